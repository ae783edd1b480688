"""Checks of exercise 10_nd_parallel. Meshes have any axes in any order; gradients are averaged on worlds of 6 and 8 ranks.

An order of axes is judged by its bytes between nodes. Sick clusters are steps of real ranks, with a virtual clock's times.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import fields
from functools import partial
from random import Random
from typing import NamedTuple

import torch
from torch import Tensor, nn

from manyranks.given import nd as given
from manyranks.given.nd import Plan, Run, Sizes, Weight, sick
from manyranks.given.numbers import normal, uneven
from manyranks.grade.check import Task
from manyranks.grade.judges import Judge, Right, Verdict, as_bytes, at_most, facts, sent, values
from manyranks.grade.learner import TABLE, Allowed, limited, noted, whole
from manyranks.grade.trial import Trial
from manyranks.measure.journal import Stopped, kind_of
from manyranks.measure.watch import ALL_MAKE_ALL, Watch, groups_compared

__all__ = ["sick"]  # besides the tasks
_EXERCISE = "10_nd_parallel"
_ADVICE = (
    (r"KeyError: '(dp|pp|cp|tp|ep)'", "sizes has only some axes, in any order: read the names from it, and rely on none"),
    TABLE,
)


class Exam(NamedTuple):
    """A rank's questions. questions: what a report calls each of them -> the arguments of the call."""

    note: str
    questions: dict[str, tuple]


def _task(
    points: int, call: str, read: Callable[..., dict], form: str, judges: tuple[Judge, ...], cases: Sequence | Callable, **more
) -> Task:
    """Makes a task: one rank answers an exam. read: makes facts of what the learner's function returns, in this form."""
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

    return Task(_EXERCISE, call, points, run, judges, cases, (1,), part=True, common=_ADVICE, **more)


_number = partial(whole, what="a number of what is returned", form="a whole number is asked for")


def _rows(groups) -> list[list[int]]:
    """Sorts the groups and the ranks in them."""
    rows = groups.tolist() if hasattr(groups, "tolist") else groups
    return sorted(sorted(rank if type(rank) is int else _number(rank) for rank in row) for row in rows)


# Tasks 1 to 3

_MESHES = {"pp": 2, "dp": 3, "tp": 4}, {"cp": 3, "dp": 2, "tp": 4, "pp": 1}, {"dp": 5}, {"dp": 64, "pp": 16, "cp": 2, "tp": 8}
_OTHERS = {"dp": 3, "pp": 2, "tp": 4}, {"tp": 2, "cp": 3, "pp": 1, "dp": 2}, {"pp": 16, "cp": 4, "dp": 32, "tp": 8}


def _on(meshes: Iterable[Sizes], questions: Callable[[Sizes], Iterator[tuple]]) -> dict:
    """Cases on these meshes, and on those that the judge draws."""

    def exams(meshes: Iterable[Sizes]) -> list[Exam]:
        return [Exam(f"with sizes = {sizes}", dict(questions(sizes))) for sizes in meshes]

    return {"cases": exams(meshes), "more": lambda random: exams(given.drawn_meshes(random))}


def _groups(name: str, found, *question) -> dict:
    """Turns many groups into a tensor, so that only a few numbers are stored."""
    rows = _rows(found)
    alike = len({*map(len, rows)}) == 1
    return {name: rows if len(rows) <= 100 else torch.tensor(rows) if alike else f"{len(rows):,} groups of several sizes"}


coordinates = _task(
    2,
    "coordinates(rank, sizes)",
    lambda name, at, rank, sizes: {name: {axis: _number(at[axis]) for axis in {**sizes, **at}}},
    "it returns a dict with a whole number for each axis of sizes",
    (values(1.0, "each rank's coordinates are right", alone=True),),
    **_on(_MESHES, given.ranks_asked),
    endless="a coordinate takes one division for each axis, and no search through the ranks",
    unexplained="begin with the last axis: rest, coordinate = divmod(rank, degree); the rest goes on to the axis before it",
)
rank_of = _task(
    2,
    "rank_of(coordinates, sizes)",
    lambda name, rank, *question: {name: _number(rank)},
    "it returns one whole number",
    (values(1.0, "each place's rank is right", alone=True),),
    **_on(_MESHES, given.places_asked),
    endless="a rank takes one product for each axis, and no search through the ranks",
    unexplained="rank = ((a·B + b)·C + c)·D + d for the coordinates a, b, c, d, and degrees of which B is b's",
    advice=((r"KeyError: '", "an axis that coordinates leaves out counts as 0: coordinates.get(axis, 0)"),),
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
    **_on(_OTHERS, given.axes_asked),
    endless="16,384 ranks take too long: each rank with each other one is 268 million comparisons. Find each group's ranks by "
    "their coordinates, in one pass over the ranks",
    unexplained="ranks that have the same coordinates in all axes but those asked for are one group",
)

