"""Chapter 08's charts: parameters held and used, a step's phases, copies that leave their node."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter

from manyranks.show import style
from manyranks.theory import ModelShape, flops

_HELD = {"color": "#cfe3f1", "hatch": "////", "edgecolor": style.BLUE, "linewidth": 0.8}
_USED = {"color": style.BLUE, "edgecolor": style.INK, "linewidth": 0.8}
# Of one name each, in a group of bars.
_SERIES = ((style.BLUE, ""), ("#fdae6b", "////"), ("#a1d99b", "...."), ("#e7a6c8", "\\\\\\\\"))
_RING = {"color": style.ORANGE, "fillstyle": "none", "markersize": 10, "markeredgewidth": 1.8, "label": "theory"}
_WAYS = (("none", "////"), (style.BLUE, ""), ("#fdae6b", "...."))


@style.styled
def parameters(*shapes: ModelShape, seq: int = 4096) -> style.Figure:
    """What a model holds beside what a token uses of it: all and active parameters, and the FLOPs of training on one token.

    seq: tokens of the sequence, for attention. Raises ValueError for none, or more than 6 models.
    """
    if not 1 <= len(shapes) <= 6:
        raise ValueError(f"{len(shapes)} models: a picture shows 1 to 6")
    fig, (held, used) = style.figure(columns=2, width=9.2, height=1.3 + 0.62 * len(shapes))
    rows = np.arange(len(shapes))
    held.barh(rows, [shape.parameters for shape in shapes], 0.62, label="held: all parameters", **_HELD)
    held.barh(rows, [shape.active_parameters for shape in shapes], 0.34, label="used: those that a token meets", **_USED)
    held.set_yticks(rows, [f"{shape.name}\n{_kind(shape)}" for shape in shapes])
    _texts(held, rows, [shape.parameters for shape in shapes], [_parameters(shape) for shape in shapes])
    work = [flops.per_token(shape, seq) for shape in shapes]
    used.barh(rows, work, 0.34, **_USED)
    used.set_yticks(rows, [""] * len(shapes))
    _texts(used, rows, work, [EngFormatter("FLOP")(_rounded(each)) for each in work])
    held.set(title="Held", xlabel="parameters")
    used.set(title="Used", xlabel=f"FLOPs of a token, forward + backward, s = {seq:,}")
    for axes, longest, unit in ((held, max(s.parameters for s in shapes), ""), (used, max(work), "FLOP")):
        axes.set(xlim=(0, 1.42 * longest), ylim=(len(shapes) - 0.5, -0.5))
        axes.xaxis.set_major_formatter(_billions if not unit else EngFormatter(unit))
        axes.locator_params(axis="x", nbins=5)
        axes.grid(visible=False, axis="y")
        axes.tick_params(axis="y", length=0)
    fig.legend(loc="outside upper left", ncols=2, handlelength=1.8)
    return fig


def _kind(shape: ModelShape) -> str:
    return f"{shape.top_k} of {shape.experts} experts" if shape.experts else "dense"


def _parameters(shape: ModelShape) -> str:
    every, active = shape.parameters / 1e9, shape.active_parameters / 1e9
    return f"{every:.3g} B: all" if active == every else f"{every:.3g} B, used: {active:.3g} B"


def _billions(number: float, _: int) -> str:
    return f"{number / 1e9:,.0f} B" if number else "0"


def _rounded(number: float) -> float:
    return float(f"{number:.3g}")


def _texts(axes: Axes, rows: Sequence[float], lengths: Sequence[float], texts: Sequence[str]) -> None:
    for y, length, text in zip(rows, lengths, texts, strict=True):
        axes.annotate(text, (length, y), (5, 0), textcoords="offset points", va="center", fontsize=9)


@style.styled
def phases(named: Mapping[str, Mapping[str, float]], ylabel: str = "seconds of a step") -> style.Figure:
    """The same phases of a step as several sources have them: a group of bars for each phase, with its numbers.

    named: source ("published", "ours") -> phase ("1F", "bubble", …) -> seconds. Their sums are in the legend.
    Raises ValueError for none, more than 4 sources, and phases that are not the first one's.
    """
    if not 1 <= len(named) <= len(_SERIES):
        raise ValueError(f"{len(named)} sources: a picture shows 1 to {len(_SERIES)}")
    names = list(next(iter(named.values())))
    for source, found in named.items():
        if list(found) != names:
            raise ValueError(f"{source!r} has the phases {list(found)}: give {names}, as the first one")
    fig, (axes,) = style.figure(width=8.8, height=3.6)
    wide, size = 0.84 / len(named), 8.5 if len(named) < 3 else 7
    for k, ((source, found), (colour, hatch)) in enumerate(zip(named.items(), _SERIES, strict=False)):
        x, seconds = np.arange(len(names)) - 0.42 + (k + 0.5) * wide, list(found.values())
        label = f"{source}: {sum(seconds):.2f} s together"
        axes.bar(x, seconds, 0.94 * wide, color=colour, hatch=hatch, edgecolor=style.INK, linewidth=0.6, label=label)
        for at, value in zip(x, seconds, strict=True):
            axes.annotate(f"{value:.2f}", (at, value), (0, 3), textcoords="offset points", ha="center", fontsize=size)
    axes.set_xticks(range(len(names)), names)
    axes.tick_params(axis="x", length=0)
    axes.set(ylabel=ylabel, xlabel="phase", ylim=(0, 1.1 * max(max(found.values()) for found in named.values())))
    axes.grid(visible=False, axis="x")
    fig.legend(loc="outside upper left", ncols=3, handlelength=1.8)
    return fig


@style.styled
def copies(
    measured: Mapping[str, Mapping[str, float]],
    predicted: Mapping[str, Mapping[str, float]],
    ylabel: str = "copies of tokens sent to another node",
    said: Callable[[float], str] = "{:,.0f}".format,
) -> style.Figure:
    """What leaves its node, measured as bars and theory's as rings: a group for each way, a bar for each routing in it.

    measured, predicted (by theory): way ("one hop", "two hops") -> routing ("free", "node-limited") -> copies; bytes with
    said=units.size.
    Raises ValueError for more than 3 routings, and ways or routings that are not the same in both.
    """
    routings = list(next(iter(measured.values()))) if measured else []
    if not 1 <= len(routings) <= len(_WAYS):
        raise ValueError(f"{len(routings)} routings: a picture shows 1 to {len(_WAYS)}")
    if {way: set(found) for way, found in predicted.items()} != {way: set(routings) for way in measured}:
        raise ValueError(f"predicted has {_all_of(predicted)}, measured has {_all_of(measured)}: give the same in both")
    fig, (axes,) = style.figure(width=7.6, height=3.5)
    wide = 0.8 / len(routings)
    top = max(max(*measured[way].values(), *predicted[way].values()) for way in measured)
    for k, (routing, (colour, hatch)) in enumerate(zip(routings, _WAYS, strict=False)):
        x = np.arange(len(measured)) - 0.4 + (k + 0.5) * wide
        found, expected = ([each[way][routing] for way in measured] for each in (measured, predicted))
        look = {"color": colour, "hatch": hatch, "edgecolor": style.INK, "linewidth": 0.8}
        axes.bar(x, found, 0.9 * wide, label=f"{routing}, measured", **look)
        rings = axes.plot(x, expected, "o", **_RING)
        for at, one, other in zip(x, found, expected, strict=True):
            text = f"{said(one)}\ntheory {said(other)}"
            axes.annotate(text, (at, max(one, other)), (0, 8), textcoords="offset points", ha="center", fontsize=8.5)
    axes.set_xticks(range(len(measured)), list(measured))
    axes.tick_params(axis="x", length=0)
    axes.set(ylabel=ylabel, ylim=(0, 1.25 * top or 1.0))
    axes.yaxis.set_major_formatter(lambda number, _: said(number))
    axes.grid(visible=False, axis="x")
    handles = [*axes.containers, *rings]
    fig.legend(handles=handles, loc="outside upper left", ncols=len(handles), handlelength=1.8)
    return fig


def _all_of(named: Mapping[str, Mapping[str, float]]) -> str:
    return ", ".join(f"{way}: {routing}" for way, found in named.items() for routing in found)
