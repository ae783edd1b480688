"""Seconds of a collective on a cluster whose levels have different links: each round waits for its slowest message."""

import functools
from collections import Counter
from typing import NamedTuple

from manyranks.theory.cluster import Cluster
from manyranks.theory.collectives import checks
from manyranks.theory.collectives.algorithms import rounds
from manyranks.theory.hardware import Link


class Leg(NamedTuple):
    """The largest message of a round on one kind of link: its share of the whole tensor."""

    link: Link
    share: float


def cluster_seconds(op: str, bytes: float, n: int, cluster: Cluster, algorithm: str | None = None, root: int = 0) -> float:
    """Seconds of one collective of ranks 0 … n−1 on the first n accelerators of the cluster; 0 for one rank.

    The sum over its rounds of the slowest message's α + size/β, each on the link between its two ranks, which it has to itself.
    bytes: of the whole tensor, as in sent_bytes. "hierarchical" takes the cluster's nodes. "ring" is one ring in the order of
    the ranks, and of broadcast a chain of n pieces. Chunks are bytes/n, not rounded. A torus counts as if all its chips were
    neighbours: torus_seconds has its own algorithm.
    Raises ValueError as rounds does, for a size below 0, and for more ranks than the cluster has room for. The messages are
    gone through once; with n in the thousands a ring has millions.
    """
    if not bytes >= 0:
        raise ValueError(f"bytes={bytes}: must not be negative")
    alike = _rounds(op, n, cluster, algorithm or checks.usual(op), root)
    return sum(times * max(leg.link.seconds(leg.share * bytes) for leg in legs) for legs, times in alike)


def round_count(op: str, n: int, cluster: Cluster, algorithm: str) -> int:
    """Rounds of one collective, as cluster_seconds counts them."""
    return sum(times for _, times in _rounds(op, n, cluster, algorithm, 0))


@functools.lru_cache(maxsize=1024)
def _rounds(op: str, n: int, cluster: Cluster, algorithm: str, root: int) -> tuple[tuple[tuple[Leg, ...], int], ...]:
    """The rounds by their largest message on each kind of link, and how many are alike."""
    elements = 16 * n * 2 ** max(n - 1, 0).bit_length()  # a multiple of every number of chunks that an algorithm cuts
    node = min(cluster.node, n) if algorithm == "hierarchical" else None
    found, between = Counter(), functools.cache(cluster.between)
    for messages in rounds(op, elements, n, algorithm, root, node):
        largest: dict[Link, int] = {}
        for message in messages:
            link = between(message.source, message.destination)
            largest[link] = max(largest.get(link, 0), message.count)
        found[tuple(Leg(link, count / elements) for link, count in largest.items())] += 1
    return tuple(found.items())
