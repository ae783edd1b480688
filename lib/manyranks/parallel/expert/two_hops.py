"""Two hops: one copy of a token to each node that has one of its experts, then inside it.

    T tokens   K choices of a token   C copies   H hidden size   D nodes

The network between nodes is slower than the links inside one. So a token crosses it once
for each node, however many experts it has there, and their results come back as one row.
Source: DeepSeek-V3, arXiv 2412.19437, section 3.2.2.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from manyranks.parallel.collectives.messages import Group
from manyranks.parallel.expert.dispatch import (
    Compute,
    Routing,
    all_to_all,
    exchange,
    one_hop,
)


def two_hops(
    x_TH: Tensor,
    routing: Routing,
    compute: Compute,
    experts: int,
    nodes: Group,
    inside: Group,
) -> Tensor:
    """Works as one_hop() does, for experts dealt to nodes and then to the ranks inside one.

    nodes: the ranks that have this rank's place in their nodes, one of each
    inside: the ranks of this node
    A copy crosses with its choices (int64) and its gates.
    """
    own = experts // dist.get_world_size(nodes)  # experts of a node
    node_C, token_C = visits(routing.experts_TK // own, dist.get_world_size(nodes))
    leaving_D = node_C.bincount(minlength=dist.get_world_size(nodes))
    coming_D = all_to_all(leaving_D, group=nodes)
    sent, received = torch.stack([leaving_D, coming_D]).tolist()
    there = _of_node(routing, node_C, token_C, own)
    came_CH = exchange(x_TH.index_select(0, token_C), sent, received, nodes)
    gates_CK = exchange(there.gates_TK, sent, received, nodes)
    choices_CK = all_to_all(there.experts_TK, sent, received, nodes)
    y_CH = one_hop(came_CH, Routing(choices_CK, gates_CK), compute, own, inside)
    y_CH = exchange(y_CH, received, sent, nodes)
    return y_CH.new_zeros(x_TH.shape).index_add(0, token_C, y_CH)


def visits(node_TK: Tensor, nodes: int) -> tuple[Tensor, Tensor]:
    """node_C and token_C of each copy that leaves: by node, and for one node by token."""
    asked_TD = torch.zeros(len(node_TK), nodes, dtype=torch.int64, device=node_TK.device)
    asked_TD.scatter_add_(1, node_TK.clamp(min=0), (node_TK >= 0).long())
    node_C, token_C = asked_TD.mT.nonzero(as_tuple=True)
    return node_C, token_C


def _of_node(routing: Routing, node_C: Tensor, token_C: Tensor, own: int) -> Routing:
    """Each copy's choices and gates on its node, where experts are counted from 0."""
    experts_CK = routing.experts_TK[token_C]
    elsewhere_CK = experts_CK // own != node_C[:, None]
    choices_CK = (experts_CK - own * node_C[:, None]).masked_fill(elsewhere_CK, -1)
    gates_CK = routing.gates_TK.index_select(0, token_C).masked_fill(elsewhere_CK, 0)
    return Routing(choices_CK, gates_CK)
