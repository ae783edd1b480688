"""python -m manyranks.calibrate: measures this machine, and writes a cluster file that theory.clusters reads."""

import argparse
import os
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist

from manyranks.measure import machine, timing
from manyranks.theory import calibration, cluster, hardware
from manyranks.theory.cluster import Cluster
from manyranks.world import World

SIZES = [2**k for k in range(10, 27, 2)]  # bytes that are all-reduced
SIDES = machine.LARGE if torch.cuda.is_available() else machine.SIZES  # of the products, all of them square
ROUNDS = 5
WAITED = 0.1  # share of the time without a processor; from here on a rate says more about other programs
SPREAD = 2  # highest rate divided by lowest; from here on nobody knows which one to believe


class Round(NamedTuple):
    """Holds what a rank measured in one round.

    products: FLOP/s of each product
    copy: bytes/s that a copy read and wrote
    seconds: of each all-reduce
    waited: share of the products' time that the rank waited for a processor; a GPU's is 0
    """

    products: list[float]
    copy: float
    seconds: list[float]
    waited: float


def main(arguments: list[str] | None = None) -> None:
    """Runs the command."""
    chosen = _parser().parse_args(arguments)
    if chosen.ranks < 2:
        _parser().error(f"--ranks {chosen.ranks}: a collective that is measured has 2 ranks or more")
    out = Path(chosen.out).absolute()
    if out.suffix != ".json" or not out.parent.is_dir() or out.is_dir():
        _parser().error(f"--out {chosen.out}: give a file in a folder that exists, as mine.json")
    try:
        known = of_gpus()
        of_ranks = _rounds(chosen.ranks)
        print(_table(of_ranks[0]))
        if (busy := doubts(of_ranks)) and not chosen.anyway:
            _parser().exit(2, f"These rates can't be trusted: {busy}.\n{_advice(chosen.ranks)}\n")
        measured = middle(of_ranks[0], chosen.ranks)
        base = known or cluster.laptop(flops=max(measured.products), bandwidth=1e9)
        found = calibration.calibrate(measured, base, Path(chosen.out).stem)
        cluster.save(found, chosen.out)
    except (ValueError, OSError) as error:
        _parser().error(str(error))
    chip, link = found.accelerator, found.levels[0].link
    rates = f"α {link.latency * 1e6:.3g} µs and β {link.bandwidth / 1e9:.3g} GB/s"
    print(f"{rates} between {chosen.ranks} ranks, each on {chip.name}.")
    if busy:
        print(f"Not to be trusted: {busy}.")
    print(f'Written: theory.clusters["{chosen.out}"]')


def _parser() -> argparse.ArgumentParser:
    does = "Measures this machine, and writes a cluster file that theory.clusters reads."
    parser = argparse.ArgumentParser(prog="python -m manyranks.calibrate", description=does)
    parser.add_argument("--ranks", type=int, default=2, help="how many ranks the collective has (2)")
    parser.add_argument("--out", default="mine.json", help="the file to write (mine.json)")
    parser.add_argument("--anyway", action="store_true", help="write the file even if the machine is busy")
    return parser


def _rounds(ranks: int) -> list[list[Round]]:
    """Returns what each rank measured, round by round."""
    with World(ranks, timeout=None) as world:
        return world.run(measure, SIDES, SIZES, ROUNDS)


def measure(sides: Sequence[int], sizes: Sequence[int], rounds: int) -> list[Round]:
    """Returns what this rank's device does: products, a copy, and all-reduces with all ranks. Every rank calls it.

    Each round measures everything once, so a busy moment doesn't spoil all measurements of one rate.

    sides: of the square products
    sizes: bytes that are all-reduced
    rounds: how many of them
    """
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    tensors = [torch.ones(size // 4, device=device) for size in sizes]
    found = []
    for _ in range(rounds):
        dist.barrier()  # all ranks compute at once, as in training
        began, used = time.perf_counter(), time.thread_time()
        products = [machine.matmul_rate(side, dtype, device, repeats=1) for side in sides]
        waited = 1 - (time.thread_time() - used) / (time.perf_counter() - began) if device.type == "cpu" else 0.0
        dist.barrier()
        copy = machine.memory_bandwidth(device=device)
        seconds = [timing.seconds(dist.all_reduce, x, repeats=3, device=device).median for x in tensors]
        found.append(Round(products, copy, seconds, waited))
    return found


def middle(rounds: list[Round], ranks: int) -> calibration.Measurements:
    """Returns the median of all rounds, for each rate."""
    products, copies, seconds, _ = zip(*rounds, strict=True)
    return calibration.Measurements(
        [median(each) for each in zip(*products, strict=True)],
        median(copies),
        ranks,
        SIZES,
        [median(each) for each in zip(*seconds, strict=True)],
    )


def doubts(of_ranks: list[list[Round]]) -> str:
    """Returns why the rates can't be trusted, "" if they can.

    A busy machine may be slow evenly, so the spread alone doesn't show it. A shared one may lose processors without telling
    us, so the wait alone isn't enough, either.
    """
    found = []
    waited = max(median(each.waited for each in rounds) for rounds in of_ranks)
    if waited >= WAITED:
        found.append(f"a rank waited for a processor {waited:.0%} of the time")
    for name, (rates, unit) in _rates(of_ranks[0]).items():
        if max(rates) >= SPREAD * min(rates):
            found.append(f"{name}: {min(rates):.3g} to {max(rates):.3g} {unit}")
    return "; ".join(found)


def _rates(rounds: list[Round]) -> dict[str, tuple[list[float], str]]:
    """Returns, for each kind of rate, its value in each round and its unit."""
    return {
        "products": ([max(each.products) / 1e12 for each in rounds], "TFLOP/s"),
        "memory": ([each.copy / 1e9 for each in rounds], "GB/s"),
        "largest all-reduce": ([SIZES[-1] / each.seconds[-1] / 1e9 for each in rounds], "GB/s"),
    }


def _table(rounds: list[Round]) -> str:
    return "\n".join(
        f"{name:<18} {median(rates):>8.3g} {unit:<7}  ({min(rates):.3g} to {max(rates):.3g} in {len(rounds)} rounds)"
        for name, (rates, unit) in _rates(rounds).items()
    )


def _advice(ranks: int) -> str:
    there = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    fewer = f"or ask for fewer ranks ({ranks} don't fit on {there} processors), " if ranks > there else ""
    return f"Nothing was written. Close other programs, {fewer}and run it again. To write the file all the same, add --anyway."


def of_gpus() -> Cluster | None:
    """Returns the cluster that has this machine's GPUs, None without GPUs. Raises ValueError for GPUs that no cluster has."""
    if not torch.cuda.is_available():
        return None
    chip = hardware.of_device(name := torch.cuda.get_device_name())
    for each in cluster.clusters.values():
        if chip is not None and each.accelerator.name == chip.name:
            return each
    raise ValueError(f"no cluster has {name}: make a theory.Cluster of it, and give that to theory.calibrate")


if __name__ == "__main__":
    main()
