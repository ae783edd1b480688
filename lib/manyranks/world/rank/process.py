"""A rank's process: it joins the group, then runs what the notebook sends until the notebook is gone."""

import contextlib
import ctypes
import datetime
import faulthandler
import os
import signal
import socket
import sys
import threading
import time
import types
from collections.abc import Callable
from dataclasses import dataclass

import cloudpickle
import numpy as np
import torch
import torch.distributed as dist

from manyranks.measure import wire
from manyranks.measure.calls import RECENT, Recorder
from manyranks.world.fences.confine import Confined, confine
from manyranks.world.rank import debugger, messages, plain, shown, watch
from manyranks.world.rank.recording import record
from manyranks.world.rank.reply import ASKED, REPLY, SHOWN, Reply, failure_of

_C = ctypes.CDLL(None)
_FOREVER = datetime.timedelta(days=7)  # hangs are found from outside: an expired wait would break gloo's pair for good


@dataclass
class Setup:
    """The first thing that a rank is told."""

    rank: int
    size: int
    backend: str
    store: str  # where ranks find each other: a file, or "tcp://host:port"
    sys_path: list[str]
    folder: str
    environment: dict[str, str | None]  # what has changed since this process's environment was made
    confined: Confined | None = None
    clock: float | None = None  # what the notebook's clock shows, where the rank may be on a machine with another one


def serve_notebook(recorder: Recorder, command: int, control: int, faults: int) -> int:
    """The whole life of a rank; returns its exit code."""
    notebook, me = socket.socket(fileno=command), os.getpid()
    sys.modules["__main__"] = types.ModuleType("__main__")  # where the variables of %%ranks cells live
    faulthandler.enable(faults)
    faulthandler.register(signal.SIGUSR1, faults, all_threads=False)
    die_with_the_parent()
    setup = messages.unpack(messages.receive(notebook))
    if setup.confined:
        confine(setup.confined, setup.size)
    if setup.clock is not None:
        _set_clock(setup.clock)
    pack = plain.pack if setup.confined else messages.pack
    running = threading.Event()
    signal.signal(signal.SIGINT, lambda *_: _interrupt(running))
    one_at_a_time = threading.Lock()

    def say(kind: bytes, frames: list) -> None:
        if os.getpid() == me:  # and not a fork that the reader's code made
            with one_at_a_time:
                messages.send(notebook, [kind, *frames])

    def look_at(frame: types.FrameType) -> None:
        try:
            debugger.look_at(frame)
        finally:
            say(REPLY, pack(Reply()))

    watch.start(socket.socket(fileno=control), recorder, running, pack, look_at)
    _join(setup)

    def ask(what: debugger.Asked) -> str | dict[str, str]:
        if os.getpid() != me:
            return {} if what.files else "quit\n"
        say(ASKED, pack(what))
        return messages.unpack(messages.receive(notebook))

    shown.start(lambda what: say(SHOWN, pack(what)))
    if not setup.confined:
        debugger.start(ask)
    watch.before = wire.counters()
    messages.send(notebook, [str(os.getpid()).encode()])
    while True:
        try:
            task = messages.receive(notebook)
        except (EOFError, OSError):
            return 0
        reply, result = _perform(task, recorder, running, pack)
        if os.getpid() != me:
            return 0  # a fork that the reader's code made and did not end: only the rank itself replies
        say(REPLY, [*pack(reply), *result])
        if recorder.issued:
            watch.before = wire.counters()  # now that nobody waits for it


def _join(setup: Setup) -> None:
    for name, value in setup.environment.items():
        os.environ.pop(name, None)
        os.environ |= {name: value} if value is not None else {}
    os.environ["MANYRANKS_RANK"] = str(setup.rank)
    os.environ.update(RANK=str(setup.rank), LOCAL_RANK=str(setup.rank), WORLD_SIZE=str(setup.size))
    sys.path[:] = setup.sys_path
    with contextlib.suppress(OSError):
        os.chdir(setup.folder)
    torch.set_num_threads(1)
    np.random.seed()  # forked ranks would all have the forkserver's state; processes of torchrun differ
    torch.seed()
    backend, device = setup.backend, None
    if backend == "nccl":
        backend, device = "cpu:gloo,cuda:nccl", torch.device("cuda", setup.rank)  # tensors on the CPU can travel too
        torch.cuda.set_device(device)
    dist.distributed_c10d._pickler = cloudpickle.Pickler  # objects of the notebook's classes travel in collectives too
    store = _store(setup)
    dist.init_process_group(backend, store=store, rank=setup.rank, world_size=setup.size, timeout=_FOREVER, device_id=device)


def _store(setup: Setup) -> dist.Store:
    if not setup.store.startswith("tcp://"):
        return dist.FileStore(setup.store, setup.size)
    host, _, port = setup.store.removeprefix("tcp://").rpartition(":")
    wire.beyond_the_loopback(store=int(port))
    return dist.TCPStore(host, int(port), setup.size, is_master=setup.rank == 0, wait_for_workers=False)


def _set_clock(now: float) -> None:
    """Lets perf_counter show the notebook's time, late by as long as the message took: one plot has several machines' times."""
    own = time.perf_counter
    behind = now - own()
    time.perf_counter = lambda: own() + behind


def _perform(task: list, recorder: Recorder, running: threading.Event, pack: Callable) -> tuple[Reply, list]:
    reply, result, function = Reply(), [], None
    recorder.start(everything=False)
    shown.renew()
    try:
        running.set()
        function, args, kwargs, counts = messages.unpack(task)
        task.clear()  # what the function lets go of is nowhere else
        if function is not debugger.after:
            debugger.keep(None)
        if counts is None:
            value = function(*args, **kwargs)
        else:
            value, reply.recording = record(recorder, counts, function, args, kwargs)
        shown.flush_figures()
        result = _packed(value, pack)
    except BaseException as error:  # SystemExit and KeyboardInterrupt of the reader's code end the run, not the rank
        running.clear()
        if function is not debugger.after and pack is messages.pack:
            debugger.keep(error.__traceback__)
        reply.failure = failure_of(debugger.named(error), whole=pack is messages.pack)
        with contextlib.suppress(Exception):
            shown.flush_figures()
    finally:
        running.clear()
        debugger.rest()
    reply.counts, reply.members = recorder.counts, recorder.members
    reply.recent = list(recorder.calls)[-RECENT:]
    reply.broken = recorder.broken or bool(recorder.late) or not dist.is_initialized()
    _flush()
    return reply, result


def _packed(value, pack: Callable) -> list:
    try:
        return pack(value)
    except Exception as error:
        raise TypeError(
            f"the result, a {type(value).__name__}, cannot be sent to the notebook ({error}); "
            "return tensors, numbers, strings, or lists and dicts of them"
        ) from None


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    _C.fflush(None)  # what C and C++ printed


def _interrupt(running: threading.Event) -> None:
    if running.is_set():
        running.clear()
        raise KeyboardInterrupt


def die_with_the_parent() -> None:
    """Ends this process when the one that started it ends, on Linux."""
    if sys.platform == "linux":
        _C.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
