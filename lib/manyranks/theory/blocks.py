"""What a block of a kernel asks of a GPU: sectors that a warp touches, bytes that a tiled kernel moves, blocks that fit.

A GPU runs a kernel as blocks of threads, each block on one of its processors (SM), in warps of 32 threads that do the same
instruction at once. Memory moves in sectors of 32 bytes, four of them to a line of 128. The bytes of a kernel are requests,
before any cache: measure.kernel counts the same.
Sources: NVIDIA, CUDA C++ Best Practices Guide, section "Coalesced Access to Global Memory", and what each function names.
"""

import functools
import math
from typing import NamedTuple

from manyranks.theory import checks, published
from manyranks.theory.hardware import Accelerator

WARP, SECTOR, LINE, BANKS = 32, 32, 128, 32  # lanes; bytes; bytes; banks of shared memory, each 4 bytes wide
LSE = 4  # bytes of a row's log-sum-exp, which is all that attention's backward needs beside its inputs and its output


def sectors(stride: int, lanes: int = WARP, itemsize: int = 4, offset: int = 0, size: int = SECTOR) -> int:
    """How many sectors a warp touches whose lanes read elements `stride` elements apart.

    stride: elements from one lane's to the next; 0 where all read the same one.
    lanes: that take part.
    itemsize: bytes of an element, a power of two up to 16.
    offset: elements before the first one, counted from the start of a sector.
    size: of what is counted, in bytes: SECTOR, or LINE for lines of 128.
    Raises ValueError for a negative number, or an itemsize that is none of these.
    """
    checks.whole(lanes=lanes)
    if min(stride, offset) < 0 or itemsize not in (1, 2, 4, 8, 16):
        raise ValueError(f"stride={stride}, offset={offset}, itemsize={itemsize}: 0 or more, and 1, 2, 4, 8 or 16 bytes")
    step, first = stride * itemsize, offset * itemsize
    if step > size:
        return lanes  # no two lanes share one
    return (first + (lanes - 1) * step) // size - first // size + 1  # none in between is left out


