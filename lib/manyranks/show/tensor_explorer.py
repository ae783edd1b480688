"""Chapter 06's explorer: what t ranks make of a layer's time and memory, and where the node ends."""

import math
from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import NamedTuple

from matplotlib.artist import Artist
from matplotlib.axes import Axes

from manyranks.show import style, units
from manyranks.show.bars import LONGEST, Bars
from manyranks.show.explorer import Explorer, choice, log_slider
from manyranks.show.labels import Labels, word
from manyranks.theory import ModelShape, Plan, clusters, memory, models, passes, tensor
from manyranks.theory.cluster import Cluster
from manyranks.theory.names import Named
from manyranks.theory.passes import Both

DEGREES = [2**k for k in range(7)]  # 1 to 64
# The sizes of the GPT that this course trains: training.GPTConfig.
SMALL = ModelShape("small GPT", layers=4, hidden=128, ffn=352, heads=4, vocab=256, tied=True)
# name -> shape, tokens of a sequence, sequences of a micro-batch; Megatron's: arXiv 2205.05198, Table 3
_MODELS = {
    "megatron-22b": (lambda: models["megatron-22b"], 2048, 4),
    "megatron-175b": (lambda: models["megatron-175b"], 2048, 1),
    "llama3-405b": (lambda: models["llama3-405b"], 8192, 1),
    "small GPT": (lambda: SMALL, 128, 4),
}
MODELS = Named("model", _MODELS)
CLUSTERS = ("a100-dgx", "v100-dgx", "h100-dgx", "b200-dgx", "gb200-nvl72", "tpu-v5p", "laptop")
# name -> Plan's recompute and flash
RECOMPUTE = Named(
    "recompute",
    {
        "nothing": ("none", False),
        "the core": ("selective", False),
        "the whole layer": ("full", False),
        "nothing, flash attention": ("none", True),
    },
)
_SWITCH = Named("switch", {"on": True, "off": False})
_BACKWARD = "backward, recomputation too"
_TIMES = {"forward": (style.BLUE, ""), _BACKWARD: ("#9ecae1", ""), "communication": (style.ORANGE, "////")}
_KEPT = {"cut by SP only": (style.ORANGE, "////"), "cut by t": (style.BLUE, "")}
_SHOWN = 4  # times the shortest bar of accelerators' time; what is longer ends in an arrow head
_WAITS = LONGEST + 0.16  # where the share of time that waits is written
_SECONDS, _BYTES = ((1, "s"), (1e-3, "ms"), (1e-6, "µs")), ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


class Setting(NamedTuple):
    """What the controls say."""

    model: str
    cluster: str
    t: int
    sequence_parallel: bool
    regather: bool
    overlap: bool
    recompute: str

    @property
    def shape(self) -> ModelShape:
        return MODELS[self.model][0]()

    @property
    def on(self) -> Cluster:
        return clusters[self.cluster]

    def plan(self) -> Plan:
        _, seq, microbatch = MODELS[self.model]
        recompute, flash = RECOMPUTE[self.recompute]
        kept = {"recompute": recompute, "flash": flash, "seq": seq, "microbatch": microbatch}
        split = {"tp": self.t, "sequence_parallel": self.sequence_parallel, "regather": self.regather}
        return Plan(**kept, **split, overlap_tensor=self.overlap)

    def time(self) -> Both:
        """Of one layer. Raises ValueError for a t that the model's sizes do not allow."""
        return passes.of_layer(self.shape, self.plan(), self.on)

    def saved(self) -> tensor.Saved:
        return tensor.saved(self.shape, self.plan())

    def larger_nodes(self) -> Both:
        """The layer's time if the group were in one node."""
        return passes.of_layer(self.shape, self.plan(), self.on.with_nodes_of(self.t))


