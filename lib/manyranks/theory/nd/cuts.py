"""Where to cut a model into stages, around the splits of its operators; and what the planner says of the same ways.

Every way to cut the layers into stages and the ranks into as many parts is tried, each stage on every logical mesh of its
ranks. A pipeline of p stages takes the sum of the stages' times and m − 1 times the slowest. A stage is split as is fastest for
its own m micro-batches. Source: Alpa, arXiv 2201.12023, section 5, by dynamic programming where we try all.
"""

import itertools
import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from manyranks.theory import checks, network, planner, step
from manyranks.theory.architecture import ModelShape
from manyranks.theory.calls import HALF
from manyranks.theory.cluster import Cluster
from manyranks.theory.kernels import DEFAULT
from manyranks.theory.nd.operators import Work
from manyranks.theory.nd.splits import Stage, fastest, of_pattern
from manyranks.theory.plan import Plan

# Four layers like those of Llama 3 8B, but with few words, for the question is about layers.
FOUR = ModelShape("four layers", 4, 4096, 14336, 32, 1024, kv_heads=8, source="arXiv 2407.21783, Table 3; vocabulary ours")
MICROBATCHES = (1, 2, 4, 8)
# The planner's plans that are charged as splits are: nothing overlaps, nothing is computed or gathered again.
_PLAIN = {"overlap": False, "overlap_tensor": False, "regather": False, "recompute": "none", "zero": 1, "cp": 1}
_PLAIN |= {"schedule": "1f1b", "virtual": 1}


class Solution(NamedTuple):
    """One way to cut the model, each stage split as well as can be. seconds: of a step."""

    seconds: float
    microbatches: int
    stages: tuple[Stage, ...]

    @property
    def name(self) -> str:
        named = [stage.pattern for stage in self.stages]
        if len(named) == 1:
            return named[0]
        layers = "+".join(str(stage.layers) for stage in self.stages)
        return f"PP {len(named)} ({layers} layers): " + (named[0] if len(set(named)) == 1 else " | ".join(named))


