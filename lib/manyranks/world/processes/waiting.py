"""Waiting for processes on a busy machine: for those that start, while they make progress, and for those that compute."""

import contextlib
import sys
import time
from collections.abc import Iterable

import psutil

from manyranks.world.limits import cores

_BETWEEN = 1.0  # seconds between two looks
_SHARE = 0.1  # of the time; a process that only waits for others works for less


class Standstill:
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
    """Returns, for each process, the seconds that it had work to do: it ran, or waited for a processor or a disk."""
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
    if turn := _turn(process.pid):
        return sum(turn)
    times = process.cpu_times()  # not Linux
    return times.user + times.system


class Clock:
    """Counts the seconds when processes could go on, without those when others had the processors that they needed.

    pids: of the processes; none where all seconds count
    slack: how many times as long the seconds may be in all

    Processes that sleep need no processor, so all their seconds count, however busy the machine is. A process that
    waits for its own threads waits for nobody else: their time counts as its own.
    """

    def __init__(self, pids: Iterable[int] = (), slack: float = 1.0):
        self._began, self._slack, self._slow = time.monotonic(), slack, 0.0
        self._before = {pid: (*turn, computed(pid)) for pid in pids if (turn := _turn(pid))} if slack > 1 else {}

    def forget(self, seconds: float) -> None:
        self._began += seconds

    def over(self, seconds: float) -> bool:
        """Returns whether so many have passed."""
        return time.monotonic() - self._began > seconds and self.seconds() > seconds

    def seconds(self) -> float:
        """Returns how many have passed so far."""
        passed = time.monotonic() - self._began
        if self._slack > 1 and not self._before:  # not Linux: how busy it is now tells how busy it was
            from manyranks.measure.machine import slowness

            self._slow = self._slow or max(1.0, slowness())
            return passed / min(self._slow, self._slack)
        turns = [(*turn, computed(pid), *before) for pid, before in self._before.items() if (turn := _turn(pid))]
        ran = sum(max(own - own_before, all_ - before) for own, _, all_, own_before, _, before in turns)
        wanted = sum(own + waited - own_before - waited_before for own, waited, _, own_before, waited_before, _ in turns)
        could = min(wanted, passed * cores())  # had no other program run
        others = min(wanted, passed) * (1 - ran / could) if could > ran else 0.0
        return max(passed - others, passed / self._slack)


def computed(pid: int, children: bool = False) -> float:
    """Returns the seconds of processors that a process has used, with all threads and children, also those that ended.

    children: whether those count that live
    """
    found = 0.0
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        for one in [process, *(process.children(recursive=True) if children else ())]:
            with contextlib.suppress(psutil.Error):
                found += sum(one.cpu_times()[:4])
    return found


def _turn(pid: int) -> tuple[float, float] | None:
    """Returns the seconds that a process's main thread has run, and has waited for a processor; None where nobody says."""
    try:
        with open(f"/proc/{pid}/schedstat") as file:
            ran, waited, _ = map(int, file.read().split())
            return ran / 1e9, waited / 1e9
    except (OSError, ValueError):
        return None
