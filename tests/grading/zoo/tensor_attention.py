"""Wrong answers to Attention of 06_tensor."""

import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from tests.grading.zoo.tensor_right import RightAttention, RightF, RightG, linear
from tests.grading.zoo.wrong import Wrong, keeper

ZOO: list[Wrong] = []
wrong = keeper(ZOO)
TASK = "Attention"


@wrong(TASK, "Attention has no parameter query.weight")
class HasNothing(nn.Module):
    def __init__(self, whole, f, g, group, sharers):
        super().__init__()

    def forward(self, x, memory):
        return x


@wrong(TASK, "the check calls Attention(whole, f, g, group, sharers)")
class TakesNoSharers(RightAttention):
    def __init__(self, whole, f, g, group):
        super().__init__(whole, f, g, group, None)


@wrong(TASK, "no attribute may hold them", right_values=True)
class KeepsTheWhole(RightAttention):
    def __init__(self, whole, *others):
        super().__init__(whole, *others)
        self.aside = [whole]


@wrong(TASK, "rank r has the query heads r, r + t, r + 2t, …, not neighbours")
class CutsBlocks(RightAttention):
    def own(self, whole):
        return list(range(whole.heads))[self.r * whole.heads // self.t :][: whole.heads // self.t]


@wrong(TASK, "cut whole heads: head j is rows j·D to (j + 1)·D")
class DealsRows(RightAttention):
    def cut(self, weight, heads):
        rows = weight[self.r :: self.t]
        return rows if len(rows) == len(heads) * self.size else super().cut(weight, heads)


@wrong(TASK, "cut whole heads: head j is rows j·D to (j + 1)·D")
class DealsColumnsOfOutput(RightAttention):
    def __init__(self, whole, *others):
        super().__init__(whole, *others)
        self.output = linear(whole.output.weight[:, self.r :: self.t])


@wrong(TASK, "this rank has no key/value head: r % kv_heads", right_values=True, cases=slice(None))
class HasNoKeys(RightAttention):
    """Right with enough key/value heads."""

    def __init__(self, *given):
        with warnings.catch_warnings(action="ignore"):  # torch's, of weights without a row
            super().__init__(*given)

    def own_kv(self, whole):
        return list(range(self.r, whole.kv_heads, self.t))


@wrong(TASK, "memory's gradient is summed twice, by sharers and by the group", cases=slice(None))
class SharesProducts(RightAttention):
    def forward(self, x, memory):
        x, memory = self.both(x, memory)
        key, value = self.given_f([self.key(memory), self.value(memory)], self.sharers)
        return self.g(self.output(self.attend(self.query(x), key, value)))


@wrong(TASK, "a head is D rows of query, key and value, and D columns of output")
class CutsOutputByRows(RightAttention):
    def __init__(self, whole, *others):
        super().__init__(whole, *others)
        self.output = linear(whole.output.weight[self.r :: self.t])


@wrong(TASK, "rank r needs the key/value heads of its query heads")
class AllKeysAndValues(RightAttention):
    def own_kv(self, whole):
        return list(range(whole.kv_heads))


@wrong(TASK, "rank r needs the key/value heads of its query heads")
class NeighbouringKeysAndValues(RightAttention):
    def own_kv(self, whole):
        count = max(1, whole.kv_heads // self.t)
        first = self.r * whole.kv_heads // self.t
        return list(range(first, first + count))


@wrong(TASK, "each finds only what its own query heads add to the gradient", cases=slice(None))
class DoesNotSumSharedHeads(RightAttention):
    def weights(self):
        return self.key.weight, self.value.weight


@wrong(TASK, "only `sharers` have this rank's")
class SumsOverAll(RightAttention):
    def weights(self):
        return self.given_f([self.key.weight, self.value.weight], self.group)


@wrong(TASK, "the gradient of a shared head is the sum", cases=slice(None))
class AveragesSharedHeads(RightAttention):
    def weights(self):
        t = dist.get_world_size(self.sharers)
        halves = [weight / t + weight.detach() * (1 - 1 / t) for weight in (self.key.weight, self.value.weight)]
        return self.given_f(halves, self.sharers)


@wrong(TASK, "g on shared weights adds the weights themselves", cases=slice(None))
class AddsSharedWeights(RightAttention):
    def weights(self):
        return self.given_g([self.key.weight, self.value.weight], self.sharers)


@wrong(TASK, "the gradient of key.weight", cases=slice(None))
class SumsTheValuesOnly(RightAttention):
    def weights(self):
        return self.key.weight, self.given_f([self.value.weight], self.sharers)[0]


@wrong(TASK, "put them into one flat row", right_values=True, cases=slice(None))
class SharesOneByOne(RightAttention):
    def weights(self):
        return [self.given_f([weight], self.sharers)[0] for weight in (self.key.weight, self.value.weight)]


@wrong(TASK, "memory comes to all ranks as x does")
class MemoryWithoutF(RightAttention):
    def both(self, x, memory):
        return self.given_f([x], self.group)[0], memory


@wrong(TASK, "x has to pass through f, as memory does")
class XWithoutF(RightAttention):
    def both(self, x, memory):
        return x, self.given_f([memory], self.group)[0]


@wrong(TASK, "x and memory have to pass through f")
class NoF(RightAttention):
    def both(self, x, memory):
        return x, memory


@wrong(TASK, "put them into one flat row", right_values=True)
class FEach(RightAttention):
    def both(self, x, memory):
        return [self.given_f([one], self.group)[0] for one in (x, memory)]


@wrong(TASK, "that is the part of this rank's heads")
class NoG(RightAttention):
    def g(self, y):
        return y


@wrong(TASK, "f and g are swapped")
class Swaps(RightAttention):
    def __init__(self, whole, f, g, group, sharers):
        super().__init__(whole, g, f, group, sharers)

    def weights(self):
        return self.given_g([self.key.weight, self.value.weight], self.sharers)


@wrong(TASK, "the gradients are t times too large")
class SumsGradientsOfTheSum(RightAttention):
    def g(self, y):
        return self.given_f([super().g(y)], self.group)[0]


@wrong(TASK, "that is summed twice: one f at the start, one g in the end")
class TwoGs(RightAttention):
    def g(self, y):
        return super().g(super().g(y))


@wrong(TASK, "not their sum")
class Averages(RightAttention):
    def g(self, y):
        return super().g(y) / self.t


@wrong(TASK, "repeat_interleave, and sdpa's enable_gqa, let neighbours share one")
class NeighboursShare(RightAttention):
    def repeated(self, q, *both):
        return [part.repeat_interleave(q.shape[1] // part.shape[1], 1) for part in both]


@wrong(TASK, "let neighbours share one")
class ByEnableGqa(RightAttention):
    def repeated(self, q, *both):
        return both

    def scores(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


@wrong(TASK, "scores are divided by √D")
class NotScaled(RightAttention):
    def scores(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, scale=1)


@wrong(TASK, "scores are divided by √D")
class ScaledByTheHidden(RightAttention):
    def scores(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, scale=self.query.in_features**-0.5)


@wrong(TASK, "called all_gather of", right_values=True)
class GathersHeads(RightAttention):
    def scores(self, q, k, v):
        y = super().scores(q, k, v)
        whole = [torch.empty_like(y) for _ in range(self.t)]
        dist.all_gather(whole, y.detach().contiguous(), group=self.group)
        return y + 0 * whole[0]


@wrong(TASK, "its group has 2", cases=slice(None))
class ForgetsTheGroup(RightAttention):
    ranks = 4

    def __init__(self, whole, f, g, group, sharers):
        super().__init__(
            whole, lambda tensors, one: RightF()(tensors, one and sharers), lambda tensors, _: RightG()(tensors), None, sharers
        )


@wrong(TASK, "dist.get_rank(group), dist.get_world_size(group)", cases=slice(None))
class RankOfTheWorld(RightAttention):
    ranks = 4

    def own(self, whole):
        return list(range(dist.get_rank(), whole.heads, dist.get_world_size()))


@wrong(TASK, "f and g return a list: [y] = f([x], group)")
class ReturnsTheList(RightAttention):
    def g(self, y):
        return self.given_g([y], self.group)


@wrong(TASK, "; right is [5, 2, 12]")
class ReturnsItsHeads(RightAttention):
    def forward(self, x, memory):
        x, memory = self.both(x, memory)
        return self.attend(self.query(x), *(F.linear(memory, weight) for weight in self.weights()))
