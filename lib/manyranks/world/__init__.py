"""Floor 2: ranks from a notebook. `World` starts processes, runs functions on them and explains what went wrong."""

from manyranks import lazy

lazy.require("torch", "numpy", "cloudpickle", "psutil", "msgspec")

# The forkserver and the ranks import their part of this package without the kernel's.
__getattr__, __dir__, __all__ = lazy.names(__name__, __file__)
