"""Activation checkpointing of a chain of layers: plans of what to keep and what to compute again, what they cost and hold.

    layer i    computes a_i from a_(i−1), i = 1 … N; a_0 is the chain's input, which the caller holds
    backward   of layer i needs what its forward has saved, a_(i−1), and the gradient of a_i, as large as a_i; it makes
               the gradient of a_(i−1)
    plan       a list of actions; the first pass over the layers is forward, then backward goes from layer N to layer 1

Forward's and backward's times may be in any unit, as seconds or FLOPs. Working memory of operators is not counted.
Source of the lectures' plans and of √N: Chen et al., "Training Deep Nets with Sublinear Memory Cost", arXiv 1604.06174.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from manyranks.theory import flops, memory
from manyranks.theory.architecture import ModelShape
from manyranks.theory.plan import Plan

FORWARD, STORE, KEEP, BACKWARD = "forward", "store", "keep", "backward"


class Layer(NamedTuple):
    """A layer of a chain.

    forward, backward: time
    output: bytes of a_i
    saved: bytes that its forward leaves for backward, a_i among them
    """

    forward: float
    backward: float
    output: int
    saved: int


class Action(NamedTuple):
    """A step of a plan, on a layer counted from 1.

    forward: computes a_i, and holds nothing but it
    store: holds the a_i just computed until layer i + 1 went backward
    keep: computes a_i, and holds what backward needs of layer i, its input included
    backward: uses that up
    """

    kind: str
    layer: int


class Outcome(NamedTuple):
    """The outcome of a plan.

    time: of all actions
    extra: time of those forwards that were not the first of their layer
    forwards: how many in all
    peak: the most bytes held at once
    held: bytes at the fullest moment of each action
    """

    time: float
    extra: float
    forwards: int
    peak: int
    held: tuple[int, ...]


def run(chain: Sequence[Layer], plan: Iterable[Action], gradient: int = 0) -> Outcome:
    """Returns what the plan costs on this chain, and what it holds on top of the chain's input.

    gradient: bytes of the input's gradient; 0 where it needs none. Raises ValueError for a plan that cannot be followed.
    """
    state, held = _State(chain, gradient), []
    time, forwards = 0.0, [0] * (len(chain) + 1)
    for action in plan:
        held.append(state.step(action))
        layer = chain[action.layer - 1]
        if action.kind in (FORWARD, KEEP):
            time += layer.forward
            forwards[action.layer] += 1
        elif action.kind == BACKWARD:
            time += layer.backward
    if state.left:
        raise ValueError(f"the plan ends before layer {state.left} went backward: it must go back to layer 1")
    extra = sum((often - 1) * layer.forward for often, layer in zip(forwards[1:], chain, strict=True))
    return Outcome(time, extra, sum(forwards), max(held, default=0), tuple(held))


class _State:
    """The values that are held: activations by number, what layers saved, the activation at hand, the gradient that waits."""

    def __init__(self, chain: Sequence[Layer], gradient: int):
        self._chain, self.left = chain, len(chain)  # layers that have not gone backward
        self._output = [gradient, *(layer.output for layer in chain)]
        self._stored: set[int] = set()
        self._kept: set[int] = set()
        self._hand: int | None = None
        self._waiting = 0  # bytes of a gradient

    def step(self, action: Action) -> int:
        """Follows it; returns the bytes held at its fullest moment."""
        kind, i = action
        if kind not in _STEPS or not 1 <= i <= self.left:
            raise ValueError(f"{action}: forward, store, keep or backward of a layer from 1 to {self.left} is possible here")
        return _STEPS[kind](self, i)

    def forward(self, i: int) -> int:
        self._take(i)
        fullest = self._bytes() + self._output[i]
        self._hand = i
        return fullest

    def store(self, i: int) -> int:
        if self._hand != i:
            raise ValueError(f"store {i}: the output of layer {i} was not just computed")
        self._stored.add(i)
        return self._bytes()

    def keep(self, i: int) -> int:
        self._take(i)
        self._stored.add(i - 1)
        self._kept.add(i)
        self._hand = i
        return self._bytes()

    def backward(self, i: int) -> int:
        if i != self.left or i not in self._kept:
            raise ValueError(f"backward {i}: layer {self.left} is next, and must be kept")
        self._hand = None
        self._waiting = self._output[i]
        fullest = self._bytes() + self._output[i - 1]
        self._waiting = self._output[i - 1]
        self.left = i - 1
        self._kept.discard(i)
        self._stored.discard(i - 1)
        return fullest

    def _take(self, i: int) -> None:
        """The input of layer i comes to hand; what was there goes."""
        if i > 1 and not {i - 1} & (self._stored | self._kept | {self._hand}):
            raise ValueError(f"layer {i} cannot be computed: the output of layer {i - 1} is not there")
        if self._hand != i - 1:
            self._hand = None

    def _bytes(self) -> int:
        alone = (self._stored | {self._hand}) - self._kept - {0, None}
        return sum(self._chain[k - 1].saved for k in self._kept) + sum(self._output[k] for k in alone) + self._waiting


_STEPS = {FORWARD: _State.forward, STORE: _State.store, KEEP: _State.keep, BACKWARD: _State.backward}


# Plans for N layers.


def keep_all(n: int) -> list[Action]:
    """Nothing is computed twice: O(N) memory."""
    return [*_all(KEEP, 1, n), *_back(n, 1)]


def from_input(n: int) -> list[Action]:
    """Each layer's backward starts again from the chain's input: O(1) memory, O(N²) compute; the lectures' "full"."""
    return nearest(n, 1)


