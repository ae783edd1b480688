"""Other right answers to the tasks of 06_tensor, which must get full marks."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from tests.grading.zoo.tensor_right import (
    IGNORED,
    RightAttention,
    RightF,
    RightG,
    RightLoss,
    RightMLP,
)


class Async(RightF):
    """The all-reduce is on its way while something else is done."""

    def reduce(self, row):
        dist.all_reduce(row, group=self.group, async_op=True).wait()


class AsyncG(RightG):
    reduce = Async.reduce


class Coalesced(RightF):
    """One call for a list of tensors."""

    def sum(self, tensors):
        copies = [tensor.contiguous().clone() for tensor in tensors]
        dist.all_reduce_coalesced(copies, group=self.group)
        return copies


class CoalescedG(RightG):
    sum = Coalesced.sum


def by_a_hook(tensors, group=None):
    """Without a Function: the row that joins them has a hook."""
    learning = [tensor for tensor in tensors if tensor.requires_grad]
    row = torch.cat([tensor.flatten() for tensor in learning])
    row = row.view_as(row)

    def summed(grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=group)
        return grad

    row.register_hook(summed)
    parts = iter(row.split([tensor.numel() for tensor in learning]))
    return [next(parts).view(tensor.shape) if tensor.requires_grad else tensor for tensor in tensors]


def by_an_all_reduce_in_place(tensors, group=None):
    """Autograd does not see it."""
    row = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(row, group=group)
    return tuple(part.view(tensor.shape) for part, tensor in zip(row.split([x.numel() for x in tensors]), tensors, strict=True))


class FusedProducts(RightMLP):
    """Gate and up as one product."""

    def units(self, h):
        weight, bias = torch.cat([self.gate.weight, self.up.weight]), torch.cat([self.gate.bias, self.up.bias])
        gate, up = F.linear(h, weight, bias).chunk(2, -1)
        return F.gelu(gate) * up


class OneFunction(torch.autograd.Function):
    """All of the MLP, with a backward by hand that sends while it computes."""

    @staticmethod
    def forward(ctx, group, x, *own):
        gate, gate_bias, up, up_bias, down, bias = own
        first, second = F.linear(x, gate, gate_bias), F.linear(x, up, up_bias)
        y = F.linear(F.gelu(first) * second, down)
        work = dist.all_reduce(y, group=group, async_op=True)
        ctx.group = group
        ctx.save_for_backward(x, first, second, *own)
        work.wait()
        return x + y + bias

    @staticmethod
    def backward(ctx, grad):
        x, first, second, gate, _, up, _, down, _ = ctx.saved_tensors
        with torch.enable_grad():
            leaf = first.detach().requires_grad_()
            active = F.gelu(leaf)
        units = grad @ down
        (first_grad,) = torch.autograd.grad(active, leaf, units * second)
        second_grad = units * active.detach()
        x_grad = first_grad @ gate + second_grad @ up
        work = dist.all_reduce(x_grad, group=ctx.group, async_op=True)
        rows = x.flatten(0, 1)
        gate_grad, up_grad = first_grad.flatten(0, 1).t() @ rows, second_grad.flatten(0, 1).t() @ rows
        down_grad = grad.flatten(0, 1).t() @ (active.detach() * second).flatten(0, 1)
        sums = [part.sum((0, 1)) for part in (first_grad, second_grad, grad)]
        work.wait()
        return None, x_grad + grad, gate_grad, sums[0], up_grad, sums[1], down_grad, sums[2]


class ByHand(RightMLP):
    def forward(self, x):
        parts = [self.gate, self.up, self.down]
        return OneFunction.apply(self.group, x, *(tensor for part in parts for tensor in (part.weight, part.bias)))


class BiasDividedByDetachedParts(RightMLP):
    """The bias before the sum, once in value: bias − (t − 1)/t of it, detached, on each rank; its gradient is whole."""

    def product(self, units):
        return super().product(units) + self.down.bias - self.down.bias.detach() * (1 - 1 / self.t)

    def last(self, x, y):
        return x + y


class Holder(nn.Module):
    """Parameters without nn.Linear."""

    def __init__(self, weight, bias=None):
        super().__init__()
        self.weight = nn.Parameter(weight.detach().clone())
        if bias is not None:
            self.bias = nn.Parameter(bias.detach().clone())


class OwnHolders(RightMLP):
    def __init__(self, whole, *others):
        super().__init__(whole, *others)
        for name in ("gate", "up", "down"):
            old = getattr(self, name)
            setattr(self, name, Holder(old.weight, old.bias))

    def units(self, h):
        return F.gelu(F.linear(h, self.gate.weight, self.gate.bias)) * F.linear(h, self.up.weight, self.up.bias)


class OneHeadAtATime(RightAttention):
    """A loop over heads, and softmax by hand."""

    def scores(self, q, k, v):
        heads = []
        for i in range(q.shape[1]):
            weights = torch.softmax(q[:, i] @ k[:, i].transpose(1, 2) * self.size**-0.5, -1)
            heads.append(weights @ v[:, i])
        return torch.stack(heads, 1)


class FusedKeysAndValues(RightAttention):
    def forward(self, x, memory):
        x, memory = self.both(x, memory)
        key, value = F.linear(memory, torch.cat(self.weights())).chunk(2, -1)
        return self.g(self.output(self.attend(self.query(x), key, value)))


class SharesByHooks(RightAttention):
    """Only where somebody shares, with all-reduces of its own."""

    def weights(self):
        if dist.get_world_size(self.sharers) == 1:
            return self.key.weight, self.value.weight
        return RightF()([self.key.weight, self.value.weight], self.sharers)


class WholeGradientsByHand(RightLoss):
    """A Function, whose backward is p and the target, by hand; both sums in one call."""

    def __call__(self, logits, targets, z, group=None):
        return LossByHand.apply(logits, targets, z, group)


class LossByHand(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, z, group):
        r, t = dist.get_rank(group), dist.get_world_size(group)
        most = logits.amax(-1)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
        counts = targets != IGNORED
        mine = counts & (targets % t == r)
        local = torch.where(mine, targets // t, 0)[..., None]
        both = torch.stack([(logits - most[..., None]).exp().sum(-1), logits.gather(-1, local)[..., 0] * mine])
        dist.all_reduce(both, group=group)
        log = both[0].log() + most
        ctx.save_for_backward(logits, log, mine, local, counts)
        ctx.z = z
        return ((log - both[1] + z * log.square()) * counts).sum() / counts.sum()

    @staticmethod
    def backward(ctx, grad):
        logits, log, mine, local, counts = ctx.saved_tensors
        p = (logits - log[..., None]).exp() * (1 + 2 * ctx.z * log)[..., None]
        p.scatter_add_(-1, local, -mine[..., None].to(p.dtype))
        return p * (counts / counts.sum().double())[..., None] * grad, None, None, None


class SumsInOneCall(RightLoss):
    def log(self):
        self.row = torch.stack([self.exponentials(), self.logits.gather(-1, self.local()[..., None])[..., 0] * self.mine()])
        return self.reduce(self.row)[0].log() + self.most

    def picked(self):
        return self.row[1]


class OfRowsThatCount(RightLoss):
    """All of a position's terms, then a product with what counts."""

    def mean(self, terms):
        return (terms * self.counts()).sum() / self.counts().sum()


ANSWERS = [
    *[("copy_in", answer) for answer in (Async, Coalesced, by_a_hook)],
    *[("reduce_out", answer) for answer in (AsyncG, CoalescedG, by_an_all_reduce_in_place)],
    *[("MLP", answer) for answer in (FusedProducts, ByHand, BiasDividedByDetachedParts, OwnHolders)],
    *[("Attention", answer) for answer in (OneHeadAtATime, FusedKeysAndValues, SharesByHooks)],
    *[("cross_entropy", answer) for answer in (RightLoss, WholeGradientsByHand, SumsInOneCall, OfRowsThatCount)],
]
