"""Draws time: the spans of a step in lanes, and the memory that the step takes."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import accumulate, combinations, pairwise

from matplotlib.patches import Polygon
from matplotlib.ticker import MaxNLocator

from manyranks.show import style, units
from manyranks.show.drawings.paper import EDGE, GAP, INK, KINDS, LARGE, WIDTH, Figure, known, on, titled

_LEFT, _LANE = 1.3, 0.4  # inches: before the lanes, height of a lane


@style.styled
def when(
    lanes: Mapping,
    phases: Mapping | Sequence = (),
    arrows: Mapping | Sequence = (),
    unit: Callable[[float], str] | None = None,
    width: float = WIDTH,
) -> Figure:
    """Draws lanes over time, such as one for compute and one for communication; several panels share the time axis.

    lanes: lane -> (start, end, label, kind) of each span; or title -> such lanes
    phases: (start, end, label) of each bracket on top; or title -> such phases
    arrows: ((lane, i), (lane, j)) where span j of one lane waits for span i of another; or title -> such arrows
    unit: writes a time as text, such as show.duration; with it, the axis shows when each panel ends
    width: of the drawing, in inches
    Raises ValueError for an unknown kind, and for a span that ends before it starts.
    """
    panels = titled(lanes, Mapping)
    spans = [_timed(lane, *span) for panel in panels.values() for lane, row in panel.items() for span in row]
    gap = 0.28 if arrows else 0.08
    head = 0.34 * any(panels) + 0.34 * bool(phases)
    tops = list(accumulate((head + len(panel) * (_LANE + gap) - gap + 0.3 for panel in panels.values()), initial=0.0))
    axis = tops.pop()
    fig = Figure(width, axis + (0.35 if unit else 0.15))
    scale = (width - _LEFT - 0.12) / (max((end for _, end, *_ in spans), default=0) or 1)
    tight = {_first(text): kind for a, b, text, kind in spans if " " in text and fig.measure(text)[0] > (b - a) * scale}
    for (title, panel), top in zip(panels.items(), tops, strict=True):
        fig.write(0, 0.15 + top, title, size=LARGE, weight="bold", ha="left")
        for start, end, label in _mine(phases, title):
            fig.bracket(_LEFT + start * scale, _LEFT + end * scale, top + head - 0.03, label)
        rows = {lane: top + head + number * (_LANE + gap) for number, lane in enumerate(panel)}
        last = max((end for row in panel.values() for _, end, *_ in row), default=0)
        _lanes(fig, panel, rows, scale, last, tight, title)
        for (one, i), (other, j) in _mine(arrows, title):
            leave, reach = (_LANE, 0) if rows[other] > rows[one] else (0, _LANE)
            start, end = _LEFT + panel[one][i][1] * scale, _LEFT + panel[other][j][0] * scale
            fig.arrow([(start, rows[one] + leave), (end, rows[other] + reach)], thick=1.4, name=f"{one} {i} to {other} {j}")
        if unit:
            x, text = _LEFT + last * scale, unit(last)
            fig.line((x, top + head), (x, axis), linestyle=":")
            fig.write(min(x, width - fig.measure(text)[0] / 2 - 0.02), axis + 0.17, text)
    fig.arrow([(_LEFT, axis), (width, axis)], thick=1.2)
    fig.write(_LEFT - 0.1, axis, "time", ha="right")
    fig.key(_LEFT, [(kind, word[0], word) for word, kind in tight.items()])
    return fig


def _lanes(fig: Figure, panel: Mapping, rows: Mapping, scale: float, last: float, tight: Collection[str], title: str) -> None:
    """Draws a panel's lanes; a label that starts with a tight word keeps its first letter and its last word."""
    for lane, y in rows.items():
        fig.write(_LEFT - 0.1, y + _LANE / 2, lane, (_LEFT - 0.1, _LANE), ha="right")
        fig.ghost(_LEFT, y, last * scale, _LANE, INK)
        for start, end, text, kind in panel[lane]:
            short, size = (text[0] + text.split()[-1], 10) if _first(text) in tight else (text, 11)
            name = f"{title} {lane} {text}".strip()
            fig.block(_LEFT + start * scale, y, (end - start) * scale, _LANE, kind, short, name, size=size)


