"""The task misplaced: which axis lies across nodes though it sends most, and the order of axes that mends it."""

from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from itertools import permutations
from math import isclose
from typing import Any, ClassVar

from manyranks.grade.nd import answers, clusters, layouts
from manyranks.grade.nd.answers import Exam, Parts, Slip, aspect
from manyranks.grade.nd.given import Call, Run
from manyranks.grade.nd.task import NdTask
from manyranks.grade.report import size
from manyranks.grade.scripts import Scene
from manyranks.grade.verdict import Aspect

CALL = "misplaced(run)"
_AXIS, _ORDER = "the axis", "the order"
_AXES = ("pp", "dp", "cp", "tp")  # of the course, and not of each cluster
_PAIR = "it returns a pair: the name of an axis, and an order of all axes, outermost first"
_ALL_BYTES = (
    "that is the axis with most bytes in all: count those that go from one node to another, rank // run.node is a rank's node"
)
_INSIDE = "that axis sends no byte, or few, from node to node: compare rank // run.node of the ranks of a call"
_OF_CALLS = "that is the axis with most calls between nodes: bytes are what fills a link"
_BY_ONE = "that is what rank 0's calls say: other stages have other work. Add up the calls of all ranks"
_BY_ANOTHER = "that is what one rank's calls say, and other stages send otherwise: add up the calls of all ranks"
_BY_SOME = "that is what some ranks' calls say: those in the middle of a pipeline send more. Add up the calls of all ranks"
_BY_LARGEST = "that is the axis of the largest call: an axis with many smaller ones may send more"
_RULE = "tp, or what is innermost in the chapter, is not always what sends most: read it off the calls"
_STAYS = "that is the order it has: another one sends fewer bytes from node to node"
_TURNED = "the order is turned round: neighbours share a node, and they differ in the last axis"
_MOST = "that order sends the most bytes from node to node: the axes with most bytes belong inside, at the end"
_SORTED = (
    "there the axis with most bytes is innermost, which is not always best, as in task 5: one larger than a node leaves it at "
    "some hops anyway. Count the bytes of each order"
)
_WHOLE_CALLS = (
    "that counts all bytes of a call whose ranks are on several nodes: a rank's bytes go to the next of `ranks`, which may be "
    "on its own node"
)
_UNEXPLAINED_AXIS = (
    "of all ranks' calls, add up `sent` by axis where the rank's next one in `ranks` is on another node (the last one's next "
    "is the first); the largest"
)
_UNEXPLAINED = (
    "bytes by axis are the sum of `sent` of all ranks' calls; the order that sends fewest from node to node, as in task 5"
)

Count = Callable[[Run, int, Call], float]  # of a rank and its call


def _most(run: Run, count: Count, choose: Callable = max) -> str:
    found = Counter(dict.fromkeys(run.sizes, 0.0))
    for rank, mine in enumerate(run.calls):
        for call in mine:
            found[call.axis] += count(run, rank, call)
    return choose(run.sizes, key=found.__getitem__)


