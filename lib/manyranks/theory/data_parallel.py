"""Data parallelism's calls that nothing hides in a step, and the optimizer: gradients reduced, parameters gathered, updates.

Gradients travel in buckets, ZeRO-1 and ZeRO-2 gather the updated parameters in the same buckets, ZeRO-3 in units of one layer:
states.rows. They're equal, one travels at a time, and each by the fastest algorithm (network.fastest).
"""

import functools
from collections.abc import Iterable
from typing import NamedTuple

from manyranks.theory.calls import BACKWARD, FORWARD
from manyranks.theory.cluster import Cluster
from manyranks.theory.communicate import Timed
from manyranks.theory.kernels import Constants
from manyranks.theory.plan import Plan
from manyranks.theory.states import Held, SentRows


class CallsPerStep(NamedTuple):
    """Counts per step: gradients reduced, parameters gathered for forward and again for backward."""

    reduces: int
    forward: int
    backward: int


def calls_per_step(plan: Plan) -> CallsPerStep:
    """ZeRO-0 and ZeRO-1 reduce once a step; from ZeRO-2 on each micro-batch's gradients are reduced, but once a step with a
    pipeline, where the stack sums them first (Stack.reduce_once); ZeRO-3 gathers the parameters of each unit before its
    forward and, where they were freed, before its backward.

    With a pipeline, units that are not freed after forward stay for the whole step (Llama 3, arXiv 2407.21783, section 3.3.2).
    Source: arXiv 1910.02054, sections 5 and 7; PyTorch FSDP, arXiv 2304.11277, section 3.
    """
    m = plan.microbatches
    reduces = 1 if plan.zero < 2 or (plan.pp > 1 and plan.framework.reduce_once) else m
    if plan.zero < 3:
        return CallsPerStep(reduces, min(plan.zero, 1), 0)
    if plan.reshard_after_forward:
        return CallsPerStep(reduces, m, m)
    return CallsPerStep(reduces, m if plan.pp == 1 else 1, 0)


def exposed(
    plan: Plan, cluster: Cluster, constants: Constants, rows: SentRows, sent: Timed, ranks: Iterable[tuple[Held, float, float]]
) -> list[float]:
    """Computes the seconds of gradients and parameters on their way that nothing hides, on each of these ranks.

    sent: seconds of each of the rows
    ranks: the parameters that each holds, and the seconds of one micro-batch's forward and backward on it

    With overlap, gradients hide behind a backward and parameters behind a forward; the last bucket of backward,
    or the first of forward, cannot. Without, the same buckets travel after backward and before forward. Assumed: backward fills
    buckets at an even pace, and what travels does not slow down what computes.
    """
    often, once, found = calls_per_step(plan), _once(rows, sent), []
    copying = _copying(plan, often, cluster, constants)
    for held, forward, backward in ranks:
        shown = _shown(plan, often, *once[held], forward, backward, rows.units[held])
        found.append(shown + copying * sum(held))
    return found


@functools.lru_cache(maxsize=65536)
def _once(rows: SentRows, sent: Timed) -> dict[Held, tuple[float, float]]:
    """Seconds of reducing all gradients of these parameters once, and of gathering the parameters."""
    found = {}
    for held, units in rows.units.items():
        timed = [sent.items[held, name] for name in Held._fields if (held, name) in rows.items]
        reduced = sum(units * each["data", BACKWARD] for each in timed)
        found[held] = reduced, sum(units * each.get(("data", FORWARD), 0.0) for each in timed)
    return found


def _copying(plan: Plan, often: CallsPerStep, cluster: Cluster, constants: Constants) -> float:
    """Seconds per parameter that nothing hides: gathers and reductions copy in the chip's own memory, whose bandwidth
    the computing needs, too. Parameters in the host's memory also travel from there, for forward and again for
    backward."""
    fetched = 0.0
    if plan.offload == "all":
        fetched = 2 * plan.microbatches * plan.recipe.parameters / (plan.shards if plan.zero == 3 else 1)
        fetched /= cluster.host * constants.bandwidth
    if plan.zero < 3 or plan.shards == plan.expert_shards == 1:
        return fetched
    copies = plan.framework.copies
    each = (often.forward + often.backward) * copies.gathered + often.reduces * copies.reduced
    return fetched + each / (cluster.accelerator.memory_bandwidth * constants.bandwidth)


def _shown(plan: Plan, often: CallsPerStep, reduce: float, gather: float, forward: float, backward: float, units: int) -> float:
    """Seconds that nothing hides: a backward gathers what was freed, and reduces if the stack doesn't sum gradients first."""
    shown = often.forward * _exposed(gather, forward, units, plan)
    if not often.backward:
        return shown + often.reduces * _exposed(reduce, backward, units, plan)
    if not plan.framework.prefetch:
        return shown + often.backward * gather + often.reduces * _exposed(reduce, backward, units, plan)
    shown += (often.backward - often.reduces) * _exposed(gather, backward, units, plan)
    return shown + often.reduces * _exposed(reduce + gather, backward, units, plan)


def _exposed(seconds: float, hidden_behind: float, units: int, plan: Plan) -> float:
    """Returns what nothing hides, and what the collective's kernels take from the processors that compute meanwhile."""
    if not plan.overlap:
        return seconds
    shown = max(seconds / units, seconds - hidden_behind)
    return shown + plan.framework.collective_share * (seconds - shown)


def optimizer_seconds(optimizer: float, plan: Plan, cluster: Cluster, constants: Constants) -> float:
    """Adam reads gradients and states and writes states and parameters of its shard, after reading gradients for their norm.

    optimizer: bytes of its states on the rank that has most. Offloaded, the gradients go to the host and the
    parameters come back over the host's link; what the host takes to compute is left out.
    Source: arXiv 2101.06840 (ZeRO-Offload), section 4.
    """
    recipe = plan.recipe
    elements = optimizer / plan.stored.optimizer
    if plan.offload != "none":
        return elements * (recipe.gradients + recipe.parameters) / (cluster.host * constants.bandwidth)
    moved = elements * (plan.framework.optimizer or 2 * recipe.gradients + 2 * recipe.optimizer + recipe.parameters)
    return moved / (cluster.accelerator.memory_bandwidth * constants.bandwidth)
