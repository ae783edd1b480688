"""Chapter 07's pictures: which rank has which tokens, how keys and values travel in the ring, and Ulysses' exchange."""

from collections.abc import Sequence

from matplotlib.axes import Axes

from manyranks.show import style
from manyranks.show.looks import LOOKS, box, sheet
from manyranks.theory import context

MOST = len(LOOKS)
_ARROW = {"arrowstyle": "-|>", "color": style.INK, "linewidth": 1.3, "shrinkA": 0, "shrinkB": 0}


def owners(layout: str, seq: int, n: int) -> list[int]:
    """For each token of the sequence the rank that has it. Raises ValueError as theory.context.work does."""
    owned = [0] * seq
    for rank in range(n):
        for chunk in context.chunks(seq, n, layout, rank):
            owned[chunk.start : chunk.stop : chunk.step] = [rank] * len(chunk)
    return owned


@style.styled
def layouts(n: int = 4) -> style.Figure:
    """The tokens of a sequence of 4n, each with the rank that has it, in every layout; at the right, how many scores a rank
    computes under a causal mask. Raises ValueError for n not 2 to 8.
    """
    ranks(n)
    seq, left, right = 4 * n, 1.15, 1.75
    side = min(0.36, 6.4 / seq)
    wide, high = left + seq * side + right, 0.62 + 3 * 0.62
    fig, axes = sheet(wide, high)
    end = left + seq * side
    axes.text(left, high - 0.2, "the tokens of a sequence, each with its rank", fontsize=9, va="center")
    axes.text(end + 0.2, high - 0.2, "scores of each rank\nunder a causal mask", fontsize=8, va="center", linespacing=1.1)
    for row, layout in enumerate(context.LAYOUTS):
        y, owned = high - 1.02 - 0.62 * row, owners(layout, seq, n)
        axes.text(left - 0.12, y + 0.17, layout, fontsize=10, fontweight="bold", ha="right", va="center")
        for place, rank in enumerate(owned):
            box(axes, (left + place * side, y), side, 0.34, rank, str(rank), 8.5)
            if not row:
                axes.text(left + (place + 0.5) * side, y + 0.37, place, ha="center", va="bottom", fontsize=7)
        _chunks(axes, owned, left, y, side)
        work = context.totals(context.work(seq, n, layout))
        axes.text(end + 0.2, y + 0.17, ", ".join(map(str, work)), va="center", fontsize=9 if n <= 4 else 7)
    return fig


def _chunks(axes: Axes, owned: list[int], left: float, y: float, side: float) -> None:
    """A thick line where the next token is another rank's."""
    for place in (0, *(k for k in range(1, len(owned)) if owned[k] != owned[k - 1]), len(owned)):
        axes.plot([left + place * side] * 2, [y, y + 0.34], color=style.INK, linestyle="-", linewidth=2)


@style.styled
def ring(n: int = 4, hop: int | Sequence[int] = (0, 1)) -> style.Figure:
    """Which keys and values each rank has after so many hops; its queries stay. hop: one, or several below each other.

    Raises ValueError for n not 2 to 8, and a hop that is not 0 to n − 1.
    """
    ranks(n)
    shown = (hop,) if isinstance(hop, int) else tuple(hop)
    if not shown or any(k not in range(n) for k in shown):
        raise ValueError(f"hop={hop!r} of {n} ranks: after the first block there are hops 1 to {n - 1}; give 0 to {n - 1}")
    left, step = 1.5, min(1.75, 7.9 / n)
    fig, axes = sheet(left + n * step + 0.1, 0.35 + 1.62 * len(shown))
    for rank in range(n):
        axes.text(left + (rank + 0.36) * step, axes.get_ylim()[1] - 0.2, f"rank {rank}", fontsize=9, ha="center", va="center")
    for place, k in enumerate(shown):
        _hop(axes, n, k, left, step, axes.get_ylim()[1] - 0.35 - 1.62 * (place + 1))
    return fig


def _hop(axes: Axes, n: int, hop: int, left: float, step: float, y: float) -> None:
    wide, last = 0.72 * step, hop == n - 1
    axes.text(0.1, y + 1.05, f"hop {hop}" if hop else "at first", fontsize=10, fontweight="bold", va="center")
    for rank in range(n):
        x, source = left + rank * step, (rank - hop) % n
        box(axes, (x, y + 0.98), wide, 0.4, rank, f"Q {rank}", 9)
        box(axes, (x, y + 0.5), wide, 0.4, source, f"K,V {source}", 9)
        if rank < n - 1 and not last:
            axes.annotate("", (x + step, y + 0.7), (x + wide, y + 0.7), arrowprops=_ARROW)
    axes.text(left - 0.1, y + 1.18, "stays", fontsize=8, style="italic", ha="right", va="center")
    axes.text(left - 0.1, y + 0.7, "all seen" if last else "goes on", fontsize=8, style="italic", ha="right", va="center")
    if not last:
        first, end = left + wide / 2, left + (n - 1) * step + wide / 2
        axes.plot([end, end, first], [y + 0.5, y + 0.24, y + 0.24], color=style.INK, linestyle="-", linewidth=1.3)
        axes.annotate("", (first, y + 0.5), (first, y + 0.235), arrowprops=_ARROW)


