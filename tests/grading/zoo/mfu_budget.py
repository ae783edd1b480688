"""Wrong answers to time_budget of 09_mfu."""

import torch
import torch.distributed as dist

from manyranks.measure import intervals
from tests.grading.zoo.mfu_right_ranks import PARTS, BySpans, RightBudget
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


@wrong(TASK, NO_WAITING, right_values=True)
class NoWaiting(RightBudget):
    def moments(self):
        super().moments()
        return [-1e9] * len(self.arrived)


@wrong(TASK, NO_WAITING, right_values=True)
class OwnMoments(RightBudget):
    """Nothing is sent."""

    def moments(self):
        return self.arrived


@wrong(TASK, NO_WAITING, right_values=True)
class EarliestRank(RightBudget):
    def exchanged(self, row):
        dist.all_reduce(row, op=dist.ReduceOp.MIN)
        return row


@wrong(TASK, "communication is counted as waiting", right_values=True)
class AllWaiting(RightBudget):
    def part(self, span, end):
        return "waiting" if span.kind == "wait" else super().part(span, end)


@wrong(TASK, "An all-reduce adds the moments unless op=dist.ReduceOp.MAX", right_values=True)
class SumOfMoments(RightBudget):
    """On clocks that have run for long."""

    def exchanged(self, row):
        row += 1000
        dist.all_reduce(row)
        return row


@wrong(TASK, "the moments are on clocks that began at different times", right_values=True)
class ClocksAgree(RightBudget):
    def moments(self):
        return self.exchanged(torch.tensor(self.arrived, dtype=torch.float64)).tolist()


@wrong(TASK, "add this rank's zero before you compare them with its spans", right_values=True)
class NotBackOnItsClock(RightBudget):
    def moments(self):
        return self.exchanged(self.sent()).tolist()


@wrong(TASK, OWN, right_values=True)
class WaitingFromOwnMoment(BySpans):
    cases = HIDDEN

    def of_wait(self, wait, last):
        waiting = max(0.0, min(last, wait.finished) - self.arrived[wait.call])
        return waiting, wait.finished - wait.started - waiting


@wrong(TASK, OWN, right_values=True)
class LastLessOwn(BySpans):
    """What is left is communication."""

    cases = HIDDEN

    def of_wait(self, wait, last):
        waiting = max(0.0, min(last, wait.finished) - self.arrived[wait.call])
        return waiting, wait.finished - max(wait.started, last)


@wrong(TASK, "there is no waiting: 0, not less", right_values=True)
class WaitingBelowZero(BySpans):
    cases = HIDDEN

    def of_wait(self, wait, last):
        waiting = min(last, wait.finished) - wait.started
        return waiting, wait.finished - wait.started - waiting


@wrong(TASK, "communication is counted from when all had come, also while this rank computed", right_values=True)
class OverlappedCommunication(BySpans):
    cases = HIDDEN

    def of_wait(self, wait, last):
        return max(0.0, min(last, wait.finished) - wait.started), wait.finished - last


@wrong(TASK, "communication is counted from when this rank came to the call", right_values=True)
class CommunicationFromItsStart(BySpans):
    cases = HIDDEN

    def of_wait(self, wait, last):
        return super().of_wait(wait, last)[0], wait.finished - self.arrived[wait.call]


@wrong(TASK, "communication is counted from when this rank came to the call", right_values=True)
class WholeCallsAreCommunication(BySpans):
    """Without anybody else's moments."""

    cases = HIDDEN

    def of_wait(self, wait, last):
        return 0.0, wait.finished - self.arrived[wait.call]


@wrong(TASK, "Python is forgotten", right_values=True)
class NoPython(BySpans):
    def left(self, parts):
        return 0.0


@wrong(TASK, PYTHON_WAITS, right_values=True)
class PythonHasTheWaits(BySpans):
    def left(self, parts):
        return self.step[1] - self.step[0] - parts["matmul"] - parts["other"]


@wrong(TASK, PYTHON_WAITS, right_values=True)
class PythonHasTheWaiting(BySpans):
    def left(self, parts):
        return super().left(parts) + parts["waiting"]


@wrong(TASK, "the step begins and ends as `step` says", right_values=True)
class FromSpanToSpan(RightBudget):
    def within(self, moment):
        return self.spans[0].started <= moment <= max(span.finished for span in self.spans)


@wrong(TASK, "'calls' spans are counted as operators", right_values=True)
class CallsAreNobodys(RightBudget):
    def parts(self):
        parts = super().parts()
        own = BySpans()
        own.spans = self.spans
        parts["python"] -= sum(own.own(span) for span in self.spans if span.kind == "calls")
        return parts


@wrong(TASK, "torch.tensor of Python's floats is float32", right_values=True)
class SingleNumbers(RightBudget):
    def sent(self):
        return torch.tensor([moment - self.zero for moment in self.arrived])


@wrong(TASK, "no rank needs each of the others' numbers", right_values=True)
class GathersMoments(RightBudget):
    def exchanged(self, row):
        parts = [torch.empty_like(row) for _ in range(me()[1])]
        dist.all_gather(parts, row)
        return torch.stack(parts).amax(0)


@wrong(TASK, "no rank needs each of the others' numbers", right_values=True)
class GathersTraces(RightBudget):
    def exchanged(self, row):
        found = [None] * me()[1]
        dist.all_gather_object(found, (self.spans, row))
        return torch.stack([theirs for _, theirs in found]).amax(0)


@wrong(TASK, "one call for each number", right_values=True)
class OneCallEach(RightBudget):
    def exchanged(self, row):
        for i in range(len(row)):
            one = row[i : i + 1].clone()
            dist.all_reduce(one, op=dist.ReduceOp.MAX)
            row[i] = one
        return row


@wrong(TASK, "one number for each call is enough", right_values=True)
class SendsItsWaitsToo(RightBudget):
    def exchanged(self, row):
        both = torch.cat([row, row])
        dist.all_reduce(both, op=dist.ReduceOp.MAX)
        return both[: len(row)]


@wrong(TASK, "a barrier is not needed", right_values=True)
class WithABarrier(RightBudget):
    def exchanged(self, row):
        dist.barrier()
        return super().exchanged(row)


@wrong(TASK, "each moment of the step belongs to the innermost span")
class SomethingElse(RightBudget):
    def form(self, parts):
        return {name: seconds * 1.01 for name, seconds in parts.items()}


@wrong(TASK, 'it returns a dict: {"matmul": …')
class ARow(RightBudget):
    def form(self, parts):
        return [parts[name] for name in PARTS]


@wrong(TASK, "has no 'python'")
class FourParts(RightBudget):
    def form(self, parts):
        return {name: seconds for name, seconds in parts.items() if name != "python"}


@wrong(TASK, "has 'idle', too")
class SixParts(RightBudget):
    def form(self, parts):
        return parts | {"idle": 0.0}


@wrong(TASK, "what is ready is no answer")
class FromTheLibrary(RightBudget):
    def parts(self):
        intervals.total([self.step])
        return super().parts()
