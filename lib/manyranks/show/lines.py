"""Curves of one quantity over another, on axes with units: a figure for any chapter."""

from collections.abc import Callable, Mapping, Sequence
from math import ceil, floor, log10

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from manyranks.show import style

_MOST = 7  # ticks on an axis
SECONDS = {1e-6: "1 µs", 1e-3: "1 ms", 1: "1 s", 1e3: "1,000 s"}  # where axes of times are numbered
_WHOLE = MaxNLocator(_MOST - 1, integer=True)


@style.styled
def curves(
    x: Sequence[float],
    named: Mapping[str, Sequence[float]],
    xlabel: str,
    ylabel: str,
    xunit: Callable[[float], str] = "{:,.0f}".format,
    yunit: Callable[[float], str] = "{:,.0f}".format,
    title: str = "",
    xticks: Sequence[float] | None = None,
    ylog: bool = True,
    xlog: bool = True,
) -> style.Figure:
    """Draws a curve for each name, over x, on logarithmic axes.

    xunit, yunit: number -> text of a tick, as units.size or units.duration
    xticks: powers of ten, or a few whole numbers of a linear axis, unless given
    ylog: False for a linear y axis that begins at 0
    xlog: False for a linear x axis

    A logarithmic axis leaves out values that are not above 0. Raises ValueError for a curve of another length than x.
    """
    fig, (axes,) = style.figure(height=3.5)
    for number, (name, y) in enumerate(named.items()):
        if len(y) != len(x):
            raise ValueError(f"{name!r} has {len(y)} values for {len(x)} places: give one for each")
        points = [(a, b) for a, b in zip(x, y, strict=True) if (a > 0 or not xlog) and (b > 0 or not ylog)]
        marker = style.MARKERS[number % len(style.MARKERS)]
        axes.plot(*zip(*points, strict=True), label=name, marker=marker, markersize=5, markevery=max(1, len(points) // 8))
    axes.set(xlabel=xlabel, ylabel=ylabel, title=title)
    axes.set(xscale="log" if xlog else "linear", yscale="log" if ylog else "linear")
    if xticks is None:
        xticks = powers(axes.get_xlim()) if xlog else [tick for tick in _WHOLE.tick_values(min(x), max(x)) if tick <= max(x)]
    axes.set_xticks(xticks, [xunit(x) for x in xticks])
    if ylog:
        axes.set_yticks(at := powers(axes.get_ylim()), [yunit(y) for y in at])
    else:
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(lambda y, _: yunit(y))
    axes.minorticks_off()
    axes.legend(loc="best")
    return fig


def powers(limits: tuple[float, float]) -> list[float]:
    """Powers of ten inside the limits; of many every second or third one, and if there is one at most, 1, 2, 5, …"""
    low, high = ceil(log10(limits[0])), floor(log10(limits[1]))
    if high > low:
        return [10.0**k for k in range(low, high + 1, max(1, ceil((high - low + 1) / _MOST)))]
    ticks = (digit * 10.0**k for k in range(low - 1, high + 1) for digit in (1, 2, 5))
    return [tick for tick in ticks if limits[0] <= tick <= limits[1]]


def ticks(axes: Axes, x: tuple | None = None, y: tuple | None = None, **look) -> None:
    """Numbers axes at these places only.

    x, y: the places, and number -> text
    look: as fontsize
    """
    for both, number in ((x, axes.set_xticks), (y, axes.set_yticks)):
        if both:
            number([*both[0]], list(map(both[1], both[0])), **look)
    axes.minorticks_off()


def ring(axes: Axes, **look) -> Line2D:
    """Draws a ring around what is shown now, which an explorer moves."""
    look = {"color": "none", "markeredgecolor": style.INK, "markersize": 11, "markeredgewidth": 1.8, "clip_on": False} | look
    return axes.plot([], [], "o", **look)[0]


# A side's color and hatch.
LOOKS = ((style.BLUE, ""), (style.ORANGE, "////"), (style.GREEN, "...."), (style.PINK, "\\\\\\\\"), (style.YELLOW, "xx"))


def columns(
    axes: Axes,
    groups: Sequence[str],
    sides: Sequence[Mapping[str, Sequence[float]]],
    unit: Callable[[float], str],
    looks: Mapping[str, tuple[str, str]] | None = None,
    gap: float = 0.14,
) -> list[np.ndarray]:
    """Draws a bar for each side of each group, and returns where each side's bars are.

    sides: part -> its height in each group, from below
    unit: number -> text, for the y axis
    looks: part -> color and hatch, LOOKS of sides without it
    gap: between groups, which have a room of 1
    """
    seen, wide = set(), (1 - gap) / len(sides)
    places = [np.arange(len(groups)) + (k + 0.5) * wide - (1 - gap) / 2 for k in range(len(sides))]
    for x, parts, own in zip(places, sides, LOOKS, strict=False):
        below = np.zeros(len(groups))
        for part, heights in parts.items():
            color, hatch = looks[part] if looks else own
            look = {"color": color, "hatch": hatch, "edgecolor": "white", "linewidth": 0.6}
            axes.bar(x, heights, 0.93 * wide, below, label=f"_{part}" if part in seen else part, **look)
            below += heights
            seen.add(part)
    axes.set_xticks(range(len(groups)), groups)
    axes.tick_params(axis="x", which="both", length=0)
    axes.grid(visible=False, axis="x")
    axes.yaxis.set_major_formatter(lambda number, _: unit(number) if number else "0")
    return places


def write(
    axes: Axes, x: Sequence[float], heights: Sequence[float], texts: Sequence[str], gap: float = 4, size: float = 8
) -> None:
    """Writes texts over bars that are so high.

    gap: between them, in points
    """
    for *at, text in zip(x, heights, texts, strict=True):
        axes.annotate(text, at, (0, gap), textcoords="offset points", ha="center", va="bottom", fontsize=size)
