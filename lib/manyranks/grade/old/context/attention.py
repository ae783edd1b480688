"""Causal attention by positions, in one process: a block, its gradients, and the merging of blocks; float64."""

import torch
from torch import Tensor

LEAST = -1e300  # finite, so that −∞ less it is −∞

Pair = tuple[Tensor, Tensor]  # o_SBAD, lse_SBA


def _scores(q_SBAD: Tensor, k_TBAD: Tensor, q_at_S: Tensor, k_at_T: Tensor) -> Tensor:
    scores_BAST = torch.einsum("sbad,tbad->bast", q_SBAD, k_TBAD) / q_SBAD.shape[-1] ** 0.5
    return scores_BAST.masked_fill(q_at_S[:, None] < k_at_T, -torch.inf)


def _for_each(x_TBGD: Tensor, heads: int) -> Tensor:
    """Query head j uses head j % G."""
    return x_TBGD.repeat(1, 1, heads // x_TBGD.shape[2], 1)


def attend(q_SBAD: Tensor, k_TBGD: Tensor, v_TBGD: Tensor, q_at_S: Tensor, k_at_T: Tensor) -> Pair:
    """(o_SBAD, lse_SBA); 0 and −∞ where a query sees no key."""
    heads = q_SBAD.shape[2]
    scores_BAST = _scores(q_SBAD, _for_each(k_TBGD, heads), q_at_S, k_at_T)
    lse_BAS = scores_BAST.logsumexp(-1)
    p_BAST = (scores_BAST - lse_BAS.clamp(min=LEAST)[..., None]).exp()
    return torch.einsum("bast,tbad->sbad", p_BAST, _for_each(v_TBGD, heads)), lse_BAS.permute(2, 0, 1)


def attend_backward(
    q_SBAD: Tensor,
    k_TBGD: Tensor,
    v_TBGD: Tensor,
    o_SBAD: Tensor,
    lse_SBA: Tensor,
    do_SBAD: Tensor,
    q_at_S: Tensor,
    k_at_T: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq_SBAD, dk_TBGD, dv_TBGD): a block's part of the gradients. o_SBAD, lse_SBA: of all keys."""
    heads, groups = q_SBAD.shape[2], (-1, k_TBGD.shape[2])
    k_TBAD, v_TBAD = _for_each(k_TBGD, heads), _for_each(v_TBGD, heads)
    scores_BAST = _scores(q_SBAD, k_TBAD, q_at_S, k_at_T)
    p_BAST = (scores_BAST - lse_SBA.permute(1, 2, 0).clamp(min=LEAST)[..., None]).exp()
    dp_BAST = torch.einsum("sbad,tbad->bast", do_SBAD, v_TBAD)
    delta_BAS = (do_SBAD * o_SBAD).sum(-1).permute(1, 2, 0)
    ds_BAST = p_BAST * (dp_BAST - delta_BAS[..., None]) / q_SBAD.shape[-1] ** 0.5
    dk_TBAD = torch.einsum("bast,sbad->tbad", ds_BAST, q_SBAD)
    dv_TBAD = torch.einsum("bast,sbad->tbad", p_BAST, do_SBAD)
    dk_TBGD, dv_TBGD = (x.unflatten(2, groups).sum(2) for x in (dk_TBAD, dv_TBAD))
    return torch.einsum("bast,tbad->sbad", ds_BAST, k_TBAD), dk_TBGD, dv_TBGD


def merge(parts: list[Pair]) -> Pair:
    """Of all the parts' keys together."""
    o_PSBAD, lse_PSBA = (torch.stack(one) for one in zip(*parts, strict=True))
    most_SBA = lse_PSBA.amax(0).clamp(min=LEAST)
    weights_PSBA = (lse_PSBA - most_SBA).exp()
    total_SBA = weights_PSBA.sum(0)
    return (weights_PSBA[..., None] * o_PSBAD).sum(0) / total_SBA.clamp(min=1)[..., None], most_SBA + total_SBA.log()


def whole(q_TBAD: Tensor, k_TBGD: Tensor, v_TBGD: Tensor) -> Tensor:
    """Of a sequence whose tokens stand in its order."""
    at_T = torch.arange(len(q_TBAD))
    return attend(q_TBAD, k_TBGD, v_TBGD, at_T, at_T)[0]
