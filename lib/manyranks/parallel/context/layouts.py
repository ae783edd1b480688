"""Layouts: which tokens of a sequence a rank has, and which keys its queries see.

    contiguous   rank r has the r-th N-th of the sequence
    striped      tokens r, r + N, r + 2N, …
    zigzag       of 2N chunks the chunks r and 2N − 1 − r: one early, one late

Under a causal mask a late token sees many others and an early one few. Striped and zigzag
give each rank both. Under a window all see about as many, and contiguous shards need few
neighbors' keys. Sources: Striped Attention, arXiv 2311.09431; zigzag: Llama 3, arXiv
2407.21783, section 3.3.2.

A query sees the keys at the places first … last of the whole sequence: a causal mask, a
window and documents narrow them. So a mask is two numbers per token, however tokens are
dealt to ranks.

    N ranks   C chunks of a rank   L tokens of a chunk   B batch, or 1 for all of it
    S tokens with queries, C·L   T tokens with keys, or of the whole sequence
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from manyranks.parallel.collectives.messages import chunk_sizes

LAYOUTS = ("contiguous", "striped", "zigzag")
TILE = 256  # tokens: the scores of a few heads' tiles fit into a core's cache
Range = tuple[int, int]  # least, greatest
_FAR = torch.iinfo(torch.int64).max


# The tokens of each rank


def positions(layout: str, seq: int, n: int, sharing: int = 1) -> list[Tensor]:
    """Returns for each rank the places of its tokens in the whole sequence, on the CPU.

    layout: one of LAYOUTS
    seq: tokens of the whole sequence
    n: ranks
    sharing: ranks next to each other that share the shard of one rank of n/sharing, as they
        do where Ulysses is inside a ring; C is then 1

    Each is places_CL and rises inside a chunk.
    Raises ValueError for an unknown layout, and for a seq that has no such equal shards.
    """
    check(layout, seq, n, sharing)
    all_T, rings = torch.arange(seq, device="cpu"), n // sharing
    if sharing > 1:
        whole = positions(layout, seq, rings)
        return [
            part_S[None] for places in whole for part_S in places.flatten().chunk(sharing)
        ]
    if layout == "contiguous":
        return [shard_S[None] for shard_S in all_T.chunk(n)]
    if layout == "striped":
        return [all_T[rank::n][None] for rank in range(n)]
    chunks = all_T.chunk(2 * n)
    return [torch.stack((chunks[rank], chunks[-1 - rank])) for rank in range(n)]


def shard(
    whole: Tensor, layout: str, rank: int, n: int, dim: int = 1, sharing: int = 1
) -> Tensor:
    """Returns one rank's part of what all tokens of a sequence have, along that dim.

    Raises ValueError as positions does, and for a rank that is none of the n.
    """
    places = positions(layout, whole.shape[dim], n, sharing)
    if not 0 <= rank < n:
        raise ValueError(f"rank={rank}: must be one of the {n} ranks, 0 to {n - 1}")
    own_S = places[rank].flatten()
    return whole.index_select(dim, own_S.to(whole.device))


def unshard(parts: Sequence[Tensor], layout: str, dim: int = 1, sharing: int = 1) -> Tensor:
    """Makes the whole of all ranks' parts, in rank order: the inverse of shard.

    Raises ValueError as positions does, and for parts of several lengths.
    """
    if len(lengths := {part.shape[dim] for part in parts}) != 1:
        raise ValueError(
            f"parts of {sorted(lengths)} tokens: give all ranks' parts, of one size"
        )
    together = torch.cat(list(parts), dim)
    places = positions(layout, together.shape[dim], len(parts), sharing)
    order_T = torch.cat([places_CL.flatten() for places_CL in places]).argsort()
    return together.index_select(dim, order_T.to(together.device))


def multiple(layout: str, n: int, sharing: int = 1) -> int:
    """Returns what a sequence's length must be a multiple of.

    Raises ValueError for a layout or a number of ranks that cannot be.
    """
    if layout not in LAYOUTS:
        raise ValueError(
            f"layout={layout!r}: choose one of {', '.join(map(repr, LAYOUTS))}"
        )
    for name, value in (("n", n), ("sharing", sharing)):
        if type(value) is not int or value < 1:
            raise ValueError(f"{name}={value!r} ranks: give a whole number, 1 or more")
    if n % sharing:
        raise ValueError(f"sharing={sharing}: must divide the {n} ranks")
    return math.lcm(n, 2 * n // sharing) if layout == "zigzag" else n


def check(layout: str, seq: int, n: int, sharing: int = 1) -> None:
    """Raises ValueError where a sequence has no equal shards in this layout."""
    step = multiple(layout, n, sharing)
    if seq < 1 or seq % step:
        below, above = seq // step * step, (seq // step + 1) * step
        nearest = f"{below} and {above}" if below > 0 else f"{above}"
        raise ValueError(
            f"a sequence of {seq} tokens on {n} ranks: the {layout} layout needs a "
            f"multiple of {step}, and the nearest are {nearest}: pad or cut the sequence"
        )


# Which keys a query sees


class Keys(NamedTuple):
    """The places of keys in the whole sequence."""

    places_T: Tensor
    tiles: list[tuple[slice, Range]]  # for each its slice of T, and its places' range


class Queries(NamedTuple):
    """The places of the first and of the last key that each query sees."""

    first_BS: Tensor
    last_BS: Tensor
    tiles: list[tuple[slice, Range, Range]]  # for each its slice of S, and both ranges


class Seen(NamedTuple):
    """A tile of keys that a tile of queries sees, at least in part."""

    columns: slice  # of T
    before_first: bool  # some of its keys are too early for some of the queries
    beyond_last: bool  # some are too late


@dataclass(frozen=True, eq=False)
class Mask:
    """Says what a query sees of the whole sequence, and how that's dealt and computed.

    causal: a query sees no later key
    layout: how ranks share the tokens, one of LAYOUTS
    documents_BT: a number for each token of the whole sequence, the same on every rank; a
        token sees its own document, a run of equal numbers, only. One row may stand for all
    tile: tokens; a pair of tiles with nothing visible is skipped
    window: a query sees keys less than so many tokens away, itself included; None for all

    Raises ValueError for values that cannot be.
    """

    causal: bool = True
    layout: str = "zigzag"
    documents_BT: Tensor | None = None
    tile: int = TILE
    window: int | None = None

    def __post_init__(self):
        multiple(self.layout, 1)  # raises
        for name in ("tile", "window"):
            value = getattr(self, name)
            if (value is not None or name == "tile") and (
                type(value) is not int or value < 1
            ):
                raise ValueError(
                    f"{name}={value!r}: give a whole number of tokens, 1 or more"
                )
        documents = self.documents_BT
        if documents is not None and (
            not isinstance(documents, Tensor) or documents.is_floating_point()
        ):
            kind = getattr(documents, "dtype", type(documents).__name__)
            raise ValueError(f"documents are {kind}: give a tensor of whole numbers")

    def sight(
        self, places: list[Tensor], rank: int, device: torch.device
    ) -> tuple[Queries, list[Keys]]:
        """Returns what this rank's queries see, and where each rank's keys stand.

        places: of each rank's tokens, on the CPU, in rank order
        """
        keys = [self.keys(places_CL, device) for places_CL in places]
        return self.queries(places[rank], device), keys

    def keys(self, places_CL: Tensor, device: torch.device) -> Keys:
        """Returns keys at these places, which rise in each chunk."""
        places_T = places_CL.flatten()
        return Keys(places_T.to(device), _tiles(places_CL, self.tile, places_T[None]))

    def queries(self, places_CL: Tensor, device: torch.device) -> Queries:
        """Returns what queries at these places see."""
        places_S = places_CL.flatten()
        first_BS = torch.zeros_like(places_S)[None]
        last_BS = torch.full_like(places_S, _FAR)[None]
        if self.documents_BT is not None:
            first_BS, last_BS = (x[:, places_S] for x in documents(self.documents_BT.cpu()))
        if self.causal:
            last_BS = last_BS.minimum(places_S)
        if self.window:
            first_BS = first_BS.maximum(places_S - self.window + 1)
            last_BS = last_BS.minimum(places_S + self.window - 1)
        tiles = _tiles(places_CL, self.tile, first_BS, last_BS)
        return Queries(first_BS.to(device), last_BS.to(device), tiles)

    def stops(self, places: list[Tensor]) -> list[int]:
        """Returns how far from home, in ranks, keys are seen by any rank's queries.

        places: of each rank's tokens, in rank order
        """
        n, cpu = len(places), torch.device("cpu")
        if self.window is None and self.documents_BT is None:
            return list(range(n))
        chunks = replace(self, tile=places[0].shape[1])
        queries = [chunks.queries(places_CL, cpu) for places_CL in places]
        keys = [chunks.keys(places_CL, cpu) for places_CL in places]
        needed = (
            any(any(pairs(queries[r], keys[r - s])) for r in range(n)) for s in range(n)
        )
        return [stop for stop, needs in enumerate(needed) if needs]


def documents(documents_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Returns for each token the places of the first and the last one of its document."""
    edge_B1 = torch.ones_like(documents_BT[:, :1], dtype=torch.bool)
    edges = documents_BT[:, 1:] != documents_BT[:, :-1]
    starts, ends = torch.cat((edge_B1, edges), 1), torch.cat((edges, edge_B1), 1)
    places_T = torch.arange(documents_BT.shape[1], device="cpu")
    first_BT = places_T.where(starts, 0).cummax(1).values
    last_BT = places_T.where(ends, _FAR).flip(1).cummin(1).values.flip(1)
    return first_BT, last_BT


