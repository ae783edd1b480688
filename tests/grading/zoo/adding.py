"""Wrong answers to the tasks of 01_collectives that add: reduce-scatter, all-reduce."""

import torch
import torch.distributed as dist

from tests.grading.zoo.wrong import Wrong, exchange, gather_ring, keeper, me, placed, reduce_ring, sum_of_whole_tensors

ZOO: list[Wrong] = []
wrong = keeper(ZOO)


# 3. Reduce-scatter by a ring


@wrong("ring_reduce_scatter", "return chunk r of the sum")
def scatter_nothing(x):
    return x


@wrong("ring_reduce_scatter", "nothing was added to it")
def scatter_own_chunk(x):
    return x.tensor_split(me()[1])[me()[0]].clone()


def scatter(x, **wrong):
    chunks = x.clone().tensor_split(me()[1])
    reduce_ring(chunks, **wrong)
    return chunks[me()[0]].clone()


@wrong("ring_reduce_scatter", "that is the mean: a reduce-scatter here sums")
def scatter_the_mean(x):
    out = scatter(x)
    return out / me()[1] if out.is_floating_point() else out


@wrong("ring_reduce_scatter", "rank 0 sent 3 MB; a ring sends 750 kB", right_values=True)
def scatter_whole_tensors(x):
    return sum_of_whole_tensors(x).tensor_split(me()[1])[me()[0]].clone()


@wrong("ring_reduce_scatter", "that is the whole sum")
def scatter_that_returns_the_sum(x):
    return sum_of_whole_tensors(x)


@wrong("ring_reduce_scatter", "that is the wrong neighbour", right_values=True)
def scatter_to_the_wrong_neighbour(x):
    return scatter(x, back=True)


@wrong("ring_reduce_scatter", "each chunk is one place off")
def scatter_one_chunk_off(x):
    chunks = x.clone().tensor_split(me()[1])
    reduce_ring(chunks, first=0)
    return chunks[(me()[0] + 1) % me()[1]].clone()


@wrong("ring_reduce_scatter", "one term is missing")
def scatter_one_step_too_few(x):
    (rank, n), chunks = me(), x.clone().tensor_split(me()[1])
    for step in range(1, n - 1):
        coming = torch.empty_like(chunks[(rank - step - 2) % n])
        exchange(chunks[(rank - step - 1) % n], (rank + 1) % n, coming, (rank - 1) % n)
        chunks[(rank - step - 2) % n].add_(coming)
    return chunks[rank].clone()


@wrong("ring_reduce_scatter", "what comes must be added")
def scatter_that_replaces(x):
    return scatter(x, adds=False)


@wrong("ring_reduce_scatter", "chunks of torch.tensor_split are views of the input", right_values=True)
def scatter_in_place(x):
    chunks = x.tensor_split(me()[1])
    reduce_ring(chunks)
    return chunks[me()[0]]


@wrong("ring_reduce_scatter", "waits in send")
def scatter_where_all_send_first(x):
    (rank, n), chunks = me(), x.clone().tensor_split(me()[1])
    for step in range(n - 1):
        dist.send(chunks[(rank - step - 1) % n], (rank + 1) % n)
        dist.recv(coming := torch.empty_like(chunks[(rank - step - 2) % n]), (rank - 1) % n)
        chunks[(rank - step - 2) % n].add_(coming)
    return chunks[rank].clone()


@wrong("ring_reduce_scatter", "right on 2 ranks only")
def scatter_for_two(x):
    return scatter(x, steps=lambda n: 1)


@wrong("ring_reduce_scatter", "rank 0 called all_reduce")
def scatter_by_all_reduce(x):
    total = x.clone()
    dist.all_reduce(total)
    return total.tensor_split(me()[1])[me()[0]].clone()


@wrong("ring_reduce_scatter", "rank 0 returned a tuple")
def scatter_that_returns_all_chunks(x):
    chunks = x.clone().tensor_split(me()[1])
    reduce_ring(chunks)
    return chunks


# 4. All-reduce by two rings


@wrong("ring_all_reduce", "that is the rank's own x: nothing was added")
def reduce_nothing(x):
    return x.clone()


@wrong("ring_all_reduce", "that is the rank's own x / N")
def reduce_own_tensor(x):
    return x / me()[1]


def two_rings(x, back=False):
    out = x.clone()
    chunks = out.tensor_split(me()[1])
    reduce_ring(chunks, back=back)
    gather_ring(chunks, back=back)
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
    return placed(scatter(x) / me()[1], len(x))


@wrong("ring_all_reduce", "that is the wrong neighbour", right_values=True)
def reduce_to_the_wrong_neighbour(x):
    return two_rings(x, back=True) / me()[1]


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
        dist.recv(coming := torch.empty_like(x), (rank - 1) % n)
        dist.send(out, (rank + 1) % n)
        out += coming
    return out / n
