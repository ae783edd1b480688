"""Seconds of a collective on links of latency α and bandwidth β: the sum over its rounds of α + largest message / β.

Model: all messages of a round at the same time, each rank sending one and receiving one; adding costs nothing
(Hockney's model, as in Thakur, Rabenseifner, Gropp 2005 and Chan et al. 2007, without their γ).
"""

import functools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from manyranks.theory.cluster import Cluster
from manyranks.theory.collectives import checks
from manyranks.theory.collectives.algorithms import rounds
from manyranks.theory.hardware import Link
from manyranks.theory.names import one_of

Links = Link | tuple[Link, Link]


class Path(NamedTuple):
    """The sum of the rounds: messages one after the other, and the whole tensors that these carry."""

    messages: int
    tensors: float


def seconds(op: str, bytes: float, n: int, link: Links, algorithm: str | None = None, node: int | None = None) -> float:
    """Computes the seconds of one collective of n ranks; 0 for one rank.

    bytes: of the whole tensor, as in sent_bytes
    link: the Link between any two ranks, whose bandwidth is what one rank has to itself (of an oversubscribed network, its
        share); for "hierarchical" the pair of Links inside a node and between nodes
    node: ranks of a node, for "hierarchical" only

    Chunks are bytes/n, not rounded. A root that sends to one rank after another takes a round for
    each. "ring" of broadcast is the chain, cut into as many pieces as are fastest: k pieces take (n−2+k)(α + bytes/kβ).
    Raises ValueError for an unknown operation or algorithm, a size below 0, an n or a node that does not suit, the wrong links.
    Source: Thakur, Rabenseifner, Gropp 2005; Chan, Heimlich, Purkayastha, van de Geijn 2007.
    """
    if not bytes >= 0:
        raise ValueError(f"bytes={bytes}: must not be negative")
    algorithm = algorithm or checks.usual(op)
    fixed, per_byte = _line(op, n, link, algorithm, node)
    if (op, algorithm) == ("broadcast", "ring"):
        return _chain_broadcast(bytes, n, link)
    return fixed + per_byte * bytes


def crossover(op: str, n: int, link: Link, first: str, second: str) -> float | None:
    """Bytes above which algorithm `second` is always faster than `first`.

    0.0 where it is faster at any size; None where it never is, or only for small tensors. Raises ValueError as seconds does.
    """
    one, other = (_line(op, n, link, algorithm, None) for algorithm in (first, second))
    if op == "broadcast" and "ring" in (first, second):
        return _chain_crossover(n, link, first, second)
    fixed, per_byte = other[0] - one[0], other[1] - one[1]
    if per_byte > 0 or (per_byte == 0 and fixed >= 0):
        return None
    return max(0.0, -fixed / per_byte) if per_byte else 0.0


def _line(op: str, n: int, link: Links, algorithm: str, node: int | None) -> tuple[float, float]:
    """Seconds that do not depend on the size, and seconds a byte."""
    checks.algorithm(_PATHS, op, algorithm)
    checks.group(op, n, algorithm, node=node)
    if algorithm == "hierarchical":
        return _hierarchical(n, link, node)
    if not isinstance(link, Link):
        raise ValueError(f"link={link!r}: {algorithm!r} takes one Link; only 'hierarchical' takes a pair")
    messages, tensors = _PATHS[op][algorithm](n)
    return messages * link.latency, tensors / link.bandwidth


def _hierarchical(n: int, link: Links, node: int) -> tuple[float, float]:
    if isinstance(link, Link) or len(link) != 2:
        raise ValueError(f"link={link!r}: 'hierarchical' takes a pair of Links, inside a node and between nodes")
    (inside, between), nodes = link, n // node
    fixed = 2 * (node - 1) * inside.latency + 2 * (nodes - 1) * between.latency
    return fixed, 2 * (node - 1) / node / inside.bandwidth + 2 * (nodes - 1) / n / between.bandwidth


def _chain_broadcast(bytes: float, n: int, link: Link) -> float:
    if n == 1:
        return 0.0

    def of(pieces: int) -> float:
        return (n - 2 + pieces) * (link.latency + bytes / pieces / link.bandwidth)

    # The derivative by k of (n−2+k)(α + bytes/kβ) is 0 at k² = (n−2)·bytes/αβ; a piece has at least a byte.
    most = max(1.0, bytes)
    best = math.sqrt((n - 2) * bytes / link.half_bandwidth_bytes) if link.half_bandwidth_bytes else most
    below = max(1, math.floor(min(best, most)))
    return min(of(below), of(below + 1))


