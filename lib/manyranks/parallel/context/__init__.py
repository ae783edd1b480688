"""Context parallelism: the tokens of one sequence on many ranks, and attention across them.

    layouts     which tokens a rank has
    blockwise   attention block by block, and what merges two blocks' results
    sight       which keys a query sees, and which tiles can be skipped
    ring        keys and values go round, gradients behind them
    gather      keys and values gathered at once
    ulysses     heads exchanged for tokens
    combined    Ulysses inside a ring
    apply       a whole model from outside

Source: Ring Attention, arXiv 2310.01889; DeepSpeed Ulysses, arXiv 2309.14509; Llama 3,
arXiv 2407.21783, section 3.3.2.
"""

from manyranks.parallel.context.apply import ATTENTION, ContextParallel
from manyranks.parallel.context.blockwise import blockwise_attention, merge
from manyranks.parallel.context.combined import ring_ulysses_attention
from manyranks.parallel.context.gather import all_gather_attention
from manyranks.parallel.context.layouts import LAYOUTS, positions, shard, unshard
from manyranks.parallel.context.ring import ring_attention
from manyranks.parallel.context.ulysses import ulysses_attention

__all__ = [
    "ATTENTION",
    "LAYOUTS",
    "ContextParallel",
    "all_gather_attention",
    "blockwise_attention",
    "merge",
    "positions",
    "ring_attention",
    "ring_ulysses_attention",
    "shard",
    "ulysses_attention",
    "unshard",
]
