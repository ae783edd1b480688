"""Chapter 05's figures: schedules that have run, under each other on one time axis, and bars of what ranks hold at most.

All of a chart that depends on the data moves, also the axis's numbers: an explorer never draws the rest again. Places are
pixels of the axes, so that edges are sharp without antialiasing.
"""

import functools
from collections import namedtuple
from collections.abc import Iterator, Mapping, Sequence
from itertools import product

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, PathPatch
from matplotlib.path import Path
from matplotlib.ticker import MaxNLocator

from manyranks.parallel.pipeline.actions import FORWARD, KINDS, Pair, Schedule, singles
from manyranks.parallel.pipeline.program import Times, program
from manyranks.parallel.pipeline.program import in_flight as in_flight_of
from manyranks.parallel.pipeline.verify import held as counted
from manyranks.parallel.pipeline.verify import peaks, verify
from manyranks.show import gantt, style, units
from manyranks.show.bars import NOTHING, joined
from manyranks.show.labels import Labels, width, word
from manyranks.show.said import Part
from manyranks.theory import pipeline as theory
from manyranks.theory.plan import SCHEDULES
from manyranks.timeline import Timeline, replay
from manyranks.timeline.spans import COMPUTE

LIGHTER = (0.0, 0.45, 0.65, 0.8)  # share of white for a rank's first, second, … stage; the last look is all further ones'
_BAND, _SIZE = 0.84, 7.0  # of a row; of names, in points
_MOST_NAMES, _MOST_MESSAGES, _MOST_PARTS = 500, 700, 100
_PARTED, _BARRED = 4, 6  # pixels from which on boxes have a gap between them, and bars that tell a rank's stages apart
_LINE = {"facecolor": "none", "linewidth": 0.6, "antialiased": True}
_LOOKS = ((style.BLUE, ""), (style.ORANGE, "////"), (style.GREEN, "...."), (style.PINK, "\\\\\\\\"), (style.YELLOW, "xx"))
_LOCATORS = [MaxNLocator(most, steps=[1, 2, 2.5, 5, 10]) for most in (9, 3)]  # of numbers under bands, and under what is held
_Texts = functools.partial(Labels, outline=word)  # new ones with every move


@style.styled
def compare(
    schedules: Mapping[str, Schedule],
    times: Times | Mapping[str, Times] = Times(),  # noqa: B008 frozen
    timelines: Mapping[str, Timeline] | None = None,
    unit: str = "",
) -> style.Figure:
    """Draws schedules under each other on one time axis, each with its bubble, and with the activations that each rank holds.

    schedules: boxes bear the micro-batch; what a rank holds is counted in micro-batches on all its stages
    times: for the replay, one for all or one for each name; timelines: those that were measured, which are not replayed
    unit: what times are in, if not in seconds

    The bubble is program.bubble's, as a share of the busiest rank's work (ideal) and of both together (whole). Raises
    ValueError for no schedule, one that cannot run, times of 0, and a measured timeline that is none of its schedule.
    """
    measured, times = timelines or {}, times if isinstance(times, Mapping) else dict.fromkeys(schedules, times)
    if not schedules or not set(measured) <= set(schedules) or set(times) != set(schedules):
        given = f"schedules {[*schedules]}, times {[*times]}, timelines {[*measured]}"
        raise ValueError(f"{given}: give a schedule or more, times for all of them, and timelines of no others")
    runs, titled = {}, []
    for name, schedule in schedules.items():
        if name not in measured:
            verify(schedule)
        runs[name] = run(schedule, measured.get(name) or replay(program(schedule), times[name]))
    end = max(each.makespan for each in runs.values())
    second, unit = (1.0, unit) if unit else gantt.unit(end)
    several = any(len(set(s.placement)) < s.stages for s in schedules.values())
    kinds = [kind for kind in KINDS if any(kind in each.boxes.kind for each in runs.values())]
    rows, linked = max(len(s.ranks) for s in schedules.values()), any(len(each.messages) for each in runs.values())
    charts = Charts(len(runs), rows, 0.42 if rows <= 4 else 0.3, f"time ({unit})", kinds, several, linked)
    for name, each in runs.items():
        ideal, whole = (units.three(100 * each.bubble / of) for of in (each.work, each.work + each.bubble))
        said = f"bubble {ideal}% of ideal, {whole}% of the whole; makespan {each.makespan / second:.4g} {unit}"
        titled.append((f"{name}: {said}", each))
    charts.show(titled, second)
    return charts.figure


