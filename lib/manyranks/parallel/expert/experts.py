"""Experts side by side: rows are sorted by expert, so that each multiplies its own at once.

    T tokens   K choices of a token   R rows, copies of tokens   E experts   H hidden size
    F an expert's feed-forward size   I inputs, O outputs of any matrix

Source: MegaBlocks, arXiv 2211.15841, on products of unequal groups without padding.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from manyranks.parallel.expert.routing import Routing

Compute = Callable[[Tensor, Sequence[int]], Tensor]


class Experts(nn.Module):
    """Gated MLPs: down(silu(gate(x)) · up(x)), one for each expert.

    forward takes tokens and their routing. How rows get to the experts is .hop, which can
    be set from outside: here(), one_hop(), two_hops().
    """

    def __init__(self, experts: int, hidden: int, ffn: int):
        super().__init__()
        self.gate = nn.Parameter(torch.empty(experts, ffn, hidden))
        self.up = nn.Parameter(torch.empty(experts, ffn, hidden))
        self.down = nn.Parameter(torch.empty(experts, hidden, ffn))
        for weight_EOI in self.parameters():
            nn.init.normal_(weight_EOI, std=weight_EOI.shape[-1] ** -0.5)
        self.hop = partial(here, experts=experts)

    def forward(self, x_TH: Tensor, routing: Routing) -> Tensor:
        """The sum of each token's experts' outputs, times their gates."""
        (x_TH,) = lowered(x_TH)  # before rows travel
        return self.hop(x_TH, routing, self.compute)

    def compute(self, x_RH: Tensor, counts: Sequence[int]) -> Tensor:
        """Rows sorted by expert, so many for each."""
        gate_RF, up_RF = (grouped(x_RH, w_EFH, counts) for w_EFH in (self.gate, self.up))
        return grouped(F.silu(gate_RF) * up_RF, self.down, counts)


def here(x_TH: Tensor, routing: Routing, compute: Compute, experts: int) -> Tensor:
    """All experts on one rank: sort, multiply, sum up."""
    order_R, counts_E = by_expert(routing.experts_TK, experts)
    y_RH = compute(copies(x_TH, routing, order_R), counts_E.tolist())
    return summed(y_RH, routing, order_R)


def by_expert(experts_TK: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """order_R: the copies by expert, and for one expert by token; counts_E of them.

    Copy t·K + k is token t's choice k. Dropped ones are left out.
    """
    copies_R = experts_TK.flatten()
    order_R = copies_R.argsort(stable=True)
    dropped = int((copies_R < 0).sum())  # they stand first
    return order_R[dropped:], copies_R[order_R[dropped:]].bincount(minlength=experts)


def copies(x_TH: Tensor, routing: Routing, order_R: Tensor) -> Tensor:
    """The tokens of these copies."""
    return x_TH.index_select(0, order_R // routing.experts_TK.shape[1])


def summed(y_RH: Tensor, routing: Routing, order_R: Tensor) -> Tensor:
    """y_TH: each token's rows times their gates, added up; 0 where all were dropped."""
    tokens, top_k = routing.experts_TK.shape
    gates_R = routing.gates_TK.flatten().index_select(0, order_R).to(y_RH.dtype)
    y_TH = y_RH.new_zeros(tokens, y_RH.shape[1])
    return y_TH.index_add(0, order_R // top_k, y_RH * gates_R[:, None])


def grouped(x_RI: Tensor, weight_EOI: Tensor, counts: Sequence[int]) -> Tensor:
    """y_RO: the first counts[0] rows times the first matrix, and so on; 0 rows are fine."""
    return _Grouped.apply(*lowered(x_RI, weight_EOI), list(counts))


def lowered(*tensors: Tensor) -> list[Tensor]:
    """In autocast's precision, where it is on; it leaves float64 as it is."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return list(tensors)
    low = torch.get_autocast_dtype(device)
    return [x if x.dtype == torch.float64 else x.to(low) for x in tensors]


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
