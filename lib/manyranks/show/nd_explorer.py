"""Chapter 10's explorer, the plan board: where each axis lies, a GPU's memory, a step's time, and the planner's plans."""

from collections.abc import Sequence
from math import log2

import ipywidgets as widgets
from matplotlib.artist import Artist
from matplotlib.axes import Axes

from manyranks.show import style, units
from manyranks.show.bars import Bars
from manyranks.show.explorer import Explorer, choice, value_slider
from manyranks.show.labels import Labels, word
from manyranks.show.nd_axes import BETWEEN, INSIDE, ordinal
from manyranks.show.nd_plans import PARTS, degrees, kept
from manyranks.show.nd_setting import (
    ALL,
    BATCHES,
    BEST,
    CLUSTERS,
    CONTEXT,
    EXPERT,
    GPUS,
    LENGTHS,
    MICROBATCHES,
    MODELS,
    PIPELINE,
    RECOMPUTE,
    SCHEDULES,
    SHARDS,
    TENSOR,
    VIRTUAL,
    ZERO,
    Setting,
    Task,
    setting_of,
)
from manyranks.show.nd_status import limit, status
from manyranks.theory.planner import Found

HIDDEN, SHOWN = "not searched", "show them"
TAKEN = tuple(f"take the {ordinal(k)}" for k in range(1, BEST + 1))
_BEFORE = "before"  # the part of a bar that is not drawn: where its row begins
_AXES = {"tp": "TP", "cp": "CP", "dp": "DP", "pp": "PP", "ep": "EP", "shards": "shards"}
_LINKS = {"inside a node": (INSIDE[0], ""), "between nodes": (BETWEEN[0], "")}  # a dashed line is between them
_MEMORY = {"parameters": (style.BLUE, ""), "gradients": ("#9ecae1", ""), "optimizer": (style.GREEN, "")}
_MEMORY |= {"activations": (style.ORANGE, ""), "buffers": ("#b0b0b0", "")}
_ROW = {"tensor": "tp", "context": "cp", "expert": "ep", "pipeline": "pp", "bubble": "pp", "data": "dp", "optimizer": "shards"}
_LETTERS = "abcdefghijklmnopqrstuvwxyzACDEFGIHLMNOPRSTUVWXYZB0123456789 .,µ%:-–×»;“”"
_NONE = -9  # a row outside the axes
_SHOWN = 3  # times the shortest step
_ROOMS = 4  # times a GPU's memory: as far as bars go
_EDGE = 1 + 1e-9  # a sum of parts is not longer than itself
_SIZE = 8.5
_LEFT, _LINES = -0.012, (-0.17, 0.19)  # where a plan's name ends, and its two lines in a row
_HINT = f"for the planner's plans, choose “{SHOWN}”"
_TITLE = "Time of a step: this plan's, and those of the planner's"


class _Mesh:
    """For every axis, how far apart its ranks are and how long a group is; beyond the dashed line it leaves the node."""

    def __init__(self, axes: Axes):
        parts = {_BEFORE: ("none", "")} | _LINKS
        self._bars = Bars(axes, parts, "Which axis on which link", list(_AXES.values()), size=_SIZE, outline=word)
        self._bars.hide(_BEFORE)
        _legend(axes, 2, 28)
        axes.set_xlabel("ranks from a group's first (log)", fontsize=9, loc="left")
        self.moving = self._bars.moving

    def update(self, now: Setting) -> None:
        node, bars, texts = now.task.on.node, [], []
        for reach in now.reaches():
            start, end = log2(reach.stride), log2(reach.span)
            middle = min(max(log2(node), start), end)
            bars.append(dict(zip((_BEFORE, *_LINKS), (start, middle - start, end - middle), strict=True)))
            apart = f", every {ordinal(reach.stride)}" * (reach.stride > 1)
            texts.append(f"{reach.size:,}: {now.link(reach)}{apart}" if reach.size > 1 else "1")
        row = list(_AXES).index(_ROW[part]) if (part := limit(now)) in _ROW else _NONE
        longest = log2(max(now.task.gpus, node, 2))
        self._bars.update(bars, texts, row, longest, (log2(node), f"a node: {node}"))


