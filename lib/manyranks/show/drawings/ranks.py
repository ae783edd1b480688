"""Draws ranks: the blocks that each one holds, and the messages between them."""

from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate, pairwise
from math import cos, hypot, pi, sin
from typing import NamedTuple

from matplotlib.patches import Circle

from manyranks.show import style, units
from manyranks.show.drawings.paper import GAP, INK, KINDS, LARGE, WIDTH, Figure, known, on, titled

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
def who_holds(
    panels: Mapping | Sequence, below: Sequence[str] = (), unit: str = "", height: float = 2.4, width: float = WIDTH
) -> Figure:
    """Draws a box per rank and in it a block per tensor; a shard is the filled slice of a faint whole.

    panels: title -> for each rank its Blocks (tuples do); or only one such list
    below: a text per panel, such as "4 + 12/N"
    unit: of the texts below, such as "bytes per parameter", in two lines
    height: of the tallest rank's blocks, in inches
    width: of the drawing, in inches
    Raises ValueError for an unknown kind, a shard that doesn't exist, and a size of 0 or less.
    """
    panels = {t: [[_checked(Block(*b)) for b in rank] for rank in ranks] for t, ranks in titled(panels, Sequence).items()}
    if below and len(below) != len(panels):
        raise ValueError(f"{len(below)} texts below {len(panels)} panels: give one per panel")
    stacks = [rank for ranks in panels.values() for rank in ranks]
    rows = [(block.label, block.size) for block in stacks[0]]
    most, gaps = max(map(len, panels.values())), GAP * (len(panels) - 1)
    narrow = (width - gaps) / len(panels) / most < 1.2
    beside = narrow and all([(block.label, block.size) for block in rank] == rows for rank in stacks)
    left, top = (1.15 if beside or unit else 0), (0.6 if any(panels) else 0.3)
    wide = (width - left - gaps) / len(panels) / most
    scale = min((height - _SEAM * (len(rank) - 1)) / sum(block.size for block in rank) for rank in stacks if rank)
    fig = Figure(width, top + height + (0.55 if below else 0.1))
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
    fig.key(left, [(kind, "", kind) for kind in fig.unnamed])
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


def _checked(block: Block) -> Block:
    known(block.kind, repr(block.label))
    part, of = block.shard or (0, 1)
    if not 0 <= part < of:
        raise ValueError(f"{block.label!r} is shard {part} of {of}: count {of} shards from 0 to {of - 1}")
    if block.size <= 0:
        raise ValueError(f"{block.label!r} has size {block.size}: give one above 0, or leave the block out")
    return block


@style.styled
def who_sends(
    arrows: Sequence[tuple[int, int, float | str]],
    ranks: int,
    kind: str = "parameters",
    ring: bool = False,
    width: float = WIDTH,
) -> Figure:
    """Draws ranks in a row or a ring and an arrow per message. If everyone sends to everyone, draw `pieces` instead.

    arrows: (from, to, bytes or any text) each
    ranks: how many, 2 to 8
    kind: a key of KINDS: what they send
    ring: draws them in a circle, clockwise
    width: of the drawing, in inches
    Raises ValueError for an unknown kind, a rank that doesn't exist, and bytes below 0.
    """
    if not 2 <= ranks <= 8:
        raise ValueError(f"{ranks} ranks: draw 2 to 8 of them; a few can stand for many")
    for source, target, _ in arrows:
        if source == target or not {source, target} <= set(range(ranks)):
            raise ValueError(f"an arrow from rank {source} to rank {target}: give two different ranks from 0 to {ranks - 1}")
    known(kind, "what they send")
    half = (0.36 if ring else min(0.45, 0.2 * width / ranks)), 0.26
    levels = sorted({abs(t - s) for s, t, _ in arrows if abs(t - s) > 1 and not ring})
    rises = {far: 0.45 + 0.34 * level for level, far in enumerate(levels)}
    up, down = (0.1 + max([0.0] + [rises.get(way * (t - s), 0) for s, t, _ in arrows]) for way in (1, -1))
    high = (2.3 if ranks < 5 else 3.2) if ring else up + 2 * half[1] + down
    turns = [2 * pi * (r - 0.5) / ranks - pi / 2 for r in range(ranks)]
    middles = [(width / 2 + 0.36 * width * cos(a), high / 2 + (high / 2 - 0.45) * sin(a)) for a in turns]
    middles = middles if ring else [(width * (r + 0.5) / ranks, up + half[1]) for r in range(ranks)]
    fig = Figure(width, high)
    pairs = {(source, target) for source, target, _ in arrows}
    for s, t, size in arrows:
        start, end, name = middles[s], middles[t], f"{s} to {t}"
        if ring or abs(t - s) == 1:
            _straight(fig, start, end, half, KINDS[kind], _size(size), 0.1 if (t, s) in pairs else 0, name)
        else:
            _arc(fig, start, end, half, KINDS[kind], _size(size), rises[abs(t - s)], name)
    for rank, (x, y) in enumerate(middles):
        fig.frame(x - half[0], y - half[1], 2 * half[0], 2 * half[1])
        fig.rank(x, y, rank, 2 * half[0])
    return fig


