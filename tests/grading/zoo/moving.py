"""Wrong answers to the tasks of 01_collectives that only move data: broadcast, all-gather, all-to-all."""

import torch
import torch.distributed as dist

from tests.grading.zoo.wrong import Wrong, exchange, gather_ring, keeper, me, placed, sum_of_whole_tensors

ZOO: list[Wrong] = []
wrong = keeper(ZOO)


# 1. Broadcast by a tree


def tree(out, root):
    (rank, n), distance = me(), 1
    while distance < n:
        place = (rank - root) % n
        if place < distance and place + distance < n:
            dist.send(out, (rank + distance) % n)
        elif distance <= place < 2 * distance:
            dist.recv(out, (rank - distance) % n)
        distance *= 2
    return out


@wrong("tree_broadcast", "the other ranks still have their own x")
def broadcast_nothing(x, root):
    return x.clone()


@wrong("tree_broadcast", "not the root alone", right_values=True)
def broadcast_by_the_root_alone(x, root):
    (rank, n), out = me(), x.clone()
    for other in range(n):
        if other != root and rank in (root, other):
            _ = dist.send(out, other) if rank == root else dist.recv(out, root)
    return out


@wrong("tree_broadcast", "that is rank 0's x: the root may be another rank")
def broadcast_from_rank_0(x, root):
    return tree(x.clone(), 0)


@wrong("tree_broadcast", "work on a copy", right_values=True)
def broadcast_in_place(x, root):
    return tree(x, root)


@wrong("tree_broadcast", "in round k each of the", right_values=True)
def broadcast_down_a_chain(x, root):
    (rank, n), out = me(), x.clone()
    place = (rank - root) % n
    if place > 0:
        dist.recv(out, (rank - 1) % n)
    if place < n - 1:
        dist.send(out, (rank + 1) % n)
    return out


@wrong("tree_broadcast", "rank 0 called broadcast")
def broadcast_by_the_backend(x, root):
    out = x.clone()
    dist.broadcast(out, root)
    return out


@wrong("tree_broadcast", "waits in recv")
def broadcast_where_all_receive_first(x, root):
    (rank, n), out = me(), x.clone()
    dist.recv(out, (rank - 1) % n)
    dist.send(out, (rank + 1) % n)
    return out


@wrong("tree_broadcast", "right on 2 ranks only")
def broadcast_to_one_rank(x, root):
    (rank, n), out = me(), x.clone()
    if rank == root:
        dist.send(out, (root + 1) % n)
    elif rank == (root + 1) % n:
        dist.recv(out, root)
    return out


# 2. All-gather by a ring


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
        coming = torch.empty(sizes[(rank - step - 1) % n], dtype=shard.dtype)
        exchange(kept[-1], (rank + 1) % n, coming, (rank - 1) % n)
        kept.append(coming)
    return kept


@wrong("ring_all_gather", "in the order of their arrival")
def gather_in_the_order_of_arrival(shard, elements):
    return torch.cat(shards_as_they_come(shard, elements))


@wrong("ring_all_gather", "each chunk is one place off")
def gather_one_place_off(shard, elements):
    (rank, n), kept = me(), shards_as_they_come(shard, elements)
    return torch.cat([kept[(rank - place + 1) % n] for place in range(n)])


@wrong("ring_all_gather", "that is the wrong neighbour", right_values=True)
def gather_to_the_wrong_neighbour(shard, elements):
    whole = placed(shard, elements)
    gather_ring(whole.tensor_split(me()[1]), back=True)
    return whole


@wrong("ring_all_gather", "waits in send")
def gather_where_all_send_first(shard, elements):
    (rank, n), whole = me(), placed(shard, elements)
    chunks = whole.tensor_split(n)
    for step in range(n - 1):
        dist.send(chunks[(rank - step) % n], (rank + 1) % n)
        dist.recv(chunks[(rank - step - 1) % n], (rank - 1) % n)
    return whole


