"""Our rings against gloo's collectives, 4 ranks, on tensors of 16 and 64 MB."""

import sys
import time
from collections.abc import Callable, Iterator

import cloudpickle
import torch
import torch.distributed as dist

import manyranks as mr
from benchmarks.compare import Row, pairs
from manyranks.parallel.collectives import pairwise_all_to_all, ring_all_gather, ring_all_reduce, ring_reduce_scatter

RANKS = 4
PIECES = {16: 1, 64: 2}  # megabytes: pieces of a chunk

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def rows() -> Iterator[Row]:
    with mr.World(RANKS) as world:
        for megabytes, pieces in PIECES.items():
            for what, ours, theirs, at_most in (
                ("all_reduce", _ring_all_reduce, _all_reduce, 1.15),
                ("reduce_scatter", _ring_reduce_scatter, _reduce_scatter, 0.75),
                ("all_gather", _ring_all_gather, _all_gather, None),
                ("all_to_all", _pairwise_all_to_all, _all_to_all, None),
            ):
                both = compared(world, ours, theirs, megabytes, pieces)
                name = f"{what} of {megabytes} MB, {RANKS} ranks: ours; gloo's"
                yield Row(name, **both, ratio_at_most=at_most)


def compared(world: mr.World, ours: Callable, theirs: Callable, megabytes: int, pieces: int) -> dict[str, tuple[float, ...]]:
    """Pairs of seconds a call, each the mean of several on tensors that stay; the slowest rank's count."""
    repeats = max(2, 128 // megabytes)

    def measure(operation: Callable) -> Callable[[], float]:
        return lambda: max(world.run(_seconds, operation, megabytes * 250_000, pieces, repeats))

    pairs(measure(ours), measure(theirs), rounds=2)
    return pairs(measure(ours), measure(theirs), rounds=21)


def _seconds(operation: Callable, elements: int, pieces: int, repeats: int) -> float:
    x = torch.zeros(elements)
    operation(x, pieces)  # memory is touched for the first time
    dist.barrier()
    started = time.perf_counter()
    for _ in range(repeats):
        operation(x, pieces)
    dist.barrier()
    return (time.perf_counter() - started) / repeats


def _ring_all_reduce(x: torch.Tensor, pieces: int) -> None:
    ring_all_reduce(x, pieces=pieces)


def _all_reduce(x: torch.Tensor, pieces: int) -> None:
    dist.all_reduce(x)


def _ring_reduce_scatter(x: torch.Tensor, pieces: int) -> None:
    ring_reduce_scatter(x, pieces=pieces)


def _reduce_scatter(x: torch.Tensor, pieces: int) -> None:
    dist.reduce_scatter_single(x.new_empty(x.numel() // RANKS), x)


def _ring_all_gather(x: torch.Tensor, pieces: int) -> None:
    ring_all_gather(x[: x.numel() // RANKS], pieces=pieces)


def _all_gather(x: torch.Tensor, pieces: int) -> None:
    dist.all_gather_single(torch.empty_like(x), x[: x.numel() // RANKS])


def _pairwise_all_to_all(x: torch.Tensor, pieces: int) -> None:
    pairwise_all_to_all(x)


def _all_to_all(x: torch.Tensor, pieces: int) -> None:
    dist.all_to_all_single(torch.empty_like(x), x)
