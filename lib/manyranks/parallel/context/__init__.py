"""Context parallelism: the tokens of one sequence on many ranks, and attention across them.

    ring       keys and values go round, gradients behind them; attention block by block,
               and what merges two blocks' results
    layouts    the tokens that each rank has, the keys that a query sees, the tiles skipped
    exchange   keys and values gathered at once; heads exchanged for tokens; and that inside
               a ring
    latent     keys and values travel compressed
    linear     linear attention, whose state is passed on
    dynamic    as many ranks for a document as it needs
    apply      a whole model from outside
    checks     what is refused

Source: Ring Attention, arXiv 2310.01889; DeepSpeed Ulysses, arXiv 2309.14509; Llama 3,
arXiv 2407.21783, section 3.3.2.
"""

from manyranks.parallel.context.apply import ATTENTION, ContextParallel
from manyranks.parallel.context.exchange import (
    all_gather_attention,
    blockwise_attention,
    ring_ulysses_attention,
    ulysses_attention,
)
from manyranks.parallel.context.latent import absorbed_attention, latent_attention
from manyranks.parallel.context.layouts import LAYOUTS, Mask, positions, shard, unshard
from manyranks.parallel.context.linear import linear_attention
from manyranks.parallel.context.ring import merge, ring_attention

__all__ = [
    "ATTENTION",
    "LAYOUTS",
    "ContextParallel",
    "Mask",
    "absorbed_attention",
    "all_gather_attention",
    "blockwise_attention",
    "latent_attention",
    "linear_attention",
    "merge",
    "positions",
    "ring_attention",
    "ring_ulysses_attention",
    "shard",
    "ulysses_attention",
    "unshard",
]
