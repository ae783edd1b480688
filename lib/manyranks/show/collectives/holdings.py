"""What each rank holds, as a grid: a row a rank, a column an element, in each cell the number and whose terms are in it.

The chapters give rank r the numbers 1, 2, 3, … times 10**r, so a sum shows its terms: 1101 is the sum of the ones of ranks 0, 2
and 3. A cell has a stripe in the colour of each of these ranks.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection

from manyranks.show import style
from manyranks.show.bars import corners
from manyranks.show.looks import LOOKS
from manyranks.theory.collectives import chunk_sizes

Row = Sequence[float] | None  # a tensor, a list of numbers, or None for nothing
_MOST = 6  # ranks whose numbers have room in a cell
_GAP = 1.4  # columns between before and after


def terms(value: float, n: int) -> list[int]:
    """The ranks whose decimal digit in the number is not 0."""
    return [rank for rank in range(n) if int(value) // 10**rank % 10]


class Holdings:
    """The grid on these axes, `left` from their left edge. Raises ValueError for more ranks than it has room for."""

    def __init__(self, axes: Axes, n: int, columns: int, left: float = 0.0):
        if not 1 <= n <= _MOST:
            raise ValueError(f"{n} ranks: this picture has room for 1 to {_MOST}")
        self._sizes, self._columns, self._left = chunk_sizes(columns, n), columns, left
        self._stripes = axes.add_collection(PolyCollection([], linewidths=0, gid="stripes"))
        look = {"facecolors": "none", "edgecolors": style.INK, "linewidths": 0.8, "gid": "frames"}
        self._frames = axes.add_collection(PolyCollection([], **look))
        look = {"color": style.BLACK, "ha": "center", "va": "center", "fontsize": 9}
        self._texts = {(r, c): axes.text(left + c + 0.5, r + 0.5, "", **look) for r in range(n) for c in range(columns)}
        axes.set(xlim=(-0.05, left + columns + 0.05), ylim=(n + 0.02, -0.02), xticks=[])
        axes.set_yticks([r + 0.5 for r in range(n)], [f"rank {r}" for r in range(n)])
        axes.tick_params(length=0)
        axes.grid(visible=False)
        axes.spines[:].set_visible(False)
        self.moving = [self._stripes, self._frames, *self._texts.values()]

    def update(self, rows: Sequence[Row]) -> None:
        """Shows these rows, one a rank. A row shorter than the grid is the rank's chunk, and stands where that chunk does."""
        cells, frames, stripes, colours = {}, [], [], []
        for rank, row in enumerate(rows):
            first = 0 if row is None or len(row) == self._columns else sum(self._sizes[:rank])
            cells |= {(rank, first + place): value for place, value in enumerate(() if row is None else row)}
        for place, text in self._texts.items():
            text.set_text(f"{cells[place]:g}" if place in cells else "")
        for (rank, column), value in cells.items():
            left, high, whose = self._left + column, (rank + 0.08, rank + 0.92), terms(value, len(rows))
            frames.append((left, left + 1, *high))
            stripes += [(*edges, *high) for edges in pairwise(np.linspace(left, left + 1, len(whose) + 1))]
            colours += [LOOKS[other][0] for other in whose]
        self._frames.set_verts(corners(frames))
        self._stripes.set_verts(corners(stripes))
        self._stripes.set_facecolor(colours)


@style.styled
def before_after(operations: Mapping[str, tuple[Sequence[Row], Sequence[Row]]]) -> style.Figure:
    """What each rank holds before and after each operation, two operations a line. operations: name -> (before, after).

    Give rank r numbers times 10**r: then each digit of a sum is one rank's. A rank that has fewer elements than the largest
    holds a chunk. Raises ValueError for more than 6 ranks, or where two pictures differ in their number of ranks.
    """
    counts = {name: (len(before), len(after)) for name, (before, after) in operations.items()}
    if len({n for both in counts.values() for n in both}) != 1:
        raise ValueError(f"ranks before and after: {counts}; give one row a rank, the same number everywhere")
    n, lines = next(iter(counts.values()))[0], -(-len(operations) // 2)
    fig, axes = style.figure(columns=2, rows=lines, width=8.8, height=lines * (0.65 + 0.26 * n))
    fig.get_layout_engine().set(wspace=0.08)
    for place, (name, both) in zip(axes, operations.items(), strict=False):
        columns = max(len(row) for rows in both for row in rows if row is not None)
        for left, rows in zip((0.0, columns + _GAP), both, strict=True):
            Holdings(place, n, columns, left).update(rows)
        start, end = ((columns + share * _GAP, n / 2) for share in (0.18, 0.82))
        place.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": style.INK})
        place.set_title(name)
    for empty in axes[len(operations) :]:
        empty.set_axis_off()
    return fig
