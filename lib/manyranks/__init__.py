"""Many Ranks: large-scale training on one laptop, with real processes.

    import manyranks as mr
    world = mr.World(4)
    world.run(fn)

Imports are lazy (PEP 562): `import manyranks.theory` brings in neither torch nor numpy.
"""

from importlib import import_module

from manyranks import lazy

__version__ = "0.2.0"

__getattr__, __dir__, __all__ = lazy.names(__name__, __file__)


def load_ipython_extension(shell) -> None:
    """`%load_ext manyranks`: adds %%ranks and starts the forkserver in the background."""
    import_module("manyranks.world.magic").load(shell)
