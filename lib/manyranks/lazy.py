"""Below all floors: a package's public names, each loaded when it is first used (PEP 562). Standard library only."""

import sys
from collections.abc import Callable
from importlib import import_module


def names(package: str, /, *modules: str, **homes: str) -> tuple[Callable, Callable, list[str]]:
    """A package's __getattr__, __dir__ and __all__. modules: its public modules; homes: other public names -> their module."""
    public = [*modules, *homes]

    def get(name: str):
        if name not in public:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = import_module(f"{package}.{homes.get(name, name)}")
        return getattr(module, name) if name in homes else module

    def all_names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *public})

    return get, all_names, public
