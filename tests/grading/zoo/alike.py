"""Right answers to 02_data_parallel in other forms than the solution's."""

import torch
import torch.distributed as dist

from tests.grading.zoo.gradients import Right, fill, hand_out, learning, row_of, total_of

AVG = dist.ReduceOp.AVG


def replicate_without_no_grad(model):
    for tensor in [*model.parameters(), *model.buffers()]:
        dist.broadcast(tensor, 0)


def replicate_into_data(model):
    for tensor in [*model.parameters(), *model.buffers()]:
        first = tensor.detach().clone()
        dist.broadcast(first, 0)
        tensor.data = first


def average_by_avg(model, examples):
    total = total_of(examples)
    fill(learning(model))
    for parameter in learning(model):
        parameter.grad *= examples * dist.get_world_size() / total
        dist.all_reduce(parameter.grad, op=AVG)


def average_by_avg_of_both(model, examples):
    mean = torch.tensor([examples], dtype=torch.float64)
    dist.all_reduce(mean, op=AVG)
    fill(learning(model))
    for parameter in learning(model):
        parameter.grad *= examples / mean
        dist.all_reduce(parameter.grad, op=AVG)


def in_buckets_by_avg(buckets):
    for bucket in buckets:
        row = row_of(bucket)
        dist.all_reduce(row, op=AVG)
        hand_out(bucket, row)


class OverlappedByAvg(Right):
    def send(self, k):
        row = row_of(self.buckets[k])
        self.underway.append((row, dist.all_reduce(row, op=AVG, async_op=True)))


class LeavesNoneWhereNoneIsUsed(Right):
    """What no rank has used has no gradient afterwards."""

    def collect(self):
        super().collect()
        for parameter in self.bucket_of:
            if not parameter.grad.any():
                parameter.grad = None


ANSWERS = [
    ("replicate", replicate_without_no_grad),
    ("replicate", replicate_into_data),
    ("average", average_by_avg),
    ("average", average_by_avg_of_both),
    ("average_in_buckets", in_buckets_by_avg),
    ("overlapped", OverlappedByAvg),
    ("no_sync", OverlappedByAvg),
    ("overlapped", LeavesNoneWhereNoneIsUsed),
    ("no_sync", LeavesNoneWhereNoneIsUsed),
]
