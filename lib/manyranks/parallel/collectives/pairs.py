"""Exchanges between pairs: in each round every rank has one partner, in the next another.

Source: Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in
MPICH", IJHPCA 19(1), 2005.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from manyranks.parallel.collectives.messages import (
    Group,
    Members,
    chunk_sizes,
    in_place,
    members,
    row_of,
)


def recursive_doubling_all_reduce(x: Tensor, group: Group = None) -> Tensor:
    """Every rank's x becomes the sum of all, in place.

    Partners 1, 2, 4, … apart swap whole tensors and add. Returns x.
    The fewest rounds, for small tensors: log₂ n. Where n is no power of two, the extra
    ranks are folded in.
    """
    return _folded(x, group, _swap_and_add)


def halving_doubling_all_reduce(x: Tensor, group: Group = None) -> Tensor:
    """Every rank's x becomes the sum of all, in place.

    A halving reduce-scatter, then a doubling all-gather. Returns x.
    2 log₂ n rounds, and each rank sends 2(n − 1)/n of the tensor, as in a ring. Where n is
    no power of two, the extra ranks are folded in, whole tensors there and back.
    Source: Rabenseifner, "Optimization of Collective Reduction Operations", ICCS 2004.
    """
    return _folded(x, group, _halve_and_double)


def pairwise_all_to_all(x: Tensor, group: Group = None) -> Tensor:
    """Rank r gets chunk r of every rank's x.

    Returns them end to end in the order of the ranks, flat: n · chunk r.
    In round k, rank r's partner is r xor k where n is a power of two; elsewhere r sends to
    r + k and receives from r − k.
    """
    everyone = members(group)
    n, rank = len(everyone.ranks), everyone.place
    chunks = row_of(x).tensor_split(n)
    result = chunks[rank].new_empty(n * chunks[rank].numel())
    parts = result.tensor_split(n)
    parts[rank].copy_(chunks[rank])
    power_of_two = n & (n - 1) == 0
    for k in range(1, n):
        to = rank ^ k if power_of_two else (rank + k) % n
        source = rank ^ k if power_of_two else (rank - k) % n
        everyone.exchange(chunks[to], to, parts[source], source)
    return result


def _folded(x: Tensor, group: Group, core: Callable[[Tensor, Members], None]) -> Tensor:
    """Runs `core` on the largest power of two of ranks.

    Of the first 2 · extra ones the even add theirs to the odd before.
    """
    everyone = members(group)
    n, rank = len(everyone.ranks), everyone.place
    extra = n - 2 ** (n.bit_length() - 1)
    folds = rank < 2 * extra
    with in_place(x) as row:
        if folds and rank % 2 == 0:
            everyone.send(row, rank + 1)
            everyone.receive(row, rank + 1)  # the whole result
            return x
        if folds:
            row.add_(everyone.receive(torch.empty_like(row), rank - 1))
        core(row, everyone.only([*range(1, 2 * extra, 2), *range(2 * extra, n)]))
        if folds:
            everyone.send(row, rank - 1)
    return x


def _swap_and_add(row: Tensor, those: Members) -> None:
    arriving = torch.empty_like(row)
    for d in _distances(those):
        partner = those.place ^ d
        row.add_(those.exchange(row, partner, arriving, partner))


def _halve_and_double(row: Tensor, those: Members) -> None:
    """Halving: partners swap the halves of what both have that the other one keeps.

    Doubling: the same way back, all kept.
    """
    n, place = len(those.ranks), those.place
    sizes = chunk_sizes(row.numel(), n)

    def block(of: int, d: int) -> Tensor:
        """The d chunks that `of` and those who differ from it by less than d share."""
        first = of // d * d
        start = sum(sizes[:first])
        return row[start : start + sum(sizes[first : first + d])]

    for d in reversed(_distances(those)):
        mine, theirs = block(place, d), block(place ^ d, d)
        mine.add_(those.exchange(theirs, place ^ d, torch.empty_like(mine), place ^ d))
    for d in _distances(those):
        those.exchange(block(place, d), place ^ d, block(place ^ d, d), place ^ d)


def _distances(those: Members) -> list[int]:
    """1, 2, 4, … below n, a power of two."""
    return [2**k for k in range(len(those.ranks).bit_length() - 1)]
