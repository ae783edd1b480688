"""Chapter 10's plot of what decides: communication ÷ computing over tokens per GPU, for every axis."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import inf, isfinite, log10
from types import MappingProxyType

from matplotlib.axes import Axes

from manyranks.show import style
from manyranks.show.lines import powers
from manyranks.theory.nd.tokens import Balance, Check

_MOST = 8  # curves
_LOWEST, _HIGHEST = 1e-3, 1e2
_LINES = (("-", style.BLUE), ("--", style.ORANGE), ("-.", style.GREEN), (":", style.PINK), ("-", style.INK))
_LINES += (((0, (6, 1, 1, 1, 1, 1)), style.YELLOW), ("--", "#56B4E9"), ((0, (1, 2)), "#666666"))
_LINE = 0.042  # of the axes' height, for a line of text
_MARKERS = (*style.MARKERS, "<", ">")


@style.styled
def tokens(
    curves: Mapping[str, Sequence[Balance]],
    checks: Mapping[str, Check] = MappingProxyType({}),
    title: str = "Tokens per GPU decide",
) -> style.Figure:
    """A line for each name, where it is above 1 all that is sent takes longer than all that it can hide under.

    curves: name ("TP 8") -> what theory.nd.tokens.curve returns; at most 8. checks: name -> what theory.nd.tokens.check has:
    a marker where step.estimate's line crosses 1, a short bar where the closed form's does.
    Raises ValueError for no or too many curves, for one without points, and for a check of none of them.
    """
    _check(curves, checks)
    fig, (axes,) = style.figure(width=9.2, height=4.8)
    for (name, points), (line, colour), marker in zip(curves.items(), _LINES, _MARKERS, strict=False):
        x, y = [each.tokens for each in points], [max(each.ratio, _LOWEST / 10) for each in points]
        axes.plot(x, y, linestyle=line, color=colour)
        if name in checks:
            _mark_crossings(axes, checks[name], marker, colour)
    every = [each for points in curves.values() for each in points]
    low, high = min(each.tokens for each in every), max(each.tokens for each in every)
    most, least = max(each.ratio for each in every), min(each.ratio for each in every)
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(max(least / 2, _LOWEST), min(max(most, 2) * 2, _HIGHEST)))
    axes.axhline(1, color=style.INK, linewidth=1.2)
    said = "above 1: communication-bound; below 1: compute-bound"
    axes.text(0.99, 0.99, said, fontsize=9, ha="right", va="top", transform=axes.transAxes)
    axes.set(xlabel="tokens per GPU", ylabel="communication ÷ computing", title=title)
    axes.set_xticks(at := [2**k for k in range(40) if low <= 2**k <= high], [f"{x:,}" for x in at], rotation=0, fontsize=8.5)
    axes.set_yticks(at := powers(axes.get_ylim()), [f"{y:g}" for y in at])
    axes.minorticks_off()
    _name(axes, curves, checks)
    if checks:
        _explain(axes)
    return fig


def _check(curves: Mapping[str, Sequence[Balance]], checks: Mapping[str, Check]) -> None:
    if not 1 <= len(curves) <= _MOST:
        raise ValueError(f"{len(curves)} curves: a picture shows 1 to {_MOST}")
    for name, points in curves.items():
        if not points:
            raise ValueError(f"{name!r} has no points: theory.nd.tokens.curve leaves out tokens that the axis cannot take")
    if unknown := [name for name in checks if name not in curves]:
        raise ValueError(f"a check of {unknown[0]!r}: the curves are {', '.join(curves)}")


def _mark_crossings(axes: Axes, check: Check, marker: str, colour: str) -> None:
    if 0 < check.real < inf:
        axes.plot([check.real], [1], marker, color=colour, markersize=8, markeredgecolor=style.INK, zorder=4)
    if 0 < check.formula < inf:
        axes.plot(
            [check.formula] * 2, [0.72, 1.39], color=colour, linewidth=2.6, linestyle="-", solid_capstyle="butt", zorder=3
        )


def _name(axes: Axes, curves: Mapping[str, Sequence[Balance]], checks: Mapping[str, Check]) -> None:
    """Each line's name beside its end, with its crossings; names that would meet are moved apart."""
    low, high = (log10(y) for y in axes.get_ylim())
    said = {name: _said(name, checks.get(name), axes.get_xlim()[0]) for name in curves}
    ends = {name: min(max(log10(max(points[-1].ratio, 1e-9)), low), high) for name, points in curves.items()}
    tall = {name: (high - low) * _LINE * (0.5 + text.count("\n") + 1) for name, text in said.items()}
    at = _apart(ends, tall, high)
    first, last = axes.get_xlim()
    near, beside = (first * (last / first) ** share for share in (1.04, 1.045))
    for (name, points), (_, colour) in zip(curves.items(), _LINES, strict=False):
        way = [points[-1].tokens, near], [10 ** ends[name], 10 ** at[name]]
        axes.plot(*way, color=colour, linestyle="-", linewidth=0.9, clip_on=False)
        axes.text(beside, 10 ** at[name], said[name], va="center", fontsize=9)


def _apart(ends: Mapping[str, float], tall: Mapping[str, float], top: float) -> dict[str, float]:
    """Heights of texts near these ends, from below to the top, none on another."""
    order, at = sorted(ends, key=ends.__getitem__), dict(ends)
    for below, name in pairwise(order):
        at[name] = max(at[name], at[below] + (tall[below] + tall[name]) / 2)
    at[order[-1]] = min(at[order[-1]], top)
    for above, name in pairwise(reversed(order)):
        at[name] = min(at[name], at[above] - (tall[above] + tall[name]) / 2)
    return at


def _said(name: str, check: Check | None, least: float) -> str:
    if check is None:
        return name
    real, closed = _from(check.real, least), _from(check.formula, least)
    return f"{name}: {real}" + (f"\n(closed form: {closed})" if closed != real else "")


def _from(crossing: float, least: float) -> str:
    if not isfinite(crossing):
        return "always above 1"
    return f"{crossing:,.0f} tokens" if crossing >= least else f"below {least:,.0f} tokens"


def _explain(axes: Axes) -> None:
    dot = axes.plot([], [], "o", color="#888888", markeredgecolor=style.INK, markersize=7, label="crosses 1 by step.estimate")[
        0
    ]
    bar = axes.plot([], [], "|", color="#888888", markersize=11, markeredgewidth=2.6, label="crosses 1 by the closed form")[0]
    axes.legend(handles=[dot, bar], loc="lower left", fontsize=8.5)
