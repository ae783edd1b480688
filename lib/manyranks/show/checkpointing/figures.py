"""Chapter 04: peaks over the number of layers; a plan as a picture; an explorer: activation memory against extra compute."""

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from manyranks.show import style, units
from manyranks.show.bars import Bars
from manyranks.show.explorer import Explorer, choice, log_slider, value_slider
from manyranks.show.lines import curves
from manyranks.theory import Plan, checkpointing, flops, models
from manyranks.theory.checkpointing import BACKWARD, KEEP, STORE, Action, Layer
from manyranks.theory.layer import FLASH_BACKWARD
from manyranks.theory.names import Named

KEEP_ALL, EVERY, SEGMENTS, INPUT, OPTIMAL = "keep everything", "every layer", "C segments", "from the input", "optimal"
STRATEGIES = dict(zip((KEEP_ALL, EVERY, SEGMENTS, INPUT, OPTIMAL), "os^vP", strict=True))  # with their markers
# flash and recompute of Plan, and how often each attention core is computed again, whatever the strategy is
_CORE = {"core kept": (False, "none", 0), "selective": (False, "selective", 1), "flash": (True, "none", FLASH_BACKWARD - 2)}
ATTENTION = Named("attention", _CORE)
_MODELS = ("gpt2-xl", "llama3-8b", "megatron-22b", "llama3-70b", "megatron-175b", "llama3-405b", "megatron-530b", "megatron-1t")
_BUDGETS = [1e9 * k for k in (1, 2, 4, 8, 16, 24, 32, 40, 64, 80, 128, 192)]
_HELD = {
    "checkpoints": (style.BLUE, ""),
    "gradients": (style.GREEN, "...."),
    "attention scores": (style.PINK, "\\\\\\\\"),
    "other kept activations": (style.ORANGE, "////"),
}
_ACTIONS = {"F": ("forward", "#56B4E9", ""), "R": ("forward again", style.YELLOW, "////"), "B": ("backward", style.GREEN, "")}
_SLOTS = 128  # into which the memory is cut where layers are computed more than twice
_SWITCH = Named("sequence_parallel", {"on": True, "off": False})
Curves = Mapping[str, Sequence[float]]


class Point(NamedTuple):
    """A strategy for equal layers at its fullest moment, in the backward of a layer: layers' inputs that are stored, and layers
    that are kept, beside two gradients. forwards: of one layer, those that it adds."""

    stored: float
    kept: int
    forwards: float

    def bytes(self, layer: Layer) -> int:
        return round((self.stored + 2) * layer.output) + self.kept * layer.saved


class Setting(NamedTuple):
    """What the controls say. sequence_parallel: "on" or "off"; attention: a key of ATTENTION; count: C; budget: bytes."""

    model: str
    seq: int
    microbatch: int
    tp: int
    sequence_parallel: str
    attention: str
    strategy: str
    count: int
    budget: float

    def layer(self) -> Layer:
        """Of the model on one rank; embedding and head are left out."""
        flash, recompute, _ = ATTENTION[self.attention]
        split = {"tp": self.tp, "sequence_parallel": _SWITCH[self.sequence_parallel]}
        plan = Plan(seq=self.seq, microbatch=self.microbatch, flash=flash, recompute=recompute, **split)
        return checkpointing.chain_of(models[self.model], plan)[0]

    def points(self) -> dict[str, Point]:
        """Every strategy's; no more segments than layers. The optimal plan: the smallest, where none is within the budget."""
        n, layer = models[self.model].layers, self.layer()
        plans = front(n, layer)
        fit = [point for point in plans if point.bytes(layer) <= self.budget]
        cut = segments(n, n, layer), segments(n, min(self.count, n), layer)
        each = Point(0, n, 0), *cut, Point(1, 1, n * (n + 1) / 2), fit[-1] if fit else plans[0]
        return Named("strategy", dict(zip(STRATEGIES, each, strict=True)))

    def extra(self, forwards: np.ndarray) -> np.ndarray:
        """FLOPs that are computed again with so many forwards of a layer, in % of a step's without."""
        shape, parts = models[self.model], flops.forward(models[self.model], self.seq)
        again = np.asarray(forwards) * parts.layers / shape.layers + ATTENTION[self.attention][2] * parts.core
        return 100 * again / flops.per_token(shape, self.seq)

    def parts(self, point: Point) -> dict[str, float]:
        """The bytes of _HELD. Scores: what flash attention would not keep."""
        layer = self.layer()
        scores = layer.saved - self._replace(attention="flash").layer().saved if self.attention == "core kept" else 0
        sizes = point.stored * layer.output, 2 * layer.output, point.kept * scores, point.kept * (layer.saved - scores)
        return dict(zip(_HELD, sizes, strict=True))


