"""Chapter 07's settings: a layer's attention on every rank, forward and backward, and its bytes."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from manyranks.show.scenario import SHAPES, Scenario
from manyranks.theory import Plan, clusters, context, traffic
from manyranks.theory.context import room
from manyranks.theory.context.sends import Sizes
from manyranks.theory.kernels import DEFAULT
from manyranks.theory.names import nearest

# name -> how it is split beside the sequence. Llama 3 405B: arXiv 2407.21783, Table 4, the row of 131,072 tokens.
_LLAMA = {"tp": 8, "pp": 16, "dp": 8, "batch": 128, "virtual": 8, "embedding_slots": True, "precision": "bf16-fp32-gradients"}
_LARGE = {"llama3-405b": _LLAMA, "gpt3-175b": {"dp": 64, "zero": 3}}
MODELS = {"llama3-8b": {"dp": 8, "zero": 3}, **_LARGE, "small GPT": {}}
VARIANTS = ("ring", "all-gather", "ulysses", "ring-ulysses")
LENGTHS, RANKS = [2**k for k in range(10, 21)], [2**k for k in range(7)]
TILE = 128  # of flash attention's kernels


class Pass(NamedTuple):
    """Forward or backward, in seconds.

    own: of each rank in each hop; under: what travels under each hop; hops: of the slowest rank in each; late: how much longer
    its message takes; before: what travels before all else. computing: of the mean rank; slower: what that waits for slower
    ones; messages: what nothing hides; seconds: all of it
    """

    own: np.ndarray
    under: np.ndarray
    hops: np.ndarray
    late: np.ndarray
    before: float
    computing: float
    slower: float
    messages: float
    seconds: float

    @classmethod
    def of(cls, own: np.ndarray, under: Sequence[float] = (0.0,), before: float = 0.0, after: float = 0.0) -> "Pass":
        """after: what travels when all is computed."""
        hops, computing = own.max(axis=0), float(own.sum(axis=1).mean())
        late, slower = np.maximum(0.0, under - hops), max(0.0, float(hops.sum()) - computing)
        messages = before + float(late.sum()) + after
        return cls(own, np.array(under), hops, late, before, computing, slower, messages, computing + slower + messages)


class Times(NamedTuple):
    """Holds one layer's attention, forward and backward."""

    forward: Pass
    backward: Pass

    def both(self, part: str) -> float:
        return getattr(self.forward, part) + getattr(self.backward, part)


