"""Chapter 05: schedules as charts under each other; what ranks hold; an explorer: two schedules, their bubble and memory."""

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from manyranks.parallel.pipeline import schedules as hand_written
from manyranks.parallel.pipeline.actions import KINDS, Schedule
from manyranks.parallel.pipeline.program import Times, program
from manyranks.parallel.pipeline.verify import peaks, verify
from manyranks.show import style
from manyranks.show.explorer import Explorer, choice, slider, value_slider
from manyranks.show.gantt import UNITS
from manyranks.show.pipeline_chart import Charts
from manyranks.show.pipeline_run import Run, run
from manyranks.theory import pipeline as theory
from manyranks.theory.names import Named
from manyranks.timeline import Program, Timeline, replay

# name -> schedule of p ranks, m micro-batches and, where it is not fixed, v stages a rank
SCHEDULES: Mapping[str, Callable[[int, int, int], Schedule]] = Named(
    "schedule",
    {
        "naive": lambda p, m, v: hand_written.naive(p, m),
        "GPipe": lambda p, m, v: hand_written.gpipe(p, m),
        "1F1B": lambda p, m, v: hand_written.one_f_one_b(p, m),
        "interleaved": hand_written.interleaved,
        "ZB-H1": lambda p, m, v: hand_written.zb_h1(p, m),
        "ZB-H2": lambda p, m, v: hand_written.zb_h2(p, m),
        "ZB-V": lambda p, m, v: hand_written.zb_v(p, m),
        "DualPipeV": lambda p, m, v: hand_written.dualpipe_v(p, m),
    },
)
_FORMS = {
    "naive": "(p − 1)m(F + B)",
    "gpipe": "(p − 1)(F + B)",
    "1f1b": "(p − 1)(F + B)",
    "interleaved": "(p − 1)(F + B)/v",
    "zb-h1": "(p − 1)(F + I − W)",
    "zb-h2": "(p − 1)(F + I − 2W)",
    "zb-v": "(p − 1)(F + I − 2W)/2",
    "dualpipe-v": "(p − 1)(F + 2I − W)/2",
}
_TIMES = [0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0]
_NEARLY = 0.9  # of the bubble: where messages make less of it, they are not named
_MESSAGES = [0.0, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0]
_LOOKS = ((style.BLUE, ""), (style.ORANGE, "////"), (style.GREEN, "...."), (style.PINK, "\\\\\\\\"), (style.YELLOW, "xx"))


@style.styled
def compare(
    schedules: Mapping[str, Schedule],
    times: Times | Mapping[str, Times] = Times(),  # noqa: B008 frozen
    timelines: Mapping[str, Timeline] = MappingProxyType({}),
    unit: str = "",
) -> style.Figure:
    """Schedules under each other on one time axis, each with its bubble, and with the activations that each rank holds.

    A schedule is verified and replayed with times (one for all, or one for each name), unless `timelines` has a measured one of
    that name. Boxes bear the micro-batch. The bubble is that of program.bubble, as a share of the busiest rank's work (ideal)
    and of both together (whole). What is held is counted in micro-batches on all stages of a rank. unit: what times are in, if
    not in seconds. Raises ValueError for no schedule, one that cannot run, times of 0, and a measured timeline that is none of
    its schedule.
    """
    runs = _runs(schedules, times if isinstance(times, Mapping) else dict.fromkeys(schedules, times), timelines)
    end = max(each.makespan for each in runs.values())
    second, unit = (1.0, unit) if unit else next((u for u in UNITS if end >= u[0]), UNITS[-1])
    several = any(len(set(s.placement)) < s.stages for s in schedules.values())
    kinds = [kind for kind in KINDS if any(kind in each.boxes.kind for each in runs.values())]
    rows, linked = max(len(s.ranks) for s in schedules.values()), any(len(each.messages) for each in runs.values())
    charts = Charts(len(runs), rows, 0.42 if rows <= 4 else 0.3, f"time ({unit})", kinds, several, linked)
    charts.update([(_title(name, each, second, unit), each) for name, each in runs.items()], second)
    return charts.figure


def _runs(schedules: Mapping[str, Schedule], times: Mapping[str, Times], timelines: Mapping[str, Timeline]) -> dict[str, Run]:
    if not schedules or not set(timelines) <= set(schedules) or set(times) != set(schedules):
        given = f"schedules {[*schedules]}, times {[*times]}, timelines {[*timelines]}"
        raise ValueError(f"{given}: give a schedule or more, times for all of them, and timelines of no others")
    found = {}
    for name, schedule in schedules.items():
        if name not in timelines:
            verify(schedule)
        timeline = timelines[name] if name in timelines else replay(program(schedule), times[name])
        found[name] = run(schedule, timeline)
    return found


