"""The best schedule that can be found for given times, placement of stages and memory.

It tries the schedules that are known, their order of F and I with each W where it fits
best, and list schedules under several policies; then it tunes the best policy rank by rank.
"""

from collections.abc import Iterator, Sequence
from itertools import cycle, islice, product
from math import isfinite

from manyranks.parallel.pipeline.actions import BACKWARD, INPUT, WEIGHT, Action, Schedule
from manyranks.parallel.pipeline.greedy import Pipeline, Policy, Result, greedy
from manyranks.parallel.pipeline.program import ActionWork, Times, bubble, program
from manyranks.parallel.pipeline.verify import peaks
from manyranks.timeline import replay

PATIENCE = (0.0, 0.25, 0.5, 0.75, 0.9, 1.0)
TUNED = 150_000  # actions to schedule while tuning: one or two seconds

Tried = tuple[Result, Policy]


def search(
    p: int,
    m: int,
    times: Times,
    memory: int | None,
    placement: tuple[int, ...],
    known: list[Schedule],
) -> Schedule:
    """The schedule with the least bubble, then makespan, of these and of all that list
    scheduling finds.

    Raises ValueError as schedules.automatic does.
    """
    _check(p, placement, times)
    pipeline = _pipeline(p, m, placement, times)
    most = max(map(len, pipeline.own))
    cap = m * most if memory is None else memory
    if cap < most:
        raise ValueError(f"memory={memory}: a rank has {most} stages; give {most} or more")
    known = [schedule for schedule in known if max(peaks(schedule)) <= cap]
    start = min(_tries(pipeline, cap, known), key=lambda tried: tried[0][:2])
    found = _tuned(pipeline, start)
    candidates = [*known, Schedule("automatic", m, placement, found.ranks)]
    best = min(candidates, key=lambda schedule: _cost(schedule, times))
    return Schedule("automatic", m, placement, best.ranks)


def _cost(schedule: Schedule, times: Times) -> tuple[float, float]:
    """The bubble, as a share of the makespan without rounding noise; then the makespan."""
    timeline = replay(program(schedule), times)
    return round(bubble(timeline) / timeline.makespan, 9), timeline.makespan


def _tries(pipeline: Pipeline, cap: int, known: list[Schedule]) -> Iterator[Tried]:
    p, most = len(pipeline.own), max(map(len, pipeline.own))
    tables = [_without_weights(schedule) for schedule in known]
    caps = {cap, max(most, cap - 1)}  # sometimes less is more
    choices = [(cap, True, table) for table in tables]
    deeps = (True, False) if most > 1 else (True,)
    choices += [(at_most, deep, None) for at_most in sorted(caps) for deep in deeps]
    for patience, (at_most, deep, table) in product(PATIENCE, choices):
        policy = Policy(at_most, (patience,) * p, deep, table)
        yield greedy(pipeline, policy), policy


def _without_weights(schedule: Schedule) -> tuple[tuple[Action, ...], ...]:
    """The order of F and I on each rank, a B being an I."""
    return tuple(
        tuple(
            action._replace(kind=INPUT) if action.kind == BACKWARD else action
            for action in schedule.actions(rank)
            if action.kind != WEIGHT
        )
        for rank in range(len(schedule.ranks))
    )


def _tuned(pipeline: Pipeline, start: Tried) -> Result:
    """Changes one rank's patience at a time and keeps what is better, a limited time."""
    best, policy = start
    tries = TUNED // (3 * pipeline.m * len(pipeline.placement))
    changes = list(product(range(len(pipeline.own)), PATIENCE))
    since = 0  # changes without effect
    for rank, share in islice(cycle(changes), tries):
        patience = (*policy.patience[:rank], share, *policy.patience[rank + 1 :])
        result = greedy(pipeline, policy._replace(patience=patience))
        since += 1
        if result[:2] < best[:2]:
            best, policy, since = result, policy._replace(patience=patience), 0
        if since == len(changes):
            break
    return best


def _pipeline(p: int, m: int, placement: tuple[int, ...], times: Times) -> Pipeline:
    stages = range(len(placement))
    own = tuple(tuple(s for s in stages if placement[s] == rank) for rank in range(p))
    works = [ActionWork(kind, stage) for kind, stage in product("FIW", stages)]
    seconds = {work[:2]: times.compute(placement[work.stage], work) for work in works}
    return Pipeline(m, placement, own, seconds, times.latency)


def _check(p: int, placement: tuple[int, ...], times: Times) -> None:
    if set(placement) != set(range(p)):
        wanted = f"each of the {p} ranks must have a stage, and no other"
        raise ValueError(f"placement={placement}: {wanted}")
    stages = len(placement)
    for name in "FIW":
        given = getattr(times, name)
        each = given if isinstance(given, Sequence) else [given] * stages
        possible = all(isfinite(t) and t >= 0 for t in each) and any(each)
        if len(each) != stages or not possible:
            wanted = f"give seconds above 0, one number or {stages} of them"
            raise ValueError(f"{name}={given!r}: {wanted}")
    if not (isfinite(times.latency) and times.latency >= 0):
        raise ValueError(f"communication={times.latency!r}: give 0 or more seconds")
