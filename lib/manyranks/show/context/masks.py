"""Chapter 07's masks: which rank computes which scores, all at once and hop by hop."""

from collections.abc import Sequence
from itertools import accumulate, groupby, product

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap

from manyranks.show import style
from manyranks.show.context.figures import ranks
from manyranks.show.looks import LOOKS
from manyranks.theory import context
from manyranks.theory.names import nearest

ORDERS = ("sequence", "ranks")
_COLOURS = ListedColormap([colour for colour, _ in LOOKS])
_LEGIBLE = 0.1  # inches of a rank's rows, for its number


def scores(
    layout: str, n: int, seq: int, tile: int | None = None, documents: Sequence[int] = (), order: str = "sequence"
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the rank of each token, in the order drawn, and which scores of queries × keys are visible and computed.

    What it takes, and refuses, is what `mask` does.
    """
    context.work(seq, n, layout, tile=tile)  # raises
    if documents and (sum(documents) != seq or min(documents) < 1):
        given = f"documents={documents!r} have {sum(documents)} tokens"
        raise ValueError(f"{given}, the sequence {seq}: give lengths of 1 or more that add up")
    if order not in ORDERS:
        raise ValueError(f"order={order!r}: {nearest(order, ORDERS)}")
    owned, document = np.array(context.owners(seq, n, layout)), np.repeat(np.arange(len(documents) or 1), documents or seq)
    visible = np.tri(seq, dtype=bool) & (document[:, None] == document)
    computed = visible.copy()
    if tile is not None:
        chunks = [np.array(chunk) for rank in range(n) for chunk in context.chunks(seq, n, layout, rank)]
        tiles = [each for chunk in chunks for each in np.array_split(chunk, -(-len(chunk) // tile))]
        for pair in product(tiles, repeat=2):
            computed[np.ix_(*pair)] = visible[np.ix_(*pair)].any()
    drawn = np.argsort(owned, kind="stable") if order == "ranks" else np.arange(seq)
    return owned[drawn], visible[np.ix_(drawn, drawn)], computed[np.ix_(drawn, drawn)]


@style.styled
def mask(
    *layouts: str,
    n: int = 4,
    seq: int = 16,
    tile: int | None = None,
    documents: Sequence[int] = (),
    order: str = "sequence",
) -> style.Figure:
    """Draws scores of queries (rows) with keys (columns), each in its rank's colour; a panel for each layout.

    layouts: theory.context.LAYOUTS, unless some are given
    n: ranks, 2 to 8
    seq: tokens
    tile: a rank's tokens are cut, chunk by chunk, into tiles of at most so many; where any of a pair of tiles is visible, all
        of it is computed, and what is computed for nothing is hatched
    documents: their lengths; a token sees its own only, up to the dashed lines
    order: "sequence", or "ranks": by rank, so that a block of rows and columns is what a rank does in one hop
    Raises ValueError for unknown names, another n, a seq without equal shards, and lengths that don't add up.
    """
    ranks(n)
    layouts = layouts or context.LAYOUTS
    found = [scores(layout, n, seq, tile, documents, order) for layout in layouts]
    side = min(3.4, 9.2 / len(layouts) - 0.75)
    fig, panels = style.figure(columns=len(layouts), width=len(layouts) * (side + 0.75), height=side + 1.65)
    for axes, layout, (owned, visible, computed) in zip(panels, layouts, found, strict=True):
        nothing, work = computed & ~visible, [int(computed[owned == rank].sum()) for rank in range(n)]
        _fill(axes, np.where(visible, owned[:, None], np.nan), edgecolors="#bbbbbb", linewidth=0.4)
        hatched = np.ma.masked_array(nothing, ~nothing)
        axes.pcolor(
            hatched, cmap=ListedColormap(["white"]), hatch="xxxxxx", edgecolors="#777777", linewidth=0, gid="for nothing"
        )
        by_ranks = order == "ranks"
        for end in [k for k in range(1, seq) if owned[k] != owned[k - 1]] if by_ranks else accumulate(documents[:-1]):
            for line in (axes.axhline, axes.axvline):
                line(end, color=style.INK, linestyle="-" if by_ranks else "--", linewidth=1.0)
        axes.xaxis.tick_top()
        axes.xaxis.set_label_position("top")
        axes.set_title(layout)
        axes.set_xlabel("keys, with their rank", fontsize=8)
        axes.set_ylabel("queries, with their rank", fontsize=8)
        places, names = _numbers(owned, side / seq)
        narrow = len(places) == 1
        axes.set_xticks(places, names, ha="left" if narrow else "center")
        axes.set_yticks(places, names, rotation=270 * narrow, va="top" if narrow else "center")
        said = [f"scores of each rank:\n{', '.join(map(str, work))}", f"slowest ÷ mean: {max(work) * n / sum(work):.2f}"]
        said += [f"hatched, for nothing: {nothing.sum()} of {sum(work)}"] * bool(nothing.any())
        axes.text(0, seq * 1.03, "\n".join(said), va="top", fontsize=8)
    return fig


def _fill(axes: Axes, cells: np.ndarray, **look) -> None:
    """Draws a square of cells in the colours of these ranks, NaN for none, the first row on top."""
    axes.pcolormesh(cells, cmap=_COLOURS, vmin=-0.5, vmax=len(LOOKS) - 0.5, gid="cells", **look)
    axes.set(xlim=(0, len(cells)), ylim=(len(cells), 0), aspect="equal", xticks=[], yticks=[])
    axes.tick_params(length=0, labelsize=8)
    axes.grid(visible=False)
    axes.spines[:].set_visible(True)


def _numbers(owned: np.ndarray, side: float) -> tuple[list[float], list[str]]:
    """Where to write which ranks, beside cells of so many inches; if they're too narrow, only how it begins."""
    groups = [(str(rank), len(list(group))) for rank, group in groupby(owned)]
    names, sizes = zip(*groups, strict=True)
    if min(sizes) * side < _LEGIBLE:
        return [0], [", ".join((*names[: max(owned) + 2], "…"))]
    return [end - size / 2 for end, size in zip(accumulate(sizes), sizes, strict=True)], list(names)


@style.styled
def hops(layout: str, n: int = 4) -> style.Figure:
    """Draws what each rank computes in each hop of the ring: its scores, their share of the block, and whose keys they are.

    A thick frame is a rank for which the others wait. The sequence counts as so long that a single diagonal doesn't matter.
    n: ranks, 2 to 8
    Raises ValueError for an unknown layout, and another n.
    """
    ranks(n)
    (owned, visible, _), share = scores(layout, n, 8 * n, order="ranks"), shares(layout, n)
    longest, shortest = share.max(axis=0), share.min(axis=0)
    idle = 1 - share.mean(axis=0).sum() / longest.sum()
    fig, panels = style.figure(columns=n, rows=n, width=max(0.4 + 0.8 * n, 3.6), height=0.9 + 1.1 * n)
    for axes, (rank, hop) in zip(panels, np.ndindex(n, n), strict=True):
        source, own = (rank - hop) % n, share[rank, hop]
        _fill(axes, np.where(visible[np.ix_(owned == rank, owned == source)], source, np.nan))
        axes.set_title(f"hop {hop}\n" * (rank == 0) + f"K,V {source}", fontsize=8, weight="normal", loc="center", pad=3)
        axes.set_xlabel((_fraction(own) or "waits") + f"\nlasts {_fraction(longest[hop])}" * (rank == n - 1), fontsize=8)
        axes.set_ylabel(f"rank {rank}" * (hop == 0), fontsize=8, rotation=0, ha="right", va="center")
        axes.spines[:].set_linewidth(2.4 if own == longest[hop] > shortest[hop] else 0.5)
    fig.suptitle(layout, fontsize=11, weight="bold")
    fig.supxlabel(f"together: {longest.sum():g} whole blocks; idle: {idle:.0%}", fontsize=9)
    return fig


def shares(layout: str, n: int) -> np.ndarray:
    """Returns what share of a block's scores each rank computes in each hop, of a long sequence: ranks × hops."""
    length = 2048  # of a shard: long enough that one diagonal does not count
    return np.round(np.array(context.work(n * length, n, layout)) / length**2, 2)


def _fraction(share: float) -> str:
    return "½" if share == 0.5 else f"{share:g}" if share else ""
