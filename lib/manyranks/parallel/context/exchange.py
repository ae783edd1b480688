"""Attention over ranks without a ring: all keys gathered, or heads exchanged for tokens.

    all-gather    every rank gets all keys and values, for its own queries: with few
                  key/value heads they are small
    Ulysses       from some tokens of all heads to all tokens of some heads, and back:
                  attention needs all tokens but never two heads, so it's local then
    ring-ulysses  the U ranks of a mesh's row exchange heads, then each column is a ring:
                  U is bounded by the heads, and a ring's message has 1/U of them

    N ranks, each with S tokens   T tokens in all, N·S   B batch   D head size
    A query heads   G key/value heads   H heads of any kind   h heads of a rank, H/N

Sources: all-gather: Llama 3, arXiv 2407.21783, section 3.3.2; DeepSpeed Ulysses, arXiv
2309.14509; both together: USP, arXiv 2405.07719.
"""

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from manyranks.parallel.collectives.messages import Group, members
from manyranks.parallel.context.checks import check_heads, fitting, groups
from manyranks.parallel.context.layouts import Keys, Mask
from manyranks.parallel.context.ring import Attention, Behind, ring_attention, zeros_like
from manyranks.parallel.flat_parameters import reduce_scatter
from manyranks.parallel.wrappers import Conjugate


def blockwise_attention(q_BASD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, **mask) -> Tensor:
    """Returns softmax(QKᵀ/√D + mask)V of one process; at most B·A·tile² scores at once.

    mask: as in ring_attention; layout makes no difference

    Saves for backward q, k, v, o and lse_BAS.
    Raises ValueError for shapes that don't fit each other or the mask.
    """
    look = Mask(**mask | {"layout": "contiguous"})
    (places_CL,) = fitting(q_BASD, k_BGSD, v_BGSD, look, 1)
    return _here(q_BASD, k_BGSD, v_BGSD, look, places_CL)


class Here(NamedTuple):
    """All keys are on this rank."""

    keys: Keys

    def visits(self, k: Tensor, v: Tensor) -> Iterator[tuple[Keys, tuple[Tensor, Tensor]]]:
        yield self.keys, (k, v)

    def behind(self) -> Behind:
        return Behind()


def _here(q: Tensor, k: Tensor, v: Tensor, look: Mask, places_CL: Tensor) -> Tensor:
    queries, (keys,) = look.sight([places_CL], 0, q.device)
    return Attention.apply(q, k, v, queries, Here(keys))


# All-gather


def all_gather_attention(
    q_BASD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, group: Group = None, **mask
) -> Tensor:
    """Attends as ring_attention does: as many bytes, in one all-gather before all else.

    While it computes, a rank holds 2·B·G·D numbers of each token of the whole sequence, and
    in backward their gradients, too. Only the own ones are kept for backward, which gathers
    again and sums gradients by a reduce-scatter. A window saves no bytes here.
    Raises ValueError as ring_attention does.
    """
    everyone, look = members(group), Mask(**mask)
    places = fitting(q_BASD, k_BGSD, v_BGSD, look, len(everyone.ranks))
    queries, keys = look.sight(places, everyone.place, q_BASD.device)
    return Attention.apply(q_BASD, k_BGSD, v_BGSD, queries, Gathered(group, keys))


class Gathered(NamedTuple):
    """All ranks' keys come at once."""

    group: Group
    keys: list[Keys]  # where each rank's stand in the sequence

    def visits(self, k_BGSD: Tensor, v_BGSD: Tensor) -> Iterator[tuple[Keys, Tensor]]:
        own = torch.stack((k_BGSD, v_BGSD)).contiguous()
        kv_N2BGSD = own[None]
        if len(self.keys) > 1:
            kv_N2BGSD = own.new_empty(len(self.keys), *own.shape)
            dist.all_gather_single(kv_N2BGSD.flatten(0, 1), own, group=self.group)
        del own
        yield from zip(self.keys, kv_N2BGSD, strict=True)

    def behind(self) -> "Scattered":
        return Scattered(self.group, len(self.keys))


