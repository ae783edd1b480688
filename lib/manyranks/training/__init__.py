"""Floor 4: the small GPT, its corpus and the trainer that composes every axis.

Imports are lazy (PEP 562): the command line reads its arguments before torch is loaded.
"""

from manyranks import lazy

__getattr__, __dir__, __all__ = lazy.names(
    __name__,
    "checkpoint",
    "config",
    "corpus",
    "gpt",
    "initial",
    "parallelize",
    "progress",
    "tensor_styles",
    "trainer",
    "utilisation",
    GPT="gpt",
    GPTConfig="config",
    Trainer="trainer",
    TrainingConfig="config",
    train="trainer",
)
