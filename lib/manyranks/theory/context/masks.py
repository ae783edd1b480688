"""Scores that each rank computes under a mask, block by block as keys and values go round a ring; what that costs in balance.

After k hops rank r has the keys and values of rank (r − k) mod N. A rank's tokens are one chunk (contiguous, striped) or two
(zigzag); a chunk is cut into tiles, and a pair of tiles is computed whole as soon as one score of it is visible. Everything is
counted in scores of one head and one sequence, exactly.
"""

from collections.abc import Sequence
from itertools import product, starmap
from typing import NamedTuple

from manyranks.theory import checks
from manyranks.theory.names import one_of
from manyranks.theory.plan import multiples

LAYOUTS = ("contiguous", "striped", "zigzag")

Work = list[list[int]]  # of each rank, of each hop


def work(seq: int, n: int, layout: str = "zigzag", causal: bool = True, tile: int | None = 1) -> Work:
    """Scores that rank r computes between hop k and the next, as [r][k].

    tile: tokens of a tile at most, tiles being as equal as torch.tensor_split makes them; 1: exactly what the mask lets
    through; None: a chunk is one tile. Raises ValueError for a sequence that the layout cannot share evenly.
    """
    length = chunk_length(seq, n, layout)
    if tile is not None:
        checks.whole(tile=tile)
    if not causal:
        return [[(seq // n) ** 2] * n for _ in range(n)]
    scores = Scores.of(length, length if tile is None else tile)
    return [_hops(layout, scores, rank, n - 1 - rank) for rank in range(n)]


def _hops(layout: str, scores: "Scores", before: int, behind: int) -> list[int]:
    """Lists one rank's scores hop by hop: its own keys, those of the ranks before it from the nearest on, those behind it."""
    if layout == "contiguous":
        return [scores.up_to] + [scores.whole] * before + [0] * behind
    if layout == "striped":
        return [scores.up_to] * (1 + before) + [scores.before] * behind
    # Zigzag: of another rank's two chunks the early one is visible to both of this rank's, or both to its late one.
    return [scores.whole + 2 * scores.up_to] + [2 * scores.whole] * (before + behind)


def chunk_length(seq: int, n: int, layout: str) -> int:
    """Tokens of a chunk. Raises ValueError for an unknown layout, and a sequence without equal chunks."""
    checks.whole(seq=seq, n=n)
    one_of(LAYOUTS, layout=layout)
    chunks = 2 * n if layout == "zigzag" else n
    if seq % chunks:
        raise ValueError(f"seq={seq} in {chunks} chunks, {layout} on n={n} ranks: give {multiples(seq, chunks)}")
    return seq // chunks


class Scores(NamedTuple):
    """The scores of one pair of chunks.

    whole: all
    up_to: keys up to the query's own index in its chunk
    before: keys before it
    """

    whole: int
    up_to: int
    before: int

    @classmethod
    def of(cls, length: int, tile: int) -> "Scores":
        """Counts scores by tiles: of tiles a and b all pairs with b < a are computed, and with b = a all but, where keys at the
        query's own index are hidden, a tile of one token."""
        count = -(-length // tile)
        larger, size = length % count, length // count
        squares = larger * (size + 1) ** 2 + (count - larger) * size**2
        up_to = (length**2 + squares) // 2
        return cls(length**2, up_to, up_to - (count - larger if size == 1 else 0))


# What follows from the counts


def totals(counts: Work) -> list[int]:
    """Scores of each rank."""
    return [sum(hops) for hops in counts]


def balance(counts: Work) -> float:
    """Slowest rank ÷ mean: how much longer than with equal shares it takes, where ranks wait for each other at the end."""
    each = totals(counts)
    return max(each) * len(each) / sum(each)


def contiguous_balance(n: int) -> float:
    """Computes the balance of a causal mask that is cut contiguously, where the sequence is long: 2 − 1/N."""
    checks.whole(n=n)
    return 2 - 1 / n


def surplus(counts: Work, seq: int) -> float:
    """Scores that are computed ÷ scores that a causal mask lets through, s(s + 1)/2."""
    return sum(totals(counts)) / (seq * (seq + 1) / 2)


class Waiting(NamedTuple):
    """The waiting of ranks.

    hops: scores of the slowest rank in each hop
    idle: share of the ranks' time
    """

    hops: list[int]
    idle: float

    @property
    def slowest(self) -> int:
        """Scores that one rank would have computed in the time of all hops."""
        return sum(self.hops)


def in_step(counts: Work) -> Waiting:
    """Returns the waiting where a hop begins when all ranks have finished the one before: the slowest sets its length."""
    hops = [max(each) for each in zip(*counts, strict=True)]
    return Waiting(hops, 1 - sum(totals(counts)) / (len(counts) * sum(hops)))


def flops(scores: int, batch: int, heads: int, head_size: int, backward: bool = False) -> int:
    """Counts FLOPs of these scores in all sequences and heads: 2 products of 2·D FLOPs each forward, 5 backward, where the
    scores are computed again. Source: arXiv 2307.08691, section 3.1.2."""
    return (10 if backward else 4) * head_size * heads * batch * scores


# Windows


def window_work(seq: int, n: int, window: int, layout: str = "contiguous") -> Work:
    """Counts as work does, exactly, where a token sees itself and the window − 1 tokens before it.

    Raises ValueError as work does, and for a window below 1.
    """
    checks.whole(window=window)
    own = [chunks(seq, n, layout, rank) for rank in range(n)]

    def seen(queries: range, keys: range) -> int:
        before = range(queries.start - window, queries.stop - window, queries.step)
        return visible(queries, keys) - visible(before, keys)

    return [[sum(starmap(seen, product(own[r], own[r - k]))) for k in range(n)] for r in range(n)]


def stops(counts: Work) -> list[int]:
    """Lists how many ranks a block has come each time that some rank computes with it: 0 for the own one. A ring makes one hop
    to each other stop, from the one before."""
    return [k for k, scores in enumerate(zip(*counts, strict=True)) if any(scores)]


# Documents


def document_work(lengths: Sequence[int], n: int, layout: str = "zigzag") -> Work:
    """Counts as work does, exactly, where a token sees its document's tokens up to itself.

    lengths: tokens of each document, which follow each other and make up the sequence
    Raises ValueError as work does, and for a document without tokens.
    """
    for index, length in enumerate(lengths):
        checks.whole(**{f"lengths[{index}]": length})
    seq = sum(lengths)
    chunk_length(seq, n, layout)  # raises
    counts, start = [[0] * n for _ in range(n)], 0
    own = [(rank, chunk) for rank in range(n) for chunk in chunks(seq, n, layout, rank)]
    for length in lengths:
        parts = [(rank, part) for rank, chunk in own if (part := _within(chunk, range(start, start + length)))]
        for (rank, queries), (source, keys) in product(parts, parts):
            counts[rank][(rank - source) % n] += visible(queries, keys)
        start += length
    return counts


def chunks(seq: int, n: int, layout: str, rank: int) -> list[range]:
    """Positions of a rank's tokens, chunk by chunk. Raises ValueError as work does, and for a rank that is none of the n."""
    length = chunk_length(seq, n, layout)
    if rank not in range(n):
        raise ValueError(f"rank={rank!r}: must be one of the {n} ranks, 0 to {n - 1}")
    if layout == "striped":
        return [range(rank, seq, n)]
    places = (rank, 2 * n - 1 - rank) if layout == "zigzag" else (rank,)
    return [range(place * length, (place + 1) * length) for place in places]


def owners(seq: int, n: int, layout: str) -> list[int]:
    """The rank of each token of the sequence. Raises ValueError as work does."""
    places = {token: rank for rank in range(n) for chunk in chunks(seq, n, layout, rank) for token in chunk}
    return [places[token] for token in range(seq)]


def _within(chunk: range, document: range) -> range:
    """The chunk's positions inside the document."""
    first = chunk.start + max(0, -(-(document.start - chunk.start) // chunk.step)) * chunk.step
    return range(first, min(chunk.stop, document.stop), chunk.step)


def visible(queries: range, keys: range) -> int:
    """Pairs of a query and a key not after it, of positions that are equally far apart in both."""
    step, own, other = queries.step, len(queries), len(keys)
    # The query with index i sees the keys with indices up to i + ahead.
    ahead = (queries.start - keys.start) // step
    below = _triangle(own + ahead) - _triangle(ahead)
    return below - _triangle(own + ahead - other) + _triangle(ahead - other)


def _triangle(count: int) -> int:
    """1 + 2 + … + count, 0 for a negative count."""
    return count * (count + 1) // 2 if count > 0 else 0