# Task 4

_TWO = "two calls per rank, each of one flat row; of dp × cp, an axis that is missing has one rank"
_KINDS = (("cut", (4, 3)), ("whole", (5,)), ("partial", (2, 3)), ("cut", (2, 2, 2)), ("partial", (3,)))


def _gradients(sizes: Sizes, rank: int, n: int, seed: int) -> tuple[Sizes, list[Tensor]]:
    alike = given.mesh_of(sizes).group("tp", rank)[0]  # what is whole is so on all tp ranks
    return sizes, [normal(shape, seed, i, alike if kind == "whole" else rank) for i, (kind, shape) in enumerate(_KINDS)]


def _average(own: tuple[Sizes, list[Tensor]], function: Callable, watch: Watch) -> dict:
    sizes, gradients = own
    key = "the gradient of weight "
    weights = [Weight(nn.Parameter(uneven(shape)), kind) for kind, shape in _KINDS]
    for (parameter, _), gradient in zip(weights, gradients, strict=True):
        parameter.grad = gradient
    before = [parameter.detach().clone() for parameter, _ in weights]
    with groups_compared(function) as made:
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


_JOBS = {6: [{"dp": 3, "tp": 2}], 8: [{"dp": 2, "tp": 2, "cp": 2}, {"cp": 2, "pp": 2, "tp": 2}]}  # by the number of ranks


def _drawn_jobs(random: Random, n: int) -> list[Sizes]:
    """Draws which axes there are besides tp, and their order."""
    degrees = random.choice(((2, 3), (3, 2))) if n == 6 else (2, 2, 2)
    axes = ["tp", *random.sample(("dp", "cp", *["pp"] * (n == 8)), len(degrees) - 1)]
    return [dict(random.sample([*zip(axes, degrees, strict=True)], len(axes)))]


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
    _JOBS.__getitem__,
    make=_gradients,
    more=lambda random: partial(_drawn_jobs, random),
    worlds=(6, 8),
    part=True,
    unexplained="partial: the sum over tp; then all: the sum over the ranks of dp × cp, divided by their number",
    advice=((r"torch\.distributed's new_group", ALL_MAKE_ALL),),
    common=_ADVICE,
)

# Task 5

_ORDER = "an order has each axis of sizes once, the outermost first; an axis of degree 1 stands in it, too"
_SMALLEST = (
    "try all orders: of each axis, the share of ranks whose next one in the ring is on another node (the last one's next is "
    "the first), times its bytes; that with the smallest sum"
)
_MORE = "{name}, a rank sends {got} from node to node in your order; {right} are enough"
_least = partial(at_most, 0.5, hint=_SMALLEST, says=_MORE, unit=as_bytes, each_world=True)
place = _task(
    3,
    "place(traffic, sizes, node)",
    lambda name, order, *question: {name: [*map(str, order)] if given.between_nodes(order, *question) >= 0 else ""},
    _ORDER,
    (
        _least("sends fewest bytes from node to node where axes fit into one", given.FIT),
        _least("and where they compete for one", given.COMPETE),
    ),
    (Exam("in one of 8 jobs", dict(given.jobs())),),
    more=lambda random: [Exam("in other jobs", dict(given.drawn_jobs(random)))],
    then=lambda exam, _, orders: {name: given.between_nodes(one, *exam.questions[name]) for name, one in orders.items()},
    endless="there are 24 orders of 4 axes, and at most 256 ranks: that's quick to count",
)

# Task 6


def _plan(case: str, function: Callable, watch: Watch) -> dict:
    if not isinstance(plan := function(), Plan):
        form = "it returns a plan: return theory.Plan(dp=…, pp=…, cp=…, tp=…, seq=8192, batch=128, …)"
        raise Stopped(f"plan() returned {kind_of(plan)}", form)
    return {"plan": {field.name: getattr(plan, field.name) for field in fields(Plan)}}


def _within(what: str, most: Callable[[float], float]) -> Judge:
    """Judges a step's time. most: seconds of the best plan -> seconds that are allowed."""

    def verdict(trial: Trial, right: Right) -> Verdict:
        seen, limit = trial.seen[0].results, most(right[0].results["seconds"])
        found = f"a step takes {seen['seconds']:.3f} s; {limit:.3f} s are asked for"
        return Verdict(True) if seen["seconds"] <= limit else Verdict(False, found, seen["why"])

    return Judge(0.25, what, verdict, needs=1, each_world=True)


