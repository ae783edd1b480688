"""Chapter 08's figures of balance: load over steps, and what an unequal load makes a step wait."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np
from matplotlib.axes import Axes

from manyranks.show import style, units

_MOST = 4  # runs
_LOUDEST = 3.0  # times the mean load: black in a heat map
_ROUNDING = 1e-9  # of a step: parts that were taken from it may add up to so much more
# What a rank does, from below.
_PARTS = {
    "rank 1 computes": {"facecolor": style.BLUE},
    "its messages are on the way": {"facecolor": "#cfe3f1", "hatch": "....", "edgecolor": style.BLUE},
    "it waits for rank 0's products": {"facecolor": "#fdd9b5", "hatch": "////", "edgecolor": style.ORANGE},
}


@style.styled
def balancing(
    runs: Mapping[str, Sequence[float]],
    target: float | None = 1.2,
    loads: Mapping[str, Sequence[Sequence[float]]] = MappingProxyType({}),
) -> style.Figure:
    """Imbalance over steps, a line for each run, with the target; below, of runs with loads, the load of each expert.

    runs: name -> max load ÷ mean load of each step. loads: name -> step -> copies that each expert got; drawn as multiples of
    the mean, white for none and black for three times the mean or more.
    Raises ValueError for none, more than 4 runs, a run without steps, and loads of a run that there is not.
    """
    if not 1 <= len(runs) <= _MOST:
        raise ValueError(f"{len(runs)} runs: a picture shows 1 to {_MOST}")
    if empty := [name for name, found in runs.items() if not len(found)]:
        raise ValueError(f"{empty[0]!r} has no steps")
    if strange := [name for name in loads if name not in runs]:
        raise ValueError(f"loads of {strange[0]!r}: there are the runs {', '.join(map(repr, runs))}")
    fig = style.Figure(figsize=(8.8, 5.2 if loads else 3.4), layout="constrained")
    grid = fig.add_gridspec(2 if loads else 1, max(1, len(loads)), height_ratios=(1.35, 1) if loads else (1,))
    _lines(fig.add_subplot(grid[0, :]), runs, target)
    panels = [fig.add_subplot(grid[1, place]) for place in range(len(loads))]
    for place, (axes, (name, found)) in enumerate(zip(panels, loads.items(), strict=True)):
        drawn = _heat(axes, name, np.asarray(found, float))
        axes.set_ylabel("" if place else "expert")
    if panels:
        bar = fig.colorbar(drawn, ax=panels, aspect=12, pad=0.01)
        bar.set_label("load ÷ mean")
        bar.set_ticks(range(4), labels=["0", "1", "2", "3 or more"])
    return fig


def _lines(axes: Axes, runs: Mapping[str, Sequence[float]], target: float | None) -> None:
    longest, top = max(map(len, runs.values())), max(map(max, runs.values()))
    for marker, (name, found) in zip(style.MARKERS, runs.items(), strict=False):
        label = f"{name}: {found[-1]:.2f} at the end"
        every = max(1, len(found) // 10)
        axes.plot(range(1, len(found) + 1), found, marker=marker, markersize=5, markevery=every, label=label, linewidth=1.5)
    if target:
        axes.axhline(target, color=style.INK, linestyle=(0, (1, 1)), linewidth=1.6, label=f"target: {target:g}")
    axes.set(xlabel="step", ylabel="largest load ÷ mean load", xlim=(1 - 0.02 * longest, 1.01 * longest))
    axes.set_ylim(1 - 0.03 * (top - 1), 1 + 1.08 * (max(top, target or 0) - 1))
    axes.locator_params(axis="x", integer=True)
    axes.legend(loc="lower left", bbox_to_anchor=(-0.01, 1.0), ncols=2, handlelength=3)


def _heat(axes: Axes, name: str, found: np.ndarray):
    shown = found / found.mean(axis=1, keepdims=True)
    steps, experts = found.shape
    extent = (0.5, steps + 0.5, experts - 0.5, -0.5)
    drawn = axes.imshow(shown.T, cmap="Greys", vmin=0, vmax=_LOUDEST, aspect="auto", interpolation="nearest", extent=extent)
    axes.set_title(name, fontsize=10)
    axes.set(xlabel="step")
    axes.set_yticks(range(0, experts, -(-experts // 8)))
    axes.locator_params(axis="x", nbins=4, integer=True)
    axes.grid(visible=False)
    axes.spines[:].set_visible(True)
    return drawn


@style.styled
def waiting(
    imbalance: Sequence[float],
    replayed: Sequence[float],
    computes: Sequence[float],
    messages: Sequence[float],
    predicted: Mapping[float, float],
    ylabel: str = "time of a step",
) -> style.Figure:
    """A step's time over the imbalance of the load: replayed points, theory's line, and what rank 1 does in it when rank 0 has
    the fullest load.

    imbalance, replayed, computes, messages: of each run, max ÷ mean load, seconds of a step, and seconds of it in which rank 1
    computes, and in which it does not, as its messages are on the way; in the rest it waits for rank 0. predicted:
    imbalance -> seconds.
    Raises ValueError for lists of other lengths, and where the parts are more than all.
    """
    lists = imbalance, replayed, computes, messages
    if not len(imbalance) == len(replayed) == len(computes) == len(messages) > 0:
        lengths = ", ".join(str(len(each)) for each in lists)
        raise ValueError(f"imbalance, replayed, computes, messages have {lengths} numbers: give as many of each, one or more")
    x, whole, works, sends = (np.asarray(each, float)[np.argsort(imbalance)] for each in lists)
    if min(*works, *sends) < 0 or (works + sends > whole * (1 + _ROUNDING)).any():
        raise ValueError("computes and messages are parts of replayed: give 0 or more, together at most the step's seconds")
    fig, (axes,) = style.figure(width=7.6, height=3.9)
    for (label, look), low, high in zip(_PARTS.items(), (0, works, works + sends), (works, works + sends, whole), strict=True):
        axes.fill_between(x, low, high, label=label, linewidth=0, **look)
        axes.plot(x, high, color=style.INK, linestyle="-", linewidth=0.6)
    if predicted:
        axes.plot(*zip(*sorted(predicted.items()), strict=True), color=style.INK, linestyle="-", label="theory")
    axes.plot(x, whole, "o", color=style.ORANGE, markersize=8, linestyle="none", label="replayed")
    top = max([*whole, *predicted.values()])
    room = 0.1 * (x[-1] - x[0]) or 0.1
    _say_seconds(axes, x, whole, works, 1.4 * room)
    axes.set(xlabel="largest load ÷ mean load", ylabel=ylabel, xlim=(x[0] - room, x[-1] + room), ylim=(0, 1.3 * top))
    axes.yaxis.set_major_formatter(lambda seconds, _: units.duration(seconds) if seconds else "0")
    fig.legend(loc="outside upper left", ncols=3, handlelength=2.2)
    return fig


def _say_seconds(axes: Axes, x: np.ndarray, whole: np.ndarray, works: np.ndarray, apart: float) -> None:
    """Numbers left above the points, and in the lowest area, where these are so far from the last ones with numbers."""
    last = -np.inf
    for at, seconds, busy in zip(x, whole, works, strict=True):
        if at - last >= apart:
            text, last = {"textcoords": "offset points", "fontsize": 8.5}, at
            axes.annotate(units.duration(seconds), (at, seconds), (2, 8), ha="right", **text)
            axes.annotate(units.duration(busy), (at, busy / 2), (0, 0), ha="center", va="center", bbox=style.PAPER, **text)
