"""The roofline: what bounds an operation on a chip, and a step's time by what the chip does in it.

An operation of intensity I, its FLOPs ÷ the bytes it moves, runs at min(R, I·β) at most. R is the chip's peak, β the bandwidth
of its memory; both roofs meet at the ridge, I = R/β. Source: Williams, Waterman, Patterson, "Roofline: An Insightful Visual
Performance Model for Multicore Architectures", Communications of the ACM 52(4), 2009.
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from manyranks.theory import checks, hardware, kernels, layer, stages, step
from manyranks.theory.architecture import ModelShape
from manyranks.theory.cluster import Cluster
from manyranks.theory.hardware import Accelerator
from manyranks.theory.kernels import DEFAULT, Constants
from manyranks.theory.layer import Kernel
from manyranks.theory.plan import Plan
from manyranks.theory.stages import Stage
from manyranks.theory.step import StepTime

# A kernel's name in a table, by its part and whether it has FLOPs.
_NAMES = {
    ("attention", True): "attention projections",
    ("latent", True): "attention projections",
    ("latent", False): "rotary",
    ("rotary", False): "rotary",
    ("core", True): "attention core",
    ("core", False): "softmax",
    ("mlp", True): "MLP",
    ("product", False): "activation",
    ("gelu", False): "activation",
    ("route", True): "router",
    ("route", False): "permutation",
    ("bias", False): "experts' biases",
    ("residual", False): "residual",
    ("quantize", False): "quantize",
    ("head", True): "head",
    ("head", False): "loss",
    ("embedding", False): "embedding",
}


@dataclass(frozen=True)
class Roof:
    """The roof over a chip's operations. Raises ValueError where one is not above 0.

    peak: FLOP/s
    bandwidth: bytes/s of the memory
    """

    peak: float
    bandwidth: float

    def __post_init__(self):
        if not (self.peak > 0 and self.bandwidth > 0):
            given = f"peak={self.peak!r}, bandwidth={self.bandwidth!r}"
            raise ValueError(f"{given}: FLOP/s and bytes/s, both above 0")

    @property
    def ridge(self) -> float:
        """The fewest FLOPs per byte that can reach the peak."""
        return self.peak / self.bandwidth

    def flops_per_second(self, intensity: float) -> float:
        """Returns what an operation of this intensity, FLOPs per byte, reaches at most."""
        return min(self.peak, _intensity(intensity) * self.bandwidth)

    def bound(self, intensity: float) -> str:
        """ "compute" or "memory": which of both roofs is the lower one."""
        return "compute" if _intensity(intensity) >= self.ridge else "memory"

    def seconds(self, flops: float, bytes: float) -> float:
        """The least time of so much work: computing and moving overlap."""
        if not (flops >= 0 and bytes >= 0):
            raise ValueError(f"flops={flops!r}, bytes={bytes!r}: both are 0 or more")
        return max(flops / self.peak, bytes / self.bandwidth)


def roof(accelerator: Accelerator, dtype: str = "bfloat16") -> Roof:
    """Returns the roof of a chip's data sheet. Raises ValueError for a dtype whose peak on it is not known."""
    peak = hardware.peak(accelerator, dtype)
    if peak is None:
        known = ", ".join(name for name in hardware.DTYPES if hardware.peak(accelerator, name))
        raise ValueError(f"dtype={dtype!r}: {accelerator.name} has no confirmed peak for it, but for {known}")
    return Roof(peak, accelerator.memory_bandwidth)


def intensity(kernel: Kernel) -> float:
    """FLOPs per byte; 0 for a kernel that only moves memory."""
    return _quotient(kernel.flops, kernel.bytes)


def product_intensity(m: int, k: int, n: int, itemsize: int = 2) -> float:
    """Returns the intensity of m × k with k × n, each matrix read or written once: 2mkn ÷ (mk + kn + mn) elements."""
    checks.whole(m=m, k=k, n=n, itemsize=itemsize)
    return intensity(layer.matmul("product", m, n, k, itemsize))


class Part(NamedTuple):
    """Kernels of a kind, of one rank in one step.

    seconds: as kernels.seconds charges them
    overhead: of those, to start them
    bound: "compute" or "memory", by the roof of the data sheet
    """

    name: str
    flops: float
    bytes: float
    seconds: float
    overhead: float
    bound: str

    @property
    def intensity(self) -> float:
        """FLOPs per byte."""
        return _quotient(self.flops, self.bytes)

    @property
    def flops_per_second(self) -> float:
        return _quotient(self.flops, self.seconds)


