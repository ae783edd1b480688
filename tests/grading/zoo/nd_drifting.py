"""Wrong answers to the task drifting of 10_nd_parallel."""

from manyranks import grade
from tests.grading.zoo.nd_right import RightDrifting, groups_of
from tests.grading.zoo.wrong import Wrong, keeper

ZOO: list[Wrong] = []
wrong = keeper(ZOO)
TASK = "drifting"
ONE_AXIS, WITH_TP = "not over one of them", "tp ranks have other parts of the weights"
AN_AXIS, PAIR = "an axis of this cluster", "it returns a pair"


@wrong(TASK, "that is what rank 0's group says")
class Rank0sGroup(RightDrifting):
    def calls(self):
        return [call for call in self.run.calls[0] if call.axis == "data"]


@wrong(TASK, "that is what rank 0's group says")
class Rank0sGroupOrDp(RightDrifting):
    """With a guess where nothing is missing."""

    def calls(self):
        return [call for call in self.run.calls[0] if call.axis == "data"]

    def axis(self):
        return super().axis() or "dp"


@wrong(TASK, "that is what the last rank's group says")
class LastRanksGroup(RightDrifting):
    def calls(self):
        return [call for call in self.run.calls[-1] if call.axis == "data"]

    def axis(self):
        return super().axis() or "dp"


@wrong(TASK, "that is what the first cluster had")
class BySize(RightDrifting):
    """By how many ranks a call has."""

    def axis(self):
        return "cp" if min(len(call.ranks) for call in self.calls()) == self.run.sizes["dp"] else "dp"


@wrong(TASK, "the order of the axes is that of run.sizes", right_values=True)
class InTheChaptersOrder(RightDrifting):
    def groups(self):
        sizes = {axis: self.run.sizes[axis] for axis in ("pp", "dp", "cp", "tp") if axis in self.run.sizes}
        return groups_of(sizes, self.axes())


@wrong(TASK, "each group once", right_values=True)
class EachTwice(RightDrifting):
    def groups(self):
        return 2 * super().groups()


@wrong(TASK, "that is what the first cluster had")
class AlwaysCp(RightDrifting):
    def axis(self):
        return "cp"


@wrong(TASK, "that is no drift")
class AnyDifference(RightDrifting):
    def axis(self):
        for axis in reversed(self.run.sizes):
            for ranks in groups_of(self.run.sizes, (axis,)):
                one, *others = (self.run.weights[rank] for rank in ranks)
                if any(one.keys() != other.keys() or any(not one[k].equal(other[k]) for k in one) for other in others):
                    return axis
        return None


@wrong(TASK, "that is no drift")
class TpOrPp(RightDrifting):
    def axis(self):
        return "tp" if "tp" in self.run.sizes else "pp"


@wrong(TASK, "its ranks have the same weights")
class TheOtherOne(RightDrifting):
    def axis(self):
        return {"dp": "cp", "cp": "dp"}[super().axis()]


@wrong(TASK, "what ails it stays", right_values=True)
class AsTheyWere(RightDrifting):
    def groups(self):
        return sorted({call.ranks for call in self.calls()})


@wrong(TASK, "those groups have the missing axis alone", right_values=True)
class OnlyTheMissing(RightDrifting):
    def axes(self):
        return (self.axis(),)


@wrong(TASK, ONE_AXIS, right_values=True)
class OnlyDp(RightDrifting):
    def axes(self):
        return ("dp",)


@wrong(TASK, ONE_AXIS, right_values=True)
class OnlyCp(RightDrifting):
    def axes(self):
        return ("cp",)


@wrong(TASK, "all ranks in one group average what is not alike", right_values=True)
class Everyone(RightDrifting):
    def axes(self):
        return tuple(self.run.sizes)


@wrong(TASK, WITH_TP, right_values=True)
class OnlyTp(RightDrifting):
    def axes(self):
        return tuple(axis for axis in ("tp", "pp") if axis in self.run.sizes)


@wrong(TASK, "the groups of all ranks are asked for", right_values=True)
class OnlySickOnes(RightDrifting):
    def groups(self):
        there = {tuple(sorted(call.ranks)) for call in self.calls()}
        return [group for group in super().groups() if tuple(group) not in there]


@wrong(TASK, "every rank is in one of them", right_values=True)
class Rank0sOwn(RightDrifting):
    def groups(self):
        return super().groups()[:1]


@wrong(TASK, PAIR)
class OnlyTheAxis(RightDrifting):
    def form(self, answer):
        return answer[0]


@wrong(TASK, AN_AXIS)
class AList(RightDrifting):
    def axis(self):
        return [super().axis()]


@wrong(TASK, "are one group: groups(run.sizes", right_values=True)
class Neighbours(RightDrifting):
    def groups(self):
        size = self.run.sizes["dp"] * self.run.sizes["cp"]
        return [[(first + 2 * i) % 8 for i in range(size)] for first in (0, 1)]


@wrong(TASK, "ready is no answer")
def from_the_library(run):
    found = grade.nd.drifts.layouts.groups(run.sizes, ("dp", "cp"))
    return "cp", found
