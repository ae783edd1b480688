"""Runs a learner's answer through a task's script on worlds of several sizes, and keeps what each rank did.

What was seen can be stored: of a tensor a few numbers are kept, which tell it from others on every platform.
"""

import contextlib
import io
import json
import math
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from manyranks.grade.watch import Event, Ready, Watch, refuse_itself, refused
from manyranks.measure import journal
from manyranks.timeline.program import Collective, Recv, Send, Wait
from manyranks.world import local
from manyranks.world.confine import Confined
from manyranks.world.errors import NotStarted, RankHung, WorldError
from manyranks.world.measurement import Measurement
from manyranks.world.trouble import RETURNED, Notes, Trouble, late, text, trouble
from manyranks.world.world import World

_RUN_SECONDS, _ALL_SECONDS = 8.0, 14.0  # with what it costs to end ranks that hang, a check stays below 20 s on a quiet machine
_BUSY, _MOST_PATIENCE = 1.5, 6.0  # slowness from which a late run gets more time, and how much
_PROBE = 0.3  # seconds to find out
_LEAST_SECONDS = 4.0  # what a case gets in any case: on a busy machine those before it have used the time up
_OVERHEAD, _UNNOTED = 2, 1 << 20  # of what is sent beside what is noted: headers; connections and new groups
_SHOWN_LINES, _LONG = 12, 600
_NAMES = {Send: "send", Recv: "recv"}
_LAST_WORDS = ("terminate called after throwing an instance of 'gloo", "  what():  [enforce fail at ")
_KINDS = ("gradient", "call", "wait", "mark")
_ROOM = 1 << 22  # elements: a result larger than this is not what a task asks for
_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
_ALL, _SAMPLES = 16, 8  # elements: up to so many are all stored; of more, so many
_FACTORS = (2654435761, 2246822519, 3266489917, 668265263)  # of projections' weights: odd, so that elements differ
_TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 1e-2}
_EXACT, NEAR = 1e-9, 1e-6  # tolerance of float64 and whole numbers, and of what was rounded to float32 on its way
_NOT_A_NUMBER, _INFINITE = 7.7e7, 8.8e7  # what stands for them in the numbers of a print

Fact = object  # JSON: numbers, words, lists and dicts of them, or a Print
Run = Callable[[Any, Any, Watch], dict]  # case, the learner's answer, watch -> results by name: tensors, or JSON


confined: Confined | None = None  # grade.apart sets it
seed = 0  # of the scripts' numbers; who makes records of his own takes another one


class Print(NamedTuple):
    """A tensor's shape and dtype, "[7] of float64", and numbers that tell it from others.

    numbers: all elements of a small tensor; of a large one some elements, then projections, then the root of its mean square.
    """

    form: str
    numbers: tuple[float, ...]


class Sent(NamedTuple):
    """A call of one rank. bytes: that it puts in; dtype: of them; peer: of a message or the root; ranks: of the group."""

    op: str
    bytes: int
    dtype: str
    peer: int | None
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Seen:
    """One rank's part of a run. results: what the script returned, by name; held: live bytes each time that it weighed.

    calls: as the world counted them; peak: the most live bytes inside the script's `peak`.
    """

    results: Mapping[str, Fact]
    events: list[Event] = field(default_factory=list)
    calls: list[Sent] = field(default_factory=list)
    held: list[int] = field(default_factory=list)
    peak: int = 0

    def marks(self, begins: str = "") -> list[str]:
        """What the script marked, in order, where it begins like this."""
        return [event.what for event in self.events if event.kind == "mark" and event.what.startswith(begins)]


@contextmanager
def unconfined() -> Iterator[None]:
    """Inside, ranks have no fences: for a teacher's own code."""
    global confined
    before, confined = confined, None
    try:
        yield
    finally:
        confined = before


class Job(NamedTuple):
    """What a rank runs. ready: whose functions the answer may not call."""

    run: Run
    case: Any
    ready: Ready
    seed: int