def parts(
    shape: ModelShape, plan: Plan, cluster: Cluster, constants: Constants = DEFAULT, imbalance: float = 1.0
) -> list[Part]:
    """All that one rank computes in a step, forward and backward, by kind of kernel, the longest first.

    The rank is one of the pipeline rank that sets the pace in step.estimate; the seconds add up to its `compute`, less what the
    chip waits for its host. The optimizer is not in it. Raises ValueError as step.estimate does.
    """
    return _parts(step.estimate(shape, plan, cluster, constants, imbalance=imbalance))


def time_budget(
    shape: ModelShape, plan: Plan, cluster: Cluster, constants: Constants = DEFAULT, imbalance: float = 1.0
) -> dict[str, float]:
    """Seconds of a step by what the rank that sets the pace does in them; they add up to step.estimate's.

    "matmul": kernels with FLOPs, what they read and write included; "other": kernels that only move memory; "overhead": to
    start both, and what the chip waits for a host that starts them more slowly than it runs them. Then as in StepTime:
    communication that nothing hides, by what it is for ("tensor", "context", "expert", "pipeline", "data"), the pipeline's
    "bubble", the "optimizer". Raises ValueError as step.estimate does.
    """
    time = step.estimate(shape, plan, cluster, constants, imbalance=imbalance)
    found = _parts(time)
    budget = {
        "matmul": sum(part.seconds - part.overhead for part in found if part.flops),
        "other": sum(part.seconds - part.overhead for part in found if not part.flops),
    }
    budget["overhead"] = max(0.0, time.compute - sum(budget.values()))
    return budget | {name: seconds for name, seconds in time.parts.items() if name != "compute"}


def _parts(time: StepTime) -> list[Part]:
    ranks = stages.of_ranks(time.shape, time.plan)
    held = [ranks[time.slowest]]
    if time.plan.schedule == "dualpipe":  # the stages from either end have half of the micro-batches each
        held.append(ranks[-1 - time.slowest])
    groups: dict[str, list[tuple[float, Kernel]]] = {}
    for stage in held:
        for count, kernel in _kernels(time.shape, time.plan, stage, time.imbalance):
            often = count * time.plan.microbatches / len(held)
            name = _NAMES.get((kernel.part, kernel.flops > 0), "norms")
            groups.setdefault(name, []).append((often, kernel))
    return sorted((_part(name, group, time) for name, group in groups.items()), key=lambda part: -part.seconds)


def _part(name: str, group: list[tuple[float, Kernel]], time: StepTime) -> Part:
    cluster, chip = time.cluster, time.cluster.accelerator

    def total(value) -> float:
        return sum(often * value(kernel) for often, kernel in group)

    computing = total(lambda kernel: kernel.flops / kernels.peak(chip, kernel.rate))
    moving = total(lambda kernel: kernel.bytes) / chip.memory_bandwidth
    return Part(
        name,
        total(lambda kernel: kernel.flops),
        total(lambda kernel: kernel.bytes),
        total(lambda kernel: kernels.seconds(kernel, chip, time.constants, cluster.reserved)),
        total(lambda kernel: time.constants.overhead),
        "compute" if computing >= moving else "memory",
    )


def _kernels(shape: ModelShape, plan: Plan, stage: Stage, imbalance: float) -> Iterator[tuple[int, Kernel]]:
    """Every kernel of one micro-batch on a stage, with how often it runs: what compute.of_part charges."""
    often = Counter()
    for count, part in stages.parts(shape, stage):
        often[part] += count
    for part, count in often.items():
        work = layer.work(shape, plan, part, imbalance)
        if part == "embedding":  # backward moves twice as much
            yield from ((3 * count, kernel) for kernel in work.forward)
        else:
            yield from ((count, kernel) for kernel in work.forward + work.backward)


def _intensity(value: float) -> float:
    if not value >= 0:
        raise ValueError(f"intensity={value!r}: FLOPs per byte, 0 or more")
    return value


def _quotient(first: float, second: float) -> float:
    return first / second if second else (math.inf if first else 0.0)
