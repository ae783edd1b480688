"""Floor 2: ranks from a notebook. `World` starts processes, runs functions on them and explains what went wrong."""

from importlib import import_module

_HOME = {
    "World": "world",
    "Measurement": "measurement",
    "WorldError": "errors",
    "RankFailed": "errors",
    "RankDied": "errors",
    "RankHung": "errors",
}
__all__ = list(_HOME)


def __getattr__(name: str):
    # Lazy: the forkserver and the ranks import their part of this package without the kernel's.
    if name in _HOME:
        return getattr(import_module(f"manyranks.world.{_HOME[name]}"), name)
    raise AttributeError(f"module 'manyranks.world' has no attribute {name!r}")
