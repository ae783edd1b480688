"""What data parallelism sends in a step, and the optimizer: gradients reduced, parameters gathered, states updated.

Gradients travel in buckets, each as large as a layer's or larger, so that it has BUCKET bytes at least; ZeRO-1 and ZeRO-2
gather the updated parameters in the same buckets, ZeRO-3 in units of one layer. Buckets are equal, one travels at a time, and
each by the fastest algorithm (traffic.fastest).
"""

import functools
from collections.abc import Iterable
from typing import NamedTuple

from manyranks.theory import memory, traffic
from manyranks.theory.architecture import ModelShape
from manyranks.theory.cluster import Cluster
from manyranks.theory.kernels import Constants
from manyranks.theory.memory import Held
from manyranks.theory.plan import Plan, Recipe

BUCKET = 25 * 2**20  # bytes that close a bucket: PyTorch DDP's default bucket_cap_mb; arXiv 2006.15704, section 3.2.3


class Times(NamedTuple):
    """How often in a step: gradients reduced, parameters gathered for forward and again for backward."""

    reduces: int
    forward: int
    backward: int


def times(plan: Plan) -> Times:
    """ZeRO-0 and ZeRO-1 reduce once a step; from ZeRO-2 on each micro-batch's gradients are reduced; ZeRO-3 gathers the
    parameters of each unit before its forward and, where they were freed, before its backward.

    With a pipeline, units that are not freed after forward stay for the whole step (Llama 3, arXiv 2407.21783, section 3.3.2).
    Source: arXiv 1910.02054, sections 5 and 7; PyTorch FSDP, arXiv 2304.11277, section 3.
    """
    m = plan.microbatches
    if plan.zero < 3:
        return Times(m if plan.zero == 2 else 1, min(plan.zero, 1), 0)
    reduces = 1 if plan.pp > 1 and plan.framework.reduce_once else m
    if plan.reshard_after_forward:
        return Times(reduces, m, m)
    return Times(reduces, m if plan.pp == 1 else 1, 0)


def sent_bytes(shape: ModelShape | float, plan: Plan) -> float:
    """Bytes that a rank sends in a step for its parameters and gradients, around rings; of all ranks, the one with most.

    With one micro-batch and N ranks: 2, 2, 2 and 3 times (N−1)/N·Φ elements for ZeRO 0 to 3.
    """
    return max(_sent_by(held, plan) for held in set(memory.rank_parameters(shape, plan)))


def _sent_by(held: Held, plan: Plan) -> float:
    often, total = times(plan), 0.0
    for elements, group in zip(held, groups(plan), strict=True):
        inner = (group.shards - 1) / group.shards * elements
        outer = 2 * (group.replicas - 1) / group.replicas * elements / group.shards
        reduced = _reduced(plan.recipe)
        if plan.zero == 0:
            total += 2 * (group.ranks - 1) / group.ranks * elements * reduced
        else:
            gathers = often.forward + often.backward
            total += often.reduces * reduced * (inner + outer) + gathers * plan.recipe.parameters * inner
    return total


class Group(NamedTuple):
    """The ranks with a copy of the same parameters: `shards` of them share one copy of the states; stride between them."""

    ranks: int
    shards: int
    stride: int

    @property
    def replicas(self) -> int:
        return self.ranks // self.shards


def groups(plan: Plan) -> tuple[Group, Group]:
    """The group of the parameters that all data-parallel ranks have, and that of an expert's (edp ranks: see Plan.etp)."""
    return _groups(plan.dp * plan.cp, plan.shards, plan.tp, plan.expert_ranks, plan.expert_shards, plan.expert_tp * plan.ep)


@functools.lru_cache(maxsize=16384)
def _groups(ranks: int, shards: int, tp: int, *of_experts: int) -> tuple[Group, Group]:
    return Group(ranks, shards, tp), Group(*of_experts)