def _timed(lane: str, start: float, end: float, label: str, kind: str) -> tuple:
    known(kind, repr(label))
    if end < start:
        raise ValueError(f"{label!r} in lane {lane!r} starts at {start} and ends at {end}: give (start, end, label, kind)")
    return start, end, label, kind


def _first(label: str) -> str:
    return label.split(" ")[0]


@style.styled
def memory_over_time(
    series: Mapping,
    phases: Mapping | Sequence = (),
    edges: Mapping | Sequence[float] = (),
    height: float = 2.3,
    width: float = WIDTH,
) -> Figure:
    """Stacks the bytes that a rank holds during each event of a step, by kind; several panels share the y axis.

    series: kind -> bytes during each event, from the bottom up; or title -> such a series
    phases: (start, end, label) of each bracket on top, on the same axis as the edges; or title -> such phases
    edges: where each event starts, and where the last one ends; 0, 1, 2 … unless given; or title -> such edges
    height: of the largest stack, in inches
    width: of the drawing, in inches
    Raises ValueError for an unknown kind, bytes below 0, and kinds with different numbers of events.
    """
    panels = titled(series, Mapping)
    times = {title: _events(kinds, _mine(edges, title)) for title, kinds in panels.items()}
    totals = {title: [sum(held) for held in zip(*kinds.values(), strict=True)] for title, kinds in panels.items()}
    top = 0.34 * any(panels) + 0.34 * bool(phases) + 0.3
    left, floor, most = 0.75, top + height, max(map(max, totals.values())) or 1
    wide = (width - left - 0.05 - GAP * (len(panels) - 1)) / len(panels)
    fig = Figure(width, floor + 0.1)
    for tick in (t for t in MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]).tick_values(0, most) if t <= most):
        y = floor - tick / most * height
        fig.write(left - 0.1, y, units.size(tick) if tick else "0", (left - 0.1, 1), ha="right")
        fig.line((left - 0.05, y), (width - 0.05, y), linewidth=0.6, alpha=0.5, zorder=0)
    unnamed = {kind: True for kinds in panels.values() for kind in kinds}
    for number, (title, kinds) in enumerate(panels.items()):
        x, (first, *_, last) = left + number * (wide + GAP), times[title]
        at = [x + (time - first) / (last - first) * wide for time in times[title]]
        fig.write(x, 0.15, title, (wide, 1), LARGE, weight="bold", ha="left")
        for start, end, label in _mine(phases, title):
            fig.bracket(*(x + (time - first) / (last - first) * wide for time in (start, end)), top - 0.33, label)
        for kind in _areas(fig, at, floor, height / most, kinds, title):
            unnamed.pop(kind, None)
        peak = max(totals[title])
        event = totals[title].index(peak)
        middle = min(max((at[event] + at[event + 1]) / 2, x + 0.55), x + wide - 0.55)
        fig.write(middle, floor - peak / most * height - 0.13, f"peak {units.size(peak)}", (wide, 1))
    fig.key(left, [(kind, "", kind) for kind in unnamed])
    return fig


