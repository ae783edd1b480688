"""Chapter 02's pictures: what leaves when in a step, and what N replicas make of a step, of memory and of a training."""

import functools
import re
from collections import Counter, namedtuple
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.patheffects import withStroke

from manyranks.show import gantt, style, units
from manyranks.show.bars import Bars
from manyranks.show.drawings import LARGE, WIDTH, Figure
from manyranks.show.explorer import Board, Explorer, Measure, Setting, log_slider
from manyranks.show.labels import word
from manyranks.show.lines import ring, ticks
from manyranks.show.scenario import SHAPES, SHARED, Scenario, controls
from manyranks.theory import Plan, batch, clusters
from manyranks.timeline import Timeline
from manyranks.timeline.intervals import outside
from manyranks.timeline.spans import COMMUNICATION, COMPUTE, Span


@style.styled
def replicas() -> style.Figure:
    """Draws one step of 4 replicas: each takes its part of the batch, and an all-reduce gives all of them the same gradient."""
    fig, wide = Figure(WIDTH, 3.75), (WIDTH - 1.35) / 4
    rows = {"weights": 0.35, "batch": 0.95, "gradient": 1.65, "mean": 2.75, "new weights": 3.3}
    for name, y in rows.items():
        fig.write(1.2, y + 0.19, name, (1.2, 1), ha="right")
    for rank in range(4):
        x = 1.35 + rank * wide
        middle, room = x + wide / 2, wide - 0.12
        fig.rank(middle, 0.15, rank, wide)
        for name, kind, text in (
            ("weights", "parameters", "W"),
            ("batch", "activations", f"part {rank}"),
            ("gradient", "gradients", f"g{rank}"),
            ("mean", "gradients", "g"),
            ("new weights", "parameters", "W′"),
        ):
            fig.block(x + 0.06, rows[name], room, 0.38, kind, text, f"{name} {rank}", size=LARGE)
        fig.arrow([(middle, 1.34), (middle, 1.64)], name=f"backward {rank}")
        fig.arrow([(middle, 2.04), (middle, 2.26)], name=f"to the sum {rank}")
        fig.arrow([(middle, 2.52), (middle, 2.74)], name=f"from the sum {rank}")
    fig.block(1.41, 2.26, 4 * wide - 0.12, 0.26, "compute", "all-reduce: g = (g0 + … + g3) / 4", "all-reduce")
    return fig


def order(measured) -> str:
    """Returns what rank 0 did, a letter each: C computes, A starts a collective, W waits for one.

    measured: what world.measure(…, flops=True) returned
    """
    letters = {"Compute": "C", "Collective": "A", "Wait": "W"}
    return "".join(letters[type(item).__name__] for item in measured.program.ranks[0])


@style.styled
def steps(timelines: Mapping[str, Timeline]) -> style.Figure:
    """Draws what rank 0 does in each timeline, under each other on one scale: compute, and below it communication.

    A communication bar bears its name, numbered where several have the same, and its size where that was recorded, as far as
    there is room. Lines, and their sum at the right: communication that no compute hides. Raises ValueError for no timeline,
    and for one without rank 0.
    """
    if not timelines or any(0 not in each.ranks for each in timelines.values()):
        ranks = {name: each.ranks for name, each in timelines.items()}
        raise ValueError(f"timelines of ranks {ranks}: give a Timeline or more, all with rank 0")
    rows = [each.of(0) for each in timelines.values()]
    stacked = Timeline(tuple(span._replace(rank=row) for row, spans in enumerate(rows) for span in spans))
    boxes = gantt.boxes(stacked)
    boxes.name = _names(stacked.spans)
    until = 1.3 * max(span.finished for span in stacked.spans)  # room for the sums
    chart = gantt.chart("", list(timelines), boxes, until, 0.85)
    chart.names.set_path_effects([withStroke(linewidth=3, foreground="white")])  # over hatches
    second, _, high, _ = chart.pixels
    for row, each in enumerate(timelines.values()):
        exposed = each.exposed_communication(0)
        text = f"|—| {units.duration(exposed)} exposed" if exposed > 1e-12 else "nothing exposed"
        chart.axes.text(chart.wide, (row + 0.5) * high, text, ha="right", va="center", fontsize=9)
        busy = [span[3:] for span in each.of(0, COMPUTE)]
        for span in each.of(0, COMMUNICATION):
            for part in outside(busy, span.started, span.finished):
                y = (row + 0.3) * high
                chart.axes.plot(np.array(part) * second, [y, y], "-|", color=style.INK, linewidth=1.2)
    return chart.axes.figure


