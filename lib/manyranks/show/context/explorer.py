"""Chapter 07's explorer: what each rank computes and waits for in attention over a sequence that many ranks share."""

import functools
import math
from collections import namedtuple
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import PathPatch

from manyranks.show import style, units
from manyranks.show.bars import NOTHING, Bars, joined
from manyranks.show.explorer import Board, Explorer, Measure, Part, Setting, choice
from manyranks.show.labels import Labels, word
from manyranks.show.lines import SECONDS, ticks
from manyranks.show.scenario import SHAPES, SHARED, Scenario, controls
from manyranks.show.setting import MUCH
from manyranks.show.units import percent
from manyranks.theory import Plan, clusters, context, network
from manyranks.theory.calls import HALF
from manyranks.theory.context.sends import Sizes
from manyranks.theory.context.times import AttentionTimes, Pass, inner, of_ranks
from manyranks.theory.kernels import DEFAULT
from manyranks.theory.names import nearest

# name -> how else it's split. Llama 3 405B: arXiv 2407.21783, Table 4, the row of 131,072 tokens.
_LLAMA = {"pp": 16, "dp": 8, "batch": 128, "virtual": 8, "embedding_slots": True, "precision": "bf16-fp32-gradients"}
MODELS = {"llama3-8b": {"dp": 8, "zero": 3}, "llama3-405b": _LLAMA, "gpt3-175b": {"dp": 64, "zero": 3}, "small GPT": {}}
VARIANTS = ("ring", "all-gather", "ulysses", "ring-ulysses")
LENGTHS, RANKS = [2**k for k in range(10, 21)], SHARED["cp"][1]
TILE = 128  # of flash attention's kernels
CLUSTERS = ("h100-dgx", "a100-dgx", "b200-dgx", "gb200-nvl72", "tpu-v5p", "laptop")
SHOWN = 16  # ranks, and hops
_NOT = "not possible"
_CHOICES = {"variant": VARIANTS, "layout": context.LAYOUTS}
_REMEDIES = {"slower": ["layout"], "messages": ["variant"]}
_PRINTS = {"attention takes": 'duration(attention.both("seconds"))'}
for _part, _name in {"slower": "waits for slower ranks", "messages": "waits for messages"}.items():
    _PRINTS[_name] = f'percent(attention.both("{_part}") / attention.both("seconds"))'
_PARTS = {"compute": (style.BLUE, ""), "waits for slower ranks": ("#78787855", "")}
_PARTS |= {"waits for messages": (style.ORANGE, "////")}
_longest = functools.lru_cache(maxsize=4096)(context.longest)


