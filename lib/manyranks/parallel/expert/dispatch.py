"""One hop: each copy of a token goes to the rank of its expert, and its result comes back.

    T tokens   K choices of a token   R rows, copies of tokens   H hidden size
    e ranks   X experts of a rank, E/e

Expert i lives on rank i // X. How many rows go where is not known before the router has
chosen, so one small all-to-all of counts goes first; then rows, as many as there are.
Source: GShard, arXiv 2006.16668, section 3.2; MegaBlocks, arXiv 2211.15841 (no padding).
"""

from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from manyranks.parallel.expert.experts import Compute, by_expert, copies, summed
from manyranks.parallel.expert.routing import Routing
from manyranks.parallel.parts import Conjugate

Group = dist.ProcessGroup | None


class Dispatch(NamedTuple):
    """Where rows go.

    order_R: the copies in the order in which they leave: by expert, and so by rank.
    sent, received: rows to and from each rank. sorted_R: rows that came, by own expert;
    they come by rank. counts: rows of each own expert.
    """

    order_R: Tensor
    sent: list[int]
    received: list[int]
    sorted_R: Tensor
    counts: list[int]


def one_hop(
    x_TH: Tensor, routing: Routing, compute: Compute, experts: int, group: Group = None
) -> Tensor:
    """As here(), with the experts dealt to the ranks of a group. All of them call it.

    compute: this rank's experts on rows sorted by them. Backward sends gradients the same
    ways: those of the results there, those of the rows back.
    """
    plan = planned(routing.experts_TK, experts, group)
    came_RH = exchange(copies(x_TH, routing, plan.order_R), plan.sent, plan.received, group)
    y_RH = compute(permuted(came_RH, plan.sorted_R), plan.counts)
    y_RH = permuted(y_RH, plan.sorted_R, back=True)
    returned_RH = exchange(y_RH, plan.received, plan.sent, group)
    return summed(returned_RH, routing, plan.order_R)


def planned(experts_TK: Tensor, experts: int, group: Group = None) -> Dispatch:
    """Tells every rank how many rows come for each of its experts; sends no rows."""
    order_R, counts_E = by_expert(experts_TK, experts)
    leaving_eX = counts_E.view(dist.get_world_size(group), -1)
    came_eX = all_to_all(leaving_eX, group=group)
    ranks, own = came_eX.shape
    expert_R = torch.arange(own, device=came_eX.device).repeat(ranks)
    expert_R = expert_R.repeat_interleave(came_eX.flatten())  # of each row that comes
    # In one go: each time that numbers leave a GPU, all its work is waited for.
    leaving, came = torch.stack([leaving_eX, came_eX]).tolist()
    sent, received = list(map(sum, leaving)), list(map(sum, came))
    counts = list(map(sum, zip(*came, strict=True)))
    return Dispatch(order_R, sent, received, expert_R.argsort(stable=True), counts)


def exchange(x_RH: Tensor, sent: list[int], received: list[int], group: Group) -> Tensor:
    """The first sent[0] rows go to the first rank, and so on; gradients go back."""
    there = partial(all_to_all, sent=sent, received=received, group=group)
    back = partial(all_to_all, sent=received, received=sent, group=group)
    return Conjugate.apply(x_RH, there, back)


def all_to_all(
    x: Tensor,
    sent: list[int] | None = None,
    received: list[int] | None = None,
    group: Group = None,
) -> Tensor:
    """Rows that come, by the rank they are from; without numbers of rows, equal parts."""
    if dist.get_world_size(group) == 1:
        return x
    came = x.new_empty(len(x) if received is None else sum(received), *x.shape[1:])
    dist.all_to_all_single(came, x.contiguous(), received, sent, group=group)
    return came


def permuted(x_RH: Tensor, order_R: Tensor, back: bool = False) -> Tensor:
    """Rows in this order; back: to where they were before. Backward goes the other way."""
    inverse_R = order_R.argsort()
    first, second = (inverse_R, order_R) if back else (order_R, inverse_R)
    there, home = (partial(torch.index_select, dim=0, index=i) for i in (first, second))
    return Conjugate.apply(x_RH, there, home)