@wrong("ring_all_gather", "rank 0 called all_gather")
def gather_by_the_backend(shard, elements):
    whole = placed(shard, elements)
    padded = [torch.empty(elements // me()[1] + 1, dtype=shard.dtype) for _ in range(me()[1])]
    own = torch.zeros_like(padded[0])
    own[: len(shard)] = shard
    dist.all_gather(padded, own)
    return torch.cat([p[: len(c)] for p, c in zip(padded, whole.tensor_split(me()[1]), strict=True)])


@wrong("ring_all_gather", "rank r sends to rank r + 1 only", right_values=True)
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
    exchange(shard, (rank + 1) % n, whole.tensor_split(n)[(rank - 1) % n], (rank - 1) % n)
    return whole


# 5. All-to-all, pair by pair


def received(x, place=lambda rank, k, n: (rank - k) % n, own=True):
    """What a rank gets, chunk by chunk. place: where that of step k goes; own: whether its own is kept."""
    (rank, n), chunks = me(), x.tensor_split(me()[1])
    out = [torch.zeros_like(chunks[rank]) for _ in range(n)]
    out[place(rank, 0, n)] = chunks[rank].clone() if own else out[rank]
    for k in range(1, n):
        to, source = (rank + k) % n, (rank - k) % n
        exchange(chunks[to], to, out[place(rank, k, n)], source)
    return torch.cat(out)


@wrong("pairwise_all_to_all", "that is the rank's own x: nothing was exchanged")
def swap_nothing(x):
    return x.clone()


@wrong("pairwise_all_to_all", "in the order of their arrival")
def swap_in_the_order_of_arrival(x):
    return received(x, place=lambda rank, k, n: k)


@wrong("pairwise_all_to_all", "the chunks stand in reverse order")
def swap_in_reverse_order(x):
    return received(x, place=lambda rank, k, n: n - 1 - (rank - k) % n)


@wrong("pairwise_all_to_all", "the rank's own chunk is missing")
def swap_without_its_own(x):
    return received(x, own=False)


@wrong("pairwise_all_to_all", "that is every rank's own chunk, an all-gather")
def swap_own_chunk_with_all(x):
    (rank, n), chunks = me(), x.tensor_split(me()[1])
    out = [chunk.clone() for chunk in chunks]
    for k in range(1, n):
        exchange(chunks[rank], (rank + k) % n, out[(rank - k) % n], (rank - k) % n)
    return torch.cat(out)


@wrong("pairwise_all_to_all", "every message is the whole tensor", right_values=True)
def swap_whole_tensors(x):
    (rank, n), out = me(), [x.tensor_split(me()[1])[me()[0]]] * me()[1]
    for k in range(1, n):
        exchange(x, (rank + k) % n, coming := torch.empty_like(x), (rank - k) % n)
        out[(rank - k) % n] = coming.tensor_split(n)[rank]
    return torch.cat(out)


@wrong("pairwise_all_to_all", "each chunk goes straight to the rank it is meant for", right_values=True)
def swap_round_a_ring(x):
    (rank, n), passing = me(), x.clone()
    out = [x.tensor_split(n)[rank]] * n
    for k in range(1, n):
        coming = torch.empty_like(x)
        exchange(passing, (rank + 1) % n, coming, (rank - 1) % n)
        passing, out[(rank - k) % n] = coming, coming.tensor_split(n)[rank]
    return torch.cat(out)


@wrong("pairwise_all_to_all", "rank 0's input has changed", right_values=True)
def swap_and_clear_the_input(x):
    out = received(x)
    x.zero_()
    return out


@wrong("pairwise_all_to_all", "waits in send")
def swap_where_all_send_first(x):
    (rank, n), chunks = me(), x.tensor_split(me()[1])
    out = [torch.empty_like(chunks[rank]) for _ in range(n)]
    for k in range(1, n):
        dist.send(chunks[(rank + k) % n], (rank + k) % n)
        dist.recv(out[(rank - k) % n], (rank - k) % n)
    return torch.cat(out)


@wrong("pairwise_all_to_all", "right on 2 ranks only")
def swap_with_one_rank(x):
    (rank, n), chunks = me(), x.tensor_split(me()[1])
    out = [chunks[rank].clone() for _ in range(n)]
    exchange(chunks[(rank + 1) % n], (rank + 1) % n, out[(rank - 1) % n], (rank - 1) % n)
    return torch.cat(out)


@wrong("pairwise_all_to_all", "rank 0 called all_to_all")
def swap_by_the_backend(x):
    (rank, n), chunks = me(), x.tensor_split(me()[1])
    out = torch.empty(n * len(chunks[rank]), dtype=x.dtype)
    dist.all_to_all_single(out, x, [len(chunks[rank])] * n, [len(c) for c in chunks])
    return out
