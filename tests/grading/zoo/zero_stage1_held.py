"""More wrong answers to the third task of 03_zero: what is held and what is sent."""

import torch
import torch.distributed as dist

from tests.grading.zoo.wrong import Wrong, keeper, me
from tests.grading.zoo.zero_right import Right1, filled, gather, pad, reduced, shard

ZOO: list[Wrong] = []
wrong = keeper(ZOO)
TASK = "Stage1"


@wrong(TASK, "give it shards, one Parameter for each parameter", right_values=True)
class ShardsNothing(Right1):
    """Data parallelism: a plain all-reduce, and a full optimizer."""

    def shard(self, parameter):
        return parameter

    def reduce(self):
        for p in self.params:
            p.grad = filled(p) / me()[1]
            dist.all_reduce(p.grad)

    def spread(self):
        pass


@wrong(TASK, "give it shards, one Parameter for each parameter", right_values=True)
class SendsAsItShouldAndShardsNothing(Right1):
    """All messages are right, and every rank has all states all the same."""

    def make(self, optimizer_class, kwargs):
        return optimizer_class(self.params, **kwargs)

    def reduce(self):
        super().reduce()
        self.means = [gather(s.grad, p.shape) for p, s in zip(self.params, self.shards, strict=True)]
        for p, mean, s in zip(self.params, self.means, self.shards, strict=True):
            p.grad, s.grad = mean, None
        self.means = []

    def spread(self):
        pass


@wrong(TASK, "is there a whole copy of the parameters that you keep", right_values=True)
class KeepsWholeCopies(Right1):
    def __init__(self, params, optimizer_class, **kwargs):
        super().__init__(params, optimizer_class, **kwargs)
        self.copies = [p.detach().clone() for p in self.params]


@wrong(TASK, "Or does zero_grad() keep gradients? set parameter.grad to None", right_values=True)
class KeepsWholeGradients(Right1):
    def zero_grad(self):
        for p in self.params:
            if p.grad is not None:
                p.grad.zero_()
        self.optimizer.zero_grad()


@wrong(TASK, "the shards' gradients are still there", right_values=True)
class KeepsGradientsOfShards(Right1):
    def zero_grad(self):
        for p in self.params:
            p.grad = None


@wrong(TASK, "more after each step", right_values=True)
class KeepsEveryStep(Right1):
    def reduce(self):
        super().reduce()
        self.past = [*getattr(self, "past", []), *[s.grad for s in self.shards]]


@wrong(TASK, "frozen parameters have no gradient and no shard in the optimizer", right_values=True)
class GathersTheFrozenToo(Right1):
    def learning(self, params):
        self.frozen = [p for p in params if not p.requires_grad]
        return super().learning(params)

    def spread(self):
        super().spread()
        for p in self.frozen:
            p.copy_(self.gather(p, shard(p)))


@wrong(TASK, "an all-reduce gives every rank the whole sum", right_values=True)
class AllReducesAndCuts(Right1):
    def mean(self, parameter):
        row = pad(filled(parameter)) / me()[1]
        dist.all_reduce(row)
        return shard(row)


@wrong(TASK, "one all-gather brings all shards at once", right_values=True)
class Broadcasts(Right1):
    def __init__(self, params, optimizer_class, **kwargs):
        params = list(params)
        for p in params:
            dist.broadcast(p.detach(), 0)
        super().__init__(params, optimizer_class, **kwargs)


@wrong(TASK, "gather each parameter once a step, after the optimizer's", right_values=True)
class GathersTwice(Right1):
    def step(self):
        self.reduce()
        self.spread()
        self.optimizer.step()
        self.spread()


@wrong(TASK, "one reduce-scatter for each parameter in each step: each parameter has its own", right_values=True)
class SendsAllInOneRow(Right1):
    """As the chapter does."""

    def reduce(self):
        n = me()[1]
        rows = torch.stack([torch.cat(parts) for parts in zip(*[pad(filled(p)).chunk(n) for p in self.params], strict=True)])
        mine = reduced(rows.flatten() / n)
        for s, grad in zip(self.shards, mine.split([len(s) for s in self.shards]), strict=True):
            s.grad = grad.clone()


@wrong(TASK, "float64 has to stay float64")
class ReducesFloat32(Right1):
    def mean(self, parameter):
        return reduced((pad(filled(parameter)) / me()[1]).float()).double()


@wrong(TASK, "every shard has S elements, padding included, on all ranks")
class PadsNothing(Right1):
    """The list form of reduce-scatter takes pieces of different sizes; the ranks then disagree."""

    def shard(self, parameter):
        return torch.nn.Parameter(parameter.detach().flatten().tensor_split(me()[1])[me()[0]].clone())

    def mean(self, parameter):
        parts = [part.contiguous() for part in (filled(parameter) / me()[1]).flatten().tensor_split(me()[1])]
        mine = torch.empty_like(parts[me()[0]])
        dist.reduce_scatter(mine, parts)
        return mine


@wrong(TASK, "states of a frozen parameter are there")
@wrong(TASK, "frozen parameters change, too")
class GivesTheFrozenZeros(Right1):
    def learning(self, params):
        return params


@wrong(TASK, "states of a frozen parameter are there, or of one twice", right_values=True)
class TrainsOneTwice(Right1):
    """The first one's shard is in the optimizer twice, as a copy that nobody gathers."""

    def make(self, optimizer_class, kwargs):
        self.copy = torch.nn.Parameter(self.shards[1].detach().clone())
        return optimizer_class([*self.shards, self.copy], **kwargs)

    def reduce(self):
        super().reduce()
        self.copy.grad = torch.zeros_like(self.copy)


@wrong(TASK, "was params a generator that was empty the second time?")
class GoesThroughParamsTwice(Right1):
    def __init__(self, params, optimizer_class, **kwargs):
        self.shards = [self.shard(p) for p in params if p.requires_grad]
        self.params = list(params)
        self.optimizer = optimizer_class(self.shards, **kwargs)

    def reduce(self):
        for p, s in zip(self.params, self.shards, strict=False):
            s.grad = self.mean(p)

    def spread(self):
        for p, s in zip(self.params, self.shards, strict=False):
            p.copy_(self.gather(p, s))


@wrong(TASK, "the padding of a gradient is at the front")
class PadsGradientsInFront(Right1):
    def mean(self, parameter):
        flat = filled(parameter).flatten() / me()[1]
        return reduced(torch.cat([flat.new_zeros(-len(flat) % me()[1]), flat]))
