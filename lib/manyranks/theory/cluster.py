"""Clusters: accelerators, the levels of links between them, and where a group of ranks lies on those."""

import functools
import itertools
import json
import math
from collections import Counter
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

from manyranks.theory import hardware, tables
from manyranks.theory.hardware import GB, Accelerator, Link
from manyranks.theory.names import Named, lazily, nearest

FORMAT = "manyranks cluster 1"  # of the files that save writes


class Level(NamedTuple):
    """A set of accelerators that one kind of link joins: a node, a rail, a pod.

    size: accelerators in it
    link: β is one accelerator's share, one way, for traffic that leaves the level below
    oversubscription: how many times less than its share an accelerator gets when all send at once; 1: full bisection
    """

    name: str
    size: int
    link: Link
    oversubscription: float = 1.0

    @property
    def share(self) -> float:
        return self.link.bandwidth / self.oversubscription


class Route(NamedTuple):
    """The links between the members of one group.

    ring: the link that a ring over all of them sees (mean α of its hops; β of its narrowest place)
    pair: between members that are far apart
    inside: members of one node, joined by `near`
    """

    ranks: int
    ring: Link
    pair: Link
    inside: int
    near: Link


@dataclass(frozen=True)
class Cluster:
    """Equal accelerators joined by levels of links, from the inside out, or by a torus.

    gpus: how many there are, or None for as many as a plan asks for
    torus: ring links an accelerator has, one for each direction of each axis; 0 for a switched network
    reserved: share of an accelerator's processors that only communicate
    host: bytes/s one way between an accelerator and its host's memory
    host_memory: an accelerator's share of that, bytes
    """

    name: str
    accelerator: Accelerator
    levels: tuple[Level, ...]
    gpus: int | None = None
    torus: int = 0
    reserved: float = 0.0
    host: float = 32e9
    host_memory: float = 256e9
    source: str = ""

    def __post_init__(self):
        sizes = [level.size for level in self.levels]
        if any(type(size) is not int for size in sizes):
            raise ValueError(f"levels of sizes {sizes}: give whole numbers")
        if not sizes or sizes != sorted(set(sizes)) or sizes[0] < 1:
            raise ValueError(f"levels of sizes {sizes}: from the inside out, each larger than the one before")
        if not all(level.oversubscription >= 1 for level in self.levels) or not 0 <= self.reserved < 1:
            raise ValueError("oversubscription is 1 or more; reserved is between 0 and 1")
        for name, value, least in (("host", self.host, "above 0"), ("host_memory", self.host_memory, "0 or more")):
            if type(value) not in (int, float) or not (value > 0 if name == "host" else value >= 0):
                raise ValueError(f"{name}={value!r} of cluster {self.name!r}: give a number, {least}")
        if self.gpus is not None and not (type(self.gpus) is int and 1 <= self.gpus <= sizes[-1]):
            raise ValueError(f"gpus={self.gpus!r}: give a whole number from 1 to {sizes[-1]:,}, the size of {self.name}")
        if type(self.torus) is not int or self.torus < 0 or self.torus % 2:
            raise ValueError(f"torus={self.torus!r}: two links for each axis, so 2, 4 or 6; 0 for a switched network")

    def __repr__(self) -> str:
        levels = ", ".join(f"{level.name} {level.size:,}" for level in self.levels)
        return f"Cluster({self.name!r}: {self.accelerator.name}, {levels}, gpus={self.gpus})"

    def __hash__(self) -> int:
        return hash((self.name, self.gpus))  # cheap: clusters are keys of caches

    @property
    def node(self) -> int:
        """Accelerators of the innermost level."""
        return self.levels[0].size

    def of(self, gpus: int) -> "Cluster":
        """The same kind of cluster with this many accelerators. Raises ValueError for fewer than one."""
        return replace(self, gpus=gpus)

    def with_link(self, level: str, **changes: float) -> "Cluster":
        """The same cluster with another latency or bandwidth at one level. Raises ValueError for an unknown level."""
        names = [lv.name for lv in self.levels]
        if level not in names:
            raise ValueError(f"level {level!r} of {self.name}: {nearest(level, names)}")
        changed = (lv._replace(link=replace(lv.link, **changes)) if lv.name == level else lv for lv in self.levels)
        return replace(self, levels=tuple(changed))

    def with_nodes_of(self, accelerators: int) -> "Cluster":
        """The same accelerators and links in smaller or larger nodes."""
        node, *others = self.levels
        levels = node._replace(size=accelerators), *(level for level in others if level.size > accelerators)
        return replace(self, name=f"{self.name}, nodes of {accelerators}", levels=levels)

    @functools.lru_cache(maxsize=4096)  # noqa: B019 clusters are few, and routes small
    def route(self, ranks: int, stride: int = 1) -> Route:
        """The way of a group of `ranks` members, each `stride` ranks after the one before, the first at a node's start.

        Raises ValueError for a group that the cluster has no room for.
        """
        if ranks < 1 or stride < 1:
            raise ValueError(f"{ranks} ranks, each {stride} after the one before: both are 1 or more")
        self.level_of(0, (ranks - 1) * stride)
        if self.torus:
            return _torus_route(self, ranks)
        full = [min(ranks, math.ceil(level.size / stride)) for level in self.levels]
        return _switched_route(self, ranks, [Spread(math.ceil(ranks / most), most, ranks % most or most) for most in full])

    @functools.lru_cache(maxsize=4096)  # noqa: B019
    def route_of(self, ranks: tuple[int, ...]) -> Route:
        """The way of a group of any ranks, where rank r is the r-th accelerator, counted node by node."""
        self.level_of(min(ranks), max(ranks))
        if self.torus:
            return _torus_route(self, len(ranks))
        counts = (Counter(rank // level.size for rank in ranks).values() for level in self.levels)
        return _switched_route(self, len(ranks), [Spread(len(count), max(count), min(count)) for count in counts])

    def between(self, first: int, second: int) -> Link:
        """The link between two ranks. Raises ValueError for a rank outside."""
        return self.levels[self.level_of(first, second)].link

    def level_of(self, first: int, second: int) -> int:
        """Index of the innermost level that holds both ranks."""
        if min(first, second) < 0 or (self.gpus is not None and max(first, second) >= self.gpus):
            raise ValueError(f"ranks {first} and {second} on a cluster of {self.gpus}: count from 0")
        for index, level in enumerate(self.levels):
            if first // level.size == second // level.size:
                return index
        raise ValueError(f"ranks {first} and {second}: {self.name} ends at {self.levels[-1].size}")


class Spread(NamedTuple):
    """Units of one level (nodes, pods) over which a group is spread, and its members in one of them, at most and at least."""

    units: int
    most: int
    least: int


def _switched_route(cluster: Cluster, ranks: int, spread: list[Spread]) -> Route:
    used = 1 + next(i for i, level in enumerate(spread) if level.units == 1)
    units = [ranks, *(level.units for level in spread[:used])]
    levels, below = cluster.levels[:used], [1, *(level.least for level in spread[:used])]
    # A ring walks through all of a unit before it leaves it, and closes over its widest gap.
    hops = [before - after for before, after in itertools.pairwise(units)]
    hops[-1] += units[-1]
    latency = sum(count * level.link.latency for count, level in zip(hops, levels, strict=True)) / ranks
    # It leaves a unit only once, and may use the shares of all members in that unit to do so; the smallest unit is narrowest.
    crossed = [k * level.share for k, level, count in zip(below, levels, hops, strict=False) if count]
    far = levels[-1]
    ring, pair = Link("ring", latency, min(crossed)), Link(far.link.name, far.link.latency, far.share)
    return Route(ranks, ring, pair, spread[0].most, levels[0].link)


def _torus_route(cluster: Cluster, ranks: int) -> Route:
    # A group takes whole rings: as many axes as it needs, each with a link in both directions.
    link, axes = cluster.levels[0].link, cluster.torus // 2
    side = max(2, round((cluster.gpus or cluster.levels[-1].size) ** (1 / axes)))
    taken = next(k for k in range(1, axes + 1) if side**k >= ranks or k == axes)
    # The farthest member is half of each ring away, fewer hops than members before it: collectives.torus_seconds.
    hops = taken * max(1, round(ranks ** (1 / taken)) // 2)
    ring = replace(link, bandwidth=2 * taken * link.bandwidth, latency=link.latency * hops / max(1, ranks - 1))
    return Route(ranks, ring, link, ranks, ring)


_INFINIBAND, _NVLINK, _ICI = 14e-6, 3.4e-6, 1e-6  # α: NCCL src/graph/tuning.cc, hwLat of a ring, Simple; scaling-book, tpus.md


def _of_row(row: dict[str, str]) -> Cluster:
    """Reads a cluster from a row.

    link_GBps: of a torus one of its links, elsewhere the share of the network, if it isn't the accelerator's own
    host_GBps: an accelerator's share of its way to the host, if that isn't PCIe
    reserved: processors that move tokens instead of multiplying, of a chip's
    """
    name, chip, size, source = row["name"], hardware.accelerators[row["chip"]], int(row["size"]), row["source"]
    bandwidth = GB * float(row["link_GBps"] or 0)
    if row["axes"]:
        ici = Level("torus", size, Link("ICI", _ICI, bandwidth, source))
        return Cluster(name, chip, (ici,), torus=2 * int(row["axes"]), source=source)
    chip = replace(chip, nic=bandwidth) if bandwidth else chip
    near, far = Link("NVLink", _NVLINK, chip.scale_up, chip.source), Link("InfiniBand", _INFINIBAND, chip.nic, chip.source)
    pcie = {"V": 16 * GB, "A": 32 * GB}.get(row["chip"][0], 64 * GB)  # PCI-SIG: 16 lanes of PCIe 3.0, 4.0 and 5.0
    host = GB * float(row["host_GBps"]) if row["host_GBps"] else pcie
    more = {"host_memory": GB * float(row["host_memory_GB"])} if row["host_memory_GB"] else {}
    reserved, levels = float(Fraction(row["reserved"] or 0)), (Level("node", size, near), Level("network", 2**20, far))
    return Cluster(name, chip, levels, reserved=reserved, host=host, source=source, **more)


@functools.cache
def _clusters() -> Named:
    table = tables.rows("clusters")
    found = {row["name"]: _of_row(row) for row in table} | {"laptop": laptop()}
    # Meta's, limited to 500 W: dynamic power grows with the cube of the clock, so that products run at 0.89 of their rate.
    slow, clock = found["grand-teton"].accelerator, (500 / 700) ** (1 / 3)
    slow = replace(slow, matmul_fraction=clock * slow.matmul_fraction, specials=clock * slow.specials)
    found["grand-teton"] = replace(found["grand-teton"], accelerator=replace(slow, memory=96 * GB, memory_bandwidth=2400 * GB))
    llama3, roce = found["llama3-cluster"], Link("RoCE", _INFINIBAND, slow.nic, "arXiv 2407.21783, section 3.3.1")
    levels = llama3.levels[0], Level("pod", 3072, roce), Level("data center", 2**20, roce, 7.0)
    found["llama3-cluster"] = replace(llama3, levels=levels)
    return _Clusters("cluster", found | {row["alias"]: found[row["name"]] for row in table if row["alias"]})


class _Clusters(Named):
    """Clusters by name, or by the path of a file that save has written: "mine.json"."""

    def __missing__(self, name: object):
        return load(name) if str(name).endswith(".json") else super().__missing__(name)


def save(cluster: Cluster, path: str | Path) -> None:
    """Writes the cluster to a file that theory.clusters[path] reads."""
    if not isinstance(cluster, Cluster):
        raise ValueError(f"cluster={cluster!r}: give a Cluster, as theory.clusters['h100-dgx']")
    text = json.dumps({"format": FORMAT} | asdict(cluster), indent=1, ensure_ascii=False)
    Path(path).write_text(f"{text}\n", encoding="utf-8")


def load(path: str | Path) -> Cluster:
    """Reads what save wrote. Raises ValueError, with what is wrong, for any other file."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
        if found.pop("format") != FORMAT:
            raise ValueError(f"its format is not {FORMAT!r}")
        levels = tuple(Level(name, size, Link(**link), more) for name, size, link, more in found["levels"])
        return Cluster(**found | {"accelerator": Accelerator(**found["accelerator"]), "levels": levels})
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path}: not a cluster file that calibrate wrote ({error})") from error


def laptop(flops: float = 50e9, bandwidth: float = 2 * GB, latency: float = 50e-6) -> Cluster:
    """Returns a stand-in for the reader's machine: ranks are processes on one core and 8 GB each, and links the loopback.

    The defaults are round numbers; manyranks.calibrate measures your own.

    flops: FLOP/s of a core
    bandwidth: bytes/s of a message between two ranks
    latency: seconds until it begins to arrive
    """
    chip = Accelerator("one core", flops, 8 * GB, 10 * GB, bandwidth, bandwidth, "round numbers", tf32=1.0)
    return Cluster("laptop", chip, (Level("loopback", 1024, Link("loopback", latency, bandwidth)),), source="round numbers")


__getattr__ = lazily(__name__, clusters=_clusters)
