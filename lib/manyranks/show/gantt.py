"""A Timeline as a picture: one band a rank, compute in its upper half, communication in its lower one."""

import math
from collections import defaultdict
from typing import NamedTuple

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.patches import Patch, PathPatch
from matplotlib.path import Path
from matplotlib.ticker import MaxNLocator

from manyranks.show import style
from manyranks.show.labels import Labels, width, word
from manyranks.timeline.spans import COMMUNICATION, COMPUTE, Timeline


class Kind(NamedTuple):
    """How its spans look. top, bottom: shares of its part of the band, so that I and W differ in grey print as well."""

    label: str
    colour: str
    hatch: str | None = None
    top: float = 0.0
    bottom: float = 1.0

    @property
    def key(self) -> Patch:
        """For a legend."""
        return Patch(facecolor=self.colour, hatch=self.hatch, edgecolor="white", linewidth=0, label=self.label)


KINDS = {
    COMPUTE: Kind("compute", style.BLUE),
    "F": Kind("F forward", "#56B4E9"),
    "B": Kind("B backward", style.GREEN),
    "I": Kind("I input gradient", style.YELLOW, bottom=0.65),
    "W": Kind("W weight gradient", style.PINK, top=0.35),
    COMMUNICATION: Kind("communication", style.ORANGE, "////"),
}
NOTHING = Path(np.empty((0, 2)))
_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
_ENDS = (1, 1.2, 1.4, 1.6, 1.8, 2, 2.5, 3, 3.5, 4, 4.5, 5, 6, 7, 8, 9, 10)  # of the axis, times a power of ten
_BAND, _MIDDLE = 0.42, 0.02  # from a rank's row to the edge of its band; half the space between its parts
_MOST_LANES = 6  # further transfers at the same time share the last lane
_MOST_LABELS = 8  # of rows
_MOST_NAMES, _NAME_POINTS = 400, 7.0
_COLUMNS = [("kind", "U13"), ("row", int), ("started", float), ("finished", float), ("name", object)]


@style.styled
def timeline(recorded: Timeline, title: str = "", until: float = 0.0) -> style.Figure:
    """Draws compute and communication of every rank over time; pipeline actions F, B, I and W each in its own colour.

    until: seconds that the axis reaches to at least, so that several pictures have one scale.
    """
    fig, (axes,) = style.figure(height=1.3 + min(0.5 * max(len(recorded.ranks), 1), 5.0))
    Gantt(axes, title).update(recorded, until)
    return fig


