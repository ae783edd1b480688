"""The time of a micro-batch and of a step on each rank of a pipeline: computing, and communication that nothing hides."""

import functools
from collections import Counter
from typing import NamedTuple

from manyranks.theory import activations, checks, communicate, compute, pipeline, stages, states
from manyranks.theory.architecture import ModelShape
from manyranks.theory.calls import BACKWARD, FORWARD, REGATHER, WITH_WEIGHT
from manyranks.theory.cluster import Cluster
from manyranks.theory.communicate import BETWEEN, Passing, Timed
from manyranks.theory.compute import Busy, Site, Work
from manyranks.theory.kernels import DEFAULT, Constants
from manyranks.theory.network import Hops, Seconds
from manyranks.theory.plan import LayerPlan, Plan, check_imbalance
from manyranks.theory.stages import Stage
from manyranks.theory.states import Held, RankParameters


class Pass(NamedTuple):
    """Seconds of forward or of backward.

    host: of the CPU that launches all of it while the chip works
    """

    compute: float = 0.0
    tensor: float = 0.0
    context: float = 0.0
    expert: float = 0.0
    host: float = 0.0

    @property
    def seconds(self) -> float:
        return max(self.chip, self.host)

    @property
    def chip(self) -> float:
        return self.compute + self.tensor + self.context + self.expert

    @property
    def parts(self) -> tuple[float, ...]:
        """The four kinds, which add up to the seconds: what the chip waits for its host counts as computing."""
        return (self.compute + self.seconds - self.chip, *self[1:4])


class ForwardBackward(NamedTuple):
    """A micro-batch's forward and backward.

    weight, host_weight: of backward, the weights' gradients that a schedule may run later and that hide no communication, on
        the chip and on its host
    """

    forward: Pass = Pass()
    backward: Pass = Pass()
    weight: float = 0.0
    host_weight: float = 0.0

    @property
    def seconds(self) -> float:
        return self.forward.seconds + self.backward.seconds

    def apart(self) -> "ForwardBackward":
        """Returns the same with weight gradients run apart: each half of backward takes at least its host's time."""
        weight = max(self.weight, self.host_weight)
        inputs = max(self.backward.chip - self.weight, self.backward.host - self.host_weight)
        return ForwardBackward(self.forward, self.backward._replace(host=inputs + weight), weight, weight)


def total(counted: list[tuple[float, ForwardBackward]]) -> ForwardBackward:
    """The sum of passes, each as often as it is counted."""
    n = len(Pass._fields)
    sums = [0.0] * (2 * n + 2)
    for count, (forward, backward, *weights) in counted:
        sums = [x + count * y for x, y in zip(sums, (*forward, *backward, *weights), strict=True)]
    return ForwardBackward(Pass(*sums[:n]), Pass(*sums[n : 2 * n]), *sums[2 * n :])


def of_layer(
    shape: ModelShape,
    plan: Plan,
    cluster: Cluster,
    constants: Constants = DEFAULT,
    moe: bool = False,
    imbalance: float = 1.0,
) -> ForwardBackward:
    """Times one micro-batch through one layer, on each of its tensor-, context- and expert-parallel ranks.

    moe: whether it is a layer with experts
    imbalance: of the expert-parallel ranks, see plan.check_imbalance: the seconds are for the fullest rank, which all
        others wait for
    Raises ValueError where the plan does not fit the shape.
    """
    checks.kinds(shape=shape, plan=plan, cluster=cluster)
    plan.check(shape)
    if moe and not shape.moe_layers:
        raise ValueError(f"moe=True: {shape.name} has no layer with experts")
    check_imbalance(shape, plan, imbalance)
    return _of_part(compute.site(shape, plan.layer_plan, cluster, constants, imbalance), "moe" if moe else "dense")


