"""Wrong answers to time_it of 09_mfu: messages, order, and what is no answer."""

import time

import torch
import torch.distributed as dist

from manyranks.grade.mfu import timing as grader
from manyranks.measure import timing
from tests.grading.zoo.mfu_right_ranks import RightTime
from tests.grading.zoo.wrong import Wrong, keeper, me

ZOO: list[Wrong] = []
wrong = keeper(ZOO)
TASK = "time_it"
COUNT = "first `warmup` launches, then `repeats` measurements of `inner` launches"


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


@wrong(TASK, "in a measurement it comes once")
class SynchronisesAtTheBegin(RightTime):
    def work(self):
        self.synchronise()
        super().work()


@wrong(TASK, "what is ready is no answer")
class FromTheCheck(RightTime):
    def middle(self, times):
        return grader.cases(me()[1])[0].expected[0]["the time"].item()
