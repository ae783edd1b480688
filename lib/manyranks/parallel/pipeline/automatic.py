"""The best schedule that can be found for given times, placement of stages and memory.

A list scheduler runs on a virtual clock: a rank that is free does the most urgent of what
is ready. An I is most urgent, then an F, then a W. A rank does not start an action that
would delay a more urgent one, already on its way, by more than a share of the action. This
share is its tolerance: with 0 it always waits, with 1 never. Several are tried, and the
best is tuned rank by rank. The schedules that are known are tried, too.
Source of the idea: arXiv 2401.10241, section 3.
"""

import heapq
from collections import deque
from collections.abc import Sequence
from functools import partial
from itertools import cycle, islice, product
from math import inf, isfinite

from manyranks.parallel.pipeline import schedules
from manyranks.parallel.pipeline.program import ActionWork, Times, bubble, program
from manyranks.parallel.pipeline.schedules import FORWARD, INPUT, WEIGHT, Action, Schedule
from manyranks.parallel.pipeline.verify import peaks
from manyranks.timeline import replay

TOLERANCES = (0.0, 0.25, 0.5, 0.75, 0.9, 1.0)
TUNED = 150_000  # actions to schedule while tuning: one or two seconds

Result = tuple[float, float, tuple]  # bubble and makespan in seconds, the ranks' actions


def automatic(
    p: int,
    m: int,
    F: float | Sequence[float] = 1.0,
    I: float | Sequence[float] = 1.0,  # noqa: E741 the field's name of it
    W: float | Sequence[float] = 1.0,
    communication: float = 0.0,
    memory: int | None = None,
    placement: Sequence[int] | None = None,
) -> Schedule:
    """Returns the schedule with the least bubble, then makespan, of all that it tries.

    F, I, W: seconds, one number or one for each stage
    communication: seconds of a message
    memory: most activations that a rank may hold, each of one micro-batch in one stage;
        None: no cap
    placement: the rank of each stage, by default one stage a rank

    Deterministic. Never worse than a hand-written schedule with this placement that keeps
    to the cap; not always the best there is. Raises ValueError for numbers that cannot be,
    and for a cap below the stages of a rank.
    """
    schedules.check_degrees(p=p, m=m)
    placement = tuple(range(p) if placement is None else placement)
    times = Times(F, I, W, latency=communication)
    _check(p, placement, times)
    most = max(map(placement.count, placement))
    cap = m * most if memory is None else memory
    if cap < most:
        raise ValueError(f"memory={memory}: a rank has {most} stages; give {most} or more")
    known = [one for one in handwritten(p, m, placement) if max(peaks(one)) <= cap]
    found = Schedule("automatic", m, placement, _searched(p, m, times, placement, cap))
    best = min([*known, found], key=lambda schedule: _cost(schedule, times))
    return Schedule("automatic", m, placement, best.ranks)


