"""Answers to 10_nd_parallel: what is right, and the mistakes that are made."""

import math
from itertools import permutations, product

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import new_group

from manyranks import theory
from manyranks.grade.answers import also_right, mistake, right, slip

# fmt: off

CHAPTER = ("pp", "dp", "cp", "tp")
FASTEST = "the first axis changes fastest here: sizes has the outermost axis first, so the last one differs from rank to rank"
FIXED = "the order of the axes is that of sizes, which is another one each time: not pp, dp, cp, tp as in the chapter"
OWN_STRIDE = "an axis's stride is the product of the degrees further inside: its own degree is not among them"

def strides(sizes):
    found, stride = {}, 1
    for axis in reversed(sizes):
        found[axis], stride = stride, stride * sizes[axis]
    return found

def table(sizes):
    return torch.arange(math.prod(sizes.values())).view(*sizes.values())

def turned(sizes):
    return dict(reversed(sizes.items()))

def chapter(sizes):
    return {axis: sizes[axis] for axis in CHAPTER if axis in sizes}

# Task 1

@right("coordinates")
def coordinates(rank, sizes):
    return {axis: rank // stride % sizes[axis] for axis, stride in strides(sizes).items()}

@also_right("coordinates")
def unravelled(rank, sizes):
    return dict(zip(sizes, np.unravel_index(rank, tuple(sizes.values()))))

@also_right("coordinates")
def as_tensors(rank, sizes):
    at = torch.unravel_index(torch.tensor(rank), tuple(sizes.values()))
    return {axis: one for axis, one in zip(reversed(sizes), reversed(at))}  # noqa: C416

@mistake("coordinates", "what is left of the rank goes on to the next axis: from inside, the quotient, not the remainder")
def remainder_goes_on(rank, sizes):
    at = {}
    for axis in reversed(sizes):
        at[axis], rank = rank // sizes[axis] % sizes[axis], rank % sizes[axis]
    return at

slip("coordinates", "columns_first", 0, FASTEST, lambda rank, sizes: coordinates(rank, turned(sizes)))
slip("coordinates", "as_in_the_chapter", 0, FIXED, lambda rank, sizes: coordinates(rank, chapter(sizes)))
slip("coordinates", "no_modulo", 0, "a coordinate goes from 0 to its degree − 1: take the remainder by the degree, too",
    lambda rank, sizes: {axis: rank // stride for axis, stride in strides(sizes).items()})
slip("coordinates", "no_stride", 0,
    "rank % degree is the coordinate of the innermost axis only: divide by the stride first, what lies inside the axis",
    lambda rank, sizes: {axis: rank % size for axis, size in sizes.items()})
slip("coordinates", "own_degree", 0, OWN_STRIDE,
    lambda rank, sizes: {axis: rank // (stride * sizes[axis]) % sizes[axis] for axis, stride in strides(sizes).items()})
slip("coordinates", "four_axes", 0, "", lambda rank, sizes: coordinates(rank, {axis: sizes[axis] for axis in CHAPTER}),
    says="read the names from it")
slip("coordinates", "without_single_ranks", 0.5, "",
    lambda rank, sizes: {axis: at for axis, at in coordinates(rank, sizes).items() if sizes[axis] > 1},
    says="it returns a dict with a whole number for each axis of sizes")

# Task 2

LOOK_UP = "coordinates has its axes in any order: go through those of sizes, and look each one up"

@right("rank_of")
def rank_of(coordinates, sizes):
    return sum(coordinates.get(axis, 0) * stride for axis, stride in strides(sizes).items())

@also_right("rank_of")
def ravelled(coordinates, sizes):
    return np.ravel_multi_index([coordinates.get(axis, 0) for axis in sizes], tuple(sizes.values()))

@also_right("rank_of")
def looked_up(coordinates, sizes):
    return table(sizes)[tuple(coordinates.get(axis, 0) for axis in sizes)]

slip("rank_of", "columns", 0, FASTEST, lambda coordinates, sizes: rank_of(coordinates, turned(sizes)))
slip("rank_of", "in_the_chapter_s_order", 0, FIXED, lambda coordinates, sizes: rank_of(coordinates, chapter(sizes)))
slip("rank_of", "as_they_come", 0, LOOK_UP, lambda coordinates, sizes: rank_of(dict(zip(sizes, coordinates.values())), sizes))
slip("rank_of", "skips_what_is_left_out", 0,
    "an axis that is left out counts as 0, but its degree still multiplies: go through all of sizes",
    lambda coordinates, sizes: rank_of(coordinates, {axis: size for axis, size in sizes.items() if axis in coordinates}))
slip("rank_of", "too_large", 0, OWN_STRIDE,
    lambda coordinates, sizes: sum(coordinates.get(a, 0) * stride * sizes[a] for a, stride in strides(sizes).items()))
slip("rank_of", "all_are_there", 0, "",
    lambda coordinates, sizes: sum(coordinates[axis] * stride for axis, stride in strides(sizes).items()),
    says="an axis that coordinates leaves out counts as 0: coordinates.get(axis, 0)")

# Task 3

@right("groups")
def groups_of(sizes, axes):
    names = list(sizes)
    inside = [i for i, axis in enumerate(names) if axis in axes]
    outside = [i for i, axis in enumerate(names) if axis not in axes]
    return table(sizes).permute(*outside, *inside).reshape(-1, length(sizes, axes)).tolist()

def length(sizes, axes):
    return math.prod(sizes[axis] for axis in axes if axis in sizes)

@also_right("groups")
def by_coordinates(sizes, axes):
    """One pass over the ranks, by what they share."""
    found, steps = {}, [(stride, sizes[axis]) for axis, stride in strides(sizes).items() if axis not in axes]
    for rank in range(math.prod(sizes.values())):
        found.setdefault(tuple([rank // stride % size for stride, size in steps]), []).append(rank)
    return list(found.values())[::-1]

@also_right("groups")
def by_rows(sizes, axes):
    return torch.tensor(groups_of(sizes, axes))

@also_right("groups")
def by_firsts(sizes, axes):
    def steps(names):
        return [sum(step) for step in product(*[[at * strides(sizes)[a] for at in range(sizes[a])] for a in names])]

    inside, firsts = steps(axes), steps(axis for axis in sizes if axis not in axes)
    return {frozenset(first + one for one in inside) for first in firsts}

def from_first_to_last(sizes, axes):
    at = sorted(map(list(sizes).index, axes))
    return groups_of(sizes, list(sizes)[at[0] : at[-1] + 1])

@mistake("groups", says="268 million comparisons", points=2.0)
def each_with_each(sizes, axes):
    others = [(stride, sizes[axis]) for axis, stride in strides(sizes).items() if axis not in axes]
    ranks = range(math.prod(sizes.values()))
    return list({tuple(b for b in ranks if all(a // s % d == b // s % d for s, d in others)) for a in ranks})

slip("groups", "columns_of", 0, FASTEST, lambda sizes, axes: groups_of(turned(sizes), axes))
slip("groups", "that_share_them", 0,
    "those ranks agree in the axes that are asked for: a group's ranks differ in these axes, and agree in all others",
    lambda sizes, axes: groups_of(sizes, [axis for axis in sizes if axis not in axes]))
slip("groups", "blocks", 0, "blocks of neighbors are the groups of the innermost axes only: others have a stride",
    lambda sizes, axes: table(sizes).view(-1, length(sizes, axes)).tolist())
slip("groups", "first_axis", 1.8,
    "several axes make one group, as many ranks as their degrees' product: those are the groups of one of the axes alone",
    lambda sizes, axes: groups_of(sizes, axes[:1]))
slip("groups", "one_after_the_other", 1.8,
    "several axes make one group, of ranks that differ in any of them: not the groups of each axis, one after the other",
    lambda sizes, axes: [group for axis in axes for group in groups_of(sizes, (axis,))])
slip("groups", "from_first_to_last", 1.8,
    "an axis that lies between those asked for is not in the group: its ranks stay in groups of their own", from_first_to_last)

# Task 4

KINDS = ("cut", "whole", "partial")

@right("average")
class Average:
    """Groups, then sums over tp, then the mean over data."""

    of_tp, of_data, summed, averaged = ("tp",), ("dp", "cp"), ("partial",), KINDS

    def __call__(self, sizes, weights):
        self.sizes, self.weights = sizes, weights
        self.tp, self.data = self.make(self.of_tp), self.make(self.of_data)
        self.over_tp()
        self.over_data()

    def groups(self, axes):
        return groups_of(self.sizes, axes)

    def make(self, axes):
        for row in self.groups(axes):
            group = dist.new_group(row)
            if dist.get_rank() in row:
                own = group
        return own

    def grads(self, kinds=KINDS):
        return [weight.parameter.grad for weight in self.weights if weight.kind in kinds]

    def over_tp(self):
        self.add_up(self.grads(self.summed), self.tp)

    def over_data(self):
        self.add_up(self.grads(self.averaged), self.data)
        for grad in self.grads(self.averaged):
            grad /= self.divisor()

    def divisor(self):
        return dist.get_world_size(self.data)

    def row(self, grads):
        return torch.cat([grad.flatten() for grad in grads])

    def reduce(self, flat, group):
        dist.all_reduce(flat, group=group)

    def add_up(self, grads, group):
        flat = self.row(grads)
        self.reduce(flat, group)
        self.put(grads, flat)

    def put(self, grads, flat):
        for grad, part in zip(grads, flat.split([grad.numel() for grad in grads])):
            grad.copy_(part.view_as(grad))

@also_right("average")
class DataFirst(Average):
    """Averages before it sums, with groups in the opposite order, and divides first, into new tensors."""

    def __call__(self, sizes, weights):
        self.sizes, self.weights = sizes, weights
        self.data, self.tp = self.make(self.of_data), self.make(self.of_tp)
        for weight in weights:
            weight.parameter.grad = weight.parameter.grad / self.divisor()
        self.add_up(self.grads(), self.data)
        self.over_tp()

    def groups(self, axes):
        return super().groups(axes)[::-1]

@also_right("average")
class ByEnumeration(Average):
    """PyTorch makes the groups, by new_group."""

    def make(self, axes):
        return dist.new_subgroups_by_enumeration(self.groups(axes))[0]

@also_right("average")
class ByGenerator(Average):
    """Ranks need not come as a list, nor the sum at once."""

    def make(self, axes):
        groups = [(row, dist.new_group(rank for rank in row)) for row in self.groups(axes)]
        return next(group for row, group in groups if dist.get_rank() in row)

    def reduce(self, flat, group):
        dist.all_reduce(flat, group=group, async_op=True).wait()

class Named(Average):
    def make(self, axes):
        groups = [(row, self.new_group(row)) for row in self.groups(axes)]
        return next(group for row, group in groups if dist.get_rank() in row)

@also_right("average")
def by_an_imported_name(sizes, weights):
    """A cell above says `from torch.distributed import new_group`."""
    answer = Named()
    answer.new_group = new_group
    answer(sizes, weights)

NOT_IN_IT = "some ranks are not in the group that they use: new_group gives such ranks no group. Keep the rank's own group"
ALL_RANKS = "dist.new_group is called by all ranks, for every group, in one order, also by ranks outside the group"

@mistake(
    "average", "averaged over all ranks: only ranks that differ in dp and cp alone have the same weights, not tp's and pp's"
)
def over_all(sizes, weights):
    for weight in weights:
        dist.all_reduce(weight.parameter.grad)
        weight.parameter.grad /= dist.get_world_size()

@mistake("average", "no rank needs each of the others' gradients, only their sum: dist.all_reduce", points=3.5)
class Gathers(Average):
    def reduce(self, flat, group):
        parts = [torch.empty_like(flat) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, flat, group=group)
        flat.copy_(sum(parts))

@mistake("average", "dp and cp make one group together: one all-reduce in place of two", points=2.5)
class OneAfterTheOther(Average):
    def over_data(self):
        for group in [self.make((axis,)) for axis in ("dp", "cp") if axis in self.sizes]:
            self.add_up(self.grads(), group)
        for grad in self.grads():
            grad /= self.divisor()

slip("average", "OverStages", 0, "averaged over stages, too: pp has other layers. The mean is over dp × cp", Average,
    of_data=("dp", "cp", "pp"))
slip("average", "WithoutCp", 0,
    "averaged over dp only: cp ranks have the same weights, and have seen other tokens. The mean is over dp × cp", Average,
    of_data=("dp",))
slip("average", "Untouched", 2, "the gradients are as they were: put what you computed into each parameter's .grad", Average,
    put=lambda *_: None, divisor=lambda self: 1)
slip("average", "OnlyPartial", 1, "only what is partial was averaged over dp × cp: all gradients are", Average,
    averaged=KINDS[2:])
slip("average", "NotSummed", 1, "what is partial was not summed over tp: each tp rank has seen a part of the tokens only",
    Average, over_tp=lambda *_: None)
slip("average", "WholeSummed", 1,
    "what is whole was summed over tp, and is tp times too large: its gradient is complete on each tp rank", Average,
    summed=KINDS[1:])
slip("average", "AllSummed", 1, "what is cut was summed over tp: each tp rank has its own part's gradient", Average,
    summed=KINDS)
slip("average", "Blocks", 0,
    "these are blocks of neighbors: ranks of an axis that is not innermost are a stride apart, as in task 3", Average,
    groups=lambda self, axes: table(self.sizes).view(-1, length(self.sizes, axes)).tolist())
slip("average", "OtherOrder", 1, FASTEST, Average, groups=lambda self, axes: groups_of(turned(self.sizes), axes))
slip("average", "KeepsTheLast", 1, NOT_IN_IT, Average, make=lambda self, axes: [*map(dist.new_group, self.groups(axes))][-1])
slip("average", "Sums", 2, "these are sums over the data ranks: their mean takes a division by dp × cp", Average,
    divisor=lambda self: 1)
slip("average", "ByAll", 2,
    "divided by the number of all ranks: the mean is over dp × cp, and tp and pp ranks are no part of it", Average,
    divisor=lambda self: dist.get_world_size())
slip("average", "MeanOverTp", 2, "what is partial is a sum over tp, not a mean: the parts of the tokens add up", Average,
    over_tp=lambda self: (Average.over_tp(self), [x.div_(2) for x in self.grads(self.summed)]))
slip("average", "OneCallEach", 3.5,
    "one call for each parameter: put all gradients into one flat row, and cut it again afterwards", Average,
    add_up=lambda self, grads, group: [self.reduce(grad, group) for grad in grads])
slip("average", "OnlyMembers", 0, "", Average, says="" + ALL_RANKS,
    groups=lambda self, axes: [row for row in groups_of(self.sizes, axes) if dist.get_rank() in row])

# Task 5

MOST_INSIDE = (
    "the axis with most bytes is innermost here, which is not always best: an axis larger than a node leaves it anyway, at "
    "few of its hops, and takes the place of one that would stay. Count the bytes of all hops, from last to first, too"
)
TURNED = "the order is turned round: the outermost axis comes first, and neighbors, which share a node, differ in the last one"

@right("place")
class Place:
    choose = min

    def __call__(self, traffic, sizes, node):
        self.traffic, self.sizes, self.node = traffic, sizes, node
        return self.form(self.order())

    def form(self, order):
        return order

    def order(self):
        return self.choose(permutations(self.sizes), key=self.crossing)

    def crossing(self, order):
        return sum(self.traffic[axis] * self.share(order, i) for i, axis in enumerate(order))

    def share(self, order, i):
        home = table({axis: self.sizes[axis] for axis in order}) // self.node
        return (home != home.roll(-1, i)).double().mean().item()

@also_right("place")
class PlaceByRanks(Place):
    """Hop by hop, and as NumPy has it."""

    def form(self, order):
        return np.array(order)

    def share(self, order, i):
        sizes = {axis: self.sizes[axis] for axis in order}
        hops = [pair for g in groups_of(sizes, order[i : i + 1]) for pair in zip(g, g[1:] + g[:1])]
        return sum(a // self.node != b // self.node for a, b in hops) / len(hops)

@mistake("place", "the last rank of a group sends to its first: that hop counts, too", points=1.5)
class NoRing(Place):
    def share(self, order, i):
        home = table({axis: self.sizes[axis] for axis in order}) // self.node
        return (home.diff(dim=i) != 0).sum().item() / home.numel()

slip("place", "as_it_was", 0, "that is the order that sizes has: another one sends fewer bytes from node to node",
    lambda traffic, sizes, node: tuple(sizes))
slip("place", "most_outside", 0,
    "the axis with the fewest bytes is innermost here: neighbors share a node, so the last axis stays inside",
    lambda traffic, sizes, node: tuple(sorted(sizes, key=traffic.get, reverse=True)))
slip("place", "InnermostFirst", 0, TURNED, Place, form=lambda self, order: order[::-1])
slip("place", "most_inside", 0, MOST_INSIDE, lambda traffic, sizes, node: tuple(sorted(sizes, key=traffic.get)))
slip("place", "AllOrNothing", 0,
    "an axis larger than what is left of a node leaves it at some hops of its ring only: count these, not all its bytes", Place,
    share=lambda self, order, i: float(Place.share(self, order, i) > 0))
slip("place", "WithoutSingleRanks", 0, "", Place, says="an axis of degree 1 stands in it, too",
    form=lambda self, order: [a for a in order if self.sizes[a] > 1])

# Task 6

JOB = {"seq": 8192, "batch": 128}

def of(**degrees):
    return lambda: theory.Plan(**JOB | degrees)

@right("plan")
def plan():
    """The best that theory.planner.search finds."""
    return theory.Plan(dp=64, pp=2, cp=4, tp=2, **JOB, virtual=8, zero=2, recompute="none")

@also_right("plan")
def by_hand():
    return theory.Plan(dp=64, pp=2, cp=2, tp=4, **JOB, virtual=8)

@also_right("plan")
def more_context():
    return theory.Plan(dp=64, pp=2, cp=4, tp=2, **JOB, virtual=6, zero=2, recompute="none")

@mistake("plan", says="the answer is one plan, written down")
def searched():
    return theory.planner.search(theory.models["llama3-70b"], theory.clusters["h100-dgx"].of(1024), 1024, **JOB)[0].plan

slip("plan", "half_the_batch", 0, "", of(dp=16, pp=8, tp=8, batch=64), says="the job is given")
slip("plan", "too_few", 0, "", of(dp=16, pp=4, tp=8), says="choose degrees whose product is 1024")
slip("plan", "does_not_fit", 0, "", of(dp=128, cp=8), says="are parameters, gradients and the optimizer's states")
slip("plan", "too_many_activations", 0, "", of(dp=8, pp=32, tp=4, microbatch=16, flash=False, recompute="none"),
    says="are activations")
slip("plan", "a_dict", 0, "", lambda: JOB, says="it returns a plan: return theory.Plan")
slip("plan", "baseline", 1, "", of(dp=16, pp=8, tp=8), says="that is the baseline itself, or just as slow")
slip("plan", "slower_than_it", 1, "", of(dp=32, pp=4, tp=8, microbatch=2), says="that is slower than the baseline")
slip("plan", "long_pipeline", 1, "", of(dp=8, pp=16, tp=8), says="the bubble takes")
slip("plan", "much_context", 1, "", of(dp=8, cp=32, pp=4, virtual=4), says="context parallelism's messages take")
slip("plan", "all_again", 2, "", of(dp=64, pp=2, cp=2, tp=4, virtual=8, recompute="full"),
    says="runs each layer's forward again")
slip("plan", "across_nodes", 2, "", of(dp=64, tp=16), says="tp=16 is larger than a node of 8")
slip("plan", "stage_3", 2, "", of(dp=128, tp=8, zero=3), says="gradients and parameters take")
slip("plan", "much_tensor", 3, "", of(dp=64, pp=2, tp=8, virtual=8), says="tensor parallelism's messages take")

# Task 7

ONE_SAYS = "that is what one rank's calls say, and other stages send otherwise: add up the calls of all ranks"
SOME_SAY = "that is what some ranks' calls say: those in the middle of a pipeline send more. Add up the calls of all ranks"

@right("misplaced")
class Misplaced(Place):
    def __call__(self, run):
        self.run, self.sizes, self.node = run, run.sizes, run.node
        self.traffic, self.between = self.bytes(lambda rank, call: True), self.bytes(self.leaves)
        return self.form((self.axis(), self.order()))

    def counted(self):
        return range(len(self.run.calls))

    def leaves(self, rank, call):
        following = call.ranks[(call.ranks.index(rank) + 1) % len(call.ranks)]
        return rank // self.run.node != following // self.run.node

    def amount(self, call):
        return call.sent

    def bytes(self, counts):
        found = dict.fromkeys(self.run.sizes, 0)
        for rank in self.counted():
            for call in self.run.calls[rank]:
                found[call.axis] += self.amount(call) * counts(rank, call)
        return found

    def axis(self):
        return max(self.between, key=self.between.get)

@also_right("misplaced")
class ChangesTheRun(Misplaced):
    """What it was given is a copy."""

    def form(self, answer):
        self.run.calls.clear()
        self.run.sizes.clear()
        return list(answer)

def that_gains_most(self):
    now, best = list(self.sizes), self.order()
    return max(now, key=lambda a: self.traffic[a] * (self.share(now, now.index(a)) - self.share(best, best.index(a))))

slip("misplaced", "CountsCalls", 0, "that is the axis with most calls between nodes: bytes fill a link", Misplaced,
    amount=lambda self, call: 1)
slip("misplaced", "Rank0sCalls", 0, ONE_SAYS, Misplaced, counted=lambda self: [0])
slip("misplaced", "WholeCalls", 0,
    "that counts all bytes of a call across nodes: a rank's go to the next of `ranks`, which may be on its own node", Misplaced,
    leaves=lambda self, rank, call: len({one // self.run.node for one in call.ranks}) > 1)
slip("misplaced", "FirstAndLast", 0, SOME_SAY, Misplaced, counted=lambda self: [0, len(self.run.calls) - 1])
slip("misplaced", "AllBytes", 0, "that is the axis with most bytes in all: count those between nodes", Misplaced,
    leaves=lambda self, rank, call: True)
slip("misplaced", "AlwaysTp", 0,
    "tp, or what is innermost in the chapter, is not always what sends most: read it off the calls", Misplaced,
    axis=lambda self: "tp", order=lambda self: list(chapter(self.sizes)))
slip("misplaced", "MostBytes", 1.5, "that order sends most between nodes: axes with most bytes belong inside", Misplaced,
    choose=max)
slip("misplaced", "MostInside", 1.5, MOST_INSIDE, Misplaced, order=lambda self: sorted(self.sizes, key=self.traffic.get))
slip("misplaced", "StaysAsItIs", 1.5, "that is the order it has: another one sends less", Misplaced,
    order=lambda self: list(self.sizes))
slip("misplaced", "TurnedRound", 1.5, TURNED, Misplaced, order=lambda self: Place.order(self)[::-1])
slip("misplaced", "GainsMost", 0,
    "that axis gains most from the better order; asked for is the one that sends most now, even if that can't change",
    Misplaced, axis=that_gains_most)

# Task 8

ONE_GROUP = (
    'that is what rank 0\'s group says: it may be right where another is wrong. Look at the ranks of all calls for "data"'
)
ONE_WEIGHT = "that compares one weight: its copies can be alike where others drift, as a frozen layer's are. Compare all names"
NO_DRIFT = (
    "weights differ from tp rank to tp rank because they are cut, from stage to stage because these have other layers: that is "
    "no drift. Compare ranks that have the same tp and pp"
)
FIRST_HAD = "that is right for some clusters only: read it off the coordinates of the ranks of a call, or off the weights"

@right("drifting")
class Drifting:
    axes, said_by = ("dp", "cp"), slice(None)

    def __call__(self, run):
        self.run = run
        return self.axis(), self.groups()

    def calls(self):
        return [call for calls in self.run.calls[self.said_by] for call in calls if call.axis == "data"]

    def axis(self):
        for call in self.calls():
            for axis in ("cp", "dp"):
                places = {coordinates(rank, self.run.sizes)[axis] for rank in call.ranks}
                if len(places) < self.run.sizes[axis]:
                    return axis
        return None

    def groups(self):
        return groups_of(self.run.sizes, self.axes)

@also_right("drifting")
class ByWeights(Drifting):
    """Copies of one weight that differ."""

    among, names = ("dp", "cp"), slice(None)

    def axis(self):
        return next((axis for axis in self.run.sizes if axis in self.among and self.differs(axis)), None)

    def differs(self, axis):
        pairs = [(ranks[0], rank) for ranks in groups_of(self.run.sizes, (axis,)) for rank in ranks[1:]]
        return any(not self.alike(self.run.weights[one], self.run.weights[other]) for one, other in pairs)

    def alike(self, one, other):
        return one.keys() == other.keys() and all(one[name].equal(other[name]) for name in list(one)[self.names])

    def groups(self):
        return {tuple(group) for group in super().groups()}

slip("drifting", "FirstNameOnly", 0, ONE_WEIGHT, ByWeights, names=slice(1))
slip("drifting", "AnyDifference", 0, NO_DRIFT, ByWeights, among=CHAPTER)
slip("drifting", "TheOtherOne", 0,
    "that axis is in the groups, and its ranks have the same weights: the other one of dp and cp is missing", Drifting,
    axis=lambda self: {"dp": "cp", "cp": "dp"}[Drifting.axis(self)])
slip("drifting", "Rank0sGroup", 0, ONE_GROUP, Drifting, said_by=slice(1))
slip("drifting", "AlwaysCp", 0, FIRST_HAD, Drifting, axis=lambda self: "cp")
slip("drifting", "Turned", 0, FASTEST, Drifting,
    __call__=lambda self, run: Drifting.__call__(self, run._replace(sizes=turned(run.sizes))))
slip("drifting", "AsInTheChapter", 1.5, FIXED, Drifting, groups=lambda self: groups_of(chapter(self.run.sizes), self.axes))
slip("drifting", "AsTheyWere", 1.5, "those are the groups the run had, mistake included", Drifting,
    groups=lambda self: sorted({call.ranks for call in self.calls()}))
slip("drifting", "OnlyTheMissing", 1.5,
    "those groups have the missing axis alone: gradients are averaged over dp and cp together", Drifting,
    groups=lambda self: groups_of(self.run.sizes, (self.axis(),)))
slip("drifting", "OnlyDp", 1.5, "gradients are averaged over dp and cp together, not over one of them", Drifting, axes=("dp",))
slip("drifting", "Everyone", 1.5, "all ranks in one group average what is not alike: tp ranks and stages", Drifting,
    axes=CHAPTER)

# Task 9

VICTIM = "that rank waits for others, and suffers: the rank that makes others wait comes last to each call and waits least"
WAITING = "a span has waiting in it: a call's own time is the shortest span among its ranks"
OTHERS = {"computes": "sends", "sends": "computes"}

@right("straggler")
class Straggler:
    of_call = of_rank = min
    limit = 1.1

    def __call__(self, run):
        self.run, self.ranks = run, range(len(run.spans))
        self.own = self.times()
        return self.answer()

    def spent(self, kind):
        lengths = ([span.finished - span.started for span in spans if span.kind == kind] for spans in self.run.spans)
        return [round(sum(each), 9) for each in lengths]  # ties are ties: since Python 3.12, sum rounds otherwise

    def times(self):
        found = {}
        for span in (span for spans in self.run.spans for span in spans if span.kind == "call"):
            found.setdefault(span.call, []).append(span.finished - span.started)
        return {number: self.of_call(both) for number, both in found.items()}

    def stage(self, rank):
        return coordinates(rank, self.run.sizes)["pp"]

    def answer(self):
        compute = self.spent("compute")
        for rank in self.ranks:
            if compute[rank] > self.limit * min(compute[one] for one in self.ranks if self.stage(one) == self.stage(rank)):
                return rank, "computes"
        return max(self.ranks, key=self.slowness), "sends"

    def far(self, rank):
        calls = [call for call in self.run.calls[rank] if call.sent]
        return [call for call in calls if len({one // self.run.node for one in call.ranks}) > 1]

    def slowness(self, rank):
        usual = {}
        for call in (call for calls in self.run.calls for call in calls if call.sent):
            kind = (call.op, call.axis, call.sent)
            usual[kind] = min(self.own[call.number], usual.get(kind, math.inf))
        return self.of_rank([self.own[c.number] / usual[c.op, c.axis, c.sent] for c in self.far(rank)])

@also_right("straggler")
class ByVotes(Straggler):
    """The rank most of whose calls between nodes are slow, as a tensor."""

    def of_rank(self, ratios):
        return sum(ratio > 1.2 for ratio in ratios) / len(ratios)

    def answer(self):
        rank, cause = super().answer()
        return [torch.tensor(rank), cause]

def most(amounts):
    """The rank that has most of something is accused; the cause is right."""
    return lambda self: (max(self.ranks, key=lambda rank: amounts(self)[rank]), Straggler.answer(self)[1])

slip("straggler", "LongestWait", 0, VICTIM, Straggler, answer=most(lambda self: self.spent("call")))
slip("straggler", "MostCompute", 0,
    "that rank computes longest because its stage has more to do: compare it with ranks of the same stage",
    Straggler, answer=most(lambda self: self.spent("compute")))
slip("straggler", "WithWaiting", 0, WAITING, Straggler, of_call=max)
slip("straggler", "AnySlowCall", 0,
    "that is a partner of the slow rank, in one slow call. The slow one is slow in all its calls between nodes", Straggler,
    of_rank=max)
slip("straggler", "MeanRatio", 0,
    "in a mean, one very slow call outweighs many slow ones: of the slow rank's calls between nodes, all are slow", Straggler,
    of_rank=lambda self, ratios: sum(ratios) / len(ratios))
slip("straggler", "InsideToo", 0, "calls inside a node do not use the slow link: leave them out", Straggler,
    far=lambda self, rank: [call for call in self.run.calls[rank] if call.sent])
slip("straggler", "BesideItsNeighbor", 0,
    "stages differ in their work: compare a rank only with those of the same pp coordinate; rank + 1 may be on another stage",
    Straggler, stage=lambda self, rank: rank // 2)
slip("straggler", "CauseSwapped", 2.1,
    '"computes" where its compute spans are longer than those of ranks with the same work, "sends" where they are not',
    Straggler, answer=lambda self: (Straggler.answer(self)[0], OTHERS[Straggler.answer(self)[1]]))
slip("straggler", "HighLimit", 0, "some slow ranks are below this limit: within a stage, 1.1 times the others is slow already",
    Straggler, limit=1.5)
slip("straggler", "AlwaysComputes", 2.1, 'compute spans are equal within a stage in some clusters: the cause is "sends" there',
    Straggler, answer=lambda self: (Straggler.answer(self)[0], "computes"))
slip("straggler", "OtherWords", 0, "", Straggler, says="it returns a pair: a rank", answer=lambda self: (0, "rank 0 is slow"))