@dataclass(frozen=True)
class Trial:
    """One case on n ranks. key: the case's name in records; seen: by rank, empty where it did not end well.

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

    def __str__(self) -> str:
        """ "on 3 ranks, with 7 elements"; the case alone where there is one rank."""
        note = f"{self.case}"
        if self.n == 1:
            return note or "on 1 rank"
        return f"on {self.n} ranks" + (note and f", {note}")


def trials(
    answer: Callable, run: Run, cases: Callable[[int], Sequence], worlds: Iterable[int], ready: Ready, part: bool = False
) -> list[Trial]:
    """One trial a case, on fresh worlds of these sizes, and no more on a world whose ranks raised or died.

    Ends after the first that hangs, and where nothing is written. part: each case counts, so that a deadlock, which is found
    soon, ends its world only.
    """
    done: list[Trial] = []
    deadline = time.monotonic() + _ALL_SECONDS
    for n in worlds:
        fences = {"confined": confined} if confined else {}
        with World(n, backend="gloo", timeout=_RUN_SECONDS, **fences) as world:
            for i, case in enumerate(cases(n)):
                world.timeout = round(min(_RUN_SECONDS, max(_LEAST_SECONDS, deadline - time.monotonic())), 1)
                done.append(_trial(world, answer, Job(run, case, ready, seed), f"{n}/{i}"))
                if found := done[-1].trouble:
                    if found.unwritten or (found.hung and not (part and found.deadlock)):
                        return done
                    break
    return done


def _trial(world: World, answer: Callable, job: Job, key: str) -> Trial:
    """Once more where it was late because the machine has other things to do, with as much more time."""
    try:
        return _ran(world, answer, job, key, patient=False)
    except _Busy as busy:
        world.timeout = round(_RUN_SECONDS * min(busy.slow, _MOST_PATIENCE), 1)
        return _ran(world, answer, job, key, patient=True)


class _Busy(Exception):
    """A run was late. slow: the seconds that a second of computing takes here."""

    def __init__(self, slow: float):
        self.slow = slow


def _ran(world: World, answer: Callable, job: Job, key: str, patient: bool) -> Trial:
    printed = io.StringIO()
    with (
        _folder() as folder,
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(printed),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # of messages that nobody received: the count of messages says it
        outcome = _outcome(world, answer, job, folder, patient)
        notes = journal.read(folder, world.size)
    return Trial(world.size, job.case, key, notes=notes, printed=_head(printed.getvalue()), **outcome)


@contextmanager
def _folder() -> Iterator[str]:
    """For notes. One that strangers could write into is removed with all of theirs, by who judges."""
    if confined:
        yield tempfile.mkdtemp(dir=confined.scratch)
    else:
        with tempfile.TemporaryDirectory() as folder:
            yield folder


def _outcome(world: World, answer: Callable, job: Job, folder: str, patient: bool) -> dict:
    """What a Trial has of it. Raises _Busy where it should be run again, unless it was that already."""
    try:
        carried = _carried()
        measured = world.measure(rehearse, answer, job, folder)
        if found := _more_than_noted(_carried() - carried, sum(measured.payload_bytes.values())):
            return {"trouble": found}
        seen = [_seen(reply, measured.calls[rank]) for rank, reply in enumerate(measured.results)]
        return {"seen": seen, "unwaited": _unwaited(measured)}
    except NotStarted:
        raise  # nothing that the answer did
    except WorldError as error:
        returned = isinstance(error, RankHung) and set(error.states.values()) == {RETURNED}
        slow = slowness() if isinstance(error, RankHung) and not patient and late(error) else 1.0
        if slow >= _BUSY or (returned and not patient):
            raise _Busy(slow) from error
        found = trouble(error, journal.read(folder, world.size))
    except Exception as error:  # a function that cannot be sent to the ranks, a result that cannot be read
        found = Trouble(f"it could not be run: {type(error).__name__}: {text(error)}", "")
    return {"trouble": found._replace(problem=_short(found.problem), hint=_short(found.hint))}


def _carried() -> int:
    """Bytes that the kernel has counted between strangers' ranks, in a network that they have for themselves."""
    return local.the_forkserver().loopback_bytes() if confined and local.strangers else 0


def _more_than_noted(carried: int, noted: int) -> Trouble | None:
    """Where far more went over the network than the ranks have noted: what they note can be forged, the kernel's count not."""
    if carried <= _OVERHEAD * noted + _UNNOTED:
        return None
    problem = f"the ranks sent each other {size(carried)}, as the kernel counts it, and noted calls of {size(noted)}"
    return Trouble(problem, "send with dist's own calls, from the thread that the check calls you in")


def rehearse(answer, job: Job, folder: str) -> dict:
    """On a rank: runs the script with the learner's answer. What it returns is plain data."""
    watch = Watch(folder, dist.get_rank(), job.seed)
    refuse_itself(answer, job.ready)
    with watch.watching(), refused(job.ready):
        results = job.run(job.case, answer, watch)
    return {
        "results": {name: _sendable(value) for name, value in results.items()},
        "events": [tuple(event) for event in watch.events],
        "held": watch.held,
        "peak": watch.peak_bytes,
    }


def _sendable(value):
    """A copy of a tensor as it is, in words where it is far too large; other values as they are."""
    if isinstance(value, torch.Tensor) and value.numel() > _ROOM:
        return f"a tensor of {value.numel():,} elements"
    if isinstance(value, torch.Tensor):
        return value.detach().as_subclass(torch.Tensor).to_dense().cpu().clone()
    return value


