"""The parts of the small GPT that tensor parallelism cuts, and how it cuts each."""

from manyranks.parallel.tensor import Masks, Positions, Style, Vocabulary
from manyranks.parallel.tensor.families import in_layers
from manyranks.training.config import GPTConfig


def styles(config: GPTConfig) -> dict[str, Style]:
    """The table for parallel.tensor.parallelize, by names of the GPT's modules.

    Routers and experts are whole: with sequence_parallel each rank has its own tokens there.
    """
    shape, layers = config.shape(), "layers.*"
    dense = ("gate", "up", "down") if shape.gated else ("up", "down")
    mlp = () if shape.moe_layers == shape.layers else dense
    has = ("query", "key", "value", "output", *mlp)
    return {
        "embedding": Positions(),
        "embedding.tokens": Vocabulary(),
        **in_layers(layers, has, shape.heads, shape.kv_heads),
        "head.projection": Vocabulary(),
        f"{layers}.attention.core.dropout": Masks(always=True),
        f"{layers}.dropout": Masks(),
        "embedding.dropout": Masks(),
    }


def styles_of(config: GPTConfig, part: str) -> dict[str, Style]:
    """The table for one module alone, as "layers.*", by the names of the parts inside it."""
    start, table = f"{part}.", styles(config)
    return {name.removeprefix(start): table[name] for name in table if name.startswith(start)}
