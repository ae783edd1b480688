"""Chapter 06: what a layer keeps and how long it takes over the degree t of tensor parallelism; pictures; an explorer."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import numpy as np
from matplotlib.axes import Axes

from manyranks.show import style, units
from manyranks.show.tensor_explorer import explorer
from manyranks.show.tensor_pictures import collectives, cut, heads
from manyranks.theory import Cluster, ModelShape, Plan, passes, tensor

__all__ = ["VARIANTS", "collectives", "cut", "explorer", "heads", "layer_time", "saved"]

# name -> what it says of a plan
VARIANTS = {
    "TP": {"sequence_parallel": False},
    "TP + SP": {"sequence_parallel": True, "regather": True},
    "TP + SP, gathered inputs kept": {"sequence_parallel": True, "regather": False},
}
_PARTS = {
    "norms, dropouts and the inputs of attention and MLP: cut by SP only": (style.ORANGE, "////"),
    "inside attention and MLP: cut by t": (style.BLUE, ""),
}
_TIMES = {"computing": (style.BLUE, ""), "communication that nothing hides": (style.ORANGE, "////")}
_NARROW = ("TP", "+ SP", "+ SP,\nkept")  # below the bars, where there are several for each t


@style.styled
def saved(
    shape: ModelShape,
    plan: Plan,
    degrees: Sequence[int] = (1, 2, 4, 8),
    measured: Mapping[str, Mapping[int, float]] = MappingProxyType({}),
    variants: Sequence[str] = ("TP", "TP + SP"),
    itemsize: int = 4,
) -> style.Figure:
    """Bytes that one layer keeps for backward on one rank, over t: a bar for each variant, with what TP alone does not cut.

    plan: all but tp and what the variant says. measured: variant -> t -> bytes, drawn as rings. variants: keys of VARIANTS.
    itemsize: of the norms' statistics, as in theory.tensor.saved.
    Raises ValueError for an unknown variant, and where a plan does not fit the shape.
    """
    if unknown := [name for name in (*variants, *measured) if name not in VARIANTS]:
        raise ValueError(f"variant {unknown[0]!r}: known are {', '.join(VARIANTS)}")
    found = {
        name: [tensor.saved(shape, replace(plan, tp=t, **VARIANTS[name]), itemsize=itemsize) for t in degrees]
        for name in variants
    }
    fig, (axes,) = style.figure(width=8.8, height=3.9)
    wide, small = 0.86 / len(variants), len(variants) * len(degrees) > 8
    for k, (name, each) in enumerate(found.items()):
        x = np.arange(len(degrees)) - 0.43 + (k + 0.5) * wide
        _stack(axes, x, 0.92 * wide, [(one.outside + one.statistics, one.inside) for one in each], _PARTS, k == 0)
        rings = [measured.get(name, {}).get(t, np.nan) for t in degrees]
        tops = np.fmax([one.total for one in each], rings)
        _over(axes, x, tops, [units.size(one.total) for one in each], 8 if measured else 4, 7 if small else 8)
        _rings(axes, x, rings, 8 if small else 10)
    _below(axes, degrees, [list(VARIANTS).index(name) for name in variants], wide)
    axes.set_ylabel("kept by one layer, a rank")
    axes.yaxis.set_major_formatter(lambda size, _: units.size(size))
    fig.legend(loc="outside upper left", ncols=3, handlelength=1.6)
    return fig


@style.styled
def layer_time(shape: ModelShape, plan: Plan, cluster: Cluster, degrees: Sequence[int] = (1, 2, 4, 8, 16, 32)) -> style.Figure:
    """Seconds of one layer, forward and backward, over t: computing, and communication that nothing hides.

    plan: all but tp. Dashed lines: the time of t = 1 divided by t; the dotted one: where groups leave the node. Raises
    ValueError where a plan does not fit the shape.
    """
    found = [passes.of_layer(shape, replace(plan, tp=t), cluster) for t in degrees]
    alone = passes.of_layer(shape, replace(plan, tp=1), cluster).seconds
    split = [(both.forward.compute + both.backward.compute, both.forward.tensor + both.backward.tensor) for both in found]
    fig, (axes,) = style.figure(width=8.6, height=3.9)
    x = np.arange(len(degrees))
    _stack(axes, x, 0.6, split, _TIMES, True)
    ideal = [alone / t for t in degrees]
    axes.hlines(ideal, x - 0.42, x + 0.42, color=style.INK, linestyle="--", linewidth=1.2, label="t = 1, divided by t")
    shares = [f"{units.duration(sum(parts))}\n{parts[1] / sum(parts):.0%} waits" for parts in split]
    _over(axes, x, list(map(max, ideal, map(sum, split))), shares)
    inside = sum(t <= cluster.node for t in degrees)
    if 0 < inside < len(degrees):
        axes.axvline(inside - 0.5, color=style.INK, linestyle=":", linewidth=1.4)
        axes.text(
            inside - 0.46, 0.97, f"beyond a node of {cluster.node}", transform=axes.get_xaxis_transform(), va="top", fontsize=9
        )
    axes.set_xticks(x, [f"t = {t}" for t in degrees])
    again = "\nwith recomputation" if plan.recompute != "none" else ""
    axes.set(
        ylabel=f"one layer, forward + backward{again}", ylim=(0, 1.22 * max(map(sum, split))), xlabel="tensor-parallel ranks"
    )
    axes.yaxis.set_major_formatter(lambda seconds, _: units.duration(seconds) if seconds else "0")
    axes.grid(visible=False, axis="x")
    fig.legend(loc="outside upper left", ncols=3, handlelength=2.2)
    return fig


def _stack(axes: Axes, x: np.ndarray, wide: float, bars: list, parts: Mapping[str, tuple[str, str]], named: bool) -> None:
    """Stacked bars; named: whether they go into the legend."""
    below = np.zeros(len(x))
    for (label, (colour, hatch)), heights in zip(parts.items(), zip(*bars, strict=True), strict=True):
        look = {"color": colour, "hatch": hatch, "edgecolor": "white", "linewidth": 0.6}
        axes.bar(x, heights, wide, below, label=label if named else None, **look)
        below += heights


def _over(axes: Axes, x: np.ndarray, heights: Sequence[float], texts: list[str], gap: float = 4, size: float = 8) -> None:
    for at, height, text in zip(x, heights, texts, strict=True):
        axes.annotate(text, (at, height), (0, gap), textcoords="offset points", ha="center", va="bottom", fontsize=size)


def _rings(axes: Axes, x: np.ndarray, heights: list[float], size: float) -> None:
    """A ring at each height that is a number."""
    found = [(at, height) for at, height in zip(x, heights, strict=True) if not np.isnan(height)]
    if found:
        label = None if axes.lines else "measured"
        look = {"fillstyle": "none", "markersize": size, "markeredgewidth": 1.4, "linestyle": "none"}
        axes.plot(*zip(*found, strict=True), "o", color=style.INK, label=label, **look)


def _below(axes: Axes, degrees: Sequence[int], names: list[int], wide: float) -> None:
    """Two rows of ticks: which variant a bar is, and its t."""
    many = len(names)
    places = [k - 0.43 + (j + 0.5) * wide for k in range(len(degrees)) for j in range(many)]
    labels = [_NARROW[name] for name in names]
    more = 11 * max(label.count("\n") for label in labels)
    axes.set_xticks(places, labels * len(degrees), fontsize=8)
    axes.tick_params(axis="x", length=0)
    axes.grid(visible=False, axis="x")
    for k, t in enumerate(degrees):
        axes.annotate(f"t = {t}", (k, 0), (0, -20 - more), ("data", "axes fraction"), "offset points", ha="center", va="top")
    axes.set_xlabel("tensor-parallel ranks" + " (kept: the gathered inputs too)" * (more > 0), labelpad=24)
    axes.set_ylim(top=1.12 * axes.get_ylim()[1])
