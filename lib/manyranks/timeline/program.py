"""A Program: for each rank, the instructions that its host issues, in order. It says what is done, not how long it takes."""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple


class Work(NamedTuple):
    """Work that is charged by its size: flops, and bytes read from and written to memory."""

    flops: float
    bytes: float = 0


class Compute(NamedTuple):
    """Runs on the rank, which goes on when it is over. name: for display ("F3"); work: what costs are charged by."""

    name: str
    work: Hashable


class Send(NamedTuple):
    """Sends `bytes` to rank `to`, as soon as it is issued: the message waits in a buffer if nobody receives it yet.

    The messages of one rank to another go one after another, in the order issued; each goes to the next Recv with its tag.
    handle: None holds the rank until the message has arrived; with a handle the rank goes on. rendezvous: the message
    starts only when its Recv is issued too.
    """

    to: int
    bytes: float
    tag: Hashable = 0
    handle: Hashable = None
    rendezvous: bool = False


class Recv(NamedTuple):
    """Receives the next message of rank `source` that has this tag. handle: None holds the rank until it has arrived."""

    source: int
    bytes: float
    tag: Hashable = 0
    handle: Hashable = None


class Collective(NamedTuple):
    """Starts when the last rank of `group` has come to it and the group's collective before it is over; ends on all at once.

    op: "all_reduce", …; bytes: as the costs count them; handle: None holds the rank until the end. The order of the ranks is
    part of a group: (0, 1) and (1, 0) are two. name: for display, `op` if empty.
    """

    op: str
    bytes: float
    group: tuple[int, ...]
    handle: Hashable = None
    name: str = ""


class Wait(NamedTuple):
    """Holds the rank until what it issued last with this handle is over."""

    handle: Hashable


Instruction = Compute | Send | Recv | Collective | Wait


@dataclass(frozen=True)
class Program:
    """Instructions: ranks[r] has rank r's, in the order its host issues them. `replay` runs and checks it."""

    ranks: tuple[tuple[Instruction, ...], ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranks", tuple(map(tuple, self.ranks)))

    def __len__(self) -> int:
        """Instructions of all ranks together."""
        return sum(map(len, self.ranks))


def at(rank: int, number: int, instruction: Instruction) -> str:
    """An instruction and where it stands, for errors."""
    return f"rank {rank}, instruction {number}: {instruction!r}"