class _Scale:
    """Ticks below bars, moving artists too: to draw an axis again takes longer than all else in a redraw."""

    def __init__(self, axes: Axes, units: tuple[tuple[float, str], ...], rows: int):
        self._units, self._bottom = units, rows - 0.1
        self._marks = axes.plot([], [], color=style.INK, linestyle="-", linewidth=0.8, clip_on=False, gid="ticks")[0]
        self._labels = Labels(axes, size=8.5, outline=word, name="numbers")
        self.moving = [self._marks, self._labels.artist]

    def update(self, longest: float) -> None:
        """longest: what a bar of the length LONGEST stands for."""
        unit, name = next((each for each in self._units if longest >= each[0]), self._units[-1])
        step = _round_up(longest / unit / 5)
        values = [k * step for k in range(int(longest / unit / step) + 1)]
        places = [value * unit / longest * LONGEST for value in values]
        ends = (self._bottom, self._bottom + 0.12, math.nan)
        self._marks.set_data([x for x in places for _ in ends], [y for _ in places for y in ends])
        self._labels.update([(x, self._bottom + 0.38) for x in places], [f"{value:,.6g} {name}" for value in values])


def _round_up(value: float) -> float:
    """To 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(k * power for k in (1, 2, 5, 10) if k * power >= value)


class Degrees:
    """A row for each t: the time of a layer on all t accelerators together, and what one of them keeps of it.

    With no communication, and nothing done twice, t times the time would be the same in every row.
    """

    @style.styled
    def __init__(self):
        self.figure = style.Figure(figsize=(9.2, 4.3), layout="constrained")
        time, kept = self.figure.subplots(1, 2, sharey=True, width_ratios=(1.25, 1))
        rows = [f"t = {t}" for t in DEGREES]
        self._time = Bars(time, _TIMES, "GPU-time of a layer (t × its time)", rows, outline=word)
        self._kept = Bars(kept, _KEPT, "kept by a layer, a rank", rows, outline=word)
        time.set(xlim=(0, _WAITS + 0.15))
        kept.set(xlim=(0, LONGEST + 0.18))
        self._longer = time.plot([], [], ">", color=style.INK, markersize=7, gid="longer")[0]
        self._waits = Labels(time, left=0, outline=word, name="waits")
        self._scales = _Scale(time, _SECONDS, len(rows)), _Scale(kept, _BYTES, len(rows))
        time.set_xlabel("GPU-time (▶ longer than shown); at the right: the layer's time", labelpad=23, loc="left")
        kept.set_xlabel("bytes kept for backward", labelpad=23, loc="left")
        look = {"color": style.INK, "linestyle": ":", "linewidth": 1.6, "gid": "node ends"}
        self._ends = [axes.axhline(0, **look) for axes in (time, kept)]
        self._node = Labels(kept, left=1, name="node")
        others = *self._ends, self._node.artist, self._longer, self._waits.artist
        self.moving: list[Artist] = [*self._time.moving, *self._kept.moving, *others]
        self.moving += [artist for scale in self._scales for artist in scale.moving]

    def update(
        self, model: str, cluster: str, t: int, sequence_parallel: str, regather: str, overlap: str, recompute: str
    ) -> str:
        """Shows this setting; returns what limits. Raises ValueError for an unknown name, and a t that the model forbids."""
        now = Setting(model, cluster, t, *(_SWITCH[value] for value in (sequence_parallel, regather, overlap)), recompute)
        now.time()
        shown = list(_possible(now))
        times, kept = [each.time() for each in shown], [each.saved() for each in shown]
        missing = ["not this t"] * (len(DEGREES) - len(shown))
        bars = [_split(each.t, both) for each, both in zip(shown, times, strict=True)]
        row = DEGREES.index(t)
        self._draw_time(bars, [units.duration(both.seconds) for both in times] + missing, row)
        self._waits.update([(_WAITS, y) for y in range(len(times))], [f"{_waits(both):.0%} waits" for both in times])
        held = [dict(zip(_KEPT, (each.outside + each.statistics, each.inside), strict=True)) for each in kept]
        most = max(each.total for each in kept)
        self._kept.update(held, [units.size(each.total) for each in kept] + missing, row, most)
        self._scales[1].update(most)
        self._draw_end(now.on)
        return _status(now)

    def _draw_time(self, bars: list[dict[str, float]], texts: list[str], row: int) -> None:
        totals = [sum(bar.values()) for bar in bars]
        at_most = _SHOWN * min(totals)
        longer = [y for y, total in enumerate(totals) if total > at_most]
        self._longer.set_data([LONGEST + 0.004] * len(longer), longer)
        shown = [_first(bar, at_most) for bar in bars]
        longest = max(sum(bar.values()) for bar in shown)
        self._time.update(shown, texts, row, longest)
        self._scales[0].update(longest)

    def _draw_end(self, cluster: Cluster) -> None:
        """The line below the last degree that fits in a node."""
        inside = sum(t <= cluster.node or cluster.torus > 0 for t in DEGREES)
        ends = inside < len(DEGREES)
        for line in self._ends:
            line.set(ydata=[inside - 0.5] * 2, visible=ends)
        self._node.update([(LONGEST, inside - 0.76)] * ends, [f"a node of {cluster.node} ends"] * ends)


def explorer() -> Explorer:
    """The explorer of chapter 06. It opens on Table 4 of arXiv 2205.05198: the 22B model's layer on eight A100s."""
    switch = list(_SWITCH)
    return Explorer(
        Degrees(),
        model=choice("model", "megatron-22b", list(MODELS)),
        cluster=choice("cluster", "a100-dgx", CLUSTERS),
        t=log_slider("tensor ranks t", 8, 0, 6),
        sequence_parallel=choice("sequence parallel", "on", switch),
        regather=choice("gather again", "on", switch),
        overlap=choice("overlap", "on", switch),
        recompute=choice("recompute", "the core", list(RECOMPUTE)),
    )


