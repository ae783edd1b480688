"""The rounds of messages of each algorithm. Bytes and seconds follow from them.

In every round each rank sends one message at most and receives one at most. Where a docstring names no other source,
steps are as in Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH", IJHPCA
19(1), 2005, and Chan, Heimlich, Purkayastha, van de Geijn, "Collective communication: theory, practice, and
experience", 2007.
"""

from collections.abc import Callable, Iterable
from itertools import chain

from manyranks.theory.collectives import checks
from manyranks.theory.collectives.messages import Group, Message, Round, chunk_sizes, cut, mirrored, send, send_all

Rounds = list[Round]
Algorithm = Callable[[Group], Rounds]


def rounds(op: str, elements: int, n: int, algorithm: str | None = None, root: int = 0, node: int | None = None) -> Rounds:
    """Lists the messages of a collective, round by round; a round's messages are on the wire at the same time.

    elements: of the whole tensor
    root: position in the group, for operations that have one and for an all_reduce that goes through one (tree, naive)
    node: ranks of a node, for "hierarchical" only: ranks 0 … node−1 are the first node's

    A chunk of no elements is a message of 0 elements. The chain broadcast is cut into n pieces. A ring has n(n−1) messages:
    for thousands of ranks ask sent_bytes and seconds.
    Raises ValueError for an unknown operation or algorithm, a size below 0, n below 1, and an n or a node that does not suit.
    """
    algorithm = algorithm or checks.usual(op)
    checks.algorithm(_ROUNDS, op, algorithm)
    checks.group(op, n, algorithm, root, node)
    if elements < 0:
        raise ValueError(f"elements={elements}: must not be negative")
    return _ROUNDS[op][algorithm](Group(range(n), cut(0, elements, n), root, node))


def ring_reduce_scatter(group: Group) -> Rounds:
    """Each chunk travels round the ring from the rank after its owner and collects a term at every stop.

    Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 69(2), 2009.
    """
    n = len(group.ranks)
    return [tuple(send(group, r, (r + 1) % n, (r - step - 1) % n, adds=True) for r in range(n)) for step in range(n - 1)]


def ring_all_gather(group: Group) -> Rounds:
    """Each rank passes on the chunk that it got last, its own first."""
    n = len(group.ranks)
    return [tuple(send(group, r, (r + 1) % n, (r - step) % n) for r in range(n)) for step in range(n - 1)]


def ring_all_reduce(group: Group) -> Rounds:
    """A reduce-scatter, then an all-gather of the sums."""
    return ring_reduce_scatter(group) + ring_all_gather(group)


def ring_reduce(group: Group) -> Rounds:
    """A reduce-scatter, then every chunk to the root, which takes one at a time."""
    return ring_reduce_scatter(group) + naive_gather(group)


def chain_broadcast(group: Group) -> Rounds:
    """Piece after piece down the chain root, root + 1, …: in round t the v-th rank after the root sends piece t − v."""
    n, pieces = len(group.ranks), len(group.cuts) - 1
    steps = range(n - 2 + pieces if n > 1 else 0)
    places = [(group.root + v) % n for v in range(n)]
    return [tuple(send(group, places[v], places[v + 1], t - v) for v in range(n - 1) if 0 <= t - v < pieces) for t in steps]


def tree_broadcast(group: Group) -> Rounds:
    """Binomial: in round k each of the 2^k ranks that have the tensor sends it to the one 2^k further on from the root."""
    n, root = len(group.ranks), group.root
    distances = [2**k for k in range((n - 1).bit_length())]
    return [tuple(send_all(group, (root + v) % n, (root + v + d) % n) for v in range(min(d, n - d))) for d in distances]


def tree_scatter(group: Group) -> Rounds:
    """Binomial: whoever holds chunks hands on the further half of them, the root at a distance of half the ranks first."""
    n, root = len(group.ranks), group.root
    out = []
    for d in (2**k for k in reversed(range((n - 1).bit_length()))):
        pairs = [(v, v + d, min(d, n - v - d)) for v in range(0, n - d, 2 * d)]
        out.append(tuple(send(group, (root + v) % n, (root + w) % n, (root + w) % n, chunks) for v, w, chunks in pairs))
    return out


def naive_broadcast(group: Group) -> Rounds:
    """The root sends the tensor to one rank after another."""
    return [(send_all(group, group.root, r),) for r in range(len(group.ranks)) if r != group.root]


def naive_scatter(group: Group) -> Rounds:
    """The root sends one rank after another its chunk."""
    return [(send(group, group.root, r, r),) for r in range(len(group.ranks)) if r != group.root]


def backwards(algorithm: Algorithm, adds: bool) -> Algorithm:
    """Makes a reduce of a broadcast, which adds, or a gather of a scatter."""
    return lambda group: mirrored(algorithm(group), adds)


tree_reduce, naive_reduce = backwards(tree_broadcast, adds=True), backwards(naive_broadcast, adds=True)
tree_gather, naive_gather = backwards(tree_scatter, adds=False), backwards(naive_scatter, adds=False)


def shifted(group: Group, theirs: bool, adds: bool) -> Rounds:
    """Sends from everyone to everyone: in round k, rank r its chunk (or with `theirs` the receiver's) to rank r + k."""
    n = len(group.ranks)
    return [_exchange(group, [(r + k) % n for r in range(n)], theirs, adds) for k in range(1, n)]


def pairwise(group: Group, theirs: bool, adds: bool) -> Rounds:
    """Exchanges as shifted does, but where n is a power of two rank r sends to r xor k, so that the two of a pair exchange."""
    n = len(group.ranks)
    if n & (n - 1):
        return shifted(group, theirs, adds)
    return [_exchange(group, [r ^ k for r in range(n)], theirs, adds) for k in range(1, n)]


