"""Below all floors: a package's public names, each loaded when it is first used (PEP 562). Standard library only."""

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path


class Missing(ImportError):
    """A package that is needed is not installed: its text says all, so neither notebooks nor commands show a traceback."""

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__name__}: {self}"]


def require(*packages: str) -> None:
    """Raises Missing for those that are not installed."""
    lacking = [name for name in packages if name not in sys.modules and find_spec(name) is None]
    if lacking:
        shown = sys.excepthook
        sys.excepthook = lambda kind, error, trace: (
            print(error, file=sys.stderr) if kind is Missing else shown(kind, error, trace)
        )
        raise Missing(f"manyranks needs {' and '.join(lacking)}: {sys.executable} -m pip install {' '.join(lacking)}")


def names(package: str, file: str) -> tuple[Callable, Callable, list[str]]:
    """A package's __getattr__, __dir__ and __all__: the names that its stub, __init__.pyi, imports from its own modules.

    file: of the package. Editors and type checkers read the same stub. A module must not have the name of a function or class
    in the stub: once it's loaded, it hides that. tests/unit/test_floors.py looks at every name twice.
    """
    homes: dict[str, str | None] = {}  # name -> the module that has it, None for one that is a module itself
    for node in ast.parse(Path(file).with_suffix(".pyi").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom):
            homes |= {alias.name: node.module for alias in node.names}

    def get(name: str):
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = import_module(f"{package}.{homes[name] or name}")
        return getattr(module, name) if homes[name] else module

    def all_names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *homes})

    return get, all_names, list(homes)
