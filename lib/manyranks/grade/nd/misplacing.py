"""The task misplaced: which axis lies across nodes though it sends most, and the order of axes that mends it."""

from collections import Counter
from collections.abc import Callable
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
_PAIR = "it returns a pair: the name of an axis, and an order of all axes, outermost first"
_ALL_BYTES = (
    "that is the axis with most bytes in all: count those that go from one node to another, rank // run.node is a rank's node"
)
_INSIDE = "that axis sends no byte, or few, from node to node: compare rank // run.node of the ranks of a call"
_OF_CALLS = "that is the axis with most calls between nodes: bytes are what fills a link"
_BY_ONE = "that is what rank 0's calls say: other stages have other work. Add up the calls of all ranks"
_BY_LARGEST = "that is the axis of the largest call: an axis with many smaller ones may send more"
_RULE = "tp, or what is innermost in the chapter, is not always what sends most: read it off the calls"
_STAYS = "that is the order it has: another one sends fewer bytes from node to node"
_TURNED = "the order is turned round: neighbours share a node, and they differ in the last axis"
_MOST = "that order sends the most bytes from node to node: the axes with most bytes belong inside, at the end"
_UNEXPLAINED_AXIS = "of all ranks' calls, add up `sent` by axis where the call's ranks are on more than one node; the largest"
_UNEXPLAINED = (
    "bytes by axis are the sum of `sent` of all ranks' calls; the order that sends fewest from node to node, as in task 5"
)

Count = Callable[[Run, Call], float]


def _most(run: Run, count: Count, ranks: slice = slice(None), choose: Callable = max) -> str:
    found = Counter(dict.fromkeys(run.sizes, 0.0))
    for mine in run.calls[ranks]:
        for call in mine:
            found[call.axis] += count(run, call)
    return choose(run.sizes, key=found.__getitem__)


def _leaves(run: Run, call: Call) -> bool:
    return len({rank // run.node for rank in call.ranks}) > 1


def _between(run: Run, call: Call) -> float:
    """Of a ring, what goes to the next rank on another node."""
    return call.sent * _leaves(run, call)


def _ordered(traffic: dict[str, float], run: Run, choose: Callable = min) -> list[str]:
    def sent(order: tuple[str, ...]) -> float:
        return layouts.crossing(traffic, layouts.in_order(run.sizes, order), run.node)

    return list(choose(permutations(run.sizes), key=sent))


def _right(run: Run) -> Parts:
    """By rings: a call whose ranks are on two nodes may send less than all of it there, which changes no answer here."""
    traffic = clusters.traffic(run)
    between = {axis: traffic[axis] * layouts.leaving(run.sizes, axis, run.node) for axis in run.sizes}
    return {_AXIS: max(between, key=between.get), _ORDER: _ordered(traffic, run)}


def _of_rank_0(run: Run) -> Parts:
    alone = run._replace(calls=run.calls[:1])
    return {_AXIS: _most(alone, _between), _ORDER: _ordered(clusters.traffic(alone), run)}


def _largest(run: Run) -> Parts:
    calls = [call for mine in run.calls for call in mine]
    return {_AXIS: max(calls, key=lambda call: _between(run, call)).axis}


_SLIPS = (
    Slip(_BY_ONE, _of_rank_0),
    Slip(_ALL_BYTES, lambda run: {_AXIS: _most(run, lambda run, call: call.sent)}),
    Slip(_OF_CALLS, lambda run: {_AXIS: _most(run, lambda run, call: float(_leaves(run, call)))}),
    Slip(_BY_LARGEST, _largest),
    Slip(_RULE, lambda run: {_AXIS: "tp", _ORDER: sorted(run.sizes, key=("pp", "dp", "tp").index)}),
    Slip(_INSIDE, lambda run: {_AXIS: _most(run, _between, choose=min)}),
    Slip(_STAYS, lambda run: {_ORDER: list(run.sizes)}),
    Slip(_TURNED, lambda run: {_ORDER: _right(run)[_ORDER][::-1]}),
    Slip(_MOST, lambda run: {_ORDER: _ordered(clusters.traffic(run), run, max)}),
    Slip(_MOST, lambda run: {_ORDER: sorted(run.sizes, key=lambda axis: -clusters.traffic(run)[axis])}),
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
    axis, order = answers.pair(function(run), CALL, _PAIR)
    return {_AXIS: answers.an_axis(axis, run.sizes, "the axis"), _ORDER: answers.an_order(order, run.sizes, CALL)}


@cache
def cases(n: int) -> list[Scene]:
    """The cluster that learners have seen, and others."""
    seen, *others = clusters.kind("A")
    exams = [([(seen,)], "the cluster that you have"), ([(run,) for run in others], "other clusters")]
    return answers.scenes((Exam(questions, _asked, _right, _SLIPS, _equal), note) for questions, note in exams)


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
