"""The judges of an answer: each looks at one side of a run, and says whether that is as it should be.

A judge gets a trial and what the ranks of the right answer did in it. `look` gives the facts that it is about, by name: where
they differ from what is right, they tell one mistake from another.
"""

import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from typing import NamedTuple

from manyranks.grade.learner import FAILED, LEAVE, LEAVE_GIVEN
from manyranks.grade.trial import Seen, Sent, Trial
from manyranks.measure.fingerprints import Fact, difference, fact, listed, only_rounded, same, size
from manyranks.measure.watch import OVERWROTE
from manyranks.world.strangers.trouble import place

WAIT = "isend, irecv and calls with async_op=True return at once: keep what they return, and call .wait() on it"
NOTHING = "nothing was sent: no rank can know what the others have"
ROUNDED = "nearly right, as if rounded: keep float64 all the way"
DTYPE = "wrong dtype: make tensors with the dtype that the text names"
_OWN_THREAD = f"dist is called from the thread that the check calls you in, not from one of your own; {LEAVE}"
_OVERWRITTEN = "until a send is over, leave its tensor as it is, or send a clone, and wait before you use it for something else"
_COUNT = "these are the right ranks, but not the right number of messages: how many steps does it take?"
_TOGETHER = "one call for all: put them into one flat row, and cut it again afterwards"

Right = list[Seen]  # by rank
Look = Callable[[Seen], dict[str, Fact]]


class Verdict(NamedTuple):
    """A judge's verdict: what was found and a hint, where it is not ok or there is more to say. ok: None where it could not be
    judged, which gives no points.

    firm: whether the hint stands, whatever known mistake fits
    """

    ok: bool | None
    found: str = ""
    hint: str = ""
    firm: bool = False


class Judge(NamedTuple):
    """A judge of one thing in a task's trials. share: of the points; what: the report's line.

    Made as such where what to say has to be worked out from what the learner did; else by one of the functions below. Those
    with **more also take the fields from `needs` to `last`.

    look: what it is about, None where no known mistake shows in it
    needs: of the judges before it, how many must be content with a trial, for it to be judged (else who does nothing gets
        points for what it doesn't send or hold)
    values: whether it judges the values, which count world by world, and without which the task is less than half done
    part: whether these are one part of the values of several, which counts whatever the others are
    each_world: whether another thing than values counts world by world
    last: whether a world's last case shows it best, not the first
    early: finds what is wrong in the notes of a run that broke off, "" for nothing
    """

    share: float
    what: str
    verdict: Callable[[Trial, Right], Verdict]
    look: Look | None = None
    needs: int = 0
    values: bool = False
    part: bool = False
    each_world: bool = False
    last: bool = False
    early: Callable[[Trial, Right], str] | None = None


def rank_by_rank(
    share: float, what: str, wrong: Callable[[Trial, int, Seen, Seen], Verdict | None], look: Look | None = None, **more
) -> Judge:
    """Judges each rank alone, and says what the first has done wrong.

    wrong: of a trial, a rank, what it did and what is right; None where nothing is
    """

    def verdict(trial: Trial, right: Right) -> Verdict:
        ranks = enumerate(zip(trial.seen, right, strict=True))
        return next((found for rank, (seen, should) in ranks if (found := wrong(trial, rank, seen, should))), Verdict(True))

    return Judge(share, what, verdict, look, **more)


def values(share: float, what: str, names: str = "", alone: bool = False, hint: str = "", tells: bool = True, **more) -> Judge:
    """Judges that the results are the right answer's.

    names: a pattern, of those that count
    alone: whether they need no communication
    hint: where no mistake explains them
    tells: whether the report says what's right
    """
    look = results(names)

    def verdict(trial: Trial, right: Right) -> Verdict:
        if rank := next((rank for rank, seen in enumerate(trial.seen, 1) if OVERWROTE in seen.marks()), 0):
            return Verdict(False, f"rank {rank - 1} changed a tensor while it was being sent", _OVERWRITTEN, firm=True)
        found = _unequal(trial, right, look, hint)
        if not tells:
            found = found._replace(found=found.found.partition("; right is ")[0])
        if found.ok:
            return found if alone else _by_communication(trial)
        return found._replace(hint=WAIT, firm=True) if trial.unwaited else found  # without waiting it is chance

    return Judge(share, what, verdict, look, values=True, **more)


