"""The copies that travel on average, where the router chooses at random: with one hop and with two, node-limited or not.

Every expert is as likely as the others. With groups of experts a token's choices lie in groups_per_token of them, as many in
each: DeepSeek-V3's groups are the experts of a node, arXiv 2412.19437, section 2.1.2.
"""

import math
from typing import NamedTuple

from manyranks.theory import calls, checks, network
from manyranks.theory.architecture import ModelShape
from manyranks.theory.calls import FORWARD
from manyranks.theory.cluster import Cluster
from manyranks.theory.kernels import DEFAULT
from manyranks.theory.plan import Plan


class Copies(NamedTuple):
    """The copies of one token, on average: to other ranks of its node, and to other nodes, in either hop."""

    inside: float
    between: float

    @property
    def sent(self) -> float:
        return self.inside + self.between


def travel(shape: ModelShape, ranks: int, inside: int, hops: int = 2) -> Copies:
    """Copies of a token, with `inside` of the ranks on each node. With one hop, K(1 − 1/nodes) leave the node, whatever
    the groups are; with two, one goes to each other node and inside it one to each of the K experts.

    Source: arXiv 2412.19437, section 3.2.2, which takes both hops at the same time.
    """
    nodes = ranks / inside
    if hops == 1:
        return Copies(shape.top_k * (1 / nodes - 1 / ranks), shape.top_k * (1 - 1 / nodes))
    return Copies(shape.top_k * (1 - 1 / inside), other_nodes(shape, nodes) if nodes > 1 else 0.0)


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
    """Chance that `drawn` different ones include at least one of `own`."""
    none = 1.0
    for i in range(math.ceil(drawn)):
        none *= max(0.0, 1 - own / (all_of_them - i))
    return 1 - none


def one_hop_copies(experts: int, top_k: int, ranks: int, nodes: int = 1, groups: int = 1, groups_per_token: int = 1) -> Copies:
    """A copy goes to the rank of each of the K experts.

    Raises ValueError for sizes below 1, ranks that do not divide the experts or nodes that do not divide the ranks, and
    choices that no token can make.
    """
    return travel(_shape(experts, top_k, ranks, nodes, groups, groups_per_token), ranks, ranks // nodes, hops=1)


def two_hops_copies(experts: int, top_k: int, ranks: int, nodes: int, groups: int = 1, groups_per_token: int = 1) -> Copies:
    """Counts copies: one goes to each other node (other_nodes), and inside it one to each of the K experts, K(1 − nodes/ranks).

    Raises ValueError as one_hop_copies does.
    """
    return travel(_shape(experts, top_k, ranks, nodes, groups, groups_per_token), ranks, ranks // nodes)


class Way(NamedTuple):
    """The way of a rank's tokens to a layer's experts and back: bytes inside the node and between nodes, and seconds."""

    inside: float = 0.0
    between: float = 0.0
    seconds: float = 0.0


def way(shape: ModelShape, plan: Plan, cluster: Cluster, imbalance: float = 1.0, hops: int = 2) -> Way:
    """Returns the way of the fullest rank and one micro-batch, forward; with two hops it's what theory.step charges.

    Raises ValueError as one_hop_copies does.
    """
    if plan.ep == 1:
        return Way()
    route = cluster.route(plan.ep, plan.expert_tp)
    _shape(shape.experts, shape.top_k, plan.ep, plan.ep // route.inside, shape.expert_groups, shape.groups_per_token)
    copies = travel(shape, plan.ep, route.inside, hops)
    sent = [call for call in calls.experts(shape, plan.layer_plan, copies, imbalance) if call.when == FORWARD]
    seconds = network.seconds(sent, {"ep": route}, DEFAULT)["ep", FORWARD]
    return Way(sum(call.bytes for call in sent), sum(call.itemsize * call.far for call in sent), seconds)


def _shape(experts: int, top_k: int, ranks: int, nodes: int, groups: int, groups_per_token: int) -> ModelShape:
    """Checked: a model that has nothing but this router."""
    checks.whole(experts=experts, ranks=ranks, nodes=nodes, groups=groups)
    if experts % ranks or ranks % nodes:
        raise ValueError(f"experts={experts} on ranks={ranks} of nodes={nodes}: ranks divide experts, and nodes divide ranks")
    chosen = {"expert_groups": groups, "groups_per_token": groups_per_token}
    return ModelShape("router", 1, 1, 1, 1, 1, experts=experts, top_k=top_k, expert_ffn=1, **chosen)
