"""Wrong answers to the task straggler of 10_nd_parallel."""

from tests.grading.zoo.nd_right import RightStraggler, groups_of
from tests.grading.zoo.wrong import Wrong, keeper

ZOO: list[Wrong] = []
wrong = keeper(ZOO)
TASK = "straggler"
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
        own = next(group for group in groups_of(self.run.sizes, ("tp",)) if rank in group)
        return next((one for one in own if one != rank), rank), cause


@wrong(TASK, "compare it with ranks of the same stage")
class MostCompute(RightStraggler):
    """Whatever its stage has to do; the cause by stages."""

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

    def of_rank(self, ratios):
        return max(ratios)


@wrong(TASK, "its ranks' shortest span")
class WithWaiting(RightStraggler):
    """As if a call took as long as its longest span."""

    def of_call(self, spans):
        return max(spans)


@wrong(TASK, "that is what the first cluster had")
class HardCoded(RightStraggler):
    def answer(self):
        return 5, "computes"


@wrong(TASK, "that is not rank 0")
class Rank0(RightStraggler):
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


@wrong(TASK, "do not add up their times")
class AddedUp(RightStraggler):
    """The longest time in calls, as if all ranks had as many."""

    def sender(self):
        return max(self.ranks, key=lambda rank: sum(self.own[call.number] for call in self.run.calls[rank]))


@wrong(TASK, "compare its compute spans with ranks of its own stage")
class BesideItsNeighbour(RightStraggler):
    def peers(self, rank):
        return [rank, rank ^ 1]

    def answer(self):
        compute = self.spent("compute")
        ratios = [mine / compute[rank ^ 1] for rank, mine in enumerate(compute)]
        return (ratios.index(max(ratios)), "computes") if max(ratios) > 1.2 else (self.sender(), "sends")


@wrong(TASK, "calls inside a node do not use the slow link")
class InsideToo(RightStraggler):
    def far(self, rank):
        return [call for call in self.run.calls[rank] if call.sent]


@wrong(TASK, "a span has waiting in it")
class OwnSpans(RightStraggler):
    def sender(self):
        return max(self.ranks, key=self.in_far_calls)

    def in_far_calls(self, rank):
        far = {c.number for c in self.run.calls[rank] if len({one // self.run.node for one in c.ranks}) > 1}
        return sum(span.finished - span.started for span in self.run.spans[rank] if span.call in far)


@wrong(TASK, "a call's number is not its place in the list")
class ByPlace(RightStraggler):
    """No points, though the cluster shown may be right."""

    def answer(self):
        for calls, spans in zip(self.run.calls, self.run.spans, strict=True):
            [calls[span.call] for span in spans if span.call is not None]
        return super().answer()
