"""The calls of a rank to others: every axis lists its collectives and messages in this form.

The axes' lists: tensor.calls, context.calls, expert.calls, sharding.calls for data parallelism, and stages here. From a list
follow bytes (counted) and seconds (network.seconds).
"""

from collections.abc import Iterable
from typing import NamedTuple

from manyranks.theory import collectives
from manyranks.theory.architecture import ModelShape
from manyranks.theory.plan import LayerPlan

HALF, SUMS = 2, 4  # bytes: of an activation that travels, and of a gradient that ranks sum up
# When a call is made. A layer's backward has also calls that travel beside the gradient of a weight, and those that gather
# again, beside the gradient of an input, what forward has gathered.
FORWARD, BACKWARD, WITH_WEIGHT, REGATHER = "forward", "backward", "with weight", "regather"


class Call(NamedTuple):
    """A collective of a group, or a message to another member.

    group: "tp"; "etp", the ranks that cut an expert; "cp"; "ep"; "pp"; of data parallelism "data", or "shards" and "replicas".
    op: of collectives, or "send"; elements: as collectives counts them, of a message its own; itemsize: bytes of an element;
    when: see FORWARD; times: how often; far: of an all-to-all whose ranks don't all get as much, the elements that leave the
    node, those that stay being `elements`; hop: of a ring of messages, the block under which it travels.
    """

    group: str
    op: str
    elements: float
    itemsize: int = HALF
    when: str = FORWARD
    times: float = 1
    far: float | None = None
    hop: int | None = None

    @property
    def bytes(self) -> float:
        return self.itemsize * self.elements


class Calls(NamedTuple):
    """Collectives and messages of one rank, by operation, and the bytes that it sends in them."""

    all_reduce: int = 0
    all_gather: int = 0
    reduce_scatter: int = 0
    bytes: int = 0
    all_to_all: int = 0
    send: int = 0

    @property
    def count(self) -> int:
        return sum(self) - self.bytes

    def __add__(self, other: "Calls") -> "Calls":
        return Calls(*(x + y for x, y in zip(self, other, strict=True)))

    def __rmul__(self, times: int) -> "Calls":
        return Calls(*(times * x for x in self))

    def __mul__(self, times: int) -> "Calls":
        return times * self


class Passes(NamedTuple):
    """Forward's calls and backward's."""

    forward: Calls = Calls()
    backward: Calls = Calls()

    @property
    def both(self) -> Calls:
        return self.forward + self.backward

    def __add__(self, other: "Passes") -> "Passes":
        return Passes(self.forward + other.forward, self.backward + other.backward)

    def __rmul__(self, times: int) -> "Passes":
        return Passes(times * self.forward, times * self.backward)

    def __mul__(self, times: int) -> "Calls":
        return times * self


def counted(calls: Iterable[Call], n: int, rank: int = 0) -> Passes:
    """Counts these calls of a group of n, and the bytes that the rank at this place of it sends; one rank says nothing.

    elements are whole numbers here. The place counts where n does not divide the tensor; ValueError if it is none.
    """
    found = Passes()
    for call in calls:
        if rank not in range(n):
            raise ValueError(f"rank={rank!r} of {n} ranks: give 0 to {n - 1}")
        if n == 1:
            break
        sent = call.bytes if call.op == "send" else collectives.sent_bytes(call.op, call.elements, call.itemsize, n)[rank]
        one = call.times * Calls(**{call.op: 1}, bytes=sent)
        found += Passes(forward=one) if call.when == FORWARD else Passes(backward=one)
    return found


def between_stages(shape: ModelShape, plan: LayerPlan) -> list[Call]:
    """Lists the calls of one micro-batch from a stage to the next, one way: each tensor-parallel rank sends its share.

    Source: arXiv 2104.04473, section 4.1.
    """
    elements = plan.rank_tokens * shape.hidden
    whole = [] if plan.sequence_parallel else [Call("tp", "all_gather", elements)]
    return [Call("pp", "send", elements / plan.tp), *whole]
