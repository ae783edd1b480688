"""The bytes that one rank keeps of attention for backward, the most that it holds at once, and the longest sequence that fits.

Counted as parallel.context computes it: the parts that grow with the sequence fall as 1/N, but for positions, 8 bytes of each
token of the whole; the tiles' own part does not depend on the sequence.
"""

from dataclasses import replace
from typing import NamedTuple

from manyranks.theory import checks, memory
from manyranks.theory.activations import itemsize
from manyranks.theory.architecture import ModelShape
from manyranks.theory.cluster import Cluster
from manyranks.theory.context import sends
from manyranks.theory.context.sends import Sizes
from manyranks.theory.names import one_of
from manyranks.theory.plan import Plan

PLACE = 8  # bytes of a position


class Saved(NamedTuple):
    """Bytes that one rank keeps of one attention for backward: its own shards, which fall as 1/N.

    lse: each row's log-sum-exp
    """

    q: int
    k: int
    v: int
    o: int
    lse: int

    @property
    def total(self) -> int:
        return sum(self)


def saved(
    batch: int, seq: int, heads: int, kv_heads: int, head_size: int, n: int, itemsize: int = 2, ulysses: int = 1
) -> Saved:
    """Counts b·(s/N)·D·(2a + 2g) numbers of `itemsize` bytes, and b·(s/N)·a of 4, or of `itemsize` if that is more.

    ulysses: ranks among which heads are dealt, a divisor of N; where they are more than key/value heads, copies of these are
    kept. Raises ValueError as sizes_of does, and as Ulysses for heads that cannot be dealt.
    """
    one, exact = sends.sizes_of(batch, seq, heads, kv_heads, head_size, n), sends.gradient_size(itemsize, None)
    checks.whole(ulysses=ulysses)
    if n % ulysses:
        raise ValueError(f"ulysses={ulysses} does not divide n={n}: choose a divisor of {n}")
    read = sends.read_heads(heads, kv_heads, ulysses)
    queries, keys = itemsize * one.queries, itemsize * one.shard * ulysses * read * head_size
    return Saved(queries, keys, keys, queries, exact * one.shard * heads)


class Peak(NamedTuple):
    """Bytes of one rank at the moment when ring attention holds the most.

    own: queries, keys and values of its shard
    positions: of keys of all ranks, and what its queries see
    output: the output and its log-sum-exp, in backward with their gradients and the queries'
    in_use, arriving: two blocks of keys and values
    gradients: of blocks, summed, on their way or about to be
    scratch: of a pair of tiles
    """

    own: int
    positions: int
    output: int
    in_use: int
    arriving: int
    gradients: int
    scratch: int

    @property
    def total(self) -> int:
        return sum(self)


def peak(
    batch: int,
    seq: int,
    heads: int,
    kv_heads: int,
    head_size: int,
    n: int,
    itemsize: int = 2,
    tile: int = 256,
    chunks: int = 2,
    backward: bool = False,
) -> Peak:
    """The most that ring attention holds under a causal mask, forward or backward, on the rank that holds the most.

    chunks: of a rank: 2 zigzag, else 1. Exact where tiles are equal and have 4·D tokens or more: unequal ones hold less, and
    with short ones other moments are worse. With the inputs and, in backward, the output and its gradient, which others hold.
    Raises ValueError as sizes_of does, and for a tile or chunks below 1.
    """
    one, exact = sends.sizes_of(batch, seq, heads, kv_heads, head_size, n), sends.gradient_size(itemsize, None)
    checks.whole(tile=tile, chunks=chunks)
    moments = _backward if backward else _forward
    return max(moments(one, itemsize, exact, Tile.of(one, itemsize, exact, tile, chunks)), key=sum)


def buffers(block: int, gradients: int, n: int, variant: str = "ring") -> int:
    """Bytes of blocks of keys and values, and of their gradients, at the moment of backward when they are most.

    block, gradients: bytes of one rank's keys and values, and of their gradients as they are summed. A ring has two
    blocks, its rank's own gradients, and a visiting block's three times: this rank's part, what leaves, what comes.
    After an all-gather a rank has all ranks' blocks and gradients. Ulysses and a single rank
    have none beyond what they keep. Raises ValueError for an unknown variant.
    """
    one_of(sends.VARIANTS, variant=variant)
    if n == 1 or variant == "ulysses":
        return 0
    return n * (block + gradients) if variant == "all-gather" else 2 * block + min(4, 2 * (n - 1)) * gradients


