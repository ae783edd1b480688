"""Kernels in Triton: compiled where there is a GPU, interpreted where there is none. Linux only, as Triton is.

A launcher checks its arguments, chooses a grid and starts a kernel; measure.kernel counts what the kernel moves.
"""

from manyranks import lazy

__getattr__, __dir__, __all__ = lazy.names(__name__, __file__)