def facts(share: float, what: str, names: str, hint: str = "", tolerance: float | None = None, **more) -> Judge:
    """Judges that results other than the values are the right answer's. tolerance: relative, of numbers."""
    look = results(names)

    def verdict(trial: Trial, right: Right) -> Verdict:
        return _unequal(trial, right, look, hint, tolerance)

    return Judge(share, what, verdict, look, **more)


def results(names: str) -> Look:
    """The results whose name has the pattern in it."""
    wanted = re.compile(names)
    return lambda seen: {name: value for name, value in seen.results.items() if wanted.search(name)}


def _unequal(trial: Trial, right: Right, look: Look, hint: str, tolerance: float | None = None) -> Verdict:
    """The first result that is not as it should be."""
    unclear = Verdict(True)
    for rank, (seen, should) in enumerate(zip(trial.seen, right, strict=True)):
        for name, value in look(should).items():
            if failed := failure(seen, name):
                return failed
            if name not in seen.results:
                return Verdict(False, f"{_who(trial, rank)}{name} is missing", LEAVE_GIVEN)
            got = seen.results[name]
            if got is None and value is not None:
                unclear = Verdict(None, f"{_who(trial, rank)}{name} could not be judged")
            elif not same(got, value, tolerance):
                says = ": " if type(value).__name__ in ("Print", "Tensor") else " "
                found = f"{_who(trial, rank)}{name}{says}{difference(got, value)}"
                return Verdict(False, found, _as_rounded(got, value) or hint)
    return unclear


def _as_rounded(got: Fact, right: Fact) -> str:
    """Returns a hint where only the dtype is another one, or was on the way; "" for other differences."""
    if not only_rounded(got, right):
        return ""
    forms = [getattr(fact(one), "form", "float64") for one in (got, right)]
    return ROUNDED if forms[1].endswith("float64") else DTYPE if forms[0] != forms[1] else ""


def failure(seen: Seen, name: str = "") -> Verdict | None:
    """Returns the verdict on a result whose call failed, where the script had others; on any of them without a name."""
    for key, what, hint, frames in map(json.loads, (mark.removeprefix(FAILED) for mark in seen.marks(FAILED))):
        if name.startswith(key) or not name:
            where = place([tuple(frame) for frame in frames])
            return Verdict(False, what, "; ".join(filter(None, (hint, where))), firm=True)
    return None


def _who(trial: Trial, rank: int) -> str:
    return f"rank {rank}: " if trial.n > 1 else ""


def _by_communication(trial: Trial) -> Verdict:
    """Makes sure that right values did not become so by chance."""
    for rank, seen in enumerate(trial.seen):
        noted = [(event.what, event.bytes) for event in seen.events if event.kind == "call"]
        if noted != [(call.op, call.bytes) for call in seen.calls]:  # the world counts them, too
            return Verdict(False, f"rank {rank}: what the check noted is not what was sent", _OWN_THREAD, firm=True)
    if trial.n > 1 and not any(seen.calls for seen in trial.seen):
        return Verdict(False, "the values are right, but not by communication", NOTHING, firm=True)
    if trial.unwaited:
        rank, op = trial.unwaited[0]
        return Verdict(False, f"rank {rank} did not wait for its {op}: the values are right by luck", WAIT, firm=True)
    return Verdict(True)


def at_most(
    share: float,
    what: str,
    names: str,
    hint: str = "",
    room: float = 0,
    says: str = "{name} is {got}; {right} is enough",
    unit: Callable[[float], str] = "{:g}".format,
    grain: float = 0,
    **more,
) -> Judge:
    """Judges that numbers among the results are no larger than the right answer's.

    room: what they may have more
    says: what is found
    unit: writes a number
    grain: how roughly they are compared with known mistakes' numbers, where nobody's are exactly the same
    """
    look = results(names)

    def roughly(seen: Seen) -> dict[str, Fact]:
        return {name: round(value / grain) if isinstance(value, int | float) else value for name, value in look(seen).items()}

    def verdict(trial: Trial, right: Right) -> Verdict:
        unclear = Verdict(True)
        for rank, (seen, should) in enumerate(zip(trial.seen, right, strict=True)):
            for name, value in look(should).items():
                if failed := failure(seen, name):
                    return failed
                got = seen.results.get(name)
                if not isinstance(got, int | float):
                    unclear = Verdict(None, f"{_who(trial, rank)}{name} could not be judged")
                elif not min(0, value) <= got <= value + room and not same(float(got), float(value)):
                    there, here = apart(unit(got), unit(value), got, value)
                    return Verdict(False, _who(trial, rank) + says.format(name=name, got=there, right=here), hint)
        return unclear

    return Judge(share, what, verdict, roughly if grain else look, **more)