def segments(n: int, count: int, layer: Layer) -> Point:
    """Of checkpointing.segments: fullest in the last segment, or in the last of those that are a layer longer."""
    short, longer = divmod(n, count)
    both = [Point(count - 1, short, n), *([Point(longer - 1, short + 1, n)] if longer else [])]
    return max(both, key=lambda point: point.bytes(layer))


@functools.lru_cache(maxsize=256)
def front(n: int, layer: Layer) -> tuple[Point, ...]:
    """The plans of n equal layers than which none is smaller and as fast, as optimal_checkpoints.Schedules finds them, the
    smallest first. Exact where a layer saves a multiple of its output, else to a forward of a layer or a slot of memory."""
    few = sorted(_computed_twice(n, layer), key=lambda point: point.bytes(layer))
    found: list[Point] = []
    for point in [*_computed_often(n, layer, few[0].bytes(layer)), *few]:
        if not found or point.forwards < found[-1].forwards:
            found.append(point)
    return tuple(found)


def _computed_twice(n: int, layer: Layer) -> Iterator[Point]:
    """For each number of layers kept from the start: as few checkpoints as do. A segment that is done frees a checkpoint, so
    the segments before it are longer."""
    for kept in range(1, n + 1):
        stored, reached = 0, kept
        while reached < n:
            stored += 1
            reached += kept + stored * layer.output // layer.saved
        yield Point(stored, kept, n - kept)


def _computed_often(n: int, layer: Layer, below: int) -> Iterator[Point]:
    """In less memory, where one layer is kept from the start: the recurrence of optimal_checkpoints for all memories at once;
    m: slots beside those of that layer and two gradients."""
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
            yield Point(m / output, 1, forwards)


class Tradeoff:
    """Left: the memory and the extra FLOPs of every strategy, and of all optimal plans; right: what the strategies hold."""

    @style.styled
    def __init__(self):
        self.figure = style.Figure(figsize=(9.4, 4.4), layout="constrained")
        both, held = self.figure.subplots(1, 2, width_ratios=(1.2, 1))
        self._front = both.step([], [], color=style.INK, linewidth=1.2, where="post", label="all optimal plans")[0]
        self._dots = [both.plot([], [], mark, label=name, markersize=8)[0] for name, mark in STRATEGIES.items()]
        self._ring = both.plot([], [], "o", color="none", markeredgecolor=style.INK, markersize=15, markeredgewidth=1.8)[0]
        self._ring.set_gid("ring")
        self._room = both.plot([], [], color=style.INK, linestyle="--", linewidth=1.4, label="room for activations")[0]
        both.set(xscale="log", xlim=(0.4, 180), ylim=(-5.5, 20000), title="memory against compute")
        both.set_yscale("symlog", linthresh=50, linscale=2)
        both.set_xticks(at := [1, 3, 10, 30, 100], [f"{x}%" for x in at])
        both.set_yticks(at := [0, 10, 20, 30, 40, 100, 1000], [f"{y:,}%" for y in at])
        both.minorticks_off()
        both.set(xlabel="activation memory (share of keeping everything)", ylabel="FLOPs computed again (share of a step)")
        both.legend(loc="upper right", handlelength=1.6)
        self._bars = Bars(held, _HELD, "held at most, and FLOPs again", list(STRATEGIES))
        self.moving: list[Artist] = [self._room, self._front, *self._dots, self._ring, *self._bars.moving]

    def update(self, **values) -> str:
        """Shows the Setting of these values; returns what limits. Raises ValueError for names and degrees that cannot be, and
        for more segments than layers where segments are chosen."""
        now = Setting(**values)
        layer, found, n = now.layer(), now.points(), models[now.model].layers
        chosen, share = found[now.strategy], 100 / found[KEEP_ALL].bytes(layer)
        if now.strategy == SEGMENTS and now.count > n:
            raise ValueError(f"C = {now.count} segments of the {n} layers of {now.model}: choose C up to {n}")
        for line, points in (self._front, front(n, layer)), *zip(self._dots, ([p] for p in found.values()), strict=True):
            line.set_data([share * p.bytes(layer) for p in points], now.extra([p.forwards for p in points]))
        row, sizes = list(STRATEGIES).index(now.strategy), [point.bytes(layer) for point in found.values()]
        self._ring.set_data([share * chosen.bytes(layer)], [now.extra(chosen.forwards)])
        self._room.set_data([share * now.budget] * 2, [-5.5, 60])
        texts = [f"{units.size(p.bytes(layer))}|+{_percent(now.extra(p.forwards))}" for p in found.values()]
        longest = max(min(now.budget, 4 * max(sizes)), min(max(sizes), max(4 * now.budget, sizes[row])))
        room = now.budget, f"room: {units.size(now.budget)}"
        self._bars.update(list(map(now.parts, found.values())), texts, row, longest, room)
        return _status(now, found)


