"""Capacity: the most copies that an expert takes of one rank's tokens.

    T tokens   K choices of a token   E experts

What comes beyond it is dropped: the token passes that expert by, on the residual
connection. So an expert's rows have a limit, whatever the router does.
Source: GShard, arXiv 2006.16668, section 2.2 and algorithm 1.
"""

import math

import torch
from torch import Tensor


def capacity(tokens: int, top_k: int, experts: int, factor: float) -> int:
    """Copies that one expert takes of so many tokens: factor times the mean, rounded up.

    Raises ValueError for a factor that is not above 0.
    """
    check_factor(factor)
    return math.ceil(factor * tokens * top_k / experts)


def check_factor(factor: float | None) -> None:
    """Raises ValueError for what is no capacity factor; None is dropless."""
    if factor is not None and not 0 < factor < math.inf:
        raise ValueError(f"capacity={factor!r}: a factor above 0, or None to drop nothing")


def drop(experts_TK: Tensor, capacity: int, experts: int) -> Tensor:
    """The choices, with −1 in the place of those that come when their expert is full.

    First come, first served: all tokens' first choices, then their second ones, and so on,
    each in the order of the tokens.
    """
    in_turn_R = experts_TK.mT.flatten()
    asked_RE = torch.nn.functional.one_hot(in_turn_R, experts)
    place_R = asked_RE.cumsum(0).gather(1, in_turn_R[:, None])[:, 0]  # 1 for the first
    kept_R = in_turn_R.masked_fill(place_R > capacity, -1)
    return kept_R.view(experts_TK.mT.shape).mT.contiguous()
