"""Which slice of a parameter each rank of a tensor-parallel group holds."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Cut(NamedTuple):
    """One dim of a whole parameter, of which rank r has the elements spans[r].

    place: this rank's. Spans of several ranks may be the same: these hold copies. A span
    shorter than the longest one is filled up with zeros at its end.
    """

    dim: int
    spans: tuple[tuple[int, int], ...]
    place: int

    @property
    def copies(self) -> tuple[int, ...]:
        """The ranks that have the same elements as this one, itself included."""
        start, stop = own = self.spans[self.place]
        if start == stop:  # nothing but filling
            return (self.place,)
        return tuple(r for r, span in enumerate(self.spans) if span == own)

    @property
    def longest(self) -> int:
        """Elements of a shard in the cut dim."""
        return max(stop - start for start, stop in self.spans)

    def own(self, whole: Tensor) -> Tensor:
        """This rank's shard, a tensor of its own."""
        start, stop = self.spans[self.place]
        shape = list(whole.shape)
        shape[self.dim] = self.longest
        shard = whole.new_zeros(shape)
        shard.narrow(self.dim, 0, stop - start).copy_(
            whole.narrow(self.dim, start, stop - start)
        )
        return shard

    def whole(self, shards: Sequence[Tensor]) -> Tensor:
        """The parameter from all ranks' shards, in rank order; no copies, no filling."""
        first = dict(zip(reversed(self.spans), reversed(shards), strict=True))
        parts = [first[a, b].narrow(self.dim, 0, b - a) for a, b in sorted(first)]
        return torch.cat(parts, self.dim)


def equal(size: int, t: int, place: int, dim: int = 0, what: str = "features") -> Cut:
    """Equal slices. Raises ValueError where t does not divide the size; what: its name."""
    if size % t:
        allowed = ", ".join(str(d) for d in range(1, size + 1) if size % d == 0)
        raise ValueError(
            f"{size} {what} on {t} tensor-parallel ranks: each needs as many; "
            f"give one of {allowed} ranks, or a multiple of {t} {what}"
        )
    return Cut(dim, tuple((r * size // t, (r + 1) * size // t) for r in range(t)), place)


def by_heads(size: int, heads: int, t: int, place: int, dim: int = 0) -> Cut:
    """Whole heads. With fewer heads than ranks, t / heads neighbours have copies of one.

    Raises ValueError where neither of heads and t divides the other, for copies of the
    input of a row-parallel layer (dim 1), and for a size that heads do not divide.
    """
    if size % heads:
        raise ValueError(
            f"{size} features do not make {heads} heads of one size: correct heads="
        )
    if heads % t and t % heads:
        raise ValueError(
            f"{heads} heads on {t} tensor-parallel ranks: one must divide the other, for a "
            "rank has whole heads; give another number of ranks"
        )
    if dim == 1 and heads < t:
        raise ValueError(
            f"{heads} heads on {t} tensor-parallel ranks: a row-parallel layer would add "
            f"up copies; give at most {heads} ranks, or a multiple of {t} heads"
        )
    each, owners = size // heads, max(1, t // heads)
    count = max(1, heads // t)
    first = [r // owners * count * each for r in range(t)]
    return Cut(dim, tuple((a, a + count * each) for a in first), place)


def padded(size: int, t: int, place: int, dim: int = 0) -> Cut:
    """Slices of ⌈size/t⌉, the last ones shorter or empty: a vocabulary's."""
    each = -(-size // t)
    spans = tuple((min(r * each, size), min((r + 1) * each, size)) for r in range(t))
    return Cut(dim, spans, place)
