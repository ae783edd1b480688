"""A device whose work is asynchronous, on a clock of its own: what a program reads there is the same each time."""

from collections.abc import Callable
from typing import NamedTuple

from manyranks.measure.journal import Stopped

LAUNCH, SYNCHRONISE, IDLE, BUSY = range(4)  # entries of the log; the last two are readings of the clock
_MOST = 4000
_ENDLESS = "far more than a right answer needs: does the loop end?"


class Plan(NamedTuple):
    """A rank's device. overhead: host's seconds for a launch; answer: for asking whether all is done; busy: seconds of
    work that is under way at the beginning; began: what the clock shows then; kernel: seconds of the i-th launch.
    """

    overhead: float
    answer: float
    busy: float
    began: float
    kernel: Callable[[int], float]


class Device:
    """log: what was called, in order."""

    def __init__(self, plan: Plan):
        self._plan, self._now, self._free = plan, plan.began, plan.began + plan.busy
        self._launched, self.log = 0, []

    def launch(self) -> None:
        """Queues one kernel, and returns before it runs."""
        self._note(LAUNCH)
        self._now += self._plan.overhead
        self._free = max(self._free, self._now) + self._plan.kernel(self._launched)
        self._launched += 1

    def synchronise(self) -> None:
        """Returns when nothing is queued any more."""
        self._note(SYNCHRONISE)
        self._now = max(self._now, self._free) + self._plan.answer

    def clock(self) -> float:
        """The host's time, in seconds."""
        self._note(BUSY if self._free > self._now else IDLE)
        return self._now

    def _note(self, what: int) -> None:
        self.log.append(what)
        if len(self.log) > _MOST:
            raise Stopped(f"launch, synchronise and clock were called more than {_MOST:,} times", _ENDLESS)
