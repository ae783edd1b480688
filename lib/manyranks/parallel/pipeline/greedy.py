"""A list scheduler on a virtual clock: a rank that is free does the best of what is ready.

What is best is a Policy's matter. Every rank keeps to its cap of activations, and lets a
later micro-batch in only if the earlier ones can still come to their end within the cap:
else ranks could hold each other up for ever with forwards whose backwards have no room.
"""

import heapq
from collections import deque
from itertools import islice, product
from math import inf
from typing import NamedTuple

from manyranks.parallel.pipeline.actions import FORWARD, INPUT, WEIGHT, Action


class Policy(NamedTuple):
    """cap: of activations on each rank. patience: of each rank.

    A rank waits rather than start an action of which more than `patience`, a share, would
    delay a more urgent one that is already on its way: 0 always waits, 1 never. An I is
    most urgent, then an F, then a W. deep: of several stages' F, the last one's first.
    tables: each rank's F and I, if it is to keep to this order; then only the next one is
    urgent.
    """

    cap: int
    patience: tuple[float, ...]
    deep: bool = True
    tables: tuple[tuple[Action, ...], ...] | None = None


class Pipeline(NamedTuple):
    """own[r]: the stages of rank r. seconds: by kind and stage."""

    m: int
    placement: tuple[int, ...]
    own: tuple[tuple[int, ...], ...]
    seconds: dict[tuple[str, int], float]
    communication: float


class Result(NamedTuple):
    """ranks: each one's actions F, I and W in order. bubble and makespan: in seconds."""

    bubble: float
    makespan: float
    ranks: tuple[tuple[Action, ...], ...]


def greedy(pipeline: Pipeline, policy: Policy) -> Result:
    """What comes of the policy. Of each stage, micro-batches go in order."""
    ranks = [_Rank(pipeline, policy, r) for r in range(len(pipeline.own))]
    events = [(0.0, r) for r in range(len(ranks))]
    while events:
        now, r = heapq.heappop(events)
        rank = ranks[r]
        if now < rank.free or (step := rank.choose(now)) is None:
            continue
        kind, stage = step
        rank.started = min(rank.started, now)
        rank.free = now + pipeline.seconds[kind, stage]
        heapq.heappush(events, (rank.free, r))
        rank.take(kind, stage)
        for then, neighbour in _follows(pipeline, kind, stage):
            other = pipeline.placement[neighbour]
            arrival = rank.free + (pipeline.communication if other != r else 0)
            ranks[other].arrivals[then, neighbour].append(arrival)
            heapq.heappush(events, (arrival, other))
    longest = max(rank.free - rank.started for rank in ranks)
    work = pipeline.m * max(sum(map(pipeline.seconds.get, rank.done)) for rank in ranks)
    tables = tuple(tuple(rank.actions) for rank in ranks)
    return Result(longest - work, max(rank.free for rank in ranks), tables)


def _follows(pipeline: Pipeline, kind: str, stage: int) -> list[tuple[str, int]]:
    """What becomes ready by it, besides a W."""
    if kind == FORWARD:
        last = stage + 1 == len(pipeline.placement)
        return [(INPUT, stage)] if last else [(FORWARD, stage + 1)]
    return [(INPUT, stage - 1)] if kind == INPUT and stage else []


class _Rank:
    """arrivals: when the inputs of each F and I are there, as far as that is known."""

    def __init__(self, pipeline: Pipeline, policy: Policy, rank: int) -> None:
        self.own, self.seconds = pipeline.own[rank], pipeline.seconds
        self.cap, self.patience = policy.cap, policy.patience[rank]
        self.arrivals = {step: [] for step in product((FORWARD, INPUT), self.own)}
        if (FORWARD, 0) in self.arrivals:
            self.arrivals[FORWARD, 0] = [0.0] * pipeline.m
        forward = [(FORWARD, stage) for stage in sorted(self.own, reverse=policy.deep)]
        self.steps = [*product((INPUT,), self.own), *forward, (WEIGHT, None)]
        self.table = policy.tables and deque(policy.tables[rank])
        self.done = dict.fromkeys(product((FORWARD, INPUT, WEIGHT), self.own), 0)
        self.waiting: deque[int] = deque()  # stages whose W is next
        self.held, self.started, self.free = 0, inf, 0.0
        self.actions: list[Action] = []

    def choose(self, now: float) -> tuple[str, int] | None:
        """The most urgent step that is ready; None to wait."""
        soon = inf
        for kind, stage in self.steps if self.table is None else self._in_order():
            if kind == WEIGHT:
                arrival = now if self.waiting else None
                stage = self.waiting[0] if self.waiting else None
            else:
                known, i = self.arrivals[kind, stage], self.done[kind, stage]
                arrival = known[i] if i < len(known) else None
            if arrival is None or (kind == FORWARD and not self._has_room(stage)):
                continue
            if arrival > now:
                soon = min(soon, arrival)
                continue
            seconds = self.seconds[kind, stage]
            waits = now + seconds - soon > self.patience * seconds
            return None if waits else (kind, stage)
        return None

    def _in_order(self) -> list[tuple[str, int | None]]:
        """What the table has next, or else a W."""
        return [(a.kind, a.stage) for a in islice(self.table, 1)] + [(WEIGHT, None)]

    def take(self, kind: str, stage: int) -> None:
        self.actions.append(Action(kind, stage, self.done[kind, stage]))
        self.done[kind, stage] += 1
        if kind == FORWARD:
            self.held += 1
        elif kind == INPUT:
            self.waiting.append(stage)
        else:
            self.waiting.popleft()
            self.held -= 1
        if self.table and kind != WEIGHT:
            self.table.popleft()

    def _has_room(self, stage: int) -> bool:
        """Whether all micro-batches can still end, oldest first, if it is let in."""
        spare = self.cap - self.held - 1
        if spare < 0 or self.table is not None or spare >= len(self.own) - 1:
            return spare >= 0
        begun = {s: self.done[FORWARD, s] + (s == stage) for s in self.own}
        over = {s: self.done[WEIGHT, s] for s in self.own}
        for i in range(min(over.values()), max(begun.values())):
            if sum(begun[s] <= i for s in self.own) > spare:
                return False
            spare += sum(over[s] <= i < begun[s] for s in self.own)
        return True
