"""The time of one training step, from the model's shape, the plan and the cluster alone.

Every kernel of a layer is charged its FLOPs and its bytes, every message α + n/β; what overlaps is hidden behind what it
overlaps with. The step takes as long as the pipeline rank that is done last, so the slowest stage sets the pace.

Assumed, beside the constants of kernels: all ranks are equally fast; reading data, writing checkpoints and Python take no
time; messages of different kinds do not share links, and communication takes nothing from the processors but what the cluster
reserves. Of data parallelism: gradients travel in equal buckets of 25 MiB at least, one after another, by rings or trees,
whichever is faster; with overlap the last bucket is exposed, and what backward is too short to hide: data, traffic.fastest.
"""

import functools
import math
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from manyranks.theory import checked, checks, data, flops, layer, memory, passes, pipeline, stages, traffic
from manyranks.theory.architecture import ModelShape
from manyranks.theory.checked import Checked
from manyranks.theory.cluster import Cluster
from manyranks.theory.kernels import DEFAULT, Constants
from manyranks.theory.memory import Held
from manyranks.theory.passes import Both, Pass
from manyranks.theory.plan import Layout, Local, Plan


@dataclass(frozen=True, slots=True, repr=False)
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
    constants: Constants = DEFAULT
    imbalance: float = 1.0

    def __repr__(self) -> str:
        parts = ", ".join(f"{name}={value:.4g}" for name, value in self.parts.items())
        warning = f", warning={self.warning!r}" if self.warning else ""
        return f"StepTime(seconds={self.seconds:.4g}, checked={str(self.checked)!r}, mfu={self.mfu:.3f}, {parts}{warning})"

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
        """Counts what the model needs, so half of the scores. utilisation has other conventions."""
        return self.utilisation("causal")

    @property
    def hfu(self) -> float:
        """As mfu, but counts what is computed again, too."""
        peak, plan = self.cluster.accelerator.flops, self.plan
        # Flash attention keeps no scores, so that selective recomputation has no core to run again.
        again = "none" if plan.flash and plan.recompute == "selective" else plan.recompute
        share = flops.hfu(self.shape, plan.seq, self.tokens_per_second, plan.gpus, peak, again)
        if plan.recompute != "selective" or not plan.framework.every_other:
            return share
        return share * (1 + layer.again_flops(self.shape, plan) / flops.per_token(self.shape, plan.seq))

    def utilisation(self, convention: str) -> float:
        """MFU under a named convention of flops.CONVENTIONS."""
        peak = self.cluster.accelerator.flops
        return flops.mfu(self.shape, self.plan.seq, self.tokens_per_second, self.plan.gpus, peak, convention)

    @property
    def limit(self) -> str:
        """What takes most of the step beside computing."""
        parts = {name: value for name, value in self.parts.items() if name != "compute"}
        return max(parts, key=parts.get)

    @property
    def checked(self) -> Checked:
        """The error of the published runs that are closest to this prediction, or why none is close: "± 8% (12 runs)"."""
        return checked.against_runs(self.shape, self.plan, self.cluster, self.constants)

    @property
    def warning(self) -> str:
        """The cost of groups of tensor-parallel ranks, or of those that cut an expert, that span several nodes; else empty.

        Compared with nodes that hold a whole group, on the same links: nothing else in the step changes by that. Where tp is
        smaller than a node but does not divide it, `seconds` is that of a group inside a node; the warning says what the others
        add.
        """
        cuts = {self.plan.tp: "tp"} | ({} if self.plan.etp in (None, self.plan.tp) else {self.plan.etp: "etp"})
        return next((said for ranks, name in cuts.items() if (said := self._warning(name, ranks))), "")

    def _warning(self, name: str, ranks: int) -> str:
        node = self.cluster.node
        if self.cluster.torus or (node % ranks == 0 or self.plan.gpus <= node):
            return ""
        article, near = "an" if name == "etp" else "a", self.cluster.levels[0].link.name
        keep = f"{article} {name} that divides {node} keeps tensor parallelism on {near}"
        if ranks < node:
            lost = self._with_nodes_of(math.gcd(ranks, node)).tensor - self.tensor
            return f"{name}={ranks} does not divide a node of {node}: groups on two nodes add {lost:.3g} s per step; {keep}"
        lost = self.seconds - self._with_nodes_of(ranks).seconds
        share, where = lost / self.seconds, f"{math.ceil(ranks / node)} nodes of {node}"
        return f"{name}={ranks} lies on {where}, which costs {lost:.3g} s per step ({share:.0%}); {keep}"

    def _with_nodes_of(self, accelerators: int) -> "StepTime":
        other = self.cluster.with_nodes_of(accelerators)
        return estimate(self.shape, self.plan, other, self.constants, self.plan.gpus, self.imbalance)


