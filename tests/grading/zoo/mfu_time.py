"""Wrong answers to time_it of 09_mfu: what is timed, and what is made of it."""

import statistics

import torch.distributed as dist

from tests.grading.zoo.mfu_right_ranks import RightTime
from tests.grading.zoo.wrong import Wrong, keeper, me

ZOO: list[Wrong] = []
wrong = keeper(ZOO)
TASK = "time_it"
EVEN = slice(1, 2)  # the case with an even number of measurements
NO_SYNC, EACH = "that is how long the launches take, not the work", "synchronise() comes after each launch"


@wrong(TASK, NO_SYNC)
class NeverSynchronises(RightTime):
    def end(self):
        pass


@wrong(TASK, NO_SYNC)
class ClockFirst(RightTime):
    """Reads the clock, and waits afterwards."""

    def measurement(self):
        started = self.clock()
        self.work()
        seconds = self.clock() - started
        self.synchronise()
        return seconds


@wrong(TASK, NO_SYNC)
class OnlyBefore(RightTime):
    def measurement(self):
        self.synchronise()
        started = self.clock()
        self.work()
        return self.clock() - started


@wrong(TASK, NO_SYNC)
class OnceAtTheEnd(RightTime):
    def times(self):
        found = super().times()
        self.synchronise()
        return found

    def end(self):
        pass


@wrong(TASK, EACH)
class AfterEachLaunch(RightTime):
    def work(self):
        for _ in range(self.inner):
            self.launch()
            self.synchronise()

    def end(self):
        pass


@wrong(TASK, EACH)
class AfterEachLaunchToo(RightTime):
    def work(self):
        for _ in range(self.inner):
            self.launch()
            self.synchronise()


@wrong(TASK, "the first launches are timed, too")
class NoWarmup(RightTime):
    def warm(self):
        self.synchronise()


@wrong(TASK, "the clock is read while the device is still busy with what came before")
class BusyAtTheBegin(RightTime):
    """What is under way is in the first measurement."""

    def warm(self):
        for _ in range(self.warmup):
            self.launch()


@wrong(TASK, "that is the mean: one hiccup spoils it")
class Mean(RightTime):
    def middle(self, times):
        return statistics.mean(times)


@wrong(TASK, "that is the mean: one hiccup spoils it")
class MeanOfAll(RightTime):
    """One measurement of everything."""

    def times(self):
        return [statistics.mean(super().times())] * self.repeats


@wrong(TASK, "that is the shortest measurement")
class Least(RightTime):
    def middle(self, times):
        return min(times)


@wrong(TASK, "that is the longest measurement")
class Most(RightTime):
    def middle(self, times):
        return max(times)


@wrong(TASK, "torch.median of an even number of values is the lower of the middle two")
class TorchMedian(RightTime):
    cases = EVEN

    def of_job(self, times):
        return self.exchanged(self.sent(times)).median()


@wrong(TASK, "that is this rank's own time")
class OwnTime(RightTime):
    def exchanged(self, row):
        return row


@wrong(TASK, "that is the largest of the ranks' medians")
class LargestOfMedians(RightTime):
    def of_job(self, times):
        return self.exchanged(self.sent([statistics.median(times)])).item()


@wrong(TASK, "that is a mean over ranks")
class MeanOfRanks(RightTime):
    def op(self):
        return dist.ReduceOp.AVG

    def exchanged(self, row):
        dist.all_reduce(row)
        return row / me()[1]


@wrong(TASK, "that is the fastest rank in each measurement")
class Fastest(RightTime):
    def op(self):
        return dist.ReduceOp.MIN


@wrong(TASK, "a measurement has `inner` launches: divide its seconds by that")
class NotDivided(RightTime):
    def divisor(self):
        return 1


@wrong(TASK, "a measurement is divided by the number of measurements")
class DividedByRepeats(RightTime):
    def divisor(self):
        return self.repeats


@wrong(TASK, "each measurement begins with a reading of the clock of its own")
class FromTheFirstReading(RightTime):
    def times(self):
        self.first = self.clock()
        return super().times()

    def measurement(self):
        self.work()
        self.end()
        return self.clock() - self.first


@wrong(TASK, "that is the sum of the measurements")
class Total(RightTime):
    def middle(self, times):
        return sum(times)


@wrong(TASK, "that is the upper one of the middle two")
class UpperMedian(RightTime):
    cases = EVEN

    def middle(self, times):
        return sorted(times)[len(times) // 2]


@wrong(TASK, "sort them first")
class NotSorted(RightTime):
    def middle(self, times):
        return times[len(times) // 2]


@wrong(TASK, "those are one rank's measurements")
class OfTheFirstRank(RightTime):
    def exchanged(self, row):
        dist.broadcast(row, 0)
        return row


@wrong(TASK, "that adds the ranks' measurements")
class SumOfRanks(RightTime):
    def exchanged(self, row):
        dist.all_reduce(row)
        return row
