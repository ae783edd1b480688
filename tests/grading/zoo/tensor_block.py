"""Wrong answers to Block of 06_tensor."""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as with_gradients
from torch import nn
from torch.nn import functional as F

from tests.grading.zoo import tensor_block_hints
from tests.grading.zoo.tensor_right import Both, RightBlock, RightF, all_gather, reduce_scatter
from tests.grading.zoo.wrong import Wrong, keeper

ZOO: list[Wrong] = [*tensor_block_hints.ZOO]
wrong = keeper(ZOO)
TASK = "Block"


@wrong(TASK, "Block has no parameter norm.weight")
class HasNothing(nn.Module):
    def __init__(self, whole, p, f, group=None):
        super().__init__()

    def forward(self, x, seed):
        return x


@wrong(TASK, "no attribute may hold them", right_values=True)
class KeepsTheWhole(RightBlock):
    def __init__(self, whole, *others):
        super().__init__(whole, *others)
        self.aside = [whole]


@wrong(TASK, "rank r has the units r, r + t, r + 2t, …, not neighbours")
class CutsBlocks(RightBlock):
    def cut(self, rows):
        return rows.chunk(self.t)[self.r]


@wrong(TASK, "norm's parameters and down's bias work on this rank's positions only, so that each rank finds a part")
class SumsNoGradients(RightBlock):
    def parameters_here(self):
        return self.norm.weight, self.norm.bias, self.down.bias


@wrong(TASK, "norm's gradients are this rank's positions' only")
class SumsTheBiasOnly(RightBlock):
    def parameters_here(self):
        return self.norm.weight, self.norm.bias, self.given_f([self.down.bias], self.group)[0]


@wrong(TASK, "down's bias belongs into f's list")
class SumsNormOnly(RightBlock):
    def parameters_here(self):
        return *self.given_f([self.norm.weight, self.norm.bias], self.group), self.down.bias


@wrong(TASK, "the gradient of what all ranks have alike is the sum")
class AveragesGradients(RightBlock):
    def parameters_here(self):
        own = [self.norm.weight, self.norm.bias, self.down.bias]
        return self.given_f([p / self.t + p.detach() * (1 - 1 / self.t) for p in own], self.group)


@wrong(TASK, "parameters are added up in forward: that is g")
class GOnParameters(RightBlock):
    def parameters_here(self):
        own = [self.norm.weight, self.norm.bias, self.down.bias]
        return Both.apply(RightF().there, lambda grads, _: grads, *self.total(own))

    def total(self, own):
        f = RightF()
        f.group = self.group
        return Both.apply(f.sum, lambda grads, _: grads, *own)


@wrong(TASK, "f takes a list", right_values=True)
class ThreeCalls(RightBlock):
    def parameters_here(self):
        return [self.given_f([p], self.group)[0] for p in (self.norm.weight, self.norm.bias, self.down.bias)]


@wrong(TASK, "their gradients are whole after the gather")
class SumsAllGradients(RightBlock):
    def gather_up(self, h):
        weight, bias = self.given_f([self.up.weight, self.up.bias], self.group)
        up = self.up
        self.up = type("Up", (), {"weight": weight, "bias": bias})
        y = super().gather_up(h)
        self.up = up
        return y

    def product(self, units):
        return F.linear(units, self.given_f([self.down.weight], self.group)[0])

    def __setattr__(self, name, value):
        if name == "up" and not isinstance(value, nn.Module):
            self._modules.pop("up")
            self.__dict__["up"] = value
        else:
            self.__dict__.pop(name, None)
            super().__setattr__(name, value)


@wrong(TASK, "each rank has added down's bias to its part")
class BiasTTimes(RightBlock):
    def sum(self, part, bias):
        return self.scatter(part + bias)


@wrong(TASK, "the gradient of what was gathered is only this rank's")
class OwnGradientOnly(RightBlock):
    def gathers_grad(self, grad):
        return grad.chunk(self.t)[self.r].clone()


@wrong(TASK, "behind the reduce-scatter, a rank knows the gradient of its own positions only")
class PadsTheGradient(RightBlock):
    def scatters_grad(self, grad):
        whole = grad.new_zeros(self.t, *grad.shape)
        whole[self.r] = grad
        return whole.flatten(0, 1)


class GatherUnseen(torch.autograd.Function):
    """A product of what was gathered outside of it."""

    @staticmethod
    def forward(ctx, x, weight, bias, block):
        ctx.block = block
        ctx.save_for_backward(x, weight)
        return F.linear(all_gather(x, block.group), weight, bias)

    @staticmethod
    def backward(ctx, grad):
        x, _ = ctx.saved_tensors
        whole = all_gather(x, ctx.block.group)
        return None, grad.flatten(0, 1).t() @ whole.flatten(0, 1), grad.sum((0, 1)), None


@wrong(TASK, "autograd does not see what dist's calls do")
class GathersUnseen(RightBlock):
    def gather_up(self, h):
        return GatherUnseen.apply(h, self.up.weight, self.up.bias, self)


@wrong(TASK, "autograd does not see what dist's calls do")
class ScattersUnseen(RightBlock):
    """The parts' graph ends at the call."""

    def scatter(self, part):
        return reduce_scatter(part.detach(), self.group)


