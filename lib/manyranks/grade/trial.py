"""Runs a learner's answer through a task's script on worlds of several sizes, and keeps what each rank did.

measure.fingerprints makes what is stored of that: of a tensor a few numbers.
"""

import contextlib
import io
import math
import os
import secrets
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from manyranks import progress_bar
from manyranks.grade.learner import LEAVE, LEAVE_GIVEN, Allowed, refuse_itself, refused, watched
from manyranks.measure import journal
from manyranks.measure.fingerprints import Fact, size
from manyranks.measure.journal import Stopped
from manyranks.measure.reachable import Elsewhere
from manyranks.measure.watch import Event, Watch
from manyranks.timeline.program import Collective, Recv, Send, Wait
from manyranks.world.counted.measurement import Measurement
from manyranks.world.errors import NotStarted, WorldError
from manyranks.world.fences.confine import Confined
from manyranks.world.processes import local
from manyranks.world.strangers.kept import answering
from manyranks.world.strangers.trouble import Notes, Trouble, head, short, text, trouble
from manyranks.world.world import Each, World

CELLS = 12.0  # seconds that a notebook's cells may take on ranks that are new, before the clock of a case starts
FREE = 2.0  # seconds of each run of the cells that a submission is not charged: new ranks import again what cells import
_RUN_SECONDS, _ALL_SECONDS = 8.0, 14.0  # with what it costs to end ranks that hang, a check stays below 20 s
SLACK = 6.0  # times as long a run may last while other programs have the processors: its seconds are those that it had
_LEAST_SECONDS = 2.0  # what a case gets when those before it have used the time up: a right one takes a part of a second
_OVER = "the submission has used up its time", "look at cells and answers that take long"
_OVERHEAD, _UNNOTED = 2, 1 << 20  # of what is sent on top of what is noted: headers; connections and new groups
_NAMES = {Send: "send", Recv: "recv"}
_KINDS = ("gradient", "call", "wait", "mark")
_EVENTS, _MARK = 100_000, 20_000  # of one rank; letters
_ROOM = 1 << 18  # elements, or items: a result larger than this is not what a task asks for, and takes long to compare

Run = Callable[[Any, Any, Watch], dict]  # what a rank gets, the learner's answer, watch -> results: tensors, or JSON
Make = Callable[[Any, int, int, int], Any]  # case, rank, number of ranks, seed -> what this rank gets
Then = Callable[[Any, Any, Mapping[str, Fact]], dict]  # case, what the rank got, its results -> results that follow


class Again(NamedTuple):
    """Makes results on a rank that runs nothing of the learner's, and gets other numbers."""

    then: Then


@dataclass
class Terms:
    """The terms on which answers run: in a learner's notebook without fences or an end; for a submission as apart says.

    confined: the fences around ranks
    left: seconds that a submission's code may still take in all
    late: how many of its checks took too long
    """

    confined: Confined | None = None
    left: float = math.inf
    late: int = 0

    @property
    def fences(self) -> Confined | None:
        """Returns what a World takes. Raises ValueError where strangers' code would run without."""
        if local.strangers and not self.confined:
            raise ValueError("this process runs strangers' code, and on confined ranks only")
        return self.confined

    def seconds(self, most: float) -> float:
        """Cuts seconds to what the submission has, or hardly more."""
        return round(min(most, max(_LEAST_SECONDS, self.left)), 1)

    def spend(self, world: World, free: float = 0.0) -> float:
        """Charges the submission for the last run, but for seconds that are free. Returns all seconds that it took."""
        self.left -= max(0.0, world.took - free)
        return world.took


class Sent(NamedTuple):
    """A call of one rank. bytes: that it puts in; dtype: of them; peer: of a message or the root; ranks: of the group."""

    op: str
    bytes: int
    dtype: str
    peer: int | None
    ranks: tuple[int, ...]


class _Results(dict):
    """Results by name. Raises Stopped for one that the script always returns, and that a rank has left out."""

    def __missing__(self, name: str) -> None:
        raise Stopped(f"{name} is missing", LEAVE_GIVEN)


