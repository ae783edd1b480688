"""python -m manyranks.calibrate: measures this machine, and writes a cluster file that theory.clusters reads."""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from manyranks.measure import machine, timing
from manyranks.theory import calibration, cluster, hardware
from manyranks.theory.cluster import Cluster
from manyranks.world import World

SIZES = [2**k for k in range(10, 27, 2)]  # bytes that are all-reduced
SIDES = machine.LARGE if torch.cuda.is_available() else machine.SIZES  # of the products, all of them square


def main(arguments: list[str] | None = None) -> None:
    """The command."""
    chosen = _parser().parse_args(arguments)
    if chosen.ranks < 2:
        _parser().error(f"--ranks {chosen.ranks}: a collective that is measured has 2 ranks or more")
    out = Path(chosen.out).absolute()
    if out.suffix != ".json" or not out.parent.is_dir() or out.is_dir():
        _parser().error(f"--out {chosen.out}: give a file in a folder that exists, as mine.json")
    try:
        known = of_gpus()
        with World(chosen.ranks, timeout=None) as world:
            measured = world.run(measure, SIDES, SIZES)[0]
        base = known or cluster.laptop(flops=max(measured.products), bandwidth=1e9)
        found = calibration.calibrate(measured, base, Path(chosen.out).stem)
        calibration.save(found, chosen.out)
    except (ValueError, OSError) as error:
        _parser().error(str(error))
    chip, link = found.accelerator, found.levels[0].link
    print(f"{max(measured.products) / 1e12:.3g} TFLOP/s of products, {measured.copy / 1e9:.3g} GB/s of memory,")
    rates = f"α {link.latency * 1e6:.3g} µs and β {link.bandwidth / 1e9:.3g} GB/s"
    print(f"{rates} between {chosen.ranks} ranks, each on {chip.name}.")
    print(f'Written: theory.clusters["{chosen.out}"]')


def _parser() -> argparse.ArgumentParser:
    does = "Measures this machine, and writes a cluster file that theory.clusters reads."
    parser = argparse.ArgumentParser(prog="python -m manyranks.calibrate", description=does)
    parser.add_argument("--ranks", type=int, default=2, help="how many ranks the collective has (2)")
    parser.add_argument("--out", default="mine.json", help="the file to write (mine.json)")
    return parser


def measure(sides: Sequence[int], sizes: Sequence[int]) -> calibration.Measurements:
    """Returns what this rank's device does: products, a copy, and all-reduces with all ranks. Every rank calls it.

    sides: of the square products
    sizes: bytes that are all-reduced
    """
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    products = [machine.matmul_rate(side, dtype, device) for side in sides]
    copy = machine.memory_bandwidth(device=device)
    seconds = []
    for size in sizes:
        x = torch.ones(size // 4, device=device)
        seconds.append(timing.seconds(dist.all_reduce, x, device=device).median)
    return calibration.Measurements(products, copy, dist.get_world_size(), sizes, seconds)


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
