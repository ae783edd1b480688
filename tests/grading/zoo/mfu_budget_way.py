"""Wrong answers to time_budget of 09_mfu: messages, and what is no answer."""

import torch
import torch.distributed as dist

from manyranks.timeline import intervals
from tests.grading.zoo.mfu_right_ranks import PARTS, RightBudget
from tests.grading.zoo.wrong import Wrong, keeper, me

ZOO: list[Wrong] = []
wrong = keeper(ZOO)
TASK = "time_budget"


@wrong(TASK, "torch.tensor of Python's floats is float32")
class SingleNumbers(RightBudget):
    def sent(self):
        return torch.tensor([moment - self.zero for moment in self.arrived])


@wrong(TASK, "no rank needs each of the others' numbers")
class GathersMoments(RightBudget):
    def exchanged(self, row):
        parts = [torch.empty_like(row) for _ in range(me()[1])]
        dist.all_gather(parts, row)
        return torch.stack(parts).amax(0)


@wrong(TASK, "no rank needs each of the others' numbers")
class GathersTraces(RightBudget):
    def exchanged(self, row):
        found = [None] * me()[1]
        dist.all_gather_object(found, (self.spans, row))
        return torch.stack([theirs for _, theirs in found]).amax(0)


@wrong(TASK, "one call for each number")
class OneCallEach(RightBudget):
    def exchanged(self, row):
        for i in range(len(row)):
            one = row[i : i + 1].clone()
            dist.all_reduce(one, op=dist.ReduceOp.MAX)
            row[i] = one
        return row


@wrong(TASK, "one number for each call is enough")
class SendsItsWaitsToo(RightBudget):
    def exchanged(self, row):
        both = torch.cat([row, row])
        dist.all_reduce(both, op=dist.ReduceOp.MAX)
        return both[: len(row)]


@wrong(TASK, "a barrier is not needed")
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
