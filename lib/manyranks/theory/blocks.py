"""Counts what a kernel's blocks need: sectors of memory, bytes, and room on a processor.

A GPU runs a kernel as blocks of threads, each block on one of its processors (SM), in warps of 32 threads that do the same
instruction at once. Memory moves in sectors of 32 bytes, four of them to a line of 128. The bytes of a kernel are requests,
before any cache: measure.kernel counts the same.
Sources: NVIDIA, CUDA C++ Best Practices Guide, section "Coalesced Access to Global Memory", and what each function names.
"""

import functools
import math
from typing import NamedTuple

from manyranks.theory import checks, tables
from manyranks.theory.hardware import Accelerator

WARP, SECTOR, LINE, BANKS = 32, 32, 128, 32  # lanes; bytes; bytes; banks of shared memory, each 4 bytes wide
LSE = 4  # bytes of a row's log-sum-exp, which is all that attention's backward needs besides its inputs and its output


def sectors(stride: int, lanes: int = WARP, itemsize: int = 4) -> int:
    """Counts the sectors that a warp touches, from the start of one, if its lanes read elements `stride` elements apart.

    stride: elements from one lane's to the next; 0 where all read the same one.
    lanes: number of lanes that read.
    itemsize: bytes of an element, a power of two up to 16.
    Raises ValueError for a negative number or another itemsize.
    """
    checks.whole(lanes=lanes)
    if stride < 0 or itemsize not in (1, 2, 4, 8, 16):
        raise ValueError(f"stride={stride}, itemsize={itemsize}: give 0 or more, and an itemsize of 1, 2, 4, 8 or 16")
    step = stride * itemsize
    if step > SECTOR:
        return lanes  # no two lanes share one
    return (lanes - 1) * step // SECTOR + 1  # with steps this small, every sector in between is touched


def bank_conflicts(stride: int) -> int:
    """Counts the turns that shared memory takes if a warp's lanes read 4-byte words `stride` words apart; 1 is no conflict.

    Word i lies in bank i mod 32. A bank gives one word per turn, to every lane that asks for it. The stride reaches
    32 ÷ gcd(stride, 32) banks. Raises ValueError for a negative stride.
    Source: CUDA C++ Programming Guide, section "Shared Memory", 5.x and later.
    """
    if stride < 0:
        raise ValueError(f"stride={stride}: give 0 words or more")
    return math.gcd(stride, BANKS) if stride else 1


def product_bytes(m: int, k: int, n: int, rows: int, columns: int | None = None, itemsize: int = 2) -> int:
    """Bytes that a product of m × k with k × n asks for when it's made in tiles of `rows` × `columns`.

    Every column of tiles reads all of the first matrix, every row of tiles all of the second, and the result is written once.
    columns: the same as `rows` by default.
    """
    columns = rows if columns is None else columns
    checks.whole(m=m, k=k, n=n, rows=rows, columns=columns, itemsize=itemsize)
    return itemsize * (m * k * math.ceil(n / columns) + k * n * math.ceil(m / rows) + m * n)


def softmax_bytes(rows: int, columns: int, itemsize: int = 4, fused: bool = True) -> int:
    """Bytes that a softmax over rows moves, in one kernel, or in five operators: max, subtract, exp, sum, divide.

    Fused, each element is read once and written once. The five read 5RC + 2R elements and write 3RC + 2R.
    """
    checks.whole(rows=rows, columns=columns, itemsize=itemsize)
    return itemsize * (2 * rows * columns if fused else 8 * rows * columns + 4 * rows)


def transpose_sectors(rows: int, columns: int, turned: bool = True) -> int:
    """Sectors that a transpose touches, reading and writing, of a matrix of 4-byte elements that fills whole tiles of 32 × 32.

    Turned in shared memory, both move every sector once. Otherwise each lane of a warp writes into a different row: a sector
    for each element.
    """
    checks.whole(rows=rows, columns=columns)
    whole = rows * columns * 4 // SECTOR
    return 2 * whole if turned else whole + rows * columns