class _Memory:
    """What the fullest GPU holds, one after another, against its memory."""

    def __init__(self, axes: Axes):
        parts = {_BEFORE: ("none", "")} | _MEMORY
        self._bars = Bars(axes, parts, "", [*_MEMORY, "together"], outline=word)
        self._bars.hide(_BEFORE)
        axes.get_legend().remove()
        axes.set_title("Memory of the fullest GPU", pad=28)
        self.moving = self._bars.moving

    def update(self, now: Setting) -> None:
        held, room, before = now.memory(), now.task.on.accelerator.memory, 0
        bars, texts = [], []
        for part, size in held.items():
            bars.append(dict.fromkeys((_BEFORE, *_MEMORY), 0) | {_BEFORE: before, part: size})
            before += size
            texts.append(f"{units.size(size)}" if size else "none")
        bars.append({_BEFORE: 0} | held)
        texts.append(f"{units.size(before)}, {before / room:.0%}")
        row = list(_MEMORY).index(max(held, key=held.get))
        self._bars.update(bars, texts, row, min(max(before, 1.2 * room), _ROOMS * room), (room, units.size(room)))


class _Time:
    """The parts of a step's time: of this plan, and of the planner's."""

    def __init__(self, axes: Axes):
        self._bars = Bars(axes, {name: look for name, *look in PARTS.values()}, _TITLE, [""] * (1 + BEST), outline=word)
        _legend(axes, 4, 56, -0.42, 1.09)
        axes.spines[:].set_visible(False)
        for x, text in ((0.55, "time, MFU"), (0.78, "memory")):
            axes.text(x, -0.75, text, fontsize=_SIZE, fontweight="bold", va="center")
        self._own = Labels(axes, size=_SIZE, left=1.0, outline=word, name="own")
        # The planner's plans change when it has searched, and not with every move.
        look = {"ha": "right", "va": "center", "fontsize": _SIZE, "in_layout": False}
        self._others = [[axes.text(_LEFT, row + y, "", **look) for y in _LINES] for row in range(1, 1 + BEST)]
        self.moving = [*self._bars.moving, self._own.artist]

    def update(self, now: Setting, best: Sequence[Found]) -> None:
        shown = [(now.plan, now.step(), now.peak()), *((each.plan, each.time, each.peak) for each in best)]
        bars = [{name: time.parts[part] for part, (name, *_) in PARTS.items()} for _, time, _ in shown]
        texts = [f"{units.duration(time.seconds)}, {time.mfu:.1%}|{units.size(peak.total)}" for _, time, peak in shown]
        totals = [time.seconds for _, time, _ in shown]
        self._bars.update(bars, texts, 0, min(max(totals), _SHOWN * min(totals)) * _EDGE)
        self._own.update([(_LEFT, y) for y in _LINES], [f"this plan: {degrees(now.plan)}", kept(now.plan)])
        said = [(f"{k}: {degrees(each.plan)}", kept(each.plan)) for k, each in enumerate(best, 1)]
        said += [(_HINT, "")] * (not best) + [("", "")] * BEST
        for texts, words in zip(self._others, said, strict=False):
            for text, line in zip(texts, words, strict=True):
                text.set_text(line)


def _legend(axes: Axes, columns: int, pad: float, x: float = -0.02, y: float = 1.0) -> None:
    """The legend at x, y in the axes, and the title `pad` points above them."""
    axes.set_title(axes.get_title(loc="left"), pad=pad, x=x + 0.02)
    handles, _ = axes.get_legend_handles_labels()
    at = {"loc": "lower left", "bbox_to_anchor": (x, y), "borderaxespad": 0.1}
    legend = axes.legend(handles=handles, ncols=columns, columnspacing=1.0, handlelength=1.4, fontsize=_SIZE, **at)
    legend.set_in_layout(False)  # the title's pad makes room for it


