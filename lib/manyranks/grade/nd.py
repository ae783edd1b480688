"""Checks of exercise 10_nd_parallel. Meshes have any axes in any order; gradients are averaged on worlds of 6 and 8 ranks.

What is judged of an order of axes is the bytes that it sends from node to node. Sick clusters are steps that ran on real
ranks, with the times of a virtual clock: learners have the first one of each kind. Task 6, the plan, is nd_plan.py.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from itertools import combinations
from random import Random
from typing import NamedTuple

import torch
from torch import Tensor, nn

from manyranks.given.nd import (
    COMPETE,
    COMPUTES,
    FIT,
    SENDS,
    Run,
    Sizes,
    Weight,
    between_nodes,
    drawn_jobs,
    drawn_meshes,
    jobs,
    mesh_of,
    recorded,
    sick,
)
from manyranks.given.numbers import normal, uneven
from manyranks.grade import nd_plan, trial
from manyranks.grade.check import Task
from manyranks.grade.judges import Judge, as_bytes, at_most, facts, sent, values
from manyranks.grade.learner import limited, noted, whole
from manyranks.measure.journal import Stopped, kind_of
from manyranks.measure.watch import ALL_MAKE_ALL, Watch, groups_compared

__all__ = ["sick"]  # beside the tasks
_EXERCISE = "10_nd_parallel"
_ADVICE = (
    (r"KeyError: '(dp|pp|cp|tp|ep)'", "sizes has only some axes, in any order: ask it which ones, no name stands for sure"),
    (r"AttributeError: '\w+' object has no attribute", "the table above has the names of what you are given"),
)


class Exam(NamedTuple):
    """What one rank is asked. questions: what a report calls each of them -> the arguments of the call."""

    note: str
    questions: dict[str, tuple]

    def __str__(self) -> str:
        return self.note


def _task(
    points: int, call: str, read: Callable[..., dict], form: str, judge: tuple[Judge, ...], cases: Sequence | Callable, **more
) -> Task:
    """One rank answers an exam. read: makes facts of what the learner's function returns, which should have this form."""
    endless = more.pop("endless", "a loop does not end")

    def run(exam: Exam, function: Callable, watch: Watch) -> dict:
        found = {}
        for name, arguments in exam.questions.items():
            with limited(call, endless):
                answer = function(*deepcopy(arguments))
            try:
                found |= read(name, answer, *arguments)
            except (TypeError, ValueError, KeyError):
                raise Stopped(f"{call} returned {kind_of(answer)}: {answer!r:.60}", form) from None
        return found

    return Task(_EXERCISE, call, points, run, judge, cases, (1,), part=True, **{"advice": _ADVICE} | more)


def _number(value) -> int:
    return whole(value, "a number of what is returned", "a whole number is asked for")


def _rows(groups) -> list[list[int]]:
    """Sorted."""
    rows = groups.tolist() if hasattr(groups, "tolist") else groups
    return sorted(sorted(rank if type(rank) is int else _number(rank) for rank in row) for row in rows)


# Tasks 1 to 3

_MESHES = {"pp": 2, "dp": 3, "tp": 4}, {"cp": 3, "dp": 2, "tp": 4, "pp": 1}, {"dp": 5}, {"dp": 64, "pp": 16, "cp": 2, "tp": 8}
_OTHERS = {"dp": 3, "pp": 2, "tp": 4}, {"tp": 2, "cp": 3, "pp": 1, "dp": 2}, {"pp": 16, "cp": 4, "dp": 32, "tp": 8}


def _on(meshes: Iterable[Sizes], questions: Callable[[Sizes], Iterator[tuple]]) -> tuple[Exam, ...]:
    return tuple(Exam(f"with sizes = {sizes}", dict(questions(sizes))) for sizes in meshes)


def _ranks(sizes: Sizes) -> Iterator[tuple]:
    n = math.prod(sizes.values())
    for rank in range(n) if n < 100 else (0, 1, 9, 1234, 7777, n - 2, n - 1):
        yield f"the place of rank {rank}", (rank, sizes)


