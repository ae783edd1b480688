"""Chapter 09's figures: what was bought and what was used, the roofline, where a step's time goes."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, cycle, product
from math import inf
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes

from manyranks.show import scenario, style, units
from manyranks.show.bars import Bars
from manyranks.show.lines import curves, powers, ticks
from manyranks.show.style import LOOKS, STEP
from manyranks.theory import Cluster, ModelShape, Plan, step
from manyranks.theory.roofline import Roof, time_budget

# A part's name in the picture, color and hatch; parts that are not known have the others in turn.
_KNOWN = STEP | {"matmul": ("matmul", style.BLUE, ""), "other": ("other operators", "#9ecae1", "....")}
_KNOWN |= {"communication": ("communication", style.ORANGE, "////"), "waiting": ("waiting", style.YELLOW, "||||")}
_KNOWN |= {"python": ("Python", "#b0b0b0", "\\\\\\\\"), "overhead": ("kernel launches", style.FAINT, "....")}
_COLORS = (style.BLUE, style.ORANGE, style.GREEN, style.PINK, style.YELLOW, "#56B4E9")


def published(runs: Sequence[tuple[str, str, float]]) -> style.Figure:
    """Draws of each run the share of the peak that was used, and the rest of what was bought.

    runs: (name, chips, MFU as a share), from above. Raises ValueError for none, more than 16, and a share that is not 0 to 1.
    """
    count("runs", runs, 16)
    if wrong := {name: share for name, _, share in runs if not 0 <= share <= 1}:
        raise ValueError(f"the shares are {wrong}: give numbers from 0 to 1, not in percent")
    looks = {"model FLOPs (MFU)": (style.BLUE, ""), "all else": (style.FAINT, "")}
    bars = {", ".join(filter(None, run)): dict(zip(looks, (share, 1 - share), strict=True)) for *run, share in runs}
    return rows("MFU of published runs", looks, bars, [f"{share:.1%}" for *_, share in runs], 1.0)


@style.styled
def rows(title: str, looks: Mapping[str, tuple], bars: Mapping[str, Mapping], said: Sequence[str], most: float) -> style.Figure:
    """A bar for each name, and what is said of it.

    looks: part -> color and hatch
    most: of the longest bar
    """
    fig, (axes,) = style.figure(width=8.8, height=0.9 + 0.38 * len(bars))
    Bars(axes, looks, title, list(bars), columns=3).update(list(bars.values()), said, -9, most)
    axes.tick_params(axis="y", labelsize=8.5)
    return fig


def count(what: str, given: Sequence | Mapping, most: int, least: int = 1) -> None:
    """Raises ValueError where a picture can't show so many."""
    if not least <= len(given) <= most:
        raise ValueError(f"{len(given)} {what}: a picture shows {least} to {most}")


class Point(NamedTuple):
    """An operator: FLOP/byte, and the FLOP/s that it was measured at; None: as fast as the roof lets it be."""

    name: str
    intensity: float
    flops_per_second: float | None = None
    group: str = ""


