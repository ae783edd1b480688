"""The processes of a world while they live: started together, ended together."""

import contextlib
import os
import selectors
import signal
import sys
import threading
import time
from collections.abc import Callable

from manyranks.world.errors import NotStarted
from manyranks.world.fences.confine import Confined
from manyranks.world.processes.handle import RankProcess, readable
from manyranks.world.processes.local import Forkserver, the_forkserver
from manyranks.world.processes.ray_engine import RayServer
from manyranks.world.processes.waiting import Standstill
from manyranks.world.rank import messages, watch
from manyranks.world.rank.process import Setup

_DUMPING = 1.0  # seconds that faulthandler has to write: a busy machine is late, and a stopped process never does
_ANSWERING = 0.3  # seconds that ranks have to say where they are
_STANDING_STILL = 120.0  # seconds that ranks which start may do nothing; while they get on, they may take any time
_TICK = 0.05
Server = Forkserver | RayServer  # forks ranks, on this machine or on a cluster; confined ones, a Forkserver alone


class Team:
    """The processes of a world's ranks, joined in one group."""

    def __init__(self, size: int, backend: str, server: Server, confined: Confined | None = None):
        """Starts the ranks and waits until their group is ready. Raises NotStarted if it does not come to be."""
        self.processes: list[RankProcess] = []
        self._owner = os.getpid()
        self._looking = threading.RLock()  # World.stacks may ask from another thread
        self.selector = selectors.DefaultSelector()  # of all that ranks may say; data: (process, which of its channels)
        self._modules: dict[str, int] = {}  # file -> when it was written, as its functions were first run
        self.kept = False  # whether a %%ranks cell or set() has left variables on the ranks
        try:
            server.wait_until_ready()
            if confined:
                server.renew_network()  # ranks before may have left no port free
            store = server.meeting_place(confined.scratch if confined else None)
            folder, environment = confined.scratch if confined else os.getcwd(), server.changed_environment()
            for rank in range(size):
                self.processes.append(process := server.fork(rank))
                process.confined = confined is not None
                setup = Setup(rank, size, backend, store, sys.path, folder, environment, confined, server.clock())
                messages.send(process.command, messages.pack(setup))
            self._wait_until_ready(Standstill(server.pid, _STANDING_STILL, "starting the ranks"))
        except BaseException:
            self.close()
            raise

    def _wait_until_ready(self, standstill: Standstill) -> None:
        for process in self.processes:
            while not readable(process.command.fileno(), _TICK):
                if standstill.over():
                    still = f"no process has made progress for {_STANDING_STILL:.0f} s"
                    raise NotStarted(f"rank {process.rank} isn't ready, and {still}:\n{_last_words(process)}")
            try:
                process.read_pid()
            except (EOFError, OSError, ValueError):
                raise NotStarted(f"rank {process.rank} ended while it started:\n{_last_words(process)}") from None
            for what in ("command", "status", "stdout", "stderr"):
                self.selector.register(getattr(process, what), selectors.EVENT_READ, (process, what))

    def stale(self, fn: Callable) -> str:
        """Says that the file of a function has changed since ranks imported it: they keep what they have. Else empty."""
        file = getattr(sys.modules.get(getattr(fn, "__module__", None) or ""), "__file__", None)
        with contextlib.suppress(OSError, TypeError):  # of no file: the function itself travels
            written = os.stat(file).st_mtime_ns
            if written != self._modules.setdefault(file, written):
                old = "has changed since this world's ranks imported it, and they run the older version; make a new World"
                return f"{file} {old}"
        return ""

    def dead(self) -> dict[int, int]:
        """Rank -> exit code, of the ranks that have ended."""
        return {process.rank: process.exit_code for process in self.processes if process.poll() is not None}

    def look(self, ranks, question: bytes = watch.DETAILS) -> dict[int, watch.Whereabouts | None]:
        """Asks these ranks what each is doing; None for one that does not answer."""
        with self._looking:
            self.ask(ranks, question)
            return dict.fromkeys(ranks) | self.answers(ranks, _ANSWERING)

    def ask(self, ranks, question: bytes) -> None:
        """Asks these ranks what they are doing; `answers` has it later."""
        with self._looking:
            for rank in ranks:
                self.processes[rank].question(question)

    def answers(self, ranks, seconds: float) -> dict[int, watch.Whereabouts]:
        """Returns the answers to the last question that have come, or come within this time."""
        with self._looking:
            deadline = time.monotonic() + seconds
            seen = {rank: self.processes[rank].whereabouts(max(0.0, deadline - time.monotonic())) for rank in ranks}
            return {rank: each for rank, each in seen.items() if each is not None}

    def lines_of_silent(self, looks: dict) -> dict[int, str]:
        """Returns what faulthandler says of the ranks that did not answer: where code in C holds the interpreter."""
        silent = [rank for rank, seen in looks.items() if seen is None]
        for rank in silent:
            self.processes[rank].send_signal(signal.SIGUSR1)
        deadline = time.monotonic() + _DUMPING
        return {rank: self.processes[rank].fault_lines(deadline - time.monotonic()) for rank in silent}

    @property
    def torn(self) -> bool:
        return any(process.torn for process in self.processes)

    def interrupt(self, ranks) -> None:
        for rank in ranks:
            self.processes[rank].send_signal(signal.SIGINT)

    def kill(self) -> None:
        """Kills every process without waiting for its end."""
        for process in self.processes:
            process.kill()

    def close(self) -> None:
        """Ends every process, whatever it is doing, and returns when all are gone."""
        if os.getpid() != self._owner:  # a fork of the notebook's process ends: the ranks are not its own
            return
        self.kill()
        while self.processes:
            self.processes[-1].close()
            self.processes.pop()
        self.selector.close()


def server_of(engine: str, size: int, confined: bool) -> Server:
    """Returns what forks the ranks of a world of this size."""
    return the_forkserver(hold=True, confined=confined) if engine == "local" else RayServer(size)


def _last_words(process: RankProcess) -> str:
    process.poll(seconds=1.0)
    try:
        return os.read(process.stderr, 1 << 16).decode(errors="replace").strip()
    except BlockingIOError:
        return "it printed nothing"
