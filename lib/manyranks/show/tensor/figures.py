"""Chapter 06's figures: what a layer keeps, and how long it takes, over t."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import numpy as np
from matplotlib.axes import Axes

from manyranks.show import style, units
from manyranks.theory import Cluster, ModelShape, Plan, passes, tensor
from manyranks.theory.names import nearest

# name -> what it says of a plan
VARIANTS = {"TP": {"sequence_parallel": False}, "TP + SP": {"sequence_parallel": True, "regather": True}}
VARIANTS |= {"TP + SP, gathered inputs kept": {"sequence_parallel": True, "regather": False}}
_NARROW = dict(zip(VARIANTS, ("TP", "+ SP", "+ SP,\nkept"), strict=True))  # below the bars, where each t has several
_PARTS = {"norms, dropouts and the inputs of attention and MLP: cut by SP only": (style.ORANGE, "////")}
_PARTS |= {"inside attention and MLP: cut by t": (style.BLUE, "")}
_TIMES = {"computing": (style.BLUE, ""), "communication that nothing hides": (style.ORANGE, "////")}


@style.styled
def saved(
    shape: ModelShape,
    plan: Plan,
    degrees: Sequence[int] = (1, 2, 4, 8),
    measured: Mapping[str, Mapping[int, float]] = MappingProxyType({}),
    variants: Sequence[str] = ("TP", "TP + SP"),
    itemsize: int = 4,
) -> style.Figure:
    """Draws the bytes that one layer keeps for backward on one rank, over t: a bar for each variant.

    plan: all but tp and what the variant says
    degrees: the t that get a bar
    measured: variant -> t -> bytes, drawn as rings
    variants: keys of VARIANTS
    itemsize: bytes of the norms' statistics, as in theory.tensor.saved
    Raises ValueError for an unknown variant, and where a plan doesn't fit the shape.
    """
    if unknown := [name for name in (*variants, *measured) if name not in VARIANTS]:
        raise ValueError(f"variant {unknown[0]!r}: {nearest(unknown[0], VARIANTS)}")
    fig, (axes,) = style.figure(width=8.8, height=3.9)
    wide, small = 0.86 / len(variants), len(variants) * len(degrees) > 8
    places = [np.arange(len(degrees)) - 0.43 + (k + 0.5) * wide for k in range(len(variants))]
    for x, name in zip(places, variants, strict=True):
        each = [tensor.saved(shape, replace(plan, tp=t, **VARIANTS[name]), itemsize=itemsize) for t in degrees]
        _stack(axes, x, 0.92 * wide, [(one.outside + one.statistics, one.inside) for one in each], _PARTS)
        rings = np.array([measured.get(name, {}).get(t, np.nan) for t in degrees])
        tops, texts = np.fmax([one.total for one in each], rings), [units.size(one.total) for one in each]
        _over(axes, x, tops, texts, 8 if measured else 4, 7 if small else 8)
        if (seen := ~np.isnan(rings)).any():
            look = {"fillstyle": "none", "markersize": 8 if small else 10, "markeredgewidth": 1.4, "color": style.INK}
            axes.plot(x[seen], rings[seen], "o", label=None if axes.lines else "measured", **look)
    axes.xaxis.remove_overlapping_locs = False  # the middle one of three bars stands where its t does
    names = [_NARROW[name] for name in variants]
    two_lines = any("\n" in name for name in names)
    axes.set_xticks(np.ravel(places), np.repeat(names, len(degrees)), minor=True, fontsize=8)
    axes.tick_params(axis="x", which="minor", length=0)
    axes.tick_params(axis="x", pad=18 + 11 * two_lines)
    _finish(fig, degrees, "kept by one layer, a rank", units.size, 1.12 * axes.get_ylim()[1])
    axes.set_xlabel("tensor-parallel ranks" + " (kept: the gathered inputs too)" * two_lines)
    return fig


@style.styled
def layer_time(shape: ModelShape, plan: Plan, cluster: Cluster, degrees: Sequence[int] = (1, 2, 4, 8, 16, 32)) -> style.Figure:
    """Draws the seconds of one layer, forward and backward, over t: computing, and communication that nothing hides.

    Dashed lines are the time of t = 1 divided by t; the dotted one is where groups leave the node.
    plan: all but tp
    cluster: where it runs
    degrees: the t that get a bar
    Raises ValueError where a plan doesn't fit the shape.
    """
    alone = passes.of_layer(shape, replace(plan, tp=1), cluster).seconds
    found = (passes.of_layer(shape, replace(plan, tp=t), cluster) for t in degrees)
    split = [(sum(each.compute for each in both[:2]), sum(each.tensor for each in both[:2])) for both in found]
    x, totals, ideal = np.arange(len(degrees)), [sum(parts) for parts in split], [alone / t for t in degrees]
    fig, (axes,) = style.figure(width=8.6, height=3.9)
    _stack(axes, x, 0.6, split, _TIMES)
    axes.hlines(ideal, x - 0.42, x + 0.42, color=style.INK, linestyle="--", linewidth=1.2, label="t = 1, divided by t")
    texts = [f"{units.duration(total)}\n{waits / total:.0%} waits" for total, (_, waits) in zip(totals, split, strict=True)]
    _over(axes, x, np.fmax(ideal, totals), texts)
    inside = sum(t <= cluster.node for t in degrees)
    if 0 < inside < len(degrees):
        axes.axvline(inside - 0.5, color=style.INK, linestyle=":", linewidth=1.4)
        at = {"transform": axes.get_xaxis_transform(), "va": "top", "fontsize": 9}
        axes.text(inside - 0.46, 0.97, f"beyond a node of {cluster.node}", **at)
    again = "\nwith recomputation" * (plan.recompute != "none")
    _finish(fig, degrees, f"one layer, forward + backward{again}", units.duration, 1.22 * max(totals))
    return fig


def _finish(fig: style.Figure, degrees: Sequence[int], ylabel: str, unit: Callable[[float], str], top: float) -> None:
    (axes,) = fig.axes
    axes.set_xticks(range(len(degrees)), [f"t = {t}" for t in degrees])
    axes.tick_params(axis="x", length=0)
    axes.set(xlabel="tensor-parallel ranks", ylabel=ylabel, ylim=(0, top))
    axes.yaxis.set_major_formatter(lambda value, _: unit(value) if value else "0")
    fig.legend(loc="outside upper left", ncols=3, handlelength=1.6)


def _stack(axes: Axes, x: np.ndarray, wide: float, bars: list, parts: Mapping[str, tuple[str, str]]) -> None:
    """Draws stacked bars; the first ones go into the legend."""
    axes.grid(visible=False, axis="x")
    below, first = np.zeros(len(x)), not axes.containers
    for (label, (colour, hatch)), heights in zip(parts.items(), zip(*bars, strict=True), strict=True):
        look = {"color": colour, "hatch": hatch, "edgecolor": "white", "linewidth": 0.6}
        axes.bar(x, heights, wide, below, label=label if first else None, **look)
        below += heights


def _over(axes: Axes, x: np.ndarray, heights: Sequence[float], texts: list[str], gap: float = 4, size: float = 8) -> None:
    for at, height, text in zip(x, heights, texts, strict=True):
        axes.annotate(text, (at, height), (0, gap), textcoords="offset points", ha="center", va="bottom", fontsize=size)
