"""The task place: the order of axes that sends the fewest bytes from node to node."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise, permutations
from math import isclose
from typing import Any, ClassVar

from manyranks.grade.nd import answers, layouts
from manyranks.grade.nd.answers import Exam, Parts, Slip, aspect
from manyranks.grade.nd.layouts import Sizes
from manyranks.grade.nd.task import NdTask
from manyranks.grade.report import size
from manyranks.grade.scripts import Scene
from manyranks.grade.verdict import Aspect

CALL = "place(traffic, sizes, node)"
_SIMPLE, _HARD = "where axes fit into a node", "where they compete for one"
_CHAPTER = ("pp", "dp", "cp", "tp")
_TURNED = (
    "the order is turned round: the outermost axis comes first, and neighbours, which share a node, differ in the last one"
)
_GREEDY = (
    "the axis with most bytes is innermost there, which is not always best: an axis larger than a node leaves it anyway, at "
    "few of its hops, and takes the place of one that would stay. Count the bytes of each order"
)
_LEAST = "the axis with the fewest bytes is innermost there: neighbours share a node, so the last axis stays inside"
_SMALLEST = "the smallest degree is no reason to stand inside: bytes are"
_LARGEST = "the largest degree is no reason to stand inside: bytes are"
_AS_IT_WAS = "that is the order that sizes has: another one sends fewer bytes from node to node"
_THE_CHAPTER_S = "pp, dp, cp, tp is a rule of thumb: here other axes send more. Count the bytes"
_WORST = "that is the order that sends the most bytes from node to node: min, not max"
_ALL_OR_NOTHING = (
    "an axis that is larger than what is left of a node does not leave it with all its bytes: of a ring only some hops go to "
    "another node. Count the ranks whose next one is elsewhere"
)
_NO_RING = "the last rank of a group sends to its first: that hop counts, too"
_UNEXPLAINED = (
    "try all orders: of each axis, the share of ranks whose next one in the ring is on another node, times its bytes; that "
    "with the smallest sum"
)


class _Rule:
    """How the best order is found; wrong ones count otherwise."""

    def __init__(self, share: Callable[[Sizes, str, int], float], choose: Callable = min):
        self.share, self.choose = share, choose

    def __call__(self, traffic: dict[str, float], sizes: Sizes, node: int) -> list[str]:
        def sent(order: tuple[str, ...]) -> float:
            turned = layouts.in_order(sizes, order)
            return sum(traffic[axis] * self.share(turned, axis, node) for axis in turned)

        return list(self.choose(permutations(sizes), key=sent))


def _leaves_or_not(sizes: Sizes, axis: str, node: int) -> float:
    """As if a group that is not inside one node left it with all its bytes."""
    return float(any(len({rank // node for rank in ranks}) > 1 for ranks in layouts.groups(sizes, (axis,))))


def _open(sizes: Sizes, axis: str, node: int) -> float:
    """Without the hop from the last rank to the first."""
    hops = [pair for ranks in layouts.groups(sizes, (axis,)) for pair in pairwise(ranks)]
    return sum(one // node != other // node for one, other in hops) / layouts.count(sizes)


RIGHT = _Rule(layouts.leaving)


def _by(key: Callable[[str, dict, Sizes], float]) -> Callable[..., list[str]]:
    """The smallest outermost."""
    return lambda traffic, sizes, node: sorted(sizes, key=lambda axis: key(axis, traffic, sizes))


def _parts(find: Callable[..., list[str]]) -> Callable[..., Parts]:
    """Of a question and the part that it belongs to."""
    return lambda *question: {part: find(*question[:3]) if part == question[3] else None for part in (_SIMPLE, _HARD)}


_SLIPS = tuple(
    Slip(hint, _parts(find))
    for hint, find in (
        (_AS_IT_WAS, lambda traffic, sizes, node: list(sizes)),
        (_GREEDY, _by(lambda axis, traffic, sizes: traffic[axis])),
        (_THE_CHAPTER_S, lambda traffic, sizes, node: sorted(sizes, key=_CHAPTER.index)),
        (_ALL_OR_NOTHING, _Rule(_leaves_or_not)),
        (_LEAST, _by(lambda axis, traffic, sizes: -traffic[axis])),
        (_TURNED, lambda *question: RIGHT(*question)[::-1]),
        (_LARGEST, _by(lambda axis, traffic, sizes: sizes[axis])),
        (_SMALLEST, _by(lambda axis, traffic, sizes: -sizes[axis])),
        (_WORST, _Rule(layouts.leaving, max)),
        (_NO_RING, _Rule(_open)),
    )
)


def equal(question: tuple, part: str, got: Any, right: Any) -> bool:
    """Whether the order sends as few bytes from node to node."""
    traffic, sizes, node, its = question
    if part != its or got is None:
        return got == right
    sent = layouts.crossing(traffic, layouts.in_order(sizes, got), node)
    return isclose(sent, layouts.fewest(traffic, sizes, node), rel_tol=1e-9)


def _asked(function: Callable, question: tuple) -> Parts:
    traffic, sizes, node, _ = question
    order = answers.an_order(function(dict(traffic), dict(sizes), node), sizes, CALL)
    return _parts(lambda *_: order)(*question)


_GB = 10**9
_FITTING = [
    ({"tp": 9 * _GB, "dp": 2 * _GB, "pp": _GB // 8}, {"tp": 8, "pp": 2, "dp": 4}, 8, _SIMPLE),
    ({"pp": _GB // 4, "cp": 6 * _GB, "tp": 2 * _GB, "dp": _GB}, {"dp": 4, "tp": 2, "cp": 4, "pp": 2}, 8, _SIMPLE),
    ({"dp": 5 * _GB, "tp": 3 * _GB}, {"dp": 4, "tp": 4}, 4, _SIMPLE),
    ({"tp": 7 * _GB, "cp": 0, "dp": 2 * _GB}, {"tp": 8, "cp": 1, "dp": 4}, 8, _SIMPLE),
]
_LARGE = [
    ({"dp": 8 * _GB, "cp": 10 * _GB, "pp": _GB // 2}, {"cp": 16, "dp": 8, "pp": 2}, 8, _HARD),
    ({"dp": 9 * _GB, "cp": 10 * _GB, "pp": _GB // 2}, {"cp": 16, "dp": 8, "pp": 2}, 8, _HARD),
    ({"dp": 4 * _GB, "tp": 6 * _GB, "cp": 5 * _GB}, {"dp": 2, "tp": 8, "cp": 4}, 4, _HARD),
    ({"dp": 3 * _GB, "tp": 4 * _GB, "cp": 3 * _GB}, {"dp": 2, "tp": 4, "cp": 2}, 4, _HARD),
]


@cache
def cases(n: int) -> list[Scene]:
    """Where axes fit into a node; where one is larger, or two together have more bytes than the largest."""
    exams = ((_FITTING, _SIMPLE), (_LARGE, _HARD))
    return answers.scenes((Exam(questions, _asked, _parts(RIGHT), _SLIPS, equal), note) for questions, note in exams)


@dataclass(frozen=True)
class Place(NdTask):
    unexplained: ClassVar[str] = _UNEXPLAINED
    endless: ClassVar[str] = "there are 24 orders of 4 axes, and at most 256 ranks: that is soon counted"
    aspects: ClassVar[tuple[Aspect, ...]] = (
        aspect("sends fewest bytes from node to node where axes fit into one", 0.5, _SIMPLE),
        aspect("and where they compete for one", 0.5, _HARD),
    )

    def found(self, question: tuple, part: str, got: Any, right: Any) -> str:
        traffic, sizes, node, _ = question
        sent, fewest = layouts.crossing(traffic, layouts.in_order(sizes, got), node), layouts.fewest(traffic, sizes, node)
        degrees = ", ".join(f"{axis} {sizes[axis]}" for axis in sizes)
        return (
            f"with {degrees}, nodes of {node} and your order {', '.join(got)} a rank sends {size(round(sent))} to other nodes; "
            f"{size(round(fewest))} are enough"
        )
