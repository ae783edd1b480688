"""Chapter 02's explorer: one model on N accelerators by data parallelism alone: step time, efficiency, memory, batch size."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection

from manyranks.show import style, units
from manyranks.show.explorer import Explorer, choice, log_slider
from manyranks.show.labels import Labels
from manyranks.theory import Plan, batch, clusters, memory, models, step

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
    """What the controls say. sequences: an accelerator's; noise: the critical batch in tokens; overlap: of the reduction."""

    model: str
    cluster: str
    n: int
    sequences: int
    overlap: bool
    noise: float

    def plan(self, n: int | None = None, overlap: bool | None = None) -> Plan:
        """Data parallelism alone on n accelerators, each with this batch; nothing is sharded."""
        ranks = n or self.n
        return Plan(
            dp=ranks,
            seq=1024,
            batch=ranks * self.sequences,
            microbatch=self.sequences,
            zero=0,
            recompute="none",
            overlap=self.overlap if overlap is None else overlap,
        )

    def step(self, n: int | None = None, overlap: bool | None = None) -> step.StepTime:
        return step.estimate(models[self.model], self.plan(n, overlap), clusters[self.cluster])

    def efficiency(self, n: int, overlap: bool) -> float:
        """Tokens a second and accelerator, as a share of those on one accelerator."""
        return self.step(1, overlap).seconds / self.step(n, overlap).seconds

    def steps(self, n: int) -> float:
        """Steps to a given loss, as a multiple of the fewest possible."""
        return batch.steps(self.plan(n).tokens, self.noise)


class Scaling:
    """Four panels: a step's time, the efficiency of N accelerators, the memory of one, and the time to train."""

    @style.styled
    def __init__(self):
        self.figure, (step_time, efficiency, held, training) = style.figure(columns=2, rows=2, width=9, height=5.6)
        self._step = Stacks(step_time, ("overlapped", "after backward"), _PARTS, units.duration, "time of a step")
        self._held = Stacks(held, ("one GPU",), _HELD, units.size, "memory of one GPU")
        self._efficiency = Curves(efficiency, ("overlapped", "after backward"), "tokens/s a GPU (%)")
        self._training = Curves(training, ("N times as fast", "data parallelism"), "time to train (1 = one GPU)")
        efficiency.set(ylim=(0, 105), title="efficiency")
        training.set(yscale="log", ylim=(1e-4, 2), title="time to a given loss")
        panels = self._step, self._efficiency, self._held, self._training
        self.moving: list[Artist] = [artist for panel in panels for artist in panel.moving]

    def update(self, model: str, cluster: str, n: int, sequences: int, reduce: str, noise: float) -> str:
        """Shows this setting; returns what limits. Raises ValueError for an unknown model or cluster, and numbers below 1."""
        now = Setting(model, cluster, n, sequences, reduce == "overlapped", noise)
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
        self._limit = axes.plot([0, 0], [-0.5, len(names) - 0.5], color=style.BLACK, linestyle="--")[0]
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
        self._dot = axes.plot([1], [1], "o", color="none", markeredgecolor=style.BLACK, markersize=11, markeredgewidth=1.8)[0]
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
def losses(named: Mapping[str, Sequence[float]]) -> style.Figure:
    """The loss of each step, a curve for each run."""
    fig, (axes,) = style.figure(height=3.4)
    for (name, values), marker in zip(named.items(), style.MARKERS, strict=False):
        axes.plot(range(len(values)), values, label=name, marker=marker, markersize=4, markevery=max(1, len(values) // 12))
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
        noise=log_slider("critical batch (tokens)", 2**20, 12, 26, show=_count),
    )


def _part(label: str, colour: str, hatch: str) -> PolyCollection:
    return PolyCollection([], facecolors=colour, hatch=hatch, edgecolors="white", linewidths=0.6, label=label)


def _parts(time: step.StepTime) -> dict[str, float]:
    return {"compute": time.compute, "communication": time.data, "optimizer": time.optimizer}


def _held(now: Setting) -> dict[str, float]:
    shape, plan = models[now.model], now.plan()
    states = memory.model_states(shape, plan)
    return {
        "parameters": states.parameters,
        "gradients": states.gradients,
        "optimizer": states.optimizer,
        "activations": memory.activations(shape, plan),
    }


def _status(now: Setting, here: step.StepTime, held: float, device: float, at: float) -> str:
    tokens = here.plan.tokens
    fits = f"{units.size(held)} of {units.size(device)}"
    if held > device:
        return f"Does not fit: {fits} a GPU. Every GPU holds the whole model, so more GPUs do not help: chapter 03."
    efficiency = now.efficiency(now.n, now.overlap)
    if now.n == 1:
        limit = "one GPU: nothing to communicate"
    elif tokens > now.noise:
        limit = f"the batch is {tokens / now.noise:.3g} times the critical one: more GPUs hardly save time"
    elif here.data > 0.1 * here.seconds:
        limit = f"{here.data / here.seconds:.0%} of a step waits for gradients"
    else:
        limit = "compute-bound"
    return (
        f"{now.model} on {now.n:,} GPUs, {fits}: {units.duration(here.seconds)} a step of {_count(tokens)} tokens, "
        f"efficiency {efficiency:.0%}, trained {1 / at:,.3g} times as fast as on one. Limit: {limit}."
    )


def _count(tokens: float) -> str:
    return units.size(tokens).removesuffix("B").replace("k", "thousand").replace("M", "million").strip()