@dataclass(frozen=True)
class Seen:
    """A rank's part of a run. results: what the script returned, by name; calls: as the world counted them."""

    results: Mapping[str, Fact]
    events: list[Event] = field(default_factory=list)
    calls: list[Sent] = field(default_factory=list)

    def __post_init__(self) -> None:
        object.__setattr__(self, "results", _Results(self.results))

    @property
    def bytes_sent(self) -> int:
        """Returns the bytes that it put into all its calls."""
        return sum(call.bytes for call in self.calls)

    def marks(self, begins: str = "") -> list[str]:
        """Lists what the script marked, in order, where it begins like this."""
        return [event.what for event in self.events if event.kind == "mark" and event.what.startswith(begins)]


class Job(NamedTuple):
    """The job of a rank.

    allowed: what may be called of what is ready-made
    given: a list of what the rank gets alone; the script empties it
    word: random letters that no learner has seen
    """

    run: Run
    allowed: Allowed
    given: list
    word: str


@dataclass(frozen=True)
class Trial:
    """A case on n ranks. key: the case's name in records; given, seen: by rank; the latter empty where it did not end well.

    unwaited: the ranks that never waited for some call, with its operation; trouble: why it did not end well; notes: the
    calls with the lines that led to them; printed: by the ranks.
    """

    n: int
    case: Any
    key: str
    seen: list[Seen] = field(default_factory=list)
    unwaited: tuple[tuple[int, str], ...] = ()
    trouble: Trouble | None = None
    notes: Notes = field(default_factory=dict)
    printed: str = ""
    given: tuple = ()

    def after(self, then: Then) -> "Trial":
        """Adds results that follow from the ranks'; none where a rank sent what the script does not make.

        torch raises RuntimeError for such a thing; an error of ours, of another kind, is nobody's fault.
        """
        try:
            pairs = zip(self.given, self.seen, strict=True) if self.seen else ()
            return replace(self, seen=[replace(one, results=then(self.case, own, one.results)) for own, one in pairs])
        except (Stopped, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RuntimeError):
            return replace(self, seen=[replace(one, results={}) for one in self.seen])

    def __str__(self) -> str:
        """Says "on 3 ranks, with 7 elements"; the case alone where there is one rank."""
        case = getattr(self.case, "note", self.case)
        return ", ".join(filter(None, [f"on {self.n} ranks" if self.n > 1 else "", f"{case}"]))

    def where(self, found: str) -> str:
        """Returns what was found, after where it was."""
        return ", ".join(filter(None, [f"{self}", found]))


def trials(
    answer: Callable, job: Job, make: Callable, cases: Callable[[int], Sequence], worlds: tuple, part: bool, terms: Terms
) -> list[Trial]:
    """Runs a trial for each case, on fresh worlds of these sizes, and no more on a world whose ranks raised or died.

    Ends after the first that hangs, and where nothing is written.

    job: without what each rank gets
    make: case, rank, number of ranks -> what this rank gets. Made here, so that nothing on a rank says more
    part: whether each case counts, so that a deadlock, which is found soon, ends its world only
    """
    done: list[Trial] = []
    left = _ALL_SECONDS
    for n in progress_bar.each(tuple(worlds), "checking on ranks"):
        with _room(terms) as room, World(n, backend="gloo", timeout=_RUN_SECONDS, confined=terms.fences) as world:
            world.slack = SLACK
            for i, case in enumerate(cases(n)):
                if terms.left <= 0:
                    return [*done, Trial(n, case, f"{n}/{i}", trouble=Trouble(*_OVER))]
                share = min(_RUN_SECONDS / 2**terms.late, left)  # each late check halves it for the next
                world.timeout = terms.seconds(min(_RUN_SECONDS, max(_LEAST_SECONDS, share)))
                given = tuple(make(case, rank, n) for rank in range(n))
                try:
                    done.append(_ran(world, room, answer, Trial(n, case, f"{n}/{i}", given=given), job, terms))
                finally:
                    left -= terms.spend(world)
                if found := done[-1].trouble:
                    if found.hung and not found.deadlock:
                        terms.late += 1
                    if found.unwritten or (found.hung and not (part and found.deadlock)):
                        return done
                    break
    return done


