"""Charts of ranks over time: boxes in rows. Places are pixels of a page, so that edges are sharp without antialiasing.

All of a chart that depends on the data moves, also the axis's numbers: an explorer never draws the rest again.
"""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.patches import Patch, PathPatch
from matplotlib.path import Path
from matplotlib.ticker import MaxNLocator

from manyranks.show import style
from manyranks.show.bars import NOTHING, joined
from manyranks.show.labels import Labels, width, word
from manyranks.timeline.spans import COMMUNICATION, COMPUTE, Timeline


class Kind(NamedTuple):
    """The look of a kind of spans.

    top, bottom: shares of its part of the band, so that I and W differ in gray print, too
    """

    label: str
    color: str
    hatch: str | None = None
    top: float = 0.0
    bottom: float = 1.0

    @property
    def look(self) -> dict:
        """The properties of a Patch, which with its label is a legend's key."""
        return {"facecolor": self.color, "hatch": self.hatch, "edgecolor": "white", "linewidth": 0, "label": self.label}


KINDS = {
    COMPUTE: Kind("compute", style.BLUE),
    "F": Kind("F forward", "#56B4E9"),
    "B": Kind("B backward", style.GREEN),
    "I": Kind("I input gradient", style.YELLOW, bottom=0.65),
    "W": Kind("W weight gradient", style.PINK, top=0.35),
    COMMUNICATION: Kind("communication", style.ORANGE, "////"),
}
BAND, _BETWEEN = 0.84, 0.04  # of a row; between compute and communication
LINE = {"facecolor": "none", "linewidth": 0.6, "antialiased": True}
_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
BOX = [("key", "U13"), ("name", object), ("corners", float, 4)]
_MOST_LANES = 6  # further transfers at the same time share the last lane
_MOST_NAMES, _SIZE, _POINT = 500, 7.0, style.DOTS / 72  # of names: points, and a point's pixels
Texts = functools.partial(Labels, outline=word)  # new ones with every move


@style.styled
def timeline(recorded: Timeline, title: str = "", until: float = 0.0) -> style.Figure:
    """Draws compute and communication of every rank over time; pipeline actions F, B, I and W each in its own color.

    until: seconds that the axis reaches to at least, so that several pictures have one scale.
    """
    return chart(title, [f"rank {rank}" for rank in recorded.ranks], boxes(recorded), until).axes.figure


class Clock:
    """Axes with rows and a time scale that moves: lines at times and, below a figure's last axes, numbers.

    most: numbers
    rows: that there is room for also where fewer are shown
    """

    def __init__(self, axes: Axes, most: int, rows: int):
        self.axes, self.wide, self.tall, self._rows = axes, axes.bbox.width, axes.bbox.height, rows
        axes.set(xlim=(0, self.wide), ylim=(self.tall, 0), xticks=[], yticks=[])
        axes.spines["left"].set_visible(False)
        self._locator = MaxNLocator(most, steps=[1, 2, 2.5, 5, 10])
        self._ticks = patch(axes, "ticks", **LINE, edgecolor="#7878784d", zorder=0)
        self._numbers = Texts(axes, size=8, name="numbers")

    @property
    def moving(self) -> list[Artist]:
        return sorted((*self.axes.patches, *self.axes.collections), key=Artist.get_zorder)

    def move(self, rows: int, end: float, second: float) -> None:
        """Gives the axis its end, in seconds.

        second: what its numbers count, in seconds
        """
        self.pixels = np.repeat([self.wide / end, self.tall / max(rows, self._rows)], 2)  # of left, right, top and bottom
        times = self._locator.tick_values(0, end / second)
        times = times[times <= end / second * (1 + 1e-9)]
        x = np.round(times * second / end * self.wide)
        self._ticks.set_path(lines(np.column_stack([x, 0 * x, x, 0 * x + self.tall])))
        if self.axes.get_subplotspec().is_last_row():
            self._numbers.write([(each, self.tall + 10) for each in x], [f"{time:.6g}" for time in times])


