"""Chapter 07's masks: which rank computes which scores, all at once and hop by hop."""

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, groupby, product
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from manyranks.show import style
from manyranks.show.context.figures import owners, ranks
from manyranks.show.looks import LOOKS, sheet
from manyranks.theory import context
from manyranks.theory.names import nearest

ORDERS = ("sequence", "ranks")
_LONGEST = 64  # tokens of a picture
_WIDE = 9.4  # inches of a figure
_LEGIBLE = 0.1  # inches of a rank's rows, for its number
_FOR_NOTHING = {"facecolor": "white", "hatch": "xxxxxx", "edgecolor": "#777777", "linewidth": 0.0}


class Masked(NamedTuple):
    """An attention over a sequence that n ranks share; the fields are what `mask` takes. Raises ValueError as that does."""

    layout: str
    n: int
    seq: int
    tile: int | None = None
    causal: bool = True
    documents: Sequence[int] = ()
    order: str = "sequence"

    def scores(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns the rank of each token, in the order drawn, and which scores of queries × keys are visible and computed."""
        self._check()
        owned = np.array(owners(self.layout, self.seq, self.n))
        document = np.repeat(np.arange(len(self.documents) or 1), self.documents or self.seq)
        visible = (document[:, None] == document[None]) & (np.tri(self.seq, dtype=bool) | (not self.causal))
        computed = visible
        if self.tile is not None:
            computed = np.zeros_like(visible)
            for pair in product(list(self._tiles()), repeat=2):
                computed[np.ix_(*pair)] = visible[np.ix_(*pair)].any()
        drawn = np.argsort(owned, kind="stable") if self.order == "ranks" else np.arange(self.seq)
        return owned[drawn], visible[np.ix_(drawn, drawn)], computed[np.ix_(drawn, drawn)]

    def _check(self) -> None:
        context.work(self.seq, self.n, self.layout, tile=self.tile)  # raises
        if self.seq > _LONGEST:
            raise ValueError(f"seq={self.seq}: a picture has room for {_LONGEST} tokens")
        if self.documents and (sum(self.documents) != self.seq or min(self.documents) < 1):
            given = f"documents={self.documents!r} have {sum(self.documents)} tokens"
            raise ValueError(f"{given}, the sequence {self.seq}: give lengths of 1 or more that add up")
        if self.order not in ORDERS:
            raise ValueError(f"order={self.order!r}: {nearest(self.order, ORDERS)}")

    def _tiles(self) -> Iterator[np.ndarray]:
        """The tokens of each tile of each rank."""
        for rank in range(self.n):
            for chunk in context.chunks(self.seq, self.n, self.layout, rank):
                yield from np.array_split(np.array(chunk), -(-len(chunk) // self.tile))


@style.styled
def mask(
    *layouts: str,
    n: int = 4,
    seq: int = 16,
    tile: int | None = None,
    causal: bool = True,
    documents: Sequence[int] = (),
    order: str = "sequence",
) -> style.Figure:
    """Draws scores of queries (rows) with keys (columns), each in its rank's colour; a panel for each layout.

    layouts: theory.context.LAYOUTS, unless some are given
    n: ranks, 2 to 8
    seq: tokens, at most 64
    tile: a rank's tokens are cut, chunk by chunk, into tiles of at most so many; where any of a pair of tiles is visible, all
        of it is computed, and what is computed for nothing is hatched
    documents: their lengths; a token sees its own only, up to the dashed lines
    order: "sequence", or "ranks": by rank, so that a block of rows and columns is what a rank does in one hop
    Raises ValueError for unknown names, other n or seq, one without equal shards, and lengths that don't add up.
    """
    each = [Masked(layout, n, seq, tile, causal, documents, order) for layout in _checked(layouts, n)]
    found = [one.scores() for one in each]
    panel = min(3.4, (_WIDE - 0.9 * len(each)) / len(each))
    fig, axes = sheet(0.2 + len(each) * (panel + 0.85), panel + 1.35)
    for place, (one, scores) in enumerate(zip(each, found, strict=True)):
        _draw_panel(axes, one, scores, (0.85 + place * (panel + 0.85), 0.72), panel)
    return fig


def _checked(layouts: Sequence[str], n: int) -> Sequence[str]:
    ranks(n)
    for layout in layouts:
        if layout not in context.LAYOUTS:
            raise ValueError(f"layout {layout!r}: {nearest(layout, context.LAYOUTS)}")
    return layouts or context.LAYOUTS


def _draw_panel(axes: Axes, one: Masked, scores: tuple, corner: tuple[float, float], panel: float) -> None:
    (owned, visible, computed), (x, y), side = scores, corner, panel / one.seq
    _fill(axes, visible, corner, side, lambda row: {"facecolor": LOOKS[owned[row]][0], "linewidth": 0.0})
    _fill(axes, computed & ~visible, corner, side, lambda row: _FOR_NOTHING)
    ends = [*accumulate(one.documents[:-1])]  # of documents, or of a rank's blocks
    if one.order == "ranks":
        ends = [k for k in range(1, one.seq) if owned[k] != owned[k - 1]]
    strong = {"color": style.INK, "linestyle": "-" if one.order == "ranks" else "--", "linewidth": 1.0}
    thin = {"color": "#bbbbbb", "linestyle": "-", "linewidth": 0.4}
    for places, look in ((range(1, one.seq), thin), (ends, strong)):
        axes.vlines([x + k * side for k in places], y, y + panel, **look)
        axes.hlines([y + panel - k * side for k in places], x, x + panel, **look)
    axes.add_patch(Rectangle(corner, panel, panel, facecolor="none", edgecolor=style.INK, linewidth=1.0))
    axes.text(x, y + panel + 0.4, one.layout, fontsize=11, fontweight="bold", va="bottom")
    axes.text(x - 0.5, y + panel / 2, "queries, with their rank", rotation=90, fontsize=8, ha="right", va="center")
    axes.text(x + panel / 2, y + panel + 0.21, "keys, with their rank", fontsize=8, ha="center", va="bottom")
    _number(axes, [(rank, len(list(group))) for rank, group in groupby(owned.tolist())], x, y + panel, side)
    work = [int(computed[owned == rank].sum()) for rank in range(one.n)]
    said = [f"scores of each rank: {', '.join(map(str, work))}", f"slowest ÷ mean: {max(work) * one.n / sum(work):.2f}"]
    if nothing := int((computed & ~visible).sum()):
        said.append(f"hatched, for nothing: {nothing} of {sum(work)}")
    axes.text(x, y - 0.08, "\n".join(said), fontsize=8, va="top", linespacing=1.35)


def _fill(axes: Axes, shown: np.ndarray, corner: tuple[float, float], side: float, look: Callable[[int], dict]) -> None:
    """Draws the cells that are True, those side by side as one box; look: of a row."""
    x, top = corner[0], corner[1] + len(shown) * side
    for row, line in enumerate(shown):
        edges = np.flatnonzero(np.diff(line, prepend=False, append=False))
        for start, end in zip(edges[::2], edges[1::2], strict=True):
            axes.add_patch(Rectangle((x + start * side, top - (row + 1) * side), (end - start) * side, side, **look(row)))


def _number(axes: Axes, groups: list[tuple[int, int]], x: float, y: float, side: float) -> None:
    """Writes ranks at rows and columns, x and y being the upper left corner; if they're too narrow, only how it begins."""
    least, start = min(length for _, length in groups) * side, 0.0
    if least < _LEGIBLE:
        first = ", ".join(str(rank) for rank, _ in groups[: max(groups)[0] + 2]) + ", …"
        axes.text(x - 0.06, y, first, fontsize=8, rotation=270, ha="right", va="top")
        axes.text(x, y + 0.05, first, fontsize=8, va="bottom")
        return
    for rank, length in groups:
        middle, size = start + length * side / 2, min(8, 55 * length * side)
        axes.text(x - 0.06, y - middle, f"rank {rank}" if least > 0.3 else rank, fontsize=size, ha="right", va="center")
        axes.text(x + middle, y + 0.05, rank, fontsize=size, ha="center", va="bottom")
        start += length * side


@style.styled
def hops(*layouts: str, n: int = 4, causal: bool = True) -> style.Figure:
    """Draws what each rank computes in each hop of the ring, a panel for each layout.

    A block has the source of its keys and values, its scores, and their share of the block; a thick frame is a rank for which
    the others wait. The sequence counts as so long that a single diagonal doesn't matter.
    layouts: theory.context.LAYOUTS, unless some are given
    n: ranks, 2 to 8
    Raises ValueError for unknown names, another n, and more than 16 columns in all.
    """
    layouts = _checked(layouts, n)
    if n * len(layouts) > 16:
        raise ValueError(f"n={n} with {len(layouts)} layouts: a picture has room for 16 columns, so show {16 // n} at once")
    side = min(0.8, (_WIDE - 0.7 * len(layouts)) / (n * len(layouts)), 7.0 / n - 0.36)
    fig, axes = sheet(max(0.05 + len(layouts) * (n * side + 0.7), 3.6), n * (side + 0.36) + 1.3)
    for place, layout in enumerate(layouts):
        _draw_hops(axes, layout, n, causal, 0.65 + place * (n * side + 0.7), side)
    return fig


def shares(layout: str, n: int, causal: bool = True) -> np.ndarray:
    """Returns what share of a block's scores each rank computes in each hop, of a long sequence: ranks × hops."""
    length = 2048  # of a shard: long enough that one diagonal does not count
    return np.round(np.array(context.work(n * length, n, layout, causal)) / length**2, 2)


def _draw_hops(axes: Axes, layout: str, n: int, causal: bool, x: float, side: float) -> None:
    owned, visible, _ = Masked(layout, n, 8 * n, causal=causal, order="ranks").scores()
    share, high, top = shares(layout, n, causal), side + 0.36, 0.7 + n * (side + 0.36)
    longest, shortest = share.max(axis=0), share.min(axis=0)
    axes.text(x, top + 0.3, layout, fontsize=11, fontweight="bold", va="bottom")
    axes.text(x - 0.06, top + 0.07, "hop", fontsize=8, ha="right", va="bottom")
    axes.text(x - 0.06, 0.6, "lasts", fontsize=8, ha="right", va="top")
    for hop in range(n):
        axes.text(x + (hop + 0.5) * side, top + 0.06, hop, fontsize=9, ha="center", va="bottom")
        axes.text(x + (hop + 0.5) * side, 0.6, _fraction(longest[hop]), fontsize=9, ha="center", va="top")
        for rank in range(n):
            source, waited = (rank - hop) % n, share[rank, hop] == longest[hop] > shortest[hop]
            texts, corner = (f"K,V {source}", _fraction(share[rank, hop]) or "waits"), (x + hop * side, top - (rank + 1) * high)
            shown = visible[np.ix_(owned == rank, owned == source)]
            _draw_block(axes, shown, LOOKS[source][0], texts, 2.4 if waited else 0.5, corner, side)
    for rank in range(n):
        axes.text(x - 0.06, top - (rank + 0.5) * high, f"rank {rank}", fontsize=8, ha="right", va="center")
    idle = 1 - share.sum() / (n * longest.sum())
    axes.text(x, 0.33, f"together: {longest.sum():g} whole blocks; idle: {idle:.0%}", fontsize=8, va="top")


def _fraction(share: float) -> str:
    return "½" if share == 0.5 else f"{share:g}" if share else ""


def _draw_block(
    axes: Axes, shown: np.ndarray, colour: str, texts: tuple[str, str], thick: float, corner: tuple[float, float], side: float
) -> None:
    """Draws a block's scores as a small mask, between its source and its share."""
    (x, y), small, high = corner, 0.62 * side, side + 0.36
    inside = x + 0.19 * side, y + (high - small) / 2
    _fill(axes, shown, inside, small / len(shown), lambda row: {"facecolor": colour, "linewidth": 0})
    axes.add_patch(Rectangle(inside, small, small, facecolor="none", edgecolor="#666666", linewidth=0.8))
    frame = {"facecolor": "none", "edgecolor": style.INK, "linewidth": thick}
    axes.add_patch(Rectangle((x + 0.03, y + 0.03), side - 0.06, high - 0.06, **frame))
    look = {"fontsize": min(8, max(6, 12 * side)), "ha": "center"}
    axes.text(x + side / 2, y + high - 0.06, texts[0], va="top", **look)
    axes.text(x + side / 2, y + 0.06, texts[1], va="bottom", **look)
