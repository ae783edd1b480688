"""Wrong answers to the third task of 03_zero: an optimizer whose states are sharded."""

import torch
import torch.distributed as dist
from torch.nn.functional import pad as torch_pad

from tests.grading.zoo.wrong import Wrong, keeper, me
from tests.grading.zoo.zero_right import Right1, filled, pad, reduced, shard

ZOO: list[Wrong] = []
wrong = keeper(ZOO)
TASK = "Stage1"


@wrong(TASK, "The optimizer has to have the very tensors that you gather from")
class TrainsACopy(Right1):
    """A shard that never trains: the optimizer has a detached copy."""

    def make(self, optimizer_class, kwargs):
        self.copies = [torch.nn.Parameter(s.detach().clone()) for s in self.shards]
        return optimizer_class(self.copies, **kwargs)

    def reduce(self):
        for p, s in zip(self.params, self.copies, strict=True):
            s.grad = self.mean(p)


@wrong(TASK, "The optimizer has to have the very tensors that you gather from")
class ReplacesShards(Right1):
    """By new ones, which the optimizer does not know."""

    def reduce(self):
        self.shards = [torch.nn.Parameter(s.detach().clone()) for s in self.shards]
        super().reduce()


@wrong(TASK, "The optimizer has to have the very tensors that you gather from")
class GivesNoGradients(Right1):
    def reduce(self):
        for p in self.params:
            p.grad = torch_pad(self.mean(p), (0, 0)).new_zeros(p.shape)


@wrong(TASK, "rank 0's shards never learn")
class OneRankNeverLearns(Right1):
    def reduce(self):
        super().reduce()
        if me()[0] == 0:
            for s in self.shards:
                s.grad = None


@wrong(TASK, "which are those with padding in them: zeros there stay zeros")
class PaddedShardsNeverLearn(Right1):
    def reduce(self):
        super().reduce()
        for p, s in zip(self.params, self.shards, strict=True):
            if (me()[0] + 1) * len(s) > p.numel():
                s.grad = None


@wrong(TASK, "that is divided by N twice")
class AveragesTwice(Right1):
    """Before and after."""

    def mean(self, parameter):
        return super().mean(parameter) / me()[1]


@wrong(TASK, "that is divided by N twice")
class AveragesAndDivides(Right1):
    def mean(self, parameter):
        return reduced(pad(filled(parameter)) / me()[1], op=dist.ReduceOp.AVG)


@wrong(TASK, "that is the sum over the ranks")
class NeverDivides(Right1):
    def mean(self, parameter):
        return reduced(pad(filled(parameter)))


@wrong(TASK, "these are the rank's own gradients")
class ReducesNothing(Right1):
    def mean(self, parameter):
        return shard(filled(parameter))


@wrong(TASK, "these are the rank's own gradients")
class ReducesAndUsesItsOwn(Right1):
    def mean(self, parameter):
        super().mean(parameter)
        return shard(filled(parameter))


@wrong(TASK, "after the optimizer's step, gather them from the shards")
class ForgetsToGather(Right1):
    def spread(self):
        pass


@wrong(TASK, "the parameters are one step behind")
class GathersBeforeTheStep(Right1):
    def step(self):
        self.reduce()
        self.spread()
        self.optimizer.step()


@wrong(TASK, "The optimizer has to have the very tensors that you gather from")
class GathersTheFirstShards(Right1):
    """Of which it has kept copies."""

    def make(self, optimizer_class, kwargs):
        self.first = [s.detach().clone() for s in self.shards]
        return super().make(optimizer_class, kwargs)

    def spread(self):
        trained, self.shards = self.shards, self.first
        super().spread()
        self.shards = trained


@wrong(TASK, "what is gathered has to be written into the model's parameters")
class CachesWholeParameters(Right1):
    """It gathers into tensors of its own, and the model's stay as they were."""

    def spread(self):
        self.whole = [self.gather(p, s) for p, s in zip(self.params, self.shards, strict=True)]
        self.whole = []


@wrong(TASK, "gather those of the others")
class WritesItsOwnShardOnly(Right1):
    @torch.no_grad()
    def spread(self):
        for p, s in zip(self.params, self.shards, strict=True):
            first = me()[0] * len(s)
            room = p.view(-1)[first : first + len(s)]
            room.copy_(s[: len(room)])


@wrong(TASK, "a rank without a gradient counts as one with zeros")
class CountsUsersOnly(Right1):
    def mean(self, parameter):
        users = torch.tensor([1.0 - (parameter.grad is None)] * me()[1], dtype=torch.float64)
        return reduced(pad(filled(parameter))) / reduced(users).clamp(min=1)


@wrong(TASK, "has a gradient of None there: zeros take its place, and are sent")
class TakesNoneForATensor(Right1):
    def mean(self, parameter):
        return reduced(pad(parameter.grad.flatten()) / me()[1])


@wrong(TASK, "is something left out where a gradient is None")
class SkipsWhatHasNoGradient(Right1):
    def reduce(self):
        for p, s in zip(self.params, self.shards, strict=True):
            if p.grad is not None:
                s.grad = self.mean(p)


@wrong(TASK, "frozen parameters have no gradient and no shard in the optimizer")
class TrainsTheFrozenToo(Right1):
    def learning(self, params):
        return params


@wrong(TASK, "gradients of all steps add up")
class NeverForgets(Right1):
    def reduce(self):
        for p, s in zip(self.params, self.shards, strict=True):
            s.grad = self.mean(p) + (0 if s.grad is None else s.grad)

    def zero_grad(self):
        for p in self.params:
            p.grad = None


@wrong(TASK, "hand **kwargs on to optimizer_class")
class IgnoresSettings(Right1):
    def make(self, optimizer_class, kwargs):
        return optimizer_class(self.shards)


@wrong(TASK, "the optimizer has more settings than lr")
class TakesLrOnly(Right1):
    def make(self, optimizer_class, kwargs):
        return optimizer_class(self.shards, lr=kwargs["lr"])


@wrong(TASK, "that is another optimizer: make one of optimizer_class", cases=slice(None))
class AlwaysAdamW(Right1):
    """Right with AdamW, wrong with SGD."""

    def make(self, optimizer_class, kwargs):
        if issubclass(optimizer_class, torch.optim.SGD):
            return torch.optim.AdamW(self.shards, lr=kwargs["lr"])
        return optimizer_class(self.shards, **kwargs)


@wrong(TASK, "make the optimizer once")
class MakesAnOptimizerEachStep(Right1):
    def make(self, optimizer_class, kwargs):
        self.again = lambda: optimizer_class(self.shards, **kwargs)
        return self.again()

    def spread(self):
        super().spread()
        self.optimizer = self.again()


@wrong(TASK, "begin with list(params)")
class IteratesTwice(Right1):
    def __init__(self, params, optimizer_class, **kwargs):
        self.shards = [self.shard(p) for p in params if p.requires_grad]
        self.params = [p for p in params if p.requires_grad]
        self.optimizer = optimizer_class([*self.shards][: len(self.params)], **kwargs)


@wrong(TASK, "change parameters under torch.no_grad()")
class ForgetsNoGrad(Right1):
    def spread(self):
        for p, s in zip(self.params, self.shards, strict=True):
            p.copy_(self.gather(p, s))
