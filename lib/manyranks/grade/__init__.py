"""Floor 5: the checks that exercises call: numerics, traffic, memory and order.

grade.collectives.ring_reduce_scatter(ring_reduce_scatter) runs a learner's function on real ranks and returns a Report.
Imports are lazy (PEP 562): every rank of a check imports this package for its probe.
"""

from importlib import import_module

_MODULES = ("collectives", "data_parallel")
_HOMES = {"Report": "report", "Line": "report"}

__all__ = ["Line", "Report", "collectives", "data_parallel"]


def __getattr__(name: str):
    if name in _MODULES:
        return import_module(f"manyranks.grade.{name}")
    if name in _HOMES:
        return getattr(import_module(f"manyranks.grade.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'manyranks.grade' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
