"""The task groups: all groups of ranks that differ in some axes only."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from typing import Any, ClassVar

from manyranks.grade.journal import Stopped
from manyranks.grade.nd import answers, layouts
from manyranks.grade.nd.answers import Exam, Parts, Slip, aspect
from manyranks.grade.nd.layouts import Order, Sizes
from manyranks.grade.nd.task import NdTask, shown
from manyranks.grade.scripts import Scene
from manyranks.grade.verdict import Aspect

CALL = "groups(sizes, axes)"
_ONE_AXIS, _SEVERAL = "the groups of one axis", "the groups of several axes"
_LIST = "it returns a list of groups, each a tuple of ranks"
_OTHERS = "those ranks agree in the axes that are asked for: a group's ranks differ in these axes, and agree in all others"
_BLOCKS = "blocks of neighbours are the groups of the innermost axes only: others have a stride"
_OUTERMOST = "so far apart are the groups of the outermost axes only: the stride is the product of the degrees further inside"
_INNERMOST = "the first axis changes fastest there: sizes has the outermost axis first"
_ONE = "only one group: there are N ÷ (ranks of a group), and every rank is in one of them"
_FIRST = "several axes make one group, as many ranks as their degrees' product: those are the groups of one of the axes alone"
_EACH = "several axes make one group, of all ranks that differ in any of them: not the groups of each axis, one after the other"
_EACH_RANK = "each group comes once: not once for each of its ranks"
_BETWEEN = "an axis that lies between those asked for is not in the group: its ranks stay in groups of their own"
_FIXED = "the order of the axes is that of sizes, not pp, dp, cp, tp as in the chapter"
_WHOLE = "all ranks in one group is what all axes together make"
_SINGLE = "each rank alone is what no axis makes"
_ENDLESS = (
    "16,384 ranks take too long: each rank with each other one is 268 million comparisons. Find each group's ranks by "
    "their coordinates, one pass over the ranks"
)
_UNEXPLAINED = "ranks that have the same coordinates in all axes but those asked for are one group"


def _parts(axes: Order, found: list[list[int]]) -> Parts:
    return {_ONE_AXIS: found if len(axes) == 1 else None, _SEVERAL: found if len(axes) > 1 else None}


def _result(find: Callable[[Sizes, Order], list]) -> Callable[[Sizes, Order], Parts]:
    return lambda sizes, axes: _parts(axes, sorted(sorted(group) for group in find(sizes, axes)))


def _length(sizes: Sizes, axes: Order) -> int:
    return math.prod(sizes[axis] for axis in axes)


def _blocks(sizes: Sizes, axes: Order) -> list[range]:
    size = _length(sizes, axes)
    return [range(first, first + size) for first in range(0, layouts.count(sizes), size)]


def _apart(sizes: Sizes, axes: Order) -> list[range]:
    step = layouts.count(sizes) // _length(sizes, axes)
    return [range(first, layouts.count(sizes), step) for first in range(step)]


def _filled(sizes: Sizes, axes: Order) -> list:
    """With the axes that lie between them."""
    at = [i for i, axis in enumerate(sizes) if axis in axes]
    return layouts.groups(sizes, tuple(list(sizes)[min(at) : max(at) + 1]))


def _fixed(sizes: Sizes) -> Sizes:
    return {axis: sizes[axis] for axis in sorted(sizes, key=("pp", "dp", "cp", "tp").index)}


_WRONG = (
    (_OTHERS, lambda sizes, axes: layouts.groups(sizes, tuple(axis for axis in sizes if axis not in axes))),
    (_BLOCKS, _blocks),
    (_OUTERMOST, _apart),
    (_INNERMOST, lambda sizes, axes: layouts.groups(dict(reversed(sizes.items())), axes)),
    (_FIXED, lambda sizes, axes: layouts.groups(_fixed(sizes), axes)),
    (_ONE, lambda sizes, axes: layouts.groups(sizes, axes)[:1]),
    (_FIRST, lambda sizes, axes: layouts.groups(sizes, axes[:1])),
    (_FIRST, lambda sizes, axes: layouts.groups(sizes, axes[-1:])),
    (_EACH, lambda sizes, axes: [group for axis in axes for group in layouts.groups(sizes, (axis,))]),
    (_EACH_RANK, lambda sizes, axes: layouts.groups(sizes, axes) * _length(sizes, axes)),
    (_BETWEEN, _filled),
    (_WHOLE, lambda sizes, axes: [range(layouts.count(sizes))]),
    (_SINGLE, lambda sizes, axes: [[rank] for rank in range(layouts.count(sizes))]),
)
_SLIPS = tuple(Slip(hint, _result(find)) for hint, find in _WRONG)


def _asked(function: Callable, question: tuple) -> Parts:
    sizes, axes = question
    found = function(dict(sizes), tuple(axes))
    found = found.tolist() if getattr(found, "ndim", 0) == 2 else found
    if not isinstance(found, tuple | list | set | frozenset):
        raise Stopped(f"{CALL} returned {answers.kind_of(found)}", _LIST)
    return _parts(axes, sorted(sorted(answers.row(group, "a group", _LIST)) for group in found))


def _asking(sizes: Sizes) -> list[tuple]:
    """Each axis, each pair of them, in both orders, and all of them."""
    pairs = [pair if i % 2 else pair[::-1] for i, pair in enumerate(combinations(sizes, 2))]
    return [(sizes, axes) for axes in (*((axis,) for axis in sizes), *pairs, tuple(sizes))]


@cache
def cases(n: int) -> list[Scene]:
    """Three orders; the last one for many ranks."""
    right = _result(layouts.groups)
    many = {"pp": 16, "cp": 4, "dp": 32, "tp": 8}
    asked = [
        (_asking({"dp": 3, "pp": 2, "tp": 4}), "24 ranks"),
        (_asking({"tp": 2, "cp": 3, "pp": 1, "dp": 2}), "another order, and an axis of one rank"),
        ([(many, ("tp",)), (many, ("cp", "dp"))], "16,384 ranks"),
    ]
    slips = (_SLIPS, _SLIPS, ())  # the others have told them apart
    exams = zip(asked, slips, strict=True)
    return answers.scenes((Exam(questions, _asked, right, known, answers.same), note) for (questions, note), known in exams)


@dataclass(frozen=True)
class Groups(NdTask):
    unexplained: ClassVar[str] = _UNEXPLAINED
    endless: ClassVar[str] = _ENDLESS
    aspects: ClassVar[tuple[Aspect, ...]] = (
        aspect("all groups of one axis, each once", 0.6, _ONE_AXIS),
        aspect("all groups of several axes at once", 0.4, _SEVERAL),
    )

    def found(self, question: tuple, part: str, got: Any, right: Any) -> str:
        sizes, axes = question
        differ = (i for i, (one, other) in enumerate(zip(got, right, strict=False)) if one != other)
        there = next(differ, min(len(got), len(right)))
        first, here = ([shown(its[there : there + 1], 60)] if its[there:] else ["none"] for its in (got, right))
        what = f"groups({sizes}, {axes}) has {len(got):,} groups, group {there} is {first[0]}"
        return f"{what}; right are {len(right):,}, with {here[0]}"