def _names(spans: Sequence[Span]) -> list[str]:
    """Lists what communication may be called, as gantt.boxes has it. Replay names a collective by its operation alone."""
    keys, names = [(span.rank, span.name) for span in spans], []
    alike, before = Counter(keys), Counter()
    for span, key in zip(spans, keys, strict=True):
        name, number = span.name, before[key]
        if recorded := re.fullmatch(r"\w+ (#\d+) of ([\d,]+) bytes.*", name):
            size = units.size(int(recorded[2].replace(",", "")))
            name = f"{recorded[1]}, {size}|{size}"
        elif alike[key] > 1:
            name = f"{name} {number}|{number}"
        names.append(name if span.kind == COMMUNICATION else "")
        before[key] += 1
    return names


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
        how = {"zero": 0, "recompute": "none", "overlap": self.overlap, "stack": "megatron-bridge-graphs"}
        plan = Plan(dp=self.dp, seq=1024, microbatch=self.microbatch, **how)
        return Scenario(SHAPES[self.model], plan, clusters[self.cluster])

    @property
    def cost(self) -> float:
        """Seconds of a training to a given loss, in relation to other settings."""
        return batch.steps(self.scenario.plan.tokens, self.critical) * self.scenario.time.seconds

    def where(self) -> str:
        return f"{self.model} on {self.dp:,} GPU{'s' if self.dp > 1 else ''}, {self.cluster}"

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
        self._dot = ring(axes[2])
        axes[2].set(xlabel="data ranks d", ylabel="time", xlim=(0.8, 1280), yscale="log", ylim=(1e-4, 2))
        axes[2].set_title("time to a given loss (1 = one GPU)")
        ticks(axes[2], (RANKS[::2], "{:,}".format))
        axes[2].legend(loc="lower left")
        self.panels, self.others = (self._step, self._held), [*self._lines, self._dot]

    def draw(self, now: Replicas) -> None:
        here, one = now.scenario, now._replace(dp=1)
        ways, row = [now._replace(overlap=overlap) for overlap in _OVERLAP], [*_OVERLAP].index(now.overlap)
        times = [each.scenario.time for each in ways]
        bars = [dict(zip(_PARTS, (time.compute, time.data, time.optimizer), strict=True)) for time in times]
        chosen = ["← " if k == row else "" for k in range(len(times))]  # a band behind the bar would look like a bar
        texts = [mark + units.duration(time.seconds) for mark, time in zip(chosen, times, strict=True)]
        alone = ", nothing sent" if now.dp == 1 else ""
        self._step.update(bars, [text + alone for text in texts], -9)
        whole, room = here.peak.total, here.cost.room
        mark, longest = (room, f"memory: {units.size(room)}"), max(room, min(4 * room, whole))
        self._held.update([here.held], [units.size(whole)], -9, longest, mark)  # one bar needs no band
        ranks = [n for n in RANKS if n <= here.cluster.levels[-1].size]
        relative = [now._replace(dp=n).cost / one.cost for n in ranks]
        for line, values in zip(self._lines, ([1 / n for n in ranks], relative), strict=True):
            line.set_data(ranks, values)
        self._dot.set_data([now.dp], [relative[ranks.index(now.dp)]])


def explorer(measure: Measure | None = None) -> Explorer:
    """Returns the explorer of chapter 02.

    measure: what "Measure it" runs, few_ranks.data_parallel
    """
    presets = {"1 sequence per GPU": {"microbatch": 1}, "after backward": {"microbatch": 1, "overlap": False}}
    presets |= {"the batch-size wall": {"dp": 1024}, "Llama 3 8B": {"model": "llama3-8b", "microbatch": 1}}
    shared = controls({"model": MODELS}, model="gpt2-xl", cluster="h100-dgx", dp=64, microbatch=8, overlap=True)
    critical = log_slider("critical batch", 2**20, 12, 26, show=_count)
    return Explorer(Scaling(), presets, measure, **shared, critical=critical)


def _count(tokens: float) -> str:
    return units.size(tokens).removesuffix("B").strip()
