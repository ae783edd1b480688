"""A layer of experts, from tokens to outputs: route, sort, send, compute, send home.

    T tokens   K choices of a token   R rows, copies of tokens   H hidden size   E experts
    e ranks   X experts of a rank, E/e   F an expert's feed-forward size
    t ranks that cut an expert   I inputs, O outputs of any matrix

Expert i lives on rank i // X. Only the router decides how many rows go where. So one small
all-to-all of counts goes first, and then rows, as many as there are.

Source: GShard, arXiv 2006.16668, section 3.2; MegaBlocks, arXiv 2211.15841, on products of
unequal groups without padding; MoE parallel folding, arXiv 2504.14960.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from manyranks.parallel.collectives.messages import Group
from manyranks.parallel.expert.checks import check_choices
from manyranks.parallel.wrappers import Conjugate, autocast

Compute = Callable[
    [Tensor, Sequence[int]], Tensor
]  # rows sorted by expert, and their counts


class Routing(NamedTuple):
    """The experts that each token goes to, and how much of each it takes.

    experts_TK: int64, −1 for a copy that was dropped
    gates_TK: what each expert's output is multiplied by; 0 for a dropped copy
    """

    experts_TK: Tensor
    gates_TK: Tensor


def one_hop(
    x_TH: Tensor, routing: Routing, compute: Compute, experts: int, group: Group = None
) -> Tensor:
    """Returns what here() does, with the experts dealt to a group's ranks, who all call it.

    compute: this rank's experts on rows sorted by them
    experts: E, all ranks' together

    Backward sends gradients the same ways: the results' there, the rows' back.
    """
    plan = planned(routing.experts_TK, experts, group)
    came_RH = exchange(copies(x_TH, routing, plan.order_R), plan.sent, plan.received, group)
    y_RH = compute(permuted(came_RH, plan.sorted_R), plan.counts)
    y_RH = permuted(y_RH, plan.sorted_R, back=True)
    returned_RH = exchange(y_RH, plan.received, plan.sent, group)
    return summed(returned_RH, routing, plan.order_R)


def here(x_TH: Tensor, routing: Routing, compute: Compute, experts: int) -> Tensor:
    """Returns each token's outputs of its experts, times their gates; all on one rank."""
    order_R, counts_E = by_expert(routing.experts_TK, experts)
    y_RH = compute(copies(x_TH, routing, order_R), counts_E.tolist())
    return summed(y_RH, routing, order_R)


# Route


