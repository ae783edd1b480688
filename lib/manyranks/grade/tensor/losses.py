"""What one process makes of the loss with a z-term, right, and wrong in known ways: from the ranks' logits, all of them."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

IGNORED = -100


@dataclass(frozen=True)
class Way:
    """How it is computed; the defaults are right.

    most: the shift in the exponentials, from all logits; sums: from the ranks' sums of exponentials, and the rank; picked: the
    target's logit; count: of the targets; z_of: the term, of the logarithm and the same less the shift; ignores: some targets.
    """

    most: Callable[[Tensor], Tensor] = lambda all_SBV: all_SBV.amax(-1)
    sums: Callable[[list[Tensor], int], Tensor] = lambda parts, rank: sum(parts)
    picked: Callable[["Picker"], Tensor] = lambda picker: picker.right()
    count: Callable[[Tensor, int, int], Tensor] = lambda targets_SB, rank, t: (targets_SB != IGNORED).sum()
    z_of: Callable[[Tensor, Tensor], Tensor] = lambda log_SB, shifted_SB: log_SB.square()
    ignores: bool = True


@dataclass(frozen=True)
class Picker:
    """The logits that a rank takes for the targets'. shards: of all ranks, each [S, B, W]."""

    shards: list[Tensor]
    targets_SB: Tensor
    rank: int

    @property
    def valid_SB(self) -> Tensor:
        return self.targets_SB.clamp(min=0)

    def right(self) -> Tensor:
        """Token k is number k // t on rank k % t."""
        return whole(self.shards).gather(-1, self.valid_SB[..., None])[..., 0]

    def of_those_that_count(self) -> Tensor:
        """Zero where the target does not count."""
        return self.right() * (self.targets_SB != IGNORED)

    def own_only(self) -> Tensor:
        """Zero where another rank has the target."""
        return self.right() * (self.valid_SB % len(self.shards) == self.rank)

    def unmasked(self, summed: bool = True) -> Tensor:
        """Number k // t on each rank, whoever has k; summed, or this rank's."""
        t = len(self.shards)
        found = [
            shard.gather(-1, (self.valid_SB // t).clamp(max=shard.shape[-1] - 1)[..., None])[..., 0] for shard in self.shards
        ]
        return sum(found) if summed else found[self.rank]

    def in_blocks(self) -> Tensor:
        """As if neighbours were on one rank."""
        width, sizes = self.shards[0].shape[-1], [shard.shape[-1] for shard in self.shards]
        rank_SB = (self.valid_SB // width).clamp(max=len(self.shards) - 1)
        found = torch.zeros_like(self.right())
        for rank, shard in enumerate(self.shards):
            local_SB = (self.valid_SB - rank * width).clamp(0, sizes[rank] - 1)
            found = found + (rank_SB == rank) * shard.gather(-1, local_SB[..., None])[..., 0]
        return found


def whole(shards: list[Tensor]) -> Tensor:
    """[S, B, V]: token k is number k // t of shard k % t."""
    count, t = sum(shard.shape[-1] for shard in shards), len(shards)
    return torch.stack([shards[k % t][..., k // t] for k in range(count)], -1)


def loss(shards: list[Tensor], targets_SB: Tensor, z: float, rank: int, way: Way) -> Tensor:
    """This rank's."""
    most_SB = way.most(torch.cat(shards, -1)).detach()
    parts = [(shard - most_SB[..., None]).exp().sum(-1) for shard in shards]
    shifted_SB = way.sums(parts, rank).log()
    log_SB = shifted_SB + most_SB
    terms_SB = log_SB - way.picked(Picker(shards, targets_SB, rank)) + z * way.z_of(log_SB, shifted_SB)
    if way.ignores:
        terms_SB = torch.where(targets_SB == IGNORED, 0.0, terms_SB)
    return terms_SB.sum() / way.count(targets_SB, rank, len(shards))