def handwritten(p: int, m: int, placement: tuple[int, ...]) -> list[Schedule]:
    """Returns the schedules that have this placement of stages."""
    v = max(1, len(placement) // p)
    names = "zb-h2", "zb-h1", "1f1b", "gpipe", "naive", "zb-v", "dualpipe-v", "interleaved"
    made = [schedules.named(name, p, m, v) for name in names]
    return [schedule for schedule in made if schedule.placement == placement]


def _cost(schedule: Schedule, times: Times) -> tuple[float, float]:
    """The bubble, as a share of the makespan without rounding noise; then the makespan."""
    timeline = replay(program(schedule), times)
    return round(bubble(timeline) / timeline.makespan, 9), timeline.makespan


def _searched(p: int, m: int, times: Times, placement: tuple[int, ...], cap: int) -> tuple:
    """The best table of one tolerance for all ranks, then of changes to one rank's."""
    run = partial(greedy, m, times, placement)
    caps = {cap, max(cap - 1, *map(placement.count, placement))}  # sometimes less is more
    tried = [
        (run(most, (x,) * p), most, (x,) * p) for x in TOLERANCES for most in sorted(caps)
    ]
    best, cap, tolerance = min(tried, key=lambda one: one[0][:2])
    changes = list(product(range(p), TOLERANCES))
    since = 0  # changes without effect
    for rank, share in islice(cycle(changes), TUNED // (3 * m * len(placement))):
        changed = (*tolerance[:rank], share, *tolerance[rank + 1 :])
        found, since = run(cap, changed), since + 1
        if found[:2] < best[:2]:
            best, tolerance, since = found, changed, 0
        if since == len(changes):
            break
    return best[2]


def greedy(
    m: int, times: Times, placement: tuple[int, ...], cap: int, tolerance: tuple[float, ...]
) -> Result:
    """Schedules with so much tolerance on each rank, and room for so many activations."""
    ranks = [_Rank(m, times, placement, cap, *one) for one in enumerate(tolerance)]
    events = [(0.0, r) for r in range(len(ranks))]
    while events:
        now, r = heapq.heappop(events)
        rank = ranks[r]
        if now < rank.free or (step := rank.choose(now)) is None:
            continue
        rank.take(*step, now)
        heapq.heappush(events, (rank.free, r))
        for kind, stage in _follows(*step, len(placement)):
            other = placement[stage]
            arrival = rank.free + (times.latency if other != r else 0)
            ranks[other].arrivals[kind, stage].append(arrival)
            heapq.heappush(events, (arrival, other))
    longest = max(rank.free - rank.started for rank in ranks)
    work = max(m * sum(rank.seconds.values()) for rank in ranks)
    tables = tuple(tuple(rank.actions) for rank in ranks)
    return longest - work, max(rank.free for rank in ranks), tables


def _follows(kind: str, stage: int, stages: int) -> list[tuple[str, int]]:
    """Lists what becomes ready by it, besides a W."""
    if kind == FORWARD:
        return [(INPUT, stage)] if stage + 1 == stages else [(FORWARD, stage + 1)]
    return [(INPUT, stage - 1)] if kind == INPUT and stage else []


class _Rank:
    """A rank on the clock.

    arrivals: when the inputs of each F and I are there, if known
    free: since when it does nothing
    room: activations that it may still take on

    A micro-batch that comes in takes room in all of the rank's stages at once: else ranks
    could hold each other up with forwards whose backwards have none.
    """

    def __init__(self, m, times, placement, cap, rank, tolerance):
        self.own = [stage for stage, owner in enumerate(placement) if owner == rank]
        works = [ActionWork(kind, stage) for kind, stage in product("FIW", self.own)]
        self.seconds = {work[:2]: times.compute(rank, work) for work in works}
        self.arrivals = {step: [] for step in product("FI", self.own)}
        if 0 in self.own:
            self.arrivals[FORWARD, 0] = [0.0] * m
        forward = [(FORWARD, stage) for stage in reversed(self.own)]
        self.steps = [*product((INPUT,), self.own), *forward, (WEIGHT, None)]
        self.done = dict.fromkeys(self.seconds, 0)
        self.waiting: deque[int] = deque()  # stages whose W is next
        self.room, self.tolerance = cap, tolerance
        self.started, self.free = inf, 0.0
        self.actions: list[Action] = []

    def choose(self, now: float) -> tuple[str, int] | None:
        """The most urgent step that is ready; None to wait."""
        soon = inf
        for kind, stage in self.steps:
            if kind == WEIGHT:
                arrival, stage = (now, self.waiting[0]) if self.waiting else (None, None)
            else:
                known, i = self.arrivals[kind, stage], self.done[kind, stage]
                arrival = known[i] if i < len(known) else None
            enters = kind == FORWARD and stage == self.own[0]
            if arrival is None or (enters and self.room < len(self.own)):
                continue
            if arrival > now:
                soon = min(soon, arrival)
                continue
            seconds = self.seconds[kind, stage]
            waits = now + seconds - soon > self.tolerance * seconds
            return None if waits else (kind, stage)
        return None

    def take(self, kind: str, stage: int, now: float) -> None:
        self.actions.append(Action(kind, stage, self.done[kind, stage]))
        self.done[kind, stage] += 1
        self.started = min(self.started, now)
        self.free = now + self.seconds[kind, stage]
        if kind == INPUT:
            self.waiting.append(stage)
        elif kind == WEIGHT:
            self.waiting.popleft()
            self.room += 1
        elif stage == self.own[0]:
            self.room -= len(self.own)


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
