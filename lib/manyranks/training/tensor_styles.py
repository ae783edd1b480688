"""Which of the small GPT's parts tensor parallelism cuts, and how."""

from manyranks.parallel.tensor import Column, Masks, Positions, Row, Style, Vocabulary
from manyranks.training.config import GPTConfig


def styles(config: GPTConfig) -> dict[str, Style]:
    """The table for parallel.tensor.parallelize, by names of the GPT's modules."""
    shape = config.shape()
    return {
        "embedding": Positions(),
        "embedding.tokens": Vocabulary(),
        "layers.*.attention.query": Column(heads=shape.heads),
        "layers.*.attention.key": Column(heads=shape.kv_heads),
        "layers.*.attention.value": Column(heads=shape.kv_heads),
        "layers.*.attention.output": Row(heads=shape.heads),
        **({"layers.*.mlp.gate": Column()} if shape.gated else {}),
        "layers.*.mlp.up": Column(),
        "layers.*.mlp.down": Row(),
        "head.projection": Vocabulary(),
        "layers.*.attention.core.dropout": Masks(always=True),
        "layers.*.dropout": Masks(),
        "embedding.dropout": Masks(),
    }


def styles_of(config: GPTConfig, part: str) -> dict[str, Style]:
    """The table for one module alone, as "layers.*", by the names of the parts inside it."""
    start, table = f"{part}.", styles(config)
    return {name.removeprefix(start): table[name] for name in table if name.startswith(start)}
