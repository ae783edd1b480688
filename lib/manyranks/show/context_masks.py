"""Chapter 07's masks: which rank computes which scores, all at once and hop by hop."""

from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby, product
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from manyranks.show import style
from manyranks.show.context_pictures import owners, ranks
from manyranks.show.looks import LOOKS, sheet
from manyranks.theory import context
from manyranks.theory.names import nearest

ORDERS = ("sequence", "ranks")
_LONGEST = 64  # tokens of a picture
_WIDE = 9.4  # inches of a figure
_LEGIBLE = 0.1  # inches of a rank's rows, for its number
_FOR_NOTHING = {"facecolor": "white", "hatch": "xxxxxx", "edgecolor": "#777777", "linewidth": 0.0}


class Scores(NamedTuple):
    """Of queries × keys, as rows and columns. ranks: of each row and column, in the order drawn."""

    ranks: list[int]
    visible: np.ndarray
    computed: np.ndarray

    def of(self, rank: int) -> int:
        """Scores that this rank computes, those for nothing too."""
        return int(self.computed[np.array(self.ranks) == rank].sum())


class Masked(NamedTuple):
    """An attention over a sequence that n ranks share; the fields are what `mask` takes."""

    layout: str
    n: int
    seq: int
    tile: int | None = None
    causal: bool = True
    documents: Sequence[int] = ()
    order: str = "sequence"

    def check(self) -> None:
        context.work(self.seq, self.n, self.layout, tile=self.tile)  # raises
        if self.seq > _LONGEST:
            raise ValueError(f"seq={self.seq}: a picture has room for {_LONGEST} tokens")
        if self.documents and (sum(self.documents) != self.seq or min(self.documents) < 1):
            given = f"documents={self.documents!r} have {sum(self.documents)} tokens"
            raise ValueError(f"{given}, the sequence {self.seq}: give lengths of 1 or more that add up")
        if self.order not in ORDERS:
            raise ValueError(f"order={self.order!r}: {nearest(self.order, ORDERS)}")

    def scores(self) -> Scores:
        owned = np.array(owners(self.layout, self.seq, self.n))
        document = np.repeat(np.arange(len(self.documents)), self.documents) if self.documents else np.zeros(self.seq)
        visible = document[:, None] == document[None]
        if self.causal:
            visible &= np.tri(self.seq, dtype=bool)
        computed = visible if self.tile is None else _by_tiles(visible, list(self._tiles()))
        drawn = np.argsort(owned, kind="stable") if self.order == "ranks" else np.arange(self.seq)
        both = np.ix_(drawn, drawn)
        return Scores(owned[drawn].tolist(), visible[both], computed[both])

    def _tiles(self) -> Iterator[np.ndarray]:
        """The tokens of each tile of each rank."""
        for rank in range(self.n):
            for chunk in context.chunks(self.seq, self.n, self.layout, rank):
                yield from np.array_split(np.array(chunk), -(-len(chunk) // self.tile))


def _by_tiles(visible: np.ndarray, tiles: list[np.ndarray]) -> np.ndarray:
    computed = np.zeros_like(visible)
    for rows, columns in product(tiles, tiles):
        computed[np.ix_(rows, columns)] = visible[np.ix_(rows, columns)].any()
    return computed


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
    """Scores of queries (rows) with keys (columns), each in the colour of the rank that computes it; a panel for each layout.

    tile: a rank's tokens are cut, chunk by chunk, into tiles of at most so many, and a pair of tiles is computed whole where
    any of it is visible: what is computed for nothing is hatched. documents: their lengths; a token sees its own only, up to
    the dashed lines.
    order: "sequence", or "ranks": by rank, so that a block of rows and columns is what a rank does in one hop.
    Raises ValueError for unknown names, n not 2 to 8, a seq above 64 or without equal shards, and lengths that do not add up.
    """
    each = [Masked(layout, n, seq, tile, causal, documents, order) for layout in _checked(layouts, n)]
    for one in each:
        one.check()
    panel = min(3.4, (_WIDE - 0.9 * len(each)) / len(each))
    fig, axes = sheet(0.2 + len(each) * (panel + 0.85), panel + 1.35)
    for place, one in enumerate(each):
        scores, corner = one.scores(), (0.85 + place * (panel + 0.85), 0.72)
        _draw_scores(axes, scores, corner, panel)
        _draw_ends(axes, one, scores, corner, panel)
        _captions(axes, one.layout, scores, corner, panel)
    return fig


def _checked(layouts: Sequence[str], n: int) -> Sequence[str]:
    ranks(n)
    for layout in layouts:
        if layout not in context.LAYOUTS:
            raise ValueError(f"layout {layout!r}: {nearest(layout, context.LAYOUTS)}")
    return layouts or context.LAYOUTS


def _draw_scores(axes: Axes, scores: Scores, corner: tuple[float, float], panel: float) -> None:
    (x, y), seq = corner, len(scores.ranks)
    side = panel / seq
    for row, rank in enumerate(scores.ranks):
        below = y + panel - (row + 1) * side
        looks = {"facecolor": LOOKS[rank][0], "linewidth": 0.0}, _FOR_NOTHING
        for shown, look in zip((scores.visible, scores.computed & ~scores.visible), looks, strict=True):
            for start, length in _runs(shown[row]):
                axes.add_patch(Rectangle((x + start * side, below), length * side, side, **look))
    lines = {"color": "#bbbbbb", "linestyle": "-", "linewidth": 0.4}
    _grid(axes, corner, panel, [k * side for k in range(1, seq)], lines)
    axes.add_patch(Rectangle(corner, panel, panel, facecolor="none", edgecolor=style.INK, linewidth=1.0))


def _draw_ends(axes: Axes, one: Masked, scores: Scores, corner: tuple[float, float], panel: float) -> None:
    """Lines where a rank's block ends, or a document."""
    if one.order == "ranks":
        ends, line = [k for k in range(1, one.seq) if scores.ranks[k] != scores.ranks[k - 1]], "-"
    else:
        ends, line = list(accumulate(one.documents[:-1])), "--"
    look = {"color": style.INK, "linestyle": line, "linewidth": 1.0}
    _grid(axes, corner, panel, [end * panel / one.seq for end in ends], look)


def _grid(axes: Axes, corner: tuple[float, float], panel: float, places: Sequence[float], look: dict) -> None:
    x, y = corner
    axes.vlines([x + place for place in places], y, y + panel, **look)
    axes.hlines([y + panel - place for place in places], x, x + panel, **look)


def _runs(shown: np.ndarray) -> Iterator[tuple[int, int]]:
    """Start and length of each run of True."""
    edges = np.flatnonzero(np.diff(shown, prepend=False, append=False))
    return ((int(start), int(end - start)) for start, end in zip(edges[::2], edges[1::2], strict=True))


def _captions(axes: Axes, layout: str, scores: Scores, corner: tuple[float, float], panel: float) -> None:
    (x, y), side = corner, panel / len(scores.ranks)
    axes.text(x, y + panel + 0.4, layout, fontsize=11, fontweight="bold", va="bottom")
    groups = [(rank, len(list(group))) for rank, group in groupby(scores.ranks)]
    least = min(length for _, length in groups) * side
    if least < _LEGIBLE:
        first = ", ".join(str(rank) for rank, _ in groups[: max(scores.ranks) + 2]) + ", …"
        axes.text(x - 0.06, y + panel, first, fontsize=8, rotation=270, ha="right", va="top")
        axes.text(x, y + panel + 0.05, first, fontsize=8, va="bottom")
    start = 0.0
    for rank, length in groups if least >= _LEGIBLE else ():
        middle, size = start + length * side / 2, min(8, 55 * length * side)
        text = f"rank {rank}" if least > 0.3 else rank
        axes.text(x - 0.06, y + panel - middle, text, fontsize=size, ha="right", va="center")
        axes.text(x + middle, y + panel + 0.05, rank, fontsize=size, ha="center", va="bottom")
        start += length * side
    axes.text(x - 0.5, y + panel / 2, "queries, with their rank", rotation=90, fontsize=8, ha="right", va="center")
    axes.text(x + panel / 2, y + panel + 0.21, "keys, with their rank", fontsize=8, ha="center", va="bottom")
    n = max(scores.ranks) + 1
    work = [scores.of(rank) for rank in range(n)]
    said = [f"scores of each rank: {', '.join(map(str, work))}", f"slowest ÷ mean: {max(work) * n / sum(work):.2f}"]
    if nothing := int((scores.computed & ~scores.visible).sum()):
        said.append(f"hatched, for nothing: {nothing} of {sum(work)}")
    axes.text(x, y - 0.08, "\n".join(said), fontsize=8, va="top", linespacing=1.35)


@style.styled
def hops(*layouts: str, n: int = 4, causal: bool = True) -> style.Figure:
    """What each rank computes in each hop of the ring: the source of its keys and values, the scores of that block, and their
    share of the block. A thick frame: a rank that the others wait for. A panel for each layout.

    Shares are those of a sequence so long that a single diagonal does not count. Raises ValueError for unknown names, n not
    2 to 8, and more than 16 columns in all.
    """
    layouts = _checked(layouts, n)
    if n * len(layouts) > 16:
        raise ValueError(f"n={n} with {len(layouts)} layouts: a picture has room for 16 columns, so show {16 // n} at once")
    side = min(0.8, (_WIDE - 0.7 * len(layouts)) / (n * len(layouts)), 7.0 / n - 0.36)
    high = side + 0.36
    fig, axes = sheet(max(0.05 + len(layouts) * (n * side + 0.7), 3.6), n * high + 1.3)
    for place, layout in enumerate(layouts):
        _draw_hops(axes, layout, n, causal, 0.65 + place * (n * side + 0.7), side, high)
    return fig


class Block(NamedTuple):
    """Of a rank's queries with a source's keys. share: of its scores that are computed; waited: other ranks wait for it."""

    rank: int
    source: int
    share: float
    waited: bool


def blocks(layout: str, n: int, causal: bool) -> list[list[Block]]:
    """Of each rank, in each hop."""
    length = 2048  # of a shard: long enough that one diagonal does not count
    work = context.work(n * length, n, layout, causal)
    shares = [[round(count / length**2, 2) for count in hops] for hops in work]
    found = []
    for rank, own in enumerate(shares):
        columns = [[row[hop] for row in shares] for hop in range(n)]
        waited = [share == max(column) > min(column) for share, column in zip(own, columns, strict=True)]
        found.append([Block(rank, (rank - hop) % n, own[hop], waited[hop]) for hop in range(n)])
    return found


def _draw_hops(axes: Axes, layout: str, n: int, causal: bool, x: float, side: float, high: float) -> None:
    scores, each = Masked(layout, n, 8 * n, causal=causal, order="ranks").scores(), blocks(layout, n, causal)
    longest, top = [max(row[hop].share for row in each) for hop in range(n)], 0.7 + n * high
    axes.text(x, top + 0.3, layout, fontsize=11, fontweight="bold", va="bottom")
    for hop in range(n):
        axes.text(x + (hop + 0.5) * side, top + 0.06, hop, fontsize=9, ha="center", va="bottom")
        axes.text(x + (hop + 0.5) * side, 0.6, _fraction(longest[hop]), fontsize=9, ha="center", va="top")
    for rank, row in enumerate(each):
        y = top - (rank + 1) * high
        axes.text(x - 0.06, y + high / 2, f"rank {rank}", fontsize=8, ha="right", va="center")
        for hop, block in enumerate(row):
            _draw_block(axes, scores, block, (x + hop * side, y), side, high)
    axes.text(x - 0.06, top + 0.07, "hop", fontsize=8, ha="right", va="bottom")
    axes.text(x - 0.06, 0.6, "lasts", fontsize=8, ha="right", va="top")
    idle = 1 - sum(block.share for row in each for block in row) / (n * sum(longest))
    axes.text(x, 0.33, f"together: {sum(longest):g} whole blocks; idle: {idle:.0%}", fontsize=8, va="top")


def _fraction(share: float) -> str:
    return "½" if share == 0.5 else f"{share:g}"


def _draw_block(axes: Axes, scores: Scores, block: Block, corner: tuple[float, float], side: float, high: float) -> None:
    """A block's scores as a small mask, between its source and its share."""
    (x, y), small, own = corner, 0.62 * side, np.array(scores.ranks)
    left, below = x + 0.19 * side, y + (high - small) / 2
    shown = scores.visible[np.ix_(own == block.rank, own == block.source)]
    each = small / len(shown)
    for row, line in enumerate(shown):
        for start, length in _runs(line):
            place = left + start * each, below + small - (row + 1) * each
            axes.add_patch(Rectangle(place, length * each, each, facecolor=LOOKS[block.source][0], linewidth=0))
    axes.add_patch(Rectangle((left, below), small, small, facecolor="none", edgecolor="#666666", linewidth=0.8))
    frame = {"facecolor": "none", "edgecolor": style.INK, "linewidth": 2.4 if block.waited else 0.5}
    axes.add_patch(Rectangle((x + 0.03, y + 0.03), side - 0.06, high - 0.06, **frame))
    look = {"fontsize": min(8, max(6, 12 * side)), "ha": "center"}
    axes.text(x + side / 2, y + high - 0.06, f"K,V {block.source}", va="top", **look)
    axes.text(x + side / 2, y + 0.06, _fraction(block.share) if block.share else "waits", va="bottom", **look)
