"""Divides the time of a step on one rank into five parts that together are the step."""

from collections.abc import Iterable
from typing import NamedTuple

from manyranks.measure.kinds import COMMUNICATION, MATMUL, OTHER
from manyranks.measure.profile import Profile
from manyranks.timeline.intervals import outside, total, within


class Wait(NamedTuple):
    """Holds one wait of the main thread, and when the last rank had come to that call: seconds of one clock."""

    started: float
    finished: float
    arrived: float


class Budget(NamedTuple):
    """Holds the seconds of one rank.

    matmul, other: its operators
    communication: it waits for bytes that are on their way
    waiting: it waits for a rank that hasn't come to the call yet
    python: neither, so interpreter, dispatcher and autograd's engine

    On an accelerator matmul and other are its kernels, python is when it has nothing to do, and waiting is part of
    communication: the kernel of a collective runs while it waits.
    """

    matmul: float
    other: float
    communication: float
    waiting: float
    python: float

    @property
    def seconds(self) -> float:
        return sum(self)

    @property
    def shares(self) -> "Budget":
        """Returns each part as a share of the whole; 0 each where that is no time."""
        whole = self.seconds or 1.0
        return Budget(*(part / whole for part in self))


def budget(profile: Profile, waits: Iterable[Wait] = ()) -> Budget:
    """Divides a profiled run into its parts.

    waits: of the same thread, on the same clock; an operator meanwhile keeps its time
    """
    here, waits = (profile.started, profile.finished), list(waits)
    busy = [(span.started, span.finished) for span in profile.spans]
    waited = [(wait.started, wait.finished) for wait in waits]
    absent = [(wait.started, min(wait.finished, wait.arrived)) for wait in waits]
    kinds = MATMUL, OTHER, COMMUNICATION
    seconds = {kind: sum(span.finished - span.started for span in profile.spans if span.kind == kind) for kind in kinds}
    # Each part has its own intervals: what the others leave might come out below 0.
    waiting = total(within(absent, outside(busy, *here)))
    communication = total(within(waited, outside([*busy, *absent], *here)))
    python = total(outside([*busy, *waited], *here))
    communication += seconds[COMMUNICATION]
    return Budget(seconds[MATMUL], seconds[OTHER], communication, waiting, python)
