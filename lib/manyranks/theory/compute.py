"""Seconds that one rank computes for one micro-batch, part by part: a layer, the head, the embedding."""

import functools
from dataclasses import dataclass
from typing import NamedTuple

from manyranks.theory import kernels, layer
from manyranks.theory.architecture import ModelShape
from manyranks.theory.cluster import Cluster
from manyranks.theory.kernels import Constants
from manyranks.theory.plan import Local
from manyranks.theory.stages import Dealt


@dataclass(frozen=True, eq=False, slots=True)
class Place:
    """A cluster, and how fast its chips and links are taken to be."""

    cluster: Cluster
    constants: Constants


@functools.lru_cache(maxsize=256)
def place(cluster: Cluster, constants: Constants) -> Place:
    """The one of these values: it is a key of caches."""
    return Place(cluster, constants)


@dataclass(frozen=True, eq=False, slots=True)
class Site:
    """A rank, whatever its layers are. imbalance: see plan.check_imbalance; it makes the seconds the fullest rank's."""

    shape: ModelShape
    local: Local
    place: Place
    imbalance: float

    def of(self, part: str) -> "Site":
        """The site as far as a part's kernels know it, so that they are timed once for all sites that they can't tell apart.

        Only a layer with experts knows how these are cut, and only a layer what backward runs again.
        """
        if part == "moe":
            return self
        local = self.local._replace(ep=1, expert_tp=self.local.tp)
        return self._with(local if part == "dense" else local._replace(recompute="none"))

    def of_calls(self, part: str) -> "Site":
        """The same as far as a part's calls know it, which say nothing of recomputation: pace.hide does."""
        return self._with(self.of(part).local._replace(recompute="none"))

    def _with(self, local: Local) -> "Site":
        return site(self.shape, local, self.place.cluster, self.place.constants, self.imbalance)


@functools.lru_cache(maxsize=16384)
def site(shape: ModelShape, local: Local, cluster: Cluster, constants: Constants, imbalance: float = 1.0) -> Site:
    """The one of these values, as place."""
    return Site(shape, local, place(cluster, constants), imbalance)


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
    lists = layer.work(at.shape, at.local, part, at.imbalance)
    hosts = [at.local.framework.host * layer.launches(work) for work in lists[:3]]
    return Busy(at, part, *(kernels.run(work, at.place.cluster, at.place.constants) for work in lists), *hosts)
