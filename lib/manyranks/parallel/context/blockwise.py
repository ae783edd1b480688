"""Attention block by block: the scores of all tokens never exist at the same time.

A block's result is (o, lse): the output as if its keys were all there are, and the
logarithm of the sum of its exponentials. Two such pairs merge into that of both together.

    B batch   S tokens with queries   T tokens with keys   A query heads   G key/value heads
    R query heads of one key/value head, A/G   D head size

Sources: online softmax, arXiv 1805.02867; FlashAttention-2, arXiv 2307.08691, sections 2.3
and 3.1: the forward, and the backward from lse.
"""

import math
from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from manyranks.parallel.context.sight import (
    Keys,
    Queries,
    check_documents,
    hidden,
    keys_of,
    pairs,
    queries_of,
)

TILE = 256  # tokens: the scores of a few heads' tiles fit into a core's cache


def blockwise_attention(
    q_BASD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    causal: bool = True,
    documents_BT: Tensor | None = None,
    tile: int = TILE,
) -> Tensor:
    """softmax(QKᵀ/√D + mask)V of one process; its largest tensor of scores is B·A·tile².

    documents_BT: a number for each token; a token sees its own document only. One row may
    stand for all of the batch. Saved for backward: q, k, v, o and lse_BAS.
    Raises ValueError for shapes that do not fit each other, and for a tile below 1.
    """
    check(q_BASD, k_BGSD, v_BGSD, tile)
    check_documents(documents_BT, q_BASD.shape[0], q_BASD.shape[2])
    where_CL = torch.arange(q_BASD.shape[2], device="cpu")[None]
    queries = queries_of(where_CL, tile, causal, documents_BT, q_BASD.device)
    keys = keys_of(where_CL, tile, q_BASD.device)
    return Blockwise.apply(q_BASD, k_BGSD, v_BGSD, queries, keys)


class Blockwise(torch.autograd.Function):
    """Attention to keys that are all here, wherever in the sequence they stand."""

    @staticmethod
    def forward(
        ctx, q_BASD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, queries: Queries, keys: Keys
    ) -> Tensor:
        found = Found.nothing(q_BASD)
        attend(found, q_BASD, k_BGTD, v_BGTD, queries, keys)
        o_BASD = found.o_BASD.to(q_BASD.dtype)
        ctx.save_for_backward(q_BASD, k_BGTD, v_BGTD, o_BASD, found.lse_BAS)
        ctx.queries, ctx.keys = queries, keys
        return o_BASD

    @staticmethod
    @once_differentiable
    def backward(ctx, do_BASD: Tensor) -> tuple:
        q_BASD, k_BGTD, v_BGTD, o_BASD, lse_BAS = ctx.saved_tensors
        output = Output.of(o_BASD, lse_BAS, do_BASD)
        dq_BASD = zeros_like(q_BASD)
        dk_BGTD, dv_BGTD = dkv_2BGTD = zeros_like(torch.stack((k_BGTD, v_BGTD)))
        attend_backward(
            dq_BASD, dkv_2BGTD, output, q_BASD, k_BGTD, v_BGTD, ctx.queries, ctx.keys
        )
        kinds = q_BASD.dtype, k_BGTD.dtype
        return dq_BASD.to(kinds[0]), dk_BGTD.to(kinds[1]), dv_BGTD.to(kinds[1]), None, None


class Found(NamedTuple):
    """What queries have found in the keys so far. Where one has seen none, lse is −∞."""

    o_BASD: Tensor
    lse_BAS: Tensor

    @classmethod
    def nothing(cls, q_BASD: Tensor) -> "Found":
        o_BASD = zeros_like(q_BASD)
        return cls(o_BASD, torch.full_like(o_BASD[..., 0], -math.inf))


class Output(NamedTuple):
    """What backward needs of the finished output: delta is the sum of do · o over D."""

    do_BASD: Tensor
    lse_BAS: Tensor
    delta_BAS: Tensor

    @classmethod
    def of(cls, o_BASD: Tensor, lse_BAS: Tensor, do_BASD: Tensor) -> "Output":
        delta_BAS = (do_BASD.to(lse_BAS.dtype) * o_BASD).sum(-1)
        return cls(do_BASD, lse_BAS, delta_BAS)


