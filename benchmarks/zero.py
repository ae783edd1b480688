"""A training step with sharded states against PyTorch's own, on a model of 10 M parameters: its time and its peak of memory."""

import sys
from collections.abc import Callable, Iterator

import cloudpickle
import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import manyranks as mr
from benchmarks import training
from benchmarks.compare import Row, pairs
from benchmarks.training import Step, step_of
from manyranks.measure.memory import PeakBytes
from manyranks.parallel.fsdp import FullyShardedDataParallel
from manyranks.parallel.zero import ZeroOptimizer

RANKS, ROUNDS, STEPS = 4, 15, 3

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def rows() -> Iterator[Row]:
    compared = {
        "FSDP; fully_shard": (_ours_sharded, _theirs_sharded, 0.85),
        "ZeRO-1; ZeroRedundancyOptimizer": (_stage_1, _theirs_redundant, 1.0),
        "ZeRO-2; ZeroRedundancyOptimizer": (_stage_2, _theirs_redundant, 1.0),
    }
    for names, (ours, theirs, at_most) in compared.items():
        with mr.World(RANKS) as world:
            seconds, peaks = (world.run(measure, ours, theirs) for measure in (_seconds, _peaks))
        yield Row(f"step, 10 M parameters, {RANKS} ranks: {names}", **training.slowest(seconds), ratio_at_most=at_most)
        # FSDP's gradients are waited for one unit later, and take room meanwhile: theory.sharding.gradients_peak.
        most = 1.1 if ours is _ours_sharded else 1.0
        yield Row(f"its peak of memory: {names}", **training.slowest(peaks), unit="bytes", ratio_at_most=most)


def _seconds(ours: Callable[[], Step], theirs: Callable[[], Step]) -> dict[str, tuple[float, ...]]:
    """Pairs of seconds a step, on this rank."""
    steps = ours(), theirs()
    measures = [lambda step=step: training.fastest(step, STEPS) for step in steps]
    pairs(*measures, rounds=2)
    return pairs(*measures, rounds=ROUNDS)


def _peaks(ours: Callable[[], Step], theirs: Callable[[], Step]) -> dict[str, tuple[float, ...]]:
    """The most bytes that live at one time in a step."""
    return {"ours": (_peak(ours()),), "theirs": (_peak(theirs()),)}


def _peak(step: Step) -> float:
    step()  # it makes the optimizer's states
    with PeakBytes() as memory:
        step()  # the counter meets every tensor that stays
        memory.peak_bytes = 0
        step()
    return memory.peak_bytes


def _ours_sharded() -> Step:
    model = FullyShardedDataParallel(training.model())
    return step_of(model, torch.optim.Adam(model.parameters()), model.finish)


def _theirs_sharded() -> Step:
    model = training.model()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    return step_of(model, torch.optim.Adam(model.parameters()))


def _stage_1() -> Step:
    return _staged(1)


def _stage_2() -> Step:
    return _staged(2)


def _staged(stage: int) -> Step:
    model = training.model()
    return step_of(model, ZeroOptimizer(model.parameters(), torch.optim.Adam, stage=stage))


def _theirs_redundant() -> Step:
    model = DistributedDataParallel(training.model(), gradient_as_bucket_view=True)
    return step_of(model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam))
