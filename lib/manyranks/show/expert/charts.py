"""Chapter 08's charts: parameters held and used, a step's phases, copies that leave their node, and how even the load is."""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter

from manyranks.show import style, units
from manyranks.theory import ModelShape, flops

_HELD = {"color": "#cfe3f1", "hatch": "////", "edgecolor": style.BLUE, "linewidth": 0.8}
_USED = {"color": style.BLUE, "edgecolor": style.INK, "linewidth": 0.8}
_LOOKS = ((style.BLUE, ""), ("#fdae6b", "////"), ("#a1d99b", "...."), ("#e7a6c8", "\\\\\\\\"))  # of a name, in groups of bars
_RING = {"color": style.ORANGE, "fillstyle": "none", "markersize": 10, "markeredgewidth": 1.8, "label": "theory"}
# What a rank does, from below.
_PARTS = {
    "rank 1 computes": {"facecolor": style.BLUE},
    "its messages are on the way": {"facecolor": "#cfe3f1", "hatch": "....", "edgecolor": style.BLUE},
    "it waits for rank 0's products": {"facecolor": "#fdd9b5", "hatch": "////", "edgecolor": style.ORANGE},
}


@style.styled
def parameters(*shapes: ModelShape) -> style.Figure:
    """Draws what a model holds beside what a token uses of it: parameters, and the FLOPs of training on one token.

    shapes: the models; of sequences of 4,096 tokens
    """
    fig, (held, used) = style.figure(columns=2, width=9.2, height=1.3 + 0.62 * len(shapes))
    every, active = ([getattr(shape, name) for shape in shapes] for name in ("parameters", "active_parameters"))
    rows, work = range(len(shapes)), [flops.per_token(shape, 4096) for shape in shapes]
    held.barh(rows, every, 0.62, label="held: all parameters", **_HELD)
    held.barh(rows, active, 0.34, label="used: those that a token meets", **_USED)
    used.barh(rows, work, 0.34, **_USED)
    kinds = (f"{shape.top_k} of {shape.experts} experts" if shape.experts else "dense" for shape in shapes)
    held.set_yticks(rows, [f"{shape.name}\n{kind}" for shape, kind in zip(shapes, kinds, strict=True)])
    used.set_yticks(rows, [""] * len(shapes))
    billions = ((f"{n / 1e9:.3g} B", f"{m / 1e9:.3g} B") for n, m in zip(every, active, strict=True))
    texts = [f"{n}, used: {m}" if n != m else f"{n}: all" for n, m in billions], [units.flops(each) for each in work]
    for axes, longest, said in zip((held, used), (every, work), texts, strict=True):
        for y, length, text in zip(rows, longest, said, strict=True):
            axes.annotate(text, (length, y), (5, 0), textcoords="offset points", va="center", fontsize=9)
        axes.set(xlim=(0, 1.42 * max(longest)), ylim=(len(shapes) - 0.5, -0.5))
        axes.locator_params(axis="x", nbins=5)
        axes.grid(visible=False, axis="y")
        axes.tick_params(axis="y", length=0)
    held.set(title="Held", xlabel="parameters")
    used.set(title="Used", xlabel="FLOPs of a token, forward + backward, s = 4,096")
    held.xaxis.set_major_formatter(lambda number, _: f"{number / 1e9:,.0f} B" if number else "0")
    used.xaxis.set_major_formatter(EngFormatter("FLOP"))
    fig.legend(loc="outside upper left", ncols=2, handlelength=1.8)
    return fig


@style.styled
def phases(named: Mapping[str, Mapping[str, float]]) -> style.Figure:
    """Draws the phases of a step as several sources have them: a group of bars for each phase, with its numbers.

    named: 1 to 4 sources ("published", "ours") -> phase ("1F", "bubble", …) -> seconds; their sums are in the legend
    Raises ValueError for no source or more than 4, and phases that are not the first one's.
    """
    fig, (axes,) = style.figure(width=8.8, height=3.6)
    each = {f"{source}: {sum(found.values()):.2f} s together": found for source, found in named.items()}
    _groups(axes, each, "{:.2f}".format, 8.5 if len(named) < 3 else 7)
    axes.set(ylabel="seconds of a step", xlabel="phase", ylim=(0, 1.1 * max(max(found.values()) for found in named.values())))
    fig.legend(loc="outside upper left", ncols=3, handlelength=1.8)
    return fig