@style.styled
def curves(named: Mapping[str, Sequence[float]], xlabel: str, ylabel: str, height: float = 2.6, width: float = WIDTH) -> Figure:
    """Draws a curve per name over 0, 1, 2 …, such as losses over steps, on linear axes.

    named: name -> values
    xlabel, ylabel: with units
    height, width: of the axes and of the drawing, in inches
    Raises ValueError without a value.
    """
    if not all(named.values()) or not named:
        raise ValueError("there is a curve without values: give each at least one")
    most = max(len(values) for values in named.values()) - 1 or 1
    low, high = min(map(min, named.values())), max(map(max, named.values()))
    left, top = 0.75, 0.35 + 0.25 * len(named)
    fig, scale = Figure(width, top + height + 0.55), height / ((high - low) or 1)
    fig.write(0, 0.15, ylabel, ha="left")
    for tick in (t for t in MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]).tick_values(low, high) if low <= t <= high):
        y = top + (high - tick) * scale
        fig.write(left - 0.1, y, f"{tick:g}", (left - 0.1, 1), ha="right")
        fig.line((left, y), (width, y), linewidth=0.6, alpha=0.5, zorder=0)
    for tick in (t for t in MaxNLocator(6, integer=True).tick_values(0, most) if 0 <= t <= most):
        fig.write(left + tick / most * (width - left - 0.15), top + height + 0.18, f"{tick:g}")
    fig.write(width / 2, top + height + 0.42, xlabel)
    looks = zip((KINDS["parameters"], KINDS["gradients"], KINDS["optimizer"]), ("-", (0, (4, 2)), (0, (1, 1.5))), strict=True)
    for number, ((name, values), (color, dashes)) in enumerate(zip(named.items(), looks, strict=False)):
        points = [(left + k / most * (width - left - 0.15), top + (high - v) * scale) for k, v in enumerate(values)]
        fig.paper.plot(*zip(*points, strict=True), color=color, linestyle=dashes, linewidth=1.8, gid=name)
        y = 0.4 + 0.25 * number
        fig.paper.plot((width - 2.75, width - 2.35), (y, y), color=color, linestyle=dashes, linewidth=1.8)
        fig.write(width - 2.25, y, name, ha="left")
    return fig


def _areas(fig: Figure, at: Sequence[float], floor: float, scale: float, kinds: Mapping, title: str) -> Iterator[str]:
    """Draws one panel's areas from the bottom up; yields the kinds whose area has room for its name."""
    low = [floor] * (len(at) - 1)
    for kind, held in kinds.items():
        high = [y - count * scale for y, count in zip(low, held, strict=True)]
        over, under = ([(x, y) for span, y in zip(pairwise(at), ys, strict=True) for x in span] for ys in (high, low))
        look = {"facecolor": KINDS[kind], "edgecolor": EDGE, "linewidth": 0.6, "gid": f"{title} {kind}".strip()}
        fig.paper.add_patch(Polygon(over + under[::-1], **look))
        x, y, *room = _roomiest(at, low, high, fig.measure(kind))
        if fig.write(x, y, kind, room, color=on(KINDS[kind])):
            yield kind
        low = high


def _roomiest(at: Sequence[float], low: Sequence[float], high: Sequence[float], text: tuple[float, float]) -> tuple:
    """Finds where in an area a text can be largest: middle x and y, width and height."""
    found = []
    for i, j in combinations(range(len(at)), 2):
        wide, top, bottom = at[j] - at[i] - 0.06, max(high[i:j]), min(low[i:j])
        fits = min(1.0, wide / text[0], (bottom - top) / text[1])
        found.append((fits, wide * max(bottom - top, 0), (at[i] + at[j]) / 2, (top + bottom) / 2, wide, bottom - top))
    return max(found)[2:]


def _events(kinds: Mapping[str, Sequence[float]], edges: Sequence[float]) -> list[float]:
    """Returns the edges of the events; raises ValueError for what can't be drawn."""
    counts = {known(kind, "a series"): len(held) for kind, held in kinds.items()}
    number = len(edges) - 1 if len(edges) else max(counts.values())
    if not number or set(counts.values()) != {number}:
        wrong = ", ".join(f"{count} for {kind!r}" for kind, count in counts.items())
        raise ValueError(f"{number} events, values: {wrong}; give one value per event, and one edge more than events")
    for kind, held in kinds.items():
        if min(held) < 0:
            raise ValueError(f"{kind!r} holds {min(held)} bytes in event {list(held).index(min(held))}: give 0 or more")
    return list(edges) if len(edges) else list(range(number + 1))


def _mine(data: Mapping | Sequence, title: str) -> Sequence:
    return data.get(title, ()) if isinstance(data, Mapping) else data
