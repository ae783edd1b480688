"""The notebook's side of the forkserver, which forks the ranks of this machine."""

import atexit
import contextlib
import os
import select
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading

from manyranks import progress_bar
from manyranks.world.errors import NotStarted
from manyranks.world.fences import sandbox
from manyranks.world.fences.confine import clean
from manyranks.world.processes import forkserver
from manyranks.world.processes.handle import RankProcess, readable
from manyranks.world.processes.waiting import Standstill

_TICK = 0.05  # seconds between two looks at whether it is ready
_STANDING_STILL = 60.0  # seconds that the import of torch may do nothing; while it gets on, it may take any time
IDLE = 600.0  # seconds that the forkserver stays without a world
_START = "import sys; sys.path[:] = {!r}; from manyranks.world.processes.forkserver import serve; serve({}, *{!r})"
strangers = False  # whether ranks run code that nobody here has written: see use()


def loopback() -> str:
    """The name of the interface that leads to this machine only."""
    return "lo0" if sys.platform == "darwin" else "lo"


class Forkserver:
    """The process that forks ranks; started once, in the background.

    interface: what their gloo uses, or the loopback
    strangers: whether they run code of strangers, who see neither this process's environment nor its network
    sandboxed: whether it runs in a sandbox
    once: modules that it imports, so that no rank has to
    """

    def __init__(
        self, interface: str | None = None, strangers: bool = False, sandboxed: bool = False, once: tuple[str, ...] = ()
    ):
        self._lock = threading.Lock()
        self._ready = False
        self._owner = os.getpid()
        self._environment = None if strangers else dict(os.environ)
        self.sandboxed, self.scratch = sandboxed, -1
        self._errors = tempfile.TemporaryFile()
        scratch = sandbox.SCRATCH if sandboxed else ""
        self.folder = scratch or tempfile.mkdtemp(prefix="manyranks-")  # as ranks see it
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [
                    *(sandbox.command() if sandboxed else ()),
                    sys.executable,
                    "-c",
                    _START.format(_import_path(), theirs.fileno(), (self.folder, strangers, scratch, once)),
                ],
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env=(clean(os.environ) if strangers else dict(os.environ)) | _environment(interface),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
            )
        atexit.register(self.close)
        self._worlds = 0
        self._leave_later()

    @property
    def pid(self) -> int:
        return self._process.pid

    def alive(self) -> bool:
        if os.getpid() == self._owner:
            return self._process.poll() is None and not self._hung_up()
        with contextlib.suppress(OSError):  # this process was forked from the one that started it, and cannot wait for it
            os.kill(self.pid, 0)
            return True
        return False

    def _hung_up(self) -> bool:
        """Returns whether its end of the socket is closed: a killed process closes its files before its parent sees it end."""
        poll = select.poll()
        poll.register(self._socket, 0)
        return bool(poll.poll(0))

    def changed_environment(self) -> dict[str, str | None]:
        """The variables that were set or removed since this process was started; strangers are told none.

        Those that keep ranks on one thread and on the loopback stay as they are.
        """
        if self._environment is None:
            return {}
        names = {name for name, _ in self._environment.items() ^ os.environ.items()} - _environment(None).keys()
        return {name: os.environ.get(name) for name in names}

    def wait_until_ready(self) -> None:
        """Returns when torch is imported there. Raises NotStarted if that fails."""
        with self._lock:
            if not self._ready:
                self._ready = self._is_ready()

    def fork(self, rank: int) -> RankProcess:
        """A new process with nothing set up yet; wait_until_ready comes first. Raises NotStarted if there can be none."""
        command, their_command = socket.socketpair()
        control, their_control = socket.socketpair()
        pipes = {name: os.pipe() for name in ("stdout", "stderr", "faults", "status")}
        theirs = [their_command.fileno(), their_control.fileno(), *(write for _, write in pipes.values())]
        process = RankProcess(rank, command, control, {name: read for name, (read, _) in pipes.items()})
        if self.sandboxed:
            process.sandboxed = True
            command.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        with their_command, their_control:
            try:
                socket.send_fds(self._socket, [forkserver.FORK], theirs)
            except OSError as error:
                command.close()
                control.close()
                process.close_pipes()
                raise NotStarted(f"rank {rank} could not be started: {error}") from error
            finally:
                for fd in theirs[2:]:
                    os.close(fd)
        return process

    def kill_all(self) -> None:
        """Kills every rank that it has forked, even if the process that asked for them is gone."""
        with contextlib.suppress(OSError):
            self._socket.send(forkserver.KILL)

    def settle(self) -> None:
        """Waits until killed ranks are gone, and reads what was answered to a process that did not live to hear it."""
        with contextlib.suppress(OSError, struct.error):
            self._socket.send(forkserver.SETTLE)
            while self._count() != forkserver.SETTLED:
                pass

    def renew_network(self) -> None:
        """Gives ranks that are forked from now on a new loopback: nothing of earlier ranks is left in it."""
        with contextlib.suppress(OSError):
            self._socket.send(forkserver.NETWORK)

    def loopback_bytes(self) -> int | None:
        """Bytes that ranks have sent each other so far, of whatever kind, as the operating system counts them.

        None where they have no network of their own: then the loopback carries what other programs send, too.
        """
        self._socket.send(forkserver.BYTES)
        count = self._count()
        return None if count == forkserver.UNKNOWN else count

    def _count(self) -> int:
        return forkserver.COUNT.unpack(self._socket.recv(forkserver.COUNT.size, socket.MSG_WAITALL))[0]

    def meeting_place(self, folder: str | None = None) -> str:
        """Names where a world's ranks find each other: a file that is not there yet, in the folder that they may write to."""
        return tempfile.mktemp(prefix="rendezvous-", dir=folder or self.folder)

    def clock(self) -> None:
        """Returns nothing for ranks to set their clock by: they have the notebook's."""

    def hold(self) -> None:
        """A world, or a submission, needs this process from now on."""
        with _starting:
            self._worlds += 1
            if os.getpid() == self._owner:  # a process that was forked from it has none of its threads
                self._leaving.cancel()

    def release(self) -> None:
        """A world has ended. Where no other needs this process, it ends after a while: it takes hundreds of MB."""
        with _starting:
            self._worlds -= 1
            if self._worlds == 0 and os.getpid() == self._owner:
                self._leave_later()

    def _leave_later(self) -> None:
        self._leaving = threading.Timer(IDLE, self._leave)
        self._leaving.daemon = True
        with contextlib.suppress(RuntimeError):  # Python is about to end, and this process with it
            self._leaving.start()

    def _leave(self) -> None:
        with _starting:
            if self._worlds == 0 and self._owner == os.getpid():
                self.close()

    def _is_ready(self) -> bool:
        standstill = Standstill(self.pid, _STANDING_STILL, "importing torch for the ranks")
        with progress_bar.bar("importing torch for the ranks") as bar:
            while not (heard := readable(self._socket.fileno(), _TICK)) and not standstill.over():
                bar.step(0)
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            if heard:
                said, places, *_ = socket.recv_fds(self._socket, 1, 1)
                self.scratch = places[0] if places else -1
                if said == b"R":
                    return True
            if heard:
                self._process.wait(timeout=_STANDING_STILL)  # it has hung up, so it ends
        if self.alive():
            self.close()
            still = f"has done nothing for {_STANDING_STILL:.0f} s"
            raise NotStarted(f"the process that starts ranks isn't ready and {still}; the next World starts another")
        self._errors.seek(0)
        said = self._errors.read().decode(errors="replace").strip() or "nothing"
        raise NotStarted(f"the process that starts ranks has ended; the next World starts another. It said: {said}")

    def close(self) -> None:
        """Ends the process; it takes every rank with it."""
        if os.getpid() != self._owner:
            return
        self._socket.close()
        if self.sandboxed:
            self._process.kill()  # and with it all that is inside
        if self.scratch >= 0:
            os.close(self.scratch)
            self.scratch = -1
        try:
            self._process.wait(timeout=2.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def _import_path() -> list[str]:
    """Leaves out the notebook's folder, where a file may hide a module of Python's; ranks get the whole path later."""
    library = os.path.abspath(os.path.join(os.path.dirname(__file__), *[os.pardir] * 3))
    return [*(path for path in sys.path if path not in ("", os.getcwd())), library]


def _environment(interface: str | None) -> dict[str, str]:
    """Gives each rank one compute thread, and lets nothing listen on other addresses than this interface's."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    return threads | {
        "GLOO_SOCKET_IFNAME": interface or loopback(),
        "OBJC_DISABLE_INITIALIZE_FORK_SAFETY": "YES",  # macOS; elsewhere unused
    }


_starting = threading.RLock()  # a world may be collected while another is made
_servers: dict[bool, Forkserver] = {}  # by whether it is for strangers


def _unlock() -> None:
    """Makes new locks after a fork: a thread that held one in the process above isn't there to give it back."""
    global _starting
    _starting = threading.RLock()
    for server in _servers.values():
        server._lock = threading.Lock()


os.register_at_fork(after_in_child=_unlock)


def use(server: Forkserver) -> None:
    """Lets this process run strangers' code from now on, and nothing else, on ranks that this server forks."""
    global strangers
    strangers = True
    _servers[strangers] = server


def the_forkserver(hold: bool = False, confined: bool = False) -> Forkserver:
    """The notebook's one forkserver, started unless one lives; another one for code of strangers.

    hold: it stays until it's released; without, it ends after a while
    confined: for confined ranks, which leave its network: no other rank may share it
    """
    theirs = strangers or confined
    with _starting:
        if theirs not in _servers or not _servers[theirs].alive():
            _servers[theirs] = Forkserver(strangers=theirs)
        if hold:
            _servers[theirs].hold()
        return _servers[theirs]