def _places(sizes: Sizes) -> Iterator[tuple]:
    """Their axes come in another order each time, and some leave one out."""
    for i in range(12):
        at = [(axis, (37 * i + 11 * j) % degree) for j, (axis, degree) in enumerate(sizes.items())]
        turned = (at[i % len(at) :] + at[: i % len(at)])[:: 1 if i % 2 else -1]
        at = dict(turned[1:] if i % 3 == 0 else turned)
        yield f"the rank at {at}", (at, sizes)


def _axes(sizes: Sizes) -> Iterator[tuple]:
    """Each axis, each pair of them, in both orders, and all of them; of many ranks one, and one pair."""
    pairs = [pair if i % 2 else pair[::-1] for i, pair in enumerate(combinations(sizes, 2))]
    every = [*((axis,) for axis in sizes), *pairs, tuple(sizes)]
    for axes in every if math.prod(sizes.values()) < 100 else [("tp",), ("cp", "dp")]:
        yield f"groups(sizes, {axes})", (sizes, axes)


def _groups(name: str, found, *question) -> dict:
    """Of many, a tensor, of which a few numbers are stored."""
    rows = _rows(found)
    alike = len({*map(len, rows)}) == 1
    return {name: rows if len(rows) <= 100 else torch.tensor(rows) if alike else f"{len(rows):,} groups of several sizes"}


coordinates = _task(
    2,
    "coordinates(rank, sizes)",
    lambda name, at, rank, sizes: {name: {axis: _number(at[axis]) for axis in {**sizes, **at}}},
    "it returns a dict with a whole number for each axis of sizes",
    (values(1.0, "each rank's coordinates are right", alone=True),),
    _on(_MESHES, _ranks),
    more=lambda random: _on(drawn_meshes(random), _ranks),
    endless="a coordinate takes one division for each axis, and no search through the ranks",
    unexplained="begin inside: coordinate and rest of the last axis are divmod(rank, degree), the rest goes on to the axis "
    "before it",
)
rank_of = _task(
    2,
    "rank_of(coordinates, sizes)",
    lambda name, rank, *question: {name: _number(rank)},
    "it returns one whole number",
    (values(1.0, "each place's rank is right", alone=True),),
    _on(_MESHES, _places),
    more=lambda random: _on(drawn_meshes(random), _places),
    endless="a rank takes one product for each axis, and no search through the ranks",
    unexplained="rank = ((a·B + b)·C + c)·D + d for the coordinates a, b, c, d, and degrees of which B is b's",
    advice=((r"KeyError: '", "an axis that coordinates leaves out counts as 0: coordinates.get(axis, 0)"), *_ADVICE),
)
groups = _task(
    3,
    "groups(sizes, axes)",
    _groups,
    "it returns a list of groups, each a tuple of ranks",
    (
        values(0.6, "all groups of one axis, each once", r",\)\)$", alone=True),
        values(0.4, "all groups of several axes at once", "', '", alone=True),
    ),
    _on(_OTHERS, _axes),
    more=lambda random: _on(drawn_meshes(random), _axes),
    endless="16,384 ranks take too long: each rank with each other one is 268 million comparisons. Find each group's ranks by "
    "their coordinates, in one pass over the ranks",
    unexplained="ranks that have the same coordinates in all axes but those asked for are one group",
)

# Task 4

_TWO = "two calls a rank, each of one flat row; of dp × cp, an axis that is missing has one rank"
_KINDS = (("cut", (4, 3)), ("whole", (5,)), ("partial", (2, 3)), ("cut", (2, 2, 2)), ("partial", (3,)))


def _gradients(sizes: Sizes, rank: int, n: int, seed: int) -> tuple[Sizes, list[Tensor]]:
    alike = mesh_of(sizes).group("tp", rank)[0]  # what is whole is so on all tp ranks
    return sizes, [normal(shape, seed, i, alike if kind == "whole" else rank) for i, (kind, shape) in enumerate(_KINDS)]


