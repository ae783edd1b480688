"""The costs of a program on a cluster: the bridge from theory to timeline.replay."""

from collections.abc import Hashable
from dataclasses import dataclass

from manyranks.theory import checks, collectives, kernels, network
from manyranks.theory.cluster import Cluster, Level
from manyranks.theory.kernels import DEFAULT, Constants
from manyranks.theory.layer import Kernel
from manyranks.timeline.costs import Transfer
from manyranks.timeline.program import Work


@dataclass(frozen=True)
class ClusterCosts:
    """Costs for timeline.replay: rank r of the program is the r-th accelerator of the cluster.

    Work is charged as a kernel, a number as that many seconds. A transfer's channels are its ranks' shares of the network, out
    and in, at the outermost level that it needs: two transfers of one rank at the same level share them. A collective keeps
    the shares of all its members busy for as long as it takes alone.
    Raises ValueError for work that is neither, an unknown operation, or a rank that the cluster does not have.
    """

    cluster: Cluster
    constants: Constants = DEFAULT

    def __post_init__(self):
        checks.kinds(cluster=self.cluster)

    def compute(self, rank: int, work: Hashable) -> float:
        if isinstance(work, Work):
            if not (work.flops or work.bytes):
                return 0.0
            kernel = Kernel("compute", work.flops, work.bytes)
            return kernels.seconds(kernel, self.cluster.accelerator, self.constants, self.cluster.reserved)
        if isinstance(work, int | float):
            return float(work)
        raise ValueError(f"work {work!r}: a cluster charges Work(flops, bytes), or a number of seconds")

    def message(self, source: int, destination: int, bytes: float) -> Transfer:
        level = self.cluster.levels[self.cluster.level_of(source, destination)]
        ends = self._shares(level, out=(source,), into=(destination,))
        return Transfer(self.constants.overhead + level.link.latency, bytes, ends)

    def collective(self, op: str, bytes: float, ranks: tuple[int, ...]) -> Transfer:
        if len(ranks) == 1:
            return Transfer(0.0)
        if op == "barrier":
            op, bytes = "all_reduce", 0
        route = self.cluster.route_of(ranks)
        algorithm = "tree" if op == "broadcast" else collectives.usual(op)
        # A ring leaves a node once and may use all its members' shares; elsewhere each rank has its own.
        link = network.reached(route.ring if algorithm == "ring" else route.pair, self.constants)
        latency = collectives.seconds(op, 0, len(ranks), link, algorithm)
        busy = collectives.seconds(op, bytes, len(ranks), link, algorithm) - latency
        level = self.cluster.levels[self.cluster.level_of(min(ranks), max(ranks))]
        capacity = level.share * self.constants.bandwidth
        return Transfer(self.constants.overhead + latency, busy * capacity, self._shares(level, out=ranks, into=ranks))

    def _shares(self, level: Level, out: tuple[int, ...], into: tuple[int, ...]) -> tuple[tuple[Hashable, float], ...]:
        capacity = level.share * self.constants.bandwidth
        ends = [(level.name, "out", rank) for rank in out] + [(level.name, "in", rank) for rank in into]
        return tuple((end, capacity) for end in ends)
