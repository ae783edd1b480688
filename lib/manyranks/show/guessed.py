"""Puts the reader's guess on a figure, beside the truth."""

from collections.abc import Callable
from math import isfinite
from typing import Any

from matplotlib.axes import Axes
from matplotlib.axis import Axis

from manyranks.show import style

_LOOK = {"color": style.INK, "linestyle": (0, (4, 2)), "linewidth": 2, "gid": "guess"}
_TEXT = {"color": style.INK, "weight": "bold", "textcoords": "offset points", "annotation_clip": False, "parse_math": False}
_LONGEST = 60, 24  # letters of a guess in words, and of a number with its unit


@style.styled
def guess(
    value: Any,
    figure: style.Figure,
    at: Callable[[float], tuple[float | None, float | None]],
    unit: Callable[[float], str] = "{:,g}".format,
) -> style.Figure:
    """Marks the reader's guess on a figure's first axes, labels it, and returns the figure.

    value: the guess. None leaves the figure as it is; anything that isn't a number is written below it.
    figure: what a function of show returned
    at: computes the (x, y) of a guess; None for one of them draws a line right across
    unit: number -> text, such as show.duration
    """
    if value is None:
        return figure
    try:
        x, y = at(number := float(value))
        if not all(isfinite(each) for each in (number, x, y) if each is not None):
            raise ValueError(f"a guess of {number} at {x}, {y}")
    except (TypeError, ValueError, ArithmeticError):
        words = " ".join(f"your guess: {value}".split())
        words = words if len(words) <= _LONGEST[0] else words[: _LONGEST[0] - 1] + "…"
        figure.supxlabel(words, x=0.99, ha="right", color=style.INK, weight="bold", fontsize="medium", parse_math=False)
        return figure
    _mark(figure.axes[0], x, y, text if len(text := unit(number)) <= _LONGEST[1] else f"{number:g}")
    return figure


def _mark(axes: Axes, x: float | None, y: float | None, text: str) -> None:
    """Draws the line or the star, and its label outside the axes: above them or to their right."""
    (x, beyond_x), (y, beyond_y) = _room(axes.xaxis, x), _room(axes.yaxis, y)
    if y is None:
        axes.axvline(x, **_LOOK)
        axes.set_title(axes.get_title("left"), pad=22)  # above the label
        before, after = "← " if beyond_x < 0 else "", " →" if beyond_x > 0 else ""
        label = f"{before}your guess: {text}{after}"
        axes.annotate(label, (x, 1), (0, 5), xycoords=("data", "axes fraction"), ha="center", va="bottom", **_TEXT)
        return
    still, (first, last) = {"scalex": False, "scaley": False}, axes.get_xlim()
    axes.plot([first if x is None else x, last], [y, y], **_LOOK, **still)
    if x is not None:
        axes.plot([x], [y], "*", color=style.INK, markersize=15, clip_on=False, zorder=5, gid="guess", **still)
    beyond = " ↓" if beyond_y < 0 else " ↑" if beyond_y > 0 else ""
    label = f"your guess:\n{text}{beyond}"
    axes.annotate(label, (1, y), (8, 0), xycoords=("axes fraction", "data"), ha="left", va="center", **_TEXT)


def _room(axis: Axis, value: float | None) -> tuple[float | None, int]:
    """Makes an axis up to three times as long, so that it reaches a value.

    Returns the value and 0 if it fits, otherwise the end of the axis that's nearer, and -1 for the low end or 1 for the high.
    """
    if value is None:
        return None, 0
    ends = low, high = axis.get_view_interval()
    first, last, place = axis.get_transform().transform([low, high, value])
    share = (place - first) / (last - first)
    if not -2 <= share <= 3:
        return (low, -1) if share < 0 else (high, 1)
    if not 0 <= share <= 1:
        room = axis.get_transform().inverted().transform([place + 0.05 * (place - (last if share > 1 else first))])[0]
        ends = (room, high) if share < 0 else (low, room)
    axis.axes.set(**{f"{axis.axis_name}lim": ends})
    return value, 0