def explorer() -> Explorer:
    """The explorer of chapter 04. It opens on the smallest model of arXiv 2205.05198, Table 3: 8 GPUs, 4 sequences."""
    return Explorer(
        Tradeoff(),
        model=choice("model", "megatron-22b", _MODELS),
        seq=log_slider("sequence length s", 2048, 9, 17, show="{:,}".format),
        microbatch=log_slider("micro-batch b", 4, 0, 5),
        tp=log_slider("tensor parallel t", 8, 0, 4),
        sequence_parallel=choice("sequence parallel", "on", list(_SWITCH)),
        attention=choice("attention", "core kept", list(ATTENTION)),
        strategy=choice("strategy", SEGMENTS, list(STRATEGIES)),
        count=log_slider("segments C", 8, 0, 7),
        budget=value_slider("activations' room", 32e9, _BUDGETS, units.size),
    )


def _percent(value: float) -> str:
    return f"{value:,.0f}%" if value >= 100 else f"{value:.3g}%"


def _status(now: Setting, found: Mapping[str, Point]) -> str:
    size, parts = found[now.strategy].bytes(now.layer()), now.parts(found[now.strategy])
    name = f"C = {now.count} segments" if now.strategy == SEGMENTS else now.strategy
    needs = f"{now.model}, {name}: {units.size(size)} of activations in {units.size(now.budget)}"
    if size > now.budget:
        return f"Does not fit: {needs}. Limit: memory, most of it for {max(parts, key=parts.get)}. {_way_out(now)}"
    extra, best = (now.extra(found[name].forwards) for name in (now.strategy, OPTIMAL))
    again = f"{needs}, and {_percent(extra)} of a step's FLOPs again"
    if best < 0.99 * extra:
        return f"{again}. Limit: computing; the optimal plan for this room needs {_percent(best)}."
    least = "memory: no plan for this room needs less" if found[now.strategy].forwards else "neither memory nor recomputation"
    return f"{again}. Limit: {least}."


def _way_out(now: Setting) -> str:
    """The first of the ways that fits."""
    for name, way in _ways(now):
        point = way.points()[way.strategy]
        if point.bytes(way.layer()) <= now.budget:
            return f"{name} fits, with {_percent(way.extra(point.forwards))} of a step's FLOPs again."
    return "Nothing here helps: give more ranks a part of each sequence (chapter 07)."


def _ways(now: Setting) -> Iterator[tuple[str, Setting]]:
    if now.tp > 1 and now.sequence_parallel == "off":
        yield "Sequence parallelism", now._replace(sequence_parallel="on")
    if now.attention == "core kept":
        yield "Flash attention", now._replace(attention="flash")
    yield "The optimal plan", now._replace(strategy=OPTIMAL)
    degrees = [now.tp, *(t for t in (2, 4, 8, 16) if t > now.tp and models[now.model].heads % t == 0)]
    yield from ((f"t = {t}", now._replace(tp=t)) for t in degrees)
    yield "A micro-batch of 1", now._replace(microbatch=1)
    most = now._replace(attention="flash", sequence_parallel="on", microbatch=1, strategy=OPTIMAL, tp=degrees[-1])
    yield f"The optimal plan of one sequence with flash attention, sequence parallelism and t = {degrees[-1]}", most