def _chain_crossover(n: int, link: Link, first: str, second: str) -> float | None:
    # A chain of many pieces needs 1/β a byte, all else twice that or more for n > 2. For n = 2 all are one message.
    if n <= 2 or first == "ring":
        return None

    def faster(bytes: float) -> bool:
        return seconds("broadcast", bytes, n, link, second) < seconds("broadcast", bytes, n, link, first) * (1 - 1e-12)

    low, high = 0.0, 1.0
    while not faster(high):
        high *= 2
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if faster(middle) else (middle, high)
    return high


def _chunk_at_a_time(n: int) -> Path:
    return Path(n - 1, (n - 1) / n)


def _tensor_at_a_time(n: int) -> Path:
    return Path(n - 1, n - 1)


def _tree(n: int) -> Path:
    return Path((n - 1).bit_length(), (n - 1).bit_length())


def _halves(n: int) -> Path:
    return Path((n - 1).bit_length(), (n - 1) / n)  # a tree's scatter too: where n is no power of two its first half is smaller


def _twice(path: Callable[[int], Path]) -> Callable[[int], Path]:
    return lambda n: Path(2 * path(n).messages, 2 * path(n).tensors)


def _folded(path: Callable[[int], Path]) -> Callable[[int], Path]:
    """The path on the largest power of two of ranks, and where n is more, the whole tensor to them and back."""

    def folded(n: int) -> Path:
        core = 2 ** (n.bit_length() - 1)
        extra = 2 if n > core else 0
        return Path(path(core).messages + extra, path(core).tensors + extra)

    return folded


_PATHS: dict[str, dict[str, Callable[[int], Path]]] = {
    "all_reduce": {
        "ring": _twice(_chunk_at_a_time),
        "tree": _twice(_tree),
        "naive": _twice(_tensor_at_a_time),
        "recursive_doubling": _folded(_tree),
        "halving_doubling": _folded(_twice(_halves)),
        "hierarchical": _twice(_chunk_at_a_time),  # of one node; _hierarchical has the rest
    },
    "reduce_scatter": dict.fromkeys(("ring", "naive", "pairwise"), _chunk_at_a_time) | {"halving": _halves},
    "all_gather": dict.fromkeys(("ring", "naive", "pairwise"), _chunk_at_a_time) | {"recursive_doubling": _halves},
    "reduce": {"ring": _twice(_chunk_at_a_time), "tree": _tree, "naive": _tensor_at_a_time},
    "broadcast": {"ring": _tensor_at_a_time, "tree": _tree, "naive": _tensor_at_a_time},  # a chain of one piece
    "scatter": {"tree": _halves, "naive": _chunk_at_a_time},
    "gather": {"tree": _halves, "naive": _chunk_at_a_time},
    "all_to_all": {"pairwise": _chunk_at_a_time},
}


def algorithm_bandwidth(bytes: float, seconds: float) -> float:
    """Bytes of the whole tensor a second, as in sent_bytes; nccl-tests' algbw.

    Raises ValueError for a size below 0 or a time that is not above 0. Source: NVIDIA/nccl-tests, doc/PERFORMANCE.md.
    """
    if not (bytes >= 0 and seconds > 0):
        raise ValueError(f"bytes={bytes}, seconds={seconds}: the size must not be negative, the time must be above 0")
    return bytes / seconds


def bus_bandwidth(op: str, bytes: float, seconds: float, n: int) -> float:
    """Bytes/s that a rank's link carries if it does no more than the operation needs; nccl-tests' busbw.

    It can be compared with the link's bandwidth for any n. With one rank it is 0 for the operations that then move
    nothing.
    Raises ValueError for an unknown operation, n below 1, and as algorithm_bandwidth.
    Source: NVIDIA/nccl-tests, doc/PERFORMANCE.md; for gather and scatter src/gather.cu and src/scatter.cu.
    """
    one_of(_FACTORS, op=op)
    if n < 1:
        raise ValueError(f"n={n}: a group has at least 1 rank")
    return algorithm_bandwidth(bytes, seconds) * _FACTORS[op](n)


def least_bytes(op: str, bytes: float, n: int) -> float:
    """Bytes that the rank which sends most cannot do without; `bytes`: as in sent_bytes.

    Those of bus_bandwidth's busiest link, but for gather: its busiest is the link into the root, which sends nothing, while
    every other rank has to send its chunk.
    """
    if n == 1:
        return 0.0
    return bytes / n if op == "gather" else bus_bandwidth(op, bytes, 1.0, n)


_FACTORS: dict[str, Callable[[int], float]] = {op: lambda n: (n - 1) / n for op in _PATHS}  # all but its own
_FACTORS |= {"all_reduce": lambda n: 2 * (n - 1) / n, "reduce": lambda n: 1.0, "broadcast": lambda n: 1.0}


