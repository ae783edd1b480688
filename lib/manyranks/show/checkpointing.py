"""Chapter 04's pictures: memory through a step, when layers run again, plans and their peaks; memory against compute."""

import functools
from collections import namedtuple
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from manyranks.show import drawings, style, units
from manyranks.show.bars import Bars
from manyranks.show.explorer import Board, Explorer, Measure, Part, Setting, choice, log_slider, value_slider
from manyranks.show.labels import word
from manyranks.show.lines import curves, ring, ticks
from manyranks.show.scenario import BUBBLE, MEMORY, MFU, SHAPES, STEP, Cost, Scenario, controls, of
from manyranks.theory import Plan, checkpointing, clusters, flops, memory
from manyranks.theory.architecture import ModelShape
from manyranks.theory.checkpointing import BACKWARD, KEEP, STORE, Action, Layer, run
from manyranks.theory.equal_checkpoints import Point, everything, from_input, front, segments
from manyranks.theory.layer import FLASH_BACKWARD
from manyranks.theory.names import Named

_ACTIONS = {"F": ("forward", "#56B4E9", ""), "R": ("forward again", style.YELLOW, "////"), "B": ("backward", style.GREEN, "")}
Curves = Mapping[str, Sequence[float]]


def step(shape: ModelShape, plans: Mapping[str, Plan]) -> style.Figure:
    """Draws what one GPU holds through a step with one micro-batch: states, and what its layers have kept so far.

    plans: title -> how it trains; pp=1

    Layers gathered for FSDP aren't counted.
    """
    n, series = shape.layers, {}
    for title, plan in plans.items():
        one, whole = (memory.layer_activations(shape, each) for each in (plan, replace(plan, recompute="none")))
        head = memory.activations(shape, plan) - n * one
        kept = [one * k for k in range(1, n + 1)]
        kept += [n * one + head] + [each + whole - one for each in reversed(kept)]
        states = memory.model_states(shape, plan)._asdict()
        flat = {kind: [states[kind]] * len(kept) for kind in ("parameters", "gradients", "optimizer")}
        series[title] = flat | {"activations": kept}
    return drawings.memory_over_time(series, [(0, n + 1, "forward"), (n + 1, 2 * n + 1, "backward")])


def again(layers: int = 4) -> style.Figure:
    """Draws when a GPU runs each layer, in a step that keeps everything and in one that runs every layer again."""
    forward = [(k, k + 1, f"forward {k}", "compute") for k in range(layers)]
    lanes, phases = {}, {}
    for title, twice in (("keep everything", False), ("keep each layer's input", True)):
        spans, now = list(forward), layers
        for k in reversed(range(layers)):
            repeats = [(f"repeat {k}", 1, "activations")] if twice else []
            for label, length, kind in [*repeats, (f"backward {k}", 2, "gradients")]:
                spans.append((now, now + length, label, kind))
                now += length
        lanes[title], phases[title] = {"GPU": spans}, [(0, layers, "forward"), (layers, now, "backward")]
    return drawings.when(lanes, phases)


@style.styled
def kept_by(sizes: Mapping[str, float], unit: str) -> style.Figure:
    """Draws a bar per module: what it keeps for backward.

    sizes: module -> size
    unit: of the sizes, for the axis
    """
    fig, (axes,) = style.figure(1, 1, 7.2, 0.9 + 0.34 * len(sizes))
    bars = axes.barh(list(sizes), list(sizes.values()), color=style.PINK, edgecolor=style.BLACK, linewidth=0.6)
    axes.bar_label(bars, [f"{size:.3g}" for size in sizes.values()], padding=4)
    axes.set(xlabel=f"kept, in {unit}", xlim=(0, 1.1 * max(sizes.values())))
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    return fig


@style.styled
def peaks(
    n: Sequence[int], expected: Curves, measured: Curves, ylabel: str, yunit: Callable[[float], str] = units.size
) -> style.Figure:
    """A quantity over the layers n, as peak memory: expected as curves, measured as rings. Raises ValueError as curves does."""
    (axes,) = curves(n, expected, "layers N", ylabel, yunit=yunit, xticks=n).axes
    rings = [[*n] * len(measured), [value for values in measured.values() for value in values]]
    axes.plot(*rings, "o", color=style.INK, fillstyle="none", markersize=11, markeredgewidth=1.2, label="measured")
    axes.legend(loc="best")
    return axes.figure


