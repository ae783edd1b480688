"""Starves ranks of processors: no healthy run may be called a deadlock, and every deadlock has to be named.

Each rank forks busy loops. Its main thread and some of gloo's threads only get the processor time that these loops leave
(SCHED_IDLE): next to nothing, for seconds. The thread that says where the rank is gets its normal share. The loops belong to
the rank's own session, because Linux divides processors among sessions first (autogroup): other sessions' loops starve nobody.
"""

import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import cloudpickle
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import manyranks as mr
from benchmarks.compare import Row
from manyranks.training import GPTConfig, TrainingConfig
from manyranks.training.trainer import Trainer

RANKS, RUNS, AT_ONCE = 4, 60, 2  # worlds at once
BURST, REST = 2.5, 0.5  # seconds
LIMIT, QUIET_LIMIT, BUSY_LIMIT = 300.0, 3.0, 30.0  # seconds: of a run, and until a deadlock has to be named
Program = Callable[[], None]

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # as the functions of a notebook travel


def rows() -> Iterator[Row]:
    yield _naming("deadlocks named, the slowest", _as_it_is, QUIET_LIMIT)
    if not hasattr(os, "SCHED_IDLE"):
        yield Row("healthy runs on starved ranks", skipped="only Linux has SCHED_IDLE")
        return
    with ThreadPoolExecutor(AT_ONCE) as pool:
        reports = [report for half in pool.map(_healthy_runs, range(AT_ONCE)) for report in half]
    share = sum(map(bool, reports)) / len(reports)
    yield Row(f"{len(reports)} healthy runs on starved ranks: called a deadlock", (share,), unit="share", at_most=0.0)
    yield _naming("deadlocks named on starved ranks, the slowest", starved, BUSY_LIMIT)


def _healthy_runs(which: int) -> list[str]:
    """Returns the reports of deadlocks, "" for a run that ended well."""
    reports = []
    with mr.World(RANKS, backend="gloo", timeout=LIMIT) as world:
        for number in range(which, RUNS, AT_ONCE):
            program, started = HEALTHY[number // AT_ONCE % len(HEALTHY)], time.monotonic()
            try:
                world.run(starved, program, number)
                reports.append("")
            except mr.RankHung as error:
                reports.append(str(error))
            _say(f"{program.__name__}: {time.monotonic() - started:.1f} s. {reports[-1]}")
    return reports


def _naming(what: str, how: Callable, at_most: float) -> Row:
    """Measures the seconds from the start of each deadlock's run until it is named."""
    seconds = {}
    with mr.World(RANKS, backend="gloo", timeout=LIMIT) as world:
        for program in DEADLOCKS:
            world.run(int)  # fresh ranks are there
            started = time.monotonic()
            try:
                world.run(how, program, 0)
            except mr.RankHung as error:
                seconds[program.__name__] = time.monotonic() - started
                _say(f"{program.__name__}: {seconds[program.__name__]:.1f} s. {error}")
    if missing := [program.__name__ for program in DEADLOCKS if program.__name__ not in seconds]:
        raise AssertionError(f"not named: {', '.join(missing)}")
    return Row(f"{len(seconds)} {what}: {max(seconds, key=seconds.get)}", (max(seconds.values()),), at_most=at_most)


def _say(text: str) -> None:
    if not sys.stderr.isatty():
        print(text, file=sys.stderr, flush=True)


def _as_it_is(program: Program, seed: int) -> None:
    program()


def starved(program: Program, seed: int) -> None:
    """Runs a program on a rank whose main thread hardly gets a processor. The seed chooses threads of gloo to starve, too."""
    loops = [_busy_loop() for _ in range(os.cpu_count())]
    starving = [thread for thread, name in _threads() if _starves(thread, name, random.Random(f"{seed} {dist.get_rank()}"))]
    try:
        _schedule(starving, os.SCHED_IDLE)
        program()
    finally:
        for loop in loops:
            os.kill(loop, signal.SIGKILL)
            os.waitpid(loop, 0)
        _schedule(starving, os.SCHED_OTHER)


def _busy_loop() -> int:
    """Forks a process into this rank's session. It computes in bursts, in step with all others, as long as the rank lives."""
    rank = os.getpid()
    if pid := os.fork():
        return pid
    while os.getppid() == rank:
        until = time.monotonic() + 0.01
        while time.monotonic() < until and time.monotonic() % (BURST + REST) < BURST:
            pass
        if time.monotonic() < until:
            time.sleep(0.01)
    os._exit(0)


def _threads() -> list[tuple[int, str]]:
    names = []
    for thread in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{thread}/comm") as file:
            names.append((int(thread), file.read()))
    return names


def _starves(thread: int, name: str, chance: random.Random) -> bool:
    return thread == os.getpid() or ("gloo" in name and chance.random() < 0.5)


def _schedule(threads: list[int], policy: int) -> None:
    for thread in threads:
        os.sched_setscheduler(thread, policy, os.sched_param(0))


def _neighbors() -> tuple[int, int]:
    rank, size = dist.get_rank(), dist.get_world_size()
    return (rank - 1) % size, (rank + 1) % size


def ring() -> None:
    before, after = _neighbors()
    x, y = torch.ones(1000), torch.empty(1000)
    for _ in range(15):
        for step in (dist.send, dist.recv)[:: 1 if dist.get_rank() % 2 else -1]:
            step(*((x, after) if step is dist.send else (y, before)))


def exchanges() -> None:
    before, after = _neighbors()
    for k in range(10):
        x, y = torch.ones(1000), torch.empty(1000)
        for work in (dist.irecv(y, before, tag=k % 2), dist.isend(x, after, tag=k % 2)):
            work.wait()
        batch = [dist.P2POp(dist.isend, x, after), dist.P2POp(dist.irecv, y, before)]
        for work in dist.batch_isend_irecv(batch):
            work.wait()


def all_reduces() -> None:
    works = [dist.all_reduce(torch.ones(1000), async_op=True) for _ in range(5)]
    for _ in range(5):
        dist.all_reduce(torch.ones(1000))
    for work in works:
        work.wait()


def mixed() -> None:
    before, after = _neighbors()
    for _ in range(3):
        dist.broadcast(torch.ones(10), 0)
        arriving = dist.irecv(torch.empty(10), before)
        dist.all_gather([torch.empty(10) for _ in range(RANKS)], torch.ones(10))
        dist.send(torch.ones(10), after)
        dist.reduce(torch.ones(10), 1)
        arriving.wait()
        dist.all_gather_object([None] * RANKS, "word")


def groups() -> None:
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2, 3])]
    for group in pairs:
        if dist.get_rank() in dist.get_process_group_ranks(group):
            dist.all_reduce(torch.ones(10), group=group)


