"""Wrong answers to the tasks misplaced and drifting of 10_nd_parallel."""

from manyranks import grade
from tests.grading.zoo.nd_right import RightDrifting, RightMisplaced, groups_of
from tests.grading.zoo.wrong import Wrong, keeper

ZOO: list[Wrong] = []
wrong = keeper(ZOO)
A, B = "misplaced", "drifting"
OTHERS = slice(1, 2)  # the clusters that learners have not seen
RULE, ONE_AXIS, WITH_TP = "is not always what sends most", "not over one of them", "tp ranks have other parts of the weights"
AN_AXIS, PAIR = "an axis of this cluster", "it returns a pair"


@wrong(A, "that is what rank 0's calls say")
class Rank0sCalls(RightMisplaced):
    def calls(self):
        return self.run.calls[0]


@wrong(A, "that is the axis with most bytes in all")
class AllBytes(RightMisplaced):
    cases = OTHERS

    def leaves(self, call):
        return True


@wrong(A, "that is the axis with most calls between nodes")
class CountsCalls(RightMisplaced):
    def axis(self):
        self.amount = lambda call: 1
        return max(self.run.sizes, key=self.bytes(self.leaves).get)


@wrong(A, "that is the axis of the largest call")
class LargestCall(RightMisplaced):
    cases = OTHERS

    def axis(self):
        return max((call for call in self.calls() if self.leaves(call)), key=self.amount).axis


@wrong(A, RULE)
class AlwaysTp(RightMisplaced):
    def axis(self):
        return "tp"

    def order(self):
        return [axis for axis in ("pp", "dp", "tp") if axis in self.sizes]


@wrong(A, "compare rank // run.node of the ranks of a call")
class TheOneInside(RightMisplaced):
    def axis(self):
        return min(self.between, key=self.between.get)


@wrong(A, "compare rank // run.node of the ranks of a call")
class ByDegree(RightMisplaced):
    def axis(self):
        return max(self.sizes, key=lambda axis: (self.sizes[axis], axis == "pp"))


@wrong(A, "add up `sent` by axis where the call's ranks are on more than one node")
class ByName(RightMisplaced):
    def axis(self):
        return min(self.sizes)


@wrong(A, "that is the order it has", right_values=True)
class StaysAsItIs(RightMisplaced):
    def order(self):
        return list(self.sizes)


@wrong(A, "the order is turned round", right_values=True)
class TurnedRound(RightMisplaced):
    def order(self):
        return super().order()[::-1]


@wrong(A, "that order sends the most bytes", right_values=True)
class MostBytes(RightMisplaced):
    cases = OTHERS

    def choose(self, orders):
        return max(orders, key=self.crossing)


@wrong(A, "the axes with most bytes belong inside", right_values=True)
class MostOutside(RightMisplaced):
    cases = OTHERS

    def order(self):
        return sorted(self.sizes, key=self.traffic.get, reverse=True)


@wrong(A, "an order has each axis of sizes once")
class OneAxisOnly(RightMisplaced):
    def order(self):
        return (self.axis(),)


@wrong(A, PAIR)
class OnlyTheOrder(RightMisplaced):
    def form(self, answer):
        return list(answer[1]) if isinstance(answer, tuple) and len(answer) == 2 else answer


@wrong(A, AN_AXIS)
class ANumber(RightMisplaced):
    def axis(self):
        return list(self.sizes).index(super().axis())


@wrong(A, PAIR)
def nothing_of_a(run):
    RightMisplaced()(run)


@wrong(A, RULE)
class HardCoded:
    """The answer to the cluster that learners see."""

    def __call__(self, run):
        return "tp", [axis for axis in ("pp", "dp", "tp") if axis in run.sizes]


@wrong(B, "that is what rank 0's group says")
class Rank0sGroup(RightDrifting):
    cases = OTHERS

    def calls(self):
        return [call for call in self.run.calls[0] if call.axis == "data"]


@wrong(B, "that is what the first cluster had")
class AlwaysCp(RightDrifting):
    def axis(self):
        return "cp"


@wrong(B, "that is no drift")
class AnyDifference(RightDrifting):
    def axis(self):
        for axis in reversed(self.run.sizes):
            for ranks in groups_of(self.run.sizes, (axis,)):
                one, *others = (self.run.weights[rank] for rank in ranks)
                if any(one.keys() != other.keys() or any(not one[k].equal(other[k]) for k in one) for other in others):
                    return axis
        return None


@wrong(B, "that is no drift")
class TpOrPp(RightDrifting):
    def axis(self):
        return "tp" if "tp" in self.run.sizes else "pp"


@wrong(B, "its ranks have the same weights")
class TheOtherOne(RightDrifting):
    def axis(self):
        return {"dp": "cp", "cp": "dp"}[super().axis()]


@wrong(B, "what ails it stays", right_values=True)
class AsTheyWere(RightDrifting):
    def groups(self):
        return sorted({call.ranks for call in self.calls()})


@wrong(B, "those groups have the missing axis alone", right_values=True)
class OnlyTheMissing(RightDrifting):
    def axes(self):
        return (self.axis(),)


@wrong(B, ONE_AXIS, right_values=True)
class OnlyDp(RightDrifting):
    cases = OTHERS

    def axes(self):
        return ("dp",)


@wrong(B, ONE_AXIS, right_values=True)
class OnlyCp(RightDrifting):
    cases = OTHERS

    def axes(self):
        return ("cp",)


@wrong(B, "all ranks in one group average what is not alike", right_values=True)
class Everyone(RightDrifting):
    def axes(self):
        return tuple(self.run.sizes)


@wrong(B, WITH_TP, right_values=True)
class OnlyTp(RightDrifting):
    def axes(self):
        return tuple(axis for axis in ("tp", "pp") if axis in self.run.sizes)


@wrong(B, "the groups of all ranks are asked for", right_values=True)
class OnlySickOnes(RightDrifting):
    cases = OTHERS

    def groups(self):
        there = {tuple(sorted(call.ranks)) for call in self.calls()}
        return [group for group in super().groups() if tuple(group) not in there]


@wrong(B, "every rank is in one of them", right_values=True)
class Rank0sOwn(RightDrifting):
    def groups(self):
        return super().groups()[:1]


@wrong(B, PAIR)
class OnlyTheAxis(RightDrifting):
    def form(self, answer):
        return answer[0]


@wrong(B, AN_AXIS)
class AList(RightDrifting):
    def axis(self):
        return [super().axis()]


@wrong(B, "are one group: groups(run.sizes", right_values=True)
class Neighbours(RightDrifting):
    cases = OTHERS

    def groups(self):
        size = self.run.sizes["dp"] * self.run.sizes["cp"]
        return [[(first + 2 * i) % 8 for i in range(size)] for first in (0, 1)]


@wrong(B, "ready is no answer")
def from_the_library(run):
    found = grade.nd.drifts.layouts.groups(run.sizes, ("dp", "cp"))
    return "cp", found
