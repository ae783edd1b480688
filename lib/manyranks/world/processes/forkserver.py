"""A process that has imported torch once and forks each rank, so that 8 ranks are ready in 0.1 s and not in 8 s.

It is our own and not multiprocessing's for three reasons: it runs in a separate session, so that an interrupt of the
notebook never reaches a rank; it does not import the reader's main module again; and when the notebook's process ends,
however it ends, it kills every rank, also one that is stuck in C++.
"""

import contextlib
import ctypes
import os
import select
import shutil
import signal
import socket
import struct
import sys
import time

from manyranks.world.fences import confine

EXIT = struct.Struct("<i")
FORK, KILL, BYTES, NETWORK, SETTLE = b"F", b"K", b"B", b"N", b"S"  # requests
COUNT = struct.Struct("<Q")
SETTLED, UNKNOWN = 2**64 - 1, 2**64 - 2  # counts that none are; the second: others use its network, too
CHANNELS = ("command", "control", "stdout", "stderr", "faults", "status")  # file descriptors that come with a request
_SECONDS_BETWEEN_LOOKS = 0.5
_SECONDS_TO_END, _A_MOMENT = 20.0, 0.002  # until ranks that were killed are gone; between two looks
_ONCE = (
    "numpy.random",  # numpy would import it in each rank
    "torch._dynamo",  # and so would DDP, fully_shard and every dispatch mode: a second a rank
    "torch.distributed.checkpoint",  # and the trainer: a tenth of a second a rank
    *("manyranks.world.world", "manyranks.measure.watch"),  # and every check of an exercise: as much
)
_SOME_RANKS = 16  # after so many there'll be more, and large pages pay
_LARGE, _COLLAPSE = 2**21, 25  # bytes of a large page; MADV_COLLAPSE of Linux
_C = ctypes.CDLL(None)
_own_network = False  # whether this process has a network that no other program has


def serve(fd: int, folder: str, strangers: bool, scratch: str, once: tuple[str, ...]) -> None:
    """Imports what ranks need, then forks one per request until the notebook's process is gone. Never returns.

    fd: the socket to the notebook's process
    folder: where worlds keep their files, removed at the end
    strangers: whether the ranks run their code, on a private network
    scratch: the folder to write into, where this is a sandbox
    once: modules that ranks need, besides those that all do; one that isn't installed is left out
    """
    global _own_network
    _own_network = (strangers and confine.leave_the_network()) or bool(scratch)
    parent = os.getppid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    wake, woken = _wake_on_children()
    ranks: dict[int, int] = {}  # pid -> where its exit code is written
    until_large = _SOME_RANKS
    with socket.socket(fileno=fd) as notebook:
        try:
            recorder = _prepare(once)
            inside = [os.open(scratch, os.O_RDONLY)] if scratch else []  # by it the notebook's process reads that folder
            socket.send_fds(notebook, [b"R"], inside)
            for place in inside:
                os.close(place)
            while os.getppid() == parent:
                ready, _, _ = select.select([notebook, wake], [], [], _SECONDS_BETWEEN_LOOKS)
                if wake in ready:
                    os.read(wake, 4096)
                until_large -= _reap(ranks)
                if until_large <= 0 and not ranks:  # so that no run is disturbed
                    until_large = sys.maxsize
                    into_large_pages()
                if notebook in ready and not _answer(notebook, ranks, (wake, woken), recorder):
                    break
        finally:
            _kill(ranks)
            shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def _prepare(once: tuple[str, ...]):
    """Does once what every rank would do: imports, and the recorder before each operator of c10d."""
    import gc
    from importlib import import_module

    import torch

    if "TRITON_INTERPRET" not in os.environ:  # torch._dynamo imports Triton, which chooses then
        os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # asks for GPUs without starting CUDA, which outlives no fork
        os.environ["TRITON_INTERPRET"] = "0" if torch.cuda.is_available() else "1"
        del os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"]
    for name in _ONCE:
        import_module(name)
    import manyranks.world.rank.process  # noqa: F401  brings in torch, torch.distributed and cloudpickle
    from manyranks.measure.calls import Recorder

    recorder = Recorder().install()
    for name in once:
        with contextlib.suppress(ImportError):
            import_module(name)
    gc.collect()
    gc.freeze()  # the collector leaves these objects alone, so that ranks go on sharing their pages
    return recorder


