"""Functions that are ready, the library's or PyTorch's, are refused to the learner's: a call of one raises Stopped."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from manyranks.grade.journal import Stopped


@contextmanager
def refused(modules: tuple[str, ...], hint: str, unless_from: tuple[str, ...] = ()) -> Iterator[None]:
    """Inside, a call of a function of these modules raises Stopped with the hint.

    modules, unless_from: how the names of modules begin; from the latter such calls are let through.
    """

    def refuse(frame, event: str, argument) -> None:
        if (
            event == "call"
            and (name := _module(frame)).startswith(modules)
            and not _module(frame.f_back).startswith(unless_from)
        ):
            raise Stopped(f"{name} is not allowed", hint)

    before = sys.getprofile()
    sys.setprofile(refuse)
    try:
        yield
    finally:
        sys.setprofile(before)


def _module(frame) -> str:
    return (frame.f_globals.get("__name__") or "") if frame else ""
