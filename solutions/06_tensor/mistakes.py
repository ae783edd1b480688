"""Answers to 06_tensor: what is right, right in other ways, and the mistakes that are made."""

from copy import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from manyranks.grade.answers import also_right, right, slip
from manyranks.parallel.tensor import layers

# fmt: off
GROUP = "the ranks are those of `group`: dist.get_rank(group), dist.get_world_size(group), and group=group in each call"
TOGETHER = "one call for all: put them into one flat row, and cut it again afterwards"
TO_F = "f is for what's the same on all ranks and is used for different things"
TO_G = "g is for what each rank has a part of"

def other(task, name, base=None, **steps):
    """A right answer that differs in some steps."""
    globals()[name] = also_right(task)(type(name, (base or globals()[task],), steps))

class Both(torch.autograd.Function):
    """One function of all tensors forward, another one of their gradients."""

    @staticmethod
    def forward(ctx, there, back, *tensors):
        ctx.back = back
        return tuple(there(tensors))

    @staticmethod
    def backward(ctx, *grads):
        return None, None, *ctx.back(grads, ctx.needs_input_grad[2:])

# Task 1

@right("copy_in")
class CopyIn:
    def __call__(self, tensors, group=None):
        own = copy(self)  # its own for each call
        own.group = group
        return list(Both.apply(own.there, own.back, *tensors))

    def there(self, tensors):
        return tensors

    def back(self, grads, needed):
        found = iter(self.sum([grad for grad, need in zip(grads, needed, strict=True) if need]))
        return [next(found) if need else None for need in needed]

    def sum(self, tensors):
        row = torch.cat([tensor.flatten() for tensor in tensors])
        self.reduce(row)
        parts = row.split([tensor.numel() for tensor in tensors])
        return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]

    def reduce(self, row):
        dist.all_reduce(row, group=self.group)

@right("reduce_out")
class ReduceOut(CopyIn):
    def there(self, tensors):
        return self.sum(tensors)

    def back(self, grads, needed):
        return grads

copy_in, reduce_out = CopyIn, ReduceOut

for task in ("copy_in", "reduce_out"):
    other(task, f"{task}_async", reduce=lambda self, row: dist.all_reduce(row, group=self.group, async_op=True).wait())

@also_right("copy_in")
def copy_in_by_a_hook(tensors, group=None):
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

@also_right("reduce_out")
def reduce_out_in_place(tensors, group=None):
    """Autograd does not see it."""
    row = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(row, group=group)
    return tuple(part.view(tensor.shape) for part, tensor in zip(row.split([x.numel() for x in tensors]), tensors, strict=True))

def divides(self, row):
    dist.all_reduce(row, group=self.group)
    row /= dist.get_world_size(self.group)

def gathers_and_adds(self, row):
    parts = [torch.empty_like(row) for _ in range(dist.get_world_size(self.group))]
    dist.all_gather(parts, row, group=self.group)
    row.copy_(sum(parts))

def one_by_one(self, tensors):
    return [CopyIn.sum(self, [tensor])[0] for tensor in tensors]

def sum_in_place(self, tensors):
    for tensor in tensors:
        dist.all_reduce(tensor.data, group=self.group)
    return [tensor.view_as(tensor) for tensor in tensors]

def sum_of_one_in_place(self, tensors):
    row = tensors[0].detach().flatten() if len(tensors) == 1 else torch.cat([tensor.flatten() for tensor in tensors])
    self.reduce(row)
    parts = row.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape).clone() for part, tensor in zip(parts, tensors, strict=True)]

for task, name in (("copy_in", "OfF"), ("reduce_out", "OfG")):
    slip(task, f"One{name}", 0.8, "a row of one tensor is a view of it, as flatten() is, so that the sum changes what you are "
         "given: clone() it", sum=sum_of_one_in_place)
    slip(task, f"Mean{name}", 0.8, "that is a mean: sums are not divided by t", reduce=divides)
    slip(task, f"ToOne{name}", 0, "dist.reduce gives the sum to one rank only, and the others need it, too: dist.all_reduce",
         reduce=lambda self, row: dist.reduce(row, group_dst=0, group=self.group))
    slip(task, f"World{name}", 0, GROUP, says="among ranks 0, 1, 2 and 3", on=(4,),
         reduce=lambda self, row: dist.all_reduce(row))
    slip(task, f"Gathers{name}", 1, "", says="each computes with its part, and an all-reduce adds up", reduce=gathers_and_adds)
slip("copy_in", "copy_in_nothing", 0, f"that is this rank's part of the gradient: {TO_F}, so that the gradient is the sum of "
     "what the ranks find", lambda tensors, group=None: tensors)
slip("reduce_out", "reduce_out_nothing", 0, f"that is this rank's part: {TO_G}, and forward adds the parts up",
     lambda tensors, group=None: tensors)
slip("copy_in", "CopyInForward", 0, f"that is summed in forward, which is g: {TO_F}. Forward changes nothing, backward sums",
     ReduceOut)