def _seen(reply, calls: list) -> Seen:
    """What a rank sent back. Raises ValueError for what `rehearse` does not send: a learner's code may have changed it."""
    if not (
        type(reply) is dict
        and reply.keys() == {"results", "events", "held", "peak"}
        and type(reply["results"]) is dict
        and all(map(_is_plain, reply["results"].items()))
        and type(reply["events"]) is type(reply["held"]) is list
        and all(map(_is_event, reply["events"]))
        and all(type(count) is int for count in [*reply["held"], reply["peak"]])
    ):
        raise ValueError("a rank did not return what the check notes: leave the check as it is")
    sent = [Sent(call.op, call.bytes, call.dtype, call.peer, tuple(call.ranks)) for call in calls]
    return Seen(reply["results"], [Event(*event) for event in reply["events"]], sent, reply["held"], reply["peak"])


def _is_plain(item, depth: int = 0) -> bool:
    if isinstance(item, torch.Tensor):
        return (
            type(item) is torch.Tensor and item.layout is torch.strided and item.device.type == "cpu" and item.numel() <= _ROOM
        )
    if type(item) in (list, tuple) and depth < 8:
        return all(_is_plain(one, depth + 1) for one in item)
    if type(item) is dict and depth < 8:
        return all(type(name) is str and _is_plain(one, depth + 1) for name, one in item.items())
    return item is None or type(item) in (bool, int, float, str)


def _is_event(event) -> bool:
    return type(event) in (tuple, list) and tuple(map(type, event)) == (str, str, int) and event[0] in _KINDS


def slowness() -> float:
    """The seconds that a second of computing takes: 1 on a machine that does nothing else."""
    started, used = time.monotonic(), time.thread_time()
    while time.thread_time() - used < _PROBE:
        pass
    return (time.monotonic() - started) / _PROBE


def _unwaited(measured: Measurement) -> tuple[tuple[int, str], ...]:
    """Rank and operation of the calls that were never waited for; none where the ranks' calls do not fit together."""
    try:
        ranks = measured.program.ranks
    except ValueError:
        return ()
    found = []
    for rank, instructions in enumerate(ranks):
        waited = {i.handle for i in instructions if type(i) is Wait}
        started = [i for i in instructions if type(i) in _NAMES or type(i) is Collective]
        found += [(rank, _NAMES.get(type(i)) or i.op) for i in started if i.handle not in waited]
    return tuple(found)


def _short(text: str) -> str:
    return text if len(text) <= _LONG else f"{text[:_LONG]} …"


def _head(text: str) -> str:
    """The first lines, without the terminal's control characters and C++'s last words, which the report translates."""
    lines = ["".join(c for c in line if c.isprintable() or c == "\t") for line in text[:20_000].splitlines()]
    lines = [line for line in lines if not line.startswith(_LAST_WORDS)]
    said = [line for line, following in zip_longest(lines, lines[1:]) if not (_headed(line) and _headed(following))]
    return "\n".join([*map(_short, said[:_SHOWN_LINES]), *(["…"] if len(said) > _SHOWN_LINES else [])])


def _headed(line: str | None) -> bool:
    """Whether it is a rank's heading, or the end."""
    return line is None or line.startswith("── rank ")


# What was seen


def print_of(tensor: torch.Tensor) -> Print:
    """The same on every platform but for rounding: positions and weights come from whole numbers."""
    flat = tensor.detach().cpu().flatten()
    form = form_of(tensor)
    if flat.is_complex():
        flat = torch.view_as_real(flat).flatten()
    flat = torch.nan_to_num(flat.double(), nan=_NOT_A_NUMBER, posinf=_INFINITE, neginf=-_INFINITE)
    n = flat.numel()
    if n <= _ALL:
        return Print(form, tuple(map(_rounded, flat.tolist())))
    index = torch.arange(n)
    weights = [(index * factor % 2**32).double() / 2**32 - 0.5 for factor in _FACTORS]
    projected = [float(flat @ weight) / math.sqrt(n) for weight in weights]
    numbers = [*flat[_places(n)].tolist(), *projected, float(flat.norm()) / math.sqrt(n)]
    return Print(form, tuple(map(_rounded, numbers)))


def _places(n: int) -> list[int]:
    """Of the elements that are stored of many: the first, the last, and some between."""
    return [i * (n - 1) // (_SAMPLES - 1) for i in range(_SAMPLES)]


def _rounded(number: float) -> float:
    return float(f"{number:.13g}")


def form_of(tensor: torch.Tensor) -> str:
    """Shape and dtype: "[7] of float32"."""
    return f"{list(tensor.shape)} of {str(tensor.dtype).removeprefix('torch.')}"


def fact(value) -> Fact:
    """As it is stored: prints for tensors, lists for tuples."""
    if isinstance(value, torch.Tensor):
        return print_of(value)
    if isinstance(value, Print) or value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(name): fact(one) for name, one in value.items()}
    return [fact(one) for one in value]


