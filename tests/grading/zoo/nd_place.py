"""Wrong answers to the task place of 10_nd_parallel."""

from tests.grading.zoo.nd_right import RightPlace, table
from tests.grading.zoo.wrong import Wrong, keeper

ZOO: list[Wrong] = []
wrong = keeper(ZOO)
TASK = "place"
ONCE = "an order has each axis of sizes once"


@wrong(TASK, "that is the order that sizes has")
def as_it_was(traffic, sizes, node):
    return tuple(sizes)


@wrong(TASK, "pp, dp, cp, tp is a rule of thumb")
def as_in_the_chapter(traffic, sizes, node):
    return tuple(axis for axis in ("pp", "dp", "cp", "tp") if axis in sizes)


@wrong(TASK, "the axis with most bytes is innermost there, which is not always best", right_values=True)
def most_inside(traffic, sizes, node):
    return tuple(sorted(sizes, key=traffic.get))


@wrong(TASK, "the axis with the fewest bytes is innermost there")
def most_outside(traffic, sizes, node):
    return tuple(sorted(sizes, key=traffic.get, reverse=True))


@wrong(TASK, "the order is turned round")
class InnermostFirst(RightPlace):
    def form(self, order):
        return order[::-1]


@wrong(TASK, "the largest degree is no reason")
def largest_inside(traffic, sizes, node):
    return tuple(sorted(sizes, key=sizes.get))


@wrong(TASK, "the smallest degree is no reason")
def smallest_inside(traffic, sizes, node):
    return tuple(sorted(sizes, key=sizes.get, reverse=True))


@wrong(TASK, "min, not max")
class Worst(RightPlace):
    def choose(self, orders):
        return max(orders, key=self.crossing)


@wrong(TASK, "does not leave it with all its bytes", right_values=True)
class AllOrNothing(RightPlace):
    def share(self, order, i):
        return float(super().share(order, i) > 0)


@wrong(TASK, "sends to its first: that hop counts, too", right_values=True)
class NoRing(RightPlace):
    def share(self, order, i):
        home = table({axis: self.sizes[axis] for axis in order}) // self.node
        return (home.diff(dim=i) != 0).sum().item() / home.numel()


@wrong(TASK, ONCE)
class OnlyTheInnermost(RightPlace):
    def form(self, order):
        return order[-1:]


@wrong(TASK, "an axis of degree 1 stands in the order, too")
class WithoutSingleRanks(RightPlace):
    def form(self, order):
        return [axis for axis in order if self.sizes[axis] > 1]


@wrong(TASK, ONCE)
class AName(RightPlace):
    def form(self, order):
        return order[-1]


@wrong(TASK, ONCE)
class Pairs(RightPlace):
    def form(self, order):
        return [(axis, self.sizes[axis]) for axis in order]


@wrong(TASK, ONCE)
def nothing(traffic, sizes, node):
    RightPlace()(traffic, sizes, node)


@wrong(TASK, "ask it which ones")
def four_axes(traffic, sizes, node):
    return tuple(sorted(("pp", "dp", "cp", "tp"), key=lambda axis: traffic[axis]))


@wrong(TASK, "try all orders")
class Neighbours(RightPlace):
    """As if only the axis inside stayed in the node."""

    def crossing(self, order):
        return sum(self.traffic[axis] for axis in order[:-1]) - sum(self.sizes[axis] == 2 for axis in order[:1]) * 10**11
