"""Seconds that one rank computes for one micro-batch, part by part: a layer, the head, the embedding."""

import functools
from dataclasses import dataclass
from typing import NamedTuple

from manyranks.theory import kernels, layer
from manyranks.theory.architecture import ModelShape
from manyranks.theory.cluster import Cluster
from manyranks.theory.kernels import Constants
from manyranks.theory.layer import Kernel
from manyranks.theory.plan import LayerPlan
from manyranks.theory.stages import Dealt


@dataclass(frozen=True, eq=False, slots=True)
class Speeds:
    """A cluster, and how fast its chips and links are taken to be."""

    cluster: Cluster
    constants: Constants


@functools.lru_cache(maxsize=256)
def speeds(cluster: Cluster, constants: Constants) -> Speeds:
    """The only Speeds with these values: it is a key of caches."""
    return Speeds(cluster, constants)


@dataclass(frozen=True, eq=False, slots=True)
class Site:
    """A rank, whatever its layers are.

    imbalance: see plan.check_imbalance; seconds are for the fullest rank
    """

    shape: ModelShape
    plan: LayerPlan
    speeds: Speeds
    imbalance: float

    def of(self, part: str) -> "Site":
        """The site as far as a part's kernels know it, so that they are timed once for all sites that they can't tell apart.

        Only a layer with experts knows how these are cut, and only a layer what backward runs again.
        """
        if part == "moe":
            return self
        plan = self.plan._replace(ep=1, expert_tp=self.plan.tp)
        return self._with(plan if part == "dense" else plan._replace(recompute="none"))

    def of_calls(self, part: str) -> "Site":
        """The same as far as a part's calls know it, which say nothing of recomputation: pace.shown does."""
        return self._with(self.of(part).plan._replace(recompute="none"))

    def _with(self, plan: LayerPlan) -> "Site":
        return site(self.shape, plan, self.speeds.cluster, self.speeds.constants, self.imbalance)


@functools.lru_cache(maxsize=16384)
def site(shape: ModelShape, plan: LayerPlan, cluster: Cluster, constants: Constants, imbalance: float = 1.0) -> Site:
    """The only Site with these values, a key of caches as speeds() is."""
    return Site(shape, plan, speeds(cluster, constants), imbalance)


@dataclass(frozen=True, eq=False, slots=True)
class Busy:
    """Seconds of a part's kernels.

    weight: of forward's products with a weight, as long as the weights' gradients are taken to be
    core, core_backward: of attention
    host, host_backward, host_weight: of the CPU that launches forward, backward, and as many kernels as `weight` has
    """

    site: Site
    part: str
    forward: float
    backward: float
    weight: float
    core: float
    core_backward: float
    host: float
    host_backward: float
    host_weight: float


class Parts(dict[str, Busy]):
    """The parts of a rank, as Dealt.parts names them, and what each computes."""

    __hash__ = object.__hash__  # a key of caches
    __eq__ = object.__eq__


class Work(NamedTuple):
    """The work that the ranks of a pipeline compute."""

    dealt: Dealt
    site: Site
    parts: Parts


def compute(dealt: Dealt, at: Site) -> Work:
    """Times all parts."""
    return Work(dealt, at, _parts(at, dealt.names))


@functools.lru_cache(maxsize=16384)
def _parts(at: Site, names: tuple[str, ...]) -> Parts:
    return Parts({name: of_part(at.of(name), name) for name in names})


@functools.lru_cache(maxsize=65536)
def of_part(at: Site, part: str) -> Busy:
    """Times one part's kernels."""
    own = layer.work(at.shape, at.plan, part, at.imbalance)

    def chip(some: list[Kernel]) -> float:
        return kernels.total_seconds(some, at.speeds.cluster, at.speeds.constants)

    def host(some: list[Kernel]) -> float:
        return at.plan.framework.host * layer.launches(some)

    return Busy(
        at,
        part,
        forward=chip(own.forward),
        backward=chip(own.backward),
        weight=chip(own.weights),
        core=chip(own.core),
        core_backward=chip(own.core_backward),
        host=host(own.forward),
        host_backward=host(own.backward),
        host_weight=host(own.weights),
    )
