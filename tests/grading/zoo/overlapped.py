"""Wrong answers to the fifth task of 02_data_parallel: buckets that leave while backward runs."""

import torch
import torch.distributed as dist

from tests.grading.zoo.gradients import Right, cut, fill, hand_out, row_of
from tests.grading.zoo.wrong import Wrong, keeper, me

ZOO: list[Wrong] = []
wrong = keeper(ZOO)
TASK = "Overlapped"


@wrong(TASK, "nothing was sent")
class DoesNothing(Right):
    def start(self, module):
        pass

    def hook(self):
        pass

    def finish(self):
        pass


@wrong(TASK, "the ranks started from different weights")
class NeverReplicates(Right):
    def start(self, module):
        pass


@wrong(TASK, "send all parameters, frozen ones too, and all buffers, as they are")
class ForgetsBuffers(Right):
    def start(self, module):
        for parameter in module.parameters():
            dist.broadcast(parameter.detach(), 0)


@wrong(TASK, "send all parameters, frozen ones too, and all buffers, as they are")
class ForgetsTheFrozen(Right):
    def start(self, module):
        with torch.no_grad():
            for tensor in [*module.parameters(), *module.buffers()]:
                if tensor.requires_grad or not isinstance(tensor, torch.nn.Parameter):
                    dist.broadcast(tensor, 0)


@wrong(TASK, "that is the sum")
class NeverDivides(Right):
    def row(self, k):
        return row_of(self.buckets[k])


@wrong(TASK, "that is divided by N twice")
class DividesTwice(Right):
    def row(self, k):
        return row_of(self.buckets[k]) / me()[1] ** 2


@wrong(TASK, "no mean has been written into parameter.grad")
class WritesNothingBack(Right):
    def collect(self):
        for _, work in self.underway:
            work.wait()


@wrong(TASK, "start the all-reduce in the hook", right_values=True)
class SendsAfterBackward(Right):
    def hook(self):
        pass


@wrong(TASK, "waits for an all-reduce while backward runs", right_values=True)
class ReducesInTheHook(Right):
    """Synchronously."""

    def send(self, k):
        row = self.row(k)
        dist.all_reduce(row)
        self.underway.append(row)

    def collect(self):
        for bucket, row in zip(self.buckets, self.underway, strict=True):
            hand_out(bucket, row)


@wrong(TASK, "waits for an all-reduce while backward runs", right_values=True)
class WaitsInTheHook(Right):
    def send(self, k):
        super().send(k)
        self.underway[k][1].wait()


class Overtakes(Right):
    """Sends what is full, without regard to order."""

    def reset(self):
        super().reset()
        self.sent = {}

    def arrived(self, parameter):
        k = self.bucket_of[parameter]
        self.missing[k] -= 1
        if self.missing[k] == 0:
            self.send(k)

    def send(self, k):
        row = self.row(k)
        self.sent[k] = (row, dist.all_reduce(row, async_op=True))

    def finish(self):
        for k in range(len(self.buckets)):
            if k not in self.sent:
                self.send(k)
        self.underway = [self.sent[k] for k in range(len(self.buckets))]
        self.collect()
        self.reset()


wrong(TASK, "overtook bucket 3 (detour.bias to detour.weight); hint: all-reduces are matched by their order")(Overtakes)


@wrong(
    TASK,
    "when the gradient of second.weight was made; hint: step 1 was right: finish() must forget what it counted",
    right_values=True,
)
class CountsOnce(Right):
    def reset(self):
        self.underway = []
        if not hasattr(self, "missing"):
            self.missing = [len(bucket) for bucket in self.buckets]


@wrong(TASK, "writes step 1's gradients: empty your lists in finish()")
class KeepsTheFirstStep(Right):
    def reset(self):
        if not hasattr(self, "underway"):
            super().reset()

    def collect(self):
        for bucket, (row, work) in zip(self.buckets, self.underway, strict=True):
            work.wait()
            fill(bucket)
            hand_out(bucket, row)


