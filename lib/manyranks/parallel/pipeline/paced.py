"""Ranks that take as long as a schedule's clock says: they sleep.

    measured = timeline(world.run(paced, one_f_one_b(4, 8), times))
    measured = timeline(world.run(carried_out, whole, costs))

On a laptop eight ranks share a few cores: they compute in turn, and a timeline of real work
shows that. A paced action computes what it has to, then sleeps until its time is over. A
rank that sleeps needs no core, so any number of ranks take their time side by side, and
what remains is what a schedule is about: who waits for whom. Messages and waking up take
real time beside it, about a millisecond an action: with actions of 40 ms and more, one to
three percent of the step.
"""

import time
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain

import torch
import torch.distributed as dist
from torch import nn

from manyranks.parallel.pipeline.program import ActionWork, Times
from manyranks.parallel.pipeline.runtime import Pipeline
from manyranks.parallel.pipeline.schedules import Action, Pair, Schedule, singles
from manyranks.timeline import (
    Collective,
    Compute,
    Costs,
    Instruction,
    Program,
    Recv,
    Send,
    Span,
    Timeline,
    Wait,
)
from manyranks.timeline.spans import COMMUNICATION, COMPUTE


def paced(schedule: Schedule, times: Times) -> list[Span]:
    """Runs one step of a schedule on ranks that compute next to nothing, held to a Pace.

    schedule: for the ranks of the default group, all of which call this
    times: what each action takes

    A step that is not paced comes first: in it the ranks tell each other their shapes.
    Returns this rank's spans, see timeline(). Raises RuntimeError where more than one
    action in ten takes longer than it may.
    """
    stages = {s: nn.Linear(1, 1) for s in schedule.stages_of(dist.get_rank())}
    batch = torch.ones(schedule.microbatches, 1, device="cpu")
    pipeline = Pipeline(stages, schedule, loss=nn.functional.mse_loss)
    pipeline.step(batch, batch)
    dist.barrier()
    pace = pipeline.pace = Pace(times, dist.get_rank())
    pipeline.step(batch, batch)
    if len(pace.overruns) > len(pace.spans) / 10:
        raise RuntimeError(
            f"{len(pace.overruns)} of {len(pace.spans)} actions took longer than they may: "
            "give longer times, or stop what else this machine does"
        )
    return pace.spans


def carried_out(whole: Program, costs: Costs) -> list[Span]:
    """Runs a Program on real ranks that sleep as long as its instructions take.

    All ranks of the default group, gloo's, call it, one for each of the Program's. Messages
    are real and carry the time at which they were issued, so that who waits for whom is
    real, too; what they take on a wire is slept. Returns this rank's spans, see timeline().
    Raises ValueError for another number of ranks.
    """
    rank, n = dist.get_rank(), dist.get_world_size()
    if n != len(whole.ranks):
        raise ValueError(f"a Program of {len(whole.ranks)} ranks on {n}: start as many")
    all_ = list(chain.from_iterable(whole.ranks))
    kinds = dict.fromkeys(one.group for one in all_ if isinstance(one, Collective))
    groups = {ranks: dist.new_group(ranks) for ranks in kinds}
    tags = {one.tag: k for k, one in enumerate(all_) if type(one) in (Send, Recv)}
    dist.barrier()
    return _Rank(rank, costs, groups, tags).run(whole.ranks[rank])


class _Rank:
    """A rank's sleep.

    ends: when each channel is free again
    """

    def __init__(self, rank: int, costs: Costs, groups: dict, tags: dict[Hashable, int]):
        self.rank, self.costs, self.groups, self.tags = rank, costs, groups, tags
        self.spans: list[Span] = []
        self.under_way: dict[Hashable, tuple] = {}
        self.ends: dict[Hashable, float] = {}

    def run(self, instructions: Sequence[Instruction]) -> list[Span]:
        for one in instructions:
            if isinstance(one, Compute):
                started = time.perf_counter()
                _until(started + self.costs.compute(self.rank, one.work))
                self._note(COMPUTE, one.name, started, time.perf_counter())
            elif isinstance(one, Wait):
                self._finish(one.handle)
            else:
                self._start(one)
                if getattr(one, "handle", None) is None:
                    self._finish(None)
        for handle in list(self.under_way):
            self._finish(handle)
        return self.spans

    def _start(self, one: Collective | Send | Recv) -> None:
        self._finish(one.handle)  # whoever issues a handle again has no use for the old one
        if isinstance(one, Collective):
            now = _stamps(len(one.group), time.perf_counter())
            stamps, group = torch.empty_like(now), self.groups[one.group]
            work = dist.all_to_all_single(stamps, now, group=group, async_op=True)
            cost = self.costs.collective(one.op, one.bytes, one.group)
            what = one.name or one.op, one.group
        elif isinstance(one, Send):
            cost = self.costs.message(self.rank, one.to, one.bytes)
            started = max(time.perf_counter(), self.ends.get(one.to, 0.0))
            self.ends[one.to] = started + cost.seconds
            stamps, what = _stamps(1, started), (f"to {one.to}", None)
            work = dist.isend(stamps, one.to, tag=self.tags[one.tag])
        else:
            cost = self.costs.message(one.source, self.rank, one.bytes)
            stamps, what = _stamps(1, 0.0), (f"from {one.source}", None)
            work = dist.irecv(stamps, one.source, tag=self.tags[one.tag])
        self.under_way[one.handle] = *what, work, stamps, cost.seconds

    def _finish(self, handle: Hashable) -> None:
        if handle not in self.under_way:
            return
        name, group, work, stamps, seconds = self.under_way.pop(handle)
        work.wait()
        started = max(*stamps.tolist(), self.ends.get(group, 0.0))
        if group:
            self.ends[group] = started + seconds
        _until(started + seconds)
        self._note(COMMUNICATION, name, started, started + seconds)

    def _note(self, kind: str, name: str, started: float, finished: float) -> None:
        self.spans.append(Span(self.rank, kind, name, started, finished))


def _until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.perf_counter()))


def _stamps(count: int, moment: float) -> torch.Tensor:
    return torch.full((count,), moment, dtype=torch.float64, device="cpu")


def timeline(spans: Iterable[Iterable[Span]]) -> Timeline:
    """The ranks' spans on one clock, which starts at 0."""
    spans = [span for own in spans for span in own]
    zero = min(span.started for span in spans)
    shifted = ((*span[:3], span.started - zero, span.finished - zero) for span in spans)
    return Timeline(tuple(map(Span._make, shifted)))


class Pace:
    """Holds each action to its duration, and notes when it ran: a Pipeline's pace.

    times: what replay charges for the same actions; the times of messages have no effect
    spans: of what was computed, in seconds of time.perf_counter, one clock for a machine's
        processes
    overruns: actions whose computing alone took longer than they may; with any, the
        durations are too short for this machine, and the bubble is not the schedule's
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
        """Notes one span per action. A Pair's share its time as they share its duration."""
        whole = sum(seconds for _, seconds in parts)
        for action, seconds in parts:
            end = start + taken * (seconds / whole if whole else 1 / len(parts))
            name = f"{action.kind}{action.microbatch}"
            self.spans.append(Span(self.rank, COMPUTE, name, start, end))
            start = end
