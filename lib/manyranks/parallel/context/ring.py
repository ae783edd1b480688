"""Ring attention: queries stay at home, keys and values go round.

A block of keys gives a query (o, lse): the output as if there were no other keys, and the
logarithm of the sum of their exponentials. Two such pairs merge into the pair of both
blocks. So blocks can come one after the other, from whatever rank has them.

    N ranks   B batch   S a rank's tokens   T tokens of a block   D head size
    A query heads   G key/value heads   R query heads of one key/value head, A/G
    U is B·G   Q is R times a tile of queries   t a tile of keys

Sources: Ring Attention, arXiv 2310.01889; online softmax, arXiv 1805.02867; the forward
and the backward of a block, FlashAttention-2, arXiv 2307.08691, sections 2.3 and 3.1.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import wraps
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from manyranks.parallel.collectives.messages import Group, Members, members, wait
from manyranks.parallel.context.checks import fitting
from manyranks.parallel.context.layouts import Keys, Mask, Queries, hidden, pairs


def ring_attention(
    q_BASD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, group: Group = None, **mask
) -> Tensor:
    """Returns the own rows of softmax(QKᵀ/√D + mask)V, for a sequence cut over the ranks.

    q_BASD, k_BGSD, v_BGSD: of this rank's tokens
    group: the ranks that share the sequence, None for all
    mask: causal=, layout=, documents_BT=, window= and tile=, as Mask takes them

    Saves for backward q, k, v, o and lse_BAS of the own tokens. A rank sends (N − 1)·2BGSD
    numbers, in backward as many again and as many sums of gradients, in 32 bits or more;
    less where a window or documents leave hops without use.
    Raises ValueError, before any message, for shapes that don't fit each other, for a
    sequence that doesn't suit the layout, and on a rank that isn't in the group.
    """
    everyone, look = members(group), Mask(**mask)
    places = fitting(q_BASD, k_BGSD, v_BGSD, look, len(everyone.ranks))
    queries, keys = look.sight(places, everyone.place, q_BASD.device)
    ring = Ring(everyone, keys, look.stops(places))
    return Attention.apply(q_BASD, k_BGSD, v_BGSD, queries, ring)


def merge(
    o: Tensor, lse: Tensor, other_o: Tensor, other_lse: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the output and the log-sum-exp of two sets of keys together.

    o, other_o: [.., D]; any finite output for a set with nothing visible
    lse, other_lse: [..]; −∞ for such a set

    Only differences are exponentiated, so no score is too large.
    """
    number = torch.finfo(lse.dtype)  # its least and tiniest: −∞ − −∞ and 0/0 would be NaN
    most = torch.maximum(lse, other_lse).clamp_min(number.min)
    weight, other_weight = (lse - most).exp(), (other_lse - most).exp()
    total = weight + other_weight
    # Not exp(lse − the new lse), which is rounded: the shares must add up to 1.
    share, other_share = (x / total.clamp_min(number.tiny) for x in (weight, other_weight))
    return o * share[..., None] + other_o * other_share[..., None], most + total.log()


class Attention(torch.autograd.Function):
    """Attention of the own queries to keys and values that come block by block.

    way: how they come, and how their gradients get home: a Ring, Gathered or Here
    """

    @staticmethod
    def forward(
        ctx, q_BASD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, queries: Queries, way
    ) -> Tensor:
        found = Found.nothing(q_BASD)
        for keys, (k_BGTD, v_BGTD) in way.visits(k_BGSD, v_BGSD):
            attend(found, q_BASD, k_BGTD, v_BGTD, queries, keys)
        o_BASD = found.o_BASD.to(q_BASD.dtype)
        ctx.save_for_backward(q_BASD, k_BGSD, v_BGSD, o_BASD, found.lse_BAS)
        ctx.queries, ctx.way = queries, way
        return o_BASD

    @staticmethod
    @once_differentiable
    def backward(ctx, do_BASD: Tensor) -> tuple:
        q_BASD, k_BGSD, v_BGSD, o_BASD, lse_BAS = ctx.saved_tensors
        output, dq_BASD = Output.of(o_BASD, lse_BAS, do_BASD), zeros_like(q_BASD)
        behind = ctx.way.behind()
        for keys, (k_BGTD, v_BGTD) in ctx.way.visits(k_BGSD, v_BGSD):
            dkv_2BGTD = behind.room(k_BGTD)
            block = q_BASD, k_BGTD, v_BGTD, ctx.queries, keys
            attend_backward(dq_BASD, dkv_2BGTD, output, *block)
            behind.add(dkv_2BGTD)
        dk_BGSD, dv_BGSD = behind.home().to(k_BGSD.dtype)
        return dq_BASD.to(q_BASD.dtype), dk_BGSD, dv_BGSD, None, None


# How blocks go round


class Ring(NamedTuple):
    """Blocks go from rank to rank.

    everyone: the N ranks
    keys: where the keys of each rank's block stand in the sequence
    stops: how far from home a block is looked at: 0, 1, …, N − 1 ranks, without those at
        which no rank sees anything of what it gets
    """

    everyone: Members
    keys: list[Keys]
    stops: list[int]

    def visits(self, k_BGSD: Tensor, v_BGSD: Tensor) -> Iterator[tuple[Keys, Tensor]]:
        """Yields this rank's block of keys and values, then the other ranks' blocks."""
        both = torch.stack((k_BGSD, v_BGSD))
        return self.rounds(both.contiguous())  # stack may keep odd strides

    def rounds(self, block: Tensor) -> Iterator[tuple[Keys, Tensor]]:
        """Yields this rank's block, then the rank before's, …, and where its keys stand.

        While the caller works on a block, the next one is on its way. Then its memory is
        used again.
        """
        rank, spare = self.everyone.place, None
        for stop, following in pairwise(self.stops):
            coming = torch.empty_like(block) if spare is None else spare
            works = hop(block, coming, following - stop, self.everyone)
            yield self.keys[rank - stop], block
            wait(works)
            block, spare = coming, block
        yield self.keys[rank - self.stops[-1]], block

    def behind(self) -> "Behind":
        """Returns what the blocks' gradients travel in."""
        ends = *self.stops[1:], len(self.keys)
        return Behind(self.everyone, [b - a for a, b in pairwise(ends)])


