"""More wrong answers to the fifth task of 02_data_parallel: hooks, gradients of None, and what is no answer."""

import os

import torch
import torch.distributed as dist

from tests.grading.zoo.gradients import Right, fill, hand_out, row_of
from tests.grading.zoo.wrong import Wrong, keeper, me

ZOO: list[Wrong] = []
wrong = keeper(ZOO)
TASK = "Overlapped"


@wrong(TASK, "is something left out where a gradient is None?")
class SkipsParametersWithoutGradient(Right):
    def row(self, k):
        there = [p.grad.flatten() for p in self.buckets[k] if p.grad is not None]
        return torch.cat(there or [torch.zeros(0, dtype=torch.float64)]) / me()[1]

    def collect(self):
        for bucket, (row, work) in zip(self.buckets, self.underway, strict=True):
            work.wait()
            hand_out([p for p in bucket if p.grad is not None], row)


@wrong(TASK, "put the zeros into parameter.grad first")
class LeavesNone(Right):
    def row(self, k):
        there = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.buckets[k]]
        return torch.cat([grad.flatten() for grad in there]) / me()[1]

    def collect(self):
        for bucket, (row, work) in zip(self.buckets, self.underway, strict=True):
            work.wait()
            for parameter, part in zip(bucket, row.split([p.numel() for p in bucket]), strict=True):
                if parameter.grad is not None:
                    parameter.grad.copy_(part.view_as(parameter))


@wrong(TASK, "has a gradient of None there: make it zeros, and send it all the same")
class WritesIntoNone(Right):
    def row(self, k):
        return torch.cat([parameter.grad.flatten() for parameter in self.buckets[k]]) / me()[1]


@wrong(TASK, "finish() has changed the weights: ")
class AveragesWeights(Right):
    def row(self, k):
        fill(self.buckets[k])
        return torch.cat([parameter.detach().flatten() for parameter in self.buckets[k]]) / me()[1]

    @torch.no_grad()
    def collect(self):
        for bucket, (row, work) in zip(self.buckets, self.underway, strict=True):
            work.wait()
            for parameter, part in zip(bucket, row.split([p.numel() for p in bucket]), strict=True):
                parameter.copy_(part.view_as(parameter))


@wrong(TASK, "register_post_accumulate_grad_hook, not register_hook")
class HooksBeforeTheGradientIsThere(Right):
    def hook(self):
        for parameter in self.bucket_of:
            parameter.register_hook(lambda grad, parameter=parameter: self.arrived(parameter))


@wrong(TASK, "was full, but had not left", right_values=True)
class HooksOneParameterOnly(Right):
    """All leave when the first layer's gradient is there."""

    def hook(self):
        next(self.module.parameters()).register_post_accumulate_grad_hook(self.all_there)

    def all_there(self, _):
        for k in range(len(self.buckets)):
            self.send(k)


@wrong(TASK, "left before it was full")
class SendsWithTheFirstGradient(Right):
    def arrived(self, parameter):
        while len(self.underway) <= self.bucket_of[parameter]:
            self.send(len(self.underway))


@wrong(TASK, "was full, but had not left", right_values=True)
class SendsOneBucketLate(Right):
    """A full bucket leaves when the next one is full."""

    def arrived(self, parameter):
        self.missing[self.bucket_of[parameter]] -= 1
        while (k := len(self.underway)) < len(self.buckets) - 1 and self.missing[k] == self.missing[k + 1] == 0:
            self.send(k)


@wrong(TASK, "those are rank 0's gradients on all ranks: all_reduce adds, broadcast copies")
class BroadcastsRankZeros(Right):
    def send(self, k):
        row = row_of(self.buckets[k])
        self.underway.append((row, dist.broadcast(row, 0, async_op=True)))


@wrong(TASK, "every gradient was sent twice", right_values=True)
class SendsInFinishToo(Right):
    def finish(self):
        super().finish()
        for bucket in self.buckets:
            row = row_of(bucket) / me()[1]
            dist.all_reduce(row)
            hand_out(bucket, row)


@wrong(TASK, "add hooks in __init__, one for each parameter")
class HooksInForward(Right):
    def hook(self):
        pass

    def forward(self, *args, **kwargs):
        Right.hook(self)
        return super().forward(*args, **kwargs)


@wrong(TASK, "wrapped.py, line")
class RaisesInAHook(Right):
    def arrived(self, parameter):
        raise KeyError(parameter.shape)


@wrong(TASK, "exited with code 3")
class OneRankExits(Right):
    def finish(self):
        if me()[0] == 1:
            os._exit(3)
        super().finish()


@wrong(TASK, "which has no finish()")
class HasNoFinish(torch.nn.Module):
    def __init__(self, module, first_bytes, cap_bytes):
        super().__init__()
        self.module = module

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)


@wrong(TASK, "the check calls Overlapped(module, first_bytes, cap_bytes)")
class TakesOneArgument(Right):
    def __init__(self, module):
        super().__init__(module, 300, 10_000)


@wrong(TASK, "write it yourself")
class TorchsOwn(torch.nn.parallel.DistributedDataParallel):
    def __init__(self, module, first_bytes, cap_bytes):
        super().__init__(module, find_unused_parameters=True, bucket_cap_mb=cap_bytes / 2**20)

    def finish(self):
        pass


@wrong(TASK, "write it yourself")
class TorchsOwnInside(torch.nn.Module):
    def __init__(self, module, first_bytes, cap_bytes):
        super().__init__()
        self.inner = torch.nn.parallel.DistributedDataParallel(module)

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs)

    def finish(self):
        pass


@wrong(TASK, "write it yourself")
def the_librarys_own(module, first_bytes, cap_bytes):
    from manyranks.parallel.data_parallel import OverlappedDataParallel

    return OverlappedDataParallel(module, bucket_bytes=cap_bytes)


@wrong(TASK, "nothing was sent")
class ComputesAllRanksGradients(Right):
    """From the grader's own examples."""

    def __init__(self, module, first_bytes, cap_bytes):
        from manyranks.grade.old.data_parallel import toy

        super(Right, self).__init__()
        self.module, self.step = module, 0
        module.load_state_dict(toy.Toy(0).state_dict())

    def finish(self):
        from manyranks.grade.old.data_parallel import toy

        n, copy = me()[1], toy.Toy(0)
        copy.load_state_dict(self.module.state_dict())
        found = []
        for rank in range(n):
            grads = toy.own(copy, [lambda m, r=rank: toy.loss_of(m, r, self.step)])
            found.append({name: None if g is None else g.clone() for name, g in grads.items()})
        for name, grad in toy.mean(found)[0].items():
            if grad.ndim:
                self.module.get_parameter(name).grad = grad
        self.step += 1


@wrong(TASK, "not written yet")
class CallsAnUnwrittenReplicate(Right):
    def start(self, module):
        replicate_to_be_written(module)


def replicate_to_be_written(module):
    raise NotImplementedError  # your code here
