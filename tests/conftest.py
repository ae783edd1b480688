"""Fixtures for every test: worlds, and the means to see that no process is left."""

import atexit
import gc
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
import torch

import manyranks as mr
from manyranks.world.processes import local

ROOT = Path(__file__).resolve().parents[1]
# A rank imports its test's module, and with it these: once for all ranks of the tests, where it is half a second in each.
IMPORTED = (
    "pytest",
    "psutil",
    "torch.distributed.optim",
    "manyranks.theory.sharding",
    "manyranks.parallel.fsdp",
    "manyranks.parallel.pipeline.runtime",
    "manyranks.parallel.zero",
    "manyranks.training.trainer",
    "manyranks.grade.check",
)
BARE = local._START
local._START = BARE.replace("; serve(", f"; import {', '.join(IMPORTED)}; serve(")
INSTALL = f"; sys.path.append({str(ROOT)!r}); from tests import strict; strict.install(); sys.path.pop(); serve("
TRITON, RUN_KERNELS = find_spec("triton") is not None, ("test_written.py", "test_few_ranks.py", "test_11_kernels.py")
STRICT = "MANYRANKS_STRICT" in os.environ  # all ranks go by NCCL's rules: see tests/strict.py
if STRICT:
    local._START = local._START.replace("; serve(", INSTALL)

# Where the environment forbids bytecode, each process of a run would compile the library, and each worker all tests.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
os.environ.setdefault("TRITON_INTERPRET", "0" if torch.cuda.is_available() else "1")  # before anything imports Triton


def pytest_configure(config):
    """Hypothesis draws the same examples in every run, so that a failure can be repeated; none has a deadline, for other
    processes may take the cores, and a test may have no use for many of them. `make test` draws 30, `make test-all` 200.

    The garbage collector rests until all tests are collected. A worker of xdist ends as soon as it has nothing to close: Python
    would take four seconds to take apart what was imported and collected.
    """
    from hypothesis import HealthCheck, settings  # not above: a rank that imports this file has no need of it

    gc.disable()
    if hasattr(config, "workerinput"):
        atexit.register(os._exit, 0)  # what tests start is registered later, and closed before
    unlucky = [HealthCheck.filter_too_much, HealthCheck.too_slow]
    patient = {"derandomize": True, "deadline": None, "suppress_health_check": unlucky, "database": None}
    drawn = 30 if config.option.markexpr else 200
    settings.register_profile("patient", settings(), max_examples=drawn, **patient)
    settings.load_profile("patient")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Without Triton, tests that run kernels are skipped.

    If a test is marked `few(n)`, `make test` runs n of its parameters, evenly spread; `make test-all` runs all."""
    groups: dict[tuple, list] = {}
    for item in items:
        if not TRITON and item.path.name in RUN_KERNELS and "kernels" in item.nodeid:
            item.add_marker(pytest.mark.skip(reason="Triton exists for Linux only"))
        if item.get_closest_marker("few"):
            groups.setdefault((item.path, item.originalname), []).append(item)
    for own in groups.values():
        n = own[0].get_closest_marker("few").args[0]
        kept = {round(i * (len(own) - 1) / max(1, n - 1)) for i in range(n)}
        for i, item in enumerate(own):
            if i not in kept:
                item.add_marker(pytest.mark.whole)


def pytest_collection_finish(session):
    """The collector leaves ten thousand collected tests and all modules alone: to look at them takes a third of a second.

    At the very end it gets them back, for Triton complains of objects that are left when the process ends.
    """
    gc.freeze()
    atexit.register(gc.unfreeze)
    gc.enable()


def pytest_runtest_setup(item):
    if STRICT and item.get_closest_marker("lenient"):
        pytest.skip("not by NCCL's rules: see the marker")
    for marker in item.iter_markers("gpu"):
        import torch

        if (there := torch.cuda.device_count()) < marker.args[0]:
            pytest.skip(f"needs {marker.args[0]} GPUs, this machine has {there}")


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """As the ranks have: tests' tensors are small, and other tests use the other cores. Sums do not depend on the machine."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


def matrix(values: Iterable, kept: Iterable) -> list:
    """Parameters of a test: `make test` has those in `kept`, `make test-all` has all. A tuple is several arguments."""
    kept = list(kept)
    given = [(value, value if isinstance(value, tuple) else (value,)) for value in values]
    return [pytest.param(*one, marks=() if value in kept else pytest.mark.whole) for value, one in given]


@pytest.fixture
def world():
    """A world of 3 ranks: odd, so that nothing works by halves."""
    with mr.World(3, backend="gloo", timeout=100) as world:
        yield world


@pytest.fixture(params=matrix([2, 3, 4], [3]))
def worlds(request):
    """Worlds of 2, 3 and 4 ranks, one after the other."""
    with mr.World(request.param, backend="gloo", timeout=100) as world:
        yield world


@pytest.fixture(scope="module")
def shared_world():
    """A world of 3 ranks for all tests of a file: for tests that leave their ranks as they were."""
    with mr.World(3, backend="gloo", timeout=100) as world:
        yield world


@pytest.fixture(scope="module", params=matrix([2, 3, 4], [3]))
def shared_worlds(request):
    """Worlds of 2, 3 and 4 ranks, each for all tests of a file."""
    with mr.World(request.param, backend="gloo", timeout=100) as world:
        yield world


@pytest.fixture(scope="module")
def four():
    """A world of 4 ranks for all tests of a file: the smallest with a mesh of two axes."""
    with mr.World(4, backend="gloo", timeout=100) as world:
        yield world


@pytest.fixture(scope="module")
def world_of():
    """From a number of ranks to a world of so many, for tests of a file in a row: another number ends it."""
    worlds: list[mr.World] = []

    def world_of(ranks: int) -> mr.World:
        if not worlds or worlds[0].size != ranks:
            close()
            worlds.append(mr.World(ranks, backend="gloo", timeout=100))
        return worlds[0]

    def close() -> None:
        while worlds:
            worlds.pop().close()

    yield world_of
    close()


@pytest.fixture(scope="module")
def sizes():
    """Worlds of 2, 3 and 4 ranks by their size, all at once: for what one writes and another reads."""
    worlds = {n: mr.World(n, backend="gloo", timeout=100) for n in (2, 3, 4)}
    yield worlds
    for world in worlds.values():
        world.close()


def gone(pid: int) -> bool:
    """Says if nothing of the process is left but its entry: its threads hold its files to their own ends."""
    try:
        process = psutil.Process(pid)
        return process.status() == psutil.STATUS_ZOMBIE and process.num_threads() == 1
    except psutil.NoSuchProcess:
        return True


def wait_until(condition, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not (met := condition()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return met


def pids(world) -> list[int]:
    return world.run(os.getpid)


def free_port() -> int:
    """A port that nobody has taken so far."""
    with socket.create_server(("localhost", 0)) as free:
        return free.getsockname()[1]


def start_script(source: str) -> subprocess.Popen:
    """A Python process with this source, its output in a pipe."""
    return subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True, start_new_session=True)
