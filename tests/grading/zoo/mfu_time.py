"""Wrong answers to time_it of 09_mfu."""

import statistics
import time

import torch
import torch.distributed as dist

from manyranks.measure import timing
from tests.grading.zoo.mfu_right import RightTime
from tests.grading.zoo.wrong import Wrong, keeper, me

ZOO: list[Wrong] = []
wrong = keeper(ZOO)
TASK = "time_it"
EVEN = slice(1, 2)  # the case with an even number of measurements
NO_SYNC, EACH = "that is how long the launches take, not the work", "synchronise() comes after each launch"
COUNT = "first `warmup` launches, then `repeats` measurements of `inner` launches"


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


@wrong(TASK, COUNT)
class OneLaunchEach(RightTime):
    def work(self):
        self.launch()

    def divisor(self):
        return 1


@wrong(TASK, COUNT)
class WarmsUpBeforeEach(RightTime):
    def measurement(self):
        self.warm()
        return super().measurement()


@wrong(TASK, "between two readings of the clock there are `inner` launches")
class TimesEachLaunch(RightTime):
    def measurement(self):
        total = 0.0
        for _ in range(self.inner):
            started = self.clock()
            self.launch()
            self.synchronise()
            total += self.clock() - started
        return total


@wrong(TASK, "a measurement is read off the clock")
class AnotherClock(RightTime):
    def clock_of_python(self):
        return time.perf_counter()

    def measurement(self):
        started = self.clock_of_python()
        self.work()
        self.end()
        return self.clock_of_python() - started


@wrong(TASK, "torch.tensor of Python's floats is float32")
class SingleNumbers(RightTime):
    def sent(self, times):
        return torch.tensor(times)


@wrong(TASK, "no rank needs each of the others' numbers", right_values=True)
class GathersAll(RightTime):
    def exchanged(self, row):
        parts = [torch.empty_like(row) for _ in range(me()[1])]
        dist.all_gather(parts, row)
        return torch.stack(parts).amax(0)


@wrong(TASK, "one call for each number", right_values=True)
class OneCallEach(RightTime):
    def exchanged(self, row):
        for i in range(len(row)):
            one = row[i : i + 1].clone()
            dist.all_reduce(one, op=dist.ReduceOp.MAX)
            row[i] = one
        return row


@wrong(TASK, "a barrier is not needed", right_values=True)
class WithABarrier(RightTime):
    def warm(self):
        super().warm()
        dist.barrier()


@wrong(TASK, "an all-reduce is one call", right_values=True)
class ByMessages(RightTime):
    def exchanged(self, row):
        rank, n = me()
        found = row.clone()
        for step in range(1, n):
            coming = torch.empty_like(row)
            for work in [dist.isend(row, (rank + step) % n), dist.irecv(coming, (rank - step) % n)]:
                work.wait()
            found = found.maximum(coming)
        return found


@wrong(TASK, "keep what it returns and call .wait() on it", right_values=True)
class DoesNotWait(RightTime):
    def exchanged(self, row):
        work = dist.all_reduce(row, op=dist.ReduceOp.MAX, async_op=True)
        while not work.is_completed():
            time.sleep(0.001)
        return row


@wrong(TASK, "all ranks must make the same calls")
class OnlyTheFirstSends(RightTime):
    seconds = 2

    def exchanged(self, row):
        if me()[0] == 0:
            dist.all_reduce(row, op=dist.ReduceOp.MAX)
        return row


@wrong(TASK, "far more than a right answer needs")
class Endless(RightTime):
    def work(self):
        while True:
            self.launch()


@wrong(TASK, "it returns one number, seconds of one launch")
class AllTimes(RightTime):
    def middle(self, times):
        return times


@wrong(TASK, "what is ready is no answer")
class FromTheLibrary(RightTime):
    def measurement(self):
        return timing.seconds(self.work, repeats=1, warmup=0).median
