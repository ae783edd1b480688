"""A training run under a trace of failures: what it keeps, what it loses, and how long it takes. Deterministic."""

import math
import random
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple


class Failure(NamedTuple):
    """Stops the whole job.

    seconds: since the start of the run
    node: which one failed; for display
    cause: for display
    """

    seconds: float
    node: int = 0
    cause: str = ""


class Period(NamedTuple):
    """A stretch of the job's time.

    kind: "work" (training that was kept), "lost" (training that had to be repeated), "save" (training stands still), "restart",
        or "wait" (no spare node)
    started, finished: seconds since the start of the run
    """

    kind: str
    started: float
    finished: float


class History(NamedTuple):
    """Holds what happened in a run, from its start until its work was done.

    periods: in order, without gaps
    failures: those that hit the job
    """

    periods: tuple[Period, ...]
    failures: tuple[Failure, ...]

    @property
    def seconds(self) -> float:
        """The seconds that the run took."""
        return self.periods[-1].finished

    @property
    def goodput(self) -> float:
        """Share of the time that went into training that was kept, between 0 and 1."""
        return self.of("work") / self.seconds

    def of(self, kind: str) -> float:
        """Adds up the seconds of all periods of a kind."""
        return math.fsum(period.finished - period.started for period in self.periods if period.kind == kind)


def poisson(mtbf: float, seconds: float, seed: int, nodes: int = 1) -> list[Failure]:
    """Draws failures at random: the gaps between them are exponential, and every node is as likely to fail as any other.

    mtbf: mean seconds between failures of the whole job
    seconds: length of the trace
    seed: the same one gives the same trace
    nodes: number to draw from
    Raises ValueError for numbers that aren't positive.
    """
    positive(mtbf=mtbf, seconds=seconds, nodes=nodes)
    draw, found = random.Random(seed), []
    now = draw.expovariate(1 / mtbf)
    while now < seconds:
        found.append(Failure(now, draw.randrange(nodes)))
        now += draw.expovariate(1 / mtbf)
    return found


def survive(
    failures: Sequence[Failure],
    work: float,
    interval: float,
    stall: float,
    restart: float,
    write: float = 0.0,
    spares: int | None = None,
    repair: float = 0.0,
) -> History:
    """Replays a training run under these failures.

    The job trains for `interval` seconds, stands still for `stall` seconds to save, and so on; it doesn't save at the very end.
    A failure throws away all training since the last checkpoint that can be used. After a restart, training goes on from there.
    A failure during a restart starts the restart again.

    failures: in order of time; those after the end of the run are ignored
    work: seconds of training to do
    interval: seconds of training from save to save
    stall: seconds that training stands still for a save
    restart: seconds from a failure until training goes on
    write: seconds after the stall until the checkpoint can be used; training runs meanwhile. 0 if the stall is all of the save
    spares: nodes that stand ready to replace failed ones; None for always enough
    repair: seconds that a failed node is away. If more nodes are away than there are spares, the job waits, then restarts
    Raises ValueError for a trace that isn't in order, numbers that make no sense, and a write longer than the interval.
    """
    positive(work=work, interval=interval)
    not_negative(stall=stall, restart=restart, write=write, repair=repair, spares=spares or 0)
    if write > interval:
        raise ValueError(f"write={write}, interval={interval}: a write must end before the next one begins; save less often")
    _ordered(failures)
    clock, done, usable = _Clock(failures), 0, 0.0  # checkpoint `done` can be used from `usable` on
    before = first = 0  # the first period after checkpoint done - 1, and after checkpoint done
    away: list[float] = []
    while done * interval < work:
        until = min(work, (done + 1) * interval)
        trained = clock.spend("work", until - done * interval)
        if trained and (until == work or clock.spend("save", stall)):
            done, usable = done + 1, clock.now + write
            before, first = first, len(clock.periods)
            continue
        if clock.now < usable:
            done, first = done - 1, before
        clock.lose(first)
        _recover(clock, restart, spares, repair, away)
        before, first, usable = len(clock.periods), len(clock.periods), clock.now
    return History(tuple(clock.periods), tuple(failures[: clock.failed]))


class _Clock:
    """Keeps the time, the periods so far, and how many failures have hit."""

    def __init__(self, failures: Sequence[Failure]):
        self.now, self.periods, self.failed, self._failures = 0.0, [], 0, failures

    def spend(self, kind: str, seconds: float) -> bool:
        """Lets the time pass until it's over or a failure hits, and says whether none did."""
        end = self.now + seconds
        hit = self.failed < len(self._failures) and self._failures[self.failed].seconds < end
        end = self._failures[self.failed].seconds if hit else end
        if end > self.now:
            self.periods.append(Period(kind, self.now, end))
        self.now = end
        if hit:
            self.failed += 1
        return not hit

    def lose(self, first: int) -> None:
        """Marks all training from this period on as lost."""
        for k in range(first, len(self.periods)):
            if self.periods[k].kind == "work":
                self.periods[k] = self.periods[k]._replace(kind="lost")


def _recover(clock: _Clock, restart: float, spares: int | None, repair: float, away: list[float]) -> None:
    """Goes from a failure to the end of a restart. away: when the repair of each node ends, in order."""
    recovered = False
    while not recovered:
        away[:] = [*(end for end in away if end > clock.now), clock.now + repair]
        missing = len(away) - spares if spares is not None else 0
        enough = missing <= 0 or clock.spend("wait", away[missing - 1] - clock.now)
        recovered = enough and clock.spend("restart", restart)


def positive(**numbers: float) -> None:
    """Raises ValueError for a number that isn't above 0 and finite, with its name."""
    for name, number in numbers.items():
        if not 0 < number < math.inf:
            raise ValueError(f"{name}={number}: give a number above 0")


def not_negative(**numbers: float) -> None:
    """Raises ValueError for a number that's below 0 or infinite, with its name."""
    for name, number in numbers.items():
        if not 0 <= number < math.inf:
            raise ValueError(f"{name}={number}: give 0 or more")


def _ordered(failures: Sequence[Failure]) -> None:
    for one, other in pairwise((Failure(0.0), *failures)):
        if other.seconds < one.seconds:
            raise ValueError(f"a failure at {other.seconds} s after one at {one.seconds} s: sort the trace, from 0 s on")
