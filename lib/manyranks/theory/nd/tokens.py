"""Tokens per GPU decide: for each axis, what a step computes and what it sends, as step.estimate has both.

T: tokens of the global batch ÷ GPUs. The N ranks of a group get N sequences of T tokens, however they split the work; but with
context parallelism one sequence of N·T, and in a pipeline micro-batches of MICROBATCH tokens. An axis is communication-bound
where all that it sends takes longer than what is computed meanwhile, so that no overlap could hide it. Context parallelism's
messages travel under attention alone, the others' under everything. The closed forms, and their sources: formulas.
"""

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from manyranks.theory import checks, roofline, step
from manyranks.theory.architecture import ModelShape
from manyranks.theory.cluster import Cluster
from manyranks.theory.kernels import DEFAULT, Constants
from manyranks.theory.nd import formulas
from manyranks.theory.nd.formulas import MICROBATCH, formula
from manyranks.theory.plan import Plan

LARGEST = 2**17  # tokens per GPU up to which a crossing is looked for
COMPARED = 8192  # tokens per GPU at which both ways are compared
PERFECT = Constants(matmul=1.0, bandwidth=1.0, overhead=0.0)
_PARTS = {"dp": "data", "fsdp": "data", "tp": "tensor", "cp": "context", "ep": "expert", "pp": "pipeline", "bubble": "bubble"}


class Balance(NamedTuple):
    """Seconds of one step of one GPU, nothing overlapped.

    compute: what the communication can hide under at most
    """

    axis: str
    degree: int
    tokens: int
    compute: float
    communication: float

    @property
    def ratio(self) -> float:
        """Seconds of communication ÷ seconds of computing; above 1: communication-bound."""
        return self.communication / self.compute


def plan(axis: str, degree: int, tokens: int) -> Plan:
    """Plans one group of this axis, with so many tokens for each rank; nothing is recomputed or overlaps, in a CUDA graph.

    Raises ValueError for another axis or degree, and for tokens that are no multiple of least_tokens.
    """
    formulas.check(axis, degree)
    checks.whole(tokens=tokens)
    if tokens % (unit := least_tokens(axis, degree)):
        raise ValueError(f"tokens={tokens}: {axis} over {degree} ranks takes multiples of {unit}")
    alone = {"recompute": "none", "overlap": False, "overlap_tensor": False, "stack": "megatron-bridge-graphs"}
    if axis in ("pp", "bubble"):
        return Plan(pp=degree, seq=MICROBATCH, batch=tokens * degree // MICROBATCH, **alone)
    if axis == "tp":
        return Plan(tp=degree, seq=tokens, microbatch=degree, **alone)
    if axis == "cp":
        return Plan(cp=degree, seq=tokens * degree, **alone)
    return Plan(dp=degree, ep=degree if axis == "ep" else 1, zero=3 if axis == "fsdp" else 1, seq=tokens, **alone)


def least_tokens(axis: str, degree: int) -> int:
    """Tokens per GPU come in multiples of this: sequence parallelism cuts sequences, a pipeline has whole micro-batches.

    Raises ValueError for another axis, and for a degree below 2.
    """
    formulas.check(axis, degree)
    if axis in ("pp", "bubble"):
        return MICROBATCH // math.gcd(degree, MICROBATCH)
    return degree if axis == "tp" else 1


def balance(
    axis: str, shape: ModelShape, cluster: Cluster, degree: int, tokens: int, constants: Constants = DEFAULT
) -> Balance:
    """Computes one point of the plot. Raises ValueError as plan and step.estimate do."""
    one = plan(axis, degree, tokens)
    time = step.estimate(shape, one, cluster, constants, gpus=degree)
    compute = time.compute
    if axis == "cp":
        parts = roofline.parts(shape, one, cluster.of(degree), constants)
        compute = sum(part.seconds for part in parts if part.name == "attention core")
    return Balance(axis, degree, tokens, compute, getattr(time, _PARTS[axis]))


def curve(axis: str, shape: ModelShape, cluster: Cluster, degree: int, tokens: Iterable[int]) -> list[Balance]:
    """Calls `balance` for each number of tokens that the axis takes; others are left out."""
    unit = least_tokens(axis, degree)
    return [balance(axis, shape, cluster, degree, each) for each in tokens if each % unit == 0]


def crossing(axis: str, shape: ModelShape, cluster: Cluster, degree: int, constants: Constants = DEFAULT) -> float:
    """The fewest tokens per GPU that let step.estimate compute for longer than it sends, as a multiple of least_tokens.

    0 where that holds for the fewest tokens already, infinite where it does not for LARGEST.
    """
    formulas.check(axis, degree)
    unit = least_tokens(axis, degree)

    def bound(count: int) -> bool:
        return balance(axis, shape, cluster, degree, count * unit, constants).ratio > 1

    low, high = 1, LARGEST // unit
    if not bound(low):
        return 0.0
    if bound(high):
        return math.inf
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if bound(middle) else (low, middle)
    return float(high * unit)


class Check(NamedTuple):
    """Crossings of one axis, in tokens per GPU.

    sheet, ideal: by the formula and by step.estimate, on a machine that reaches its data sheet and has no latency
    formula, real: the same two on the real one, where step.estimate also charges what kernels move
    agreement: on the ideal machine, step.estimate's ratio ÷ the formula's, with about COMPARED tokens
    """

    axis: str
    degree: int
    sheet: float
    ideal: float
    formula: float
    real: float
    agreement: float


def check(axis: str, shape: ModelShape, cluster: Cluster, degree: int) -> Check:
    """Both ways to the crossing, on the data sheet's machine and on the real one."""
    perfect = ideal(cluster)
    closed, unit = formula(axis, shape, perfect, degree, PERFECT), least_tokens(axis, degree)
    compared = COMPARED // unit * unit or unit
    stepped = balance(axis, shape, perfect, degree, compared, PERFECT)
    return Check(
        axis,
        degree,
        closed.crossing,
        crossing(axis, shape, perfect, degree, PERFECT),
        formula(axis, shape, cluster, degree).crossing,
        crossing(axis, shape, cluster, degree),
        stepped.ratio / closed.ratio(compared),
    )


def ideal(cluster: Cluster) -> Cluster:
    """The cluster without what the closed form leaves out: latency, memory traffic, exponentials, and that products do not
    reach the peak."""
    chip = replace(cluster.accelerator, memory_bandwidth=math.inf, matmul_fraction=1.0, specials=0.0, processors=0)
    levels = tuple(level._replace(link=replace(level.link, latency=0.0)) for level in cluster.levels)
    return replace(cluster, name=f"{cluster.name}, ideal", accelerator=chip, levels=levels, reserved=0.0)