def nearest(n: int, count: int) -> list[Action]:
    """Plans as lectures count checkpoints: the starts of `count` segments are stored, and each layer's backward computes again
    from the nearest one: O(C) memory, O(N²/C) compute, so O(N√N) with √N of them. Raises ValueError as segments does.
    """
    starts = _starts(n, count)
    plan = _stored(n, starts)
    for first, last in reversed(starts):
        for i in range(last, first - 1, -1):
            plan += [*_all(FORWARD, first, i - 1), Action(KEEP, i), Action(BACKWARD, i)]
    return plan


def segments(n: int, count: int) -> list[Action]:
    """Plans as it is done: `count` segments, each computed again once, as a whole, before its backward: one extra forward, and
    O(C + N/C) memory, least with about √(N·saved ÷ output) of equal layers. They differ by a layer at most, the longer ones
    first. Raises ValueError for less than one segment or more than there are layers.
    """
    plan = _stored(n, _starts(n, count))
    for first, last in reversed(_starts(n, count)):
        plan += [*_all(KEEP, first, last), *_back(last, first)]
    return plan


def every_layer(n: int) -> list[Action]:
    """Each layer's input is stored and nothing else, which papers call full recomputation: one extra forward."""
    return segments(n, n)


def _starts(n: int, count: int) -> list[tuple[int, int]]:
    if type(count) is not int or not 1 <= count <= n:
        raise ValueError(f"count={count!r} segments of {n} layers: give a number from 1 to {n}")
    ends = [k * (n // count) + min(k, n % count) for k in range(count + 1)]
    return [(first + 1, last) for first, last in pairwise(ends)]


def _stored(n: int, parts: list[tuple[int, int]]) -> list[Action]:
    """Forward through all layers, the inputs of all parts stored."""
    plan = []
    for first, last in parts:
        plan += [*_all(FORWARD, first, last), *([Action(STORE, last)] if last < n else [])]
    return plan


def _all(kind: str, first: int, last: int) -> Iterator[Action]:
    return (Action(kind, i) for i in range(first, last + 1))


def _back(last: int, first: int) -> Iterator[Action]:
    return (Action(BACKWARD, i) for i in range(last, first - 1, -1))


# Transformers.


def chain_of(shape: ModelShape, plan: Plan) -> list[Layer]:
    """A model's layers as a chain, in FLOPs of one micro-batch of the whole model's ranks and bytes of one rank.

    plan: its recomputation ("none", "selective") is each layer's own. Layers without experts; embedding and
    head are left out. Raises ValueError where plan and shape do not fit.
    """
    saved = memory.layer_activations(shape, plan)
    output = memory.layer_activations(shape, replace(plan, recompute="full"))
    forward = plan.microbatch * plan.seq * flops.forward(shape, plan.seq).layers / shape.layers
    return [Layer(forward, 2 * forward, output, saved)] * shape.layers


def statistics(shape: ModelShape, plan: Plan, itemsize: int = 4) -> int:
    """Bytes that the norms of one layer keep on top of their inputs, which layer_activations leaves out.

    A mean and an inverse deviation a token for LayerNorm, an inverse root mean square for RMSNorm, of `itemsize` bytes each.
    Raises ValueError where plan and shape do not fit.
    """
    numbers = {"layernorm": 2, "rmsnorm": 1}.get(shape.norm, 0)
    split = plan.tp if plan.sequence_parallel else 1
    return numbers * itemsize * shape.norms_per_layer * plan.microbatch * plan.seq // (plan.cp * split)