@style.styled
def plan(actions: Sequence[Action], chain: Sequence[Layer] = (), yunit: Callable[[float], str] = units.size) -> style.Figure:
    """A plan as a grid: a column for each action, a row for each layer; below it what is held, at each action's fullest moment.

    chain: as for checkpointing.run; without one, all that a layer saves is its output, of size 1
    yunit: size -> text

    Raises ValueError as run does, and for no layer or more than 16.
    """
    n = max((action.layer for action in actions), default=0)
    if not 1 <= n <= 16:
        raise ValueError(f"a plan for {n} layers: give one for 1 to 16, as checkpointing.segments(9, 3)")
    outcome = run(chain or [Layer(1, 2, 1, 1)] * n, actions)
    held = [size for action, size in zip(actions, outcome.held, strict=True) if action.kind != STORE]
    fig, (grid, below) = style.figure(1, 2, 8.6, 2.6 + 0.24 * n, sharex=True, height_ratios=(max(n, 3), 5))
    _draw(grid, actions)
    grid.set(ylabel="layer", yticks=range(1, n + 1), ylim=(0.4, n + 0.7), xlim=(0, len(held)))
    handles = dict(zip(*reversed(grid.get_legend_handles_labels()), strict=True))
    fig.legend(handles.values(), handles, loc="outside upper left", ncols=5)
    below.stairs(held, color=style.BLUE, fill=True)
    below.axhline(outcome.peak, color=style.INK, linestyle="--", linewidth=1)
    unit = yunit if chain else "{:g} activations".format
    below.set(xlabel="actions, one after another", title=f"held: at most {unit(outcome.peak)}")
    below.yaxis.set_major_formatter(lambda size, _: yunit(size) if chain else f"{size:g}")
    below.xaxis.set_major_locator(MaxNLocator(integer=True))
    return fig


def _draw(axes: Axes, actions: Sequence[Action]) -> None:
    """The actions, and from when to when a layer's saved bytes, and a stored output, are held."""
    moments = [action for action in actions if action.kind != STORE]
    done, seen, x = {action: end for end, action in enumerate(moments, start=1)}, set(), 0
    for kind, i in actions:
        if kind == STORE:
            at = [x, done.get((BACKWARD, i + 1), x)], [i + 0.5] * 2
            axes.plot(*at, "o-", color=style.INK, markevery=[0], markersize=4, label="checkpoint")
            continue
        if kind == KEEP:
            axes.barh(i, done[BACKWARD, i] - x, 0.9, x, color="#78787855", label="kept")
        letter = "B" if kind == BACKWARD else "R" if i in seen else "F"
        label, color, hatch = _ACTIONS[letter]
        axes.bar(x + 0.5, 0.8, 0.96, i - 0.4, color=color, hatch=hatch, edgecolor="white", linewidth=0.3, label=label)
        if len(moments) <= 75:
            axes.text(x + 0.5, i, letter, color=style.BLACK, ha="center", va="center_baseline", fontsize=8)
        seen.add(i)
        x += 1


