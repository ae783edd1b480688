"""Other right answers to the tasks of 10_nd_parallel, which must get full marks."""

from itertools import product

import numpy as np
import torch
import torch.distributed as dist

from manyranks import theory
from tests.grading.zoo.nd_right import (
    RightAverage,
    RightDrifting,
    RightMisplaced,
    RightPlace,
    RightStraggler,
    groups_of,
    strides,
    table,
)


def unravelled(rank, sizes):
    return dict(zip(sizes, np.unravel_index(rank, tuple(sizes.values())), strict=True))


def as_tensors(rank, sizes):
    at = torch.unravel_index(torch.tensor(rank), tuple(sizes.values()))
    return {axis: one for axis, one in zip(reversed(sizes), reversed(at), strict=True)}  # noqa: C416


def ravelled(coordinates, sizes):
    return np.ravel_multi_index([coordinates.get(axis, 0) for axis in sizes], tuple(sizes.values()))


def looked_up(coordinates, sizes):
    return table(sizes)[tuple(coordinates.get(axis, 0) for axis in sizes)]


def by_coordinates(sizes, axes):
    """One pass over the ranks, by what they share."""
    found, steps = {}, [(stride, sizes[axis]) for axis, stride in strides(sizes).items() if axis not in axes]
    for rank in range(table(sizes).numel()):
        found.setdefault(tuple([rank // stride % size for stride, size in steps]), []).append(rank)
    return list(found.values())[::-1]


def by_rows(sizes, axes):
    return torch.tensor(groups_of(sizes, axes))


def by_firsts(sizes, axes):
    own = strides(sizes)
    inside = [sum(step) for step in product(*[[at * own[a] for at in range(sizes[a])] for a in axes])]
    others = [axis for axis in sizes if axis not in axes]
    firsts = [sum(step) for step in product(*[[at * own[a] for at in range(sizes[a])] for a in others])]
    return {frozenset(first + one for one in inside) for first in firsts}


class DataFirst(RightAverage):
    """Averages before it sums, with groups in the opposite order, and in-place division first."""

    def __call__(self, sizes, weights):
        self.sizes, self.weights = sizes, weights
        self.data, self.tp = self.make(self.axes_of_data()), self.make(self.axes_of_tp())
        self.over_data()
        self.over_tp()

    def groups(self, axes):
        return super().groups(axes)[::-1]


class DividesFirst(RightAverage):
    def over_data(self):
        for weight in self.weights:
            weight.parameter.grad = weight.parameter.grad / self.divisor()
        self.add_up(self.grads(), self.data)


class ByEnumeration(RightAverage):
    """PyTorch makes the groups, by new_group."""

    def make(self, axes):
        return dist.new_subgroups_by_enumeration(self.groups(axes))[0]


class ByGenerator(RightAverage):
    """Ranks need not come as a list."""

    def make(self, axes):
        rows = self.groups(axes)
        groups = [dist.new_group(rank for rank in row) for row in rows]
        return next(group for row, group in zip(rows, groups, strict=True) if dist.get_rank() in row)


class Waits(RightAverage):
    def reduce(self, flat, group):
        dist.all_reduce(flat, group=group, async_op=True).wait()


class PlaceAsAList(RightPlace):
    def form(self, order):
        return list(order)


class PlaceByRanks(RightPlace):
    """Hop by hop."""

    def share(self, order, i):
        sizes = {axis: self.sizes[axis] for axis in order}
        hops = [pair for g in groups_of(sizes, order[i : i + 1]) for pair in zip(g, g[1:] + g[:1], strict=True)]
        return sum(a // self.node != b // self.node for a, b in hops) / len(hops)


def by_hand():
    return theory.Plan(dp=32, pp=4, cp=2, tp=4, seq=8192, batch=128, virtual=10)


def without_a_pipeline():
    return theory.Plan(dp=128, cp=2, tp=4, seq=8192, batch=128, zero=2)


class MisplacedByCalls(RightMisplaced):
    """Each call once, by its number."""

    def form(self, answer):
        return list(answer) if isinstance(answer[0], str) and answer[0] in self.sizes else answer


class ChangesTheRun(RightMisplaced):
    """What it was given is a copy."""

    def form(self, answer):
        self.run.calls.clear()
        self.run.sizes.clear()
        return answer


class DriftingByWeights(RightDrifting):
    """Copies of one weight that differ."""

    def axis(self):
        for axis in ("dp", "cp"):
            for ranks in groups_of(self.run.sizes, (axis,)):
                one, *others = (self.run.weights[rank] for rank in ranks)
                if any(not one[name].equal(other[name]) for other in others for name in one):
                    return axis
        return None

    def form(self, answer):
        return [answer[0], {tuple(group) for group in answer[1]}]


class StragglerByVotes(RightStraggler):
    """Of the slow calls, the rank that is in most of them, and in slow ones only."""

    def sender(self):
        return max(self.ranks, key=lambda rank: (self.slowness(rank) > 1.2, self.slowness(rank)))

    def form(self, answer):
        return torch.tensor(answer[0]), answer[1]


ANSWERS = [
    ("coordinates", unravelled),
    ("coordinates", as_tensors),
    ("rank_of", ravelled),
    ("rank_of", looked_up),
    ("groups", by_coordinates),
    ("groups", by_rows),
    ("groups", by_firsts),
    ("average", DataFirst),
    ("average", DividesFirst),
    ("average", ByEnumeration),
    ("average", ByGenerator),
    ("average", Waits),
    ("place", PlaceAsAList),
    ("place", PlaceByRanks),
    ("plan", by_hand),
    ("plan", without_a_pipeline),
    ("misplaced", MisplacedByCalls),
    ("misplaced", ChangesTheRun),
    ("drifting", DriftingByWeights),
    ("straggler", StragglerByVotes),
]
