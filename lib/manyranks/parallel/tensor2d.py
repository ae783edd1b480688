"""Tensor parallelism in two dimensions: x, the weight and y all in blocks, one a rank.

The ranks are a square, a mesh of q × q. Rank (i, j) has of each matrix one block of 1/q²:

    x_NI         tokens i, features j     N tokens   I features that come in
    weight_OI    rows j, columns i        O features that go out
    y_NO         tokens i, features j

(The papers' weight is PyTorch's, transposed.) In step k of q all of mesh row i get the
block x(i, k) from its owner, and all of mesh column j the block of the weight to multiply
it with: y(i, j) = Σ_k x(i, k) · weight(j, k)ᵀ. No rank ever has a whole matrix; in one
dimension each has all of x.

A rank receives (q − 1)/q² · (N·I + I·O) elements forward. Backward it receives the same
blocks again, and as many elements in sums of gradients.
Sources: van de Geijn and Watts, "SUMMA: Scalable Universal Matrix Multiplication
Algorithm", Concurrency 9(4), 1997; Xu et al., "An Efficient 2D Method for Training
Super-Large Deep Learning Models" (Optimus), arXiv 2104.05343.
"""

from typing import NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from manyranks.parallel.collectives import (
    ring_all_gather,
    ring_all_reduce,
    tree_broadcast,
    tree_reduce,
)


class SummaLinear(nn.Module):
    """y = xWᵀ + b on a square of ranks: the block x(i, j) to the block y(i, j).

    mesh: a DeviceMesh of q × q. .weight: [O/q, I/q]; .bias: [O/q], the same on all ranks
    of a mesh column. The first weights are nn.Linear's, cut: seed all ranks alike.
    Raises ValueError for a mesh that is no square, and for features that q does not divide.
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool, mesh: DeviceMesh
    ) -> None:
        super().__init__()
        self._take(nn.Linear(in_features, out_features, bias), mesh)

    @classmethod
    def of(cls, linear: nn.Linear, mesh: DeviceMesh) -> Self:
        """This rank's block of an existing layer, which is the same on all ranks."""
        own = cls.__new__(cls)
        nn.Module.__init__(own)
        own._take(linear, mesh)
        return own

    def _take(self, linear: nn.Linear, mesh: DeviceMesh) -> None:
        self.square = square(mesh)
        q, (i, j), _ = self.square
        _check(q, in_features=linear.in_features, out_features=linear.out_features)
        block_OI = linear.weight.detach().chunk(q)[j].chunk(q, 1)[i]
        self.weight = nn.Parameter(block_OI.clone(), linear.weight.requires_grad)
        self.bias = None
        if linear.bias is not None:
            own_O = linear.bias.detach().chunk(q)[j].clone()
            self.bias = nn.Parameter(own_O, linear.bias.requires_grad)

    def forward(self, x: Tensor) -> Tensor:
        """x: [tokens/q, I/q] of this rank's place, or with more dims before the last."""
        return _Summa.apply(x, self.weight, self.bias, self.square)


class Line(NamedTuple):
    """The ranks of one mesh row, or column. roots: where each stands in the group."""

    group: dist.ProcessGroup
    roots: tuple[int, ...]

    def broadcast(self, own: Tensor, k: int, here: int) -> Tensor:
        """The k-th one's block, for all; here: which one this rank is."""
        block = own.contiguous() if k == here else torch.empty_like(own)
        return tree_broadcast(block, self.roots[k], self.group)

    def add(self, term: Tensor, k: int) -> Tensor:
        """The sum of all terms, which only the k-th one gets."""
        return tree_reduce(term, self.roots[k], self.group)


class Square(NamedTuple):
    """q × q ranks, of which this is the one at place (i, j), in mesh row i and column j."""

    q: int
    place: tuple[int, int]
    lines: tuple[Line, Line]  # mesh row i, mesh column j


