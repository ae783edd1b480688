"""Words for a name that is not known and for a number that cannot be, and how a value with many fields is written."""

import math
from collections.abc import Callable, Iterable
from dataclasses import fields
from difflib import get_close_matches


def nearest(name: object, known: Iterable[str]) -> str:
    """The end of an error message about an unknown name: the nearest known one, and all of them."""
    known = list(known)
    close = get_close_matches(str(name), known, n=1) or get_close_matches(str(name).lower(), known, n=1)
    return (f"did you mean {close[0]!r}? " if close else "") + f"choose from {', '.join(known)}"


def one_of(known: Iterable[str], /, **given: object) -> None:
    """Raises ValueError, by name, for what is none of the known ones."""
    for name, value in given.items():
        if not isinstance(value, str) or value not in known:
            raise ValueError(f"{name}={value!r}: {nearest(value, known)}")


class UnknownName(ValueError, KeyError):
    """A name that is not in the table: a KeyError for those who look it up, a ValueError for those who gave it."""

    def __str__(self) -> str:
        return str(self.args[0])


class Named(dict):
    """A table by name whose error for an unknown one suggests the nearest."""

    def __init__(self, kind: str, entries: dict):
        super().__init__(entries)
        self._kind = kind

    def __missing__(self, name: object):
        raise UnknownName(f"{self._kind} {name!r}: {nearest(name, self)}")


def lazily(module: str, **tables: Callable[[], Named]) -> Callable[[str], Named]:
    """Makes a module's __getattr__: tables are read from package data on first use, and importing the theory reads no file."""

    def get(name: str) -> Named:
        if name in tables:
            return tables[name]()
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return get


def concise(value: object, *always: str, hide: str = "") -> str:
    """Writes a dataclass's instance as repr does, without fields that have their default, but with those named in `always`."""
    given = ((f.name, getattr(value, f.name)) for f in fields(value) if f.name != hide)
    defaults = {f.name: f.default for f in fields(value)}
    shown = (f"{name}={v!r}" for name, v in given if name in always or (v != defaults[name] and (v or defaults[name])))
    return f"{type(value).__name__}({', '.join(shown)})"


def whole(least: int = 1, /, **sizes: int) -> None:
    """Raises ValueError, by name, for a size that is not a whole number from `least` up."""
    for name, size in sizes.items():
        if type(size) is not int or size < least:
            raise ValueError(f"{name}={size!r}: must be a whole number, {least} or more")


def positive(**values: float) -> None:
    """Raises ValueError, by name, for what is not a number above 0, or infinite."""
    for name, value in values.items():
        if not 0 < value < math.inf:
            raise ValueError(f"{name}={value!r}: must be a number above 0")


def not_negative(**values: float) -> None:
    """Raises ValueError, by name, for what is not a number from 0 up."""
    for name, value in values.items():
        if not value >= 0:
            raise ValueError(f"{name}={value!r}: must be a number, 0 or more")
