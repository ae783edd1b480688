"""Random numbers, the same for the same words. Those of one rank, or of one task, tell nothing of another's."""

from hashlib import sha256
from random import Random

import torch
from torch import Tensor

EXACT = {"dtype": torch.float64}  # with digits that float32 has not


def seed_of(*words) -> int:
    """Returns a seed that only these words have."""
    return int.from_bytes(sha256(repr(words).encode()).digest()[:7])


def generator(*words) -> torch.Generator:
    """Returns one that begins where these words say."""
    return torch.Generator().manual_seed(seed_of(*words))


def normal(shape: tuple[int, ...], *words, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=generator(*words), dtype=dtype)


def whole(below: int, shape: tuple[int, ...], *words, least: int = 0) -> Tensor:
    """Returns whole numbers, int64."""
    return torch.randint(least, below, shape, generator=generator(*words))


def drawn(*words) -> Random:
    """Returns Python's own kind."""
    return Random(seed_of(*words))


def uneven(shape: tuple[int, ...]) -> Tensor:
    """Returns the same numbers for a shape, no two of them equal: what a result is multiplied by."""
    return torch.cos(torch.arange(torch.Size(shape).numel(), dtype=torch.float64)).view(shape)