KEEP_ALL, EVERY, SEGMENTS, INPUT, OPTIMAL = "keep everything", "every layer", "C segments", "from the input", "optimal"
STRATEGIES = dict(zip((KEEP_ALL, EVERY, SEGMENTS, INPUT, OPTIMAL), "os^vP", strict=True))  # with their markers
# flash and recompute of Plan, and how often each attention core is computed again, whatever the strategy is
_CORE = {"core kept": (False, "none", 0), "selective": (False, "selective", 1), "flash": (True, "none", FLASH_BACKWARD - 2)}
ATTENTION = Named("attention", _CORE)
ONLY = {"seq": [2**k for k in range(9, 18)], "microbatch": [2**k for k in range(6)], "tp": [2**k for k in range(5)]}
ONLY |= {"pp": [2**k for k in range(6)]}
ONLY["model"] = ("gpt2-xl", "llama3-8b", "megatron-22b", "llama3-70b", "megatron-175b", "llama3-405b")
ONLY["model"] += ("megatron-530b", "megatron-1t")
_BUDGETS = [1e9 * k for k in (1, 2, 4, 8, 16, 24, 32, 40, 64, 80, 128, 192)]
_HELD = {"checkpoints": (style.BLUE, ""), "gradients": (style.GREEN, "....")}
_HELD |= {"attention scores": (style.PINK, "\\\\\\\\"), "other activations": (style.ORANGE, "////")}
_ROOM = {"sequence_parallel": [True], "attention": ["flash"], "strategy": [OPTIMAL], "tp": ONLY["tp"], "microbatch": [1]}
_peaks = functools.lru_cache(maxsize=4096)(memory.peaks)
_CODE = """none, full = (step.estimate(shape, replace(plan, recompute=how), cluster) for how in ("none", "full"))
seconds = time.seconds + {again} * (full.seconds - none.seconds)
exposed += {again} * sum(getattr(full, axis) - getattr(none, axis) for axis in ("tensor", "pipeline", "data"))
bubble = time.bubble + {again} * (full.bubble - none.bubble)
"""
_PRINTS = {"exposed communication": "percent(exposed / seconds)", STEP: "duration(seconds)"}
_PRINTS |= {MFU: "percent(time.mfu * time.seconds / seconds)", BUBBLE: "percent(bubble / seconds)"}
_WORDS = {"attention": "flash attention", "strategy": "the optimal plan", "microbatch": "a micro-batch of {}"}
_CONTROLS = "model seq microbatch dp tp sequence_parallel pp attention strategy count budget"


@dataclass(frozen=True)
class Step(Scenario):
    """A step with a strategy that chooses the layers to keep; its plan's recompute is about attention alone.

    more: bytes to add to what each pipeline rank holds when it keeps every layer
    again: how often all layers run again
    """

    more: tuple[int, ...] = (0,)
    again: float = 0.0

    @property
    def fullest(self) -> tuple[int, int]:
        """Returns the bytes of the rank that holds the most, and its place in the pipeline."""
        return max((peak.total + self.more[rank], rank) for rank, peak in _peaks(self.shape, self.plan).items())

    @property
    def cost(self) -> Cost:
        """Adds, for all layers once again, what recompute="full" adds to "none"."""
        kept = super().cost
        none, full = (Scenario(self.shape, replace(self.plan, recompute=how), self.cluster).cost for how in ("none", "full"))
        seconds = kept.seconds + self.again * (full.seconds - none.seconds)
        waits = kept.exposed * kept.seconds + self.again * (full.exposed * full.seconds - none.exposed * none.seconds)
        bubble = kept.bubble * kept.seconds + self.again * (full.bubble * full.seconds - none.bubble * none.seconds)
        mfu = kept.mfu * kept.seconds / seconds
        return Cost(self.fullest[0], kept.room, bubble / seconds, waits / seconds, seconds, mfu)

    def code(self) -> str:
        _, rank = self.fullest
        prints = _PRINTS | {MEMORY: f"size(memory.peaks(shape, plan)[{rank}].total + {self.more[rank]})"}
        return super().code(prints, lines=_CODE.format(again=self.again))


