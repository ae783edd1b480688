"""What the zoo of tensor parallelism is made of: right answers, in parts that wrong ones leave out or replace."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

IGNORED = -100


class Both(torch.autograd.Function):
    """One function of all tensors forward, another one of their gradients."""

    @staticmethod
    def forward(ctx, there, back, *tensors):
        ctx.back = back
        return tuple(there(tensors))

    @staticmethod
    def backward(ctx, *grads):
        return None, None, *ctx.back(grads, ctx.needs_input_grad[2:])


class RightF:
    """A right answer to copy_in."""

    def __call__(self, tensors, group=None):
        self.group = group
        return list(Both.apply(self.there, self.back, *tensors))

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


class RightG(RightF):
    """A right answer to reduce_out."""

    def there(self, tensors):
        return self.sum(tensors)

    def back(self, grads, needed):
        return grads


def linear(weight, bias=None):
    made = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, dtype=weight.dtype)
    made.weight.data.copy_(weight)
    if bias is not None:
        made.bias.data.copy_(bias)
    return made


class RightMLP(nn.Module):
    def __init__(self, whole, f, g, group=None):
        super().__init__()
        self.given_f, self.given_g, self.group = f, g, group
        self.r, self.t = dist.get_rank(group), dist.get_world_size(group)
        self.halves(whole)
        self.down = linear(self.cut(whole.down.weight.t()).t(), whole.down.bias)

    def halves(self, whole):
        (gate, up), (gate_bias, up_bias) = whole.gate_up.weight.chunk(2), whole.gate_up.bias.chunk(2)
        self.gate, self.up = linear(self.cut(gate), self.cut(gate_bias)), linear(self.cut(up), self.cut(up_bias))

    def cut(self, rows):
        return rows[self.r :: self.t]

    def f(self, x):
        return self.given_f([x], self.group)[0]

    def g(self, y):
        return self.given_g([y], self.group)[0]

    def forward(self, x):
        return self.last(x, self.g(self.product(self.units(self.f(x)))))

    def units(self, h):
        return F.gelu(self.gate(h)) * self.up(h)

    def product(self, units):
        return F.linear(units, self.down.weight)

    def last(self, x, y):
        return x + y + self.down.bias


class RightAttention(nn.Module):
    def __init__(self, whole, f, g, group, sharers):
        super().__init__()
        self.given_f, self.given_g, self.group, self.sharers = f, g, group, sharers
        self.r, self.t = dist.get_rank(group), dist.get_world_size(group)
        self.size = whole.size
        own = self.own(whole)
        kv = self.own_kv(whole)
        self.query, self.output = linear(self.cut(whole.query.weight, own)), linear(self.cut(whole.output.weight.t(), own).t())
        self.key, self.value = linear(self.cut(whole.key.weight, kv)), linear(self.cut(whole.value.weight, kv))

    def own(self, whole):
        return list(range(self.r, whole.heads, self.t))

    def own_kv(self, whole):
        return sorted({j % whole.kv_heads for j in self.own(whole)})

    def cut(self, weight, heads):
        return weight.unflatten(0, (-1, self.size))[heads].flatten(0, 1)

    def both(self, x, memory):
        return self.given_f([x, memory], self.group)

    def weights(self):
        return self.given_f([self.key.weight, self.value.weight], self.sharers)

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


class RightLoss:
    """A right answer to cross_entropy, by autograd: all-reduces in place, which it does not see."""

    def __call__(self, logits, targets, z, group=None):
        self.group, self.z, self.logits, self.targets = group, z, logits, targets
        self.r, self.t = dist.get_rank(group), dist.get_world_size(group)
        self.most = self.largest()
        return self.mean(self.terms(self.log(), self.picked()))

    def largest(self):
        most = self.logits.detach().amax(-1)
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

    def picked(self):
        return self.reduce(self.logits.gather(-1, self.local()[..., None])[..., 0] * self.mine())

    def terms(self, log, picked):
        return log - picked + self.z * log.square()

    def mean(self, terms):
        return terms[self.counts()].mean()


def all_gather(x, group):
    whole = x.new_empty(len(x) * dist.get_world_size(group), *x.shape[1:])
    dist.all_gather_single(whole, x.contiguous(), group=group)
    return whole


def reduce_scatter(x, group):
    part = x.new_empty(len(x) // dist.get_world_size(group), *x.shape[1:])
    dist.reduce_scatter_single(part, x.contiguous(), group=group)
    return part


class GatherUp(torch.autograd.Function):
    """A gather and a product; the shard is kept, and gathered again."""

    @staticmethod
    def forward(ctx, x, weight, bias, block):
        ctx.block = block
        ctx.save_for_backward(x, weight)
        return F.linear(all_gather(x, block.group), weight, bias)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        whole = all_gather(x, ctx.block.group)
        x_grad = ctx.block.gathers_grad(grad @ weight)
        return x_grad, grad.flatten(0, 1).t() @ whole.flatten(0, 1), grad.sum((0, 1)), None


class RightBlock(nn.Module):
    def __init__(self, whole, p, f, group=None):
        super().__init__()
        self.r, self.t = dist.get_rank(group), dist.get_world_size(group)
        self.p, self.given_f, self.group = p, f, group
        self.norm = nn.LayerNorm(whole.norm.normalized_shape, dtype=torch.float64)
        self.norm.load_state_dict(whole.norm.state_dict())
        self.up = linear(self.cut(whole.up.weight), self.cut(whole.up.bias))
        self.down = linear(self.cut(whole.down.weight.t()).t(), whole.down.bias)

    def cut(self, rows):
        return rows[self.r :: self.t]

    def forward(self, x, seed):
        scale, shift, bias = self.parameters_here()
        units = F.gelu(self.gather_up(F.layer_norm(x, scale.shape, scale, shift)))
        return x + self.drop(self.sum(self.product(units), bias), seed)

    def parameters_here(self):
        return self.given_f([self.norm.weight, self.norm.bias, self.down.bias], self.group)

    def gather_up(self, h):
        return GatherUp.apply(h, self.up.weight, self.up.bias, self)

    def gathers_grad(self, grad):
        return reduce_scatter(grad, self.group)

    def product(self, units):
        return F.linear(units, self.down.weight)

    def sum(self, part, bias):
        return self.scatter(part) + bias

    def scatter(self, part):
        return Both.apply(
            lambda tensors: [reduce_scatter(tensors[0], self.group)], lambda grads, _: [self.scatters_grad(grads[0])], part
        )[0]

    def scatters_grad(self, grad):
        return all_gather(grad, self.group)

    def seed(self, seed):
        return seed * self.t + self.r

    def drop(self, y, seed):
        kept = torch.rand(y.shape, generator=torch.Generator().manual_seed(self.seed(seed))) >= self.p
        return y * kept / (1 - self.p)
