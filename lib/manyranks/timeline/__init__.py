"""Floor 0: the value types that theory and measurement share, and the virtual clock. Standard library only."""

from manyranks.timeline.costs import Costs, Durations, Transfer
from manyranks.timeline.failures import Failure, History, Period, poisson, survive
from manyranks.timeline.program import Collective, Compute, Instruction, Program, Recv, Send, Wait, Work
from manyranks.timeline.replay import Deadlock, replay
from manyranks.timeline.spans import Span, Timeline

__all__ = [
    "Collective",
    "Compute",
    "Costs",
    "Deadlock",
    "Durations",
    "Failure",
    "History",
    "Instruction",
    "Period",
    "Program",
    "Recv",
    "Send",
    "Span",
    "Timeline",
    "Transfer",
    "Wait",
    "Work",
    "poisson",
    "replay",
    "survive",
]
