"""Floor 4: the small GPT, its corpus and the trainer that composes every axis.

Imports are lazy (PEP 562): the command line reads its arguments before torch is loaded.
"""

from manyranks import lazy

__getattr__, __dir__, __all__ = lazy.names(__name__, __file__)
