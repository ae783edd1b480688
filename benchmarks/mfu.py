"""Measuring a step: whether the parts of its time add up, what measuring costs, and each figure against another way to it."""

import functools
import os
import shutil
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.utils.benchmark import Timer
from torch.utils.flop_counter import FlopCounterMode

import manyranks as mr
from benchmarks import training
from benchmarks.compare import Row, one_thread, pairs, processor_seconds, timed
from manyranks.measure import machine
from manyranks.measure.flops import WorkCounter
from manyranks.training.config import GPTConfig, TrainingConfig
from manyranks.training.trainer import Trainer, train

ROUNDS = 11
RANKS, MESSAGE = 2, 4_000_000  # of the reduction that is timed without waiting: numbers, of 4 bytes
SIZE = 2048
CHAIN = 2**21  # numbers that the chain of operators works on: more than a core's own caches hold
RUN = TrainingConfig(steps=6)
# Its dropout keeps attention from computing its scores again: the FLOPs that run are those that the model needs.
RUNS = {
    "MFU": (GPTConfig(dropout=0.1), RUN),
    "HFU": (GPTConfig(), TrainingConfig(steps=RUN.steps, recompute="full")),
}


def rows() -> Iterator[Row]:
    for ranks in (1, 2, 4):
        with mr.World(ranks) as world:
            yield from _waterfalls(world)
    with mr.World(RANKS) as world:
        what = f"all-reduce of {4 * MESSAGE / 1e6:.0f} MB, {RANKS} ranks: async_op=True, not waited for; waited for"
        yield Row(what, **training.slowest(world.run(_launches)), ratio_at_most=1 / 10)
        yield from (_utilization(world, name, *run) for name, run in RUNS.items())
    with one_thread():
        yield _counters()
        yield from _peaks()
        yield from _fused()


# Where a step's time went, on ranks


def _waterfalls(world: mr.World) -> Iterator[Row]:
    what = f"step of the small GPT, ranks: {world.size}; "
    sums, clocks = [], []

    def profiled() -> float:
        m = world.measure(_step, profile=True)
        whole = [(m.budgets[rank].seconds, seconds) for rank, (seconds, _) in enumerate(m.results)]
        farthest = max(whole, key=lambda both: abs(both[0] - both[1]))
        sums.append(farthest[0])
        clocks.append(farthest[1])
        return max(processor for _, processor in m.results)

    def plain() -> float:
        return max(processor for _, processor in world.run(_step))

    plain()
    seconds = pairs(profiled, plain, ROUNDS)
    yield Row(what + "the five parts of its time, summed; a clock around it", tuple(sums), tuple(clocks), ratio_within=0.02)
    yield Row(what + "under the profiler, processor; without", **seconds, ratio_at_most=1.1)


def _step() -> tuple[float, float]:
    """Seconds, and the processor's, of one more step of this rank's trainer.

    The ranks import this module, where other groups send theirs by value: so a trainer lives from one run to the next.
    """
    started, used = time.perf_counter(), time.process_time()
    _trainer().run(1)
    return time.perf_counter() - started, time.process_time() - used


@functools.cache
def _trainer() -> Trainer:
    trainer = Trainer(GPTConfig(), TrainingConfig(steps=1000))
    trainer.run(2)
    return trainer


# Wrong without waiting


def _launches() -> dict[str, tuple[float, ...]]:
    x = torch.zeros(MESSAGE)
    measures = [partial(_least, partial(measure, x)) for measure in (_launched, _reduced)]
    pairs(*measures, rounds=1)
    return pairs(*measures, rounds=ROUNDS)


def _launched(x: Tensor) -> float:
    dist.barrier()
    started = time.perf_counter()
    work = dist.all_reduce(x, async_op=True)
    seconds = time.perf_counter() - started
    work.wait()
    return seconds


def _reduced(x: Tensor) -> float:
    dist.barrier()
    return timed(lambda: dist.all_reduce(x, async_op=True).wait())


# Utilization by tokens, and by counting