def pairs(queries: Queries, keys: Keys) -> Iterator[tuple[slice, list[Seen]]]:
    """Yields each tile of queries with the tiles of keys that it sees, at least in part."""
    for rows, first, last in queries.tiles:
        seen = [
            Seen(columns, low < first[1], high > last[0])
            for columns, (low, high) in keys.tiles
            if low <= last[1] and high >= first[0]
        ]
        if seen:
            yield rows, seen


def hidden(queries: Queries, keys: Keys, rows: slice, seen: Seen) -> Tensor | None:
    """Returns the keys of a pair of tiles that a query doesn't see, None for none."""
    found_BST = None
    if seen.beyond_last:
        found_BST = keys.places_T[seen.columns] > queries.last_BS[:, rows, None]
    if seen.before_first:
        before_BST = keys.places_T[seen.columns] < queries.first_BS[:, rows, None]
        found_BST = before_BST if found_BST is None else found_BST | before_BST
    return found_BST


def _tiles(places_CL: Tensor, tile: int, *values_BS: Tensor) -> list[tuple]:
    """Each chunk in as few nearly equal tiles as possible: the slices, and the least and
    greatest of these values, which rise inside a chunk."""
    chunks, length = places_CL.shape
    edges = list(accumulate(chunks * chunk_sizes(length, -(-length // tile)), initial=0))
    ranges = []
    for each_BS in values_BS:
        least, greatest = each_BS[:, edges[:-1]], each_BS[:, [e - 1 for e in edges[1:]]]
        ranges.append(zip(least.amin(0).tolist(), greatest.amax(0).tolist(), strict=True))
    return list(zip([slice(*pair) for pair in pairwise(edges)], *ranges, strict=True))