@style.styled
def copies(
    measured: Mapping[str, Mapping[str, float]],
    predicted: Mapping[str, Mapping[str, float]],
    ylabel: str = "copies of tokens sent to another node",
    said: Callable[[float], str] = "{:,.0f}".format,
) -> style.Figure:
    """Draws what leaves its node, measured as bars and theory's as rings: a group for each way, a bar for each routing.

    measured, predicted: way ("one hop", "two hops") -> routing ("free", "node-limited"; up to 4) -> copies, or bytes
    ylabel: what the numbers are
    said: number -> text; units.size for bytes
    Raises ValueError for no or too many routings, and ways or routings that are not the same in both.
    """
    same = {way: set(found) for way, found in measured.items()} == {way: set(found) for way, found in predicted.items()}
    _refuse(not same, f"predicted has {predicted}, measured has {measured}: give the same ways and routings in both")
    fig, (axes,) = style.figure(width=7.6, height=3.5)
    routings = {f"{name}, measured": name for found in measured.values() for name in found}
    found = {label: {way: each[name] for way, each in measured.items()} for label, name in routings.items()}
    for x, name in zip(_groups(axes, found), routings.values(), strict=True):
        numbers = [(each[name], predicted[way][name]) for way, each in measured.items()]
        rings = axes.plot(x, [expected for _, expected in numbers], "o", **_RING)
        for at, (one, other) in zip(x, numbers, strict=True):
            text, place = f"{said(one)}\ntheory {said(other)}", (at, max(one, other))
            axes.annotate(text, place, (0, 8), textcoords="offset points", ha="center", fontsize=8.5)
    top = max(number for each in (measured, predicted) for way in each.values() for number in way.values())
    axes.set(ylabel=ylabel, ylim=(0, 1.25 * top or 1.0))
    axes.yaxis.set_major_formatter(lambda number, _: said(number))
    handles = [*axes.containers, *rings]
    fig.legend(handles=handles, loc="outside upper left", ncols=len(handles), handlelength=1.8)
    return fig


def _groups(axes: Axes, named: Mapping, said: Callable[[float], str] | None = None, size: float = 8.5) -> list[np.ndarray]:
    """Bars side by side: name -> group -> number, with their numbers where `said` writes them. Returns each name's places."""
    _refuse(not 1 <= len(named) <= len(_LOOKS), f"{len(named)} names: a picture shows 1 to {len(_LOOKS)}")
    groups, wide = list(next(iter(named.values()))), 0.84 / len(named)
    places = [np.arange(len(groups)) - 0.42 + (k + 0.5) * wide for k in range(len(named))]
    for x, (name, found), (colour, hatch) in zip(places, named.items(), _LOOKS, strict=False):
        _refuse(list(found) != groups, f"{name!r} has {list(found)}: give {groups}, as the first one")
        look = {"color": colour, "hatch": hatch, "edgecolor": style.INK, "linewidth": 0.6}
        bars = axes.bar(x, list(found.values()), 0.94 * wide, label=name, **look)
        if said:
            axes.bar_label(bars, [said(number) for number in found.values()], padding=3, fontsize=size)
    axes.set_xticks(range(len(groups)), groups)
    axes.tick_params(axis="x", length=0)
    axes.grid(visible=False, axis="x")
    return places


