"""What chapter 07's explorer shows of a setting: a layer's attention on every rank, forward and backward, and its bytes."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from manyranks.show.tensor_explorer import SMALL
from manyranks.theory import ModelShape, Plan, clusters, context, memory, models, traffic
from manyranks.theory.cluster import Cluster
from manyranks.theory.context import room
from manyranks.theory.context.sends import Sizes
from manyranks.theory.kernels import DEFAULT
from manyranks.theory.names import Named

# name -> shape and how it is split beside the sequence. Llama 3 405B: arXiv 2407.21783, Table 4, the row of 131,072 tokens.
_LLAMA = {"tp": 8, "pp": 16, "dp": 8, "batch": 128, "virtual": 8, "embedding_slots": True, "precision": "bf16-fp32-gradients"}
MODELS = Named(
    "model",
    {
        "llama3-8b": (lambda: models["llama3-8b"], {"dp": 8, "zero": 3}),
        "llama3-405b": (lambda: models["llama3-405b"], _LLAMA),
        "gpt3-175b": (lambda: models["gpt3-175b"], {"dp": 64, "zero": 3}),
        "small GPT": (lambda: SMALL, {}),
    },
)
MASKS = Named("mask", {"causal": True, "full": False})
VARIANTS = ("ring", "all-gather", "ulysses", "ring-ulysses")
LENGTHS, RANKS = [2**k for k in range(10, 21)], [2**k for k in range(7)]
TILE = 128  # of flash attention's kernels


@dataclass(frozen=True, eq=False)
class Pass:
    """Forward or backward, in seconds. own: of each rank in each hop; under: what travels under each hop; before, after:
    what travels when nothing is computed."""

    own: np.ndarray
    under: Sequence[float] | float = 0.0
    before: float = 0.0
    after: float = 0.0

    @cached_property
    def hops(self) -> np.ndarray:
        """Of the slowest rank in each hop."""
        return self.own.max(axis=0)

    @cached_property
    def late(self) -> np.ndarray:
        """How much longer than a hop its message takes."""
        return np.maximum(0.0, self.under - self.hops)

    @cached_property
    def computing(self) -> float:
        """Of the mean rank."""
        return float(self.own.sum(axis=1).mean())

    @cached_property
    def slower(self) -> float:
        """What the mean rank waits for slower ones."""
        return max(0.0, float(self.hops.sum()) - self.computing)

    @cached_property
    def messages(self) -> float:
        """What nothing hides."""
        return self.before + float(self.late.sum()) + self.after

    @cached_property
    def seconds(self) -> float:
        return self.computing + self.slower + self.messages


class Times(NamedTuple):
    """Of one layer's attention, forward and backward."""

    forward: Pass
    backward: Pass

    def both(self, part: str) -> float:
        return getattr(self.forward, part) + getattr(self.backward, part)


