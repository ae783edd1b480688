"""Tokens that like some experts more than others, for the checks of exercise 08_expert."""

from typing import NamedTuple

import torch
from torch import Tensor

from manyranks.given.numbers import normal


class Case(NamedTuple):
    """A case of a task; what it does not need is empty.

    tokens: of each rank; dropped: whether some copies are; liked: how much more the first experts are than the last, or all by
    bias; n, limit, factor: arguments; e: ranks of an expert-parallel group; strided: whether rows are not contiguous.
    """

    tokens: tuple[int, ...] = ()
    E: int = 0
    K: int = 0
    H: int = 0
    dropped: bool = False
    liked: float = 0
    n: int = 0
    limit: int = 0
    factor: float = 0
    e: int = 0
    strided: bool = False

    def __str__(self) -> str:
        return "with " + ", ".join(f"{name} = {value}" for name, value in self._asdict().items() if value)

    def mine(self, rank: int, seed: int) -> tuple[Tensor, Tensor, list[int], list[int]]:
        """A rank's experts_KT and gates_KT; how many rows go to each rank, and come from each."""
        ranks, every = range(len(self.tokens)), []
        for r, tokens in enumerate(self.tokens):
            liked_TE = normal((tokens, self.E), seed, self, r) + torch.linspace(self.liked, 0, self.E)
            every.append(liked_TE.argsort(1, descending=True)[:, : self.K].T.contiguous())
            if self.dropped:
                every[-1].view(-1)[1::3] = -1
                every[-1][:, :1] = -1  # a token that goes nowhere
        table = [[int(((one >= 0) & (one % len(ranks) == r)).sum()) for r in ranks] for one in every]
        gates_KT = normal(every[rank].shape, seed, "gates", rank).sigmoid().where(every[rank] >= 0, 0)
        return every[rank], gates_KT, table[rank], [row[rank] for row in table]
