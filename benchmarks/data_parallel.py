"""A training step of our overlapped data parallelism against DistributedDataParallel's, on a model of 10 M parameters."""

import sys
import time
from collections.abc import Callable, Iterator

import cloudpickle
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import manyranks as mr
from benchmarks.compare import Row, pairs
from manyranks.parallel.data_parallel import OverlappedDataParallel

WIDTH, DEPTH, ROWS = 1024, 10, 32  # 10 · (1024² + 1024) = 10.5 M parameters
ROUNDS, STEPS = 21, 4

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def rows() -> Iterator[Row]:
    for ranks in (2, 4):
        with mr.World(ranks) as world:
            of_ranks = world.run(_both)
        # The slowest rank's count.
        both = {which: tuple(map(max, zip(*(rank[which] for rank in of_ranks), strict=True))) for which in of_ranks[0]}
        name = f"data-parallel step, 10 M parameters, {ranks} ranks: overlapped; DistributedDataParallel"
        yield Row(name, **both, ratio_at_most=1.05)


def _both() -> dict[str, tuple[float, ...]]:
    """Pairs of seconds a step, on this rank."""
    ours, theirs = OverlappedDataParallel(_model()), DistributedDataParallel(_model(), gradient_as_bucket_view=True)
    steps = _step(ours, ours.finish), _step(theirs, lambda: None)
    measures = [lambda step=step: _fastest(step) for step in steps]
    pairs(*measures, rounds=2)
    return pairs(*measures, rounds=ROUNDS)


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(DEPTH)))


def _step(model: nn.Module, finish: Callable[[], None]) -> Callable[[], None]:
    optimizer, x = torch.optim.SGD(model.parameters(), lr=1e-3), torch.ones(ROWS, WIDTH)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        finish()
        optimizer.step()

    return step


def _fastest(step: Callable[[], None]) -> float:
    """Seconds of the fastest of some steps: the one that whatever else runs on the machine disturbed least."""
    seconds = []
    for _ in range(STEPS):
        dist.barrier()
        started = time.perf_counter()
        step()
        dist.barrier()
        seconds.append(time.perf_counter() - started)
    return min(seconds)