class Gantt:
    """A chart of a Timeline on `axes`, for a figure or for an explorer: `moving` are its boxes, `update` moves them.

    Compute whose name begins with F, B, I or W is drawn as that action of a pipeline schedule, with its name where there is
    room. Where nothing communicates compute has the whole band. A span shorter than a pixel is widened to one, as long as
    such spans take no more than an eighth of a band: what a large chart shows of communication is its share.
    """

    def __init__(self, axes: Axes, title: str = ""):
        self.axes, self._frame = axes, ()
        self._patches = {key: axes.add_patch(PathPatch(NOTHING, gid=key)) for key in KINDS}
        for patch, kind in zip(self._patches.values(), KINDS.values(), strict=True):
            patch.set(facecolor=kind.colour, hatch=kind.hatch, edgecolor="white", linewidth=0)
        self._names = Labels(axes, _NAME_POINTS, outline=word, name="names", colour=style.BLACK)
        axes.set_title(title, pad=24)  # the legend is under it
        axes.grid(axis="y", visible=False)
        axes.xaxis.set_major_locator(MaxNLocator(7, steps=[1, 2, 2.5, 5, 10]))
        self.update(Timeline(()))

    @property
    def moving(self) -> list[Artist]:
        return [*self._patches.values(), self._names.artist]

    def update(self, timeline: Timeline, until: float = 0.0) -> None:
        """Shows this timeline on an axis that reaches to its end, or to `until` seconds if that is more: to compare charts."""
        spans = timeline.spans
        keys = [s.name[0] if s.kind == COMPUTE and s.name[:1] in (*"FBIW",) else s.kind for s in spans]
        rows = {rank: row for row, rank in enumerate(timeline.ranks)}
        columns = [(key, rows[s.rank], s.started, s.finished, s.name) for key, s in zip(keys, spans, strict=True)]
        boxes = np.array(columns, _COLUMNS).view(np.recarray)
        end = _round_up(max(until, boxes.finished.max(initial=0.0))) or 1.0
        frame = end, timeline.ranks, [key for key in KINDS if key in boxes.kind]
        if frame != self._frame:
            self._draw_frame(*frame)
            self._frame = frame
        self._move(boxes, *frame)

    @style.styled  # explorers call update when no style is set
    def _draw_frame(self, end: float, ranks: list[int], kinds: list[str]) -> None:
        second, name = unit(end)
        self.axes.set(xlim=(0, end / second), xlabel=f"time ({name})")
        rows = range(0, len(ranks), -(-len(ranks) // _MOST_LABELS) or 1)
        self.axes.set_yticks(rows, [f"rank {ranks[row]}" for row in rows])
        self.axes.set_ylim(max(len(ranks), 1) - 0.5, -0.5)
        keys = [KINDS[kind].key for kind in kinds] or [Patch(alpha=0, label=" ")]  # keeps the legend's place
        place = {"loc": "lower left", "bbox_to_anchor": (0, 1), "borderaxespad": 0.2, "borderpad": 0.2}
        self.axes.legend(handles=keys, ncols=len(KINDS), handlelength=1.4, columnspacing=1.2, **place)

    def _move(self, boxes: np.recarray, end: float, ranks: list[int], kinds: list[str]) -> None:
        second, pixel = unit(end)[0], end / self.axes.bbox.width
        least = min(1.0, self.axes.bbox.width / 8 / np.bincount(boxes.row).max(initial=1))  # pixels of a box
        high = self.axes.bbox.height / max(len(ranks), 1) * (_BAND - _MIDDLE) >= 1.4 * _NAME_POINTS
        written = "FBIW" if high and np.isin(boxes.kind, [*"FBIW"]).sum() <= _MOST_NAMES else ""
        named, places = [], []
        for key, patch in self._patches.items():
            of = boxes[boxes.kind == key]
            upper = 2 * _BAND if COMMUNICATION not in kinds else _BAND - _MIDDLE
            top, bottom = (of.row - _BAND + share * upper for share in (KINDS[key].top, KINDS[key].bottom))
            if key == COMMUNICATION:
                lanes = np.minimum(_lanes(of), _MOST_LANES - 1)
                height = (_BAND - _MIDDLE) / (lanes.max(initial=0) + 1)
                top = of.row + _MIDDLE + height * lanes
                bottom = top + height * (0.85 if lanes.any() else 1)
            right = np.maximum(of.finished, of.started + least * pixel)
            right -= np.clip(0.25 * ((right - of.started) / pixel - 2), 0, 1) * pixel  # a gap, cheaper than an outline
            patch.set_path(rectangles(np.column_stack([of.started / second, right / second, top, bottom])))
            patch.set_snap(None if least == 1 else False)  # to whole pixels would swallow what is narrower than one
            if key in written:
                points = (right - of.started) / pixel * 72 / self.axes.figure.dpi
                room = [width(name, _NAME_POINTS) <= each for name, each in zip(of.name, points, strict=True)]
                named += list(of.name[room])
                places += zip(((of.started + right) / 2 / second)[room], ((top + bottom) / 2)[room], strict=True)
        self._names.update(places, named)


def unit(end: float) -> tuple[float, str]:
    """What an axis that reaches to so many seconds counts in, and its name."""
    return next((each for each in _UNITS if end >= each[0]), _UNITS[-1])


def rectangles(corners: np.ndarray) -> Path:
    """One path of them all, from left, right, top and bottom of each: much faster than a collection of as many polygons."""
    polygons = corners[:, [0, 2, 1, 2, 1, 3, 0, 3]].reshape(-1, 4, 2)
    return Path.make_compound_path_from_polys(polygons) if len(polygons) else NOTHING


def _lanes(boxes: np.recarray) -> np.ndarray:
    """For each box the first lane of its row that is free when it starts."""
    lanes, ends = np.zeros(len(boxes), int), defaultdict(list)
    order = np.lexsort((boxes.finished, boxes.started))
    columns = (boxes[name][order].tolist() for name in ("row", "started", "finished"))
    for index, row, started, finished in zip(order.tolist(), *columns, strict=True):
        busy, lane = ends[row], 0
        while lane < len(busy) and busy[lane] > started:
            lane += 1
        busy[lane : lane + 1] = [finished]
        lanes[index] = lane
    return lanes


def _round_up(end: float) -> float:
    """The next end of an axis: one that stays where it is while a control moves the data a little."""
    if end <= 0:
        return 0.0
    power = 10.0 ** math.floor(math.log10(end))
    return next(power * step for step in _ENDS if power * step >= end * (1 - 1e-9))