def _fits(trial: Trial, right: Right) -> Verdict:
    found, hint = trial.seen[0].results.get("problem", ("what came back isn't a plan", ""))
    return Verdict(not found, found, hint)


plan = Task(
    _EXERCISE,
    "plan()",
    4,
    _plan,
    (
        Judge(0.25, "the plan is possible, and fits into memory", _fits, each_world=True),
        _within("is 1.25 times as fast as the baseline", lambda best: given.time_of(given.BASELINE).seconds / 1.25),
        _within("is 1.6 times as fast as the baseline", lambda best: given.time_of(given.BASELINE).seconds / 1.6),
        _within("is within 3% of the best that the planner finds", lambda best: 1.03 * best),
    ),
    cases=("llama3-70b on 1,024 GPUs",),
    worlds=(1,),
    then=given.plan_judged,
    part=True,
    allowed=Allowed(
        given=tuple(f"manyranks.theory.{name}" for name in ("plan", "cluster", "hardware", "shapes")),
        hint="the answer is one plan, written down: search in a cell of your own, delete that cell, and return what you found, "
        "theory.Plan(dp=…, pp=…, …)",
    ),
    advice=(
        (r"ValueError: ", "a Plan says what cannot be, and what can"),
        (r"unexpected keyword argument", "help(theory.Plan) names its fields"),
    ),
)

# Tasks 7 to 9


def _clusters(kind: str) -> dict:
    """Makes one case of all clusters of a kind. The judge asks about more: knowing only the first ones earns no points."""

    def exam(case: str, rank: int, n: int, seed: int) -> Exam:
        questions = {}
        for i, run in enumerate(given.recorded(seed, kind), 1):
            axes = ", ".join(f"{axis} {degree}" for axis, degree in run.sizes.items())
            whose = "another cluster" if i > 1 else "the cluster that you have"
            questions[f"{whose} ({i}: {axes}; nodes of {run.node})"] = (run,)
        return Exam(case, questions)

    return {"cases": (f"of {len(given.KINDS[kind])} clusters",), "make": exam}


_AXIS = {"dp": "dp", "pp": "pp", "cp": "cp", "tp": "tp", None: "none"}


def _mended(name: str, answer, run: Run) -> dict:
    axis, order = answer
    return {f"{name}: the axis": _AXIS[axis], name: [*map(str, order)] if given.sent_between(order, run) >= 0 else ""}


def _grouped(name: str, answer, run: Run) -> dict:
    axis, groups = answer
    return {f"{name}: the axis": _AXIS[axis], f"{name}: the list of groups": _rows(groups)}


def _slow(name: str, answer, run: Run) -> dict:
    rank, cause = answer
    if cause not in (given.COMPUTES, given.SENDS):
        raise ValueError("not a cause")
    return {f"{name}: the rank": _number(rank), f"{name}: the cause": str(cause)}


_BY_NUMBER = "a call's number is not its place in the list: {c.number: c for c in run.calls[rank]} finds it"
misplaced = _task(
    3,
    "misplaced(run)",
    _mended,
    f"it returns a pair: the name of an axis of this cluster, and an order. {_ORDER[0].upper()}{_ORDER[1:]}",
    (
        values(0.5, "finds the axis that sends most from node to node", "axis$", alone=True),
        _least("and the order of axes that sends least", r"\)$"),
    ),
    **_clusters("A"),
    then=lambda _, exam, found: (
        found | {name: given.sent_between(found[name], *asked) for name, asked in exam.questions.items()}
    ),
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
    **_clusters("B"),
    unexplained='the missing axis is the one of dp and cp in which the ranks of some call for "data" do not differ, though its '
    "degree is more than 1; ranks that differ in dp and cp only are one group, as in task 3",
)
straggler = _task(
    3,
    "straggler(run)",
    _slow,
    f'it returns a pair: a rank, and "{given.COMPUTES}" or "{given.SENDS}"',
    (
        values(0.7, "finds the rank that everybody waits for", "rank$", alone=True),
        values(0.3, "and whether it computes slowly, or sends slowly", "cause$", alone=True, needs=1),
    ),
    **_clusters("C"),
    unexplained="first compare compute seconds within each stage, 1.1 times is slow. If they are equal: a call's own time is "
    "its ranks' shortest span. Compare it with calls of the same axis and bytes; the slow rank is in no fast one between nodes",
    advice=((r"IndexError|KeyError: \d", _BY_NUMBER),),
)
