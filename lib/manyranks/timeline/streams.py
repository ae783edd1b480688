"""Things that a running program's ranks share: streams, on which exchanges go one by one, and lanes, which number them.

An *exchange* is one message or one collective. A *stream* is a directed pair of ranks, or a group: its exchanges go one
after another. A *lane* is a part of a stream that all its members count in the same way: the messages with one tag, or
all collectives of the group. The third message of a lane is the same one to its sender and to its receiver, so nobody
has to look for it.
"""

from collections import deque
from collections.abc import Callable, Generator, Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

from manyranks.timeline.costs import Transfer
from manyranks.timeline.program import Collective

Host = Generator["Stream", None, None]


class Memo(dict):
    """A dict that makes what it does not have yet."""

    def __init__(self, make: Callable) -> None:
        self.make = make

    def __missing__(self, key: Hashable):
        value = self[key] = self.make(key)
        return value


class Price(NamedTuple):
    """The price of an exchange: what it takes alone, and what it asks of the network."""

    seconds: float
    transfer: Transfer


@dataclass(slots=True, eq=False)
class Stream:
    """A stream. names: of the spans, by rank; free: when the last exchange ended."""

    names: dict[int, str]
    prices: Memo  # of a message, by bytes; of a collective, by op and bytes
    free: float = 0.0
    queue: deque["Exchange"] = field(default_factory=deque)  # issued by somebody, and not over
    waiting: list[Host] = field(default_factory=list)  # for an end that is not known yet


@dataclass(slots=True, eq=False)
class Pair(Stream):
    """The stream of the messages from `source` to `to`."""

    source: int = 0
    to: int = 0
    lanes: Memo = field(init=False)  # by tag
    posted: dict[tuple, float] = field(default_factory=dict)  # (tag, k) of Recvs before their Send -> when
    unmet: dict[tuple, "Exchange"] = field(default_factory=dict)  # (tag, k) of rendezvous before their Recv

    def __post_init__(self) -> None:
        self.lanes = Memo(lambda tag: Messages(self, tag))


@dataclass(slots=True, eq=False)
class Group(Stream):
    """The stream of a group's collectives. joined: rank -> to how many of them it has come."""

    joined: dict[int, int] = field(default_factory=dict)
    issued: list["Exchange"] = field(default_factory=list)
    lane: "Lane" = field(init=False)

    def __post_init__(self) -> None:
        self.lane = Lane(self)


@dataclass(slots=True, eq=False)
class Lane:
    """A lane: ends[k] is when its k-th exchange was over; it grows as exchanges end."""

    stream: Stream
    tag: Hashable = None
    ends: list[float] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Messages(Lane):
    """The lane of the messages with one tag. sent, received: bytes of each Send, and of each Recv."""

    sent: list[float] = field(default_factory=list)
    received: list[float] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Exchange:
    """A collective, or a message that cannot be settled when it is sent.

    names: of its span on each rank that takes part. absent: the ranks that must still come before it can start.
    """

    lane: Lane
    price: Price
    names: dict[int, str]
    absent: set[int]
    instruction: Collective | None = None  # of the rank that came first
    ready: float = 0.0  # when the last rank came; once it starts, when it did