def _average(given: tuple[Sizes, list[Tensor]], function: Callable, watch: Watch) -> dict:
    (sizes, gradients), key = given, "the gradient of weight "
    weights = [Weight(nn.Parameter(uneven(shape)), kind) for kind, shape in _KINDS]
    for (parameter, _), gradient in zip(weights, gradients, strict=True):
        parameter.grad = gradient
    before = [parameter.detach().clone() for parameter, _ in weights]
    with groups_compared() as made:
        function(dict(sizes), list(weights))
    found = {"the list of groups that were made": sorted(made)}
    with noted(watch, key, "average(sizes, weights)", first=False):
        for i, (parameter, kind) in enumerate(weights):
            if not parameter.detach().equal(before[i]):
                raise Stopped(f"weight {i} has changed", "gradients are averaged, weights stay as they are")
            if (grad := parameter.grad) is None or grad.shape != parameter.shape:
                hint = "cut the flat row again, in the order and the sizes in which it was put together"
                raise Stopped(f"{key}{i} is {kind_of(grad)}, or of another shape than the weight", hint)
            found[f"{key}{i}, which is {kind}"] = grad
    return found


def _jobs(n: int) -> list[Sizes]:
    """Meshes of n ranks; for the judge one of axes that are drawn, before those that everybody can see."""
    own = [{"dp": 3, "tp": 2}] if n == 6 else [{"dp": 2, "tp": 2, "cp": 2}, {"cp": 2, "pp": 2, "tp": 2}]
    random = Random(trial.seed)
    few, many = [(random.choice(("dp", "cp")), 3)], [(axis, 2) for axis in random.sample(("dp", "cp", "pp"), 2)]
    axes = (few if n == 6 else many) + [("tp", 2)]
    return [dict(random.sample(axes, len(axes)))] * bool(trial.seed) + own


average = Task(
    _EXERCISE,
    "average(sizes, weights)",
    5,
    _average,
    (
        values(0.5, "each gradient is that of the whole batch, as one process has it", "gradient"),
        facts(0.2, "all ranks make all groups, in one order", "groups"),
        sent(0.3, "two all-reduces: what is partial over tp, everything over dp × cp", groups=True, hint=_TWO),
    ),
    _jobs,
    make=_gradients,
    worlds=(6, 8),
    part=True,
    unexplained="partial: the sum over tp; then all: the sum over the ranks of dp × cp, divided by their number",
    advice=((r"torch\.distributed's new_group", ALL_MAKE_ALL), *_ADVICE),
)

# Task 5

_ORDER = "an order has each axis of sizes once, the outermost first; an axis of degree 1 stands in it, too"
_SENDS = {
    "hint": "try all orders: of each axis, the share of ranks whose next one in the ring is on another node, times its bytes; "
    "that with the smallest sum",
    "says": "{name}, a rank sends {got} from node to node in your order; {right} are enough",
    "unit": as_bytes,
}
place = _task(
    3,
    "place(traffic, sizes, node)",
    lambda name, order, *question: {name: [*map(str, order)] if between_nodes(order, *question) >= 0 else ""},
    _ORDER,
    (
        at_most(0.5, "sends fewest bytes from node to node where axes fit into one", FIT, **_SENDS)._replace(each_world=True),
        at_most(0.5, "and where they compete for one", COMPETE, **_SENDS)._replace(each_world=True),
    ),
    (Exam("in one of 8 jobs", dict(jobs())),),
    more=lambda random: [Exam("in other jobs", dict(drawn_jobs(random)))],
    then=lambda exam, given, results: {name: between_nodes(order, *exam.questions[name]) for name, order in results.items()},
    endless="there are 24 orders of 4 axes, and at most 256 ranks: that is soon counted",
)

plan = nd_plan.plan  # task 6

