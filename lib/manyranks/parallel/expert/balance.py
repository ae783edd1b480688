"""Two ways to keep the experts equally busy: a loss, and biases that need none.

T tokens   E experts   K choices of a token   L layers with experts
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn


def auxiliary_loss(
    probabilities_TE: Tensor, counts_E: Tensor, top_k: int, ranks: int = 1
) -> Tensor:
    """E·Σ f·P over the experts: 1 where all are alike, more where many like the same.

    f: the share of the choices that an expert got, from counts_E, those of ALL ranks; it
    has no gradient. P: the mean probability that the router gave it, which has. A rank
    knows P of its own tokens only, so this is its share, times `ranks`: the mean over the
    ranks is the loss of one process with all tokens.
    Source: Switch Transformers, arXiv 2101.03961, equations 4 to 6.
    """
    counts_E = counts_E.to(probabilities_TE.dtype)
    choices = counts_E.sum().clamp(min=1)
    P_E = probabilities_TE.sum(0) * (ranks * top_k / choices)
    return len(counts_E) * (counts_E / choices * P_E).sum()


def new_bias(bias_E: Tensor, counts_E: Tensor, speed: float) -> Tensor:
    """Biases after a step: `speed` more for an expert that got less than the mean.

    And `speed` less for one that got more. Source: Wang et al., "Auxiliary-Loss-Free Load
    Balancing", arXiv 2408.15664, section 3.1.
    """
    missing_E = counts_E.double().mean() - counts_E
    return bias_E + speed * missing_E.sign().to(bias_E.dtype)


def take_counts(routers: Sequence[nn.Module]) -> Tensor:
    """counts_LE: what each router has counted since the last time; back to 0."""
    counts_LE = torch.stack([router.counts_E for router in routers])
    for router in routers:
        router.counts_E.zero_()
    return counts_LE


def move_biases(routers: Sequence[nn.Module], counts_LE: Tensor) -> None:
    """Once a step, with the counts of all ranks, so that biases stay equal on them."""
    for router, counts_E in zip(routers, counts_LE, strict=True):
        if router.bias_speed:
            router.bias_E.copy_(new_bias(router.bias_E, counts_E, router.bias_speed))