def solve(
    shape: ModelShape,
    cluster: Cluster,
    ranks: int,
    batch: int,
    seq: int,
    microbatches: Iterable[int] = MICROBATCHES,
    memory: float | None = None,
) -> list[Solution]:
    """The best splits for every cut of a dense model's layers over so many ranks, fastest first; empty where none fits.

    batch: sequences of a step; microbatches: their numbers to try; memory: bytes of an accelerator, default the cluster's. The
    embedding and the head are left out. Raises ValueError for another model, and for ranks that are no power of two.
    """
    _check(shape, cluster, ranks, batch, seq)
    numbers, found = tuple(microbatches), []
    for m in numbers:
        checks.whole(microbatches=m)
    limit = cluster.accelerator.memory if memory is None else memory
    for m, cut in itertools.product(numbers, cuts(shape.layers, ranks)):
        if batch % m == 0 and (one := _solution(shape, cluster, cut, batch // m, seq, m, limit)):
            found.append(one)
    return sorted(found, key=lambda one: one.seconds)


def cuts(layers: int, ranks: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """Every way to cut layers into stages, each with a power of two of the ranks: ((layers, ranks), …)."""
    powers = [2**k for k in range(ranks.bit_length())]
    for stages in range(1, min(layers, ranks) + 1):
        ends = itertools.combinations(range(1, layers), stages - 1)
        parts = [tuple(b - a for a, b in itertools.pairwise((0, *cut, layers))) for cut in ends]
        shares = [one for one in itertools.product(powers, repeat=stages) if sum(one) == ranks]
        yield from (tuple(zip(part, share, strict=True)) for part in parts for share in shares)


def meshes(ranks: int) -> list[tuple[int, ...]]:
    """Logical meshes of so many ranks: one axis, or two."""
    return [(ranks,), *((ranks // n, n) for n in range(2, ranks) if ranks % n == 0)]


def uniform(shape: ModelShape, cluster: Cluster, plan: Plan) -> Solution:
    """What the splits of a plan cost: data parallelism outside, Megatron's inside, equal stages.

    Of the plan only dp, tp, pp, batch and micro-batch count. Raises ValueError where pp does not divide the layers.
    """
    if shape.layers % plan.pp:
        raise ValueError(f"pp={plan.pp} does not divide {shape.layers} layers: choose a divisor of them")
    work = Work(shape, cluster, (plan.dp, plan.tp), plan.microbatch * plan.dp, plan.seq)
    layers, m, flying = shape.layers // plan.pp, plan.microbatches, min(plan.microbatches, plan.pp)
    stage = of_pattern(("data", "Megatron"), work, layers, m, flying)
    return _piped((stage,) * plan.pp, work, cluster, m)


class Beside(NamedTuple):
    """A plan, and seconds of its step: its splits' cost, and step.estimate's without the optimizer."""

    plan: Plan
    splits: float
    step: float


def beside_planner(shape: ModelShape, cluster: Cluster, ranks: int, batch: int, seq: int) -> list[Beside]:
    """All plans of the planner that splits can express, its fastest first."""
    _check(shape, cluster, ranks, batch, seq)
    found = planner.search(shape, cluster.of(ranks), seq=seq, batch=batch, microbatch=_divisors(batch), **_PLAIN)
    even = [one for one in found if shape.layers % one.plan.pp == 0]
    return [Beside(one.plan, uniform(shape, cluster, one.plan).seconds, _without_optimizer(one.time)) for one in even]


def agreement(rows: list[Beside]) -> float:
    """Share of all pairs of plans that both costs put in the same order. Raises ValueError for fewer than two plans."""
    if len(rows) < 2:
        raise ValueError(f"{len(rows)} plans: there is no pair to compare; give two rows of beside_planner or more")
    pairs = list(itertools.combinations(rows, 2))
    return sum((a.splits - b.splits) * (a.step - b.step) >= 0 for a, b in pairs) / len(pairs)


def _without_optimizer(time: step.StepTime) -> float:
    return time.seconds - time.optimizer


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _solution(
    shape: ModelShape, cluster: Cluster, cut: tuple[tuple[int, int], ...], sequences: int, seq: int, m: int, limit: float
) -> Solution | None:
    stages = []
    for i, (layers, ranks) in enumerate(cut):
        works = [Work(shape, cluster, mesh, sequences, seq) for mesh in meshes(ranks)]
        fitting = [best for work in works if (best := fastest(work, layers, m, min(m, len(cut) - i), limit))]
        if not fitting:
            return None
        stages.append(min(fitting, key=lambda stage: m * stage.seconds + stage.once))
    return _piped(tuple(stages), works[0], cluster, m)


def _piped(stages: tuple[Stage, ...], work: Work, cluster: Cluster, m: int) -> Solution:
    times = [stage.seconds + sent for stage, sent in zip(stages, _messages(stages, work, cluster), strict=True)]
    return Solution(sum(times) + (m - 1) * max(times) + max(stage.once for stage in stages), m, stages)


def _messages(stages: tuple[Stage, ...], work: Work, cluster: Cluster) -> list[float]:
    """Of a micro-batch, from each stage: activations to the next and gradients back, every rank its share."""
    ranks = [math.prod(stage.mesh) for stage in stages]
    starts = list(itertools.accumulate(ranks, initial=0))
    size = HALF * work.tokens * work.shape.hidden
    routes = [cluster.route_of((starts[i], starts[i + 1])) for i in range(len(stages) - 1)]
    return [*(2 * network.hop(route, size / n, DEFAULT) for route, n in zip(routes, ranks, strict=False)), 0.0]


def _check(shape: ModelShape, cluster: Cluster, ranks: int, batch: int, seq: int) -> None:
    checks.is_shape(shape)
    checks.is_cluster(cluster)
    checks.whole(batch=batch, seq=seq)
    if shape.experts or shape.latent:
        raise ValueError(f"{shape.name}: splits of a dense model with plain attention only, as cuts.FOUR")
    if type(ranks) is not int or ranks < 1 or ranks & (ranks - 1):
        raise ValueError(f"ranks={ranks!r}: give a power of two, which cuts into equal halves")