def _possible(now: Setting) -> Iterator[Setting]:
    """The setting at each t up to the first that the model forbids: no greater power of two is allowed after it."""
    for t in DEGREES:
        each = now._replace(t=t)
        try:
            each.plan().check(now.shape)
        except ValueError:
            return
        yield each


def _split(t: int, both: Both) -> dict[str, float]:
    waits = both.forward.tensor + both.backward.tensor
    return dict(zip(_TIMES, (t * both.forward.compute, t * both.backward.compute, t * waits), strict=True))


def _first(bar: dict[str, float], at_most: float) -> dict[str, float]:
    """The beginning of a bar, as long as this."""
    ends = [min(end, at_most) for end in accumulate(bar.values(), initial=0.0)]
    return {part: end - start for part, (start, end) in zip(bar, pairwise(ends), strict=True)}


def _waits(both: Both) -> float:
    return (both.forward.tensor + both.backward.tensor) / both.seconds


def _status(now: Setting) -> str:
    both, kept = now.time(), now.saved()
    peak, room = memory.peak(now.shape, now.plan()).total, now.on.accelerator.memory
    again = "" if RECOMPUTE[now.recompute][0] == "none" else " with recomputation"
    time = f"a layer takes {units.duration(both.seconds)}{again}, and waits for messages {_waits(both):.0%} of that"
    layer = f"{now.model}, t = {now.t}, {now.cluster}: {time}"
    model = f"it keeps {units.size(kept.total)}; all layers need {units.size(peak)} of {units.size(room)} on each rank"
    if peak > room:
        enough = [each.t for each in _possible(now) if memory.peak(each.shape, each.plan()).total <= room]
        way = f"t = {enough[0]} fits" if enough else "no t helps alone: spread layers over pipeline stages, too (chapter 05)"
        return f"Does not fit: {layer}; {model}. Limit: memory; {way}. Of the time: {_limit(now, both)}."
    return f"{layer}; {model}. Limit: {_limit(now, both)}."


def _limit(now: Setting, both: Both) -> str:
    if now.t == 1:
        return "one accelerator's arithmetic: nothing is cut, nothing is sent"
    if now.t > now.on.node and not now.on.torus:
        inside = now.larger_nodes().seconds
        if inside < 0.95 * both.seconds:
            return f"the node's boundary: in a node of {now.t} it would be {units.duration(inside)}"
    computing, alone = both.forward.compute + both.backward.compute, now._replace(t=1).time().seconds
    more = computing - alone / now.t
    waits = both.seconds - computing
    if max(waits, more) < 0.15 * both.seconds:
        return "computing"
    if waits >= more:
        return f"communication{_remedy(now, both)}"
    repeated = " and norms that every rank repeats" if not now.sequence_parallel else ""
    return (
        f"small products{repeated}: {now.t} accelerators together compute {now.t * computing / alone:.3g} times as long as one"
    )


def _remedy(now: Setting, both: Both) -> str:
    """What a switch would save."""
    hidden = now._replace(overlap=True).time().seconds
    if hidden < 0.97 * both.seconds:
        return f"; with overlap it takes {units.duration(hidden)}"
    return f": {units.duration(_waits(both) * both.seconds)} that only rings in chunks (asynchronous TP) would hide"
