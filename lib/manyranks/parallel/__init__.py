"""Floor 3: the techniques, one file each, in plain torch.distributed.

Each also runs under torchrun.
Imports are lazy (PEP 562): parallel.collectives loads that technique only.
"""

from importlib import import_module

_MODULES = (
    "collectives",
    "data_parallel",
    "fsdp",
    "offload",
    "precision",
    "sharded_state",
    "zero",
)

__all__ = [*_MODULES]


def __getattr__(name: str):
    if name in _MODULES:
        return import_module(f"manyranks.parallel.{name}")
    raise AttributeError(f"module 'manyranks.parallel' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
