"""A pipeline schedule that has run, as a picture: a band a rank, and beside it the activations that the rank holds.

Charts lie under each other on one time axis. All that depends on the data moves, also the axis's numbers: an explorer never
draws the rest again. Places are pixels of the axes, so that edges are sharp without antialiasing.
"""

import functools
from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, PathPatch
from matplotlib.path import Path
from matplotlib.ticker import MaxNLocator

from manyranks.parallel.pipeline.actions import KINDS
from manyranks.show import gantt, style
from manyranks.show.labels import Labels, width, word
from manyranks.show.pipeline_run import Boxes, Run

LIGHTER = (0.0, 0.45, 0.65, 0.8)  # share of white for a rank's first, second, … stage; the last look is all further ones'
_BAND = 0.84  # of a row
_SIZE = 7.0  # of names, in points
_MOST_NAMES, _MOST_MESSAGES = 500, 700
_PARTED, _BARRED = 4, 6  # pixels from which on boxes have a gap between them, and bars that tell a rank's stages apart
_NOTHING = Path(np.empty((0, 2)))
_BOX = np.array([Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY], Path.code_type)
_MARGIN, _GAP, _RIGHT = 0.62, 0.28, 0.42  # inches: for the ranks' names, between the columns, for the peaks
_TOP, _TITLE, _BOTTOM = 0.34, 0.27, 0.46  # inches: for the legend, above each chart, under the last one
_HELD = 0.24  # of the width, for what is held
_Texts = functools.partial(Labels, outline=word)  # new ones with every move


class Charts:
    """A figure of `count` charts, of so many rows each at least; `update` shows as many runs, in any figure or explorer.

    kinds: those of the legend. split: whether it explains a rank's several stages; links: and messages.
    """

    def __init__(self, count: int, rows: int, inches: float, xlabel: str, kinds: Sequence[str], split: bool, links: bool):
        width, tall = 9.2, max(0.75, inches * rows)
        height = _TOP + count * (_TITLE + tall) + _BOTTOM
        self.figure = style.Figure(figsize=(width, height), layout="none")
        self.figure.legend(
            handles=_handles(kinds, split, links), loc="upper left", ncols=7, handlelength=1.2, columnspacing=1.0
        )
        wide = width - _MARGIN - _GAP - _RIGHT
        self._bands, self._held = [], []
        for k in range(count):
            below = height - _TOP - (k + 1) * (_TITLE + tall)
            places = (_MARGIN, (1 - _HELD) * wide), (width - _RIGHT - _HELD * wide, _HELD * wide)
            both = [self.figure.add_axes((x / width, below / height, w / width, tall / height)) for x, w in places]
            self._bands.append(Bands(both[0], rows))
            self._held.append(Held(both[1], rows))
        last = self._bands[-1].axes, self._held[-1].axes
        self._ticks = [Ticks([chart.axes for chart in column], size) for column, size in ((self._bands, 9), (self._held, 3))]
        for axes, label in zip(last, (xlabel, "time"), strict=True):
            axes.text(0.5, -0.36 / tall, label, transform=axes.transAxes, ha="center", va="center")

    @property
    def moving(self) -> list[Artist]:
        parts = [*self._ticks, *self._bands, *self._held]
        return [artist for part in parts for artist in part.moving]

    def update(self, titled: Sequence[tuple[str, Run]], second: float = 1.0) -> None:
        """Shows each run under its title. second: what the time axis counts, in seconds."""
        end = max(each.boxes.finished.max() for _, each in titled)
        most = max(max(each.peaks) for _, each in titled)
        for ticks in self._ticks:
            ticks.update(end, second)
        for (title, each), bands, held in zip(titled, self._bands, self._held, strict=True):
            bands.update(title, each, end)
            held.update(each, end, most)


