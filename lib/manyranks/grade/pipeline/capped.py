"""The task under_a_cap: any schedule of F, I and W that keeps to a cap of memory, the less waiting the better."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import ClassVar, NamedTuple

from manyranks.grade.journal import Stopped
from manyranks.grade.pipeline import failed, ready, tables
from manyranks.grade.pipeline.task import ADVICE, TableTask
from manyranks.grade.scripts import Scene, Tensors
from manyranks.grade.trial import Trial
from manyranks.grade.verdict import Aspect, Verdict
from manyranks.parallel.pipeline.actions import BACKWARD, INPUT, Schedule
from manyranks.parallel.pipeline.program import Times
from manyranks.parallel.pipeline.schedules import one_stage_a_rank
from manyranks.theory import pipeline as theory

FORM = 'return a list of p tables, one a rank, each a list of pairs: [[("F", 0), ("I", 0), ("W", 0), …], …]'
_WHOLE = "a whole B keeps the rank above waiting while this one does its W: give I first, and do a W where the rank would wait"
_ALONE = (
    "rank 0 has only one micro-batch under way, and waits until it is back: warm up first, rank r with p − 1 − r forwards at "
    "least, as 1F1B does"
)
_SOON = (
    "a W right after its I is a whole B in two pieces. Within a cap of p, rank r can do its first W r rounds of F and I later "
    "than rank 0, for it has warmed up with r forwards less"
)
_LATE_W = (
    "a W gives memory back: put off too far, there is no room for the next forward, and the ranks below wait for it. Rank r "
    "puts each W off by r rounds of F and I, no more"
)
_DEEPER = (
    "there is room for more: with 2p − 1 activations, rank r warms up with 2(p − 1 − r) forwards, so that no rank waits for "
    "its first gradient, and puts each W off by 2r rounds"
)


class Size(NamedTuple):
    """p ranks, m micro-batches, at most cap activations a rank; seconds of F, I and W."""

    p: int
    m: int
    cap: int
    F: int = 1
    I: int = 1  # noqa: E741 the field's name of it
    W: int = 1

    def waits(self, schedule: str) -> float:
        """The bubble of a schedule of the papers."""
        return theory.bubble(schedule, self.p, self.m, F=self.F, B=self.I + self.W, W=self.W)


_SIZES = (
    Size(4, 8, 4),
    Size(4, 12, 7),
    Size(4, 8, 5),
    Size(4, 6, 2),
    Size(8, 16, 8, 10, 11, 9),
    Size(8, 24, 15, 10, 11, 9),
    Size(3, 2, 3),
    Size(1, 3, 1),
)


def _asked(size: Size, function: Callable, watch) -> Tensors:
    call = f"under_a_cap({size.p}, {size.m}, {size.cap}, times)"
    times = {"F": size.F, "I": size.I, "W": size.W}
    with failed.noted(watch, "", call, first=size == _SIZES[0], patient=True), ready.refused():
        ranks = tables.listed(function(*size[:3], times), call, FORM, size.p)
        if len(ranks) < size.p:
            raise Stopped(f"{call} returned {len(ranks)} table{'s' * (len(ranks) != 1)}", FORM)
        named = [(f"{call}[{rank}]", rows) for rank, rows in enumerate(ranks)]
        rows = [(name, tables.listed(table, name, FORM, 12 * size.m + 64)) for name, table in named]
        return {str(rank): tables.encoded(table, name, 2, FORM) for rank, (name, table) in enumerate(rows)}
    return {}


@cache
def cases(n: int) -> list[Scene]:
    """At caps of p and of 2p − 1, between and below; also with times that differ, and few micro-batches."""
    return [Scene(1, partial(_asked, size), [{}], must=size, note=_named(size)) for size in _SIZES]


def _named(size: Size) -> str:
    times = "" if size.F == size.I == size.W else f", F, I, W = {size.F}, {size.I}, {size.W} s"
    return f"with p = {size.p}, m = {size.m}, cap = {size.cap}{times}"


def _schedule(trial: Trial) -> Schedule:
    size, found = trial.case.must, trial.answers[0].tensors
    return tables.schedule("the table", [found[str(r)] for r in range(size.p)], size.m, one_stage_a_rank(size.p))


def _keeps(trial: Trial) -> Verdict:
    for verdict in failed.failures(trial).values():
        return verdict
    problem = tables.verified(_schedule(trial), trial.case.must.cap)
    return tables.why_not(problem, ADVICE) if problem else Verdict(True)


def _can_run(task: "Capped", trial: Trial) -> Verdict:
    return _keeps(trial) if trial.case.must.cap >= trial.case.must.p else Verdict(True)


def _keeps_low(task: "Capped", trial: Trial) -> Verdict:
    return _keeps(trial) if trial.case.must.cap < trial.case.must.p else Verdict(True)


def _less_than(name: str, paper: str, from_cap: Callable[[int], int], strictly: bool) -> Callable[..., Verdict]:
    """A judge: at a cap of from_cap(p) and above, the waiting is that of the paper's schedule at most, or less."""

    def judge(task: "Capped", trial: Trial) -> Verdict:
        size = trial.case.must
        if size.cap < from_cap(size.p) or size.m < max(size.p, theory.fewest(paper, size.p)) or size.p == 1:
            return Verdict(True)
        if not _keeps(trial).ok:
            return Verdict(None, "the table cannot run, or not within the cap")
        schedule = _schedule(trial)
        got = tables.waited(schedule, Times(size.F, size.I, size.W))
        right = size.waits(paper)
        if got < right or (got == right and not strictly):
            return Verdict(True)
        last = size.p - 1
        found = f"a rank waits {got:g} s; {name} {right:g} s (rank {last}: {tables.table_of(schedule.ranks[last])})"
        return Verdict(False, found, _why(schedule, size))

    return judge


def _why(schedule: Schedule, size: Size) -> str:
    """The hint where a rank waits too long."""
    kinds = ["".join(action.kind for action in table) for table in schedule.ranks]
    last = size.p - 1
    if kinds[0][1:2] in (BACKWARD, INPUT):
        return _ALONE
    if any(BACKWARD in row for row in kinds):
        return _WHOLE
    if (late := _late(kinds[last])) < last:
        return f"rank {last} puts its W off by {late} round{'s' * (late != 1)}, and has room for {last}: {_SOON}"
    if tables.waited(schedule, Times(size.F, size.I, size.W)) > size.waits("zb-h1"):
        return _LATE_W
    return _DEEPER


def _late(row: str) -> int:
    """By how many I the first W follows its own."""
    return max(0, row.partition("W")[0].count("I") - 1)


@dataclass(frozen=True)
class Capped(TableTask):
    aspects: ClassVar[tuple[Aspect, ...]] = (
        Aspect("can run, and keeps to a cap of p or more", 0.1, _can_run),
        Aspect("with a cap of p, waits less than 1F1B", 0.25, _less_than("1F1B", "1f1b", lambda p: p, strictly=True)),
        Aspect("with a cap of p, waits no longer than ZB-H1", 0.3, _less_than("ZB-H1", "zb-h1", lambda p: p, strictly=False)),
        Aspect(
            "with a cap of 2p − 1, waits no longer than ZB-H2",
            0.25,
            _less_than("ZB-H2", "zb-h2", lambda p: 2 * p - 1, strictly=False),
        ),
        Aspect("can run, and keeps to a cap below p", 0.1, _keeps_low),
    )
