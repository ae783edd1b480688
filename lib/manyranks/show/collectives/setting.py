"""Chapter 01's settings: a collective, its algorithm and where it runs; its rounds, what ranks then hold, how long it takes.

Times are theory.collectives.cluster_seconds'; ranks 0 to 7 are the first node. On a torus there is one algorithm, which runs on
all axes at once (torus_seconds), over the shape that is nearest to a cube.
"""

import functools
from contextlib import suppress
from typing import NamedTuple

from manyranks.theory import clusters, collectives
from manyranks.theory.cluster import Cluster
from manyranks.theory.collectives import ALGORITHMS, Round, checks, contents, timing, topology
from manyranks.theory.names import Named

_SYSTEMS = {
    "one H100 node (NVLink)": clusters["h100-dgx"].of(8),
    "H100 nodes of 8 (InfiniBand)": clusters["h100-dgx"],
    "TPU v5p torus": clusters["tpu-v5p"],
    "laptop": clusters["laptop"],
}
TOPOLOGIES: dict[str, Cluster] = Named("topology", _SYSTEMS)
_ON_TORUS = {each: collectives.usual(each) for each in ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")}
SIZES = [2**k for k in range(0, 37, 2)]  # 1 B to 64 GiB
_rounds = functools.lru_cache(maxsize=256)(collectives.rounds)


class Setting(NamedTuple):
    """What the controls say; size: bytes of the whole tensor."""

    operation: str
    algorithm: str
    n: int
    size: int
    topology: str

    @property
    def cluster(self) -> Cluster:
        return TOPOLOGIES[self.topology]

    @property
    def node(self) -> int | None:
        """Ranks of a node, for the algorithm that has nodes."""
        return self.cluster.node if self.algorithm == "hierarchical" else None

    def rounds(self, elements: int) -> list[Round]:
        """Messages of a tensor of so many elements."""
        return _rounds(self.operation, elements, self.n, self.algorithm, node=self.node)

    @property
    def steps(self) -> int:
        """Rounds that it takes."""
        return timing.round_count(self.operation, self.n, self.cluster, self.algorithm)

    def messages(self, step: int) -> list[tuple[int, int, float]]:
        """Those of round `step`, counted from 1, as (source, destination, share of the whole tensor); none in round 0."""
        drawn = self.rounds(self.size)[step - 1] if step else ()
        return [(m.source, m.destination, m.count / self.size) for m in drawn]

    def counts(self, step: int) -> list[list[int]]:
        """[rank][chunk]: how many ranks' terms are in what that rank holds after so many rounds."""
        chunks = contents.chunks(self.operation, self.algorithm, self.n)
        held = contents.after(self.operation, contents.at_first(self.operation, self.n, chunks), self.rounds(chunks)[:step])
        return [[terms.bit_count() for terms in row] for row in held]

    def seconds(self, size: float) -> float:
        """Raises ValueError for what cannot be: an algorithm, ranks or a topology that do not suit."""
        self._check()
        if self.cluster.torus:
            return collectives.torus_seconds(self.operation, size, topology.cube(self.n), self.cluster.levels[0].link)
        return collectives.cluster_seconds(self.operation, size, self.n, self.cluster, self.algorithm)

    @property
    def times(self) -> dict[str, list[float]]:
        """For each of the operation's algorithms that can run here, its seconds at SIZES."""
        return _times(self.operation, self.n, self.topology)

    def _check(self) -> None:
        operation, algorithm, n, _, topology = self
        if algorithm not in (known := ALGORITHMS[operation]):
            raise ValueError(f"{operation} has no {algorithm} algorithm: choose {', '.join(known)}")
        if self.node and n and (n <= self.node or n % self.node):
            raise ValueError(f"N = {n}: hierarchical needs two or more whole nodes of {self.node} ranks; {topology} has none")
        try:
            checks.group(operation, n, algorithm, node=n if self.node else None)
        except ValueError as error:
            raise ValueError(str(error).replace("n=", "N = ")) from None
        if n > (room := self.cluster.gpus or self.cluster.levels[-1].size):
            raise ValueError(f"N = {n}: {topology} has only {room} ranks; choose fewer, or another topology")
        if self.cluster.torus and _ON_TORUS.get(operation) != algorithm:
            timed = ", ".join(f"{each} by {way}" for each, way in _ON_TORUS.items())
            raise ValueError(f"{operation} by {algorithm} isn't timed on a torus; choose {timed}")


@functools.lru_cache(maxsize=256)
def _times(operation: str, n: int, topology: str) -> dict[str, list[float]]:
    found = {}
    for name in ALGORITHMS[operation]:
        with suppress(ValueError):
            found[name] = [Setting(operation, name, n, size, topology).seconds(size) for size in SIZES]
    return found
