"""The slices of a parameter that tensor-parallel ranks hold, and the words of a table.

styles = {"embedding.tokens": Vocabulary(), "layers.*.mlp.up": Column(), …}
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from manyranks.parallel.collectives.messages import Group

Span = tuple[int, int]


def size(group: Group) -> int:
    """Returns t; 1 in a process without torch.distributed."""
    return dist.get_world_size(group) if dist.is_initialized() else 1


def rank(group: Group) -> int:
    """Returns this rank's place in the group."""
    return dist.get_rank(group) if dist.is_initialized() else 0


class Cut(NamedTuple):
    """A dim of a whole parameter; rank r has its slices spans[r], side by side.

    place: this rank's. Several ranks' slices may be the same: these hold copies. A shard
    that is shorter than the longest is filled up with zeros at its end.
    """

    dim: int
    spans: tuple[tuple[Span, ...], ...]
    place: int

    @property
    def span(self) -> Span:
        """This rank's one slice."""
        (span,) = self.spans[self.place]
        return span

    @property
    def copies(self) -> tuple[int, ...]:
        """The ranks that have the same elements as this one, itself included."""
        own = self.spans[self.place]
        if not _length(own):  # nothing but filling
            return (self.place,)
        return tuple(r for r, spans in enumerate(self.spans) if spans == own)

    @property
    def longest(self) -> int:
        """Elements of a shard in the cut dim."""
        return max(map(_length, self.spans))

    @property
    def size(self) -> int:
        """Elements of the whole parameter in the cut dim."""
        return max(stop for spans in self.spans for _, stop in spans)

    def slices(self, shard: Tensor, r: int) -> list[Tensor]:
        """Rank r's slices, parts of its shard without the filling."""
        found, at = [], 0
        for start, stop in self.spans[r]:
            found.append(shard.narrow(self.dim, at, stop - start))
            at += stop - start
        return found

    def own(self, whole: Tensor) -> Tensor:
        """Copies this rank's shard into a new tensor."""
        shape = list(whole.shape)
        shape[self.dim] = self.longest
        shard = whole.new_zeros(shape)
        own = self.spans[self.place]
        for part, (start, stop) in zip(self.slices(shard, self.place), own, strict=True):
            part.copy_(whole.narrow(self.dim, start, stop - start))
        return shard

    def part(self, parameter: nn.Parameter) -> nn.Parameter:
        """Makes this rank's part of a parameter, which learns if that does."""
        return nn.Parameter(self.own(parameter.detach()), parameter.requires_grad)

    def whole(self, shards: Sequence[Tensor]) -> Tensor:
        """Puts the parameter together from all ranks' shards; no copies, no filling."""
        found = {}
        for r, shard in enumerate(shards):
            for span, part in zip(self.spans[r], self.slices(shard, r), strict=True):
                found.setdefault(span, part)
        return torch.cat([found[span] for span in sorted(found)], self.dim)


def _length(spans: tuple[Span, ...]) -> int:
    return sum(stop - start for start, stop in spans)


