"""Wrong answers to the second task of 01_collectives: all-gather by a ring."""

import torch
import torch.distributed as dist

from tests.grading.zoo.wrong import Wrong, exchange, gather_ring, keeper, me, placed, sum_of_whole_tensors

ZOO: list[Wrong] = []
wrong = keeper(ZOO)


@wrong("ring_all_gather", "that is the rank's own shard")
def gather_nothing(shard, elements):
    return shard.clone()


@wrong("ring_all_gather", "no other one was received")
def gather_own_shard(shard, elements):
    return placed(shard, elements)


@wrong("ring_all_gather", "the last shard is missing: a ring of N ranks has N − 1 steps")
def gather_one_step_too_few(shard, elements):
    whole = placed(shard, elements)
    gather_ring(whole.tensor_split(me()[1]), steps=lambda n: n - 2)
    return whole


@wrong("ring_all_gather", "3 messages are needed, not 4: too many steps", right_values=True)
def gather_one_step_too_many(shard, elements):
    whole = placed(shard, elements)
    gather_ring(whole.tensor_split(me()[1]), steps=lambda n: n)
    return whole


def shards_as_they_come(shard, elements):
    (rank, n), kept = me(), [shard]
    sizes = [len(chunk) for chunk in torch.empty(elements).tensor_split(n)]
    for step in range(n - 1):
        coming = torch.empty(sizes[(rank + step + 1) % n], dtype=shard.dtype)
        exchange(kept[-1], (rank - 1) % n, coming, (rank + 1) % n)
        kept.append(coming)
    return kept


@wrong("ring_all_gather", "in the order of their arrival")
def gather_in_the_order_of_arrival(shard, elements):
    return torch.cat(shards_as_they_come(shard, elements))


@wrong("ring_all_gather", "each chunk is one place off")
def gather_one_place_off(shard, elements):
    (rank, n), kept = me(), shards_as_they_come(shard, elements)
    return torch.cat([kept[(place - rank + 1) % n] for place in range(n)])


@wrong("ring_all_gather", "this ring runs upwards: rank 0 sent to rank 1; here rank r sends to r − 1", right_values=True)
def gather_upwards_as_in_the_chapter(shard, elements):
    whole = placed(shard, elements)
    gather_ring(whole.tensor_split(me()[1]), up=True)
    return whole


@wrong("ring_all_gather", "that is the wrong neighbour: in this ring", right_values=True)
def gather_round_a_ring_of_other_neighbours(shard, elements):
    (rank, n), whole = me(), placed(shard, elements)
    order = sorted(range(n), key=lambda r: (r % 2, r))
    place = order.index(rank)
    for step in range(n - 1):
        mine, coming = (whole.tensor_split(n)[order[(place - k) % n]] for k in (step, step + 1))
        exchange(mine, order[(place + 1) % n], coming, order[(place - 1) % n])
    return whole


@wrong("ring_all_gather", "do both mean the same chunk in this step?")
def gather_its_own_shard_in_every_step(shard, elements):
    (rank, n), whole = me(), placed(shard, elements)
    for step in range(n - 1):
        exchange(shard, (rank - 1) % n, whole.tensor_split(n)[(rank + step + 1) % n], (rank + 1) % n)
    return whole


@wrong("ring_all_gather", "right shape, wrong dtype: take dtype=shard.dtype")
def gather_into_the_default_dtype(shard, elements):
    whole = torch.empty(elements)
    chunks = whole.tensor_split(me()[1])
    chunks[me()[0]].copy_(shard)
    gather_ring(chunks)
    return whole


@wrong("ring_all_gather", "the rank's own shard is missing")
def gather_without_its_own_shard(shard, elements):
    whole = placed(shard, elements)
    gather_ring(whole.tensor_split(me()[1]))
    whole.tensor_split(me()[1])[me()[0]].fill_(-1)
    return whole


@wrong("ring_all_gather", "cut with torch.tensor_split")
def gather_into_chunks_of_torch_chunk(shard, elements):
    whole = torch.empty(elements, dtype=shard.dtype)
    chunks = whole.chunk(me()[1])
    chunks[me()[0]].copy_(shard)
    gather_ring(chunks)
    return whole


@wrong("ring_all_gather", "isend and irecv return at once")
def gather_that_does_not_wait(shard, elements):
    (rank, n), whole = me(), placed(shard, elements)
    chunks = whole.tensor_split(n)
    for step in range(n - 1):
        dist.isend(chunks[(rank + step) % n], (rank - 1) % n)
        dist.irecv(chunks[(rank + step + 1) % n], (rank + 1) % n)
    return whole


@wrong("ring_all_gather", "rank 0 did not wait for 3 of its messages", right_values=True)
def gather_that_waits_only_for_what_comes(shard, elements):
    (rank, n), whole = me(), placed(shard, elements)
    chunks = whole.tensor_split(n)
    for step in range(n - 1):
        dist.isend(chunks[(rank + step) % n], (rank - 1) % n)
        dist.irecv(chunks[(rank + step + 1) % n], (rank + 1) % n).wait()
    return whole


@wrong("ring_all_gather", "waits in send")
def gather_where_all_send_first(shard, elements):
    (rank, n), whole = me(), placed(shard, elements)
    chunks = whole.tensor_split(n)
    for step in range(n - 1):
        dist.send(chunks[(rank + step) % n], (rank - 1) % n)
        dist.recv(chunks[(rank + step + 1) % n], (rank + 1) % n)
    return whole


@wrong("ring_all_gather", "rank 0 called all_gather")
def gather_by_the_backend(shard, elements):
    whole = placed(shard, elements)
    padded = [torch.empty(elements // me()[1] + 1, dtype=shard.dtype) for _ in range(me()[1])]
    own = torch.zeros_like(padded[0])
    own[: len(shard)] = shard
    dist.all_gather(padded, own)
    return torch.cat([p[: len(c)] for p, c in zip(padded, whole.tensor_split(me()[1]), strict=True)])


@wrong("ring_all_gather", "rank r sends to rank r − 1 only", right_values=True)
def gather_by_everyone_to_everyone(shard, elements):
    (rank, n), whole = me(), placed(shard, elements)
    for k in range(1, n):
        exchange(shard, (rank + k) % n, whole.tensor_split(n)[(rank - k) % n], (rank - k) % n)
    return whole


@wrong("ring_all_gather", "every message is the whole tensor", right_values=True)
def gather_with_whole_tensors(shard, elements):
    return sum_of_whole_tensors(placed(shard, elements))


@wrong("ring_all_gather", "rank 0's input has changed", right_values=True)
def gather_and_clear_the_input(shard, elements):
    whole = placed(shard, elements)
    gather_ring(whole.tensor_split(me()[1]))
    shard.zero_()
    return whole


@wrong("ring_all_gather", "right on 2 ranks only")
def gather_that_passes_nothing_on(shard, elements):
    (rank, n), whole = me(), placed(shard, elements)
    exchange(shard, (rank - 1) % n, whole.tensor_split(n)[(rank + 1) % n], (rank + 1) % n)
    return whole
