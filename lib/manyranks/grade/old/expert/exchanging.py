"""The task Exchange: an uneven all-to-all, and its gradients the same way back."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from manyranks.grade.old.context.task import untouched
from manyranks.grade.old.context.travel import BACKWARD, FORWARD
from manyranks.grade.old.expert.ready import own
from manyranks.grade.old.expert.task import ExpertTask, fitting, values
from manyranks.grade.old.expert.traffic import Must, Sent, messages
from manyranks.grade.old.scripts import Scene, Tensors, Wrong
from manyranks.grade.old.tensor.layout import drawn
from manyranks.grade.old.tensor.task import gradient, slip, telling
from manyranks.grade.old.trial import Trial
from manyranks.grade.old.verdict import Aspect
from manyranks.measure.journal import Stopped

_ROWS, _GRADIENT = "the rows that arrive", "the gradient of the rows"
_KIND = "write class Exchange(torch.autograd.Function) with forward(ctx, rows_SH, sent, received) and backward(ctx, grad_RH)"
_FORWARD = "forward returns the rows that arrive, [sum(received), H], those of rank 0 first"
_TURNED = "the rows stand in another order: those from rank 0 come first, and none is moved on its way"
_NOT_SENT = "that is what this rank had: nothing came of the other ranks"
_EMPTY = "the rows are zeros: dist.all_to_all_single writes into out, so return out"
_NONE = (
    "the rows have no gradient: backward returns one for rows_SH, by an all-to-all the same way back, and None for each list"
)
_STAYED = (
    "backward has to send, too: the gradient of a row that came from rank s belongs to rank s. As many rows go back as came"
)
_TIMES = "the gradients are N times too large: each row went to one rank, and its gradient comes back from that one, once"
_DIVIDED = "the gradients are divided by N: they are no means"
_ONES = "backward gets the gradient of what forward returned, and sends that: it is not 1"
_SCATTERED = "what is sent, and what it is written to, have to be contiguous: rows.contiguous(), grad.contiguous(), a new out"
_BACK = "backward is forward with sent and received swapped: received[s] rows go to rank s, and sent[s] come back from it"
_KNOWN = "sent and received are given: no counts travel here, only the rows"
_UNEXPLAINED = "forward: dist.all_to_all_single(out, rows, received, sent); backward: the same with the two lists swapped"


@dataclass(frozen=True)
class Rows:
    """Of n ranks: table[s][d] rows go from rank s to rank d. strided: whether rows and gradients are not contiguous."""

    n: int
    table: tuple[tuple[int, ...], ...]
    hidden: int
    strided: bool = False

    @property
    def note(self) -> str:
        return f"rows sent: {'; '.join(str(list(row)) for row in self.table)}" + (", not contiguous" if self.strided else "")

    def received(self, rank: int) -> list[int]:
        """From each rank."""
        return [row[rank] for row in self.table]

    @cached_property
    def rows(self) -> list[Tensor]:
        """By rank."""
        return [self._drawn(rank, sum(row)) for rank, row in enumerate(self.table)]

    @cached_property
    def upstream(self) -> list[Tensor]:
        """The gradient of what arrives, by rank."""
        return [self._drawn(50 + rank, sum(self.received(rank))) for rank in range(self.n)]

    def _drawn(self, seed: int, rows: int) -> Tensor:
        numbers = drawn(seed + 10 * self.hidden, rows, self.hidden)
        return numbers.T.contiguous().T if self.strided else numbers


def _moved(rows: list[Tensor], table: list[list[int]]) -> list[Tensor]:
    """What arrives at each rank."""
    cut = [own.split(list(sizes)) for own, sizes in zip(rows, table, strict=True)]
    return [torch.cat([cut[source][rank] for source in range(len(rows))]) for rank in range(len(rows))]


def results(rows: Rows) -> list[Tensors]:
    """By rank."""
    back = [rows.received(rank) for rank in range(rows.n)]
    pairs = zip(_moved(rows.rows, list(map(list, rows.table))), _moved(rows.upstream, back), strict=True)
    return [{_ROWS: there, _GRADIENT: home} for there, home in pairs]


def _wrong(rows: Rows, right: list[Tensors]) -> Iterator[Wrong]:
    turned = [
        torch.cat([*own[_ROWS].split(rows.received(rank))][::-1]) if own[_ROWS].numel() else own[_ROWS]
        for rank, own in enumerate(right)
    ]
    yield Wrong(_TURNED, [{_ROWS: one} for one in turned])
    yield Wrong(_NOT_SENT, [{_ROWS: one} for one in rows.rows])
    yield Wrong(_EMPTY, [{_ROWS: torch.zeros_like(own[_ROWS])} for own in right])
    for hint, make in (
        (_NONE, torch.zeros_like),
        (_TIMES, lambda grad: grad * rows.n),
        (_DIVIDED, lambda grad: grad / rows.n),
        (_ONES, torch.ones_like),
    ):
        yield Wrong(hint, [own | {_GRADIENT: make(own[_GRADIENT])} for own in right])
    yield Wrong(_STAYED, [own | {_GRADIENT: up} for own, up in zip(right, rows.upstream, strict=True)])


def _run(rows: Rows, results: list[Tensors], kind: Any, watch) -> Tensors:
    if not (isinstance(kind, type) and issubclass(kind, torch.autograd.Function)):
        raise Stopped(f"Exchange is a {'class of another kind' if isinstance(kind, type) else type(kind).__name__}", _KIND)
    rank = dist.get_rank()
    leaf, sent, received = rows.rows[rank].clone().requires_grad_(), list(rows.table[rank]), rows.received(rank)
    right = results[rank]
    with own(watch):
        watch.mark(FORWARD)
        y = kind.apply(leaf, sent, received)
        found = fitting(y, right[_ROWS], "what forward returned", _FORWARD)
        watch.mark(BACKWARD)
        if not y.requires_grad:
            raise Stopped("what forward returned has no graph", _NONE)
        upstream = rows.upstream[rank].clone(memory_format=torch.preserve_format)
        y.backward(upstream)
    if watch.scattered:
        slip(watch, "an all-to-all wrote to an out that is not contiguous", _SCATTERED)
    before = {"rows_SH": rows.rows[rank], "the gradient of the result": rows.upstream[rank]}
    untouched(watch, {"rows_SH": leaf, "the gradient of the result": upstream}, before)
    if (sent, received) != (list(rows.table[rank]), rows.received(rank)):
        slip(watch, "sent or received changed")
    return {_ROWS: found, _GRADIENT: gradient(leaf)}


def _table(n: int) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple((2 * s + 3 * d + s * d) % 4 + (s == d) for d in range(n)) for s in range(n))


def _lonely(n: int) -> tuple[tuple[int, ...], ...]:
    """Rank 0 sends to the last rank only, and the others nothing; rank 1 of three or more has no part in it."""
    return tuple(tuple(3 * (s == 0 and d == n - 1) + 2 * (s == d == n - 1) for d in range(n)) for s in range(n))


@cache
def cases(n: int) -> list[Scene]:
    """Uneven numbers of rows; rows that are not contiguous, and ranks without any."""
    return [_scene(Rows(n, _table(n), 3)), _scene(Rows(n, _lonely(n), 5, strided=True))]


def _scene(rows: Rows) -> Scene:
    right, n = results(rows), rows.n
    there = [[Sent("all_to_all", 8 * own.numel(), "float64", n)] for own in rows.rows]
    back = [[Sent("all_to_all", 8 * own.numel(), "float64", n)] for own in rows.upstream]
    must = Must(there, back)
    return Scene(n, partial(_run, rows, right), right, lambda: telling(right, _wrong(rows, right)), must, rows.note)


@dataclass(frozen=True)
class Exchanging(ExpertTask):
    unexplained: ClassVar[str] = _UNEXPLAINED
    advice: ClassVar[tuple[tuple[str, str], ...]] = (
        (r"forward\(\) (takes|missing)", "the check calls Exchange.apply(rows_SH, sent, received): forward gets ctx first"),
        (r"backward\(\) (takes|missing)", "backward gets ctx and the gradient of what forward returned"),
        (r"returned an incorrect number of gradients", "backward returns three: the rows' gradient, None, None"),
        (r"returned an invalid gradient at index 0", _BACK),
        (r"must be contiguous|has to be contiguous", _SCATTERED),
        *ExpertTask.advice,
    )
    aspects: ClassVar[tuple[Aspect, ...]] = (
        Aspect("the rows and their gradients are right", 0.6, values, each_world=True),
        Aspect("sends one all-to-all in each direction, without a row too many", 0.4, messages),
    )

    def why(self, trial: Trial, rank: int, phase: str, got: list[Sent], right: list[Sent]) -> str:
        """Who sends whole numbers sends counts."""
        if any(call.op == "all_to_all" and "int" in call.dtype for call in got):
            return _KNOWN
        return super().why(trial, rank, phase, got, right)

    def better(self, trial: Trial, hint: str) -> str:
        """What was sent may explain what no known mistake does."""
        return hint or messages(self, trial).hint
