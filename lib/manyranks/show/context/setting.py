"""Chapter 07's settings: a layer's attention on every rank, forward and backward, and its bytes."""

import functools
from collections import namedtuple

from manyranks.show import limits
from manyranks.show.scenario import SHAPES, Scenario
from manyranks.theory import Plan, clusters, context, traffic
from manyranks.theory.context import room
from manyranks.theory.context.sends import Sizes
from manyranks.theory.context.times import Times, inner, of_ranks
from manyranks.theory.kernels import DEFAULT
from manyranks.theory.names import nearest

# name -> how it is split beside the sequence. Llama 3 405B: arXiv 2407.21783, Table 4, the row of 131,072 tokens.
_LLAMA = {"tp": 8, "pp": 16, "dp": 8, "batch": 128, "virtual": 8, "embedding_slots": True, "precision": "bf16-fp32-gradients"}
_LARGE = {"llama3-405b": _LLAMA, "gpt3-175b": {"dp": 64, "zero": 3}}
MODELS = {"llama3-8b": {"dp": 8, "zero": 3}, **_LARGE, "small GPT": {}}
VARIANTS = ("ring", "all-gather", "ulysses", "ring-ulysses")
LENGTHS, RANKS = [2**k for k in range(10, 21)], [2**k for k in range(7)]
TILE = 128  # of flash attention's kernels


_longest = functools.lru_cache(maxsize=4096)(context.longest)


class Setting(namedtuple("Setting", "model cluster seq cp causal layout variant"), limits.Setting):
    """Holds what the controls say: one sequence of seq tokens on cp ranks, each `tp` ranks after the one before."""

    @property
    def scenario(self) -> Scenario:
        """Returns the step around it, causal and zigzag, with a ring for ring-ulysses. Raises ValueError for an unknown name,
        where Ulysses cannot share the heads, and for more GPUs than the cluster has."""
        self.bytes()
        shape, variant = SHAPES[self.model], "ring" if self.variant == "ring-ulysses" else self.variant
        plan = Plan(cp=self.cp, seq=self.seq, context=variant, **MODELS[self.model])
        here = Scenario(shape, plan, clusters[self.cluster])
        here.time  # noqa: B018 - raises
        return here

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
        return inner(self.sizes, self.variant, self.together)

    def bytes(self) -> int:
        """Returns the bytes that a rank sends for a layer. Raises ValueError where Ulysses cannot share the heads."""
        if self.variant not in VARIANTS:
            raise ValueError(f"variant {self.variant!r}: {nearest(self.variant, VARIANTS)}")
        try:  # an all-gather sends the bytes of a ring
            return context.ring_ulysses(*self.sizes[:-1], self.cp // self.together, self.together).both.bytes
        except ValueError as error:
            others = ", ".join(name for name in VARIANTS if name != self.variant)
            raise ValueError(f"{self.model}: {error}, or take another variant: {others}") from error

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

    @functools.lru_cache(maxsize=4096)  # noqa: B019 a setting is a few numbers
    def times(self) -> Times:
        """Raises ValueError as bytes does."""
        self.bytes()
        mask = self.layout, self.causal, TILE
        return of_ranks(self.sizes, clusters[self.cluster], self.variant, self.together, *mask, stride=self.tp)

    def longest(self) -> int:
        """Returns the tokens of the longest sequence that fits."""
        here = self._replace(seq=LENGTHS[0]).scenario
        return _longest(here.shape, here.plan, here.cluster)

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
