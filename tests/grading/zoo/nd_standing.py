"""Wrong answers to the tasks coordinates and rank_of of 10_nd_parallel."""

import math

from manyranks.parallel.mesh import Mesh
from tests.grading.zoo.nd_right import strides, table
from tests.grading.zoo.wrong import Wrong, keeper

ZOO: list[Wrong] = []
wrong = keeper(ZOO)
AT, RANK = "coordinates", "rank_of"
FIRST, OWN, FIXED = "changes fastest", "its own degree is not", "not pp, dp, cp, tp"


def turned(sizes):
    return dict(reversed(sizes.items()))


def right(rank, sizes):
    return {axis: rank // stride % sizes[axis] for axis, stride in strides(sizes).items()}


def back(at, sizes):
    return sum(at.get(axis, 0) * stride for axis, stride in strides(sizes).items())


def chapter(sizes):
    return {axis: sizes[axis] for axis in ("pp", "dp", "cp", "tp") if axis in sizes}


@wrong(AT, "is where rank 0 stands")
def nowhere(rank, sizes):
    return dict.fromkeys(sizes, 0)


@wrong(AT, FIRST)
def columns_first(rank, sizes):
    at = {}
    for axis, size in sizes.items():
        rank, at[axis] = divmod(rank, size)
    return at


@wrong(AT, FIXED)
def as_in_the_chapter(rank, sizes):
    return right(rank, chapter(sizes))


@wrong(AT, "the order of the axes is that of sizes: not by name")
def by_name(rank, sizes):
    return right(rank, {axis: sizes[axis] for axis in sorted(sizes)})


@wrong(AT, "take the remainder by the degree, too")
def no_modulo(rank, sizes):
    return {axis: rank // stride for axis, stride in strides(sizes).items()}


@wrong(AT, "divide by the stride first")
def no_stride(rank, sizes):
    return {axis: rank % size for axis, size in sizes.items()}


@wrong(AT, OWN)
def own_degree(rank, sizes):
    return {axis: rank // (stride * sizes[axis]) % sizes[axis] for axis, stride in strides(sizes).items()}


@wrong(AT, "not their sum")
def summed_strides(rank, sizes):
    names = list(sizes)
    return {a: rank // max(1, sum(sizes[b] for b in names[i + 1 :])) % sizes[a] for i, a in enumerate(names)}


@wrong(AT, FIRST)
def outer_strides(rank, sizes):
    found, stride = {}, 1
    for axis, size in sizes.items():
        found[axis], stride = rank // stride % size, stride * size
    return found


@wrong(AT, "the wrong axes, in the opposite order")
def turned_coordinates(rank, sizes):
    return dict(zip(sizes, right(rank, sizes).values(), strict=True))


@wrong(AT, "counted from 0")
def from_one(rank, sizes):
    return {axis: at + 1 for axis, at in right(rank, sizes).items()}


@wrong(AT, "the quotient, not the remainder")
def remainder_goes_on(rank, sizes):
    at = {}
    for axis in reversed(sizes):
        at[axis], rank = rank // sizes[axis] % sizes[axis], rank % sizes[axis]
    return at


@wrong(AT, "it returns a dict with a whole number")
def a_tuple(rank, sizes):
    return tuple(right(rank, sizes).values())


@wrong(AT, "it returns a dict with a whole number", right_values=True)
def without_single_ranks(rank, sizes):
    return {axis: at for axis, at in right(rank, sizes).items() if sizes[axis] > 1}


@wrong(AT, "// in place of /")
def divided(rank, sizes):
    return {axis: rank / stride % sizes[axis] for axis, stride in strides(sizes).items()}


@wrong(AT, "ask it which ones")
def four_axes(rank, sizes):
    return right(rank, {axis: sizes[axis] for axis in ("pp", "dp", "cp", "tp")})


@wrong(AT, "what is ready is no answer")
def mesh(rank, sizes):
    order = (*sizes, *{"pp", "dp", "cp", "tp"} - {*sizes})
    return dict(Mesh(**sizes, order=order).coordinates(rank))


@wrong(AT, "it returns a dict")
def nothing(rank, sizes):
    right(rank, sizes)


@wrong(AT, "divmod(rank, degree)")
def one_too_far(rank, sizes):
    return right((rank + 1) % math.prod(sizes.values()), sizes)


@wrong(RANK, "is where rank 0 stands")
def always_0(coordinates, sizes):
    return 0


@wrong(RANK, FIRST)
def columns(coordinates, sizes):
    return back(coordinates, turned(sizes))


@wrong(RANK, FIXED)
def in_the_chapter_s_order(coordinates, sizes):
    return back(coordinates, chapter(sizes))


@wrong(RANK, "look each one up")
def as_they_come(coordinates, sizes):
    own = strides(sizes)
    return sum(at * own[axis] for at, axis in zip(coordinates.values(), sizes, strict=False))


@wrong(RANK, "look each one up")
def in_the_order_of_coordinates(coordinates, sizes):
    own = {axis: sizes[axis] for axis in coordinates}
    return back(coordinates, own | sizes)


@wrong(RANK, "look each one up")
def row_by_row_as_they_come(coordinates, sizes):
    rank = 0
    for axis, at in coordinates.items():
        rank = rank * sizes[axis] + at
    return rank


@wrong(RANK, "look each one up")
def side_by_side(coordinates, sizes):
    rank = 0
    for at, size in zip(coordinates.values(), sizes.values(), strict=False):
        rank = rank * size + at
    return rank


@wrong(RANK, "its degree still multiplies")
def skips_what_is_left_out(coordinates, sizes):
    rank = 0
    for axis, size in sizes.items():
        rank = rank * size + coordinates[axis] if axis in coordinates else rank
    return rank


@wrong(RANK, "an axis that coordinates leaves out counts as 0")
def all_are_there(coordinates, sizes):
    return sum(coordinates[axis] * stride for axis, stride in strides(sizes).items())


@wrong(RANK, "not as its last coordinate")
def missing_is_last(coordinates, sizes):
    return back({axis: coordinates.get(axis, size - 1) for axis, size in sizes.items()}, sizes)


@wrong(RANK, "times the stride")
def sum_of_coordinates(coordinates, sizes):
    return sum(coordinates.values())


@wrong(RANK, "times the stride")
def times_degrees(coordinates, sizes):
    return sum(at * sizes[axis] for axis, at in coordinates.items())


@wrong(RANK, OWN)
def too_large(coordinates, sizes):
    rank = 0
    for axis, size in sizes.items():
        rank = (rank + coordinates.get(axis, 0)) * size
    return rank


@wrong(RANK, "not their sum")
def sums(coordinates, sizes):
    names = list(sizes)
    return sum(coordinates.get(a, 0) * max(1, sum(sizes[b] for b in names[i + 1 :])) for i, a in enumerate(names))


@wrong(RANK, FIRST)
def outside(coordinates, sizes):
    rank, stride = 0, 1
    for axis, size in sizes.items():
        rank, stride = rank + coordinates.get(axis, 0) * stride, stride * size
    return rank


@wrong(RANK, "counted from 0")
def one_more(coordinates, sizes):
    return back(coordinates, sizes) + 1


@wrong(RANK, "it returns one whole number")
def in_a_list(coordinates, sizes):
    return [back(coordinates, sizes), 0]


@wrong(RANK, "((a·B + b)·C + c)·D + d")
def half(coordinates, sizes):
    return back(coordinates, sizes) // 2


@wrong(RANK, "what is ready is no answer")
def mesh_rank(coordinates, sizes):
    return Mesh(**sizes, order=(*sizes, *{"pp", "dp", "cp", "tp"} - {*sizes})).rank(**coordinates)


@wrong(RANK, "one product for each axis, and no search")
class Endless:
    seconds = 1.5

    def __call__(self, coordinates, sizes):
        rank = -1
        while rank != back(coordinates, sizes):
            rank -= int(table(sizes)[0].numel() > 0)
        return rank