@wrong(TASK, "that is this rank's part of the sum: a reduce-scatter adds the parts up")
class TakesItsOwnPart(RightBlock):
    def scatter(self, part):
        return part.chunk(self.t)[self.r]


@wrong(TASK, "that is divided by t")
class Averages(RightBlock):
    def scatter(self, part):
        return super().scatter(part) / self.t


@wrong(TASK, "an all-reduce gives each rank all positions", right_values=True)
class AllReduces(RightBlock):
    """f and g in the place of the gather and the scatter: cuts and pads around them."""

    def scatter(self, part):
        whole = with_gradients.all_reduce(part, group=self.group or dist.group.WORLD)
        return whole.chunk(self.t)[self.r]


@wrong(TASK, "gathers it again in backward", right_values=True)
class KeepsTheGathered(RightBlock):
    def gather_up(self, h):
        whole = Both.apply(
            lambda tensors: [all_gather(tensors[0], self.group)], lambda grads, _: [reduce_scatter(grads[0], self.group)], h
        )[0]
        return self.up(whole)


@wrong(TASK, "The norm and dropout work on shards", right_values=True)
class NormsAllPositions(RightBlock):
    def forward(self, x, seed):
        whole = Both.apply(
            lambda tensors: [all_gather(tensors[0], self.group)], lambda grads, _: [reduce_scatter(grads[0], self.group)], x
        )[0]
        scale, shift, bias = self.parameters_here()
        units = F.gelu(self.up(F.layer_norm(whole, scale.shape, scale, shift)))
        return x + self.drop(self.sum(self.product(units), bias), seed)


@wrong(TASK, "dropped the same elements; hint: each rank has other positions", right_values=True, cases=slice(None))
class OneMaskForAll(RightBlock):
    def seed(self, seed):
        return seed


@wrong(TASK, "dropped the same elements; hint: each rank has other positions", right_values=True, cases=slice(None))
class GlobalSeed(RightBlock):
    def drop(self, y, seed):
        torch.manual_seed(seed)
        return F.dropout(y, self.p)


@wrong(TASK, "seed * t + rank is another number for each pair", right_values=True, cases=slice(None))
class SeedsThatMeet(RightBlock):
    def seed(self, seed):
        return seed + self.r


@wrong(TASK, "each step has a seed of its own, which has to count", right_values=True, cases=slice(None))
class SeedByRank(RightBlock):
    def seed(self, seed):
        return self.r


@wrong(TASK, "dropped other elements when seed 7 came again", right_values=True, cases=slice(None))
class GlobalRandomNumbers(RightBlock):
    def drop(self, y, seed):
        if not hasattr(self, "started"):
            torch.manual_seed(100 + self.r)
            self.started = True
        return F.dropout(y, self.p)


@wrong(TASK, "nothing was dropped", cases=slice(None))
class NoDropout(RightBlock):
    def drop(self, y, seed):
        return y


@wrong(TASK, "an element of the sum is either dropped or divided by 1 − p", cases=slice(None))
class ForgetsToDivide(RightBlock):
    def drop(self, y, seed):
        return super().drop(y, seed) * (1 - self.p)


@wrong(TASK, "an element is dropped with probability p", right_values=True, cases=slice(None))
class KeepsWithP(RightBlock):
    def drop(self, y, seed):
        kept = torch.rand(y.shape, generator=torch.Generator().manual_seed(self.seed(seed))) < max(self.p, 1 - 3 * (self.p > 0))
        return y * (kept if self.p else 1) / (1 - self.p)


@wrong(TASK, "Dropout comes last, before x is added", cases=slice(None))
class DropsParts(RightBlock):
    """Before the reduce-scatter, each rank others."""

    def product(self, units):
        return super().drop(super().product(units), 3)

    def drop(self, y, seed):
        return y


@wrong(TASK, "returned [12, 4, 16]; right is [4, 4, 16]")
class ReturnsAllPositions(RightBlock):
    def forward(self, x, seed):
        return all_gather(super().forward(x, seed).detach(), self.group)


@wrong(TASK, "its group has 2", cases=slice(None))
class ForgetsTheGroup(RightBlock):
    ranks = 4

    def __init__(self, whole, p, f, group=None):
        super().__init__(whole, p, f, None)


@wrong(TASK, "keep what it returns and call .wait() on it")
class DoesNotWait(RightBlock):
    def scatters_grad(self, grad):
        whole = grad.new_empty(len(grad) * self.t, *grad.shape[1:])
        self.work = dist.all_gather_single(whole, grad.contiguous(), group=self.group, async_op=True)
        return whole


@wrong(TASK, "is not allowed; hint: write it yourself")
class TheLibrarys(RightBlock):
    def scatter(self, part):
        from manyranks.parallel.tensor import mappings

        return mappings.reduce_scatter_out(part.transpose(0, 1), self.group).transpose(0, 1)


@wrong(TASK, "forward() takes 2 positional arguments but 3 were given")
class TakesNoSeed(RightBlock):
    def forward(self, x):
        return super().forward(x, 0)


@wrong(TASK, "all ranks must make the same calls in the same order")
class OnlyOneGathers(RightBlock):
    def gathers_grad(self, grad):
        return super().gathers_grad(grad) if self.r == 0 else grad.chunk(self.t)[self.r].clone()
