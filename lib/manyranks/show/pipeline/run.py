"""A pipeline schedule that has run, in numbers: what a chart shows of it, and what is said of it."""

import functools
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

from manyranks.parallel.pipeline.actions import FORWARD, Schedule, singles
from manyranks.parallel.pipeline.program import in_flight
from manyranks.parallel.pipeline.verify import held
from manyranks.show.gantt import KINDS
from manyranks.timeline import Timeline
from manyranks.timeline.spans import COMPUTE


class Run(NamedTuple):
    """What a chart shows of a schedule and its timeline, and what is said of it.

    boxes: columns of all actions: kind, level (which of its rank's stages), rank, top and bottom (shares of the rank's band),
    microbatch, started, finished. messages: rank and time where each starts, rank and time where it ends. held: rank, since
    when, until when, how many micro-batches, each counted on all stages of the rank; peaks: the most. work: the busiest rank's.
    """

    boxes: SimpleNamespace
    messages: np.ndarray
    held: np.ndarray
    peaks: list[float]
    work: float
    bubble: float
    makespan: float


def run(schedule: Schedule, timeline: Timeline) -> Run:
    """timeline: of the schedule's program, or measured. Raises ValueError where it has another number of actions."""
    columns, counts, stages = _table(schedule)
    spans = np.array([(*span[3:], span.rank) for span in timeline.spans if span.kind == COMPUTE]).reshape(-1, 3)
    started, finished, rank = spans[np.lexsort(spans.T[[1, 0, 2]])].T
    if rank.tolist() != columns["rank"].tolist():
        [in_flight(schedule, timeline, each) for each in range(len(schedule.ranks))]  # says where
    # An activation comes when its F starts and goes when its B or W ends, as program.in_flight has it; in the end all are gone.
    changed = np.flatnonzero(np.diff(counts, prepend=0))
    when, count = np.where(columns["kind"] == FORWARD, started, finished)[changed], counts[changed] / stages
    steps = np.column_stack([rank[changed][:-1], when[:-1], when[1:], count[:-1]])[count[:-1] > 0]
    peaks = [float(steps[steps[:, 0] == each, 3].max(initial=0)) for each in range(len(schedule.ranks))]
    first = np.unique(rank, return_index=True)[1]
    work = np.add.reduceat(finished - started, first).max()
    bubble = max(0.0, round((np.maximum.reduceat(finished, first) - started[first]).max() - work, 12))  # as program.bubble
    # The sender's span says all of a message that was replayed: "send → 1" ends when rank 1 has it.
    sent = [(s.rank, s.started, int(s.name[7:]), s.finished) for s in timeline.spans if s.name.startswith("send → ")]
    boxes = SimpleNamespace(**columns, started=started[columns["first"]], finished=finished[columns["last"]])
    return Run(boxes, np.array(sent, float).reshape(-1, 4), steps, peaks, work, bubble, timeline.makespan)


@functools.lru_cache(maxsize=64)
def _table(schedule: Schedule) -> tuple[dict[str, np.ndarray], np.ndarray, int]:
    """Columns of boxes, and first and last, the spans that have a box's times, which the halves of a Pair share; how many
    activations a rank holds after each action, and how many of them make a micro-batch on all its stages.
    """
    rows, ranks = [], range(len(schedule.ranks))
    for rank, actions in [(rank, singles(item)) for rank in ranks for item in schedule.ranks[rank]]:  # noqa: B020
        at, alone = (len(rows), len(rows) + len(actions) - 1), KINDS[actions[0].kind]
        edges = [(alone.top, alone.bottom)] if len(actions) == 1 else [(0.0, 0.48), (0.52, 1.0)]
        for (kind, stage, i), ends in zip(actions, edges, strict=True):
            rows.append((kind, schedule.placement[:stage].count(rank), rank, *ends, i, *at))
    names = ("kind", "level", "rank", "top", "bottom", "microbatch", "first", "last")
    columns = dict(zip(names, map(np.array, zip(*rows, strict=True)), strict=True))
    counts = [count for rank in ranks for count in held(schedule, rank)]
    return columns, np.array(counts), max(map(schedule.placement.count, ranks))
