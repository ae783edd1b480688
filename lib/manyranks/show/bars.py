"""Horizontal bars of several parts, one below the other, that follow an explorer's controls."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise, zip_longest
from math import log10, nan

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.patches import PathPatch, Rectangle
from matplotlib.path import Path

from manyranks.show import style, units
from manyranks.show.labels import Labels
from manyranks.show.setting import Part

LONGEST = 0.52  # of an axis, for the longest bar: the rest is for texts
NOTHING = Path(np.empty((0, 2)))


class Bars:
    """Bars in rows with these names, with texts at their ends, a band behind one, a dashed limit.

    parts: name -> color and hatch, from left to right
    unit: how a part's number is written
    columns: of the legend, 0 for none
    labels: how texts are drawn, as Labels takes it: outline=word for texts that another setting seldom has
    ends, ticks: of a logarithmic axis, on which the parts of a row are below each other
    """

    column = 0.23  # of an axis, for a text

    def __init__(
        self,
        axes: Axes,
        parts: Mapping[str, tuple[str, str]],
        title: str,
        rows: Sequence[str],
        unit: Callable[[float], str] = units.size,
        columns: int = 2,
        ends: tuple[float, float] | None = None,
        ticks: Sequence[float] = (),
        **labels,
    ):
        self._axes, self._rows, self._unit, self._ends, self._bars, self._longest = axes, list(rows), unit, ends, [], 1.0
        self._boxes = {part: PathPatch(NOTHING, facecolor=color, hatch=hatch) for part, (color, hatch) in parts.items()}
        for part, boxes in self._boxes.items():
            axes.add_patch(boxes).set(edgecolor="white", linewidth=0.6, label=part)
        self._labels = Labels(axes, left=0, name="texts", **labels)
        look = {"color": style.INK, "linestyle": "--", "linewidth": 1.4, "gid": "limit"}
        self._limit = axes.plot([0, 0], [-0.5, len(rows) - 0.5], **look)[0]
        self._band = Rectangle((0, 0), LONGEST + 0.02, 0.9, color=style.FAINT, linewidth=0, zorder=0, gid="band")
        axes.add_patch(self._band)  # not behind texts, which could hardly be read on it
        axes.set(xlim=(0, 1), ylim=(len(rows) - 0.1, -0.6))
        axes.set_xticks([self.place(tick) for tick in ticks], list(map(unit, ticks)))
        axes.set_yticks(range(len(rows)), list(rows))
        if len(parts) < 2:
            columns = 0  # no legend
        axes.set_title(title, pad=6 + 19 * -(-len(parts) // columns) if columns else 6)
        axes.tick_params(length=0, grid_linewidth=0)
        if columns:
            at = {"loc": "lower left", "bbox_to_anchor": (-0.02, 1.0), "borderaxespad": 0.1}
            axes.legend(ncols=columns, columnspacing=1.0, handlelength=1.4, fontsize=8.5, **at)

    @property
    def moving(self) -> list[Artist]:
        return [self._band, *self._boxes.values(), self._limit, self._labels]

    def parts(self) -> Iterator[Part]:
        """Yields what each part of each bar says, as it was drawn last."""
        for y, bar in enumerate(self._bars):
            for part, left, right, top, bottom in self._places(y, bar):
                if right > left and part in self._boxes:
                    name = ", ".join(dict.fromkeys(filter(None, (self._rows[y], part))))
                    yield Part(self._axes, left, right, bottom, top, f"{name}: {self._unit(bar[part])}")

    def update(
        self,
        bars: Sequence[Mapping[str, float]],
        texts: Sequence[str],
        row: int,
        longest: float | None = None,
        limit: tuple[float, str] | None = None,
        missing: str = "",
        others: Sequence[tuple[float, str]] = (),
    ) -> None:
        """Shows bars, cut off at `longest` or at the end of the band's bar.

        bars: name of a part -> number; the room of another name stays empty, as where a waterfall's bar has not begun yet
        texts: for each row, in columns between "|", of one or two lines
        row: of the band
        limit, others: where dashed lines are, with their names; none is drawn beyond `longest`
        missing: what the last rows say, if they have neither bar nor text
        """
        lengths = [sum(bar.values()) for bar in bars]
        longest = max([longest or max(lengths) or 1.0, *lengths[max(row, 0) : row + 1]])
        self._longest = longest = self._ends[1] if self._ends else longest
        self._bars = bars
        if missing:
            texts = [*texts, *[missing] * (len(self._rows) - len(texts))]
        for part, boxes in self._boxes.items():
            each = (box for y, bar in enumerate(bars) for box in self._places(y, bar))
            boxes.set_path(path := joined([place for name, *place in each if name == part]))
            boxes.set_visible(len(path.vertices) > 0)  # a hatch is drawn for nothing, too
        end = longest * (1 + 1e-9)  # the same parts, added in another order, may sum to a little more
        texts = [f"» {text}" if bar and sum(bar.values()) > end else text for bar, text in zip_longest(bars, texts)]
        lines = [(y, line) for row, text in enumerate(texts) for y, line in apart(row, text)]
        places = [(LONGEST + 0.03 + self.column * k, y) for y, line in lines for k in range(line.count("|") + 1)]
        words = [word for _, line in lines for word in line.split("|")]
        limits = [*([limit] if limit else ()), *others]
        if limits and self._axes.get_ylim()[0] < len(self._rows):
            self._axes.set_ylim(bottom=len(self._rows) + 0.2)  # room for their names
        words += [f"{name} »" if at > end else name for at, name in limits]
        places += [(self.place(at), len(self._rows) - 0.3) for at, _ in limits]
        shown = [self.place(at) for at, _ in limits if at <= end]
        ends = [-0.5, len(self._rows) - 0.5, nan]
        self._limit.set_data(np.repeat(shown, 3)[:-1], (ends * len(shown))[:-1])
        self._limit.set_visible(bool(shown))
        self._band.set_y(row - 0.45)
        self._labels.write(places, words)

    def place(self, x: float) -> float:
        """Returns where a number is on the axis."""
        low, high = self._ends or (0, 0)
        return LONGEST * (log10(max(x / low, 1)) / log10(high / low) if low else min(x / self._longest, 1))

    def _places(self, y: int, bar: Mapping[str, float]) -> Iterator[tuple[str, float, float, float, float]]:
        """Left, right, top and bottom of each part of a bar."""
        if self._ends and len(bar) > 1:
            lanes = np.linspace(y - 0.38, y + 0.38, len(bar), endpoint=False)
            return ((part, 0, self.place(x), top, top + 0.16) for (part, x), top in zip(bar.items(), lanes, strict=True))
        ends = map(self.place, accumulate(bar.values(), initial=0.0))
        return ((part, *each, y - 0.3, y + 0.3) for part, each in zip(bar, pairwise(ends), strict=True))


def apart(row: int, text: str) -> list[tuple[float, str]]:
    """Returns the lines of a row's text, each with where it stands."""
    lines = text.split("\n")
    return [(row + 0.42 * (k - (len(lines) - 1) / 2), line) for k, line in enumerate(lines)]


def corners(boxes: Sequence[tuple[float, float, float, float]]) -> np.ndarray:
    """The four corners of each box (left, right, low, high), without the boxes that have no width."""
    boxes = np.reshape(boxes, (-1, 4))
    return boxes[boxes[:, 1] > boxes[:, 0] + 1e-9][:, [[0, 2], [1, 2], [1, 3], [0, 3]]]


def joined(boxes: Sequence[tuple[float, float, float, float]]) -> Path:
    """Boxes as one path: to draw a hatch takes milliseconds for every path."""
    each = corners(boxes)
    return Path.make_compound_path_from_polys(each) if len(each) else NOTHING