def square(mesh: DeviceMesh) -> Square:
    """A mesh as a square. Raises ValueError for one that has not two axes of equal size."""
    shape = tuple(mesh.shape)
    if len(shape) != 2 or shape[0] != shape[1]:
        raise ValueError(
            f"a mesh of shape {shape}: SUMMA needs two axes of equal size; make it by "
            'init_device_mesh("cpu", (q, q)) on q² ranks: 1, 4, 9, 16, …'
        )
    if mesh.get_coordinate() is None:
        raise ValueError(f"rank {dist.get_rank()} is not in the mesh {mesh.mesh.tolist()}")
    i, j = mesh.get_coordinate()
    members = mesh.mesh[i].tolist(), mesh.mesh[:, j].tolist()
    groups = mesh.get_group(1), mesh.get_group(0)
    lines = (
        Line(group, tuple(dist.get_group_rank(group, rank) for rank in ranks))
        for group, ranks in zip(groups, members, strict=True)
    )
    return Square(shape[0], (i, j), tuple(lines))


class _Summa(torch.autograd.Function):
    """In each of three products one matrix stays; the others come, or leave as terms."""

    @staticmethod
    def forward(
        ctx, x: Tensor, weight_OI: Tensor, bias_O: Tensor | None, s: Square
    ) -> Tensor:
        ctx.square = s
        ctx.save_for_backward(x, weight_OI)
        (i, j), (row, column) = s.place, s.lines
        x_NI = x.flatten(0, -2)
        y_NO = x_NI.new_zeros(len(x_NI), len(weight_OI))
        for k in range(s.q):
            x_k, weight_k = row.broadcast(x_NI, k, j), column.broadcast(weight_OI, k, i)
            torch.addmm(y_NO, x_k, weight_k.mT, out=y_NO)
        if bias_O is not None:
            y_NO += bias_O
        return y_NO.unflatten(0, x.shape[:-1])

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple:
        x, weight_OI = ctx.saved_tensors
        grad_NO, s = grad.flatten(0, -2), ctx.square
        to_x, to_weight, to_bias, _ = ctx.needs_input_grad
        grad_x = _of_x(grad_NO, weight_OI, s).view_as(x) if to_x else None
        grad_weight = _of_weight(grad_NO, x.flatten(0, -2), s) if to_weight else None
        # The ranks of a mesh column have the same bias and different tokens.
        grad_bias = ring_all_reduce(grad_NO.sum(0), s.lines[1].group) if to_bias else None
        return grad_x, grad_weight, grad_bias, None


def _of_x(grad_NO: Tensor, weight_OI: Tensor, s: Square) -> Tensor:
    """Of x(i, k): Σ_j grad(i, j) · weight(j, k). Weights come, terms leave."""
    (i, j), (row, column) = s.place, s.lines
    for k in range(s.q):
        term_NI = row.add(grad_NO @ column.broadcast(weight_OI, k, i), k)
        if k == j:
            own_NI = term_NI
    return own_NI


def _of_weight(grad_NO: Tensor, x_NI: Tensor, s: Square) -> Tensor:
    """Of weight(j, k): Σ_i grad(i, j)ᵀ · x(i, k). Inputs come, terms leave."""
    (i, j), (row, column) = s.place, s.lines
    for k in range(s.q):
        term_OI = column.add(grad_NO.mT @ row.broadcast(x_NI, k, j), k)
        if k == i:
            own_OI = term_OI
    return own_OI


def cut(whole: Tensor, mesh: DeviceMesh) -> Tensor:
    """This rank's block of a tensor [tokens, features] that all ranks have.

    Of more dims than two, all but the last are tokens. A rank's own gradients flow through.
    Raises ValueError for tokens or features that q does not divide.
    """
    q, (i, j), _ = square(mesh)
    rows = whole.flatten(0, -2)
    _check(q, tokens=rows.shape[0], features=rows.shape[1])
    return rows.chunk(q)[i].chunk(q, 1)[j].contiguous()


def join(block: Tensor, mesh: DeviceMesh) -> Tensor:
    """The whole tensor [tokens, features] from the ranks' blocks, on all of them.

    Gradients do not flow through.
    """
    q, _, (row, column) = square(mesh)
    block = block.detach().flatten(0, -2)
    for line, dim in ((row, 1), (column, 0)):
        found = ring_all_gather(block, line.group).view(q, *block.shape)
        block = torch.cat([found[root] for root in line.roots], dim)
    return block


def _check(q: int, **sizes: int) -> None:
    for name, size in sizes.items():
        if size % q:
            raise ValueError(
                f"{name}={size} on a square of {q} × {q} ranks is cut into {q} equal "
                f"parts: give a multiple of {q}, for example {size + q - size % q}"
            )
