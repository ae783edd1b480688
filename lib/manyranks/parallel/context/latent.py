"""Latent attention in a ring: keys and values travel compressed.

DeepSeek makes every head's key and value of a token from one latent of K numbers, and adds
P rotary numbers that all heads share. Only these L = K + P numbers travel: in DeepSeek-V3
512 + 64, instead of 128 heads' keys of 192 and values of 128. Each rank expands whatever
block visits it. The gradients it finds go home in the latent, too.

    N ranks   B batch   S a rank's tokens   T tokens of a block   K latent   P rotary
    A query heads   G key/value heads, A in DeepSeek's   V value size
    D what the latent adds to a key   E size of queries and keys, D + P   L what travels

Source: DeepSeek-V2, arXiv 2405.04434, section 2.1.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from manyranks.parallel.collectives.messages import Group, members
from manyranks.parallel.context.checks import fitting
from manyranks.parallel.context.layouts import Mask, Queries
from manyranks.parallel.context.ring import (
    Found,
    Output,
    Ring,
    attend,
    attend_backward,
    not_autocast,
    zeros_like,
)


def latent_attention(
    q_BASE: Tensor,
    latent_BSK: Tensor,
    rotary_BSP: Tensor,
    up_k_GDK: Tensor,
    up_v_GVK: Tensor,
    group: Group = None,
    **mask,
) -> Tensor:
    """Returns the own rows of attention to keys and values made from latents, o_BASV.

    q_BASE: of this rank's tokens; the last P of each query's numbers meet the rotary key
    latent_BSK: of this rank's tokens
    rotary_BSP: of this rank's tokens, rotated to their places
    up_k_GDK, up_v_GVK: the up-projections of each head, the same on every rank
    group, mask: as in ring_attention

    A rank sends (N − 1)·BSL numbers, in backward as many again and as many sums of
    gradients. It holds one block's expanded keys and values at a time. The up-projections
    get the gradients of this rank's queries: sum them over the ranks, as all others.
    Raises ValueError, before any message, for shapes that don't fit each other, and as
    ring_attention does.
    """
    everyone, look = members(group), Mask(**mask)
    _check(q_BASE, latent_BSK, rotary_BSP, up_k_GDK, up_v_GVK)
    places = fitting(q_BASE, q_BASE, q_BASE, look, len(everyone.ranks))
    queries, keys = look.sight(places, everyone.place, q_BASE.device)
    ring = Ring(everyone, keys, look.stops(places))
    x_BSL = torch.cat((latent_BSK, rotary_BSP), -1)
    return _Latent.apply(q_BASE, x_BSL, up_k_GDK, up_v_GVK, queries, ring)


def absorbed_attention(
    q_BASE: Tensor,
    latent_BSK: Tensor,
    rotary_BSP: Tensor,
    up_k_ADK: Tensor,
    up_v_AVK: Tensor,
    group: Group = None,
    **mask,
) -> Tensor:
    """Attends as latent_attention does, but q·(Wc) is (qW)·c: all heads' key is the latent.

    Nothing is expanded, but a score takes L products instead of E, and a value K instead of
    V. So it's the faster one only for a few queries, as when a model writes. Its autograd
    gives the gradients of the up-projections. Raises ValueError as latent_attention does.
    """
    _check(q_BASE, latent_BSK, rotary_BSP, up_k_ADK, up_v_AVK)
    own, size = up_k_ADK.shape[1:]
    q_BASL = torch.cat((q_BASE[..., :own] @ up_k_ADK, q_BASE[..., own:]), -1)
    q_BASL = q_BASL * (q_BASL.shape[-1] / q_BASE.shape[-1]) ** 0.5  # scores are q·k/√E
    as_it_is_1KK = torch.eye(size, dtype=q_BASE.dtype, device=q_BASE.device)[None]
    projections = as_it_is_1KK, as_it_is_1KK
    o_BASK = latent_attention(q_BASL, latent_BSK, rotary_BSP, *projections, group, **mask)
    return o_BASK @ up_v_AVK.mT


class _Latent(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        q_BASE: Tensor,
        x_BSL: Tensor,
        up_k_GDK: Tensor,
        up_v_GVK: Tensor,
        queries: Queries,
        ring: Ring,
    ) -> Tensor:
        ups = up_k_GDK, up_v_GVK
        found = Found.nothing(q_BASE.new_empty(*q_BASE.shape[:3], up_v_GVK.shape[1]))
        for keys, x_BTL in ring.rounds(x_BSL.clone()):
            attend(found, q_BASE, *expand(ups, x_BTL), queries, keys)
        o_BASV = found.o_BASD.to(q_BASE.dtype)
        ctx.save_for_backward(q_BASE, x_BSL, *ups, o_BASV, found.lse_BAS)
        ctx.queries, ctx.ring = queries, ring
        return o_BASV

    @staticmethod
    @once_differentiable
    def backward(ctx, do_BASV: Tensor) -> tuple:
        q_BASE, x_BSL, *ups, o_BASV, lse_BAS = ctx.saved_tensors
        output, dq_BASE = Output.of(o_BASV, lse_BAS, do_BASV), zeros_like(q_BASE)
        dups, behind = [zeros_like(up) for up in ups], ctx.ring.behind()
        for keys, x_BTL in ctx.ring.rounds(x_BSL.clone()):
            kv = expand(ups, x_BTL)
            dkv = [zeros_like(x) for x in kv]
            attend_backward(dq_BASE, dkv, output, q_BASE, *kv, ctx.queries, keys)
            behind.add(collapse(ups, x_BTL, dkv, dups))
        dx_BSL = behind.home().to(x_BSL.dtype)
        dups = [dup.to(up.dtype) for dup, up in zip(dups, ups, strict=True)]
        return dq_BASE.to(q_BASE.dtype), dx_BSL, *dups, None, None


@not_autocast
def expand(ups: tuple[Tensor, Tensor], x_BTL: Tensor) -> tuple[Tensor, Tensor]:
    """Makes all heads' keys and values, in the precision of sums."""
    kind = zeros_like(x_BTL, 0).dtype
    up_k_GDK, up_v_GVK = (up.to(kind) for up in ups)
    c_BTK, r_BTP = x_BTL.to(kind).tensor_split((up_k_GDK.shape[-1],), -1)
    r_BGTP = r_BTP[:, None].expand(-1, len(up_k_GDK), -1, -1)
    k_BGTD = torch.einsum("btk,gdk->bgtd", c_BTK, up_k_GDK)
    return torch.cat((k_BGTD, r_BGTP), -1), torch.einsum("btk,gvk->bgtv", c_BTK, up_v_GVK)


