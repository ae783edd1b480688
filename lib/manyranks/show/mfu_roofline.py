"""Chapter 09's roofline: what a chip's arithmetic and its memory let an operator reach, over its arithmetic intensity."""

from collections.abc import Collection, Mapping, Sequence
from itertools import combinations
from math import inf, log10
from typing import NamedTuple, Protocol

from matplotlib.axes import Axes

from manyranks.show import style, units
from manyranks.show.labels import width
from manyranks.show.lines import powers

_ROOFS, _POINTS, _GROUPS = 4, 20, 6  # at most
_LEFT, _WIDE, _LIST = 1.2, 4.9, 3.0  # inches left of the axes, of them, and for the list of points
_BELOW, _HIGH = 0.55, 3.65
_SIZE = 8.5  # points, of a number
_COLOURS = (style.BLUE, style.ORANGE, style.GREEN, style.PINK, style.YELLOW, "#56B4E9")
_LINES = ("-", "--", "-.", ":")


class Ceiling(Protocol):
    """A theory.roofline.Roof. peak: FLOP/s; bandwidth: bytes/s; ridge: FLOP/byte."""

    peak: float
    bandwidth: float
    ridge: float

    def flops_per_second(self, intensity: float) -> float: ...


class Point(NamedTuple):
    """An operator: FLOP/byte, and the FLOP/s that it was measured at; None: as fast as the roof lets it be."""

    name: str
    intensity: float
    flops_per_second: float | None = None
    group: str = ""


class _Scale(NamedTuple):
    """Limits of both logarithmic axes."""

    left: float
    right: float
    low: float
    high: float

    def inches(self, x: float, y: float) -> tuple[float, float]:
        across = log10(x / self.left) / log10(self.right / self.left)
        return _WIDE * across, _HIGH * log10(y / self.low) / log10(self.high / self.low)


@style.styled
def roofline(roofs: Mapping[str, Ceiling], points: Sequence[Point] = (), title: str = "") -> style.Figure:
    """FLOP/s over arithmetic intensity: a roof for each name, and numbered points, listed at the right.

    roofs: name ("H100, bfloat16") -> theory.roofline.Roof. A point without FLOP/s is hollow, on the first roof; one with them
    is filled, and hangs by a dotted line from where that roof would let it be. One of intensity 0 has no place on logarithmic
    axes: it is only listed.
    Raises ValueError for no or more than 4 roofs, more than 20 points or 6 groups, an intensity below 0, a rate not above 0.
    """
    _check(roofs, points)
    roof, groups = next(iter(roofs.values())), list(dict.fromkeys(point.group for point in points))
    drawn = {k: point for k, point in enumerate(points) if point.intensity}
    scale = _scale(roofs.values(), drawn.values(), roof)
    wide, high = _LEFT + _WIDE + (_LIST if points else 0.3), _BELOW + _HIGH + 0.15 + 0.19 * len(roofs) + 0.25 * bool(title)
    fig = style.Figure(figsize=(wide, high), layout="none")
    axes = fig.add_axes((_LEFT / wide, _BELOW / high, _WIDE / wide, _HIGH / high))
    axes.set(xscale="log", yscale="log", xlim=scale[:2], ylim=scale[2:])
    _draw_roofs(axes, roofs, scale)
    for point in drawn.values():
        _draw(axes, point, roof, groups.index(point.group))
    _number(axes, drawn, roof, scale)
    axes.set(xlabel="arithmetic intensity (FLOP/byte)", ylabel="rate of an operator")
    axes.set_xticks(at := powers(scale[:2]), [f"{x:,g}" for x in at])
    axes.set_yticks(at := powers(scale[2:]), [units.flop_rate(y) for y in at])
    axes.minorticks_off()
    _listed(fig, points, groups, roof)
    axes.legend(loc="lower left", bbox_to_anchor=(-0.02, 1.0), borderaxespad=0.2, handlelength=3)
    if title:
        fig.text(0.1 / wide, 1 - 0.17 / high, title, fontsize=11, fontweight="bold", va="center")
    return fig