class Tile(NamedTuple):
    """Bytes of what a pair of tiles needs.

    rows: a tile of queries, or of output
    scores: a pair's
    row: a number for each row
    keys: a tile's keys and values in the precision of sums, where they are not
    mask: of a pair
    cut: whether rows of several heads must be copied to stand together
    many: whether a tile of queries looks at several of keys
    """

    rows: int
    scores: int
    row: int
    keys: int
    mask: int
    cut: bool
    many: bool

    @classmethod
    def of(cls, one: Sizes, itemsize: int, exact: int, tile: int, chunks: int) -> "Tile":
        shard = one.seq // one.n
        length = -(-shard // chunks)
        count = -(-length // tile)
        size = -(-length // count)
        row = exact * one.batch * one.heads * size
        keys = 0 if itemsize == exact else 2 * exact * one.batch * one.kv_heads * size * one.head_size
        several = chunks * count > 1
        return cls(row * one.head_size, row * size, row, keys, size * size, one.heads > one.kv_heads and several, several)

    @property
    def forward(self) -> int:
        """The scores, queries, what is found in this pair and what was found before."""
        found = 1 if self.cut or self.many else 0
        return self.scores + (2 + found) * self.rows + (4 + found) * self.row + self.keys + self.mask

    def backward(self, itemsize: int, exact: int) -> int:
        """The scores' shares and their gradients, queries and their gradient, and the output's gradient."""
        rows = 3 if self.cut or itemsize != exact else 2
        return 2 * self.scores + rows * self.rows + (2 * self.row if self.cut else 0) + self.keys


def _forward(one: Sizes, itemsize: int, exact: int, tile: Tile) -> list[Peak]:
    own, places, block = _held(one, itemsize)
    output = exact * one.queries + exact * _rows(one)
    result = itemsize * one.queries if itemsize != exact else 0
    at_work = Peak(own, places, output, block, block if one.n > 1 else 0, 0, tile.forward)
    return [at_work, Peak(own, places, output + result, block, 0, 0, 0)]


def _backward(one: Sizes, itemsize: int, exact: int, tile: Tile) -> list[Peak]:
    own, places, block = _held(one, itemsize)
    queries, grad = exact * one.queries, 2 * exact * one.keys
    output = 2 * itemsize * one.queries + 2 * exact * _rows(one)  # o and its gradient, lse, and what a row's gradients share
    other = block if one.n > 1 else 0
    rounded = itemsize != exact
    traveling = buffers(0, grad, one.n) or grad
    rounding = itemsize * one.queries if rounded else 0
    beginning = Peak(own, places, output - exact * _rows(one) + (2 if rounded else 1) * queries, 0, 0, 0, 0)
    at_work = Peak(own, places, output + queries, block, other, traveling, tile.backward(itemsize, exact))
    last_message = Peak(own, places, output + queries, block, other, 3 * grad if one.n > 1 else grad, 0)
    sent = min(one.n, 2) * grad + (block if rounded else 0)
    end = Peak(own, places, output + queries + rounding, block, 0, sent, 0)
    return [beginning, at_work, last_message, end]


def _held(one: Sizes, itemsize: int) -> tuple[int, int, int]:
    """Own queries, keys and values; positions; a block of keys and values."""
    shard, block = one.seq // one.n, 2 * itemsize * one.keys
    return itemsize * one.queries + block, PLACE * (one.seq + 2 * shard), block


def _rows(one: Sizes) -> int:
    return one.shard * one.heads


LONGEST = 2**31  # tokens; beyond it nothing is searched


def longest(shape: ModelShape, plan: Plan, cluster: Cluster) -> int:
    """Tokens of the longest sequence that lets a rank's peak fit its memory: a multiple of 2·c·t, as zigzag chunks and
    sequence parallelism need; 0 where none fits.

    plan: all but seq. The peak is memory.peak's, and the blocks of keys and values that one layer's attention has of others.
    Raises ValueError where plan and shape do not fit.
    """
    checks.kinds(cluster=cluster, plan=plan)
    unit, room = 2 * plan.cp * plan.tp, cluster.accelerator.memory

    def fits(units: int) -> bool:
        longer = replace(plan, seq=units * unit)
        return memory.peak(shape, longer).total + of_others(shape, longer) <= room

    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
        if high * unit > LONGEST:
            raise ValueError(f"more than {LONGEST:,} tokens of {shape.name} fit: nothing is kept that grows with them")
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low * unit


def of_others(shape: ModelShape, plan: Plan) -> int:
    """Bytes of holds.buffers in one layer's backward; with latent attention the compressed keys and values travel."""
    each = 2 * max(1, shape.kv_heads // plan.tp) * shape.head_size
    if shape.latent:
        each = shape.latent.kv_rank + shape.latent.rope_size
    numbers, item = plan.rank_tokens * each, itemsize(plan)
    return buffers(item * numbers, sends.gradient_size(item, None) * numbers, plan.cp, plan.context)
