"""Chapter 05's pictures: schedules under each other, what ranks hold, and an explorer of two schedules."""

import functools
from collections import namedtuple
from collections.abc import Iterator, Mapping, Sequence
from itertools import product

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from manyranks.parallel.pipeline import program, schedules, verify
from manyranks.parallel.pipeline.schedules import FORWARD, KINDS, Pair, Schedule, singles
from manyranks.show import gantt, style, units
from manyranks.show.bars import joined
from manyranks.show.drawings import KINDS as KINDS_OF_DATA
from manyranks.show.drawings import WIDTH, Figure
from manyranks.show.explorer import Board, Explorer, Measure, Panels, Setting, choice, slider, value_slider
from manyranks.show.labels import width
from manyranks.show.scenario import BUBBLE, MEMORY, MFU, SHAPES, Scenario, controls
from manyranks.show.setting import MUCH, Part, Said
from manyranks.theory import Plan, clusters
from manyranks.theory import pipeline as theory
from manyranks.theory.plan import SCHEDULES
from manyranks.timeline import Timeline, replay
from manyranks.timeline.spans import COMPUTE

LIGHTER = (0.0, 0.45, 0.65, 0.8)  # share of white for a rank's first, second, … stage; the last look is all further ones'
LOOKS = {
    f"{kind}{k}": gantt.Kind("", tuple(white + (1 - white) * np.array(to_rgb(gantt.KINDS[kind].color))))
    for kind, (k, white) in product(KINDS, enumerate(LIGHTER))
}


@style.styled
def stages(parts: Sequence[Sequence[str]], message: str) -> style.Figure:
    """Draws a box per rank with its parts, and between them what goes forward and what comes back.

    parts: each rank's, by name
    message: what crosses a boundary, such as "b·s·h numbers"
    """
    gap = 1.0
    wide = (WIDTH - gap * (len(parts) - 1)) / len(parts)
    high = 0.42 * max(map(len, parts))
    fig = Figure(WIDTH, high + 0.95)
    for rank, own in enumerate(parts):
        x = rank * (wide + gap)
        fig.rank(x + wide / 2, 0.15, rank, wide)
        fig.frame(x + 0.02, 0.33, wide - 0.04, high + 0.08)
        for row, name in enumerate(own):
            fig.block(x + 0.08, 0.39 + 0.42 * row, wide - 0.16, 0.36, "parameters", name, f"{name} of rank {rank}")
        if rank:
            for y, kind, ends in ((0.5, "activations", (x - gap, x)), (0.18 + high, "gradients", (x, x - gap))):
                fig.arrow([(end, y) for end in ends], KINDS_OF_DATA[kind], name=f"{kind} {rank}")
                fig.write(x - gap / 2, y + 0.2, kind, (gap, 1))
    fig.write(WIDTH / 2, high + 0.72, f"each arrow: {message} per micro-batch")
    return fig


_BOX = [*gantt.BOX, ("kind", "U1"), *((name, int) for name in ("rank", "level", "microbatch", "first", "last", "counts"))]


