"""Floor 1: what should happen. Bytes, seconds and FLOPs from formulas. Standard library only."""

from manyranks import lazy

__getattr__, __dir__, __all__ = lazy.names(__name__, __file__)
