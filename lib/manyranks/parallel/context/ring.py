"""Ring attention: queries stay at home, keys and values go round.

    N ranks, each with S tokens   B batch   A query heads   G key/value heads   D head size

In N − 1 hops every rank's keys and values visit every other rank, as one message to the
next rank; the next block is on its way while the queries look at this one. Backward, they
go round again, and behind each block travels the gradient that it has collected.

Source: Liu et al., "Ring Attention with Blockwise Transformers", arXiv 2310.01889.
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from manyranks.parallel.collectives.messages import Members, members, wait
from manyranks.parallel.context import blockwise
from manyranks.parallel.context.blockwise import TILE, Found, Output, check, zeros_like
from manyranks.parallel.context.layouts import positions
from manyranks.parallel.context.sight import (
    Keys,
    Queries,
    check_documents,
    keys_of,
    queries_of,
)

Group = dist.ProcessGroup | None


def ring_attention(
    q_BASD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    group: Group = None,
    causal: bool = True,
    layout: str = "zigzag",
    documents_BT: Tensor | None = None,
    tile: int = TILE,
) -> Tensor:
    """softmax(QKᵀ/√D + mask)V of a sequence of which each rank has S tokens: the own rows.

    layout: which tokens these are, see layouts. documents_BT: of the whole sequence, the
    same on every rank; a token sees its own document, a run of equal numbers, only. tile:
    tokens; a pair of tiles of which nothing is visible is skipped. Saved for backward: q,
    k, v, o and lse_BAS of the own tokens. A rank sends (N − 1)·2BGSD numbers, in backward
    as many again and as many sums of gradients, these in 32 bits or more.
    Raises ValueError, before any message, for shapes that do not fit each other, for a
    sequence that does not suit the layout, and on a rank that the group has not.
    """
    queries, keys = own_queries(
        q_BASD, k_BGSD, v_BGSD, group, causal, layout, documents_BT, tile
    )
    return _Ring.apply(q_BASD, k_BGSD, v_BGSD, queries, keys, group)


class _Ring(torch.autograd.Function):
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
        for source, kv_2BGSD in visits(torch.stack((k_BGSD, v_BGSD)), members(group)):
            blockwise.attend(found, q_BASD, *kv_2BGSD, queries, keys[source])
        o_BASD = found.o_BASD.to(q_BASD.dtype)
        ctx.save_for_backward(q_BASD, k_BGSD, v_BGSD, o_BASD, found.lse_BAS)
        ctx.queries, ctx.keys, ctx.group = queries, keys, group
        return o_BASD

    @staticmethod
    @once_differentiable
    def backward(ctx, do_BASD: Tensor) -> tuple:
        q_BASD, k_BGSD, v_BGSD, o_BASD, lse_BAS = ctx.saved_tensors
        output, dq_BASD = Output.of(o_BASD, lse_BAS, do_BASD), zeros_like(q_BASD)
        collected = _Collected(members(ctx.group))
        for source, kv_2BGSD in visits(torch.stack((k_BGSD, v_BGSD)), collected.everyone):
            dkv_2BGSD = zeros_like(kv_2BGSD)
            sight = ctx.queries, ctx.keys[source]
            blockwise.attend_backward(dq_BASD, dkv_2BGSD, output, q_BASD, *kv_2BGSD, *sight)
            collected.add(dkv_2BGSD)
        dk_BGSD, dv_BGSD = collected.home().to(k_BGSD.dtype)
        return dq_BASD.to(q_BASD.dtype), dk_BGSD, dv_BGSD, None, None, None


def visits(own: Tensor, everyone: Members) -> Iterator[tuple[int, Tensor]]:
    """Each rank's block, the own first, then that of the rank before, …; with its rank.

    While the caller works on one, the next is on its way. A block is good until the next
    one is asked for: its memory is used again. own is used up.
    """
    n, rank, spare = len(everyone.ranks), everyone.place, None
    block = own.contiguous()  # torch.stack follows the strides of some inputs
    for hop in range(n - 1):
        coming = torch.empty_like(block) if spare is None else spare
        works = everyone.post(block, (rank + 1) % n, coming, (rank - 1) % n)
        yield (rank - hop) % n, block
        wait(works)
        block, spare = coming, block
    yield (rank + 1) % n, block


class _Collected:
    """Gradients of blocks, each of which travels behind its block and gains at every rank.

    The first block is the own one: its part stays here, others' come home at the end.
    """

    def __init__(self, everyone: Members):
        self.everyone, self._works = everyone, []
        self.own: Tensor | None = None

    def add(self, part: Tensor) -> None:
        """What this rank adds to the block that visits it now."""
        if self.own is None:
            self.own = part
            return
        if self._works:  # behind the second visitor comes what others have added to it
            part += self._arrived()
        n, rank = len(self.everyone.ranks), self.everyone.place
        self._leaving, self._coming = part, torch.empty_like(part)
        where = (rank + 1) % n, self._coming, (rank - 1) % n
        self._works = self.everyone.post(self._leaving, *where)

    def home(self) -> Tensor:
        """The whole gradient of this rank's own block."""
        if self._works:
            self.own += self._arrived()
        return self.own

    def _arrived(self) -> Tensor:
        wait(self._works)
        self._works = []  # they hold the tensors
        arrived, self._leaving, self._coming = self._coming, None, None
        return arrived


def own_queries(
    q_BASD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    group: Group,
    causal: bool,
    layout: str,
    documents_BT: Tensor | None,
    tile: int,
) -> tuple[Queries, list[Keys]]:
    """What this rank's queries see, and where each rank's keys stand.

    Raises ValueError as ring_attention does.
    """
    check(q_BASD, k_BGSD, v_BGSD, tile)
    everyone = members(group)
    n, seq = len(everyone.ranks), q_BASD.shape[2] * len(everyone.ranks)
    check_documents(documents_BT, q_BASD.shape[0], seq)
    places = positions(layout, seq, n)
    queries = queries_of(places[everyone.place], tile, causal, documents_BT, q_BASD.device)
    return queries, [keys_of(places_CL, tile, q_BASD.device) for places_CL in places]