def _straight(fig: Figure, start: tuple, end: tuple, half: tuple, color: str, text: str, aside: float, name: str) -> None:
    """Draws an arrow from box to box, `aside` inches to its own left, with its text on its left."""
    dx, dy = end[0] - start[0], end[1] - start[1]
    way = hypot(dx, dy)
    dx, dy = dx / way, dy / way
    inside = min(h / abs(d) if abs(d) > 1e-9 else 99 for h, d in zip(half, (dx, dy), strict=True)) + 0.05
    ends = [(start[0] + dx * at + dy * aside, start[1] + dy * at - dx * aside) for at in (inside, way - inside)]
    fig.arrow(ends, color, name=name)
    found = fig.write(0, 0, text, (way - 2 * inside - 0.05 if abs(dy) < 0.1 else 1, 1))
    if found:
        wide, high = fig.measure(text, found.get_fontsize())
        off = abs(dy) * wide / 2 + abs(dx) * high / 2 + 0.06 + 0.05 * abs(dy)
        found.set_position(((ends[0][0] + ends[1][0]) / 2 + dy * off, (ends[0][1] + ends[1][1]) / 2 - dx * off))


def _arc(fig: Figure, start: tuple, end: tuple, half: tuple, color: str, text: str, rise: float, name: str) -> None:
    """Draws an arrow over the boxes between, to the right above them and to the left below."""
    way = 1 if end[0] > start[0] else -1
    y = start[1] - way * (half[1] + 0.03)
    middle = (start[0] + end[0]) / 2
    fig.arrow([(start[0] + way * 0.12, y), (middle, y - way * 2 * rise), (end[0] - way * 0.12, y)], color, name=name)
    fig.write(middle, y - way * (rise - 0.13), text)


@style.styled
def pieces(
    panels: Mapping[str, Sequence[Sequence[str | None]]],
    between: Sequence[tuple[str, float | str, str]],
    kind: str | Sequence[str],
    trace: Collection[int] | None = None,
    width: float = WIDTH,
) -> Figure:
    """Draws a column per rank and a row per piece, before and after a collective; every row's arrow shows where it goes.

    panels: title -> for each rank the text of each piece; None for a piece it doesn't hold
    between: (name, bytes or any text, mark) for each pair of neighboring panels; the mark "+" says that the pieces are summed
    kind: a key of KINDS: what the pieces are; or one per panel
    trace: the rows that get an arrow; the others fade. All of them unless given
    width: of the drawing, in inches
    Raises ValueError for an unknown kind, ranks with different numbers of pieces, and a step too many or too few.
    """
    kinds = [known(one, "every piece") for one in ([kind] * len(panels) if isinstance(kind, str) else kind)]
    if len(between) != len(panels) - 1:
        raise ValueError(f"{len(between)} steps between {len(panels)} panels: give {len(panels) - 1} of (name, bytes, mark)")
    counts = {len(column) for ranks in panels.values() for column in ranks}
    if len(counts) > 1 or not set(trace or ()) <= set(range(max(counts))):
        raise ValueError(f"{sorted(counts)} pieces and trace={trace}: give each rank the same number, None for what it lacks")
    rows, columns = max(counts), max(map(len, panels.values()))
    trace = range(rows) if trace is None else trace
    gutter, high = 1.2, min(0.42, 2.6 / rows)
    left = 0.45 if (width - gutter * len(between)) / len(panels) / columns < 0.6 else 0
    wide = (width - left - gutter * len(between)) / len(panels) / columns
    fig = Figure(width, _TOP + rows * high + (0.4 if between else 0.1))
    corners = [left + number * (columns * wide + gutter) for number in range(len(panels))]
    for x, (title, ranks), kind in zip(corners, panels.items(), kinds, strict=True):
        fig.write(x - 0.06, _TOP - 0.15, "rank" if left else "", ha="right")
        fig.write(x + columns * wide / 2, 0.15, title, (columns * wide, 1), LARGE, weight="bold")
        _grid(fig, x, wide, high, ranks, kind, trace, title)
    steps = zip(pairwise(corners), pairwise(panels.values()), between, strict=True)
    for (x, after_x), (before, after), (name, size, mark) in steps:
        middle = after_x - gutter / 2
        fig.write(middle, 0.16, name, (gutter + 0.2, 1))
        fig.write(middle, _TOP + rows * high + 0.2, _size(size), (gutter + 1, 1))
        for row in trace:
            y = _TOP + (row + 0.5) * high
            start = x + wide * max((rank + 1 for rank, column in enumerate(before) if column[row] is not None), default=columns)
            end = after_x + wide * min((rank for rank, column in enumerate(after) if column[row] is not None), default=0)
            fig.arrow([(start + 0.02, y), (end - 0.02, y)], name=f"{name} {row}")
            if mark:
                fig.paper.add_patch(Circle((middle, y), min(0.13, 0.4 * high), facecolor=INK, edgecolor="none", zorder=3))
                fig.write(middle, y, mark, size=LARGE, color=on(INK), weight="bold", zorder=4)
    return fig


def _grid(
    fig: Figure, x: float, wide: float, high: float, ranks: Sequence, kind: str, trace: Collection[int], title: str
) -> None:
    """Draws a column per rank; pieces in rows without a trace are hollow, and missing ones are faint."""
    for rank, column in enumerate(ranks):
        fig.rank(x + (rank + 0.5) * wide, _TOP - 0.15, rank, wide)
        for row, text in enumerate(column):
            place = x + rank * wide + 0.03, _TOP + row * high + 0.03, wide - 0.06, high - 0.06
            if text is None:
                fig.ghost(*place, KINDS[kind])
            else:
                fig.block(*place, kind, text, f"{title} {rank} {row}", hollow=row not in trace)


def _size(size: float | str) -> str:
    if not isinstance(size, str) and size < 0:
        raise ValueError(f"a message of {size} bytes: give 0 or more, or a text")
    return size if isinstance(size, str) else units.size(size)
