"""Chapter 12's figures, and its explorer."""

from collections import namedtuple
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

import numpy as np
from matplotlib.patches import PathPatch
from matplotlib.ticker import MaxNLocator

from manyranks.show import style, units
from manyranks.show.bars import Bars, joined
from manyranks.show.drawings import LARGE, WIDTH, Figure
from manyranks.show.explorer import Board, Explorer, Measure, Setting, value_slider
from manyranks.show.labels import word
from manyranks.show.lines import ticks
from manyranks.show.scenario import controls, in_code
from manyranks.show.units import percent
from manyranks.theory import failures
from manyranks.theory.published import failures as published
from manyranks.timeline import History

# Kind of a period -> its name, color and hatch.
KINDS = {
    "work": ("training kept", style.BLUE, ""),
    "lost": ("training lost", style.ORANGE, "////"),
    "save": ("saves", style.GREEN, ""),
    "restart": ("restarts", style.PINK, "\\\\\\\\"),
    "wait": ("no spare node", "#b0b0b0", "...."),
}
_CATEGORIES = {
    "GPU": (style.BLUE, ""),
    "Dependency": (style.ORANGE, "////"),
    "Network": (style.PINK, "\\\\\\\\"),
    "Unplanned Maintenance": (style.YELLOW, "xxxx"),
    "Host": (style.GREEN, "...."),
    "Unknown": ("#b0b0b0", ""),
}
_TIMES = {"days": 86400, "hours": 3600, "minutes": 60, "s": 1}
TICKS = [1, 10, 60, 600, 3600, 36000, 345600]  # seconds, of intervals


@style.styled
def history(histories: Mapping[str, History]) -> style.Figure:
    """Draws what runs did over time, a bar per run: training that's kept, lost training, saves, restarts, waits, failures.

    histories: name -> what timeline.survive returns
    """
    longest = max(each.seconds for each in histories.values())
    unit, scale = next((unit, scale) for unit, scale in _TIMES.items() if longest >= 3 * scale or scale == 1)
    fig, (axes,) = style.figure(width=WIDTH, height=1.25 + 0.62 * len(histories))
    for kind, (name, color, hatch) in KINDS.items():
        periods = [(y, each) for y, run in enumerate(histories.values()) for each in run.periods if each.kind == kind]
        boxes = [(each.started / scale, each.finished / scale, y - 0.28, y + 0.28) for y, each in periods]
        if boxes:
            look = {"facecolor": color, "hatch": hatch, "edgecolor": "white", "linewidth": 0}
            axes.add_patch(PathPatch(joined(boxes), **look, label=name, gid=kind))
    for y, run in enumerate(histories.values()):
        at = [failure.seconds / scale for failure in run.failures]
        label = {"label": "a failure"} if not any(line.get_label() == "a failure" for line in axes.lines) and at else {}
        axes.plot(at, [y - 0.36] * len(at), "v", color=style.INK, markersize=4, linestyle="none", gid="failures", **label)
        axes.text(run.seconds / scale + 0.01 * longest / scale, y, f"{run.goodput:.0%} kept", va="center")
    axes.set(xlim=(0, 1.14 * longest / scale), ylim=(len(histories) - 0.5, -0.6), xlabel=f"time ({unit})")
    axes.set_yticks(range(len(histories)), list(histories))
    axes.grid(visible=False, axis="y")
    fig.legend(*axes.get_legend_handles_labels(), loc="outside lower left", ncols=6, columnspacing=1.0, handlelength=1.4)
    return fig


