"""Which keys a query sees, and in which tiles of tokens that is looked at.

A query sees the keys at the places first … last of the whole sequence: under a causal mask
last is its own place, and documents narrow both. So a mask is two numbers a token, however
the tokens are dealt to ranks.

    B batch, or 1 for all of it   C chunks of a rank   L tokens of a chunk
    S tokens with queries, C·L    T tokens with keys
"""

from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from manyranks.parallel.collectives.messages import chunk_sizes

Range = tuple[int, int]  # least, greatest
_FAR = torch.iinfo(torch.int64).max


class Keys(NamedTuple):
    """Where keys stand. tiles: their slice of T, and their places' range."""

    places_T: Tensor
    tiles: list[tuple[slice, Range]]


class Queries(NamedTuple):
    """What queries see. tiles: their slice of S, the range of first, the range of last."""

    first_BS: Tensor
    last_BS: Tensor
    tiles: list[tuple[slice, Range, Range]]


class Seen(NamedTuple):
    """A tile of keys, of which a tile of queries sees something."""

    columns: slice
    before_first: bool  # whether some of its keys are too early for some of the queries
    beyond_last: bool  # or too late


def keys_of(places_CL: Tensor, tile: int, device: torch.device) -> Keys:
    """Keys at these places, on the CPU, which rise in each chunk."""
    places_T, slices = places_CL.flatten(), _slices(places_CL, tile)
    return Keys(
        places_T.to(device), list(zip(slices, _ranges(places_T[None], slices), strict=True))
    )


def queries_of(
    places_CL: Tensor,
    tile: int,
    causal: bool,
    documents_BT: Tensor | None,
    device: torch.device,
) -> Queries:
    """What queries at these places see. documents_BT: of the whole sequence."""
    places_S, slices = places_CL.flatten(), _slices(places_CL, tile)
    first_BS = torch.zeros_like(places_S)[None]
    last_BS = torch.full_like(places_S, _FAR)[None]
    if documents_BT is not None:
        first_BS, last_BS = (x[:, places_S] for x in documents(documents_BT.cpu()))
    if causal:
        last_BS = last_BS.minimum(places_S)
    ranges = _ranges(first_BS, slices), _ranges(last_BS, slices)
    return Queries(
        first_BS.to(device), last_BS.to(device), list(zip(slices, *ranges, strict=True))
    )


def check_documents(documents_BT: Tensor | None, batch: int, seq: int) -> None:
    """Raises ValueError for documents that are not numbers of all the sequence's tokens."""
    if documents_BT is None:
        return
    if not isinstance(documents_BT, Tensor) or documents_BT.is_floating_point():
        kind = getattr(documents_BT, "dtype", type(documents_BT).__name__)
        raise ValueError(f"documents are {kind}: give a tensor of whole numbers")
    if tuple(documents_BT.shape) not in ((batch, seq), (1, seq)):
        raise ValueError(
            f"documents of shape {tuple(documents_BT.shape)}: give a number for each token "
            f"of the whole sequence, [{batch}, {seq}] or [1, {seq}]"
        )


def documents(documents_BT: Tensor) -> tuple[Tensor, Tensor]:
    """For each token the places of the first and the last one of its document.

    A document is a run of equal numbers.
    """
    edge_B1 = torch.ones_like(documents_BT[:, :1], dtype=torch.bool)
    edges = documents_BT[:, 1:] != documents_BT[:, :-1]
    starts, ends = torch.cat((edge_B1, edges), 1), torch.cat((edges, edge_B1), 1)
    places_S = torch.arange(documents_BT.shape[1], device="cpu")
    first_BS = places_S.where(starts, 0).cummax(1).values
    last_BS = places_S.where(ends, _FAR).flip(1).cummin(1).values.flip(1)
    return first_BS, last_BS


def pairs(queries: Queries, keys: Keys) -> Iterator[tuple[slice, list[Seen]]]:
    """Each tile of queries with the tiles of keys of which it sees something."""
    for rows, first, last in queries.tiles:
        seen = [
            Seen(columns, low < first[1], high > last[0])
            for columns, (low, high) in keys.tiles
            if low <= last[1] and high >= first[0]
        ]
        if seen:
            yield rows, seen


def hidden(queries: Queries, keys: Keys, rows: slice, seen: Seen) -> Tensor | None:
    """Of a pair of tiles hidden_BST, the keys that a query does not see; None for none."""
    found_BST = None
    if seen.beyond_last:
        found_BST = keys.places_T[seen.columns] > queries.last_BS[:, rows, None]
    if seen.before_first:
        before_BST = keys.places_T[seen.columns] < queries.first_BS[:, rows, None]
        found_BST = before_BST if found_BST is None else found_BST | before_BST
    return found_BST


def _slices(places_CL: Tensor, tile: int) -> list[slice]:
    """Each chunk in as few nearly equal tiles as possible."""
    chunks, length = places_CL.shape
    edges = accumulate(chunks * chunk_sizes(length, -(-length // tile)), initial=0)
    return [slice(*pair) for pair in pairwise(edges)]


def _ranges(values_BS: Tensor, slices: list[slice]) -> list[Range]:
    """Least and greatest of each slice: the values rise inside it."""
    starts, ends = [s.start for s in slices], [s.stop - 1 for s in slices]
    least, greatest = values_BS[:, starts].amin(0), values_BS[:, ends].amax(0)
    return list(zip(least.tolist(), greatest.tolist(), strict=True))