@torch.no_grad()
def choose(
    scores_TE: Tensor,
    top_k: int,
    bias_E: Tensor | None = None,
    groups: int = 1,
    groups_per_token: int = 1,
) -> Tensor:
    """Finds experts_TK, the largest score + bias first; of equal ones the lower number.

    bias_E: chooses and does no more, for gates are made of the scores
    groups: equal parts of the experts. A token stays inside the groups_per_token whose
        top_k/groups_per_token best experts have the largest sum

    Raises ValueError for sizes that don't go together.
    """
    check_choices(scores_TE.shape[1], top_k, groups, groups_per_token)
    wanted_TE = scores_TE if bias_E is None else scores_TE + bias_E
    if groups > 1:
        wanted_TGM = wanted_TE.unflatten(1, (groups, -1))
        share = min(-(-top_k // groups_per_token), wanted_TGM.shape[2])
        sums_TG = wanted_TGM.topk(share).values.sum(-1)
        others_TG = torch.ones_like(sums_TG, dtype=torch.bool)
        others_TG.scatter_(1, _largest(sums_TG, groups_per_token), False)
        wanted_TE = wanted_TGM.masked_fill(others_TG[:, :, None], -math.inf).flatten(1)
    return _largest(wanted_TE, top_k)


def _largest(x_TE: Tensor, count: int) -> Tensor:
    """Stable, so that equal scores give the same choice on every rank and device."""
    return x_TE.sort(dim=1, descending=True, stable=True).indices[:, :count]


# Sort


def by_expert(experts_TK: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Sorts copies by expert, and for one expert by token: order_R, and counts_E of them.

    Copy t·K + k is token t's choice k. Dropped ones are left out.
    """
    copies_R = experts_TK.flatten()
    order_R = copies_R.argsort(stable=True)
    dropped = int((copies_R < 0).sum())  # they stand first
    return order_R[dropped:], copies_R[order_R[dropped:]].bincount(minlength=experts)


def copies(x_TH: Tensor, routing: Routing, order_R: Tensor) -> Tensor:
    """Copies the tokens in this order."""
    return x_TH.index_select(0, order_R // routing.experts_TK.shape[1])


# Send


class Dispatch(NamedTuple):
    """The plan of where rows go."""

    order_R: Tensor  # the copies as they leave: by expert, and so by rank
    sent: list[int]  # rows to each rank
    received: list[int]  # and from each
    sorted_R: Tensor  # rows that came, by own expert; they come by rank
    counts: list[int]  # rows of each own expert


def planned(experts_TK: Tensor, experts: int, group: Group = None) -> Dispatch:
    """Tells every rank how many rows come for each of its experts; sends no rows."""
    order_R, counts_E = by_expert(experts_TK, experts)
    leaving_eX = counts_E.view(dist.get_world_size(group), -1)
    came_eX = all_to_all(leaving_eX, group=group)
    sorted_R = _sorted(came_eX)
    # In one go: each time that numbers leave a GPU, all its work is waited for.
    leaving, came = torch.stack([leaving_eX, came_eX]).tolist()
    sent, received = list(map(sum, leaving)), list(map(sum, came))
    return Dispatch(
        order_R, sent, received, sorted_R, list(map(sum, zip(*came, strict=True)))
    )


def _sorted(came_eX: Tensor) -> Tensor:
    """Sorts rows by own expert that came by rank, and from each rank by expert."""
    ranks, own = came_eX.shape
    expert_R = torch.arange(own, device=came_eX.device).repeat(ranks)
    return expert_R.repeat_interleave(came_eX.flatten()).argsort(stable=True)


def exchange(x_RH: Tensor, sent: list[int], received: list[int], group: Group) -> Tensor:
    """Sends the first sent[0] rows to the first rank, and so on; gradients go back."""
    there = partial(all_to_all, sent=sent, received=received, group=group)
    back = partial(all_to_all, sent=received, received=sent, group=group)
    return Conjugate.apply(x_RH, there, back)


def all_to_all(
    x: Tensor,
    sent: list[int] | None = None,
    received: list[int] | None = None,
    group: Group = None,
) -> Tensor:
    """Returns rows that come, by the rank they're from; without numbers, equal parts."""
    if dist.get_world_size(group) == 1:
        return x
    came = x.new_empty(len(x) if received is None else sum(received), *x.shape[1:])
    dist.all_to_all_single(came, x.contiguous(), received, sent, group=group)
    return came


# Compute


class Experts(nn.Module):
    """Gated MLPs: down(silu(gate(x)) · up(x)), one for each expert.

    hop: how rows get to the experts, which can be set from outside: here, one_hop, two_hops
    slicing: how ranks that cut each expert compute together: in_slices; None for whole ones
    sliced: the dim of each weight that several ranks cut
    dealt: whether some of its experts are on other ranks
    """

    sliced: ClassVar = {"gate": 1, "up": 1, "down": 2}
    slicing: Callable | None = None
    dealt = False

    def __init__(self, experts: int, hidden: int, ffn: int):
        super().__init__()
        self.gate = nn.Parameter(torch.empty(experts, ffn, hidden))
        self.up = nn.Parameter(torch.empty(experts, ffn, hidden))
        self.down = nn.Parameter(torch.empty(experts, hidden, ffn))
        for weight_EOI in self.parameters():
            nn.init.normal_(weight_EOI, std=weight_EOI.shape[-1] ** -0.5)
        self.hop = partial(here, experts=experts)

    def forward(self, x_TH: Tensor, routing: Routing) -> Tensor:
        """Returns the sum of each token's experts' outputs, times their gates."""
        compute = self.compute
        if self.slicing is not None:
            compute = partial(self.slicing, compute=self.compute)
        return self.hop(autocast(x_TH), routing, compute)  # cast before rows travel

    def compute(self, x_RH: Tensor, counts: Sequence[int]) -> Tensor:
        """Computes rows sorted by expert, so many for each."""
        gate_RF, up_RF = (grouped(x_RH, w_EFH, counts) for w_EFH in (self.gate, self.up))
        return grouped(F.silu(gate_RF) * up_RF, self.down, counts)


def grouped(x_RI: Tensor, weight_EOI: Tensor, counts: Sequence[int]) -> Tensor:
    """Multiplies the first counts[0] rows by the first matrix, and so on; 0 are fine."""
    return _Grouped.apply(autocast(x_RI), autocast(weight_EOI), list(counts))


class _Grouped(torch.autograd.Function):
    """Each product writes its part of one tensor: nothing is joined afterwards."""

    @staticmethod
    def forward(ctx, x_RI: Tensor, weight_EOI: Tensor, counts: list[int]) -> Tensor:
        ctx.save_for_backward(x_RI, weight_EOI)
        ctx.counts = counts
        y_RO = x_RI.new_empty(len(x_RI), weight_EOI.shape[1])
        parts = zip(x_RI.split(counts), weight_EOI, y_RO.split(counts), strict=True)
        for x_rI, weight_OI, y_rO in parts:
            torch.mm(x_rI, weight_OI.mT, out=y_rO)
        return y_RO

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_RO: Tensor) -> tuple:
        x_RI, weight_EOI = ctx.saved_tensors
        needs_x, needs_weight, _ = ctx.needs_input_grad
        grad_x_RI = torch.empty_like(x_RI) if needs_x else None
        grad_weight_EOI = torch.empty_like(weight_EOI) if needs_weight else None
        start = 0
        for expert, count in enumerate(ctx.counts):
            rows = slice(start, start := start + count)
            if needs_x:
                torch.mm(grad_RO[rows], weight_EOI[expert], out=grad_x_RI[rows])
            if needs_weight:  # of no rows, too: zeros
                torch.mm(grad_RO[rows].mT, x_RI[rows], out=grad_weight_EOI[expert])
        return grad_x_RI, grad_weight_EOI, None


def in_slices(
    x_RH: Tensor, counts: Sequence[int], compute: Compute, group: Group, same: bool = False
) -> Tensor:
    """Computes with experts that the t ranks of a group cut; all of them call it.

    Each slice needs the rows of all t ranks: they're gathered, and the slices' results are
    summed where the rows came from. Backward gathers and sums the other way round.

    compute: this rank's slice of its experts
    same: the ranks have the same rows already, so that nothing is gathered
    """
    t = dist.get_world_size(group)
    if t == 1:
        return compute(x_RH, counts)
    if same:
        total = partial(_all_reduced, group=group)
        x_RH = Conjugate.apply(x_RH, torch.clone, total)
        return Conjugate.apply(compute(x_RH, counts), total, torch.clone)
    own_X = torch.tensor(counts, dtype=torch.int64, device=x_RH.device)
    came_tX = all_to_all(own_X.repeat(t, 1), group=group)
    sorted_R, own = _sorted(came_tX), [len(x_RH)] * t
    came = came_tX.tolist()
    rows = list(map(sum, came))

    def gather(x_rH: Tensor) -> Tensor:
        return all_to_all(x_rH.repeat(t, 1), own, rows, group)

    def sum_up(y_RH: Tensor) -> Tensor:
        return all_to_all(y_RH, rows, own, group).view(t, own[0], y_RH.shape[1]).sum(0)

    x_RH = permuted(Conjugate.apply(x_RH, gather, sum_up), sorted_R)
    y_RH = compute(x_RH, list(map(sum, zip(*came, strict=True))))
    return Conjugate.apply(permuted(y_RH, sorted_R, back=True), sum_up, gather)


def _all_reduced(x: Tensor, group: Group) -> Tensor:
    total = x.clone()
    dist.all_reduce(total, group=group)
    return total


# The way back


def permuted(x_RH: Tensor, order_R: Tensor, back: bool = False) -> Tensor:
    """Puts rows in this order.

    back: where they were before

    Backward does the opposite.
    """
    inverse_R = order_R.argsort()
    first, second = (inverse_R, order_R) if back else (order_R, inverse_R)
    there, home = (partial(torch.index_select, dim=0, index=i) for i in (first, second))
    return Conjugate.apply(x_RH, there, home)


def summed(y_RH: Tensor, routing: Routing, order_R: Tensor) -> Tensor:
    """Adds up each token's rows, times their gates; 0 where all were dropped."""
    tokens, top_k = routing.experts_TK.shape
    gates_R = routing.gates_TK.flatten().index_select(0, order_R).to(y_RH.dtype)
    y_TH = y_RH.new_zeros(tokens, y_RH.shape[1])
    return y_TH.index_add(0, order_R // top_k, y_RH * gates_R[:, None])
