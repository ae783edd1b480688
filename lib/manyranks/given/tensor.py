"""Exercise 06: f and g, so that no task needs another's answer; what one process computes with; the ranks' groups."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from manyranks.given.numbers import EXACT, seed_of
from manyranks.measure.journal import Stopped
from manyranks.measure.watch import Watch

STRIDED = "not contiguous: "  # a mark
_INPUTS = {"allgather": 1, "allgather_base": 1, "reduce_scatter_base": 1, "alltoall_base": 1}  # their place among arguments


def f(tensors: list[Tensor], group: dist.ProcessGroup | None = None) -> list[Tensor]:
    """Returns the tensors as they are; one all-reduce for the gradients of those that need one."""
    return _apply("f", tensors, group)


def g(tensors: list[Tensor], group: dist.ProcessGroup | None = None) -> list[Tensor]:
    """Returns their sums over the ranks, by one all-reduce; gradients as they are."""
    return _apply("g", tensors, group)


def _apply(name: str, tensors, group) -> list[Tensor]:
    if not isinstance(tensors, list | tuple) or not all(isinstance(one, Tensor) for one in tensors):
        said = type(tensors).__name__
        raise Stopped(f"{name} was called with a {said}", f"{name} takes a list of tensors: [y] = {name}([x], group)")
    return list(_Sum.apply(group, name == "g", *tensors))


class _Sum(torch.autograd.Function):
    """Sums over the ranks, in forward or in backward."""

    @staticmethod
    def forward(ctx, group, there, *tensors):
        ctx.group, ctx.there = group, there
        return tuple(_summed(tensors, group) if there else [one.view_as(one) for one in tensors])

    @staticmethod
    def backward(ctx, *grads):
        if ctx.there:
            return None, None, *grads
        needed = ctx.needs_input_grad[2:]
        sums = iter(_summed([grad for grad, need in zip(grads, needed, strict=True) if need], ctx.group))
        return None, None, *(next(sums) if need else None for need in needed)


def _summed(tensors: Sequence[Tensor], group) -> list[Tensor]:
    row = torch.cat([one.flatten() for one in tensors])
    dist.all_reduce(row, group=group)
    parts = row.split([one.numel() for one in tensors])
    return [part.view(one.shape) for part, one in zip(parts, tensors, strict=True)]


class WholeMLP(nn.Module):
    """The first U rows of gate_up are the gate's, the other U are up's."""

    def __init__(self, hidden: int, units: int):
        super().__init__()
        self.gate_up, self.down = nn.Linear(hidden, 2 * units, **EXACT), nn.Linear(units, hidden, **EXACT)

    def forward(self, x_SBH: Tensor) -> Tensor:
        gate_SBU, up_SBU = self.gate_up(x_SBH).chunk(2, -1)
        return x_SBH + self.down(F.silu(gate_SBU) * up_SBU)


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
        self.norm, self.up = nn.LayerNorm(hidden, **EXACT), nn.Linear(hidden, units, **EXACT)
        self.down = nn.Linear(units, hidden, **EXACT)
        nn.init.uniform_(self.norm.weight, 0.5, 1.5)
        nn.init.uniform_(self.norm.bias, -1, 1)


def made(kind: type, sizes: tuple[int, ...], *words) -> nn.Module:
    """One of these classes, the same for these words."""
    with torch.random.fork_rng([]):
        torch.manual_seed(seed_of(*words))
        return kind(*sizes)


# Where a rank stands, and what it sees of an answer


class Case(NamedTuple):
    """Groups of t ranks; note: as reports say it. Which fields count depends on the task.

    unused: whether rank 1 does not use the second result; alone: whether there is one tensor; heads: of queries, and of keys
    and values; offset: of logits; drops: the p of dropout; strided: whether x and the result's gradient are not
    contiguous.
    """

    t: int
    note: str
    unused: bool = False
    alone: bool = False
    heads: tuple[int, int] = (0, 0)
    offset: float = 0.0
    drops: float = 0.0
    strided: bool = False

    def __str__(self) -> str:
        return self.note

    def at(self, rank: int, n: int) -> tuple[int, int]:
        """The number of a rank's group, and its place there."""
        return rank % (n // self.t), rank // (n // self.t)


def groups_of(case: Case, share: int = 0) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """This rank's group, None for all ranks, and those of it that share something: every `share`-th. All ranks make all."""
    n, rank, found = dist.get_world_size(), dist.get_rank(), {}
    for number in range(n // case.t):
        ranks = list(range(number, n, n // case.t))
        group = dist.new_group(ranks) if case.t < n else None
        found |= dict.fromkeys(ranks, (group, None))
        for k in range(share):
            found |= dict.fromkeys(ranks[k::share], (group, dist.new_group(ranks[k::share])))
    return found[rank]


def in_pairs(n: int) -> tuple[int, str]:
    """The size of groups that are not the world where there can be some, and what reports say of them."""
    return (2, "in two pairs, ") if n == 4 else (n, "")


def untouched(tensors: list[Tensor], before: list[Tensor]) -> str:
    return "as it was" if all(map(torch.equal, tensors, before)) else "changed"


class Made(TorchDispatchMode):
    """Inside, notes calls whose input is not contiguous: Gloo copies it in silence, NCCL refuses it.

    largest: bytes of the largest tensor that an operator makes; all that a gather fills counts as one.
    """

    def __init__(self, watch: Watch):
        super().__init__()
        self.largest, self._watch = 0, watch

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = {one.untyped_storage()._cdata for one in _leaves((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        made = [one.untyped_storage() for one in _leaves(result)]
        self.largest = max([self.largest, *(one.nbytes() for one in made if one._cdata not in before)])
        space, _, name = func._schema.name.partition("::")
        name = name.strip("_")
        if space == "c10d" and name == "allgather":
            self.largest = max(self.largest, sum(one.nbytes for one in _leaves(args[0])))
        if space == "c10d" and not all(one.is_contiguous() for one in _leaves(args[_INPUTS.get(name, len(args)) :][:1])):
            self._watch.mark(STRIDED + ("all_gather" if "gather" in name else "reduce_scatter"))
        return result


def _leaves(values_) -> list[Tensor]:
    return [one for one in tree_leaves(values_) if isinstance(one, Tensor) and one.layout == torch.strided]
