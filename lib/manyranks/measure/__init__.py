"""Floor 1: what happened. Calls, bytes on the wire, bytes in memory and FLOPs, counted on real ranks."""

from manyranks import lazy

__getattr__, __dir__, __all__ = lazy.names(__name__, __file__)