def merge(
    o: Tensor, lse: Tensor, other_o: Tensor, other_lse: Tensor
) -> tuple[Tensor, Tensor]:
    """The output and the log-sum-exp of two sets of keys together.

    o: [.., D]; lse: [..]. Only differences are exponentiated: no score is too large.
    A set with nothing visible has lse = −∞ and any finite output.
    """
    number = torch.finfo(lse.dtype)  # its least and tiniest: −∞ − −∞ and 0/0 would be NaN
    most = torch.maximum(lse, other_lse).clamp_min(number.min)
    weight, other_weight = (lse - most).exp(), (other_lse - most).exp()
    total = weight + other_weight
    # Not exp(lse − the new lse), which is rounded: the shares must add up to 1.
    share, other_share = (x / total.clamp_min(number.tiny) for x in (weight, other_weight))
    return o * share[..., None] + other_o * other_share[..., None], most + total.log()


def _not_autocast(attend: Callable) -> Callable:
    """Autocast would make 16 bits of the scores and of the sums that are merged."""

    @wraps(attend)
    def run(first: Found | Tensor, second: Tensor, *others) -> None:
        kind = second.device.type
        available = torch.amp.is_autocast_available(kind)
        with torch.autocast(kind, enabled=False) if available else nullcontext():
            attend(first, second, *others)

    return run


@_not_autocast
def attend(
    found: Found,
    q_BASD: Tensor,
    k_BGTD: Tensor,
    v_BGTD: Tensor,
    queries: Queries,
    keys: Keys,
) -> None:
    """Merges into `found` what the queries find in these keys."""
    groups = k_BGTD.shape[1]
    q_URSD, o_URSD, lse_URS = (_by_group(x, groups) for x in (q_BASD, *found))
    k_UTD, v_UTD = k_BGTD.flatten(0, 1), v_BGTD.flatten(0, 1)
    for rows, tiles in pairs(queries, keys):
        q_UQD = _scaled(q_URSD[:, :, rows], lse_URS.dtype)
        o_UQD, lse_UQ = o_URSD[:, :, rows].flatten(1, 2), lse_URS[:, :, rows].flatten(1, 2)
        for seen in tiles:
            k_UtD, v_UtD = (x[:, seen.columns].to(o_UQD.dtype) for x in (k_UTD, v_UTD))
            hidden_BST = hidden(queries, keys, rows, seen)
            o_UQD, lse_UQ = merge(o_UQD, lse_UQ, *_tile(q_UQD, k_UtD, v_UtD, hidden_BST))
        o_URSD[:, :, rows] = o_UQD.unflatten(1, (-1, rows.stop - rows.start))
        lse_URS[:, :, rows] = lse_UQ.unflatten(1, (-1, rows.stop - rows.start))