@style.styled
def in_flight(schedules: Mapping[str, Schedule]) -> style.Figure:
    """Bars: the most activations that each rank holds, in micro-batches on all its stages; lines: theory's closed forms.

    Raises ValueError for no schedule, more than five, or schedules of different numbers of ranks.
    """
    ranks = {name: len(schedule.ranks) for name, schedule in schedules.items()}
    if not 1 <= len(schedules) <= len(_LOOKS) or len(set(ranks.values())) > 1:
        raise ValueError(f"schedules of {ranks} ranks: give 1 to {len(_LOOKS)}, of equally many ranks")
    (p,) = set(ranks.values())
    fig, (axes,) = style.figure(width=9, height=3.2)
    wide = 0.8 / len(schedules)
    for k, (name, schedule) in enumerate(schedules.items()):
        _bars(axes, k, wide, name, schedule)
    axes.set_xticks(range(p), [f"rank {rank}" for rank in range(p)])
    axes.set(ylabel="micro-batches held at most")
    axes.grid(axis="x", visible=False)
    handles, _ = axes.get_legend_handles_labels()
    handles += [Line2D([], [], color=style.INK, label="closed form")] * bool(axes.collections)
    fig.legend(handles=handles, loc="outside upper left", ncols=6)
    return fig


def _bars(axes: Axes, k: int, wide: float, name: str, schedule: Schedule) -> None:
    """The k-th bar of every rank, and its closed form where there is one."""
    (colour, hatch), p = _LOOKS[k], len(schedule.ranks)
    x = np.arange(p) - 0.4 + (k + 0.5) * wide
    heights = [count * p / schedule.stages for count in peaks(schedule)]
    bars = axes.bar(x, heights, 0.94 * wide, color=colour, hatch=hatch, edgecolor="white", linewidth=0.4, label=name)
    axes.bar_label(bars, [f"{height:.3g}" for height in heights], fontsize=7.5, padding=1)
    if schedule.name in _FORMS:
        axes.hlines([_expected(schedule, rank) for rank in range(p)], x - wide / 2, x + wide / 2, color=style.INK)


def _expected(schedule: Schedule, rank: int) -> float:
    p = len(schedule.ranks)
    v = schedule.stages // p if schedule.name == "interleaved" else 1
    return theory.in_flight(schedule.name, p, schedule.microbatches, v, rank)


class Setting(NamedTuple):
    """What the controls say. F, I, W: of a micro-batch on all stages of a rank; message: between two stages; in one unit."""

    p: int
    m: int
    v: int
    F: float
    I: float  # noqa: E741
    W: float
    message: float

    def run(self, name: str) -> Run:
        return _run(name, self if name == "interleaved" else self._replace(v=1))

    def expected(self, schedule: str) -> float:
        """The bubble's closed form. Raises ValueError for fewer micro-batches than it holds for."""
        v = self.v if schedule == "interleaved" else 1
        return theory.bubble(schedule, self.p, self.m, v, self.F, self.I + self.W, self.W)


@functools.lru_cache(maxsize=256)
def _run(name: str, now: Setting) -> Run:
    schedule, instructions = _program(name, now.p, now.m, now.v)
    each = schedule.stages / now.p
    return run(schedule, replay(instructions, Times(now.F / each, now.I / each, now.W / each, latency=now.message)))


@functools.lru_cache(maxsize=8)
def _program(name: str, p: int, m: int, v: int) -> tuple[Schedule, Program]:
    schedule = SCHEDULES[name](p, m, v)
    return schedule, program(schedule)


class Two:
    """Two schedules under each other on one time axis."""

    @style.styled
    def __init__(self):
        self._charts = Charts(2, 4, 0.45, "time (in the unit of F, I and W)", KINDS, True, True)
        self.figure, self.moving = self._charts.figure, self._charts.moving

    def idle(self, first: str, second: str, **_) -> tuple[str, ...]:
        """Names the controls that do nothing for these schedules."""
        return () if "interleaved" in (first, second) else ("v",)

    def update(self, first: str, second: str, **values) -> str:
        """Shows the Setting of these values; returns what limits each. Raises ValueError for an unknown name."""
        now = Setting(**values)
        runs = {name: now.run(name) for name in (first, second)}
        self._charts.update([(_title(name, runs[name]), runs[name]) for name in (first, second)])
        return " ".join(status(name, each, now) for name, each in runs.items())


