"""What the zoo of data parallelism is made of: the right answers, in parts that wrong ones leave out or replace."""

from contextlib import contextmanager

import torch
import torch.distributed as dist


def replicate(model):
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            dist.broadcast(tensor, src=0)


def cut(parameters, first_bytes, cap_bytes):
    buckets, size = [[]], 0
    for parameter in reversed(parameters):
        if parameter.requires_grad:
            buckets[-1].append(parameter)
            size += parameter.nbytes
            if size >= (first_bytes if len(buckets) == 1 else cap_bytes):
                buckets.append([])
                size = 0
    return [bucket for bucket in buckets if bucket]


def learning(model):
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def fill(parameters):
    """No gradient is None."""
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


def total_of(examples):
    total = torch.tensor([examples], dtype=torch.float64)
    dist.all_reduce(total)
    return total


def row_of(bucket):
    fill(bucket)
    return torch.cat([parameter.grad.flatten() for parameter in bucket])


def hand_out(bucket, row):
    parts = row.split([parameter.numel() for parameter in bucket])
    for parameter, part in zip(bucket, parts, strict=True):
        parameter.grad.copy_(part.view_as(parameter))


class Right(torch.nn.Module):
    """A right answer to the tasks Overlapped and no_sync; each wrong one changes one method."""

    def __init__(self, module, first_bytes, cap_bytes):
        super().__init__()
        self.module = module
        self.start(module)
        self.buckets = self.cut(list(module.parameters()), first_bytes, cap_bytes)
        self.bucket_of = {p: k for k, bucket in enumerate(self.buckets) for p in bucket}
        self.syncs = True
        self.reset()
        self.hook()

    def start(self, module):
        replicate(module)

    def cut(self, parameters, first_bytes, cap_bytes):
        return cut(parameters, first_bytes, cap_bytes)

    def hook(self):
        for parameter in self.bucket_of:
            parameter.register_post_accumulate_grad_hook(self.arrived)

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def finish(self):
        while len(self.underway) < len(self.buckets):
            self.send(len(self.underway))
        self.collect()
        self.reset()

    def collect(self):
        for bucket, (row, work) in zip(self.buckets, self.underway, strict=True):
            work.wait()
            hand_out(bucket, row)

    def reset(self):
        self.missing = [len(bucket) for bucket in self.buckets]
        self.underway = []

    def arrived(self, parameter):
        if not self.syncs:
            return
        self.missing[self.bucket_of[parameter]] -= 1
        while (k := len(self.underway)) < len(self.buckets) and self.missing[k] == 0:
            self.send(k)

    def send(self, k):
        row = self.row(k)
        self.underway.append((row, dist.all_reduce(row, async_op=True)))

    def row(self, k):
        return row_of(self.buckets[k]) / dist.get_world_size()

    @contextmanager
    def no_sync(self):
        self.syncs = False
        try:
            yield
        finally:
            self.syncs = True