def halving_reduce_scatter(group: Group) -> Rounds:
    """Ranks n/2 apart swap the halves of the tensor that the other one keeps, then n/4 apart, … 1. n is a power of two."""
    n = len(group.ranks)
    distances = [2**k for k in reversed(range(n.bit_length() - 1))]
    return [tuple(send(group, r, r ^ d, (r ^ d) // d * d, d, adds=True) for r in range(n)) for d in distances]


def doubling_all_gather(group: Group) -> Rounds:
    """Neighbors swap all they have, then ranks 2 apart, 4, … n/2. n is a power of two."""
    n = len(group.ranks)
    return [tuple(send(group, r, r ^ d, r // d * d, d) for r in range(n)) for d in (2**k for k in range(n.bit_length() - 1))]


def doubling_all_reduce(group: Group) -> Rounds:
    """Neighbors swap and add the whole tensor, then ranks 2 apart, 4, …; extra ranks are folded in."""

    def swap_and_add(core: Group) -> Rounds:
        n = len(core.ranks)
        return [tuple(send_all(core, r, r ^ 2**k, adds=True) for r in range(n)) for k in range(n.bit_length() - 1)]

    return _folded(group, swap_and_add)


def halving_doubling_all_reduce(group: Group) -> Rounds:
    """A halving reduce-scatter, then a doubling all-gather; extra ranks are folded in.

    Source: Rabenseifner, "Optimization of Collective Reduction Operations", ICCS 2004.
    """
    return _folded(group, lambda core: halving_reduce_scatter(core) + doubling_all_gather(core))


def hierarchical_all_reduce(group: Group) -> Rounds:
    """Ring reduce-scatter in each node, ring all-reduce of shard i among all nodes' i-th ranks, ring all-gather in a node."""
    n, node, start = len(group.ranks), group.node, group.cuts[0]
    shards = cut(start, group.cuts[-1] - start, node)
    inside = [Group(group.ranks[first : first + node], shards) for first in range(0, n, node)]
    sizes = chunk_sizes(shards[-1] - start, node)
    between = [Group(group.ranks[i::node], cut(shards[i], sizes[i], n // node)) for i in range(node)]
    return [
        *_together(ring_reduce_scatter, inside),
        *_together(ring_all_reduce, between),
        *_together(ring_all_gather, inside),
    ]


def _exchange(group: Group, partners: list[int], theirs: bool, adds: bool) -> Round:
    return tuple(send(group, r, to, to if theirs else r, adds=adds) for r, to in enumerate(partners))


def _folded(group: Group, core: Algorithm) -> Rounds:
    """Runs `core` on the largest power of two p ≤ n of ranks, as MPICH does (Thakur et al. 2005, on allreduce).

    Among the first 2(n − p) ranks, each even one sends its whole tensor to the odd one after it, which adds it. These
    odd ranks and all from 2(n − p) on are the p places of `core`, in this order, with the tensor cut anew into p
    chunks. At the end each odd one sends the whole result back to its even one.
    """
    n, start = len(group.ranks), group.cuts[0]
    elements, extra = group.cuts[-1] - start, n - 2 ** (n.bit_length() - 1)
    even, odd = group.ranks[0 : 2 * extra : 2], group.ranks[1 : 2 * extra : 2]
    places = [*odd, *group.ranks[2 * extra :]]
    middle = core(Group(places, cut(start, elements, len(places))))
    if not extra:
        return middle
    fold = tuple(Message(a, b, start, elements, True) for a, b in zip(even, odd, strict=True))
    return [fold, *middle, *mirrored([fold], adds=False)]


def _together(algorithm: Algorithm, groups: Iterable[Group]) -> Rounds:
    """The rounds of groups of the same size, all at the same time."""
    return [tuple(chain(*same)) for same in zip(*(algorithm(group) for group in groups), strict=True)]


_ROUNDS: dict[str, dict[str, Algorithm]] = {
    "all_reduce": {
        "ring": ring_all_reduce,
        "tree": lambda group: tree_reduce(group) + tree_broadcast(group),
        "naive": lambda group: naive_reduce(group) + naive_broadcast(group),
        "recursive_doubling": doubling_all_reduce,
        "halving_doubling": halving_doubling_all_reduce,
        "hierarchical": hierarchical_all_reduce,
    },
    "reduce_scatter": {
        "ring": ring_reduce_scatter,
        "naive": lambda group: shifted(group, theirs=True, adds=True),
        "halving": halving_reduce_scatter,
        "pairwise": lambda group: pairwise(group, theirs=True, adds=True),
    },
    "all_gather": {
        "ring": ring_all_gather,
        "naive": lambda group: shifted(group, theirs=False, adds=False),
        "recursive_doubling": doubling_all_gather,
        "pairwise": lambda group: pairwise(group, theirs=False, adds=False),
    },
    "reduce": {"ring": ring_reduce, "tree": tree_reduce, "naive": naive_reduce},
    "broadcast": {"ring": chain_broadcast, "tree": tree_broadcast, "naive": naive_broadcast},
    "scatter": {"tree": tree_scatter, "naive": naive_scatter},
    "gather": {"tree": tree_gather, "naive": naive_gather},
    "all_to_all": {"pairwise": lambda group: pairwise(group, theirs=True, adds=False)},
}

ALGORITHMS: dict[str, tuple[str, ...]] = {op: tuple(algorithms) for op, algorithms in _ROUNDS.items()}
