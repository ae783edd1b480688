"""Attention as its definition says: all scores, and a mask of the whole sequence made by the rule."""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import functional as F


def draw(*shape: int, seed: int = 0) -> Tensor:
    """The same numbers in every process, in 64 bits."""
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def mask_of(seq: int, causal: bool, documents_BT: Tensor | None, window: int | None = None) -> Tensor:
    """What a query sees, [B or 1, 1, S, S]: a document is a run of equal numbers."""
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


def gap(pairs: list[tuple[Tensor, Tensor]]) -> float:
    """The largest difference of a number of (ours, expected)."""
    assert all(a.shape == b.shape and a.dtype == b.dtype for a, b in pairs)
    return largest((a - b).abs().max().item() for a, b in pairs)


def largest(differences: Iterable[float]) -> float:
    """NaN where one is, which Python's max passes over."""
    return torch.tensor(list(differences)).max().item()
