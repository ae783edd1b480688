"""A Timeline as a picture: one band a rank, compute in its upper half, communication in its lower one."""

import functools
import math
from typing import NamedTuple

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.patches import Patch, PathPatch
from matplotlib.path import Path
from matplotlib.textpath import TextPath
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import Affine2D

from manyranks.show import style
from manyranks.show.labels import Words
from manyranks.timeline.spans import COMMUNICATION, COMPUTE, Span, Timeline


class Kind(NamedTuple):
    """How its spans look. top, bottom: shares of its part of the band, so that I and W differ in grey print as well."""

    label: str
    colour: str
    hatch: str = ""
    top: float = 0.0
    bottom: float = 1.0


KINDS = {
    COMPUTE: Kind("compute", style.BLUE),
    "F": Kind("F forward", "#56B4E9"),
    "B": Kind("B backward", style.GREEN),
    "I": Kind("I input gradient", style.YELLOW, bottom=0.65),
    "W": Kind("W weight gradient", style.PINK, top=0.35),
    COMMUNICATION: Kind("communication", style.ORANGE, "////"),
}
_ACTIONS = frozenset("FBIW")
UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
_ENDS = (1, 1.2, 1.4, 1.6, 1.8, 2, 2.5, 3, 3.5, 4, 4.5, 5, 6, 7, 8, 9, 10)  # of the axis, times a power of ten
_BAND, _MIDDLE = 0.42, 0.02  # from a rank's row to the edge of its band; half the space between its parts
_MOST_LANES = 6  # further transfers at the same time share the last lane
_MOST_LABELS = 8  # of rows
_MOST_NAMES, _NAME_POINTS = 400, 7.0
_RECTANGLE = np.array([Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY], Path.code_type)


@style.styled
def timeline(recorded: Timeline, title: str = "", until: float = 0.0) -> style.Figure:
    """Draws compute and communication of every rank over time; pipeline actions F, B, I and W each in its own colour.

    until: seconds that the axis reaches to at least, so that several pictures have one scale.
    """
    fig, (axes,) = style.figure(height=1.3 + min(0.5 * max(len(recorded.ranks), 1), 5.0))
    Gantt(axes, title).update(recorded, until)
    return fig


class Frame(NamedTuple):
    """What a chart's axes and legend depend on. end: seconds; unit: the axis counts in so many seconds of this name."""

    end: float
    unit: tuple[float, str]
    ranks: tuple[int, ...]
    kinds: tuple[str, ...]


class Boxes(NamedTuple):
    """A row for each span: the key of its kind, the row of its rank, its times in seconds, its name."""

    kind: np.ndarray
    row: np.ndarray
    started: np.ndarray
    finished: np.ndarray
    name: np.ndarray

    def of(self, kind: str) -> "Boxes":
        chosen = self.kind == kind
        return Boxes(*(column[chosen] for column in self))


