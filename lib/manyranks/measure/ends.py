"""The moments when Works are done, also of those that nobody waits for yet."""

import queue
import threading
from collections.abc import Callable

import torch
import torch.distributed as dist

wait = dist.Work.wait  # PyTorch's own, in whose place the recorder puts its


def notify(work: dist.Work, done: Callable[[], None]) -> bool:
    """Calls done() when the Work's future is done. Returns False where the Work has no future."""
    try:
        work.get_future().add_done_callback(lambda _: done())
    except RuntimeError:
        return False
    return True


class Followers:
    """Threads that wait for Works, one Work after the other; another one starts where all of them wait."""

    def __init__(self):
        self._jobs: queue.SimpleQueue[Callable] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)

    def follow(self, work: dist.Work, done: Callable[[], None]) -> dist.Work:
        """A Work that is done when `work` is, and done() was called at that moment.

        gloo's messages and its reduce-scatter have no future, and a message says that it is complete only once it was waited
        for. So a thread waits; starting a thread for each call would take three times as long as the call itself.
        """
        future: torch.futures.Future = torch.futures.Future()

        def job():
            try:
                wait(work)
            except Exception as error:
                future.set_exception(error)
                return
            done()
            future.set_result([])

        self._jobs.put(job)
        if not self._idle.acquire(blocking=False):
            threading.Thread(target=self._work, daemon=True, name="ends of calls").start()
        return torch._C._distributed_c10d._create_work_from_future(future)

    def _work(self) -> None:
        while True:
            self._jobs.get()()
            self._idle.release()
