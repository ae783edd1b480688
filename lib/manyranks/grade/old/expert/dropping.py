"""The task drop: which copies find no place, for each rank's tokens alone."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from manyranks.grade.old.context.task import untouched
from manyranks.grade.old.expert.copies import Copies
from manyranks.grade.old.expert.ready import own
from manyranks.grade.old.expert.task import ExpertTask, fitting, of, several
from manyranks.grade.old.scripts import Scene, Tensors, Wrong
from manyranks.grade.old.tensor.layout import drawn
from manyranks.grade.old.tensor.task import gradient, telling
from manyranks.grade.old.trial import Trial
from manyranks.grade.old.verdict import Aspect, Verdict

_EXPERTS, _GATES, _GRADIENT = "experts_KT", "gates_KT", "the gradient of the gates"
_SHAPE = "it returns (experts_KT, gates_KT), in the shapes of what it gets, and of the same dtypes"
_BY_TOKEN = (
    "the wrong copies are dropped: places are taken token by token there. All first choices come before any second choice: "
    "that is the order of experts_KT.flatten()"
)
_BY_GATE = "the wrong copies are dropped: those with the smallest gates. Places are taken in order, whatever the gates are"
_FIRST_OUT = "the wrong copies are dropped: the first ones. Who comes first has a place"
_EACH_CHOICE = (
    "each row of choices has C places of its own there: second choices find those places taken that first choices have taken"
)
_ROUNDED = "C is rounded up: math.ceil, not int, // or round"
_NO_K = "C = ⌈factor · T·K / E⌉: there are T·K copies, not T"
_OF_ALL = "T is this rank's own number of tokens: capacity is per source rank, not for the whole batch"
_MEAN_T = "T is this rank's own number of tokens, not the mean over ranks: ranks have different numbers"
_LARGEST = "T is this rank's own number of tokens, not the largest of all ranks"
_LOCAL = "E are all experts: the copies of a rank go to experts of all ranks"
_NO_FACTOR = "the factor is missing: C = ⌈factor · T·K / E⌉"
_ONE_LESS = "C copies have a place: there the C-th one is dropped, too"
_ONE_MORE = "C copies have a place: there one more is kept. Who has C before it is dropped"
_TOKENS = "a dropped copy takes its token's other copies with it: each copy is kept or dropped for itself"
_MISSED = "a dropped copy is marked by −1"
_GATES_LEFT = "the gate of a dropped copy is 0: its expert does not compute it"
_AGAIN = "the gates that remain are not changed: there they are divided by their sum again"
_NO_GRADIENT = "the gates have no way back: copies that are kept pass their gradient, so no detach and no no_grad"
_UNDROPPED = "the gate of a dropped copy has no gradient: it is 0, whatever it was"
_SILENT = "each rank drops for itself: its own tokens are all that it needs to know"
_UNEXPLAINED = (
    "go through experts_KT.flatten() in order and count for each expert: a copy that finds C before it is dropped. "
    "C = ⌈factor · T·K / E⌉"
)


class Crowd(NamedTuple):
    """A case: copies, and the factor."""

    copies: Copies
    factor: float

    @property
    def note(self) -> str:
        return f"{self.copies.note}, factor = {self.factor:g}"

    def upstream(self) -> list[Tensor]:
        """The gates' gradient by rank."""
        return [drawn(900 + rank, *gates.shape) for rank, gates in enumerate(self.copies.gates)]


def _places(crowd: Crowd, rank: int) -> int:
    copies = crowd.copies
    return math.ceil(crowd.factor * copies.tokens[rank] * copies.top_k / copies.experts)


def _kept(experts_KT: Tensor, places: int, order: list[int] | None = None) -> Tensor:
    """[K, T]: whether the copy has a place, taken in this order of numbers."""
    copies, taken = experts_KT.flatten().tolist(), {}
    kept = torch.zeros(len(copies), dtype=torch.bool)
    for number in order if order is not None else range(len(copies)):
        taken[copies[number]] = taken.get(copies[number], 0) + 1
        kept[number] = taken[copies[number]] <= places
    return kept.view_as(experts_KT)


def _results(crowd: Crowd, kept: Callable[[int], Tensor]) -> list[Tensors]:
    """By rank. kept: of a rank."""
    found = []
    for rank, (experts, gates, upstream) in enumerate(
        zip(crowd.copies.choices, crowd.copies.gates, crowd.upstream(), strict=True)
    ):
        there = kept(rank)
        found.append({_EXPERTS: experts.where(there, -1), _GATES: gates.where(there, 0.0), _GRADIENT: upstream.where(there, 0)})
    return found


def results(crowd: Crowd) -> list[Tensors]:
    """By rank."""
    return _results(crowd, lambda rank: _kept(crowd.copies.choices[rank], _places(crowd, rank)))


def _other_capacities(crowd: Crowd) -> list[tuple[str, Callable[[int], int]]]:
    copies, factor = crowd.copies, crowd.factor
    exact = [factor * tokens * copies.top_k / copies.experts for tokens in copies.tokens]
    whole = sum(copies.tokens)
    return [
        (_ROUNDED, lambda r: int(exact[r])),
        (_ROUNDED, lambda r: round(exact[r])),
        (_NO_K, lambda r: math.ceil(exact[r] / copies.top_k)),
        (_NO_FACTOR, lambda r: math.ceil(exact[r] / factor)),
        (_OF_ALL, lambda r: math.ceil(factor * whole * copies.top_k / copies.experts)),
        (_MEAN_T, lambda r: math.ceil(factor * whole / copies.n * copies.top_k / copies.experts)),
        (_LARGEST, lambda r: math.ceil(max(exact))),
        (_LOCAL, lambda r: math.ceil(exact[r] * copies.n)),
        (_ONE_LESS, lambda r: max(0, _places(crowd, r) - 1)),
        (_ONE_MORE, lambda r: _places(crowd, r) + 1),
    ]