@style.styled
def roofline(roofs: Mapping[str, Roof], points: Sequence[Point] = ()) -> style.Figure:
    """Draws FLOP/s over arithmetic intensity: a roof for each name, and numbered points, listed at the right.

    roofs: name ("H100, bfloat16") -> theory.roofline.Roof
    points: one without FLOP/s is hollow, on the first roof; one with them is filled, and hangs by a dotted line from where that
        roof would let it be

    One of intensity 0 has no place on logarithmic axes: it is only listed.
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
    listed = [axes.plot([], [], style.MARKERS[k], color=_COLORS[k], label=group)[0] for k, group in enumerate(groups) if group]
    for k, (point, (x, y)) in enumerate(zip(points, places, strict=True), 1):
        marker, color = ((style.MARKERS, _COLORS)[each][groups.index(point.group)] for each in (0, 1))
        measured, said = point.flops_per_second is not None, units.flop_rate(y) if x else "moves memory"
        look = {"color": color, "markerfacecolor": color if measured else "white", "markersize": 7, "markeredgewidth": 1.6}
        look |= {"label": f"{k if x else '–'}  {point.name}: {units.short(x)}; {said}", "linestyle": "none", "zorder": 3}
        listed += axes.plot([x] if x else [], [y] if x else [], marker, **look)
        below = [x] if measured and x > 0 else []
        axes.vlines(below, y, roof.flops_per_second(x), colors=color, linestyles=":", linewidth=1.2)
    if listed:
        fig.legend(handles=listed, loc="outside right upper", title="FLOP/byte; FLOP/s", fontsize=8, labelspacing=0.3)
    fig.draw_without_rendering()  # places the axes: which numbers would meet depends on it
    _number(axes, {number: place for number, place in enumerate(places, 1) if place[0]})
    return fig


def _draw_roofs(axes: Axes, roofs: Mapping[str, Roof], places: Sequence[tuple[float, float]]) -> None:
    """Draws roofs on axes with at least a decade on both sides of every ridge, all places, and room above for texts."""
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
    axes.axvspan(left, min(ridges), ymax=0.93, color=style.FAINT, zorder=0, linewidth=0)  # texts on it could hardly be read
    for x, text, side in ((min(ridges), "memory-bound  ", "right"), (max(ridges), "  compute-bound", "left")):
        axes.text(x, 0.97 * high, text, fontsize=9, fontstyle="italic", ha=side, va="top")
    axes.set(xscale="log", yscale="log", xlim=(left, right), ylim=(low, high))
    axes.set(xlabel="arithmetic intensity (FLOP/byte)", ylabel="rate of an operator")
    ticks(axes, (powers((left, right)), "{:,g}".format), (powers((low, high)), units.flop_rate))
    axes.grid(visible=False)


def _number(axes: Axes, places: Mapping[int, tuple[float, float]]) -> None:
    """A number above each point; where it would meet a point or another number, elsewhere around it, with a line to it."""
    scale = 72 / axes.figure.dpi  # points per pixel; a number is 14 wide and 9 high
    taken = [tuple(scale * axes.transData.transform(place)) for place in places.values()]
    left, low, right, high = scale * axes.bbox.extents
    ways = (0, 1), (1, 0), (-1, 0), (0, -1), (0.8, 0.8), (-0.8, 0.8), (0.8, -0.8), (-0.8, -0.8)
    for (number, place), (x, y) in zip(places.items(), list(taken), strict=True):
        for far, (a, b) in product(range(10, 1000, 5), ways):
            at = x + far * a, y + far * b
            inside = left < at[0] < right and low < at[1] < high - 20  # where the regions' names are
            if inside and all(abs(at[0] - other) >= 14 or abs(at[1] - over) >= 9 for other, over in taken):
                break
        taken.append(at)
        look = {"fontsize": 8.5, "ha": "center", "va": "center", "fontweight": "bold", "zorder": 4}
        axes.annotate(str(number), place, (far * a, far * b), textcoords="offset points", **look)
        if far > 10:
            ends = [(x + part * a, y + part * b) for part in (0, far - 6)]
            line = axes.transData.inverted().transform(np.divide(ends, scale))
            axes.plot(*line.T, "-", color=style.INK, linewidth=0.6, zorder=2)


def _looks(parts: Iterable[str]) -> dict[str, tuple[str, str, str]]:
    others = cycle(LOOKS)
    return {part: _KNOWN.get(part) or (part, *next(others)) for part in parts}


class Falls(Bars):
    """Rows of a step's parts, each beginning where the one above ends. A row's name says what its bar is: no hatches."""

    def __init__(self, axes: Axes, parts: Sequence[str], title: str, **labels):
        looks = {name: (color, "") for name, color, *_ in _looks(parts).values()}
        super().__init__(axes, looks, title, [""] * len(looks), units.duration, columns=0, **labels)
        axes.set_title(title, pad=8)
        axes.set_yticks(range(len(looks)), [row.removesuffix(" messages") for row in looks], fontsize=9)
        self._names = list(looks)

    def show(self, seconds: Mapping[str, float], longest: float) -> None:
        """Shows a step.

        seconds: of each part
        longest: of the axis
        """
        *begun, whole = accumulate(seconds.values(), initial=0.0)
        bars = [{"": start, name: x} for name, start, x in zip(self._names, begun, seconds.values(), strict=True)]
        texts = [f"{units.duration(x)}, {x / whole:.1%}" if x else "none" for x in seconds.values()]
        self.update(bars, texts, -9, longest, (whole, f"together {units.duration(whole)}"))


@style.styled
def waterfall(budgets: Mapping[object, Mapping[str, float] | tuple], title: str = "") -> style.Figure:
    """Draws the parts of a step's time, one after another from 0 to their sum, with their seconds and shares.

    budgets: rank -> measure.budget.Budget, or name -> {part: seconds}. Up to 4 have a waterfall each, side by side; up to 16 a
    bar each. Where there are more than 5 parts, those without time are left out
    Raises ValueError for none, more than 16, other parts than the first one's, more than 10 of them, and negative seconds.
    """
    names = [f"rank {key}" if isinstance(key, int) else str(key) for key in budgets]
    spent = [dict(found) if isinstance(found, Mapping) else found._asdict() for found in budgets.values()]
    count("budgets", spent, 16)
    count("parts", spent[0], 10)
    for name, parts in zip(names, spent, strict=True):
        if [*parts] != [*spent[0]] or any(not 0 <= x < inf for x in parts.values()) or not sum(parts.values()):
            raise ValueError(f"{name!r} has {parts}: give seconds of {', '.join(spent[0])}, 0 or more, not all of them 0")
    shown = [part for part in spent[0] if len(spent[0]) <= 5 or any(parts[part] for parts in spent)]
    longest = max(sum(parts.values()) for parts in spent)
    spent = [{part: parts[part] for part in shown} for parts in spent]
    if len(names) > 4:
        looks = {name: look for name, *look in _looks(shown).values()}
        bars = {name: dict(zip(looks, parts.values(), strict=True)) for name, parts in zip(names, spent, strict=True)}
        return rows(title, looks, bars, [units.duration(sum(parts.values())) for parts in spent], longest)
    fig = style.Figure(figsize=(min(9.2, 3.4 + 3.0 * len(names)), 0.9 + 0.36 * len(shown)), layout="constrained")
    for axes, name, parts in zip(fig.subplots(1, len(names), squeeze=False)[0], names, spent, strict=True):
        Falls(axes, shown, name if len(names) > 1 else title or name, size=8).show(parts, longest)
        axes.label_outer()
    fig.suptitle(title if len(names) > 1 else "", fontsize=11, fontweight="bold", x=0.01, ha="left")
    return fig


@style.styled
def over_degree(shape: ModelShape, plan: Plan, cluster: Cluster, degree: str, values: Sequence[int]) -> style.Figure:
    """Draws MFU over one degree of a plan, and the shares of a step that are lost to all else; the batch stays what it is.

    shape, plan, cluster: as theory.step.estimate takes them
    degree: "dp", "tp", "pp", or another degree of the plan
    values: what it is set to, one or more, from low to high. "matmuls below peak" is the time of matmuls beyond what

    MFU's FLOPs take at the peak. Raises ValueError for no values, and for one that model, batch or cluster don't allow.
    """
    count("values", values, 16)
    steps = []
    for each in (replace(plan, **{degree: value}) for value in values):
        time, budget = step.estimate(shape, each, cluster), time_budget(shape, each, cluster)
        used = time.mfu * time.seconds
        spent = {"MFU": used, "matmuls below peak": budget.pop("matmul") - used}
        spent |= {"other operators": budget.pop("other") + budget.pop("overhead")}
        spent |= {name: budget[part] for part, (name, *_) in _looks(budget).items()}
        steps.append({name: 100 * seconds / time.seconds for name, seconds in spent.items()})
    shown = {name: [each[name] for each in steps] for name in steps[0] if max(each[name] for each in steps) > 1}  # percent
    fig = curves(values, shown, scenario.SHARED[degree][0], "share of a step (%)", title=shape.name, xticks=values, ylog=False)
    fig.axes[0].legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))  # inside it would lie on curves
    return fig
