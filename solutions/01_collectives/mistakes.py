"""Answers to 01_collectives: what is right, and the mistakes that are made."""

import torch
import torch.distributed as dist

from manyranks.grade.answers import mistake, right, slip
from manyranks.parallel import collectives

# fmt: off

ALL = (2, 3, 4)  # ranks: some mistakes show on 2 only, others on 4 only

HINT_0 = "return a new tensor, and work on a copy: chunks of torch.tensor_split are views of the input"
HINT_1 = "each chunk is one place off: check which chunk rank r sends first and which it holds at the end"
HINT_2 = "this ring runs upward: rank 0 sent to rank 1; here rank r sends to r − 1"
HINT_3 = "cut with torch.tensor_split: torch.chunk and torch.split make other sizes where N does not divide E"
HINT_4 = "every message is the whole tensor: cut it with torch.tensor_split and send one chunk at a time"
HINT_5 = "write it yourself, with dist.send, recv, isend, irecv or batch_isend_irecv"

def me() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()

def exchange(outgoing, to, incoming, source):
    for message in [dist.isend(outgoing.contiguous(), to), dist.irecv(incoming, source)]:
        message.wait()

def reduce_ring(chunks, first=1, steps=None, up=False, adds=True):
    """A ring over chunks: what is right, with the knobs that learners turn the wrong way."""
    (rank, n), sign = me(), 1 if up else -1
    for step in range(n - 1 if steps is None else steps(n)):
        mine, target = chunks[(rank - sign * (step + first)) % n], chunks[(rank - sign * (step + first + 1)) % n]
        coming = torch.empty_like(target)
        exchange(mine, (rank + sign) % n, coming, (rank - sign) % n)
        target.copy_(target + coming if adds else coming)

def gather_ring(chunks, steps=None, up=False):
    reduce_ring(chunks, 0, steps, up, adds=False)

def sum_of_whole_tensors(x):
    (rank, n), total, passing = me(), x.clone(), x.clone()
    for _ in range(n - 1):
        coming = torch.empty_like(x)
        exchange(passing, (rank - 1) % n, coming, (rank + 1) % n)
        total, passing = total + coming, coming
    return total

def placed(shard, elements):
    whole = torch.zeros(elements, dtype=shard.dtype)
    whole.tensor_split(me()[1])[me()[0]].copy_(shard)
    return whole

@right("tree_broadcast")
def right_broadcast(x, root):
    return far_first(x.clone(), root)

@right("ring_all_gather")
def right_gather(shard, elements):
    whole = placed(shard, elements)
    gather_ring(whole.tensor_split(me()[1]))
    return whole

@right("ring_reduce_scatter")
def right_scatter(x):
    chunks = x.clone().tensor_split(me()[1])
    reduce_ring(chunks)
    return chunks[me()[0]].clone()

@right("ring_all_reduce")
def right_reduce(x):
    return two_rings(x) / me()[1]

@right("pairwise_all_to_all")
def right_swap(x):
    (rank, n), chunks = me(), x.tensor_split(me()[1])
    out = [chunks[rank].clone() for _ in range(n)]
    for k in range(1, n):
        to, source = (rank + k) % n, (rank - k) % n
        exchange(chunks[to], to, out[source], source)
    return torch.cat(out)

# mistakes: broadcast

