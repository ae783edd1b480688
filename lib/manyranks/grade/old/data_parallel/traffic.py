"""What must be sent, and what may be held, judged by the bytes that each rank counted."""

from typing import TYPE_CHECKING, NamedTuple

from manyranks.grade.old.compare import sizes
from manyranks.grade.old.report import listed, size
from manyranks.grade.old.scripts import NOTHING, WAIT
from manyranks.grade.old.toy import FROZEN_BYTES, TIED_BYTES
from manyranks.grade.old.trial import Trial
from manyranks.grade.old.verdict import Verdict
from manyranks.grade.watch import Event

if TYPE_CHECKING:
    from manyranks.grade.old.check import Task

_SMALL = 4096  # bytes of examples and numbers
_NUMBER = 64  # bytes: no parameter is as small as this, a number is


class Travel(NamedTuple):
    """What a script's calls must be. names: of the parameters of each bucket; buckets: its bytes; rounds: how often they go.

    first: bytes that are broadcast before; model: bytes of parameters and buffers; cut: which buckets these are, in words;
    early, late: the hints for one that leaves without its last gradient, and for one that leaves too late; others: the
    buckets' bytes by rules that learners follow instead, each with its hint.
    """

    names: tuple[tuple[str, ...], ...]
    buckets: tuple[int, ...]
    rounds: int = 1
    first: int = 0
    model: int = 0
    cut: str = ""
    early: str = ""
    late: str = ""
    others: tuple[tuple[str, tuple[int, ...]], ...] = ()

    @property
    def ops(self) -> tuple[str, ...]:
        """The operations that the task asks for."""
        return ("broadcast",) * bool(self.first) + ("all_reduce",) * bool(self.buckets)

    @property
    def calls(self) -> list[int]:
        """Bytes of all all-reduces, in order."""
        return list(self.buckets) * self.rounds


def traffic(task: "Task", trial: Trial) -> Verdict:
    """Every bucket once a round, and the first weights once."""
    must: Travel = trial.case.must
    for rank, seen in enumerate(trial.answers):
        if other := foreign(rank, seen.events, must.ops):
            return other
        if (sent := sum(seen.calls("broadcast"))) != must.first:
            return _broadcasts(rank, sent, must.first)
        if (got := seen.calls("all_reduce")) != must.calls:
            return Verdict(False, f"rank {rank} {_reduced(got, must.calls)}", _bucket_hint(got, must))
    return Verdict(True)


def foreign(rank: int, events: list[Event], allowed: tuple[str, ...]) -> Verdict | None:
    """Where an operation was called that the task does not ask for."""
    for event in events:
        if event.kind == "call" and event.what not in allowed:
            return Verdict(False, f"rank {rank} called {event.what}", f"the task needs {listed(list(allowed))} only")
    return None


def _broadcasts(rank: int, sent: int, right: int) -> Verdict:
    """Where other bytes were broadcast than there are."""
    if not sent:
        return Verdict(False, f"rank {rank} took part in no broadcast", NOTHING)
    there, here = sizes(sent, right)
    return Verdict(False, f"rank {rank} broadcast {there}; parameters and buffers have {here}", _broadcast_hint(sent, right))


def _broadcast_hint(sent: int, right: int) -> str:
    if sent < right:
        return "send all parameters, frozen ones too, and all buffers, as they are"
    if sent == 2 * right:
        return "everything was sent twice"
    if sent - right == TIED_BYTES:
        return "is a tied parameter sent twice? parameters() and buffers() give each tensor once"
    return "broadcast each parameter and each buffer, once, when the training begins; gradients are all-reduced"


def _reduced(got: list[int], right: list[int]) -> str:
    if sum(got) != sum(right):
        there, here = sizes(sum(got), sum(right))
        return f"all-reduced {there} in {len(got)} calls; right is {here} in {len(right)}"
    if len(got) != len(right):
        return f"made {len(got)} all-reduces; right are {len(right)}"
    k = next(k for k, (a, b) in enumerate(zip(got, right, strict=True)) if a != b)
    return f"gave all_reduce #{k} {got[k]:,} bytes; right are {right[k]:,}"