# Tasks 7 to 9


def _clusters(kind: str) -> Callable[[int], tuple[Exam]]:
    """One case of all clusters of a kind, of the judge's own for the judge: who knows only the first has no points."""

    def cases(n: int) -> tuple[Exam]:
        questions = {}
        for i, run in enumerate(recorded(trial.seed)[kind], 1):
            axes = ", ".join(f"{axis} {degree}" for axis, degree in run.sizes.items())
            whose = "another cluster" if i > 1 or trial.seed else "the cluster that you have"
            questions[f"{whose} ({i}: {axes}; nodes of {run.node})"] = (run,)
        return (Exam(f"of {len(questions)} clusters", questions),)

    return cases


def _mended(name: str, answer, run: Run) -> dict:
    axis, order = answer
    return {f"{name}: the axis": _axis(axis), name: list(order) if _between(order, run) >= 0 else ""}


def _between(order: Sequence[str], run: Run) -> float:
    traffic = dict.fromkeys(run.sizes, 0.0)
    for call in (call for calls in run.calls for call in calls):
        traffic[call.axis] += call.sent / len(run.calls)
    return between_nodes(order, traffic, run.sizes, run.node)


def _axis(axis) -> str:
    return {"dp": "dp", "pp": "pp", "cp": "cp", "tp": "tp", None: "none"}[axis]


def _grouped(name: str, answer, run: Run) -> dict:
    axis, groups = answer
    return {f"{name}: the axis": _axis(axis), f"{name}: the list of groups": _rows(groups)}


def _slow(name: str, answer, run: Run) -> dict:
    rank, cause = answer
    if cause not in (COMPUTES, SENDS):
        raise ValueError("not a cause")
    return {f"{name}: the rank": _number(rank), f"{name}: the cause": cause}


_BY_NUMBER = "a call's number is not its place in the list: {c.number: c for c in run.calls[rank]} finds it"
misplaced = _task(
    3,
    "misplaced(run)",
    _mended,
    f"it returns a pair: the name of an axis of this cluster, and an order. {_ORDER[0].upper()}{_ORDER[1:]}",
    (
        values(0.5, "finds the axis that sends most from node to node", "axis$", alone=True),
        at_most(0.5, "and the order of axes that sends least", r"\)$", **_SENDS)._replace(each_world=True),
    ),
    _clusters("A"),
    then=lambda exam, given, found: found | {name: _between(found[name], *asked) for name, asked in exam.questions.items()},
    unexplained="of all ranks' calls, add up `sent` by axis where the rank's next one in `ranks` is on another node (the last "
    "one's next is the first); the largest",
)
drifting = _task(
    3,
    "drifting(run)",
    _grouped,
    "it returns a pair: the name of an axis of this cluster, and a list of groups, each a tuple of ranks",
    (
        values(0.5, "finds the axis that is missing in the averages", "axis$", alone=True),
        values(0.5, "and the groups that gradients have to be averaged over", "groups$", alone=True),
    ),
    _clusters("B"),
    unexplained='the missing axis is the one of dp and cp in which the ranks of some call for "data" do not differ, though its '
    "degree is more than 1; ranks that differ in dp and cp only are one group, as in task 3",
)
straggler = _task(
    3,
    "straggler(run)",
    _slow,
    f'it returns a pair: a rank, and "{COMPUTES}" or "{SENDS}"',
    (
        values(0.7, "finds the rank that everybody waits for", "rank$", alone=True),
        values(0.3, "and whether it computes slowly, or sends slowly", "cause$", alone=True)._replace(needs=1),
    ),
    _clusters("C"),
    unexplained="first compare compute seconds within each stage. If these are equal: a call's own time is its ranks' shortest "
    "span, the last one's. Compare it with calls of the same axis and bytes; the slow rank is in no fast one between nodes",
    advice=((r"IndexError|KeyError: \d", _BY_NUMBER), *_ADVICE),
)