class Setting(NamedTuple):
    """What the controls say. One sequence of s tokens on n ranks, each `tp` ranks after the one before."""

    model: str
    cluster: str
    s: int
    n: int
    causal: bool
    layout: str
    variant: str

    @property
    def shape(self) -> ModelShape:
        return MODELS[self.model][0]()

    @property
    def on(self) -> Cluster:
        return clusters[self.cluster]

    @property
    def plan(self) -> Plan:
        variant = "ring" if self.variant == "ring-ulysses" else self.variant
        return Plan(cp=self.n, seq=self.s, context=variant, **MODELS[self.model][1])

    @property
    def tp(self) -> int:
        return MODELS[self.model][1].get("tp", 1)

    @property
    def heads(self) -> tuple[int, int]:
        """Query heads and key/value heads of one rank, before Ulysses deals them out."""
        t = self.tp
        return self.shape.heads // t, max(1, self.shape.kv_heads // t)

    @property
    def sizes(self) -> Sizes:
        """Of the whole attention."""
        return Sizes(1, self.s, *self.heads, self.shape.head_size, self.n)

    @property
    def together(self) -> int:
        """Ranks of one all-to-all. With a ring around it: as many of a node as divide the heads."""
        if self.variant != "ring-ulysses":
            return self.n if self.variant == "ulysses" else 1
        most, u = min(self.n, max(1, self.on.node // self.tp)), 1
        while 2 * u <= most and self.heads[0] % (2 * u) == 0:
            u *= 2
        return u

    @property
    def ring(self) -> int:
        """Ranks of one ring."""
        return 1 if self.variant in ("all-gather", "ulysses") else self.n // self.together

    def bytes(self) -> int:
        """What a rank sends for a layer. Raises ValueError where Ulysses cannot share the heads."""
        if self.variant == "ring-ulysses":
            return context.ring_ulysses(*self.sizes[:-1], self.ring, self.together).both.bytes
        try:
            return context.VARIANTS[self.variant](*self.sizes).both.bytes
        except ValueError as error:
            others = ", ".join(name for name in VARIANTS if name != self.variant)
            raise ValueError(f"{self.model}: {error}, or take another variant: {others}") from error

    @property
    def possible(self) -> bool:
        """Whether the variant can share the heads."""
        try:
            return self.bytes() >= 0
        except ValueError:
            return False

    def times(self) -> Times:
        """Raises ValueError as bytes does."""
        self.bytes()
        return _times(self)

    def balance(self) -> float:
        """Slowest ÷ mean: of what the ranks compute forward, where each hop waits for its slowest."""
        forward = self.times().forward
        return 1 + forward.slower / forward.computing

    def peak(self) -> int:
        """Bytes of the fullest rank of the whole model, with other ranks' keys and values of one layer."""
        return memory.peak(self.shape, self.plan).total + room.of_others(self.shape, self.plan)

    def longest(self) -> int:
        """Tokens of the longest sequence that fits."""
        return _longest(self._replace(s=LENGTHS[0], causal=True, layout=context.LAYOUTS[0]))

    def hop(self) -> tuple[float, float]:
        """Seconds forward of what is computed while a message travels, by the slowest rank, and of that message; of a variant
        without hops of the whole."""
        if self.ring == 1:
            whole = self.times().forward
            return float(whole.hops[0]), whole.messages
        # Of two ranks with the same shards the second hop is like all but the first.
        two = self._ring._replace(seq=2 * self.s // self.ring, n=2)
        return context.hops(*two, self.on, *self._mask).compute[1], self._message()

    @property
    def _ring(self) -> Sizes:
        """What the ring computes: after Ulysses' exchange some heads of more tokens."""
        (heads, kv_heads), u = self.heads, self.together
        return Sizes(1, self.s, heads // u, max(1, kv_heads // u), self.shape.head_size, self.ring)

    @property
    def _mask(self) -> tuple:
        return self.layout, self.causal, TILE

    def _message(self) -> float:
        """Seconds forward of a hop's keys and values."""
        ring = self._ring
        return traffic.hop(self.on.route(ring.n, self.tp * self.together), 2 * traffic.HALF * ring.keys, DEFAULT)


@functools.lru_cache(maxsize=4096)
def _longest(now: Setting) -> int:
    return context.longest(now.shape, now.plan, now.on)


@functools.lru_cache(maxsize=4096)
def _times(now: Setting) -> Times:
    return Times(*(_pass(now, backward) for backward in (False, True)))


def _pass(now: Setting, backward: bool) -> Pass:
    if now.variant == "all-gather":
        return Pass(_shares(now, backward), 0.0, *_gathers(now, backward))
    ring, u = now._ring, now.together
    seconds = context.hops(*ring, now.on, *now._mask, backward=backward, stride=now.tp * u)
    own = np.repeat(_scores(ring.seq, ring.n, now) * seconds.compute, u, axis=0)
    *under, home = seconds.messages
    before, after = _exchanges(now, backward)
    return Pass(own, under, before, home + after)


def _scores(s: int, n: int, now: Setting) -> np.ndarray:
    """Of each rank in each hop ÷ those of the slowest."""
    scores = np.array(context.work(s, n, *now._mask), float)
    return scores / scores.max(axis=0)


def _shares(now: Setting, backward: bool) -> np.ndarray:
    """Seconds of each rank that attends to all gathered keys at once: its share of the whole, and the start of a kernel."""
    alone = context.hops(*now.sizes[:-1], 1, now.on, *now._mask, backward=backward).compute[0]
    scores = np.array(context.totals(context.work(now.s, now.n, *now._mask)), float)[:, None]
    return DEFAULT.overhead + (alone - DEFAULT.overhead) * scores / scores.sum()


def _gathers(now: Setting, backward: bool) -> tuple[float, float]:
    """Keys and values of all tokens before, and backward their gradients after."""
    _, kv_heads = now.heads
    numbers, route = 2 * now.s * kv_heads * now.shape.head_size, now.on.route(now.n, now.tp)
    before, after = (traffic.gather(route, size * numbers, DEFAULT) for size in (traffic.HALF, traffic.SUMS))
    return before, after if backward else 0.0


def _exchanges(now: Setting, backward: bool) -> tuple[float, float]:
    """Ulysses' all-to-alls: queries, keys and values before, the output after; backward the other way round."""
    u, (heads, kv_heads) = now.together, now.heads
    if u == 1:
        return 0.0, 0.0
    head = traffic.HALF * now.s // now.n * now.shape.head_size
    sizes = (head * each for each in (heads, max(kv_heads, u)))
    queries, keys = (traffic.exchange(now.on.route(u, now.tp), size, DEFAULT) for size in sizes)
    both = queries + 2 * keys, queries
    return both[::-1] if backward else both
