"""What each rank holds, as a grid: a row a rank, a column an element, in each cell the number and whose terms are in it.

The chapters give rank r the numbers 1, 2, 3, … times 10**r. Then a sum shows its terms: 1101 is the sum of the ones of ranks 0,
2 and 3. A cell has a stripe in the colour of each of these ranks.
"""

from collections.abc import Sequence

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection

from manyranks.show import style

Row = Sequence[float] | None
_COLOURS = ("#9CC9E8", "#F2B48C", "#8FD6BC", "#E8C2D8", "#F5D98A", "#C9C9C9")
MOST = len(_COLOURS)  # ranks that have a colour


def terms(value: float, n: int) -> list[int]:
    """The ranks whose decimal digit in the number is not 0."""
    return [rank for rank in range(n) if int(value) // 10**rank % 10]


class Holdings:
    """The grid on these axes, `left` from their left edge. Raises ValueError for more ranks than there are colours."""

    def __init__(self, axes: Axes, n: int, columns: int, left: float = 0.0):
        if not 1 <= n <= MOST:
            raise ValueError(f"{n} ranks: this picture has room and colours for 1 to {MOST}")
        self.n, self.columns, self._left = n, columns, left
        self._stripes = axes.add_collection(PolyCollection([], linewidths=0, gid="stripes"))
        frames = {"facecolors": "none", "edgecolors": style.INK, "linewidths": 0.8, "gid": "frames"}
        self._frames = axes.add_collection(PolyCollection([], **frames))
        places = [(left + c + 0.5, r + 0.5) for r in range(n) for c in range(columns)]
        self._texts = [axes.text(x, y, "", color=style.BLACK, ha="center", va="center", fontsize=9) for x, y in places]
        axes.set(xlim=(-0.05, left + columns + 0.05), ylim=(n + 0.02, -0.02), xticks=[])
        axes.set_yticks([r + 0.5 for r in range(n)], [f"rank {r}" for r in range(n)])
        axes.tick_params(length=0)
        axes.grid(visible=False)
        axes.spines[:].set_visible(False)

    @property
    def moving(self) -> list[Artist]:
        return [self._stripes, self._frames, *self._texts]

    def update(self, rows: Sequence[Row]) -> None:
        """Shows these rows, one a rank. A row shorter than the grid is the rank's chunk, and stands where that chunk does."""
        cells = {(r, c): value for r, row in enumerate(rows) if row is not None for c, value in self._placed(r, row)}
        for at, text in enumerate(self._texts):
            value = cells.get(divmod(at, self.columns))
            text.set_text("" if value is None else f"{value:g}")
        stripes = [(at, i, who) for at, value in cells.items() for i, who in enumerate(terms(value, self.n))]
        widths = {at: max(1, len(terms(value, self.n))) for at, value in cells.items()}
        self._stripes.set_verts([self._box(r, c + i / widths[r, c], 1 / widths[r, c]) for (r, c), i, _ in stripes])
        self._stripes.set_facecolor([_COLOURS[who] for _, _, who in stripes])
        self._frames.set_verts([self._box(r, c) for r, c in cells])

    def _placed(self, rank: int, row: Sequence[float]) -> list[tuple[int, float]]:
        sizes = [self.columns // self.n + (r < self.columns % self.n) for r in range(self.n)]
        first = sum(sizes[:rank]) if len(row) < self.columns else 0
        return [(first + i, value) for i, value in enumerate(row)]

    def _box(self, row: float, column: float, width: float = 1.0) -> list[tuple[float, float]]:
        left, top, bottom = self._left + column, row + 0.08, row + 0.92
        return [(left, top), (left + width, top), (left + width, bottom), (left, bottom)]