@style.styled
def compare(
    schedules: Mapping[str, Schedule],
    times: program.Times | Mapping[str, program.Times] = program.Times(),  # noqa: B008 frozen
    timelines: Mapping[str, Timeline] | None = None,
    unit: str = "",
) -> style.Figure:
    """Draws schedules under each other on one time axis, with the activations that each rank holds, in micro-batches.

    times: for the replay, one for all or one for each name
    timelines: those that were measured, which are not replayed
    unit: what times are in, if not in seconds

    The bubble is program.bubble's, as a share of the busiest rank's work (ideal) and of both together (whole). Raises
    ValueError for no schedule, one that cannot run, times of 0, and a measured timeline that is none of its schedule.
    """
    measured = timelines or {}
    times = times if isinstance(times, Mapping) else dict.fromkeys(schedules, times)
    if not schedules or not set(measured) <= set(schedules) or set(times) != set(schedules):
        given = f"schedules {[*schedules]}, times {[*times]}, timelines {[*measured]}"
        raise ValueError(f"{given}: give a schedule or more, times for all of them, and timelines of no others")
    runs, titled = {}, []
    for name, schedule in schedules.items():
        if name not in measured:
            verify.verify(schedule)
        runs[name] = run(schedule, measured.get(name) or replay(program.program(schedule), times[name]))
    end = max(each.makespan for each in runs.values())
    second, unit = (1.0, unit) if unit else gantt.unit(end)
    several = any(each.boxes.level.any() for each in runs.values())
    kinds = [kind for kind in KINDS if any(kind in each.boxes.kind for each in runs.values())]
    rows, linked = max(len(s.ranks) for s in schedules.values()), any(len(each.messages) for each in runs.values())
    charts = Charts(len(runs), rows, 0.42 if rows <= 4 else 0.3, f"time ({unit})", kinds, several, linked)
    for name, each in runs.items():
        ideal, whole = (units.three(100 * each.bubble / of) for of in (each.work, each.work + each.bubble))
        makespan = f"makespan {each.makespan / second:.4g} {unit}"
        titled.append((f"{name}: bubble {ideal}% of ideal time, {whole}% of total; {makespan}", each))
    charts.show(titled, second)
    return charts.figure


class Run(namedtuple("Run", "boxes messages held peaks work bubble makespan")):
    """Holds what a chart shows of a schedule and its timeline, and what is said of it. A rank's row is 1 high.

    boxes: as a Gantt takes them, and of each action kind, rank, level (its look's in LIGHTER) and microbatch
    messages: time and row where each starts, time and row where it ends
    held: rank, since when, until when, how many micro-batches, each counted on all stages of the rank
    peaks: the most of those
    work: the busiest rank's
    """

    @property
    def late(self) -> float:
        """Seconds of the makespan besides work and bubble: some ranks start later than others, and end later."""
        return float(max(0.0, round(self.makespan - self.work - self.bubble, 9)))


def run(schedule: Schedule, timeline: Timeline) -> Run:
    """Returns what is shown of a timeline of the schedule's program, or a measured one.

    Raises ValueError where it has another number of actions.
    """
    boxes, ranks = _boxes(schedule).copy(), range(len(schedule.ranks))
    spans = [(*span[3:], rank) for rank in ranks for span in timeline.of(rank, COMPUTE)]
    if [rank for *_, rank in spans] != boxes.rank.tolist():
        [program.in_flight(schedule, timeline, rank) for rank in ranks]  # says where
    started, finished, _ = np.array(spans).T
    boxes.corners[:, :2] = np.column_stack([started[boxes.first], finished[boxes.last]])
    # An activation comes when its F starts and goes when its B or W ends, as program.in_flight has it; in the end all are gone.
    changed = np.flatnonzero(np.diff(boxes.counts, prepend=0))
    when = np.where(boxes.kind == FORWARD, started, finished)[changed]
    n = boxes.counts[changed] / max(map(schedule.placement.count, schedule.placement))
    held = np.column_stack([boxes.rank[changed][:-1], when[:-1], when[1:], n[:-1]])[n[:-1] > 0]
    first, work = np.unique(boxes.rank, return_index=True)[1], np.bincount(boxes.rank, finished - started).max()
    bubble = max(0.0, round((np.maximum.reduceat(finished, first) - started[first]).max() - work, 12))  # as program.bubble
    # The sender's span says all of a message that was replayed: "send → 1" ends when rank 1 has it.
    sent = [(s.started, s.rank, s.finished, int(s.name[7:])) for s in timeline.spans if s.name.startswith("send → ")]
    messages = np.reshape(np.array(sent, float), (-1, 4))
    edge = gantt.BAND / 2 * np.sign(messages[:, 3] - messages[:, 1])  # of a band, which a line begins and ends at
    messages[:, 1::2] += np.column_stack([0.5 + edge, 0.5 - edge])
    most = [float(held[held[:, 0] == rank, 3].max(initial=0)) for rank in ranks]
    return Run(boxes, messages, held, most, work, bubble, timeline.makespan)