class Board:
    """Three panels: axes on links, a GPU's memory, and a step's time beside those of the planner's plans."""

    @style.styled
    def __init__(self):
        self.figure = style.Figure(figsize=(9.2, 4.65), layout="constrained")
        grid = self.figure.add_gridspec(2, 2, width_ratios=(1.1, 1), height_ratios=(1, 2))
        places = (
            grid[0, 0],
            grid[0, 1],
            grid[1, :].subgridspec(1, 2, width_ratios=(0.4, 1))[1],
        )  # plans' names are before the bars
        left, right, below = (self.figure.add_subplot(place) for place in places)
        self._mesh, self._memory, self._time = _Mesh(left), _Memory(right), _Time(below)
        word(_LETTERS, 9, 0)  # a letter's outline takes milliseconds, the first time
        self.moving: list[Artist] = [*self._mesh.moving, *self._memory.moving, *self._time.moving]

    def update(self, model: str, cluster: str, gpus: int, batch: int, seq: int, best: str, **plan) -> str:
        """Shows this setting; returns what limits. Raises ValueError for what cannot be, and where no plan fits.

        plan: Setting's fields but its task. best: unless HIDDEN, the planner's plans are searched, which takes seconds once.
        """
        now = Setting(Task(model, cluster, gpus, batch, seq), **plan)
        now.task.check()
        found = now.task.best() if best != HIDDEN else ()
        if best != HIDDEN and not found:
            room = units.size(now.task.on.accelerator.memory)
            raise ValueError(
                f"the planner finds no plan that fits in {room} a GPU: take more GPUs, or another model or cluster"
            )
        said = _said(now, found)
        self._mesh.update(now)
        self._memory.update(now)
        self._time.update(now, found)
        return said


def _said(now: Setting, found: Sequence[Found]) -> str:
    """As status; where the setting cannot be, with the planner's best."""
    try:
        return status(now, found)
    except ValueError as error:
        if not found:
            raise
        plan, seconds = found[0].plan, units.duration(found[0].seconds)
        best = f"{degrees(plan)}; {kept(plan)}: {seconds}"
        raise ValueError(f"{error}. The planner's best: {best}; “{TAKEN[0]}” has it") from error


class PlanBoard(Explorer):
    """An explorer whose last control has the planner search, and puts one of its plans into the others."""

    def __init__(self, best: widgets.ValueWidget, task: dict[str, widgets.ValueWidget], plan: dict[str, widgets.ValueWidget]):
        self._best, self._task, self._taking = best, task, False
        # Before the explorer's own observers: what it draws is of one setting.
        for name, control in (task | plan).items():
            control.observe(self._another_task if name in task else self._another_plan, "value")
        best.observe(self._take, "value")
        super().__init__(Board(), **task, **plan, best=best)

    def _another_task(self, _) -> None:
        self._best.value = HIDDEN

    def _another_plan(self, _) -> None:
        if self._best.value in TAKEN and not self._taking:
            self._best.value = SHOWN

    def _take(self, change) -> None:
        """Searches, and moves the other controls; where no plan fits, the plot says so."""
        if change.new == HIDDEN:
            return
        self._line.value = "<b>The planner searches …</b>"
        task = Task(**{name: control.value for name, control in self._task.items()})
        found = task.best()
        if change.new in TAKEN and len(found) > (k := TAKEN.index(change.new)):
            self._taking = True
            try:
                self.set(**{name: value for name, value in setting_of(task, found[k].plan)._asdict().items() if name != "task"})
            finally:
                self._taking = False


def explorer() -> PlanBoard:
    """The explorer of chapter 10. It opens on Llama 3 70B on 1,024 H100s, split as a rule of thumb has it."""
    task = {
        "model": choice("model", "llama3-70b", MODELS),
        "cluster": choice("cluster", "h100-dgx", CLUSTERS),
        "gpus": value_slider("GPUs", 1024, GPUS, "{:,}".format),
        "batch": value_slider("batch (sequences)", 1024, BATCHES, "{:,}".format),
        "seq": value_slider("sequence (tokens)", 8192, LENGTHS, "{:,}".format),
    }
    plan = {
        "tp": value_slider("tensor ranks t", 8, TENSOR),
        "cp": value_slider("context ranks c", 1, CONTEXT),
        "pp": value_slider("pipeline ranks p", 4, PIPELINE),
        "ep": value_slider("expert ranks e", 1, EXPERT),
        "dp_shard": value_slider("HSDP dp_shard", ALL, SHARDS, lambda k: f"{k:,}" if k else "all"),
        "microbatch": value_slider("micro-batch b", 1, MICROBATCHES),
        "schedule": choice("schedule", "1f1b", SCHEDULES),
        "virtual": value_slider("virtual stages v", 1, VIRTUAL),
        "zero": value_slider("ZeRO stage", 1, ZERO),
        "recompute": choice("recompute", "selective", RECOMPUTE),
    }
    return PlanBoard(choice("planner's plans", HIDDEN, (HIDDEN, SHOWN, *TAKEN)), task, plan)