slip("reduce_out", "ReduceOutBackward", 0, f"that is f: {TO_G}. Forward sums, backward passes the gradient on as it is",
     CopyIn)
slip("reduce_out", "ReduceOutBothWays", 0, "the gradient is summed, which is f's work: all ranks go on from the same sum and "
     "find the same gradient for it, and each part of a sum has the sum's gradient, once", CopyIn,
     there=lambda self, tensors: self.sum(tensors))
slip("reduce_out", "reduce_out_detaches", 0, "",
     lambda tensors, group=None: [ReduceOut()([tensor.detach()], group)[0] for tensor in tensors], says="result 0 has no graph")
slip("copy_in", "CopyInOneByOne", 1, "", says=TOGETHER, sum=one_by_one)
slip("copy_in", "CopyInSendsAll", 1, "what needs no gradient has none to be summed: ask ctx.needs_input_grad, and leave it "
     "out of the row", back=lambda self, grads, needed: self.sum(grads))
slip("copy_in", "CopyInInPlace", 0, "the gradient that backward gets is not yours alone: sum a copy",
     sum=lambda self, tensors: sum_in_place(self, [tensor.contiguous() for tensor in tensors]))
slip("reduce_out", "reduce_out_all_in_place", 0, "leave what you are given as it is: sum a copy, or into a new row",
     lambda tensors, group=None: [dist.all_reduce(tensor, group=group) or tensor for tensor in tensors])
slip("copy_in", "CopyInOffByOne", 0, "ctx.needs_input_grad has one entry for each argument of apply, the group's first",
     back=lambda self, grads, needed: CopyIn.back(self, grads, (False, *needed[:-1])))
slip("copy_in", "copy_in_of_a_list", 0, "",
     lambda tensors, group=None: Both.apply(lambda given: given, lambda grads, needed: grads, tensors),
     says="apply takes tensors one by one")
slip("copy_in", "CopyInViews", 0, "", says="reshape(-1) in place of view(-1)",
     sum=lambda self, tensors: CopyIn.sum(self, [tensor.view(-1).view(tensor.shape) for tensor in tensors]))
slip("reduce_out", "reduce_out_by_the_library", 0, "",
     lambda tensors, group=None: [layers.all_reduce(tensors[0].detach(), group)],
     says="manyranks.parallel.tensor.layers.all_reduce is not allowed")

# Task 2

def linear(weight, bias=None):
    made = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, dtype=weight.dtype)
    made.weight.data.copy_(weight)
    if bias is not None:
        made.bias.data.copy_(bias)
    return made

@right("MLP")
class MLP(nn.Module):
    def __init__(self, whole, f, g, group=None):
        super().__init__()
        self.given_f, self.given_g, self.group = f, g, group
        self.r, self.t = dist.get_rank(group), dist.get_world_size(group)
        self.halves(whole)
        self.down = linear(self.cut(whole.down.weight.t()).t(), whole.down.bias)
        self.more(whole)

    def halves(self, whole):
        (gate, up), (gate_bias, up_bias) = whole.gate_up.weight.chunk(2), whole.gate_up.bias.chunk(2)
        self.gate, self.up = linear(self.cut(gate), self.cut(gate_bias)), linear(self.cut(up), self.cut(up_bias))

    def cut(self, rows):
        return rows[self.r :: self.t]

    def more(self, whole):
        """Keeps nothing else."""

    def f(self, x):
        return self.given_f([x], self.group)[0]

    def g(self, y):
        return self.given_g([y], self.group)[0]

    def forward(self, x):
        return self.last(x, self.g(self.product(self.units(self.f(x)))))

    def units(self, h):
        return F.silu(self.gate(h)) * self.up(h)

    def product(self, units):
        return F.linear(units, self.down.weight)

    def last(self, x, y):
        return x + y + self.down.bias

@also_right("MLP")
class MLPWithFusedProducts(MLP):
    def units(self, h):
        weight, bias = torch.cat([self.gate.weight, self.up.weight]), torch.cat([self.gate.bias, self.up.bias])
        gate, up = F.linear(h, weight, bias).chunk(2, -1)
        return F.silu(gate) * up

class OneFunction(torch.autograd.Function):
    """All of the MLP, with a backward by hand that sends while it computes."""

    @staticmethod
    def forward(ctx, group, x, *own):
        gate, gate_bias, up, up_bias, down, bias = own
        first, second = F.linear(x, gate, gate_bias), F.linear(x, up, up_bias)
        y = F.linear(F.silu(first) * second, down)
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
            active = F.silu(leaf)
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

@also_right("MLP")
class MLPByHand(MLP):
    def forward(self, x):
        parts = [self.gate, self.up, self.down]
        return OneFunction.apply(self.group, x, *(tensor for part in parts for tensor in (part.weight, part.bias)))

