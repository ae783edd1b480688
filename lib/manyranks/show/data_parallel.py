"""Chapter 02: what leaves when in a step; losses; an explorer: step time, efficiency, memory and batch size of N replicas."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.patheffects import withStroke
from matplotlib.textpath import TextPath

from manyranks.show import style, units
from manyranks.show.explorer import Explorer, choice, log_slider
from manyranks.show.gantt import KINDS, Gantt
from manyranks.show.labels import Labels
from manyranks.theory import Plan, batch, clusters, memory, models, step
from manyranks.timeline import Timeline
from manyranks.timeline.spans import COMMUNICATION, COMPUTE, Span

RANKS = [2**k for k in range(11)]  # 1 to 1,024
_MODELS = ("gpt2", "gpt2-xl", "llama3.2-1b", "llama3-8b")
_CLUSTERS = ("h100-dgx", "a100-dgx", "v100-dgx", "b200-dgx")
_PARTS = {"compute": (style.BLUE, ""), "communication": (style.ORANGE, "////"), "optimizer": (style.GREEN, "....")}
_HELD = {
    "parameters": (style.BLUE, ""),
    "gradients": (style.ORANGE, "////"),
    "optimizer": (style.GREEN, "...."),
    "activations": (style.PINK, "\\\\\\\\"),
}


class Setting(NamedTuple):
    """What the controls say. sequences: an accelerator's; critical: the critical batch in tokens; overlap: of the reduction."""

    model: str
    cluster: str
    n: int
    sequences: int
    overlap: bool
    critical: float

    def plan(self, n: int | None = None, overlap: bool | None = None) -> Plan:
        """Data parallelism alone on n accelerators, each with this batch; nothing is sharded."""
        n, each = n or self.n, self.sequences
        overlap = self.overlap if overlap is None else overlap
        return Plan(dp=n, seq=1024, batch=n * each, microbatch=each, zero=0, recompute="none", overlap=overlap)

    def step(self, n: int | None = None, overlap: bool | None = None) -> step.StepTime:
        return step.estimate(models[self.model], self.plan(n, overlap), clusters[self.cluster])

    def efficiency(self, n: int, overlap: bool) -> float:
        """Tokens a second and accelerator, as a share of those on one accelerator."""
        return self.step(1, overlap).seconds / self.step(n, overlap).seconds

    def steps(self, n: int) -> float:
        """Steps to a given loss, as a multiple of the fewest possible."""
        return batch.steps(self.plan(n).tokens, self.critical)

    def examples(self, n: int) -> float:
        """Tokens to a given loss, as a multiple of the fewest possible."""
        return batch.examples(self.plan(n).tokens, self.critical)


class Scaling:
    """Four panels: a step's time, the efficiency of N accelerators, the memory of one, and the time to train."""

    @style.styled
    def __init__(self):
        self.figure, (step_time, efficiency, held, training) = style.figure(columns=2, rows=2, width=9, height=5.3)
        self._step = Stacks(step_time, ("overlapped", "after backward"), _PARTS, units.duration, "time of a step")
        self._held = Stacks(held, ("one GPU",), _HELD, units.size, "memory of one GPU")
        self._efficiency = Curves(efficiency, ("overlapped", "after backward"), "tokens/s a GPU (%)")
        self._training = Curves(training, ("N times as fast", "data parallelism"), "time to train (1 = one GPU)")
        efficiency.set(ylim=(0, 105), title="efficiency")
        training.set(yscale="log", ylim=(1e-4, 2), title="time to a given loss")
        panels = self._step, self._efficiency, self._held, self._training
        self.moving: list[Artist] = [artist for panel in panels for artist in panel.moving]

    def update(self, model: str, cluster: str, n: int, sequences: int, reduce: str, critical: float) -> str:
        """Shows this setting; returns what limits. Raises ValueError for an unknown model or cluster, and numbers below 1."""
        now = Setting(model, cluster, n, sequences, reduce == "overlapped", critical)
        here, one = now.step(), now.step(1)
        self._step.update([_parts(now.step(overlap=True)), _parts(now.step(overlap=False))])
        held, device = _held(now), clusters[cluster].accelerator.memory
        self._held.update([held], limit=(device, "memory"))
        curves = [[100 * now.efficiency(r, overlap) for r in RANKS] for overlap in (True, False)]
        self._efficiency.update(curves, (n, 100 * now.efficiency(n, now.overlap)))
        relative = [now.steps(r) * now.step(r).seconds / now.steps(1) / one.seconds for r in RANKS]
        at = now.steps(n) * here.seconds / now.steps(1) / one.seconds
        self._training.update([[1 / r for r in RANKS], relative], (n, at))
        return _status(now, here, sum(held.values()), device, at)


