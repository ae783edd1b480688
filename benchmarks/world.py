"""Starting ranks, calling them, losing one, and moving results: World against what a reader would use instead."""

import contextlib
import io
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Iterator

import cloudpickle
import torch
import torch.distributed as dist

import manyranks as mr
from benchmarks import peers
from benchmarks.compare import Row, pairs, timed
from manyranks.world.processes.local import the_forkserver

RANKS, VICTIM = 8, 3
MEGABYTES = 100

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # as the functions of a notebook travel


def rows() -> Iterator[Row]:
    the_forkserver().wait_until_ready()
    with mr.World(1) as world:
        world.run(_all_reduce)  # nothing below is a first time
    for benchmark in (starting, spawning, launching, interactive, calling, restarting, losing, measuring, many, returning):
        yield from benchmark()


def starting() -> Iterator[Row]:
    seconds = tuple(_start(RANKS) for _ in range(15))
    yield Row(f"{RANKS} ranks started, first all_reduce done", seconds, at_most=0.3)


def spawning() -> Iterator[Row]:
    both = pairs(lambda: _whole_life(RANKS), lambda: timed(lambda: peers.spawn_ranks(RANKS)), rounds=3)
    yield Row("  … and ended; torch.multiprocessing.spawn", **both, ratio_at_most=1 / 20)


def launching() -> Iterator[Row]:
    what = "  … and ended; accelerate's debug_launcher (fork)"
    if reason := peers.missing("accelerate"):
        yield Row(what, skipped=reason)
        return
    yield Row(what, **pairs(lambda: _whole_life(RANKS), lambda: peers.debug_launcher_seconds(RANKS), 5), ratio_at_most=1.5)


def interactive() -> Iterator[Row]:
    """Both rows share the last cluster: each takes some 20 s to start."""
    start, call = f"{RANKS} ranks started; ipyparallel, engines with torch", f"run of nothing on {RANKS} ranks; apply_sync"
    if reason := peers.missing("ipyparallel"):
        yield from (Row(what, skipped=reason) for what in (start, call))
        return
    with contextlib.ExitStack() as last:
        clients: list = []
        both = pairs(lambda: _start(RANKS), lambda: _start_engines(last, clients), rounds=2)
        yield Row(start, **both, ratio_at_most=1 / 40)
        view, world = clients[-1][:], last.enter_context(mr.World(RANKS))
        both = (lambda: timed(lambda: world.run(_nothing))), (lambda: timed(lambda: view.apply_sync(peers.nothing)))
        pairs(*both, rounds=5)
        yield Row(call, **pairs(*both, rounds=50), ratio_at_most=1 / 10)
        series = tuple(lambda side=side: sum(side() for _ in range(10)) / 10 for side in both)
        yield Row("  … each call of a series of ten", **pairs(*series, rounds=20), ratio_at_most=1 / 10)


def calling() -> Iterator[Row]:
    with mr.World(RANKS) as world:
        world.run(_nothing)
        seconds = tuple(timed(lambda: world.run(_nothing)) for _ in range(200))
    yield Row(f"run of nothing on {RANKS} ranks", seconds, at_most=1e-3)


def restarting() -> Iterator[Row]:
    seconds = tuple(_restart()[1] for _ in range(7))
    yield Row("after RankDied: next run, an all_reduce, done", seconds, at_most=0.3)


def losing() -> Iterator[Row]:
    seconds = tuple(sum(_restart()) for _ in range(7))
    yield Row("from the kill to RankDied, then an all_reduce", seconds)


def measuring() -> Iterator[Row]:
    with mr.World(4) as world:
        world.measure(_hundred)
        both = pairs(lambda: timed(lambda: world.measure(_hundred)), lambda: timed(lambda: world.run(_hundred)), rounds=15)
    yield Row("100 all_reduces of 4 kB, 4 ranks: measure; run", **both, ratio_at_most=2.0)
    with mr.World(2) as world:
        world.measure(_computing)
        both = pairs(lambda: timed(lambda: world.measure(_computing)), lambda: timed(lambda: world.run(_computing)), rounds=15)
    yield Row("40 products and 20 all_reduces, 2 ranks: measure; run", **both, ratio_at_most=1.1)


