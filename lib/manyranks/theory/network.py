"""Seconds of calls on a cluster's links: α + n/β of a message, rings and trees, rings of messages, exchanges of all with
all."""

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from manyranks.theory import collectives
from manyranks.theory.calls import Call
from manyranks.theory.cluster import Route
from manyranks.theory.hardware import Link
from manyranks.theory.kernels import Constants

_AXIS = {"etp": "tp", "shards": "data", "replicas": "data"}  # groups that belong to an axis


class Seconds(dict[tuple[str, str], float | tuple[float, ...]]):
    """(axis, when) -> seconds of those calls; for a ring of keys and values a tuple: by block, the way home last."""

    __hash__ = object.__hash__  # one list of calls is one key of caches
    __eq__ = object.__eq__


def seconds(calls: Iterable[Call], routes: Mapping[str, Route], constants: Constants, trees: bool = False) -> Seconds:
    """Seconds of these calls, one after another, each on its group's route.

    An all-reduce is two passes of a ring, a reduce-scatter and an all-gather. trees: whether collectives may use one.
    """
    sums: dict[tuple[str, str, str], float] = {}
    found, ring = Seconds(), [call for call in calls if call.hop is not None]
    for when in dict.fromkeys(call.when for call in ring):
        found["cp", when] = hops([call for call in ring if call.when == when], routes["cp"], constants)
    for call in calls:
        if call.hop is None:
            key = _AXIS.get(call.group, call.group), call.when, call.op
            passes = 2 if call.op == "all_reduce" else 1
            once = call.times * passes * _once(call, routes[call.group], constants, trees)
            sums[key] = sums.get(key, 0.0) + once
    for (axis, when, _), total in sums.items():
        found[axis, when] = found.get((axis, when), 0.0) + total
    return found


def _once(call: Call, route: Route, constants: Constants, trees: bool) -> float:
    if call.op == "send":
        return hop(route, call.bytes, constants)
    if call.far is not None:
        return near_and_far(route, call.bytes, call.itemsize * call.far, constants)
    if call.op == "all_to_all":
        return exchange(route, call.bytes, constants)
    return (fastest if trees else gather)(route, call.bytes, constants)


def gather(route: Route, size: float, constants: Constants) -> float:
    """An all-gather or a reduce-scatter of `size` bytes (the whole tensor's) around a ring."""
    if route.ranks == 1:
        return 0.0
    return constants.overhead + collectives.seconds("all_gather", size, route.ranks, reached(route.ring, constants))


def fastest(route: Route, size: float, constants: Constants) -> float:
    """Times a gather, by a tree between the nodes where that is faster. An all-reduce takes two of these.

    The tree goes through a node rank by rank, then from node to node in log2 of them rounds. It passes the tensor on in pieces,
    so that these rounds count for α only, and uses all of the nodes' network shares, as the ring does. Inside one node, and on
    a torus, there is only the ring. Source: NCCL, src/graph/tuning.cc: latency and bandwidth of its double binary trees, which
    it has for all-reduce; that the halves are as fast is assumed (NCCL has such trees for nodes of one GPU, since 2.23: PAT).
    """
    if route.ranks == 1:
        return 0.0
    nodes = math.ceil(route.ranks / route.inside)
    latency = (route.inside - 1) * route.near.latency + (nodes - 1).bit_length() * route.pair.latency
    tree = constants.overhead + latency + size / reached(route.ring, constants).bandwidth
    return min(tree, gather(route, size, constants))


def hop(route: Route, size: float, constants: Constants) -> float:
    """A message of `size` bytes between members that are far apart, each with its own share of the link."""
    return constants.overhead + reached(route.pair, constants).seconds(size)


def exchange(route: Route, size: float, constants: Constants) -> float:
    """An all-to-all of `size` bytes on each rank, its own part with them: as much for each of the others."""
    if route.ranks == 1:
        return 0.0
    near, far = route.inside - 1, route.ranks - route.inside
    return near_and_far(route, near * size / route.ranks, far * size / route.ranks, constants)


def near_and_far(route: Route, near: float, far: float, constants: Constants) -> float:
    """Bytes inside the node and to others: at the same time, so that the slower ones count."""
    inside, outside = (reached(link, constants).bandwidth for link in (route.near, route.pair))
    return constants.overhead + route.pair.latency + max(near / inside, far / outside)


def reached(link: Link, constants: Constants) -> Link:
    """The link with the share of its bandwidth that programs get."""
    return Link(link.name, link.latency, link.bandwidth * constants.bandwidth)


class Hops(NamedTuple):
    """Seconds of a ring of keys and values.

    compute: in each of N hops, one for each block
    messages: of what travels under each, and of the last, under which nothing is computed
    """

    compute: tuple[float, ...]
    messages: tuple[float, ...]

    @property
    def exposed(self) -> float:
        """The seconds that nothing hides: where a message takes longer than the hop under which it travels."""
        return sum(max(0.0, m - c) for m, c in zip(self.messages, (*self.compute, 0.0), strict=True))

    @property
    def seconds(self) -> float:
        return sum(self.compute) + self.exposed


def hops(calls: Iterable[Call], route: Route, constants: Constants) -> tuple[float, ...]:
    """A ring's messages, of forward or of backward: seconds of what travels under each of N blocks, and of the last, home."""
    sizes = [0.0] * (route.ranks + 1)
    for call in calls:
        sizes[call.hop] += call.bytes
    taken = {size: hop(route, size, constants) if size else 0.0 for size in set(sizes)}
    return tuple(taken[size] for size in sizes)
