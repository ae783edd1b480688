"""Wrong answers to the last task of 03_zero: when units are gathered and freed."""

from manyranks.grade.zero import driver
from tests.grading.zoo.wrong import Wrong, keeper, me
from tests.grading.zoo.zero_right import RightSchedule

ZOO: list[Wrong] = []
wrong = keeper(ZOO)
TASK = "Prefetch"


@wrong(TASK, "before_forward(k) starts unit k + 1, too", right_values=True)
class OneAtATime(RightSchedule):
    """What was given, but for the last unit."""

    def before_forward(self, k):
        self.gather(k)

    def before_backward(self, k):
        self.gather(k)


@wrong(TASK, "in backward the next layer is k − 1", right_values=True)
class PrefetchesInForwardOnly(RightSchedule):
    def before_backward(self, k):
        self.gather(k)


@wrong(TASK, "before_forward(k) starts unit k + 1, too", right_values=True)
class PrefetchesInBackwardOnly(RightSchedule):
    def before_forward(self, k):
        self.gather(k)


@wrong(TASK, "two at a time: the one that computes and the next one", right_values=True)
class PrefetchesTwo(RightSchedule):
    def before_forward(self, k):
        super().before_forward(k)
        if k + 2 <= self.last:
            self.units[k + 2].start()


@wrong(TASK, "two at a time: the one that computes and the next one", right_values=True)
class PrefetchesTwoInBackward(RightSchedule):
    def before_backward(self, k):
        super().before_backward(k)
        if k > 1:
            self.units[k - 2].start()


@wrong(TASK, "two at a time: the one that computes and the next one", right_values=True)
class GathersAllAtTheStart(RightSchedule):
    def before_forward(self, k):
        if k == 0:
            for unit in self.units:
                unit.start()
        self.units[k].wait()


@wrong(TASK, "the last unit stays whole between forward and backward", right_values=True)
class DropsTheLast(RightSchedule):
    def after_forward(self, k):
        self.units[k].free()


@wrong(TASK, "now it could come while layer 0 computes", right_values=True)
class WaitsForTheNext(RightSchedule):
    def before_forward(self, k):
        super().before_forward(k)
        if k < self.last:
            self.units[k + 1].wait()


@wrong(TASK, "unit 1 is not on its way", right_values=True)
class StartsTheNextTooLate(RightSchedule):
    """After the layer has computed."""

    def before_forward(self, k):
        self.gather(k)

    def after_forward(self, k):
        super().after_forward(k)
        if k < self.last:
            self.units[k + 1].start()


@wrong(TASK, "a layer computed while its parameters were not there")
class NeverWaits(RightSchedule):
    def gather(self, k):
        self.units[k].start()


@wrong(TASK, "two at a time: the one that computes and the next one", right_values=True)
class FreesTheNext(RightSchedule):
    def after_forward(self, k):
        if k < self.last:
            self.units[k + 1].free()


@wrong(TASK, "a layer computed while its parameters were not there")
class GathersInForwardOnly(RightSchedule):
    def before_backward(self, k):
        pass


@wrong(TASK, "two at a time: the one that computes and the next one")
class NeverFrees(RightSchedule):
    def after_forward(self, k):
        pass

    def after_backward(self, k):
        self.units[k].reduce()


@wrong(TASK, "two at a time: the one that computes and the next one", right_values=True)
class FreesAfterBackwardOnly(RightSchedule):
    def after_forward(self, k):
        pass


@wrong(TASK, "free it before")
class NeverFreesTheFirst(RightSchedule):
    """Unit 0 stays: the next forward computes with the old ones."""

    def after_backward(self, k):
        self.units[k].reduce()
        if k:
            self.units[k].free()


@wrong(TASK, "after_backward(k) calls reduce() of unit k")
class NeverReduces(RightSchedule):
    def after_backward(self, k):
        self.units[k].free()


@wrong(TASK, "every gradient was sent twice", right_values=True)
class ReducesTwice(RightSchedule):
    def after_backward(self, k):
        self.units[k].free()
        self.units[k].reduce()
        grads = [s.grad for s in self.units[k].shards]
        self.units[k].reduce()
        for s, grad in zip(self.units[k].shards, grads, strict=True):
            s.grad = grad


@wrong(TASK, "list index out of range")
class GoesPastTheEnd(RightSchedule):
    def before_forward(self, k):
        self.gather(k)
        self.units[k + 1].start()


@wrong(TASK, "units[-1] is the last unit")
class WrapsAround(RightSchedule):
    """units[k - 1] of unit 0 is the last one: it is started for nothing, and never freed."""

    def before_backward(self, k):
        self.gather(k)
        self.units[k - 1].start()


@wrong(TASK, "in backward the next layer is k − 1")
class PrefetchesForwardsInBackward(RightSchedule):
    def before_backward(self, k):
        self.before_forward(k)


@wrong(TASK, "start() and wait() for unit k before layer k computes")
class DoesNothing(RightSchedule):
    def before_forward(self, k):
        pass

    before_backward = after_forward = after_backward = before_forward


@wrong(TASK, "which has no after_backward()")
class HasThreeMethods:
    def __init__(self, units):
        pass

    def before_forward(self, k):
        pass

    after_forward = before_backward = before_forward


@wrong(TASK, "the driver calls schedule.before_forward(k)")
class TakesAFlag(RightSchedule):
    def before_forward(self, k, backward):
        pass


@wrong(TASK, "units[-1] is the last unit")
class WrapsAroundAndWaitsOnly(RightSchedule):
    """As the solution, which does not start the last unit again in backward."""

    def before_backward(self, k):
        self.units[k].wait()
        self.units[k - 1].start()


@wrong(TASK, "in backward the next layer is k − 1")
class StartsTheOneAfterInBackward(RightSchedule):
    def before_backward(self, k):
        self.gather(k)
        if k < self.last:
            self.units[k + 1].start()


@wrong(TASK, "in forward, unit 6 is still there from before")
class KeepsTheLastForGood(RightSchedule):
    def after_backward(self, k):
        self.units[k].reduce()
        if k < self.last:
            self.units[k].free()


@wrong(TASK, "does the schedule do something on one rank only?")
class RankZeroDoesNotPrefetch(RightSchedule):
    def before_forward(self, k):
        self.gather(k)
        if k < self.last and me()[0]:
            self.units[k + 1].start()

    def before_backward(self, k):
        self.gather(k)
        if k > 0 and me()[0]:
            self.units[k - 1].start()


@wrong(TASK, "before_forward(k) starts unit k + 1, too", right_values=True)
class WhatWasGiven(driver.OneAtATime):
    pass
