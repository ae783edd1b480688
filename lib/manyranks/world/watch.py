"""A rank's second thread: it answers "where are you?" while the first one is stuck, and leaves when the kernel is gone."""

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from manyranks.measure import wire
from manyranks.measure.calls import RECENT, Call, Recorder
from manyranks.measure.place import Place, place_of
from manyranks.world import messages

BRIEFLY, DETAILS = b"?", b"!"  # what the kernel asks
_LOOKS = 3  # at most, at one moment


@dataclass
class Whereabouts:
    """What a rank is doing at this moment."""

    running: bool
    place: Place | None
    blocked: Call | str | None  # the call it waits in, or the torch.distributed function; None where it computes
    issued: int  # calls so far in this run
    cpu: float  # seconds of processor time so far
    moved: tuple[int, int]  # bytes sent and received so far
    recent: list[Call]  # with DETAILS only

    def progress(self) -> tuple:
        """Changes whenever the rank gets on with its communication."""
        return self.running, self.issued, self.moved, self.place


def start(control: socket.socket, recorder: Recorder, running: threading.Event, pack: Callable) -> None:
    """Starts the thread; it is called by the thread that it tells about. pack: how its answers travel."""
    main = threading.get_ident()
    threading.Thread(target=_answer, args=(control, recorder, running, main, pack), daemon=True, name="watch").start()


def _answer(control: socket.socket, recorder: Recorder, running: threading.Event, main: int, pack: Callable) -> None:
    while True:
        try:
            question, number = messages.receive(control, messages.EXACTLY)
        except (EOFError, OSError):
            os._exit(0)  # the kernel is gone; the main thread may be stuck in C++ for ever
        looked = pack(_seen(recorder, running, main, question.tobytes() == DETAILS))
        with contextlib.suppress(OSError):
            messages.send(control, [*looked, number])


def _seen(recorder: Recorder, running: threading.Event, main: int, details: bool) -> Whereabouts:
    """The main thread goes on while it is looked at: what does not fit together is looked at again."""
    for _ in range(_LOOKS - 1):
        with contextlib.suppress(Exception):
            return _look(recorder, running, main, details)
    return _look(recorder, running, main, details)


def _look(recorder: Recorder, running: threading.Event, main: int, details: bool) -> Whereabouts:
    place, blocked = _where(recorder, main)
    return Whereabouts(
        running=running.is_set(),
        place=place,
        blocked=blocked,
        issued=recorder.issued,
        cpu=time.process_time(),
        moved=_moved(),
        recent=list(recorder.calls)[-RECENT:] if details else [],
    )


def _where(recorder: Recorder, main: int) -> tuple[Place | None, Call | str | None]:
    """Lets go of the frame before anything else lets the main thread run: a frame keeps its tensors alive after its return."""
    frame = sys._current_frames().get(main)
    return place_of(frame), recorder.blocked_in(frame)


def _moved() -> tuple[int, int]:
    try:
        return wire.moved({}, wire.counters())
    except OSError:  # no file descriptor is left
        return 0, 0