def _other_orders(crowd: Crowd) -> list[tuple[str, Callable[[int], list[int]]]]:
    copies = crowd.copies

    def by_token(rank: int) -> list[int]:
        return [*torch.arange(copies.choices[rank].numel()).view(copies.top_k, -1).T.flatten().tolist()]

    def by_gate(rank: int) -> list[int]:
        return copies.gates[rank].flatten().argsort(descending=True).tolist()

    return [
        (_BY_TOKEN, by_token),
        (_BY_GATE, by_gate),
        (_FIRST_OUT, lambda rank: [*range(copies.choices[rank].numel())][::-1]),
    ]


def _wrong(crowd: Crowd, right: list[Tensors]) -> Iterator[Wrong]:
    """By the copies that are dropped; where these are right, by the gates."""
    choices = crowd.copies.choices
    for hint, order in _other_orders(crowd):
        found = _results(crowd, lambda rank, order=order: _kept(choices[rank], _places(crowd, rank), order(rank)))
        yield _by(hint, found, _EXPERTS)
    rows = _results(crowd, lambda r: torch.stack([_kept(row, _places(crowd, r)) for row in choices[r]]))
    yield _by(_EACH_CHOICE, rows, _EXPERTS)
    for hint, places in _other_capacities(crowd):
        yield _by(hint, _results(crowd, lambda rank, places=places: _kept(choices[rank], places(rank))), _EXPERTS)
    yield _by(_TOKENS, _results(crowd, lambda r: (right[r][_EXPERTS] >= 0).all(0).expand_as(choices[r])), _EXPERTS)
    yield Wrong(_MISSED, [{_EXPERTS: chosen} for chosen in choices])
    yield Wrong(_MISSED, [{_EXPERTS: own[_EXPERTS].where(own[_EXPERTS] >= 0, crowd.copies.experts)} for own in right])
    yield from _wrong_gates(crowd, right)


def _wrong_gates(crowd: Crowd, right: list[Tensors]) -> Iterator[Wrong]:
    gates, upstream = crowd.copies.gates, crowd.upstream()
    yield Wrong(
        _GATES_LEFT, [own | {_GATES: one} | {_GRADIENT: up} for own, one, up in zip(right, gates, upstream, strict=True)]
    )
    yield Wrong(_GATES_LEFT, [{_EXPERTS: own[_EXPERTS], _GATES: one} for own, one in zip(right, gates, strict=True)])
    again = [own[_GATES] / own[_GATES].sum(0) for own in right]
    yield Wrong(_AGAIN, [{_EXPERTS: own[_EXPERTS], _GATES: one} for own, one in zip(right, again, strict=True)])
    safe = [one.nan_to_num(0.0) for one in again]
    yield Wrong(_AGAIN, [{_EXPERTS: own[_EXPERTS], _GATES: one} for own, one in zip(right, safe, strict=True)])
    yield Wrong(_NO_GRADIENT, [own | {_GRADIENT: torch.zeros_like(own[_GRADIENT])} for own in right])
    yield Wrong(_UNDROPPED, [own | {_GRADIENT: up} for own, up in zip(right, upstream, strict=True)])


def _by(hint: str, found: list[Tensors], name: str) -> Wrong:
    return Wrong(hint, [{name: own[name]} for own in found])


def _run(crowd: Crowd, function: Callable, watch) -> Tensors:
    rank = dist.get_rank()
    experts, gates = crowd.copies.choices[rank].clone(), crowd.copies.gates[rank].clone().requires_grad_()
    with own(watch):
        found = several(function(experts, gates, crowd.copies.experts, crowd.factor), 2, "drop", _SHAPE)
    kept = fitting(found[0], experts, "experts_KT", _SHAPE)
    left = fitting(found[1], gates, "gates_KT", _SHAPE)
    if found[1].requires_grad:
        found[1].backward(crowd.upstream()[rank])
    before = {"experts_KT": crowd.copies.choices[rank], "gates_KT": crowd.copies.gates[rank]}
    untouched(watch, {"experts_KT": experts, "gates_KT": gates}, before)
    return {_EXPERTS: kept, _GATES: left, _GRADIENT: gradient(gates)}


@cache
def cases(n: int) -> list[Scene]:
    """A factor above 1, and one below with a rank that has no tokens."""
    first = Crowd(Copies(n, (16, 18, 13, 11)[:n], 1, 2, 2, skew=3.0), 3 * n / 16)
    second = Crowd(Copies(n, (11, 0, 6, 13)[:n], 1, 1, 2 if n > 2 else 1, skew=1.0), 0.75)
    return [_scene(first), _scene(second)]


def _scene(crowd: Crowd) -> Scene:
    right = results(crowd)
    n, wrong = crowd.copies.n, partial(_wrong, crowd, right)
    return Scene(n, partial(_run, crowd), right, lambda: telling(right, wrong()), note=crowd.note)


def _silent(task: "Drop", trial: Trial) -> Verdict:
    for rank, calls in trial.calls.items():
        if calls:
            return Verdict(False, f"rank {rank} called {calls[0].op} of {calls[0].bytes:,} bytes", _SILENT)
    return Verdict(True)


@dataclass(frozen=True)
class Drop(ExpertTask):
    unexplained: ClassVar[str] = _UNEXPLAINED
    aspects: ClassVar[tuple[Aspect, ...]] = (
        Aspect("drops the right copies", 0.55, of(_EXPERTS, alone=True), each_world=True),
        Aspect("the gates and their gradients are right", 0.3, of(_GATES, _GRADIENT, alone=True), each_world=True),
        Aspect("asks no other rank", 0.15, _silent, each_world=True),
    )
