"""What was ready, the library's or PyTorch's, is refused: a learner's call of it raises Stopped."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from manyranks.grade.journal import Stopped

_MEASURE = ("budget", "flops", "intervals", "kinds", "machine", "profile", "timing")  # other modules note what goes on
_READY = (
    *("manyranks.theory", "manyranks.training", *(f"manyranks.measure.{name}" for name in _MEASURE)),
    *("torch.utils.flop_counter", "torch.utils.benchmark", "torch.profiler"),
)
_OTHERS = ("manyranks.", "torch.", "contextlib", "functools")  # call these modules for themselves
_YOURSELF = "what is ready is no answer: the text above says all that it needs"


@contextmanager
def own() -> Iterator[None]:
    """Inside, the learner's function runs."""
    before = sys.getprofile()
    sys.setprofile(_refuse)
    try:
        yield
    finally:
        sys.setprofile(before)


def _refuse(frame, event: str, argument) -> None:
    if event == "call" and (name := _module(frame)).startswith(_READY) and not _module(frame.f_back).startswith(_OTHERS):
        raise Stopped(f"{name} is not allowed", _YOURSELF)


def _module(frame) -> str:
    return (frame.f_globals.get("__name__") or "") if frame else ""
