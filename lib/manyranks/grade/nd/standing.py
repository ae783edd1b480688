"""The tasks coordinates and rank_of: from a rank to its place in a mesh, and back."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, ClassVar

from manyranks.grade.journal import Stopped
from manyranks.grade.nd import answers, layouts
from manyranks.grade.nd.answers import Exam, Parts, Slip, aspect
from manyranks.grade.nd.layouts import Sizes
from manyranks.grade.nd.task import NdTask, shown
from manyranks.grade.scripts import Scene
from manyranks.grade.verdict import Aspect

COORDINATES, RANK_OF = "coordinates(rank, sizes)", "rank_of(coordinates, sizes)"
_AT, _RANK = "the coordinates", "the rank"
_DICT = "it returns a dict with a whole number for each axis of sizes"
_NUMBER = "it returns one whole number"
_CHAPTER = ("pp", "dp", "cp", "tp")
_INNERMOST = (
    "the first axis changes fastest there: sizes has the outermost axis first, so the last one differs from rank to rank"
)
_NO_MODULO = "a coordinate goes from 0 to its degree − 1: take the remainder by the degree, too"
_NO_STRIDE = "rank % degree is the coordinate of the innermost axis only: divide by the stride first, what lies inside the axis"
_OWN_STRIDE = "an axis's stride is the product of the degrees further inside: its own degree is not among them"
_SUMMED = "an axis's stride is the product of the degrees further inside, not their sum"
_TURNED = "the coordinates stand at the wrong axes, in the opposite order"
_FIXED = "the order of the axes is that of sizes, which is another one each time: not pp, dp, cp, tp as in the chapter"
_BY_NAME = "the order of the axes is that of sizes: not by name"
_FROM_ONE = "coordinates are counted from 0"
_ZERO = "0 everywhere is where rank 0 stands, and nobody else"
_REST = "what is left of the rank goes on to the next axis: the quotient, not the remainder, where you begin inside"
_BY_DIVISION = (
    "begin inside: coordinate and rest of the last axis are divmod(rank, degree), the rest goes on to the axis before it"
)
_GIVEN_ORDER = "coordinates has its axes in any order: go through those of sizes, and look each one up"
_STILL_COUNTS = "an axis that is left out counts as 0, but its degree still multiplies: go through all of sizes"
_LAST = "an axis that is left out counts as 0, not as its last coordinate"
_NO_STRIDES = "each coordinate counts as many ranks as lie inside its axis: times the stride"
_BY_SUM = "rank = ((a·B + b)·C + c)·D + d for the coordinates a, b, c, d, and degrees of which B is b's"
_LEFT_OUT = "an axis that coordinates leaves out counts as 0: coordinates.get(axis, 0)"


def _strides(sizes: Sizes, combine: Callable = math.prod) -> dict[str, int]:
    degrees = list(sizes.values())
    return {axis: combine(degrees[i + 1 :]) for i, axis in enumerate(sizes)}


def _turned(sizes: Sizes) -> Sizes:
    return dict(reversed(sizes.items()))


def _fixed(sizes: Sizes) -> Sizes:
    return {axis: sizes[axis] for axis in sorted(sizes, key=(*_CHAPTER, "ep").index)}


def _at(find: Callable[[int, Sizes], dict[str, int]]) -> Callable[[int, Sizes], Parts]:
    return lambda rank, sizes: {_AT: dict(sorted(find(rank, sizes).items()))}


def _remainders(rank: int, sizes: Sizes) -> dict[str, int]:
    found = {}
    for axis in reversed(sizes):
        found[axis] = rank // sizes[axis] % sizes[axis]
        rank %= sizes[axis]
    return found


_COORDINATES_WRONG = tuple(
    Slip(hint, _at(find))
    for hint, find in (
        (_ZERO, lambda rank, sizes: dict.fromkeys(sizes, 0)),
        (_INNERMOST, lambda rank, sizes: layouts.coordinates(rank, _turned(sizes))),
        (_FIXED, lambda rank, sizes: layouts.coordinates(rank, _fixed(sizes))),
        (_BY_NAME, lambda rank, sizes: layouts.coordinates(rank, dict(sorted(sizes.items())))),
        (_NO_MODULO, lambda rank, sizes: {axis: rank // stride for axis, stride in _strides(sizes).items()}),
        (_NO_STRIDE, lambda rank, sizes: {axis: rank % size for axis, size in sizes.items()}),
        (_OWN_STRIDE, lambda rank, sizes: {a: rank // (s * sizes[a]) % sizes[a] for a, s in _strides(sizes).items()}),
        (_SUMMED, lambda rank, sizes: {a: rank // max(1, s) % sizes[a] for a, s in _strides(sizes, sum).items()}),
        (
            _TURNED,
            lambda rank, sizes: dict(zip(sizes, reversed(layouts.coordinates(rank, sizes).values()), strict=True)),
        ),
        (_FROM_ONE, lambda rank, sizes: {axis: at + 1 for axis, at in layouts.coordinates(rank, sizes).items()}),
        (_REST, _remainders),
    )
)


def _weighed(weights: Callable[[Sizes], dict[str, int]]) -> Callable[[dict, Sizes], int]:
    return lambda at, sizes: sum(at.get(axis, 0) * weight for axis, weight in weights(sizes).items())


def _as_given(at: dict, sizes: Sizes) -> int:
    """The degrees of sizes, and the coordinates as they come."""
    return sum(one * stride for one, stride in zip(at.values(), _strides(sizes).values(), strict=False))


def _row_by_row(pairs: Iterable[tuple[int, int]]) -> int:
    """By coordinates and degrees, the outermost first."""
    rank = 0
    for one, size in pairs:
        rank = rank * size + one
    return rank


def _in_its_order(at: dict, sizes: Sizes) -> int:
    return layouts.rank_of(at, {axis: sizes[axis] for axis in (*at, *(axis for axis in sizes if axis not in at))})


_RANKS_WRONG = tuple(
    Slip(hint, lambda at, sizes, find=find: {_RANK: find(at, sizes)})
    for hint, find in (
        (_ZERO, lambda at, sizes: 0),
        (_INNERMOST, lambda at, sizes: layouts.rank_of(at, _turned(sizes))),
        (_FIXED, lambda at, sizes: layouts.rank_of(at, _fixed(sizes))),
        (_GIVEN_ORDER, _as_given),
        (_GIVEN_ORDER, _in_its_order),
        (_GIVEN_ORDER, lambda at, sizes: _row_by_row((one, sizes[axis]) for axis, one in at.items())),
        (_GIVEN_ORDER, lambda at, sizes: _row_by_row(zip(at.values(), sizes.values(), strict=False))),
        (_STILL_COUNTS, lambda at, sizes: _row_by_row((at[axis], size) for axis, size in sizes.items() if axis in at)),
        (_LAST, lambda at, sizes: layouts.rank_of({axis: at.get(axis, size - 1) for axis, size in sizes.items()}, sizes)),
        (_NO_STRIDES, lambda at, sizes: sum(at.values())),
        (_OWN_STRIDE, _weighed(lambda sizes: {axis: stride * sizes[axis] for axis, stride in _strides(sizes).items()})),
        (_NO_STRIDES, _weighed(lambda sizes: sizes)),
        (_SUMMED, _weighed(partial(_strides, combine=sum))),
        (_SUMMED, _weighed(lambda sizes: {axis: max(1, stride) for axis, stride in _strides(sizes, sum).items()})),
        (_FROM_ONE, lambda at, sizes: layouts.rank_of(at, sizes) + 1),
        (_FROM_ONE, lambda at, sizes: layouts.rank_of({axis: one - 1 for axis, one in at.items()}, sizes)),
    )
)


def _asked_coordinates(function: Callable, question: tuple) -> Parts:
    rank, sizes = question
    found = function(rank, dict(sizes))
    if not isinstance(found, dict):
        raise Stopped(f"{COORDINATES} returned {answers.kind_of(found)}", _DICT)
    if {*found} != {*sizes}:
        raise Stopped(f"{COORDINATES} returned the axes {', '.join(map(str, found)) or 'none':.60}", _DICT)
    return {_AT: {axis: answers.whole(found[axis], f"the coordinate {axis}", _DICT) for axis in sorted(sizes)}}


def _asked_rank(function: Callable, question: tuple) -> Parts:
    at, sizes = question
    return {_RANK: answers.whole(function(dict(at), dict(sizes)), f"what {RANK_OF} returned", _NUMBER)}


_MESHES: list[tuple[Sizes, str]] = [
    ({"pp": 2, "dp": 3, "tp": 4}, "24 ranks"),
    ({"cp": 3, "dp": 2, "tp": 4, "pp": 1}, "another order, and an axis of one rank"),
    ({"dp": 5}, "one axis"),
    ({"dp": 64, "pp": 16, "cp": 2, "tp": 8}, "16,384 ranks"),
]


def _ranks(sizes: Sizes) -> list[int]:
    """All, or some of very many."""
    n = layouts.count(sizes)
    return [*range(n)] if n < 100 else [0, 1, 9, 1234, 7777, n - 2, n - 1]


@cache
def cases(n: int) -> list[Scene]:
    """Meshes of several orders and sizes."""
    right = _at(layouts.coordinates)
    return answers.scenes(
        (Exam([(rank, sizes) for rank in _ranks(sizes)], _asked_coordinates, right, _COORDINATES_WRONG, answers.same), note)
        for sizes, note in _MESHES
    )


@cache
def back(n: int) -> list[Scene]:
    """The same, the coordinates in another order each time, and some left out."""

    def right(at: dict[str, int], sizes: Sizes) -> Parts:
        return {_RANK: layouts.rank_of(at, sizes)}

    return answers.scenes(
        (Exam(_mixed(sizes), _asked_rank, right, _RANKS_WRONG, answers.same), note) for sizes, note in _MESHES
    )


def _mixed(sizes: Sizes) -> list[tuple]:
    found = []
    for rank in _ranks(sizes):
        at = list(layouts.coordinates(rank, sizes).items())
        turned = at[rank % len(at) :] + at[: rank % len(at)]
        found.append((dict(turned if rank % 2 else reversed(turned)), sizes))
        found += [(dict(turned[1:]), sizes)] if rank % 3 == 0 else []
    return found


@dataclass(frozen=True)
class Coordinates(NdTask):
    unexplained: ClassVar[str] = _BY_DIVISION
    endless: ClassVar[str] = "a coordinate takes one division for each axis, and no search through the ranks"
    aspects: ClassVar[tuple[Aspect, ...]] = (aspect("each rank's coordinates are right", 1.0, _AT),)

    def found(self, question: tuple, part: str, got: Any, right: Any) -> str:
        return f"coordinates({question[0]}, {question[1]}) is {shown(got)}; right is {shown(right)}"


@dataclass(frozen=True)
class RankOf(NdTask):
    unexplained: ClassVar[str] = _BY_SUM
    endless: ClassVar[str] = "a rank takes one product for each axis, and no search through the ranks"
    advice: ClassVar[tuple[tuple[str, str], ...]] = ((r"KeyError: '(dp|pp|cp|tp)'", _LEFT_OUT), *NdTask.advice)
    aspects: ClassVar[tuple[Aspect, ...]] = (aspect("each place's rank is right", 1.0, _RANK),)

    def found(self, question: tuple, part: str, got: Any, right: Any) -> str:
        return f"rank_of({question[0]}, {question[1]}) is {got}; right is {right}"
