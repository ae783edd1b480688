"""Draws ranks: the blocks that each one holds, and where pieces go from rank to rank."""

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from matplotlib.patches import Circle

from manyranks.show import style
from manyranks.show.drawings.paper import GAP, INK, KINDS, LARGE, WIDTH, Figure, on

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
    beside = narrow and all([(block.label, block.size) for block in rank] == rows for rank in stacks)
    left, top = (1.15 if beside or unit else 0), (0.6 if any(panels) else 0.3)
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
            _stack(fig, (x + rank * wide + 0.03, top), wide - 0.06, scale, blocks, not beside, f"{title} {rank}".strip())
    fig.write(left - 0.1, top + height + 0.3, unit, (left - 0.1, 1), ha="right")
    if beside:
        fig.write(left - 0.1, top - 0.15, "rank" if wide < 0.6 else "", ha="right")
        for (name, size), y in zip(rows, accumulate(size * scale + _SEAM for _, size in rows), strict=True):
            fig.write(left - 0.1, top + y - _SEAM - size * scale / 2, name, (left - 0.1, size * scale), ha="right")
    fig.key(left)
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
