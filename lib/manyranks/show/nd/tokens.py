"""Chapter 10's plot of what decides: communication ÷ computing over tokens per GPU, for every axis."""

from collections.abc import Mapping, Sequence
from math import inf, isfinite
from types import MappingProxyType

from matplotlib.axes import Axes

from manyranks.show import style
from manyranks.show.lines import powers
from manyranks.theory.nd.tokens import Balance, Check

_LOWEST, _HIGHEST = 1e-3, 1e2
_LINES = (("-", style.BLUE), ("--", style.ORANGE), ("-.", style.GREEN), (":", style.PINK), ("-", style.INK))
_LINES += (((0, (6, 1, 1, 1, 1, 1)), style.YELLOW), ("--", "#56B4E9"), ((0, (1, 2)), "#666666"))
_MARKERS = (*style.MARKERS, "<", ">")
_BAR = {"linewidth": 2.6, "linestyle": "-", "solid_capstyle": "butt", "zorder": 3}


@style.styled
def tokens(
    curves: Mapping[str, Sequence[Balance]],
    checks: Mapping[str, Check] = MappingProxyType({}),
    title: str = "Tokens per GPU decide",
) -> style.Figure:
    """Draws a line for each name: where it is above 1, all that is sent takes longer than all that it can hide under.

    curves: name ("TP 8") -> what theory.nd.tokens.curve returns; at most 8
    checks: name -> what theory.nd.tokens.check has: a marker where step.estimate's line crosses 1, a short bar where the
        closed form's does
    Raises ValueError for no or too many curves, for one without points, and for a check of none of them.
    """
    if not 1 <= len(curves) <= len(_LINES):
        raise ValueError(f"{len(curves)} curves: a picture shows 1 to {len(_LINES)}")
    if empty := [name for name, points in curves.items() if not points]:
        raise ValueError(f"{empty[0]!r} has no points: theory.nd.tokens.curve leaves out tokens that the axis cannot take")
    if unknown := [name for name in checks if name not in curves]:
        raise ValueError(f"a check of {unknown[0]!r}: the curves are {', '.join(curves)}")
    fig, (axes,) = style.figure(width=9.2, height=4.4)
    x, y = ([getattr(each, of) for points in curves.values() for each in points] for of in ("tokens", "ratio"))
    axes.set(xscale="log", yscale="log", xlim=(min(x), max(x)), xlabel="tokens per GPU", title=title)
    axes.set(ylim=(max(min(y) / 2, _LOWEST), min(max(*y, 2) * 2, _HIGHEST)), ylabel="communication ÷ computing")
    for (name, points), line, marker in zip(curves.items(), _LINES, _MARKERS, strict=False):
        _draw(axes, name, points, checks.get(name), *line, marker)
    axes.axhline(1, color=style.INK, linewidth=1.2)
    said = "above 1: communication-bound; below 1: compute-bound"
    axes.text(0.99, 0.99, said, fontsize=9, ha="right", va="top", transform=axes.transAxes)
    axes.set_xticks(at := [2**k for k in range(40) if min(x) <= 2**k <= max(x)], [f"{t:,}" for t in at], fontsize=8.5)
    axes.set_yticks(at := powers(axes.get_ylim()), [f"{t:g}" for t in at])
    axes.minorticks_off()
    _legend(fig, axes, bool(checks))
    return fig


def _draw(axes: Axes, name: str, points: Sequence[Balance], check: Check | None, line, colour: str, marker: str) -> None:
    """A curve, and where it and the closed form cross 1."""
    least, said = axes.get_xlim()[0], name
    if check:
        real, closed = _from(check.real, least), _from(check.formula, least)
        said = f"{name}: {real}" + f"\n(closed form: {closed})" * (closed != real)
        if 0 < check.real < inf:
            axes.plot([check.real], [1], marker, color=colour, markersize=8, markeredgecolor=style.INK, zorder=4)
        if 0 < check.formula < inf:
            axes.plot([check.formula] * 2, [0.72, 1.39], color=colour, **_BAR)
    ratios = [max(each.ratio, _LOWEST / 10) for each in points]
    axes.plot([each.tokens for each in points], ratios, linestyle=line, color=colour, label=said)


def _from(crossing: float, least: float) -> str:
    if not isfinite(crossing):
        return "always above 1"
    return f"{crossing:,.0f} tokens" if crossing >= least else f"below {least:,.0f} tokens"


def _legend(fig: style.Figure, axes: Axes, checked: bool) -> None:
    """Names of the lines as they end from above, and of what marks crossings."""
    lines = sorted(axes.get_legend_handles_labels()[0], key=lambda line: -line.get_ydata()[-1])
    for marker, said in (("o", "crosses 1 by step.estimate"), ("|", "crosses 1 by the closed form")) * checked:
        lines += axes.plot([], [], marker, color="#888888", markersize=8, markeredgewidth=1.8, label=said)
    fig.legend(handles=lines, loc="outside right upper", fontsize=8.5, handlelength=2.6, labelspacing=0.9)
