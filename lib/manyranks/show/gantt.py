"""A Timeline as a picture: one band a rank, compute in its upper half, communication in its lower one."""

import math
from collections import defaultdict
from typing import NamedTuple

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.patches import Patch, PathPatch
from matplotlib.ticker import MaxNLocator

from manyranks.show import style
from manyranks.show.bars import NOTHING, joined
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
    def look(self) -> dict:
        """Of a Patch, which with its label is a legend's key."""
        return {"facecolor": self.colour, "hatch": self.hatch, "edgecolor": "white", "linewidth": 0, "label": self.label}


KINDS = {
    COMPUTE: Kind("compute", style.BLUE),
    "F": Kind("F forward", "#56B4E9"),
    "B": Kind("B backward", style.GREEN),
    "I": Kind("I input gradient", style.YELLOW, bottom=0.65),
    "W": Kind("W weight gradient", style.PINK, top=0.35),
    COMMUNICATION: Kind("communication", style.ORANGE, "////"),
}
_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
_ENDS = (1, 1.2, 1.4, 1.6, 1.8, 2, 2.5, 3, 3.5, 4, 4.5, 5, 6, 7, 8, 9, 10)  # of the axis, times a power of ten
_BAND, _MIDDLE = 0.42, 0.02  # from a rank's row to the edge of its band; half the space between its parts
_MOST_LANES = 6  # further transfers at the same time share the last lane
_MOST_LABELS = 8  # of rows
_MOST_NAMES, _NAME_POINTS = 400, 7.0
_COLUMNS = [("row", int), ("kind", "U13"), ("name", object), ("started", float), ("finished", float)]


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
        self._patches = {key: axes.add_patch(PathPatch(NOTHING, gid=key, **kind.look)) for key, kind in KINDS.items()}
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
        spans = [(row, *span[1:]) for row, rank in enumerate(timeline.ranks) for span in timeline.of(rank)]
        boxes = np.array(spans, _COLUMNS).view(np.recarray)
        boxes.kind = [name[0] if kind == COMPUTE and name[:1] in KINDS else kind for _, kind, name, *_ in spans]
        end = max(until, boxes.finished.max(initial=0.0))
        frame = _round_up(end) if end > 0 else 1.0, timeline.ranks, [key for key in KINDS if key in boxes.kind]
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
        keys = [Patch(**KINDS[kind].look) for kind in kinds] or [Patch(alpha=0, label=" ")]  # keeps the legend's place
        place = {"loc": "lower left", "bbox_to_anchor": (0, 1), "borderaxespad": 0.2, "borderpad": 0.2}
        self.axes.legend(handles=keys, ncols=len(KINDS), handlelength=1.4, columnspacing=1.2, **place)

    def _move(self, boxes: np.recarray, end: float, ranks: list[int], kinds: list[str]) -> None:
        second, pixel = unit(end)[0], end / self.axes.bbox.width
        least = min(1.0, self.axes.bbox.width / 8 / np.bincount(boxes.row).max(initial=1))  # pixels of a box
        high = self.axes.bbox.height / max(len(ranks), 1) * (_BAND - _MIDDLE) >= 1.4 * _NAME_POINTS
        written = "FBIW" if high and np.isin(boxes.kind, [*"FBIW"]).sum() <= _MOST_NAMES else ""
        upper, named, places = _BAND - _MIDDLE if COMMUNICATION in kinds else 2 * _BAND, [], []
        for key, patch in self._patches.items():
            of = boxes[boxes.kind == key]
            top, bottom = (of.row - _BAND + share * upper for share in (KINDS[key].top, KINDS[key].bottom))
            if key == COMMUNICATION:
                lanes = _lanes(of)
                height = (_BAND - _MIDDLE) / (lanes.max(initial=0) + 1)
                top = of.row + _MIDDLE + height * lanes
                bottom = top + height * (0.85 if lanes.any() else 1)
            right = np.maximum(of.finished, of.started + least * pixel)
            right -= np.clip(0.25 * ((right - of.started) / pixel - 2), 0, 1) * pixel  # a gap, cheaper than an outline
            patch.set_path(joined(np.column_stack([of.started / second, right / second, top, bottom])))
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


def _lanes(boxes: np.recarray) -> np.ndarray:
    """For each box, in order of start, the first lane of its row that is free when it starts, or else the last one."""
    lanes, ends = [], defaultdict(lambda: [-math.inf] * _MOST_LANES)
    for row, _, _, started, finished in boxes.tolist():
        lanes.append(next((k for k, end in enumerate(ends[row]) if end <= started), _MOST_LANES - 1))
        ends[row][lanes[-1]] = finished
    return np.array(lanes, int)


def _round_up(end: float) -> float:
    """The next end of an axis: one that stays where it is while a control moves the data a little."""
    power = 10.0 ** math.floor(math.log10(end))
    return next(power * step for step in _ENDS if power * step >= end * (1 - 1e-9))
