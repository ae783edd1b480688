"""Linear attention over ranks: a state is passed on, and no key.

    S_t = a_t·S_{t−1} + k_t v_tᵀ        o_t = q_t S_t

All that a token knows of those before it is a state of D × V numbers per head, however many
they are. A rank's tokens turn the state S before them into d·S + L: d is the product of
their decays, and L their own state, as if nothing came before. Two such pairs in a row make
one:

    first (d, L), then (d′, L′)   is   (d′d, d′L + L′)

So nobody has to wait for the rank before: all make their pairs at the same time, gather
them, and each puts together those before it. Backward, the same goes the other way round.
Mamba-2, RetNet and gated linear attention with one decay per head are of this form.

    N ranks, rank r with the r-th N-th of the sequence   B batch   A heads   D key size
    S a rank's tokens   C tokens of a chunk   V value size

Sources: Mamba-2, arXiv 2405.21060, section 6 (chunks) and 8.2 (ranks); LASP-2, arXiv
2502.07563 (the all-gather).
"""

import math

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from manyranks.parallel.collectives.messages import Group, Members, members
from manyranks.parallel.context.ring import zeros_like

CHUNK = 64  # tokens


def linear_attention(
    q_BASD: Tensor,
    k_BASD: Tensor,
    v_BASV: Tensor,
    log_decay_BAS: Tensor,
    group: Group = None,
    chunk: int = CHUNK,
) -> Tensor:
    """Returns the own rows of linear attention over a sequence cut over the ranks, o_BASV.

    q_BASD, k_BASD, v_BASV: of this rank's tokens, the r-th N-th of the sequence
    log_decay_BAS: the logarithm of each a_t, 0 or less and finite; −1 keeps 1/e per token
    group: the ranks that share the sequence, None for all
    chunk: tokens whose scores are computed at once

    A rank contributes BA(DV + 1) numbers to an all-gather, in backward BADV to another one,
    in 32 bits or more, however long the sequence is.
    Raises ValueError, before any message, for shapes that don't fit each other and a chunk
    below 1, and on a rank that isn't in the group.
    """
    everyone = members(group)
    _check(q_BASD, k_BASD, v_BASV, log_decay_BAS, chunk)
    precise = zeros_like(q_BASD, 0).dtype
    q, k, v, log = (x.to(precise) for x in (q_BASD, k_BASD, v_BASV, log_decay_BAS))
    with torch.autocast(q.device.type, enabled=False):
        o_BASV, state_BADV = chunkwise(q, k, v, log, chunk)
        since_BAS = log.cumsum(-1)  # of the decays since the rank's first token
        decay_BA = since_BAS[..., -1].exp()
        before_BADV = Before.apply(decay_BA, state_BADV, everyone)
        o_BASV = o_BASV + (q * since_BAS.exp()[..., None]) @ before_BADV
    return o_BASV.to(q_BASD.dtype)


def chunkwise(
    q_BASD: Tensor, k_BASD: Tensor, v_BASV: Tensor, log_decay_BAS: Tensor, chunk: int
) -> tuple[Tensor, Tensor]:
    """Returns the output and the last state of tokens before which there is nothing.

    In a chunk scores are computed as in attention, and the state stands for all before it.
    """
    state_BADV = (k_BASD[:, :, :1].mT @ v_BASV[:, :, :1]) * 0
    outputs = []
    tensors = (q_BASD, k_BASD, v_BASV, log_decay_BAS)
    for q, k, v, log in zip(*(x.split(chunk, 2) for x in tensors), strict=True):
        since_BAC = log.cumsum(-1)
        between_BACC = since_BAC[..., :, None] - since_BAC[..., None, :]
        later = torch.ones(between_BACC.shape[-2:], device=q.device).triu(1).bool()
        scores_BACC = (q @ k.mT) * between_BACC.masked_fill(later, -math.inf).exp()
        outputs.append(scores_BACC @ v + (q * since_BAC.exp()[..., None]) @ state_BADV)
        left_BAC = (since_BAC[..., -1:] - since_BAC).exp()  # of a token at the chunk's end
        whole_BA11 = since_BAC[..., -1:, None].exp()
        state_BADV = whole_BA11 * state_BADV + (k * left_BAC[..., None]).mT @ v
    return torch.cat(outputs, 2), state_BADV


class Before(torch.autograd.Function):
    """Turns each rank's decay and own state into the state before this rank's tokens."""

    @staticmethod
    def forward(ctx, decay_BA: Tensor, state_BADV: Tensor, everyone: Members) -> Tensor:
        pair = torch.cat((decay_BA[..., None], state_BADV.flatten(2)), -1)
        decays_NBA11, states = gathered(pair, everyone)[..., None].split(
            (1, pair.shape[-1] - 1), 3
        )
        states_NBADV = states.view(-1, *state_BADV.shape)
        before_BADV = torch.zeros_like(state_BADV)
        for rank in range(everyone.place):
            before_BADV = decays_NBA11[rank] * before_BADV + states_NBADV[rank]
        ctx.save_for_backward(decays_NBA11.clone(), before_BADV)
        ctx.everyone = everyone
        return before_BADV

    @staticmethod
    @once_differentiable
    def backward(ctx, dbefore_BADV: Tensor) -> tuple:
        decays_NBA11, before_BADV = ctx.saved_tensors
        dbefore_NBADV = gathered(dbefore_BADV, ctx.everyone)
        dafter_BADV = torch.zeros_like(before_BADV)  # of the state after this rank's tokens
        for rank in reversed(range(ctx.everyone.place + 1, len(dbefore_NBADV))):
            dafter_BADV = dbefore_NBADV[rank] + decays_NBA11[rank] * dafter_BADV
        return (dafter_BADV * before_BADV).sum((-2, -1)), dafter_BADV, None


def gathered(own: Tensor, everyone: Members) -> Tensor:
    """All ranks' tensors, stacked."""
    n, own = len(everyone.ranks), own.contiguous()
    if n == 1:
        return own[None]
    together = own.new_empty(n, *own.shape)
    dist.all_gather_single(together.flatten(0, 1), own, group=everyone.group)
    return together


def _check(
    q_BASD: Tensor, k_BASD: Tensor, v_BASV: Tensor, log_decay_BAS: Tensor, chunk: int
) -> None:
    """Raises ValueError for tensors that don't fit each other, and a chunk below 1."""
    shapes = [tuple(x.shape) for x in (q_BASD, k_BASD, v_BASV, log_decay_BAS)]
    q, k, v, decay = shapes
    if list(map(len, shapes)) != [4, 4, 4, 3] or q != k or not q[:3] == v[:3] == decay:
        raise ValueError(
            f"q, k, v and log_decay have shapes {q}, {k}, {v} and {decay}: give "
            "[B, A, S, D] twice, [B, A, S, V] and [B, A, S]"
        )
    if min(*q, v[3]) < 1:
        raise ValueError(f"q has shape {q} and v {v}: give at least one token and number")
    if type(chunk) is not int or chunk < 1:
        raise ValueError(f"chunk={chunk!r}: give a whole number of tokens, 1 or more")