class Stacks:
    """Horizontal bars of several parts, each with its colour and hatch, under each other."""

    def __init__(self, axes: Axes, names: tuple[str, ...], parts: dict[str, tuple[str, str]], unit, title: str):
        self._unit, self._parts, self._names = unit, parts, names
        self._boxes = {part: axes.add_collection(_part(part, *look), autolim=False) for part, look in parts.items()}
        self._labels = Labels(axes, left=0)
        self._limit = axes.plot([0, 0], [-0.5, len(names) - 0.5], color=style.INK, linestyle="--")[0]
        axes.set(xlim=(0, 1.3), ylim=(len(names) - 0.4, -1.0), xticks=[], title=title)
        axes.set_yticks(range(len(names)), names)
        axes.tick_params(length=0)
        axes.grid(visible=False)
        axes.legend(loc="upper left", ncols=len(parts), columnspacing=1.0, handlelength=1.4, fontsize=8.5)

    @property
    def moving(self) -> list[Artist]:
        return [*self._boxes.values(), self._labels.artist, self._limit]

    def update(self, bars: list[dict[str, float]], limit: tuple[float, str] | None = None) -> None:
        """Shows each bar's parts, and a dashed line at the limit (value, name)."""
        longest = max(*(sum(bar.values()) for bar in bars), limit[0] if limit else 0)
        verts: dict[str, list] = {part: [] for part in self._parts}
        texts = []
        for row, bar in enumerate(bars):
            left = 0.0
            for part, value in bar.items():
                right = left + value / longest
                verts[part].append([(left, row - 0.3), (right, row - 0.3), (right, row + 0.3), (left, row + 0.3)])
                left = right
            texts.append(((left + 0.02, row), self._unit(sum(bar.values()))))
        if limit:
            self._limit.set_xdata([limit[0] / longest] * 2)
            texts.append(((limit[0] / longest + 0.02, 0.45), f"{limit[1]} {self._unit(limit[0])}"))
        self._limit.set_visible(limit is not None)
        for part, boxes in self._boxes.items():
            boxes.set_verts(verts[part])
        self._labels.update([place for place, _ in texts], [text for _, text in texts])


class Curves:
    """Two curves over the number of accelerators, and a mark."""

    def __init__(self, axes: Axes, names: tuple[str, str], ylabel: str):
        looks = ((style.BLUE, "-", "o"), (style.ORANGE, "--", "s"))
        self._lines = [
            axes.semilogx(RANKS, RANKS, base=2, color=c, linestyle=line, marker=m, markersize=4, label=name)[0]
            for name, (c, line, m) in zip(names, looks, strict=True)
        ]
        self._dot = axes.plot([1], [1], "o", color="none", markeredgecolor=style.INK, markersize=11, markeredgewidth=1.8)[0]
        axes.set(xlabel="accelerators N", ylabel=ylabel, xlim=(0.8, 1280))
        axes.set_xticks([1, 4, 16, 64, 256, 1024], ["1", "4", "16", "64", "256", "1,024"])
        axes.minorticks_off()
        axes.legend(loc="lower left")

    @property
    def moving(self) -> list[Artist]:
        return [*self._lines, self._dot]

    def update(self, curves: list[list[float]], at: tuple[float, float]) -> None:
        for line, values in zip(self._lines, curves, strict=True):
            line.set_ydata(values)
        self._dot.set_data([at[0]], [at[1]])


