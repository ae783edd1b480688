"""What travels on average, where the router chooses at random: with one hop and with two, node-limited or not.

Every expert is as likely as the others. With groups of experts a token's choices lie in groups_per_token of them, as many in
each: DeepSeek-V3's groups are the experts of a node, arXiv 2412.19437, section 2.1.2.
"""

from typing import NamedTuple

from manyranks.theory import checks, traffic
from manyranks.theory.architecture import ModelShape


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


def _shape(experts: int, top_k: int, ranks: int, nodes: int, groups: int, groups_per_token: int) -> ModelShape:
    """Checked: a model that has nothing but this router."""
    checks.whole(experts=experts, ranks=ranks, nodes=nodes, groups=groups)
    if experts % ranks or ranks % nodes:
        raise ValueError(f"experts={experts} on ranks={ranks} of nodes={nodes}: ranks divide experts, and nodes divide ranks")
    chosen = {"expert_groups": groups, "groups_per_token": groups_per_token}
    return ModelShape("router", 1, 1, 1, 1, 1, experts=experts, top_k=top_k, expert_ffn=1, **chosen)
