"""Wrong answers to the task average of 10_nd_parallel: what is done with gradients."""

import torch
import torch.distributed as dist

from tests.grading.zoo.nd_right import RightAverage, groups_of
from tests.grading.zoo.wrong import Wrong, keeper

ZOO: list[Wrong] = []
wrong = keeper(ZOO)
TASK = "average"
OVER_ALL = "Only ranks that differ in dp and cp alone"
CP = 8  # ranks of the meshes with cp


@wrong(TASK, "by dist.new_group(ranks)")
def nothing(sizes, weights):
    """Leaves them as they were, and makes no group."""
    for weight in weights:
        dist.all_reduce(torch.zeros(weight.parameter.shape), group=None)


@wrong(TASK, "the gradients are as they were")
class Untouched(RightAverage):
    def put(self, grads, flat):
        pass

    def divisor(self):
        return 1


@wrong(TASK, "their mean takes a division by dp × cp")
class Sums(RightAverage):
    def divisor(self):
        return 1


@wrong(TASK, "divided twice")
class Twice(RightAverage):
    def divisor(self):
        return super().divisor() ** 2


@wrong(TASK, "divided by the number of all ranks")
class ByAll(RightAverage):
    def divisor(self):
        return dist.get_world_size()


@wrong(TASK, "divided by dp × cp × pp")
class ByStages(RightAverage):
    """Right where there are no stages."""

    ranks, cases = CP, slice(1, 2)

    def divisor(self):
        return dist.get_world_size() // self.sizes["tp"]


@wrong(TASK, "what is whole was not averaged over dp × cp")
class WholeLeftOut(RightAverage):
    def over_data(self):
        every, self.grads = self.grads, lambda: every("cut", "partial")
        super().over_data()


@wrong(TASK, "over dp × cp goes everything")
class WholeNotSent(RightAverage):
    """But divided."""

    def over_data(self):
        self.add_up(self.grads("cut", "partial"), self.data)
        for grad in self.grads():
            grad /= self.divisor()


@wrong(TASK, "the two groups are swapped")
class Swapped(RightAverage):
    def axes_of_tp(self):
        return ("dp", "cp")

    def axes_of_data(self):
        return ("tp",)

    def divisor(self):
        return dist.get_world_size(self.tp)


@wrong(TASK, "those of axes as in the chapter")
class InTheChaptersOrder(RightAverage):
    ranks, cases = CP, slice(1, 2)

    def groups(self, axes):
        return groups_of({axis: self.sizes[axis] for axis in ("pp", "dp", "cp", "tp") if axis in self.sizes}, axes)


@wrong(TASK, "divided by tp")
class ByTp(RightAverage):
    def divisor(self):
        return dist.get_world_size(self.tp)


@wrong(TASK, OVER_ALL)
def over_all(sizes, weights):
    for weight in weights:
        dist.all_reduce(weight.parameter.grad)
        weight.parameter.grad /= dist.get_world_size()


@wrong(TASK, "averaged over stages, too")
class OverStages(RightAverage):
    ranks, cases = CP, slice(1, 2)

    def axes_of_data(self):
        return ("dp", "cp", "pp")


@wrong(TASK, "averaged over the tp ranks")
class OverTp(RightAverage):
    def axes_of_data(self):
        return ("tp",)


@wrong(TASK, "averaged over dp only")
class WithoutCp(RightAverage):
    ranks = CP

    def axes_of_data(self):
        return ("dp",)


@wrong(TASK, "averaged over cp only")
class WithoutDp(RightAverage):
    ranks = CP

    def axes_of_data(self):
        return ("cp",)


@wrong(TASK, "what is partial was not summed over tp")
class NotSummed(RightAverage):
    def over_tp(self):
        pass


@wrong(TASK, "is a sum over tp, not a mean")
class MeanOverTp(RightAverage):
    def over_tp(self):
        super().over_tp()
        for grad in self.grads("partial"):
            grad /= dist.get_world_size(self.tp)


@wrong(TASK, "what is whole was summed over tp")
class WholeSummed(RightAverage):
    def summed_kinds(self):
        return ("whole", "partial")


@wrong(TASK, "what is cut was summed over tp")
class AllSummed(RightAverage):
    def summed_kinds(self):
        return ()


@wrong(TASK, "only what is partial was averaged")
class OnlyPartial(RightAverage):
    def over_data(self):
        every, self.grads = self.grads, lambda: every("partial")
        super().over_data()


@wrong(TASK, "but not averaged over dp × cp")
class PartialNotAveraged(RightAverage):
    def over_data(self):
        every, self.grads = self.grads, lambda: every("cut", "whole")
        super().over_data()


@wrong(TASK, "the groups are those of another order of axes")
class OtherOrder(RightAverage):
    def groups(self, axes):
        return groups_of(dict(reversed(self.sizes.items())), axes)


@wrong(TASK, "the gradients are mixed up")
class FromTheBeginning(RightAverage):
    def over_data(self):
        flat = self.row(self.grads())
        self.reduce(flat, self.data)
        for grad in self.grads():
            grad.copy_(flat[: grad.numel()].view_as(grad) / self.divisor())


@wrong(TASK, "float64 has to stay float64")
class Rounded(RightAverage):
    def row(self, grads):
        return super().row(grads).float()


@wrong(TASK, "keep what it returns and call .wait() on it")
class NotWaited(RightAverage):
    def reduce(self, flat, group):
        dist.all_reduce(flat, group=group, async_op=True)


@wrong(TASK, "gradients are averaged, weights stay as they are")
class Steps(RightAverage):
    def over_data(self):
        super().over_data()
        for weight in self.weights:
            weight.parameter.data -= 0.1 * weight.parameter.grad


@wrong(TASK, "the sum over tp; then all")
class Halved(RightAverage):
    def divisor(self):
        return 0.5 + super().divisor()
