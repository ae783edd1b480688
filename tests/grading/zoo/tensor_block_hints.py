"""More wrong answers to Block of 06_tensor: seeds that collide, tensors that are not contiguous, and some with own hints."""

import torch
import torch.distributed as dist
from torch.nn import functional as F

from tests.grading.zoo.tensor_right import GatherUp, RightBlock
from tests.grading.zoo.wrong import Wrong, keeper

ZOO: list[Wrong] = []
wrong = keeper(ZOO)
TASK = "Block"


@wrong(TASK, "draws the mask of rank 0 with seed", right_values=True, cases=slice(None))
class RankTimesT(RightBlock):
    def seed(self, seed):
        return self.r * self.t + seed


@wrong(TASK, "rank 1 with seed 4 draws the mask of rank 0 with seed 8", right_values=True, cases=slice(None))
class SeedTimesRank(RightBlock):
    def seed(self, seed):
        return seed * (self.r + 1)


@wrong(TASK, "draws the mask of rank 0 with seed", right_values=True, cases=slice(None))
class SeedXorRank(RightBlock):
    def seed(self, seed):
        return seed ^ self.r


@wrong(TASK, "rank 1 with seed 7 draws the mask of rank 0 with seed 1007", right_values=True, cases=slice(None))
class RankTimesThousand(RightBlock):
    def seed(self, seed):
        return self.r * 1000 + seed


@wrong(TASK, "rank 1 with seed 7 draws the mask of rank 0 with seed 107", right_values=True, cases=slice(None))
class RankTimesHundred(RightBlock):
    def seed(self, seed):
        return seed + 100 * self.r


@wrong(TASK, "a tensor that is not contiguous; hint: collectives want contiguous tensors", right_values=True, cases=slice(None))
class GathersWhatIsNotContiguous(RightBlock):
    def scatters_grad(self, grad):
        whole = grad.new_empty(len(grad) * self.t, *grad.shape[1:])
        dist.all_gather_single(whole, grad, group=self.group)
        return whole


@wrong(TASK, "which elements rank 0 dropped cannot be told from its result", cases=slice(None))
class MaskBeforeTheBias(RightBlock):
    def sum(self, part, bias):
        self.late = bias
        return self.scatter(part)

    def drop(self, y, seed):
        return super().drop(y, seed) + self.late


@wrong(TASK, "norm has the whole norm's weight and bias")
class NormOfItsOwn(RightBlock):
    def __init__(self, whole, p, f, group=None):
        super().__init__(whole, p, f, group)
        self.norm.reset_parameters()


class Changed(RightBlock):
    """What is added, and what goes into norm."""

    def forward(self, x, seed):
        scale, shift, bias = self.parameters_here()
        normed = F.layer_norm(self.before(x), scale.shape, scale, shift)
        units = F.gelu(self.gather_up(normed))
        return self.added(x, normed) + self.drop(self.sum(self.product(units), bias), seed)

    def before(self, x):
        return x

    def added(self, x, normed):
        return x


@wrong(TASK, "x itself is added, not norm(x)")
class AddsTheNormed(Changed):
    def added(self, x, normed):
        return normed


@wrong(TASK, "x's shard is this rank's alone: not through f")
class FOnX(Changed):
    def before(self, x):
        return self.given_f([x], self.group)[0]


@wrong(TASK, "x's shard is this rank's alone: not through f")
class FOnAllOfX(RightBlock):
    def forward(self, x, seed):
        return super().forward(self.given_f([x], self.group)[0], seed)


@wrong(TASK, "the gradient of norm.weight is 0.3333 times the right one")
class DividesTheGathered(RightBlock):
    def scatters_grad(self, grad):
        return super().scatters_grad(grad) / self.t


@wrong(TASK, "the gradient of up.weight is 0.3333 times the right one")
class DividesAWeightsGradient(RightBlock):
    def __init__(self, whole, p, f, group=None):
        super().__init__(whole, p, f, group)
        self.up.weight.register_hook(lambda grad: grad / self.t)


@wrong(TASK, "the ranks are those of `group`", cases=slice(None))
class CutsForAllRanks(RightBlock):
    ranks = 4

    def cut(self, rows):
        return rows[dist.get_rank() :: dist.get_world_size()]


class _OfAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, block):
        group, block.group = block.group, None
        whole = GatherUp.forward(ctx, x, weight, bias, block)
        block.group = group
        return whole

    @staticmethod
    def backward(ctx, grad):
        return GatherUp.backward(ctx, grad)


@wrong(TASK, "the ranks are those of `group`", right_values=True, cases=slice(None))
class GathersFromAllRanks(RightBlock):
    ranks = 4

    def gather_up(self, h):
        return _OfAll.apply(h, self.up.weight, self.up.bias, self)
