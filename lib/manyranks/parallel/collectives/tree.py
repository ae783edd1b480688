"""Binomial trees: whoever has the tensor helps to spread it.

So n ranks take log₂ n rounds, not n − 1.

Ranks are counted from the root on: v = 0 is the root, v = 1 the rank after it, and so on
round to the one before it. In the round of distance d, v and v + d are partners; the
distances are 1, 2, 4, … or the same backwards.
Source: Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in
MPICH", IJHPCA 19(1), 2005.
"""

import torch
from torch import Tensor

from manyranks.parallel.collectives.messages import (
    Group,
    Members,
    chunk_sizes,
    in_place,
    members,
    row_of,
    shard_row,
)


def tree_broadcast(x: Tensor, root: int = 0, group: Group = None) -> Tensor:
    """Every rank's x becomes the root's, in place.

    Each round doubles the ranks that have it. Returns x.
    Raises ValueError for a root outside the group.
    """
    tree, n, v = _tree(group, root)
    with in_place(x) as row:
        for d in _distances(n):
            if v < d and v + d < n:
                tree.send(row, v + d)
            elif d <= v < 2 * d:
                tree.receive(row, v - d)
    return x


def tree_reduce(x: Tensor, root: int = 0, group: Group = None) -> Tensor:
    """The root's x becomes the sum of all ranks', in place; the others' stay.

    A broadcast backwards, adding. Returns x.
    Raises ValueError for a root outside the group.
    """
    tree, n, v = _tree(group, root)
    with in_place(x) as row:
        total = row if v == 0 else row.clone()
        arrived = torch.empty_like(row)
        for d in reversed(_distances(n)):
            if v < d and v + d < n:
                total.add_(tree.receive(arrived, v + d))
            elif d <= v < 2 * d:
                tree.send(total, v - d)
    return x


def tree_all_reduce(x: Tensor, root: int = 0, group: Group = None) -> Tensor:
    """Every rank's x becomes the sum of all, in place.

    A tree reduce to the root, a tree broadcast from it. Returns x.
    Raises ValueError for a root outside the group.
    """
    return tree_broadcast(tree_reduce(x, root, group), root, group)


def tree_scatter(x: Tensor, root: int = 0, group: Group = None) -> Tensor:
    """Each rank that holds chunks hands on the further half of them.

    Returns this rank's shard, flat.
    From the other ranks' x it takes only size, dtype and device.
    Raises ValueError for a root outside the group.
    """
    tree, n, v = _tree(group, root)
    row = row_of(x)
    sizes = [chunk_sizes(row.numel(), n)[rank] for rank in tree.ranks]
    chunks = row.tensor_split(n)
    # The chunks from v on; the root holds all, the others nothing yet.
    held = [chunks[rank] for rank in tree.ranks]
    for d in reversed(_distances(n)):
        if v % (2 * d) == 0 and v + d < n:
            tree.send(torch.cat(held[d:]), v + d)
            held = held[:d]
        elif v % (2 * d) == d:
            mine = sizes[v : v + d]
            held = list(tree.receive(row.new_empty(sum(mine)), v - d).split(mine))
    return held[0].clone()  # a view would keep the whole tensor alive


def tree_gather(
    shard: Tensor,
    root: int = 0,
    group: Group = None,
    elements: int | None = None,
) -> Tensor | None:
    """A scatter backwards.

    Returns all ranks' shards end to end, flat, on the root, and None elsewhere.
    elements: of the whole; give it where n does not divide it, or the ranks cannot know
    each other's sizes.
    Raises ValueError for a root outside the group and a shard that is not this rank's
    chunk.
    """
    tree, n, v = _tree(group, root)
    row, elements = shard_row(shard, elements, members(group))
    sizes = [chunk_sizes(elements, n)[rank] for rank in tree.ranks]
    held = [row]
    for d in _distances(n):
        if v % (2 * d) == 0 and v + d < n:
            held.append(tree.receive(row.new_empty(sum(sizes[v + d : v + 2 * d])), v + d))
        elif v % (2 * d) == d:
            tree.send(torch.cat(held), v - d)
    before_root = sum(chunk_sizes(elements, n)[:root])
    return torch.cat(held).roll(before_root) if v == 0 else None


def _tree(group: Group, root: int) -> tuple[Members, int, int]:
    """Everyone in the order root, root + 1, …; how many they are; this rank's v."""
    everyone = members(group, root)
    n = len(everyone.ranks)
    tree = everyone.only([(root + v) % n for v in range(n)])
    return tree, n, tree.place


def _distances(n: int) -> list[int]:
    """1, 2, 4, … below n."""
    return [2**k for k in range((n - 1).bit_length())]
