"""Chapter 09's charts: MFU of published runs and under every convention, measured rates, and measured times in their order."""

from collections.abc import Mapping, Sequence
from math import nan, sqrt
from statistics import fmean, median

import numpy as np

from manyranks.show import style, units
from manyranks.show.bars import Bars
from manyranks.show.lines import curves
from manyranks.show.looks import LOOKS
from manyranks.theory import flops


def published(runs: Sequence[tuple[str, str, float]], title: str = "MFU of published runs") -> style.Figure:
    """Draws of each run the share of the peak that was used, and the rest of what was bought.

    runs: (name, chips, MFU as a share), from above
    Raises ValueError for none, more than 16, and a share that is not 0 to 1.
    """
    count("runs", runs, 16)
    if wrong := {name: share for name, _, share in runs if not 0 <= share <= 1}:
        raise ValueError(f"the shares are {wrong}: give numbers from 0 to 1, not in percent")
    names = [f"{name}, {chips}" if chips else name for name, chips, _ in runs]
    looks = {"model FLOPs (MFU)": (style.BLUE, ""), "all else": (style.FAINT, "")}
    bars = [dict(zip(looks, (share, 1 - share), strict=True)) for *_, share in runs]
    return rows(title, looks, dict(zip(names, bars, strict=True)), [f"{share:.1%}" for *_, share in runs], 1.0)


def conventions(shares: Mapping[str, float]) -> style.Figure:
    """Draws MFU of one run under each convention, with what that counts.

    shares: one of theory.flops.CONVENTIONS -> MFU as a share, from above
    Raises ValueError for none, and for another convention.
    """
    counted = {name: f"{name}\n{_counts(flops.CONVENTIONS[name])}" for name in shares}
    bars = {counted[name]: {"MFU": share} for name, share in shares.items()}
    said = [f"{share:.1%}" for share in shares.values()]
    return rows("One run's MFU under every convention", {"MFU": (style.BLUE, "")}, bars, said, max(shares.values()) or 1.0)


def _counts(rule: flops.Convention) -> str:
    """What a convention counts, in words."""
    products = f"6 × all parameters{'' if rule.embedding else ' but the embedding'}" if rule.everything else "every product"
    return f"{products}, {({0: 'no scores', 0.5: 'causal half of the scores', 1: 'all scores'})[rule.attention]}"


@style.styled
def bought(parts: Mapping[str, float], gpus: int = 16384) -> style.Figure:
    """Draws what all GPUs of a run do, as if each part of the time were so many GPUs that do nothing else: 8 a cell.

    parts: name -> share of the whole, at most 6; together 1
    gpus: how many there are, from 256 to 32,768
    Raises ValueError for other parts, and for too few or too many GPUs.
    """
    count("parts", parts, 6)
    if abs(sum(parts.values()) - 1) > 1e-6 or not 32 <= (cells := gpus // 8) <= 4096:
        raise ValueError(f"gpus={gpus}, {dict(parts)}: give 256 to 32,768 GPUs, and shares that are 1 together")
    wide = round(sqrt(2 * cells))
    rows, ends = np.arange(-(-cells // wide)), np.rint(np.cumsum([0.0, *parts.values()]) * cells)
    fig, (axes,) = style.figure(width=8.8, height=3.4)
    for (name, share), look, start, end in zip(parts.items(), ((style.BLUE, ""), *LOOKS[1:]), ends, ends[1:], strict=False):
        left, right = (np.clip(at - rows * wide, 0, wide) for at in (start, end))  # of each row of cells, from above
        look = {"color": look[0], "hatch": look[1], "edgecolor": "#666666", "linewidth": 0}
        axes.barh(rows + 0.5, right - left, 1.0, left, label=f"{name}\n{share:.0%}, {gpus * share:,.0f} GPUs", **look)
    axes.vlines(range(wide + 1), 0, len(rows), colors="white", linewidth=0.8)
    axes.hlines(range(len(rows) + 1), 0, wide, colors="white", linewidth=0.8)
    axes.set(xlim=(0, wide), ylim=(len(rows), 0), aspect="equal", title=f"{gpus:,} GPUs, 8 a cell")
    axes.axis("off")
    fig.legend(loc="outside right upper")
    return fig


def rates(found: Mapping[str, Mapping[float, float]], title: str = "") -> style.Figure:
    """Draws FLOP/s of matrix products over their size, a line for each name, on logarithmic axes.

    found: name ("bfloat16") -> size -> FLOP/s
    Raises ValueError for none, more than 6 lines, and a line without points.
    """
    count("lines", found, 6)
    sizes = sorted({size for points in found.values() for size in points})
    best = {name: f"{name}: at best {units.flop_rate(max(points.values()))}" for name, points in found.items()}
    named = {best[name]: [points.get(size, nan) for size in sizes] for name, points in found.items()}
    of = "rows and columns of both matrices", "rate of the product"
    return curves(sizes, named, *of, yunit=units.flop_rate, title=title, xticks=sizes[:: -(-len(sizes) // 9)])


@style.styled
def timings(samples: Mapping[str, Sequence[float]]) -> style.Figure:
    """Draws times of repeated calls in their order, with the first one ringed, and lines for their median and mean.

    samples: name -> seconds
    Raises ValueError for none, more than 4 names, and no times.
    """
    count("names", samples, 4)
    calls = range(1, max(map(len, samples.values())) + 1)
    named = {name: [*seconds, *[nan] * (len(calls) - len(seconds))] for name, seconds in samples.items()}
    of = {"xlabel": "call", "ylabel": "time of a call", "xlog": False, "xticks": calls[:: -(-len(calls) // 8)]}
    fig = curves(calls, named, yunit=units.duration, **of)
    (axes,) = fig.axes
    for line, (name, seconds) in zip(list(axes.lines), samples.items(), strict=True):
        times = [units.duration(each) for each in (seconds[0], fmean(seconds), median(seconds))]
        said = "{}: first call {} (ringed), mean {} (dashed), median {} (line)".format(name, *times)
        line.set(linestyle="none", markevery=1, label=said)
        axes.plot([1], seconds[:1], "o", color=line.get_color(), fillstyle="none", markersize=11)
        for at, dash in ((fmean(seconds), "--"), (median(seconds), "-")):
            axes.axhline(at, color=line.get_color(), linestyle=dash, linewidth=1.2)
    axes.legend(handles=axes.lines[: len(samples)], loc="lower left", bbox_to_anchor=(-0.02, 1.0))
    return fig


@style.styled
def rows(title: str, looks: Mapping[str, tuple], bars: Mapping[str, Mapping], said: Sequence[str], most: float) -> style.Figure:
    """A bar for each name, and what is said of it. looks: part -> colour and hatch; most: of the longest bar."""
    fig, (axes,) = style.figure(width=8.8, height=0.9 + 0.38 * len(bars))
    Bars(axes, looks, title, list(bars), columns=3).update(list(bars.values()), said, -9, most)
    axes.tick_params(axis="y", labelsize=8.5)
    return fig


def count(what: str, given: Sequence | Mapping, most: int, least: int = 1) -> None:
    """Raises ValueError where a picture can't show so many."""
    if not least <= len(given) <= most:
        raise ValueError(f"{len(given)} {what}: a picture shows {least} to {most}")
