"""Bytes that each rank sends in a collective, exactly, for any size and any number of ranks.

Chunk r of a tensor of E elements on n ranks has E//n elements, and one more where r < E % n (torch.tensor_split's rule).
"""

from collections.abc import Callable

Sizes = list[int]


def chunk_sizes(elements: int, n: int) -> Sizes:
    """Elements of each of the n chunks."""
    return [elements // n + (r < elements % n) for r in range(n)]


def sent_bytes(op: str, elements: int, itemsize: int, n: int, algorithm: str = "ring", root: int = 0) -> Sizes:
    """Bytes of payload that rank 0, 1, … n−1 sends.

    elements: of the whole tensor, counted where it is whole: the input of all_reduce, reduce, reduce_scatter, broadcast and
    scatter, the output of all_gather and gather, one rank's input of all_to_all. root: position in the group.
    Raises ValueError for an unknown operation, an algorithm that it does not have, or negative numbers.
    Source: Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH", 2005.
    """
    if elements < 0 or itemsize < 0 or n < 1:
        raise ValueError(f"elements={elements}, itemsize={itemsize}, n={n}: sizes must not be negative, n at least 1")
    if not 0 <= root < n:
        raise ValueError(f"root={root}: must be one of the {n} ranks, 0 to {n - 1}")
    algorithms = _SENT.get(op)
    if algorithms is None:
        raise ValueError(f"op={op!r}: known are {', '.join(_SENT)}")
    if algorithm not in algorithms:
        raise ValueError(f"algorithm={algorithm!r}: {op} has {', '.join(algorithms)}")
    return [itemsize * count for count in algorithms[algorithm](chunk_sizes(elements, n), n, root)]


def _ring_reduce_scatter(chunks: Sizes, n: int, root: int) -> Sizes:
    return [sum(chunks) - chunks[r] for r in range(n)]  # every chunk but the one it keeps


def _ring_all_gather(chunks: Sizes, n: int, root: int) -> Sizes:
    return [sum(chunks) - chunks[(r + 1) % n] for r in range(n)]  # every chunk but its neighbour's own


def _ring_all_reduce(chunks: Sizes, n: int, root: int) -> Sizes:
    return [a + b for a, b in zip(_ring_reduce_scatter(chunks, n, root), _ring_all_gather(chunks, n, root), strict=True)]


def _ring_reduce(chunks: Sizes, n: int, root: int) -> Sizes:
    own = [chunk if r != root else 0 for r, chunk in enumerate(chunks)]  # reduce-scatter, then each chunk to the root
    return [a + b for a, b in zip(_ring_reduce_scatter(chunks, n, root), own, strict=True)]


def _chain_broadcast(chunks: Sizes, n: int, root: int) -> Sizes:
    return [sum(chunks) if (r - root) % n < n - 1 else 0 for r in range(n)]


def _tree_broadcast(chunks: Sizes, n: int, root: int) -> Sizes:
    # Binomial: in round k, each of the first 2^k positions after the root sends to the one 2^k further on.
    rounds = range((n - 1).bit_length())
    places = [(r - root) % n for r in range(n)]
    return [sum(chunks) * sum(v < 2**k and v + 2**k < n for k in rounds) for v in places]


def _naive_broadcast(chunks: Sizes, n: int, root: int) -> Sizes:
    return [sum(chunks) * (n - 1) if r == root else 0 for r in range(n)]


def _scatter(chunks: Sizes, n: int, root: int) -> Sizes:
    return [sum(chunks) - chunks[root] if r == root else 0 for r in range(n)]


def _gather(chunks: Sizes, n: int, root: int) -> Sizes:
    return [0 if r == root else chunks[r] for r in range(n)]


_SENT: dict[str, dict[str, Callable[[Sizes, int, int], Sizes]]] = {
    "all_reduce": {"ring": _ring_all_reduce},
    "reduce_scatter": {"ring": _ring_reduce_scatter},
    "all_gather": {"ring": _ring_all_gather},
    "reduce": {"ring": _ring_reduce},
    "broadcast": {"ring": _chain_broadcast, "tree": _tree_broadcast, "naive": _naive_broadcast},
    "scatter": {"naive": _scatter},
    "gather": {"naive": _gather},
    "all_to_all": {"pairwise": _ring_reduce_scatter},
}
