"""Chapter 02's explorer: the time of a step, MFU, memory, and the time to a given loss, of d replicas."""

import functools
from collections import namedtuple

from matplotlib.axes import Axes

from manyranks.show import limits, style, units
from manyranks.show.bars import Bars
from manyranks.show.explorer import Explorer, Measure, Panels, log_slider
from manyranks.show.labels import word
from manyranks.show.said import Said
from manyranks.show.scenario import SHAPES, Scenario, controls
from manyranks.theory import Plan, batch, clusters, memory

RANKS = [2**k for k in range(11)]  # 1 to 1,024
MODELS = ("small GPT", "gpt2", "gpt2-xl", "llama3.2-1b", "llama3-8b", "llama3-70b")
_PARTS = {"compute": (style.BLUE, ""), "communication": (style.ORANGE, "////"), "optimizer": (style.GREEN, "....")}
_HELD = {"parameters": (style.BLUE, ""), "gradients": (style.ORANGE, "////"), "optimizer": (style.GREEN, "....")}
_HELD |= {"activations": (style.PINK, "\\\\\\\\"), "buffers": (style.FAINT, "")}
_OVERLAP = {True: "overlapped", False: "after backward"}


class Setting(namedtuple("Setting", "model cluster dp microbatch overlap critical"), limits.Setting):
    """Holds what the controls say. critical: the critical batch in tokens."""

    @functools.cached_property
    def scenario(self) -> Scenario:
        """Data parallelism alone, nothing sharded. Raises ValueError for a name that there is not, and numbers below 1."""
        plan = Plan(dp=self.dp, seq=1024, microbatch=self.microbatch, zero=0, recompute="none", overlap=self.overlap)
        return Scenario(SHAPES[self.model], plan, clusters[self.cluster])

    @property
    def cost(self) -> float:
        """Seconds of a training to a given loss, in relation to other settings."""
        return batch.steps(self.scenario.plan.tokens, self.critical) * self.scenario.time.seconds

    def held(self) -> dict[str, float]:
        """Bytes of one accelerator; their sum is the peak."""
        here = self.scenario
        states = memory.model_states(here.shape, here.plan)[:3]
        return dict(zip(_HELD, (*states, here.peak.activations, here.peak.buffers), strict=True))


class Scaling(Panels):
    """Four panels: a step's time, the MFU of d accelerators, the memory of one, and the time to train."""

    @style.styled
    def __init__(self):
        self.figure, (step_time, mfu, held, training) = style.figure(columns=2, rows=2, width=9, height=4.2)
        self._step = Bars(step_time, _PARTS, "step time", list(_OVERLAP.values()), units.duration, columns=3, outline=word)
        self._held = Bars(held, _HELD, "memory per GPU", [""], columns=3, outline=word)
        self._mfu = _Curves(mfu, tuple(_OVERLAP.values()), "MFU (%)", "upper right")
        self._training = _Curves(training, ("d times as fast", "data parallelism"), "time (1 = one GPU)", "lower left")
        mfu.set(ylim=(0, 100), title="MFU over d")
        training.set(yscale="log", ylim=(1e-4, 2), title="time to a given loss")
        self.panels = self._step, self._mfu, self._held, self._training

    def update(self, **values) -> Said:
        """Shows the Setting of these values. Raises ValueError for an unknown model or cluster, and numbers below 1."""
        now = Setting(**values)
        here, one = now.scenario, now._replace(dp=1)
        ways, row = [now._replace(overlap=overlap) for overlap in _OVERLAP], [*_OVERLAP].index(now.overlap)
        times = [each.scenario.time for each in ways]
        bars = [dict(zip(_PARTS, (time.compute, time.data, time.optimizer), strict=True)) for time in times]
        chosen = ["← " * (k == row) for k in range(len(times))]  # a band behind the bar would look like a bar
        texts = [mark + units.duration(time.seconds) for mark, time in zip(chosen, times, strict=True)]
        self._step.update(bars, [text + ", nothing sent" * (now.dp == 1) for text in texts], -9)
        whole, room = here.peak.total, here.cost.room
        mark, longest = (room, f"memory: {units.size(room)}"), max(room, min(4 * room, whole))
        self._held.update([now.held()], [units.size(whole)], -9, longest, mark)  # one bar needs no band
        ranks = [n for n in RANKS if n <= here.cluster.levels[-1].size]
        self._mfu.update(ranks, [[100 * way._replace(dp=n).scenario.time.mfu for n in ranks] for way in ways], now.dp, row)
        relative = [now._replace(dp=n).cost / one.cost for n in ranks]
        self._training.update(ranks, [[1 / n for n in ranks], relative], now.dp, 1)
        return _said(now, one)