def _tile(
    q_UQD: Tensor, k_UtD: Tensor, v_UtD: Tensor, hidden_BST: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The output and the log-sum-exp of a pair of tiles. Q: queries of all R heads."""
    scores_UQt = _scores(q_UQD, k_UtD, hidden_BST)
    number = torch.finfo(scores_UQt.dtype)
    most_UQ1 = scores_UQt.amax(-1, keepdim=True).clamp_min_(number.min)  # was −∞: sees none
    weights_UQt = scores_UQt.sub_(most_UQ1).exp_()
    sum_UQ1 = weights_UQt.sum(-1, keepdim=True)
    o_UQD = torch.bmm(weights_UQt, v_UtD).div_(sum_UQ1.clamp_min(number.tiny))
    return o_UQD, (most_UQ1 + sum_UQ1.log()).squeeze(-1)


@_not_autocast
def attend_backward(
    dq_BASD: Tensor,
    dkv_2BGTD: Tensor,
    output: Output,
    q_BASD: Tensor,
    k_BGTD: Tensor,
    v_BGTD: Tensor,
    queries: Queries,
    keys: Keys,
) -> None:
    """Adds to the gradients what these queries and these keys do to each other.

    The scores are computed again; exp(score − lse) is a key's share of the whole sequence's
    softmax, so that blocks need nothing of each other.
    """
    groups = k_BGTD.shape[1]
    q_URSD, dq_URSD, do_URSD, lse_URS, delta_URS = (
        _by_group(x, groups) for x in (q_BASD, dq_BASD, *output)
    )
    k_UTD, v_UTD = k_BGTD.flatten(0, 1), v_BGTD.flatten(0, 1)
    dk_UTD, dv_UTD = dkv_2BGTD.flatten(1, 2)
    scale, kind = q_BASD.shape[-1] ** -0.5, lse_URS.dtype
    for rows, tiles in pairs(queries, keys):
        q_UQD, do_UQD = (
            _scaled(q_URSD[:, :, rows], kind),
            do_URSD[:, :, rows].flatten(1, 2).to(kind),
        )
        lse_UQ1, delta_UQ1 = (
            x[:, :, rows].flatten(1)[..., None] for x in (lse_URS, delta_URS)
        )
        dq_UQD = torch.zeros_like(q_UQD)
        for seen in tiles:
            k_UtD, v_UtD = (x[:, seen.columns].to(kind) for x in (k_UTD, v_UTD))
            weights_UQt = _scores(q_UQD, k_UtD, hidden(queries, keys, rows, seen))
            weights_UQt.sub_(lse_UQ1).exp_()
            dv_UTD[:, seen.columns].baddbmm_(weights_UQt.mT, do_UQD)
            dscores_UQt = torch.bmm(do_UQD, v_UtD.mT).sub_(delta_UQ1).mul_(weights_UQt)
            dq_UQD.baddbmm_(dscores_UQt, k_UtD)
            dk_UTD[:, seen.columns].baddbmm_(dscores_UQt.mT, q_UQD)  # q is scaled
            del weights_UQt, dscores_UQt  # before the next pair of tiles has its own
        dq_URSD[:, :, rows] += dq_UQD.mul_(scale).unflatten(1, (-1, rows.stop - rows.start))


def _scores(q_UQD: Tensor, k_UtD: Tensor, hidden_BST: Tensor | None) -> Tensor:
    scores_UQt = torch.bmm(q_UQD, k_UtD.mT)
    if hidden_BST is not None:
        batch, seq, keys = hidden_BST.shape  # one mask for all heads of a sequence
        scores_UQt.view(batch, -1, seq, keys).masked_fill_(hidden_BST[:, None], -math.inf)
    return scores_UQt


def _scaled(q_URSD: Tensor, dtype: torch.dtype) -> Tensor:
    """The rows of all heads of a group, divided by √D."""
    return q_URSD.flatten(1, 2).to(dtype) * q_URSD.shape[-1] ** -0.5


def _by_group(x_BAS: Tensor, groups: int) -> Tensor:
    """[B, A, S, …] as [U, R, S, …], the heads of each key/value head together; U is B·G."""
    return x_BAS.unflatten(1, (groups, -1)).flatten(0, 1)


def zeros_like(x: Tensor) -> Tensor:
    """In the precision in which sums are made: 32 bits, or 64 where x has so many."""
    precise = torch.promote_types(x.dtype, torch.float32)
    return torch.zeros_like(x, dtype=precise, memory_format=torch.contiguous_format)


def check(q_BASD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, tile: int) -> None:
    """Raises ValueError for tensors that do not fit each other, and for a tile below 1."""
    shapes = [tuple(x.shape) for x in (q_BASD, k_BGSD, v_BGSD)]
    q, k, v = shapes
    if not all(len(shape) == 4 and min(shape) > 0 for shape in shapes):
        raise ValueError(
            f"q, k and v have shapes {q}, {k} and {v}: give [B, heads, S, D] each"
        )
    if k != v or (q[0], *q[2:]) != (k[0], *k[2:]) or q[1] % k[1]:
        raise ValueError(
            f"q, k and v have shapes {q}, {k} and {v}: k and v must be alike, B, S and D "
            "the same in all, and the heads of q a multiple of theirs"
        )
    if (
        len({x.dtype for x in (q_BASD, k_BGSD, v_BGSD)}) > 1
        or not q_BASD.is_floating_point()
    ):
        kinds = ", ".join(str(x.dtype) for x in (q_BASD, k_BGSD, v_BGSD))
        raise ValueError(f"q, k and v are {kinds}: give one floating-point dtype")
    if len(places := {str(x.device) for x in (q_BASD, k_BGSD, v_BGSD)}) > 1:
        raise ValueError(f"q, k and v are on {', '.join(sorted(places))}: give one device")
    if type(tile) is not int or tile < 1:
        raise ValueError(f"tile={tile!r}: give a whole number of tokens, 1 or more")
