"""How a rank's threads get on with the processors, as Linux tells it."""

import os
import threading
from typing import NamedTuple

_TASKS = "/proc/self/task"


class Processor(NamedTuple):
    """state: the main thread's, "S" where it sleeps and "R" where it runs or would like to; rests: how often it has gone to
    sleep by its own choice; delayed: seconds that a thread of this process has waited for a processor, on average."""

    state: str
    rests: int
    delayed: float


def processor() -> Processor | None:
    """What the system says now; None where it says nothing."""
    try:
        main = threading.main_thread().native_id
        status = dict(line.split(":", 1) for line in _read(main, "status").splitlines() if ":" in line)
        waited = [int(_read(task, "schedstat").split()[1]) for task in os.listdir(_TASKS)]
        return Processor(status["State"].split()[0], int(status["voluntary_ctxt_switches"]), sum(waited) / len(waited) / 1e9)
    except (OSError, LookupError, ValueError):  # another system, or a thread has just ended
        return None


def _read(task, name: str) -> str:
    with open(f"{_TASKS}/{task}/{name}") as file:
        return file.read()
