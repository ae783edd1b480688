"""Waits for processes that start as long as they make progress, however slow a busy machine makes them."""

import contextlib
import sys
import time

import psutil

_BETWEEN = 1.0  # seconds between two looks
_SHARE = 0.1  # of the time; a process that only waits for others works for less


class Patience:
    """Waits for a process and its children.

    pid: the process; None if it can't be seen, and then the time alone counts
    seconds: how long all of them may stand still
    what: what they do, for the line that says it takes long
    """

    def __init__(self, pid: int | None, seconds: float, what: str):
        self._pid, self._seconds, self._what, self._said = pid, seconds, what, False
        self._began = self._moved = self._looked = time.monotonic()
        self._efforts = _efforts(pid)

    def over(self) -> bool:
        """Returns whether they have stood still for that long. Says once, on standard error, that it keeps waiting."""
        now = time.monotonic()
        if now - self._looked < _BETWEEN:
            return False
        efforts, least = _efforts(self._pid), _SHARE * (now - self._looked)
        if any(effort - self._efforts.get(pid, 0.0) >= least for pid, effort in efforts.items()):
            self._moved = now
        self._looked, self._efforts = now, efforts
        if now - self._began > self._seconds and now - self._moved <= self._seconds:
            self._say(now - self._began)
        return now - self._moved > self._seconds

    def _say(self, seconds: float) -> None:
        if not self._said and "ipykernel" not in sys.modules:  # a notebook has a bar
            print(f"{self._what} has taken {seconds:.0f} s so far: this machine is busy, and we keep waiting", file=sys.stderr)
        self._said = True


def _efforts(pid: int | None) -> dict[int, float]:
    """Returns, for each process, the seconds in which it had work to do: it ran, or waited for a processor or a disk."""
    found = {}
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid) if pid else None
        for one in [process, *process.children(recursive=True)] if process else ():
            with contextlib.suppress(psutil.Error):  # it has just ended
                found[one.pid] = _effort(one)
    return found


def _effort(process: psutil.Process) -> float:
    if process.status() == psutil.STATUS_DISK_SLEEP:
        return time.monotonic()  # as if it had run
    try:
        with open(f"/proc/{process.pid}/schedstat") as file:
            ran, waited, _ = map(int, file.read().split())
        return (ran + waited) / 1e9
    except (OSError, ValueError):  # not Linux
        times = process.cpu_times()
        return times.user + times.system