def ran_again(found: list[Trial], again: Then, make: Callable[[Any], Any], terms: Terms) -> list[Trial]:
    """Trials with what comes of their results on a rank that has run nothing of the learner's. make: what it gets in a case."""
    with World(1, backend="gloo", timeout=terms.seconds(_RUN_SECONDS), confined=terms.fences) as world:
        world.slack = SLACK
        done: list[Trial] = []
        for one in found:
            if terms.left <= 0 or any(other.trouble and other.trouble.hung for other in done):
                done.append(replace(one, seen=[], trouble=one.trouble or Trouble(*_OVER)))
            else:
                world.timeout = terms.seconds(_RUN_SECONDS)
                done.append(_again(world, replace(one, given=(make(one.case),)), again, terms) if one.seen else one)
        return done


def _again(world: World, one: Trial, again: Then, terms: Terms) -> Trial:
    try:
        results = world.run(_sent_again, again, one.case, one.given[0], one.seen[0].results)[0]
        if type(results) is dict and all(map(_is_plain, results.items())):
            return replace(one, seen=[replace(one.seen[0], results=results)])
        problem = Trouble("what came back isn't a result", LEAVE)
    except NotStarted:
        raise
    except WorldError as error:
        problem = trouble(error, {})
    finally:
        terms.spend(world)
    return replace(one, seen=[], trouble=problem._replace(problem=short(problem.problem), hint=short(problem.hint)))


def _sent_again(again: Then, case: Any, given: Any, results: dict) -> dict:
    return {name: _sendable(value) for name, value in again(case, given, results).items()}


def _ran(world: World, room: str, answer: Callable, new: Trial, job: Job, terms: Terms) -> Trial:
    printed = io.StringIO()
    folder = there = _folder(room)
    if terms.confined:  # where a rank sees the same folder
        there = os.path.join(terms.confined.scratch, os.path.basename(folder))
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of messages that nobody received: the count of messages says it
        word = secrets.token_hex(8)
        with answering(new.given, folder, there) as given:
            jobs = Each(job._replace(given=[own], word=word) for own in given)
            free = FREE if new.key.endswith("/0") else 0.0  # cells have run before on ranks that had a case
            outcome = _outcome(world, answer, jobs, word, folder, there, free, terms)
        notes = journal.read(folder, world.size)
    return replace(new, notes=notes, printed=head(printed.getvalue()), **outcome)


@contextmanager
def _room(terms: Terms) -> Iterator[str]:
    """A folder for notes, and for what ranks write beside them. One of strangers is removed by who judges."""
    if terms.confined:
        yield terms.confined.seen or terms.confined.scratch
        return
    folder = _folder()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _folder(room: str | None = None) -> str:
    try:
        return tempfile.mkdtemp(dir=room)
    except OSError as error:
        raise NotStarted(f"there is no room for notes: {error}") from error


def _outcome(world: World, answer: Callable, jobs: Each, word: str, folder: str, there: str, free: float, terms: Terms) -> dict:
    """Runs an answer; returns what a Trial has of that."""
    try:
        _prepare(world, answer, free, terms)
        carried = _carried(terms)
        measured = world.measure(run_script, answer, jobs, there)
        now = _carried(terms)
        noted = sum(measured.payload_bytes.values())
        sockets = sum((measured.sent_bytes or {}).values()) if terms.confined and local.strangers else 0
        if found := _more_than_noted(sockets if None in (carried, now) else now - carried, noted):
            return {"trouble": found}
        seen = [_seen(reply, measured.calls[rank]) for rank, reply in enumerate(measured.results)]
        if any(reply["watched"] != watched(word) for reply in measured.results):
            return {"trouble": Trouble("the check's watcher of ready-made calls was removed", LEAVE)}
        return {"seen": seen, "unwaited": _unwaited(measured)}
    except NotStarted:
        raise  # nothing that the answer did
    except WorldError as error:
        found = trouble(error, journal.read(folder, world.size))
    except Exception as error:  # a function that cannot be sent to the ranks, or notes that no rank makes of itself
        if terms.confined and not isinstance(error, ValueError):
            raise  # an error of ours, and no answer's: grade.apart says so
        found = Trouble(f"it could not be run: {type(error).__name__}: {text(error)}", "")
    return {"trouble": found._replace(problem=short(found.problem), hint=short(found.hint))}


def _prepare(world: World, answer: Callable, free: float, terms: Terms) -> None:
    """Starts the ranks. A stranger's cells run there now (absent.load), before the clock of a case starts.

    It's the argument that makes them run, when it is unpacked; what is called with it, `callable`, does nothing.
    """
    seconds = world.timeout
    world.timeout = terms.seconds(max(CELLS, seconds))
    try:
        world.run(callable, answer if terms.confined else int)
    finally:
        world.timeout = seconds
        terms.spend(world, free)


