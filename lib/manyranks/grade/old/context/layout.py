"""The layout of the exercise: folded in the middle, the late chunk first."""

import torch
from torch import Tensor


def places(seq: int, n: int) -> list[Tensor]:
    """For each rank the positions of its tokens: of 2n chunks, those of n + rank and of n − 1 − rank."""
    chunks = torch.arange(seq).chunk(2 * n)
    return [torch.cat((chunks[n + rank], chunks[n - 1 - rank])) for rank in range(n)]


def dealt(whole: Tensor, n: int) -> list[Tensor]:
    """Each rank's part of a whole sequence, which is the first dimension."""
    return [whole[own_S] for own_S in places(len(whole), n)]


def visible_pairs(rank: int, n: int) -> int:
    """Pairs of chunks, one of this rank's queries and one of any keys, of which some query sees some key."""
    chunks = n + rank, n - 1 - rank
    return sum(chunk + 1 for chunk in chunks)
