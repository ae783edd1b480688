"""Rings: every rank sends to the next one and receives from the previous one, all at once.

In an all-reduce a rank sends 2(n − 1)/n of its tensor: less than twice, however many ranks
there are, and no algorithm can do with less on every rank.
Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
workstations", JPDC 69(2), 2009.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from manyranks.parallel.collectives.messages import (
    Group,
    Members,
    in_place,
    members,
    row_of,
    shard_row,
    wait,
)
from manyranks.parallel.collectives.naive import naive_gather


def ring_all_reduce(x: Tensor, group: Group = None, pieces: int = 1) -> Tensor:
    """Every rank's x becomes the sum of all, in place.

    A reduce-scatter, then an all-gather of the sums. Returns x.
    Each rank sends 2(n − 1)/n of the tensor. Takes scratch for one chunk.
    pieces: parts of a chunk, each a message; while one is added the next is on its way.
    Several are faster where a chunk has many megabytes, and slower below.
    All ranks get the same bits, for each sum is made on one rank.
    Raises ValueError for pieces below 1.
    """
    everyone = members(group)
    _check_pieces(pieces)
    with in_place(x) as row:
        chunks = row.tensor_split(len(everyone.ranks))
        sends = add_up(chunks, everyone, pieces)
        # They are waited for at the end only: no chunk comes back whole before this rank's
        # term of it was taken.
        sends += _hand_round(chunks, everyone, pieces)
        wait(sends)
    return x


def ring_reduce_scatter(x: Tensor, group: Group = None, pieces: int = 1) -> Tensor:
    """Sums x over the ranks and leaves each rank one chunk of the sum.

    Returns this rank's shard, flat.
    A chunk travels round the ring from the rank after its owner, and collects a term at
    every stop. x stays as it is, so the partial sums take scratch of x's size.
    pieces: as in ring_all_reduce. Raises ValueError for pieces below 1.
    """
    everyone = members(group)
    _check_pieces(pieces)
    line = _line(row_of(x).tensor_split(len(everyone.ranks)), everyone.place - 1, pieces)
    sums = [torch.empty_like(piece) for piece in line[pieces:]]
    wait(_round_the_ring(line, sums, everyone, add=lambda own, arrived: arrived.add_(own)))
    return torch.cat(line[-pieces:])


def ring_all_gather(
    shard: Tensor,
    group: Group = None,
    elements: int | None = None,
    pieces: int = 1,
) -> Tensor:
    """Every rank passes on the shard that it got last, its own first.

    Returns all shards end to end, flat.
    elements: of the whole; give it where n does not divide it, or the ranks cannot know
    each other's sizes.
    pieces: as in ring_all_reduce.
    Raises ValueError for a shard that is not this rank's chunk, and pieces below 1.
    """
    everyone = members(group)
    _check_pieces(pieces)
    row, elements = shard_row(shard, elements, everyone)
    whole = row.new_empty(elements)
    chunks = whole.tensor_split(len(everyone.ranks))
    chunks[everyone.place].copy_(row)
    wait(_hand_round(chunks, everyone, pieces))
    return whole


def ring_reduce(x: Tensor, root: int = 0, group: Group = None) -> Tensor:
    """The root's x becomes the sum of all ranks', in place; the others' stay.

    A reduce-scatter, then a gather. Returns x.
    Raises ValueError for a root outside the group.
    """
    members(group, root)  # a wrong root is an error before the first message
    with in_place(x) as row:
        shard = ring_reduce_scatter(row, group)
        whole = naive_gather(shard, root, group, elements=row.numel())
        if whole is not None:
            row.copy_(whole)
    return x


def ring_broadcast(
    x: Tensor,
    root: int = 0,
    group: Group = None,
    pieces: int | None = None,
) -> Tensor:
    """Every rank's x becomes the root's, in place.

    Piece after piece goes down the chain root, root + 1, … A rank passes on one piece while
    it receives the next. Returns x.
    pieces: of the whole tensor, n unless given.
    Raises ValueError for a root outside the group and pieces below 1.
    """
    everyone = members(group, root)
    n = len(everyone.ranks)
    before, after = (everyone.place - 1) % n, (everyone.place + 1) % n
    pieces = n if pieces is None else pieces
    _check_pieces(pieces)
    with in_place(x) as row:
        sends = []
        for part in row.tensor_split(pieces):
            if everyone.place != root:
                everyone.receive(part, before)
            if after != root:
                # It leaves while the next one comes, and stays as it is until the end.
                sends.append(dist.isend(part, group=group, group_dst=after))
        wait(sends)
    return x


def hierarchical_all_reduce(x: Tensor, node: int, group: Group = None) -> Tensor:
    """Every rank's x becomes the sum of all, in place, with little traffic between nodes.

    A ring reduce-scatter inside each node; a ring all-reduce of shard i among the i-th
    ranks of all nodes, so that 1/node of the tensor crosses each rank's link between nodes;
    a ring all-gather inside each node. Returns x.
    node: ranks of a node; ranks 0 … node − 1 are the first one's.
    Raises ValueError for a node that does not divide n.
    """
    everyone = members(group)
    n, rank = len(everyone.ranks), everyone.place
    if node < 1 or n % node:
        allowed = ", ".join(str(d) for d in range(1, n + 1) if n % d == 0)
        raise ValueError(
            f"node={node}: ranks of a node must divide the {n} ranks of the group; "
            f"allowed are {allowed}"
        )
    inside = everyone.only(range(rank // node * node, rank // node * node + node))
    across = everyone.only(range(rank % node, n, node))
    with in_place(x) as row:
        shards = row.tensor_split(node)
        wait(add_up(shards, inside))
        chunks = shards[inside.place].tensor_split(len(across.ranks))
        wait(add_up(chunks, across))
        wait(_hand_round(chunks, across))
        wait(_hand_round(shards, inside))
    return x


def add_up(chunks: Sequence[Tensor], ring: Members, pieces: int = 1) -> list[dist.Work]:
    """Ring reduce-scatter in place: this rank's own chunk becomes the sum.

    Its others become partial sums. Returns the sends.
    """
    line = _line(chunks, ring.place - 1, pieces)
    sizes = [piece.numel() for piece in line]
    # What arrives is added at once, so its place is free again `pieces` messages later.
    places = line[0].new_empty(pieces, max(sizes))
    landings = [places[k % pieces, :size] for k, size in enumerate(sizes[pieces:])]
    return _round_the_ring(line, landings, ring, add=Tensor.add_)


def _hand_round(
    chunks: Sequence[Tensor], ring: Members, pieces: int = 1
) -> list[dist.Work]:
    """Ring all-gather in place: each chunk becomes its owner's. Returns the sends."""
    line = _line(chunks, ring.place, pieces)
    return _round_the_ring(line, line[pieces:], ring)