@functools.lru_cache(maxsize=64)
def _boxes(schedule: Schedule) -> np.recarray:
    """Run's boxes without times, but with those spans that have them, which the halves of a Pair share."""
    rows: list[tuple] = []
    for rank, items in enumerate(schedule.ranks):
        own, top = schedule.stages_of(rank), rank + (1 - gantt.BAND) / 2
        counts = verify.held(schedule, rank)
        for item in items:
            first, last = len(rows), len(rows) + len(singles(item)) - 1
            for half, (kind, stage, i) in enumerate(singles(item)):
                level, look = min(own.index(stage), len(LIGHTER) - 1), gantt.KINDS[kind]
                share = (0.52 * half, 0.48 + 0.52 * half) if type(item) is Pair else (look.top, look.bottom)
                corners = 0, 0, *(top + gantt.BAND * k for k in share)
                rows.append((f"{kind}{level}", f"{kind}{i}|{i}", corners, kind, rank, level, i, first, last, next(counts)))
    return np.array(rows, _BOX).view(np.recarray)


class Charts(Panels):
    """A figure of `count` charts, of so many rows each at least; `show` shows as many runs, in any figure or explorer.

    kinds: in the legend
    split, links: whether the legend explains a rank's several stages, and messages
    wide: inches
    """

    def __init__(
        self, count: int, rows: int, inches: float, xlabel: str, kinds: Sequence[str], split: bool, links: bool, wide=9.2
    ):
        later = {"facecolor": "#c8c8c8", "edgecolor": style.INK, "hatch": "--", "linewidth": 0}
        keys = [Patch(**gantt.KINDS[kind].look) for kind in kinds]
        if split:
            keys.append(Patch(**later, label="lighter, striped: a rank's later stages"))
        if links:
            keys.append(Line2D([], [], color=style.INK, linewidth=0.6, label="message"))
        self.figure = gantt.frame(max(0.75, inches * rows), [xlabel, "time"], keys, count=count, wide=wide)
        self.panels = [(Held if k % 2 else Chart)(axes, rows) for k, axes in enumerate(self.figure.axes)]

    def show(self, titled: Sequence[tuple[str, Run]], second: float = 1.0) -> None:
        """Shows each run under its title.

        second: what the time axis counts, in seconds
        """
        end = max(each.boxes.corners[:, 1].max() for _, each in titled)
        most = max(max(each.peaks) for _, each in titled)
        for (title, each), chart, held in zip(titled, self.panels[::2], self.panels[1::2], strict=True):
            chart.show(title, each, end, second)
            held.show(each, end, second, most)


class Chart(gantt.Gantt):
    """A run: when each rank computes what, and thin lines from rank to rank for messages."""

    def __init__(self, axes: Axes, rows: int):
        super().__init__(axes, LOOKS, rows)
        self._links = gantt.patch(axes, "messages", **gantt.LINE, edgecolor=style.INK, zorder=0.5)
        self._bars = gantt.patch(axes, "bars", facecolor=style.BLACK, zorder=2)

    def show(self, title: str, shown: Run, end: float, second: float) -> None:
        corners = self.update(title, [f"rank {rank}" for rank in range(len(shown.peaks))], shown.boxes, end, second)
        room = np.diff(shown.boxes.corners[:, :2])[:, 0] * self.pixels[0]
        deep = np.where(room >= 6, shown.boxes.level, 0)  # pixels: narrower boxes have no bars
        bars = [corners[deep >= k][:, [0, 1, 3, 3]] - (0, 0, 3 * k - 1, 3 * k - 3) for k in range(1, len(LIGHTER))]
        self._bars.set_path(joined(np.concatenate(bars)))  # as many in a box as its rank has stages before it
        self._links.set_path(gantt.lines(shown.messages * self.pixels[[0, 2, 0, 2]]))
        self._links.set_visible(len(shown.messages) <= 700)
        self._drawn = shown, corners

    def parts(self) -> Iterator[Part]:
        """Yields one for each box of the run that was drawn last, or where there are many for each rank."""
        shown, corners = self._drawn
        b, row, says = shown.boxes, self.pixels[2], "rank {}, {} {}: from {:.4g} to {:.4g}".format
        texts = map(says, b.rank, [gantt.KINDS[kind].label[2:] for kind in b.kind], b.microbatch, *b.corners.T[:2])
        if len(b) > 100:
            corners = [(0, self.wide, rank * row, (rank + 1) * row) for rank in range(len(shown.peaks))]
            texts = [f"rank {rank}: holds at most {peak:.3g} micro-batches" for rank, peak in enumerate(shown.peaks)]
        return (Part(self.axes, *each, text) for each, text in zip(corners, texts, strict=True))


