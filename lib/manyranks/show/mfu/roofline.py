"""Chapter 09's roofline: what a chip's arithmetic and its memory let an operator reach, over its arithmetic intensity."""

from collections.abc import Mapping, Sequence
from math import inf
from typing import NamedTuple

from matplotlib.axes import Axes

from manyranks.show import style, units
from manyranks.show.lines import powers
from manyranks.show.mfu.figures import count
from manyranks.theory.roofline import Roof

_COLOURS = (style.BLUE, style.ORANGE, style.GREEN, style.PINK, style.YELLOW, "#56B4E9")


class Point(NamedTuple):
    """An operator: FLOP/byte, and the FLOP/s that it was measured at; None: as fast as the roof lets it be."""

    name: str
    intensity: float
    flops_per_second: float | None = None
    group: str = ""


@style.styled
def roofline(roofs: Mapping[str, Roof], points: Sequence[Point] = (), title: str = "") -> style.Figure:
    """Draws FLOP/s over arithmetic intensity: a roof for each name, and numbered points, listed at the right.

    roofs: name ("H100, bfloat16") -> theory.roofline.Roof
    points: one without FLOP/s is hollow, on the first roof; one with them is filled, and hangs by a dotted line from where that
    roof would let it be. One of intensity 0 has no place on logarithmic axes: it is only listed
    Raises ValueError for no or more than 4 roofs, more than 20 points or 6 groups, an intensity below 0, a rate not above 0.
    """
    groups = list(dict.fromkeys(point.group for point in points))
    for what, given, least, most in (("roofs", roofs, 1, 4), ("points", points, 0, 20), ("groups of points", groups, 0, 6)):
        count(what, given, most, least)
    for name, x, rate, _ in points:
        if not 0 <= x < inf or (x and rate is not None and not 0 < rate < inf):
            raise ValueError(f"{name!r} at {x!r} FLOP/byte and {rate!r} FLOP/s: an intensity is 0 or more, a rate above 0")
    roof = next(iter(roofs.values()))
    places = [(each.intensity, each.flops_per_second or roof.flops_per_second(each.intensity)) for each in points]
    fig, (axes,) = style.figure(width=9.2 if points else 6.4, height=4.0 + 0.2 * len(roofs))
    _draw_roofs(axes, roofs, [place for place in places if place[0]])
    axes.legend(loc="lower left", bbox_to_anchor=(-0.02, 1.0), handlelength=3)
    axes.set_title(title, pad=10 + 15 * len(roofs))
    listed = [axes.plot([], [], style.MARKERS[k], color=_COLOURS[k], label=group)[0] for k, group in enumerate(groups) if group]
    for k, (point, (x, y)) in enumerate(zip(points, places, strict=True), 1):
        marker, colour = ((style.MARKERS, _COLOURS)[each][groups.index(point.group)] for each in (0, 1))
        measured, said = point.flops_per_second is not None, units.flop_rate(y) if x else "moves memory"
        look = {"color": colour, "markerfacecolor": colour if measured else "white", "markersize": 7, "markeredgewidth": 1.6}
        look |= {"label": f"{k if x else '–'}  {point.name}: {units.short(x)}; {said}", "linestyle": "none", "zorder": 3}
        listed += axes.plot([x] * bool(x), [y] * bool(x), marker, **look)
        axes.vlines([x] * (measured and x > 0), y, roof.flops_per_second(x), colors=colour, linestyles=":", linewidth=1.2)
    if listed:
        fig.legend(handles=listed, loc="outside right upper", title="FLOP/byte; FLOP/s", fontsize=8, labelspacing=0.3)
    fig.draw_without_rendering()  # places the axes: which numbers would meet depends on it
    _number(axes, {number: place for number, place in enumerate(places, 1) if place[0]})
    return fig


def _draw_roofs(axes: Axes, roofs: Mapping[str, Roof], places: Sequence[tuple[float, float]]) -> None:
    """On axes with at least a decade on both sides of every ridge, all places, and room above for texts."""
    ridges, peaks = [roof.ridge for roof in roofs.values()], [roof.peak for roof in roofs.values()]
    left = min([min(ridges) / 20, *(x / 2.5 for x, _ in places)])
    right = max([max(ridges) * 20, *(2 * x for x, _ in places)])
    low = min([roof.flops_per_second(left) for roof in roofs.values()] + [y / 2 for _, y in places])
    high = max(peaks) * (max(peaks) / low) ** 0.2
    for (name, roof), line in zip(roofs.items(), ("-", "--", "-.", ":"), strict=False):
        said = f"{name}: {units.flop_rate(roof.peak)}, {units.rate(roof.bandwidth)}, ridge at {units.short(roof.ridge)}"
        rates = [roof.flops_per_second(each) for each in (left, roof.ridge, right)]
        axes.plot([left, roof.ridge, right], rates, color=style.INK, linestyle=line, label=f"{said} FLOP/byte")
    axes.vlines(ridges, low, peaks, colors="#666666", linestyles=":", linewidth=1.0)
    axes.axvspan(left, min(ridges), color=style.FAINT, zorder=0, linewidth=0)
    for x, text, side in ((min(ridges), "memory-bound  ", "right"), (max(ridges), "  compute-bound", "left")):
        axes.text(x, 0.97 * high, text, fontsize=9, fontstyle="italic", ha=side, va="top")
    axes.set(xscale="log", yscale="log", xlim=(left, right), ylim=(low, high))
    axes.set(xlabel="arithmetic intensity (FLOP/byte)", ylabel="rate of an operator")
    axes.set_xticks(at := powers((left, right)), [f"{x:,g}" for x in at])
    axes.set_yticks(at := powers((low, high)), [units.flop_rate(y) for y in at])
    axes.minorticks_off()
    axes.grid(visible=False)


def _number(axes: Axes, places: Mapping[int, tuple[float, float]]) -> None:
    """A number above each point; where it would meet a point or another number, above that."""
    taken = [tuple(72 / axes.figure.dpi * axes.transData.transform(place)) for place in places.values()]
    for (number, place), (x, y) in zip(places.items(), list(taken), strict=True):
        up = 10.0  # points; a number is 12 wide and 9 high
        while any(abs(x - a) < 12 and abs(y + up - b) < 9 for a, b in taken):
            up += 4.5
        taken.append((x, y + up))
        look = {"fontsize": 8.5, "ha": "center", "va": "center", "fontweight": "bold", "zorder": 4}
        axes.annotate(str(number), place, (0, up), textcoords="offset points", **look)
