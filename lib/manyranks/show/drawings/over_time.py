"""Draws time: the spans of a step in lanes, and the memory that the step takes."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from manyranks.show import lines, style, units
from manyranks.show.drawings.paper import EDGE, INK, KINDS, WIDTH, on

Phases = Sequence[tuple[float, float, str]]  # (start, end, label) of each


@style.styled
def when(lanes: Mapping[str, Mapping[str, Sequence]], phases: Mapping[str, Phases]) -> style.Figure:
    """Draws lanes over time, such as compute and network, in panels on one time axis.

    lanes: title -> lane -> (start, end, label, kind) of each span; of "gather 2" the bar has "g2", and the legend "g: gather"
    phases: title -> those of the panel
    """
    high = 0.5 + sum(0.75 + 0.45 * len(panel) for panel in lanes.values())
    fig, panels = style.figure(rows=len(lanes), width=WIDTH, height=high)
    ends = {title: max(end for row in panel.values() for _, end, *_ in row) for title, panel in lanes.items()}
    words = {}
    for axes, (title, panel) in zip(panels, lanes.items(), strict=True):
        axes.barh(list(panel), ends[title], color=INK, alpha=0.2)
        for lane, row in panel.items():
            for start, end, label, kind in row:
                word, _, number = label.rpartition(" ")
                bar = axes.barh(lane, end - start, left=start, color=KINDS[kind], edgecolor=EDGE, linewidth=0.6)
                axes.bar_label(bar, [word[:1] + number], label_type="center", color=on(KINDS[kind]), fontsize=10)
                words |= {f"{word[0]}: {word}": KINDS[kind]} if word else {}
        axes.set(xlim=(0, max(ends.values())), ylim=(len(panel) - 0.5, -0.5))
        axes.grid(visible=False, axis="y")
        _frame(axes, title, phases[title])
    panels[-1].set_xlabel("time →", loc="right")
    fig.legend(handles=[Patch(facecolor=color, label=word) for word, color in words.items()], loc="outside lower left", ncols=6)
    return fig


@style.styled
def memory_over_time(series: Mapping[str, Mapping[str, Sequence[float]]], phases: Phases) -> style.Figure:
    """Stacks the bytes that a rank holds during each event of a step, by kind, in panels with one scale.

    series: title -> kind -> bytes during each event, from the bottom up
    phases: of all panels; event k is from k to k + 1
    """
    fig, panels = style.figure(columns=len(series), width=WIDTH, height=3.2)
    most = max(np.sum(list(kinds.values()), axis=0).max() for kinds in series.values())
    for axes, (title, kinds) in zip(panels, series.items(), strict=True):
        low = np.zeros(len(next(iter(kinds.values()))))
        for kind, held in kinds.items():
            high, look = low + held, {"facecolor": KINDS[kind], "edgecolor": EDGE, "linewidth": 0.6}
            axes.stairs(high, baseline=low, fill=True, label=kind, **look)
            low = high
        at = int(low.argmax())  # the label stands beside it: behind it may be the line between two phases
        side = {"ha": "left"} if (early := at < len(low) / 2) else {"ha": "right"}
        axes.text(at + early, 1.02 * low.max(), f" peak {units.size(low.max())} ", va="bottom", **side)
        axes.set(xlim=(0, len(low)), ylim=(0, 1.14 * most))
        axes.yaxis.set_major_formatter(lambda size, _: units.size(size) if size else "0")
        axes.tick_params(labelleft=axes is panels[0])
        _frame(axes, title, phases)
    fig.legend(*panels[0].get_legend_handles_labels(), loc="outside lower left", ncols=6)
    return fig


def _frame(axes: Axes, title: str, phases: Phases) -> None:
    """Writes a panel's title, and its phases under the axis, with lines between them."""
    axes.set_title(title, loc="left", weight="bold")
    axes.set_xticks([(start + end) / 2 for start, end, _ in phases], [label for *_, label in phases])
    axes.tick_params(length=0)
    axes.grid(visible=False, axis="x")
    for _, end, _ in phases[:-1]:
        axes.axvline(end, color=INK, linestyle=":", linewidth=1.2)


def curves(named: Mapping[str, Sequence[float]], xlabel: str, ylabel: str) -> style.Figure:
    """Draws a curve per name over 0, 1, 2 …, such as losses; some may end early. ylabel: with its unit."""
    steps = range(max(map(len, named.values())))
    named = {name: [*values, *[np.nan] * (len(steps) - len(values))] for name, values in named.items()}
    return lines.curves(steps, named, xlabel, ylabel, yunit="{:g}".format, ylog=False, xlog=False)
