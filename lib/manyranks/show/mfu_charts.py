"""Chapter 09's charts: MFU of published runs and under every convention, measured rates, and measured times in their order."""

from collections.abc import Iterable, Mapping, Sequence
from math import inf, sqrt
from statistics import fmean, median
from types import MappingProxyType

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from manyranks.show import style, units
from manyranks.show.lines import powers
from manyranks.show.looks import sheet
from manyranks.theory import flops

_RUNS, _LINES, _SERIES = 16, 6, 4  # at most
_USED = {"color": style.BLUE, "edgecolor": style.INK, "linewidth": 0.8}
_REST = {"color": style.FAINT, "edgecolor": style.INK, "linewidth": 0.8}
# A part's colour and hatch: of what was bought.
_PARTS = (
    (style.BLUE, ""),
    ("#fdae6b", "////"),
    ("#e7a6c8", "\\\\\\\\"),
    ("#ffe08a", "xxxx"),
    ("#a1d99b", "...."),
    ("#cccccc", "---"),
)
_CELLS, _GRID = (32, 4096), 5.8  # cells of a picture, and inches of a row of them


@style.styled
def published(runs: Sequence[tuple[str, str, float]], title: str = "MFU of published runs") -> style.Figure:
    """Of each run the share of the peak that was used, and the rest of what was bought.

    runs: (name, chips, MFU as a share), from above. Raises ValueError for none, more than 16, and a share that is not 0 to 1.
    """
    _count("runs", runs, _RUNS)
    shares = [share for *_, share in runs]
    _shares({name: share for name, _, share in runs})
    fig, (axes,) = style.figure(width=8.0, height=1.35 + 0.36 * len(runs))
    rows = np.arange(len(runs))
    axes.barh(rows, [100 * share for share in shares], 0.66, label="model FLOPs (MFU)", **_USED)
    rest = [100 * (1 - share) for share in shares]
    axes.barh(rows, rest, 0.66, [100 * share for share in shares], label="all else", **_REST)
    axes.set_yticks(rows, [f"{name}, {chips}" if chips else name for name, chips, _ in runs])
    for y, share in zip(rows, shares, strict=True):
        _say(axes, f"{share:.1%}", 100 * share, y)
    axes.set(xlabel="share of the chips' peak FLOP/s (%)", xlim=(0, 100), ylim=(len(runs) - 0.5, -0.5), title=title)
    _rows_only(axes)
    fig.legend(loc="outside upper right", ncols=2, handlelength=1.8)
    return fig


def _say(axes: Axes, text: str, x: float, y: float) -> None:
    axes.annotate(text, (x, y), (5, 0), textcoords="offset points", va="center", fontsize=9)


