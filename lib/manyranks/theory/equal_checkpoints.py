"""Strategies for chains of equal layers, what they hold and compute again: in closed form, without a plan."""

import functools
import math
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from manyranks.theory.checkpointing import Layer

_SLOTS = 128  # into which the memory is cut where layers are computed more than twice


class Point(NamedTuple):
    """A strategy for equal layers at its fullest moment, in the backward of a layer. Two gradients come on top.

    stored: layers' inputs
    kept: whole layers
    forwards: of one layer, those that it adds
    waiting: inputs and layers that a micro-batch holds between its forward and its backward; the stage's own input is one, its
        output isn't
    """

    stored: float
    kept: int
    forwards: float
    waiting: tuple[float, int]

    def bytes(self, layer: Layer, flying: int = 1) -> int:
        """Returns what a rank holds.

        flying: micro-batches in flight; one of them is in its backward
        """
        inputs, whole = self.waiting
        own = round((self.stored + 2) * layer.output) + self.kept * layer.saved
        return own + (flying - 1) * round(inputs * layer.output + whole * layer.saved)


def everything(n: int) -> Point:
    """Returns the point of keeping all n layers."""
    return Point(0, n, 0, (0, n))


def from_input(n: int) -> Point:
    """Returns the point of keeping the first layer's input only: each layer's backward runs all layers before it again."""
    return Point(1, 1, n * (n + 1) / 2, (1, 0))


def segments(n: int, count: int, layer: Layer) -> Point:
    """Returns the point of checkpointing.segments: fullest in the last segment, or the last of those a layer longer."""
    short, longer = divmod(n, count)
    both = [Point(count - 1, short, n, (count, 0))]
    if longer:
        both.append(Point(longer - 1, short + 1, n, (count, 0)))
    return max(both, key=lambda point: point.bytes(layer))


@functools.lru_cache(maxsize=256)
def front(n: int, layer: Layer, flying: int = 1) -> tuple[Point, ...]:
    """The plans of n equal layers than which none is smaller and as fast, as optimal_checkpoints.Schedules finds them, the
    smallest first. Exact where a layer saves a multiple of its output, else to a forward of a layer or a slot of memory.
    Several micro-batches in flight: of the plans that repeat a layer at most once, in segments of equal length."""
    if flying > 1:
        plans = sorted(_in_flight(n, layer), key=lambda point: (point.bytes(layer, flying), point.forwards))
    else:
        few = sorted(_computed_twice(n, layer), key=lambda point: point.bytes(layer))
        plans = [*_computed_often(n, layer, few[0].bytes(layer)), *few]
    found: list[Point] = []
    for point in plans:
        if not found or point.forwards < found[-1].forwards:
            found.append(point)
    return tuple(found)


def _computed_twice(n: int, layer: Layer) -> Iterator[Point]:
    """Yields, for each number of layers kept from the start, as few checkpoints as do. A segment that is done frees a
    checkpoint, so the segments before it are longer."""
    for kept in range(1, n + 1):
        stored, reached = 0, kept
        while reached < n:
            stored += 1
            reached += kept + stored * layer.output // layer.saved
        yield Point(stored, kept, n - kept, (stored, kept))


def _computed_often(n: int, layer: Layer, below: int) -> Iterator[Point]:
    """Yields points in less memory, where one layer is kept from the start: the recurrence of optimal_checkpoints for
    all memories at once; m: slots besides that layer and two gradients."""
    room = below - layer.saved - 2 * layer.output
    output = max(1, _SLOTS * layer.output // max(room, 1))  # slots: whole, so that only `saved` is rounded
    slot = layer.output / output
    saved, most = math.ceil(layer.saved / slot), math.ceil(room / slot)
    extra = np.full((n + 1, most + 1), np.inf, np.float32)  # [k, m]: of k layers
    extra[:2] = 0
    for k in range(2, n + 1):
        extra[k, saved:] = extra[k - 1, : max(0, most + 1 - saved)]  # to keep a layer, or to store after 1, 2, … layers
        ways = np.arange(1, k)[:, None] + extra[1:k, output:] + extra[k - 1 : 0 : -1, :-output]
        extra[k, output:] = np.minimum(extra[k, output:], ways.min(axis=0))
    for m, (before, forwards) in enumerate(pairwise([math.inf, *extra[n, :most].tolist()])):
        if forwards < before:
            yield Point(m / output, 1, forwards, (m / output, 1))


def _in_flight(n: int, layer: Layer) -> Iterator[Point]:
    """Keeps the last layers whole and the others in segments, for each number of both."""
    yield everything(n)
    for whole in range(n):
        for longest in range(1, n - whole + 1):
            inputs = -((whole - n) // longest)
            ends = [(inputs if whole else inputs - 1, whole), (inputs - 1, longest)]
            yield max((Point(*end, n - whole, (inputs, whole)) for end in ends), key=lambda point: point.bytes(layer))