other("MLP", "MLPWithTheBiasBefore", last=lambda self, x, y: x + y,  # the rest of it is detached: once in value
      product=lambda self, units: MLP.product(self, units) + self.down.bias - self.down.bias.detach() * (1 - 1 / self.t))

class Holder(nn.Module):
    """Parameters without nn.Linear."""

    def __init__(self, old):
        super().__init__()
        self.weight, self.bias = (nn.Parameter(p.detach().clone()) for p in (old.weight, old.bias))

@also_right("MLP")
class MLPOfHolders(MLP):
    def more(self, whole):
        self.gate, self.up, self.down = Holder(self.gate), Holder(self.up), Holder(self.down)

    def units(self, h):
        return F.silu(F.linear(h, self.gate.weight, self.gate.bias)) * F.linear(h, self.up.weight, self.up.bias)

HELD = (
    "the whole weights are still there: no attribute may hold them, in whatever form, and a part that is a view keeps all of "
    "its memory: clone() it"
)
def slip_that_keeps(task, points):
    """A mistake: the whole weights stay in an attribute, as arrays."""
    slip(task, f"{task}_keep_arrays", points, "", says=HELD,
         more=lambda self, whole: setattr(self, "aside", [p.detach().numpy().copy() for p in whole.parameters()]))

def keep_views(self, whole):
    gate, up = whole.gate_up.weight.detach().chunk(2)
    self.gate.weight, self.up.weight = nn.Parameter(self.cut(gate)), nn.Parameter(self.cut(up))

def cut_both_halves(self, whole):
    gate, up = whole.gate_up.weight.chunk(self.t)[self.r].chunk(2)
    gate_bias, up_bias = whole.gate_up.bias.chunk(self.t)[self.r].chunk(2)
    self.gate, self.up = linear(gate, gate_bias), linear(up, up_bias)

def change_x(self, x):
    y = MLP.forward(self, x)
    x.data.mul_(2)
    return y + x.detach() * 0.5 + 1

slip("MLP", "MLPBlocks", 2, "units are dealt in turn: rank r has the units r, r + t, r + 2t, …, not neighbors",
     cut=lambda self, rows: rows.chunk(self.t)[self.r])
slip("MLP", "MLPBothHalvesAtOnce", 2, "the first U rows of gate_up are gates, the others ups: cut each half by itself. A "
     "part of all 2U rows has gates on some ranks and ups on the others", halves=cut_both_halves)
slip("MLP", "MLPRankOfTheWorld", 2, GROUP, on=(4,), cut=lambda self, rows: rows[dist.get_rank() :: dist.get_world_size()])
slip_that_keeps("MLP", 4.25)
slip("MLP", "MLP_keep_views", 4.25, "", says=HELD, more=keep_views)
slip("MLP", "MLPEverywhere", 0, "each rank computes all units with the whole weights: compute with this rank's gate, up and "
     "down, so that they get gradients, and let g add the parts up", more=lambda self, whole: setattr(self, "aside", [whole]),
     forward=lambda self, x: self.aside[0](x))
slip("MLP", "MLPTakesTheList", 0, "", says="f and g return a list: [y] = f([x], group)",
     f=lambda self, x: self.given_f([x], self.group))
slip("MLP", "MLPWithoutG", 0.75, "that is this rank's part of the sum: g adds the parts up", g=lambda self, y: y)
slip("MLP", "MLPWithoutF", 0.75, "x's gradient through the units is only this rank's part: x has to pass through f before "
     "the units, which sums in backward", f=lambda self, x: x)
slip("MLP", "MLPSwaps", 2, "f and g are swapped: x goes through f before the units, what down gives goes through g",
     __init__=lambda self, whole, f, g, group=None: MLP.__init__(self, whole, g, f, group))
slip("MLP", "MLPBiasTTimes", 2, "each rank has added down's bias to its part, so the sum has it t times: add it after g",
     product=lambda self, units: self.down(units), last=lambda self, x, y: x + y)
slip("MLP", "MLPResidualThroughF", 2, "the residual connection's gradient is the same on all ranks, and f has summed it: "
     "give f's result to the units, and add x itself in the end",
     forward=lambda self, x: (h := self.f(x)) + self.g(self.product(self.units(h))) + self.down.bias)
slip("MLP", "MLPFEach", 3.25, "once is enough: where one tensor has several uses, one f stands in front of them all",
     f=lambda self, x: x, units=lambda self, h: F.silu(self.gate(MLP.f(self, h))) * self.up(MLP.f(self, h)))
slip("MLP", "MLPWithoutTheBias", 2, "down's bias is missing: it is added once, after g", last=lambda self, x, y: x + y)
slip("MLP", "MLPChangesX", 2, "leave what you are given as it is: compute into a new tensor", forward=change_x)

# Task 3