@style.styled
def in_flight(schedules: Mapping[str, Schedule]) -> style.Figure:
    """Draws bars: the most activations that each rank holds, in micro-batches on all its stages; lines: theory's closed forms.

    Raises ValueError for no schedule, more than five, or schedules of different numbers of ranks.
    """
    ranks = {name: len(schedule.ranks) for name, schedule in schedules.items()}
    if not 1 <= len(schedules) <= len(_LOOKS) or len(set(ranks.values())) > 1:
        raise ValueError(f"schedules of {ranks} ranks: give 1 to {len(_LOOKS)}, of equally many ranks")
    p, wide = max(ranks.values()), 0.8 / len(schedules)
    fig, (axes,) = style.figure(width=9, height=3.2)
    for k, ((name, each), (colour, hatch)) in enumerate(zip(schedules.items(), _LOOKS, strict=False)):
        x, heights = np.arange(p) - 0.4 + (k + 0.5) * wide, [count * p / each.stages for count in peaks(each)]
        look = {"color": colour, "hatch": hatch, "edgecolor": "white", "linewidth": 0.4, "label": name}
        axes.bar_label(axes.bar(x, heights, 0.94 * wide, **look), fmt="{:.3g}", fontsize=7.5, padding=1)
        if each.name in SCHEDULES:
            v = each.stages // p if each.name == "interleaved" else 1
            expected = [theory.in_flight(each.name, p, each.microbatches, v, rank) for rank in range(p)]
            axes.hlines(expected, x - wide / 2, x + wide / 2, color=style.INK)
    axes.set_xticks(range(p), [f"rank {rank}" for rank in range(p)])
    axes.set(ylabel="micro-batches held at most")
    axes.grid(axis="x", visible=False)
    handles, _ = axes.get_legend_handles_labels()
    handles += [Line2D([], [], color=style.INK, label="closed form")] * bool(axes.collections)
    fig.legend(handles=handles, loc="outside upper left", ncols=6)
    return fig


class Run(namedtuple("Run", "boxes corners messages held peaks work bubble makespan")):
    """Holds what a chart shows of a schedule and its timeline, and what is said of it. A rank's row is 1 high.

    boxes: of each action kind, level (which of its rank's stages), rank and microbatch; corners: when it starts and ends, and
    where in the rows. messages: time and row where each starts, time and row where it ends. held: rank, since when, until when,
    how many micro-batches, each counted on all stages of the rank; peaks: the most. work: the busiest rank's.
    """


