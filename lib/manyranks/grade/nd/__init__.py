"""Checks of exercise 10_nd_parallel. Each takes the learner's function and returns a Report.

Meshes have any axes in any order. Gradients are averaged on worlds of 6 and 8 ranks. Sick clusters are steps that ran on 8
real ranks, with the times of a virtual clock: `sick` gives the first of each kind, the checks have others.
"""

from manyranks.grade.check import check
from manyranks.grade.nd import (
    averaging,
    drifts,
    grouping,
    misplacing,
    placing,
    planning,
    standing,
    straggling,
)
from manyranks.grade.nd.clusters import first as sick
from manyranks.grade.report import Report

__all__ = [
    "average",
    "coordinates",
    "drifting",
    "groups",
    "misplaced",
    "place",
    "plan",
    "rank_of",
    "sick",
    "straggler",
]


def coordinates(function) -> Report:
    """Checks coordinates(rank, sizes): where a rank stands."""
    return check(standing.Coordinates("coordinates", 2, standing.cases, standing.COORDINATES), function)


def rank_of(function) -> Report:
    """Checks rank_of(coordinates, sizes): who stands there."""
    return check(standing.RankOf("rank_of", 2, standing.back, standing.RANK_OF), function)


def groups(function) -> Report:
    """Checks groups(sizes, axes): all groups of one axis, or of several."""
    return check(grouping.Groups("groups", 3, grouping.cases, grouping.CALL), function)


def average(function) -> Report:
    """Checks average(sizes, weights): process groups on real ranks, and each gradient over the right one."""
    return check(averaging.Averaging("average", 5, averaging.cases, averaging.CALL), function)


def place(function) -> Report:
    """Checks place(traffic, sizes, node): the order of axes with the fewest bytes between nodes."""
    return check(placing.Place("place", 3, placing.cases, placing.CALL), function)


def plan(function) -> Report:
    """Checks plan(): a plan that fits, and beats the baseline."""
    return check(planning.Planning("plan", 4, planning.cases, planning.CALL), function)


def misplaced(function) -> Report:
    """Checks misplaced(run): an axis across nodes, and the order that mends it."""
    return check(misplacing.Misplaced("misplaced", 3, misplacing.cases, misplacing.CALL), function)


def drifting(function) -> Report:
    """Checks drifting(run): an axis that averages forget, and the groups that mend it."""
    return check(drifts.Drifting("drifting", 3, drifts.cases, drifts.CALL), function)


def straggler(function) -> Report:
    """Checks straggler(run): the slow rank, and what is slow."""
    return check(straggling.Straggler("straggler", 3, straggling.cases, straggling.CALL), function)
