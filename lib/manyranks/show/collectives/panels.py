"""Three panels of chapter 01's explorer: what ranks hold, the bytes that they send, and time against message size."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.collections import LineCollection, PathCollection, PolyCollection
from matplotlib.colors import ListedColormap
from matplotlib.markers import MarkerStyle
from matplotlib.transforms import Affine2D

from manyranks.show import style, units
from manyranks.show.bars import corners, joined
from manyranks.show.collectives.circle import MOST
from manyranks.show.collectives.setting import SIZES
from manyranks.show.labels import Labels, heading, word
from manyranks.show.said import Part

_DIGITS = 8  # ranks whose cells have room for a digit
_SHADES = ListedColormap(colormaps["Blues"](np.linspace(0, 1, 64)))
# Colour, line and marker of an algorithm. Those that look alike are never algorithms of the same operation.
LOOKS = {
    "ring": (style.BLUE, "-", "o"),
    "tree": (style.ORANGE, "--", "s"),
    "naive": (style.GREEN, "-.", "D"),
    "recursive_doubling": (style.PINK, ":", "^"),
    "halving_doubling": (style.INK, "-", "v"),
    "hierarchical": (style.YELLOW, "--", "P"),
    "halving": (style.INK, "-", "v"),
    "pairwise": (style.YELLOW, "--", "P"),
}
_BYTES, _SECONDS = (0.6, 2e11), (5e-7, 1e4)  # ends of axes
_MARKS, _RING = (
    {each.get_marker(): each.get_path().transformed(each.get_transform().scale(size)) for each in map(MarkerStyle, shapes)}
    for size, shapes in ((5, "osD^vP"), (11, "o"))  # points
)
_PARTS = (0, 0.5, 1)  # of the highest bar, where there is a line with its amount


class Grid:
    """A row for each rank, a column for each chunk; the darker a cell, the more of what belongs there has come."""

    def __init__(self, axes: Axes):
        self._cells = axes.add_collection(PathCollection([]), autolim=False)
        self._inside, self._beside, self._title = Labels(axes), Labels(axes, size=8), heading(axes)
        self.moving = [self._cells, self._inside.artist, self._beside.artist, self._title.artist]
        axes.set(xlim=(0, 1), ylim=(1, 0), xticks=[], yticks=[])
        axes.set_xlabel("chunk", labelpad=15)
        axes.set_ylabel("rank", labelpad=18)
        axes.spines[:].set_visible(False)
        axes.grid(visible=False)
        bar = axes.figure.colorbar(ScalarMappable(cmap=_SHADES), ax=axes, ticks=[0, 1], shrink=0.7, pad=0.02)
        bar.ax.set_yticklabels(["none", "all"])

    def update(self, counts: Sequence[Sequence[int]], most: int, title: str) -> None:
        """Shows in cell [rank][chunk] how many of `most` terms are in it; no counts at all: only a text instead of the grid."""
        self._title.update([(0, 1)], [title])
        rows, columns = np.shape(counts) if counts else (0, 0)
        flat, (down, across) = np.ravel(counts), np.indices((rows, columns)).reshape(2, -1)
        boxes = np.stack((across / columns, (across + 1) / columns, down / rows, (down + 1) / rows), axis=1)
        middles, shades = boxes.reshape(-1, 2, 2).mean(axis=2), np.unique(flat)
        self._cells.set_paths([joined(boxes[flat == count]) for count in shades] + [joined(boxes)] * (rows > 0))
        self._cells.set(facecolors=[*_SHADES(shades / most), (0, 0, 0, 0)], edgecolors=["none"] * len(shades) + ["#b0b0b0"])
        self._cells.set_linewidths([0] * len(shades) + [0.6])
        if rows:
            shown = flat if rows <= _DIGITS and most > 1 else flat[:0]
            self._inside.update(middles[: len(shown)], shown, np.where(2 * shown > most, "white", style.BLACK))
        else:
            self._inside.update([(0.5, 0.5)], [f"drawn up to {MOST} ranks"])
        sides = [(x, 1.05) for x in middles[:columns, 0]] + [(-0.035, y) for y in middles[::columns, 1]] if rows else []
        self._beside.update(sides, [*range(columns), *range(rows)])


class Sent:
    """The bytes that each rank sends: a bar a rank, many ranks from most to least; and the least possible."""

    def __init__(self, axes: Axes):
        self._bars = axes.add_collection(PolyCollection([], facecolors=style.BLUE, linewidths=0), autolim=False)
        self._line = axes.plot([0, 1], [0, 0], color=style.ORANGE, linestyle="--", linewidth=1.5)[0]
        self._right, self._left = Labels(axes, left=0, outline=word, colour=style.ORANGE), Labels(axes, left=1, outline=word)
        self._numbers, self._under = Labels(axes, size=8), Labels(axes, size=10)
        for x, align, longest in ((1.01, "left", "least for the busiest: "), (-0.015, "right", "1,000 MB")):
            axes.text(x, 1, longest, ha=align, fontsize=9, color="none")  # the layout leaves this much room for texts
        self.moving, self._axes, self._sent = [self._bars, self._line], axes, ()
        self.moving += [each.artist for each in (self._right, self._left, self._numbers, self._under)]
        axes.set(xlim=(0, 1), ylim=(0, 1.08), xticks=[], title="bytes that each rank sends")
        axes.set_yticks(_PARTS, [""] * len(_PARTS))
        axes.tick_params(length=0)

    def parts(self) -> Iterator[Part]:
        """The bytes of each rank, where a bar is one rank's."""
        n, top = len(self._sent), max(*self._sent, 1)
        for rank, size in enumerate(self._sent if n <= MOST else ()):
            place = (rank + 0.14) / n, (rank + 0.86) / n, 0, max(size / top, 0.03)
            yield Part(self._axes, *place, f"rank {rank}: {size:,} bytes")

    def update(self, sent: Sequence[int], least: float) -> None:
        """Shows the bytes of rank 0, 1, …, and the bytes that the busiest rank cannot do without."""
        n, top, self._sent = len(sent), max(*sent, least, 1), sent
        few = n <= MOST
        apart, each = (0.14, sent) if few else (0, sorted(sent, reverse=True))
        self._bars.set_verts(corners([((r + apart) / n, (r + 1 - apart) / n, 0, size / top) for r, size in enumerate(each)]))
        self._line.set_ydata([least / top] * 2)
        beside = [(1.01, least / top + up) for up in (0.055, -0.055)]
        self._right.update(beside, ["least for the busiest:", units.size(least)])
        self._left.update([(-0.015, part) for part in _PARTS], [units.size(part * top) for part in _PARTS])
        self._numbers.update([((r + 0.5) / n, -0.07) for r in range(n)] if few else [], range(n if few else 0))
        self._under.update([(0.5, -0.18)], ["rank" if few else f"{n} ranks, from most to least"])


