"""Functions that are ready, the library's or PyTorch's, are refused to the learner's: a call of one raises Stopped."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from manyranks.measure.journal import Stopped


@contextmanager
def refused(modules: tuple[str, ...], hint: str, unless_from: tuple[str, ...] = ()) -> Iterator[None]:
    """Inside, a call of a function of these modules raises Stopped with the hint.

    modules: how the names of modules begin, or of functions in them, compiled ones too; unless_from: the same of modules from
    which such calls are let through, as they are from `modules` themselves, which call one another when they are imported.
    """
    inside = (*modules, *unless_from)

    def refuse(frame: FrameType, event: str, argument) -> None:
        if event == "c_call":
            name, caller = f"{getattr(argument, '__module__', None)}.{getattr(argument, '__name__', '')}", frame
        elif event == "call" and frame.f_code.co_name != "<module>":
            name, caller = f"{_module(frame)}.{frame.f_code.co_qualname}", frame.f_back
        else:
            return
        if name.startswith(modules) and not _module(caller).startswith(inside):
            raise Stopped(f"{name if event == 'c_call' else _as_called(frame, modules)} is not allowed", hint)

    before = sys.getprofile()
    sys.setprofile(refuse)
    try:
        yield
    finally:
        sys.setprofile(before)


def _module(frame: FrameType | None) -> str:
    return (frame.f_globals.get("__name__") or "") if frame else ""


def _as_called(frame: FrameType, modules: tuple[str, ...]) -> str:
    """The function's name, or that of the class whose object is made, in the outermost package that has it."""
    code, module = frame.f_code, _module(frame)
    name = code.co_qualname
    if code.co_name == "__init__":
        kinds = type(frame.f_locals[code.co_varnames[0]]).__mro__  # the learner's own may be derived from it
        kind = next((kind for kind in kinds if kind.__module__.startswith(modules)), kinds[0])
        module, name = kind.__module__, kind.__qualname__
    parts = module.split(".")
    packages = [".".join(parts[:k]) for k in range(1, len(parts))]
    here = (package for package in packages if getattr(_found(package, name), "__module__", "") == module)
    return f"{next(here, module)}.{name}"


def _found(package: str, name: str):
    return vars(sys.modules[package]).get(name) if package in sys.modules else None
