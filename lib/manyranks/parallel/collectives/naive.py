"""Naive collectives: the root talks to one rank after another, while all others wait."""

from collections.abc import Sequence

import torch
from torch import Tensor

from manyranks.parallel.collectives.messages import (
    Group,
    in_place,
    members,
    row_of,
    shard_row,
)


def naive_broadcast(x: Tensor, root: int = 0, group: Group = None) -> Tensor:
    """Every rank's x becomes the root's, in place.

    The root sends the whole tensor n − 1 times. Returns x.
    Raises ValueError for a root outside the group.
    """
    everyone = members(group, root)
    with in_place(x) as row:
        if everyone.place != root:
            everyone.receive(row, root)
        else:
            for rank in _others(everyone.ranks, root):
                everyone.send(row, rank)
    return x


def naive_reduce(x: Tensor, root: int = 0, group: Group = None) -> Tensor:
    """The root's x becomes the sum of all ranks', in place; the others' stay. Returns x.

    Raises ValueError for a root outside the group.
    """
    everyone = members(group, root)
    with in_place(x) as row:
        if everyone.place != root:
            everyone.send(row, root)
        else:
            arrived = torch.empty_like(row)
            for rank in reversed(_others(everyone.ranks, root)):
                row.add_(everyone.receive(arrived, rank))
    return x


def naive_all_reduce(x: Tensor, root: int = 0, group: Group = None) -> Tensor:
    """Every rank's x becomes the sum of all, in place.

    A naive reduce to the root, a naive broadcast from it. Returns x.
    Raises ValueError for a root outside the group.
    """
    return naive_broadcast(naive_reduce(x, root, group), root, group)


def naive_scatter(x: Tensor, root: int = 0, group: Group = None) -> Tensor:
    """The root hands each rank its chunk of x. Returns this rank's shard, flat.

    From the other ranks' x it takes only size, dtype and device.
    Raises ValueError for a root outside the group.
    """
    everyone = members(group, root)
    chunks = row_of(x).tensor_split(len(everyone.ranks))
    if everyone.place != root:
        return everyone.receive(torch.empty_like(chunks[everyone.place]), root)
    for rank in _others(everyone.ranks, root):
        everyone.send(chunks[rank], rank)
    return chunks[root].clone()


def naive_gather(
    shard: Tensor,
    root: int = 0,
    group: Group = None,
    elements: int | None = None,
) -> Tensor | None:
    """The root collects every rank's shard.

    Returns them end to end, flat, on the root, and None elsewhere.
    elements: of the whole; give it where n does not divide it, or the ranks cannot know
    each other's sizes.
    Raises ValueError for a root outside the group and a shard that is not this rank's
    chunk.
    """
    everyone = members(group, root)
    row, elements = shard_row(shard, elements, everyone)
    if everyone.place != root:
        everyone.send(row, root)
        return None
    whole = row.new_empty(elements)
    chunks = whole.tensor_split(len(everyone.ranks))
    chunks[root].copy_(row)
    for rank in reversed(_others(everyone.ranks, root)):
        everyone.receive(chunks[rank], rank)
    return whole


def _others(ranks: Sequence[int], root: int) -> list[int]:
    return [rank for rank in ranks if rank != root]
