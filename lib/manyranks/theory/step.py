"""The time of one training step, from the model's shape, the plan and the cluster alone.

Every kernel of a layer is charged its FLOPs and its bytes, every message α + n/β; what overlaps is hidden behind what it
overlaps with. The step takes as long as the pipeline rank that is done last, so the slowest stage sets the pace.
"""

import functools
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from manyranks.theory import data, flops, memory, passes, pipeline, stages, traffic
from manyranks.theory.architecture import ModelShape
from manyranks.theory.cluster import Cluster
from manyranks.theory.kernels import DEFAULT, Constants
from manyranks.theory.memory import Held
from manyranks.theory.passes import Both, Pass
from manyranks.theory.plan import Plan, plan_of


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step, by what they are spent on; communication only as far as nothing hides it."""

    shape: ModelShape
    plan: Plan
    cluster: Cluster
    compute: float
    tensor: float  # tensor and sequence parallelism
    context: float
    expert: float
    pipeline: float  # messages between stages
    bubble: float
    data: float  # gradients and parameters
    optimizer: float

    @property
    def parts(self) -> dict[str, float]:
        names = ("compute", "tensor", "context", "expert", "pipeline", "bubble", "data", "optimizer")
        return {name: getattr(self, name) for name in names}

    @property
    def seconds(self) -> float:
        communication = self.tensor + self.context + self.expert + self.pipeline + self.data
        return self.compute + communication + self.bubble + self.optimizer

    @property
    def tokens_per_second(self) -> float:
        """Of all accelerators together."""
        return self.plan.tokens / self.seconds

    @property
    def mfu(self) -> float:
        return self.utilisation("full")

    @property
    def hfu(self) -> float:
        peak, plan = self.cluster.accelerator.flops, self.plan
        return flops.hfu(self.shape, plan.seq, self.tokens_per_second, plan.gpus, peak, plan.recompute)

    def utilisation(self, convention: str) -> float:
        """MFU under a named convention of flops.CONVENTIONS."""
        peak = self.cluster.accelerator.flops
        return flops.mfu(self.shape, self.plan.seq, self.tokens_per_second, self.plan.gpus, peak, convention)

    @property
    def limit(self) -> str:
        """What takes most of the step beside computing."""
        parts = {name: value for name, value in self.parts.items() if name != "compute"}
        return max(parts, key=parts.get)


def estimate(
    shape: ModelShape, plan: Plan, cluster: Cluster, constants: Constants = DEFAULT, gpus: int | None = None
) -> StepTime:
    """The time of one step.

    constants: the library's three, or others to see what they do. gpus: checked against the plan, as cluster.gpus is.
    Raises ValueError where the plan does not fit the shape or the number of accelerators.
    """
    plan.check(shape, cluster.gpus if gpus is None else gpus)
    once = message(shape, plan, cluster, constants)
    optimizer = data.optimizer_seconds(shape, plan, cluster, constants)
    ranks = rank_costs(shape, plan, cluster, constants)
    return max((_step(shape, plan, cluster, constants, rank, once, optimizer) for rank in ranks), key=lambda time: time.seconds)


def _step(
    shape: ModelShape, plan: Plan, cluster: Cluster, constants: Constants, rank: "Rank", once: float, optimizer: float
) -> StepTime:
    """The step as one pipeline rank sees it."""
    m, (forward, backward, _) = plan.microbatches, rank.own
    waits = steady_waits(plan, rank.own, once)
    # Gradients and parameters travel while the rank computes, and while it waits for other messages.
    behind = forward.seconds + waits[0], backward.seconds + waits[1]
    return StepTime(
        shape,
        plan,
        cluster,
        compute=m * (forward.compute + backward.compute),
        tensor=m * (forward.tensor + backward.tensor),
        context=m * (forward.context + backward.context),
        expert=m * (forward.expert + backward.expert),
        pipeline=2 * (plan.pp - 1) * once + m * sum(waits),  # filling and draining pass p − 1 times each, and nothing hides it
        bubble=bubble(plan, rank.others),
        data=data.seconds(shape, plan, cluster, constants, rank.held, *behind),
        optimizer=optimizer,
    )


class Rank(NamedTuple):
    """One micro-batch on a pipeline rank, all its stages together; the mean of the other ranks; the parameters it holds."""

    own: Both
    others: Both
    held: Held


def rank_costs(shape: ModelShape, plan: Plan, cluster: Cluster, constants: Constants) -> tuple[Rank, ...]:
    """One for each kind of pipeline rank: those with equal layers take as long."""
    return _rank_costs(shape, plan.layout, plan.local, cluster, constants, memory.rank_parameters(shape, plan))


@functools.lru_cache(maxsize=65536)
def _rank_costs(
    shape: ModelShape, layout: tuple, local: tuple, cluster: Cluster, constants: Constants, held: tuple[Held, ...]
) -> tuple[Rank, ...]:
    dealt, schedule = stages.dealt(shape, layout), layout[4]
    cost = {stage: passes.of_stage(shape, local, cluster, constants, stage) for stage in set(dealt)}
    costs = [cost[stage] for stage in dealt]
    if schedule == "dualpipe":  # half the micro-batches come from the other end
        costs = [passes.total([(0.5, a), (0.5, b)]) for a, b in zip(costs, reversed(costs), strict=True)]
    kinds, paired = Counter(costs), schedule.startswith("dualpipe") and plan_of(local).overlap
    each = dict.fromkeys(zip(costs, held, strict=True))
    # While the pipeline fills and drains, passes have no partner to hide behind.
    return tuple(Rank(hide_experts(own) if paired else own, _others(kinds, own), params) for own, params in each)


def _others(kinds: Counter[Both], own: Both) -> Both:
    others = kinds.total() - 1
    return passes.total([((count - (cost == own)) / others, cost) for cost, count in kinds.items()]) if others else Both()


def hide_experts(cost: Both) -> Both:
    """One micro-batch's forward runs beside another's backward: tokens travel to experts while the other does all the rest.

    The two are one piece of work then: forward and backward are given half of it each.
    """
    half = Pass(*(sum(pair) / 2 for pair in zip(cost.forward, cost.backward, strict=True)))
    half = half._replace(expert=max(0.0, half.expert - (half.seconds - half.expert)))
    return Both(half, half, cost.weight)


def bubble(plan: Plan, others: Both) -> float:
    """The closed form of equal stages, with the mean of the other ranks: filling and draining pass through each of them."""
    if plan.pp == 1:
        return 0.0
    forward, backward = others.forward.seconds, others.backward.seconds
    return pipeline.bubble(plan.schedule, plan.pp, plan.microbatches, plan.virtual, forward, backward, others.weight)


def message(shape: ModelShape, plan: Plan, cluster: Cluster, constants: Constants) -> float:
    """Seconds of one micro-batch's message from a stage to the next."""
    if plan.pp == 1:
        return 0.0
    return traffic.stage_message(shape, plan.local, plan.pp, plan.tp * plan.cp * plan.dp, cluster, constants)


def steady_waits(plan: Plan, own: Both, once: float) -> tuple[float, float]:
    """Seconds that a micro-batch's messages make a rank wait, forward and backward, while the pipeline is full.

    With overlap they travel while the rank has other micro-batches at work: it waits for what takes longer than these.
    """
    all_chunks = once * plan.stages / plan.pp
    if not plan.overlap:
        return all_chunks, all_chunks
    return max(0.0, all_chunks - own.forward.seconds), max(0.0, all_chunks - own.backward.seconds)