class Scattered:
    """Gradients of the keys of a group's n ranks, which go home at once."""

    def __init__(self, group: Group, n: int):
        self.group, self.n, self.visited = group, n, 0
        self.dkv_N2BGSD: Tensor | None = None

    def room(self, k_BGSD: Tensor) -> Tensor:
        if self.dkv_N2BGSD is None:
            self.dkv_N2BGSD = zeros_like(k_BGSD, self.n, 2)
        return self.dkv_N2BGSD[self.visited]

    def add(self, part: Tensor) -> None:
        self.visited += 1  # the part lies in its place

    def home(self) -> Tensor:
        own = reduce_scatter(self.dkv_N2BGSD.flatten(), self.group)
        return own.view_as(self.dkv_N2BGSD[0])


# Ulysses


def ulysses_attention(
    q_BASD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, group: Group = None, **mask
) -> Tensor:
    """Attends as ring_attention does, by four all-to-alls forward, and four backward.

    A rank sends less as N grows: (N − 1)/N of its shard for each of q, k, v and o.
    N must divide the query heads. Where there are more ranks than key/value heads, N must
    be a multiple of these: each rank then gets a copy of the one that its queries read.
    Saves for backward q, k, v and o of all tokens and the rank's heads, and their lse.
    Raises ValueError as ring_attention does, and for heads that do not fit N.
    """
    n, look = len(members(group).ranks), Mask(**mask)
    places_CL = torch.cat(fitting(q_BASD, k_BGSD, v_BGSD, look, n))
    check_heads(q_BASD.shape[1], k_BGSD.shape[1], n)
    qkv = to_heads(q_BASD, k_BGSD, v_BGSD, group)
    return to_tokens(_here(*qkv, look, places_CL), group)


def ring_ulysses_attention(
    q_BASD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, mesh: DeviceMesh, **mask
) -> Tensor:
    """Attends as ring_attention does, on a mesh of R × U ranks.

    Its axes are "ring" and "ulysses". A rank has the tokens of
    layouts.positions(layout, seq, R · U, sharing=U).
    Raises ValueError as ring_attention and ulysses_attention do, and for another mesh.
    """
    ring, ulysses = groups(mesh)
    u = dist.get_world_size(ulysses)
    fitting(q_BASD, k_BGSD, v_BGSD, Mask(**mask), mesh.size(), u)
    check_heads(q_BASD.shape[1], k_BGSD.shape[1], u)
    qkv = to_heads(q_BASD, k_BGSD, v_BGSD, ulysses)
    return to_tokens(ring_attention(*qkv, ring, **mask), ulysses)


def to_heads(q_BASD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, group: Group) -> list[Tensor]:
    """Exchanges all heads of this rank's tokens for its heads of all tokens."""
    n, heads = dist.get_world_size(group), k_BGSD.shape[1]
    if n > heads:  # autograd sums the gradients of a head's copies
        copies = torch.arange(n, device=k_BGSD.device) * heads // n
        k_BGSD, v_BGSD = k_BGSD.index_select(1, copies), v_BGSD.index_select(1, copies)
    there, back = partial(_exchange, 1, 2, group), partial(_exchange, 2, 1, group)
    return [Conjugate.apply(x, there, back) for x in (q_BASD, k_BGSD, v_BGSD)]


def to_tokens(o_BhTD: Tensor, group: Group) -> Tensor:
    """Exchanges them back."""
    there, back = partial(_exchange, 2, 1, group), partial(_exchange, 1, 2, group)
    return Conjugate.apply(o_BhTD, there, back)


def _exchange(cut: int, join: int, group: Group, x: Tensor) -> Tensor:
    """Part r along dim `cut` goes to rank r; what comes is put together along `join`."""
    out = torch.stack(x.chunk(dist.get_world_size(group), cut)).contiguous()
    came = out
    if len(out) > 1:
        came = torch.empty_like(out)
        dist.all_to_all_single(came, out, group=group)
    return torch.cat(list(came), join)
