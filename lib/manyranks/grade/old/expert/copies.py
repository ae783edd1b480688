"""The copies of a case: tokens of all ranks, their choices and gates, and where each copy goes."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from manyranks.grade.old.report import listed
from manyranks.grade.old.tensor.layout import drawn

SPREAD, DROPPED, ONE = "", "some copies dropped", "all for expert 1"


def home(expert: int, n: int, local: int) -> tuple[int, int]:
    """The rank of an expert, and its number there: experts are dealt in turn."""
    return expert % n, expert // n


def in_blocks(expert: int, n: int, local: int) -> tuple[int, int]:
    """The same in the chapter's layout."""
    return expert // local, expert % local


class Way(NamedTuple):
    """How copies go; the defaults are right.

    home: of an expert; token: of a copy's number, T and K; number: of a choice, a token, T and K; sort: key of an arrived row
    (local expert, source rank, number); None leaves rows as they come; dropped: whether dropped copies go, too.
    """

    home: Callable[[int, int, int], tuple[int, int]] = home
    token: Callable[[int, int, int], int] = lambda number, tokens, top_k: number % tokens
    number: Callable[[int, int, int, int], int] = lambda k, t, tokens, top_k: k * tokens + t
    sort: Callable[[tuple[int, int, int]], tuple] | None = lambda row: row
    dropped: bool = False


RIGHT = Way()


class Plan(NamedTuple):
    """A rank's. order: numbers of the copies it sends; sent, received: rows to and from each rank; sorted: of arrived rows;
    rows: source rank and token of each; counts: of its experts; going: how many copies it sends to each rank's such expert.
    """

    order: list[int]
    sent: list[int]
    received: list[int]
    sorted: list[int]
    rows: list[tuple[int, int]]
    counts: list[int]
    going: list[int]


@dataclass(frozen=True)
class Copies:
    """Of n ranks. tokens: by rank; local: experts of a rank; kind: which copies there are; skew: how much more the
    first experts are liked than the last ones.
    """

    n: int
    tokens: tuple[int, ...]
    hidden: int
    local: int
    top_k: int
    kind: str = SPREAD
    skew: float = 0.0

    @property
    def experts(self) -> int:
        return self.n * self.local

    @property
    def note(self) -> str:
        counts = listed([str(count) for count in self.tokens])
        return f"{counts} tokens, {self.experts} experts" + (f", {self.kind}" if self.kind else "")

    @cached_property
    def choices(self) -> list[Tensor]:
        """experts_KT by rank."""
        return [self._chosen(rank, tokens) for rank, tokens in enumerate(self.tokens)]

    def _chosen(self, rank: int, tokens: int) -> Tensor:
        if self.kind == ONE:
            return torch.ones(self.top_k, tokens, dtype=torch.int64)
        liked_TE = drawn(11_700 + 10 * self.n + rank, tokens, self.experts) + torch.linspace(self.skew, 0, self.experts)
        order_TE = liked_TE.argsort(1, descending=True)
        experts_KT = order_TE[:, : self.top_k].T.contiguous()
        if self.kind == DROPPED:
            experts_KT.view(-1)[1::3] = -1
            experts_KT[:, :1] = -1  # a token that goes nowhere
        return experts_KT

    @cached_property
    def x(self) -> list[Tensor]:
        """Tokens by rank."""
        return [drawn(10 * self.n + rank, tokens, self.hidden) for rank, tokens in enumerate(self.tokens)]

    @cached_property
    def gates(self) -> list[Tensor]:
        """gates_KT by rank, 0 where a copy is dropped."""
        raw = [drawn(300 + rank, self.top_k, tokens).sigmoid() for rank, tokens in enumerate(self.tokens)]
        return [gates.where(chosen >= 0, 0.0) for gates, chosen in zip(raw, self.choices, strict=True)]

    def plans(self, way: Way = RIGHT) -> list[Plan]:
        """By rank."""
        going = [self._going(rank, way) for rank in range(self.n)]
        return [self._plan(rank, going, way) for rank in range(self.n)]

    def _going(self, rank: int, way: Way) -> list[tuple[int, int, int]]:
        """(rank, local expert, number) of each copy that the rank sends, in order."""
        tokens, found = self.tokens[rank], []
        for k, row in enumerate(self.choices[rank].tolist()):
            for t, expert in enumerate(row):
                if expert >= 0 or way.dropped:
                    found.append((*way.home(expert, self.n, self.local), way.number(k, t, tokens, self.top_k)))
        return sorted(found)

    def _plan(self, rank: int, going: list[list[tuple[int, int, int]]], way: Way) -> Plan:
        mine = going[rank]
        arrived = [(local, source, number) for source, its in enumerate(going) for to, local, number in its if to == rank]
        order = sorted(range(len(arrived)), key=lambda i: way.sort(arrived[i])) if way.sort else [*range(len(arrived))]
        rows = [(source, way.token(number, self.tokens[source], self.top_k)) for _, source, number in arrived]
        return Plan(
            order=[number for _, _, number in mine],
            sent=[sum(to == r for to, _, _ in mine) for r in range(self.n)],
            received=[sum(source == r for _, source, _ in arrived) for r in range(self.n)],
            sorted=order,
            rows=[rows[i] for i in order],
            counts=[sum(local == j for local, _, _ in arrived) for j in range(self.local)],
            going=[sum(local == j for _, local, _ in mine) for j in range(self.local)],
        )


def whole(numbers: list[int]) -> Tensor:
    """int64."""
    return torch.tensor(numbers, dtype=torch.int64)


def travelling(n: int) -> list[Copies]:
    """Tokens everywhere; dropped copies, and a rank without tokens; all for one expert, and a rank with nothing at all."""
    return [
        Copies(n, (5, 3, 6, 4)[:n], 3, 3, 2),
        Copies(n, (7, 4, 0, 5)[:n], 2, 2, 3, DROPPED),
        Copies(n, (3, 0, 0, 4)[:n], 4, 2, 1, ONE),
    ]
