"""The seconds that a kernel takes, with the three constants that all estimates share."""

import functools
import math
from typing import NamedTuple

from manyranks.theory.cluster import Cluster
from manyranks.theory.hardware import Accelerator
from manyranks.theory.layer import Kernel

MATMUL = 0.93  # share of a chip's best matrix product (Accelerator.matmul_fraction) that a step reaches: published.fit
BANDWIDTH = 0.79  # share of a link's or a memory's specified bandwidth: mean of measured_busbw.csv's rings ÷ specification
OVERHEAD = 5e-6  # seconds that a kernel or a collective takes on top of its work
OVERHEAD_SOURCE = "a round number for starting a kernel; with 0 or 10 µs the mean error changes by less than half a point"
# Rows and columns of the result that one processor computes at a time. Sections 2.3 to 3.2 of NVIDIA's "Matrix Multiplication
# Background User's Guide" have the sizes, and what follows from them for products that are small, or no multiples.
TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64))


class Constants(NamedTuple):
    """The constants of our estimates.

    matmul: share of a chip's best product that a step's products reach
    bandwidth: share of what links and memory are specified for
    overhead: seconds that a kernel or a collective takes on top of its work
    """

    matmul: float = MATMUL
    bandwidth: float = BANDWIDTH
    overhead: float = OVERHEAD


DEFAULT = Constants()


def seconds(kernel: Kernel, chip: Accelerator, constants: Constants, reserved: float = 0.0) -> float:
    """FLOPs ÷ rate + exponentials ÷ their rate + bytes ÷ memory bandwidth + the overhead. The rate is the best
    product's, times the share of the processors that this one's sizes keep at work.

    A sum, not the roofline's maximum: nothing in a kernel hides its first reading and its last writing.
    reserved: share of the processors that communicate instead.
    """
    processors = 1 - reserved
    reach = kernel.reach * chip.ampere or chip.matmul_fraction * constants.matmul
    if kernel.sizes and chip.processors:
        m, n, _, count = kernel.sizes
        reach *= in_use(m, n, count, int(chip.processors * processors), chip.reuse)
    if kernel.tiles:
        processors /= 1 + 2 * chip.processors * processors / kernel.tiles  # the last tile to start has twice the mean's work
    compute = kernel.flops / (peak(chip, kernel.rate) * reach * processors)
    specials = kernel.specials / (chip.specials * processors) if chip.specials else 0.0
    return compute + specials + kernel.bytes / (chip.memory_bandwidth * constants.bandwidth) + constants.overhead


def total_seconds(work: list[Kernel], cluster: Cluster, constants: Constants) -> float:
    """Seconds of the chip for these kernels."""
    return sum(seconds(kernel, cluster.accelerator, constants, cluster.reserved) for kernel in work)


@functools.lru_cache(maxsize=65536)
def in_use(m: float, n: float, count: float, processors: int, reuse: float) -> float:
    """Share of the processors that `count` products with m × n results keep at work, with the best of TILES.

    Tiles stick out over the edges, and the last wave of them is not full. A tile of a × b does ab multiplications with a + b
    numbers from the cache: one with less than `reuse` of them for each number waits for the cache.
    """
    return max(filled(m, n, count, processors, a, b, min(1.0, a * b / (a + b) / reuse)) for a, b in TILES)


def filled(m: float, n: float, count: float, processors: int, a: int, b: int, fed: float = 1.0) -> float:
    """Computes in_use with tiles of a × b only, one per processor at a time.

    fed: share of its rate at which a tile is fed
    """
    waves = math.ceil(math.ceil(m / a) * math.ceil(n / b) * count / processors)
    return fed * m * n * count / (waves * processors * a * b)


def peak(chip: Accelerator, rate: str) -> float:
    """FLOP/s of matrix products: "bf16", "fp8" or "fp4" (bf16's on chips without), or "fp32" (TF32 on GPUs, half of bf16)."""
    if rate == "bf16":
        return chip.flops
    quantized = {"fp8": chip.flops_fp8 or chip.flops, "fp4": chip.flops_fp4 or chip.flops}
    return (quantized | {"fp32": chip.flops * chip.tf32})[rate]
