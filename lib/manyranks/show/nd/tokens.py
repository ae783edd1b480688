"""Chapter 10's plot of what decides: communication ÷ compute over tokens per GPU, for every axis."""

from collections.abc import Mapping, Sequence
from itertools import cycle
from math import inf

from manyranks.show import style
from manyranks.show.lines import curves as drawn
from manyranks.theory.nd.tokens import Balance, Check

_MOST, _LOWEST = 8, 1e-3  # curves, and a ratio


@style.styled
def tokens(curves: Mapping[str, Sequence[Balance]], checks: Mapping[str, Check] = {}) -> style.Figure:
    """Draws a line for each name: where it is above 1, all that is sent takes longer than all that it can hide under.

    curves: name ("TP 8") -> what theory.nd.tokens.curve returns; at most 8; checks: name -> what theory.nd.tokens.check has: a
    dot where step.estimate crosses 1, a bar where the closed form does. Raises ValueError for no or too many curves, for one
    without points, and for a check of none of them.
    """
    if not 1 <= len(curves) <= _MOST:
        raise ValueError(f"{len(curves)} curves: a picture shows 1 to {_MOST}")
    if empty := [name for name, points in curves.items() if not points]:
        raise ValueError(f"{empty[0]!r} has no points: theory.nd.tokens.curve leaves out tokens that the axis cannot take")
    if unknown := [name for name in checks if name not in curves]:
        raise ValueError(f"a check of {unknown[0]!r}: the curves are {', '.join(curves)}")
    ratios = {name: {each.tokens: each.ratio for each in points} for name, points in curves.items()}
    x = sorted({tokens for each in ratios.values() for tokens in each})
    named = {name: [max(each[t], _LOWEST / 10) if t in each else 0 for t in x] for name, each in ratios.items()}
    of = {"xlabel": "tokens per GPU", "ylabel": "communication ÷ compute", "title": "Tokens per GPU decide"}
    fig = drawn(x, named, **of, yunit="{:g}".format, xticks=x)
    (axes,) = fig.axes
    axes.get_legend().remove()
    axes.set(xlim=(x[0], x[-1]), ylim=(max(axes.get_ylim()[0], _LOWEST), min(axes.get_ylim()[1], 100)))
    lines = dict(zip(curves, axes.lines, strict=True))
    for (name, line), dashes in zip(lines.items(), cycle(("-", "--", "-.", ":")), strict=False):
        line.set(linestyle=dashes, marker="")
        if check := checks.get(name):
            line.set_label(_label(name, check, x[0]))
            for at, look in ((check.real, "o"), (check.formula, "|")):
                if x[0] <= at < inf:
                    axes.plot([at], [1], look, color=line.get_color(), markersize=9, markeredgewidth=2)
    axes.axhline(1, color=style.INK, linewidth=1.2)
    said = "above 1: communication-bound; below 1: compute-bound"
    said += "\n● step.estimate crosses 1, ❙ the closed form does" * bool(checks)
    axes.text(0.99, 0.99, said, fontsize=9, ha="right", va="top", transform=axes.transAxes)
    fig.set_size_inches(9.2, 4.4)
    ordered = sorted(lines, key=lambda name: -curves[name][-1].ratio)  # as they end from above
    fig.legend(handles=[lines[name] for name in ordered], loc="outside right upper", fontsize=8.5, labelspacing=0.9)
    return fig


def _label(name: str, check: Check, least: float) -> str:
    below, above = f"below {least:,} tokens", "always above 1"
    both = check.real, check.formula
    real, closed = (above if at == inf else f"{at:,.0f} tokens" if at >= least else below for at in both)
    return f"{name}: {real}" + f"\n(closed form: {closed})" * (closed != real)