def seconds(
    shape: ModelShape, plan: Plan, cluster: Cluster, constants: Constants, ranks: Iterable[tuple[Held, float, float]]
) -> list[float]:
    """What of the gradients' and parameters' travel nothing hides, on each of these ranks.

    ranks: the parameters that each holds, and the seconds of one micro-batch's forward and backward on it. With overlap,
    gradients hide behind a backward and parameters behind a forward; the last bucket of backward, or the first of forward,
    cannot. Without, the same buckets travel after backward and before forward. Assumed: backward fills buckets at an even pace,
    and what travels does not slow down what computes.
    """
    often, both, recipe, layers = times(plan), groups(plan), plan.recipe, max(1, shape.layers // plan.pp)
    copying, found = _copying(plan, often, cluster, constants), []
    for held, forward, backward in ranks:
        units = buckets(held, plan, layers)
        reduce, gather = _once(held, both, cluster, constants, recipe, plan.zero > 0, units)
        shown = _shown(plan, often, reduce, gather, forward, backward, units)
        found.append(shown + copying * sum(held))
    return found


def _copying(plan: Plan, often: Times, cluster: Cluster, constants: Constants) -> float:
    """Seconds a parameter that nothing hides: what gathers and reductions move in the chip's own memory, which who computes
    needs; and, with parameters in the host's memory, their way from there for forward and again for backward."""
    fetched = 0.0
    if plan.offload == "all":
        fetched = 2 * plan.microbatches * plan.recipe.parameters / (plan.shards if plan.zero == 3 else 1)
        fetched /= cluster.host * constants.bandwidth
    if plan.zero < 3 or plan.shards == plan.expert_shards == 1:
        return fetched
    copies = plan.framework.copies
    each = (often.forward + often.backward) * copies.gathered + often.reduces * copies.reduced
    return fetched + each / (cluster.accelerator.memory_bandwidth * constants.bandwidth)


def buckets(held: Held, plan: Plan, layers: int) -> int:
    """Pieces in which a rank with these parameters, of so many layers, sends its gradients and gathers parameters."""
    if plan.zero == 3:
        return layers
    return max(1, min(layers, int(sum(held) * _reduced(plan.recipe) / BUCKET)))


def _reduced(recipe: Recipe) -> int:
    """Bytes of one element of a gradient on its way."""
    return min(4, recipe.gradients)


def _shown(plan: Plan, often: Times, reduce: float, gather: float, forward: float, backward: float, units: int) -> float:
    shown = often.forward * _exposed(gather, forward, units, plan)
    if not often.backward:
        return shown + often.reduces * _exposed(reduce, backward, units, plan)
    if not plan.framework.prefetch:
        return shown + often.reduces * (gather + _exposed(reduce, backward, units, plan))
    return shown + often.reduces * _exposed(reduce + gather, backward, units, plan)


def _exposed(seconds: float, hidden_behind: float, units: int, plan: Plan) -> float:
    """What nothing hides, and what the collective's kernels take from the processors that compute beside it."""
    if not plan.overlap:
        return seconds
    shown = max(seconds / units, seconds - hidden_behind)
    return shown + plan.framework.beside * (seconds - shown)


@functools.lru_cache(maxsize=65536)
def _once(
    held: Held,
    of_each: tuple[Group, Group],
    cluster: Cluster,
    constants: Constants,
    recipe: Recipe,
    sharded: bool,
    units: int,
) -> tuple[float, float]:
    """Seconds of reducing all gradients of these parameters once, and of gathering the parameters, in so many units."""
    reduce = gather = 0.0
    for elements, group in zip(held, of_each, strict=True):
        if not elements:
            continue
        size, parameters = elements * _reduced(recipe) / units, elements * recipe.parameters / units
        if not sharded:
            reduce += 2 * units * traffic.fastest(cluster.route(group.ranks, group.stride), size, constants)
            continue
        inner = cluster.route(group.shards, group.stride)
        outer = cluster.route(group.replicas, group.stride * group.shards)
        across = 2 * traffic.fastest(outer, size / group.shards, constants)
        reduce += units * (traffic.fastest(inner, size, constants) + across)
        gather += units * traffic.fastest(inner, parameters, constants)
    return reduce, gather


def optimizer_seconds(held: Iterable[Held], plan: Plan, cluster: Cluster, constants: Constants) -> float:
    """Adam reads gradients and states and writes states and parameters of its shard, after reading gradients for their norm.

    held: parameters of the ranks; the time is that of the largest shard. Offloaded, the gradients go to the host and the
    parameters come back over the host's link; what the host takes to compute is left out.
    Source: arXiv 2101.06840 (ZeRO-Offload), section 4.
    """
    recipe = plan.recipe
    elements = max(memory.states_of(each, plan).optimizer for each in held) / plan.stored.optimizer
    if plan.offload != "none":
        return elements * (recipe.gradients + recipe.parameters) / (cluster.host * constants.bandwidth)
    moved = elements * (plan.framework.optimizer or 2 * recipe.gradients + 2 * recipe.optimizer + recipe.parameters)
    return moved / (cluster.accelerator.memory_bandwidth * constants.bandwidth)