def hop(block: Tensor, coming: Tensor, ahead: int, everyone: Members) -> list[dist.Work]:
    """Starts to send a block so many ranks ahead and to receive one from as far back."""
    n, rank = len(everyone.ranks), everyone.place
    return everyone.post(block, (rank + ahead) % n, coming, (rank - ahead) % n)


class Behind:
    """Gradients of blocks: each travels behind its block and gains at every stop.

    everyone: the N ranks
    hops: ranks from a stop to the next one, and from the last one home

    The first block is the own one: its part stays here, the others' come home at the end.
    """

    def __init__(self, everyone: Members | None = None, hops: list[int] | None = None):
        self.everyone, self.hops = everyone, hops
        self.own: Tensor | None = None
        self.traveling: tuple[Tensor, ...] = ()  # what leaves, and what comes
        self.works: list[dist.Work] = []
        self.spare: list[Tensor] = []  # memory that's used again

    def room(self, k_BGTD: Tensor) -> Tensor:
        """Returns zeros, to which the gradients of the visiting block are added."""
        return self.spare.pop().zero_() if self.spare else zeros_like(k_BGTD, 2)

    def add(self, part: Tensor) -> None:
        """Sends on what others and this rank have found for the block that is here now."""
        if self.own is None:
            self.own = part
            return
        self._add_arrived(part)  # what others have found, from the second visitor on
        coming = self.spare.pop() if self.spare else torch.empty_like(part)
        self.traveling = part, coming
        self.works = hop(part, coming, self.hops.pop(0), self.everyone)

    def home(self) -> Tensor:
        """Returns the whole gradient of this rank's own block."""
        self._add_arrived(self.own)
        self.spare.clear()
        return self.own

    def _add_arrived(self, part: Tensor) -> None:
        if self.traveling:
            wait(self.works)
            part += self.traveling[1]
            self.spare += self.traveling
            self.works, self.traveling = [], ()


# One block, tile by tile: the scores of all its tokens never exist at the same time


class Found(NamedTuple):
    """The finds of queries in the keys so far. Where one has seen none, lse is −∞."""

    o_BASD: Tensor
    lse_BAS: Tensor

    @classmethod
    def nothing(cls, q_BASD: Tensor) -> "Found":
        o_BASD = zeros_like(q_BASD)
        return cls(o_BASD, torch.full_like(o_BASD[..., 0], -math.inf))


class Output(NamedTuple):
    """The finished output, as backward needs it: delta is the sum of do · o over D."""

    do_BASD: Tensor
    lse_BAS: Tensor
    delta_BAS: Tensor

    @classmethod
    def of(cls, o_BASD: Tensor, lse_BAS: Tensor, do_BASD: Tensor) -> "Output":
        delta_BAS = (do_BASD.to(lse_BAS.dtype) * o_BASD).sum(-1)
        return cls(do_BASD, lse_BAS, delta_BAS)


def zeros_like(x: Tensor, *times: int) -> Tensor:
    """Zeros in the precision of sums: 32 bits, or 64 where x has so many."""
    precise = torch.promote_types(x.dtype, torch.float32)
    return torch.zeros(*times, *x.shape, dtype=precise, device=x.device)


def not_autocast(attend: Callable) -> Callable:
    """Switches autocast off, which would make 16 bits of the scores and of merged sums."""

    @wraps(attend)
    def run(*given):
        kind = next(x for x in given if isinstance(x, Tensor)).device.type
        available = torch.amp.is_autocast_available(kind)
        with torch.autocast(kind, enabled=False) if available else nullcontext():
            return attend(*given)

    return run


@not_autocast
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
    """The output and the log-sum-exp of a pair of tiles."""
    scores_UQt = _scores(q_UQD, k_UtD, hidden_BST)
    number = torch.finfo(scores_UQt.dtype)
    most_UQ1 = scores_UQt.amax(-1, keepdim=True).clamp_min_(number.min)  # was −∞: sees none
    weights_UQt = scores_UQt.sub_(most_UQ1).exp_()
    sum_UQ1 = weights_UQt.sum(-1, keepdim=True)
    o_UQD = torch.bmm(weights_UQt, v_UtD).div_(sum_UQ1.clamp_min(number.tiny))
    return o_UQD, (most_UQ1 + sum_UQ1.log()).squeeze(-1)


@not_autocast
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
    dk_UTD, dv_UTD = (x.flatten(0, 1) for x in dkv_2BGTD)
    scale, kind = q_BASD.shape[-1] ** -0.5, lse_URS.dtype
    for rows, tiles in pairs(queries, keys):
        q_UQD = _scaled(q_URSD[:, :, rows], kind)
        do_UQD = do_URSD[:, :, rows].flatten(1, 2).to(kind)
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
    """Returns [B, A, S, …] as [U, R, S, …], the heads of each key/value head together."""
    return x_BAS.unflatten(1, (groups, -1)).flatten(0, 1)
