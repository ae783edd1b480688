"""Tensor and sequence parallelism: a layer's matrices are cut over ranks.

    t       ranks of the group         B batch   S sequence   s = S/t
    I       features that come in      O features that go out
    x_BSI   whole: every rank has all S tokens
    x_BsI   a shard of the sequence: this rank's s tokens, in rank order

Column-parallel: rank r has O/t rows of weight_OI. All of x makes a part of the output.
Row-parallel: rank r has I/t columns. A part of x makes a term of the output. (Columns and
rows are the paper's: PyTorch keeps its matrix transposed.) What a rank's columns make, its
rows take, so that nothing is sent between the two:

    up, down = ColumnParallelLinear(h, f), RowParallelLinear(f, h)
    y_BSH = down(gelu(up(x_BSH)))           # one all-reduce forward, one backward

Messages are sent where activations enter such a part and where they leave it. The gradient
goes the other way:

    name                  forward           backward          paper
    copy_in               nothing           all-reduce        f
    reduce_out            all-reduce        nothing           f̄ (g in Megatron-LM's first)
    gather_in             all-gather        reduce-scatter    g
    reduce_scatter_out    reduce-scatter    all-gather        ḡ

Source: Shoeybi et al., "Megatron-LM", arXiv 1909.08053, section 3; with sequence
parallelism Korthikanti et al., arXiv 2205.05198, section 4.2.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

from manyranks.parallel import flat_parameters
from manyranks.parallel.collectives.messages import Group
from manyranks.parallel.tensor import overlapped
from manyranks.parallel.tensor.cuts import Cut, check_sequence, equal, rank, size
from manyranks.parallel.wrappers import Conjugate, autocast

# What happens to activations where a parallel part begins and ends


def copy_in(x: Tensor, group: Group = None) -> Tensor:
    """Returns x as it is; its gradient is the sum of what all ranks found."""
    return Conjugate.apply(x, same, partial(all_reduce, group=group))


def reduce_out(x: Tensor, group: Group = None) -> Tensor:
    """Returns the sum of all ranks' x; each rank's term has the sum's gradient."""
    return Conjugate.apply(x, partial(all_reduce, group=group), same)


def gather_in(x_BsI: Tensor, group: Group = None) -> Tensor:
    """Gathers the sequence's shards; a shard's gradient is summed over the ranks."""
    there, back = (partial(move, group=group) for move in (all_gather, reduce_scatter))
    return Conjugate.apply(x_BsI, there, back)


def reduce_scatter_out(x_BSO: Tensor, group: Group = None) -> Tensor:
    """Returns this rank's shard of the sum of all ranks' x; the gradient is gathered.

    Raises ValueError where t does not divide S.
    """
    there, back = (partial(move, group=group) for move in (reduce_scatter, all_gather))
    return Conjugate.apply(x_BSO, there, back)


def same(x: Tensor) -> Tensor:
    """Returns x as a new tensor in the same memory."""
    return x.view_as(x)


def all_reduce(x: Tensor, group: Group = None) -> Tensor:
    """Sums over the ranks, into a new tensor."""
    total = x.clone(memory_format=torch.contiguous_format)
    if size(group) > 1:
        dist.all_reduce(total, group=group)
    return total


def all_gather(x_BsI: Tensor, group: Group = None) -> Tensor:
    """Puts all ranks' shards of the sequence one after another."""
    if (t := size(group)) == 1:
        return x_BsI
    parts_tBsI = x_BsI.new_empty(t, *x_BsI.shape)
    dist.all_gather_single(parts_tBsI.flatten(0, 1), x_BsI.contiguous(), group=group)
    # A copy, unless B is 1. Detached: no view, so that a caller may change it in place.
    return parts_tBsI.movedim(0, 1).flatten(1, 2).detach()


def reduce_scatter(x_BSO: Tensor, group: Group = None) -> Tensor:
    """Sums over the ranks, and returns this rank's shard of the sequence."""
    check_sequence(x_BSO, t := size(group))
    if t == 1:
        return x_BSO
    parts_tBsO = torch.stack(x_BSO.chunk(t, 1))
    own_E = flat_parameters.reduce_scatter(parts_tBsO.view(-1), group)
    return own_E.view(parts_tBsO.shape[1:]).detach()


# Linear layers


class How(NamedTuple):
    """The way activations reach the ranks of a group.

    sequence_parallel: between the parallel parts each rank has S/t tokens, not all S.
    regather: what was gathered forward is gathered again backward instead of kept: 6
    all-gathers and 4 reduce-scatters per layer, not 4 and 4, and 4sbh(1 − 1/t) bytes less.
    overlap: messages travel while products are made, piece by piece: asynchronous tensor
    parallelism, which needs sequence_parallel.
    """

    group: Group = None
    sequence_parallel: bool = False
    regather: bool = True
    overlap: bool = False

    def __deepcopy__(self, memo: dict) -> Self:
        return self  # a copy of a layer works in the same group

    def check(self) -> Self:
        """Raises ValueError for options that do not go together."""
        if self.overlap and not (self.sequence_parallel and self.regather):
            raise ValueError(
                "overlap=True needs sequence_parallel=True and regather=True: shards "
                "travel while they are multiplied; an all-reduce's result comes as a whole"
            )
        return self

    def check_input(self, x: Tensor) -> None:
        """Raises ValueError for a shard that has no dim of the sequence."""
        if self.sequence_parallel and x.dim() < 3:
            raise ValueError(
                f"x of shape {tuple(x.shape)} with sequence_parallel=True: dim 1 is the "
                "sequence; give [batch, sequence, features]"
            )