class Times:
    """Time against the size of the tensor, a curve for each algorithm, which always looks the same."""

    def __init__(self, axes: Axes):
        self._lines = axes.add_collection(LineCollection([], transform=axes.transAxes), autolim=False)
        self._marks = PathCollection([], offsets=[], offset_transform=axes.transAxes)
        self._marks.set_transform(Affine2D().scale(1 / 72) + axes.figure.dpi_scale_trans)
        axes.add_collection(self._marks, autolim=False)
        self._names = Labels(axes, left=0, within=axes.transAxes)
        self.moving = [self._lines, self._marks, self._names.artist]
        axes.set(xscale="log", yscale="log", xlim=_BYTES, ylim=_SECONDS, xlabel="size of the tensor", ylabel="time")
        axes.set_title("time (circled: this tensor)")
        axes.set_xticks([1, 1e3, 1e6, 1e9], ["1 B", "1 kB", "1 MB", "1 GB"])
        axes.set_yticks([1e-6, 1e-3, 1, 1e3], ["1 µs", "1 ms", "1 s", "1,000 s"])
        axes.minorticks_off()

    def update(self, seconds: Mapping[str, Sequence[float]], chosen: str, at: tuple[float, float]) -> None:
        """Shows these algorithms' seconds at SIZES, the chosen one on a band, and a mark at `at`, (bytes, seconds)."""
        curves = {name: np.stack((_share(SIZES, _BYTES), _share(times, _SECONDS)), axis=1) for name, times in seconds.items()}
        heights = {name: 0.95 - 0.1 * place for place, name in enumerate(curves)}
        samples = [[(0.02, y), (0.12, y)] for y in heights.values()]  # a legend: matplotlib's would be laid out in every redraw
        colours, lines, _ = zip(*(LOOKS[name] for name in curves), strict=True)
        widths = [2.6 if name == chosen else 1.2 for name in curves]
        self._lines.set_segments([curves[chosen], *curves.values(), *samples])
        self._lines.set(colors=[(LOOKS[chosen][0], 0.3), *2 * colours])
        self._lines.set(linestyles=["-", *2 * lines], linewidths=[7, *2 * widths])
        # Markers of different curves stand at different sizes, so that those which lie on each other can all be seen.
        marks = [(name, place) for name, curve in curves.items() for place in curve[list(LOOKS).index(name) % 6 :: 6]]
        marks += [(name, (0.07, y)) for name, y in heights.items()]
        colours = [LOOKS[name][0] for name, _ in marks]
        self._marks.set_paths([_MARKS[LOOKS[name][2]] for name, _ in marks] + [_RING["o"]])
        self._marks.set_offsets([place for _, place in marks] + [(_share(at[0], _BYTES), _share(at[1], _SECONDS))])
        self._marks.set(facecolors=[*colours, "none"], edgecolors=[*colours, style.INK], linewidths=[1] * len(marks) + [1.8])
        self._names.update([(0.14, y) for y in heights.values()], list(heights))


def _share(values: float | Sequence[float], ends: tuple[float, float]) -> np.ndarray:
    """Where they are on a logarithmic axis with these ends, from 0 to 1."""
    low, high = np.log10(ends)
    return (np.log10(np.maximum(values, 1e-30)) - low) / (high - low)
