"""Exercise 06: f and g, so that no task needs another's answer; what one process computes with; the ranks' groups."""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from manyranks.given.numbers import EXACT, normal, seed_of, whole
from manyranks.measure.journal import Stopped
from manyranks.measure.watch import Watch

POSITIONS, BATCH, WORDS = 9, 2, 61  # of logits
_AS_IT_WAS = "as it was"
STRIDED = "not contiguous: "  # a mark
_INPUTS = {"allgather": 1, "allgather_base": 1, "reduce_scatter_base": 1, "alltoall_base": 1}  # their place among arguments


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
        self.norm = nn.LayerNorm(hidden, **EXACT)
        self.up, self.down = nn.Linear(hidden, units, **EXACT), nn.Linear(units, hidden, **EXACT)
        with torch.no_grad():
            self.norm.weight.uniform_(0.5, 1.5)
            self.norm.bias.uniform_(-1, 1)


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

    def loss(self, rank: int, n: int, seed: int) -> tuple["Case", Tensor, Tensor, float]:
        """This rank's logits; all targets, and the z-loss's factor."""
        number, r = self.at(rank, n)
        targets = whole(WORDS, (POSITIONS, BATCH), seed, number)
        targets[-2:, 0] = targets[0, 1] = -100
        targets[1:3, 1] = torch.tensor([WORDS - 1, WORDS - 2])  # the last ones of ranks, also of those that have one more
        whose_SB1 = torch.arange(POSITIONS * BATCH).view(POSITIONS, BATCH, 1) % self.t  # the rank with the largest logits
        shift_SB1, z = self.offset * (2.0 * (whose_SB1 == r) - 1), (0.05 + seed_of(seed) % 7 / 10) * (1 + (self.offset > 0))
        mine = len(range(r, WORDS, self.t))
        return self, normal((POSITIONS, BATCH, mine), seed, "logits", rank) * 3 + shift_SB1, targets, z


class Place(NamedTuple):
    """A rank's. group: None for all ranks; r: in the group; sharers: who has the same heads."""

    group: dist.ProcessGroup | None
    r: int
    t: int
    sharers: dist.ProcessGroup | None


def place_of(case: Case, share: int = 0) -> Place:
    """This rank's, with groups that all ranks make. share: every so many ranks of a group share something."""
    n, rank, found = dist.get_world_size(), dist.get_rank(), None
    for number in range(n // case.t):
        ranks = list(range(number, n, n // case.t))
        group = dist.new_group(ranks) if case.t < n else None
        parts = [ranks[k::share] for k in range(min(share, case.t))]
        sharers = [dist.new_group(part) for part in parts]
        if rank in ranks:
            r = ranks.index(rank)
            found = Place(group, r, case.t, sharers[r % share] if share else None)
    return found


def in_pairs(n: int) -> tuple[int, str]:
    """The size of groups that are not the world where there can be some, and what reports say of them."""
    return (2, "in two pairs, ") if n == 4 else (n, "")


def untouched(tensors: list[Tensor], before: list[Tensor]) -> str:
    return _AS_IT_WAS if all(map(torch.equal, tensors, before)) else "changed"


class Made(TorchDispatchMode):
    """Inside, notes calls whose input is not contiguous: Gloo copies it in silence, NCCL refuses it.

    largest: bytes of the largest tensor that an operator makes; all that a gather fills counts as one.
    """

    def __init__(self, watch: Watch):
        super().__init__()
        self.largest, self._watch, self._given = 0, watch, set()

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


def nodes(y: Tensor) -> list:
    """The graph's functions, which may keep something of their own."""
    met, todo = {}, [y.grad_fn]
    while todo:
        if (node := todo.pop()) is not None and id(node) not in met:
            met[id(node)] = node
            todo += [following for following, _ in node.next_functions]
    return list(met.values())