def equal(size: int, t: int, place: int, dim: int = 0, what: str = "features") -> Cut:
    """Makes equal slices.

    what: the size's name

    Raises ValueError where t does not divide it.
    """
    if size % t:
        allowed = ", ".join(str(d) for d in range(1, size + 1) if size % d == 0)
        raise ValueError(
            f"{size} {what} on {t} tensor-parallel ranks: each needs as many; "
            f"give one of {allowed} ranks, or a multiple of {t} {what}"
        )
    return _of_firsts([r * size // t for r in range(t)], size // t, size, place, dim)


def by_heads(size: int, heads: int, t: int, place: int, dim: int = 0) -> Cut:
    """Leaves heads whole. If there are fewer than t, t / heads neighbors have each.

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
    each, owners = size // heads * max(1, heads // t), max(1, t // heads)
    return _of_firsts([r // owners * each for r in range(t)], each, size, place, dim)


def padded(size: int, t: int, place: int, dim: int = 0) -> Cut:
    """Makes slices of ⌈size/t⌉, the last ones shorter or empty: a vocabulary's."""
    each = -(-size // t)
    return _of_firsts([min(r * each, size) for r in range(t)], each, size, place, dim)


def _of_firsts(firsts: Sequence[int], each: int, size: int, place: int, dim: int) -> Cut:
    return Cut(dim, tuple(((a, min(a + each, size)),) for a in firsts), place)


def side_by_side(parts: Sequence[Cut]) -> Cut:
    """Makes one cut of several, of parts that lie end to end in a parameter.

    Raises ValueError where ranks would have copies of one part and not of another.
    """
    spans, start = [()] * len(parts[0].spans), 0
    for cut in parts:
        if len(cut.copies) > 1 and len(parts) > 1:
            raise ValueError(
                f"parts of one layer on {len(spans)} tensor-parallel ranks, which would "
                f"share one of them: give at most {len(set(cut.spans))} ranks, or make a "
                "layer of each part"
            )
        for r, ((a, b),) in enumerate(cut.spans):
            spans[r] += ((start + a, start + b),)
        start += cut.size
    return Cut(parts[0].dim, tuple(spans), parts[0].place)


# The sequence


def check_sequence(x_BSH: Tensor, t: int) -> None:
    """Raises ValueError where the sequence has no t equal shards."""
    if x_BSH.dim() < 2 or x_BSH.shape[1] % t:
        raise ValueError(
            f"a tensor of shape {tuple(x_BSH.shape)} on {t} ranks: sequence parallelism "
            f"cuts dim 1, the sequence, into {t} shards; give a multiple of {t} tokens"
        )


def own_part(x_BSH: Tensor, group: Group = None) -> Tensor:
    """Copies this rank's shard of the sequence: a view would keep the whole in memory."""
    check_sequence(x_BSH, size(group))
    own_BsH = x_BSH.chunk(size(group), 1)[rank(group)]
    return own_BsH.clone(memory_format=torch.contiguous_format)


# What the table says of a module


@dataclass(frozen=True)
class Column:
    """A linear layer by its output features.

    heads: how many they are, not to be cut
    parts: how many parts lie end to end in them, as a fused layer's gate and up: each is
        cut, and a rank's slices stand side by side. Parts of other sizes have heads:
        heads=(q, k, v).
    entered: the module around it has its input from gather_in or copy_in already
    """

    heads: int | tuple[int, ...] | None = None
    parts: int = 1
    entered: bool = False

    def __repr__(self) -> str:
        parts = f", parts={self.parts}" if self.parts > 1 else ""
        return f"Column(heads={self.heads}{parts})"

    def cut(self, features: int, t: int, place: int, what: str) -> Cut:
        """Raises ValueError for sizes that do not go together."""
        if isinstance(self.heads, tuple):
            heads, each = self.heads, features // sum(self.heads)
            sizes = [each * count for count in heads]
        else:
            heads, sizes = [self.heads] * self.parts, [features // self.parts] * self.parts
        if sum(sizes) != features:
            raise ValueError(
                f"{features} {what} do not make the parts of {self!r}: correct it"
            )
        return side_by_side(
            [
                by_heads(size, count, t, place) if count else equal(size, t, place, 0, what)
                for size, count in zip(sizes, heads, strict=True)
            ]
        )


@dataclass(frozen=True)
class Row:
    """A linear layer by its input features.

    heads: how many they are, not to be cut
    """

    heads: int | None = None

    def cut(self, features: int, t: int, place: int, what: str) -> Cut:
        """Raises ValueError for sizes that do not go together."""
        if self.heads:
            return by_heads(features, self.heads, t, place, 1)
        return equal(features, t, place, 1, what)


@dataclass(frozen=True)
class Vocabulary:
    """An embedding, or the logits' linear layer, by tokens; filled up to t equal parts."""


@dataclass(frozen=True)
class Masks:
    """Dropout: with sequence parallelism each rank draws its own masks.

    always: without it, too, where each rank has its own activations anyway.
    """

    always: bool = False


@dataclass(frozen=True)
class Positions:
    """A module called with (tokens_BS, positions_S).

    With sequence parallelism it gets the positions of this rank's shard.
    """


Style = Column | Row | Vocabulary | Masks | Positions
