"""Wrong answers to the fifth task of 03_zero: parameters that come and go."""

import torch
import torch.distributed as dist

from tests.grading.zoo.wrong import Wrong, keeper, me
from tests.grading.zoo.zero_right import RightUnit, gather, pad, reduced, shard

ZOO: list[Wrong] = []
wrong = keeper(ZOO)
TASK = "Unit"


@wrong(TASK, "a unit is free at first", right_values=True)
class NeverFrees(RightUnit):
    def free(self):
        self.is_free = True


@wrong(TASK, "the memory of a parameter is parameter.untyped_storage()", right_values=True)
class FreesInTheBeginningOnly(RightUnit):
    def free(self):
        if not hasattr(self, "begun"):
            super().free()
        self.begun = self.is_free = True


class GivesOtherData(RightUnit):
    """parameter.data = empty: what autograd has saved stays."""

    def lay(self):
        pass

    def issue(self):
        self.wholes = [s.new_empty(len(s) * self.n) for s in self.shards]
        for whole, shard_S in zip(self.wholes, self.shards, strict=True):
            self.works.append(dist.all_gather_single(whole, shard_S.detach(), async_op=True))

    def wait(self):
        if self.works:
            super().wait()
            for parameter, whole in zip(self.params, self.wholes, strict=True):
                parameter.data = whole[: parameter.numel()].view(parameter.shape)
            self.wholes = []

    def free(self):
        self.shapes = getattr(self, "shapes", [p.shape for p in self.params])
        for parameter, shape in zip(self.params, self.shapes, strict=True):
            parameter.data = torch.empty(1, dtype=parameter.dtype).expand(shape)
        self.is_free = True


wrong(TASK, "autograd has saved what they were and keeps its memory", right_values=True)(GivesOtherData)


@wrong(TASK, "loses the shape, and frees nothing that autograd has saved")
class GivesEmptyData(GivesOtherData):
    def free(self):
        self.shapes = getattr(self, "shapes", [p.shape for p in self.params])
        for parameter in self.params:
            parameter.data = torch.empty(0, dtype=parameter.dtype)
        self.is_free = True

    def wait(self):
        if self.works:
            RightUnit.wait(self)
            for parameter, whole, shape in zip(self.params, self.wholes, self.shapes, strict=True):
                parameter.data = whole[: shape.numel()].view(shape)
            self.wholes = []


@wrong(TASK, "into the same storage as before: autograd has saved that one")
class GathersIntoNewStorages(GivesOtherData):
    """And empties the old ones, which backward needs."""

    def free(self):
        if hasattr(self, "shapes"):
            for p in self.params:
                p.untyped_storage().resize_(0)
        super().free()


@wrong(TASK, "something else of yours holds whole copies", right_values=True)
class FreeKeepsAClone(RightUnit):
    def free(self):
        if self.is_free is False and hasattr(self, "begun"):
            self.kept = [whole.clone() for whole in self.wholes]
        self.begun = True
        super().free()


@wrong(TASK, "a shard that is a view keeps the whole tensor", right_values=True)
class KeepsViewsAsShards(RightUnit):
    def shard(self, p):
        return torch.nn.Parameter(pad(p.detach()).chunk(self.n)[me()[0]], p.requires_grad)


@wrong(TASK, "reduce() drops the whole gradients, parameter.grad = None", right_values=True)
class KeepsWholeGradients(RightUnit):
    """In a list."""

    def drop(self, p):
        self.kept = [*getattr(self, "kept", [])[-len(self.params) + 1 :], p.grad]
        p.grad = None


@wrong(TASK, "whole gradients count again in the next backward")
class DropsNoGradient(RightUnit):
    def drop(self, p):
        pass


@wrong(TASK, "the shards never change")
class GivesNewShards(RightUnit):
    """A shard replaced by a new tensor, which the optimizer does not know."""

    def reduce(self):
        self.shards = [torch.nn.Parameter(s.detach().clone(), s.requires_grad) for s in self.shards]
        super().reduce()


@wrong(TASK, "the shards never change")
class ShardsAreAProperty(RightUnit):
    """Each time others: what the optimizer gets is a copy."""

    def __init__(self, module):
        super().__init__(module)
        self.own = self.__dict__.pop("shards")

    def __getattr__(self, name):
        if name == "shards" and "own" in self.__dict__:
            return [torch.nn.Parameter(s.detach().clone(), s.requires_grad) for s in self.own]
        raise AttributeError(name)


@wrong(TASK, "the shards never change")
class LeavesGradientsWhereTheyAre(RightUnit):
    def take(self, p, s, mean_S):
        self.means = mean_S


