"""Context parallelism's published numbers beside the theory's: least blocks, longest contexts, shares of the ideal."""

from typing import NamedTuple

from manyranks.theory import context, published

# That a rank holds: a query, keys and values, those that arrive, an output. Source: arXiv 2310.01889, section 3.
BLOCKS = 6


class Block(NamedTuple):
    """Of one device, in thousands of tokens: the least block whose message hides, and the least shard of six such blocks."""

    device: str
    block: float
    printed_block: float
    shard: float
    printed_shard: float


def blocks() -> list[Block]:
    """arXiv 2310.01889, Table 2: FLOP/s ÷ bytes/s."""
    found = []
    for row in published.rows("ring_min_block"):
        least = context.least_shard(float(row["tflops"]) * 1e12, float(row["interconnect_GBps"]) * 1e9) / 1e3
        found.append(Block(row["device"], least, float(row["min_block_k"]), BLOCKS * least, float(row["min_seq_k"])))
    return found


class Longest(NamedTuple):
    """Thousands of tokens that a model's training takes at most. alone: on one device, computing block by block; chips: of the
    ring."""

    devices: str
    model: str
    chips: int
    alone: int
    context: int
    printed: int

    @property
    def ratio(self) -> float:
        return self.context / self.printed


def longest() -> list[Longest]:
    """arXiv 2310.01889, Table 3: a ring of N chips takes N times the context of one, exactly on GPUs; on TPUs half of that for
    some models. TPU v3 and v4 are named after their cores, two a chip. Source: docs.cloud.google.com, TPU system pages."""
    found = []
    for row in published.rows("ring_max_context"):
        chips, alone = int(row["chips"]), int(row["bpt_k"])
        found.append(Longest(row["devices"], row["model"], chips, alone, chips * alone, int(row["ring_k"])))
    return found


class Share(NamedTuple):
    """Measured speed ÷ that of the same attention without communication or waiting. bound: what the balance of work allows,
    1 ÷ (slowest ÷ mean · scores computed ÷ scores needed); None where the documents are not known."""

    gpu: str
    documents: bool
    backward: bool
    variant: str
    share: float
    bound: float | None


GPUS, TOKENS, TILE = 8, 8192, 128  # of the runs: ranks, tokens of each; rows of flash attention's tiles
_LAYOUTS = {"ring": "contiguous", "zigzag": "zigzag", "stripe": "striped"}


def shares() -> list[Share]:
    """zhuzilin/ring-flash-attention, README: contiguous ("ring"), zigzag, striped ("stripe"), and all-gathered ("llama3")."""
    bounds, found = {variant: _bound(layout) for variant, layout in _LAYOUTS.items()}, []
    for row in published.rows("ring_flash_attention"):
        documents, share = row["mode"] == "varlen", float(row["it_s"]) / float(row["ideal_it_s"])
        bound = None if documents else bounds[row["variant"]]
        found.append(Share(row["gpu"], documents, row["pass"] == "fwd+bwd", row["variant"], share, bound))
    return found


def _bound(layout: str) -> float:
    seq = GPUS * TOKENS
    counts = context.work(seq, GPUS, layout, tile=TILE)
    return 1 / (context.balance(counts) * context.surplus(counts, seq))


class Formula(NamedTuple):
    """A row of the table on given sizes; ours: what this library counts, in the same unit."""

    method: str
    quantity: str
    formula: str
    value: float
    ours: float
    unit: str


def formulas(seq: int, heads: int, head_size: int, n: int) -> list[Formula]:
    """context_parallel_formulas on N = seq tokens, h = a·D and P = n ranks: one sequence, as many key/value heads as heads.

    "Per link" counts a rank's own part too: ours is (P − 1)/P of it. The memory is six blocks of c·h numbers (in 16 bits, twice
    the bytes that the table says); ours has the log-sum-exp besides, and not the copy in which keys and values are sent.
    Raises ValueError for fewer than 2 ranks, between which nothing is sent.
    """
    if n < 2:
        raise ValueError(f"n={n}: give 2 ranks or more, for one sends nothing")
    sizes, h, c = (1, seq, heads, heads, head_size, n), heads * head_size, seq // n
    held, scores = context.peak(*sizes, accumulating=2), context.work(seq, n, "contiguous", causal=False)[0][0]
    pairs = {
        ("DeepSpeed-Ulysses", "forward all-to-all"): (4 * seq * h / n, context.ulysses(*sizes).forward.bytes / 2),
        ("Megatron-SP", "forward 2 AG + 2 RS"): (4 * seq * h, context.tensor_parallel(*sizes).forward.bytes / 2),
        ("Ring Attention", "attention block FLOPs"): (4 * h * c**2, context.flops(scores, 1, heads, head_size)),
        ("Ring Attention", "K,V block sent"): (4 * c * h, context.ring(*sizes).forward.bytes / (n - 1)),
        ("Ring Attention", "memory per device"): (6 * c * h, (held.own + held.output + held.arriving) / 2),
    }
    return [
        Formula(*row, value, ours, "elements" if beginning.startswith("memory") else unit)
        for *row, unit, _ in (each.values() for each in published.rows("context_parallel_formulas"))
        for (method, beginning), (value, ours) in pairs.items()
        if row[0] == method and row[1].startswith(beginning)
    ]
