"""Tensor and sequence parallelism: matrices cut over ranks that compute a layer together.

    layers       the algorithm: column- and row-parallel layers, and what they send
    apply        a whole model from outside, by a table of names; who draws which masks
    cuts         which slice a rank has, and the words of the table
    checks       what a cut model must not do
    vocabulary   the embedding and the loss, cut by tokens of the vocabulary
    overlapped   messages beside products, piece by piece
    families     the table of models of transformers
    state        checkpoints, for any number of ranks

Source: "Megatron-LM", arXiv 1909.08053; Korthikanti et al., arXiv 2205.05198.
"""

from manyranks.parallel.tensor.apply import (
    TensorParallel,
    draw_own_masks,
    own_randomness,
    parallelize,
)
from manyranks.parallel.tensor.cuts import (
    Column,
    Masks,
    Positions,
    Row,
    Style,
    Vocabulary,
)
from manyranks.parallel.tensor.families import parallelize_transformers
from manyranks.parallel.tensor.layers import (
    ColumnParallelLinear,
    How,
    RowParallelLinear,
    column_parallel,
    copy_in,
    gather_in,
    reduce_out,
    reduce_scatter_out,
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
    "vocab_parallel_cross_entropy",
]
