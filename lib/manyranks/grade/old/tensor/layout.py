"""Which ranks are a group: all of them, or two pairs, so that a group is not the world."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

EXACT = {"dtype": torch.float64}


class Place(NamedTuple):
    """A rank's. group: None for all ranks; number: of its group; rank: within the group; sharers: its part of the group."""

    group: dist.ProcessGroup | None
    number: int
    rank: int
    sharers: dist.ProcessGroup | None = None


@dataclass(frozen=True)
class Layout:
    """n ranks in groups of t: all of them, or ranks 0 and 2, 1 and 3. share: every so many ranks of a group share something."""

    n: int
    t: int
    share: int = 0

    @property
    def groups(self) -> list[list[int]]:
        return [list(range(k, self.n, self.n // self.t)) for k in range(self.n // self.t)]

    def place(self) -> Place:
        """This rank's, with groups that all ranks make."""
        rank, found = dist.get_rank(), None
        for number, ranks in enumerate(self.groups):
            group = dist.new_group(ranks) if self.t < self.n else None
            parts = [ranks[k :: self.share] for k in range(min(self.share, self.t))]
            sharers = [dist.new_group(part) for part in parts]
            if rank in ranks:
                own = sharers[ranks.index(rank) % self.share] if self.share else None
                found = Place(group, number, ranks.index(rank), own)
        return found

    def spread(self, of_group: Callable[[int], list[Any]]) -> list[Any]:
        """By rank, what of_group(number) gives for the ranks of each group."""
        found: list[Any] = [None] * self.n
        for number, ranks in enumerate(self.groups):
            for rank, one in zip(ranks, of_group(number), strict=True):
                found[rank] = one
        return found

    def __str__(self) -> str:
        return "" if self.t == self.n else "in two pairs, "


def drawn(seed: int, *shape: int) -> torch.Tensor:
    """Normal, float64; the same for a seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), **EXACT)
