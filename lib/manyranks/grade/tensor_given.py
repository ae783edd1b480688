"""What exercise 06's checks hand out: f and g, so that no task depends on another, and what one process computes with."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from manyranks.measure.journal import Stopped

EXACT = {"dtype": torch.float64}


def f(tensors: list[Tensor], group: dist.ProcessGroup | None = None) -> list[Tensor]:
    """The tensors as they are; one all-reduce for the gradients of those that need one."""
    return list(_CopyIn.apply(group, *_tensors("f", tensors)))


def g(tensors: list[Tensor], group: dist.ProcessGroup | None = None) -> list[Tensor]:
    """Their sums over the ranks, by one all-reduce; gradients as they are."""
    return list(_ReduceOut.apply(group, *_tensors("g", tensors)))


def _tensors(name: str, tensors) -> list[Tensor]:
    if not isinstance(tensors, list | tuple) or not all(isinstance(one, Tensor) for one in tensors):
        said = type(tensors).__name__
        raise Stopped(f"{name} was called with a {said}", f"{name} takes a list of tensors: [y] = {name}([x], group)")
    return list(tensors)


def _summed(tensors: list[Tensor], group) -> list[Tensor]:
    row = torch.cat([one.flatten() for one in tensors])
    dist.all_reduce(row, group=group)
    parts = row.split([one.numel() for one in tensors])
    return [part.view(one.shape) for part, one in zip(parts, tensors, strict=True)]


class _CopyIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, group, *tensors):
        ctx.group = group
        return tuple(one.view_as(one) for one in tensors)

    @staticmethod
    def backward(ctx, *grads):
        needed = [i for i in range(len(grads)) if ctx.needs_input_grad[1 + i]]
        found = dict(zip(needed, _summed([grads[i] for i in needed], ctx.group), strict=True))
        return None, *(found.get(i) for i in range(len(grads)))


class _ReduceOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx, group, *tensors):
        return tuple(_summed(list(tensors), group))

    @staticmethod
    def backward(ctx, *grads):
        return None, *grads


class WholeMLP(nn.Module):
    """The first U rows of gate_up are the gate's, the other U are up's."""

    def __init__(self, hidden: int, units: int):
        super().__init__()
        self.gate_up, self.down = nn.Linear(hidden, 2 * units, **EXACT), nn.Linear(units, hidden, **EXACT)

    def forward(self, x_SBH: Tensor) -> Tensor:
        gate_SBU, up_SBU = self.gate_up(x_SBH).chunk(2, -1)
        return x_SBH + self.down(F.gelu(gate_SBU) * up_SBU)


class WholeAttention(nn.Module):
    """What a decoder's attention to a memory has."""

    def __init__(self, hidden: int, size: int, heads: int, kv_heads: int):
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads, size
        exact = {"bias": False, **EXACT}
        self.query, self.output = nn.Linear(hidden, heads * size, **exact), nn.Linear(heads * size, hidden, **exact)
        self.key, self.value = (nn.Linear(hidden, kv_heads * size, **exact) for _ in range(2))


class WholeBlock(nn.Module):
    """What a block with norm, MLP, dropout and residual connection has."""

    def __init__(self, hidden: int, units: int):
        super().__init__()
        self.norm = nn.LayerNorm(hidden, **EXACT)
        self.up, self.down = nn.Linear(hidden, units, **EXACT), nn.Linear(units, hidden, **EXACT)
        with torch.no_grad():
            self.norm.weight.uniform_(0.5, 1.5)
            self.norm.bias.uniform_(-1, 1)


def made(kind: type, seed: int, *sizes: int) -> nn.Module:
    """One of these classes, the same for a seed; other random numbers go on as they were."""
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        return kind(*sizes)