@style.styled
def bought(parts: Mapping[str, float], gpus: int = 16384, each: int = 8) -> style.Figure:
    """What all GPUs of a run do, as if each part of the time were so many GPUs that do nothing else: a cell for `each` of them.

    parts: name -> share of the whole, at most 6; together 1. Raises ValueError for other parts, and for no or too many cells.
    """
    _count("parts", parts, len(_PARTS))
    _shares(parts)
    if abs(sum(parts.values()) - 1) > 1e-6:
        raise ValueError(f"the parts are {sum(parts.values()):.4f} of the whole together: give shares of 1, “all else” too")
    if each < 1 or not _CELLS[0] <= gpus // each <= _CELLS[1]:
        raise ValueError(f"gpus={gpus}, each={each}: a picture has {_CELLS[0]} to {_CELLS[1]:,} cells")
    columns = round(sqrt(2 * (gpus // each)))
    side = _GRID / columns
    high = -(-(gpus // each) // columns) * side
    fig, axes = sheet(_GRID + 3.0, high + 0.6)
    axes.text(0.1, high + 0.36, f"{gpus:,} GPUs, {each} a cell", fontsize=11, fontweight="bold", va="center")
    _cells(axes, parts, gpus // each, columns, side)
    for k, ((name, share), (colour, hatch)) in enumerate(zip(parts.items(), _PARTS, strict=False)):
        x, y = _GRID + 0.35, high - 0.2 - 0.44 * k
        axes.add_patch(Rectangle((x, y), 0.26, 0.22, facecolor=colour, hatch=hatch, edgecolor="#666666", linewidth=0.5))
        axes.text(x + 0.36, y + 0.11, f"{name}\n{share:.0%}, {gpus * share:,.0f} GPUs", fontsize=9, va="center")
    return fig


def _cells(axes: Axes, parts: Mapping[str, float], cells: int, columns: int, side: float) -> None:
    """Cells row by row from above, in their parts' looks: a box for each row of a part, and white lines over all."""
    rows = -(-cells // columns)
    ends = np.rint(np.cumsum(list(parts.values())) * cells).astype(int)
    for start, end, (colour, hatch) in zip((0, *ends), ends, _PARTS, strict=False):
        for row in range(start // columns, -(-end // columns)):
            first, last = max(start - row * columns, 0), min(end - row * columns, columns)
            corner, look = (0.1 + first * side, 0.1 + (rows - row - 1) * side), {"facecolor": colour, "hatch": hatch}
            axes.add_patch(Rectangle(corner, (last - first) * side, side, edgecolor="#666666", linewidth=0, **look))
    lines = {"colors": "white", "linewidth": 0.8}
    axes.vlines([0.1 + k * side for k in range(columns + 1)], 0.1, 0.1 + rows * side, **lines)
    axes.hlines([0.1 + k * side for k in range(rows + 1)], 0.1, 0.1 + columns * side, **lines)


@style.styled
def rates(
    found: Mapping[str, Mapping[float, float]],
    title: str = "",
    peaks: Mapping[str, float] = MappingProxyType({}),
    xlabel: str = "rows and columns of both matrices",
) -> style.Figure:
    """FLOP/s of matrix products over their size, a line for each name; peaks, horizontal, with their name on them.

    found: name ("bfloat16") -> size -> FLOP/s; peaks: name -> FLOP/s. Both axes are logarithmic.
    Raises ValueError for none, more than 6 lines, a line without points, and rates, sizes or peaks that are not above 0.
    """
    _check_rates(found, peaks)
    fig, (axes,) = style.figure(width=7.6, height=3.8)
    for marker, (name, points) in zip(style.MARKERS, found.items(), strict=False):
        best = max(points.values())
        x, y = zip(*sorted(points.items()), strict=True)
        axes.plot(x, y, marker=marker, markersize=6, label=f"{name}: at best {units.flop_rate(best)}")
    sizes = sorted({size for points in found.values() for size in points})
    _peaks(axes, peaks, [rate for points in found.values() for rate in points.values()])
    axes.set(xscale="log", yscale="log", xlabel=xlabel, ylabel="rate of the product", title=title)
    shown = sizes if len(sizes) <= 9 else sizes[:: -(-len(sizes) // 9)]
    axes.set_xticks(shown, [f"{size:,.0f}" for size in shown])
    axes.set_yticks(at := powers(axes.get_ylim(), 3), [units.flop_rate(rate) for rate in at])
    axes.minorticks_off()
    fig.legend(loc="outside upper left", ncols=2, handlelength=3)
    return fig


def _check_rates(found: Mapping[str, Mapping[float, float]], peaks: Mapping[str, float]) -> None:
    _count("lines", found, _LINES)
    for name, points in found.items():
        if not points or not _above_0([*points, *points.values()]):
            raise ValueError(f"{name!r} has the rates {dict(points)}: give one or more sizes, all numbers above 0")
    if not _above_0(peaks.values()):
        raise ValueError(f"the peaks are {dict(peaks)}: give FLOP/s, above 0")


def _peaks(axes: Axes, peaks: Mapping[str, float], rates: Sequence[float]) -> None:
    for name, rate in peaks.items():
        axes.axhline(rate, color=style.INK, linestyle=(0, (1, 1)), linewidth=1.4)
        at = {"transform": axes.get_yaxis_transform(), "ha": "left", "va": "bottom", "fontsize": 8.5}
        axes.text(0.01, rate * 1.03, f"{name}: {units.flop_rate(rate)}", **at)
    low, high = min(rates), max(*rates, *peaks.values(), 0.0) if peaks else max(rates)
    axes.set_ylim(low / 1.6, high * (2.2 if peaks else 1.6))


@style.styled
def timings(samples: Mapping[str, Sequence[float]], ylabel: str = "time of a call") -> style.Figure:
    """Times of repeated calls in their order: the first one ringed, with the median and the mean of all. A panel for each name.

    samples: name -> seconds. Raises ValueError for none, more than 4 names, no times, and one that is not above 0.
    """
    _count("panels", samples, _SERIES)
    for name, seconds in samples.items():
        if not len(seconds) or not _above_0(seconds):
            raise ValueError(f"{name!r} has the times {list(seconds)}: give one or more seconds, all above 0")
    wide = min(9.2, 1.4 + 3.6 * len(samples))
    fig = style.Figure(figsize=(wide, 3.7), layout="constrained")
    panels = fig.subplots(1, len(samples), sharey=True, squeeze=False)[0]
    for axes, (name, seconds) in zip(panels, samples.items(), strict=True):
        _timed(axes, name, seconds)
    panels[0].set(ylabel=ylabel, yscale="log")
    every = [each for seconds in samples.values() for each in seconds]
    panels[0].set_ylim(min(every) / 1.5, max(every) * 1.5)
    panels[0].set_yticks(at := powers(panels[0].get_ylim(), 3), [units.duration(each) for each in at])
    panels[0].minorticks_off()
    return fig


def _timed(axes: Axes, name: str, seconds: Sequence[float]) -> None:
    middle, mean, first = median(seconds), fmean(seconds), seconds[0]
    calls = range(1, len(seconds) + 1)
    axes.plot(calls, seconds, "o", color=style.BLUE, markersize=5, linestyle="none")
    look = {"marker": "o", "fillstyle": "none", "markersize": 11, "markeredgewidth": 1.6, "linestyle": "none"}
    axes.plot([1], [first], color=style.INK, label=f"first call: {units.duration(first)}", **look)
    axes.axhline(mean, color=style.ORANGE, linestyle="--", label=f"mean: {units.duration(mean)}")
    axes.axhline(middle, color=style.GREEN, linestyle="-", label=f"median: {units.duration(middle)}")
    axes.set(xlabel="call", xlim=(0.5 - 0.05 * len(seconds), len(seconds) + 0.5 + 0.05 * len(seconds)))
    axes.set_title(name, pad=52)
    axes.locator_params(axis="x", integer=True, nbins=6)
    axes.legend(loc="lower left", bbox_to_anchor=(-0.03, 1.0), borderaxespad=0.1, handlelength=2.2)


@style.styled
def conventions(
    shares: Mapping[str, float],
    counted: Mapping[str, str] = MappingProxyType({}),
    title: str = "One run under every convention",
) -> style.Figure:
    """MFU of one run under each convention, with what that counts.

    shares: convention -> MFU as a share, from above; counted: what a convention counts, in place of what is known of those of
    theory.flops.CONVENTIONS. Raises ValueError for none, more than 16, and a share that is below 0.
    """
    _count("conventions", shares, _RUNS)
    _shares(shares, most=10.0)
    fig, (axes,) = style.figure(width=8.8, height=0.95 + 0.44 * len(shares))
    rows, percent = np.arange(len(shares)), [100 * share for share in shares.values()]
    axes.hlines(rows, 0, percent, color="#b0b0b0", linewidth=1.4)
    axes.plot(percent, rows, "o", color=style.BLUE, markersize=9, linestyle="none")
    known = {name: counts(rule) for name, rule in flops.CONVENTIONS.items()} | dict(counted)
    axes.set_yticks(rows, [f"{name}\n{known[name]}" if name in known else name for name in shares], fontsize=8.5)
    for y, share in zip(rows, percent, strict=True):
        axes.annotate(f"{share:.1f}%", (share, y), (8, 0), textcoords="offset points", va="center", fontsize=9)
    axes.set(xlabel="MFU (%)", xlim=(0, 1.16 * max(percent) or 1.0), ylim=(len(shares) - 0.5, -0.5), title=title)
    _rows_only(axes)
    return fig


def counts(rule: flops.Convention) -> str:
    """What a convention counts, in words."""
    products = f"6 × all parameters{'' if rule.embedding else ' but the embedding'}" if rule.everything else "every product"
    core = {0: "no scores", 0.5: "causal half of the scores", 1: "all scores"}[rule.attention]
    return f"{products}, {core}"


def _rows_only(axes: Axes) -> None:
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")


def _count(what: str, given: Sequence | Mapping, most: int) -> None:
    if not 1 <= len(given) <= most:
        raise ValueError(f"{len(given)} {what}: a picture shows 1 to {most}")


def _above_0(numbers: Iterable[float]) -> bool:
    return all(0 < number < inf for number in numbers)


def _shares(named: Mapping[str, float], most: float = 1.0) -> None:
    for name, share in named.items():
        if not 0 <= share <= most:
            raise ValueError(f"{name!r} has the share {share!r}: give a number from 0 to {most:g}, not in percent")
