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
    target's logit; count: of the targets; z_of: the term, of the logarithm and the same less the shift; ignores: some targets;
    adds: the shift to the logarithm.
    """

    most: Callable[[Tensor], Tensor] = lambda all_SBV: all_SBV.amax(-1)
    sums: Callable[[list[Tensor], int], Tensor] = lambda parts, rank: sum(parts)
    picked: Callable[["Picker"], Tensor] = lambda picker: picker.right()
    count: Callable[[Tensor, int, int], Tensor] = lambda targets_SB, rank, t: (targets_SB != IGNORED).sum()
    z_of: Callable[[Tensor, Tensor], Tensor] = lambda log_SB, shifted_SB: log_SB.square()
    ignores: bool = True
    adds: bool = True


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

    def without_last(self, all_ranks: bool) -> Tensor:
        """Zero where a target is the last of its rank's logits; or only beyond the first V // t."""
        count, t = sum(shard.shape[-1] for shard in self.shards), len(self.shards)
        last_SB = self.valid_SB + t >= count if all_ranks else self.valid_SB // t >= count // t
        return self.right() * ~last_SB

    def in_own_blocks(self) -> Tensor:
        """As if neighbours were on one rank, and each rank had as many as this one."""
        found = torch.zeros_like(self.right())
        for rank, shard in enumerate(self.shards):
            local_SB, mine_SB = self.valid_SB % shard.shape[-1], self.valid_SB // shard.shape[-1] == rank
            found = found + mine_SB * shard.gather(-1, local_SB[..., None])[..., 0]
        return found

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
    log_SB = shifted_SB + most_SB * way.adds
    terms_SB = log_SB - way.picked(Picker(shards, targets_SB, rank)) + z * way.z_of(log_SB, shifted_SB)
    if way.ignores:
        terms_SB = torch.where(targets_SB == IGNORED, 0.0, terms_SB)
    return terms_SB.sum() / way.count(targets_SB, rank, len(shards))


@dataclass(frozen=True)
class Slope:
    """How the gradient is computed; the defaults are right.

    z: how much of z·log Z is added to 1; target: [k = y]; masked: on its rank only; places: also at 0, on the ranks that do not
    have it; ignores: some targets; scale: of all; times: t of them; own: p over a rank's own tokens; largest: also the shift's.
    """

    z: float = 2
    target: bool = True
    masked: bool = True
    places: bool = False
    ignores: bool = True
    scale: float = 1
    times: bool = False
    own: bool = False
    largest: bool = False


def gradients(shards: list[Tensor], targets_SB: Tensor, z: float, upstream: float, slope: Slope) -> list[Tensor]:
    """Those of the ranks' logits; upstream: what backward is given."""
    log_SB, t = torch.cat(shards, -1).logsumexp(-1), len(shards)
    valid_SB = targets_SB != IGNORED
    found = []
    for rank, shard in enumerate(shards):
        p = (shard - (shard.logsumexp(-1) if slope.own else log_SB)[..., None]).exp()
        weight_SB = 1 + slope.z * z * log_SB
        grad = p * weight_SB[..., None]
        if slope.largest:
            grad = grad.scatter_add(-1, shard.argmax(-1, keepdim=True), (weight_SB * (1 - p.sum(-1)))[..., None])
        if slope.target:
            grad = grad - _ones(shard, targets_SB, rank, t, slope)
        grad = grad * (valid_SB | (not slope.ignores))[..., None] / valid_SB.sum() * upstream * slope.scale
        found.append(grad * t if slope.times else grad)
    return found


def _ones(shard: Tensor, targets_SB: Tensor, rank: int, t: int, slope: Slope) -> Tensor:
    """[k = y], of this rank's k."""
    mine_SB = (targets_SB != IGNORED) & ((targets_SB % t == rank) | (not slope.masked))
    local_SB = (targets_SB.clamp(min=0) // t).clamp(max=shard.shape[-1] - 1)
    if slope.places:
        local_SB = torch.where(mine_SB, local_SB, 0)
    hot = (mine_SB | slope.places)[..., None].to(shard.dtype)
    return torch.zeros_like(shard).scatter(-1, local_SB[..., None], hot)