class Shared(namedtuple("Shared", "model cluster seq cp tp causal layout variant ulysses"), Setting):
    """Holds what the controls say: one sequence of seq tokens on cp ranks, each `tp` ranks after the one before.

    ulysses: how many ranks exchange heads if a ring is around them; 0 for as many as a node has and the heads allow
    """

    choices, remedies, room = _CHOICES, _REMEDIES, ("cp", "tp")
    note = "The step time assumes a causal mask, evenly balanced ranks, and a plain ring in place of ring-ulysses."

    @property
    def scenario(self) -> Scenario:
        """The step around it: causal, zigzag, ring-ulysses as a ring. Raises ValueError as bytes does and for too many GPUs."""
        self.bytes()
        variant = "ring" if self.variant == "ring-ulysses" else self.variant
        plan = Plan(cp=self.cp, tp=self.tp, seq=self.seq, context=variant, **MODELS[self.model])
        return Scenario(SHAPES[self.model], plan, clusters[self.cluster]).checked()

    @property
    def sizes(self) -> Sizes:
        """Returns the whole attention's sizes, with one rank's heads, before Ulysses deals them out."""
        shape, t = SHAPES[self.model], self.tp
        return Sizes(1, self.seq, shape.heads // t, max(1, shape.kv_heads // t), shape.head_size, self.cp)

    @property
    def together(self) -> int:
        """Returns the ranks of one all-to-all; with a ring around it, as many of a node as divide the heads."""
        if self.variant != "ring-ulysses":
            return self.cp if self.variant == "ulysses" else 1
        if self.ulysses:
            return self.ulysses
        most = min(self.cp, max(1, clusters[self.cluster].node // self.tp))
        return max(u for u in RANKS if u <= most and self.sizes.heads % u == 0)

    @property
    def ring(self) -> Sizes:
        """Returns the sizes of a ring's attention: some heads of more tokens, if Ulysses is inside; n: its ranks."""
        return inner(self.sizes, self.variant, self.together)

    def bytes(self) -> int:
        """Returns the bytes that a rank sends for a layer. Raises ValueError where Ulysses cannot share the heads."""
        if self.variant not in VARIANTS:
            raise ValueError(f"variant {self.variant!r}: {nearest(self.variant, VARIANTS)}")
        if (heads := SHAPES[self.model].heads) % self.tp:
            raise ValueError(f"{self.model}: t = {self.tp} does not divide its {heads} heads: choose a divisor of {heads}")
        if self.cp % self.together:
            raise ValueError(f"{self.together} ranks that exchange heads don't divide c = {self.cp}: choose a divisor of it")
        try:  # an all-gather sends the bytes of a ring
            return context.ring_ulysses(*self.sizes[:-1], self.cp // self.together, self.together).both.bytes
        except ValueError as error:
            others = ", ".join(name for name in VARIANTS if name != self.variant)
            said = str(error).replace("n=", "cp=", 1)
            raise ValueError(f"{self.model}: {said}, or take another variant: {others}") from error

    @property
    def seconds(self) -> float:
        return self.times().both("seconds")

    @property
    def cost(self) -> float:
        """Returns its GPU-seconds, on all ranks together."""
        return self.cp * self.seconds

    @property
    def fits(self) -> bool:
        """Returns whether the whole model does on the fullest rank, with other ranks' keys and values of one layer."""
        here = self.scenario
        return here.peak.total + context.of_others(here.shape, here.plan) <= here.cluster.accelerator.memory

    @functools.lru_cache(maxsize=4096)  # noqa: B019 a setting is a few numbers
    def times(self) -> AttentionTimes:
        """Raises ValueError as bytes does."""
        self.bytes()
        mask = self.layout, self.causal, TILE
        return of_ranks(self.sizes, clusters[self.cluster], self.variant, self.together, *mask, stride=self.tp)

    def spent(self) -> list[float]:
        """Returns the seconds of _PARTS, forward and backward."""
        return [self.times().both(part) for part in ("computing", "slower", "messages")]

    def longest(self) -> int:
        """Returns the tokens of the longest sequence that fits."""
        here = self._replace(seq=LENGTHS[0]).scenario
        return _longest(here.shape, here.plan, here.cluster)

    def hop(self) -> tuple[float, float]:
        """Seconds forward of what is computed while a message travels, by the slowest rank, and of that message; of a variant
        without hops of the whole."""
        ring, cluster = self.ring, clusters[self.cluster]
        if ring.n == 1:
            return float(self.times().forward.hops[0]), self.times().forward.messages
        two = ring._replace(seq=2 * self.seq // ring.n, n=2)  # with the same shards: its second hop is like all but the first
        message = network.hop(cluster.route(ring.n, self.tp * self.together), 2 * HALF * ring.keys, DEFAULT)
        return context.hops(*two, cluster, self.layout, self.causal, TILE).compute[1], message

    def where(self) -> str:
        return f"{self.model}, s = {self.seq:,}, CP {self.cp}, {self.cluster}"

    def numbers(self) -> dict[str, str]:
        longest, (_, slower, messages) = self.longest(), (percent(each / self.seconds) for each in self.spent())
        numbers = {"attention takes": units.duration(self.seconds), "waits for slower ranks": slower}
        numbers |= {"waits for messages": messages}
        return numbers | {"a rank sends": units.size(self.bytes()), "fits up to": f"s = {longest:,}" if longest else "none"}

    def code(self) -> str:
        sizes, together, mask = tuple(self.sizes), self.together, (self.layout, self.causal, TILE)
        lines = f"sizes = context.sends.Sizes{sizes}\n"
        lines += (
            f"attention = context.times.of_ranks(sizes, cluster, {self.variant!r}, {together}, *{mask}, stride={self.tp})\n"
        )
        return self.scenario.code(_PRINTS, "context", lines.replace("'", '"'))

    def limits(self) -> str:
        if not self.fits:
            helps = "recompute whole layers (chapter 04), or cut the model further (chapters 03, 05, 06)"
            return self.memory(f"no value of c or t makes it fit: {helps}")
        if self.cp == 1:
            return "compute: one rank sends nothing"
        (computing, slower, messages), (alone, *_) = self.spent(), self._replace(cp=1, variant="ring").spent()
        shares = {"slower": slower, "messages": messages, "small": computing - alone / self.cp}
        part = max(shares, key=shares.get)
        if shares[part] < MUCH * self.seconds:
            return "compute"
        if part == "small":
            return f"small blocks: {self.cp} GPUs use {units.three(self.cp * computing / alone)} times the GPU time of one"
        takes = self.takes(part, lambda cost: units.duration(cost / self.cp))
        if part == "slower":
            return f"waiting for the slowest rank{takes}"
        inside = self.cp * self.scenario.plan.tp <= self.scenario.cluster.node or self.scenario.cluster.torus
        return f"messages {'inside a node' if inside else 'between nodes'}{takes}"


class _Timeline:
    """Forward, hop by hop: a row for each rank, of many for some."""

    def __init__(self, axes: Axes):
        self._axes, self._says = axes, []
        self._paths = {part: PathPatch(NOTHING, facecolor=c, hatch=h) for part, (c, h) in _PARTS.items()}
        for part, path in self._paths.items():
            axes.add_patch(path).set(edgecolor="white", linewidth=0.5, label=part)
        self._ends = axes.plot([], [], color=style.INK, linestyle=":", linewidth=0.8)[0]
        self._names = Labels(axes, size=8.5, left=1, outline=word, name="ranks")
        self._words = Labels(axes, size=8.5, outline=word, name="hops")
        self.moving = [*self._paths.values(), self._ends, self._names, self._words]
        axes.set(xlim=(0, 1), ylim=(1, 0), xticks=[])
        axes.set_yticks([0.5], ["rank 63"], color="none")  # keeps room for the names
        axes.tick_params(length=0, grid_linewidth=0)
        axes.set_title("Forward, rank by rank", pad=20)
        axes.set_xlabel("time; dotted: the end of a hop", labelpad=18)

    def update(self, one: Pass) -> None:
        n, count, whole = len(one.own), len(one.hops), one.seconds
        ranks = np.linspace(0, n - 1, min(n, SHOWN)).round().astype(int)
        own, hops, late, before = np.array(one.own)[ranks], one.hops, one.late, one.before
        if count > SHOWN:  # the sums
            own, hops, late, before = own.sum(axis=1, keepdims=True), [np.sum(hops)], [one.messages], 0.0
        # Messages before and after all hops are late in a hop without computing.
        own, hops = np.pad(own, ((0, 0), (1, 1))), np.array([0, *hops, 0])
        late = np.array([before, *late, one.messages - before - sum(late)])
        starts = np.cumsum([0, *(hops + late)]) / whole
        edges = starts[:-1] + np.stack(np.broadcast_arrays(0, own, hops, hops + late)) / whole
        top, bottom = ((np.arange(len(ranks))[:, None] + at) / len(ranks) for at in (0.1, 0.9))
        for path, left, right in zip(self._paths.values(), edges, edges[1:], strict=False):
            path.set_path(joined(np.stack(np.broadcast_arrays(left, right, top, bottom), axis=-1)))
        spent = zip(own.sum(axis=1), (hops - own).sum(axis=1), [one.messages] * len(ranks), strict=True)
        said = (", ".join(map("{} {}".format, _PARTS, map(units.duration, seconds))) for seconds in spent)
        self._says = [f"rank {rank}, forward: {each}" for rank, each in zip(ranks, said, strict=True)]
        starts = starts[1:-1] if 1 < count <= SHOWN else ()
        self._ends.set_data([x for end in starts[1:] for x in (end, end, math.nan)], [0, 1, math.nan] * len(starts[1:]))
        every = 1 if count <= SHOWN // 2 else 2  # many hops are narrower than two digits
        above = {(a + b) / 2: f"{hop}" for hop, (a, b) in enumerate(pairwise(starts)) if hop % every == 0}
        above |= {0.5: f"sum of {count} hops"} if count > SHOWN else {}
        places = [(0, 1.035), (1, 1.035), *((x, -0.025) for x in above)]
        self._words.write(places, ["0", units.duration(whole), *above.values()])
        middles = [(-0.015, (row + 0.5) / len(ranks)) for row in range(len(ranks))]
        self._names.write(middles, [f"rank {rank}" for rank in ranks])

    def parts(self) -> Iterator[Part]:
        high = 1 / len(self._says)
        return (Part(self._axes, 0, 1, (row + 0.9) * high, (row + 0.1) * high, says) for row, says in enumerate(self._says))


class _Lengths:
    """Seconds of a hop and of its message over s."""

    def __init__(self, axes: Axes):
        look = {"markersize": 3.5, "linewidth": 1.6}
        self._computing = axes.plot([], [], "o-", color=style.BLUE, label="compute, slowest rank", **look)[0]
        self._message = axes.plot([], [], "s--", color=style.ORANGE, label="message", **look)[0]
        self._now = axes.plot([], [], color=style.INK, linestyle=":", linewidth=1.4, gid="now")[0]
        self._words = Labels(axes, size=8.5, left=0, outline=word, within=axes.transAxes)
        self.moving = [self._computing, self._message, self._now, self._words]
        axes.set(xscale="log", yscale="log", xlim=(LENGTHS[0] / 1.2, 1.2 * LENGTHS[-1]), ylim=(1e-6, 1e3))
        ticks(axes, (LENGTHS[::4], "{:,}".format), (SECONDS, SECONDS.__getitem__), fontsize=8)
        axes.set_title("Forward: a hop, over s", pad=20)
        axes.legend(loc="lower left", bbox_to_anchor=(-0.02, 0.98), ncols=2, fontsize=8.5, handlelength=2.6, borderaxespad=0.1)

    def update(self, now: Shared) -> None:
        computing, message = zip(*(now._replace(seq=s).hop() for s in LENGTHS), strict=True)
        self._computing.set_data(LENGTHS, computing)
        self._message.set_data(LENGTHS, [seconds or math.nan for seconds in message])
        self._now.set_data([now.seq] * 2, [1e-6, 30])  # up to the words
        late = max((s for s, *each in zip(LENGTHS, computing, message, strict=True) if each[0] < each[1]), default=0)
        hop = "not hidden at any s here" if late == LENGTHS[-1] else f"hidden for s ≥ {max(2 * late, LENGTHS[0]):,}"
        ring = f"one hop, and its message: {hop}" if now.ring.n > 1 else "whole attention: nothing hides its messages"
        self._words.write([(0.02, 0.93)], [ring if now.cp > 1 else "one rank: no messages"])


class Ranks(Board):
    """The attention of one layer: forward rank by rank; compute and message over s; all variants, forward and backward."""

    setting, over = Shared, "cp"

    @style.styled
    def __init__(self):
        self.figure = style.Figure(figsize=(6.45, 3.95), layout="constrained")
        left, above, below = self.figure.subplot_mosaic("ab;ac", width_ratios=(1, 1.35), height_ratios=(1.15, 1)).values()
        self._timeline, self._lengths = _Timeline(left), _Lengths(above)
        title = "Both ways; a rank sends"
        self._variants = Bars(below, _PARTS, title, VARIANTS, units.duration, columns=0, outline=word)
        self.figure.legend(handles=[*self._timeline.moving[:3]], loc="outside upper left", ncols=3, handlelength=1.6)
        self.panels = self._timeline, self._lengths, self._variants

    def draw(self, now: Shared) -> None:
        self._timeline.update(now.times().forward)
        self._lengths.update(now)
        each = [now._replace(variant=name) for name in VARIANTS]
        bars = [dict(zip(_PARTS, one.spent(), strict=True)) if one.possible else {} for one in each]
        texts = [f"{units.duration(one.seconds)}, {units.size(one.bytes())}" if one.possible else _NOT for one in each]
        if each[-1].possible:
            texts[-1] += f", ring of {each[-1].ring.n}"
        self._variants.update(bars, texts, VARIANTS.index(now.variant))

    def idle(self, variant: str, **others) -> dict[str, bool]:
        return {"ulysses": variant != "ring-ulysses"}


def explorer(measure: Measure | None = None) -> Explorer:
    """Opens on contiguous shards, where ranks wait half of the time.

    measure: what "Measure it" runs, of few_ranks
    """
    only = {"model": MODELS, "cluster": CLUSTERS, "seq": LENGTHS, "cp": RANKS}
    zigzag, many = {"layout": "zigzag"}, {"layout": "zigzag", "cp": 64, "seq": 2**15}
    presets = {"zigzag": zigzag, "two nodes": zigzag | {"cp": 16}, "ring × Ulysses": zigzag | {"variant": "ring-ulysses"}}
    presets |= {"64 ranks": many, "no grouped heads": many | {"model": "gpt3-175b"}}
    shared = controls(only, model="llama3-8b", cluster="h100-dgx", seq=2**17, cp=8, tp=1)
    own = {"causal": choice("mask", True, {"causal": True, "full": False})}
    own |= {"layout": choice("layout", "contiguous", context.LAYOUTS), "variant": choice("variant", "ring", VARIANTS)}
    own |= {"ulysses": choice("exchange heads", 0, {"in a node": 0} | {f"{u} ranks": u for u in RANKS[1:6]})}
    return Explorer(Ranks(), presets, measure, **shared, **own)