def _line(chunks: Sequence[Tensor], first: int, pieces: int) -> list[Tensor]:
    """The chunks, each cut into pieces, in the order in which they leave this rank.

    That is first, first − 1, … round to first + 1.
    """
    n = len(chunks)
    leaving = [chunks[(first - step) % n] for step in range(n)]
    return [piece for chunk in leaving for piece in chunk.tensor_split(pieces)]


def _round_the_ring(
    line: list[Tensor],
    landings: list[Tensor],
    ring: Members,
    add: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> list[dist.Work]:
    """Sends the line to the next rank, while the previous rank's arrives in the landings.

    The last chunk of a line is not sent. With one piece a chunk, step k sends line[k] and
    receives landings[k], which is about the same chunk as line[k + 1]. It takes that one's
    place, or with `add` its sum with that one does, and leaves in step k + 1. With more
    pieces, so many messages are under way at any time: message k becomes line[k + pieces].
    Returns the sends, which nobody has waited for.
    """
    n, pieces = len(ring.ranks), len(line) - len(landings)
    before, after = (ring.place - 1) % n, (ring.place + 1) % n
    sends, receives = [], []
    for k in range(len(line)):
        if k >= pieces:
            receives[k - pieces].wait()
            arrived = landings[k - pieces]
            line[k] = add(line[k], arrived) if add else arrived
        if k < len(landings):
            # The receive comes last; NCCL makes one work of a batch, which is then both.
            *sent, receive = ring.post(line[k], after, landings[k], before)
            sends += sent
            receives.append(receive)
    return sends


def _check_pieces(pieces: int) -> None:
    if pieces < 1:
        raise ValueError(f"pieces={pieces}: a chunk is cut into at least 1 piece")
