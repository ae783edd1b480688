"""The time of one training step, from the model's shape, the plan and the cluster alone.

Every kernel of a layer is charged by the roofline, every message by α + n/β; what overlaps is hidden behind what it overlaps
with; the slowest stage sets the pace of the pipeline.
"""

import functools
from dataclasses import dataclass
from typing import NamedTuple

from manyranks.theory import data, flops, passes, pipeline, stages, traffic
from manyranks.theory.architecture import ModelShape
from manyranks.theory.cluster import Cluster
from manyranks.theory.kernels import DEFAULT, Constants
from manyranks.theory.passes import Both
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
    ranks = rank_costs(shape, plan, cluster, constants)
    m, slowest = plan.microbatches, ranks.slowest
    forward, backward = slowest.forward, slowest.backward
    return StepTime(
        shape,
        plan,
        cluster,
        compute=m * (forward.compute + backward.compute),
        tensor=m * (forward.tensor + backward.tensor),
        context=m * (forward.context + backward.context),
        expert=m * (forward.expert + backward.expert),
        pipeline=messages(shape, plan, cluster, constants),
        bubble=bubble(plan, ranks),
        data=data.seconds(shape, plan, cluster, constants, ranks.forward, ranks.backward),
        optimizer=data.optimizer_seconds(shape, plan, cluster, constants),
    )


class Ranks(NamedTuple):
    """One micro-batch on the pipeline rank that takes the longest; means of the seconds of the other ranks, and of all
    ranks' forward and backward.
    """

    slowest: Both
    others: float
    forward: float
    backward: float


def rank_costs(shape: ModelShape, plan: Plan, cluster: Cluster, constants: Constants) -> Ranks:
    """One micro-batch on each pipeline rank, all its stages together."""
    return _rank_costs(shape, plan.layout, plan.local, cluster, constants)


@functools.lru_cache(maxsize=65536)
def _rank_costs(shape: ModelShape, layout: tuple, local: tuple, cluster: Cluster, constants: Constants) -> Ranks:
    dealt, schedule = stages.dealt(shape, layout), layout[4]
    cost = {stage: passes.of_stage(shape, local, cluster, constants, stage) for stage in set(dealt)}
    costs = [cost[stage] for stage in dealt]
    if schedule == "dualpipe":  # half the micro-batches come from the other end
        costs = [passes.total([(0.5, a), (0.5, b)]) for a, b in zip(costs, reversed(costs), strict=True)]
    if schedule.startswith("dualpipe") and plan_of(local).overlap:
        costs = [hide_experts(cost) for cost in costs]
    slowest = max(costs, key=lambda cost: cost.seconds)
    forward, backward = (sum(cost[i].seconds for cost in costs) for i in (0, 1))
    others = (forward + backward - slowest.seconds) / max(1, len(costs) - 1)
    return Ranks(slowest, others, forward / len(costs), backward / len(costs))


def hide_experts(cost: Both) -> Both:
    """One micro-batch's forward runs beside another's backward: tokens travel while the other computes."""
    forward, backward, weight = cost
    shown = max(0.0, forward.expert + backward.expert - forward.compute - backward.compute)
    return Both(forward._replace(expert=shown / 2), backward._replace(expert=shown / 2), weight)


def bubble(plan: Plan, ranks: Ranks) -> float:
    """The closed form of equal stages, in proportion to the mean of the other ranks: filling passes through each of them."""
    if plan.pp == 1:
        return 0.0
    forward, backward, weight = ranks.slowest
    whole = pipeline.bubble(plan.schedule, plan.pp, plan.microbatches, plan.virtual, forward.seconds, backward.seconds, weight)
    return whole * ranks.others / ranks.slowest.seconds


def messages(shape: ModelShape, plan: Plan, cluster: Cluster, constants: Constants) -> float:
    """Messages between stages that a rank waits for: with overlap those of filling and draining, without all of them."""
    if plan.pp == 1:
        return 0.0
    once = traffic.stage_message(shape, plan.local, plan.pp, plan.tp * plan.cp * plan.dp, cluster, constants)
    chunks = plan.stages / plan.pp
    waits = 2 * (plan.pp - 1) if plan.overlap else 2 * (plan.pp - 1) + 2 * chunks * plan.microbatches
    return once * waits
