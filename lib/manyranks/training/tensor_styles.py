"""Which of the small GPT's parts tensor parallelism cuts, and how."""

from manyranks.parallel.tensor import Column, Masks, Positions, Row, Style, Vocabulary
from manyranks.training.config import GPTConfig


def styles(config: GPTConfig) -> dict[str, Style]:
    """The table for parallel.tensor.parallelize, by names of the GPT's modules.

    Routers and experts are whole: with sequence_parallel each rank has its own tokens there.
    """
    shape = config.shape()
    return {
        "embedding": Positions(),
        "embedding.tokens": Vocabulary(),
        "layers.*.attention.query": Column(heads=shape.heads),
        "layers.*.attention.key": Column(heads=shape.kv_heads),
        "layers.*.attention.value": Column(heads=shape.kv_heads),
        "layers.*.attention.output": Row(heads=shape.heads),
        **(_mlp(shape.gated) if shape.moe_layers < shape.layers else {}),
        "head.projection": Vocabulary(),
        "layers.*.attention.core.dropout": Masks(always=True),
        "layers.*.dropout": Masks(),
        "embedding.dropout": Masks(),
    }


def _mlp(gated: bool) -> dict[str, Style]:
    columns = ("layers.*.mlp.gate", "layers.*.mlp.up") if gated else ("layers.*.mlp.up",)
    return {**dict.fromkeys(columns, Column()), "layers.*.mlp.down": Row()}


def styles_of(config: GPTConfig, part: str) -> dict[str, Style]:
    """The table for one module alone, as "layers.*", by the names of the parts inside it."""
    start, table = f"{part}.", styles(config)
    return {name.removeprefix(start): table[name] for name in table if name.startswith(start)}
