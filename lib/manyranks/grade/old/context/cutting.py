"""The tasks positions and unshard: the layout, folded in the middle with the late chunk first."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from manyranks.grade.old.compare import form
from manyranks.grade.old.context.layout import dealt, places
from manyranks.grade.old.context.ready import own
from manyranks.grade.old.context.task import ContextTask, tensor_of, untouched, values
from manyranks.grade.old.scripts import Scene, Tensors, Wrong
from manyranks.grade.old.tensor.task import telling
from manyranks.grade.old.trial import Trial
from manyranks.grade.old.verdict import Aspect, Verdict
from manyranks.measure.journal import Stopped

_CHUNKS = {3: 5, 2: 1, 4: 3, 5: 2, 1: 3}  # ranks -> tokens of a chunk
_BAD = ((3, 10), (2, 6), (3, 9), (4, 20), (1, 5))  # ranks, a length that cannot be cut
_REFUSES = "what was not refused: "  # a mark
_CHAPTERS = (
    "that is the chapter's layout, chunks r and 2N − 1 − r: here rank r has chunks N + r and N − 1 − r, so that rank 0 has "
    "those in the middle"
)
_EARLY_FIRST = "the early chunk comes first: a rank has chunk N + r first, and then chunk N − 1 − r"
_CONTIGUOUS = "those are neighbours: a rank has two chunks of 2N, a late one and an early one"
_STRIPED = "tokens are dealt in turn: a rank has two chunks, each of neighbours"
_DESCENDING = "inside a chunk, positions ascend"
_REFUSE = (
    "raise a ValueError where 2n does not divide seq: what is left over would be lost, or the chunks would differ in length"
)
_REFUSE_HALF = "N divides it, but there are 2N chunks: raise a ValueError where 2n does not divide seq"
_TOGETHER = "the parts are joined rank by rank: each has a late chunk and an early one, which belong to different places"
_NOT_INVERSE = (
    "the tokens are moved the wrong way: joined[order] takes token order[i] for place i. To put token i into place order[i], "
    "whole[order] = joined, or joined[order.argsort()]"
)
_FORM = "int64 of the shape [seq / n]: one position for each of the rank's tokens"
_UNEXPLAINED = "rank r has chunk N + r of 2N and then chunk N − 1 − r; draw it for N = 3"
_DEPENDS = "parts may be any tensors, whose first dimension is the sequence"

Layout = Callable[[int, int], list[Tensor]]  # of a length, on n ranks: positions by rank


def _chunked(numbers: Callable[[int, int], tuple[int, ...]]) -> Layout:
    """Each rank's chunks of 2n, by their numbers."""

    def of(seq: int, n: int) -> list[Tensor]:
        chunks = torch.arange(seq).chunk(2 * n)
        return [torch.cat([chunks[k] for k in numbers(rank, n)]) for rank in range(n)]

    return of


_OTHERS: list[tuple[str, Layout]] = [
    (_CHAPTERS, _chunked(lambda r, n: (r, 2 * n - 1 - r))),
    (_CHAPTERS, _chunked(lambda r, n: (2 * n - 1 - r, r))),
    (_EARLY_FIRST, _chunked(lambda r, n: (n - 1 - r, n + r))),
    (_CONTIGUOUS, _chunked(lambda r, n: (2 * r, 2 * r + 1))),
    (_CONTIGUOUS, _chunked(lambda r, n: (2 * r + 1, 2 * r))),
    (_STRIPED, lambda seq, n: [torch.arange(r, seq, n) for r in range(n)]),
    (_DESCENDING, lambda seq, n: [torch.cat([half.flip(0) for half in own.chunk(2)]) for own in places(seq, n)]),
    (_DESCENDING, lambda seq, n: [own.sort().values.flip(0) for own in places(seq, n)]),
]


def _name(n: int, rank: int) -> str:
    return f"positions of rank {rank} of {n}, {2 * n * _CHUNKS[n]} tokens"


def _all_places(layout: Layout) -> Tensors:
    return {_name(n, rank): own for n, c in _CHUNKS.items() for rank, own in enumerate(layout(2 * n * c, n))}


def _positions(function: Callable, watch) -> Tensors:
    found = {}
    for n, c in _CHUNKS.items():
        for rank in range(n):
            with own():
                mine = function(2 * n * c, rank, n)
            found[_name(n, rank)] = _integers(mine)
    for n, seq in _BAD:
        if not _refuses(function, n, seq):
            watch.mark(f"{_REFUSES}{seq} tokens on {n} rank{'s' * (n > 1)}")
    return found


def _integers(value: Any) -> Tensor:
    if not isinstance(value, Tensor):
        raise Stopped(f"positions returned a {type(value).__name__}", f"it returns a tensor, {_FORM}")
    if value.is_floating_point():
        raise Stopped(f"positions returned {form(value)}", _FORM)
    return value.clone()


