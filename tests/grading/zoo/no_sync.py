"""Wrong answers to the sixth task of 02_data_parallel: gradients that accumulate without communication."""

from contextlib import contextmanager, nullcontext, suppress

import torch

from tests.grading.zoo.gradients import Right
from tests.grading.zoo.wrong import Wrong, keeper, me

ZOO: list[Wrong] = []
wrong = keeper(ZOO)


def without_finally(self):
    self.syncs = False
    yield
    self.syncs = True


@wrong("no_sync", "not written yet")
class WritesNothing(Right):
    @contextmanager
    def no_sync(self):
        raise NotImplementedError  # your code here


@wrong("no_sync", "an all-reduce inside no_sync()")
class SyncsAllTheSame(Right):
    @contextmanager
    def no_sync(self):
        yield


@wrong("no_sync", "an exception inside no_sync() must not leave it switched on", right_values=True, cases=slice(None))
class UsesNoFinally(Right):
    no_sync = contextmanager(without_finally)


@wrong("no_sync", "after no_sync(), switch this on again", right_values=True)
class NeverSwitchesBackOn(Right):
    @contextmanager
    def no_sync(self):
        self.syncs = False
        yield


@wrong("no_sync", "only the last micro-batch counts")
class DropsWhatAccumulated(Right):
    @contextmanager
    def no_sync(self):
        self.syncs = False
        try:
            yield
        finally:
            self.syncs = True
            self.module.zero_grad()


@wrong("no_sync", "the sum over the micro-batches is asked for, not their mean")
class AveragesMicroBatches(Right):
    def row(self, k):
        return super().row(k) / 3


@wrong("no_sync", "only the last micro-batch")
class SendsTheLastMicroBatchOnly(Right):
    def hook(self):
        self.latest = {}
        for parameter in self.bucket_of:
            parameter.register_hook(lambda grad, parameter=parameter: self.latest.__setitem__(parameter, grad.clone()))
        super().hook()

    def row(self, k):
        super().row(k)
        there = [self.latest.pop(p, torch.zeros_like(p)) for p in self.buckets[k]]
        return torch.cat([grad.flatten() for grad in there]) / me()[1]

    @contextmanager
    def no_sync(self):
        with super().no_sync():
            yield
        self.latest.clear()


@wrong("no_sync", "what only an earlier micro-batch used has a gradient from inside no_sync(): it must travel, too")
class SendsOnlyWhatTheLastBackwardMade(Right):
    """A parameter that only the first micro-batch used keeps its own gradient."""

    def reset(self):
        super().reset()
        self.seen = set()

    def arrived(self, parameter):
        if self.syncs:
            self.seen.add(parameter)
        super().arrived(parameter)

    def row(self, k):
        super().row(k)
        there = [p.grad if p in self.seen else torch.zeros_like(p) for p in self.buckets[k]]
        return torch.cat([grad.flatten() for grad in there]) / me()[1]


@wrong("no_sync", "what arrives inside no_sync() is not counted")
class CountsInside(Right):
    def arrived(self, parameter):
        self.missing[self.bucket_of[parameter]] -= 1
        while self.syncs and (k := len(self.underway)) < len(self.buckets) and self.missing[k] <= 0:
            self.send(k)


@wrong("no_sync", "what arrives inside no_sync() is not counted, and leaves gradients that are not None")
class LooksForNone(Right):
    """As the chapter's first wrapper does: what has accumulated looks like what has just arrived."""

    def arrived(self, parameter):
        while self.syncs and (k := len(self.underway)) < len(self.buckets) and self.there(k):
            self.send(k)

    def there(self, k):
        return all(p.grad is not None for p in self.buckets[k])


@wrong("no_sync", "an all-reduce inside no_sync()")
class SendsAtItsEnd(Right):
    @contextmanager
    def no_sync(self):
        with super().no_sync():
            yield
        while len(self.underway) < len(self.buckets):
            self.send(len(self.underway))


@wrong("no_sync", "has no no_sync()")
class HasNone(torch.nn.Module):
    def __init__(self, module, first_bytes, cap_bytes):
        super().__init__()
        self.inner = [Right(module, first_bytes, cap_bytes)]

    def forward(self, *args, **kwargs):
        return self.inner[0](*args, **kwargs)

    def finish(self):
        self.inner[0].finish()


@wrong("no_sync", "put @contextmanager above it")
class IsNoContextManager(Right):
    no_sync = without_finally


@wrong("no_sync", "put @contextmanager above it")
class OnlySwitchesOff(Right):
    def no_sync(self):
        self.syncs = False


@wrong("no_sync", "inside no_sync() backward must still make gradients")
class UsesNoGrad(Right):
    def no_sync(self):
        return torch.no_grad()


@wrong("no_sync", "an all-reduce inside no_sync()")
class UsesNullcontext(Right):
    def no_sync(self):
        return nullcontext()


@wrong("no_sync", "start the all-reduce in the hook", right_values=True)
class SendsInFinishOnly(Right):
    def arrived(self, parameter):
        pass


@wrong("no_sync", "no_sync() has swallowed an exception", cases=slice(None))
class CatchesTheException(Right):
    @contextmanager
    def no_sync(self):
        self.syncs = False
        with suppress(Exception):
            yield
        self.syncs = True


@wrong("no_sync", "no mean has been written into parameter.grad")
class FinishDoesNothingAfterwards(Right):
    """Each no_sync() switches the next finish() off."""

    def finish(self):
        if self.quiet:
            self.quiet = False
            self.reset()
        else:
            super().finish()

    def reset(self):
        super().reset()
        self.quiet = False

    def arrived(self, parameter):
        if not self.syncs:
            self.quiet = True
