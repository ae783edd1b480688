"""Chapter 10's picture of published layouts beside their neighbours: how much longer a step takes, and the memory."""

import textwrap
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes

from manyranks.show import style, units
from manyranks.theory.published.layouts import Neighbour

_PANELS, _ROWS = 3, 16  # at most: layouts, neighbours of one
_LONGEST = 1.0  # times the published step's time, beyond its own: longer bars are cut off
_SAME = 0.005  # of the time
_FITS, _TOO_LARGE = ("#9ecae1", ""), ("#fdae6b", "////")
_EDGE = {"edgecolor": style.INK, "linewidth": 0.7}


@style.styled
def layouts(named: Mapping[str, Sequence[Neighbour]]) -> style.Figure:
    """Each layout and its neighbours: time of a step against the first one's, and bytes of a GPU against its memory.

    named: name -> what theory.published.layouts.why_not returns; the first is the layout as it was published.
    Raises ValueError for none, for more than 3 layouts or 16 neighbours, and where the first is not possible.
    """
    if not 1 <= len(named) <= _PANELS:
        raise ValueError(f"{len(named)} layouts: a picture shows 1 to {_PANELS}")
    for name, each in named.items():
        if not 1 <= len(each) <= _ROWS or each[0].time is None:
            raise ValueError(f"{name!r} has {len(each)} rows: give 1 to {_ROWS}, the first one a layout that can be")
    heights = [1.0 + 0.28 * len(each) for each in named.values()]
    fig = style.Figure(figsize=(9.2, sum(heights) + 0.3), layout="constrained")
    grid = fig.subplots(len(named), 2, squeeze=False, width_ratios=(1.7, 1), height_ratios=heights)
    for (name, each), (left, right) in zip(named.items(), grid, strict=True):
        _times(left, each, name)
        _memory(right, each)
    handles = [left.barh(0, 0, color=colour, hatch=hatch, **_EDGE) for colour, hatch in (_FITS, _TOO_LARGE)]
    fig.legend(handles, ["fits in memory", "does not fit"], loc="outside lower left", ncols=2, fontsize=8.5)
    return fig


def _times(axes: Axes, rows: Sequence[Neighbour], name: str) -> None:
    published = rows[0].time.seconds
    most = min(max([0.1, *(row.slower for row in rows)]), _LONGEST)
    least = min(0.0, *(row.slower for row in rows), 0.0)
    wide = most - least
    for y, row in enumerate(rows):
        if row.time is None:
            _say(axes, "not possible: " + textwrap.shorten(row.impossible, 44, placeholder=" …"), 0.0, y)
            continue
        colour, hatch = _look(row)
        axes.barh(y, 100 * min(row.slower, most), 0.66, color=colour, hatch=hatch, **_EDGE)
        change = f"{row.slower:+.0%}, ".replace("-", "−") if abs(row.slower) >= _SAME else "as long, " * (y > 0)
        _say(
            axes,
            f"{'» ' * (row.slower > most)}{change}{units.duration(row.time.seconds)}",
            100 * min(max(row.slower, 0.0), most),
            y,
        )
    axes.axvline(0, color=style.INK, linewidth=1.2)
    axes.set_yticks(range(len(rows)), [row.name for row in rows], fontsize=9)
    axes.set(xlim=(100 * (least - 0.03 * wide), 100 * (most + 0.45 * wide)), ylim=(len(rows) - 0.5, -0.5))
    axes.set(title=name, xlabel=f"time of a step against {units.duration(published)} (%)")
    _rows_only(axes)


def _memory(axes: Axes, rows: Sequence[Neighbour]) -> None:
    room = rows[0].time.cluster.accelerator.memory
    for y, row in enumerate(rows):
        if row.time is None:
            continue
        colour, hatch = _look(row)
        axes.barh(y, min(row.peak.total, 2 * room), 0.66, color=colour, hatch=hatch, **_EDGE)
        again = {"none": "", "full": ", recompute all"}.get(row.plan.recompute, f", {row.plan.recompute}")
        changed = again if row.plan.recompute != rows[0].plan.recompute else ""
        _say(axes, units.size(row.peak.total) + changed, max(room, min(row.peak.total, 2 * room)), y)
    axes.axvline(room, color=style.INK, linestyle="--", linewidth=1.2)
    axes.set(
        xlim=(0, 3.3 * room), ylim=(len(rows) - 0.5, -0.5), yticks=[], xlabel=f"memory of a GPU (dashed: {units.size(room)})"
    )
    axes.xaxis.set_major_formatter(lambda size, _: units.size(size) if size else "0")
    axes.locator_params(axis="x", nbins=4)
    _rows_only(axes)


def _look(row: Neighbour) -> tuple[str, str]:
    return _FITS if row.fits else _TOO_LARGE


def _say(axes: Axes, text: str, x: float, y: int) -> None:
    axes.annotate(text, (x, y), (4, 0), textcoords="offset points", va="center", fontsize=8.5)


def _rows_only(axes: Axes) -> None:
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