def explorer() -> Explorer:
    """The explorer of chapter 05."""
    names = list(SCHEDULES)
    return Explorer(
        Two(),
        first=choice("above", "1F1B", names),
        second=choice("below", "ZB-H1", names),
        p=slider("ranks p", 4, 1, 8),
        m=slider("micro-batches m", 8, 1, 32),
        v=slider("v (of interleaved)", 2, 1, 4),
        F=value_slider("F forward", 1.0, _TIMES, "{:g}".format),
        I=value_slider("I input gradient", 1.0, _TIMES, "{:g}".format),
        W=value_slider("W weight gradient", 1.0, _TIMES, "{:g}".format),
        message=value_slider("message", 0.0, _MESSAGES, "{:g}".format),
    )


def _number(value: float) -> str:
    """Without rounding noise, such as a bubble of 1e-15."""
    return f"{round(value, 9) + 0.0:.4g}"


def _percent(share: float) -> str:
    return f"{100 * share:,.0f}%" if share >= 1 else f"{round(100 * share, 6) + 0.0:.3g}%"


def _bubble(shown: Run) -> str:
    return f"{_percent(shown.of_ideal)} of ideal, {_percent(shown.of_whole)} of the whole"


def _title(name: str, shown: Run, second: float = 1.0, unit: str = "") -> str:
    return f"{name}: bubble {_bubble(shown)}; makespan {_number(shown.makespan / second)} {unit}".rstrip()


def status(name: str, shown: Run, now: Setting) -> str:
    """What is said of this schedule, and what limits it."""
    rank = shown.peaks.index(peak := max(shown.peaks))
    usual = min(now.p, now.m)
    held = f"{peak:.3g} micro-batch{'es' * (peak != 1)}" + f" (1F1B: {usual})" * (peak != usual)
    idle = _percent(1 - shown.work / shown.makespan)
    return (
        f"{name}: bubble {_number(shown.bubble)} {_closed_form(shown, now)}, {_bubble(shown)}; "
        f"makespan {_number(shown.makespan)}, {idle} idle; rank {rank} holds {held}. Limit: {_limit(name, shown, now)}."
    )


def _closed_form(shown: Run, now: Setting) -> str:
    """What the papers' form says of this bubble, and why it says something else."""
    try:
        expected = now.expected(shown.name)
    except ValueError:
        fewest = theory.fewest(shown.name, now.p)
        return f"(no closed form for m < {fewest})" if now.m < fewest else "(no closed form where p does not divide m)"
    form = _FORMS[shown.name]
    if abs(expected - shown.bubble) < 1e-6 * shown.work:
        return f"= {form}"
    unequal = "W" in form and not now.F == now.I == now.W
    reasons = ["messages"] * (now.message > 0) + ["unequal times"] * unequal
    return f"(not {form} = {_number(expected)}, because of {' and '.join(reasons)})"


def _limit(name: str, shown: Run, now: Setting) -> str:
    if now.p == 1:
        return "computing: one rank waits for nobody"
    if name == "naive":
        return "one rank works at a time"
    if shown.of_ideal < 0.005:
        return "computing" + "; the price is memory" * (max(shown.peaks) > now.p)
    if now.message and (without := now._replace(message=0.0).run(name).bubble) <= shown.bubble / 2:
        return f"messages; bubble {_number(without)} without them"
    if now.m < (fewest := theory.fewest(shown.name, now.p)):
        return f"few micro-batches; the schedule is made for m ≥ {fewest}"
    third, whole = (now.F + now.I + now.W) / 3, -(-now.m // now.p) * now.p
    best = now._replace(F=third, I=third, W=third, m=whole if name == "interleaved" else now.m)
    besides = " and no messages" * (now.message > 0)
    if (bubble := best.expected(shown.name)) <= shown.bubble / 2:
        return f"unequal times; bubble {_number(bubble)} with F = I = W{besides}"
    if best.m != now.m and now.v > 1:
        return f"p does not divide m; bubble {_number(bubble)} with m = {whole}{besides}"
    if now.message and without < _NEARLY * shown.bubble:
        parts = f"warm-up and drain {_number(without)}, messages {_number(shown.bubble - without)}"
        return f"{parts}; more micro-batches dilute the first only"
    return "warm-up and drain; more micro-batches dilute them"