def run(schedule: Schedule, timeline: Timeline) -> Run:
    """Returns what is shown of a timeline of the schedule's program, or a measured one.

    Raises ValueError where it has another number of actions.
    """
    boxes, ranks, stages = _boxes(schedule), range(len(schedule.ranks)), max(map(schedule.placement.count, schedule.placement))
    spans = [(*span[3:], rank) for rank in ranks for span in timeline.of(rank, COMPUTE)]
    if [rank for *_, rank in spans] != boxes.rank.tolist():
        [in_flight_of(schedule, timeline, rank) for rank in ranks]  # says where
    started, finished, _ = np.array(spans).T
    # An activation comes when its F starts and goes when its B or W ends, as program.in_flight has it; in the end all are gone.
    changed = np.flatnonzero(np.diff(boxes.counts, prepend=0))
    when, n = np.where(boxes.kind == FORWARD, started, finished)[changed], boxes.counts[changed] / stages
    held = np.column_stack([boxes.rank[changed][:-1], when[:-1], when[1:], n[:-1]])[n[:-1] > 0]
    first, work = np.unique(boxes.rank, return_index=True)[1], np.bincount(boxes.rank, finished - started).max()
    bubble = max(0.0, round((np.maximum.reduceat(finished, first) - started[first]).max() - work, 12))  # as program.bubble
    corners = np.column_stack([started[boxes.first], finished[boxes.last], boxes.top, boxes.bottom])
    # The sender's span says all of a message that was replayed: "send → 1" ends when rank 1 has it.
    sent = [(s.started, s.rank, s.finished, int(s.name[7:])) for s in timeline.spans if s.name.startswith("send → ")]
    messages = np.reshape(np.array(sent, float), (-1, 4))
    edge = _BAND / 2 * np.sign(messages[:, 3] - messages[:, 1])  # of a band, which a line begins and ends at
    messages[:, 1::2] += np.column_stack([0.5 + edge, 0.5 - edge])
    most = [float(held[held[:, 0] == rank, 3].max(initial=0)) for rank in ranks]
    return Run(boxes, corners, messages, held, most, work, bubble, timeline.makespan)


@functools.lru_cache(maxsize=64)
def _boxes(schedule: Schedule) -> np.recarray:
    """What Run has of each action, its place in the rows, and the spans of its times, which the halves of a Pair share."""
    rows: list[tuple] = []
    for rank, items in enumerate(schedule.ranks):
        own, top = [stage for stage, owner in enumerate(schedule.placement) if owner == rank], rank + (1 - _BAND) / 2
        counts = counted(schedule, rank)
        for item in items:
            first, last = len(rows), len(rows) + len(singles(item)) - 1
            for half, (kind, stage, i) in enumerate(singles(item)):
                look = gantt.KINDS[kind]
                share = (0.52 * half, 0.48 + 0.52 * half) if type(item) is Pair else (look.top, look.bottom)
                rows.append((kind, own.index(stage), rank, i, *(top + _BAND * k for k in share), first, last, next(counts)))
    return np.rec.fromrecords(rows, names="kind, level, rank, microbatch, top, bottom, first, last, counts")


class Charts:
    """A figure of `count` charts, of so many rows each at least; `show` shows as many runs, in any figure or explorer.

    kinds: in the legend. split: whether it explains a rank's several stages; links: and messages.
    """

    def __init__(self, count: int, rows: int, inches: float, xlabel: str, kinds: Sequence[str], split: bool, links: bool):
        wide, tall = 9.2, max(0.75, inches * rows)
        high = 0.34 + count * (0.27 + tall) + 0.46  # legend, titles and charts, numbers
        self.figure = style.Figure(figsize=(wide, high), layout="none")
        edges = {"left": 0.62 / wide, "right": 1 - 0.42 / wide, "bottom": 0.46 / high, "top": 1 - 0.61 / high}
        space = {"hspace": 0.27 / tall, "wspace": 0.07, "width_ratios": (0.76, 0.24)}
        axes = self.figure.subplots(count, 2, squeeze=False, gridspec_kw=edges | space)
        self._charts = [Chart(*both, rows) for both in axes]
        self._numbers = [_Texts(last, size=8, name="numbers") for last in axes[-1]]
        for last, label in zip(axes[-1], (xlabel, "time"), strict=True):
            last.text(0.5, -0.36 / tall, label, transform=last.transAxes, ha="center", va="center")
        self.moving = [artist for each in self.figure.axes for artist in (*each.patches, *each.collections)]
        handles: list[Artist] = [Patch(**gantt.KINDS[kind].look) for kind in kinds]
        later = {"facecolor": "#c8c8c8", "edgecolor": style.INK, "hatch": "--", "linewidth": 0}
        handles += [Patch(**later, label="lighter, with a bar: the rank's later stages")] * split
        handles += [Line2D([], [], color=style.INK, linewidth=0.6, label="message")] * links
        self.figure.legend(handles=handles, loc="upper left", ncols=7, handlelength=1.2, columnspacing=1.0)

    def show(self, titled: Sequence[tuple[str, Run]], second: float = 1.0) -> None:
        """Shows each run under its title. second: what the time axis counts, in seconds."""
        end = max(each.corners[:, 1].max() for _, each in titled)
        most = max(max(each.peaks) for _, each in titled)
        times = [each.tick_values(0, end / second) * second for each in _LOCATORS]
        times = [each[each <= end * (1 + 1e-9)] for each in times]
        for (title, each), chart in zip(titled, self._charts, strict=True):
            chart.update(title, each, end, most, times)
        for numbers, each in zip(self._numbers, times, strict=True):
            (_, wide), (tall, _) = numbers.artist.axes.get_xlim(), numbers.artist.axes.get_ylim()
            numbers.update([(x, tall + 10) for x in np.round(each / end * wide)], [f"{time / second:.6g}" for time in each])

    def parts(self) -> Iterator[Part]:
        """Yields a part for each box, or where there are many for each rank."""
        return (part for chart in self._charts for part in chart.parts())