def _check(roofs: Mapping[str, Ceiling], points: Sequence[Point]) -> None:
    for what, given, least, most in (("roofs", roofs, 1, _ROOFS), ("points", points, 0, _POINTS)):
        if not least <= len(given) <= most:
            raise ValueError(f"{len(given)} {what}: a picture shows {least} to {most}")
    if (groups := len({point.group for point in points})) > _GROUPS:
        raise ValueError(f"{groups} groups of points: a picture shows at most {_GROUPS}")
    for name, intensity, rate, _ in points:
        if not 0 <= intensity < inf or (intensity and rate is not None and not 0 < rate < inf):
            raise ValueError(
                f"{name!r} at {intensity!r} FLOP/byte and {rate!r} FLOP/s: an intensity is 0 or more, a rate above 0"
            )


def _reached(point: Point, roof: Ceiling) -> float:
    return point.flops_per_second or roof.flops_per_second(point.intensity)


def _scale(roofs: Collection[Ceiling], points: Collection[Point], first: Ceiling) -> _Scale:
    """At least a decade on both sides of every ridge, all points, and room above for texts."""
    ridges, peaks = [roof.ridge for roof in roofs], [roof.peak for roof in roofs]
    left = min([min(ridges) / 20, *(point.intensity / 2.5 for point in points)])
    right = max([max(ridges) * 20, *(point.intensity * 2 for point in points)])
    least = [min(roof.flops_per_second(left) for roof in roofs), *(_reached(point, first) / 2 for point in points)]
    low, high = min(least), max(peaks)
    return _Scale(left, right, low, high * (high / low) ** 0.2)


def _draw_roofs(axes: Axes, roofs: Mapping[str, Ceiling], scale: _Scale) -> None:
    left, right, low, high = scale
    for (name, roof), line in zip(roofs.items(), _LINES, strict=False):
        x = (left, roof.ridge, right)
        said = (
            f"{name}: {units.flop_rate(roof.peak)}, {units.rate(roof.bandwidth)}, ridge at {units.short(roof.ridge)} FLOP/byte"
        )
        rates = [roof.flops_per_second(each) for each in x]
        axes.plot(x, rates, color=style.INK, linestyle=line, linewidth=1.8, label=said)
        axes.plot([roof.ridge] * 2, [low, roof.peak], color="#666666", linestyle=":", linewidth=1.0)
    axes.grid(visible=False)
    ridges = [roof.ridge for roof in roofs.values()]
    if len(roofs) == 1:
        axes.axvspan(left, ridges[0], color=style.FAINT, zorder=0, linewidth=0)
    for x, text, side in ((min(ridges), "memory-bound", "right"), (max(ridges), "compute-bound", "left")):
        at = (-6, -4) if side == "right" else (6, -4)
        look = {"textcoords": "offset points", "fontsize": 9, "fontstyle": "italic", "ha": side, "va": "top"}
        axes.annotate(text, (x, high), at, **look)


def _draw(axes: Axes, point: Point, roof: Ceiling, group: int) -> None:
    y, top = _reached(point, roof), roof.flops_per_second(point.intensity)
    measured, colour = point.flops_per_second is not None, _COLOURS[group]
    if measured:
        axes.plot([point.intensity] * 2, [y, top], color=colour, linestyle=":", linewidth=1.2)
    look = {"markerfacecolor": colour if measured else "white", "markeredgecolor": colour, "markeredgewidth": 1.6}
    axes.plot([point.intensity], [y], style.MARKERS[group], markersize=7.5, linestyle="none", zorder=3, **look)