def _wake_on_children() -> tuple[int, int]:
    wake, woken = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(woken)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    return wake, woken


def _answer(notebook: socket.socket, ranks: dict[int, int], mine: tuple[int, int], recorder) -> bool:
    """Does what the notebook asks for: FORK, KILL, NETWORK, SETTLE or BYTES. Returns False when the notebook is gone."""
    request, fds, _, _ = socket.recv_fds(notebook, 1, len(CHANNELS))
    if not request:
        return False
    if request == KILL:
        _kill(ranks)
        return True
    if request == NETWORK:
        confine.leave_the_network()
        return True
    if request == SETTLE:
        until = time.monotonic() + _SECONDS_TO_END
        while ranks and time.monotonic() < until:  # a thread that is in a system call ends a little late
            _reap(ranks)
            time.sleep(_A_MOMENT)
        notebook.sendall(COUNT.pack(SETTLED))
        return True
    if request == BYTES:
        notebook.sendall(COUNT.pack(_loopback()))
        return True
    channels = dict(zip(CHANNELS, fds, strict=True))
    try:
        pid = os.fork()
    except OSError as error:
        os.write(channels["stderr"], f"fork: {error}\n".encode())
    else:
        if pid == 0:
            _become_rank(channels, (notebook.fileno(), *mine, *ranks.values()), recorder)
        ranks[pid] = os.dup(channels["status"])
    for fd in fds:
        os.close(fd)
    return True


def _loopback() -> int:
    """Bytes that the loopback of this process's own network has carried so far; UNKNOWN where it has none, or nobody says."""
    if not _own_network:
        return UNKNOWN
    with contextlib.suppress(OSError), open("/proc/net/dev") as lines:
        return next((int(line.split(":")[1].split()[0]) for line in lines if line.strip().startswith("lo:")), UNKNOWN)
    return UNKNOWN


def _reap(ranks: dict[int, int]) -> int:
    """Tells how the ranks that have ended did. Returns how many they are."""
    there = len(ranks)
    while ranks:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            break
        with contextlib.suppress(OSError):
            os.killpg(pid, signal.SIGKILL)  # what the rank had started and left
        fd = ranks.pop(pid, None)
        if fd is not None:
            with contextlib.suppress(OSError):  # nobody waits for it any more
                os.write(fd, EXIT.pack(os.waitstatus_to_exitcode(status)))
            os.close(fd)
    return there - len(ranks)


def into_large_pages() -> None:
    """Moves this process's memory into pages of 2 MiB, where Linux 6.1 or later can: a fork copies an entry for each page.

    To start and to end a rank takes a quarter of the processor's time then. A rank still copies only the 4 KiB that it changes.
    """
    with contextlib.suppress(OSError), open("/proc/self/maps") as lines:
        for places, access, *_, inode in (line.split()[:5] for line in lines):
            if access.startswith("rw-p") and inode == "0":
                start, end = (int(place, 16) for place in places.split("-"))
                start, end = -(-start // _LARGE) * _LARGE, end // _LARGE * _LARGE
                if start < end:
                    _C.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _COLLAPSE)


def _kill(ranks: dict[int, int]) -> None:
    for pid in ranks:
        for kill in (os.killpg, os.kill):  # the group first: what a rank started goes with it
            with contextlib.suppress(OSError):
                kill(pid, signal.SIGKILL)


def _become_rank(channels: dict[str, int], foreign: tuple[int, ...], recorder) -> None:
    """Turns the child into a rank: its own session and standard streams, then the rank's loop. Never returns."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        for fd in (*foreign, channels.pop("status")):
            os.close(fd)
        _redirect(channels.pop("stdout"), channels.pop("stderr"))
        from manyranks.world.rank.process import serve_notebook

        code = serve_notebook(recorder, **channels)
    except BaseException:  # whatever escapes is printed where the notebook reads it
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _redirect(stdout: int, stderr: int) -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (stdout, 1), (stderr, 2)):
        os.dup2(source, target)
        os.close(source)
    sys.stdin = open(0, encoding="utf-8")
    sys.stdout = open(1, "w", encoding="utf-8", errors="backslashreplace", buffering=1)
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", buffering=1)
