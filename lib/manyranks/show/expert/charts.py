"""Chapter 08's charts: parameters held and used, copies that leave their node, and how even the load is."""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import numpy as np
from matplotlib.ticker import EngFormatter

from manyranks.show import style, units
from manyranks.show.columns import columns, write
from manyranks.theory import ModelShape, flops

Numbers = Mapping[str, Mapping[str, float]]
Floats = Sequence[float]
_HELD = {"color": "#cfe3f1", "hatch": "////", "edgecolor": style.BLUE, "linewidth": 0.8}
_USED = {"color": style.BLUE, "edgecolor": style.INK, "linewidth": 0.8}
# What a rank does, from below: colour, hatch and its colour.
_PARTS = {"rank 1 computes": (style.BLUE, "", style.BLUE), "its messages are on the way": ("#cfe3f1", "....", style.BLUE)}
_PARTS |= {"it waits for rank 0's products": ("#fdd9b5", "////", style.ORANGE)}


@style.styled
def parameters(*shapes: ModelShape) -> style.Figure:
    """Draws what models hold beside what a token uses of it: parameters, and the FLOPs of training on it, with s = 4,096."""
    fig, (held, used) = style.figure(columns=2, width=9.2, height=1.3 + 0.62 * len(shapes), sharey=True)
    rows, work = range(len(shapes)), [flops.per_token(shape, 4096, "full") for shape in shapes]
    every, active = ([getattr(shape, name) for shape in shapes] for name in ("parameters", "active_parameters"))
    bars = held.barh(rows, every, 0.62, label="held: all parameters", **_HELD), used.barh(rows, work, 0.34, **_USED)
    held.barh(rows, active, 0.34, label="used: those that a token meets", **_USED)
    names = [f"{s.name}\n" + (f"{s.top_k} of {s.experts} experts" if s.experts else "dense") for s in shapes]
    billions = ([f"{n / 1e9:.3g} B" for n in numbers] for numbers in (every, active))
    texts = [f"{n}, used: {m}" if n != m else f"{n}: all" for n, m in zip(*billions, strict=True)], map(units.flops, work)
    for axes, drawn, said in zip((held, used), bars, texts, strict=True):
        axes.bar_label(drawn, said, padding=5, fontsize=9)
        axes.set_xlim(0, 1.42 * max(drawn.datavalues))
        axes.locator_params(axis="x", nbins=5)
        axes.tick_params(axis="y", length=0, grid_linewidth=0)
    held.set(title="Held", xlabel="parameters", ylim=(len(shapes) - 0.5, -0.5), yticks=rows, yticklabels=names)
    used.set(title="Used", xlabel="FLOPs of a token, forward + backward, s = 4,096")
    held.xaxis.set_major_formatter(lambda number, _: f"{number / 1e9:,.0f} B" if number else "0")
    used.xaxis.set_major_formatter(EngFormatter("FLOP"))
    fig.legend(loc="outside upper left", ncols=2, handlelength=1.8)
    return fig


@style.styled
def copies(measured: Numbers, predicted: Numbers, ylabel: str, said: Callable[[float], str]) -> style.Figure:
    """Draws what leaves its node, measured as bars and theory's as rings: a group for each way, a bar for each routing.

    measured, predicted: way ("one hop", "two hops") -> routing ("free", "node-limited"; up to 5) -> copies, or bytes
    ylabel, said: what the numbers are, and number -> text; units.size for bytes
    """
    fig, (axes,) = style.figure(width=7.6, height=3.5)
    routings = list(next(iter(measured.values())))
    found, theory = (np.array([[of[way][name] for way in measured] for name in routings]) for of in (measured, predicted))
    sides = [{f"{name}, measured": numbers} for name, numbers in zip(routings, found, strict=True)]
    x = np.ravel(columns(axes, list(measured), sides, said))
    axes.plot(x, theory.flat, "o", color=style.INK, markerfacecolor="white", markersize=10, markeredgewidth=1.8, label="theory")
    texts = [f"{said(one)}\ntheory {said(other)}" for one, other in zip(found.flat, theory.flat, strict=True)]
    write(axes, x, np.fmax(found, theory).flat, texts, 8, 8.5)
    axes.set(ylabel=ylabel, ylim=(0, 1.2 * axes.get_ylim()[1]))
    fig.legend(loc="outside upper left", ncols=5, handlelength=1.8)
    return fig