def _number(axes: Axes, points: Mapping[int, Point], roof: Ceiling, scale: _Scale) -> None:
    """A number above each point; points whose numbers would meet share one label."""
    clusters = []
    for k, point in points.items():
        flat = point.flops_per_second is None and point.intensity >= roof.ridge
        clusters.append(_Numbers((k,), (scale.inches(point.intensity, _reached(point, roof)),), flat))
    while pair := next(((a, b) for a, b in combinations(clusters, 2) if a.meets(b) or b.meets(a)), None):
        clusters = [each for each in clusters if each not in pair] + [pair[0].joined(pair[1])]
    for cluster in clusters:
        left, low, right, _ = cluster.box
        at = {"fontsize": _SIZE, "ha": "center", "va": "bottom", "fontweight": "bold", "zorder": 4}
        axes.text((left + right) / 2 / _WIDE, low / _HIGH, cluster.text, transform=axes.transAxes, **at)


class _Numbers(NamedTuple):
    """A label of some points, at their places in inches. above: in the middle over them, where the roof is flat; else it is at
    the left of the leftmost one, where a slope leaves room.
    """

    points: tuple[int, ...]
    places: tuple[tuple[float, float], ...]
    above: bool

    @property
    def text(self) -> str:
        """Their numbers, counted from 1; of three or more in a row the first and the last."""
        runs: list[list[int]] = []
        for k in self.points:
            if runs and runs[-1][-1] == k - 1:
                runs[-1].append(k)
            else:
                runs.append([k])
        names = (f"{run[0] + 1}–{run[-1] + 1}" if len(run) > 2 else ", ".join(str(k + 1) for k in run) for run in runs)
        return ", ".join(names)

    @property
    def box(self) -> tuple[float, float, float, float]:
        wide = 1.15 * width(self.text, _SIZE) / 72
        (x, y), last = min(self.places), max(x for x, _ in self.places)
        left = (x + last - wide) / 2 if self.above else x - 0.04 - wide
        return left, y + 0.065, left + wide, y + 0.065 + 1.1 * _SIZE / 72

    def meets(self, other: "_Numbers") -> bool:
        """Whether this label lies on the other one, or on one of its points."""
        left, low, right, high = self.box
        a, b, c, d = other.box
        if left < c + 0.03 and a < right + 0.03 and low < d and b < high:
            return True
        return any(left - 0.05 < x < right + 0.05 and low - 0.05 < y < high + 0.05 for x, y in other.places)

    def joined(self, other: "_Numbers") -> "_Numbers":
        both = zip(self.points + other.points, self.places + other.places, strict=True)
        points, places = zip(*sorted(both), strict=True)
        return _Numbers(points, places, self.above and other.above)


def _listed(fig: style.Figure, points: Sequence[Point], groups: Sequence[str], roof: Ceiling) -> None:
    """Names and numbers of all points, group by group, at the right of the axes."""
    if not points:
        return
    wide, high = fig.get_size_inches()
    axes = fig.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, wide), ylim=(0, high))
    axes.axis("off")
    named = [group for group in groups if group]
    x, y = _LEFT + _WIDE + 0.25, _BELOW + _HIGH - 0.1
    step = min(0.24, _HIGH / (len(points) + 1.25 * len(named)))
    for look, group in enumerate(groups):
        if group:
            edge = {"markerfacecolor": "white", "markeredgecolor": _COLOURS[look], "markeredgewidth": 1.6}
            axes.plot([x + 0.06], [y], style.MARKERS[look], markersize=7, linestyle="none", **edge)
            axes.text(x + 0.22, y, group, fontsize=8.5, fontweight="bold", va="center")
            y -= step
        for k, point in enumerate(points):
            if point.group == group:
                number = k + 1 if point.intensity else "–"
                axes.text(x + 0.2, y, number, fontsize=8, fontweight="bold", ha="right", va="center")
                axes.text(x + 0.28, y, point.name, fontsize=8, va="center")
                axes.text(wide - 0.05, y, _said(point, roof), fontsize=8, ha="right", va="center")
                y -= step
        y -= 0.25 * step
    axes.text(wide - 0.05, _BELOW + _HIGH + 0.12, "FLOP/byte; FLOP/s", fontsize=8, fontstyle="italic", ha="right", va="center")


def _said(point: Point, roof: Ceiling) -> str:
    rate = units.flop_rate(_reached(point, roof)) if point.intensity else "moves memory"
    return f"{units.short(point.intensity)}; {rate}"