class Gantt(Clock):
    """A chart of boxes over time, for a figure or for an explorer: `moving` are its artists, `update` moves them.

    looks: of boxes with a key. A box shorter than a pixel is widened to one, as long as such boxes take no more than a quarter
    of a row, and else as far as they take an eighth: what a large chart shows of them is their share.
    """

    def __init__(self, axes: Axes, looks: dict[str, Kind] = KINDS, rows: int = 1):
        super().__init__(axes, 9, rows)
        self._boxes = {key: patch(axes, key, **kind.look) for key, kind in looks.items()}
        self.names = Texts(axes, size=_SIZE, name="names", color=style.BLACK)
        self._ranks = Labels(axes, size=9, left=1, name="ranks")
        self._title = Texts(axes, size=9, left=0, name="title")

    def update(self, title: str, rows: Sequence[str], boxes: np.recarray, end: float, second: float = 1.0) -> np.ndarray:
        """Shows boxes, as `boxes` returns them, in rows of these names, and returns their corners in pixels."""
        self.move(len(rows), end, second)
        corners = boxes.corners * self.pixels
        room = corners[:, 1] - corners[:, 0]
        short = np.bincount(boxes.corners[room < 1, 2].astype(int)).max(initial=0)
        least = 1.0 if 4 * short <= self.wide else self.wide / 8 / short
        corners = np.round(corners) if least == 1 else corners
        corners[:, 0] = np.minimum(corners[:, 0], self.wide - 1)  # what ends the axis is seen, too
        corners[:, 1::2] = np.maximum(corners[:, 1::2], corners[:, ::2] + (least, 1))
        corners[:, 1] -= room >= 4  # a gap between boxes that have room for one
        for key, drawn in self._boxes.items():
            drawn.set_path(path := joined(corners[boxes.key == key]))
            drawn.set_visible(path is not NOTHING)
            drawn.set_antialiased(least < 1)
            drawn.set_snap(None if least == 1 else False)  # to whole pixels would swallow what is narrower than one
        self._write(boxes.name, corners, room - 1)
        shown = range(0, len(rows), int(-(-14 // self.pixels[2])))  # 14 pixels for each name
        self._ranks.write([(-8, (row + 0.5) * self.pixels[2]) for row in shown], [rows[row] for row in shown])
        self._title.write([(0, -12)], [title] if title else [])
        return corners

    def _write(self, names: np.ndarray, corners: np.ndarray, room: np.ndarray) -> None:
        """Names the boxes that have room, in pixels."""
        high, written = (corners[:, 3] - corners[:, 2] >= 1.25 * _SIZE * _POINT) & (names != ""), {}
        if np.count_nonzero(names != "") <= _MOST_NAMES:
            middles = (corners[:, ::2] + corners[:, 1::2]) / 2
            for texts, middle, pixels in zip(names[high], middles[high].tolist(), room[high], strict=True):
                fits = [text for text in texts.split("|") if width(text, _SIZE) * _POINT <= pixels]
                written |= {tuple(middle): text for text in fits[:1]}
        self.names.write(list(written), list(written.values()))


def chart(title: str, rows: Sequence[str], boxes: np.recarray, until: float, inches: float = 0.5) -> Gantt:
    """A figure of one chart.

    until: seconds that it reaches to at least
    inches: of a row
    """
    end = max(until, boxes.corners[:, 1].max(initial=0.0)) or 1.0
    second, name = unit(end)
    left = 0.2 + max((width(row, 9) for row in rows), default=0) / 72
    keys = [Patch(**kind.look) for key, kind in KINDS.items() if key in boxes.key]
    gantt = Gantt(frame(min(inches * max(len(rows), 1), 5.0), [f"time ({name})"], keys, left).axes[0])
    gantt.update(title, rows, boxes, end, second)
    return gantt


def frame(
    tall: float, labels: Sequence[str], keys: Sequence[Artist], left: float = 0.62, count: int = 1, wide: float = 9.2
) -> style.Figure:
    """A figure for `count` charts of that many inches, `left` from its edge, and a legend.

    labels: of time, below the last
    """
    columns, more = (7, 0.0) if wide > 8 else (4, 0.2)  # a narrow legend has a line more
    high = 0.34 + more + count * (0.27 + tall) + 0.46  # legend, titles and charts, numbers
    figure = style.Figure(figsize=(wide, high), layout="none")
    edges = {"left": left / wide, "right": 1 - 0.42 / wide, "bottom": 0.46 / high, "top": 1 - (0.61 + more) / high}
    space = {"hspace": 0.27 / tall, "wspace": 0.07, "width_ratios": (0.76, 0.24)[: len(labels)]}
    *_, last = figure.subplots(count, len(labels), squeeze=False, gridspec_kw=edges | space)
    for axes, label in zip(last, labels, strict=True):
        axes.set_xlabel(label, labelpad=20)
    figure.legend(handles=keys, loc="upper left", ncols=columns, handlelength=1.2, columnspacing=1.0)
    return figure


def boxes(timeline: Timeline) -> np.recarray:
    """Returns what Gantt shows of each span, rank by rank in order of start.

    key: its look's; compute whose name begins with F, B, I or W has the look of a pipeline schedule's action
    name: the action's, none for others; one may have a longer and a shorter, "F3|3": the first that has room is written
    corners: from and to in seconds, top and bottom in rows
    Where nothing communicates compute has the whole band.
    """
    found, lanes = [], []
    high = (BAND - _BETWEEN) / 2 if any(span.kind == COMMUNICATION for span in timeline.spans) else BAND
    for row, rank in enumerate(timeline.ranks):
        ends = [-math.inf] * _MOST_LANES
        for _, kind, name, started, finished in timeline.of(rank):
            key, top = kind, row + (1 - BAND) / 2
            if kind == COMMUNICATION:
                top += high + _BETWEEN
                lanes.append(next((k for k, end in enumerate(ends) if end <= started), _MOST_LANES - 1))
                ends[lanes[-1]] = finished
            elif name[:1] in KINDS:
                key = name[0]
            look = KINDS[key]
            corners = started, finished, top + look.top * high, top + look.bottom * high
            found.append((key, name if key in "FBIW" else "", corners))
    made, lane = np.array(found, BOX).view(np.recarray), high / (max(lanes, default=0) + 1)
    sent, down = made.key == COMMUNICATION, lane * np.array(lanes)
    made.corners[sent, 2] += down
    made.corners[sent, 3] += down + lane * (0.85 if any(lanes) else 1) - high
    return made


def unit(end: float) -> tuple[float, str]:
    """Returns what an axis that reaches to so many seconds counts in, and its name."""
    return next((each for each in _UNITS if end >= each[0]), _UNITS[-1])


def patch(axes: Axes, name: str, **look) -> PathPatch:
    """A part of a chart that is drawn as one path, with sharp edges."""
    return axes.add_patch(PathPatch(NOTHING, **{"linewidth": 0, "antialiased": False, "gid": name} | look))


def lines(ends: np.ndarray) -> Path:
    """Makes one path of them all, from x, y of the one end and of the other."""
    return Path(ends.reshape(-1, 2), np.tile([Path.MOVETO, Path.LINETO], len(ends)))