@wrong(TASK, "keep nothing of a step that is over", right_values=True)
class KeepsRows(Right):
    def reset(self):
        self.old = [*getattr(self, "old", []), *getattr(self, "underway", [])]
        super().reset()


@wrong(TASK, "one copy of the gradients is enough", right_values=True)
class HoldsTwoCopies(Right):
    def reset(self):
        rows = [row for row, _ in getattr(self, "underway", [])]
        self.copies = [*rows, *[row.clone() for row in rows]]
        super().reset()


@wrong(TASK, "right are the buckets of `cut` with first_bytes=300 and cap_bytes=10,000", right_values=True)
class CutsByTheRuleOfTheChapter(Right):
    def cut(self, parameters, first_bytes, cap_bytes):
        buckets = [[]]
        for parameter in reversed([p for p in parameters if p.requires_grad]):
            most = first_bytes if len(buckets) == 1 else cap_bytes
            if buckets[-1] and sum(p.nbytes for p in buckets[-1]) + parameter.nbytes > most:
                buckets.append([])
            buckets[-1].append(parameter)
        return buckets


@wrong(TASK, "first_bytes; right are the buckets of `cut` with first_bytes=300 and cap_bytes=10,000", right_values=True)
class IgnoresFirstBytes(Right):
    def cut(self, parameters, first_bytes, cap_bytes):
        return cut(parameters, cap_bytes, cap_bytes)


@wrong(TASK, "go through them in reverse; right are the buckets of `cut`", right_values=True)
class CutsForwards(Right):
    def cut(self, parameters, first_bytes, cap_bytes):
        return cut(parameters[::-1], first_bytes, cap_bytes)


@wrong(TASK, "frozen parameters have no gradient: leave them out", right_values=True)
class SendsTheFrozenToo(Right):
    def cut(self, parameters, first_bytes, cap_bytes):
        return [*cut(parameters, first_bytes, cap_bytes), [p for p in parameters if not p.requires_grad]]

    def hook(self):
        for parameter in self.bucket_of:
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self.arrived)


@wrong(TASK, "is a tied parameter sent twice?", right_values=True)
class ReplicatesTheStateDict(Right):
    def start(self, module):
        for tensor in module.state_dict().values():
            dist.broadcast(tensor, 0)


@wrong(TASK, "a parameter has more than one hook of yours")
class HooksTheTiedTwice(Right):
    def hook(self):
        for _, parameter in self.module.named_parameters(remove_duplicate=False):
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self.arrived)


@wrong(TASK, "one call a parameter", right_values=True)
class SendsEachParameter(Right):
    def cut(self, parameters, first_bytes, cap_bytes):
        return cut(parameters, 1, 1)


@wrong(TASK, "one call for everything", right_values=True)
class SendsAllInOneCall(Right):
    def cut(self, parameters, first_bytes, cap_bytes):
        return cut(parameters, 10**9, 10**9)


@wrong(TASK, "called all_gather", right_values=True)
class GathersAndAverages(Right):
    def send(self, k):
        row = row_of(self.buckets[k])
        everyone = [torch.empty_like(row) for _ in range(me()[1])]
        self.underway.append((everyone, dist.all_gather(everyone, row, async_op=True)))

    def collect(self):
        for bucket, (rows, work) in zip(self.buckets, self.underway, strict=True):
            work.wait()
            hand_out(bucket, sum(rows) / me()[1])


@wrong(TASK, "nearly right, as if rounded: float64 has to stay float64")
class SendsFloat32(Right):
    def row(self, k):
        return super().row(k).float()


@wrong(TASK, "async_op=True returns at once")
class NeverWaits(Right):
    def collect(self):
        for bucket, (row, _) in zip(self.buckets, self.underway, strict=True):
            hand_out(bucket, row)


@wrong(TASK, "is something left out where a gradient is None?")
class LeavesBucketsThatAreNotFull(Right):
    """What never fills never leaves: the ranks where it does wait, or have gradients of their own."""

    def finish(self):
        for bucket, (row, work) in zip(self.buckets, self.underway, strict=False):
            work.wait()
            hand_out(bucket, row)
        self.reset()
