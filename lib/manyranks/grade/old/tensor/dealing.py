"""Dealt in turn: which rows and columns of a whole weight a rank has, right or as typical mistakes cut them."""

from collections.abc import Callable

import torch
from torch import Tensor

Cut = Callable[[Tensor, int, int, int], Tensor]  # of a whole tensor, along a dim, the part of rank r of t


def dealt(whole: Tensor, dim: int, rank: int, t: int) -> Tensor:
    """Number k is on rank k % t."""
    return whole.index_select(dim, torch.arange(rank, whole.shape[dim], t))


def in_blocks(whole: Tensor, dim: int, rank: int, t: int) -> Tensor:
    """Neighbours stay together."""
    return whole.chunk(t, dim)[rank]


def heads(cut: Cut, size: int) -> Cut:
    """The same of heads, each of so many rows or columns."""

    def of_heads(whole: Tensor, dim: int, rank: int, t: int) -> Tensor:
        apart = whole.unflatten(dim, (-1, size))
        return cut(apart, dim, rank, t).flatten(dim, dim + 1)

    return of_heads