class ExpertLayerTime(NamedTuple):
    """The times of one micro-batch in one layer with experts.

    fullest: the rank for which all wait
    balanced: any rank, if all had the mean load
    """

    fullest: ForwardBackward
    balanced: ForwardBackward

    @property
    def forward(self) -> float:
        return self.fullest.forward.seconds

    @property
    def backward(self) -> float:
        return self.fullest.backward.seconds

    @property
    def seconds(self) -> float:
        return self.fullest.seconds

    @property
    def waiting(self) -> float:
        """Seconds that a rank with the mean load waits, forward and backward."""
        return self.fullest.seconds - self.balanced.seconds


def expert_layer(shape: ModelShape, plan: Plan, cluster: Cluster, imbalance: float = 1.0) -> ExpertLayerTime:
    """Attention and experts of one layer, where the fullest rank has `imbalance` times the mean load.

    The products of its experts and the bytes that it receives and sends back are so many times a balanced load's; no message
    hides behind another micro-batch, as under DualPipe (step.estimate does that). Raises ValueError for a plan that does not
    fit, a shape without experts and an imbalance that cannot be.
    """
    found = (of_layer(shape, plan, cluster, moe=True, imbalance=each) for each in (imbalance, 1.0))
    return ExpertLayerTime(*found)


def of_ranks(shape: ModelShape, plan: Plan, cluster: Cluster, constants: Constants = DEFAULT) -> list[ForwardBackward]:
    """Times one micro-batch on each pipeline rank. Raises ValueError where the plan does not fit the shape."""
    plan.check(shape)
    dealt = stages.deal(shape, plan.stage_plan)
    work = compute.compute(dealt, compute.site(shape, plan.layer_plan, cluster, constants))
    rows = states.rows(states.hold(dealt), shape, plan)
    found = of_stages(work, communicate.communicate(work, plan.stride, rows).passes)
    return [found[stage] for stage in dealt.ranks]


def of_stages(work: Work, sent: Timed) -> dict[Stage, ForwardBackward]:
    """Times one micro-batch on each kind of pipeline rank."""
    both = {name: (busy, sent.items[name]) for name, busy in work.parts.items()}
    found = {stage: _of_stage(tuple([(count, *both[name]) for count, name in own])) for stage, own in work.dealt.parts.items()}
    return {stage: fetching(work.site, stage, own) for stage, own in found.items()} if work.site.plan.offload_layers else found


def fetching(at: Site, stage: Stage, own: ForwardBackward) -> ForwardBackward:
    """The same where layers' activations go to the host while forward computes, and come back while backward does.

    Source of the overlap: Megatron-LM's cpu_offloading_num_layers, by Transformer Engine's cpu_offload.
    """
    bandwidth = at.speeds.cluster.host * at.speeds.constants.bandwidth
    takes = activations.offloaded(at.shape, at.plan, stage) / bandwidth
    longer = (each._replace(compute=each.compute + max(0.0, takes - each.chip)) for each in own[:2])
    return ForwardBackward(*longer, *own[2:])


@functools.lru_cache(maxsize=16384)
def of_model(at: Site) -> ForwardBackward:
    """Times one micro-batch in the whole model, as if one pipeline rank had all of it."""
    return total([(count, _of_part(at, part)) for count, part in stages.parts_of_model(at.shape)])


def _of_part(at: Site, part: str) -> ForwardBackward:
    return shown(compute.of_part(at.of(part), part), communicate.seconds(Passing(at.of_calls(part), part), at.speeds))


@functools.lru_cache(maxsize=65536)
def _of_stage(parts: tuple[tuple[int, Busy, Seconds], ...]) -> ForwardBackward:
    return total([(count, shown(busy, sent)) for count, busy, sent in parts])


