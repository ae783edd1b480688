"""A cluster's constants from what was measured on it: products, a copy, a collective."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from manyranks.theory import checks, hardware
from manyranks.theory.cluster import Cluster
from manyranks.theory.hardware import Link, fit_link
from manyranks.theory.kernels import BANDWIDTH, MATMUL

SLOWEST = 0.01  # share of a chip's products below which something else was measured


@dataclass(frozen=True)
class Measurements:
    """Holds what one machine did.

    products: FLOP/s of some matrix products in 16 bits (32 on a CPU), large ones among them
    copy: bytes/s that a copy read and wrote
    ranks: how many took part in the collective
    sizes: bytes of the tensors that were all-reduced
    seconds: what each of these took, in their order
    Raises ValueError for a rate that is not above 0, for no product, and for fewer than 2 ranks.
    """

    products: Sequence[float]
    copy: float
    ranks: int
    sizes: Sequence[float]
    seconds: Sequence[float]

    def __post_init__(self):
        rates = (*self.products, self.copy) if isinstance(self.products, Sequence) else ()
        if len(rates) < 2 or not all(type(rate) in (int, float) and 0 < rate < math.inf for rate in rates):
            raise ValueError(f"products={self.products!r}, copy={self.copy!r}: give one product or more, and rates above 0")
        for name in ("sizes", "seconds"):
            if not all(type(each) in (int, float) for each in getattr(self, name)):
                raise ValueError(f"{name}={getattr(self, name)!r}: give numbers")
        if type(self.ranks) is not int or self.ranks < 2:
            raise ValueError(f"ranks={self.ranks!r}: a collective that is measured has 2 ranks or more")


def calibrate(measured: Measurements, cluster: Cluster, name: str = "") -> Cluster:
    """Returns the cluster with the rates that were measured on it, in place of what its data sheet and published figures say.

    measured: what one of its nodes did, or a whole cluster of one level
    cluster: its accelerators and levels, as theory.clusters["h100-dgx"]
    name: of the result; default the cluster's, "calibrated"
    Only the innermost level changes: the collective has ranks of one node. Raises ValueError for more ranks than it has, for
    fewer than two different sizes, for times that aren't above 0 or don't grow with the size, and for products that are faster
    than the chip, or a hundred times slower.
    """
    checks.kinds(cluster=cluster)
    if measured.ranks > cluster.node:
        raise ValueError(f"ranks={measured.ranks}: a node of {cluster.name} has {cluster.node}; measure inside one")
    best = max(measured.products)
    # Of several, a step's products reach the median of the large ones, which is MATMUL times the share that the chip is given.
    typical = statistics.median(each for each in measured.products if each >= best / 2)
    fraction = min(best, typical / MATMUL) / cluster.accelerator.flops
    if not SLOWEST <= fraction <= hardware.MOST:
        chip = f"{cluster.accelerator.name}, which does {cluster.accelerator.flops:.3g}"
        raise ValueError(
            f"products of {max(measured.products):.3g} FLOP/s on {chip}: give FLOP/s, and the cluster of this chip"
        )
    chip = replace(
        cluster.accelerator,
        matmul_fraction=fraction,
        memory_bandwidth=measured.copy / BANDWIDTH,
        source="measured",
    )
    node, *others = cluster.levels
    n = measured.ranks  # an all-reduce around a ring of them takes 2(n − 1)α + 2(n − 1)/n · S/β
    whole = fit_link(node.link.name, [2 * (n - 1) / n * size for size in measured.sizes], measured.seconds)
    link = Link(node.link.name, max(0.0, whole.latency) / (2 * (n - 1)), whole.bandwidth / BANDWIDTH, "measured")
    levels = node._replace(link=link), *others
    return replace(cluster, name=name or f"{cluster.name}, calibrated", accelerator=chip, levels=levels)
