"""More wrong answers to Overlapped and no_sync: what is not forgotten after a step, and hooks that get something else."""

import functools
from contextlib import contextmanager

import torch
import torch.distributed as dist

from tests.grading.zoo.gradients import Right, fill, hand_out
from tests.grading.zoo.wrong import Wrong, keeper, me

ZOO: list[Wrong] = []
wrong = keeper(ZOO)
TASK = "Overlapped"


@wrong(TASK, "gradient of embedding.weight was made; hint: two buckets can leave at once: while, not if", right_values=True)
class SendsOneBucketAHook(Right):
    """`if` where `while` is needed."""

    def arrived(self, parameter):
        self.missing[self.bucket_of[parameter]] -= 1
        if (k := len(self.underway)) < len(self.buckets) and self.missing[k] == 0:
            self.send(k)


class KeepsArrivals(Right):
    """A set of what has arrived, of all steps."""

    def hook(self):
        self.seen = set()
        super().hook()

    def arrived(self, parameter):
        if self.syncs:
            self.seen.add(parameter)
        while self.syncs and (k := len(self.underway)) < len(self.buckets) and self.seen.issuperset(self.buckets[k]):
            self.send(k)


wrong(TASK, "without second.weight; hint: step 1 was right: finish() must forget what it counted\n")(KeepsArrivals)
wrong("no_sync", "step 1 was right: finish() must forget what it counted")(KeepsArrivals)


@wrong(TASK, "step 1 was right: finish() must forget what it counted")
class CountsBelowZero(Right):
    """Counters that are never set again, of which all that are not positive count as full."""

    def reset(self):
        self.underway = []
        self.missing = getattr(self, "missing", None) or [len(bucket) for bucket in self.buckets]

    def arrived(self, parameter):
        self.missing[self.bucket_of[parameter]] -= 1
        while (k := len(self.underway)) < len(self.buckets) and not self.missing[k] > 0:
            self.send(k)


@wrong(TASK, "AttributeError in step 2: 'NoneType' object has no attribute 'copy_'; hint: only step 1 sent anything")
class KeepsRowsUnderWay(Right):
    def reset(self):
        self.missing = [len(bucket) for bucket in self.buckets]
        self.underway = getattr(self, "underway", [])


@wrong(TASK, "only step 1 sent anything: empty your lists in finish()")
class KeepsRowsUnderWayAndFillsGradients(KeepsRowsUnderWay):
    def collect(self):
        for bucket in self.buckets:
            fill(bucket)
        super().collect()


@wrong(TASK, "PyTorch calls hook(parameter)")
class HooksTakeNothing(Right):
    def hook(self):
        for parameter in self.bucket_of:
            parameter.register_post_accumulate_grad_hook(self.came)

    def came(self):
        pass


@wrong(TASK, "PyTorch calls hook(parameter)")
class HooksTakeLess(Right):
    def hook(self):
        for parameter in self.bucket_of:
            parameter.register_post_accumulate_grad_hook(functools.partial(self.arrived, parameter))


@wrong(TASK, "but 2 were given; hint: forgotten.py, line ")
class CallsItsOwnWrongly(Right):
    def arrived(self, parameter):
        self.came(parameter)

    def came(self):
        pass


@wrong(TASK, "the training loop calls model.finish()")
class FinishTakesMore(Right):
    def finish(self, optimizer):
        pass


@wrong(TASK, "a lambda in a loop sees its last value: use functools.partial", right_values=True)
class HooksSeeTheLast(Right):
    def hook(self):
        for parameter in self.bucket_of:
            parameter.register_post_accumulate_grad_hook(lambda _: self.arrived(parameter))


@wrong(TASK, "finish() ran inside backward; hint: the training loop calls finish(), after backward")
class FinishesInTheHook(Right):
    def arrived(self, parameter):
        super().arrived(parameter)
        if len(self.underway) == len(self.buckets):
            self.finish()


@wrong(TASK, "frozen parameters get no gradient and no hook: ask parameter.requires_grad; forgotten.py, line ")
class HooksTheFrozen(Right):
    def hook(self):
        for parameter in self.module.parameters():
            parameter.register_post_accumulate_grad_hook(self.arrived)


@wrong(TASK, "finish() leaves no gradients: write the means into parameter.grad")
class FinishEndsWithNone(Right):
    def finish(self):
        super().finish()
        self.module.zero_grad()


class ReusesRows(Right):
    """One row a bucket, into which nothing is written where the gradient is None."""

    divides_first = True

    def start(self, module):
        super().start(module)
        self.rows = {}

    def row(self, k):
        size = sum(p.numel() for p in self.buckets[k])
        row = self.rows.setdefault(k, torch.zeros(size, dtype=torch.float64))
        for parameter, part in zip(self.buckets[k], row.split([p.numel() for p in self.buckets[k]]), strict=True):
            if parameter.grad is not None:
                part.copy_(parameter.grad.flatten() / (me()[1] if self.divides_first else 1))
        return row

    def collect(self):
        for bucket, (row, work) in zip(self.buckets, self.underway, strict=True):
            work.wait()
            fill(bucket)
            hand_out(bucket, row if self.divides_first else row.div_(me()[1]))


class ReusesRowsOfSums(ReusesRows):
    divides_first = False


for stale in (ReusesRows, ReusesRowsOfSums):
    wrong(TASK, "where the gradient is None, the row still has what a step before left there: write zeros into it")(stale)


@wrong(TASK, "that is divided by N twice: ReduceOp.AVG divides, too")
class AveragesAndDivides(Right):
    def send(self, k):
        row = self.row(k)
        self.underway.append((row, dist.all_reduce(row, op=dist.ReduceOp.AVG, async_op=True)))


@wrong(TASK, "unexpected keyword argument 'asynchronous'; hint: forgotten.py, line ")
class SaysAsynchronous(Right):
    def send(self, k):
        row = self.row(k)
        self.underway.append((row, dist.all_reduce(row, asynchronous=True)))


@wrong(TASK, "dist.all_reduce returns something to wait for with async_op=True only")
class ForgetsAsyncOp(Right):
    def send(self, k):
        row = self.row(k)
        self.underway.append((row, dist.all_reduce(row)))


wrong(TASK, "DistributedDataParallel is not allowed; hint: write it yourself")(torch.nn.parallel.DistributedDataParallel)


@wrong("no_sync", "no_sync() has to `yield`, where what stands inside is to run")
class YieldsOnlySometimes(Right):
    @contextmanager
    def no_sync(self):
        self.syncs = False
        if self.syncs:
            yield


@wrong("no_sync", "no_sync() has to `yield`, where what stands inside is to run")
class NeverYields(Right):
    @contextmanager
    def no_sync(self):
        self.syncs = False


@wrong("no_sync", "no_sync() has to `yield` once, and no more")
class YieldsTwice(Right):
    @contextmanager
    def no_sync(self):
        self.syncs = False
        yield
        self.syncs = True
        yield


@wrong("no_sync", "the training loop calls model.no_sync()")
class NoSyncTakesMore(Right):
    @contextmanager
    def no_sync(self, steps):
        yield