def _carried(terms: Terms) -> int | None:
    """Bytes that Linux has counted between strangers' ranks; None where they have no network for themselves.

    Their own sockets count then, for the loopback carries what others send, too.
    """
    return local.the_forkserver().loopback_bytes() if terms.confined and local.strangers else None


def _more_than_noted(carried: int, noted: int) -> Trouble | None:
    """Finds whether far more went over the network than ranks have noted: their notes can be forged, Linux's count not."""
    if carried <= _OVERHEAD * noted + _UNNOTED:
        return None
    problem = f"the ranks sent each other {size(carried)}, as the kernel counts it, and noted calls of {size(noted)}"
    return Trouble(problem, "send with dist's own calls, from the thread that the check calls you in")


def run_script(answer, job: Job, folder: str) -> dict:
    """Runs, on a rank, the script with the learner's answer. Returns plain data."""
    watch = Watch(folder, dist.get_rank())
    refuse_itself(answer, job.allowed)
    with watch.watching(), refused(job.allowed) as still_watched:
        _came = Elsewhere(job.given).tensors  # a name that keeps them alive to the end: they count, without what else came
        given = [deepcopy(job.given.pop())]  # tensors that came stand on a message: nobody can resize their storages
        watch.leave_out(answer)
        watch.meet(*given)
        # given is popped in the call, so that the script alone holds it, and can let it go
        results = {name: _sendable(value) for name, value in job.run(given.pop(), answer, watch).items()}
        word = still_watched(job.word) if callable(still_watched) else ""
    events = [tuple(event) for event in watch.events]
    return {"results": results, "events": events, "watched": word}


def _sendable(value):
    """A copy of a tensor as it is, in words where it is far too large; other values as they are."""
    if isinstance(value, torch.Tensor) and value.numel() > _ROOM:
        return f"a tensor of {value.numel():,} elements"
    if isinstance(value, torch.Tensor):
        return value.detach().as_subclass(torch.Tensor).to_dense().cpu().clone()
    return value


def _seen(reply, calls: list) -> Seen:
    """Reads what a rank sent back. Raises ValueError for what `run_script` never sends: learners' code may have changed it."""
    if not (
        type(reply) is dict
        and reply.keys() == {"results", "events", "watched"}
        and type(reply["results"]) is dict
        and all(map(_is_plain, reply["results"].items()))
        and type(reply["events"]) is list
        and len(reply["events"]) <= _EVENTS
        and all(map(_is_event, reply["events"]))
    ):
        raise ValueError(f"a rank did not return what the check notes: {LEAVE}")
    sent = [Sent(call.op, call.bytes, call.dtype, call.peer, tuple(call.ranks)) for call in calls]
    return Seen(reply["results"], [Event(*event) for event in reply["events"]], sent)


def _is_plain(item, depth: int = 0) -> bool:
    if isinstance(item, torch.Tensor):
        return (
            type(item) is torch.Tensor and item.layout is torch.strided and item.device.type == "cpu" and item.numel() <= _ROOM
        )
    if type(item) in (list, tuple) and depth < 8 and len(item) <= _ROOM:
        return all(_is_plain(one, depth + 1) for one in item)
    if type(item) is dict and depth < 8:
        return all(type(name) is str and _is_plain(one, depth + 1) for name, one in item.items())
    return item is None or type(item) in (bool, int, float, str)


def _is_event(event) -> bool:
    if type(event) not in (tuple, list) or tuple(map(type, event)) != (str, str, int):
        return False
    return event[0] in _KINDS and len(event[1]) <= _MARK


def _unwaited(measured: Measurement) -> tuple[tuple[int, str], ...]:
    """Lists rank and operation of the calls that were never waited for; none where the ranks' calls do not fit together."""
    try:
        ranks = measured.program.ranks
    except (ValueError, LookupError):
        return ()
    found = []
    for rank, instructions in enumerate(ranks):
        waited = {i.handle for i in instructions if type(i) is Wait}
        started = [i for i in instructions if type(i) in _NAMES or type(i) is Collective]
        found += [(rank, _NAMES.get(type(i)) or i.op) for i in started if i.handle not in waited]
    return tuple(found)