def mesh() -> None:
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for name in ("dp", "tp"):
        dist.all_reduce(torch.ones(10), group=both[name].get_group())
    dist.barrier()


def ddp() -> None:
    model = DistributedDataParallel(torch.nn.Sequential(*[torch.nn.Linear(20, 20) for _ in range(4)]), bucket_cap_mb=0.002)
    for _ in range(4):
        model(torch.ones(3, 20)).sum().backward()


def fsdp() -> None:
    from torch.distributed.fsdp import fully_shard

    model = torch.nn.Sequential(*[torch.nn.Linear(20, 20) for _ in range(3)])
    for layer in (*model, model):
        fully_shard(layer, mesh=init_device_mesh("cpu", (RANKS,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(3, 20)).sum().backward()
        optimizer.step()


def training() -> None:
    Trainer(GPTConfig(), TrainingConfig(steps=2)).run(2)


def ring_of_receives() -> None:
    dist.recv(torch.ones(1), _neighbors()[1])


def sends_to_each_other() -> None:
    dist.send(torch.ones(1), dist.get_rank() ^ 1)


def another_operation() -> None:
    dist.recv(torch.ones(2), 1) if dist.get_rank() == 0 else dist.all_reduce(torch.ones(2))


def wrong_tag() -> None:
    dist.isend(torch.ones(1), _neighbors()[1], tag=1)
    dist.recv(torch.ones(1), _neighbors()[0], tag=2)


def leaves_early() -> None:
    if dist.get_rank() != 2:
        dist.barrier()


def swapped_groups() -> None:
    pair, rest = dist.new_group([0, 1]), dist.new_group([0, 1, 2])
    if dist.get_rank() < 2:
        for group in (pair, rest)[:: 1 if dist.get_rank() else -1]:
            dist.all_reduce(torch.ones(1), group=group)


def alone_in_new_group() -> None:
    if dist.get_rank() == 0:
        dist.new_group([0, 1])


def without_the_root() -> None:
    if dist.get_rank() != 1:
        dist.broadcast(torch.ones(1), 1)


def one_receiver_less() -> None:
    if dist.get_rank() != 2:
        dist.broadcast(torch.ones(1), 0)


def from_anyone() -> None:
    if dist.get_rank() == 0:
        dist.recv(torch.ones(1))


def backward_of_ddp() -> None:
    model = DistributedDataParallel(torch.nn.Linear(2, 2))
    loss = model(torch.ones(1, 2)).sum()
    if dist.get_rank() == 0:
        dist.barrier()
    loss.backward()


HEALTHY = (ring, exchanges, all_reduces, mixed, groups, mesh, ddp, fsdp, training)
DEADLOCKS = (
    *(ring_of_receives, sends_to_each_other, another_operation, wrong_tag, leaves_early, swapped_groups),
    *(alone_in_new_group, without_the_root, one_receiver_less, from_anyone, backward_of_ddp),
)
