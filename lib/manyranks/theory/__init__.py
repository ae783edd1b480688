"""Floor 1: what should happen. Bytes, seconds and FLOPs from formulas. Standard library only."""

from importlib import import_module

_MODULES = ("collectives", "flops", "hardware", "published")
__all__ = [*_MODULES, "accelerators", "links"]


def __getattr__(name: str):
    if name in _MODULES:
        return import_module(f"manyranks.theory.{name}")
    if name in ("accelerators", "links"):
        return getattr(import_module("manyranks.theory.hardware"), name)
    raise AttributeError(f"module 'manyranks.theory' has no attribute {name!r}")