@style.styled
def all_to_all(heads: int = 8, n: int = 4, kv_heads: int | None = None) -> style.Figure:
    """Ulysses: before, a rank has all heads of its tokens; after the all-to-all some heads of all tokens. With fewer key/value
    heads than ranks each goes to all ranks whose queries read it.

    Raises ValueError for more than 16 heads, n not 2 to 8, and numbers that do not divide each other as they must.
    """
    ranks(n)
    kv_heads = heads if kv_heads is None else kv_heads
    numbers = f"heads={heads!r}, kv_heads={kv_heads!r}, n={n}"
    if not all(type(each) is int and 1 <= each <= 16 for each in (heads, kv_heads)):
        raise ValueError(f"{numbers}: a picture has room for 1 to 16 heads")
    if heads % kv_heads or heads % n or (kv_heads % n and n % kv_heads):
        raise ValueError(f"{numbers}: kv_heads and n must divide heads, and one of kv_heads and n the other")
    grouped, received = kv_heads < heads, max(kv_heads, n)
    columns = 2 * heads + (kv_heads + received if grouped else 0)
    apart = (3.7 if grouped else 1.7) + 0.4
    side = min(0.3, (9.4 - apart) / columns)
    fig, axes = sheet(max(apart + columns * side, 4.6), 2.8)
    title = "queries" if grouped else "queries, keys, values"
    x = _exchange(axes, 0.55, side, title, n, [range(heads)] * 2)
    if grouped:
        _exchange(
            axes, x + 0.6, side, "keys, values", n, [range(kv_heads), [k * kv_heads // received for k in range(received)]]
        )
    return fig


def _exchange(axes: Axes, x: float, side: float, title: str, n: int, numbers: list[Sequence[int]]) -> float:
    """Tokens × heads, before and after. numbers: of the heads in the columns, twice. Returns where it ends."""
    before, after = numbers
    high, y, wide = 1.75, 0.62, len(before) * side
    axes.text(x, 2.7, title, fontsize=11, fontweight="bold", va="top")
    for rank in range(n):
        text = f"rank {rank}" if wide > 0.8 else str(rank)
        box(axes, (x, y + high * (1 - (rank + 1) / n)), wide, high / n, rank, text, 9)
    axes.text(x - 0.08, y + high / 2, "tokens", rotation=90, fontsize=9, ha="right", va="center")
    _columns(axes, x, y, high, side, before, "all heads, own tokens")
    start = x + wide + 1.0
    axes.annotate("", (start - 0.15, y + high / 2), (x + wide + 0.15, y + high / 2), arrowprops=_ARROW)
    axes.text(start - 0.5, y + high / 2 + 0.07, "all-to-all", fontsize=9, ha="center", va="bottom")
    each = len(after) // n * side
    for rank in range(n):
        narrow = each < 0.2
        box(axes, (start + rank * each, y), each, high, rank, "" if narrow else str(rank), 9)
        if narrow:
            axes.text(start + (rank + 0.5) * each, y + high + 0.02, rank, fontsize=8, ha="center", va="bottom")
    _columns(axes, start, y, high, side, after, "own heads, all tokens" + ", copied" * (len(after) > len(before)))
    return start + len(after) * side


def _columns(axes: Axes, x: float, y: float, high: float, side: float, numbers: Sequence[int], said: str) -> None:
    """Lines between heads, their numbers, and what a rank has."""
    for place, head in enumerate(numbers):
        if place:
            axes.plot([x + place * side] * 2, [y, y + high], color="#666666", linestyle=":", linewidth=0.8)
        if side > 0.15 or not head % 4:
            axes.text(x + (place + 0.5) * side, y - 0.04, head, fontsize=7.5, ha="center", va="top")
    middle = x + len(numbers) * side / 2
    axes.text(middle, y - 0.22, "head", fontsize=8, ha="center", va="top")
    axes.text(middle, y - 0.4, said, fontsize=8, style="italic", ha="center", va="top")


def ranks(n: int) -> None:
    """Raises ValueError for a number of ranks that a picture cannot tell apart."""
    if type(n) is not int or not 2 <= n <= MOST:
        raise ValueError(f"n={n!r}: a picture shows 2 to {MOST} ranks")