@not_autocast
def collapse(
    ups: tuple[Tensor, Tensor], x_BTL: Tensor, dkv: list[Tensor], dups: list[Tensor]
) -> Tensor:
    """Makes a block's gradient, dx_BTL, and adds to the up-projections' gradients."""
    kind = dkv[0].dtype
    up_k_GDK, up_v_GVK = (up.to(kind) for up in ups)
    c_BTK = x_BTL[..., : up_k_GDK.shape[-1]].to(kind)
    dk_BGTD, dr_BGTP = dkv[0].tensor_split((up_k_GDK.shape[1],), -1)
    for dup, d_BGTD in zip(dups, (dk_BGTD, dkv[1]), strict=True):
        dup += torch.einsum("bgtd,btk->gdk", d_BGTD, c_BTK)
    dc_BTK = torch.einsum("bgtd,gdk->btk", dk_BGTD, up_k_GDK)
    dc_BTK += torch.einsum("bgtv,gvk->btk", dkv[1], up_v_GVK)
    return torch.cat((dc_BTK, dr_BGTP.sum(1)), -1)  # all heads shared the rotary key


def _check(
    q_BASE: Tensor,
    latent_BSK: Tensor,
    rotary_BSP: Tensor,
    up_k_GDK: Tensor,
    up_v_GVK: Tensor,
) -> None:
    """Raises ValueError for tensors that don't fit each other."""
    given = {
        "q": q_BASE,
        "latent": latent_BSK,
        "rotary": rotary_BSP,
        "up_k": up_k_GDK,
        "up_v": up_v_GVK,
    }
    shapes = {name: tuple(x.shape) for name, x in given.items()}
    text = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
    q, latent, rotary, up_k, up_v = shapes.values()
    if list(map(len, shapes.values())) != [4, 3, 3, 3, 3]:
        raise ValueError(
            f"{text}: give q [B, A, S, E], latent [B, S, K], rotary [B, S, P], "
            "up_k [G, D, K] and up_v [G, V, K]"
        )
    if latent[:2] != (q[0], q[2]) or rotary[:2] != latent[:2]:
        raise ValueError(f"{text}: q, latent and rotary must be of the same B and S")
    if up_k[0] != up_v[0] or q[1] % up_k[0] or {up_k[2], up_v[2]} != {latent[2]}:
        raise ValueError(
            f"{text}: up_k and up_v must take latents of {latent[2]}, and have as "
            "many heads as each other, and q a multiple of them"
        )
    if q[3] != up_k[1] + rotary[2]:
        raise ValueError(
            f"{text}: a query must have {up_k[1]} + {rotary[2]} numbers, those that up_k "
            "makes and the rotary ones"
        )
    if len({(x.dtype, x.device) for x in given.values()}) > 1:
        kinds = ", ".join(f"{name} {x.dtype} {x.device}" for name, x in given.items())
        raise ValueError(f"{kinds}: give one dtype, on one device")