@style.styled
def steps(timelines: Mapping[str, Timeline], rank: int = 0, until: float | None = None) -> style.Figure:
    """What one rank does in each timeline, under each other on one scale: compute, and below it communication.

    A communication bar bears its name, numbered where several have the same, and its size where that was recorded, as far as
    there is room. Lines, and their sum at the right: communication that no compute hides. until: seconds that the axis
    reaches to at least. Raises ValueError for no timeline, and for one without the rank.
    """
    if not timelines or any(rank not in each.ranks for each in timelines.values()):
        ranks = {name: each.ranks for name, each in timelines.items()}
        raise ValueError(f"rank={rank} and timelines of ranks {ranks}: give a Timeline or more, and a rank that all have")
    rows = [each.of(rank) for each in timelines.values()]
    stacked = Timeline(tuple(span._replace(rank=row) for row, spans in enumerate(rows) for span in spans))
    fig, (axes,) = style.figure(width=8, height=1.0 + 0.85 * len(rows))
    chart = Gantt(axes)
    chart.update(stacked, max(until or 0.0, 1.3 * max(span.finished for span in stacked.spans)))  # room for the sums
    axes.set_yticks(range(len(rows)), list(timelines))
    fig.draw_without_rendering()  # places the axes: which names have room depends on their width
    _write_names(chart, stacked)
    for row, each in enumerate(timelines.values()):
        exposed = each.exposed_communication(rank)
        text = f"|—| {units.duration(exposed)} exposed" if exposed > 1e-12 else "nothing exposed"
        axes.text(0.995, row, text, transform=axes.get_yaxis_transform(), ha="right", va="center", fontsize=9)
    return fig


def _write_names(chart: Gantt, stacked: Timeline) -> None:
    """Names the communication bars where there is room, and draws lines over what of them is exposed."""
    spans = [span for span in stacked.spans if span.kind == COMMUNICATION]
    boxes = chart.moving[list(KINDS).index(COMMUNICATION)].get_path().vertices.reshape(len(spans), 5, 2)
    (left, top), (right, bottom) = boxes[:, 0].T, boxes[:, 2].T
    pixels = (right - left) * chart.axes.bbox.width / chart.axes.get_xlim()[1]
    texts = list(map(_that_fits, _names(spans), pixels))
    places = np.column_stack([left + right, top + bottom]) / 2
    labels = Labels(chart.axes, size=8, colour=style.BLACK)
    labels.artist.set_path_effects([withStroke(linewidth=3, foreground="white")])  # over hatches
    labels.update([place for place, text in zip(places, texts, strict=True) if text], list(filter(None, texts)))
    for span, end in zip(spans, right, strict=True):
        for part in _exposed(stacked.of(span.rank, COMPUTE), span):
            x = np.array(part) * end / span.finished  # seconds in the axis's unit
            chart.axes.plot(x, [span.rank - 0.2] * 2, "-|", color=style.INK, linewidth=1.2)


def _names(spans: Sequence[Span]) -> Iterator[tuple[str, ...]]:
    """For each span what it may be called, the longest first. Replay names a collective by its operation alone."""
    alike, before = Counter((span.rank, span.name) for span in spans), Counter()
    for key in ((span.rank, span.name) for span in spans):
        name, number = key[1], before[key]
        before[key] += 1
        if recorded := re.fullmatch(r"\w+ (#\d+) of ([\d,]+) bytes.*", name):
            size = units.size(int(recorded[2].replace(",", "")))
            yield f"{recorded[1]}, {size}", size
        else:
            yield (f"{name} {number}", str(number)) if alike[key] > 1 else (name,)


def _that_fits(names: tuple[str, ...], pixels: float) -> str:
    widths = (TextPath((0, 0), name, size=8).get_extents().width * 100 / 72 for name in names)
    return next((name for name, width in zip(names, widths, strict=True) if width + 6 <= pixels), "")


