"""Chapter 07's figures: who has which tokens and computes which scores, how keys and values travel, each rank's work."""

from collections.abc import Mapping, Sequence
from itertools import accumulate, product

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap

from manyranks.show import drawings, style, units
from manyranks.show.lines import columns
from manyranks.show.style import LOOKS, box, sheet
from manyranks.theory import context
from manyranks.theory.names import nearest

ORDERS = ("sequence", "ranks")
_N = 4  # ranks, where none are given
_COLORS = ListedColormap([color for color, _ in LOOKS])
_LONG = 2048  # tokens of a shard: so many that one diagonal does not count
_ARROW = {"arrowstyle": "-|>", "color": style.INK, "linewidth": 1.3, "shrinkA": 0, "shrinkB": 0}


@style.styled
def balance(work: Mapping[str, Sequence[float]]) -> style.Figure:
    """Draws the FLOPs of each rank, a panel for each name, with the mean as a dashed line and slowest ÷ mean in words."""
    fig, panels = style.figure(columns=len(work), width=min(9.4, 1.2 + 2.9 * len(work)), height=3.2)
    top = max(map(max, work.values()))
    for axes, (name, numbers) in zip(panels, work.items(), strict=True):
        mean, n = sum(numbers) / len(numbers), len(numbers)
        columns(axes, range(n), [{"": numbers}], units.flops, gap=0.25)
        axes.axhline(mean, color=style.INK, linestyle="--", linewidth=1.4)
        axes.set(title=name, xlabel="rank", ylim=(0, 1.3 * top), xlim=(-0.6, n - 0.4), xticks=range(0, n, -(-n // 16)))
        axes.tick_params(labelleft=axes is panels[0])
        text = f"slowest ÷ mean: {max(numbers) / mean:.2f}\ndashed, the mean: {units.flops(mean)}"
        axes.text(0.03, 0.98, text, transform=axes.transAxes, fontsize=9, va="top")
    panels[0].set_ylabel("work of a rank")
    return fig


@style.styled
def layouts() -> style.Figure:
    """Draws the tokens of a sequence, each with its rank of 4, in every layout, and how many scores each rank computes."""
    seq, left, high, side = 4 * _N, 1.15, 0.62 + 3 * 0.62, 0.36
    end = left + seq * side
    fig, axes = sheet(end + 1.75, high)
    axes.text(left, high - 0.2, "the tokens of a sequence, each with its rank", fontsize=9, va="center")
    axes.text(end + 0.2, high - 0.2, "scores of each rank\nunder a causal mask", fontsize=8, va="center", linespacing=1.1)
    for place in range(seq):
        axes.text(left + (place + 0.5) * side, high - 0.65, place, ha="center", va="bottom", fontsize=7)
    for row, layout in enumerate(context.LAYOUTS):
        y, owned = high - 1.02 - 0.62 * row, context.owners(seq, _N, layout)
        axes.text(left - 0.12, y + 0.17, layout, fontsize=10, fontweight="bold", ha="right", va="center")
        for place, rank in enumerate(owned):
            box(axes, (left + place * side, y), side, 0.34, rank, str(rank), 8.5)
        ends = 0, *_ends(owned), seq
        axes.vlines([left + k * side for k in ends], y, y + 0.34, color=style.INK, linewidth=2)
        work = context.totals(context.work(seq, _N, layout))
        axes.text(end + 0.2, y + 0.17, ", ".join(map(str, work)), va="center", fontsize=9)
    return fig


def ring() -> style.Figure:
    """Draws which keys and values each of 4 ranks has at first and after a hop; its queries stay."""
    held = [[[f"K,V {k}" if k == (rank - hop) % _N else None for k in range(_N)] for rank in range(_N)] for hop in (0, 1)]
    return drawings.pieces({"at first": held[0], "hop 1": held[1]}, [("to the next", "queries stay", "")], ["gathered"] * 2)


def homeward() -> style.Figure:
    """Draws which block each of 4 ranks has after each hop of backward, and behind it its gradient."""
    held = {}
    for hop in range(1, _N + 1):
        blocks, home = [(rank - hop) % _N for rank in range(_N)], hop == _N
        own = {"dK": "gradients"} if home else {"K": "gathered", "dK": "gradients"}
        held["home" if home else f"hop {hop}"] = [[(f"{name} {k}", kind) for name, kind in own.items()] for k in blocks]
    return drawings.who_holds(held, height=1.2)


def behind_attention(messages: Mapping[str, float]) -> style.Figure:
    """Draws the hops of a ring of 4 on a lane of attention and one of messages.

    messages: title -> a message's time ÷ the time of a hop's attention
    """
    lanes = {}
    for title, ratio in messages.items():
        starts = [hop * max(1.0, ratio) for hop in range(_N)]
        attention = [(at, at + 1, f"attention {hop}", "compute") for hop, at in enumerate(starts)]
        network = [(at, at + ratio, f"keys and values {hop}", "gathered") for hop, at in enumerate(starts[:-1], 1)]
        lanes[title] = {"attention": attention, "network": network}
    return drawings.when(lanes, {title: [] for title in lanes})


@style.styled
def all_to_all(heads: int = 8, n: int = 4, kv_heads: int | None = None) -> style.Figure:
    """Draws Ulysses: before, a rank has all heads of its tokens; after the all-to-all, some heads of all tokens.

    heads: query heads, at most 8
    n: ranks, 2 to 4
    kv_heads: if they're fewer than ranks, each goes to all ranks whose queries read it
    Raises ValueError for other numbers, and those that don't divide each other as they must.
    """
    kv_heads = kv_heads or heads
    if heads > 8 or n not in range(2, 5):
        raise ValueError(f"heads={heads}, n={n!r}: a picture has room for 8 heads on 2 to 4 ranks")
    context.ulysses(1, n, heads, kv_heads, 1, n)  # raises
    received = max(kv_heads, n)
    keys = {"keys, values": (range(kv_heads), [k * kv_heads // received for k in range(received)])}
    own = range(heads), range(heads)
    panels = {"queries, keys, values": own} if kv_heads == heads else {"queries": own} | keys
    apart, many = 0.1 + 2.0 * len(panels), sum(len(each) for both in panels.values() for each in both)
    side, x = min(0.3, (9.4 - apart) / many), 0.55
    fig, axes = sheet(max(apart + many * side, 4.6), 2.8)
    for title, numbers in panels.items():
        x = 0.6 + _exchange(axes, x, side, title, n, *numbers)
    return fig


def _exchange(axes: Axes, x: float, side: float, title: str, n: int, before: Sequence[int], after: Sequence[int]) -> float:
    """Tokens × heads, before and after: the numbers of the heads in the columns. Returns where it ends."""
    high, y, wide, each = 1.75, 0.62, len(before) * side, len(after) // n * side
    start = x + wide + 1.0
    axes.text(x, 2.7, title, fontsize=11, fontweight="bold", va="top")
    axes.text(x - 0.08, y + high / 2, "tokens", rotation=90, fontsize=9, ha="right", va="center")
    for rank in range(n):
        text = f"rank {rank}" if wide > 0.8 else str(rank)
        box(axes, (x, y + high * (1 - (rank + 1) / n)), wide, high / n, rank, text, 9)
        box(axes, (start + rank * each, y), each, high, rank, str(rank), 9)
    axes.annotate("", (start - 0.15, y + high / 2), (x + wide + 0.15, y + high / 2), arrowprops=_ARROW)
    axes.text(start - 0.5, y + high / 2 + 0.07, "all-to-all", fontsize=9, ha="center", va="bottom")
    copied = ", copied" if len(after) > len(before) else ""
    for left, heads, said in ((x, before, "all heads, own tokens"), (start, after, f"own heads, all tokens{copied}")):
        axes.vlines([left + k * side for k in range(1, len(heads))], y, y + high, color="#666666", linestyle=":", linewidth=0.8)
        for place, head in enumerate(heads):
            axes.text(left + (place + 0.5) * side, y - 0.04, head, fontsize=7.5, ha="center", va="top")
        middle = left + len(heads) * side / 2
        axes.text(middle, y - 0.22, "head", fontsize=8, ha="center", va="top")
        axes.text(middle, y - 0.4, said, fontsize=8, style="italic", ha="center", va="top")
    return start + len(after) * side


def scores(
    layout: str, seq: int, tile: int | None = None, documents: Sequence[int] = (), order: str = "sequence"
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The rank of each token as drawn, and which scores of queries × keys are visible and computed; refuses what mask does."""
    context.work(seq, _N, layout, tile=tile)  # raises
    if documents and (sum(documents) != seq or min(documents) < 1):
        raise ValueError(f"documents={documents!r} have {sum(documents)} tokens, the sequence {seq}: give lengths that add up")
    if order not in ORDERS:
        raise ValueError(f"order={order!r}: {nearest(order, ORDERS)}")
    owned, document = np.array(context.owners(seq, _N, layout)), np.repeat(np.arange(len(documents) or 1), documents or seq)
    visible = np.tri(seq, dtype=bool) & (document[:, None] == document)
    computed = visible.copy()
    if tile is not None:
        chunks = [np.array(chunk) for rank in range(_N) for chunk in context.chunks(seq, _N, layout, rank)]
        tiles = [each for chunk in chunks for each in np.array_split(chunk, -(-len(chunk) // tile))]
        for pair in product(tiles, repeat=2):
            computed[np.ix_(*pair)] = visible[np.ix_(*pair)].any()
    drawn = np.argsort(owned, kind="stable") if order == "ranks" else np.arange(seq)
    return owned[drawn], visible[np.ix_(drawn, drawn)], computed[np.ix_(drawn, drawn)]


@style.styled
def mask(
    *layouts: str, seq: int = 16, tile: int | None = None, documents: Sequence[int] = (), order: str = "sequence"
) -> style.Figure:
    """Draws scores of queries (rows) with keys (columns), each in the color of its rank of 4; a panel for each layout.

    layouts: theory.context.LAYOUTS, unless some are given
    seq: tokens
    tile: most tokens of a tile of a rank's chunk; where any of a pair of tiles is visible, all of it is computed, and what is
        computed for nothing is hatched
    documents: their lengths; a token sees its own only, up to the dashed lines
    order: "sequence", or "ranks": by rank, so that a block of rows and columns is what a rank does in one hop

    Raises ValueError for unknown names, a seq without equal shards, and lengths that don't add up.
    """
    layouts = layouts or context.LAYOUTS
    found = [scores(layout, seq, tile, documents, order) for layout in layouts]
    side = min(3.4, 9.2 / len(layouts) - 0.75)
    fig, panels = style.figure(columns=len(layouts), width=len(layouts) * (side + 0.75), height=side + 1.65)
    for axes, layout, (owned, visible, computed) in zip(panels, layouts, found, strict=True):
        nothing, work = computed & ~visible, [int(computed[owned == rank].sum()) for rank in range(_N)]
        _fill(axes, np.where(visible, owned[:, None], np.nan), edgecolors="#78787840", linewidth=0.4)
        look = {"cmap": ListedColormap(["white"]), "hatch": "xxxxxx", "edgecolors": "#777777", "linewidth": 0}
        axes.pcolor(np.ma.masked_array(nothing, ~nothing), gid="for nothing", **look)
        by_ranks = order == "ranks"
        for end in _ends(owned) if by_ranks else accumulate(documents[:-1]):
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
        axes.set_yticks(places, names, rotation=270 if narrow else 0, va="top" if narrow else "center")
        said = [f"scores of each rank:\n{', '.join(map(str, work))}", f"slowest ÷ mean: {max(work) * _N / sum(work):.2f}"]
        if nothing.any():
            said.append(f"hatched, for nothing: {nothing.sum()} of {sum(work)}")
        axes.text(0, seq * 1.03, "\n".join(said), va="top", fontsize=8)
    return fig


def _ends(owned: Sequence[int]) -> np.ndarray:
    """The places of tokens that are another rank's than the one before."""
    return np.flatnonzero(np.diff(owned)) + 1


def _fill(axes: Axes, cells: np.ndarray, **look) -> None:
    """Draws a square of cells in the colors of these ranks, NaN for none, the first row on top."""
    axes.pcolormesh(cells, cmap=_COLORS, vmin=-0.5, vmax=len(LOOKS) - 0.5, gid="cells", **look)
    axes.set(xlim=(0, len(cells)), ylim=(len(cells), 0), aspect="equal", xticks=[], yticks=[])
    axes.tick_params(length=0, labelsize=8, grid_linewidth=0)
    axes.spines[:].set_visible(True)


def _numbers(owned: np.ndarray, side: float) -> tuple[Sequence[float], list[str]]:
    """Returns where to write which ranks, beside cells of so many inches; if they're too narrow, only how it begins."""
    ends = np.array([0, *_ends(owned), len(owned)])
    names = [str(rank) for rank in owned[ends[:-1]]]
    if np.diff(ends).min() * side < 0.1:
        return [0], [", ".join((*names[: max(owned) + 2], "…"))]
    return (ends[:-1] + ends[1:]) / 2, names


@style.styled
def hops(layout: str) -> style.Figure:
    """Draws what each of 4 ranks computes in each hop of a ring: its scores, their share of the block, whose keys they are.

    A thick frame is a rank for which the others wait. The sequence counts as so long that a single diagonal doesn't matter.
    Raises ValueError for an unknown layout.
    """
    (owned, visible, _), share = scores(layout, 8 * _N, order="ranks"), shares(layout)
    longest, shortest = share.max(axis=0), share.min(axis=0)
    idle = 1 - share.mean(axis=0).sum() / longest.sum()
    fig, panels = style.figure(columns=_N, rows=_N, width=0.4 + 0.8 * _N, height=0.9 + 1.1 * _N)
    for axes, (rank, hop) in zip(panels, np.ndindex(_N, _N), strict=True):
        source, own = (rank - hop) % _N, share[rank, hop]
        _fill(axes, np.where(visible[np.ix_(owned == rank, owned == source)], source, np.nan))
        above = f"hop {hop}\nK,V {source}" if rank == 0 else f"K,V {source}"
        axes.set_title(above, fontsize=8, weight="normal", loc="center", pad=3)
        said = {0: "waits", 0.5: "½"}.get(own, f"{own:g}"), {0.5: "½"}.get(longest[hop], f"{longest[hop]:g}")
        axes.set_xlabel("\nlasts ".join(said if rank == _N - 1 else said[:1]), fontsize=8)
        axes.set_ylabel(f"rank {rank}" if hop == 0 else "", fontsize=8, rotation=0, ha="right", va="center")
        axes.spines[:].set_linewidth(2.4 if own == longest[hop] > shortest[hop] else 0.5)
    fig.suptitle(layout, fontsize=11, weight="bold")
    fig.supxlabel(f"together: {longest.sum():g} whole blocks; idle: {idle:.0%}", fontsize=9)
    return fig


def shares(layout: str) -> np.ndarray:
    """Returns what share of a block's scores each rank computes in each hop, of a long sequence: ranks × hops."""
    return np.round(np.array(context.work(_N * _LONG, _N, layout)) / _LONG**2, 2)