def cluster_seconds(op: str, bytes: float, n: int, cluster: Cluster, algorithm: str | None = None) -> float:
    """Seconds of one collective of ranks 0 … n−1 on the first n accelerators of the cluster; 0 for one rank.

    The sum over its rounds of the slowest message's α + size/β, each on the link between its two ranks, which it has to itself.
    bytes: of the whole tensor, as in sent_bytes. "hierarchical" takes the cluster's nodes. "ring" is one ring in the order of
    the ranks, and of broadcast a chain of n pieces. Chunks are bytes/n, not rounded. A torus counts as if all its chips were
    neighbors: torus_seconds has its own algorithm.
    Raises ValueError as rounds does, for a size below 0, and for more ranks than the cluster has room for. The messages are
    gone through once; with n in the thousands a ring has millions.
    """
    if not bytes >= 0:
        raise ValueError(f"bytes={bytes}: must not be negative")
    alike = _rounds(op, n, cluster, algorithm or checks.usual(op))
    return sum(times * max(link.seconds(share * bytes) for link, share in legs) for legs, times in alike)


def round_count(op: str, n: int, cluster: Cluster, algorithm: str) -> int:
    """Rounds of one collective, as cluster_seconds counts them."""
    return sum(times for _, times in _rounds(op, n, cluster, algorithm))


@functools.lru_cache(maxsize=1024)
def _rounds(op: str, n: int, cluster: Cluster, algorithm: str) -> tuple[tuple[tuple[tuple[Link, float], ...], int], ...]:
    """The largest message of a round on each kind of link, as a share of the tensor, and how many rounds have the same."""
    elements = 16 * n * 2 ** max(n - 1, 0).bit_length()  # a multiple of every number of chunks that an algorithm cuts
    node = min(cluster.node, n) if algorithm == "hierarchical" else None
    found, between = Counter(), functools.cache(cluster.between)
    for messages in rounds(op, elements, n, algorithm, node=node):
        largest: dict[Link, int] = {}
        for message in messages:
            link = between(message.source, message.destination)
            largest[link] = max(largest.get(link, 0), message.count)
        found[tuple((link, count / elements) for link, count in largest.items())] += 1
    return tuple(found.items())


def torus_seconds(op: str, bytes: float, dims: Sequence[int], link: Link) -> float:
    """Computes the seconds of one collective over all chips of a torus; 0 for one chip.

    bytes: of the whole tensor, as in sent_bytes
    dims: chips along each axis, e.g. (4, 4, 4); every axis closes to a ring, and one of a single chip has no links
    link: one link of one axis, one way

    all_gather, reduce_scatter: α·hops + (N−1)/N·bytes / (2β·axes), where hops are half of each ring. A chip receives (N−1)/N of
    the tensor over two links of each axis. Equal dims reach this: the tensor is cut into a part per axis, and part i takes the
    axes in the order i, i+1, …, so that all links are always busy. With unequal dims it's a lower bound.
    all_reduce: both, one after the other.
    all_to_all: α·hops + (D//2)(D−D//2)/2D·bytes/β, D the longest axis. Cut across it, the chips of one side send the
    other side (D//2)(D−D//2)/D² ·N·bytes over 2N/D links. For an even D that is bytes·D/8β.

    Raises ValueError for an unknown operation, a size below 0 or an axis below 1.
    Source: jax-ml/scaling-book, sharding.md. It leaves out (N−1)/N, counts an all-to-all's bytes of all chips together, and
    takes the larger of the hops' time and the bytes' time; we take the sum.
    """
    one_of(("all_reduce", "reduce_scatter", "all_gather", "all_to_all"), op=op)
    if not bytes >= 0:
        raise ValueError(f"bytes={bytes}: must not be negative")
    if any(dim < 1 for dim in dims):
        raise ValueError(f"dims={tuple(dims)}: an axis has at least 1 chip")
    rings = [dim for dim in dims if dim > 1]
    if not rings:
        return 0.0
    chips, longest, hops = math.prod(rings), max(rings), sum(dim // 2 for dim in rings)  # hops to the furthest chip
    if op == "all_to_all":
        crossing = (longest // 2) * (longest - longest // 2) / (2 * longest)
        return hops * link.latency + crossing * bytes / link.bandwidth
    once = hops * link.latency + (chips - 1) / chips * bytes / (2 * len(rings) * link.bandwidth)
    return 2 * once if op == "all_reduce" else once


def cube(n: int) -> tuple[int, int, int]:
    """Finds the three axes of n chips that are nearest to a cube, longest first: 16 -> (4, 2, 2)."""
    sides = [d for d in range(1, n + 1) if n % d == 0]
    found = [(n // (b * c), b, c) for c in sides for b in sides if c <= b and n % (b * c) == 0 and b <= n // (b * c)]
    return min(found, key=sum)
