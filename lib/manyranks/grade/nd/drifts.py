"""The task drifting: which axis was forgotten when gradients were averaged, and the groups that mend it."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

from manyranks.grade.journal import Stopped
from manyranks.grade.nd import answers, clusters, layouts
from manyranks.grade.nd.answers import Exam, Parts, Slip, aspect
from manyranks.grade.nd.given import Run
from manyranks.grade.nd.task import NdTask, shown
from manyranks.grade.scripts import Scene
from manyranks.grade.verdict import Aspect

CALL = "drifting(run)"
_AXIS, _GROUPS = "the axis", "the groups"
_PAIR = "it returns a pair: the name of an axis, and a list of groups, each a tuple of ranks"
_BY_ONE = (
    'that is what rank 0\'s group says: it may be in order where another one is not. Look at the ranks of all calls for "data"'
)
_BY_LAST = (
    "that is what the last rank's group says: it may be in order where rank 0's is not. Look at the ranks of all calls for "
    '"data"'
)
_CUT = (
    "weights differ from tp rank to tp rank because they are cut, from stage to stage because these have other layers: that "
    "is no drift. Compare ranks that have the same tp and pp"
)
_THE_OTHER = "that axis is in the groups, and its ranks have the same weights: the other one of dp and cp is missing"
_ALWAYS = (
    "that is what the first cluster had: read it off the calls, or the weights. Where dp and cp are equally large, how many "
    "ranks a call has does not tell; their coordinates do"
)
_FIXED = "the order of the axes is that of run.sizes, not pp, dp, cp, tp as in the chapter"
_EACH_ONCE = "each group once: every rank is in one of them"
_STILL = "those are the groups that the run had: what ails it stays"
_ONLY_MISSING = "those groups have the missing axis alone: gradients are averaged over dp and cp together"
_ONE_AXIS = "gradients are averaged over dp and cp together, in one group of dp × cp ranks, not over one of them"
_EVERYONE = "all ranks in one group average what is not alike: tp ranks and stages have other weights"
_WITH_TP = "tp ranks have other parts of the weights, and stages other layers: they are no part of these groups"
_ONLY_SICK = "the groups of all ranks are asked for, also where the old ones were right"
_OWN = "one group is not enough: every rank is in one of them"
_UNEXPLAINED_AXIS = (
    'of dp and cp, the one in which the ranks of some call for "data" do not differ, though its degree is more than 1; in this '
    "axis copies of one weight differ"
)
_UNEXPLAINED = 'ranks that differ in dp and cp only are one group: groups(run.sizes, ("dp", "cp")) of task 3'


def _called(run: Run) -> list[list[int]]:
    """Groups over which gradients were averaged."""
    return sorted({tuple(sorted(call.ranks)) for mine in run.calls for call in mine if call.axis == "data"})


def _missing(run: Run, groups: list) -> str | None:
    """Of dp and cp, the one in which ranks of a group do not differ."""
    for ranks in groups:
        places = [layouts.coordinates(rank, run.sizes) for rank in ranks]
        for axis in ("cp", "dp"):
            if len({place[axis] for place in places}) < run.sizes[axis]:
                return axis
    return None


def _right(run: Run) -> Parts:
    return {_AXIS: _missing(run, _called(run)), _GROUPS: layouts.groups(run.sizes, ("dp", "cp"))}


def _differing(run: Run) -> str | None:
    """The first axis along which weights differ, whatever it is."""
    for axis in reversed(run.sizes):
        for ranks in layouts.groups(run.sizes, (axis,)):
            one, *others = (run.weights[rank] for rank in ranks)
            if any(one.keys() != other.keys() or any(not one[name].equal(other[name]) for name in one) for other in others):
                return axis
    return None


def _said_by(rank: int, otherwise: str | None) -> Callable[[Run], Parts]:
    """By one rank's group alone, and a guess where nothing is missing there."""

    def found(run: Run) -> Parts:
        ranks = next(call.ranks for call in run.calls[rank] if call.axis == "data")
        return {_AXIS: _missing(run, [ranks]) or otherwise}

    return found