def estimate(
    shape: ModelShape,
    plan: Plan,
    cluster: Cluster,
    constants: Constants = DEFAULT,
    gpus: int | None = None,
    imbalance: float = 1.0,
) -> StepTime:
    """The time of one step.

    constants: the library's three, or others to see what they do. gpus: checked against the plan, as cluster.gpus is.
    imbalance: copies that come to the fullest expert-parallel rank ÷ their mean, in every layer with experts; a micro-batch
    takes as long as on that rank. Raises ValueError where the plan does not fit the shape or the number of accelerators, for
    8-bit products on a chip without them, and for an imbalance that cannot be. .warning of what comes back says what it costs
    that tensor parallelism leaves the node. Whether the plan fits in memory, memory.peak says.
    """
    checks.is_shape(shape)
    checks.is_plan(plan)
    checks.is_cluster(cluster)
    if constants is not DEFAULT:
        checks.are_constants(constants)
    checks.has_8_bits(plan, cluster)
    plan.check(shape, cluster.gpus if gpus is None else gpus)
    passes.check_imbalance(shape, plan, imbalance)
    stride, own = plan.tp * plan.cp * plan.dp, (plan.microbatches, plan.virtual)
    paces = _paces(shape, plan.layout, plan.local, stride, *own, cluster, constants, imbalance)
    # Gradients and parameters travel while a rank computes, and while it waits for other messages.
    travels = data.seconds(shape, plan, cluster, constants, [(pace.held, *pace.behind) for pace in paces])
    travel, pace = max(zip(travels, paces, strict=True), key=lambda both: both[0] + both[1].seconds)
    optimizer = data.optimizer_seconds([pace.held for pace in paces], plan, cluster, constants)
    return StepTime(shape, plan, cluster, *pace.parts, travel, optimizer, constants, imbalance)


class Pace(NamedTuple):
    """A step as one pipeline rank sees it, whatever ZeRO does: seconds by what they are spent on, in StepTime's order; a
    micro-batch's forward and backward, under which gradients and parameters travel; the parameters that the rank holds.
    """

    parts: tuple[float, ...]
    seconds: float
    behind: tuple[float, float]
    held: Held


@functools.lru_cache(maxsize=65536)
def _paces(
    shape: ModelShape,
    layout: Layout,
    local: Local,
    stride: int,
    m: int,
    virtual: int,
    cluster: Cluster,
    constants: Constants,
    imbalance: float = 1.0,
) -> list[Pace]:
    """One for each kind of pipeline rank: those with equal layers take as long."""
    p, schedule = layout.pp, layout.schedule
    dealt, held = stages.dealt(shape, layout), memory.held_by_rank(shape, layout)
    kinds = {stage: passes.of_stage(shape, local, cluster, constants, stage, imbalance) for stage in set(dealt)}
    costs = [kinds[stage] for stage in dealt]
    if schedule == "dualpipe":  # half the micro-batches come from the other end
        costs = [passes.total([(0.5, a), (0.5, b)]) for a, b in zip(costs, reversed(costs), strict=True)]
    message = 0.0
    if p > 1:
        message = traffic.stage_message(shape, local, cluster.route(p, stride), cluster.route(local.tp), constants)
    counted, paired, found = Counter(costs), schedule.startswith("dualpipe") and local.overlap, []
    for own, parameters in dict.fromkeys(zip(costs, held, strict=True)):
        # The bubble is the closed form of equal stages, with the mean of the other ranks: it passes through each of them.
        # While the pipeline fills and drains, passes have no partner to hide behind.
        others = Mean.of([(count - (each == own), each) for each, count in counted.items()])
        bubble = pipeline.bubble(schedule, p, m, virtual, *others) if p > 1 else 0.0
        forward, backward, _ = own = hide_experts(own) if paired else own
        waits = steady_waits(own, message * layout.stages / p, local.overlap)
        passes_of_m = [m * (f + b) for f, b in zip(forward, backward, strict=True)]
        # Filling and draining pass p − 1 times each, and nothing hides their messages.
        parts = (*passes_of_m, 2 * (p - 1) * message + m * sum(waits), bubble)
        found.append(Pace(parts, sum(parts), (forward.seconds + waits[0], backward.seconds + waits[1]), parameters))
    return found


class Mean(NamedTuple):
    """Mean seconds of a micro-batch's forward and backward on some ranks, and of what of the backward a schedule may move."""

    forward: float
    backward: float
    weight: float

    @classmethod
    def of(cls, counted: list[tuple[int, Both]]) -> "Mean":
        n = max(1, sum(count for count, _ in counted))
        forward = sum(count * cost.forward.seconds for count, cost in counted)
        backward = sum(count * cost.backward.seconds for count, cost in counted)
        return cls(forward / n, backward / n, sum(count * cost.weight for count, cost in counted) / n)


def hide_experts(cost: Both) -> Both:
    """One micro-batch's forward runs beside another's backward: tokens travel to experts while the other does all the rest.

    The two are one piece of work then: forward and backward are given half of it each.
    """
    half = Pass(*(sum(pair) / 2 for pair in zip(cost.forward, cost.backward, strict=True)))
    half = half._replace(expert=max(0.0, half.expert - (half.seconds - half.expert)))
    return Both(half, half, cost.weight)


def steady_waits(own: Both, once: float, overlap: bool) -> tuple[float, float]:
    """Seconds that a micro-batch's messages make a rank wait, forward and backward, while the pipeline is full.

    once: of a micro-batch's messages on all the rank's stages, one way. With overlap they travel while the rank has other
    micro-batches at work: it waits for what takes longer than these.
    """
    if not overlap:
        return once, once
    return max(0.0, once - own.forward.seconds), max(0.0, once - own.backward.seconds)
