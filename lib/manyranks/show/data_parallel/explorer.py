"""Chapter 02's explorer: the time of a step, memory, and the time to a given loss, of d replicas."""

import functools
from collections import namedtuple

from manyranks.show import style, units
from manyranks.show.bars import Bars
from manyranks.show.explorer import Board, Explorer, Measure, Setting, log_slider
from manyranks.show.labels import word
from manyranks.show.scenario import SHAPES, SHARED, Scenario, controls
from manyranks.theory import Plan, batch, clusters, memory

RANKS = SHARED["dp"][1]
MODELS = ("small GPT", "gpt2", "gpt2-xl", "llama3.2-1b", "llama3-8b", "llama3-70b")
_PARTS = {"compute": (style.BLUE, ""), "communication": (style.ORANGE, "////"), "optimizer": (style.GREEN, "....")}
_HELD = {"parameters": (style.BLUE, ""), "gradients": (style.ORANGE, "////"), "optimizer": (style.GREEN, "....")}
_HELD |= {"activations": (style.PINK, "\\\\\\\\"), "buffers": (style.FAINT, "")}
_OVERLAP = {True: "overlapped", False: "after backward"}
_CODE = """
one = step.estimate(shape, replace(plan, dp=1, batch=None), cluster)
tokens, alone = plan.tokens, one.plan.tokens
faster = time.tokens_per_second / one.tokens_per_second
more = batch.examples(tokens, {critical}) / batch.examples(alone, {critical})
"""
_PRINTS = {"tokens/s": "three(faster), '× one GPU'", "tokens to same loss": "three(more), '×'"}
_PRINTS |= {"training speedup": "three(faster / more), '×'"}


class Replicas(namedtuple("Replicas", "model cluster dp microbatch overlap critical"), Setting):
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

    def where(self) -> str:
        return f"{self.model} on {self.dp:,} GPU{'s' * (self.dp > 1)}, {self.cluster}"

    def numbers(self) -> dict[str, str]:
        time, one, twice = self.scenario.time, self._replace(dp=1), self._replace(dp=2 * self.dp)
        numbers = {"tokens per step": _count(time.plan.tokens)}
        if self.dp > 1:
            speed = time.tokens_per_second / one.scenario.time.tokens_per_second
            more = batch.examples(time.plan.tokens, self.critical) / batch.examples(one.scenario.plan.tokens, self.critical)
            numbers |= {"tokens/s": f"{units.three(speed)} × one GPU", "tokens to same loss": f"{units.three(more)} ×"}
            numbers["training speedup"] = f"{units.three(one.cost / self.cost)} ×"
        if twice.dp <= self.scenario.cluster.levels[-1].size:
            numbers["same loss, twice the GPUs"] = f"{1 - twice.cost / self.cost:.1%} less time"
        return numbers

    def code(self) -> str:
        return (
            self.scenario.code(_PRINTS, "batch", _CODE.format(critical=self.critical)) if self.dp > 1 else self.scenario.code()
        )

    def limits(self) -> str:
        here, time = self.scenario, self.scenario.time
        if not here.fits:
            if (states := here.peak.states) <= here.cost.room:
                return f"memory. The model states ({units.size(states)}) would fit alone, so lower the micro-batch"
            return "memory. Every GPU holds the whole model, so more GPUs don't help. Chapter 03 shards it"
        if self.dp == 1:
            return "compute: one GPU sends nothing, so overlap changes nothing"
        if time.plan.tokens > self.critical:
            return (
                f"the batch is {units.three(time.plan.tokens / self.critical)} × the critical batch, so more GPUs save little"
            )
        if time.data > 0.05 * time.seconds:
            return f"{time.data / time.seconds:.0%} of the step is spent waiting for gradients"
        return "compute"


class Scaling(Board):
    """Three panels: a step's time, the memory of one accelerator, and the time to train."""

    setting, over = Replicas, "dp"

    @style.styled
    def __init__(self):
        self.figure, axes = style.figure(rows=3, width=6.45, height=4.2, height_ratios=(1.1, 0.75, 1.3))
        names = list(_OVERLAP.values())
        self._step = Bars(axes[0], _PARTS, "step time", names, units.duration, columns=3, outline=word)
        self._held = Bars(axes[1], _HELD, "memory per GPU", [""], columns=5, outline=word)
        looks = zip(("d times as fast", "data parallelism"), "os", strict=True)
        self._lines = [axes[2].semilogx(RANKS, RANKS, marker=m, base=2, markersize=4, label=name)[0] for name, m in looks]
        look = {"color": "none", "markeredgecolor": style.INK, "markersize": 11, "markeredgewidth": 1.8}
        self._dot = axes[2].plot([1], [1], "o", **look)[0]
        axes[2].set(xlabel="data ranks d", ylabel="time", xlim=(0.8, 1280), yscale="log", ylim=(1e-4, 2))
        axes[2].set_title("time to a given loss (1 = one GPU)")
        axes[2].set_xticks(RANKS[::2], [f"{n:,}" for n in RANKS[::2]])
        axes[2].minorticks_off()
        axes[2].legend(loc="lower left")
        self.panels, self.others = (self._step, self._held), [*self._lines, self._dot]

    def draw(self, now: Replicas) -> None:
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
        relative = [now._replace(dp=n).cost / one.cost for n in ranks]
        for line, values in zip(self._lines, ([1 / n for n in ranks], relative), strict=True):
            line.set_data(ranks, values)
        self._dot.set_data([now.dp], [relative[ranks.index(now.dp)]])


def explorer(measure: Measure | None = None) -> Explorer:
    """Returns the explorer of chapter 02. measure: what "Measure it" runs, manyranks.small's data_parallel."""
    presets = {"1 sequence per GPU": {"microbatch": 1}, "after backward": {"microbatch": 1, "overlap": False}}
    presets |= {"the batch-size wall": {"dp": 1024}, "Llama 3 8B": {"model": "llama3-8b", "microbatch": 1}}
    shared = controls({"model": MODELS}, model="gpt2-xl", cluster="h100-dgx", dp=64, microbatch=8, overlap=True)
    critical = log_slider("critical batch", 2**20, 12, 26, show=_count)
    return Explorer(Scaling(), presets, measure, **shared, critical=critical)


def _count(tokens: float) -> str:
    return units.size(tokens).removesuffix("B").strip()
