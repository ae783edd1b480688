"""Seconds that tensor, context, expert and pipeline parallelism spend communicating, as far as nothing hides it.

T: tokens of a micro-batch on this rank. Activations travel in 16 bits.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from manyranks.theory import collectives
from manyranks.theory.architecture import ModelShape
from manyranks.theory.cluster import Cluster, Route
from manyranks.theory.hardware import Link
from manyranks.theory.kernels import Constants
from manyranks.theory.layer import expert_tokens, split_tokens, tokens
from manyranks.theory.plan import Local, Plan

HALF, SUMS = 2, 4  # bytes: of an activation, and of a gradient that ranks sum up

Seconds = tuple[float, float]  # forward, backward


class Routes(NamedTuple):
    """Where the groups lie to which a rank sends while a micro-batch passes. slices: the ranks that cut an expert."""

    tensor: Route
    context: Route
    expert: Route
    slices: Route

    @classmethod
    def of(cls, plan: Plan | Local, cluster: Cluster) -> "Routes":
        """Tensor-parallel ranks are neighbours, context-parallel ones tp apart. Expert-parallel ranks are etp apart, as in
        Megatron-LM, whose expert ranks count etp first, then ep, then edp; with etp = 1 they are neighbours.

        Raises ValueError for a group that the cluster has no room for.
        """
        etp = plan.expert_tp
        return cls(cluster.route(plan.tp), cluster.route(plan.cp, plan.tp), cluster.route(plan.ep, etp), cluster.route(etp))


def gather(route: Route, size: float, constants: Constants) -> float:
    """An all-gather or a reduce-scatter of `size` bytes (the whole tensor's) around a ring."""
    if route.ranks == 1:
        return 0.0
    return constants.overhead + collectives.seconds("all_gather", size, route.ranks, reached(route.ring, constants))


def fastest(route: Route, size: float, constants: Constants) -> float:
    """As gather, but by a tree between the nodes where that is faster. An all-reduce takes two of these.

    The tree goes through a node rank by rank, then from node to node in log2 of them rounds. It passes the tensor on in pieces,
    so that these rounds count for α only, and uses all of the nodes' network shares, as the ring does. Inside one node, and on
    a torus, there is only the ring. Source: NCCL, src/graph/tuning.cc: latency and bandwidth of its double binary trees, which
    it has for all-reduce; that the halves are as fast is assumed (NCCL has such trees for nodes of one GPU, since 2.23: PAT).
    """
    if route.ranks == 1:
        return 0.0
    nodes = math.ceil(route.ranks / route.inside)
    latency = (route.inside - 1) * route.near.latency + (nodes - 1).bit_length() * route.pair.latency
    tree = constants.overhead + latency + size / reached(route.ring, constants).bandwidth
    return min(tree, gather(route, size, constants))


def hop(route: Route, size: float, constants: Constants) -> float:
    """A message of `size` bytes between members that are far apart, each with its own share of the link."""
    return constants.overhead + reached(route.pair, constants).seconds(size)


class Hops(NamedTuple):
    """Seconds of a ring of keys and values. compute: in each of N hops, one for each block; messages: of what travels under
    each, and of the last, under which nothing is computed."""

    compute: tuple[float, ...]
    messages: tuple[float, ...]

    @property
    def exposed(self) -> float:
        """What nothing hides: where a message takes longer than the hop under which it travels."""
        return sum(max(0.0, m - c) for m, c in zip(self.messages, (*self.compute, 0.0), strict=True))

    @property
    def seconds(self) -> float:
        return sum(self.compute) + self.exposed


def ring(route: Route, compute: Sequence[float], keys: float, gradients: float, constants: Constants) -> Hops:
    """keys, gradients: bytes of a block's keys and values, and in backward of its gradients, else 0.

    The next block travels under the own one already. What a rank finds of another's gradients, from the second block on,
    travels under the block after it, and after the last home. Both make N − 1 messages.
    """
    n = route.ranks
    sizes = [keys * (block < n - 1) + gradients * (block > 1) for block in range(n + 1)]
    seconds = {size: hop(route, size, constants) if size else 0.0 for size in set(sizes)}
    return Hops(tuple(compute), tuple(seconds[size] for size in sizes))


def exchange(route: Route, size: float, constants: Constants) -> float:
    """An all-to-all of `size` bytes on each rank, its own part with them: as much for each of the others."""
    if route.ranks == 1:
        return 0.0
    near, far = route.inside - 1, route.ranks - route.inside
    return near_and_far(route, near * size / route.ranks, far * size / route.ranks, constants)


def near_and_far(route: Route, near: float, far: float, constants: Constants) -> float:
    """Bytes inside the node and to others: at the same time, so that the slower ones count."""
    inside, outside = (reached(link, constants).bandwidth for link in (route.near, route.pair))
    return constants.overhead + route.pair.latency + max(near / inside, far / outside)


def reached(link: Link, constants: Constants) -> Link:
    """The link with the share of its bandwidth that programs get."""
    return Link(link.name, link.latency, link.bandwidth * constants.bandwidth)


def tensor(
    shape: ModelShape,
    plan: Plan,
    routes: Routes,
    constants: Constants,
    moe: bool,
    hidden_behind: float,
    imbalance: float = 1.0,
) -> Seconds:
    """One layer's: two all-reduces each way, or as many pairs of all-gather and reduce-scatter.

    Backward: the gradient that leaves a column-parallel layer travels while the weight gradient is computed, and with sequence
    parallelism the saved input is gathered again while the input gradient is, unless plan.regather is False; hidden_behind:
    seconds of the weight gradients. imbalance: as in layer.experts.
    Source: arXiv 2205.05198, sections 4.2.1 and 4.2.2.
    """
    blocks = 1 if shape.parallel_layers else 2
    pair = 2 * (blocks - moe) * gather(routes.tensor, HALF * tokens(plan) * shape.hidden, constants)
    pair += _of_experts(shape, plan, routes, constants, imbalance) if moe else 0.0
    again = pair / 2 if plan.sequence_parallel and plan.regather else 0.0
    if not (plan.overlap and plan.overlap_tensor):
        return pair, pair + again
    hideable = again + (pair / 2 if plan.sequence_parallel else pair)
    shown = 0.0 if not plan.sequence_parallel else pair / 2
    return pair, shown + max(0.0, hideable - hidden_behind)


def _of_experts(shape: ModelShape, plan: Plan, routes: Routes, constants: Constants, imbalance: float) -> float:
    """The etp ranks that cut an expert gather the rows that came for it, and sum up its results; with etp = 1 they need not.

    Shared experts, which tp cuts, have a pair of their own: they read the rank's rows, not those that came for its experts.
    Source: Megatron-LM, megatron/core/transformer/moe/shared_experts.py.
    """
    row = HALF * shape.hidden
    routed = imbalance * shape.top_k * gather(routes.slices, row * expert_tokens(plan), constants)
    shared = gather(routes.tensor, row * tokens(plan), constants) if shape.shared_experts else 0.0
    return 2 * (routed + shared)


def head(shape: ModelShape, plan: Plan, routes: Routes, constants: Constants) -> Seconds:
    """The vocabulary-parallel head: its input gathered, the gradient of it reduced; the loss moves a few bytes a token."""
    once = gather(routes.tensor, HALF * tokens(plan) * shape.hidden, constants)
    if not plan.sequence_parallel:
        return 0.0, 2 * once
    hidden = not plan.regather or (plan.overlap and plan.overlap_tensor)  # behind the input gradient, longer than a gather
    return once, once if hidden else 2 * once


def embedding(shape: ModelShape, plan: Plan, routes: Routes, constants: Constants) -> Seconds:
    once = gather(routes.tensor, HALF * tokens(plan) * shape.hidden, constants)
    return (once, once) if plan.sequence_parallel else (2 * once, 0.0)


def context(shape: ModelShape, plan: Plan, routes: Routes, constants: Constants, core: Seconds) -> Seconds:
    """One layer's keys and values, backward with their gradients. core: seconds of the attention, each way.

    A ring's messages hide behind the blocks' attention. An all-gather (Llama 3, arXiv 2407.21783, section 3.3.2) and Ulysses'
    all-to-alls (arXiv 2309.14509) come before and after it. Ulysses sends a key/value head to each rank that reads it, a copy
    each where there are more of them than heads.
    """
    if plan.cp == 1:
        return 0.0, 0.0
    route, n = routes.context, plan.cp
    if plan.context == "ulysses":
        keys = shape.head_size * max(shape.kv_heads, plan.tp * n)  # copies, where there are more ranks
        queries, keys = (exchange(route, HALF * tokens(plan) * size / plan.tp, constants) for size in (shape.query_size, keys))
        return (2 * (queries + keys),) * 2
    per_token = 2 * max(shape.kv_heads, plan.tp) * shape.head_size / plan.tp
    if shape.latent:
        per_token = shape.latent.kv_rank + shape.latent.rope_size
    keys, gradients = (size * tokens(plan) * per_token for size in (HALF, SUMS))
    if plan.context == "all-gather":
        once = gather(route, n * keys, constants)
        return once, once + gather(route, n * gradients, constants)
    hops = [(seconds / n if plan.overlap else 0.0,) * n for seconds in core]
    forward, backward = ring(route, hops[0], keys, 0.0, constants), ring(route, hops[1], keys, gradients, constants)
    return forward.exposed, backward.exposed


def expert(shape: ModelShape, plan: Plan, routes: Routes, constants: Constants, imbalance: float = 1.0) -> Seconds:
    """Tokens to their experts and back. Backward sends gradients the same ways.

    With sequence parallelism each tensor-parallel rank sends its own T/t tokens.

    imbalance: copies that come to the fullest rank ÷ those of a balanced load. All wait for its messages, there and back; its
    node is taken to be as full as itself.
    """
    if plan.ep == 1:
        return 0.0, 0.0
    rows = imbalance * split_tokens(plan) * shape.hidden
    away = min(HALF, plan.recipe.matmul)  # tokens leave in the precision of the products, results come back in 16 bits
    once = sum(all_to_all(shape, routes.expert, rows * size, constants) for size in (away, HALF))
    return once, once


def all_to_all(shape: ModelShape, route: Route, size: float, constants: Constants) -> float:
    """size: bytes of one copy of a rank's tokens. One copy goes to each other node, and inside it one to each expert.

    Source: arXiv 2412.19437, section 3.2.2, which takes both hops at the same time.
    """
    nodes = route.ranks / route.inside
    far = other_nodes(shape, nodes) * size if nodes > 1 else 0.0
    return near_and_far(route, shape.top_k * (1 - 1 / route.inside) * size, far, constants)


def other_nodes(shape: ModelShape, nodes: float) -> float:
    """Expected nodes, other than its own, that one token is sent to, if all experts are as likely as each other.

    Groups of experts: every chosen group has as many of the token's experts as the others.
    """
    groups = shape.expert_groups if shape.expert_groups > 1 else shape.experts
    chosen = shape.groups_per_token if shape.expert_groups > 1 else shape.top_k
    if nodes <= groups:
        hit = nodes * _some(groups, groups / nodes, chosen)
    else:
        within = nodes / groups  # nodes of one group
        hit = chosen * within * _some(shape.experts / groups, shape.experts / nodes, shape.top_k / chosen)
    return hit * (1 - 1 / nodes)


def _some(all_of_them: float, own: float, drawn: float) -> float:
    """Chance that of `drawn` different ones at least one is among `own` of all."""
    none = 1.0
    for i in range(math.ceil(drawn)):
        none *= max(0.0, 1 - own / (all_of_them - i))
    return 1 - none


def stage_message(shape: ModelShape, plan: Local, route: Route, tensor: Route, constants: Constants) -> float:
    """One micro-batch from a stage to the next: each tensor-parallel rank sends its share; arXiv 2104.04473, section 4.1.

    route, tensor: of the pipeline's ranks, and of Routes.
    """
    size = HALF * tokens(plan) * shape.hidden
    sent = hop(route, size / plan.tp, constants)
    return sent + (0.0 if plan.sequence_parallel else gather(tensor, size, constants))
