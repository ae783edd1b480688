"""Wrong answers to the task misplaced of 10_nd_parallel."""

from tests.grading.zoo.nd_right import RightMisplaced
from tests.grading.zoo.wrong import Wrong, keeper

ZOO: list[Wrong] = []
wrong = keeper(ZOO)
TASK = "misplaced"
RULE = "is not always what sends most"
AN_AXIS, PAIR = "an axis of this cluster", "it returns a pair"


@wrong(TASK, "that is what rank 0's calls say")
class Rank0sCalls(RightMisplaced):
    def counted(self):
        return [0]


@wrong(TASK, "that is what one rank's calls say")
class Rank1sCalls(RightMisplaced):
    def counted(self):
        return [1]


@wrong(TASK, "that is what one rank's calls say")
class LastRanksCalls(RightMisplaced):
    def counted(self):
        return [len(self.run.calls) - 1]


@wrong(TASK, "that is what some ranks' calls say", right_values=True)
class FirstAndLast(RightMisplaced):
    def counted(self):
        return [0, len(self.run.calls) - 1]


@wrong(TASK, "that is what some ranks' calls say", right_values=True)
class FirstFour(RightMisplaced):
    def counted(self):
        return range(4)


@wrong(TASK, "that counts all bytes of a call whose ranks are on several nodes")
class WholeCalls(RightMisplaced):
    def leaves(self, rank, call):
        return len({one // self.run.node for one in call.ranks}) > 1


@wrong(TASK, "there the axis with most bytes is innermost", right_values=True)
class MostInside(RightMisplaced):
    def order(self):
        return sorted(self.sizes, key=self.traffic.get)


@wrong(TASK, "that is the axis with most bytes in all")
class AllBytes(RightMisplaced):
    def leaves(self, rank, call):
        return True


@wrong(TASK, "that is the axis with most calls between nodes")
class CountsCalls(RightMisplaced):
    def axis(self):
        self.amount = lambda call: 1
        return max(self.run.sizes, key=self.bytes(self.leaves).get)


@wrong(TASK, "that is the axis of the largest call")
class LargestCall(RightMisplaced):
    def axis(self):
        return max((one[1] for one in self.calls() if self.leaves(*one)), key=self.amount).axis


@wrong(TASK, RULE)
class AlwaysTp(RightMisplaced):
    def axis(self):
        return "tp"

    def order(self):
        return [axis for axis in ("pp", "dp", "tp") if axis in self.sizes]


@wrong(TASK, "compare rank // run.node of the ranks of a call")
class TheOneInside(RightMisplaced):
    def axis(self):
        return min(self.between, key=self.between.get)


@wrong(TASK, "add up `sent` by axis where the rank's next one in `ranks` is on another node")
class ByDegree(RightMisplaced):
    def axis(self):
        return max(self.sizes, key=lambda axis: (self.sizes[axis], axis == "pp"))


@wrong(TASK, "add up `sent` by axis where the rank's next one in `ranks` is on another node")
class ByName(RightMisplaced):
    def axis(self):
        return min(self.sizes)


@wrong(TASK, "that is the order it has", right_values=True)
class StaysAsItIs(RightMisplaced):
    def order(self):
        return list(self.sizes)


@wrong(TASK, "the order is turned round", right_values=True)
class TurnedRound(RightMisplaced):
    def order(self):
        return super().order()[::-1]


@wrong(TASK, "that order sends the most bytes", right_values=True)
class MostBytes(RightMisplaced):
    def choose(self, orders):
        return max(orders, key=self.crossing)


@wrong(TASK, "the axes with most bytes belong inside", right_values=True)
class MostOutside(RightMisplaced):
    def order(self):
        return sorted(self.sizes, key=self.traffic.get, reverse=True)


@wrong(TASK, "an order has each axis of sizes once")
class OneAxisOnly(RightMisplaced):
    def order(self):
        return (self.axis(),)


@wrong(TASK, PAIR)
class OnlyTheOrder(RightMisplaced):
    def form(self, answer):
        return list(answer[1]) if isinstance(answer, tuple) and len(answer) == 2 else answer


@wrong(TASK, AN_AXIS)
class ANumber(RightMisplaced):
    def axis(self):
        return list(self.sizes).index(super().axis())


@wrong(TASK, PAIR)
def nothing_of_a(run):
    RightMisplaced()(run)


@wrong(TASK, RULE)
class HardCoded:
    """The answer to the cluster that learners see."""

    def __call__(self, run):
        return "tp", [axis for axis in ("pp", "dp", "tp") if axis in run.sizes]