class Attention(NamedTuple):
    """The sizes of an attention that is computed in tiles.

    batch: number of sequences.
    heads: heads of queries.
    groups: heads of keys and values.
    rows: queries per sequence.
    columns: keys per sequence.
    size: numbers per head.
    queries: rows of a tile of queries.
    keys: rows of a tile of keys.
    causal: query i sees keys up to i, and tiles beyond are skipped.
    itemsize: bytes of an element of Q, K, V and the output.
    """

    batch: int
    heads: int
    groups: int
    rows: int
    columns: int
    size: int
    queries: int = 64
    keys: int = 64
    causal: bool = False
    itemsize: int = 2

    @property
    def visits(self) -> int:
        """Rows of K that the tiles of one head's queries read together."""
        tiles = range(math.ceil(self.rows / self.queries))
        if not self.causal:
            return len(tiles) * self.columns
        seen = ((i + 1) * self.queries for i in tiles)
        return sum(min(self.columns, math.ceil(min(end, self.columns) / self.keys) * self.keys) for end in seen)

    @property
    def returns(self) -> int:
        """Rows of Q that the tiles of one head's keys read together, in backward."""
        tiles = range(math.ceil(self.columns / self.keys))
        if not self.causal:
            return len(tiles) * self.rows
        return sum(max(0, self.rows - j * self.keys // self.queries * self.queries) for j in tiles)


def attention_bytes(sizes: Attention) -> int:
    """Bytes that FlashAttention's forward moves: Q read, O and 4 bytes of log-sum-exp per row written, K and V read once for
    every tile of queries. Source: arXiv 2307.08691, algorithm 1.
    """
    rows = sizes.rows * sizes.size * 2 + sizes.visits * sizes.size * 2
    return sizes.batch * sizes.heads * (sizes.itemsize * rows + LSE * sizes.rows)


def attention_bytes_once(rows: float, heads: float, groups: float, key_size: int, value_size: int) -> float:
    """Bytes that attention must move in 16 bits: Q, K and V read and O written, each once.

    That's what reaches DRAM if a cache holds one head's K and V; theory.step charges this. rows: of Q and of K, in all batches.
    """
    return 2 * rows * (heads + groups) * (key_size + value_size)


def attention_backward_bytes(sizes: Attention) -> int:
    """Bytes that FlashAttention's two backward kernels ask for, without δ, the row sums of dO · O, which are made before.

    The kernel of K's and V's gradients reads K and V once, and Q, dO and 8 bytes of statistics per row for every tile of keys;
    it writes dK and dV. The kernel of Q's gradient reads Q, dO and the statistics once, K and V for every tile of queries; it
    writes dQ. Source: arXiv 2307.08691, algorithm 2, whose one kernel adds to dQ instead.
    """
    of_keys = sizes.groups * sizes.columns * sizes.size * 4 + sizes.heads * sizes.returns * sizes.size * 2
    of_queries = sizes.heads * (sizes.rows * sizes.size * 3 + sizes.visits * sizes.size * 2)
    statistics = 2 * LSE * sizes.heads * (sizes.returns + sizes.rows)
    return sizes.batch * (sizes.itemsize * (of_keys + of_queries) + statistics)


def standard_attention_bytes(sizes: Attention) -> int:
    """Bytes that attention asks for when it writes its scores: a product, a fused softmax, another product.

    The products' tiles are of 128 × 128. No mask saves anything. Source: arXiv 2205.14135, algorithm 0.
    """
    rows, columns, size, itemsize = sizes.rows, sizes.columns, sizes.size, sizes.itemsize
    products = sum(product_bytes(rows, *others, 128, itemsize=itemsize) for others in ((size, columns), (columns, size)))
    return sizes.batch * sizes.heads * (products + softmax_bytes(rows, columns, itemsize))


def loss_bytes(tokens: int, hidden: int, vocab: int, rows: int, itemsize: int = 2, words: int | None = None) -> int:
    """Bytes that the fused cross-entropy's forward asks for. It writes no logits.

    For every tile of `rows` tokens the weight is read once, for every tile of `words` words the tokens' hidden vectors; then 8
    bytes of target read and 8 of statistics written per token. words: by default all of them at once.
    Source: arXiv 2411.09009.
    """
    words = vocab if words is None else words
    checks.whole(tokens=tokens, hidden=hidden, vocab=vocab, rows=rows, words=words, itemsize=itemsize)
    read = vocab * hidden * math.ceil(tokens / rows) + tokens * hidden * math.ceil(vocab / words)
    return itemsize * read + 16 * tokens


class Processor(NamedTuple):
    """Says what one of a chip's processors (SM) holds at a time.

    registers: number of 32-bit registers.
    warps: most warps.
    blocks: most blocks.
    shared: bytes of shared memory.
    per_block: most bytes of shared memory that one block can have.
    reserved: bytes of shared memory that the system takes per block.
    source: where the figures are from.
    """

    registers: int
    warps: int
    blocks: int
    shared: int
    per_block: int
    reserved: int
    source: str


def processor(chip: Accelerator) -> Processor:
    """Looks up a chip's processors. Raises ValueError for a chip that isn't in tables/processors.csv."""
    for names, found in _processors().items():
        if chip.name.startswith(names):
            return found
    known = ", ".join(name for names in _processors() for name in names)
    raise ValueError(f"{chip.name}: unknown processors; choose one of {known}")


@functools.cache
def _processors() -> dict[tuple[str, ...], Processor]:
    return {
        tuple(row["chips"].split()): Processor(
            *(int(row[name]) for name in ("registers", "warps", "blocks")),
            *(1024 * int(row[name]) for name in ("shared_KB", "block_KB", "reserved_KB")),
            row["source"],
        )
        for row in tables.rows("processors")
    }


class Occupancy(NamedTuple):
    """The share of a processor that blocks fill.

    blocks: number that one processor holds at a time.
    share: part of the processor's warps that they fill.
    limit: what runs out first: "registers", "shared memory", "warps" or "blocks".
    """

    blocks: int
    share: float
    limit: str


def occupancy(chip: Accelerator, warps: int, registers: int, shared: int = 0) -> Occupancy:
    """Computes how many blocks of a kernel fit on one of a chip's processors at a time.

    warps: warps per block; a processor takes them in fours, one for each of its quarters.
    registers: registers per thread; a warp gets them in portions of 256.
    shared: bytes of shared memory per block.
    Raises ValueError if not even one block fits.
    Source: CUDA C++ Best Practices Guide, section "Calculating Occupancy", and CUDA's occupancy calculator.
    """
    checks.whole(warps=warps, registers=registers)
    one = processor(chip)
    if registers > 255:
        raise ValueError(f"registers={registers}: a thread has at most 255")
    portion = math.ceil(registers * WARP / 256) * 256
    room = {
        "blocks": one.blocks,
        "warps": one.warps // warps,
        "registers": one.registers // portion // 4 * 4 // warps,
        "shared memory": 0 if shared > one.per_block else one.shared // max(1, shared + one.reserved),
    }
    limit = min(room, key=room.__getitem__)
    if not room[limit]:
        given = f"{warps} warps with {registers} registers per thread and {shared:,} bytes of shared memory"
        raise ValueError(
            f"{given}: one block needs more {limit} than a processor of {chip.name} has: {one.registers:,} registers, "
            f"{one.warps} warps and {one.per_block:,} bytes of shared memory per block"
        )
    return Occupancy(room[limit], room[limit] * warps / one.warps, limit)


def waves(blocks: int, processors: int, at_once: int = 1) -> float:
    """Computes how many times a chip's processors are filled until all blocks have run; the last time may be in part.

    at_once: blocks that one processor holds. If all blocks take equally long, time grows with the ceiling of this.
    """
    checks.whole(blocks=blocks, processors=processors, at_once=at_once)
    return blocks / (processors * at_once)