class Ticks:
    """Lines and numbers of one time axis for axes under each other; the numbers are under the last."""

    def __init__(self, column: Sequence[Axes], most: int):
        self._size = column[0].bbox.width, column[0].bbox.height
        look = {"edgecolor": "#7878784d", "linewidth": 0.6, "zorder": 0, "gid": "ticks"}
        self._lines = [axes.add_patch(PathPatch(_NOTHING, **look)) for axes in column]
        self._numbers = _Texts(column[-1], size=8, name="numbers")
        self._locator = MaxNLocator(most, steps=[1, 2, 2.5, 5, 10])

    @property
    def moving(self) -> list[Artist]:
        return [*self._lines, self._numbers.artist]

    def update(self, end: float, second: float) -> None:
        wide, tall = self._size
        times = [time for time in self._locator.tick_values(0, end / second) if time * second <= end * (1 + 1e-9)]
        x = np.round(np.array(times) * second / end * wide)
        path = _lines(np.column_stack([x, np.zeros(len(x)), x, np.full(len(x), tall)]))
        for lines in self._lines:
            lines.set_path(path)
        self._numbers.update([(at, tall + 10) for at in x], [f"{time:.6g}" for time in times])


class Rows:
    """Axes in pixels, with a row for each rank."""

    def __init__(self, axes: Axes, rows: int):
        self.axes, self._least = axes, rows
        self.wide, self.tall = axes.bbox.width, axes.bbox.height
        axes.set(xlim=(0, self.wide), ylim=(self.tall, 0), xticks=[], yticks=[])
        axes.spines["left"].set_visible(False)

    def height(self, ranks: int) -> float:
        """Of a row."""
        return self.tall / max(ranks, self._least)


class Bands(Rows):
    """What each rank computes and when; thin lines from rank to rank are messages."""

    def __init__(self, axes: Axes, rows: int):
        super().__init__(axes, rows)
        looks = product(KINDS, range(len(LIGHTER)))
        self._patches = {look: axes.add_patch(_patch(*look)) for look in looks}
        self._links = axes.add_patch(PathPatch(_NOTHING, edgecolor=style.INK, linewidth=0.6, facecolor="none", zorder=0.5))
        self._bars = axes.add_patch(PathPatch(_NOTHING, facecolor=style.BLACK, linewidth=0, antialiased=False, zorder=2))
        self._links.set_gid("messages")
        self._bars.set_gid("bars")
        self._names = _Texts(axes, size=_SIZE, name="names", colour=style.BLACK)
        self._ranks = Labels(axes, size=9, left=1, name="ranks")
        self._title = _Texts(axes, size=10.5, left=0, name="title")

    @property
    def moving(self) -> list[Artist]:
        labels = (self._names, self._ranks, self._title)
        return [self._links, *self._patches.values(), self._bars, *(each.artist for each in labels)]

    def update(self, title: str, shown: Run, end: float) -> None:
        """end: seconds of the whole axis."""
        boxes, ranks = shown.boxes, len(shown.held)
        looks = np.minimum(boxes.level, len(LIGHTER) - 1)
        row = self.height(ranks)
        room = (boxes.finished - boxes.started) / end * self.wide
        left = np.round(boxes.started / end * self.wide)
        right = np.maximum(np.round(boxes.finished / end * self.wide), left + 1)
        right -= room >= _PARTED  # a gap
        first = (boxes.rank + (1 - _BAND) / 2) * row
        top, bottom = (np.round(first + share * _BAND * row) for share in (boxes.top, boxes.bottom))
        corners = np.column_stack([left, right, top, bottom])
        for (kind, level), patch in self._patches.items():
            own = corners[(boxes.kind == kind) & (looks == level)]
            patch.set_path(_rectangles(own))
            patch.set_visible(len(own) > 0)
        self._bars.set_path(_rectangles(np.concatenate(list(_marks(corners, looks * (room >= _BARRED))))))
        self._links.set_path(_lines(_ends(shown.messages, self.wide / end, row)))
        self._write(boxes, corners, room - 1)
        self._ranks.update([(-8, (rank + 0.5) * row) for rank in range(ranks)], [f"rank {rank}" for rank in range(ranks)])
        self._title.update([(0, -12)], [title])

    def _write(self, boxes: Boxes, corners: np.ndarray, room: np.ndarray) -> None:
        """Names the boxes that have room, in pixels: F3, or 3."""
        dots = self.axes.figure.dpi / 72
        middles = np.column_stack([corners[:, :2].mean(axis=1), corners[:, 2:].mean(axis=1)])
        high = corners[:, 3] - corners[:, 2] >= 1.25 * _SIZE * dots
        places, texts = [], []
        if len(room) <= _MOST_NAMES:
            for kind, i, place, pixels in zip(*(c[high] for c in (boxes.kind, boxes.microbatch, middles, room)), strict=True):
                text = next((text for text in (f"{kind}{i}", f"{i}") if width(text, _SIZE) * dots <= pixels), "")
                if text:
                    texts.append(text)
                    places.append(place)
        self._names.update(places, texts)


