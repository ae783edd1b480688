"""Chapter 04's explorer: activation memory against extra compute."""

import functools
from collections import namedtuple
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from manyranks.show import limits, style, units
from manyranks.show.bars import Bars
from manyranks.show.explorer import Explorer, Panels, Part, Said, choice, log_slider, value_slider
from manyranks.show.labels import word
from manyranks.show.scenario import SHAPES, Cost, Scenario, controls, of
from manyranks.theory import Plan, checkpointing, clusters, flops
from manyranks.theory.equal_checkpoints import Point, front, segments
from manyranks.theory.layer import FLASH_BACKWARD
from manyranks.theory.names import Named

KEEP_ALL, EVERY, SEGMENTS, INPUT, OPTIMAL = "keep everything", "every layer", "C segments", "from the input", "optimal"
STRATEGIES = dict(zip((KEEP_ALL, EVERY, SEGMENTS, INPUT, OPTIMAL), "os^vP", strict=True))  # with their markers
# flash and recompute of Plan, and how often each attention core is computed again, whatever the strategy is
_CORE = {"core kept": (False, "none", 0), "selective": (False, "selective", 1), "flash": (True, "none", FLASH_BACKWARD - 2)}
ATTENTION = Named("attention", _CORE)
ONLY = {"seq": [2**k for k in range(9, 18)], "microbatch": [2**k for k in range(6)], "tp": [2**k for k in range(5)]}
ONLY["model"] = ("gpt2-xl", "llama3-8b", "megatron-22b", "llama3-70b", "megatron-175b", "llama3-405b")
ONLY["model"] += ("megatron-530b", "megatron-1t")
_BUDGETS = [1e9 * k for k in (1, 2, 4, 8, 16, 24, 32, 40, 64, 80, 128, 192)]
_HELD = {"checkpoints": (style.BLUE, ""), "gradients": (style.GREEN, "....")}
_HELD |= {"attention scores": (style.PINK, "\\\\\\\\"), "other activations": (style.ORANGE, "////")}
_ROOM = {"sequence_parallel": [True], "attention": ["flash"], "strategy": [OPTIMAL], "tp": ONLY["tp"], "microbatch": [1]}
_SAID = {"sequence_parallel": "sequence parallelism", "attention": "flash attention", "strategy": "the optimal plan"}
_WAYS = limits.Limits(_ROOM, {}, list(_ROOM), _SAID | {"tp": "t = {}", "microbatch": "a micro-batch of {}"})
_CONTROLS = "model seq microbatch tp sequence_parallel attention strategy count budget"


@dataclass(frozen=True)
class Step(Scenario):
    """A step in which a strategy chooses the layers to keep; its plan's recompute is about attention alone.

    more: bytes to add to what a rank holds when it keeps every layer, 0 or below; again: how often all layers run again
    """

    more: int = 0
    again: float = 0.0

    @property
    def cost(self) -> Cost:
        """Adds, for all layers once again, what recompute="full" adds to "none"."""
        kept = super().cost
        none, full = (Scenario(self.shape, replace(self.plan, recompute=how), self.cluster).cost for how in ("none", "full"))
        seconds = kept.seconds + self.again * (full.seconds - none.seconds)
        waits = kept.exposed * kept.seconds + self.again * (full.exposed * full.seconds - none.exposed * none.seconds)
        return Cost(kept.held + self.more, kept.room, 0.0, waits / seconds, seconds, kept.mfu * kept.seconds / seconds)

    def code(self) -> str:
        """Python that computes the same numbers."""
        lines = super().code().replace("from ", "from dataclasses import replace\n\nfrom ", 1)
        return lines + (
            f"# Layers run {self.again:g} times more than once:\n"
            'ends = (replace(plan, recompute=how) for how in ("none", "full"))\n'
            "none, full = (step.estimate(shape, each, cluster).seconds for each in ends)\n"
            f"print(time.seconds + {self.again:g} * (full - none), memory.peak(shape, plan).total - {-self.more})\n"
        )


