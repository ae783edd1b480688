"""A schedule in time, on the virtual clock.

times = Times(F=0.02, I=0.02, W=0.02)
replayed = replay(program(one_f_one_b(4, 8)), times)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from manyranks.parallel.pipeline.schedules import (
    BACKWARD,
    FORWARD,
    Message,
    Schedule,
    singles,
)
from manyranks.parallel.pipeline.verify import held
from manyranks.timeline import (
    Compute,
    Instruction,
    Program,
    Recv,
    Send,
    Timeline,
    Transfer,
)
from manyranks.timeline.spans import COMPUTE


class ActionWork(NamedTuple):
    """The work that an action is charged by.

    paired: it is half of a Pair
    """

    kind: str
    stage: int
    paired: bool = False


@dataclass(frozen=True)
class Times:
    """Costs of a schedule's program in seconds.

    F, I, W, B: one number, or one a stage
    B: I + W where it is None
    pair: what a Pair takes, as a share of its F and B one after the other
    latency, bandwidth: of a message between two ranks, in seconds and bytes/s
    """

    F: float | Sequence[float] = 1.0
    I: float | Sequence[float] = 1.0  # noqa: E741 the field's name of it
    W: float | Sequence[float] = 1.0
    B: float | Sequence[float] | None = None
    pair: float = 1.0
    latency: float = 0.0
    bandwidth: float = inf

    def compute(self, rank: int, work: ActionWork) -> float:
        kind, stage, paired = work
        if kind == BACKWARD and self.B is None:
            seconds = _at(self.I, stage) + _at(self.W, stage)
        else:
            seconds = _at(getattr(self, kind), stage)
        return seconds * self.pair if paired else seconds

    def message(self, source: int, destination: int, bytes: float) -> Transfer:
        return Transfer(self.latency, bytes, (((source, destination), self.bandwidth),))

    def collective(self, op: str, bytes: float, ranks: tuple[int, ...]) -> Transfer:
        raise ValueError(f"{op}: a pipeline schedule has no collectives")


def program(schedule: Schedule, bytes: float = 0) -> Program:
    """Returns what each rank of a verified schedule computes and sends.

    bytes: of a message

    A rank waits for its inputs, computes ("F3" is micro-batch 3), sends its output and goes
    on. Both halves of a Pair wait for the inputs of both, and both outputs leave when both
    are over. A message has no micro-batch: each lane's arrive as they are sent, in order.
    """
    ranks = range(len(schedule.ranks))
    return Program(tuple(_instructions(schedule, rank, bytes) for rank in ranks))


def bubble(timeline: Timeline) -> float:
    """Seconds: the longest span of a rank, last end − first start, less the longest work.

    The zero of the zero-bubble schedules is this one's. The makespan, which also counts how
    much later one rank starts than another, stays above it; Timeline.bubble is its share.
    """
    spans = [timeline.of(rank, COMPUTE) for rank in timeline.ranks]
    spans = [max(s.finished for s in own) - own[0].started for own in spans if own]
    return max(spans, default=0.0) - max(map(timeline.busy, timeline.ranks), default=0.0)


def in_flight(schedule: Schedule, timeline: Timeline, rank: int) -> list[tuple[float, int]]:
    """Counts the activations that a rank holds over time: (since when, how many), in order.

    timeline: of the schedule's program, or measured with the same actions in the same
    order. An activation comes when its F starts and goes when its B or W ends. Raises
    ValueError where the timeline has another number of actions, as one that takes no time
    is not in it.
    """
    actions, spans = schedule.actions(rank), timeline.of(rank, COMPUTE)
    if len(actions) != len(spans):
        raise ValueError(
            f"rank {rank} has {len(actions)} actions and {len(spans)} spans of compute; "
            "give every action more than 0 s, and the timeline of this schedule"
        )
    steps = [(0.0, 0)]
    for action, span, count in zip(actions, spans, held(schedule, rank), strict=True):
        if count != steps[-1][1]:
            steps.append((span.started if action.kind == FORWARD else span.finished, count))
    return steps


def _instructions(schedule: Schedule, rank: int, bytes: float) -> tuple[Instruction, ...]:
    instructions: list[Instruction] = []
    for item in schedule.ranks[rank]:
        actions = singles(item)
        for action in actions:
            message = schedule.uses(action)
            if message is not None and (source := schedule.sender(message)) != rank:
                instructions.append(Recv(source, bytes, _lane(message)))
        for kind, stage, i in actions:
            work = ActionWork(kind, stage, paired=len(actions) == 2)
            instructions.append(Compute(f"{kind}{i}", work))
        for action in actions:
            message = schedule.makes(action)
            if message is not None and (target := schedule.receiver(message)) != rank:
                lane = _lane(message)
                instructions.append(Send(target, bytes, tag=lane, handle=lane))
    return tuple(instructions)


def _lane(message: Message) -> tuple[str, int]:
    """All messages that a stage makes of a kind; they arrive in the order they're sent."""
    return message.kind, message.source


def _at(seconds: float | Sequence[float], stage: int) -> float:
    return seconds[stage] if isinstance(seconds, Sequence) else seconds