def column_parallel(x: Tensor, *layers: "ColumnParallelLinear") -> list[Tensor]:
    """Multiplies one input by several column-parallel layers: it's copied or gathered once.

    For query, key and value, or gate and up: one communication each way, not one a layer.
    Raises ValueError for a layer of another kind, or one that is cut for other ranks.
    """
    how = layers[0].how if isinstance(layers[0], ColumnParallelLinear) else None
    if how is None or any(getattr(layer, "how", None) != how for layer in layers):
        raise ValueError(
            f"{', '.join(type(layer).__name__ for layer in layers)} read one input: all "
            "must be column-parallel, with the same options; give each of them Column()"
        )
    how.check_input(x)
    x, both = autocast(x), [(layer.weight, layer.bias) for layer in layers]
    if how.overlap:
        return overlapped.column(x, both, how.group)
    if not how.sequence_parallel:
        x_BSI = copy_in(x, how.group)
        return [F.linear(x_BSI, weight, bias) for weight, bias in both]
    x_BSI = gather_in(x, how.group)
    again = partial(all_gather, group=how.group) if how.regather else None
    learn = any(weight.requires_grad for weight, _ in both)
    with regathered(x_BSI, x, again if learn else None):
        return [F.linear(x_BSI, weight, bias) for weight, bias in both]


def regathered(
    whole_BSI: Tensor, x_BsI: Tensor, gather: Callable[[Tensor], Tensor] | None
) -> AbstractContextManager:
    """A context where products keep a shard instead of the whole sequence.

    In backward gather(x) makes the whole again, once for all of them. Hooks that are there
    already, such as a checkpoint's, are given what is kept.
    """
    if gather is None or not torch.is_grad_enabled() or whole_BSI.shape == x_BsI.shape:
        return nullcontext()
    # PyTorch has no public name for the hooks that ours hide.
    outside = torch._C._autograd._top_saved_tensors_default_hooks(False)
    pack_outside, unpack_outside = outside or (_as_it_is, _as_it_is)
    storage, version = whole_BSI.untyped_storage()._cdata, x_BsI._version
    shard, again, uses, waiting = pack_outside(x_BsI.detach()), None, 0, 0

    def pack(tensor: Tensor) -> tuple:
        nonlocal uses
        if tensor.untyped_storage()._cdata != storage:
            return None, pack_outside(tensor)
        uses += 1
        return (tensor.shape, tensor.stride(), tensor.storage_offset()), None

    def unpack(kept: tuple) -> Tensor:
        nonlocal again, waiting
        view, other = kept
        if view is None:
            return unpack_outside(other)
        if isinstance(shard, Tensor) and shard._version != version:
            raise RuntimeError("the input of a column-parallel layer was changed in place")
        if again is None:
            again, waiting = gather(unpack_outside(shard)), uses
        whole = again
        waiting -= 1
        again = whole if waiting else None  # the last product lets it go
        return whole.as_strided(*view)

    return saved_tensors_hooks(pack, unpack)


def _as_it_is(x: Tensor) -> Tensor:
    return x


class _Part(nn.Module):
    """A rank's part of a linear layer, cut in dim 0 or 1 of its weight_OI."""

    dim: int
    heads: tuple[int, ...] = ()  # of the whole layer's parts, as its table says

    def __init__(self, in_features: int, out_features: int, bias=True, group=None, **how):
        super().__init__()
        self._take(nn.Linear(in_features, out_features, bias), How(group, **how), None)

    @classmethod
    def of(cls, linear: nn.Linear, how: How, cut: Cut | None = None) -> Self:
        """Takes this rank's part of a layer.

        cut: of its weight_OI, None for equal parts

        Raises ValueError for options that do not go together, and where t does not divide.
        """
        own = cls.__new__(cls)
        nn.Module.__init__(own)
        own._take(linear, how, cut)
        return own

    def _take(self, linear: nn.Linear, how: How, cut: Cut | None) -> None:
        features = linear.weight.shape[self.dim]
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.how = how.check()
        self.cut = cut or equal(features, size(how.group), rank(how.group), self.dim)
        self.weight = self.cut.part(linear.weight)
        whole = linear.bias is None or self.dim == 1  # a bias has a number for each output
        self.bias = linear.bias if whole else self.cut.part(linear.bias)

    def extra_repr(self) -> str:
        here = " × ".join(str(size) for size in self.weight.shape)
        return f"{self.in_features}, {self.out_features}, here {here}"


class ColumnParallelLinear(_Part):
    """y = xWᵀ + b; this rank has out_features/t columns of it.

    Whole x_BSI to y_BSO of this rank's features; with how.sequence_parallel, the shard
    x_BsI to all S tokens. The gradient of x is summed over the ranks.
    group, **how: see How. The first weights are nn.Linear's, cut: the same at every t.
    Raises ValueError where t does not divide out_features.
    """

    dim = 0

    def forward(self, x: Tensor) -> Tensor:
        return column_parallel(x, self)[0]


class RowParallelLinear(_Part):
    """y = xWᵀ + b, where this rank has in_features/t features of x and makes a term of y.

    x_BSI to the sum of all ranks' terms: y_BSO, or with how.sequence_parallel this rank's
    tokens of it, y_BsO. The bias is whole on every rank and added once, to the sum.
    group, **how: see How. The first weights are nn.Linear's, cut.
    Raises ValueError where t does not divide in_features, or S with sequence_parallel.
    """

    dim = 1

    def forward(self, x: Tensor) -> Tensor:
        group, sequence_parallel, _, overlap = self.how
        self.how.check_input(x)
        if overlap:
            y = overlapped.row(x, self.weight, group)
        else:
            leave = reduce_scatter_out if sequence_parallel else reduce_out
            y = leave(F.linear(x, self.weight), group)
        return y if self.bias is None else y + self.bias.to(y.dtype)