class Strategy(namedtuple("Strategy", _CONTROLS), Setting):
    """Holds what the controls say. attention: a key of ATTENTION; count: C; budget: bytes."""

    choices, room = _ROOM, tuple(_ROOM)
    words = _WORDS

    @property
    def plan(self) -> Plan:
        """Says how a layer is split and how its attention runs, whatever the strategy."""
        flash, recompute, _ = ATTENTION[self.attention]
        names = "seq", "microbatch", "dp", "tp", "sequence_parallel", "pp"
        batch = self.dp * self.microbatch * (4 * self.pp if self.pp > 1 else 1)
        how = {name: getattr(self, name) for name in names} | {"zero": 3 if self.pp == 1 else 1, "batch": batch}
        return Plan(flash=flash, recompute=recompute, **how)

    @functools.cached_property
    def layer(self) -> checkpointing.Layer:
        """Returns a layer on one rank; embedding and head are left out."""
        return checkpointing.chain_of(SHAPES[self.model], self.plan)[0]

    @functools.cached_property
    def scenario(self) -> Scenario:
        """Takes H100s. Raises ValueError for stages of unequal length, and for more segments than a rank has layers."""
        shape, n = SHAPES[self.model], self.layers
        if shape.layers % self.pp:
            raise ValueError(f"{self.pp} stages of the {shape.layers} layers of {self.model}: choose a p that divides them")
        if self.strategy == SEGMENTS and self.count > n:
            raise ValueError(f"C = {self.count} segments of {n} layers of {self.model}: choose C up to {n}")
        layer, now, kept = self.layer, self.point, self.points[KEEP_ALL]
        flights = range(self.pp, 0, -1)
        more = tuple(now.bytes(layer, flying) - kept.bytes(layer, flying) for flying in flights)
        return Step(shape, self.plan, clusters["h100-dgx"], more=more, again=now.forwards / n)

    @property
    def layers(self) -> int:
        return -(-SHAPES[self.model].layers // self.pp)

    def bytes(self, point: Point) -> int:
        """Returns what the pipeline's first rank holds of activations: of p micro-batches, with the schedule 1F1B."""
        return point.bytes(self.layer, self.pp)

    @property
    def point(self) -> Point:
        return self.points[self.strategy]

    @property
    def fits(self) -> bool:
        return self.bytes(self.point) <= self.budget

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
        n, layer = self.layers, self.layer
        plans = front(n, layer, self.pp)
        fit = [point for point in plans if self.bytes(point) <= self.budget]
        cut = segments(n, n, layer), segments(n, min(self.count, n), layer)
        each = everything(n), *cut, from_input(n), fit[-1] if fit else plans[0]
        return Named("strategy", dict(zip(STRATEGIES, each, strict=True)))

    def extra(self, forwards: np.ndarray) -> np.ndarray:
        """FLOPs that are computed again with so many forwards of a layer, in % of a step's without."""
        shape, parts = SHAPES[self.model], flops.forward(SHAPES[self.model], self.seq)
        again = np.asarray(forwards) * parts.layers / self.layers + ATTENTION[self.attention][2] * parts.core
        return 100 * again / flops.per_token(shape, self.seq, "full")

    def parts(self, point: Point) -> dict[str, float]:
        """The bytes of _HELD. Scores: what flash attention would not keep."""
        layer = self.layer
        scores = layer.saved - self._replace(attention="flash").layer.saved if self.attention == "core kept" else 0
        inputs, kept = (one + (self.pp - 1) * each for one, each in zip((point.stored, point.kept), point.waiting, strict=True))
        sizes = inputs * layer.output, 2 * layer.output, kept * scores, kept * (layer.saved - scores)
        return dict(zip(_HELD, sizes, strict=True))

    def where(self) -> str:
        return f"{self.model}, " + (f"C = {self.count} segments" if self.strategy == SEGMENTS else self.strategy)

    def numbers(self) -> dict[str, str]:
        numbers = {"activations": of(units.size(self.bytes(self.point)), units.size(self.budget))}
        numbers["checkpoints + layers kept"] = f"{self.point.stored:.3g} + {self.point.kept}"
        return numbers | {"recomputed": _percent(self.cost), "optimal plan": _percent(self.best)}

    @property
    def note(self) -> str:
        held, room = self.scenario.cost[:2]
        stages = f"{4 * self.pp} micro-batches, 1F1B, ZeRO-1; optimal among plans in equal segments. " if self.pp > 1 else ""
        full = of(units.size(held), units.size(room))
        return stages + (f"With the model's states the GPU is too full: {full}." if held > room else "")

    def limits(self) -> str:
        if self.fits:
            if self.best < 0.99 * self.cost:
                return f"compute; the optimal plan recomputes {_percent(self.best)}"
            none = "none: every layer fits, so no layer is recomputed as a whole"
            return "budget: no plan within it recomputes less" if self.point.forwards else none
        parts = self.parts(self.point)
        most = f"budget, mainly {max(parts, key=parts.get)}"
        if other := self.fitting():
            return f"{most}: {self.change(other)} fits, with {units.short(other.cost)}% of a step's FLOPs recomputed"
        return f"{most}: no single control helps; change several, or split each sequence over more ranks (chapter 07)"


def _percent(flops: float) -> str:
    return f"{units.short(flops)}% of FLOPs"


class Tradeoff(Board):
    """Above: the memory and the extra FLOPs of every strategy, and of all optimal plans; below: what the strategies hold."""

    setting, over = Strategy, "count"

    @style.styled
    def __init__(self):
        self.figure, (both, held) = style.figure(1, 2, 6.45, 4.0, height_ratios=(1.25, 1))
        self._front = both.step([], [], color=style.INK, linewidth=1.2, where="post", label="all optimal plans")[0]
        self._dots = [both.plot([], [], mark, label=name, markersize=8)[0] for name, mark in STRATEGIES.items()]
        self._ring = ring(both, markersize=15, clip_on=True, gid="ring")
        self._room = both.plot([], [], color=style.INK, linestyle="--", linewidth=1.4, label="activation budget")[0]
        both.set(xscale="log", xlim=(0.4, 180), ylim=(-5.5, 20000))
        both.set_yscale("symlog", linthresh=50, linscale=2)
        ticks(both, ([1, 3, 10, 30, 100], "{}%".format), ([0, 20, 40, 100, 1000], "{:,}%".format))
        both.set(xlabel="activation memory (share of keeping everything)", ylabel="recomputed (% of FLOPs)")
        both.set_title("memory against compute", pad=42)
        look = {"borderaxespad": 0.1, "columnspacing": 1.0, "handlelength": 1.6, "fontsize": 8.5}
        both.legend(loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncols=4, **look)
        self._bars = Bars(held, _HELD, "peak memory, FLOPs recomputed", list(STRATEGIES), columns=4, outline=word)
        self.panels, self.others = [self._bars], [self._room, self._front, *self._dots, self._ring]

    def draw(self, now: Strategy) -> None:
        layer, found = now.layer, now.points
        each = front(now.layers, layer, now.pp), [found[now.strategy]], *([point] for point in found.values())
        row, sizes = list(found).index(now.strategy), [now.bytes(point) for point in found.values()]
        share = 100 / sizes[0]
        for line, points in zip((self._front, self._ring, *self._dots), each, strict=True):
            line.set_data([share * now.bytes(p) for p in points], now.extra([p.forwards for p in points]))
        self._room.set_data([share * now.budget] * 2, [-5.5, 60])
        texts = [f"{units.size(now.bytes(p))}|+{units.short(now.extra(p.forwards))}%" for p in found.values()]
        longest = max(min(now.budget, 4 * max(sizes)), min(max(sizes), max(4 * now.budget, sizes[row])))
        room = now.budget, f"budget: {units.size(now.budget)}"
        self._bars.update([now.parts(point) for point in found.values()], texts, row, longest, room)

    def at(self, now: Strategy, control: str, degree: int) -> Cost | None:
        """Returns the cost of so many segments, whatever the strategy is now."""
        return super().at(now._replace(strategy=SEGMENTS), control, degree)

    def parts(self) -> Iterator[Part]:
        for line in self._dots:
            ((x, y),) = line.get_xydata()
            says = f"{line.get_label()}: {units.short(x)}% of the memory, {units.short(y)}% of a step's FLOPs recomputed"
            yield Part(line.axes, x / 1.1, x * 1.1, 0.93 * y - 2, 1.07 * y + 2, says)
        yield from super().parts()

    def idle(self, tp: int, strategy: str, **values) -> dict[str, bool]:
        """C is of segments alone, and one rank has nothing to split."""
        return {"sequence_parallel": tp == 1, "count": strategy != SEGMENTS}


def explorer(measure: Measure | None = None) -> Explorer:
    """Opens on Llama 3 8B with FSDP over 64 GPUs.

    measure: what "Measure it" runs, of few_ranks
    """
    presets = {"16 segments": {"count": 16}, "optimal": {"strategy": OPTIMAL}, "pipeline": {"pp": 4, "strategy": EVERY}}
    long = {"model": "llama3-70b", "seq": 131072, "microbatch": 1, "tp": 8, "sequence_parallel": True}
    old = {"model": "megatron-22b", "seq": 2048, "microbatch": 4, "tp": 8, "sequence_parallel": True, "dp": 1}
    presets |= {"long sequence": long, "2022": old | {"attention": "core kept", "strategy": OPTIMAL}}
    shared = controls(ONLY, model="llama3-8b", seq=8192, microbatch=2, dp=64, tp=1, sequence_parallel=False, pp=1)
    own = {"attention": choice("attention", "flash", [*ATTENTION])}
    own |= {"strategy": choice("strategy", SEGMENTS, [*STRATEGIES]), "count": log_slider("segments C", 8, 0, 7)}
    own["budget"] = value_slider("activation budget", 32e9, _BUDGETS, units.size)
    return Explorer(Tradeoff(), presets, measure, **shared, **own)
