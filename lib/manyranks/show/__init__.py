"""Floor 5: plots (data in, Figure out), the explorers around them, and tables of theory beside measurement."""

from importlib import import_module

_HOME = {
    "Explorer": "explorer",
    "choice": "explorer",
    "slider": "explorer",
    "log_slider": "explorer",
    "value_slider": "explorer",
    "size": "units",
    "duration": "units",
    "rate": "units",
    "reconcile": "tables",
    "table": "tables",
    "source": "listing",
    "timeline": "gantt",
    "Gantt": "gantt",
    "curves": "lines",
    "hardware": None,
    "collectives": None,
    "data_parallel": None,
    "zero": None,
}
__all__ = list(_HOME)


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module 'manyranks.show' has no attribute {name!r}")
    module = import_module(f"manyranks.show.{_HOME[name] or name}")
    return getattr(module, name) if _HOME[name] else module
