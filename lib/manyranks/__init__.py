"""Many Ranks: large-scale training on one laptop, with real processes.

    import manyranks as mr
    world = mr.World(4)
    world.run(fn)

Imports are lazy (PEP 562): `import manyranks.theory` brings in neither torch nor numpy.
"""

from importlib import import_module

__version__ = "0.1.0"

_SUBPACKAGES = ("timeline", "theory", "measure", "world", "parallel", "training", "show", "grade")
_WORLD_NAMES = ("World", "WorldError", "RankFailed", "RankDied", "RankHung")

__all__ = [*_WORLD_NAMES, *_SUBPACKAGES]


def __getattr__(name: str):
    if name in _SUBPACKAGES:
        return import_module(f"manyranks.{name}")
    if name in _WORLD_NAMES:
        return getattr(import_module("manyranks.world"), name)
    raise AttributeError(f"module 'manyranks' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


def load_ipython_extension(shell) -> None:
    """`%load_ext manyranks`: adds %%ranks and starts the forkserver in the background."""
    import_module("manyranks.world.magic").load(shell)
