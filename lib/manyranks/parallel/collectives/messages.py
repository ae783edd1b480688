"""The parts of every collective.

These are the ranks that take part, a tensor as one row of elements, and an exchange of two.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

Group = dist.ProcessGroup | None  # None: the default group, which has all ranks


class Members(NamedTuple):
    """The ranks that take part, in order.

    ranks: their ranks in the group
    place: where in `ranks` this rank stands

    In most collectives everyone takes part and a place is a rank. Some have a phase for a
    few of the ranks only.
    """

    group: Group
    ranks: Sequence[int]
    place: int

    def only(self, places: Sequence[int]) -> "Members":
        """The members at these places; this rank must be at one of them."""
        ranks = [self.ranks[p] for p in places]
        return Members(self.group, ranks, list(places).index(self.place))

    def send(self, tensor: Tensor, to: int) -> None:
        """Sends to the member at a place; returns when it has been taken."""
        dist.send(tensor, group=self.group, group_dst=self.ranks[to])

    def receive(self, tensor: Tensor, source: int) -> Tensor:
        """Fills the tensor with what the member at a place sends, and returns it."""
        dist.recv(tensor, group=self.group, group_src=self.ranks[source])
        return tensor

    def post(
        self, outgoing: Tensor, to: int, incoming: Tensor, source: int
    ) -> list[dist.Work]:
        """Starts to send one tensor and to receive another, and returns at once.

        The receive is the last work.
        A send is over only when the other side receives. Two ranks that both sent first
        would wait for each other for ever, so both messages are handed over before either
        is waited for. Until then neither tensor may be touched.
        """
        group, ranks = self.group, self.ranks
        send = dist.P2POp(dist.isend, outgoing, group=group, group_peer=ranks[to])
        receive = dist.P2POp(dist.irecv, incoming, group=group, group_peer=ranks[source])
        return dist.batch_isend_irecv([send, receive])

    def exchange(self, outgoing: Tensor, to: int, incoming: Tensor, source: int) -> Tensor:
        """Sends one tensor while receiving another, which it returns once both are over."""
        wait(self.post(outgoing, to, incoming, source))
        return incoming


def wait(works: Sequence[dist.Work]) -> None:
    """Returns when all these messages have arrived.

    Each may be waited for only once: gloo would wait again, for ever.
    """
    for work in works:
        work.wait()


def members(group: Group, root: int = 0) -> Members:
    """Returns everyone in the group.

    Raises ValueError where this rank is not in it, or the root is none of its ranks.
    """
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    if rank < 0:
        raise ValueError(
            "this rank is not in the group: "
            "call the collective on the ranks of the group only"
        )
    if not 0 <= root < n:
        raise ValueError(
            f"root={root}: must be one of the {n} ranks of the group, 0 to {n - 1}"
        )
    return Members(group, range(n), rank)


def row_of(x: Tensor) -> Tensor:
    """The elements of x in one dimension.

    They are x's own memory where it is contiguous, else a copy.
    Raises ValueError for what is no tensor or has no strides.
    """
    if not isinstance(x, Tensor):
        raise ValueError(
            f"x is a {type(x).__name__}: give a torch.Tensor, as torch.as_tensor(x)"
        )
    if x.layout != torch.strided:
        raise ValueError(f"x has layout {x.layout}: give a dense tensor, as x.to_dense()")
    return x.detach().reshape(-1).contiguous()


@contextmanager
def in_place(x: Tensor) -> Iterator[Tensor]:
    """x as a row to be changed: at the end x, whatever its strides, has what is in the row.

    Raises ValueError also where several elements of x share memory.
    """
    row, shape = row_of(x), tuple(x.shape)
    dims = zip(x.stride(), shape, strict=True)
    if any(stride == 0 and size > 1 for stride, size in dims):
        raise ValueError(
            f"x of shape {shape} was expanded: its elements share memory; give x.clone()"
        )
    yield row
    if row.data_ptr() != x.data_ptr():
        x.detach().copy_(row.view(x.shape))


def chunk_sizes(elements: int, n: int) -> list[int]:
    """Elements of each of the n chunks, as torch.tensor_split cuts them."""
    return [elements // n + (r < elements % n) for r in range(n)]


def shard_row(shard: Tensor, elements: int | None, everyone: Members) -> tuple[Tensor, int]:
    """The shard as a row, and the elements of the whole tensor.

    Without `elements`, they are n times the shard's.
    Raises ValueError where the shard is not this rank's chunk of so many elements.
    """
    row, n = row_of(shard), len(everyone.ranks)
    if elements is None:
        elements = n * row.numel()
    if elements < 0 or row.numel() != (fits := chunk_sizes(elements, n)[everyone.place]):
        fits = "none" if elements < 0 else fits
        raise ValueError(
            f"shard of {row.numel()} elements: of elements={elements} over {n} ranks, "
            f"rank {everyone.place} has {fits}"
        )
    return row, elements
