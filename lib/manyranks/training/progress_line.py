"""A line that says how far a run is, rewritten in place; nothing where nobody would see it."""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator

Report = Callable[[int, float], None]  # of the number of steps done, and the loss
_WIDTH = 24  # characters of the bar
_PAUSE = 0.1  # seconds between two looks at least


def terminal() -> str | None:
    """The name of the terminal that sys.stderr is, None where it is none.

    By its name a rank can write to it whose own output goes elsewhere.
    """
    return os.ttyname(sys.stderr.fileno()) if sys.stderr.isatty() else None


@contextlib.contextmanager
def bar(name: str | None, steps: int) -> Iterator[Report | None]:
    """Gives a function to call after each step, None without the name of a terminal."""
    if name is None:
        yield None
        return
    with open(os.open(name, os.O_WRONLY | os.O_NOCTTY), "w", encoding="utf-8") as stream:
        yield _reporter(stream.write, stream.flush, steps)
        stream.write("\n")


def _reporter(write, flush, steps: int) -> Report:
    started = shown = time.perf_counter()
    first = None

    def report(step: int, loss: float) -> None:
        nonlocal first, shown
        first = step - 1 if first is None else first  # a resumed run does not start at 0
        now = time.perf_counter()
        if now - shown >= _PAUSE or step == steps:
            shown = now
            write("\r" + line(step, steps, loss, (step - first) / (now - started)))
            flush()

    return report


def line(step: int, steps: int, loss: float, rate: float) -> str:
    """Writes the line.

    rate: steps a second
    """
    done = "━" * (_WIDTH * step // steps)
    return f"{done:─<{_WIDTH}} step {step}/{steps}  {loss:.3f} nats a byte  {rate:.1f} steps/s "