@style.styled
def intervals(stall: float, restart: float, mtbf: float, simulated: Iterable[tuple[float, float]] = ()) -> style.Figure:
    """Draws goodput over the interval between saves, with Young's, Daly's and the best interval.

    stall, restart, mtbf: seconds, as for theory.failures.goodput
    simulated: (interval, goodput) of runs that were replayed
    """
    simulated, best = list(simulated), failures.best_interval(stall, mtbf)
    ends = [best / 30, *(interval for interval, _ in simulated), 30 * best]
    places = np.geomspace(min(ends), max(ends), 200)
    fig, (axes,) = style.figure(width=WIDTH, height=3.4)
    percent = [100 * failures.goodput(at, stall, restart, mtbf) for at in places]
    axes.semilogx(places, percent, color=style.BLUE)
    marks = {"best": (best, "o", style.GREEN), "Daly": (failures.daly(stall, mtbf), "s", style.PINK)}
    marks["Young"] = failures.young(stall, mtbf), "^", style.ORANGE
    for name, (at, marker, color) in marks.items():
        share = 100 * failures.goodput(at, stall, restart, mtbf)
        look = {"color": color, "markersize": 9, "linestyle": "none", "fillstyle": "none", "markeredgewidth": 2}
        axes.plot(at, share, marker, **look, label=f"{name}: {units.duration(at)}, {share:.1f} %", gid=name)
    if simulated:
        look = {"color": style.INK, "markersize": 6, "linestyle": "none"}
        axes.plot([at for at, _ in simulated], [100 * each for _, each in simulated], "D", **look, label="replayed runs")
    axes.legend(loc="lower center", fontsize=10)
    axes.set(xlabel="time between saves", ylabel="goodput (% of the time)", ylim=(0, 1.1 * max(percent)))
    low, high = axes.get_xlim()
    ticks(axes, ([tick for tick in TICKS if low <= tick <= high], units.duration))
    return fig


@style.styled
def lost() -> style.Figure:
    """Draws what a failure costs: steps in a row, the last checkpoint, the failure, the restart, and the steps once again."""
    every, fails = 4, 10  # steps: from save to save; that had been done when it failed
    kept = fails // every * every
    saves, again = kept // every, fails - kept
    restart, after = 2, 3  # steps: how long it takes, and those that follow the repeated ones
    fig = Figure(WIDTH, 2.05)
    wide = (WIDTH - 0.1) / (fails + 0.4 * saves + restart + again + after)
    x, top, high = 0.05, 0.95, 0.5
    for step in range(1, fails + 1):
        kind = "gradients" if step > kept else "parameters"
        fig.block(x, top, wide, high, kind, f"{step}", name=f"{'lost' if step > kept else 'kept'} {step}", size=LARGE)
        x += wide
        if step % every == 0 and step <= kept:
            fig.block(x, top, 0.4 * wide, high, "optimizer", name=f"save {step}")
            saved, x = x + 0.2 * wide, x + 0.4 * wide
    failed = x
    fig.block(x, top, restart * wide, high, "activations", "restart", name="restart")
    x += restart * wide
    for step in range(kept + 1, fails + after + 1):
        fig.block(x, top, wide, high, "parameters", f"{step}", name=f"again {step}", size=LARGE)
        x += wide
    fig.arrow([(failed, 0.42), (failed, top - 0.03)], style.ORANGE, 2.5, name="failure")
    fig.write(failed, 0.26, "a failure", size=LARGE, color=style.ORANGE, weight="bold")
    fig.arrow([(saved, 0.62), (saved, top - 0.03)], style.GREEN, name="checkpoint")
    fig.write(saved + 0.1, 0.46, "the last checkpoint", (2, 1), ha="right")
    fig.write(failed - again * wide / 2, top + high + 0.2, f"{again} steps lost", (2, 1))
    fig.write(failed + (restart + again / 2) * wide, top + high + 0.2, "redone", (2, 1))
    fig.write(WIDTH - 0.05, top + high + 0.42, "time →", ha="right")
    return fig


@style.styled
def standstill() -> style.Figure:
    """Draws what 4 ranks do when one dies in mid-step: the others wait for it in the all-reduce, until a timeout."""
    fig, dies = Figure(WIDTH, 2.18), 2
    for rank in range(4):
        row = [(0, 2, "parameters", "step 1"), (2, 2.5, "activations", ""), (2.5, 4.5, "parameters", "step 2")]
        row += [(4.5, 5, "activations", ""), (5, 6.2 if rank == dies else 7, "parameters", "step 3")]
        if rank != dies:
            row.append((7, 11, "", f"waits for rank {dies}"))
        _lane(fig, 0.1 + 0.42 * rank, f"rank {rank}", row, 11)
    at = _at(6.2, 11), 0.1 + 0.42 * dies + 0.15
    fig.write(at[0] + 0.12, at[1], "killed", ha="left", color=style.ORANGE, weight="bold", size=LARGE)
    fig.write(_at(2.25, 11), 1.98, "all-reduce", (1, 1))
    fig.write(_at(11, 11), 1.98, "a timeout", (1, 1), ha="right", color=style.ORANGE, weight="bold")
    return fig


