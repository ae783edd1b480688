"""The drawings of every lesson: who holds what, where pieces go, what happens when, how much memory over time."""

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.patches import Circle, FancyArrowPatch, Patch, Rectangle
from matplotlib.path import Path
from matplotlib.text import Text

from manyranks.show import lines, style, units

# Communication has the color of what it moves: a gather is "gathered", a reduce-scatter "gradients".
KINDS = {
    "parameters": style.BLUE,
    "gathered": "#4B9CD3",
    "gradients": style.ORANGE,
    "optimizer": style.GREEN,
    "activations": style.PINK,
    "compute": "#6E7A8A",
}
INK, EDGE = style.INK, style.BLACK
NORMAL, LARGE, LEAST = 11.0, 13.0, 7.0  # points
WIDTH, GAP = 7.2, 0.3  # inches: of a drawing, between its panels
_FAINT = 0.2


class Figure(style.Figure):
    """Holds a drawing whose axes count inches from the upper left corner."""

    def __init__(self, wide: float, high: float):
        super().__init__(figsize=(wide, high), dpi=style.DOTS, layout="none", facecolor="none")
        FigureCanvasAgg(self)  # the canvas of a bare figure measures texts slowly
        self.unnamed: dict[str, None] = {}  # kinds of blocks that had no room for their text
        self.paper = self.add_axes((0, 0, 1, 1))
        self.paper.set(xlim=(0, wide), ylim=(high, 0))
        self.paper.axis("off")

    def write(self, x: float, y: float, text: str, room: Sequence[float] = (9, 9), size: float = NORMAL, **look) -> Text | None:
        """Writes a text around (x, y), smaller if its room is too small, and not at all below 7 points.

        room: width and height, in inches
        size: in points
        look: what else matplotlib's Text takes, such as ha="left"
        """
        found = self.paper.text(x, y, text, **{"ha": "center", "va": "center", "fontsize": size, "color": INK} | look)
        while text and size >= LEAST:
            box = found.get_window_extent()
            fits = min(room[0] * style.DOTS / box.width, room[1] * style.DOTS / box.height)
            if fits >= 1:
                return found
            size = min(size * fits // 0.25 * 0.25, size - 0.25)  # glyphs are whole pixels wide: one try may not do
            found.set_fontsize(size)
        found.remove()
        return None

    def rank(self, x: float, y: float, number: int, wide: float) -> None:
        """Writes "rank 3" around (x, y), or only the number if the room isn't that wide."""
        self.write(x, y, f"rank {number}" if wide >= 0.6 else f"{number}")

    def block(self, x: float, y: float, wide: float, high: float, kind: str, text: str = "", name: str = "", **look) -> None:
        """Fills a block in its kind's color, and writes the text if it has room.

        name: its gid, to find it by
        look: hollow=True for an outline only, or the text's size in points
        """
        hollow = look.pop("hollow", False)
        fill, edge = ("none", KINDS[kind]) if hollow else (KINDS[kind], EDGE)
        self.paper.add_patch(Rectangle((x, y), wide, high, facecolor=fill, edgecolor=edge, linewidth=0.6, gid=name))
        color = INK if hollow else on(fill)
        written = self.write(x + wide / 2, y + high / 2, text, (wide - 0.03, high), color=color, **look)
        if text and not written:
            self.unnamed.setdefault(kind)

    def key(self, x: float) -> None:
        """Adds a line at the bottom, from x on, with the names of the blocks whose text had no room."""
        wide, high = self.get_size_inches()
        if self.unnamed:
            self.set_size_inches(wide, high + 0.3)
            self.paper.set_ylim(high + 0.3, 0)
        for kind in self.unnamed:
            self.paper.add_patch(Rectangle((x, high + 0.02), 0.22, 0.22, facecolor=KINDS[kind], edgecolor=EDGE, linewidth=0.6))
            name = self.write(x + 0.3, high + 0.13, kind, ha="left")
            x += name.get_window_extent().width / style.DOTS + 0.55

    def ghost(self, x: float, y: float, wide: float, high: float, color: str) -> None:
        """Fills a block faintly, for what could be there. A text on it would be hard to read."""
        self.paper.add_patch(Rectangle((x, y), wide, high, facecolor=color, alpha=_FAINT, linewidth=0))

    def frame(self, x: float, y: float, wide: float, high: float) -> None:
        self.paper.add_patch(Rectangle((x, y), wide, high, facecolor="none", edgecolor=INK, linewidth=1.2))

    def arrow(self, ends: Sequence[Sequence[float]], color: str = INK, thick: float = 2.0, name: str = "") -> None:
        head = {"arrowstyle": "-|>", "mutation_scale": 6 * thick, "joinstyle": "miter"}
        self.paper.add_patch(FancyArrowPatch(path=Path(ends), color=color, linewidth=thick, gid=name, **head))


def on(color: str) -> str:
    """Chooses white or nearly black for a text on this color, whichever has more contrast."""
    return max("white", EDGE, key=lambda ink: contrast(ink, color))


def contrast(one: str, other: str) -> float:
    """Computes how well two colors tell apart, 1 to 21, as the Web Content Accessibility Guidelines do."""
    low, high = sorted(_luminance(color) for color in (one, other))
    return (high + 0.05) / (low + 0.05)


def _luminance(color: str) -> float:
    linear = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(color))
    return sum(share * c for share, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


_TOP, _SEAM = 0.65, 0.05  # inches: above the pieces, between blocks


class Block(NamedTuple):
    """Says how much of a tensor a rank holds.

    label: the tensor's name
    kind: a key of KINDS
    shard: (i, n) for shard i of n, None for all of it
    size: of all of it, in any unit
    """

    label: str
    kind: str
    shard: tuple[int, int] | None = None
    size: float = 1.0


@style.styled
def who_holds(panels: Mapping | Sequence, below: Sequence[str] = (), unit: str = "", height: float = 2.4) -> Figure:
    """Draws a box per rank and in it a block per tensor; a shard is the filled slice of a faint whole.

    panels: title -> for each rank its Blocks (tuples do); or only one such list
    below: a text per panel, such as "4 + 12/N"
    unit: of the texts below, such as "bytes per parameter", in two lines
    height: of the tallest rank's blocks, in inches
    """
    panels = panels if isinstance(panels, Mapping) else {"": panels}
    panels = {title: [[Block(*block) for block in rank] for rank in ranks] for title, ranks in panels.items()}
    stacks = [rank for ranks in panels.values() for rank in ranks]
    rows = [(block.label, block.size) for block in stacks[0]]
    most, gaps = max(map(len, panels.values())), GAP * (len(panels) - 1)
    narrow = (WIDTH - gaps) / len(panels) / most < 1.2
    common = narrow and all([(block.label, block.size) for block in rank] == rows for rank in stacks)
    left, top = (1.15 if common or unit else 0), (0.6 if any(panels) else 0.3)
    wide = (WIDTH - left - gaps) / len(panels) / most
    scale = min((height - _SEAM * (len(rank) - 1)) / sum(block.size for block in rank) for rank in stacks if rank)
    fig = Figure(WIDTH, top + height + (0.55 if below else 0.1))
    for number, (title, ranks) in enumerate(panels.items()):
        x = left + number * (most * wide + GAP)
        middle, room = x + len(ranks) * wide / 2, (len(ranks) * wide + GAP - 0.1, 1)
        fig.write(middle, 0.15, title, room, LARGE, weight="bold")
        fig.write(middle, top + height + 0.3, below[number] if below else "", room, LARGE)
        for rank, blocks in enumerate(ranks):
            fig.rank(x + (rank + 0.5) * wide, top - 0.15, rank, wide)
            _stack(fig, (x + rank * wide + 0.03, top), wide - 0.06, scale, blocks, not common, f"{title} {rank}".strip())
    fig.write(left - 0.1, top + height + 0.3, unit, (left - 0.1, 1), ha="right")
    if common:
        fig.write(left - 0.1, top - 0.15, "rank" if wide < 0.6 else "", ha="right")
        for (name, size), y in zip(rows, accumulate(size * scale + _SEAM for _, size in rows), strict=True):
            fig.write(left - 0.1, top + y - _SEAM - size * scale / 2, name, (left - 0.1, size * scale), ha="right")
    fig.key(left + 0.03)
    return fig


def _stack(fig: Figure, at: tuple, wide: float, scale: float, blocks: Sequence[Block], inside: bool, name: str) -> None:
    """Stacks a rank's blocks, the first one on top; writes their labels if inside."""
    x, y = at
    for label, kind, shard, size in blocks:
        part, of = shard or (0, 1)
        high = size * scale
        if shard:
            fig.ghost(x, y, wide, high, KINDS[kind])
        fig.block(x, y + high * part / of, wide, high / of, kind, label if inside else "", f"{name} {label}")
        y += high + _SEAM


@style.styled
def pieces(
    panels: Mapping[str, Sequence[Sequence[str | None]]], between: Sequence[tuple[str, str, str]], kinds: Sequence[str]
) -> Figure:
    """Draws a column per rank and a row per piece, before and after a collective; every row's arrow shows where it goes.

    panels: title -> for each rank the text of each piece; None for a piece it doesn't hold
    between: (name, a text below, mark) for each pair of neighboring panels; the mark "+" says that the pieces are summed
    kinds: keys of KINDS: what each panel's pieces are
    """
    rows, columns = len(next(iter(panels.values()))[0]), max(map(len, panels.values()))
    gutter, high = 1.2, min(0.42, 2.6 / rows)
    left = 0.45 if (WIDTH - gutter * len(between)) / len(panels) / columns < 0.6 else 0
    wide = (WIDTH - left - gutter * len(between)) / len(panels) / columns
    fig = Figure(WIDTH, _TOP + rows * high + (0.4 if between else 0.1))
    corners = [left + number * (columns * wide + gutter) for number in range(len(panels))]
    for x, (title, ranks), kind in zip(corners, panels.items(), kinds, strict=True):
        fig.write(x - 0.06, _TOP - 0.15, "rank" if left else "", ha="right")
        fig.write(x + columns * wide / 2, 0.15, title, (columns * wide, 1), LARGE, weight="bold")
        for rank, column in enumerate(ranks):
            fig.rank(x + (rank + 0.5) * wide, _TOP - 0.15, rank, wide)
            for row, text in enumerate(column):
                place = x + rank * wide + 0.03, _TOP + row * high + 0.03, wide - 0.06, high - 0.06
                if text is None:
                    fig.ghost(*place, KINDS[kind])
                else:
                    fig.block(*place, kind, text, f"{title} {rank} {row}")
    steps = zip(pairwise(corners), pairwise(panels.values()), between, strict=True)
    for (x, after_x), (before, after), (name, text, mark) in steps:
        middle = after_x - gutter / 2
        fig.write(middle, 0.16, name, (gutter + 0.2, 1))
        fig.write(middle, _TOP + rows * high + 0.2, text, (gutter + 1, 1))
        for row in range(rows):
            y = _TOP + (row + 0.5) * high
            start = x + wide * max((rank + 1 for rank, column in enumerate(before) if column[row] is not None), default=columns)
            end = after_x + wide * min((rank for rank, column in enumerate(after) if column[row] is not None), default=0)
            fig.arrow([(start + 0.02, y), (end - 0.02, y)], name=f"{name} {row}")
            if mark:
                fig.paper.add_patch(Circle((middle, y), min(0.13, 0.4 * high), facecolor=INK, edgecolor="none", zorder=3))
                fig.write(middle, y, mark, size=LARGE, color=on(INK), weight="bold", zorder=4)
    return fig


Phases = Sequence[tuple[float, float, str]]  # (start, end, label) of each


@style.styled
def when(lanes: Mapping[str, Mapping[str, Sequence]], phases: Mapping[str, Phases]) -> style.Figure:
    """Draws lanes over time, such as compute and network, in panels on one time axis.

    lanes: title -> lane -> (start, end, label, kind) of each span; of "gather 2" the bar has "g2", and the legend "g: gather"
    phases: title -> the panel's phases
    """
    high = 0.5 + sum(0.75 + 0.45 * len(panel) for panel in lanes.values())
    fig, panels = style.figure(rows=len(lanes), width=WIDTH, height=high)
    ends = {title: max(end for row in panel.values() for _, end, *_ in row) for title, panel in lanes.items()}
    words = {}
    for axes, (title, panel) in zip(panels, lanes.items(), strict=True):
        axes.barh(list(panel), ends[title], color=INK, alpha=0.2)
        for lane, row in panel.items():
            for start, end, label, kind in row:
                word, _, number = label.rpartition(" ")
                bar = axes.barh(lane, end - start, left=start, color=KINDS[kind], edgecolor=EDGE, linewidth=0.6)
                axes.bar_label(bar, [word[:1] + number], label_type="center", color=on(KINDS[kind]), fontsize=10)
                words |= {f"{word[0]}: {word}": KINDS[kind]} if word else {}
        axes.set(xlim=(0, max(ends.values())), ylim=(len(panel) - 0.5, -0.5))
        axes.grid(visible=False, axis="y")
        _frame(axes, title, phases[title])
    panels[-1].set_xlabel("time →", loc="right")
    fig.legend(handles=[Patch(facecolor=color, label=word) for word, color in words.items()], loc="outside lower left", ncols=6)
    return fig


@style.styled
def memory_over_time(series: Mapping[str, Mapping[str, Sequence[float]]], phases: Phases) -> style.Figure:
    """Stacks the bytes that a rank holds during each event of a step, by kind, in panels with one scale.

    series: title -> kind -> bytes during each event, from the bottom up
    phases: of all panels; event k is from k to k + 1
    """
    fig, panels = style.figure(columns=len(series), width=WIDTH, height=3.2)
    most = max(np.sum(list(kinds.values()), axis=0).max() for kinds in series.values())
    for axes, (title, kinds) in zip(panels, series.items(), strict=True):
        low = np.zeros(len(next(iter(kinds.values()))))
        for kind, held in kinds.items():
            high, look = low + held, {"facecolor": KINDS[kind], "edgecolor": EDGE, "linewidth": 0.6}
            axes.stairs(high, baseline=low, fill=True, label=kind, **look)
            low = high
        at = int(low.argmax())  # the label stands next to it or ends with the axis: a line between two phases may be behind it
        at, side = (at + 1, "left") if at < len(low) / 2 else (len(low), "right")
        axes.text(at, 1.02 * low.max(), f" peak {units.size(low.max())} ", va="bottom", ha=side)
        axes.set(xlim=(0, len(low)), ylim=(0, 1.14 * most))
        axes.yaxis.set_major_formatter(lambda size, _: units.size(size) if size else "0")
        axes.tick_params(labelleft=axes is panels[0])
        _frame(axes, title, phases)
    fig.legend(*panels[0].get_legend_handles_labels(), loc="outside lower left", ncols=6)
    return fig


def _frame(axes: Axes, title: str, phases: Phases) -> None:
    """Writes a panel's title, and its phases under the axis, with lines between them."""
    axes.set_title(title, loc="left", weight="bold")
    axes.set_xticks([(start + end) / 2 for start, end, _ in phases], [label for *_, label in phases])
    axes.tick_params(length=0)
    axes.grid(visible=False, axis="x")
    for _, end, _ in phases[:-1]:
        axes.axvline(end, color=INK, linestyle=":", linewidth=1.2)


def curves(named: Mapping[str, Sequence[float]], xlabel: str, ylabel: str) -> style.Figure:
    """Draws a curve per name over 0, 1, 2 …, such as losses; some may end early.

    ylabel: with its unit
    """
    steps = range(max(map(len, named.values())))
    named = {name: [*values, *[np.nan] * (len(steps) - len(values))] for name, values in named.items()}
    return lines.curves(steps, named, xlabel, ylabel, yunit="{:g}".format, ylog=False, xlog=False)
