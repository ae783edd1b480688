"""What was ready, the library's or PyTorch's, is refused: calls of it raise Stopped."""

import sys
from contextlib import contextmanager

from torch.utils._python_dispatch import TorchDispatchMode

from manyranks.grade.old.context.ready import READY
from manyranks.measure.journal import Stopped

YOURSELF = "what is ready is no answer: the text above says all that it needs"


class _Own(TorchDispatchMode):
    """Raises Stopped where the library computes what the learner should: some tasks make no call that could be seen."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        frame = sys._getframe(1)
        while frame is not None:
            if (name := frame.f_globals.get("__name__", "")).startswith("manyranks.parallel"):
                raise Stopped(f"{name} is not allowed", YOURSELF)
            frame = frame.f_back
        return function(*args, **(kwargs or {}))


@contextmanager
def own(watch):
    """Inside, what is ready is refused."""
    watch.refuse(READY, YOURSELF)
    with _Own():
        yield
