"""Three panels of chapter 01's explorer: what ranks hold, the bytes that they send, and time against message size."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from matplotlib import colormaps
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.collections import PolyCollection
from matplotlib.colors import ListedColormap

from manyranks.show import style, units
from manyranks.show.bars import corners
from manyranks.show.collectives.circle import MOST
from manyranks.show.labels import Labels
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
_PARTS = (0, 0.5, 1)  # of the highest bar, where there is a line with its amount
SIZES = [2**k for k in range(0, 37, 2)]  # 1 B to 64 GiB


class Grid:
    """A row for each rank, a column for each chunk; the darker a cell, the more of what belongs there has come."""

    def __init__(self, axes: Axes):
        self._cells = axes.add_collection(PolyCollection([], edgecolors="#b0b0b0", linewidths=0.6), autolim=False)
        self._digits, self._beside = Labels(axes, zorder=3), Labels(axes, size=8)
        self._note = axes.text(0.5, 0.5, "", ha="center", va="center", fontsize=9)
        self._title = axes.set_title("held")
        self.moving: list[Artist] = [self._cells, self._digits.artist, self._beside.artist, self._note, self._title]
        axes.set(xlim=(0, 1), ylim=(1, 0), xticks=[], yticks=[])
        axes.set_xlabel("chunk", labelpad=15)
        axes.set_ylabel("rank", labelpad=18)
        axes.spines[:].set_visible(False)
        axes.grid(visible=False)
        bar = axes.figure.colorbar(ScalarMappable(cmap=_SHADES), ax=axes, ticks=[0, 1], shrink=0.7, pad=0.02)
        bar.ax.set_yticklabels(["none", "all"])

    def update(self, counts: Sequence[Sequence[int]], most: int, title: str) -> None:
        """Shows in cell [rank][chunk] how many of `most` terms are in it; no counts at all: only a text instead of the grid."""
        self._title.set_text(title)
        self._note.set_text("" if counts else f"drawn up to {MOST} ranks")
        rows, columns = len(counts), len(counts[0]) if counts else 0
        flat = [(r, c, count) for r, row in enumerate(counts) for c, count in enumerate(row)]
        self._cells.set_verts(corners([(c / columns, (c + 1) / columns, r / rows, (r + 1) / rows) for r, c, _ in flat]))
        self._cells.set_facecolors(_SHADES([count / most for *_, count in flat]))
        digits = flat if rows <= _DIGITS and most > 1 else []
        places = [((c + 0.5) / columns, (r + 0.5) / rows) for r, c, _ in digits]
        colours = ["white" if 2 * count > most else style.BLACK for *_, count in digits]
        self._digits.update(places, [count for *_, count in digits], colours)
        sides = [((c + 0.5) / columns, 1.05) for c in range(columns)] + [(-0.035, (r + 0.5) / rows) for r in range(rows)]
        self._beside.update(sides, [*range(columns), *range(rows)])


class Sent:
    """The bytes that each rank sends: a bar a rank, many ranks from most to least; and the least possible."""

    def __init__(self, axes: Axes):
        self._bars = axes.add_collection(PolyCollection([], facecolors=style.BLUE, linewidths=0), autolim=False)
        self._line = axes.plot([0, 1], [0, 0], color=style.ORANGE, linestyle="--", linewidth=1.5)[0]
        self._right, self._left, self._numbers = Labels(axes, left=0), Labels(axes, left=1), Labels(axes, size=8)
        for x, align in ((1.01, "left"), (-0.015, "right")):
            axes.text(x, 1, "1,000 MB", ha=align, fontsize=9, color="none")  # the layout leaves this much room for amounts
        self._under = axes.text(0.5, -0.18, "rank", ha="center", va="center")
        labels = self._right.artist, self._left.artist, self._numbers.artist
        self.moving: list[Artist] = [self._bars, self._line, *labels, self._under]
        self._axes, self._sent = axes, ()
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
        apart = 0.14 if few else 0
        bars = enumerate(sent if few else sorted(sent, reverse=True))
        self._bars.set_verts(corners([((r + apart) / n, (r + 1 - apart) / n, 0, size / top) for r, size in bars]))
        self._line.set_ydata([least / top] * 2)
        beside = [(1.01, least / top + 0.055), (1.01, least / top - 0.055)]
        self._right.update(beside, ["least", units.size(least)], [style.ORANGE] * 2)
        self._left.update([(-0.015, part) for part in _PARTS], [units.size(part * top) for part in _PARTS])
        self._numbers.update([((r + 0.5) / n, -0.07) for r in range(n)] if few else [], range(n if few else 0))
        self._under.set_text("rank" if few else f"{n} ranks, from most to least")


class Times:
    """Time against the size of the tensor, a curve for each algorithm, which always looks the same."""

    def __init__(self, axes: Axes):
        self._band = axes.loglog(SIZES, SIZES, linestyle="-", linewidth=7, alpha=0.3)[0]
        self._curves, self._samples = {}, {}  # samples: a legend of our own; matplotlib's would be laid out in every redraw
        for place, (name, (colour, line, marker)) in enumerate(LOOKS.items()):
            look = {"color": colour, "linestyle": line, "marker": marker, "markersize": 5}
            # Markers of different curves stand at different sizes, so that those which lie on each other can all be seen.
            self._curves[name] = axes.plot(SIZES, SIZES, markevery=(place % 6, 6), **look)[0]
            self._samples[name] = axes.plot([0.02, 0.07, 0.12], [1] * 3, markevery=[1], transform=axes.transAxes, **look)[0]
        self._dot = axes.plot([1], [1], "o", color="none", markeredgecolor=style.INK, markersize=11, markeredgewidth=1.8)[0]
        self._names = Labels(axes, left=0, within=axes.transAxes)
        lines = self._band, *self._curves.values(), self._dot, *self._samples.values()
        self.moving: list[Artist] = [*lines, self._names.artist]
        axes.set(xlim=(0.6, 2e11), ylim=(5e-7, 1e4), xlabel="size of the tensor", ylabel="time")
        axes.set_title("time (circle: this tensor)")
        ticks = [1, 1e3, 1e6, 1e9]
        axes.set_xticks(ticks, [units.size(n) for n in ticks])
        axes.set_yticks([1e-6, 1e-3, 1, 1e3], ["1 µs", "1 ms", "1 s", "1,000 s"])
        axes.minorticks_off()

    def update(self, seconds: Mapping[str, Sequence[float]], chosen: str, at: tuple[float, float]) -> None:
        """Shows these algorithms' seconds at SIZES, the chosen one on a band, and a mark at `at`, (bytes, seconds)."""
        heights = {name: 0.95 - 0.1 * place for place, name in enumerate(seconds)}
        for name in LOOKS:
            self._curves[name].set_ydata(seconds.get(name, SIZES))
            self._samples[name].set_ydata([heights.get(name, 0)] * 3)
            for line in (self._curves[name], self._samples[name]):
                line.set(visible=name in seconds, linewidth=2.6 if name == chosen else 1.2)
        self._band.set(ydata=seconds[chosen], color=LOOKS[chosen][0])
        self._dot.set_data([at[0]], [at[1]])
        self._names.update([(0.14, height) for height in heights.values()], list(heights))