def far_first(out, root, last=1, divisor=2, most=64):
    """The right tree, with the knobs that learners turn the wrong way."""
    rank, n = me()
    place = (rank - root) % n
    distance = min(most, 2 ** (n - 1).bit_length() // 2)
    while distance >= last:
        if place % (2 * distance) == 0 and place + distance < n:
            dist.send(out, (rank + distance) % n)
        elif place % (2 * distance) == distance:
            dist.recv(out, (rank - distance) % n)
        distance //= divisor
    return out

@mistake(
    "tree_broadcast",
    "this tree sends near first: here the root sends to the farthest place first, and distances halve",
    on=ALL,
    points=1.8,
)
def broadcast_near_first_as_in_the_chapter(x, root):
    (rank, n), distance, out = me(), 1, x.clone()
    while distance < n:
        place = (rank - root) % n
        if place < distance and place + distance < n:
            dist.send(out, (rank + distance) % n)
        elif distance <= place < 2 * distance:
            dist.recv(out, (rank - distance) % n)
        distance *= 2
    return out

slip("tree_broadcast", "broadcast_one_round_too_few", 0,
    "a round is missing: there are ⌈log₂ N⌉, and the last one has distance 1",
    lambda x, root: far_first(x.clone(), root, last=2), on=ALL)

slip("tree_broadcast", "broadcast_nothing", 0, "the other ranks still have their own x: each must return what it received",
    lambda x, root: x.clone(), on=ALL)

@mistake("tree_broadcast", "each rank that has the tensor passes it on, not the root alone", on=ALL, points=1.8)
def broadcast_by_the_root_alone(x, root):
    (rank, n), out = me(), x.clone()
    for other in range(n):
        if other != root and rank in (root, other):
            _ = dist.send(out, other) if rank == root else dist.recv(out, root)
    return out

slip("tree_broadcast", "broadcast_from_rank_0", 0, "that is rank 0's x: the root may be another rank",
    lambda x, root: far_first(x.clone(), 0), on=ALL)
slip("tree_broadcast", "broadcast_in_place", 2.7, HINT_0, lambda x, root: far_first(x, root), on=ALL)
slip("tree_broadcast", "broadcast_that_halves_n_as_it_is", 0.9,
    "a round is missing: round N up to a power of two before you halve it",
    lambda x, root: far_first(x.clone(), root, most=me()[1] // 2), on=(4, 5))

@mistake("tree_broadcast", says="dist.send and dist.recv take ranks, not places", on=(2,), points=0.0)
def broadcast_to_places(x, root):
    (rank, n), out = me(), x.clone()
    if (rank - root) % n == 0:
        dist.send(out, 1)
    else:
        dist.recv(out, 0)
    return out

@mistake("tree_broadcast", "", says="rank 0 called broadcast", on=ALL, points=0.0)
def broadcast_by_the_backend(x, root):
    out = x.clone()
    dist.broadcast(out, root)
    return out

# mistakes: all_gather

slip("ring_all_gather", "gather_nothing", 0, "that is the rank's own shard: the other shards are missing",
    lambda shard, elements: shard.clone(), on=ALL)

@mistake("ring_all_gather", "the last shard is missing: a ring of N ranks has N − 1 steps", on=ALL, points=0.0)
def gather_one_step_too_few(shard, elements):
    whole = placed(shard, elements)
    gather_ring(whole.tensor_split(me()[1]), steps=lambda n: n - 2)
    return whole

def shards_as_they_come(shard, elements):
    (rank, n), kept = me(), [shard]
    sizes = [len(chunk) for chunk in torch.empty(elements).tensor_split(n)]
    for step in range(n - 1):
        coming = torch.empty(sizes[(rank + step + 1) % n], dtype=shard.dtype)
        exchange(kept[-1], (rank - 1) % n, coming, (rank + 1) % n)
        kept.append(coming)
    return kept

slip("ring_all_gather", "gather_in_the_order_of_arrival", 1.6,
    "the shards stand in the order of their arrival; shard r belongs at place r",
    lambda shard, elements: torch.cat(shards_as_they_come(shard, elements)), on=ALL)

@mistake("ring_all_gather", HINT_1, on=ALL, points=1.6)
def gather_one_place_off(shard, elements):
    (rank, n), kept = me(), shards_as_they_come(shard, elements)
    return torch.cat([kept[(place - rank + 1) % n] for place in range(n)])

def gather(shard, elements, peer=-1, chunk=1, first=0, passes=1):
    """The ring with the knobs apart: whom a rank sends to, and which chunks it takes for those that go and come."""
    (rank, n), whole = me(), placed(shard, elements)
    chunks = whole.tensor_split(n)
    for step in range(first, n - 1 + first):
        mine, coming = chunks[(rank + chunk * step * passes) % n], chunks[(rank + chunk * (step + 1)) % n]
        exchange(mine, (rank + peer) % n, coming, (rank - peer) % n)
    return whole

slip("ring_all_gather", "gather_upwards_with_chunks_downwards", 0, "", lambda shard, elements: gather(shard, elements, peer=1),
    says="rank 0 sends to rank 1; right is rank 2: in this ring, rank r sends to rank r − 1 only")
slip("ring_all_gather", "gather_downwards_with_chunks_upwards", 0, "",
    lambda shard, elements: gather(shard, elements, chunk=-1),
    says="rank 1 makes room for 3 elements; right is 2: make room for the chunk that rank r + 1")
slip("ring_all_gather", "gather_its_own_again_and_again", 0, "", lambda shard, elements: gather(shard, elements, passes=0),
    says="rank 0 sends 3 elements; right is 2: after the first step, a rank passes on what it has just")

STARTS = "each rank begins with a chunk that it doesn't have yet: in the first step it has only its own shard to send"

slip("ring_all_gather", "gather_beginning_with_the_next", 0.6, STARTS, lambda shard, elements: gather(shard, elements, first=1),
    says="sent 750,020 bytes; right is 750,024 bytes", on=(3, 4))

@mistake("ring_all_gather", says="not the right number of messages: how many steps does it take?", points=2.4)
def gather_one_step_too_many(shard, elements):
    whole = placed(shard, elements)
    gather_ring(whole.tensor_split(me()[1]), steps=lambda n: n)
    return whole

@mistake("ring_all_gather", HINT_2, on=ALL, points=2.4)
def gather_upwards_as_in_the_chapter(shard, elements):
    whole = placed(shard, elements)
    gather_ring(whole.tensor_split(me()[1]), up=True)
    return whole

@mistake("ring_all_gather", "right shape, wrong dtype: take dtype=shard.dtype", on=ALL, points=0.6)
def gather_into_the_default_dtype(shard, elements):
    whole = torch.empty(elements)
    chunks = whole.tensor_split(me()[1])
    chunks[me()[0]].copy_(shard)
    gather_ring(chunks)
    return whole

slip("ring_all_gather", "gather_with_whole_tensors", 3, HINT_4,
    lambda shard, elements: sum_of_whole_tensors(placed(shard, elements)), on=ALL)

# mistakes: reduce_scatter

slip("ring_reduce_scatter", "scatter_own_chunk", 0, "that is the rank's own chunk: nothing was added to it",
    lambda x: x.tensor_split(me()[1])[me()[0]].clone(), on=ALL)

def scatter(x, **wrong):
    chunks = x.clone().tensor_split(me()[1])
    reduce_ring(chunks, **wrong)
    return chunks[me()[0]].clone()

@mistake("ring_reduce_scatter", "that is the mean: a reduce-scatter here sums", on=ALL, points=2.0)
def scatter_the_mean(x):
    out = scatter(x)
    return out / me()[1] if out.is_floating_point() else out

slip("ring_reduce_scatter", "scatter_that_returns_the_sum", 0.75, "that is the whole sum: return only the rank's chunk of it",
    lambda x: sum_of_whole_tensors(x), on=ALL)
slip("ring_reduce_scatter", "scatter_upwards_as_in_the_chapter", 4.25, HINT_2, lambda x: scatter(x, up=True), on=ALL)

@mistake("ring_reduce_scatter", HINT_1, on=ALL, points=0.75)
def scatter_one_chunk_off(x):
    chunks = x.clone().tensor_split(me()[1])
    reduce_ring(chunks, first=0)
    return chunks[(me()[0] - 1) % me()[1]].clone()

PLACE = "chunk r does not end at rank r: it starts at rank r − 1, so which chunk does a rank send first?"

slip("ring_reduce_scatter", "scatter_beginning_with_its_own", 0.75, PLACE, lambda x: scatter(x, first=0))

@mistake("ring_reduce_scatter", "what came is passed on as it was: a rank adds its own term, and sends the sum on", points=2.0)
def scatter_that_passes_on_what_came(x):
    (rank, n), chunks = me(), x.clone().tensor_split(me()[1])
    passing = chunks[(rank + 1) % n]
    for step in range(2, n + 1):
        coming = torch.empty_like(chunks[(rank + step) % n])
        exchange(passing, (rank - 1) % n, coming, (rank + 1) % n)
        chunks[(rank + step) % n].add_(passing := coming)
    return chunks[rank].clone()

@mistake("ring_reduce_scatter", "these are all chunks, and only chunk r is complete on rank r: return that one", points=2.0)
def scatter_that_returns_all_chunks(x):
    chunks = x.clone().tensor_split(me()[1])
    reduce_ring(chunks)
    return torch.cat(chunks)

@mistake("ring_reduce_scatter", "one term is missing: a ring of N ranks has N − 1 steps", on=ALL, points=0.0)
def scatter_one_step_too_few(x):
    (rank, n), chunks = me(), x.clone().tensor_split(me()[1])
    for step in range(1, n - 1):
        coming = torch.empty_like(chunks[(rank + step + 2) % n])
        exchange(chunks[(rank + step + 1) % n], (rank - 1) % n, coming, (rank + 1) % n)
        chunks[(rank + step + 2) % n].add_(coming)
    return chunks[rank].clone()

slip("ring_reduce_scatter", "scatter_that_replaces", 2, "what comes must be added to the rank's own terms, not replace them",
    lambda x: scatter(x, adds=False), on=ALL)

slip("ring_reduce_scatter", "scatter_for_two", 1, "", lambda x: scatter(x, steps=lambda n: 1), says="right on 2 ranks only",
    on=ALL)

@mistake("ring_reduce_scatter", HINT_3, on=ALL, points=2.0)
def scatter_chunks_of_torch_chunk(x):
    chunks = x.clone().chunk(me()[1])
    reduce_ring(chunks)
    return chunks[me()[0]].clone()

# mistakes: all_reduce

slip("ring_all_reduce", "reduce_nothing", 0, "that is the rank's own x: nothing was added to it", lambda x: x.clone(), on=ALL)

def two_rings(x, up=False):
    out = x.clone()
    chunks = out.tensor_split(me()[1])
    reduce_ring(chunks, up=up)
    gather_ring(chunks, up=up)
    return out

slip("ring_all_reduce", "reduce_to_the_sum", 1.6, "that is the sum: the mean is asked for, so divide by N",
    lambda x: two_rings(x), on=ALL)
slip("ring_all_reduce", "reduce_and_divide_twice", 1.6, "that is divided by N twice",
    lambda x: two_rings(x / me()[1]) / me()[1], on=ALL)
slip("ring_all_reduce", "reduce_whole_tensors", 2.4, HINT_4, lambda x: sum_of_whole_tensors(x) / me()[1], on=ALL)

@mistake("ring_all_reduce", "only the rank's own chunk is summed: the all-gather is missing", on=ALL, points=0.0)
def reduce_without_the_gather(x):
    chunks = x.clone().tensor_split(me()[1])
    reduce_ring(chunks)
    return placed(chunks[me()[0]] / me()[1], len(x))

slip("ring_all_reduce", "reduce_without_the_reduce_scatter", 0,
    "these are the ranks' own chunks, divided by N: nothing was added, so does your ring_reduce_scatter pass its check?",
    lambda x: right_gather(x.tensor_split(me()[1])[me()[0]] / me()[1], len(x)))
slip("ring_all_reduce", "reduce_and_round_down", 1.6, "// rounds down: divide with /", lambda x: two_rings(x) // me()[1])

@mistake("ring_all_reduce", says="ring_all_gather takes chunk r, and the number of elements of the whole tensor: is that")
def reduce_and_gather_n_shards_like_its_own(x):
    shard = right_scatter(x) / me()[1]
    return right_gather(shard, me()[1] * len(shard))

slip("ring_all_reduce", "reduce_with_a_broken_ring", 1.6, "", lambda x: right_gather(scatter(x, adds=False) / me()[1], len(x)),
    says="do your ring_reduce_scatter and ring_all_gather pass their own checks?")
slip("ring_all_reduce", "reduce_upwards_as_in_the_chapter", 2.4, HINT_2, lambda x: two_rings(x, up=True) / me()[1], on=ALL)

# mistakes: all_to_all

def received(x, place=lambda rank, k, n: (rank - k) % n, own=True):
    """What a rank gets, chunk by chunk. place: where that of step k goes; own: whether its own is kept."""
    (rank, n), chunks = me(), x.tensor_split(me()[1])
    out = [torch.zeros_like(chunks[rank]) for _ in range(n)]
    out[place(rank, 0, n)] = chunks[rank].clone() if own else out[rank]
    for k in range(1, n):
        to, source = (rank + k) % n, (rank - k) % n
        exchange(chunks[to], to, out[place(rank, k, n)], source)
    return torch.cat(out)

slip("pairwise_all_to_all", "swap_nothing", 0, "that is the rank's own x: nothing was exchanged", lambda x: x.clone(), on=ALL)
slip("pairwise_all_to_all", "swap_in_the_order_of_arrival", 1.6,
    "every rank has chunk r of all ranks, but in the order of their arrival", lambda x: received(x, place=lambda rank, k, n: k),
    on=ALL)
slip("pairwise_all_to_all", "swap_without_its_own", 1.6, "the rank's own chunk is missing: it stays, and belongs at place r",
    lambda x: received(x, own=False), on=ALL)

@mistake(
    "pairwise_all_to_all", "that is every rank's own chunk, an all-gather: rank s sends chunk r to rank r", on=ALL, points=0.6
)
def swap_own_chunk_with_all(x):
    (rank, n), chunks = me(), x.tensor_split(me()[1])
    out = [chunk.clone() for chunk in chunks]
    for k in range(1, n):
        exchange(chunks[rank], (rank + k) % n, out[(rank - k) % n], (rank - k) % n)
    return torch.cat(out)

@mistake("pairwise_all_to_all", HINT_3, on=ALL, points=1.6)
def swap_chunks_of_torch_chunk(x):
    (rank, n), chunks = me(), x.chunk(me()[1])
    out = [chunks[rank].clone() for _ in range(n)]
    for k in range(1, n):
        exchange(chunks[(rank + k) % n], (rank + k) % n, out[(rank - k) % n], (rank - k) % n)
    return torch.cat(out)

slip("pairwise_all_to_all", "swap_into_the_places_of_receivers", 1.6,
    "each chunk stands at the place of the rank that it went to: rank s's belongs at s",
    lambda x: received(x, place=lambda rank, k, n: (rank + k) % n))

@mistake("pairwise_all_to_all", says="rank 0 sends 3 elements; right is 2: the rank that you send to wants its own chunk")
def swap_its_own_chunk_into_room_for_its_own(x):
    (rank, n), chunks = me(), x.tensor_split(me()[1])
    out = [chunks[rank].clone() for _ in range(n)]
    for k in range(1, n):
        exchange(chunks[rank], (rank + k) % n, out[(rank - k) % n], (rank - k) % n)
    return torch.cat(out)

# mistakes: collectives_ready

slip("ring_all_gather", "gather_by_the_chapter", 0, HINT_5,
    lambda shard, elements: collectives.ring_all_gather(shard, elements=elements),
    says="manyranks.parallel.collectives.ring_all_gather is not allowed", on=ALL)

@mistake(
    "ring_all_reduce", HINT_5, says="manyranks.parallel.collectives.ring_reduce_scatter is not allowed", on=ALL, points=0.0
)
def reduce_by_an_inner_module_that_it_imports(x):
    from manyranks.parallel.collectives.ring import ring_all_gather, ring_reduce_scatter

    return ring_all_gather(ring_reduce_scatter(x) / me()[1], elements=len(x))