@style.styled
def saves() -> style.Figure:
    """Draws a blocking save and one in two phases: what the GPU and the disk do when."""
    fig = Figure(WIDTH, 2.5)
    steps = [(3 * k, 3 * k + 3, "parameters", "3 steps") for k in range(4)]
    rows = {
        "blocking": (steps[:1], [(3, 6, "", "idle")], steps[2:3], [(3, 6, "optimizer", "write")]),
        "two phases": (steps[:1], [(3, 3.4, "gradients", "")], [(3.4 + s, 6.4 + s, *look) for s, _, *look in steps[:2]], None),
    }
    for k, (title, (before, between, after, disk)) in enumerate(rows.items()):
        top = 1.25 * k
        fig.write(0.1, top + 0.14, title, ha="left", size=LARGE, weight="bold")
        _lane(fig, top + 0.3, "GPU", [*before, *between, *after], 9.4)
        _lane(fig, top + 0.72, "disk", disk or [(3.4, 6.4, "optimizer", "write the copy")], 9.4)
    fig.arrow([(_at(3.2, 9.4), 1.35), (_at(3.2, 9.4), 1.53)], style.ORANGE, 1.5, name="copy")
    fig.write(_at(3.2, 9.4) + 0.12, 1.39, "copy", ha="left", color=style.ORANGE, weight="bold")
    return fig


def _at(time: float, end: float) -> float:
    """Returns the x of a time on a lane that ends then."""
    return 0.8 + (WIDTH - 0.9) * time / end


def _lane(fig: Figure, y: float, name: str, spans: Iterable[tuple[float, float, str, str]], end: float) -> None:
    """Draws a row of blocks from one time to another, of a kind and with a text; without a kind it's an outline."""
    fig.write(0.7, y + 0.15, name, (0.7, 1), ha="right")
    for start, stop, kind, text in spans:
        x, wide = _at(start, end), _at(stop, end) - _at(start, end)
        fig.block(x, y, wide, 0.3, kind or "compute", text, name=f"{name} {text}", hollow=not kind)


@style.styled
def heat(seconds: Sequence[Sequence[float]]) -> style.Figure:
    """Draws how long each rank took for each step as a heat map, and names the rank whose median is furthest above the others'.

    seconds: of shape (ranks, steps); a rank's own work, without waiting for others
    Raises ValueError for another shape.
    """
    table = np.asarray(seconds, float)
    if table.ndim != 2 or not table.size:
        raise ValueError(f"seconds of shape {table.shape}: give a row per rank and a column per step")
    medians = np.median(table, axis=1)
    slow, usual = int(medians.argmax()), float(np.median(medians))
    fig, (axes,) = style.figure(width=WIDTH, height=3.6)
    low, high = np.percentile(table, 1), max(np.percentile(table, 99), medians[slow])
    picture = axes.imshow(table, "cividis", aspect="auto", interpolation="nearest", vmin=low, vmax=high)
    bar = fig.colorbar(picture, format=lambda each, _: units.duration(each), pad=0.02)
    bar.set_label("time of a step")
    bar.locator = MaxNLocator(5)
    text = f"rank {slow}: {units.duration(medians[slow])} per step, {medians[slow] / usual - 1:+.0%}"
    above = slow > len(table) / 2
    arrow = {"arrowstyle": "-|>", "color": "white", "linewidth": 1.5}
    at = 0.72 * (table.shape[1] - 1), slow
    place = 0.32, 0.75 if above else 0.25
    axes.annotate(
        text, at, place, textcoords="axes fraction", arrowprops=arrow, color=style.BLACK, bbox=style.PAPER, ha="center"
    )
    axes.set(xlabel="step", ylabel="rank")
    axes.grid(visible=False)
    return fig


