"""A rank's second thread: it answers "where are you?" while the first one is stuck, and leaves when the notebook is gone.

An answer keeps the locals of the first thread's frames alive for a moment. PyTorch clones a gradient that it hands over just
then, so the bytes that operators move may differ by one tensor from run to run: compare FLOPs, calls and payload instead.
"""

import contextlib
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import NamedTuple

from manyranks.measure import wire
from manyranks.measure.calls import RECENT, Call, Recorder
from manyranks.measure.location import Place, idle, machinery, place_of, readers_first
from manyranks.world.rank import debugger, messages, tasks

BRIEFLY, DETAILS = b"?", b"!"  # what the notebook asks
DEBUG, NAMES = b"d", b"n"  # the first opens the debugger where the rank is; after the second comes what a name begins with
_DEEP = 20  # frames
_LOOKS = 3  # at most, at one moment
_TASKS = "/proc/self/task"  # what Linux says of threads
before: wire.Counters = {}  # where the sockets' counters stood when this run began


class Processor(NamedTuple):
    """Holds what Linux says about a process.

    state: of the main thread, "S" if it sleeps and "R" if it runs or is ready to
    rests: how often the main thread has gone to sleep voluntarily
    ready: each other thread that is ready to run, and how often it has run
    delayed: seconds that a thread has waited for a processor, on average
    """

    state: str
    rests: int
    ready: list[tuple[int, int]]
    delayed: float


@dataclass
class Whereabouts:
    """The whereabouts of a rank: what it is doing at this moment."""

    running: bool
    place: Place | None
    blocked: Call | str | None  # the call it waits in, or the torch.distributed function; None where it computes
    issued: int  # calls so far in this run
    cpu: float  # seconds of processor time so far
    moved: tuple[int, int]  # bytes sent and received in this run
    recent: list[Call]  # with DETAILS only
    stack: list[tuple[str, int, str]] = field(default_factory=list)  # the same: file, line, function; outermost first
    names: list[str] = field(default_factory=list)  # with NAMES
    debugged: bool = False  # whether it waits for a line of the reader's
    issues: bool = False  # whether `blocked` is a call that it's about to make
    at: int = 0  # changes when its Python goes on
    # With DETAILS only:
    certain: bool = False  # whether only its peers can end `blocked`, and no other thread of the rank can make calls
    counts: dict[str | tuple[str, str, int | None, int], int] | None = None  # as Recorder's
    members: dict[str, tuple[int, ...]] | None = None
    processor: Processor | None = None

    def progress(self) -> tuple:
        """Changes whenever the rank gets on."""
        return self.running, self.issued, self.moved, self.place, self.at


def start(
    control: socket.socket, recorder: Recorder, running: threading.Event, pack: Callable, look_at: Callable[[FrameType], None]
) -> None:
    """Starts the thread; it is called by the thread that it tells about.

    pack: how its answers travel
    look_at: opens the debugger on a frame
    """
    given = control, recorder, running, threading.get_ident(), pack, look_at
    threading.Thread(target=_answer, args=given, daemon=True, name="watch").start()


def _answer(
    control: socket.socket, recorder: Recorder, running: threading.Event, main: int, pack: Callable, look_at: Callable
) -> None:
    while True:
        try:
            question, number = messages.receive(control, messages.EXACTLY)
        except (EOFError, OSError):
            os._exit(0)  # the notebook is gone; the main thread may be stuck in C++ for ever
        kind = question.tobytes()
        if kind == DEBUG and pack is messages.pack:
            threading.Thread(target=look_at, args=(sys._current_frames()[main],), daemon=True, name="debugger").start()
        seen = _seen(recorder, running, main, kind == DETAILS)
        if kind.startswith(NAMES):
            seen.names = tasks.names(kind.removeprefix(NAMES).decode())
        looked = pack(seen)
        with contextlib.suppress(OSError):
            messages.send(control, [*looked, number])


def _seen(recorder: Recorder, running: threading.Event, main: int, details: bool) -> Whereabouts:
    """The main thread goes on while it is looked at: what does not fit together is looked at again."""
    for _ in range(_LOOKS - 1):
        with contextlib.suppress(Exception):
            return _look(recorder, running, main, details)
    return _look(recorder, running, main, details)


def _look(recorder: Recorder, running: threading.Event, main: int, details: bool) -> Whereabouts:
    place, blocked, at = _where(recorder, main)
    seen = Whereabouts(
        running=running.is_set(),
        place=place,
        blocked=blocked,
        issued=recorder.issued,
        cpu=time.process_time(),
        moved=_moved(),
        debugged=debugger.asking,
        recent=[],
        issues=isinstance(blocked, Call)
        and blocked is recorder.issuing
        and blocked.op != "barrier",  # monitored ones wait there
        at=at,
    )
    if details:
        seen.recent, seen.stack, seen.processor = list(recorder.calls)[-RECENT:], _stack(main), processor()
        seen.counts, seen.members = dict(recorder.counts), dict(recorder.members)
        seen.certain = blocked is not None and recorder.waits_for_peers(blocked) and _no_other_thread(main)
    return seen


def _where(recorder: Recorder, main: int) -> tuple[Place | None, Call | str | None, int]:
    """Lets go of the frame before anything else lets the main thread run: a frame keeps its tensors alive after its return."""
    frame = sys._current_frames().get(main)
    return place_of(frame), recorder.blocked_in(frame), _at(frame)


def _at(frame: FrameType | None) -> int:
    steps = []
    while frame is not None:
        steps.append((id(frame.f_code), frame.f_lasti))
        frame = frame.f_back
    return hash(tuple(steps))


def _no_other_thread(main: int) -> bool:
    """Returns whether no other thread, of the reader or of a library, could make calls while the main one waits."""
    ours = main, threading.get_ident()
    return all(thread in ours or idle(frame) for thread, frame in sys._current_frames().items())


def _stack(main: int) -> list[tuple[str, int, str]]:
    """The reader's part of what the main thread is in."""
    found = traceback.extract_stack(sys._current_frames()[main])
    found = found[readers_first([line.filename for line in found]) :]
    return [(line.filename, line.lineno or 0, line.name) for line in found if not machinery(line.filename)][-_DEEP:]


def _moved() -> tuple[int, int]:
    try:
        return wire.moved(before, wire.counters())
    except OSError:  # no file descriptor is left
        return 0, 0


def processor() -> Processor | None:
    """Returns what the system says, None if it says nothing."""
    try:
        main, asker = os.getpid(), threading.get_native_id()  # main_thread().native_id is the parent's after a fork
        status = dict(line.split(":", 1) for line in _read(main, "status").splitlines() if ":" in line)
        threads = {int(task): [int(n) for n in _read(task, "schedstat").split()] for task in os.listdir(_TASKS)}
        ready = [(task, ran) for task, (_, _, ran) in threads.items() if task != asker and _state(task) == "R"]
        delayed = sum(waited for _, waited, _ in threads.values()) / len(threads) / 1e9
        return Processor(status["State"].split()[0], int(status["voluntary_ctxt_switches"]), ready, delayed)
    except (OSError, LookupError, ValueError):  # another system, or a thread has just ended
        return None


def _state(task: int) -> str:
    return _read(task, "stat").rpartition(") ")[2][0]


def _read(task: int | str, name: str) -> str:
    with open(f"{_TASKS}/{task}/{name}") as file:
        return file.read()
