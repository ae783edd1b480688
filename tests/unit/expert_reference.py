"""Experts as their papers say: token by token, in plain sums and loops."""

import math

import torch
from torch import Tensor


def chosen(row: list[float], k: int, bias: list[float] | None = None, groups: int = 1, per_token: int = 1) -> list[int]:
    """The experts of one token, best first, of equal ones the lower number. DeepSeek-V3, arXiv 2412.19437, section 2.1.2."""
    wanted = [score + b for score, b in zip(row, bias or [0.0] * len(row), strict=True)]
    size = len(row) // groups
    members = [range(g * size, (g + 1) * size) for g in range(groups)]
    share = min(math.ceil(k / per_token), size)
    sums = [sum(sorted((wanted[i] for i in group), reverse=True)[:share]) for group in members]
    open_groups = sorted(range(groups), key=lambda g: (-sums[g], g))[:per_token] if groups > 1 else [0]
    allowed = [i for g in open_groups for i in members[g]]
    return sorted(allowed, key=lambda i: (-wanted[i], i))[:k]


def kept(choices: list[list[int]], most: int) -> list[list[int]]:
    """−1 for what comes when its expert is full: first choices of all tokens first. GShard, arXiv 2006.16668, algorithm 1."""
    taken: dict[int, int] = {}
    left = [list(row) for row in choices]
    for place in range(len(choices[0]) if choices else 0):
        for row in left:
            expert = row[place]
            if taken.get(expert, 0) == most:
                row[place] = -1
            else:
                taken[expert] = taken.get(expert, 0) + 1
    return left


def mixture(x_TH: Tensor, choices: list[list[int]], gates_TK: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Each token through its experts, one after the other."""
    out = []
    for x, row, gates in zip(x_TH, choices, gates_TK, strict=True):
        y = torch.zeros_like(x)
        for expert, share in zip(row, gates, strict=True):
            if expert >= 0:
                inner = gate[expert] @ x
                y = y + share * (down[expert] @ (inner / (1 + torch.exp(-inner)) * (up[expert] @ x)))
        out.append(y)
    return torch.stack(out) if out else x_TH.clone()


def layer(
    shards: list[Tensor],
    router_EH: Tensor,
    experts: list[Tensor],
    k: int,
    scores: str = "softmax",
    bias: list[float] | None = None,
    groups: int = 1,
    per_token: int = 1,
    capacity: float | None = None,
    normalize: bool = True,
    scale: float = 1.0,
) -> tuple[list[Tensor], Tensor, list[int]]:
    """A router and its experts on the tokens of several ranks: their outputs, the auxiliary loss of all, the counts of all.

    Copies are dropped rank by rank. The loss: Switch Transformers, arXiv 2101.03961, equations 4 to 6.
    """
    outputs, counts, probabilities = [], [0] * len(router_EH), []
    for x_TH in shards:
        logits_TE = x_TH @ router_EH.mT
        exp_TE = logits_TE.exp()
        scores_TE = exp_TE / exp_TE.sum(1, keepdim=True) if scores == "softmax" else exp_TE / (1 + exp_TE)
        probabilities += list(scores_TE / scores_TE.sum(1, keepdim=True))
        rows = [chosen(row, k, bias, groups, per_token) for row in scores_TE.tolist()]
        for expert in (i for row in rows for i in row):
            counts[expert] += 1
        gates = [scale * scores_TE[t, row] / (scores_TE[t, row].sum() if normalize else 1) for t, row in enumerate(rows)]
        if capacity is not None:
            rows = kept(rows, math.ceil(capacity * len(x_TH) * k / len(router_EH)))
        outputs.append(mixture(x_TH, rows, torch.stack(gates) if gates else x_TH.new_zeros(0, k), *experts))
    mean_E, f_E = torch.stack(probabilities).mean(0), [count / sum(counts) for count in counts]
    return outputs, len(counts) * sum(f * p for f, p in zip(f_E, mean_E, strict=True)), counts