class Setting(namedtuple("Setting", _CONTROLS), limits.Setting):
    """Holds what the controls say. attention: a key of ATTENTION; count: C; budget: bytes."""

    @property
    def plan(self) -> Plan:
        """Says how a layer is split and how its attention runs, whatever the strategy."""
        flash, recompute, _ = ATTENTION[self.attention]
        how = {"seq": self.seq, "microbatch": self.microbatch, "tp": self.tp, "sequence_parallel": self.sequence_parallel}
        return Plan(flash=flash, recompute=recompute, **how)

    @functools.cached_property
    def layer(self) -> checkpointing.Layer:
        """Returns a layer on one rank; embedding and head are left out."""
        return checkpointing.chain_of(SHAPES[self.model], self.plan)[0]

    @functools.cached_property
    def scenario(self) -> Scenario:
        """Takes the paper's A100s, and ranks that have all layers."""
        shape, layer = SHAPES[self.model], self.layer
        more = self.point.bytes(layer) - self.points[KEEP_ALL].bytes(layer)
        return Step(shape, self.plan, clusters["a100-dgx"], more=more, again=self.point.forwards / shape.layers)

    @property
    def point(self) -> Point:
        return self.points[self.strategy]

    @property
    def fits(self) -> bool:
        return self.point.bytes(self.layer) <= self.budget

    @property
    def cost(self) -> float:
        """FLOPs that the strategy computes again, in % of a step's."""
        return float(self.extra(self.point.forwards))

    @functools.cached_property
    def best(self) -> float:
        """The same of the optimal plan for this room."""
        return self._replace(strategy=OPTIMAL).cost

    @functools.cached_property
    def points(self) -> dict[str, Point]:
        """Every strategy's; no more segments than layers. The optimal plan: the smallest, where none is within the budget."""
        n, layer = SHAPES[self.model].layers, self.layer
        plans = front(n, layer)
        fit = [point for point in plans if point.bytes(layer) <= self.budget]
        cut = segments(n, n, layer), segments(n, min(self.count, n), layer)
        each = Point(0, n, 0), *cut, Point(1, 1, n * (n + 1) / 2), fit[-1] if fit else plans[0]
        return Named("strategy", dict(zip(STRATEGIES, each, strict=True)))

    def extra(self, forwards: np.ndarray) -> np.ndarray:
        """FLOPs that are computed again with so many forwards of a layer, in % of a step's without."""
        shape, parts = SHAPES[self.model], flops.forward(SHAPES[self.model], self.seq)
        again = np.asarray(forwards) * parts.layers / shape.layers + ATTENTION[self.attention][2] * parts.core
        return 100 * again / flops.per_token(shape, self.seq, "full")

    def parts(self, point: Point) -> dict[str, float]:
        """The bytes of _HELD. Scores: what flash attention would not keep."""
        layer = self.layer
        scores = layer.saved - self._replace(attention="flash").layer.saved if self.attention == "core kept" else 0
        sizes = point.stored * layer.output, 2 * layer.output, point.kept * scores, point.kept * (layer.saved - scores)
        return dict(zip(_HELD, sizes, strict=True))


