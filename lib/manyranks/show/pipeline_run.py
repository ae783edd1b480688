"""A pipeline schedule that has run, in numbers: what a chart shows of it, and what is said of it."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from manyranks.parallel.pipeline.actions import KINDS, Pair, Schedule
from manyranks.parallel.pipeline.program import bubble, in_flight
from manyranks.show import gantt
from manyranks.timeline import Timeline
from manyranks.timeline.spans import COMPUTE

_WHOLE = {kind: (gantt.KINDS[kind].top, gantt.KINDS[kind].bottom) for kind in KINDS}  # of the band
_UPPER, _LOWER = (0.0, 0.48), (0.52, 1.0)  # for the halves of a Pair


class Boxes(NamedTuple):
    """A row for each action. level: which of its rank's stages; top, bottom: as shares of the rank's band."""

    kind: np.ndarray
    level: np.ndarray
    rank: np.ndarray
    top: np.ndarray
    bottom: np.ndarray
    started: np.ndarray
    finished: np.ndarray
    microbatch: np.ndarray


class Run(NamedTuple):
    """What a chart shows of a schedule and its timeline, and what is said of it.

    name: the schedule's. messages: rank and time where each starts, rank and time where it ends. held[rank]: rows of since when
    and how many micro-batches, each counted on all stages of the rank. work: of the busiest rank, in seconds as all times.
    """

    name: str
    boxes: Boxes
    messages: np.ndarray
    held: tuple[np.ndarray, ...]
    work: float
    bubble: float
    makespan: float

    @property
    def peaks(self) -> list[float]:
        """Most micro-batches that each rank holds."""
        return [float(steps[:, 1].max()) for steps in self.held]

    @property
    def of_ideal(self) -> float:
        return self.bubble / self.work

    @property
    def of_whole(self) -> float:
        return self.bubble / (self.work + self.bubble)


def run(schedule: Schedule, timeline: Timeline) -> Run:
    """timeline: of the schedule's program, or measured. Raises ValueError where it has another number of actions."""
    ranks = range(len(schedule.ranks))
    each = max(1, *(schedule.placement.count(rank) for rank in ranks))
    held = tuple(np.array(in_flight(schedule, timeline, rank)) / (1, each) for rank in ranks)
    rows = [box for rank in ranks for box in _boxes(schedule, timeline, rank)]
    boxes = Boxes(*map(np.array, zip(*rows, strict=True)))
    work = max(map(timeline.busy, timeline.ranks))
    return Run(schedule.name, boxes, _messages(timeline), held, work, bubble(timeline), timeline.makespan)


def _boxes(schedule: Schedule, timeline: Timeline, rank: int) -> Iterator[tuple]:
    """As Boxes. The halves of a Pair, which follow each other on the virtual clock, have its whole time."""
    own = [stage for stage, owner in enumerate(schedule.placement) if owner == rank]
    level = {stage: k for k, stage in enumerate(own)}
    spans = iter(timeline.of(rank, COMPUTE))
    for item in schedule.ranks[rank]:
        if type(item) is Pair:
            started, finished = next(spans).started, next(spans).finished
            for (kind, stage, i), half in zip(item, (_UPPER, _LOWER), strict=True):
                yield kind, level[stage], rank, *half, started, finished, i
        else:
            kind, stage, i = item
            *_, started, finished = next(spans)
            yield kind, level[stage], rank, *_WHOLE[kind], started, finished, i


def _messages(timeline: Timeline) -> np.ndarray:
    """Those that were replayed. The sender's span says all: "send → 1" ends when rank 1 has the message."""
    sent = [span for span in timeline.spans if span.name.startswith("send → ")]
    return np.array([(s.rank, s.started, int(s.name.split()[-1]), s.finished) for s in sent], float).reshape(-1, 4)
