"""Context parallelism's published numbers next to the theory's: least blocks, longest contexts, shares of the ideal."""

from typing import NamedTuple

from manyranks.theory import context, tables

# That a rank holds: a query, keys and values, those that arrive, an output. Source: arXiv 2310.01889, section 3.
BLOCKS = 6


class Block(NamedTuple):
    """A device's least block whose message hides, and least shard, of six such blocks; both in thousands of tokens."""

    device: str
    block: float
    printed_block: float
    shard: float
    printed_shard: float


def blocks() -> list[Block]:
    """arXiv 2310.01889, Table 2: FLOP/s ÷ bytes/s."""
    found = []
    for row in tables.rows("ring_min_block"):
        least = context.least_shard(float(row["tflops"]) * 1e12, float(row["interconnect_GBps"]) * 1e9) / 1e3
        found.append(Block(row["device"], least, float(row["min_block_k"]), BLOCKS * least, float(row["min_seq_k"])))
    return found


class Longest(NamedTuple):
    """Thousands of tokens that a model's training takes at most.

    chips: of the ring
    alone: on one device, computing block by block
    """

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
    for row in tables.rows("ring_max_context"):
        chips, alone = int(row["chips"]), int(row["bpt_k"])
        found.append(Longest(row["devices"], row["model"], chips, alone, chips * alone, int(row["ring_k"])))
    return found


class Share(NamedTuple):
    """Measured speed ÷ speed of the same attention without communication or waiting.

    bound: what the balance of work allows, 1 ÷ (slowest ÷ mean · scores computed ÷ scores needed); None where the documents are
        not known
    """

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
    counts = {variant: context.work(GPUS * TOKENS, GPUS, layout, tile=TILE) for variant, layout in _LAYOUTS.items()}
    bounds = {name: 1 / (context.balance(each) * context.surplus(each, GPUS * TOKENS)) for name, each in counts.items()}
    found = []
    for row in tables.rows("ring_flash_attention"):
        documents, share = row["mode"] == "varlen", float(row["it_s"]) / float(row["ideal_it_s"])
        bound = None if documents else bounds[row["variant"]]
        found.append(Share(row["gpu"], documents, row["pass"] == "fwd+bwd", row["variant"], share, bound))
    return found