def _leaves(run: Run, rank: int, call: Call) -> bool:
    """Whether the call's ranks are on several nodes."""
    return len({rank // run.node for rank in call.ranks}) > 1


def _between(run: Run, rank: int, call: Call) -> float:
    """What goes to the next rank on another node."""
    following = call.ranks[(call.ranks.index(rank) + 1) % len(call.ranks)]
    return call.sent * (rank // run.node != following // run.node)


def _ordered(traffic: dict[str, float], run: Run, choose: Callable = min) -> list[str]:
    def sent(order: tuple[str, ...]) -> float:
        return layouts.crossing(traffic, layouts.in_order(run.sizes, order), run.node)

    return list(choose(permutations(run.sizes), key=sent))


def _right(run: Run) -> Parts:
    return {_AXIS: _most(run, _between), _ORDER: _ordered(clusters.traffic(run), run)}


def _of(*ranks: int) -> Callable[[Run], Parts]:
    """What the calls of these ranks alone say; −1 is the last."""

    def found(run: Run) -> Parts:
        who = {rank % len(run.calls) for rank in ranks}
        return _right(run._replace(calls=[mine if rank in who else [] for rank, mine in enumerate(run.calls)]))

    return found


def _by_shares(*ranks: int) -> Callable[[Run], Parts]:
    """The same, with the share of all ranks whose next one is on another node."""

    def found(run: Run) -> Parts:
        sent: Counter = Counter()
        for rank in {rank % len(run.calls) for rank in ranks}:
            for call in run.calls[rank]:
                sent[call.axis] += call.sent
        return {_AXIS: max(run.sizes, key=lambda axis: sent[axis] * layouts.leaving(run.sizes, axis, run.node))}

    return found


def _largest(run: Run) -> Parts:
    calls = [(rank, call) for rank, mine in enumerate(run.calls) for call in mine]
    return {_AXIS: max(calls, key=lambda one: _between(run, *one))[1].axis}


def _sorted(run: Run, sign: int = 1) -> list[str]:
    """By bytes, the largest innermost."""
    traffic = clusters.traffic(run)
    return sorted(run.sizes, key=lambda axis: sign * traffic[axis])


_ALONE = ((_BY_ONE, (0,)), (_BY_ANOTHER, (1,)), (_BY_ANOTHER, (-1,)), (_BY_SOME, (0, -1)), (_BY_SOME, (0, 1, 2, 3)))
_SLIPS = (
    Slip(_BY_LARGEST, _largest),
    *(Slip(hint, of(*ranks)) for hint, ranks in _ALONE for of in (_of, _by_shares)),
    Slip(_ALL_BYTES, lambda run: {_AXIS: _most(run, lambda run, rank, call: call.sent)}),
    Slip(_WHOLE_CALLS, lambda run: {_AXIS: _most(run, lambda run, rank, call: call.sent * _leaves(run, rank, call))}),
    Slip(_OF_CALLS, lambda run: {_AXIS: _most(run, lambda *one: float(_leaves(*one)))}),
    Slip(_RULE, lambda run: {_AXIS: "tp", _ORDER: sorted(run.sizes, key=("pp", "dp", "tp").index)}),
    Slip(_INSIDE, lambda run: {_AXIS: _most(run, _between, choose=min)}),
    Slip(_STAYS, lambda run: {_ORDER: list(run.sizes)}),
    Slip(_TURNED, lambda run: {_ORDER: _right(run)[_ORDER][::-1]}),
    Slip(_MOST, lambda run: {_ORDER: _ordered(clusters.traffic(run), run, max)}),
    Slip(_MOST, lambda run: {_ORDER: _sorted(run, -1)}),
    Slip(_SORTED, lambda run: {_ORDER: _sorted(run)}),
)


def _equal(question: tuple, part: str, got: Any, right: Any) -> bool:
    if part == _AXIS:
        return got == right
    run = question[0]
    traffic = clusters.traffic(run)
    sent = layouts.crossing(traffic, layouts.in_order(run.sizes, got), run.node)
    return isclose(sent, layouts.fewest(traffic, run.sizes, run.node), rel_tol=1e-9)


def _asked(function: Callable, question: tuple) -> Parts:
    run = question[0]
    axis, order = answers.pair(function(deepcopy(run)), CALL, _PAIR)
    return {_AXIS: answers.an_axis(axis, dict.fromkeys(_AXES, 1), "the axis"), _ORDER: answers.an_order(order, run.sizes, CALL)}


@cache
def cases(n: int) -> list[Scene]:
    """The cluster that learners have seen, and others."""
    questions = [(run,) for run in clusters.kind("A")]
    return [answers.of_clusters(Exam(questions, _asked, _right, _SLIPS, _equal))]


@dataclass(frozen=True)
class Misplaced(NdTask):
    unexplained: ClassVar[str] = _UNEXPLAINED
    aspects: ClassVar[tuple[Aspect, ...]] = (
        aspect("finds the axis that sends most from node to node", 0.5, _AXIS),
        aspect("and the order of axes that sends least", 0.5, _ORDER),
    )

    def found(self, question: tuple, part: str, got: Any, right: Any) -> str:
        run = question[0]
        degrees = ", ".join(f"{axis} {degree}" for axis, degree in run.sizes.items())
        where, traffic = f"with {degrees} on nodes of {run.node}", clusters.traffic(run)
        if part == _AXIS:
            return f"{where}: your axis is {got}; right is {right}"
        sent = layouts.crossing(traffic, layouts.in_order(run.sizes, got), run.node)
        fewest = layouts.fewest(traffic, run.sizes, run.node)
        return f"{where}: in the order {', '.join(got)} a rank sends {size(round(sent))}; {size(round(fewest))} are enough"

    def otherwise(self, part: str, exam: Exam, got: list) -> str:
        return _UNEXPLAINED_AXIS if part == _AXIS else ""