class Gantt:
    """A chart of a Timeline on `axes`, for a figure or for an explorer: `moving` are its boxes, `update` moves them.

    Compute whose name begins with F, B, I or W is drawn as that action of a pipeline schedule, with its name where there is
    room. Where nothing communicates compute has the whole band. A span shorter than a pixel is widened to one, as long as
    such spans take no more than an eighth of a band: what a large chart shows of communication is its share.
    """

    def __init__(self, axes: Axes, title: str = ""):
        self.axes = axes
        self._frame: Frame | None = None
        self._patches = {key: axes.add_patch(_patch(kind, gid=key)) for key, kind in KINDS.items()}
        self._names = Words([], facecolor=style.BLACK, linewidth=0, offset_transform=axes.transData)
        self._names.set_transform(Affine2D().scale(1 / 72) + axes.figure.dpi_scale_trans)
        axes.add_collection(self._names, autolim=False)
        axes.set_title(title, pad=24)  # the legend is under it
        axes.grid(axis="y", visible=False)
        axes.xaxis.set_major_locator(MaxNLocator(7, steps=[1, 2, 2.5, 5, 10]))
        self.update(Timeline(()))

    @property
    def moving(self) -> list[Artist]:
        return [*self._patches.values(), self._names]

    def update(self, timeline: Timeline, until: float = 0.0) -> None:
        """Shows this timeline on an axis that reaches to its end, or to `until` seconds if that is more: to compare charts."""
        ranks, boxes = _boxes(timeline)
        end = _round_up(max(until, boxes.finished.max(initial=0.0)))
        unit = next((unit for unit in UNITS if end >= unit[0]), UNITS[-1]) if end else UNITS[0]
        frame = Frame(end or 1.0, unit, ranks, tuple(key for key in KINDS if key in boxes.kind))
        if frame != self._frame:
            self._draw_frame(frame)
        self._move(boxes)

    @style.styled  # explorers call update when no style is set
    def _draw_frame(self, frame: Frame) -> None:
        """Draws anew what differs from the frame that is there: texts take most of the time."""
        before, self._frame = self._frame, frame
        second, unit = frame.unit
        self.axes.set(xlim=(0, frame.end / second), xlabel=f"time ({unit})")
        if before is None or before.ranks != frame.ranks:
            rows = range(0, len(frame.ranks), -(-len(frame.ranks) // _MOST_LABELS) or 1)
            self.axes.set_yticks(rows, [f"rank {frame.ranks[row]}" for row in rows])
            self.axes.set_ylim(max(len(frame.ranks), 1) - 0.5, -0.5)
        if before is None or before.kinds != frame.kinds:
            handles = [_patch(KINDS[key], Patch, label=KINDS[key].label) for key in frame.kinds]
            handles = handles or [Patch(alpha=0, label=" ")]  # keeps the legend's place
            place = {"loc": "lower left", "bbox_to_anchor": (0, 1), "borderaxespad": 0.2, "borderpad": 0.2}
            self.axes.legend(handles=handles, ncols=len(KINDS), handlelength=1.4, columnspacing=1.2, **place)

    def _move(self, boxes: Boxes) -> None:
        second, pixel = self._frame.unit[0], self._frame.end / self.axes.bbox.width
        least = _least_pixels(boxes, self.axes.bbox.width)
        named: list[tuple[Boxes, np.ndarray, np.ndarray, np.ndarray]] = []
        for key, patch in self._patches.items():
            of = boxes.of(key)
            top, bottom = self._edges(key, of)
            right = np.maximum(of.finished, of.started + least * pixel)
            right -= np.clip(0.25 * ((right - of.started) / pixel - 2), 0, 1) * pixel  # a gap, cheaper than an outline
            patch.set_path(_rectangles(of.started / second, right / second, top, bottom))
            patch.set_snap(None if least == 1 else False)  # to whole pixels would swallow what is narrower than one
            if key in _ACTIONS:
                named.append((of, (of.started + right) / 2 / second, (top + bottom) / 2, (right - of.started) / pixel))
        self._write(named)

    def _edges(self, key: str, of: Boxes) -> tuple[np.ndarray, np.ndarray]:
        """Top and bottom of each box, in rows."""
        if key == COMMUNICATION:
            lanes = np.minimum(_lanes(of), _MOST_LANES - 1)
            height = (_BAND - _MIDDLE) / (lanes.max(initial=0) + 1)
            top = of.row + _MIDDLE + height * lanes
            return top, top + height * (0.85 if lanes.any() else 1)
        height = _BAND + (-_MIDDLE if COMMUNICATION in self._frame.kinds else _BAND)
        return of.row - _BAND + KINDS[key].top * height, of.row - _BAND + KINDS[key].bottom * height

    def _write(self, named: list[tuple[Boxes, np.ndarray, np.ndarray, np.ndarray]]) -> None:
        """Puts the names of these boxes, with centres and widths in pixels, where they have room."""
        texts, outlines, places = [], [], []
        row = self.axes.bbox.height / max(len(self._frame.ranks), 1)
        if sum(len(of.name) for of, *_ in named) <= _MOST_NAMES and row * (_BAND - _MIDDLE) >= 1.4 * _NAME_POINTS:
            dots = self.axes.figure.dpi / 72
            for of, *where in named:
                for name, x, y, pixels in zip(of.name, *where, strict=True):
                    outline, points = _text(name)
                    if points * dots + 2 <= pixels:
                        texts.append(name)
                        outlines.append(outline)
                        places.append((x, y))
        self._names.texts = texts
        self._names.set(paths=outlines, offsets=np.array(places).reshape(-1, 2))


def _patch(kind: Kind, shape: type[Patch] = PathPatch, **options) -> Patch:
    path = (_rectangles(*np.empty((4, 0))),) if shape is PathPatch else ()
    return shape(*path, facecolor=kind.colour, edgecolor="white", linewidth=0, hatch=kind.hatch or None, **options)


def _rectangles(left: np.ndarray, right: np.ndarray, top: np.ndarray, bottom: np.ndarray) -> Path:
    """One path of them all: three times as fast as a collection of as many polygons."""
    corners = np.stack([left, top, right, top, right, bottom, left, bottom, left, top], axis=1)
    return Path(corners.reshape(-1, 2), np.tile(_RECTANGLE, len(left)))


def _boxes(timeline: Timeline) -> tuple[tuple[int, ...], Boxes]:
    """The ranks from top to bottom, and the spans in columns."""
    columns = zip(*timeline.spans, strict=True) if timeline.spans else ((),) * len(Span._fields)
    rank, kind, name, started, finished = columns
    keys = [n[0] if k == COMPUTE and n[:1] in _ACTIONS else k for k, n in zip(kind, name, strict=True)]
    ranks, row = np.unique(np.array(rank, int), return_inverse=True)
    times = np.array(started, float), np.array(finished, float)
    return tuple(ranks.tolist()), Boxes(np.array(keys, str), row, *times, np.array(name, object))


def _lanes(boxes: Boxes) -> np.ndarray:
    """For each box the first lane of its row that is free when it starts."""
    lanes, row_before, ends = np.zeros(len(boxes.row), int), -1, []
    order = np.lexsort((boxes.finished, boxes.started, boxes.row))
    rows, starts, finishes = (column[order].tolist() for column in (boxes.row, boxes.started, boxes.finished))
    for index, row, started, finished in zip(order.tolist(), rows, starts, finishes, strict=True):
        if row != row_before:
            row_before, ends = row, []
        for lane, end in enumerate(ends):  # noqa: B007
            if end <= started:
                break
        else:
            lane = len(ends)
        ends[lane : lane + 1] = [finished]
        lanes[index] = lane
    return lanes


def _least_pixels(boxes: Boxes, width: float) -> float:
    """How wide every box is at least, so that boxes of that width take no more than an eighth of a row, and 1 is enough."""
    most = np.bincount(boxes.row).max(initial=1)
    return min(1.0, width / 8 / most)


def _round_up(end: float) -> float:
    """The next end of an axis: one that stays where it is while a control moves the data a little."""
    if end <= 0:
        return 0.0
    power = 10.0 ** math.floor(math.log10(end))
    return next(power * step for step in _ENDS if power * step >= end * (1 - 1e-9))


@functools.cache
def _text(name: str) -> tuple[Path, float]:
    """The outline of a name around (0, 0), and its width, in points; drawn as a path it takes a tenth of a Text's time."""
    outline = TextPath((0, 0), name, size=_NAME_POINTS)
    box = outline.get_extents()
    return outline.transformed(Affine2D().translate(-(box.x0 + box.x1) / 2, -(box.y0 + box.y1) / 2)), box.width