@style.styled
def balancing(runs: Mapping[str, Floats], loads: Mapping[str, Sequence[Floats]]) -> style.Figure:
    """Draws imbalance over steps, a line for each run, and below it the load of each expert, a panel for each run.

    runs: name -> max load ÷ mean load of each step
    loads: name -> step -> copies that each expert got; shown as multiples of the mean, white for none, black for 3 or more
    """
    fig = style.Figure(figsize=(8.8, 5.2), layout="constrained")
    axes, *panels = fig.subplot_mosaic([[-1] * len(loads), range(len(loads))], height_ratios=(1.35, 1)).values()
    for marker, (name, found) in zip(style.MARKERS, runs.items(), strict=False):
        look = {"marker": marker, "markersize": 5, "markevery": max(1, len(found) // 10), "linewidth": 1.5}
        axes.plot(range(1, len(found) + 1), found, label=f"{name}: {found[-1]:.2f} at the end", **look)
    axes.axhline(1.2, color=style.INK, linestyle=(0, (1, 1)), linewidth=1.6, label="target: 1.2")
    axes.set(xlabel="step", ylabel="largest load ÷ mean load")
    axes.locator_params(axis="x", integer=True)
    axes.legend(loc="lower left", bbox_to_anchor=(-0.01, 1.0), ncols=2, handlelength=3)
    for panel, (name, each) in zip(panels, loads.items(), strict=True):
        found = np.asarray(each, float).T  # of an expert in each step
        ticks = range(0, len(found), -(-len(found) // 8))
        panel.set(title=name, xlabel="step", ylabel="expert" if panel is panels[0] else "", yticks=ticks)
        look = {"cmap": "Greys", "vmin": 0, "vmax": 3, "aspect": "auto", "interpolation": "nearest"}
        drawn = panel.imshow(found / found.mean(axis=0), extent=(0.5, len(each) + 0.5, len(found) - 0.5, -0.5), **look)
        panel.locator_params(axis="x", nbins=4, integer=True)
        panel.grid(visible=False)
    bar = fig.colorbar(drawn, ax=panels, aspect=12, pad=0.01, label="load ÷ mean")
    bar.set_ticks(range(4), labels=["0", "1", "2", "3 or more"])
    return fig


@style.styled
def waiting(
    imbalance: Floats, replayed: Floats, computes: Floats, messages: Floats, predicted: Mapping[float, float], ylabel: str
) -> style.Figure:
    """Draws a step's time over the imbalance of the load: replayed points, theory's line, and what rank 1 does meanwhile.

    imbalance: load of the fullest rank, rank 0, ÷ the mean; one for each run, as in the next three
    replayed: seconds of a step; computes, messages: those in which rank 1 computes, and its messages are on the way
    predicted: imbalance -> seconds; ylabel: what the seconds are
    """
    order = np.argsort(imbalance)
    x, whole, works, sends = (np.asarray(each, float)[order] for each in (imbalance, replayed, computes, messages))
    fig, (axes,) = style.figure(width=7.6, height=3.9)
    ends = pairwise((0 * x, works, works + sends, whole))
    for (label, (face, hatch, edge)), (low, high) in zip(_PARTS.items(), ends, strict=True):
        axes.fill_between(x, low, high, label=label, linewidth=0, facecolor=face, hatch=hatch, edgecolor=edge)
        axes.plot(x, high, color=style.INK, linestyle="-", linewidth=0.6)
    axes.plot(sorted(predicted), [predicted[at] for at in sorted(predicted)], color=style.INK, linestyle="-", label="theory")
    axes.plot(x, whole, "o", color=style.ORANGE, markersize=8, linestyle="none", label="replayed")
    room, last = 0.1 * (x[-1] - x[0]) or 0.1, -np.inf
    for at, seconds, busy in zip(x, whole, works, strict=True):
        if at - last >= 1.4 * room:  # else numbers would lie on those before
            last, look = at, {"ha": "center", "va": "center", "color": style.BLACK, "bbox": style.PAPER, "fontsize": 8.5}
            axes.annotate(units.duration(seconds), (at, seconds), (2, 8), textcoords="offset points", ha="right", fontsize=8.5)
            axes.text(at, busy / 2, units.duration(busy), **look)
    top = 1.3 * max([*whole, *predicted.values()])
    axes.set(xlabel="largest load ÷ mean load", ylabel=ylabel, xlim=(x[0] - room, x[-1] + room), ylim=(0, top))
    axes.yaxis.set_major_formatter(lambda seconds, _: units.duration(seconds) if seconds else "0")
    fig.legend(loc="outside upper left", ncols=3, handlelength=2.2)
    return fig