def _refuses(function: Callable, n: int, seq: int) -> bool:
    try:
        function(seq, 0, n)
    except ValueError:
        return True
    except Exception:  # another error is none of the learner's own
        return False
    return False


def _refusals(task: "Positions", trial: Trial) -> Verdict:
    said = [event.what.removeprefix(_REFUSES) for event in trial.answers[0].events if event.what.startswith(_REFUSES)]
    if not said:
        return Verdict(True)
    tokens, ranks = (int(word) for word in said[0].split() if word.isdigit())
    return Verdict(False, f"{said[0]} raised no ValueError", _REFUSE if tokens % ranks else _REFUSE_HALF)


@cache
def places_cases(n: int) -> list[Scene]:
    """All ranks of one to five, in one script."""
    right = _all_places(places)
    known = [Wrong(hint, [_all_places(layout)]) for hint, layout in _OTHERS]
    return [Scene(1, _positions, [right], lambda: telling([right], known), note="of 1 to 5 ranks")]


@dataclass(frozen=True)
class Positions(ContextTask):
    sizes: ClassVar[tuple[int, ...]] = (1,)
    unexplained: ClassVar[str] = _UNEXPLAINED
    aspects: ClassVar[tuple[Aspect, ...]] = (
        Aspect("the positions of each rank's tokens are right", 0.75, values, each_world=True),
        Aspect("refuses a length that cannot be cut", 0.25, _refusals, each_world=True),
    )

    def better(self, trial: Trial, hint: str) -> str:
        """A wrong shape comes first, and then a wrong dtype."""
        got, right = trial.answers[0].tensors, trial.case.expected[0]
        return _FORM if any(form(got[name]) != form(right[name]) for name in right) else hint


_SHAPES = {1: (2,), 2: (), 3: (2, 3), 4: (1,), 5: ()}  # of what a token has


def _whole(n: int) -> Tensor:
    """Each token is its position, and tenths where it has several numbers."""
    tenths = torch.arange(math.prod(_SHAPES[n])).view(_SHAPES[n]) / 10
    return torch.arange(2 * n * _CHUNKS[n]).double().view(-1, *(1 for _ in _SHAPES[n])) + tenths


def _joined_name(n: int) -> str:
    return f"the whole of {n} part{'s' * (n > 1)}"


def _unshard(function: Callable, watch) -> Tensors:
    found = {}
    for n in _CHUNKS:
        whole, parts = _whole(n), dealt(_whole(n), n)
        before = {f"part {i}": part.clone() for i, part in enumerate(parts)}
        with own():
            got = function([*parts])
        found[_joined_name(n)] = tensor_of(got, whole, "what unshard returned", "it returns the whole sequence, [N·S, …]")
        untouched(watch, {f"part {i}": part for i, part in enumerate(parts)}, before)
    return found


def _wholes(put: Callable[[list[Tensor], int], Tensor]) -> Tensors:
    return {_joined_name(n): put(dealt(_whole(n), n), n) for n in _CHUNKS}


def _by(layout: Layout) -> Callable[[list[Tensor], int], Tensor]:
    """Put back as if they had been cut so."""

    def put(parts: list[Tensor], n: int) -> Tensor:
        joined = torch.cat(parts)
        return joined[torch.cat(layout(len(joined), n)).argsort()]

    return put


def _misjoined(layout: Layout) -> Callable[[list[Tensor], int], Tensor]:
    """With the permutation in place of its inverse."""
    return lambda parts, n: torch.cat(parts)[torch.cat(layout(sum(map(len, parts)), n))]


def _wrong_wholes() -> Iterator[Wrong]:
    yield Wrong(_TOGETHER, [_wholes(lambda parts, n: torch.cat(parts))])
    yield Wrong(_NOT_INVERSE, [_wholes(_misjoined(places))])
    for hint, layout in [other for other in _OTHERS if other[0] != _CONTIGUOUS]:
        yield Wrong(hint, [_wholes(_by(layout))])
        yield Wrong(hint, [_wholes(_misjoined(layout))])


@cache
def whole_cases(n: int) -> list[Scene]:
    """One to five parts, in one script."""
    right = {_joined_name(n): _whole(n) for n in _CHUNKS}
    return [Scene(1, _unshard, [right], lambda: telling([right], _wrong_wholes()), note="of 1 to 5 ranks")]


@dataclass(frozen=True)
class Unshard(ContextTask):
    sizes: ClassVar[tuple[int, ...]] = (1,)
    unexplained: ClassVar[str] = _UNEXPLAINED
    advice: ClassVar[tuple[tuple[str, str], ...]] = (
        (r"IndexError|must match|mismatch|not enough values|expand", _DEPENDS),
        *ContextTask.advice,
    )
    aspects: ClassVar[tuple[Aspect, ...]] = (Aspect("the whole sequence is in order", 1.0, values, each_world=True),)