def bank_conflicts(stride: int, lanes: int = WARP) -> int:
    """How many turns shared memory takes for a warp whose lanes read 4-byte words `stride` words apart; 1 is no conflict.

    Word i lies in bank i mod 32, and a bank gives one word a turn, to as many lanes as ask for it. Lanes share a bank every
    32 ÷ gcd(stride, 32) of them. Source: CUDA C++ Programming Guide, section "Shared Memory", 5.x and later.
    """
    checks.whole(lanes=lanes)
    if not stride:
        return 1
    return math.ceil(lanes / (BANKS // math.gcd(stride, BANKS)))


def product_bytes(m: int, k: int, n: int, rows: int, columns: int | None = None, itemsize: int = 2) -> int:
    """Bytes that a product of m × k with k × n reads and writes when it's made in tiles of `rows` × `columns`.

    Each tile of the result reads its rows of the first matrix and its columns of the second, so the first is read once for
    every column of tiles and the second once for every row of them. columns: by default as `rows`.
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


def transpose_sectors(rows: int, columns: int, itemsize: int = 4, turned: bool = True) -> int:
    """Sectors that a transpose touches, reading and writing, of a matrix whose sizes fill whole sectors and tiles of 32.

    Turned in shared memory, both move every sector once. Otherwise each lane of a warp writes into a row of its own: a sector
    for each element.
    """
    checks.whole(rows=rows, columns=columns, itemsize=itemsize)
    whole = rows * columns * itemsize // SECTOR
    return 2 * whole if turned else whole + rows * columns


class Attention(NamedTuple):
    """The sizes of an attention that is computed in tiles.

    batch: sequences; heads: of queries; groups: heads of keys and values; rows: queries; columns: keys; size: of a head.
    queries, keys: of a tile. causal: whether query i sees keys up to i only, and tiles beyond are skipped.
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


def attention_bytes_once(rows: float, heads: float, groups: float, key_size: int, value_size: int, itemsize: int = 2) -> float:
    """Bytes that attention moves at the least: Q, K and V read and O written, each once.

    It's what reaches DRAM where a cache holds one head's K and V; theory.step charges this. rows: of Q and of K, all batches.
    """
    return itemsize * rows * (heads + groups) * (key_size + value_size)


def attention_backward_bytes(sizes: Attention) -> int:
    """Bytes that FlashAttention's backward moves, in two kernels.

    The kernel of K's and V's gradients reads K and V once, and Q, dO and 8 bytes of statistics per row for every tile of keys;
    it writes dK and dV. The kernel of Q's gradient reads Q, dO and the statistics once, K and V for every tile of queries; it
    writes dQ. Source: arXiv 2307.08691, algorithm 2, whose one kernel adds to dQ instead.
    """
    of_keys = sizes.groups * sizes.columns * sizes.size * 4 + sizes.heads * sizes.returns * sizes.size * 2
    of_queries = sizes.heads * (sizes.rows * sizes.size * 3 + sizes.visits * sizes.size * 2)
    statistics = 2 * LSE * sizes.heads * (sizes.returns + sizes.rows)
    return sizes.batch * (sizes.itemsize * (of_keys + of_queries) + statistics)


def standard_attention_bytes(sizes: Attention) -> int:
    """Bytes of the same without tiles kept on the chip: scores written and read, probabilities written and read.

    Q, K and V are read, the output written, each once. Source: arXiv 2205.14135, algorithm 0.
    """
    ends = sizes.heads * sizes.rows * sizes.size * 2 + sizes.groups * sizes.columns * sizes.size * 2
    return sizes.batch * sizes.itemsize * (ends + 4 * sizes.heads * sizes.rows * sizes.columns)


def loss_bytes(tokens: int, hidden: int, vocab: int, rows: int, itemsize: int = 2, words: int | None = None) -> int:
    """Bytes that the fused cross-entropy's forward moves: no logit.

    For every tile of `rows` tokens the weight is read once, for every tile of `words` words the tokens' hidden vectors; then 8
    bytes of target read and 8 of statistics written per token. words: by default all of them at once.
    Source: arXiv 2411.09009.
    """
    words = vocab if words is None else words
    checks.whole(tokens=tokens, hidden=hidden, vocab=vocab, rows=rows, words=words, itemsize=itemsize)
    read = vocab * hidden * math.ceil(tokens / rows) + tokens * hidden * math.ceil(vocab / words)
    return itemsize * read + 16 * tokens


class Processor(NamedTuple):
    """What one of a chip's processors (SM) holds at a time.

    registers: 32-bit ones. warps, blocks: at most. shared: bytes of shared memory. per_block: of it, the most of one block.
    reserved: bytes of it that each block costs besides. source: where the figures are from.
    """

    registers: int
    warps: int
    blocks: int
    shared: int
    per_block: int
    reserved: int
    source: str


def processor(chip: Accelerator) -> Processor:
    """Looks up a chip's processors. Raises ValueError for a chip that isn't in published/processors.csv."""
    for names, found in _processors().items():
        if chip.name.startswith(names):
            return found
    known = ", ".join(name for names in _processors() for name in names)
    raise ValueError(f"{chip.name}: nothing is known of its processors; of {known} it is")


@functools.cache
def _processors() -> dict[tuple[str, ...], Processor]:
    return {
        tuple(row["chips"].split()): Processor(
            *(int(row[name]) for name in ("registers", "warps", "blocks")),
            *(1024 * int(row[name]) for name in ("shared_KB", "block_KB", "reserved_KB")),
            row["source"],
        )
        for row in published.rows("processors")
    }


class Occupancy(NamedTuple):
    """blocks: that one processor holds at a time. share: of its warps that they fill. limit: what leaves no room for one
    more, "registers", "shared memory", "warps" or "blocks".
    """

    blocks: int
    share: float
    limit: str


def occupancy(chip: Accelerator, warps: int, registers: int, shared: int = 0) -> Occupancy:
    """How many blocks of a kernel fit on one of a chip's processors at a time.

    warps: of a block. registers: of a thread; a warp gets them in portions of 256. shared: bytes of a block's shared memory.
    Raises ValueError where not even one block fits. Source: CUDA C++ Best Practices Guide, section "Calculating Occupancy".
    """
    checks.whole(warps=warps, registers=registers)
    one = processor(chip)
    if registers > 255:
        raise ValueError(f"registers={registers}: a thread has at most 255")
    portion = math.ceil(registers * WARP / 256) * 256
    room = {
        "blocks": one.blocks,
        "warps": one.warps // warps,
        "registers": one.registers // (portion * warps),
        "shared memory": 0 if shared > one.per_block else one.shared // max(1, shared + one.reserved),
    }
    limit = min(room, key=room.__getitem__)
    if not room[limit]:
        given = f"{warps} warps with {registers} registers per thread and {shared:,} bytes of shared memory"
        much = "much" if limit == "shared memory" else "many"
        raise ValueError(
            f"{given}: too {much} {limit} for one processor of {chip.name}, which has {one.registers:,} registers, "
            f"{one.warps} warps and {one.per_block:,} bytes for a block"
        )
    return Occupancy(room[limit], room[limit] * warps / one.warps, limit)


def waves(blocks: int, processors: int, at_once: int = 1) -> float:
    """How many times a chip's processors are filled until all blocks have run; the last time may be in part.

    at_once: blocks that one processor holds. math.ceil of it is what the time follows where all blocks take as long.
    """
    checks.whole(blocks=blocks, processors=processors, at_once=at_once)
    return blocks / (processors * at_once)
