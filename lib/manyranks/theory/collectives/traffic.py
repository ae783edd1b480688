"""Bytes that each rank sends in a collective, exactly, for any size and any number of ranks."""

from collections.abc import Callable

from manyranks.theory.collectives import checks
from manyranks.theory.collectives.algorithms import ALGORITHMS, rounds
from manyranks.theory.collectives.messages import chunk_sizes

Sizes = list[int]


def sent_bytes(
    op: str, elements: int, itemsize: int, n: int, algorithm: str | None = None, root: int = 0, node: int | None = None
) -> Sizes:
    """Counts the bytes of payload that rank 0, 1, … n−1 sends: the sum over the messages of rounds().

    elements: of the whole tensor, counted where it is whole: the input of all_reduce, reduce, reduce_scatter, broadcast and
        scatter, the output of all_gather and gather, one rank's input of all_to_all
    algorithm: default a ring, where the operation has one
    root: position in the group
    node: ranks of a node, for "hierarchical" only

    The pieces of a chain broadcast add up to the same bytes however many they are.
    Raises ValueError for an unknown operation, an algorithm that it does not have, negative numbers, or an n or a node that
    does not suit.
    Source: Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH", 2005.
    """
    if not all(type(size) is int and size >= 0 for size in (elements, itemsize)):
        raise ValueError(f"elements={elements!r}, itemsize={itemsize!r}: whole numbers that must not be negative")
    algorithm = algorithm or checks.usual(op)
    checks.algorithm(ALGORITHMS, op, algorithm)
    checks.group(op, n, algorithm, root, node)
    closed = _CLOSED.get((op, algorithm))
    counts = closed(elements, n, root, node) if closed else _of_rounds(op, elements, n, algorithm, root)
    return [itemsize * count for count in counts]


def _of_rounds(op: str, elements: int, n: int, algorithm: str, root: int) -> Sizes:
    sent = [0] * n
    for messages in rounds(op, elements, n, algorithm, root):
        for message in messages:
            sent[message.source] += message.count
    return sent


def _ring_reduce_scatter(elements: int, n: int, *_) -> Sizes:
    return [elements - chunk for chunk in chunk_sizes(elements, n)]  # every chunk but the one it keeps


def _ring_all_gather(elements: int, n: int, *_) -> Sizes:
    chunks = chunk_sizes(elements, n)
    return [elements - chunk for chunk in chunks[1:] + chunks[:1]]  # every chunk but its neighbor's own


def _ring_all_reduce(elements: int, n: int, *_) -> Sizes:
    return [a + b for a, b in zip(_ring_reduce_scatter(elements, n), _ring_all_gather(elements, n), strict=True)]


def _ring_reduce(elements: int, n: int, root: int, node: int | None) -> Sizes:
    return [elements - (chunk if r == root else 0) for r, chunk in enumerate(chunk_sizes(elements, n))]


def _chain_broadcast(elements: int, n: int, root: int, node: int | None) -> Sizes:
    return [elements if (r - root) % n < n - 1 else 0 for r in range(n)]


def _own_to_all(elements: int, n: int, *_) -> Sizes:
    return [(n - 1) * chunk for chunk in chunk_sizes(elements, n)]


def _hierarchical(elements: int, n: int, root: int, node: int) -> Sizes:
    inside = _ring_all_reduce(elements, node)
    between = [_ring_all_reduce(shard, n // node) for shard in chunk_sizes(elements, node)]
    return [inside[r % node] + between[r % node][r // node] for r in range(n)]


# Where an algorithm has more than O(n log n) messages.
_CLOSED: dict[tuple[str, str], Callable[[int, int, int, int | None], Sizes]] = {
    ("all_reduce", "ring"): _ring_all_reduce,
    ("all_reduce", "hierarchical"): _hierarchical,
    ("reduce_scatter", "ring"): _ring_reduce_scatter,
    ("reduce_scatter", "naive"): _ring_reduce_scatter,
    ("reduce_scatter", "pairwise"): _ring_reduce_scatter,
    ("all_gather", "ring"): _ring_all_gather,
    ("all_gather", "naive"): _own_to_all,
    ("all_gather", "pairwise"): _own_to_all,
    ("reduce", "ring"): _ring_reduce,
    ("broadcast", "ring"): _chain_broadcast,
    ("all_to_all", "pairwise"): _ring_reduce_scatter,
}
