"""Ulysses: from some tokens of all heads to all tokens of some heads, and back.

    N ranks, each with S tokens   T tokens in all, N·S   B batch   D head size
    A query heads   G key/value heads   H heads of any kind   h heads of a rank, H/N

Attention needs all tokens but never two heads, so that after an all-to-all it is local.
What a rank sends falls with N: (N − 1)/N of its shard for each of q, k, v and the output.

Source: Jacobs et al., "DeepSpeed Ulysses", arXiv 2309.14509.
"""

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from manyranks.parallel.collectives.messages import members
from manyranks.parallel.context.blockwise import TILE, Blockwise, check
from manyranks.parallel.context.layouts import positions
from manyranks.parallel.context.ring import Group
from manyranks.parallel.context.sight import check_documents, keys_of, queries_of
from manyranks.parallel.parts import Conjugate


def ulysses_attention(
    q_BASD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    group: Group = None,
    causal: bool = True,
    layout: str = "zigzag",
    documents_BT: Tensor | None = None,
    tile: int = TILE,
) -> Tensor:
    """As ring_attention, by four all-to-alls forward, and four backward.

    N must divide the query heads. Where there are more ranks than key/value heads, N must
    be a multiple of these: each rank then gets a copy of the one that its queries read.
    Saved for backward: q, k, v and o of all tokens and the rank's heads, and their lse.
    Raises ValueError as ring_attention does, and for heads that do not fit N.
    """
    check(q_BASD, k_BGSD, v_BGSD, tile)
    n = len(members(group).ranks)
    check_heads(q_BASD.shape[1], k_BGSD.shape[1], n)
    check_documents(documents_BT, q_BASD.shape[0], n * q_BASD.shape[2])
    places_CL = torch.cat(positions(layout, n * q_BASD.shape[2], n))
    queries = queries_of(places_CL, tile, causal, documents_BT, q_BASD.device)
    qkv = to_heads(q_BASD, k_BGSD, v_BGSD, group)
    o_BhTD = Blockwise.apply(*qkv, queries, keys_of(places_CL, tile, q_BASD.device))
    return to_tokens(o_BhTD, group)


def to_heads(
    q_BASD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, group: Group
) -> tuple[Tensor, Tensor, Tensor]:
    """This rank's heads of all tokens, shard after shard."""
    n, heads = dist.get_world_size(group), k_BGSD.shape[1]
    if n > heads:  # autograd sums the gradients of a head's copies
        copies = torch.arange(n, device=k_BGSD.device) * heads // n
        k_BGSD, v_BGSD = k_BGSD.index_select(1, copies), v_BGSD.index_select(1, copies)
    there, back = partial(_to_heads, group=group), partial(_to_tokens, group=group)
    q, k, v = (Conjugate.apply(x, there, back) for x in (q_BASD, k_BGSD, v_BGSD))
    return q, k, v


def to_tokens(o_BhTD: Tensor, group: Group) -> Tensor:
    """All heads of this rank's tokens: the way back."""
    there, back = partial(_to_tokens, group=group), partial(_to_heads, group=group)
    return Conjugate.apply(o_BhTD, there, back)


def _to_heads(x_BHSD: Tensor, group: Group) -> Tensor:
    n = dist.get_world_size(group)
    out_NBhSD = torch.stack(x_BHSD.chunk(n, 1))  # by the rank that gets it
    came_NBhSD = _all_to_all(out_NBhSD, group)  # by the rank that it is from
    return came_NBhSD.movedim(0, 2).flatten(2, 3)


def _to_tokens(x_BhTD: Tensor, group: Group) -> Tensor:
    n = dist.get_world_size(group)
    out_NBhSD = torch.stack(x_BhTD.chunk(n, 2))
    return _all_to_all(out_NBhSD, group).transpose(0, 1).flatten(1, 2)


def _all_to_all(out: Tensor, group: Group) -> Tensor:
    """Part r goes to rank r; part r of the result is from rank r."""
    if len(out) == 1:
        return out
    out = out.contiguous()  # torch.stack follows the strides of some inputs
    came = torch.empty_like(out)
    dist.all_to_all_single(came, out, group=group)
    return came


def check_heads(heads: int, kv_heads: int, n: int) -> None:
    """Raises ValueError for heads that cannot be dealt to n ranks."""
    if heads % n:
        fits = ", ".join(str(d) for d in range(1, heads + 1) if heads % d == 0)
        raise ValueError(
            f"{heads} query heads on {n} ranks: Ulysses gives each rank as many heads, so "
            f"give a number of ranks that divides them ({fits}), or use ring_attention"
        )
    if kv_heads % n and n % kv_heads:
        raise ValueError(
            f"{kv_heads} key/value heads on {n} ranks: give a number of ranks that divides "
            "them or is a multiple of them, or use ring_attention"
        )
