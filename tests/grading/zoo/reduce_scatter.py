"""Wrong answers to the third task of 01_collectives: reduce-scatter by a ring."""

import torch
import torch.distributed as dist

from tests.grading.zoo.wrong import Wrong, exchange, keeper, me, reduce_ring, sum_of_whole_tensors

ZOO: list[Wrong] = []
wrong = keeper(ZOO)


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


@wrong("ring_reduce_scatter", "rank 0 sent 3 MB; this ring sends 750 kB", right_values=True)
def scatter_whole_tensors(x):
    return sum_of_whole_tensors(x).tensor_split(me()[1])[me()[0]].clone()


@wrong("ring_reduce_scatter", "that is the whole sum")
def scatter_that_returns_the_sum(x):
    return sum_of_whole_tensors(x)


@wrong("ring_reduce_scatter", "this ring runs upwards: rank 0 sent to rank 1; here rank r sends to r − 1", right_values=True)
def scatter_upwards_as_in_the_chapter(x):
    return scatter(x, up=True)


@wrong("ring_reduce_scatter", "each chunk is one place off")
def scatter_one_chunk_off(x):
    chunks = x.clone().tensor_split(me()[1])
    reduce_ring(chunks, first=0)
    return chunks[(me()[0] - 1) % me()[1]].clone()


@wrong("ring_reduce_scatter", "one term is missing")
def scatter_one_step_too_few(x):
    (rank, n), chunks = me(), x.clone().tensor_split(me()[1])
    for step in range(1, n - 1):
        coming = torch.empty_like(chunks[(rank + step + 2) % n])
        exchange(chunks[(rank + step + 1) % n], (rank - 1) % n, coming, (rank + 1) % n)
        chunks[(rank + step + 2) % n].add_(coming)
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
        dist.send(chunks[(rank + step + 1) % n], (rank - 1) % n)
        dist.recv(coming := torch.empty_like(chunks[(rank + step + 2) % n]), (rank + 1) % n)
        chunks[(rank + step + 2) % n].add_(coming)
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


@wrong("ring_reduce_scatter", "do both mean the same chunk in this step?")
def scatter_that_sends_another_chunk_than_it_receives(x):
    (rank, n), chunks = me(), x.clone().tensor_split(me()[1])
    for step in range(n - 1):
        coming = torch.empty_like(chunks[(rank + step + 2) % n])
        exchange(chunks[(rank + step) % n], (rank - 1) % n, coming, (rank + 1) % n)
        chunks[(rank + step + 2) % n].add_(coming)
    return chunks[rank].clone()


@wrong("ring_reduce_scatter", "rank 1 made room for 7 of float32 (28 bytes); hint: give the room the dtype of what comes")
def scatter_into_room_of_another_dtype(x):
    total, passing = x.clone(), x
    for _ in range(me()[1] - 1):
        coming = torch.empty(len(x))
        exchange(passing, (me()[0] - 1) % me()[1], coming, (me()[0] + 1) % me()[1])
        total, passing = total + coming, coming
    return total.tensor_split(me()[1])[me()[0]].clone()


@wrong("ring_reduce_scatter", "the rank's own terms are missing")
def scatter_without_its_own_terms(x):
    (rank, n), out = me(), scatter(x)
    return out - x.tensor_split(n)[rank]


@wrong("ring_reduce_scatter", "cut with torch.tensor_split")
def scatter_chunks_of_torch_chunk(x):
    chunks = x.clone().chunk(me()[1])
    reduce_ring(chunks)
    return chunks[me()[0]].clone()


@wrong("ring_reduce_scatter", "isend and irecv return at once")
def scatter_that_does_not_wait(x):
    (rank, n), chunks = me(), x.clone().tensor_split(me()[1])
    for step in range(n - 1):
        coming = torch.empty_like(chunks[(rank + step + 2) % n])
        dist.isend(chunks[(rank + step + 1) % n], (rank - 1) % n)
        dist.irecv(coming, (rank + 1) % n)
        chunks[(rank + step + 2) % n].add_(coming)
    return chunks[rank].clone()