def _in_chapter_s_order(run: Run) -> Parts:
    sizes = {axis: run.sizes[axis] for axis in sorted(run.sizes, key=("pp", "dp", "cp", "tp").index)}
    return {_GROUPS: layouts.groups(sizes, ("dp", "cp"))}


def _other(run: Run) -> str:
    return {"cp": "dp", "dp": "cp"}[_missing(run, _called(run))]


def _axes(*axes: str) -> Callable[[Run], Parts]:
    return lambda run: {_GROUPS: layouts.groups(run.sizes, layouts.present(run.sizes, *axes))}


def _sick_ones(run: Run) -> Parts:
    right = layouts.groups(run.sizes, ("dp", "cp"))
    return {_GROUPS: [ranks for ranks in right if tuple(ranks) not in _called(run)]}


_SLIPS = (
    *(Slip(_BY_ONE, _said_by(0, guess)) for guess in (None, "dp", "cp")),
    *(Slip(_BY_LAST, _said_by(-1, guess)) for guess in (None, "dp", "cp")),
    Slip(_ALWAYS, lambda run: {_AXIS: "cp"}),
    Slip(_CUT, lambda run: {_AXIS: _differing(run)}),
    Slip(_CUT, lambda run: {_AXIS: "tp" if "tp" in run.sizes else "pp"}),
    Slip(_THE_OTHER, lambda run: {_AXIS: _other(run)}),
    Slip(_STILL, lambda run: {_GROUPS: _called(run)}),
    Slip(_ONLY_MISSING, lambda run: {_GROUPS: layouts.groups(run.sizes, (_missing(run, _called(run)),))}),
    Slip(_ONE_AXIS, _axes("dp")),
    Slip(_ONE_AXIS, _axes("cp")),
    Slip(_EVERYONE, _axes("dp", "cp", "tp", "pp")),
    Slip(_WITH_TP, _axes("tp", "pp")),
    Slip(_ONLY_SICK, _sick_ones),
    Slip(_FIXED, _in_chapter_s_order),
    Slip(_EACH_ONCE, lambda run: {_GROUPS: sorted(2 * layouts.groups(run.sizes, ("dp", "cp")))}),
    Slip(_OWN, lambda run: {_GROUPS: layouts.groups(run.sizes, ("dp", "cp"))[:1]}),
)


def _asked(function: Callable, question: tuple) -> Parts:
    run = question[0]
    axis, groups = answers.pair(function(deepcopy(run)), CALL, _PAIR)
    if not isinstance(groups, tuple | list | set | frozenset):
        raise Stopped(f"the groups of {CALL} are {answers.kind_of(groups)}", _PAIR)
    found = sorted(sorted(answers.row(group, "a group", _PAIR)) for group in groups)
    return {_AXIS: axis if axis is None else answers.an_axis(axis, run.sizes, "the axis"), _GROUPS: found}


@cache
def cases(n: int) -> list[Scene]:
    """The cluster that learners have seen, and others."""
    questions = [(run,) for run in clusters.kind("B")]
    return [answers.of_clusters(Exam(questions, _asked, _right, _SLIPS, answers.same))]


@dataclass(frozen=True)
class Drifting(NdTask):
    unexplained: ClassVar[str] = _UNEXPLAINED
    aspects: ClassVar[tuple[Aspect, ...]] = (
        aspect("finds the axis that is missing in the averages", 0.5, _AXIS),
        aspect("and the groups that gradients have to be averaged over", 0.5, _GROUPS),
    )

    def found(self, question: tuple, part: str, got: Any, right: Any) -> str:
        degrees = ", ".join(f"{axis} {degree}" for axis, degree in question[0].sizes.items())
        return f"with {degrees}: {part} you have: {shown(got)}; right: {shown(right)}"

    def otherwise(self, part: str, exam: Exam, got: list) -> str:
        return _UNEXPLAINED_AXIS if part == _AXIS else ""