def many() -> Iterator[Row]:
    yield Row("32 ranks started, first all_reduce done", tuple(_start(32) for _ in range(5)))
    what = "  … memory of the ranks and the forkserver (PSS)"
    if not os.path.exists("/proc/self/smaps_rollup"):
        yield Row(what, skipped="only Linux tells a process's share of memory")
        return
    with mr.World(32) as world:
        world.run(_all_reduce)
        pids = [the_forkserver().pid, *world.run(os.getpid)]
        yield Row(what, (float(sum(_shared_bytes(pid) for pid in pids)),), unit="bytes", at_most=2e9)


def returning() -> Iterator[Row]:
    tensor = torch.rand(MEGABYTES * 250_000)
    with mr.World(1) as world:
        world.set(tensor=tensor)
        both = pairs(lambda: timed(lambda: world.get("tensor")), lambda: timed(lambda: _pickled(tensor)), rounds=9)
    yield Row(f"{MEGABYTES} MB tensor returned by a rank; pickled in place", **both)
    rates = {side: tuple(MEGABYTES * 1e6 / seconds for seconds in values) for side, values in both.items()}
    yield Row("  … the same as a rate", **rates, unit="bytes/s")


def _start(size: int) -> float:
    """Seconds until the first all_reduce is done; the end of the ranks is not counted."""
    started = time.perf_counter()
    with mr.World(size) as world:
        world.run(_all_reduce)
        return time.perf_counter() - started


def _whole_life(size: int) -> float:
    return timed(lambda: _start(size))


def _start_engines(last: contextlib.ExitStack, clients: list) -> float:
    """Seconds until all engines have torch. Leaves the cluster to `last`, and ends the one that was there."""
    last.close()
    started = time.perf_counter()
    clients.append(last.enter_context(peers.ipyparallel_engines(RANKS)))
    return time.perf_counter() - started


def _computing() -> None:
    x = torch.ones(300, 300)
    for _ in range(40):
        x = (x @ x).clamp(0, 1)
    for _ in range(20):
        dist.all_reduce(x)


def _restart() -> tuple[float, float]:
    """Seconds from the kill of a rank in a run until RankDied is seen; seconds of the next run."""
    killed: list[float] = []
    with mr.World(RANKS) as world, contextlib.redirect_stderr(io.StringIO()):
        victim = world.run(os.getpid)[VICTIM]
        threading.Timer(0.3, _kill, (victim, killed)).start()
        with contextlib.suppress(mr.RankDied):
            world.run(_wait_for_the_victim)
            raise AssertionError("the run outlived its rank")
        seen = time.perf_counter()
        return seen - killed[0], timed(lambda: world.run(_all_reduce))


def _kill(pid: int, when: list[float]) -> None:
    when.append(time.perf_counter())
    os.kill(pid, signal.SIGKILL)


def _shared_bytes(pid: int) -> int:
    """Memory of a process, pages that it shares divided by the number of their users."""
    with open(f"/proc/{pid}/smaps_rollup") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * 1024


def _pickled(tensor: torch.Tensor) -> None:
    pickle.loads(pickle.dumps(tensor, protocol=pickle.HIGHEST_PROTOCOL))


def _all_reduce() -> None:
    dist.all_reduce(torch.ones(8))


def _nothing() -> None:
    pass


def _hundred() -> None:
    x = torch.zeros(1024)
    for _ in range(100):
        dist.all_reduce(x)


def _wait_for_the_victim() -> None:
    if dist.get_rank() == VICTIM:
        time.sleep(60)
    dist.all_reduce(torch.ones(8))
