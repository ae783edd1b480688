"""Python's audit events: what opens a file or looks for objects says so, whatever name it was called by, in any thread."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

_listeners: list[Callable[[str, tuple], None]] = []


@cache
def _listen() -> None:
    """Adds the hook, once in a process: Python never takes one away again."""

    def tell(event: str, args: tuple) -> None:
        for listener in tuple(_listeners):
            listener(event, args)

    sys.addaudithook(tell)


@contextmanager
def audited(listener: Callable[[str, tuple], None]) -> Iterator[None]:
    """Calls a function at each event inside, before what it's about is done: it may raise.

    listener: gets the event's name, such as "open", and its arguments
    """
    _listen()
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)
