"""The time of one training step, from the model's shape, the plan and the cluster alone.

Every kernel of a layer is charged its FLOPs and its bytes, every message α + n/β; what overlaps is hidden behind what it
overlaps with. The step takes as long as the pipeline rank that is done last, so the slowest stage sets the pace.

Assumed, besides the constants of kernels: all ranks are equally fast; reading data and writing checkpoints take no time,
and Python only what it takes to launch kernels (Stack.host); messages of different kinds do not share links, and
communication takes nothing from the processors but what the cluster reserves. In data parallelism gradients travel in
equal buckets, one after another, by rings or trees, whichever is faster; ZeRO-3's in units of a layer. With overlap,
what shows is the last bucket, or what backward is too short to hide if that is longer: data_parallel, network.
"""

import math
from dataclasses import dataclass

from manyranks.theory import checks, data_parallel, flops, layer, pace, stages, states
from manyranks.theory.architecture import ModelShape
from manyranks.theory.cluster import Cluster
from manyranks.theory.communicate import communicate
from manyranks.theory.compute import compute, site
from manyranks.theory.kernels import DEFAULT, Constants
from manyranks.theory.plan import Plan, check_imbalance


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
    slowest: int = 0  # the pipeline rank that sets the pace; the first, where several do

    def __repr__(self) -> str:
        return self.said()

    def said(self, checked: str = "") -> str:
        """Returns what is printed.

        checked: what published.confidence says of it, where that is known
        """
        parts = ", ".join(f"{name}={value:.4g}" for name, value in self.parts.items())
        warning = f", warning={self.warning!r}" if self.warning else ""
        sure = f"checked={checked!r}, " if checked else ""
        return f"StepTime(seconds={self.seconds:.4g}, {sure}mfu={self.mfu:.3f}, {parts}{warning})"

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
        """The tokens per second of all accelerators together."""
        return self.plan.tokens / self.seconds

    @property
    def mfu(self) -> float:
        """Counts what the model needs, so half of the scores. utilization has other conventions."""
        return self.utilization("causal")

    @property
    def hfu(self) -> float:
        """The hardware FLOPs utilization: mfu with what is computed again counted, too."""
        peak, plan = self.cluster.accelerator.flops, self.plan
        # Flash attention keeps no scores, so that selective recomputation has no core to run again.
        again = "none" if plan.flash and plan.recompute == "selective" else plan.recompute
        share = flops.hfu(self.shape, plan.seq, self.tokens_per_second, plan.gpus, peak, again)
        if plan.recompute != "selective" or not plan.framework.every_other:
            return share
        return share * (1 + layer.again_flops(self.shape, plan) / flops.per_token(self.shape, plan.seq))

    def utilization(self, convention: str) -> float:
        """MFU under a named convention of flops.CONVENTIONS."""
        peak = self.cluster.accelerator.flops
        return flops.mfu(self.shape, self.plan.seq, self.tokens_per_second, self.plan.gpus, peak, convention)

    @property
    def limit(self) -> str:
        """The part that takes most of the step apart from computing."""
        parts = {name: value for name, value in self.parts.items() if name != "compute"}
        return max(parts, key=parts.get)

    @property
    def warning(self) -> str:
        """The cost of groups of tensor-parallel ranks, or of those that cut an expert, that span several nodes; else empty.

        Compared with nodes that hold a whole group, on the same links: nothing else in the step changes. Where tp is
        smaller than a node but does not divide it, `seconds` is for a group inside a node; the warning says what the
        others add.
        """
        cuts = {self.plan.tp: "tp"} | ({} if self.plan.etp in (None, self.plan.tp) else {self.plan.etp: "etp"})
        return next((said for ranks, name in cuts.items() if (said := self._warning(name, ranks))), "")

    def _warning(self, name: str, ranks: int) -> str:
        node = self.cluster.node
        if self.cluster.torus or (node % ranks == 0 or self.plan.gpus <= node):
            return ""
        article = "an" if name == "etp" else "a"
        near = self.cluster.levels[0].link.name
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
    """Estimates the time of one step; memory.peak says whether the plan fits in memory.

    constants: the library's three, or others to see what they do
    gpus: checked against the plan, as cluster.gpus is
    imbalance: copies that come to the fullest expert-parallel rank ÷ their mean, in every layer with experts; a micro-batch
        takes as long as on that rank

    If tensor parallelism leaves the node, .warning of what comes back says what that costs. Raises ValueError where the plan
    does not fit the shape or the number of accelerators, for 8-bit products on a chip without them, and for an imbalance that
    cannot be.
    """
    checks.kinds(shape=shape, plan=plan, cluster=cluster)
    if constants is not DEFAULT:
        checks.are_constants(constants)
    checks.check_precision(plan, cluster)
    plan.check(shape, cluster.gpus if gpus is None else gpus)
    check_imbalance(shape, plan, imbalance)
    dealt = stages.deal(shape, plan.stage_plan)  # the layers of each rank
    held = states.hold(dealt)  # and its parameters
    rows, largest = states.rows(held, shape, plan), states.optimizer_bytes(held, plan)
    at = site(shape, plan.layer_plan, cluster, constants, imbalance)
    work = compute(dealt, at)  # seconds of a micro-batch
    sent = communicate(work, plan.stride, rows)  # seconds of calls, as if nothing hid them
    paced = pace.pipe(work, sent.passes, held, plan.microbatches, plan.virtual)  # a step of each rank, with what shows
    # Gradients and parameters travel while a rank computes, and while it waits for other messages.
    behind = [(each.held, *each.behind) for each in paced]
    travels = data_parallel.exposed(plan, cluster, constants, rows, sent.states, behind)
    travel, slowest = max(zip(travels, paced, strict=True), key=lambda both: both[0] + both[1].seconds)
    optimizer = data_parallel.optimizer_seconds(largest, plan, cluster, constants)
    return StepTime(shape, plan, cluster, *slowest.parts, travel, optimizer, constants, imbalance, slowest.rank)
