"""Messages between two ranks at one moment, and how a tensor is cut into chunks.

Chunk r of a tensor of E elements on n ranks has E//n elements, and one more where r < E % n (torch.tensor_split's rule).
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple


class Message(NamedTuple):
    """A message: `source` sends `destination` the elements start, start + 1, … start + count − 1 of the tensor.

    Positions are those in the whole tensor of E elements, and go on at 0 after E − 1. adds: whether the receiver adds what
    comes to what it has at the same positions; otherwise it replaces it. In an all_to_all, `start` counts in the sender's
    input.
    """

    source: int
    destination: int
    start: int
    count: int
    adds: bool


Round = tuple[Message, ...]  # messages that are on the wire at the same time


class Group(NamedTuple):
    """The ranks that take part, and where the tensor is cut: chunk i goes from cuts[i] to cuts[i + 1].

    A place is an index into ranks.
    """

    ranks: Sequence[int]
    cuts: Sequence[int]
    root: int = 0
    node: int | None = None


def chunk_sizes(elements: int, n: int) -> list[int]:
    """Elements of each of the n chunks."""
    return [elements // n + (r < elements % n) for r in range(n)]


def cut(start: int, elements: int, n: int) -> list[int]:
    """The n + 1 positions that cut `elements` elements from `start` on into n chunks."""
    return list(accumulate(chunk_sizes(elements, n), initial=start))


def send(group: Group, place: int, to: int, chunk: int, chunks: int = 1, adds: bool = False) -> Message:
    """The message of one place to another with `chunks` chunks from `chunk` on; after the last comes the first."""
    cuts, end = group.cuts, chunk + chunks
    parts = len(cuts) - 1
    count = cuts[min(end, parts)] - cuts[chunk] + cuts[max(end - parts, 0)] - cuts[0]
    return Message(group.ranks[place], group.ranks[to], cuts[chunk], count, adds)


def send_all(group: Group, place: int, to: int, adds: bool = False) -> Message:
    """The message of one place to another with the whole tensor."""
    return send(group, place, to, 0, len(group.cuts) - 1, adds)


def mirrored(rounds: Sequence[Round], adds: bool) -> list[Round]:
    """The rounds backwards, each message the other way: a broadcast becomes a reduce, a scatter a gather."""
    return [tuple(Message(m.destination, m.source, m.start, m.count, adds) for m in r) for r in reversed(rounds)]