class _Curves:
    """Two curves over the number of accelerators, and a mark."""

    def __init__(self, axes: Axes, names: tuple[str, ...], ylabel: str, legend: str):
        each = zip(names, "os", strict=True)
        self._lines = [axes.semilogx(RANKS, RANKS, marker=m, base=2, markersize=4, label=name)[0] for name, m in each]
        self._dot = axes.plot([1], [1], "o", color="none", markeredgecolor=style.INK, markersize=11, markeredgewidth=1.8)[0]
        axes.set(xlabel="data ranks d", ylabel=ylabel, xlim=(0.8, 1280))
        axes.set_xticks(RANKS[::2], [f"{n:,}" for n in RANKS[::2]])
        axes.minorticks_off()
        axes.legend(loc=legend)
        self.moving = [*self._lines, self._dot]

    def update(self, ranks: list[int], curves: list[list[float]], at: int, of: int = 0) -> None:
        """at: the place of the mark; of: the curve that it is on."""
        for line, values in zip(self._lines, curves, strict=True):
            line.set_data(ranks, values)
        self._dot.set_data([at], [curves[of][ranks.index(at)]])


def explorer(measure: Measure | None = None) -> Explorer:
    """Returns the explorer of chapter 02. measure: what "Measure it" runs, manyranks.small's data_parallel."""
    presets = {"1 sequence per GPU": {"microbatch": 1}, "after backward": {"microbatch": 1, "overlap": False}}
    presets |= {"the batch-size wall": {"dp": 1024}, "Llama 3 8B": {"model": "llama3-8b", "microbatch": 1}}
    shared = controls({"model": MODELS}, model="gpt2-xl", cluster="h100-dgx", dp=64, microbatch=8, overlap=True)
    critical = log_slider("critical batch", 2**20, 12, 26, show=_count)
    return Explorer(Scaling(), presets, measure, **shared, critical=critical)


def _said(now: Setting, one: Setting) -> Said:
    here, time, twice = now.scenario, now.scenario.time, now._replace(dp=2 * now.dp)
    numbers = {"tokens per step": _count(time.plan.tokens)}
    if now.dp > 1:
        speed = time.tokens_per_second / one.scenario.time.tokens_per_second
        more = batch.examples(time.plan.tokens, now.critical) / batch.examples(one.scenario.plan.tokens, now.critical)
        numbers |= {"tokens/s": f"{units.three(speed)} × one GPU", "tokens to same loss": f"{units.three(more)} ×"}
        numbers["training speedup"] = f"{units.three(one.cost / now.cost)} ×"
    if twice.dp <= here.cluster.levels[-1].size:
        numbers["same loss, twice the GPUs"] = f"{1 - twice.cost / now.cost:.1%} less time"
    return Said(f"{now.model} on {now.dp:,} GPU{'s' * (now.dp > 1)}, {now.cluster}", numbers, _limit(now), here.fits, here)


def _limit(now: Setting) -> str:
    here, time = now.scenario, now.scenario.time
    if not here.fits:
        if (states := here.peak.states) <= here.cost.room:
            return f"memory. The model states ({units.size(states)}) would fit alone, so lower the micro-batch"
        return "memory. Every GPU holds the whole model, so more GPUs don't help. Chapter 03 shards it"
    if now.dp == 1:
        return "compute: one GPU sends nothing, so overlap changes nothing"
    if time.plan.tokens > now.critical:
        return f"the batch is {units.three(time.plan.tokens / now.critical)} × the critical batch, so more GPUs save little"
    if time.data > 0.05 * time.seconds:
        return f"{time.data / time.seconds:.0%} of the step is spent waiting for gradients"
    return "compute"


def _count(tokens: float) -> str:
    return units.size(tokens).removesuffix("B").strip()
