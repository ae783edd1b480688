"""Where ranks stand, by a table of all ranks: what the learner computes by division, looked up."""

from functools import cache
from itertools import permutations

import torch
from torch import Tensor

Sizes = dict[str, int]
Order = tuple[str, ...]


def table(sizes: Sizes) -> Tensor:
    """The ranks, one dim an axis, the outermost first."""
    degrees = list(sizes.values())
    return torch.arange(torch.Size(degrees).numel()).view(degrees)


def count(sizes: Sizes) -> int:
    return torch.Size(list(sizes.values())).numel()


def coordinates(rank: int, sizes: Sizes) -> dict[str, int]:
    at = (table(sizes) == rank).nonzero()[0].tolist()
    return dict(zip(sizes, at, strict=True))


def rank_of(at: dict[str, int], sizes: Sizes) -> int:
    return int(table(sizes)[tuple(at.get(axis, 0) for axis in sizes)])


def groups(sizes: Sizes, axes: Order) -> list[list[int]]:
    """Each in rising order, the groups by their first rank."""
    names = list(sizes)
    inner = [i for i, axis in enumerate(names) if axis in axes]
    outer = [i for i, axis in enumerate(names) if axis not in axes]
    degrees = torch.Size(sizes[names[i]] for i in inner)
    return sorted(sorted(row) for row in table(sizes).permute(*outer, *inner).reshape(-1, degrees.numel()).tolist())


def group_of(rank: int, sizes: Sizes, axes: Order) -> list[int]:
    return next(ranks for ranks in groups(sizes, axes) if rank in ranks)


def present(sizes: Sizes, *axes: str) -> Order:
    return tuple(axis for axis in axes if axis in sizes)


def in_order(sizes: Sizes, order: Order) -> Sizes:
    return {axis: sizes[axis] for axis in order}


@cache
def _leaving(sizes: tuple[tuple[str, int], ...], axis: str, node: int) -> float:
    """The share of ranks whose next one in the axis's rings is on another node."""
    own = dict(sizes)
    if own[axis] == 1:
        return 0.0
    hops = [pair for ranks in groups(own, (axis,)) for pair in zip(ranks, ranks[1:] + ranks[:1], strict=True)]
    return sum(one // node != other // node for one, other in hops) / len(hops)


def leaving(sizes: Sizes, axis: str, node: int) -> float:
    """The share of ranks whose next one in the axis's rings is on another node."""
    return _leaving(tuple(sizes.items()), axis, node)


def crossing(traffic: dict[str, float], sizes: Sizes, node: int) -> float:
    """Bytes that a rank sends from node to node, in the mean over ranks."""
    return sum(traffic[axis] * leaving(sizes, axis, node) for axis in sizes)


def fewest(traffic: dict[str, float], sizes: Sizes, node: int) -> float:
    """Such bytes of the best order."""
    return min(crossing(traffic, in_order(sizes, order), node) for order in permutations(sizes))
