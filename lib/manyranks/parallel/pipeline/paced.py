"""Actions held to a set duration, so that the wall clock shows a schedule's bubble.

On a laptop eight ranks share a few cores: they compute in turn, and a timeline of real work
shows that. A paced action computes what it has to, then sleeps until its time is over. A
rank that sleeps needs no core, so any number of ranks take their time side by side, and
what remains is what a schedule is about: who waits for whom. Messages and waking up take
real time beside it, about a millisecond an action: with actions of 40 ms and more, one to
three percent of the step.

    times = Times(F=0.02, I=0.02, W=0.02)
    measured = timeline(world.run(run, one_f_one_b(4, 8), times))
    replayed = replay(program(one_f_one_b(4, 8)), times)
"""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from manyranks.parallel.pipeline.actions import Action, Pair, Schedule, singles
from manyranks.parallel.pipeline.program import ActionWork, Times
from manyranks.parallel.pipeline.runtime import Pipeline
from manyranks.timeline import Span, Timeline
from manyranks.timeline.spans import COMPUTE


class Pace:
    """Holds each action to its duration, and notes when it ran: a Pipeline's pace.

    times: what replay charges for the same actions; those of messages have no effect.
    spans: of what was computed, in seconds of time.perf_counter, one clock for a machine's
    processes. overruns: actions whose computing alone took longer than they may; with any,
    the durations are too short for this machine, and the bubble is not the schedule's.
    """

    def __init__(self, times: Times, rank: int):
        self.times, self.rank = times, rank
        self.spans: list[Span] = []
        self.overruns: list[Action | Pair] = []

    @contextmanager
    def __call__(self, item: Action | Pair) -> Iterator[None]:
        started = time.perf_counter()
        yield
        parts = list(self._parts(item))
        left = started + sum(seconds for _, seconds in parts) - time.perf_counter()
        if left < 0:
            self.overruns.append(item)
        time.sleep(max(0.0, left))
        self._note(parts, started, time.perf_counter() - started)

    def _parts(self, item: Action | Pair) -> Iterator[tuple[Action, float]]:
        """Each action with its duration: two in a Pair."""
        actions = singles(item)
        for action in actions:
            work = ActionWork(action.kind, action.stage, paired=len(actions) == 2)
            yield action, self.times.compute(self.rank, work)

    def _note(self, parts: list[tuple[Action, float]], start: float, taken: float) -> None:
        """One span an action. Those of a Pair share its time as they share its duration."""
        whole = sum(seconds for _, seconds in parts)
        for action, seconds in parts:
            end = start + taken * (seconds / whole if whole else 1 / len(parts))
            name = f"{action.kind}{action.microbatch}"
            self.spans.append(Span(self.rank, COMPUTE, name, start, end))
            start = end


def run(
    schedule: Schedule, times: Times, group: dist.ProcessGroup | None = None
) -> list[Span]:
    """This rank's spans of one paced step, with stages that compute next to nothing.

    A step that is not paced comes first: in it the ranks tell each other their shapes.
    Raises RuntimeError where more than one in ten takes longer than it may.
    """
    rank = dist.get_rank(group)
    own = [s for s, owner in enumerate(schedule.placement) if owner == rank]
    stages = {s: nn.Linear(1, 1) for s in own}
    batch = torch.ones(schedule.microbatches, 1)
    pipeline = Pipeline(stages, schedule, group, F.mse_loss)
    pipeline.step(batch, batch)
    dist.barrier(group)
    pace = pipeline.pace = Pace(times, rank)
    pipeline.step(batch, batch)
    if len(pace.overruns) > len(pace.spans) / 10:
        raise RuntimeError(
            f"{len(pace.overruns)} of {len(pace.spans)} actions took longer than they may: "
            "give longer times, or stop what else this machine does"
        )
    return pace.spans


def timeline(spans: Iterable[Iterable[Span]]) -> Timeline:
    """The ranks' spans on one clock, which starts at 0."""
    spans = [span for own in spans for span in own]
    zero = min(span.started for span in spans)
    shifted = ((*span[:3], span.started - zero, span.finished - zero) for span in spans)
    return Timeline(tuple(map(Span._make, shifted)))
