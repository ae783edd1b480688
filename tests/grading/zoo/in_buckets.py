"""Wrong answers to the fourth task of 02_data_parallel: one all-reduce a bucket."""

import torch
import torch.distributed as dist

from tests.grading.zoo.gradients import fill, hand_out, row_of
from tests.grading.zoo.wrong import Wrong, keeper, me

ZOO: list[Wrong] = []
wrong = keeper(ZOO)
TASK = "average_in_buckets"


@wrong(TASK, "nothing was sent")
def in_buckets_nothing(buckets):
    pass


@wrong(TASK, "that is the sum: the mean")
def in_buckets_the_sum(buckets):
    for bucket in buckets:
        row = row_of(bucket)
        dist.all_reduce(row)
        hand_out(bucket, row)


@wrong(TASK, "that is divided by N twice")
def in_buckets_divided_twice(buckets):
    for bucket in buckets:
        row = row_of(bucket) / me()[1]
        dist.all_reduce(row)
        hand_out(bucket, row / me()[1])


@wrong(TASK, "is something left out where a gradient is None?")
def in_buckets_skipping_none(buckets):
    for bucket in buckets:
        there = [parameter for parameter in bucket if parameter.grad is not None]
        if there:
            row = row_of(there) / me()[1]
            dist.all_reduce(row)
            hand_out(there, row)


@wrong(TASK, "put the zeros into parameter.grad first")
def in_buckets_leaving_none(buckets):
    for bucket in buckets:
        there = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
        row = torch.cat([grad.flatten() for grad in there]) / me()[1]
        dist.all_reduce(row)
        for parameter, part in zip(bucket, row.split([p.numel() for p in bucket]), strict=True):
            if parameter.grad is not None:
                parameter.grad.copy_(part.view_as(parameter))


@wrong(TASK, "one call a parameter", right_values=True)
def in_buckets_one_call_a_parameter(buckets):
    for bucket in buckets:
        fill(bucket)
        for parameter in bucket:
            parameter.grad /= me()[1]
            dist.all_reduce(parameter.grad)


@wrong(TASK, "one call for everything", right_values=True)
def in_buckets_one_call_for_all(buckets):
    everything = [parameter for bucket in buckets for parameter in bucket]
    row = row_of(everything) / me()[1]
    dist.all_reduce(row)
    hand_out(everything, row)


@wrong(TASK, "make the row of one bucket", right_values=True)
def in_buckets_all_rows_at_once(buckets):
    rows = [row_of(bucket) / me()[1] for bucket in buckets]
    for row in rows:
        dist.all_reduce(row)
    for bucket, row in zip(buckets, rows, strict=True):
        hand_out(bucket, row)


@wrong(TASK, "three rows of the largest bucket have 56.4 kB; hint: make the row of one bucket", right_values=True)
def in_buckets_all_under_way_at_once(buckets):
    rows = [row_of(bucket) / me()[1] for bucket in buckets]
    for work in [dist.all_reduce(row, async_op=True) for row in rows]:
        work.wait()
    for bucket, row in zip(buckets, rows, strict=True):
        hand_out(bucket, row)


@wrong(TASK, "no mean has been written into parameter.grad")
def in_buckets_not_written_back(buckets):
    for bucket in buckets:
        dist.all_reduce(row_of(bucket) / me()[1])


@wrong(TASK, "every parameter got the beginning of the row")
def in_buckets_the_first_part_for_all(buckets):
    for bucket in buckets:
        row = row_of(bucket) / me()[1]
        dist.all_reduce(row)
        for parameter in bucket:
            parameter.grad.copy_(row[: parameter.numel()].view_as(parameter))


@wrong(TASK, "async_op=True returns at once")
def in_buckets_and_wait_for_nothing(buckets):
    for bucket in buckets:
        row = row_of(bucket) / me()[1]
        dist.all_reduce(row, async_op=True)
        hand_out(bucket, row)


@wrong(TASK, "nearly right, as if rounded: float64 has to stay float64")
def in_buckets_in_float32(buckets):
    for bucket in buckets:
        row = row_of(bucket).float() / me()[1]
        dist.all_reduce(row)
        hand_out(bucket, row)


@wrong(TASK, "called all_gather", right_values=True)
def in_buckets_by_all_gather(buckets):
    for bucket in buckets:
        row = row_of(bucket)
        everyone = [torch.empty_like(row) for _ in range(me()[1])]
        dist.all_gather(everyone, row)
        hand_out(bucket, sum(everyone) / me()[1])


@wrong(TASK, "is something left out where a gradient is None?")
def in_buckets_skipping_an_unused_bucket(buckets):
    for bucket in buckets:
        if any(parameter.grad is not None for parameter in bucket):
            row = row_of(bucket) / me()[1]
            dist.all_reduce(row)
            hand_out(bucket, row)


@wrong(TASK, "the right buckets in the wrong order", right_values=True)
def in_buckets_last_bucket_first(buckets):
    for bucket in buckets[::-1]:
        row = row_of(bucket) / me()[1]
        dist.all_reduce(row)
        hand_out(bucket, row)


@wrong(TASK, "the others count as zeros, divide by N")
def in_buckets_the_mean_of_those_that_used_it(buckets):
    for bucket in buckets:
        used = torch.tensor([float(p.grad is not None) for p in bucket for _ in range(p.numel())], dtype=torch.float64)
        row = row_of(bucket)
        dist.all_reduce(row)
        dist.all_reduce(used)
        hand_out(bucket, row / used.clamp(min=1))


@wrong(TASK, "divide by the number of ranks, not of buckets")
def in_buckets_divided_by_the_buckets(buckets):
    for bucket in buckets:
        row = row_of(bucket) / len(buckets)
        dist.all_reduce(row)
        hand_out(bucket, row)


@wrong(TASK, "has a gradient of None there: make it zeros, and send it all the same")
def in_buckets_with_none_in_the_row(buckets):
    for bucket in buckets:
        row = torch.cat([parameter.grad.flatten() for parameter in bucket])
        dist.all_reduce(row)
        hand_out(bucket, row / me()[1])


@wrong(TASK, "has a gradient of None there: make it zeros, and send it all the same")
def in_buckets_joining_what_is_there(buckets):
    for bucket in buckets:
        row = torch.cat([parameter.grad.flatten() for parameter in bucket if parameter.grad is not None])
        dist.all_reduce(row)


@wrong(TASK, "object is not iterable; hint: in_buckets.py, line ")
def in_buckets_with_a_none_of_its_own(buckets):
    for bucket in buckets:
        for parameter in fill(bucket):
            dist.all_reduce(parameter.grad)


@wrong(TASK, "that is divided by N twice: ReduceOp.AVG divides, too")
def in_buckets_by_avg_and_divided(buckets):
    for bucket in buckets:
        row = row_of(bucket) / me()[1]
        dist.all_reduce(row, op=dist.ReduceOp.AVG)
        hand_out(bucket, row)


@wrong(
    TASK, "one call a parameter: put the gradients of a bucket into one tensor; right are the buckets that you were given", True
)
def in_buckets_each_parameter_by_avg(buckets):
    for bucket in buckets:
        fill(bucket)
        for parameter in bucket:
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)
