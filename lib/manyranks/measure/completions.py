"""The moments when Works are done, also of those that nobody waits for yet, and when their tensors are let go.

A tensor that was sent is let go once gloo is done with it, so a later receive may get the same address.
"""

import os
import queue
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

# PyTorch's own, in whose place the recorder puts its
wait, get_future = dist.Work.wait, dist.Work.get_future
wait_for, then = torch._C.Future.wait, torch._C.Future.then
_GLOO = "pt_gloo_runloop"  # the threads where ProcessGroupGloo runs collectives
FOLLOWER = "ends of calls"  # a thread that waits for Works
_TASKS = "/proc/self/task"  # Linux lists a process's threads here


def let_go() -> None:
    """Waits until no thread of gloo is about to let go of the tensors of a collective that is done; a second at most.

    ProcessGroupGloo.cpp (AsyncWork::execute, runLoop) first says that a Work is done and drops it afterwards: on a busy
    machine tens of milliseconds later. A thread that sleeps has dropped it; or it waits for Python's lock to do so, hence a
    sleep between two looks, which hands the lock over. Where threads cannot be seen, they are given 5 ms.
    """
    deadline, rests = time.perf_counter() + 1.0, 0
    while rests < 2 and time.perf_counter() < deadline:
        time.sleep(0.0002 if os.path.isdir(_TASKS) else 0.0025)
        rests = 0 if _gloo_runs() else rests + 1


def _gloo_runs() -> bool:
    for task in os.listdir(_TASKS) if os.path.isdir(_TASKS) else ():
        try:
            with open(f"{_TASKS}/{task}/stat") as file:
                name, state = file.read().split("(", 1)[1].rsplit(") ", 1)
        except OSError:  # it has ended since the folder was listed
            continue
        if name == _GLOO and state[0] != "S":
            return True
    return False


def notify(work: dist.Work, done: Callable[[], None]) -> bool:
    """Calls done() when the Work's future is done. Returns False where the Work has no future."""
    try:
        get_future(work).add_done_callback(lambda _: done())
    except RuntimeError:
        return False
    return True


class Followers:
    """Threads that wait for Works, one Work after the other; another one starts where all of them wait."""

    def __init__(self):
        self._jobs: queue.SimpleQueue[Callable] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._ended: weakref.WeakKeyDictionary[dist.Work, threading.Event] = weakref.WeakKeyDictionary()

    def follow(self, work: dist.Work, done: Callable[[], None]) -> dist.Work:
        """A Work that is done when `work` is, and done() was called at that moment.

        gloo's messages and its reduce-scatter have no future, and a message says that it is complete only once it was waited
        for. So a thread waits; starting a thread for each call would take three times as long as the call itself.
        """
        future: torch.futures.Future = torch.futures.Future()
        following, ended = torch._C._distributed_c10d._create_work_from_future(future), threading.Event()
        future.add_done_callback(lambda _: ended.set())
        self._ended[following] = ended

        def job():
            nonlocal work
            try:
                wait(work)
            except Exception as error:
                future.set_exception(error)
                return
            done()
            del work  # and with it its tensors, before the caller goes on
            future.set_result([])

        self._jobs.put(job)
        if not self._idle.acquire(blocking=False):
            threading.Thread(target=self._work, daemon=True, name=FOLLOWER).start()
        return following

    def wait(self, work: dist.Work, *args, **kwargs) -> bool:
        """Waits for a Work. One of `follow` knows no timeout: its thread is waited for instead, that long at most."""
        timeout: timedelta = args[0] if args else kwargs.get("timeout", timedelta())
        if timeout and (ended := self._ended.get(work)):
            if not ended.wait(timeout.total_seconds()):
                raise RuntimeError(f"Wait timeout: the call wasn't over after {timeout.total_seconds():g} s")
            return wait(work)
        return wait(work, *args, **kwargs)

    def _work(self) -> None:
        while True:
            self._jobs.get()()
            self._idle.release()
