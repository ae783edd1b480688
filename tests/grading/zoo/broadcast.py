"""Wrong answers to the first task of 01_collectives: broadcast by a tree that sends far first."""

import torch.distributed as dist

from tests.grading.zoo.wrong import Wrong, keeper, me

ZOO: list[Wrong] = []
wrong = keeper(ZOO)


def far_first(out, root, place=None, last=1):
    """The right tree, with the knobs that learners turn the wrong way."""
    rank, n = me()
    place = (rank - root) % n if place is None else place
    distance = 2 ** (n - 1).bit_length() // 2
    while distance >= last:
        if place % (2 * distance) == 0 and place + distance < n:
            dist.send(out, (rank + distance) % n)
        elif place % (2 * distance) == distance:
            dist.recv(out, (rank - distance) % n)
        distance //= 2
    return out


@wrong("tree_broadcast", "this tree sends near first", right_values=True)
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


@wrong("tree_broadcast", "or other calls; hint: far more than a right answer needs: does the loop end?")
def broadcast_that_does_not_halve(x, root):
    (rank, n), out = me(), x.clone()
    place, distance = (rank - root) % n, n // 2
    while distance >= 1:
        if place % (2 * distance) == 0 and place + distance < n:
            dist.send(out, (rank + distance) % n)
        elif place % (2 * distance) == distance:
            dist.recv(out, (rank - distance) % n)
    return out


@wrong("tree_broadcast", "a round is missing: there are ⌈log₂ N⌉")
def broadcast_one_round_too_few(x, root):
    return far_first(x.clone(), root, last=2)


@wrong("tree_broadcast", "this tree sends to no rank (root = 3)")
def broadcast_with_places_that_are_ranks(x, root):
    return far_first(x.clone(), root, place=me()[0])


@wrong("tree_broadcast", "sends to itself; hint: copy instead")
def broadcast_to_all_and_itself(x, root):
    (rank, n), out = me(), x.clone()
    for other in range(n):
        if rank in (root, other):
            _ = dist.send(out, other) if rank == root else dist.recv(out, root)
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
    return far_first(x.clone(), 0)


@wrong("tree_broadcast", "work on a copy", right_values=True)
def broadcast_in_place(x, root):
    return far_first(x, root)


@wrong("tree_broadcast", "in the round of distance d, each place", right_values=True)
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


@wrong("tree_broadcast", "unexpected keyword argument 'to'; hint: broadcast.py, line ")
def broadcast_with_another_keyword(x, root):
    dist.send(x, to=root)