@style.styled
def interruptions() -> style.Figure:
    """Draws what interrupted Llama 3 405B in 54 days on 16,384 GPUs, by component and category."""
    causes = published.interruptions()
    total = sum(cause.count for cause in causes)
    order = list(_CATEGORIES)
    causes.sort(key=lambda cause: (order.index(cause.category), -cause.count))
    fig, (axes,) = style.figure(width=WIDTH, height=4.6)
    most, y = max(cause.count for cause in causes), 0
    for category, found in groupby(causes, lambda cause: cause.category):
        counts = [cause.count for cause in found]
        color, hatch = _CATEGORIES[category]
        rows = range(y, y + len(counts))
        bars = axes.barh(rows, counts, 0.72, color=color, hatch=hatch, edgecolor="white", linewidth=0)
        axes.bar_label(bars, padding=3, fontsize=9)
        text = f"{category}: {sum(counts)} of {total}, {sum(counts) / total:.0%}"
        axes.text(1.5 * most, y + (len(counts) - 1) / 2, text, ha="right", va="center", weight="bold")
        y += len(counts)
        axes.axhline(y - 0.5, color=style.INK, linewidth=0.5, alpha=0.4)
    axes.set_yticks(range(y), [cause.component for cause in causes], fontsize=9)
    axes.set(xlim=(0, 1.52 * most), ylim=(y - 0.4, -0.6), xlabel="unexpected interruptions in 54 days")
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    return fig


HOUR, DAY, RUN = 3600, 86400, 54  # seconds; days that a run takes without failures
GPUS_PER_NODE = 8
_PLACES = np.geomspace(1, 1e6, 160)
_PARTS = {name: (color, hatch) for kind, (name, color, hatch) in KINDS.items() if kind != "wait"}
_HOURS = [digit * 10**k for k in range(6) for digit in (1, 2, 5)] + [10**6]
_STALLS = (0.1, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600)
_WRITES = (0, 1, 5, 10, 30, 60, 120, 300, 600, 1800)
_RESTARTS = (1, 5, 10, 30, 60, 120, 300, 600, 1200, 1800, 3600)
_INTERVALS = (0, 10, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 28800, DAY)
_REPAIRS = (1, 4, 12, 24, 48, 96, 168, 336)


_CODE = """\
from manyranks.theory import failures

mtbf = failures.job_mtbf({hours} * 3600, {gpus})
interval = {interval}
goodput = failures.goodput(interval, {stall}, {restart}, mtbf, {write})
"""


