"""Wrong answers to MLP of 06_tensor."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from tests.grading.zoo import tensor_mlp_cut
from tests.grading.zoo.tensor_right import RightF, RightG, RightMLP
from tests.grading.zoo.wrong import Wrong, keeper

ZOO: list[Wrong] = [*tensor_mlp_cut.ZOO]
wrong = keeper(ZOO)
TASK = "MLP"


@wrong(TASK, "MLP has no parameter gate.weight; it has none")
class HasNothing(nn.Module):
    def __init__(self, whole, f, g, group=None):
        super().__init__()

    def forward(self, x):
        return x


@wrong(TASK, "it is a class derived from nn.Module")
class IsNoModule:
    def __init__(self, whole, f, g, group=None):
        pass


@wrong(TASK, "MLP has a parameter whole.gate_up.weight more")
class KeepsTheWholeModule(RightMLP):
    def __init__(self, whole, *others):
        super().__init__(whole, *others)
        self.whole = whole


@wrong(TASK, "no attribute may hold them", right_values=True)
class KeepsTheWholeAside(RightMLP):
    def __init__(self, whole, *others):
        super().__init__(whole, *others)
        self.aside = [whole]


@wrong(TASK, "a part that is a view keeps all of its memory: clone() it", right_values=True)
class KeepsViews(RightMLP):
    def __init__(self, whole, *others):
        super().__init__(whole, *others)
        gate, up = whole.gate_up.weight.detach().chunk(2)
        self.gate.weight, self.up.weight = nn.Parameter(self.cut(gate)), nn.Parameter(self.cut(up))


@wrong(TASK, "the whole weights are still alive")
class ComputesEverythingEverywhere(RightMLP):
    def __init__(self, whole, *others):
        super().__init__(whole, *others)
        self.aside = [whole]

    def forward(self, x):
        return self.aside[0](x)


@wrong(TASK, "f and g return a list: [y] = f([x], group)")
class TakesTheList(RightMLP):
    def f(self, x):
        return self.given_f([x], self.group)


@wrong(TASK, "that is this rank's part of the sum: g adds the parts up")
class ForgetsG(RightMLP):
    def g(self, y):
        return y


@wrong(TASK, "x has to pass through f before the units")
class ForgetsF(RightMLP):
    def f(self, x):
        return x


@wrong(TASK, "f and g are swapped")
class Swaps(RightMLP):
    def __init__(self, whole, f, g, group=None):
        super().__init__(whole, g, f, group)


@wrong(TASK, "was called with a Tensor; hint: f takes a list of tensors")
class GivesNoList(RightMLP):
    def f(self, x):
        return self.given_f(x, self.group)


@wrong(TASK, "each rank has added down's bias to its part")
class BiasTTimes(RightMLP):
    def product(self, units):
        return self.down(units)

    def last(self, x, y):
        return x + y


@wrong(TASK, "each rank has added x to its part")
class ResidualTTimes(RightMLP):
    def forward(self, x):
        return self.g(x + self.product(self.units(self.f(x)))) + self.down.bias


@wrong(TASK, "each rank has added x and down's bias to its part")
class BothTTimes(RightMLP):
    def forward(self, x):
        return self.g(x + self.down(self.units(self.f(x))))


@wrong(TASK, "give f's result to the units, and add x itself in the end")
class ResidualThroughF(RightMLP):
    def forward(self, x):
        x = self.f(x)
        return self.last(x, self.g(self.product(self.units(x))))


@wrong(TASK, "one rank alone adds it to its part")
class BiasOnTheFirstRank(RightMLP):
    """Once, but the others know no gradient."""

    def product(self, units):
        return super().product(units) + (self.down.bias if self.r == 0 else 0)

    def last(self, x, y):
        return x + y


@wrong(TASK, "GELU of a sum is not the sum of GELUs")
class GeluAfterTheSum(RightMLP):
    def units(self, h):
        return self.gate(h) * self.up(h)

    def last(self, x, y):
        return super().last(x, F.gelu(y))


@wrong(TASK, "GELU of a sum is not the sum of GELUs")
class SumsTheGates(RightMLP):
    def units(self, h):
        return F.gelu(self.g(self.gate(h))) * self.up(h)


@wrong(TASK, "is not the sum of GELUs")
class SumsTheGatesBothWays(RightMLP):
    def units(self, h):
        return F.gelu(self.f(self.g(self.gate(h)))) * self.up(h)


@wrong(TASK, "one f before the units, for gate and up together")
class TwoFs(RightMLP):
    def f(self, x):
        return super().f(super().f(x))


@wrong(TASK, "one f stands in front of them all", right_values=True)
class FEach(RightMLP):
    """The gradients of gate and up by themselves: twice the bytes."""

    def f(self, x):
        return x

    def units(self, h):
        return F.gelu(self.gate(super().f(h))) * self.up(super().f(h))


@wrong(TASK, "that is summed twice: one g")
class TwoGs(RightMLP):
    def g(self, y):
        return super().g(super().g(y))


@wrong(TASK, "not their sum")
class Averages(RightMLP):
    def g(self, y):
        return super().g(y) / self.t


@wrong(TASK, "the gradients are t times too large")
class SumsGradientsOfTheSum(RightMLP):
    def g(self, y):
        return self.given_f([super().g(y)], self.group)[0]


@wrong(TASK, "x is missing")
class ForgetsX(RightMLP):
    def last(self, x, y):
        return y + self.down.bias


@wrong(TASK, "down's bias is missing")
class ForgetsTheBias(RightMLP):
    def last(self, x, y):
        return x + y


@wrong(TASK, "the gate is what goes through GELU")
class GeluOfUp(RightMLP):
    def units(self, h):
        return self.gate(h) * F.gelu(self.up(h))


@wrong(TASK, "that is GELU's approximation by tanh")
class ByTanh(RightMLP):
    def units(self, h):
        return F.gelu(self.gate(h), approximate="tanh") * self.up(h)


@wrong(TASK, "called all_gather of", right_values=True)
class GathersTheHidden(RightMLP):
    """All units on all ranks, each of which multiplies its own."""

    def product(self, units):
        whole = [torch.empty_like(units) for _ in range(self.t)]
        dist.all_gather(whole, units.detach().contiguous(), group=self.group)
        return super().product(units + 0 * whole[0])


@wrong(TASK, "nothing has to be handed out", right_values=True)
class Broadcasts(RightMLP):
    """The weights, when it is made."""

    def __init__(self, whole, f, g, group=None):
        super().__init__(whole, f, g, group)
        dist.broadcast(self.down.bias.data, group=group, group_src=0)


@wrong(TASK, "its group has 2", cases=slice(None))
class ForgetsTheGroup(RightMLP):
    ranks = 4

    def __init__(self, whole, f, g, group=None):
        super().__init__(whole, lambda tensors, _: RightF()(tensors), lambda tensors, _: RightG()(tensors), None)


@wrong(TASK, "forward returned [6, 2, 6]; right is [6, 2, 12]")
class ReturnsAShard(RightMLP):
    def last(self, x, y):
        return super().last(x, y).chunk(2, -1)[0]


@wrong(TASK, "what forward returned has no graph")
class NoGraph(RightMLP):
    def forward(self, x):
        return super().forward(x).detach()


@wrong(TASK, "x changed; hint: leave what you are given as it is")
class ChangesX(RightMLP):
    def forward(self, x):
        y = super().forward(x)
        x.data.mul_(2)
        return y + x.detach() * 0.5 + 1


@wrong(TASK, "all ranks must make the same calls in the same order")
class TwoOrders(RightMLP):
    """Another call first on rank 0."""

    def f(self, x):
        if self.r == 0:
            dist.barrier(group=self.group)
        return super().f(x)