@functools.lru_cache(maxsize=16384)
def shown(busy: Busy, sent: Seconds) -> ForwardBackward:
    """A part of a stage: what it computes, and what shows of its calls.

    With full recomputation, backward makes forward's calls once more.
    """
    plan = busy.site.plan
    if busy.part in ("head", "embedding"):
        forward, backward = sent.get(("tp", FORWARD), 0.0), sent.get(("tp", BACKWARD), 0.0) + sent.get(("tp", WITH_WEIGHT), 0.0)
        if not (plan.overlap and plan.overlap_tensor):  # else behind the input's gradient, longer than a gather
            backward += sent.get(("tp", REGATHER), 0.0)
        passes = (Pass(busy.forward, forward, host=busy.host), Pass(busy.backward, backward, host=busy.host_backward))
        return ForwardBackward(*passes, busy.weight, busy.host_weight)
    alone, tensor = (tensor_shown(plan, sent, behind) for behind in (0.0, busy.weight))
    free = max(0.0, busy.weight - (alone[1] - tensor[1]))
    context = context_shown(plan, sent, (busy.core, busy.core_backward))
    expert = sent.get(("ep", FORWARD), 0.0), sent.get(("ep", BACKWARD), 0.0)
    if plan.recompute == "full":
        tensor, context, expert = ((there, back + there) for there, back in (tensor, context, expert))
    each = zip((busy.forward, busy.backward), tensor, context, expert, (busy.host, busy.host_backward), strict=True)
    moved = busy.host_weight * free / busy.weight if busy.weight else 0.0
    return ForwardBackward(*(Pass(*seconds) for seconds in each), free, moved)


def tensor_shown(plan: LayerPlan, sent: Seconds, behind: float) -> tuple[float, float]:
    """Times one layer's tensor parallelism, each way. behind: seconds of weights' gradients, behind which some calls hide.

    A stack that cuts a product and its gather or sum in as many chunks as ranks shows one chunk of each.
    """
    forward, backward, with_weight, again = (sent.get(("tp", when), 0.0) for when in (FORWARD, BACKWARD, WITH_WEIGHT, REGATHER))
    if plan.overlap and plan.overlap_tensor and plan.framework.chunks:
        forward, backward = forward / plan.tp, backward / plan.tp
    if not (plan.overlap and plan.overlap_tensor):
        return forward, backward + with_weight + again
    return forward, backward + max(0.0, again + with_weight - behind)


def context_shown(plan: LayerPlan, sent: Seconds, core: tuple[float, float]) -> tuple[float, float]:
    """Times one layer's context parallelism, each way.

    core: seconds of its attention, whose blocks hide a ring's messages; what is gathered or dealt comes before and after it
    """
    found = [sent.get(("cp", when), 0.0) for when in (FORWARD, BACKWARD)]
    if plan.context != "ring" or plan.cp == 1:
        return tuple(found)
    blocks = [(seconds / plan.cp if plan.overlap else 0.0,) * plan.cp for seconds in core]
    return tuple(Hops(*each).exposed for each in zip(blocks, found, strict=True))


class RankStep(NamedTuple):
    """A step as a pipeline rank sees it, whatever ZeRO does.

    rank: the first of those that take as long and hold as much
    parts: seconds by what they are spent on, in StepTime's order
    behind: seconds of a micro-batch's forward and backward, to hide gradients and parameters behind
    held: the parameters of the rank
    """

    rank: int
    parts: tuple[float, ...]
    seconds: float
    behind: tuple[float, float]
    held: Held


