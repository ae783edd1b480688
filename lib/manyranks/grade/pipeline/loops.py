"""The task interleaved: one rank's table where each rank has v stages."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import ClassVar, NamedTuple

from manyranks.grade.pipeline import failed, tables
from manyranks.grade.pipeline.task import ADVICE, TableTask
from manyranks.grade.scripts import Scene, Tensors
from manyranks.grade.trial import Trial
from manyranks.grade.verdict import Aspect, Verdict
from manyranks.parallel.pipeline import schedules
from manyranks.parallel.pipeline.actions import FORWARD, Schedule
from manyranks.parallel.pipeline.program import Times
from manyranks.parallel.pipeline.schedules import looped
from manyranks.parallel.pipeline.verify import peaks
from manyranks.theory import pipeline as theory

FORM = 'return a list of triples, the kind, the stage and the micro-batch: [("F", 0, 0), ("F", 0, 1), …, ("B", 2, 0), …]'
_TIMES = Times(F=1, I=1, W=1)  # of one stage
_LATENCY = 0.5
_SLOW = replace(_TIMES, latency=_LATENCY)
_AHEAD = "rank r warms up with 2(p − 1 − r) + (v − 1)p forwards"
_ADVICE = ADVICE | {
    "deadlock:": (
        f"these ranks wait for each other: {_AHEAD}; with fewer, it needs a gradient of its last stage before that stage's "
        "input has come round. And forwards go p at a time through each of a rank's stages, backwards the same, from its last"
    ),
    "which it needs": f"backwards begin with the rank's last stage, when its forward is over; {_AHEAD}",
}
_SWAPPED = "with the numbers the other way round, the table can run: the second is the stage, the third the micro-batch"
_CANNOT = "the table cannot run"
_LONG = f"{_AHEAD}: the warm-up here is too long"
_GPIPE = "all forwards come first: after the warm-up, a backward follows each forward, and gives its activations back"
_LATE = (
    f"{_AHEAD}, then does one forward and one backward in turn. p micro-batches pass a rank's first stage, then the same p its "
    "second one, and so on, before the next p come; backwards the same, from its last stage to its first"
)
_ROUND = (
    "a micro-batch that has left a rank's stage comes round after p steps: take p of them through one stage before the next "
    "stage begins"
)
_MESSAGES = (
    f"{_AHEAD}. With p − 1 − r in place of 2(p − 1 − r), all fits only as long as messages take no time: each rank needs a "
    "gradient the moment that it is computed. One forward more for each rank below hides the messages' time"
)


class Size(NamedTuple):
    """p ranks, m micro-batches, v stages a rank."""

    p: int
    m: int
    v: int

    def most(self, rank: int) -> int:
        """Activations that the rank holds at most, each of one micro-batch in one stage."""
        return min(self.m * self.v, 2 * (self.p - 1 - rank) + (self.v - 1) * self.p + 1)


_SIZES = (Size(2, 4, 2), Size(4, 8, 2), Size(3, 6, 3), Size(4, 4, 2), Size(8, 16, 2), Size(1, 3, 2))


def _asked(size: Size, function: Callable, watch) -> Tensors:
    found: Tensors = {}
    for rank in range(size.p):
        call = f"interleaved({', '.join(map(str, size))}, {rank})"
        with failed.noted(watch, "", call, first=size == _SIZES[0] and not found):
            rows = tables.asked(function, call, (*size, rank), FORM, 8 * size.m * size.v + 64)
            found[str(rank)] = tables.encoded(rows, call, 3, FORM)
    return found


@cache
def cases(n: int) -> list[Scene]:
    """Several numbers of ranks, micro-batches and stages; m is a multiple of p."""
    return [Scene(1, partial(_asked, size), [{}], must=size, note=_named(size)) for size in _SIZES]


def _named(size: Size) -> str:
    return f"with p = {size.p}, m = {size.m}, v = {size.v}"


def _schedule(trial: Trial, columns: tuple[int, int, int] = (0, 1, 2)) -> Schedule:
    """columns: where the kind, the stage and the micro-batch are."""
    size, found = trial.case.must, trial.answers[0].tensors
    rows = [found[str(rank)][:, list(columns)] for rank in range(size.p)]
    return tables.schedule("the table", rows, size.m, looped(size.p, size.v))


def _can_run(task: "Loops", trial: Trial) -> Verdict:
    for verdict in failed.failures(trial).values():
        return verdict
    if not (problem := tables.verified(_schedule(trial))):
        return Verdict(True)
    if not tables.verified(_schedule(trial, (0, 2, 1))):
        return Verdict(False, problem, _SWAPPED)
    return tables.why_not(problem, _ADVICE)


def _waits(task: "Loops", trial: Trial) -> Verdict:
    """On the virtual clock, (p − 1)(f + b), where f and b are those of one stage."""
    if not _can_run(task, trial).ok:
        return Verdict(None, _CANNOT)
    (p, m, _), schedule = trial.case.must, _schedule(trial)
    got, right = tables.waited(schedule, _TIMES), theory.bubble("1f1b", p, m)  # of one stage a rank, for F and B are a stage's
    if got <= right:
        return Verdict(True)
    words = f"with f = 1 s and b = 2 s, a rank waits {got:g} s; interleaved, {right:g} s"
    return Verdict(False, words, _ROUND if _goes_on_too_soon(schedule, p) else _LATE)


def _goes_on_too_soon(schedule: Schedule, p: int) -> bool:
    """Whether rank 0 comes to its second stage before p micro-batches have gone through its first."""
    forwards = [action.stage for action in schedule.ranks[0] if action.kind == FORWARD]
    return len(set(forwards[:p])) > 1


def _hides(task: "Loops", trial: Trial) -> Verdict:
    """With messages that take time, it waits no longer than the published one."""
    if not (before := _waits(task, trial)).ok:
        return Verdict(None, _CANNOT if before.ok is None else "it waits longer than an interleaved one without them")
    size, schedule = trial.case.must, _schedule(trial)
    got, right = tables.waited(schedule, _SLOW), tables.waited(schedules.interleaved(*size), _SLOW)
    if got <= right:
        return Verdict(True)
    return Verdict(
        False, f"with messages of {_LATENCY:g} s, a rank waits {got:g} s; interleaved, {right:g} s", _why_slow(schedule, size)
    )


def _why_slow(schedule: Schedule, size: Size) -> str:
    first = schedule.ranks[0]
    ahead = next((k for k, action in enumerate(first) if action.kind != FORWARD), len(first))
    return _MESSAGES if ahead < size.most(0) else _GPIPE


def _in_flight(task: "Loops", trial: Trial) -> Verdict:
    """No more than the published peak, where the waiting is right."""
    if not (before := _waits(task, trial)).ok:
        return Verdict(None, _CANNOT if before.ok is None else "it waits longer than an interleaved one")
    size, schedule = trial.case.must, _schedule(trial)
    for rank, got in enumerate(peaks(schedule)):
        if got > size.most(rank):
            found = f"rank {rank} holds {got} activations, each of one micro-batch in one stage; interleaved, {size.most(rank)}"
            return Verdict(False, found, _GPIPE if got == size.m * size.v else _LONG)
    return Verdict(True)


@dataclass(frozen=True)
class Loops(TableTask):
    aspects: ClassVar[tuple[Aspect, ...]] = (
        Aspect("does each F and each B of each stage once, in an order that can run", 0.2, _can_run),
        Aspect("waits (p − 1)(f + b) in all, f and b of one stage", 0.3, _waits),
        Aspect("hides messages as far as it can", 0.2, _hides),
        Aspect("holds (p − r − 1)·2 + (v − 1)p + 1 activations, no more", 0.3, _in_flight),
    )