class Held(gantt.Clock):
    """Areas of what each rank of a run holds over time, and the most of it."""

    def __init__(self, axes: Axes, rows: int):
        super().__init__(axes, 3, rows)
        axes.text(0, -12, "micro-batches held, peak →", fontsize=9, va="center")
        self._areas = gantt.patch(axes, "areas", facecolor=style.BLUE)
        self._floors = gantt.patch(axes, "floors", **gantt.LINE, edgecolor=style.INK)
        self._peaks = gantt.Texts(axes, size=9, left=0, name="peaks")

    def show(self, shown: Run, end: float, second: float, most: float) -> None:
        """Draws areas on floors, and writes the peaks.

        most: micro-batches that a row has room for
        """
        self.move(len(shown.peaks), end, second)
        (rank, since, until, count), (scale, _, row, _) = shown.held.T, self.pixels
        floors = np.round((np.arange(len(shown.peaks)) + 0.5 + gantt.BAND / 2) * row)
        x, floor = np.round(np.stack([since, until]) * scale), floors[rank.astype(int)]
        self._areas.set_path(joined(np.column_stack([*x, floor - np.round(count / most * gantt.BAND * row), floor])))
        self._floors.set_path(gantt.lines(np.column_stack([0 * floors, floors, 0 * floors + self.wide, floors])))
        self._peaks.write([(self.wide + 6, floor - row / 2 + 2) for floor in floors], [f"{peak:.3g}" for peak in shown.peaks])


MODELS = [name for name, shape in SHAPES.items() if shape.layers >= 32]  # layers for 8 ranks of 4 stages each
NAMES = {theory.WRITTEN[name]: name for name in SCHEDULES if name != "dualpipe"}  # that one has no program
_TIMES, _MESSAGES = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0), (0.0, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0)
_CODE = """\
from manyranks.parallel.pipeline import program, schedules
from manyranks.timeline import replay

for place, (name, v) in {both}.items():
    schedule = schedules.named(name, {pp}, {m}, v)
    F, I, W = (each * {pp} / schedule.stages for each in ({F}, {I}, {W}))
    timeline = replay(program.program(schedule), program.Times(F, I, W, latency={message}))
    print(f"{{place}} makespan: work {{{work}:.4g}} + bubble {{program.bubble(timeline):.4g}}")

"""


# The controls that may make room in memory.
_ROOM = {"first": NAMES.values(), "pp": range(1, 9), "tp": (1, 2, 4, 8)}


