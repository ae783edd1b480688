"""Linear layers whose weight is cut over the ranks of a group.

    t    ranks of the group        B batch   S sequence   s = S/t
    I    features that come in     O features that go out

    column-parallel   rank r has O/t rows of weight_OI: all of x, a part of the output
    row-parallel      rank r has I/t columns:           a part of x, a term of the output

(Columns and rows are those of the paper's matrix, which PyTorch keeps transposed.) One
after the other they need no communication between: what a rank's columns make, its rows
take.

    up, down = ColumnParallelLinear(h, f), RowParallelLinear(f, h)
    y_BSH = down(gelu(up(x_BSH)))           # one all-reduce forward, one backward

Source: arXiv 1909.08053, section 3; with sequence parallelism arXiv 2205.05198, section
4.2.2.
"""

from typing import NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from manyranks.parallel.tensor import gradients, overlapped
from manyranks.parallel.tensor.cuts import Cut, equal
from manyranks.parallel.tensor.gradients import halves, rows
from manyranks.parallel.tensor.mappings import (
    Group,
    autocast,
    rank,
    reduce_out,
    reduce_scatter_out,
    size,
    start_all_gather,
    start_reduce_scatter,
)


class How(NamedTuple):
    """How activations reach the ranks of a group.

    sequence_parallel: between the parallel parts each rank has S/t tokens, not all S.
    regather: what was gathered forward is gathered again backward instead of kept: 6
    all-gathers and 4 reduce-scatters a layer, not 4 and 4, and 4sbh(1 − 1/t) bytes less.
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


class _Part(nn.Module):
    """One rank's part of a linear layer, cut in dim 0 or 1 of its weight_OI."""

    dim: int

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        group: Group = None,
        **how,
    ):
        super().__init__()
        linear = nn.Linear(in_features, out_features, bias)
        self._take(linear, How(group, **how), None)

    @classmethod
    def of(cls, linear: nn.Linear, how: How, cut: Cut | None = None) -> Self:
        """This rank's part of a layer. cut: of its weight_OI, None for equal parts.

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
        self.weight = part(linear.weight, self.cut)
        whole = linear.bias is None or self.dim == 1  # a bias has a number for each output
        self.bias = linear.bias if whole else part(linear.bias, self.cut)

    def extra_repr(self) -> str:
        here = " × ".join(str(size) for size in self.weight.shape)
        return f"{self.in_features}, {self.out_features}, here {here}"


class ColumnParallelLinear(_Part):
    """y = xWᵀ + b, of which this rank has out_features/t columns.

    Whole x_BSI to y_BSO of this rank's features; with how.sequence_parallel, the shard
    x_BsI to all S tokens. The gradient of x is summed over the ranks.
    group, **how: see How. The first weights are nn.Linear's, cut: the same at every t.
    Raises ValueError where t does not divide out_features.
    """

    dim = 0

    def forward(self, x: Tensor) -> Tensor:
        return column_parallel(x, self)[0]


class EnteredColumnLinear(ColumnParallelLinear):
    """One whose input is whole already, from gather_in or copy_in: it sends nothing."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


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


def column_parallel(x: Tensor, *layers: ColumnParallelLinear) -> list[Tensor]:
    """What several column-parallel layers make of one input, gathered once for all.

    For query, key and value, or gate and up: one communication each way, not one a layer.
    Raises ValueError for a layer of another kind, or one that is cut for other ranks.
    """
    how = _how_of(layers)
    how.check_input(x)
    parameters = [y.weight for y in layers] + [y.bias for y in layers]
    x, *parameters = autocast(x, *parameters)
    if how.overlap:
        return list(overlapped.column(x, *halves(parameters), how.group))
    return list(ColumnProducts.apply(x, how, *parameters))


def _how_of(layers: tuple[nn.Module, ...]) -> How:
    hows = [y.how if isinstance(y, ColumnParallelLinear) else None for y in layers]
    if hows[0] is None or any(how != hows[0] for how in hows):
        kinds = ", ".join(type(y).__name__ for y in layers)
        raise ValueError(
            f"{kinds} read one input: all must be column-parallel, with the same options; "
            "give each of them Column()"
        )
    return hows[0]


class ColumnProducts(torch.autograd.Function):
    """copy_in or gather_in, and products with weights cut by columns.

    The two are one function so that backward can do both at a time: the saved shard is
    gathered again while the input's gradient is made, and without sequence parallelism that
    gradient is summed over the ranks while the weights' are made.
    """

    @staticmethod
    def forward(ctx, x: Tensor, how: How, *parameters: Tensor | None) -> tuple[Tensor, ...]:
        weights, biases = halves(parameters)
        whole_BSI = start_all_gather(x, how.group)() if how.sequence_parallel else x
        ctx.how, ctx.gathers = how, how.sequence_parallel and how.regather
        kept = x if ctx.gathers else whole_BSI
        # Frozen weights need no input.
        learn = any(halves(ctx.needs_input_grad[2:])[0])
        ctx.save_for_backward(kept if learn else None, *weights)
        both = zip(weights, biases, strict=True)
        # Detached, for F.linear may give a view, which no caller could change in place.
        return tuple(F.linear(whole_BSI, weight, bias).detach() for weight, bias in both)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor) -> tuple:
        kept, *weights = ctx.saved_tensors
        to_x, _, *to_parameters = ctx.needs_input_grad
        learn = any(halves(to_parameters)[0])
        gathers = ctx.gathers and learn
        whole_BSI = start_all_gather(kept, ctx.how.group) if gathers else lambda: kept
        finish = None
        if to_x:
            finish = _start_to_add(gradients.of_input(grads, weights), ctx.how)
        x_NI = rows(whole_BSI()) if learn else None
        del whole_BSI  # and with it what came, shard by shard
        of_parameters = gradients.of_parameters(grads, x_NI, to_parameters)
        return finish() if to_x else None, None, *of_parameters


def _start_to_add(grad_x: Tensor, how: How):
    """Starts to sum the ranks' gradients of x; what it returns waits and gives the sum."""
    if size(how.group) == 1:
        return lambda: grad_x
    if how.sequence_parallel:
        return start_reduce_scatter(grad_x, how.group)
    work = dist.all_reduce(grad_x, group=how.group, async_op=True)

    def whole() -> Tensor:
        work.wait()
        return grad_x

    return whole


def part(parameter: nn.Parameter, cut: Cut) -> nn.Parameter:
    """This rank's part of a parameter, which learns if that does."""
    return nn.Parameter(cut.own(parameter.detach()), parameter.requires_grad)