def as_bytes(count: float) -> str:
    """Writes a number of bytes, as a `unit` does."""
    return size(round(count))


def if_done(done: Callable[[Seen, Seen], bool], judge: Callable[..., Judge]) -> Callable[..., Judge]:
    """Makes judges that give nothing to who does not do the work. done: whether a rank's run, the first, does what's right."""

    def made(*args, **kwargs) -> Judge:
        one = judge(*args, **kwargs)

        def verdict(trial: Trial, right: Right) -> Verdict:
            idle = not all(map(done, trial.seen, right))
            return Verdict(None, "not judged, because the work wasn't done") if idle else one.verdict(trial, right)

        return one._replace(verdict=verdict)

    return made


def apart(there: str, here: str, got: float, right: float) -> tuple[str, str]:
    """Writes two numbers out to the last digit if they would otherwise read the same."""
    unit = " bytes" if there.endswith(("kB", "MB", "GB")) else ""
    return (there, here) if there != here else (f"{got:,}{unit}", f"{right:,}{unit}")


def sent(
    share: float,
    what: str,
    ops: str = "",
    hint: str = "",
    instead: dict[str, str] | None = None,
    groups: bool = False,
    alike: Callable[[list[tuple[str, int, str]]], list[tuple[str, int, str]]] = list,
) -> Judge:
    """Judges that the ranks' calls are the right answer's, in any order: operation, bytes, whom they reach.

    ops: a pattern, of those that count
    hint: where no mistake explains them
    instead: operation that the right answer does not call -> what to say of it, "" for none at all
    groups: whether it counts which ranks a collective reaches, not only how many
    alike: turns two ways that are both right into one
    """
    wanted = re.compile(ops)

    def found(among: list[Sent]) -> list[tuple[str, int, str]]:
        return sorted(alike([(call.op, call.bytes, _whom(call, groups)) for call in among if wanted.search(call.op)]))

    def wrong(trial: Trial, rank: int, got: list[tuple], must: list[tuple]) -> tuple[str, str]:
        return f"rank {rank} {calls_in_words(got, must)}", _why_calls(trial, got, must, instead or {}) or hint

    return _of_calls(share, what, found, wrong)


def calls(share: float, what: str, words: Callable[[list[Sent]], list[str]] | None = None, hint: str = "") -> Judge:
    """Judges that the ranks' calls are the right answer's, in its order.

    words: what counts of them; else operation, bytes and dtype
    """

    def found(among: list[Sent]) -> list[str]:
        said = words(among) if words else [f"{call.op} of {call.bytes:,} bytes of {call.dtype}" for call in among]
        return said or ["no call"]

    def wrong(trial: Trial, rank: int, got: list[str], must: list[str]) -> tuple[str, str]:
        at, lengths_differ = parting(got, must), len(got) != len(must)
        there, here = (listed(its) if len(its) <= 4 else around(its, at, before=0, after=2) for its in (got, must))
        if lengths_differ:
            there, here = f"{there} in {len(got)} calls", f"{here} in {len(must)}"
        return f"rank {rank}: {there}; right is {here}", hint if trial.seen[rank].calls else NOTHING

    return _of_calls(share, what, found, wrong)