def same(got: Fact, right: Fact, tolerance: float | None = None) -> bool:
    """Whether they are alike; numbers but for rounding, as far as their dtype has it."""
    got, right = fact(got), fact(right)
    if isinstance(got, Print) and isinstance(right, Print):
        limit = tolerance or _TOLERANCE.get(right.form.rpartition(" ")[2], _EXACT)
        return got.form == right.form and _close(got.numbers, right.numbers, limit)
    if _is_number(got) and _is_number(right) and (tolerance or float in (type(got), type(right))):
        return _close((float(got),), (float(right),), tolerance or _EXACT)
    if type(got) is not type(right):
        return False
    if isinstance(right, list):
        return len(got) == len(right) and all(same(one, other, tolerance) for one, other in zip(got, right, strict=True))
    if isinstance(right, dict):
        return got.keys() == right.keys() and all(same(got[name], right[name], tolerance) for name in right)
    return got == right


def _is_number(value: Fact) -> bool:
    return type(value) in (int, float)


def _close(got: tuple[float, ...], right: tuple[float, ...], tolerance: float) -> bool:
    scale = max([*map(abs, got), *map(abs, right), 1e-12], default=1.0)
    pairs = zip(got, right, strict=True)  # beside what is infinite, everything would be close
    return all(one == other or abs(one - other) <= tolerance * scale < math.inf for one, other in pairs)


def only_rounded(got: Fact, right: Fact) -> bool:
    """Whether they differ as if float32 had been in between."""
    got, right = fact(got), fact(right)
    if isinstance(got, Print) and isinstance(right, Print) and got.form != right.form:
        return got.form.partition(" of ")[0] == right.form.partition(" of ")[0]
    return same(got, right, NEAR)


def difference(got: Fact, right: Fact) -> str:
    """In words: "2 of 7 elements are wrong; element 0 is 5, right is 7"."""
    got, right = fact(got), fact(right)
    if not (isinstance(got, Print) and isinstance(right, Print)):
        return _unlike(got, right)
    if got.form != right.form:
        return f"{got.form}; right is {right.form}"
    n = math.prod(json.loads(right.form.partition(" of ")[0]))
    places = range(n) if n <= _ALL else _places(n)
    limit = _TOLERANCE.get(right.form.rpartition(" ")[2], _EXACT)
    scale = max([*map(abs, right.numbers), 1e-12], default=1.0)
    numbers = list(zip(places, got.numbers, right.numbers, strict=False))
    wrong = [one for one in numbers if abs(one[1] - one[2]) > limit * scale]
    many = f"{len(wrong)} of {n} elements are wrong; " if n <= _ALL else ""
    if not wrong:
        return f"some of its {n:,} elements are wrong"
    place, there, here = wrong[0]
    return f"{many}element {place:,} is {_number(there, here)}, right is {_number(here, there)}"


def _number(one: float, other: float) -> str:
    """With as many digits as tell it from the other."""
    special = {_NOT_A_NUMBER: "nan", _INFINITE: "inf", -_INFINITE: "-inf"}
    return special.get(one) or (f"{one:g}" if f"{one:g}" != f"{other:g}" else f"{one:.13g}")


def _unlike(got: Fact, right: Fact) -> str:
    """Of long lists, what differs first."""
    if isinstance(got, list) and isinstance(right, list) and len(str(right)) > 60:
        at = next(
            (i for i, (one, other) in enumerate(zip(got, right, strict=False)) if one != other), min(len(got), len(right))
        )
        there, here = (shown(its[at]) if at < len(its) else "missing" for its in (got, right))
        return f"has {len(got):,} items, item {at} is {there}; right are {len(right):,}, and item {at} is {here}"
    return f"is {shown(got)}; right is {shown(right)}"


def shown(value: Fact, longest: int = 120) -> str:
    """For a report."""
    if isinstance(value, Print):
        return value.form
    if isinstance(value, dict):
        text = "{" + ", ".join(f"{name}: {shown(one)}" for name, one in value.items()) + "}"
    elif isinstance(value, list):
        text = "(" + ", ".join(shown(one) for one in value) + ")"
    else:
        text = f"{value:g}" if isinstance(value, float) else "nothing" if value is None else str(value)
    return text if len(text) <= longest else f"{text[:longest]} …"


def size(n: int) -> str:
    """3500000 -> "3.5 MB"; three digits, and exact bytes below 1 kB."""
    for unit, name in _UNITS:
        if n >= unit:
            return f"{n / unit:.3g} {name}"
    return f"{n} bytes"


def listed(words: list[str]) -> str:
    """ "2, 3 and 4"."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