def _bucket_hint(got: list[int], must: Travel) -> str:
    right = must.calls
    if not got:
        return NOTHING
    if must.rounds > 1 and got == list(must.buckets):
        return "only step 1 sent anything: empty your lists in finish()"
    if known := _amount(sum(got) / must.rounds, sum(must.buckets)):
        return known
    here = f"right are {must.cut}, which have {listed([f'{b:,}' for b in must.buckets])} bytes"
    if sum(got) == sum(right) and len(got) == sum(map(len, must.names)) * must.rounds:
        return f"that is one call a parameter: put the gradients of a bucket into one tensor; {here}"
    if sum(got) == sum(right) and len(got) == must.rounds:
        return f"that is one call for everything: make one a bucket; {here}"
    if known := next((hint for hint, other in must.others if got == list(other) * must.rounds), ""):
        return f"{known}; {here}"
    return f"the right buckets in the wrong order; {here}" if sorted(got) == sorted(right) else here


def _amount(got: float, right: int) -> str:
    """What explains so many bytes of gradients, if something does."""
    known = {
        2 * right: "every gradient was sent twice",
        right / 2: "float64 gradients are sent as float64, and these had half the bytes",
        right + FROZEN_BYTES: "frozen parameters have no gradient: leave them out",
        right + TIED_BYTES: "a tied parameter has one gradient: parameters() gives it once",
    }
    return known.get(got, "")


def one_a_parameter(task: "Task", trial: Trial) -> Verdict:
    """Each gradient by itself once, and beside them the number of examples."""
    right = trial.case.must.buckets
    for rank, seen in enumerate(trial.answers):
        if other := foreign(rank, seen.events, ("all_reduce",)):
            return other
        sent = seen.calls("all_reduce")
        gradients = [count for count in sent if count > _NUMBER]
        if sorted(gradients) != sorted(right) or len(sent) != len(right) + 1:
            found = f"rank {rank} all-reduced {sum(sent):,} bytes in {len(sent)} calls"
            here = f"right are {sum(right):,} bytes in {len(right)} calls, and one small call for the number of examples"
            return Verdict(False, f"{found}; {here}", _parameter_hint(gradients, len(sent), right))
    return Verdict(True)


def _parameter_hint(gradients: list[int], calls: int, right: tuple[int, ...]) -> str:
    if not calls:
        return NOTHING
    if sorted(gradients) == sorted(right):
        if calls == len(right):
            return "no rank knows how many examples the others have: all-reduce the number, too"
        return "the number of examples is the same for all parameters: one small call is enough"
    if len(gradients) == 1:
        return "that is one call for everything: here each parameter has a call of its own, and buckets come in task 4"
    return _amount(sum(gradients), sum(right)) or "send the gradient of each parameter that learns, once"


def memory(task: "Task", trial: Trial) -> Verdict:
    """Nothing but the buckets is kept from step to step, and no more from each step."""
    must: Travel = trial.case.must
    gradients = sum(must.buckets)
    for rank, seen in enumerate(trial.answers):
        if not seen.calls("all_reduce"):
            return Verdict(False, "there was no all-reduce to judge")
        if len(seen.held) < 2:
            return Verdict(False, f"rank {rank} did not take two steps", "leave the check as it is")
        kept, more = seen.held[-1] - must.model, seen.held[-1] - seen.held[-2]
        if more > 0:
            found = f"rank {rank} holds {size(more)} more after each step"
            hint = WAIT if trial.unwaited else "keep nothing of a step that is over: empty your lists in finish()"
            return Verdict(False, found, hint)
        if kept > gradients + _SMALL:
            found = f"rank {rank} holds {size(kept)} beside the model; the gradients have {size(gradients)}"
            return Verdict(False, found, WAIT if trial.unwaited else "one copy of the gradients is enough")
    return Verdict(True)


def peak(task: "Task", trial: Trial) -> Verdict:
    """The rows of one bucket at a time: three, for a loop's variables keep the one before, and what is made of a row."""
    must: Travel = trial.case.must
    most = 3 * max(must.buckets)
    for rank, seen in enumerate(trial.answers):
        if not seen.calls("all_reduce"):
            return Verdict(False, "there was no all-reduce to judge")
        rows = seen.peak_bytes - must.model - sum(must.buckets)
        if rows > most + _SMALL:
            found = f"rank {rank} held {size(rows)} beside the gradients; three rows of the largest bucket have {size(most)}"
            hint = (
                WAIT if trial.unwaited else "make the row of one bucket, reduce it, write it back, and only then make the next"
            )
            return Verdict(False, found, hint)
    return Verdict(True)