def _of_calls(share: float, what: str, found: Callable[[list[Sent]], list], wrong: Callable[..., tuple[str, str]]) -> Judge:
    """Judges that each rank's calls are the right answer's, and then that somebody waits for each of them.

    found: what counts of a rank's calls
    wrong: what is said, and a hint, of a trial, a rank, what it has called, and what is right
    """

    def called(seen: Seen) -> list:
        return found([call for call in seen.calls if len(call.ranks) > 1])  # one alone sends nothing

    def verdict(trial: Trial, right: Right) -> Verdict:
        for rank, (seen, should) in enumerate(zip(trial.seen, right, strict=True)):
            got, must = called(seen), called(should)
            if got != must:
                return Verdict(False, *wrong(trial, rank, got, must))
        for rank, op in trial.unwaited:
            return Verdict(False, f"rank {rank} did not wait for its {op}", WAIT, firm=True)
        return Verdict(True)

    return Judge(share, what, verdict, lambda seen: {"calls": called(seen)})


def _whom(call: Sent, groups: bool) -> str:
    if call.op in ("send", "recv"):
        return f"{'to' if call.op == 'send' else 'from'} rank {call.peer}"
    return f"among ranks {listed([str(rank) for rank in sorted(call.ranks)])}" if groups else f"among {len(call.ranks)} ranks"


def calls_in_words(got: list[tuple], must: list[tuple]) -> str:
    """Says both in short: by operation where the numbers of calls differ, else the first that is not right."""
    counts = Counter(call[0] for call in got), Counter(call[0] for call in must)
    if counts[0] != counts[1]:
        there, here = (listed([f"{number} × {op}" for op, number in sorted(count.items())] or ["nothing"]) for count in counts)
        both = [size(sum(call[1] for call in calls)) for calls in (got, must)]
        return f"called {there} ({both[0]}); right is {here} ({both[1]})"
    (op, there, whom), (other, here, them) = next(pair for pair in zip(got, must, strict=True) if pair[0] != pair[1])
    return f"called {op} of {there:,} bytes {whom}; right is {other} of {here:,} bytes {them}"


def _why_calls(trial: Trial, got: list[tuple], must: list[tuple], instead: dict[str, str]) -> str:
    """Says what the calls alone tell."""
    right = {call[0] for call in must}
    if found := next((instead[op] for op, *_ in got if op not in right and op in instead), ""):
        return found
    if not got:
        return instead.get("", NOTHING)
    if trial.unwaited:
        return WAIT
    total, needed = (sum(call[1] for call in calls) for calls in (got, must))
    if 2 * total == needed and len(got) == len(must):
        return "float64 is sent as float64, and this had half the bytes"
    return _TOGETHER if total == needed and len(got) > len(must) else ""


def messages(share: float, what: str, in_order: bool = True, hint: str = "", **more) -> Judge:
    """Judges that the ranks send to the same ranks as the right answer, in its order."""

    def peers(seen: Seen) -> list[int | None]:
        found = [call.peer for call in seen.calls if call.op == "send" and call.bytes]
        return found if in_order else sorted(found)

    def verdict(trial: Trial, right: Right) -> Verdict:
        for rank, (seen, should) in enumerate(zip(trial.seen, right, strict=True)):
            if (got := peers(seen)) != (must := peers(should)):
                found = f"rank {rank} sent to {_times(got)}; right is {_times(must)}"
                return Verdict(False, found, _COUNT if set(got) == set(must) and len(got) != len(must) else hint)
        if early := [rank for rank, op in trial.unwaited if op == "send"]:
            return Verdict(False, f"rank {early[0]} did not wait for {early.count(early[0])} of its messages", WAIT, firm=True)
        return Verdict(True)

    def early(trial: Trial, right: Right) -> str:
        return _other_ranks(trial, right, in_order, hint)

    return Judge(share, what, verdict, lambda seen: {"peers": peers(seen)}, early=early, **more)


def _other_ranks(trial: Trial, right: Right, in_order: bool, hint: str) -> str:
    """Says which message of a run that broke off is the first that goes to, or comes from, the wrong rank."""
    for rank, should in enumerate(right):
        for op, does in (("send", "sends to"), ("recv", "receives from")):
            got = [entry.peer for entry in trial.notes.get(rank, []) if entry.op == op]
            must = [call.peer for call in should.calls if call.op == op]
            if rank in got or None in got:  # to itself is another mistake; from whoever sends may be right
                continue
            for k, peer in enumerate(got):
                fits = must[k : k + 1] if in_order else must
                if peer not in fits:
                    return f"rank {rank} {does} rank {peer}; right is {_times(fits)}: {hint}"
    return ""


