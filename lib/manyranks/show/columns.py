"""Bars that stand over names, side by side and on each other, with their numbers: for any chapter's figures."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes

from manyranks.show import style

# A side's colour and hatch.
LOOKS = ((style.BLUE, ""), (style.ORANGE, "////"), (style.GREEN, "...."), (style.PINK, "\\\\\\\\"), (style.YELLOW, "xx"))


def columns(
    axes: Axes,
    groups: Sequence[str],
    sides: Sequence[Mapping[str, Sequence[float]]],
    unit: Callable[[float], str],
    looks: Mapping[str, tuple[str, str]] | None = None,
    gap: float = 0.14,
) -> list[np.ndarray]:
    """Draws a bar for each side of each group, and returns where those of each side are.

    sides: part -> its height in each group, from below; unit: number -> text, for the y axis; looks: part -> colour and hatch,
    LOOKS of sides without it; gap: between groups, which have a room of 1
    """
    seen, wide = set(), (1 - gap) / len(sides)
    places = [np.arange(len(groups)) + (k + 0.5) * wide - (1 - gap) / 2 for k in range(len(sides))]
    for x, parts, own in zip(places, sides, LOOKS, strict=False):
        below = np.zeros(len(groups))
        for part, heights in parts.items():
            colour, hatch = looks[part] if looks else own
            look = {"color": colour, "hatch": hatch, "edgecolor": "white", "linewidth": 0.6}
            axes.bar(x, heights, 0.93 * wide, below, label="_" * (part in seen) + part, **look)
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
    """Writes texts over bars that are so high. gap: between them, in points."""
    for *at, text in zip(x, heights, texts, strict=True):
        axes.annotate(text, at, (0, gap), textcoords="offset points", ha="center", va="bottom", fontsize=size)
