"""Seconds of one micro-batch's way through the layers of one rank: computing, and communication that nothing hides."""

import functools
from typing import NamedTuple

from manyranks.theory import checks, kernels, layer, traffic
from manyranks.theory.architecture import ModelShape
from manyranks.theory.cluster import Cluster
from manyranks.theory.kernels import DEFAULT, Constants, Kernel
from manyranks.theory.plan import Local, Plan
from manyranks.theory.stages import Stage


class Pass(NamedTuple):
    """Seconds of forward or of backward."""

    compute: float = 0.0
    tensor: float = 0.0
    context: float = 0.0
    expert: float = 0.0

    @property
    def seconds(self) -> float:
        return self.compute + self.tensor + self.context + self.expert


class Both(NamedTuple):
    """Forward, backward, and the seconds of weight gradients that a schedule may move: those that hide no communication."""

    forward: Pass = Pass()
    backward: Pass = Pass()
    weight: float = 0.0

    @property
    def seconds(self) -> float:
        return self.forward.seconds + self.backward.seconds


def total(weighted: list[tuple[float, Both]]) -> Both:
    """The sum of passes, each times its weight."""
    sums = [0.0] * 9
    for w, (forward, backward, weight) in weighted:
        sums = [x + w * y for x, y in zip(sums, (*forward, *backward, weight), strict=True)]
    return Both(Pass(*sums[:4]), Pass(*sums[4:8]), sums[8])


def of_layer(
    shape: ModelShape,
    plan: Plan,
    cluster: Cluster,
    constants: Constants = DEFAULT,
    moe: bool = False,
    imbalance: float = 1.0,
) -> Both:
    """One micro-batch through one layer, on each of its tensor-, context- and expert-parallel ranks.

    moe: whether it is a layer with experts; imbalance: of the expert-parallel ranks, see check_imbalance: the seconds are those
    of the fullest, for which the others wait. Raises ValueError where the plan does not fit the shape.
    """
    checks.is_shape(shape)
    checks.is_plan(plan)
    checks.is_cluster(cluster)
    plan.check(shape)
    if moe and not shape.moe_layers:
        raise ValueError(f"moe=True: {shape.name} has no layer with experts")
    check_imbalance(shape, plan, imbalance)
    return _layer(shape, plan.local, cluster, constants, moe, imbalance)


def check_imbalance(shape: ModelShape, plan: Plan, imbalance: float) -> None:
    """imbalance: copies that come to the fullest of e expert-parallel ranks ÷ their mean.

    Raises ValueError below 1 and for more than layer.most_imbalance.
    """
    most = layer.most_imbalance(shape.experts, shape.top_k, plan.ep) if shape.experts else 1.0
    if type(imbalance) not in (int, float) or not 1 <= imbalance <= most:
        can = f"1 to {most:g} times the mean load" if most > 1 else "the mean load: give 1"
        raise ValueError(f"imbalance={imbalance!r}: with ep={plan.ep} the fullest rank has {can}")


@functools.lru_cache(maxsize=65536)
def of_stage(
    shape: ModelShape, local: Local, cluster: Cluster, constants: Constants, stage: Stage, imbalance: float = 1.0
) -> Both:
    """One micro-batch on a rank that holds these layers. local: Plan.local."""
    parts = [
        (stage.dense, _layer(shape, local, cluster, constants, False)),
        (stage.moe, _layer(shape, local, cluster, constants, True, imbalance)) if stage.moe else (0, Both()),
    ]
    if stage.head or stage.mtp:
        parts.append((stage.head + stage.mtp, _head(shape, local, cluster, constants)))
    if stage.mtp:
        last = shape.is_moe(shape.layers - 1)
        parts.append((stage.mtp, _layer(shape, local, cluster, constants, last, imbalance if last else 1.0)))
    if stage.embedding:
        parts.append((1, _embedding(shape, local, cluster, constants)))
    return total([part for part in parts if part[0]])


@functools.lru_cache(maxsize=8192)
def _layer(shape: ModelShape, plan: Local, cluster: Cluster, constants: Constants, moe: bool, imbalance: float = 1.0) -> Both:
    forward, backward = (pass_(shape, plan, moe, imbalance) for pass_ in (layer.forward, layer.backward))
    seconds = functools.partial(_seconds, plan=plan, cluster=cluster, constants=constants)
    weight = seconds([k for k in forward if k.flops and k.part != "core"])
    core = [k for k in forward if k.part == "core"]
    attention = seconds(core), seconds([gradient for kernel in core for gradient in layer.gradients(kernel, plan)])
    routes = traffic.Routes.of(plan, cluster)
    alone, tensor = (traffic.tensor(shape, plan, routes, constants, moe, w, imbalance) for w in (0.0, weight))
    free = max(0.0, weight - (alone[1] - tensor[1]))
    context = traffic.context(shape, plan, routes, constants, attention)
    expert = traffic.expert(shape, plan, routes, constants, imbalance) if moe else (0.0, 0.0)
    if plan.recompute == "full":  # what forward says to others, it says again
        tensor, context, expert = ((f, b + f) for f, b in (tensor, context, expert))
    return Both(
        Pass(seconds(forward), tensor[0], context[0], expert[0]),
        Pass(seconds(backward), tensor[1], context[1], expert[1]),
        free,
    )


@functools.lru_cache(maxsize=4096)
def _head(shape: ModelShape, plan: Local, cluster: Cluster, constants: Constants) -> Both:
    forward = layer.head(shape, plan)
    backward = [gradient for kernel in forward for gradient in layer.gradients(kernel, plan)]
    seconds = functools.partial(_seconds, plan=plan, cluster=cluster, constants=constants)
    tensor = traffic.head(shape, plan, traffic.Routes.of(plan, cluster), constants)
    return Both(Pass(seconds(forward), tensor[0]), Pass(seconds(backward), tensor[1]), seconds([k for k in forward if k.flops]))


@functools.lru_cache(maxsize=4096)
def _embedding(shape: ModelShape, plan: Local, cluster: Cluster, constants: Constants) -> Both:
    once = _seconds([layer.embedding(shape, plan)], plan, cluster, constants)
    tensor = traffic.embedding(shape, plan, traffic.Routes.of(plan, cluster), constants)
    return Both(Pass(once, tensor[0]), Pass(2 * once, tensor[1]))


def _seconds(work: list[Kernel], plan: Local, cluster: Cluster, constants: Constants) -> float:
    """Of the chip, or of the host where it takes longer to start the kernels than the chip to run them."""
    chip = sum(kernels.seconds(kernel, cluster.accelerator, constants, cluster.reserved) for kernel in work)
    return max(chip, len(work) * plan.framework.host * constants.overhead)