def _times(ranks: list) -> str:
    times = [f"rank {rank}" + (f" ({count} times)" if count > 1 else "") for rank, count in Counter(ranks).items()]
    return listed(times) if times else "no rank"


def parting(got: list[str], must: list[str]) -> int:
    """The first place where they differ."""
    places = (i for i, (one, other) in enumerate(zip(got, must, strict=False)) if one != other)
    return next(places, min(len(got), len(must)))


def around(steps: list[str], at: int, before: int = 2, after: int = 4) -> str:
    """A few steps around the place where they differ."""
    first = max(0, at - before)
    shown = [step.removeprefix("mark ") for step in steps[first : at + after]] or ["nothing more"]
    return ("… " if first else "") + ", ".join(shown) + (" …" if at + after < len(steps) else "")


_ALONE = "this takes no communication: each rank has all that it needs"


def silent(share: float, what: str, hint: str = _ALONE, **more) -> Judge:
    """Judges that nothing is sent. For answers that ask for their rank but need no messages; others have worlds=(1,)."""

    def wrong(trial: Trial, rank: int, seen: Seen, should: Seen) -> Verdict | None:
        return Verdict(False, f"rank {rank} called {seen.calls[0].op}", hint) if seen.calls else None

    return rank_by_rank(share, what, wrong, lambda seen: {"ops": sorted({call.op for call in seen.calls})}, **more)


def little(share: float, what: str, hint: str) -> Judge:
    """The ranks together send about as little as the right answer's, in about as few calls. The case may have more room."""

    def of(ranks: list[Seen]) -> list[int]:
        return [call.bytes for seen in ranks for call in seen.calls if len(call.ranks) > 1 and call.op != "recv"]

    def verdict(trial: Trial, right: Right) -> Verdict:
        got, ours, n = of(trial.seen), of(right), trial.n
        if sum(got) > sum(ours) + getattr(trial.case, "room", 64) * n:
            return Verdict(False, f"the ranks sent {size(sum(got))} together; {size(sum(ours))} are enough", hint)
        if len(got) > 2 * len(ours) + 2 * n:
            return Verdict(False, f"the ranks made {len(got)} calls together; {len(ours)} are enough", hint)
        return Verdict(True)

    return Judge(share, what, verdict, lambda seen: {"bytes": sum(of([seen]))}, needs=1)


def by_phase(judges: dict[str, Judge]) -> Judge:
    """Judges what is sent in each phase apart. A phase begins where the script marks its name, the first one at once.

    Calls after a mark "over" count for none of them.
    """

    def parts(seen: Seen) -> dict[str, Seen]:
        found, phase, sent = {name: [] for name in (*judges, "over")}, next(iter(judges)), iter(seen.calls)
        for event in seen.events:
            if event.kind == "mark" and event.what in found:
                phase = event.what
            elif event.kind == "call":
                found[phase] += islice(sent, 1)
        return {phase: replace(seen, calls=found[phase]) for phase in judges}

    def look(seen: Seen) -> dict[str, Fact]:
        return {f"{phase} {k}": v for phase, its in parts(seen).items() for k, v in judges[phase].look(its).items()}

    def verdict(trial: Trial, right: Right) -> Verdict:
        got, must = ([parts(one) for one in ranks] for ranks in (trial.seen, right))
        for phase, judge in judges.items():
            found = judge.verdict(replace(trial, seen=[one[phase] for one in got]), [one[phase] for one in must])
            if not found.ok:
                return found if found.firm else found._replace(found=f"in {phase}, {found.found}")
        return Verdict(True)

    return next(iter(judges.values()))._replace(look=look, verdict=verdict)


def both(one: Judge, other: Judge) -> Judge:
    """Joins two judges: the first one's line, for what both look at."""

    def verdict(trial: Trial, right: Right) -> Verdict:
        found = one.verdict(trial, right)
        return other.verdict(trial, right) if found.ok else found

    return one._replace(verdict=verdict, look=lambda seen: one.look(seen) | other.look(seen))
