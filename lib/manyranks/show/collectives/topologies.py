"""What chapter 01's explorer runs collectives on, and how long each algorithm takes there.

Model: every round waits for its slowest message, which takes α + size/β on the link between its two ranks: NVLink inside a
node, the ranks' own network cards between nodes (theory.collectives.cluster_seconds). Ranks 0 to 7 are the first node. A ring
is one ring, a broadcast's is a chain of n pieces. On a torus there is one algorithm, which runs on all axes at once
(theory.collectives.torus_seconds), over the shape that is nearest to a cube; every axis closes to a ring.
"""

from manyranks.theory import clusters, collectives
from manyranks.theory.cluster import Cluster
from manyranks.theory.collectives import checks
from manyranks.theory.hardware import Link
from manyranks.theory.names import Named

_SYSTEMS = {
    "one H100 node (NVLink)": clusters["h100-dgx"].of(8),
    "H100 nodes of 8 (InfiniBand)": clusters["h100-dgx"],
    "TPU v5p torus": clusters["tpu-v5p"],
    "laptop": clusters["laptop"],
}
TOPOLOGIES: dict[str, Cluster] = Named("topology", _SYSTEMS)
_COUNTING = Link("one second a message", 1.0, 1.0)
_ON_TORUS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")


def node_of(topology: str, algorithm: str) -> int | None:
    """Ranks of a node, for the algorithm that has nodes; None for the others."""
    return TOPOLOGIES[topology].node if algorithm == "hierarchical" else None


def check(operation: str, algorithm: str, n: int, topology: str) -> None:
    """Raises ValueError where the operation has no such algorithm, n ranks do not suit it, or the topology does not."""
    checks.algorithm(collectives.ALGORITHMS, operation, algorithm)
    checks.group(operation, n, algorithm, node=n if algorithm == "hierarchical" else None)
    cluster = TOPOLOGIES[topology]
    room = cluster.gpus or cluster.levels[-1].size
    if n > room:
        raise ValueError(f"n={n}: {topology} has room for {room} ranks; take fewer, or another topology")
    if cluster.torus:
        _check_torus(operation, algorithm)
    elif algorithm == "hierarchical" and n <= cluster.node:
        raise ValueError(
            f"n={n}: hierarchical needs more than one node, here there is one; take 16, 24, 32, … ranks in H100 nodes of 8"
        )


def _check_torus(operation: str, algorithm: str) -> None:
    if operation not in _ON_TORUS:
        raise ValueError(f"{operation} on a torus: no time is known here; there are those of {', '.join(_ON_TORUS)}")
    own = collectives.usual(operation)
    if algorithm != own:
        raise ValueError(f"{algorithm} on a torus: only its own {operation}, on all axes at once, is timed; choose {own}")


def seconds(operation: str, algorithm: str, n: int, size: float, topology: str) -> float:
    """Seconds of the collective; `size` bytes of the whole tensor. Raises ValueError as check and theory.collectives do."""
    check(operation, algorithm, n, topology)
    cluster = TOPOLOGIES[topology]
    if cluster.torus:
        return collectives.torus_seconds(operation, size, shape(n), cluster.levels[0].link)
    return collectives.cluster_seconds(operation, size, n, cluster, algorithm)


def shape(n: int) -> tuple[int, int, int]:
    """The three axes of n chips that are nearest to a cube, longest first: 16 -> (4, 2, 2)."""
    sides = [d for d in range(1, n + 1) if n % d == 0]
    found = [(n // (b * c), b, c) for c in sides for b in sides if c <= b and n % (b * c) == 0 and b <= n // (b * c)]
    return min(found, key=sum)


def offered(operation: str, n: int, topology: str) -> list[str]:
    """The operation's algorithms that can run on n ranks of this topology."""
    return [name for name in collectives.ALGORITHMS[operation] if _runs(operation, name, n, topology)]


def _runs(operation: str, algorithm: str, n: int, topology: str) -> bool:
    try:
        seconds(operation, algorithm, n, 1, topology)
    except ValueError:
        return False
    return True


def round_count(operation: str, algorithm: str, n: int, node: int | None) -> int:
    """Rounds of messages, one after the other, without listing them; a broadcast by ring is cut into n pieces: 2n − 2."""
    if (operation, algorithm) == ("broadcast", "ring"):
        return 2 * n - 2
    link = (_COUNTING, _COUNTING) if node else _COUNTING
    return round(collectives.seconds(operation, 0, n, link, algorithm, node))


def least(operation: str, size: float, n: int) -> float:
    """Bytes that the rank which sends most cannot do without.

    For all but gather, those of nccl-tests' bus bandwidth: the bytes of the busiest link. A gather's busiest is the link into
    the root, which sends nothing; every other rank has to send its chunk.
    """
    if n == 1:
        return 0.0
    return size / n if operation == "gather" else collectives.bus_bandwidth(operation, size, 1.0, n)
