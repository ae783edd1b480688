"""The task one_f_one_b: one rank's table of F and B, as data."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from typing import ClassVar

from manyranks.grade.pipeline import failed, tables
from manyranks.grade.pipeline.task import ADVICE, TableTask
from manyranks.grade.scripts import Scene, Tensors
from manyranks.grade.trial import Trial
from manyranks.grade.verdict import Aspect, Verdict
from manyranks.parallel.pipeline.actions import FORWARD, Schedule
from manyranks.parallel.pipeline.program import Times
from manyranks.parallel.pipeline.schedules import one_stage_a_rank
from manyranks.parallel.pipeline.verify import peaks
from manyranks.theory import pipeline as theory

FORM = 'return a list of pairs, the kind and the micro-batch, counted from 0: [("F", 0), ("F", 1), ("B", 0), …]'
_TIMES = Times(F=1, I=1, W=1)
_P = (4, 1, 2, 3, 8)
_GPIPE = (
    "that is GPipe's memory: when the warm-up is over, a backward follows each forward, and gives its activations back before "
    "the next forward"
)
_LONG = "rank r warms up with p − 1 − r forwards, then does one forward and one backward in turn: the warm-up here is too long"
_SHORT = (
    "rank r warms up with p − 1 − r forwards, then does one forward and one backward in turn: the warm-up here is too short. A "
    "micro-batch that has left comes back as a gradient only after all ranks below; until then, other forwards fill the time"
)
_NOT_IN_TURN = (
    "after the warm-up, F and B strictly take turns, one of each, until there are no forwards left: two of one kind in a row "
    "let another rank wait"
)
_ADVICE = ADVICE | {
    "deadlock:": (
        "these ranks wait for each other. Rank r warms up with p − 1 − r forwards: the first rank has most, the last one none"
    ),
}


def _asked(p: int, function: Callable, watch) -> Tensors:
    found: Tensors = {}
    for m, rank in product(counts(p), range(p)):
        call = f"one_f_one_b({p}, {m}, {rank})"
        with failed.noted(watch, str(m), call, first=p == _P[0] and not found):
            rows = tables.asked(function, call, (p, m, rank), FORM, 8 * m + 1000)
            found[f"{m}, {rank}"] = tables.encoded(rows, call, 2, FORM)
    return found


def counts(p: int) -> list[int]:
    """Of micro-batches, the one that shows most first."""
    return list(dict.fromkeys((2 * p, 4 * p, 2 * p + 1, p, 2, 1)))


@cache
def cases(n: int) -> list[Scene]:
    """Several numbers of ranks, each with several of micro-batches."""
    return [Scene(1, partial(_asked, p), [{}], must=p, note=f"with p = {p}") for p in _P]


def _schedules(trial: Trial, few: bool = False) -> list[Schedule]:
    """Those with p micro-batches and more; few: the others."""
    p, found = trial.case.must, trial.answers[0].tensors
    ranks = {m: [found[f"{m}, {rank}"] for rank in range(p)] for m in counts(p) if (m < p) == few}
    return [tables.schedule(f"m = {m}", rows, m, one_stage_a_rank(p)) for m, rows in ranks.items()]


def _can_run(task: "Steady", trial: Trial, few: bool = False) -> Verdict:
    for m, verdict in failed.failures(trial).items():
        if (int(m) < trial.case.must) == few:
            return verdict
    for schedule in _schedules(trial, few):
        if problem := tables.verified(schedule):
            return tables.why_not(problem, _ADVICE)
    return Verdict(True)


def _in_flight(task: "Steady", trial: Trial, few: bool = False) -> Verdict:
    """Exactly min(m, p − rank): with fewer, others wait."""
    if not _can_run(task, trial, few).ok:
        return Verdict(None, "the table cannot run")
    p = trial.case.must
    for schedule in _schedules(trial, few):
        m, got = schedule.microbatches, peaks(schedule)
        right = tuple(min(m, p - rank) for rank in range(p))
        for rank in range(p):
            if got[rank] != right[rank]:
                found = f"{schedule.name}, rank {rank} holds {tables.batches(got[rank])}; 1F1B holds {right[rank]}"
                return Verdict(False, found, _why_held(schedule, rank, got, right))
    return Verdict(True)


def _why_held(schedule: Schedule, rank: int, got: tuple[int, ...], right: tuple[int, ...]) -> str:
    if got[rank] < right[rank]:
        return _SHORT
    few = schedule.microbatches < len(got)
    return _GPIPE if min(got) == schedule.microbatches and not few else _LONG


def _waits(task: "Steady", trial: Trial, few: bool = False) -> Verdict:
    """On the virtual clock, (p − 1)(F + B), where the memory is 1F1B's."""
    if not _in_flight(task, trial, few).ok:
        return Verdict(None, "it does not hold what 1F1B holds")
    for schedule in _schedules(trial, few):
        got = tables.waited(schedule, _TIMES)
        right = theory.bubble("1f1b", trial.case.must, schedule.microbatches)
        if got != right:
            found = f"{schedule.name}, with F = 1 s and B = 2 s a rank waits {got:g} s; with 1F1B {right:g} s"
            return Verdict(False, f"{found} ({_odd_rank(schedule)})", _NOT_IN_TURN)
    return Verdict(True)


def _with_few(task: "Steady", trial: Trial) -> Verdict:
    """All of it with fewer micro-batches than ranks; the first thing that is wrong."""
    verdicts = (judge(task, trial, few=True) for judge in (_can_run, _in_flight, _waits))
    return next((verdict for verdict in verdicts if not verdict.ok), Verdict(True))


def _odd_rank(schedule: Schedule) -> str:
    """The first rank whose table leaves the turns, and the table."""
    p = len(schedule.ranks)
    for rank, table in enumerate(schedule.ranks):
        ahead = min(schedule.microbatches, p - 1 - rank)
        turns = "".join(action.kind for action in table[ahead:])
        if not turns.startswith((FORWARD + "B") * (schedule.microbatches - ahead)):
            return f"rank {rank}: {tables.table_of(table)}"
    return f"rank 0: {tables.table_of(schedule.ranks[0])}"


@dataclass(frozen=True)
class Steady(TableTask):
    aspects: ClassVar[tuple[Aspect, ...]] = (
        Aspect("does each F and each B once, in an order that can run", 0.2, _can_run),
        Aspect("holds min(m, p − rank) micro-batches", 0.4, _in_flight),
        Aspect("with this memory, waits (p − 1)(F + B) in all", 0.25, _waits),
        Aspect("does so with fewer micro-batches than ranks", 0.15, _with_few),
    )