class Held(Rows):
    """What each rank holds over time, and the most of it."""

    def __init__(self, axes: Axes, rows: int):
        super().__init__(axes, rows)
        self._areas = axes.add_patch(PathPatch(_NOTHING, facecolor=style.BLUE, linewidth=0, antialiased=False, gid="areas"))
        self._floors = axes.add_patch(PathPatch(_NOTHING, edgecolor=style.INK, linewidth=0.6, facecolor="none"))
        self._peaks = _Texts(axes, size=9, left=0, name="peaks")
        self._title = Labels(axes, size=9, left=0)
        self._title.update([(0, -12)], ["micro-batches held, at most →"])

    @property
    def moving(self) -> list[Artist]:
        return [self._areas, self._floors, self._peaks.artist, self._title.artist]

    def update(self, shown: Run, end: float, most: float) -> None:
        """most: micro-batches that a row has room for."""
        row, ranks = self.height(len(shown.held)), range(len(shown.held))
        floors = np.round((np.arange(len(ranks)) + 0.5 + _BAND / 2) * row)
        corners = []
        for steps, floor in zip(shown.held, floors, strict=True):
            when, count = np.vstack([steps, (end, 0)]).T
            x = np.round(when / end * self.wide)
            y = floor - np.round(count[:-1] / most * _BAND * row)
            corners.append(np.column_stack([x[:-1], x[1:], y, np.full(len(y), floor)]))
        self._areas.set_path(_rectangles(np.concatenate(corners)))
        self._floors.set_path(_lines(np.column_stack([0 * floors, floors, 0 * floors + self.wide, floors])))
        self._peaks.update([(self.wide + 6, floor - row / 2 + 2) for floor in floors], [f"{peak:.3g}" for peak in shown.peaks])


def _patch(kind: str, level: int) -> PathPatch:
    return PathPatch(_NOTHING, facecolor=_colour(kind, level), linewidth=0, antialiased=False, zorder=1, gid=f"{kind}{level}")


def _colour(kind: str, level: int) -> tuple[float, ...]:
    return tuple(part + (1 - part) * LIGHTER[level] for part in to_rgb(gantt.KINDS[kind].colour))


def _marks(corners: np.ndarray, level: np.ndarray) -> Iterator[np.ndarray]:
    """As many black bars in a box as its rank has stages before this one."""
    for k in range(1, len(LIGHTER)):
        left, right, _, bottom = corners[level >= k].T
        yield np.column_stack([left, right, bottom - 3 * k + 1, bottom - 3 * k + 3])


def _ends(messages: np.ndarray, scale: float, row: float) -> np.ndarray:
    """Where the lines of messages begin and end, from one band's edge to another's; none where they would be a thicket."""
    shown = messages if len(messages) <= _MOST_MESSAGES else messages[:0]
    source, started, to, finished = shown.T
    edge = _BAND / 2 * np.sign(to - source)
    return np.column_stack([started * scale, (source + 0.5 + edge) * row, finished * scale, (to + 0.5 - edge) * row])


def _rectangles(corners: np.ndarray) -> Path:
    """One path of them all, from left, right, top and bottom of each."""
    left, right, top, bottom = corners.T
    points = np.stack([left, top, right, top, right, bottom, left, bottom, left, top], axis=1)
    return Path(points.reshape(-1, 2), np.tile(_BOX, len(corners)))


def _lines(ends: np.ndarray) -> Path:
    """One path of them all, from x, y of the one end and of the other."""
    return Path(ends.reshape(-1, 2), np.tile(_BOX[:2], len(ends)))


def _handles(kinds: Sequence[str], split: bool, links: bool) -> list[Artist]:
    handles: list[Artist] = [Patch(facecolor=gantt.KINDS[kind].colour, label=gantt.KINDS[kind].label) for kind in kinds]
    if split:
        look = {"facecolor": "#c8c8c8", "edgecolor": style.INK, "hatch": "--", "linewidth": 0}
        handles.append(Patch(**look, label="lighter, with a bar: the rank's later stages"))
    if links:
        handles.append(Line2D([], [], color=style.INK, linewidth=0.6, label="message"))
    return handles
