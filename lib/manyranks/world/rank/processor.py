"""Asks Linux whether a rank's threads get a processor."""

import os
import threading
from typing import NamedTuple

_TASKS = "/proc/self/task"


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
