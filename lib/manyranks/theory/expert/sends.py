"""The bytes of every all-to-all of an expert layer, from the routing itself: one hop and two hops, forward and backward.

routing: for each rank of an expert-parallel group its tokens, each with the numbers of its K experts, −1 for a dropped copy.
Expert i is on rank i // X, X = E/e. A copy is a token's row of H numbers, for one expert. The ranks of a node follow each
other: rank r is at place r % (e/nodes) of node r // (e/nodes).

Where etp ranks cut each expert, they're neighbors: rank r has slice r % etp of the experts of place r // etp, and sends rows to
the ranks with the same slice. Source: Megatron-LM, whose expert ranks count etp first, then ep; arXiv 2504.14960.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from manyranks.theory import checks
from manyranks.theory.names import one_of

Routing = Sequence[Sequence[Sequence[int]]]
Matrix = tuple[tuple[int, ...], ...]  # [source][destination]

INDEX = 8  # bytes of a count and of an expert's number

# The exchanges: of one hop, and of the first of two, in which a copy is for a node.
ONE_HOP = ("counts", "rows", "results", "results' gradients", "rows' gradients")
TO_NODES = ("copies to come", "copies", "gates", "choices", "sums")
SLICES = ("counts of rows", "gathered rows", "partial sums", "sums' gradients to slices", "gradients' partial sums")
NAMES = (*ONE_HOP, *SLICES, *TO_NODES, "sums' gradients", "gates' gradients", "copies' gradients")


class Split(NamedTuple):
    """Bytes by the way they take: to the rank itself (no message), inside its node, to other nodes."""

    own: int
    inside: int
    between: int

    @property
    def sent(self) -> int:
        return self.inside + self.between


class Exchange(NamedTuple):
    """An all-to-all, of the whole group or of several side by side.

    bytes: [source][destination], a rank's own part too
    """

    what: str
    bytes: Matrix

    @property
    def sent(self) -> tuple[int, ...]:
        """Bytes that each rank sends to others: the payload."""
        return tuple(sum(row) - row[rank] for rank, row in enumerate(self.bytes))

    def split(self, node: int) -> Split:
        """Splits the bytes of all ranks together.

        node: ranks of a node
        """
        checks.whole(node=node)
        ways = [0, 0, 0]
        for source, row in enumerate(self.bytes):
            for destination, size in enumerate(row):
                ways[0 if source == destination else 1 if source // node == destination // node else 2] += size
        return Split(*ways)


class Sends(NamedTuple):
    """The all-to-alls of one layer on so many ranks, in the order issued."""

    ranks: int
    forward: tuple[Exchange, ...] = ()
    backward: tuple[Exchange, ...] = ()

    @property
    def both(self) -> tuple[Exchange, ...]:
        return self.forward + self.backward

    @property
    def payload(self) -> tuple[int, ...]:
        """Bytes that each rank sends to others, forward and backward."""
        return tuple(sum(exchange.sent[rank] for exchange in self.both) for rank in range(self.ranks))

    def split(self, node: int, what: str | None = None) -> Split:
        """Splits the bytes of all ranks, both passes together.

        what: of these exchanges only, one of NAMES, else ValueError
        """
        if what is not None:
            one_of(NAMES, what=what)
        chosen = [exchange.split(node) for exchange in self.both if what in (None, exchange.what)]
        return Split(*map(sum, zip((0, 0, 0), *chosen, strict=True)))


def one_hop(routing: Routing, experts: int, hidden: int, itemsize: int = 2, etp: int = 1) -> Sends:
    """Lists counts, rows to their experts and results back; backward the results' gradients there and the rows' back.

    itemsize: bytes of a number
    etp: ranks that cut each expert; routing has all e·etp ranks'. They gather the rows that came for any of them, and each
        sends the others their rows' partial sums

    One rank sends nothing. Raises ValueError for experts that the ranks don't divide, an expert that isn't there, tokens with
    different numbers of choices, and sizes below 1. Source: parallel.expert.one_hop and in_slices.
    """
    checks.whole(hidden=hidden, itemsize=itemsize, etp=etp)
    there, n = rows(routing, experts, etp), len(routing)
    groups = [rank % etp for rank in range(n)], [rank // etp for rank in range(n)]  # of ep, of etp
    told = INDEX * experts * etp // n
    each = _there_and_back(ONE_HOP, _times(there, hidden * itemsize), told, groups[0]) if n > etp else ()
    if etp == 1:
        return Sends(n, each[:3], each[3:])
    came = [hidden * itemsize * sum(column) for column in zip(*there, strict=True)]
    gathered = [[came[r] if groups[1][r] == groups[1][s] else 0 for s in range(n)] for r in range(n)]
    cut = _there_and_back(SLICES, _frozen(gathered), told, groups[1])
    return Sends(n, each[:2] + cut[:3] + each[2:3], each[3:4] + cut[3:] + each[4:])


def two_hops(routing: Routing, experts: int, hidden: int, nodes: int, itemsize: int = 2) -> Sends:
    """Counts as one_hop does, with one copy to each node that has experts of the token; K choices and K gates travel with it.

    Inside the node a copy goes to each of the token's experts; their weighted sum comes back as one row. A gate has
    4 bytes, or itemsize where that is more. Raises ValueError as one_hop does, and for nodes that do not divide the
    ranks. Source: parallel.expert.two_hops; arXiv 2412.19437, section 3.2.2.
    """
    checks.whole(hidden=hidden, itemsize=itemsize)
    first, second = node_rows(routing, experts, nodes), inside_rows(routing, experts, nodes)
    row, gates = hidden * itemsize, _choices(routing) * max(4, itemsize)
    there = back = inner = Sends(len(routing))
    if nodes > 1:
        there, back = _outer(first, row, gates, _choices(routing) * INDEX, nodes)
    if nodes < len(routing):
        inner = _inner(second, row, experts, nodes)
    forward = there.forward + inner.forward + back.forward
    return Sends(len(routing), forward, back.backward + inner.backward + there.backward)


def rows(routing: Routing, experts: int, etp: int = 1) -> Matrix:
    """Counts copies that each rank sends to each, one for a token and expert. Raises ValueError as one_hop does."""
    return _counted(len(routing), _copies(routing, experts, etp))


def node_rows(routing: Routing, experts: int, nodes: int) -> Matrix:
    """Copies of the first of two hops: one for each node that has one of the token's experts, to the rank at the sender's place
    in that node. Raises ValueError as two_hops does."""
    e, inside = _ranks(routing, experts), _inside(len(routing), nodes)
    tokens = [(source, token) for source, own in enumerate(routing) for token in own]
    chosen = [(source, {expert * nodes // experts for expert in token if expert >= 0}) for source, token in tokens]
    return _counted(e, ((source, node * inside + source % inside) for source, them in chosen for node in them))


def inside_rows(routing: Routing, experts: int, nodes: int) -> Matrix:
    """Copies of the second hop: from the rank at the token's place in a node to those with its experts there, one for each.

    Raises ValueError as two_hops does.
    """
    e, inside = len(routing), _inside(len(routing), nodes)
    return _counted(e, ((to // inside * inside + source % inside, to) for source, to in _copies(routing, experts)))


def _outer(first: Matrix, row: int, gates: int, choices: int, nodes: int) -> tuple[Sends, Sends]:
    """Lists what travels between nodes, there and back. Every rank tells the others at its place how many copies come."""
    e, there = len(first), _times(first, row)
    told = [[INDEX if r % (e // nodes) == s % (e // nodes) else 0 for s in range(e)] for r in range(e)]
    forward = Exchange("copies to come", _frozen(told)), Exchange("copies", there)
    forward += Exchange("gates", _times(first, gates)), Exchange("choices", _times(first, choices))
    backward = Exchange("gates' gradients", _turned(_times(first, gates))), Exchange("copies' gradients", _turned(there))
    return Sends(e, forward, backward), Sends(e, (Exchange("sums", _turned(there)),), (Exchange("sums' gradients", there),))


def _inner(second: Matrix, row: int, experts: int, nodes: int) -> Sends:
    """Inside the nodes: one hop, in groups side by side."""
    e = len(second)
    each = _there_and_back(ONE_HOP, _times(second, row), INDEX * experts // e, [rank * nodes // e for rank in range(e)])
    return Sends(e, each[:3], each[3:])


def _there_and_back(names: Sequence[str], there: Matrix, told: int, group: list[int]) -> tuple[Exchange, ...]:
    """Lists exchanges in groups side by side: `told` bytes of counts to each rank, rows and results; gradients of both."""
    counts = [[told if mine == other else 0 for other in group] for mine in group]
    each = (_frozen(counts), there, _turned(there), there, _turned(there))
    return tuple(Exchange(*one) for one in zip(names, each, strict=True))


def _copies(routing: Routing, experts: int, etp: int = 1) -> list[tuple[int, int]]:
    """Lists where each copy comes from, and the rank of its expert."""
    n = _ranks(routing, experts, etp)
    chosen = ((r, expert) for r, tokens in enumerate(routing) for token in tokens for expert in token if expert >= 0)
    return [(source, expert * (n // etp) // experts * etp + source % etp) for source, expert in chosen]


def _counted(n: int, ways: Iterable[tuple[int, int]]) -> Matrix:
    """Counts the copies from each of n ranks to each."""
    found = Counter(ways)
    return tuple(tuple(found[source, destination] for destination in range(n)) for source in range(n))


def _frozen(counts: list[list[int]]) -> Matrix:
    return tuple(map(tuple, counts))


def _times(counts: Matrix, size: int) -> Matrix:
    """Counts so many bytes for each of these copies."""
    return tuple(tuple(size * count for count in row) for row in counts)


def _turned(counts: Matrix) -> Matrix:
    """The same on the way back."""
    return tuple(zip(*counts, strict=True))


def _choices(routing: Routing) -> int:
    """K; 0 where no rank has a token."""
    return next((len(token) for tokens in routing for token in tokens), 0)


def _ranks(routing: Routing, experts: int, etp: int = 1) -> int:
    """Returns e·etp, checked."""
    checks.whole(experts=experts)
    e = len(routing)
    if e < 1 or e % etp:
        raise ValueError(f"routing of {e} ranks with etp={etp}: give a multiple of etp")
    if experts * etp % e:
        raise ValueError(f"routing of {e} ranks for experts={experts}: give a number of ranks that divides {experts * etp}")
    choices = {choice for tokens in routing for token in tokens for choice in token}
    if wrong := [choice for choice in choices if not -1 <= choice < experts]:
        raise ValueError(f"expert {wrong[0]} in the routing: they are 0 to {experts - 1}, and -1 for a dropped copy")
    if len({len(token) for tokens in routing for token in tokens}) > 1:
        raise ValueError("tokens of the routing have different numbers of choices: give -1 for a copy that is dropped")
    return e


def _inside(e: int, nodes: int) -> int:
    checks.whole(nodes=nodes)
    if e % nodes:
        raise ValueError(f"nodes={nodes} does not divide the {e} ranks of the routing: choose a divisor of {e}")
    return e // nodes


def choices_of(routing: Routing, experts: int) -> list[int]:
    """Every copy's expert, without the dropped ones. Raises ValueError as one_hop does."""
    _ranks(routing, experts)
    return [expert for tokens in routing for token in tokens for expert in token if expert >= 0]