class Tradeoff(Panels):
    """Left: the memory and the extra FLOPs of every strategy, and of all optimal plans; right: what the strategies hold."""

    @style.styled
    def __init__(self):
        self.figure, (both, held) = style.figure(2, width=9.2, height=3.95, width_ratios=(1.2, 1))
        self._front = both.step([], [], color=style.INK, linewidth=1.2, where="post", label="all optimal plans")[0]
        self._dots = [both.plot([], [], mark, label=name, markersize=8)[0] for name, mark in STRATEGIES.items()]
        self._ring = both.plot([], [], "o", color="none", markeredgecolor=style.INK, markersize=15, markeredgewidth=1.8)[0]
        self._ring.set_gid("ring")
        self._room = both.plot([], [], color=style.INK, linestyle="--", linewidth=1.4, label="activation budget")[0]
        both.set(xscale="log", xlim=(0.4, 180), ylim=(-5.5, 20000), title="memory against compute")
        both.set_yscale("symlog", linthresh=50, linscale=2)
        both.set_xticks(at := [1, 3, 10, 30, 100], [f"{x}%" for x in at])
        both.set_yticks(at := [0, 10, 20, 30, 40, 100, 1000], [f"{y:,}%" for y in at])
        both.minorticks_off()
        both.set(xlabel="activation memory (share of keeping everything)", ylabel="FLOPs recomputed (share of a step)")
        both.legend(loc="upper right", handlelength=1.6)
        self._bars = Bars(held, _HELD, "peak memory, FLOPs recomputed", list(STRATEGIES), outline=word)
        self.panels, self.others = [self._bars], [self._room, self._front, *self._dots, self._ring]

    def update(self, **values) -> Said:
        """Shows the Setting of these values. Raises ValueError for what cannot be, as more segments than layers."""
        now = Setting(**values)
        n, heads = SHAPES[now.model].layers, SHAPES[now.model].heads
        if heads % now.tp:
            raise ValueError(f"t = {now.tp} does not divide the {heads} heads of {now.model}: choose a divisor of them")
        if now.strategy == SEGMENTS and now.count > n:
            raise ValueError(f"C = {now.count} segments of the {n} layers of {now.model}: choose C up to {n}")
        layer, found = now.layer, now.points
        each = front(n, layer), [found[now.strategy]], *([point] for point in found.values())
        row, sizes = list(found).index(now.strategy), [point.bytes(layer) for point in found.values()]
        share = 100 / sizes[0]
        for line, points in zip((self._front, self._ring, *self._dots), each, strict=True):
            line.set_data([share * p.bytes(layer) for p in points], now.extra([p.forwards for p in points]))
        self._room.set_data([share * now.budget] * 2, [-5.5, 60])
        texts = [f"{units.size(p.bytes(layer))}|+{units.short(now.extra(p.forwards))}%" for p in found.values()]
        longest = max(min(now.budget, 4 * max(sizes)), min(max(sizes), max(4 * now.budget, sizes[row])))
        room = now.budget, f"budget: {units.size(now.budget)}"
        self._bars.update([now.parts(point) for point in found.values()], texts, row, longest, room)
        return _said(now)

    def parts(self) -> Iterator[Part]:
        for line in self._dots:
            ((x, y),) = line.get_xydata()
            says = f"{line.get_label()}: {units.short(x)}% of the memory, {units.short(y)}% of a step's FLOPs recomputed"
            yield Part(line.axes, x / 1.1, x * 1.1, 0.93 * y - 2, 1.07 * y + 2, says)
        yield from super().parts()

    def idle(self, tp: int, strategy: str, **values) -> list[str]:
        """C is of segments alone, and one rank has nothing to split."""
        return ["sequence_parallel"] * (tp == 1) + ["count"] * (strategy != SEGMENTS)


def explorer() -> Explorer:
    """Returns the explorer of chapter 04. It opens on the smallest model of arXiv 2205.05198, Table 3: 8 GPUs, 4 sequences."""
    presets = {"16 segments": {"count": 16}, "optimal": {"strategy": OPTIMAL}}
    presets |= {f"optimal, {how}": {"strategy": OPTIMAL, "attention": how} for how in ("selective", "flash")}
    presets["long sequence"] = {"model": "llama3-70b", "seq": 131072, "microbatch": 1, "attention": "flash"}
    shared = controls(ONLY, model="megatron-22b", seq=2048, microbatch=4, tp=8, sequence_parallel=True)
    own = {"attention": choice("attention", "core kept", [*ATTENTION])}
    own |= {"strategy": choice("strategy", SEGMENTS, [*STRATEGIES]), "count": log_slider("segments C", 8, 0, 7)}
    own["budget"] = value_slider("activation budget", 32e9, _BUDGETS, units.size)
    return Explorer(Tradeoff(), presets, **shared, **own)


def _said(now: Setting) -> Said:
    where = f"{now.model}, " + (f"C = {now.count} segments" if now.strategy == SEGMENTS else now.strategy)
    numbers = {"activations": of(units.size(now.point.bytes(now.layer)), units.size(now.budget))}
    numbers["checkpoints + layers kept"] = f"{now.point.stored:.3g} + {now.point.kept}"
    numbers |= {"recomputed": f"{units.short(now.cost)}% of FLOPs", "optimal plan": f"{units.short(now.best)}% of FLOPs"}
    held, room = now.scenario.cost[:2]
    full = f"With the model's states the GPU is too full: {of(units.size(held), units.size(room))}." if held > room else ""
    return Said(where, numbers, _limit(now), now.fits, now.scenario, full)


def _limit(now: Setting) -> str:
    """Says what limits, and the first of the ways out."""
    if now.fits:
        if now.best < 0.99 * now.cost:
            return f"compute; the optimal plan recomputes {units.short(now.best)}% of FLOPs"
        none = "none: every layer fits, so no layer is recomputed as a whole"
        return "budget: no plan within it recomputes less" if now.point.forwards else none
    parts = now.parts(now.point)
    most = f"budget, mainly {max(parts, key=parts.get)}"
    if other := _WAYS.fitting(now):
        return f"{most}: {_WAYS.change(now, other)} fits, with {units.short(other.cost)}% of a step's FLOPs recomputed"
    return f"{most}: no single control helps; change several, or split each sequence over more ranks (chapter 07)"