@wrong(TASK, "rank 0's shards never learn")
class OneRankNeverLearns(RightUnit):
    def take(self, p, s, mean_S):
        if me()[0]:
            super().take(p, s, mean_S)


@wrong(TASK, "start() has to gather the shards as they are then")
class GathersTheFirst(RightUnit):
    """Copies of the shards from the beginning."""

    def __init__(self, module):
        super().__init__(module)
        self.first = [s.detach().clone() for s in self.shards]

    def issue(self):
        for whole, first in zip(self.wholes, self.first, strict=True):
            whole.untyped_storage().resize_(whole.nbytes)
            self.works.append(dist.all_gather_single(whole, first, async_op=True))


@wrong(TASK, "start() has to gather the shards as they are then")
class GathersOnceAndKeepsIt(RightUnit):
    """Whole parameters cached for good."""

    def issue(self):
        if not hasattr(self, "cache"):
            super().issue()

    def wait(self):
        super().wait()
        self.cache = True

    def free(self):
        if not hasattr(self, "cache"):
            super().free()
        self.is_free = True


@wrong(TASK, "waits in start()", right_values=True)
class GathersSynchronously(RightUnit):
    def issue(self):
        for whole, shard_S in zip(self.wholes, self.shards, strict=True):
            whole.untyped_storage().resize_(whole.nbytes)
            dist.all_gather_single(whole, shard_S.detach())


@wrong(TASK, "gathers are issued in start(), and only there", right_values=True)
class GathersInWait(RightUnit):
    def start(self):
        pass

    def wait(self):
        RightUnit.start(self)
        super().wait()


@wrong(TASK, "start() does nothing where the unit is whole or under way", right_values=True)
class GathersAgain(RightUnit):
    def start(self):
        self.issue()


@wrong(TASK, "only the last backward pass counts")
class Overwrites(RightUnit):
    def take(self, p, s, mean_S):
        s.grad = mean_S


@wrong(TASK, "that is divided by N twice")
class AveragesTwice(RightUnit):
    def mean(self, p):
        return super().mean(p) / self.n


@wrong(TASK, "that is the sum over the ranks")
class NeverDivides(RightUnit):
    def mean(self, p):
        return super().mean(p) * self.n


@wrong(TASK, "these are the rank's own gradients")
class ReducesNothing(RightUnit):
    def mean(self, p):
        return shard(torch.zeros(p.shape, dtype=p.dtype) if p.grad is None else p.grad)


@wrong(TASK, "an all-reduce gives every rank the whole sum", right_values=True)
class AllReduces(RightUnit):
    def mean(self, p):
        row = pad(torch.zeros(p.shape, dtype=p.dtype) if p.grad is None else p.grad) / self.n
        dist.all_reduce(row)
        return shard(row)


@wrong(TASK, "does one rank leave a call out, in reduce() where its gradient is None")
class LeavesNoneOut(RightUnit):
    def reduce(self):
        for p, s in zip(self.params, self.shards, strict=True):
            if p.grad is not None:
                self.take(p, s, self.mean(p))
                p.grad = None


@wrong(TASK, "has a gradient of None there: zeros take its place, and are sent")
class TakesNoneForATensor(RightUnit):
    def mean(self, p):
        return reduced(pad(p.grad.flatten()) / self.n)


@wrong(TASK, "frozen parameters have no gradient", right_values=True)
class ReducesTheFrozen(RightUnit):
    def reduce(self):
        super().reduce()
        for p in self.params:
            if not p.requires_grad:
                reduced(pad(torch.zeros(p.shape, dtype=p.dtype)))


@wrong(TASK, "a shard learns where its parameter does")
class TrainsTheFrozen(RightUnit):
    def shard(self, p):
        return torch.nn.Parameter(shard(p.detach()))


@wrong(TASK, "one Parameter for each of module.parameters()")
class LeavesTheFrozenWhole(RightUnit):
    def parameters(self, module):
        return [p for p in module.parameters() if p.requires_grad]


@wrong(TASK, "a shard is what shard(parameter) returns")
class ShardsNothing(RightUnit):
    def shard(self, p):
        return torch.nn.Parameter(pad(p.detach()), p.requires_grad)


@wrong(TASK, "a parameter was used whose memory had been given back")
class FreesTooEarly(RightUnit):
    """Reads the parameter in reduce(), where nothing is there."""

    def free(self):
        super().free()
        if hasattr(self, "begun"):
            self.params[0].add(1)
        self.begun = True


@wrong(TASK, "gathers in reduce()", right_values=True)
class GathersInReduce(RightUnit):
    def reduce(self):
        super().reduce()
        for p, s in zip(self.params, self.shards, strict=True):
            gather(s.detach(), p.shape)
