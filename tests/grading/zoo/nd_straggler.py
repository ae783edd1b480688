"""Wrong answers to the task straggler of 10_nd_parallel."""

from tests.grading.zoo.nd_right import RightStraggler, groups_of
from tests.grading.zoo.wrong import Wrong, keeper

ZOO: list[Wrong] = []
wrong = keeper(ZOO)
TASK = "straggler"
OTHERS, SEEN = slice(1, 2), slice(1)  # the clusters that learners have not seen, and the one that they have
VICTIM, PARTNER = "is the one that suffers", "that is a partner of the slow rank"


@wrong(TASK, VICTIM)
class LongestWait(RightStraggler):
    def answer(self):
        calls = self.spent("call")
        return calls.index(max(calls)), super().answer()[1]


@wrong(TASK, VICTIM)
class TpPartner(RightStraggler):
    def answer(self):
        rank, cause = super().answer()
        return next(one for one in next(g for g in groups_of(self.run.sizes, ("tp",)) if rank in g) if one != rank), cause


@wrong(TASK, "compare it with ranks of the same stage")
class MostCompute(RightStraggler):
    """Whatever its stage has to do; the cause by stages."""

    cases = OTHERS

    def answer(self):
        compute = self.spent("compute")
        return compute.index(max(compute)), super().answer()[1]


@wrong(TASK, "none of them computes slowly")
class LeastCompute(RightStraggler):
    def answer(self):
        compute = self.spent("compute")
        return compute.index(min(compute)), super().answer()[1]


@wrong(TASK, "a rank that waits little may still be as fast")
class LeastTimeInCalls(RightStraggler):
    cases = OTHERS

    def answer(self):
        calls = self.spent("call")
        return calls.index(min(calls)), super().answer()[1]


@wrong(TASK, VICTIM)
class EndsLast(RightStraggler):
    def answer(self):
        ends = [spans[-1].finished for spans in self.run.spans]
        return ends.index(max(ends)), super().answer()[1]


@wrong(TASK, PARTNER)
class AnySlowCall(RightStraggler):
    """A rank in a slow call, whatever its other calls are like."""

    cases = OTHERS

    def of_rank(self, ratios):
        return max(ratios)


@wrong(TASK, "its ranks' shortest span")
class WithWaiting(RightStraggler):
    """As if a call took as long as its longest span."""

    cases = OTHERS

    def of_call(self, spans):
        return max(spans)


@wrong(TASK, "that is what the first cluster had")
class HardCoded(RightStraggler):
    def answer(self):
        return 5, "computes"


@wrong(TASK, "that is not rank 0")
class Rank0(RightStraggler):
    cases = OTHERS

    def answer(self):
        return 0, super().answer()[1]


@wrong(TASK, "where its compute spans are longer than those of ranks with the same work", right_values=True)
class CauseSwapped(RightStraggler):
    def answer(self):
        rank, cause = super().answer()
        return rank, {"computes": "sends", "sends": "computes"}[cause]


@wrong(TASK, "compute spans are equal within a stage", right_values=True)
class AlwaysComputes(RightStraggler):
    def answer(self):
        return super().answer()[0], "computes"


@wrong(TASK, "compute spans of one rank are longer", right_values=True)
class AlwaysSends(RightStraggler):
    cases = OTHERS

    def answer(self):
        return super().answer()[0], "sends"


@wrong(TASK, "it returns a pair: a rank")
class OnlyTheRank(RightStraggler):
    def form(self, answer):
        return answer[0]


@wrong(TASK, "it returns a pair: a rank")
class OtherWords(RightStraggler):
    def form(self, answer):
        return answer[0], f"rank {answer[0]} is slow"


@wrong(TASK, "it returns a pair: a rank")
class Turned(RightStraggler):
    def form(self, answer):
        return answer[::-1]


@wrong(TASK, "it returns a pair: a rank")
def nothing(run):
    RightStraggler()(run)


@wrong(TASK, "its ranks' shortest span")
class OneTooFar(RightStraggler):
    def answer(self):
        rank, cause = super().answer()
        return (rank + 4) % 8 if cause == "sends" else rank, cause