class Setting(NamedTuple):
    """Holds what the controls say: one sequence of seq tokens on cp ranks, each `tp` ranks after the one before."""

    model: str
    cluster: str
    seq: int
    cp: int
    causal: bool
    layout: str
    variant: str

    @property
    def scenario(self) -> Scenario:
        """Returns the step around it, causal and zigzag, with a ring for ring-ulysses. Raises ValueError for unknown names."""
        shape, variant = SHAPES[self.model], "ring" if self.variant == "ring-ulysses" else self.variant
        plan = Plan(cp=self.cp, seq=self.seq, context=variant, **MODELS[self.model])
        return Scenario(shape, plan, clusters[self.cluster])

    @property
    def sizes(self) -> Sizes:
        """Returns the whole attention's sizes, with one rank's heads, before Ulysses deals them out."""
        shape, t = SHAPES[self.model], self.tp
        return Sizes(1, self.seq, shape.heads // t, max(1, shape.kv_heads // t), shape.head_size, self.cp)

    @property
    def tp(self) -> int:
        return MODELS[self.model].get("tp", 1)

    @property
    def together(self) -> int:
        """Returns the ranks of one all-to-all; with a ring around it, as many of a node as divide the heads."""
        if self.variant != "ring-ulysses":
            return self.cp if self.variant == "ulysses" else 1
        most, u = min(self.cp, max(1, clusters[self.cluster].node // self.tp)), 1
        while 2 * u <= most and self.sizes.heads % (2 * u) == 0:
            u *= 2
        return u

    @property
    def ring(self) -> Sizes:
        """Returns the sizes of a ring's attention: some heads of more tokens, if Ulysses is inside; n: its ranks."""
        u, n = self.together, 1 if self.variant in ("all-gather", "ulysses") else self.cp // self.together
        return self.sizes._replace(heads=self.sizes.heads // u, kv_heads=max(1, self.sizes.kv_heads // u), n=n)

    def bytes(self) -> int:
        """Returns the bytes that a rank sends for a layer. Raises ValueError where Ulysses cannot share the heads."""
        if self.variant not in VARIANTS:
            raise ValueError(f"variant {self.variant!r}: {nearest(self.variant, VARIANTS)}")
        if self.variant == "ring-ulysses":
            return context.ring_ulysses(*self.sizes[:-1], self.ring.n, self.together).both.bytes
        try:
            return context.VARIANTS[self.variant](*self.sizes).both.bytes
        except ValueError as error:
            others = ", ".join(name for name in VARIANTS if name != self.variant)
            raise ValueError(f"{self.model}: {error}, or take another variant: {others}") from error

    @property
    def possible(self) -> bool:
        """Whether the variant can share the heads, and the cluster has so many GPUs."""
        try:
            return self.bytes() >= 0 and self.scenario.plan.gpus <= self.scenario.cluster.levels[-1].size
        except ValueError:
            return False

    @property
    def seconds(self) -> float:
        """Returns the time of a layer's attention, forward and backward."""
        return self.times().both("seconds")

    @property
    def cost(self) -> float:
        """Returns its GPU-seconds, on all ranks together."""
        return self.cp * self.seconds

    @property
    def fits(self) -> bool:
        """Whether the whole model does on the fullest rank, with other ranks' keys and values of one layer."""
        here = self.scenario
        return here.peak.total + room.of_others(here.shape, here.plan) <= here.cluster.accelerator.memory

    def times(self) -> Times:
        """Raises ValueError as bytes does."""
        self.bytes()
        return _times(self)

    def longest(self) -> int:
        """Returns the tokens of the longest sequence that fits."""
        return _longest(self._replace(seq=LENGTHS[0], causal=True, layout=context.LAYOUTS[0]))

    def hop(self) -> tuple[float, float]:
        """Seconds forward of what is computed while a message travels, by the slowest rank, and of that message; of a variant
        without hops of the whole."""
        if self.ring.n == 1:
            whole = self.times().forward
            return float(whole.hops[0]), whole.messages
        # Of two ranks with the same shards the second hop is like all but the first.
        ring, cluster = self.ring, clusters[self.cluster]
        two = ring._replace(seq=2 * self.seq // ring.n, n=2)
        message = traffic.hop(cluster.route(ring.n, self.tp * self.together), 2 * traffic.HALF * ring.keys, DEFAULT)
        return context.hops(*two, cluster, self.layout, self.causal, TILE).compute[1], message


@functools.lru_cache(maxsize=4096)
def _longest(now: Setting) -> int:
    return context.longest(now.scenario.shape, now.scenario.plan, now.scenario.cluster)


@functools.lru_cache(maxsize=4096)
def _times(now: Setting) -> Times:
    return Times(*(_pass(now, backward) for backward in (False, True)))


def _pass(now: Setting, backward: bool) -> Pass:
    cluster, mask, ring, u = clusters[now.cluster], (now.layout, now.causal, TILE), now.ring, now.together
    seconds = context.hops(*ring, cluster, *mask, backward=backward, stride=now.tp * u)
    if now.variant == "all-gather":  # each attends to all gathered keys at once: its share of the whole, and a kernel's start
        scores = np.array(context.totals(context.work(now.seq, now.cp, *mask)), float)[:, None]
        own = DEFAULT.overhead + (seconds.compute[0] - DEFAULT.overhead) * scores / scores.sum()
        numbers, route = 2 * now.cp * now.sizes.keys, cluster.route(now.cp, now.tp)
        gathers = [traffic.gather(route, size * numbers, DEFAULT) for size in (traffic.HALF, traffic.SUMS)[: 1 + backward]]
        return Pass.of(own, (0.0,), *gathers)  # keys and values before, and backward their gradients after
    scores = np.array(context.work(ring.seq, ring.n, *mask), float)
    *under, home = seconds.messages
    before, after = _exchanges(now, backward)
    return Pass.of(np.repeat(scores / scores.max(axis=0) * seconds.compute, u, axis=0), under, before, home + after)


def _exchanges(now: Setting, backward: bool) -> tuple[float, float]:
    """Ulysses' all-to-alls: queries, keys and values before, the output after; backward the other way round."""
    u, sizes = now.together, now.sizes
    if u == 1:
        return 0.0, 0.0
    route, head = clusters[now.cluster].route(u, now.tp), traffic.HALF * sizes.shard * sizes.head_size
    queries, keys = (traffic.exchange(route, head * each, DEFAULT) for each in (sizes.heads, max(sizes.kv_heads, u)))
    both = queries + 2 * keys, queries
    return both[::-1] if backward else both
