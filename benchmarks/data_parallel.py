"""A training step of our overlapped data parallelism against DistributedDataParallel's, on a model of 10 M parameters."""

import sys
from collections.abc import Iterator

import cloudpickle
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import manyranks as mr
from benchmarks import training
from benchmarks.compare import Row, pairs
from manyranks.parallel.data_parallel import OverlappedDataParallel

ROUNDS, STEPS = 21, 4

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def rows() -> Iterator[Row]:
    for ranks in (2, 4):
        with mr.World(ranks) as world:
            seconds = training.slowest(world.run(_both))
        name = f"data-parallel step, 10 M parameters, {ranks} ranks: overlapped; DistributedDataParallel"
        yield Row(name, **seconds, ratio_at_most=1.05)


def _both() -> dict[str, tuple[float, ...]]:
    """Pairs of seconds a step, on this rank."""
    ours = OverlappedDataParallel(training.model())
    theirs = DistributedDataParallel(training.model(), gradient_as_bucket_view=True)
    steps = training.step_of(ours, _sgd(ours), ours.finish), training.step_of(theirs, _sgd(theirs))
    measures = [lambda step=step: training.fastest(step, STEPS) for step in steps]
    pairs(*measures, rounds=2)
    return pairs(*measures, rounds=ROUNDS)


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-3)
