"""Attention as its definition says: all scores, and a mask of the whole sequence made by the rule."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F


def draw(*shape: int, seed: int = 0) -> Tensor:
    """The same numbers in every process, in 64 bits."""
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def mask_of(seq: int, causal: bool, documents_BT: Tensor | None, window: int | None = None) -> Tensor:
    """The keys that a query sees, [B or 1, 1, S, S]: a document is a run of equal numbers."""
    mask = torch.ones(1, seq, seq, dtype=torch.bool)
    if causal:
        mask = mask.tril()
    if window is not None:
        mask = mask.triu(1 - window).tril(window - 1)
    if documents_BT is not None:
        run_BS = F.pad((documents_BT.diff(dim=1) != 0).cumsum(1), (1, 0))
        mask = mask & (run_BS[:, :, None] == run_BS[:, None, :])
    return mask[:, None]


def full(q: Tensor, k: Tensor, v: Tensor, causal: bool = True, documents_BT: Tensor | None = None, **more) -> Tensor:
    """Called as blockwise_attention is; tile has no effect."""
    mask = mask_of(q.shape[2], causal, documents_BT, more.get("window"))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def differences(attend, one_process, whole: list[Tensor], cut, weights: Iterable[Tensor] = (), learn: str = "") -> float:
    """The largest difference of a rank's output and gradients from one process's with all tokens. cut: gives a rank's
    part of what tokens have. Gradients of weights, which every rank has, are summed. learn: the places in whole that
    do."""
    expected, weights = one_process(*whole, *weights), [*weights]
    pull = draw(*expected.shape, seed=9)
    right = torch.autograd.grad((expected * pull).sum(), whole + weights)
    own = [cut(x.detach()).requires_grad_(not learn or str(k) in learn) for k, x in enumerate(whole)]
    o = attend(*own, *weights)
    (o * cut(pull)).sum().backward()
    sums = [weight.grad.contiguous() for weight in weights]
    for total in sums:
        dist.all_reduce(total)
    theirs = [cut(x) for x in right[: len(own)]] + [*right[len(own) :]]
    grads = zip([x.grad for x in own] + sums, theirs, strict=True)
    return gap([(o, cut(expected)), *(pair for pair in grads if pair[0] is not None)])


def gap(pairs: list[tuple[Tensor, Tensor]]) -> float:
    """The largest difference of a number of (ours, expected)."""
    assert all(a.shape == b.shape and a.dtype == b.dtype for a, b in pairs)
    return largest((a - b).abs().max().item() for a, b in pairs)


def largest(differences: Iterable[float]) -> float:
    """NaN where one is, which Python's max passes over."""
    return torch.tensor(list(differences)).max().item()


def wrong(results: Iterable[dict[str, float]], most: float = 1e-12) -> list[tuple[str, float]]:
    """Cases of all ranks that are off by more, or by NaN."""
    return [(case, error) for found in results for case, error in found.items() if not error < most]