@functools.lru_cache(maxsize=65536)
def pipe(work: Work, sent: Timed, held: RankParameters, m: int, virtual: int) -> list[RankStep]:
    """Returns the step of one rank per kind: those with equal layers take as long.

    held: the parameters of each rank
    """
    plan, overlap, p = work.dealt.plan, work.site.plan.overlap, work.dealt.plan.pp
    kinds = of_stages(work, sent)
    costs = [kinds[stage] for stage in work.dealt.ranks]
    if p > 1 and plan.schedule in pipeline.SPLIT:
        costs = [cost.apart() for cost in costs]
    if plan.schedule == "dualpipe":  # half the micro-batches come from the other end
        costs = [total([(0.5, a), (0.5, b)]) for a, b in zip(costs, reversed(costs), strict=True)]
    message = sum(sent.items[BETWEEN].values()) if p > 1 else 0.0
    paired = hides_experts(work.site.plan, plan.schedule, p, m, virtual)
    counted = Counter(costs)
    each = [Kind(count, cost.forward.seconds, cost.backward.seconds, cost.weight) for cost, count in counted.items()]
    index = {cost: i for i, cost in enumerate(counted)}
    firsts = {}
    for rank, kind in enumerate(zip(costs, held.ranks, strict=True)):
        firsts.setdefault(kind, rank)
    found = []
    for (own, parameters), rank in firsts.items():
        # The bubble is the closed form of equal stages, with the mean of the other ranks: it passes through each of them.
        # While the pipeline fills and drains, passes have no partner to hide behind.
        others = mean_of_others(each, index[own])
        own = hide_experts(own) if paired else own
        waits = steady_waits(own, message * plan.stages / p, overlap)
        passes_of_m = [m * (f + b) for f, b in zip(own.forward.parts, own.backward.parts, strict=True)]
        bubble = pipeline.bubble(plan.schedule, p, m, virtual, *others) if p > 1 else 0.0
        # Filling and draining pass p − 1 times each, and nothing hides their messages.
        parts = (*passes_of_m, 2 * (p - 1) * message + m * sum(waits), bubble)
        behind = own.forward.seconds + waits[0], own.backward.seconds + waits[1]
        found.append(RankStep(rank, parts, sum(parts), behind, parameters))
    return found


class Kind(NamedTuple):
    """Ranks that take as long.

    forward, backward, weight: seconds of a micro-batch, weight of what a schedule may move
    """

    count: int
    forward: float
    backward: float
    weight: float


def mean_of_others(kinds: list[Kind], own: int) -> tuple[float, float, float]:
    """Mean forward, backward and weight of all other ranks than one of this kind.

    own: its index in the list
    """
    n = forward = backward = weight = 0
    for index, kind in enumerate(kinds):
        count = kind.count - 1 if index == own else kind.count
        n += count
        forward += count * kind.forward
        backward += count * kind.backward
        weight += count * kind.weight
    n = max(1, n)
    return forward / n, backward / n, weight / n


def hides_experts(plan: LayerPlan, schedule: str, p: int, m: int, virtual: int) -> bool:
    """Returns whether one micro-batch's forward runs together with another's backward.

    It does under DualPipe, and where the stack does so without a pipeline or with interleaved stages.
    """
    if not plan.overlap or m == 1:
        return False
    if p > 1 and (schedule.startswith("dualpipe") or (virtual > 1 and plan.framework.hides_experts)):
        return True
    return p == 1 and plan.framework.hides_experts == "always"


def hide_experts(cost: ForwardBackward) -> ForwardBackward:
    """Runs one micro-batch's forward together with another's backward.

    Tokens of one travel to experts while the other does all the rest. The two are one piece of work then: forward and backward
    are given half of it each.
    """
    half = Pass(*(sum(pair) / 2 for pair in zip(cost.forward, cost.backward, strict=True)))
    half = half._replace(expert=max(0.0, half.expert - (half.chip - half.expert)))
    return ForwardBackward(half, half, cost.weight, cost.host_weight)


def steady_waits(own: ForwardBackward, once: float, overlap: bool) -> tuple[float, float]:
    """Seconds that a micro-batch's messages make a rank wait, forward and backward, while the pipeline is full.

    once: of a micro-batch's messages on all the rank's stages, one way. With overlap they travel while the rank has other
    micro-batches at work: it waits for what takes longer than these.
    """
    if not overlap:
        return once, once
    return max(0.0, once - own.forward.seconds), max(0.0, once - own.backward.seconds)
