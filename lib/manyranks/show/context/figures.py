"""Chapter 07's figures: who has which tokens, how keys and values travel, Ulysses' exchange, and each rank's work."""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter

from manyranks.show import drawings, style
from manyranks.show.looks import LOOKS, box, sheet
from manyranks.theory import context

_ARROW = {"arrowstyle": "-|>", "color": style.INK, "linewidth": 1.3, "shrinkA": 0, "shrinkB": 0}


@style.styled
def balance(work: Mapping[str, Sequence[float]]) -> style.Figure:
    """Draws the FLOPs of each rank, a panel for each name, with the mean as a dashed line and slowest ÷ mean in words."""
    fig, panels = style.figure(columns=len(work), width=min(9.4, 1.2 + 2.9 * len(work)), height=3.2)
    top, said = max(map(max, work.values())), EngFormatter("FLOP")
    for axes, (name, numbers) in zip(panels, work.items(), strict=True):
        mean, n = sum(numbers) / len(numbers), len(numbers)
        axes.bar(range(n), numbers, 0.7, color=style.BLUE, edgecolor="white")
        axes.axhline(mean, color=style.INK, linestyle="--", linewidth=1.4)
        axes.set(title=name, xlabel="rank", ylim=(0, 1.3 * top), xlim=(-0.6, n - 0.4), xticks=range(0, n, -(-n // 16)))
        axes.yaxis.set_major_formatter(said)
        axes.grid(visible=False, axis="x")
        axes.tick_params(labelleft=axes is panels[0])
        text = f"slowest ÷ mean: {max(numbers) / mean:.2f}\ndashed, the mean: {said(float(f'{mean:.3g}'))}"
        axes.text(0.03, 0.98, text, transform=axes.transAxes, fontsize=9, va="top")
    panels[0].set_ylabel("work of a rank")
    return fig


@style.styled
def layouts(n: int = 4) -> style.Figure:
    """Draws the tokens of a sequence of 4n, each with its rank, in every layout, and how many scores a rank computes.

    n: ranks, 2 to 8; otherwise raises ValueError
    """
    ranks(n)
    seq, left, high = 4 * n, 1.15, 0.62 + 3 * 0.62
    side = min(0.36, 6.4 / seq)
    end = left + seq * side
    fig, axes = sheet(end + 1.75, high)
    axes.text(left, high - 0.2, "the tokens of a sequence, each with its rank", fontsize=9, va="center")
    axes.text(end + 0.2, high - 0.2, "scores of each rank\nunder a causal mask", fontsize=8, va="center", linespacing=1.1)
    for place in range(seq):
        axes.text(left + (place + 0.5) * side, high - 0.65, place, ha="center", va="bottom", fontsize=7)
    for row, layout in enumerate(context.LAYOUTS):
        y, owned = high - 1.02 - 0.62 * row, context.owners(seq, n, layout)
        axes.text(left - 0.12, y + 0.17, layout, fontsize=10, fontweight="bold", ha="right", va="center")
        for place, rank in enumerate(owned):
            box(axes, (left + place * side, y), side, 0.34, rank, str(rank), 8.5)
        ends = (0, *(k for k in range(1, seq) if owned[k] != owned[k - 1]), seq)  # where the next token is another rank's
        axes.vlines([left + k * side for k in ends], y, y + 0.34, color=style.INK, linewidth=2)
        work = context.totals(context.work(seq, n, layout))
        axes.text(end + 0.2, y + 0.17, ", ".join(map(str, work)), va="center", fontsize=9 if n <= 4 else 7)
    return fig


def ring(n: int = 4) -> style.Figure:
    """Draws which keys and values each rank has at first and after a hop; its queries stay. n: ranks, 2 to 8."""
    ranks(n)
    panels, kv = {}, "K,V " if n <= 4 else ""  # without it where there's no room
    for hop, title in enumerate(("at first", "hop 1")):
        panels[title] = [[f"{kv}{other}" if other == (rank - hop) % n else None for other in range(n)] for rank in range(n)]
    return drawings.pieces(panels, [("to the next", "queries stay", "")], ["gathered"] * len(panels))


@style.styled
def all_to_all(heads: int = 8, n: int = 4, kv_heads: int | None = None) -> style.Figure:
    """Draws Ulysses: before, a rank has all heads of its tokens; after the all-to-all, some heads of all tokens.

    heads: query heads, at most 16
    n: ranks, 2 to 8
    kv_heads: if they're fewer than ranks, each goes to all ranks whose queries read it
    Raises ValueError for other numbers, and those that don't divide each other as they must.
    """
    ranks(n)
    kv_heads = kv_heads or heads
    if heads > 16:
        raise ValueError(f"heads={heads}: a picture has room for 1 to 16 heads")
    context.ulysses(1, n, heads, kv_heads, 1, n)  # raises
    received = max(kv_heads, n)
    keys = {"keys, values": (range(kv_heads), [k * kv_heads // received for k in range(received)])}
    own = range(heads), range(heads)
    panels = {"queries, keys, values": own} if kv_heads == heads else {"queries": own} | keys
    apart, columns = 0.1 + 2.0 * len(panels), sum(len(each) for both in panels.values() for each in both)
    side, x = min(0.3, (9.4 - apart) / columns), 0.55
    fig, axes = sheet(max(apart + columns * side, 4.6), 2.8)
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
        box(axes, (start + rank * each, y), each, high, rank, "" if each < 0.2 else str(rank), 9)
        if each < 0.2:
            axes.text(start + (rank + 0.5) * each, y + high + 0.02, rank, fontsize=8, ha="center", va="bottom")
    axes.annotate("", (start - 0.15, y + high / 2), (x + wide + 0.15, y + high / 2), arrowprops=_ARROW)
    axes.text(start - 0.5, y + high / 2 + 0.07, "all-to-all", fontsize=9, ha="center", va="bottom")
    copied = ", copied" * (len(after) > len(before))
    for left, heads, said in ((x, before, "all heads, own tokens"), (start, after, f"own heads, all tokens{copied}")):
        axes.vlines([left + k * side for k in range(1, len(heads))], y, y + high, color="#666666", linestyle=":", linewidth=0.8)
        for place, head in enumerate(heads):
            if side > 0.15 or not head % 4:
                axes.text(left + (place + 0.5) * side, y - 0.04, head, fontsize=7.5, ha="center", va="top")
        middle = left + len(heads) * side / 2
        axes.text(middle, y - 0.22, "head", fontsize=8, ha="center", va="top")
        axes.text(middle, y - 0.4, said, fontsize=8, style="italic", ha="center", va="top")
    return start + len(after) * side


def ranks(n: int) -> None:
    """Raises ValueError for a number of ranks that a picture cannot tell apart."""
    if type(n) is not int or not 2 <= n <= len(LOOKS):
        raise ValueError(f"n={n!r}: a picture shows 2 to {len(LOOKS)} ranks")