def _exposed(busy: list[Span], span: Span) -> list[tuple[float, float]]:
    """The parts of a span in which nothing of `busy` runs."""
    parts = [(span.started, span.finished)]
    for other in busy:
        cut = [((start, min(end, other.started)), (max(start, other.finished), end)) for start, end in parts]
        parts = [part for both in cut for part in both if part[0] < part[1]]
    return parts


@style.styled
def losses(named: Mapping[str, Sequence[float]]) -> style.Figure:
    """The loss of each step: a curve for the first run, and markers for the others, which may lie on it."""
    fig, (axes,) = style.figure(height=3.4)
    for k, ((name, values), marker) in enumerate(zip(named.items(), " " + style.MARKERS, strict=False)):
        every = (min(k, len(values) // 2), max(2, len(values) // 10))  # runs that agree do not hide each other's markers
        look = {"marker": marker, "markevery": every, "fillstyle": "none", "markersize": 7, "markeredgewidth": 1.5}
        axes.plot(range(len(values)), values, label=name, linestyle="" if k else "-", **look)
    axes.set(xlabel="step", ylabel="loss (nats a byte)", ylim=(0, None))
    axes.legend(loc="lower left")
    return fig


def explorer() -> Explorer:
    """The explorer of chapter 02."""
    return Explorer(
        Scaling(),
        model=choice("model", "gpt2-xl", _MODELS),
        cluster=choice("cluster", "h100-dgx", _CLUSTERS),
        n=log_slider("accelerators N", 64, 0, 10, show="{:,}".format),
        sequences=log_slider("sequences a GPU", 8, 0, 6),
        reduce=choice("gradients reduced", "overlapped", ("overlapped", "after backward")),
        critical=log_slider("critical batch", 2**20, 12, 26, show=_count),
    )


def _part(label: str, colour: str, hatch: str) -> PolyCollection:
    return PolyCollection([], facecolors=colour, hatch=hatch, edgecolors="white", linewidths=0.6, label=label)


def _parts(time: step.StepTime) -> dict[str, float]:
    return {"compute": time.compute, "communication": time.data, "optimizer": time.optimizer}


def _held(now: Setting) -> dict[str, float]:
    shape, plan = models[now.model], now.plan()
    parameters, gradients, optimizer, _ = memory.model_states(shape, plan)
    return dict(zip(_HELD, (parameters, gradients, optimizer, memory.activations(shape, plan)), strict=True))


def _status(now: Setting, here: step.StepTime, held: float, device: float, at: float) -> str:
    fits = f"{units.size(held)} of {units.size(device)}"
    if held > device:
        if (states := held - _held(now)["activations"]) <= device:
            return f"Does not fit: {fits} a GPU. The model's states alone, {units.size(states)}, do: take fewer sequences."
        return f"Does not fit: {fits} a GPU. Every GPU holds the whole model, so more GPUs do not help: chapter 03."
    tokens = _count(here.plan.tokens)
    took = f"{now.model} on {now.n:,} GPU{'s' * (now.n > 1)}, {fits}: {units.duration(here.seconds)} a step of {tokens} tokens"
    if now.n == 1:
        return f"{took}. Limit: one GPU: nothing to communicate."
    efficiency = now.efficiency(now.n, now.overlap)
    more = now.examples(now.n) / now.examples(1)
    return (
        f"{took}; {units.three(efficiency * now.n)} times the tokens/s of one GPU (efficiency {100 * efficiency:.3g}%). Larger "
        f"batches learn less a token: with a critical one of {_count(now.critical)}, the same loss takes {units.three(more)} "
        f"times the tokens, so it is reached {units.three(1 / at)} times as fast. Limit: {_limit(now, here)}."
    )


def _limit(now: Setting, here: step.StepTime) -> str:
    if here.plan.tokens > now.critical:
        return f"the batch is {here.plan.tokens / now.critical:.3g} times the critical one: more GPUs hardly save time"
    if here.data > 0.05 * here.seconds:
        return f"{here.data / here.seconds:.0%} of a step waits for gradients"
    return "compute-bound"


def _count(tokens: float) -> str:
    return units.size(tokens).removesuffix("B").replace("k", "thousand").replace("M", "million").strip()