class Schedules(namedtuple("Schedules", "first second model cluster dp tp pp m v F I W message"), Setting):
    """Holds what the controls say. F, I, W: of a micro-batch on all stages of a rank; message: between two stages; one unit."""

    choices, room = _ROOM, tuple(_ROOM)

    @property
    def scenario(self) -> Scenario:
        """The upper schedule's. Raises ValueError where theory has no step time."""
        if (shape := SHAPES[self.model]).heads % self.tp:
            raise ValueError(f"{self.tp} tensor ranks can't share the {shape.heads} heads of {self.model}")
        if self.m < (fewest := theory.fewest(self.first, self.pp)) and self.pp > 1:
            raise ValueError(f"the formula for {theory.WRITTEN[self.first]} needs m ≥ {fewest}")
        shared = {"dp": self.dp, "tp": self.tp, "pp": self.pp}
        plan = Plan(batch=self.dp * self.m, schedule=self.first, virtual=self.stages(self.first), **shared)
        return Scenario(shape, plan, clusters[self.cluster]).checked()

    def stages(self, name: str) -> int:
        return self.v if name == "interleaved" else 1

    def run(self, name: str) -> Run:
        return _run(name, self.pp, self.m, self.stages(name), self.message, self.F, self.I, self.W)

    def expected(self, name: str) -> float | None:
        """The papers' closed form of the bubble; None for micro-batches that it doesn't hold for."""
        if (self.stages(name) > 1 and self.m % self.pp) or (self.pp > 1 and self.m < theory.fewest(name, self.pp)):
            return None
        return theory.bubble(name, self.pp, self.m, self.stages(name), self.F, self.I + self.W, self.W)

    def said(self) -> Said:
        """Says what both schedules do, and what the upper one makes of a step, where theory has its time."""
        both, numbers = [(name, self.run(name)) for name in (self.first, self.second)], {}
        where = f"{theory.WRITTEN[self.first]} above {theory.WRITTEN[self.second]}, PP {self.pp}, m = {self.m}"
        for place, (_, shown) in zip(("upper", "lower"), both, strict=True):
            late = f" + late start {shown.late:.4g}" if shown.late > 0 else ""
            numbers[f"{place} makespan"] = f"work {shown.work:.4g} + bubble {shown.bubble:.4g}{late}"
            numbers[f"{place} holds"] = f"{max(shown.peaks):.3g} micro-batch{'es' if max(shown.peaks) != 1 else ''}"
        try:
            here = self.scenario
        except ValueError as error:
            return Said(where, numbers, f"{_limits(both, self)}; no prediction: {error}")
        note = f"The step: the upper schedule on {self.model}, whatever F, I, W and message are."
        limit = _limits(both, self) if here.fits else self.memory("no single control helps")
        return Said(where, numbers, limit, here.fits, here, note)

    def change(self, other: "Schedules") -> str:
        change = super().change(other)
        return theory.WRITTEN.get(change, change)

    def code(self) -> str:
        both = {place: (name, self.stages(name)) for place, name in (("upper", self.first), ("lower", self.second))}
        lines = _CODE.format(both=str(both).replace("'", '"'), work=self.m * (self.F + self.I + self.W), **self._asdict())
        return lines + (self.scenario.code() if self.possible else "")


_named, _program = functools.lru_cache(8)(schedules.named), functools.lru_cache(8)(program.program)


@functools.lru_cache(maxsize=256)
def _run(name: str, p: int, m: int, v: int, message: float, *times: float) -> Run:
    schedule = _named(name, p, m, v)
    F, I, W = (each / (schedule.stages / p) for each in times)  # noqa: E741
    return run(schedule, replay(_program(schedule), program.Times(F, I, W, latency=message)))


class Two(Charts, Board):
    """Two schedules under each other on one time axis."""

    setting, over, curves, apart = Schedules, "pp", (MEMORY, MFU, BUBBLE), {BUBBLE: "m"}

    @style.styled
    def __init__(self):
        super().__init__(2, 4, 0.281, "time (in units of F, I and W)", KINDS, True, True, wide=6.45)
        width("".join([*NAMES, *theory.FORMS.values()]) + "0123456789=≠.;", 1)  # their outlines are made now, not in a redraw

    def idle(self, first: str, second: str, **_) -> dict[str, bool]:
        return {"v": "interleaved" not in (first, second)}

    def draw(self, now: Schedules) -> None:
        each = [(name, now.run(name)) for name in (now.first, now.second)]
        self.show([(title(name, shown, now), shown) for name, shown in each])