class Chart:
    """A run on axes in pixels, with a row for each rank: when it computes what, thin lines from rank to rank for messages, and
    on further axes what it holds over time, and the most of it.
    """

    def __init__(self, bands: Axes, held: Axes, rows: int):
        self._bands, self._least, self._tall = bands, rows, bands.bbox.height
        self._wide, self._held, self._dots = bands.bbox.width, held.bbox.width, bands.figure.dpi / 72  # explorers have more
        for axes in (bands, held):
            axes.set(xlim=(0, axes.bbox.width), ylim=(self._tall, 0), xticks=[], yticks=[])
            axes.spines["left"].set_visible(False)
        held.text(0, -12, "micro-batches held, at most →", fontsize=9, va="center")
        self._ticks = [_patch(axes, "ticks", **_LINE, edgecolor="#7878784d", zorder=0) for axes in (bands, held)]
        self._links = _patch(bands, "messages", **_LINE, edgecolor=style.INK, zorder=0.5)
        self._boxes = {}
        for kind, (level, white) in product(KINDS, enumerate(LIGHTER)):
            colour = white + (1 - white) * np.array(to_rgb(gantt.KINDS[kind].colour))
            self._boxes[kind, level] = _patch(bands, f"{kind}{level}", facecolor=colour)
        self._bars = _patch(bands, "bars", facecolor=style.BLACK, zorder=2)
        self._areas = _patch(held, "areas", facecolor=style.BLUE)
        self._floors = _patch(held, "floors", **_LINE, edgecolor=style.INK)
        self._names = _Texts(bands, size=_SIZE, name="names", colour=style.BLACK)
        self._ranks = Labels(bands, size=9, left=1, name="ranks")
        self._title, self._peaks = _Texts(bands, size=10.5, left=0, name="title"), _Texts(held, size=9, left=0, name="peaks")

    def update(self, title: str, shown: Run, end: float, most: float, times: Sequence[np.ndarray]) -> None:
        """end: seconds of the whole axis; most: micro-batches that a row has room for; times: of the ticks of both axes."""
        for ticks, wide, each in zip(self._ticks, (self._wide, self._held), times, strict=True):
            x = np.round(each / end * wide)
            ticks.set_path(_lines(np.column_stack([x, 0 * x, x, 0 * x + self._tall])))
        boxes, ranks, scale = shown.boxes, range(len(shown.peaks)), self._wide / end
        row = self._tall / max(len(ranks), self._least)
        room = (shown.corners[:, 1] - shown.corners[:, 0]) * scale
        corners = np.round(shown.corners * (scale, scale, row, row))
        corners[:, 1] = np.maximum(corners[:, 1], corners[:, 0] + 1) - (room >= _PARTED)  # a gap
        level = np.minimum(boxes.level, len(LIGHTER) - 1)
        for (kind, k), patch in self._boxes.items():
            patch.set_path(path := joined(corners[(boxes.kind == kind) & (level == k)]))
            patch.set_visible(path is not NOTHING)
        deep = level * (room >= _BARRED)
        bars = [corners[deep >= k][:, [0, 1, 3, 3]] - (0, 0, 3 * k - 1, 3 * k - 3) for k in range(1, len(LIGHTER))]
        self._bars.set_path(joined(np.concatenate(bars)))  # as many in a box as its rank has stages before it
        self._links.set_path(_lines(shown.messages * (scale, row, scale, row)))
        self._links.set_visible(len(shown.messages) <= _MOST_MESSAGES)
        self._write(boxes, corners, room - 1)
        self._ranks.update([(-8, (rank + 0.5) * row) for rank in ranks], [f"rank {rank}" for rank in ranks])
        self._title.update([(0, -12)], [title])
        self._hold(shown, end, most, row)
        self._drawn = shown, corners, row

    def parts(self) -> Iterator[Part]:
        """Yields those of the run that was drawn last."""
        (shown, corners, row), says = self._drawn, "rank {}, {} {}: from {:.4g} to {:.4g}".format
        b = shown.boxes
        if len(corners) > _MOST_PARTS:
            corners = [(0, self._wide, rank * row, (rank + 1) * row) for rank in range(len(shown.peaks))]
            texts = [f"rank {rank}, most micro-batches held: {peak:.3g}" for rank, peak in enumerate(shown.peaks)]
        else:
            names = [gantt.KINDS[kind].label[2:] for kind in b.kind]
            texts = map(says, b.rank, names, b.microbatch, *shown.corners.T[:2])
        return (Part(self._bands, *each, text) for each, text in zip(corners, texts, strict=True))

    def _write(self, boxes: np.recarray, corners: np.ndarray, room: np.ndarray) -> None:
        """Names the boxes that have room, in pixels: F3, or 3."""
        high = (corners[:, 3] - corners[:, 2] >= 1.25 * _SIZE * self._dots) & (len(room) <= _MOST_NAMES)
        named = {}
        for kind, i, box, pixels in zip(boxes.kind[high], boxes.microbatch[high], corners[high], room[high], strict=True):
            fits = [text for text in (f"{kind}{i}", f"{i}") if width(text, _SIZE) * self._dots <= pixels]
            named |= {tuple(box.reshape(2, 2).mean(axis=1)): text for text in fits[:1]}
        self._names.update(list(named), list(named.values()))

    def _hold(self, shown: Run, end: float, most: float, row: float) -> None:
        """Draws areas on floors, and writes the peaks."""
        rank, since, until, count = shown.held.T
        floors = np.round((np.arange(len(shown.peaks)) + 0.5 + _BAND / 2) * row)
        x, floor = np.round(np.stack([since, until]) / end * self._held), floors[rank.astype(int)]
        self._areas.set_path(joined(np.column_stack([*x, floor - np.round(count / most * _BAND * row), floor])))
        self._floors.set_path(_lines(np.column_stack([0 * floors, floors, 0 * floors + self._held, floors])))
        self._peaks.update([(self._held + 6, floor - row / 2 + 2) for floor in floors], [f"{peak:.3g}" for peak in shown.peaks])


def _patch(axes: Axes, name: str, **look) -> PathPatch:
    return axes.add_patch(PathPatch(NOTHING, **{"linewidth": 0, "antialiased": False, "gid": name} | look))


def _lines(ends: np.ndarray) -> Path:
    """One path of them all, from x, y of the one end and of the other."""
    return Path(ends.reshape(-1, 2), np.tile([Path.MOVETO, Path.LINETO], len(ends)))
