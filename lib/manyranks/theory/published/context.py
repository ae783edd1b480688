"""Context parallelism's published numbers beside the theory's: least blocks, longest contexts, shares of the ideal, Llama 3."""

from typing import NamedTuple

from manyranks.theory import context, published, step
from manyranks.theory.kernels import DEFAULT, Constants
from manyranks.theory.published import steps
from manyranks.theory.step import StepTime

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
    return [_block(row) for row in published.rows("ring_min_block")]


def _block(row: dict[str, str]) -> Block:
    least = context.least_shard(float(row["tflops"]) * 1e12, float(row["interconnect_GBps"]) * 1e9) / 1e3
    return Block(row["device"], least, float(row["min_block_k"]), BLOCKS * least, float(row["min_seq_k"]))


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
    some models."""
    return [_longest(row) for row in published.rows("ring_max_context")]


def _longest(row: dict[str, str]) -> Longest:
    chips, alone = _chips(row["devices"]), int(row["bpt_k"])
    return Longest(row["devices"], row["model"], chips, alone, chips * alone, int(row["ring_k"]))


def _chips(devices: str) -> int:
    """TPU v3 and v4 are named after their cores, two a chip; v5e has one. Source: docs.cloud.google.com, TPU system pages."""
    if not devices.startswith("TPU"):
        return int(devices.partition("x")[0])
    kind, _, count = devices.removeprefix("TPU ").partition("-")
    return int(count) // (2 if kind in ("v3", "v4") else 1)


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
    bounds = {variant: _bound(layout) for variant, layout in _LAYOUTS.items()}
    return [_share(row, bounds) for row in published.rows("ring_flash_attention")]


def _share(row: dict[str, str], bounds: dict[str, float]) -> Share:
    documents, share = row["mode"] == "varlen", float(row["it_s"]) / float(row["ideal_it_s"])
    bound = None if documents else bounds[row["variant"]]
    return Share(row["gpu"], documents, row["pass"] == "fwd+bwd", row["variant"], share, bound)


def _bound(layout: str) -> float:
    seq = GPUS * TOKENS
    counts = context.work(seq, GPUS, layout, tile=TILE)
    return 1 / (context.balance(counts) * context.surplus(counts, seq))


class LongRow(NamedTuple):
    """Llama 3 405B with 131,072 tokens. predicted, printed: FLOP/s a GPU, causal; other: the row of 8,192 tokens on as many."""

    predicted: float
    printed: float
    time: StepTime
    other_predicted: float
    other_printed: float

    @property
    def slower(self) -> float:
        """Predicted FLOP/s with long sequences ÷ with short ones."""
        return self.predicted / self.other_predicted

    @property
    def printed_slower(self) -> float:
        return self.printed / self.other_printed


def llama3(constants: Constants = DEFAULT) -> LongRow:
    """arXiv 2407.21783, Table 4, the row with 16 context-parallel ranks, from its configuration alone."""
    _, short, long = steps.llama3()
    time = step.estimate(long.shape, long.plan, long.cluster, constants)
    found = ((row.predict(constants) * 1e12, row.measured * 1e12) for row in (long, short))
    (predicted, printed), other = found
    return LongRow(predicted, printed, time, *other)


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
