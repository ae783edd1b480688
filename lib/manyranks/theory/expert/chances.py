"""What travels on average, where the router chooses at random: with one hop and with two, node-limited or not.

Every expert is as likely as the others. With groups of experts a token's choices lie in groups_per_token of them, as many in
each: DeepSeek-V3's groups are the experts of a node, arXiv 2412.19437, section 2.1.2.
"""

from typing import NamedTuple

from manyranks.theory import checks, traffic
from manyranks.theory.architecture import ModelShape
from manyranks.theory.cluster import Cluster
from manyranks.theory.kernels import DEFAULT
from manyranks.theory.layer import split_tokens
from manyranks.theory.plan import Plan


class Copies(NamedTuple):
    """Of one token, on average: copies to other ranks of its node, and to other nodes, in either hop."""

    inside: float
    between: float

    @property
    def sent(self) -> float:
        return self.inside + self.between


def one_hop_copies(experts: int, top_k: int, ranks: int, nodes: int = 1, groups: int = 1, groups_per_token: int = 1) -> Copies:
    """A copy goes to the rank of each of the K experts: K(1 − 1/nodes) leave the node, whatever the groups are.

    Raises ValueError for sizes below 1, ranks that do not divide the experts or nodes that do not divide the ranks, and
    choices that no token can make.
    """
    _shape(experts, top_k, ranks, nodes, groups, groups_per_token)
    return Copies(top_k * (1 / nodes - 1 / ranks), top_k * (1 - 1 / nodes))


def two_hops_copies(experts: int, top_k: int, ranks: int, nodes: int, groups: int = 1, groups_per_token: int = 1) -> Copies:
    """One copy goes to each other node (traffic.other_nodes), and inside it one to each of the K experts, K(1 − nodes/ranks).

    Raises ValueError as one_hop_copies does.
    """
    shape = _shape(experts, top_k, ranks, nodes, groups, groups_per_token)
    return Copies(top_k * (1 - nodes / ranks), traffic.other_nodes(shape, nodes))


class Way(NamedTuple):
    """Of a layer's tokens of one rank, to their experts and back: bytes inside the node and between nodes, and seconds."""

    inside: float = 0.0
    between: float = 0.0
    seconds: float = 0.0


def way(shape: ModelShape, plan: Plan, cluster: Cluster, imbalance: float = 1.0, hops: int = 2) -> Way:
    """Of the fullest rank and one micro-batch, forward; with two hops it's what traffic.expert charges.

    Raises ValueError as one_hop_copies does.
    """
    if plan.ep == 1:
        return Way()
    route, row = cluster.route(plan.ep, plan.expert_tp), imbalance * split_tokens(plan) * shape.hidden
    sizes = shape.experts, shape.top_k, plan.ep, plan.ep // route.inside, shape.expert_groups, shape.groups_per_token
    copies = one_hop_copies(*sizes) if hops == 1 else two_hops_copies(*sizes)
    there, back = ([row * size * each for each in copies] for size in (min(traffic.HALF, plan.recipe.matmul), traffic.HALF))
    seconds = sum(traffic.near_and_far(route, *each, DEFAULT) for each in (there, back))
    return Way(*map(sum, zip(there, back, strict=True)), seconds)


def _shape(experts: int, top_k: int, ranks: int, nodes: int, groups: int, groups_per_token: int) -> ModelShape:
    """Checked: a model that has nothing but this router."""
    checks.whole(experts=experts, ranks=ranks, nodes=nodes, groups=groups)
    if experts % ranks or ranks % nodes:
        raise ValueError(f"experts={experts} on ranks={ranks} of nodes={nodes}: ranks divide experts, and nodes divide ranks")
    chosen = {"expert_groups": groups, "groups_per_token": groups_per_token}
    return ModelShape("router", 1, 1, 1, 1, 1, experts=experts, top_k=top_k, expert_ffn=1, **chosen)
