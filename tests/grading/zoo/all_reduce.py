"""Wrong answers to the fourth task of 01_collectives: all-reduce by two rings."""

import torch
import torch.distributed as dist

from tests.grading.zoo.wrong import Wrong, gather_ring, keeper, me, placed, reduce_ring, sum_of_whole_tensors

ZOO: list[Wrong] = []
wrong = keeper(ZOO)


@wrong("ring_all_reduce", "that is the rank's own x: nothing was added")
def reduce_nothing(x):
    return x.clone()


@wrong("ring_all_reduce", "that is the rank's own x / N")
def reduce_own_tensor(x):
    return x / me()[1]


def two_rings(x, up=False):
    out = x.clone()
    chunks = out.tensor_split(me()[1])
    reduce_ring(chunks, up=up)
    gather_ring(chunks, up=up)
    return out


@wrong("ring_all_reduce", "that is the sum: the mean is asked for, so divide by N")
def reduce_to_the_sum(x):
    return two_rings(x)


@wrong("ring_all_reduce", "that is divided by N twice")
def reduce_and_divide_twice(x):
    return two_rings(x / me()[1]) / me()[1]


@wrong("ring_all_reduce", "every message is the whole tensor", right_values=True)
def reduce_whole_tensors(x):
    return sum_of_whole_tensors(x) / me()[1]


@wrong("ring_all_reduce", "the all-gather is missing")
def reduce_without_the_gather(x):
    chunks = x.clone().tensor_split(me()[1])
    reduce_ring(chunks)
    return placed(chunks[me()[0]] / me()[1], len(x))


@wrong("ring_all_reduce", "this ring runs upwards", right_values=True)
def reduce_upwards_as_in_the_chapter(x):
    return two_rings(x, up=True) / me()[1]


@wrong("ring_all_reduce", "rank 0's input has changed", right_values=True)
def reduce_in_place(x):
    x.copy_(two_rings(x) / me()[1])
    return x.clone()


@wrong("ring_all_reduce", "rank 0 called all_reduce")
def reduce_by_the_backend(x):
    out = x.clone()
    dist.all_reduce(out)
    return out / me()[1]


@wrong("ring_all_reduce", "right on 2 ranks only")
def reduce_and_divide_by_two(x):
    return two_rings(x) / 2


@wrong("ring_all_reduce", "waits in recv")
def reduce_where_all_receive_first(x):
    (rank, n), out = me(), x.clone()
    for _ in range(n - 1):
        dist.recv(coming := torch.empty_like(x), (rank + 1) % n)
        dist.send(out, (rank - 1) % n)
        out += coming
    return out / n


@wrong("ring_all_reduce", "divide with /, not with //")
def reduce_and_round_down(x):
    return two_rings(x) // me()[1]


@wrong("ring_all_reduce", "the rank's own chunk is missing")
def reduce_and_forget_its_own_chunk(x):
    out = two_rings(x) / me()[1]
    out.tensor_split(me()[1])[me()[0]].zero_()
    return out


def ring_reduce_scatter(x):
    raise NotImplementedError  # your code here


@wrong("ring_all_reduce", "ring_reduce_scatter is not written yet")
def reduce_with_a_reduce_scatter_to_be_written(x):
    return ring_reduce_scatter(x) / me()[1]
