"""All-gather attention: every rank gets all keys and values, for its own queries.

    N ranks, each with S tokens   B batch   A query heads   G key/value heads   D head size

With few key/value heads they are small. Only the own ones are kept for backward, which
gathers them again and sums their gradients by a reduce-scatter.

Source: "The Llama 3 Herd of Models", arXiv 2407.21783, section 3.3.2.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from manyranks.parallel import sharding
from manyranks.parallel.context import blockwise
from manyranks.parallel.context.blockwise import TILE, Found, Output, zeros_like
from manyranks.parallel.context.ring import Group, own_queries
from manyranks.parallel.context.sight import Keys, Queries


def all_gather_attention(
    q_BASD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    group: Group = None,
    causal: bool = True,
    layout: str = "zigzag",
    documents_BT: Tensor | None = None,
    tile: int = TILE,
) -> Tensor:
    """As ring_attention, with as many bytes, in one all-gather before all else.

    While it computes, a rank holds 2·B·G·D numbers of each token of the whole sequence, and
    in backward their gradients, too. Raises ValueError as ring_attention does.
    """
    queries, keys = own_queries(
        q_BASD, k_BGSD, v_BGSD, group, causal, layout, documents_BT, tile
    )
    return _Gathered.apply(q_BASD, k_BGSD, v_BGSD, queries, keys, group)


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        q_BASD: Tensor,
        k_BGSD: Tensor,
        v_BGSD: Tensor,
        queries: Queries,
        keys: list[Keys],
        group: Group,
    ) -> Tensor:
        found = Found.nothing(q_BASD)
        for kv_2BGSD, here in zip(gathered(k_BGSD, v_BGSD, group), keys, strict=True):
            blockwise.attend(found, q_BASD, *kv_2BGSD, queries, here)
        o_BASD = found.o_BASD.to(q_BASD.dtype)
        ctx.save_for_backward(q_BASD, k_BGSD, v_BGSD, o_BASD, found.lse_BAS)
        ctx.queries, ctx.keys, ctx.group = queries, keys, group
        return o_BASD

    @staticmethod
    @once_differentiable
    def backward(ctx, do_BASD: Tensor) -> tuple:
        q_BASD, k_BGSD, v_BGSD, o_BASD, lse_BAS = ctx.saved_tensors
        output, dq_BASD = Output.of(o_BASD, lse_BAS, do_BASD), zeros_like(q_BASD)
        kv_N2BGSD = gathered(k_BGSD, v_BGSD, ctx.group)
        dkv_N2BGSD = zeros_like(kv_N2BGSD)
        for kv_2BGSD, dkv_2BGSD, here in zip(kv_N2BGSD, dkv_N2BGSD, ctx.keys, strict=True):
            blockwise.attend_backward(
                dq_BASD, dkv_2BGSD, output, q_BASD, *kv_2BGSD, ctx.queries, here
            )
        own = sharding.reduce_scatter(dkv_N2BGSD.flatten(), ctx.group)
        dk_BGSD, dv_BGSD = own.view_as(dkv_N2BGSD[0]).to(k_BGSD.dtype)
        return dq_BASD.to(q_BASD.dtype), dk_BGSD, dv_BGSD, None, None, None


def gathered(k_BGSD: Tensor, v_BGSD: Tensor, group: Group) -> Tensor:
    """All ranks' keys and values, kv_N2BGSD."""
    own = torch.stack((k_BGSD, v_BGSD)).contiguous()
    n = dist.get_world_size(group)
    if n == 1:
        return own[None]
    kv_N2BGSD = own.new_empty(n, *own.shape)
    dist.all_gather_single(kv_N2BGSD.flatten(0, 1), own, group=group)
    return kv_N2BGSD
