"""The task time_it: how long a launch takes on the job's slowest ranks, on devices whose work is asynchronous."""

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import ClassVar, NamedTuple

import torch
import torch.distributed as dist

from manyranks.grade.mfu import amounts
from manyranks.grade.mfu.amounts import SECONDS, Amounts, aspect
from manyranks.grade.mfu.device import BUSY, IDLE, LAUNCH, SYNCHRONISE, Device, Plan
from manyranks.grade.mfu.ready import own
from manyranks.grade.mfu.task import MfuTask
from manyranks.grade.mfu.traffic import one_message
from manyranks.grade.old.scripts import Scene, Tensors
from manyranks.grade.old.trial import Trial
from manyranks.grade.old.verdict import Aspect, Verdict

CALL = "time_it(launch, synchronise, clock, warmup, repeats, inner)"
_TIME, _LOG = "the time", "the log"
_UNIT = 2.0**-10  # seconds; sums of such times are exact
_PLACES = (0, 3, 1, 2)  # of the ranks: neither the first nor the last one of four is the fastest or the slowest
_NO_SYNC = (
    "that is how long the launches take, not the work: launch() returns at once. synchronise() before the clock is read at a "
    "measurement's end"
)
_EACH_LAUNCH = (
    "synchronise() comes after each launch: then the device waits for the host, and the host for the device, as they do "
    "nowhere in training. Once for each measurement, after its last launch"
)
_NO_WARMUP = "the first launches are timed, too: `warmup` of them come first, and are slower"
_MEAN = "that is the mean: one hiccup spoils it. The median of the measurements"
_LEAST = "that is the shortest measurement: the median is asked for"
_MOST = "that is the longest measurement: the median is asked for"
_LOW_MEDIAN = "torch.median of an even number of values is the lower of the middle two: statistics.median, or their mean"
_HIGH_MEDIAN = "that is the upper one of the middle two: of an even number of values the median is their mean"
_ONE_RANK = "those are one rank's measurements: in each of them another rank may be the slowest"
_ORDERED = "that is the measurement in the middle as they came: sort them first, as statistics.median does"
_SUM = "that adds the ranks' measurements: an all-reduce adds unless op=dist.ReduceOp.MAX"
_TWO_SYNCS = "synchronise() is called once too often: in a measurement it comes once, between the last launch and the clock"
_OWN = "that is this rank's own time: the job is as fast as its slowest rank, in each measurement"
_OF_MEDIANS = (
    "that is the largest of the ranks' medians: measurement i takes as long as on its slowest rank. First the largest of each "
    "measurement, then the median"
)
_MEAN_OF_RANKS = "that is a mean over ranks: all wait for the slowest one"
_FASTEST = "that is the fastest rank in each measurement: all wait for the slowest one, op=dist.ReduceOp.MAX"
_NOT_DIVIDED = "a measurement has `inner` launches: divide its seconds by that"
_REPEATS = "a measurement is divided by the number of measurements: it has `inner` launches"
_FROM_START = "each measurement begins with a reading of the clock of its own, not at the first one's"
_TOTAL = "that is the sum of the measurements: their median is asked for"
_COUNT = "first `warmup` launches, then `repeats` measurements of `inner` launches"
_BUSY_BEGIN = (
    "the clock is read while the device is still busy with what came before, so a measurement has that in it, too: "
    "synchronise() before the first reading"
)
_BUSY_END = "the clock is read while the device still works: synchronise() first, then the clock"
_INSIDE = "synchronise() is called within a measurement: once, after its last launch"
_NO_CLOCK = "a measurement is read off the clock: clock() before its first launch, and after its synchronise()"
_SLICES = "between two readings of the clock there are `inner` launches: one measurement"
_MORE = "one number for each measurement, its seconds: in each of them another rank may be the slowest"
_UNEXPLAINED = (
    "warm up, synchronise; `repeats` times: clock, `inner` launches, synchronise, clock; the difference ÷ inner; the largest "
    "of all ranks, measurement by measurement; the median of these"
)