class Saving(namedtuple("Saving", "gpus hours stall write restart interval mfu repair"), Setting):
    """Holds what the controls say. hours: between failures of one GPU; interval: 0 for Young's; repair: hours."""

    @property
    def mtbf(self) -> float:
        return failures.job_mtbf(self.hours * HOUR, self.gpus)

    @property
    def intervals(self) -> list[float]:
        """Seconds between saves: the chosen ones, Young's and the best. The last two are no shorter than a write."""
        young = max(self.write, failures.young(self.stall, self.mtbf))
        return [self.interval or young, young, max(self.write, failures.best_interval(self.stall, self.mtbf))]

    @property
    def shares(self) -> list[dict[str, float]]:
        """Shares of the time with each of these. Raises ValueError for an interval that's shorter than a write."""
        return [failures.shares(each, self.stall, self.restart, self.mtbf, self.write) for each in self.intervals]

    @property
    def spares(self) -> str:
        """Says how many spare nodes are enough 99 % of the time."""
        per_node = min(GPUS_PER_NODE, self.gpus)
        nodes = -(-self.gpus // per_node)
        if self.gpus * self.repair > nodes * self.hours:
            return f"more than its {nodes:,}"
        return f"{failures.spares(nodes, self.hours / per_node, self.repair):,} for {nodes:,}"

    def where(self) -> str:
        return f"{self.gpus:,} GPUs, a save every {units.duration(self.intervals[0])}"

    def numbers(self) -> dict[str, str]:
        goodput = self.shares[0]["work"]
        longer = f"{units.short(RUN / goodput - RUN)} days more" if goodput > 1e-3 else "never ends"
        numbers = {"goodput": percent(goodput), "failures": f"one per {units.duration(self.mtbf)}"}
        numbers |= {f"{RUN} days of training": longer, "effective MFU": percent(failures.effective_mfu(self.mfu, goodput))}
        return numbers | {"spare nodes": self.spares}

    def limits(self) -> str:
        (interval, young, _), (here, there, _) = self.intervals, self.shares
        most = max((kind for kind in here if kind != "work"), key=here.get)
        said = f"{KINDS[most][0]}, {percent(here[most])} of the time"
        if there["work"] > here["work"] + 0.002:
            return f"{said}; Young's interval of {units.duration(young)} gives a goodput of {percent(there['work'])}"
        if most == "restart":
            return f"{said}: find failures sooner, restart faster"
        if most == "lost" and self.write > interval / 2:
            return f"{said}: a checkpoint doesn't count until it's written; write faster"
        return f"{said}; the interval is already the best, so only a shorter stall or fewer failures help"

    def code(self) -> str:
        interval = self.interval or f"max({self.write}, failures.young({self.stall}, mtbf))"
        prints = {"goodput": "percent(goodput)", "failures": "'one per', duration(mtbf)"}
        prints |= {f"{RUN} days of training": f"short({RUN} / goodput - {RUN}), 'days more'"}
        prints |= {"effective MFU": f"percent(failures.effective_mfu({self.mfu}, goodput))"}
        return in_code(_CODE.format(**self._asdict() | {"interval": interval}), prints)


class Intervals(Board):
    """Draws goodput over the interval on the left, and where the time goes on the right."""

    setting = Saving

    @style.styled
    def __init__(self):
        self.figure, (left, right) = style.figure(columns=2, width=9.2, height=3.5, width_ratios=(1.1, 1))
        self._curve = left.semilogx([1], [0], color=style.BLUE)[0]
        look = {"color": style.ORANGE, "linestyle": ":", "linewidth": 2}
        self._young = left.plot([1, 1], [0, 100], **look, label="Young's interval")[0]
        look = {"linestyle": "none", "fillstyle": "none", "markeredgewidth": 2.2}
        self._point = left.plot([1], [0], "o", color=style.INK, markersize=11, label="this interval", **look)[0]
        left.set(xlim=(1, 1e6), ylim=(0, 104))
        left.set_title("Goodput", pad=25)
        left.set(xlabel="time between saves", ylabel="goodput (%)")
        ticks(left, (TICKS, units.duration))
        left.legend(ncols=2, loc="lower left", bbox_to_anchor=(-0.02, 1.0), borderaxespad=0.1)
        title = "Where the time goes; interval, goodput"
        self._bars = Bars(right, _PARTS, title, ["this", "Young's", "best"], percent, outline=word)
        self.panels, self.others = [self._bars], [self._young, self._curve, self._point]

    def draw(self, now: Saving) -> None:
        places = _PLACES[now.write <= _PLACES]
        curve = [100 * failures.goodput(at, now.stall, now.restart, now.mtbf, now.write) for at in places]
        self._curve.set_data(places, curve)
        self._young.set_xdata([now.intervals[1]] * 2)
        self._point.set_data([now.intervals[0]], [100 * now.shares[0]["work"]])
        bars = [{KINDS[kind][0]: share for kind, share in row.items()} for row in now.shares]
        each = zip(now.intervals, now.shares, strict=True)
        self._bars.update(bars, [f"{units.duration(at)}|{percent(row['work'])}" for at, row in each], 0, 1.0)


def explorer(measure: Measure | None = None) -> Explorer:
    """Opens on Llama 3's GPUs and rate of failures.

    measure: what "Measure it" runs, of few_ranks

    MegaScale's stall of seconds and its 10 minutes to find a failure are published. The other stalls, writes and restarts are
    guesses: the papers don't print them.
    """
    presets = {
        "a blocking save of 5 min": {"stall": 300},
        "64 GPUs": {"gpus": 64},
        "131,072 GPUs": {"gpus": 131072},
        "MegaScale's two stages": {"gpus": 8192, "stall": 5, "write": 120, "restart": 600},
        "4 ranks on a laptop": {"gpus": 4, "hours": 1, "stall": 0.1, "restart": 5, "repair": 1},
    }

    def hours(value: float) -> str:
        return f"{value:,} h"

    return Explorer(
        Intervals(),
        presets,
        measure,
        **controls({"gpus": [2**k for k in range(18)]}, gpus=16384),
        hours=value_slider("a GPU fails every", 50000, _HOURS, hours),
        stall=value_slider("a save stalls for", 30, _STALLS, units.duration),
        write=value_slider("… and writes for", 0, _WRITES, lambda each: units.duration(each) if each else "0 s"),
        restart=value_slider("restart", 300, _RESTARTS, units.duration),
        interval=value_slider("save every", 0, _INTERVALS, lambda each: units.duration(each) if each else "Young's"),
        mfu=value_slider("MFU of a step", 0.4, [k / 20 for k in range(2, 15)], percent),
        repair=value_slider("a node's repair", 24, _REPAIRS, hours),
    )