@style.styled
def peaks(n: Sequence[int], expected: Curves, measured: Curves, ylabel: str, yunit=units.size) -> style.Figure:
    """A quantity over the layers n, as peak memory: expected as curves, measured as rings. Raises ValueError as curves does."""
    fig = curves(n, expected, "layers N", ylabel, yunit=yunit, xticks=n)
    for name, values in measured.items():
        if len(values) != len(n):
            raise ValueError(f"measured {name!r} has {len(values)} values for {len(n)} places: give one for each")
    rings = [[*n] * len(measured), [value for values in measured.values() for value in values]]
    fig.axes[0].plot(*rings, "o", color=style.INK, fillstyle="none", markersize=11, markeredgewidth=1.2, label="measured")
    fig.axes[0].legend(loc="best")
    return fig


@style.styled
def plan(actions: Sequence[Action], chain: Sequence[Layer] = (), gradient: int = 0, yunit=units.size) -> style.Figure:
    """A plan as a grid: a column for each action, a row for each layer; below it what is held, at each action's fullest moment.

    chain, gradient: as for checkpointing.run; without a chain, all that a layer saves is its output, of size 1. yunit: size ->
    text. Raises ValueError as run does, and for no layer or more than 16.
    """
    n = max((action.layer for action in actions), default=0)
    if not 1 <= n <= 16:
        raise ValueError(f"a plan for {n} layers: give one for 1 to 16, as checkpointing.segments(9, 3)")
    outcome = checkpointing.run(chain or [Layer(1, 2, 1, 1)] * n, actions, gradient)
    held = [size for action, size in zip(actions, outcome.held, strict=True) if action.kind != STORE]
    fig = style.Figure(figsize=(8.6, 2.6 + 0.24 * n), layout="constrained")
    grid, below = fig.subplots(2, 1, sharex=True, height_ratios=(max(n, 3), 5))
    _draw(grid, actions)
    grid.set(ylabel="layer", yticks=range(1, n + 1), ylim=(0.4, n + 0.7), xlim=(0, len(held)))
    handles = dict(zip(*reversed(grid.get_legend_handles_labels()), strict=True))
    fig.legend(handles.values(), handles, loc="outside upper left", ncols=5)
    below.stairs(held, color=style.BLUE, fill=True)
    below.axhline(outcome.peak, color=style.INK, linestyle="--", linewidth=1)
    unit = yunit if chain else "{:g} activations".format
    below.set(xlabel="actions, one after another", title=f"held: at most {unit(outcome.peak)}")
    below.yaxis.set_major_formatter(lambda size, _: unit(size))
    below.xaxis.set_major_locator(MaxNLocator(integer=True))
    return fig


def _draw(axes: Axes, actions: Sequence[Action]) -> None:
    """The actions, and from when to when a layer's saved bytes, and a stored output, are held."""
    moments = [action for action in actions if action.kind != STORE]
    done, seen, x = {action: end for end, action in enumerate(moments, start=1)}, set(), 0
    for kind, i in actions:
        if kind == STORE:
            at = [x, done.get((BACKWARD, i + 1), x)], [i + 0.5] * 2
            axes.plot(*at, "o-", color=style.INK, markevery=[0], markersize=4, label="stored")
            continue
        if kind == KEEP:
            axes.barh(i, done[BACKWARD, i] - x, 0.9, x, color="#78787855", label="kept")
        letter = "B" if kind == BACKWARD else "R" if i in seen else "F"
        label, colour, hatch = _ACTIONS[letter]
        axes.bar(x + 0.5, 0.8, 0.96, i - 0.4, color=colour, hatch=hatch, edgecolor="white", linewidth=0.3, label=label)
        if len(moments) <= 75:
            axes.text(x + 0.5, i, letter, color=style.BLACK, ha="center", va="center_baseline", fontsize=8)
        seen.add(i)
        x += 1
