"""Tensor and sequence parallelism: matrices cut over ranks that compute a layer together.

    mappings     what happens to activations where a parallel part begins and ends
    linear       column- and row-parallel linear layers
    vocabulary   the embedding and the loss, cut by tokens of the vocabulary
    overlapped   messages beside products, piece by piece
    dropout      which masks are the same on all ranks
    apply        a whole model from outside, by a table of names: cuts, styles
    families     the tables of some models of transformers
    state        checkpoints, for any number of ranks

Source: "Megatron-LM", arXiv 1909.08053; Korthikanti et al., arXiv 2205.05198.
"""

from manyranks.parallel.tensor.apply import TensorParallel, parallelize
from manyranks.parallel.tensor.dropout import draw_own_masks, own_randomness
from manyranks.parallel.tensor.families import parallelize_transformers
from manyranks.parallel.tensor.linear import (
    ColumnParallelLinear,
    How,
    RowParallelLinear,
    column_parallel,
)
from manyranks.parallel.tensor.mappings import (
    copy_in,
    gather_in,
    reduce_out,
    reduce_scatter_out,
    split_in,
)
from manyranks.parallel.tensor.styles import (
    Column,
    Masks,
    Positions,
    Row,
    Style,
    Vocabulary,
)
from manyranks.parallel.tensor.vocabulary import (
    VocabParallelEmbedding,
    vocab_parallel_cross_entropy,
)

__all__ = [
    "Column",
    "ColumnParallelLinear",
    "How",
    "Masks",
    "Positions",
    "Row",
    "RowParallelLinear",
    "Style",
    "TensorParallel",
    "VocabParallelEmbedding",
    "Vocabulary",
    "column_parallel",
    "copy_in",
    "draw_own_masks",
    "gather_in",
    "own_randomness",
    "parallelize",
    "parallelize_transformers",
    "reduce_out",
    "reduce_scatter_out",
    "split_in",
    "vocab_parallel_cross_entropy",
]