@style.styled
def balancing(
    runs: Mapping[str, Sequence[float]], loads: Mapping[str, Sequence[Sequence[float]]] = MappingProxyType({})
) -> style.Figure:
    """Draws imbalance over steps, a line for each run; below it, for runs with loads, the load of each expert.

    runs: name -> max load ÷ mean load of each step
    loads: name -> step -> copies that each expert got; shown as multiples of the mean, white for none, black for 3 or more
    Raises ValueError for no run, a run without steps, and loads of a run that there is not.
    """
    _refuse(not runs or not all(map(len, runs.values())), "a run without steps, or no run: give each the imbalance of a step")
    _refuse(not loads.keys() <= runs.keys(), f"loads of {', '.join(loads)}: there are the runs {', '.join(runs)}")
    fig = style.Figure(figsize=(8.8, 5.2 if loads else 3.4), layout="constrained")
    grid = fig.add_gridspec(2 if loads else 1, max(1, len(loads)), height_ratios=(1.35, 1) if loads else (1,))
    axes = fig.add_subplot(grid[0, :])
    for marker, (name, found) in zip(style.MARKERS, runs.items(), strict=False):
        look = {"marker": marker, "markersize": 5, "markevery": max(1, len(found) // 10), "linewidth": 1.5}
        axes.plot(range(1, len(found) + 1), found, label=f"{name}: {found[-1]:.2f} at the end", **look)
    axes.axhline(1.2, color=style.INK, linestyle=(0, (1, 1)), linewidth=1.6, label="target: 1.2")
    axes.set(xlabel="step", ylabel="largest load ÷ mean load")
    axes.locator_params(axis="x", integer=True)
    axes.legend(loc="lower left", bbox_to_anchor=(-0.01, 1.0), ncols=2, handlelength=3)
    panels = [fig.add_subplot(grid[1, place]) for place in range(len(loads))]
    drawn = [_heat(panel, name, np.asarray(found, float)) for panel, (name, found) in zip(panels, loads.items(), strict=True)]
    if panels:
        panels[0].set_ylabel("expert")
        bar = fig.colorbar(drawn[-1], ax=panels, aspect=12, pad=0.01, label="load ÷ mean")
        bar.set_ticks(range(4), labels=["0", "1", "2", "3 or more"])
    return fig


def _heat(axes: Axes, name: str, found: np.ndarray):
    steps, experts = found.shape
    look = {"cmap": "Greys", "vmin": 0, "vmax": 3, "aspect": "auto", "interpolation": "nearest"}
    shown = found / found.mean(axis=1, keepdims=True)
    drawn = axes.imshow(shown.T, extent=(0.5, steps + 0.5, experts - 0.5, -0.5), **look)
    axes.set_title(name, fontsize=10)
    axes.set(xlabel="step", yticks=range(0, experts, -(-experts // 8)))
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
    """Draws a step's time over the imbalance of the load: replayed points, theory's line, and what rank 1 does meanwhile.

    imbalance: of each run, the load of rank 0, the fullest, ÷ the mean
    replayed: seconds of a step
    computes, messages: seconds of it in which rank 1 computes, and in which its messages are on the way; else it waits
    predicted: imbalance -> seconds
    ylabel: what the seconds are
    Raises ValueError for lists of other lengths, and where the parts are more than all.
    """
    lengths = [len(each) for each in (imbalance, replayed, computes, messages)]
    _refuse(len(set(lengths)) > 1, f"imbalance, replayed, computes, messages have {lengths} numbers: give as many of each")
    order = np.argsort(imbalance)
    x, whole, works, sends = (np.asarray(each, float)[order] for each in (imbalance, replayed, computes, messages))
    over = min(*works, *sends) < 0 or (works + sends > whole * (1 + 1e-9)).any()  # parts taken from it may round up
    _refuse(over, "computes and messages are parts of replayed: give 0 or more, together at most the step's seconds")
    fig, (axes,) = style.figure(width=7.6, height=3.9)
    for (label, look), (low, high) in zip(_PARTS.items(), pairwise((0 * x, works, works + sends, whole)), strict=True):
        axes.fill_between(x, low, high, label=label, linewidth=0, **look)
        axes.plot(x, high, color=style.INK, linestyle="-", linewidth=0.6)
    axes.plot(sorted(predicted), [predicted[at] for at in sorted(predicted)], color=style.INK, linestyle="-", label="theory")
    axes.plot(x, whole, "o", color=style.ORANGE, markersize=8, linestyle="none", label="replayed")
    room, last = 0.1 * (x[-1] - x[0]) or 0.1, -np.inf
    for at, seconds, busy in zip(x, whole, works, strict=True):
        if at - last >= 1.4 * room:  # else numbers would lie on those before
            text, last = {"textcoords": "offset points", "fontsize": 8.5}, at
            axes.annotate(units.duration(seconds), (at, seconds), (2, 8), ha="right", **text)
            look = {"ha": "center", "va": "center", "color": style.BLACK, "bbox": style.PAPER}
            axes.annotate(units.duration(busy), (at, busy / 2), (0, 0), **look, **text)
    top = 1.3 * max([*whole, *predicted.values()])
    axes.set(xlabel="largest load ÷ mean load", ylabel=ylabel, xlim=(x[0] - room, x[-1] + room), ylim=(0, top))
    axes.yaxis.set_major_formatter(lambda seconds, _: units.duration(seconds) if seconds else "0")
    fig.legend(loc="outside upper left", ncols=3, handlelength=2.2)
    return fig


def _refuse(wrong: bool, said: str) -> None:
    if wrong:
        raise ValueError(said)
