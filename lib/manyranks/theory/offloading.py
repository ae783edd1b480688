"""Places where a layer's activations wait for backward: on the chip, at the host, or nowhere, to be computed again.

Offloaded bytes travel to the host while the layer computes, and come back while its backward does. Forward is shorter,
so it decides: a layer that computes for T seconds hides β·T bytes, at β bytes/s one way.

Source of the idea: Megatron-Core's fine-grained activation offloading.
"""

from collections.abc import Sequence
from typing import NamedTuple

from manyranks.theory import activations, kernels, layer, memory
from manyranks.theory.architecture import ModelShape
from manyranks.theory.blocks import LSE
from manyranks.theory.cluster import Cluster
from manyranks.theory.kernels import DEFAULT
from manyranks.theory.plan import Plan


class Group(NamedTuple):
    """Tensors of one layer that one operator makes.

    bytes: of one micro-batch
    seconds: to compute them again from what the operator reads; infinite for the layer's input
    """

    name: str
    bytes: float
    seconds: float


class Split(NamedTuple):
    """Bytes of a layer that are kept, recomputed, and offloaded to the host; and seconds that this adds to the step."""

    kept: float
    recomputed: float
    offloaded: float
    seconds: float


def groups(shape: ModelShape, plan: Plan, cluster: Cluster) -> list[Group]:
    """Lists what one dense layer with flash attention keeps, in the order of forward.

    Raises ValueError for a layer that isn't Llama's (two RMSNorms, plain attention, a gated MLP), and where plan and shape
    don't fit.
    """
    whole = memory.layer_activations(shape, plan)
    other = shape.moe_layers or shape.latent or shape.qk_norm or shape.parallel_layers or not shape.gated
    if other or (shape.norm, shape.norms_per_layer) != ("rmsnorm", 2):
        raise ValueError(f"{shape.name}: give a dense model with layers as Llama's, such as theory.models['llama3-8b']")
    if not plan.flash or plan.recompute != "none":
        raise ValueError(f"{plan!r}: give a plan with flash=True, recompute='none'")
    one = {}
    for kernel in layer.forward(shape, plan, False):
        one.setdefault(kernel.part, []).append(kernels.seconds(kernel, cluster.accelerator, DEFAULT, cluster.reserved))
    into, out = one["attention"]
    wide, item, t = plan.rank_tokens, activations.itemsize(plan), plan.tp
    split = t if plan.sequence_parallel else 1
    norm = item * wide * shape.hidden / split
    found = [
        Group("the layer's input", norm, float("inf")),
        Group("the first norm's result", norm, one["rmsnorm"][0]),
        Group("query, key, value", item * wide * (shape.query_size + 2 * shape.kv_size) / t, into + sum(one["rotary"])),
        Group("attention's result", wide * (item * shape.query_size + LSE * shape.heads) / t, sum(one["core"])),
        Group("the second norm's input", norm, out + one["residual"][0]),
        Group("the second norm's result", norm, one["rmsnorm"][1]),
        Group("gate, up", 2 * item * wide * shape.ffn / t, one["mlp"][0]),
        Group("their product", item * wide * shape.ffn / t, sum(one["product"])),
    ]
    if round(sum(group.bytes for group in found)) != whole:
        raise ValueError(f"{plan!r}: only groups of a plain layer are known; leave precision, context and stack as they are")
    return found


def forward_seconds(shape: ModelShape, plan: Plan, cluster: Cluster) -> float:
    """Computes how long one layer's forward takes."""
    return kernels.total_seconds(layer.forward(shape, plan, False), cluster, DEFAULT)


def best(found: Sequence[Group], room: float, seconds: float, bandwidth: float) -> Split:
    """Splits a layer's activations so that they fit and the step gets as little longer as can be.

    found: from groups
    room: bytes that the layer may keep on the chip; parts of a group may stay
    seconds: of the layer's forward, under which bytes travel
    bandwidth: β to the host, bytes/s one way; 0 for none

    Each byte takes the cheapest way: what hides costs nothing, then come the groups with the fewest seconds a byte, until
    waiting for the bus is cheaper. Raises ValueError for negative numbers, and without a bus for too little room.
    """
    if min(room, seconds, bandwidth) < 0:
        raise ValueError(f"room={room}, seconds={seconds}, bandwidth={bandwidth}: each must be 0 or more")
    over = max(0.0, sum(group.bytes for group in found) - room)
    hidden = min(over, bandwidth * seconds)
    left, recomputed, extra = over - hidden, 0.0, 0.0
    for group in sorted(found, key=lambda group: group.seconds / group.bytes):
        if left <= 0 or (bandwidth and group.seconds / group.bytes >= 1 / bandwidth) or group.seconds == float("inf"):
            break
        part = min(left, group.bytes)
        left -= part
        recomputed += part
        extra += part / group.bytes * group.seconds
    if left > 1 and not bandwidth:
        raise ValueError(f"room={room:,.0f} bytes: without a host the layer's input must stay, {found[0].bytes:,.0f} bytes")
    waiting = left / bandwidth if bandwidth else 0.0
    return Split(sum(group.bytes for group in found) - over, recomputed, hidden + left, extra + waiting)
