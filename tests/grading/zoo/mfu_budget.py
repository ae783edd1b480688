"""Wrong answers to time_budget of 09_mfu: to whom a moment belongs."""

import torch
import torch.distributed as dist

from tests.grading.zoo.mfu_right_ranks import BySpans, RightBudget
from tests.grading.zoo.wrong import Wrong, keeper, me

ZOO: list[Wrong] = []
wrong = keeper(ZOO)
TASK = "time_budget"
HIDDEN = slice(1, 2)  # the case with asynchronous calls
NESTED, NO_WAITING = "nested operators are counted twice", "waiting is counted as communication"
OWN, PYTHON_WAITS = "waiting is counted from when this rank came to the call", "the waits are in Python's part, too"


@wrong(TASK, NESTED)
class NestedTwice(BySpans):
    def own(self, span):
        return span.finished - span.started


@wrong(TASK, NESTED)
class NestedTwiceAndSome(BySpans):
    """Takes what is inside away from products only."""

    def own(self, span):
        return super().own(span) if span.kind == "matmul" else span.finished - span.started


@wrong(TASK, "not to the outermost one")
class Outermost(RightBudget):
    def choice(self, covering):
        return next((span for span in covering if span.kind != "calls"), covering[0])


@wrong(TASK, "'calls' spans are counted as operators")
class CallsAreOperators(RightBudget):
    def of_calls(self):
        return "other"


@wrong(TASK, 'what is inside a "calls" span is forgotten')
class OutermostCalls(RightBudget):
    """A module's time is Python's, whatever runs in it."""

    def choice(self, covering):
        return next((span for span in covering if span.kind == "calls"), covering[-1])


@wrong(TASK, NO_WAITING)
class NoWaiting(RightBudget):
    def moments(self):
        super().moments()
        return [-1e9] * len(self.arrived)


@wrong(TASK, NO_WAITING)
class OwnMoments(RightBudget):
    """Nothing is sent."""

    def moments(self):
        return self.arrived


@wrong(TASK, NO_WAITING)
class EarliestRank(RightBudget):
    def exchanged(self, row):
        dist.all_reduce(row, op=dist.ReduceOp.MIN)
        return row


@wrong(TASK, "communication is counted as waiting")
class AllWaiting(RightBudget):
    def part(self, span, end):
        return "waiting" if span.kind == "wait" else super().part(span, end)


@wrong(TASK, "An all-reduce adds the moments unless op=dist.ReduceOp.MAX")
class SumOfMoments(RightBudget):
    """On clocks that have run for long."""

    def exchanged(self, row):
        row += 1000
        dist.all_reduce(row)
        return row


@wrong(TASK, "the moments are on clocks that began at different times")
class ClocksAgree(RightBudget):
    def moments(self):
        return self.exchanged(torch.tensor(self.arrived, dtype=torch.float64)).tolist()


@wrong(TASK, "add this rank's zero before you compare them with its spans")
class NotBackOnItsClock(RightBudget):
    def moments(self):
        return self.exchanged(self.sent()).tolist()


@wrong(TASK, OWN)
class WaitingFromOwnMoment(BySpans):
    cases = HIDDEN

    def of_wait(self, wait, last):
        waiting = max(0.0, min(last, wait.finished) - self.arrived[wait.call])
        return waiting, wait.finished - wait.started - waiting


@wrong(TASK, OWN)
class LastLessOwn(BySpans):
    """What is left is communication."""

    cases = HIDDEN

    def of_wait(self, wait, last):
        waiting = max(0.0, min(last, wait.finished) - self.arrived[wait.call])
        return waiting, wait.finished - max(wait.started, last)


@wrong(TASK, "there is no waiting: 0, not less")
class WaitingBelowZero(BySpans):
    cases = HIDDEN

    def of_wait(self, wait, last):
        waiting = min(last, wait.finished) - wait.started
        return waiting, wait.finished - wait.started - waiting


@wrong(TASK, "communication is counted from when all had come, also while this rank computed")
class OverlappedCommunication(BySpans):
    cases = HIDDEN

    def of_wait(self, wait, last):
        return max(0.0, min(last, wait.finished) - wait.started), wait.finished - last


@wrong(TASK, "communication is counted from when this rank came to the call")
class CommunicationFromItsStart(BySpans):
    cases = HIDDEN

    def of_wait(self, wait, last):
        return super().of_wait(wait, last)[0], wait.finished - self.arrived[wait.call]


@wrong(TASK, "communication is counted from when this rank came to the call")
class WholeCallsAreCommunication(BySpans):
    """Without anybody else's moments."""

    cases = HIDDEN

    def of_wait(self, wait, last):
        return 0.0, wait.finished - self.arrived[wait.call]


@wrong(TASK, "Python is forgotten")
class NoPython(BySpans):
    def left(self, parts):
        return 0.0


@wrong(TASK, PYTHON_WAITS)
class PythonHasTheWaits(BySpans):
    def left(self, parts):
        return self.step[1] - self.step[0] - parts["matmul"] - parts["other"]


@wrong(TASK, PYTHON_WAITS)
class PythonHasTheWaiting(BySpans):
    def left(self, parts):
        return super().left(parts) + parts["waiting"]


@wrong(TASK, "the step begins and ends as `step` says")
class FromSpanToSpan(RightBudget):
    def within(self, moment):
        return self.spans[0].started <= moment <= max(span.finished for span in self.spans)


@wrong(TASK, "'calls' spans are counted as operators")
class CallsAreNobodys(RightBudget):
    def parts(self):
        parts = super().parts()
        own = BySpans()
        own.spans = self.spans
        parts["python"] -= sum(own.own(span) for span in self.spans if span.kind == "calls")
        return parts


@wrong(TASK, "a span's own time is what the spans directly in it leave")
class AllInsideTakenAway(BySpans):
    def inside(self, span):
        return [one for one in self.spans if self.holds(span, one)]


@wrong(TASK, "'calls' spans are counted as operators")
class CallsInOperatorsAreTheirs(BySpans):
    def inside(self, span):
        whole = self.spans
        self.spans = [one for one in whole if one.kind != "calls"]
        found, self.spans = super().inside(span), whole
        return found


@wrong(TASK, "a wait inside an operator is a wait")
class WaitsInOperatorsTwice(BySpans):
    cases = HIDDEN

    def inside(self, span):
        return [one for one in super().inside(span) if one.kind != "wait"]


@wrong(TASK, "`call` says which collective a wait is for")
class WaitsInTheCallsOrder(RightBudget):
    cases = HIDDEN

    def part(self, span, end):
        if span.kind == "wait":
            waits = [one for one in self.spans if one.kind == "wait"]
            return "waiting" if end <= self.last[waits.index(span)] else "communication"
        return super().part(span, end)


@wrong(TASK, "the last rank is the one that comes last")
class LastByItsNumber(RightBudget):
    def exchanged(self, row):
        dist.broadcast(row, me()[1] - 1)
        return row


@wrong(TASK, "moments are counted from the step's begin")
class FromTheStep(RightBudget):
    def sent(self):
        return super().sent() + self.zero - self.step[0]

    def moments(self):
        return (self.exchanged(self.sent()) + self.step[0]).tolist()


@wrong(TASK, "where the last rank comes in the middle of a wait")
class WholeWaits(BySpans):
    def of_wait(self, wait, last):
        length = wait.finished - wait.started
        return (length, 0.0) if last > wait.started else (0.0, length)


@wrong(TASK, "communication and waiting are swapped")
class Crossed(RightBudget):
    def form(self, parts):
        return parts | {"waiting": parts["communication"], "communication": parts["waiting"]}