def _utilization(world: mr.World, name: str, gpt: GPTConfig, run: TrainingConfig) -> Row:
    ours, counted = [], []
    flops = sum(world.measure(_one_step, gpt, run, flops=True).flops.values())
    for _ in range(3):
        result = world.run(train, gpt, run, utilization=True)[0]
        used = result.utilization
        ours.append(used.mfu("full") if name == "MFU" else used.hfu("full"))
        counted.append(flops * run.steps / result.seconds / used.peak.flops)
    what = f"{name} of a run on {RANKS} ranks, recomputation {run.recompute}: from tokens/s; from the FLOPs that ran"
    return Row(what, tuple(ours), tuple(counted), unit="share", ratio_within=0.005)


def _one_step(gpt: GPTConfig, run: TrainingConfig) -> None:
    Trainer(gpt, run).run(1)


# One process, one thread


def _counters() -> Row:
    """FlopCounterMode leaves out the CPU's attention; WorkCounter counts bytes, too."""
    step = partial(Trainer(GPTConfig(), TrainingConfig(steps=1000)).run, 1)

    def under(counter: Callable) -> float:
        with counter():
            return processor_seconds(step)

    ours, theirs = partial(under, WorkCounter), partial(under, partial(FlopCounterMode, display=False))
    pairs(ours, theirs, rounds=2)
    what = "step of the small GPT under a counter, processor: WorkCounter; FlopCounterMode"
    return Row(what, **pairs(ours, theirs, ROUNDS), ratio_at_most=1.1)


def _peaks() -> Iterator[Row]:
    for dtype in (torch.float32, torch.bfloat16):
        name, best = str(dtype).removeprefix("torch."), 0.05 if dtype == torch.float32 else None
        theirs = partial(_timers_rate, dtype)
        same = pairs(partial(machine.matmul_rate, SIZE, dtype), theirs, rounds=7)
        yield Row(
            f"product of {SIZE:,}, {name}: machine.matmul_rate; benchmark.Timer", **same, unit="FLOP/s", ratio_within=0.05
        )
        # Of 16-bit products a smaller one may be faster: it is in the caches.
        peaks = pairs(partial(machine.peak, dtype), theirs, rounds=7)
        yield Row(f"best product, {name}: machine.peak; that one by Timer", **peaks, unit="FLOP/s", ratio_within=best)


def _timers_rate(dtype: torch.dtype) -> float:
    x, y = (torch.ones(SIZE, SIZE, dtype=dtype) for _ in range(2))
    timer = Timer("torch.mm(x, x, out=y)", globals={"torch": torch, "x": x, "y": y})
    return 2 * SIZE**3 / timer.blocked_autorange(min_run_time=0.5).median


# What fusing changes


def _fused() -> Iterator[Row]:
    """Compares a chain of operators, which all read and write memory, with one loop that PyTorch has or compiles for them."""
    x, matrix = torch.randn(CHAIN), torch.randn(512, 512)
    chain = f"GELU of {CHAIN / 1e6:.1f} M numbers"
    yield _of_both(f"{chain}: F.gelu, one operator; nine", partial(F.gelu, approximate="tanh"), _gelu, x, 0.7)
    compiled = {
        f"{chain}: nine operators, torch.compile; as written": (_gelu, x, 0.7),
        "product of 512: torch.compile; as written, nothing to fuse": (_product, matrix, None),
    }
    for what, (function, of, at_most) in compiled.items():
        if shutil.which(os.environ.get("CXX", "g++")):
            yield _of_both(what, torch.compile(function), function, of, at_most)
        else:
            yield Row(what, skipped="no C++ compiler, which torch.compile needs")


def _of_both(what: str, one: Callable, other: Callable, x: Tensor, at_most: float | None) -> Row:
    torch.testing.assert_close(one(x), other(x), rtol=1e-4, atol=1e-5)
    seconds = [partial(_least, partial(processor_seconds, partial(function, x))) for function in (one, other)]
    return Row(what + ", processor", **pairs(*seconds, rounds=ROUNDS), ratio_at_most=at_most)


def _least(measure: Callable[[], float]) -> float:
    """Returns the least of a few measurements, the one that other processes disturbed least."""
    return min(measure() for _ in range(5))


def _gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))


def _product(x: Tensor) -> Tensor:
    return x @ x
