"""Wrong answers to the last task of 01_collectives: all-to-all, pair by pair."""

import torch
import torch.distributed as dist

from tests.grading.zoo.wrong import Wrong, exchange, keeper, me

ZOO: list[Wrong] = []
wrong = keeper(ZOO)


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


@wrong("pairwise_all_to_all", "receives from itself; hint: copy instead")
def swap_with_itself_too(x):
    (rank, n), chunks = me(), x.tensor_split(me()[1])
    out = [torch.empty_like(chunks[rank]) for _ in range(n)]
    for k in range(n):
        dist.irecv(out[(rank - k) % n], (rank - k) % n).wait()
    return torch.cat(out)


@wrong("pairwise_all_to_all", "cut with torch.tensor_split")
def swap_chunks_of_torch_chunk(x):
    (rank, n), chunks = me(), x.chunk(me()[1])
    out = [chunks[rank].clone() for _ in range(n)]
    for k in range(1, n):
        exchange(chunks[(rank + k) % n], (rank + k) % n, out[(rank - k) % n], (rank - k) % n)
    return torch.cat(out)


@wrong("pairwise_all_to_all", "hint: every chunk that a rank receives is as long as its own chunk, chunk r: make the room like")
def swap_with_room_like_the_senders_chunk(x):
    (rank, n), chunks = me(), x.tensor_split(me()[1])
    out = [torch.empty_like(chunks[source]) for source in range(n)]
    out[rank] = chunks[rank].clone()
    for k in range(1, n):
        exchange(chunks[(rank + k) % n], (rank + k) % n, out[(rank - k) % n], (rank - k) % n)
    return torch.cat(out)
