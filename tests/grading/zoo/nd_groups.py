"""Wrong answers to the task groups of 10_nd_parallel."""

import math
from itertools import pairwise

from manyranks.parallel.mesh import Mesh
from tests.grading.zoo.nd_right import groups_of, strides
from tests.grading.zoo.wrong import Wrong, keeper

ZOO: list[Wrong] = []
wrong = keeper(ZOO)
TASK = "groups"
LIST = "it returns a list of groups"


def size(sizes, axes):
    return math.prod(sizes[axis] for axis in axes)


@wrong(TASK, "a group's ranks differ in these axes, and agree in all others")
def that_share_them(sizes, axes):
    return groups_of(sizes, [axis for axis in sizes if axis not in axes])


@wrong(TASK, "blocks of neighbours are the groups of the innermost axes only")
def blocks(sizes, axes):
    n, own = math.prod(sizes.values()), size(sizes, axes)
    return [tuple(range(first, first + own)) for first in range(0, n, own)]


@wrong(TASK, "the groups of the outermost axes only")
def far_apart(sizes, axes):
    n, own = math.prod(sizes.values()), size(sizes, axes)
    return [tuple(range(first, n, n // own)) for first in range(n // own)]


@wrong(TASK, "the first axis changes fastest there")
def columns(sizes, axes):
    return groups_of(dict(reversed(sizes.items())), axes)


@wrong(TASK, "not pp, dp, cp, tp as in the chapter")
def in_the_chapter_s_order(sizes, axes):
    return groups_of({axis: sizes[axis] for axis in ("pp", "dp", "cp", "tp") if axis in sizes}, axes)


@wrong(TASK, "only one group")
def rank_0_s(sizes, axes):
    return groups_of(sizes, axes)[:1]


@wrong(TASK, "the groups of one of the axes alone", right_values=True)
def first_axis(sizes, axes):
    return groups_of(sizes, axes[:1])


@wrong(TASK, "the groups of one of the axes alone", right_values=True)
def last_axis(sizes, axes):
    return groups_of(sizes, axes[-1:])


@wrong(TASK, "not the groups of each axis", right_values=True)
def one_after_the_other(sizes, axes):
    return [group for axis in axes for group in groups_of(sizes, (axis,))]


@wrong(TASK, "each group comes once")
def once_for_each_rank(sizes, axes):
    return [group for group in groups_of(sizes, axes) for _ in group]


@wrong(TASK, "an axis that lies between", right_values=True)
def from_first_to_last(sizes, axes):
    names = list(sizes)
    at = sorted(map(names.index, axes))
    return groups_of(sizes, names[at[0] : at[-1] + 1])


@wrong(TASK, "is what all axes together make")
def everyone(sizes, axes):
    return [tuple(range(math.prod(sizes.values())))]


@wrong(TASK, "is what no axis makes")
def alone(sizes, axes):
    return [(rank,) for rank in range(math.prod(sizes.values()))]


@wrong(TASK, LIST)
def a_dict(sizes, axes):
    return {group[0]: group for group in groups_of(sizes, axes)}


@wrong(TASK, LIST)
def flat(sizes, axes):
    return [rank for group in groups_of(sizes, axes) for rank in group]


@wrong(TASK, LIST)
def nothing(sizes, axes):
    groups_of(sizes, axes)


@wrong(TASK, "// in place of /")
def floats(sizes, axes):
    return [tuple(rank / 1 for rank in group) for group in groups_of(sizes, axes)]


@wrong(TASK, "what is ready is no answer")
def mesh(sizes, axes):
    return Mesh(**sizes, order=(*sizes, *{"pp", "dp", "cp", "tp"} - {*sizes})).groups(axes[0])


@wrong(TASK, "the same coordinates in all axes but those asked for")
def without_the_last(sizes, axes):
    return groups_of(sizes, axes)[:-1]


@wrong(TASK, "268 million comparisons", right_values=True)
class EachWithEach:
    cases, seconds = slice(3), 2

    def __call__(self, sizes, axes):
        others = [(stride, sizes[axis]) for axis, stride in strides(sizes).items() if axis not in axes]
        ranks = range(math.prod(sizes.values()))
        found = {tuple(b for b in ranks if all(a // s % d == b // s % d for s, d in others)) for a in ranks}
        assert all(one != other for one, other in pairwise(sorted(found)))
        return list(found)


@wrong(TASK, "what is ready is no answer")
def the_graders(sizes, axes):
    from manyranks.grade.nd.setups import Setup

    return Setup(tuple(sizes.items())).groups(axes)