class Case(NamedTuple):
    """n ranks' devices, and how to time them."""

    n: int
    warmup: int
    repeats: int
    inner: int

    @property
    def note(self) -> str:
        return f"warmup={self.warmup}, repeats={self.repeats}, inner={self.inner}"

    @property
    def count(self) -> int:
        """Numbers that a rank sends."""
        return self.repeats

    def device(self, rank: int) -> Device:
        """A new one. Its first launches are slow, and it has a hiccup in a measurement of its own."""
        hiccup, place = (3 * rank + 1) % self.repeats, _PLACES[rank]

        def kernel(i: int) -> float:
            if i < self.warmup:
                return (40 + rank) * _UNIT
            measurement, turn = divmod(i - self.warmup, self.inner)
            slow = (180 + 20 * rank) * (measurement == hiccup and turn == self.inner // 2)
            return (6 + (22 * measurement + 50 * place + 40 * measurement * place) % 61 / 16 + slow) * _UNIT

        return Device(Plan(2 * _UNIT, _UNIT, 700 * _UNIT, 3.0 + rank, kernel))


Times = list[float]


class Rule(NamedTuple):
    """How a rank times; the defaults are right. each, end: whether synchronise comes after each launch, and after each
    measurement; divide: a measurement's seconds by the rest of the case; chained: whether all begin at the first reading.
    """

    warm: bool = True
    each: bool = False
    end: bool = True
    divide: Callable[[Case], float] = lambda case: case.inner
    chained: bool = False


RIGHT = Rule()


def measured(case: Case, rank: int, rule: Rule = RIGHT) -> Times:
    """Seconds of each measurement on this rank."""
    device, found = case.device(rank), []
    for _ in range(case.warmup * rule.warm):
        device.launch()
    device.synchronise()
    first = device.clock()
    for _ in range(case.repeats):
        started = first if rule.chained else device.clock()
        for _ in range(case.inner):
            device.launch()
            if rule.each:
                device.synchronise()
        if rule.end:
            device.synchronise()
        found.append((device.clock() - started) / rule.divide(case))
    return found


def _slowest(times: list[Times], choose: Callable = max) -> Times:
    """Measurement by measurement."""
    return [choose(each) for each in zip(*times, strict=True)]


def _alike(case: Case, rule: Rule) -> float:
    return statistics.median(_slowest([measured(case, rank, rule) for rank in range(case.n)]))


_RULES: list[tuple[str, Rule]] = [
    (_NO_SYNC, Rule(end=False)),
    (_EACH_LAUNCH, Rule(each=True)),
    (_EACH_LAUNCH, Rule(each=True, end=False)),
    (_NO_WARMUP, Rule(warm=False)),
    (_NOT_DIVIDED, Rule(divide=lambda case: 1)),
    (_REPEATS, Rule(divide=lambda case: case.repeats)),
    (_REPEATS, Rule(divide=lambda case: case.repeats * case.inner)),
    (_FROM_START, Rule(chained=True)),
]


def _wrong(case: Case) -> Iterator[tuple[str, list[Amounts]]]:
    """By how a rank times; then by what is made of the times, on one rank and on all."""
    for hint, rule in _RULES:
        yield hint, _all(case, _alike(case, rule))
        yield hint, [{_TIME: statistics.median(measured(case, rank, rule))} for rank in range(case.n)]
    times = [measured(case, rank) for rank in range(case.n)]
    slowest, medians = _slowest(times), [statistics.median(own) for own in times]
    yield _OWN, [{_TIME: one} for one in medians]
    for hint, of in (
        (_MEAN, statistics.mean),
        (_LEAST, min),
        (_MOST, max),
        (_TOTAL, sum),
    ):
        yield hint, _all(case, of(slowest))
        yield hint, _all(case, max(map(of, times)))
        yield hint, [{_TIME: of(own)} for own in times]
    if case.repeats % 2 == 0:
        yield _LOW_MEDIAN, _all(case, statistics.median_low(slowest))
        yield _HIGH_MEDIAN, _all(case, statistics.median_high(slowest))
    yield _ORDERED, _all(case, slowest[case.repeats // 2])
    yield _SUM, _all(case, statistics.median(_slowest(times, sum)))
    yield _OF_MEDIANS, _all(case, max(medians))
    for rank in {0, case.n - 1}:
        yield _ONE_RANK, _all(case, medians[rank])
    yield _MEAN_OF_RANKS, _all(case, statistics.mean(medians))
    yield _MEAN_OF_RANKS, _all(case, statistics.median(_slowest(times, statistics.mean)))
    yield _FASTEST, _all(case, statistics.median(_slowest(times, min)))
    yield _FASTEST, _all(case, min(medians))


def _all(case: Case, time: float) -> list[Amounts]:
    return [{_TIME: time}] * case.n


def _run(case: Case, function: Callable, watch) -> Tensors:
    device = case.device(dist.get_rank())
    with own():
        found = function(device.launch, device.synchronise, device.clock, case.warmup, case.repeats, case.inner)
    time = amounts.number(found, f"what {CALL} returned", "it returns one number, seconds of one launch")
    return {_TIME: time, _LOG: torch.tensor(device.log, dtype=torch.int64)}


@cache
def cases(n: int) -> list[Scene]:
    """An odd number of measurements, and an even one."""
    return [_scene(Case(n, 3, 9, 5)), _scene(Case(n, 2, 10, 3))]


def _scene(case: Case) -> Scene:
    right = [amounts.exact(own) for own in _all(case, _alike(case, RIGHT))]
    return Scene(case.n, partial(_run, case), right, lambda: amounts.mistakes(right, _wrong(case)), case, case.note)


def _order(task: "TimeIt", trial: Trial) -> Verdict:
    """Each rank launches, synchronises and reads the clock in the right order."""
    for rank, seen in enumerate(trial.answers):
        if verdict := _of_log(trial.case.must, seen.tensors[_LOG].tolist()):
            found, hint = verdict
            return Verdict(False, f"rank {rank} {found}", hint)
    return Verdict(True)


def _of_log(case: Case, log: list[int]) -> tuple[str, str] | None:
    """What is wrong with a rank's calls, and a hint."""
    launches, right = log.count(LAUNCH), case.warmup + case.repeats * case.inner
    if launches != right:
        return f"launched {launches} times; right is {right}", _NO_WARMUP if launches == right - case.warmup else _COUNT
    slices = _between_readings(log)
    if len(slices) < 2:
        return f"read the clock {len(slices)} times", _NO_CLOCK
    if BUSY in log:
        early = log[: log.index(BUSY)].count(LAUNCH) <= case.warmup
        return "read the clock while its device was busy", _BUSY_BEGIN if early else _BUSY_END
    timed = [part for part in slices[1:] if LAUNCH in part]
    while timed and sum(part.count(LAUNCH) for part in timed) > case.repeats * case.inner:
        timed.pop(0)  # a warm-up that is timed, too
    if [part.count(LAUNCH) for part in timed] != [case.inner] * case.repeats:
        return f"read the clock after {[part.count(LAUNCH) for part in timed]} launches", _SLICES
    if any(SYNCHRONISE in part[_first(part) : _last(part)] for part in timed):
        return "synchronised between a measurement's launches", _INSIDE
    if any(part.count(SYNCHRONISE) > 1 for part in timed):
        return "synchronised more than once in a measurement", _TWO_SYNCS
    return None


def _first(part: list[int]) -> int:
    return part.index(LAUNCH)


def _last(part: list[int]) -> int:
    return len(part) - part[::-1].index(LAUNCH)


def _between_readings(log: list[int]) -> list[list[int]]:
    """What was called before each reading of the clock, after the one before."""
    found: list[list[int]] = [[]]
    for entry in log:
        if entry in (IDLE, BUSY):
            found.append([])
        else:
            found[-1].append(entry)
    return found[:-1]


@dataclass(frozen=True)
class TimeIt(MfuTask):
    measured: ClassVar[str] = "the job's is"
    unexplained: ClassVar[str] = _UNEXPLAINED
    aspects: ClassVar[tuple[Aspect, ...]] = (
        aspect("the job's time for one launch is right, the same on all ranks", 0.5, (_TIME,), SECONDS),
        Aspect("warms up, synchronises and reads the clock in the right order", 0.3, _order, each_world=True),
        one_message("sends its measurements, once", 0.2, _MORE),
    )

    def otherwise(self, trial: Trial, name: str) -> str:
        """What was called may explain the time."""
        return _order(self, trial).hint