@right("Attention")
class Attention(nn.Module):
    def __init__(self, whole, f, g, group, sharers):
        super().__init__()
        self.given_f, self.given_g, self.group, self.sharers = f, g, group, sharers
        self.r, self.t = dist.get_rank(group), dist.get_world_size(group)
        self.size = whole.size
        own = self.own(whole)
        kv = self.own_kv(whole)
        self.query, self.output = linear(self.cut(whole.query.weight, own)), linear(self.cut(whole.output.weight.t(), own).t())
        self.key, self.value = linear(self.cut(whole.key.weight, kv)), linear(self.cut(whole.value.weight, kv))
        self.more(whole)

    def own(self, whole):
        return list(range(self.r, whole.heads, self.t))

    def own_kv(self, whole):
        return sorted({j % whole.kv_heads for j in self.own(whole)})

    def cut(self, weight, heads):
        return weight.unflatten(0, (-1, self.size))[heads].flatten(0, 1)

    def more(self, whole):
        """Keeps nothing else."""

    def both(self, x, memory):
        return self.given_f([x, memory], self.group)

    def two(self):
        return [self.key.weight, self.value.weight]

    def weights(self):
        return self.given_f(self.two(), self.sharers)

    def g(self, y):
        return self.given_g([y], self.group)[0]

    def forward(self, x, memory):
        x, memory = self.both(x, memory)
        key, value = (F.linear(memory, weight) for weight in self.weights())
        return self.g(self.output(self.attend(self.query(x), key, value)))

    def attend(self, *three):
        q, k, v = (part.unflatten(-1, (-1, self.size)).permute(1, 2, 0, 3) for part in three)
        return self.scores(q, *self.repeated(q, k, v)).permute(2, 0, 1, 3).flatten(2)

    def repeated(self, q, *both):
        return [part.repeat(1, q.shape[1] // part.shape[1], 1, 1) for part in both]

    def scores(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v)

@also_right("Attention")
class AttentionHeadByHead(Attention):
    def scores(self, q, k, v):
        weights = [torch.softmax(q[:, i] @ k[:, i].transpose(1, 2) * self.size**-0.5, -1) for i in range(q.shape[1])]
        return torch.stack([weight @ v[:, i] for i, weight in enumerate(weights)], 1)

@also_right("Attention")
class AttentionOfFusedKeysAndValues(Attention):
    def forward(self, x, memory):
        x, memory = self.both(x, memory)
        key, value = F.linear(memory, torch.cat(self.weights())).chunk(2, -1)
        return self.g(self.output(self.attend(self.query(x), key, value)))

@also_right("Attention")
class AttentionThatSharesWhereSomebodyDoes(Attention):
    def weights(self):
        return self.two() if dist.get_world_size(self.sharers) == 1 else CopyIn()(self.two(), self.sharers)

KV = "rank r needs the key/value heads of its query heads: r, r + t, … where there are t or more, else head r % kv_heads alone"
ROWS = "cut whole heads: head j is rows j·D to (j + 1)·D (columns in output): weight.unflatten(0, (-1, D))[r::t].flatten(0, 1)"

def deal_rows(self, weight, heads):
    rows = weight[self.r :: self.t]
    return rows if len(rows) == len(heads) * self.size else Attention.cut(self, weight, heads)

slip_that_keeps("Attention", 4.5)
slip("Attention", "AttentionBlocks", 1.5, "heads are dealt in turn: rank r has the query heads r, r + t, r + 2t, …, not "
     "neighbors", own=lambda self, whole: list(range(whole.heads))[self.r * whole.heads // self.t :][: whole.heads // self.t])
slip("Attention", "AttentionDealsRows", 2, ROWS, cut=deal_rows)
slip("Attention", "AttentionWithoutKeys", 3.33, "this rank has no key/value head: r % kv_heads",
     own_kv=lambda self, whole: list(range(self.r, whole.kv_heads, self.t)))
slip("Attention", "AttentionNeighboringKeys", 2, KV, own_kv=lambda self, whole:
     list(range(whole.kv_heads))[self.r * whole.kv_heads // self.t :][: max(1, whole.kv_heads // self.t)])
slip("Attention", "AttentionDoesNotShare", 0.5, "several ranks have this key/value head, and each finds only what its own "
     "query heads add to the gradient: sum it over `sharers`. f is for anything that's the same on several ranks and is "
     "used for different things: weights, too", weights=lambda self: self.two())
slip("Attention", "AttentionSharesWithAll", 0.5, "key's and value's gradients are summed over ranks that have other heads: "
     "only `sharers` have this rank's", weights=lambda self: self.given_f(self.two(), self.group))
slip("Attention", "AttentionMemoryWithoutF", 0.5, "memory comes to all ranks as x does: it has to pass through f, too, in "
     "the same call", both=lambda self, x, memory: (self.given_f([x], self.group)[0], memory))
slip("Attention", "AttentionFEach", 3.5, "", says=TOGETHER,
     both=lambda self, x, memory: [self.given_f([one], self.group)[0] for one in (x, memory)])
slip("Attention", "AttentionWithoutG", 0.5, "that is the part of this rank's heads: g adds the parts up", g=lambda self, y: y)
slip("Attention", "AttentionNeighborsShare", 2, "query head j uses key/value head j % kv_heads. repeat_interleave, and sdpa's "
     "enable_gqa, let neighbors share one: with heads dealt in turn, a rank's query head i uses its key/value head i % (how "
     "many it has)",
     repeated=lambda self, q, *both: [part.repeat_interleave(q.shape[1] // part.shape[1], 1) for part in both])
slip("Attention", "AttentionRankOfTheWorld", 2, GROUP, on=(4,),
     own=lambda self, whole: list(range(dist.get_rank(), whole.heads, dist.get_world_size())))

# Task 4

IGNORED = -100

@right("cross_entropy")
class CrossEntropy:
    """By autograd, which does not see all-reduces in place."""

    def __call__(self, logits, targets, z, group=None):
        self.group, self.z, self.logits, self.targets = group, z, logits, targets
        self.r, self.t = dist.get_rank(group), dist.get_world_size(group)
        self.most = self.largest()
        return self.mean(self.terms(self.log(), self.picked()))

    def own_largest(self):
        return self.logits.detach().amax(-1)

    def largest(self):
        most = self.own_largest()
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self.group)
        return most

    def exponentials(self):
        return (self.logits - self.most[..., None]).exp().sum(-1)

    def reduce(self, tensor):
        dist.all_reduce(tensor, group=self.group)
        return tensor

    def log(self):
        return self.reduce(self.exponentials()).log() + self.most

    def counts(self):
        return self.targets != IGNORED

    def mine(self):
        return self.counts() & (self.targets % self.t == self.r)

    def local(self):
        return torch.where(self.mine(), self.targets // self.t, 0)

    def own(self):
        return self.logits.gather(-1, self.local()[..., None])[..., 0]

    def picked(self):
        return self.reduce(self.own() * self.mine())

    def terms(self, log, picked):
        return log - picked + self.z * log.square()

    def mean(self, terms):
        return terms[self.counts()].mean()

cross_entropy = CrossEntropy

class LossByHand(torch.autograd.Function):
    @staticmethod
    def forward(ctx, answer, logits, *others):
        ctx.answer = answer
        return CrossEntropy.__call__(answer, logits, *others)

    @staticmethod
    def backward(ctx, upstream):
        answer, z_log = ctx.answer, 2 * ctx.answer.z * ctx.answer.kept
        grad = (answer.logits - answer.kept[..., None]).exp() * (1 + z_log)[..., None]
        grad = grad.scatter_add(-1, answer.local()[..., None], -answer.mine()[..., None].to(grad.dtype))
        return None, grad * answer.share(upstream)[..., None], None, None, None

@also_right("cross_entropy")
class CrossEntropyByHand(CrossEntropy):
    def __call__(self, *given):
        return LossByHand.apply(copy(self), *given, *[None] * (4 - len(given)))

    def log(self):
        self.kept = CrossEntropy.log(self)
        return self.kept

    def share(self, upstream):
        return self.counts() * upstream / self.counts().sum()

@also_right("cross_entropy")
class CrossEntropyInTwoCalls(CrossEntropy):
    def log(self):
        self.row = torch.stack([self.exponentials(), self.own() * self.mine()])
        return self.reduce(self.row)[0].log() + self.most

    def picked(self):
        return self.row[1]

other("cross_entropy", "CrossEntropyOfRowsThatCount",
      mean=lambda self, terms: (terms * self.counts()).sum() / self.counts().sum())

UPSTREAM = "the loss was multiplied by a number: multiply by backward's argument, the gradient of the loss, which need not be 1"
WIDTH = "where t does not divide V, some ranks have one more: do not count on V / t, but on the logits' own width"
BLOCKS = "token k is number k // t on rank k % t, not in a block: not k − r·W on rank k // W"
SHIFT = "the shift by the largest logit has no gradient: take the maximum of logits.detach()"

def all_parts(logits, group):
    """All logits on every rank, in a list."""
    r, t, own = dist.get_rank(group), dist.get_world_size(group), logits.shape[-1]

    def gather(tensors):
        padded = F.pad(tensors[0], (0, -(-61 // t) - own), value=-1e30)
        parts = [torch.empty_like(padded) for _ in range(t)]
        dist.all_gather(parts, padded.contiguous(), group=group)
        return parts

    return Both.apply(gather, lambda grads, _: [grads[r][..., :own]], logits)

def loss_of(parts, targets, z):
    """Of all logits: target k is number k // n in part k % n."""
    log = torch.stack([part.logsumexp(-1) for part in parts]).logsumexp(0)
    picked = 0
    for k, part in enumerate(parts):
        mine = (targets != IGNORED) & (targets % len(parts) == k)
        local = torch.where(mine, targets // len(parts), 0)
        picked = picked + part.gather(-1, local[..., None])[..., 0] * mine
    return (log - picked + z * log.square())[targets != IGNORED].mean()

slip("cross_entropy", "LossOfAllLogits", 1.6, "", says="it made a tensor of 9.07 kB; the largest logits of a rank have 3.02 kB",
     __call__=lambda self, logits, targets, z, group=None:
     loss_of([torch.stack(all_parts(logits, group), -1).flatten(2)], targets, z))
slip("cross_entropy", "LossOfAllParts", 1.6, "", says="parts that are gathered into a list count as one tensor",
     __call__=lambda self, logits, targets, z, group=None: loss_of(all_parts(logits, group), targets, z))
slip("cross_entropy", "LossWithoutTheMaximum", 1.6, "exp overflows at 710 in float64: subtract the largest logit first, and "
     "add it to the logarithm again", largest=lambda self: torch.zeros_like(self.logits[..., 0]).detach())
slip("cross_entropy", "LossWithItsOwnMaximum", 1.6, "each rank has subtracted its own largest logit, and sums of "
     "exponentials with different shifts do not add up: the maximum of all ranks first, by dist.ReduceOp.MAX",
     largest=lambda self: self.own_largest())
slip("cross_entropy", "LossSumsMaxima", 1.6, "exp overflows all the same: is the first all-reduce one of dist.ReduceOp.MAX? "
     "Without it, maxima are added up", on=(4,), largest=lambda self: self.reduce(self.own_largest()))
slip("cross_entropy", "LossWithItsOwnSum", 1.6, "the sum of exponentials is only that of this rank's tokens: add the ranks' "
     "sums up before the logarithm", log=lambda self: self.exponentials().log() + self.most)
slip("cross_entropy", "LossWithItsOwnTarget", 1.6, "a target's logit is on one rank: the others put in 0, and an all-reduce "
     "gives it to all", picked=lambda self: self.own() * self.mine())
slip("cross_entropy", "LossOfEveryRanksTarget", 1.6, "every rank has taken a logit for every target, also for those that are "
     "not its own: target k is on rank k % t alone; the others put in 0", picked=lambda self: self.reduce(self.own()),
     local=lambda self: (self.targets.clamp(min=0) // self.t).clamp(max=self.logits.shape[-1] - 1))
slip("cross_entropy", "LossInBlocks", 1.6, BLOCKS,
     mine=lambda self: self.counts() & (self.targets // -(-61 // self.t) == self.r),
     local=lambda self: (self.targets - self.r * -(-61 // self.t)).clamp(0, self.logits.shape[-1] - 1))
slip("cross_entropy", "LossIndexesByTheIgnored", 0, "", says="a target may be −100, which is no token",
     local=lambda self: torch.where(self.targets % self.t == self.r, self.targets // self.t, 0))
slip("cross_entropy", "LossCountsTheIgnored", 1.6, "the mean is over the targets that count: those of −100 are not among them",
     mean=lambda self, terms: torch.where(self.counts(), terms, 0.0).mean())
slip("cross_entropy", "LossWithoutTokenZero", 1.6, "token 0 counts like any other: only −100 is no token",
     counts=lambda self: self.targets > 0)
slip("cross_entropy", "LossMeanOfItsOwn", 1.6, "the mean is over all targets that count, of all ranks' tokens: every rank "
     "knows them", mean=lambda self, terms: terms[self.counts()].sum() / self.mine().sum())
slip("cross_entropy", "LossWithoutZ", 1.6, "the z-term is missing: z·(log Z)², for each target that counts",
     terms=lambda self, log, picked: log - picked)
slip("cross_entropy", "LossWithoutTheOneMore", 1.6, WIDTH,
     mine=lambda self: CrossEntropy.mine(self) & (self.targets // self.t < 61 // self.t))
slip("cross_entropy", "LossWithTheFirstRanksMaximum", 1.6, "", says="on 3 ranks, logits near ±900, rank 0: the loss",
     own_largest=lambda self: self.logits.detach().amax(-1) - 1e4 * (self.r > 0))
slip("cross_entropy", "LossWithAZOfItsOwn", 1.6, "", says="the loss", terms=lambda self, log, picked:
     log - picked + 0.05 * log.square())
slip("cross_entropy", "LossThroughTheLargest", 1.6, SHIFT, own_largest=lambda self: self.logits.amax(-1))
slip("cross_entropy", "LossWithoutUpstream", 1.6, UPSTREAM, CrossEntropyByHand,
     share=lambda self, upstream: self.counts().double() / self.counts().sum())
slip("cross_entropy", "LossSumsInBackward", 1.6, "the gradient is t times too large: each rank has the same loss, and its "
     "own logits' gradient is whole without any sum",
     reduce=lambda self, tensor: CopyIn()(ReduceOut()([tensor], self.group), self.group)[0])
slip("cross_entropy", "LossWithoutTheGroup", 1.6, GROUP, on=(4,),
     __call__=lambda self, logits, targets, z, group=None: CrossEntropy.__call__(self, logits, targets, z))

# Task 5

class GatherUp(torch.autograd.Function):
    """A gather and a product; the shard is kept, and gathered again."""

    @staticmethod
    def forward(ctx, x, weight, bias, block):
        whole = block.gather(x)
        ctx.block, ctx.kept = block, block.kept(whole)
        ctx.save_for_backward(x, weight)
        return F.linear(whole, weight, bias)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        whole = ctx.block.gather(x) if ctx.kept is None else torch.cat([*map(torch.as_tensor, ctx.kept)])
        x_grad = ctx.block.gathers_grad(grad @ weight)
        return x_grad, grad.flatten(0, 1).t() @ whole.flatten(0, 1), grad.sum((0, 1)), None

@right("Block")
class Block(nn.Module):
    def __init__(self, whole, p, f, group=None):
        super().__init__()
        self.r, self.t = dist.get_rank(group), dist.get_world_size(group)
        self.p, self.given_f, self.group = p, f, group
        self.norm = nn.LayerNorm(whole.norm.normalized_shape, dtype=torch.float64)
        self.norm.load_state_dict(whole.norm.state_dict())
        self.up = linear(self.cut(whole.up.weight), self.cut(whole.up.bias))
        self.down = linear(self.cut(whole.down.weight.t()).t(), whole.down.bias)
        self.more(whole)

    def cut(self, rows):
        return rows[self.r :: self.t]

    def more(self, whole):
        """Keeps nothing else."""

    def forward(self, x, seed):
        scale, shift, bias = self.parameters_here()
        normed = F.layer_norm(self.before(x), scale.shape, scale, shift)
        units = F.gelu(self.gather_up(normed))
        return x + self.drop(self.sum(F.linear(units, self.down.weight), bias), seed)

    def before(self, x):
        return x

    def three(self):
        return [self.norm.weight, self.norm.bias, self.down.bias]

    def parameters_here(self):
        return self.given_f(self.three(), self.group)

    def gather_up(self, h):
        return GatherUp.apply(h, self.up.weight, self.up.bias, self)

    def kept(self, whole):
        """Nothing: backward gathers again."""

    def gather(self, x):
        whole = x.new_empty(len(x) * self.t, *x.shape[1:])
        dist.all_gather_single(whole, x.contiguous(), group=self.group)
        return whole

    def reduce_scatter(self, x):
        part = x.new_empty(len(x) // self.t, *x.shape[1:])
        dist.reduce_scatter_single(part, x.contiguous(), group=self.group)
        return part

    def gathers_grad(self, grad):
        return self.reduce_scatter(grad)

    def sum(self, part, bias):
        return self.scatter(part) + bias

    def scatter(self, part):
        (own,) = Both.apply(lambda parts: [self.reduce_scatter(parts[0])], lambda grads, _: [self.gather(grads[0])], part)
        return own

    def seed(self, seed):
        return seed * self.t + self.r

    def drop(self, y, seed):
        kept = torch.rand(y.shape, generator=torch.Generator().manual_seed(self.seed(seed))) >= self.p
        return y * kept / (1 - self.p)

@also_right("Block")
class BlockByLists(Block):
    def reduce_scatter(self, x):
        parts = [part.contiguous() for part in x.chunk(self.t)]
        own = torch.empty_like(parts[0])
        dist.reduce_scatter(own, parts, group=self.group)
        return own

    def gather(self, x):
        parts = [torch.empty_like(x) for _ in range(self.t)]
        dist.all_gather(parts, x.contiguous(), group=self.group)
        return torch.cat(parts)

@also_right("Block")
class BlockByOlderNames(Block):
    def reduce_scatter(self, x):
        own = x.new_empty(len(x) // self.t, *x.shape[1:])
        dist.reduce_scatter_tensor(own, x.contiguous(), group=self.group)
        return own

    def gather(self, x):
        whole = x.new_empty(len(x) * self.t, *x.shape[1:])
        dist.all_gather_into_tensor(whole, x.contiguous(), group=self.group)
        return whole

def gathered(block, h):
    """With gradients; autograd keeps it where it is used."""
    return Both.apply(lambda own: [block.gather(own[0])], lambda grads, _: [block.gathers_grad(grads[0])], h)[0]

@also_right("Block")
class BlockByHooksOnSavedTensors(Block):
    """A gather with gradients, whose result is kept as a shard."""

    def gather_up(self, h):
        whole = gathered(self, h)
        shapes = whole.shape, whole.flatten(0, 1).shape

        def pack(tensor):
            return (h.detach(), tensor.shape) if tensor.shape in shapes else (tensor, None)

        def unpack(kept):
            tensor, was = kept
            return tensor if was is None else self.gather(tensor).view(was)

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return self.up(whole)

@also_right("Block")
class BlockWithFunctionalDropout(Block):
    def drop(self, y, seed):
        with torch.random.fork_rng([]):
            torch.manual_seed(self.seed(seed) + 1000)
            return F.dropout(y, self.p)

other("Block", "BlockWithItsOwnF", parameters_here=lambda self: CopyIn()(self.three(), self.group))

@also_right("Block")
class BlockThatKeepsMoreOfItsPositions(Block):
    """A norm by hand, and dropout with a mask in float64."""

    def forward(self, x, seed):
        scale, shift, bias = self.parameters_here()
        apart = x - x.mean(-1, keepdim=True)
        normed = apart / (apart.square().mean(-1, keepdim=True) + self.norm.eps).sqrt()
        units = F.gelu(self.gather_up(normed * scale + shift))
        return x + self.drop(self.sum(F.linear(units, self.down.weight), bias), seed)

    def drop(self, y, seed):
        generator = torch.Generator().manual_seed(self.seed(seed))
        return y * ((torch.rand(y.shape, generator=generator) >= self.p).double() / (1 - self.p))

slip_that_keeps("Block", 5.7)
slip("Block", "BlockBlocks", 2.4, "units are dealt in turn: rank r has the units r, r + t, r + 2t, …, not neighbors",
     cut=lambda self, rows: rows.chunk(self.t)[self.r])
slip("Block", "BlockWithoutSums", 2.4, "norm's parameters and down's bias work on this rank's positions only, so that "
     "each rank finds a part of their gradients: f is for what's the same on all ranks and is used for different things. One f "
     "for the three", parameters_here=lambda self: self.three())
slip("Block", "BlockThreeCalls", 4.8, "one all-reduce for the gradients of norm and of down's bias: f takes a list",
     parameters_here=lambda self: [self.given_f([p], self.group)[0] for p in self.three()])
slip("Block", "BlockFOnX", 2.4, "x's shard is this rank's alone: not through f, which would add up gradients of different "
     "positions", before=lambda self, x: self.given_f([x], self.group)[0])
slip("Block", "BlockBiasTTimes", 2.4, "each rank has added down's bias to its part, so the sum has it t times: add it "
     "after the reduce-scatter", sum=lambda self, part, bias: self.scatter(part + bias))
slip("Block", "BlockOwnGradient", 2.4, "the gradient of what was gathered is only this rank's: each rank has used all "
     "positions, so the gradients of a position are added up over the ranks, and go back to the one that has it: a "
     "reduce-scatter", gathers_grad=lambda self, grad: grad.chunk(self.t)[self.r].clone())
slip("Block", "BlockGathersUnseen", 2.4, "autograd does not see what dist's calls do: inside a torch.autograd.Function, "
     "backward says what becomes of a gradient", gathers_grad=lambda self, grad: None)
slip("Block", "BlockAllReduces", 4.8, "an all-reduce gives each rank all positions, with twice the bytes of a "
     "reduce-scatter: what is outside the units has a rank's positions only",
     scatter=lambda self, part: CopyIn()(ReduceOut()([part], self.group), self.group)[0].chunk(self.t)[self.r])
slip("Block", "BlockKeepsTheGathered", 5.1, "", says="which keeps the shard and gathers it again in backward",
     gather_up=lambda self, h: self.up(gathered(self, h)))
slip("Block", "BlockKeepsParts", 5.1, "", says="neither whole nor in parts",
     kept=lambda self, whole: [part.clone() for part in whole.chunk(self.t)])
slip("Block", "BlockWithOneMask", 4.8, "", says="each rank has other positions, so it needs", seed=lambda self, seed: seed)
slip("Block", "BlockSeedsMeet", 4.8, "", says="seed * t + rank is another number for each pair",
     seed=lambda self, seed: seed + self.r)
slip("Block", "BlockDrawsGlobally", 2.4, "", says="dropped other elements when seed 7 came again",
     more=lambda self, whole: torch.manual_seed(100 + self.r), drop=lambda self, y, seed: F.dropout(y, self.p))
def dropping(name, says, kept):
    """By kept(y, p, generator), in place of a number for each element."""
    slip("Block", name, 4.8, "", says=says, drop=lambda self, y, seed:
         y * kept(y, self.p, torch.Generator().manual_seed(self.seed(seed))) / (1 - self.p))

dropping("BlockDropsFeatures", "not each alone", lambda y, p, its: torch.rand(y.shape[-1], generator=its) >= p)
dropping("BlockDropsTooFew", "of the elements; p is 37.5 %", lambda y, p, its:
         torch.rand(y.shape, generator=its) >= 0.3 * (p > 0))
dropping("BlockDropsJustSoMany", "37.5 % of the elements in each mask", lambda y, p, its:
         (torch.randperm(y.numel(), generator=its) >= p * y.numel()).view_as(y))
slip("Block", "BlockForgetsToDivide", 2.4, "an element of the sum is either dropped or divided by 1 − p. Dropout comes last, "
     "before x is added: after the reduce-scatter and the bias, and on this rank's positions",
     drop=lambda self, y, seed: Block.drop(self, y, seed) * (1 - self.p))
slip("Block", "BlockWithoutTheGroup", 2.4, GROUP, on=(4,), says="in two pairs",
     __init__=lambda self, whole, p, f, group=None: Block.__init__(self, whole, p, f, None))