def explorer(measure: Measure | None = None) -> Explorer:
    """Returns the explorer of chapter 05.

    measure: what "Measure it" runs, few_ranks.pipeline
    """
    presets = {"GPipe's memory": {"first": "gpipe", "second": "1f1b", "m": 32}}
    presets["interleaved"] = {"second": "interleaved", "v": 4}
    presets["slow messages"] = presets["interleaved"] | {"message": 0.5}
    presets["zero bubble"] = {"first": "zb-h1", "second": "zb-h2", "pp": 8, "m": 16}
    presets["ZB-V"] = {"first": "zb-v", "second": "1f1b", "m": 16}
    names = {"first": choice("upper schedule", "1f1b", NAMES), "second": choice("lower schedule", "zb-h1", NAMES)}
    shared = controls({"model": MODELS, "tp": (1, 2, 4, 8)}, model="llama3-8b", cluster="h100-dgx", dp=1, tp=1)
    counts = {"pp": slider("pipeline ranks p", 4, 1, 8), "m": slider("micro-batches m", 8, 1, 32)}
    counts["v"] = slider("v (interleaved only)", 2, 1, 4)
    times = {kind: value_slider(gantt.KINDS[kind].label, 1.0, _TIMES, "{:g}".format) for kind in "FIW"}
    times["message"] = value_slider("message", 0.0, _MESSAGES, "{:g}".format)
    return Explorer(Two(), presets, measure, **names, **shared, **counts, **times)


def title(name: str, shown: Run, now: Schedules) -> str:
    """Says the bubble, and whether it's what the papers' form gives."""
    expected = now.expected(name)
    same = "=" if expected is not None and abs(expected - shown.bubble) < 1e-6 * shown.work else "≠"
    form = "" if expected is None else f" {same} {theory.FORMS[name]}"
    halves = " (two at once)" if name == "dualpipe-v" else ""
    return f"{theory.WRITTEN[name]}{halves}: bubble {shown.bubble:.4g}{form}"


def _limits(both: list[tuple[str, Run]], now: Schedules) -> str:
    said = {theory.WRITTEN[name]: _limit(name, shown, now) for name, shown in both}
    words = "; ".join(f"{name}: {limit}" for name, limit in said.items()) if len(set(said.values())) > 1 else min(said.values())
    (_, one), (name, other) = sorted(both, key=lambda each: each[1].late)
    if other.late == one.late or abs(one.makespan - other.makespan) > 1e-9:
        return words
    late = f"{theory.WRITTEN[name]}'s late start of {other.late:.4g}"
    return f"{words}; the makespans are equal, but {late} counts in the first step only"


def _limit(name: str, shown: Run, now: Schedules) -> str:
    """Names the reason of this schedule's bubble."""
    if now.pp == 1:
        return "compute: one rank sends nothing"
    if name == "naive":
        return "one rank works at a time"
    if shown.bubble < 0.005 * shown.work:
        return "compute (the price is memory)" if max(shown.peaks) > now.pp else "compute"
    without = now._replace(message=0.0).run(name).bubble
    if without <= shown.bubble / 2:
        return f"messages (bubble {without:.4g} without them)"
    if now.m < (fewest := theory.fewest(name, now.pp)):
        return f"too few micro-batches (it's designed for m ≥ {fewest})"
    third, whole = (now.F + now.I + now.W) / 3, -(-now.m // now.pp) * now.pp
    besides = " and no messages" if now.message > 0 else ""
    best = now._replace(F=third, I=third, W=third, m=whole if name == "interleaved" else now.m)
    if (bubble := best.expected(name)) <= shown.bubble / 2:
        return f"unequal times (bubble {bubble:.4g} with F = I = W{besides})"
    if best.m != now.m and now.v > 1:
        return f"p does not divide m (bubble {bubble:.4g} with m = {whole}{besides})"
    if without < (1 - MUCH) * shown.bubble:
        rest = f"messages {shown.bubble - without:.4g}"
        return f"warm-up and drain {without:.4g}, {rest} (more micro-batches dilute only the warm-up and drain)"
    return "warm-up and drain (more micro-batches dilute them)"
