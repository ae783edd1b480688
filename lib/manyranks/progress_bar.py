"""A bar in the notebook for what takes longer than two seconds. Elsewhere, and in a thread, nothing is shown."""

import html
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

DELAY, EVERY = 2.0, 0.2  # seconds before a bar is shown, and between two changes of it
_shown = threading.Lock()  # one bar at a time: a part of something long has none

T = TypeVar("T")


class Bar:
    """A bar with these words. total: number of steps; 0 if unknown, and then only the seconds are shown."""

    def __init__(self, words: str, total: int = 0):
        self._words, self._total, self._done = words, total, 0
        self._started = self._last = time.monotonic()
        self._handle = None

    def step(self, steps: int = 1) -> None:
        """Adds to the steps that are done; 0: only time has passed."""
        self._done += steps
        now = time.monotonic()
        if now - self._started < DELAY or now - self._last < EVERY:
            return
        self._last = now
        if self._handle is None:
            self._handle = _display(self._data(now))
        else:
            self._handle.update(self._data(now), raw=True)

    def end(self) -> None:
        """Takes the bar away."""
        if self._handle is not None:
            self._handle.update({"text/plain": ""}, raw=True)

    def _data(self, now: float) -> dict[str, str]:
        share = min(self._done / self._total, 1.0) if self._total else 0.0
        said = f"{self._words}: {f'{share:.0%}, ' if self._total else ''}{now - self._started:.0f} s"
        bar = f"<progress max='1' value='{share:.3f}' aria-label='{html.escape(self._words)}'></progress> "
        return {"text/plain": said, "text/html": f"<small>{bar if self._total else ''}{html.escape(said)}</small>"}


class _Nothing(Bar):
    """A bar that shows nothing, for where nobody looks."""

    def step(self, steps: int = 1) -> None:
        pass


@contextmanager
def place() -> Iterator[bool]:
    """Gives whether a notebook has room for what says that it is busy: the outermost has it."""
    if not notebook() or not _shown.acquire(blocking=False):
        yield False
        return
    try:
        yield True
    finally:
        _shown.release()


@contextmanager
def bar(words: str, total: int = 0) -> Iterator[Bar]:
    """Gives a Bar, and takes it away at the end."""
    with place() as free:
        shown = Bar(words, total) if free else _Nothing(words)
        try:
            yield shown
        finally:
            shown.end()


def each(items: Iterable[T], words: str) -> Iterator[T]:
    """Gives the items one by one, with a bar."""
    items = items if isinstance(items, Sequence) else list(items)
    with bar(words, len(items)) as shown:
        for item in items:
            yield item
            shown.step()


def notebook() -> bool:
    """Returns whether the main thread of a notebook's kernel calls this, and what is shown may differ from run to run."""
    shell = sys.modules["IPython"].get_ipython() if "ipykernel" in sys.modules and "IPython" in sys.modules else None
    main = threading.current_thread() is threading.main_thread()
    return hasattr(shell, "kernel") and main and os.environ.get("MANYRANKS_SETTINGS") != "off"


def _display(data: dict[str, str]):
    from IPython.display import display

    return display(data, raw=True, display_id=True)
