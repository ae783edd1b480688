"""The tensors of a case: queries, keys and values of all tokens, and each rank's part of them."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from manyranks.grade.old.context.layout import dealt, places
from manyranks.grade.old.tensor.layout import drawn


@dataclass(frozen=True)
class Shards:
    """Of n ranks with two chunks each. strong: what queries are multiplied by; weighs: whether the bytes held are counted.

    transposed: whether keys, values and the result's gradient are not contiguous.
    """

    n: int
    chunk: int
    batch: int
    heads: int
    kv_heads: int
    size: int
    strong: float = 1.0
    weighs: bool = False
    transposed: bool = False

    @property
    def tokens(self) -> int:
        """Of a rank."""
        return 2 * self.chunk

    @cached_property
    def places(self) -> list[Tensor]:
        """Each rank's positions."""
        return places(self.n * self.tokens, self.n)

    @property
    def halves(self) -> tuple[slice, slice]:
        """A rank's chunks."""
        return slice(0, self.chunk), slice(self.chunk, None)

    def of_heads(self, heads: int) -> int:
        """Bytes of a rank's tensor."""
        return 8 * self.tokens * self.batch * heads * self.size

    def whole(self) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of all tokens, in the order of the sequence."""
        return tuple(self._drawn(seed, heads) for seed, heads in ((1, self.heads), (2, self.kv_heads), (3, self.kv_heads)))

    def ranks(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Queries, keys and values by rank."""
        cut = [dealt(one, self.n) for one in self.whole()]
        return [(q, self._placed(k), self._placed(v)) for q, k, v in zip(*cut, strict=True)]

    def upstream(self) -> list[Tensor]:
        """The result's gradient by rank."""
        return [self._placed(one) for one in dealt(self._drawn(4, self.heads) / self.strong, self.n)]

    def _drawn(self, seed: int, heads: int) -> Tensor:
        numbers = drawn(100 * self.n + seed, self.n * self.tokens, self.batch, heads, self.size)
        return self.strong * numbers if seed == 1 else numbers

    def _placed(self, x: Tensor) -> Tensor:
        return x.transpose(0, 1).contiguous().transpose(0, 1) if self.transposed else x


def local(at_S: Tensor) -> Tensor:
    """The places among a rank's own tokens, which are no positions."""
    return torch.arange(len(at_S))
