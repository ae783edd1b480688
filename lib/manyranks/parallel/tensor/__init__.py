"""Tensor and sequence parallelism: matrices cut over ranks that compute a layer together.

    layers       the algorithm: column- and row-parallel layers, and what they send
    apply        a whole model from outside, by a table of names
    cuts         which slice a rank has, and the words of the table
    dropout      who draws which masks
    checks       what a cut model must not do
    vocabulary   the embedding and the loss, cut by tokens of the vocabulary
    overlapped   messages beside products, piece by piece
    families     the table of models of transformers
    state        checkpoints, for any number of ranks

Source: "Megatron-LM", arXiv 1909.08053; Korthikanti et al., arXiv 2205.05198.
"""

from manyranks import lazy

__getattr__, __dir__, __all__ = lazy.names(__name__, __file__)
