"""A verdict on a plan and a cluster: whether it can be, and if not, why, and what would do."""

import itertools
from collections.abc import Iterator
from dataclasses import replace

from manyranks.theory import checks, memory, step
from manyranks.theory.architecture import ModelShape
from manyranks.theory.cluster import Cluster
from manyranks.theory.plan import Plan

GB = 1e9


def check(shape: ModelShape, plan: Plan, cluster: Cluster, across_nodes: bool = False) -> None:
    """Raises ValueError, with a way out, for degrees that do not fit the shape or the cluster, for a rank
    that needs more memory than an accelerator has, or its share of the host, and for tensor parallelism that leaves its node.

    across_nodes: allows the last: it is slow, not impossible.
    """
    checks.kinds(shape=shape, plan=plan, cluster=cluster)
    plan.check(shape, cluster.gpus)
    room, peak = cluster.accelerator.memory, memory.peak(shape, plan)
    if peak.total > room:
        parts = f"states {peak.states / GB:.1f}, activations {peak.activations / GB:.1f}, buffers {peak.buffers / GB:.1f}"
        alone = list(_changes(plan))
        pairs = [one | other for one, other in itertools.combinations(alone, 2) if not one.keys() & other.keys()]
        found = list(_that_fit(shape, plan, room, alone)) or _that_fit(shape, plan, room, pairs)  # of one field, or else of two
        ways = ", ".join(found) or "no one or two fields help: take more GPUs, and shard over them"
        need = f"{peak.total / GB:.1f} GB ({parts}) of {room / GB:.0f} GB"
        raise ValueError(f"{plan!r} of {shape.name} needs {need} on its fullest rank: {ways}")
    if (host := memory.host(shape, plan)) > cluster.host_memory:
        need = f"{host / GB:.1f} GB on the host, whose share for an accelerator is {cluster.host_memory / GB:.0f} GB"
        raise ValueError(f"{plan!r} of {shape.name} keeps {need}: offload less, or shard over more ranks")
    if not across_nodes and (warning := step.estimate(shape, plan, cluster).warning):
        raise ValueError(f"{warning}; if you mean it, say across_nodes=True")


def _that_fit(shape: ModelShape, plan: Plan, room: float, changes: list[dict[str, object]]) -> Iterator[str]:
    """Changes after which it fits, with what a rank then needs."""
    for change in changes:
        try:
            other = replace(plan, **change)
            other.check(shape)
            total = memory.peak(shape, other).total
        except ValueError:
            continue
        if total <= room:
            fields = " and ".join(f"{name}={value!r}" for name, value in change.items())
            yield f"with {fields} it needs {total / GB:.1f} GB"


def _changes(plan: Plan) -> Iterator[dict[str, object]]:
    """Yields, on as many accelerators, more sharding, more recomputation, smaller micro-batches, or an axis instead of dp."""
    yield from ({"zero": stage} for stage in range(plan.zero + 1, 4))
    yield from ({"recompute": kind} for kind in ("selective", "full") if plan.recompute == "none" or kind == "full")
    if plan.microbatch > 1:
        yield {"microbatch": plan.microbatch // 2}
    if plan.dp % 2 == 0:
        yield from ({axis: 2 * getattr(plan, axis), "dp": plan.dp // 2} for axis in ("tp", "pp", "cp"))
