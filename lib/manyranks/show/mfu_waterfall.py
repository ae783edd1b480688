"""Chapter 09's waterfall: where the time of a step goes."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import inf

from matplotlib.axes import Axes

from manyranks.show import style, units
from manyranks.show.labels import width

_SIZE = 8.5  # points, of a text
_PANELS, _ROWS, _PARTS = 4, 16, 10  # at most: ranks with a waterfall each, ranks, parts
_FEW = 5  # of so many parts those that take no time are shown, too
# A part's name in the picture, colour and hatch; parts that are not known have the others in turn.
_KNOWN = {
    "matmul": ("matmul", style.BLUE, ""),
    "other": ("other operators", "#9ecae1", "...."),
    "communication": ("communication", style.ORANGE, "////"),
    "waiting": ("waiting", style.YELLOW, "||||"),
    "python": ("Python", "#b0b0b0", "\\\\\\\\"),
    # Those of theory.roofline.time_budget.
    "overhead": ("starting kernels", "#b0b0b0", "\\\\\\\\"),
    "tensor": ("tensor-parallel messages", style.ORANGE, "////"),
    "context": ("context-parallel messages", "#fdd9b5", "oo"),
    "expert": ("tokens to experts", "#e7a6c8", "xxxx"),
    "pipeline": ("messages between stages", "#fdd9b5", "++"),
    "bubble": ("bubble", style.FAINT, "||||"),
    "data": ("gradients, parameters", style.YELLOW, "----"),
    "optimizer": ("optimizer", style.GREEN, ""),
}
_OTHERS = (
    (style.GREEN, ""),
    ("#e7a6c8", "xxxx"),
    ("#cfe3f1", "----"),
    ("#a1d99b", "oo"),
    ("none", "////"),
    ("#ffe08a", "++"),
    ("#9ecae1", "\\\\\\\\"),
    ("#fdd9b5", "...."),
    ("#cccccc", "||||"),
    ("#f0f0f0", "++"),
)
_TOTAL = {"color": "none", "edgecolor": style.INK, "linewidth": 1.0}


@style.styled
def waterfall(
    budgets: Mapping[object, Mapping[str, float] | tuple], step: float | Mapping[object, float] | None = None, title: str = ""
) -> style.Figure:
    """The parts of a step's time, one after another from 0 to their sum, with their seconds and shares.

    budgets: rank -> measure.budget.Budget, or name -> {part: seconds}. Up to 4 have a waterfall each, side by side; of up to 16
    each is one bar. Of more than 5 parts those without time are left out. step: the measured seconds of the step, of all or
    of each, for a dashed line; the shares are of it then.
    Raises ValueError for none, more than 16, other parts than the first one's, more than 10 of them, negative seconds, and a
    step that is not above 0.
    """
    named = {_name(key): _parts(found) for key, found in budgets.items()}
    steps = {_name(key): step.get(key) if isinstance(step, Mapping) else step for key in budgets}
    _check(named, steps)
    named = _spent(named)
    if len(named) > _PANELS:
        return _bars(named, steps, title)
    first, count = next(iter(named.values())), len(named)
    wide = min(9.2, 3.0 + 3.4 * count)
    names = max(width(label, 10) for label, *_ in looks(list(first)).values()) / 72 + 0.25
    fig = style.Figure(figsize=(wide, 1.1 + 0.46 * (len(first) + 1)), layout="constrained")
    longest = max(max(sum(parts.values()), steps[name] or 0.0) for name, parts in named.items())
    inch = 1.04 * longest / ((wide - names) / count - 0.1)
    for axes, (name, parts) in zip(fig.subplots(1, count, sharey=True, squeeze=False)[0], named.items(), strict=True):
        _falls(axes, parts, steps[name], longest, inch)
        axes.set_title(name if count > 1 or not title else title)
        axes.locator_params(axis="x", nbins=4 if count < 3 else 2)
    fig.supxlabel(f"time{' (dashed: measured)' * any(steps.values())}", fontsize=10)
    if title and count > 1:
        fig.suptitle(title, fontsize=11, fontweight="bold", x=0.01, ha="left")
    return fig


def _name(key: object) -> str:
    return f"rank {key}" if isinstance(key, int) else str(key)


def _parts(found: Mapping[str, float] | tuple) -> dict[str, float]:
    return dict(found) if isinstance(found, Mapping) else found._asdict()


def _check(named: Mapping[str, Mapping[str, float]], steps: Mapping[str, float | None]) -> None:
    if not 1 <= len(named) <= _ROWS:
        raise ValueError(f"{len(named)} budgets: a picture shows 1 to {_ROWS}")
    first = list(next(iter(named.values())))
    if not 1 <= len(first) <= _PARTS:
        raise ValueError(f"{len(first)} parts: a picture shows 1 to {_PARTS}")
    for name, parts in named.items():
        if list(parts) != first:
            raise ValueError(f"{name!r} has the parts {list(parts)}: give {first}, as the first one")
        if any(not 0 <= seconds < inf for seconds in parts.values()) or not sum(parts.values()):
            raise ValueError(f"{name!r} has {dict(parts)}: give seconds, 0 or more, not all of them 0")
        if steps[name] is not None and not 0 < steps[name] < inf:
            raise ValueError(f"{name!r} has the step {steps[name]!r}: give its seconds, above 0, or leave it out")


def _spent(named: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Without parts that nobody spends time on, where there are more than a few."""
    first = list(next(iter(named.values())))
    shown = [part for part in first if len(first) <= _FEW or any(parts[part] for parts in named.values())]
    return {name: {part: parts[part] for part in shown} for name, parts in named.items()}


def looks(parts: Sequence[str]) -> dict[str, tuple[str, str, str]]:
    """Of each part its name in the picture, colour and hatch."""
    unknown = iter(_OTHERS)
    return {part: _KNOWN.get(part) or (part, *next(unknown)) for part in parts}


def _falls(axes: Axes, parts: Mapping[str, float], step: float | None, longest: float, inch: float) -> None:
    """inch: seconds of one inch of the axis."""
    axes.set_xlim(0, 1.04 * longest)
    whole, found = step or sum(parts.values()), looks(list(parts))
    ends = list(accumulate(parts.values()))
    for row, ((part, seconds), end) in enumerate(zip(parts.items(), ends, strict=True)):
        _, colour, hatch = found[part]
        look = {"color": colour, "hatch": hatch, "edgecolor": style.INK, "linewidth": 0.7}
        axes.barh(row + 0.16, seconds, 0.42, end - seconds, **look)
        axes.plot([end, end], [row - 0.05, row + 1.37], color="#666666", linestyle=":", linewidth=1.0)
        said = f"{units.duration(seconds)}, {seconds / whole:.1%}" if seconds else "none"
        _say(axes, said, end - seconds, end, row, inch)
    axes.barh(len(parts) + 0.16, ends[-1], 0.42, **_TOTAL)
    said = units.duration(ends[-1]) + (f", {ends[-1] / step:.1%}" if step else "")
    _say(axes, said, 0.0, ends[-1], len(parts), inch)
    if step:
        axes.axvline(step, color=style.INK, linestyle="--", linewidth=1.2)
    axes.set_yticks([row + 0.16 for row in range(len(parts) + 1)], [*(name for name, *_ in found.values()), "together"])
    axes.set_ylim(len(parts) + 0.5, -0.5)
    _time_axis(axes)


def _say(axes: Axes, text: str, start: float, end: float, row: int, inch: float) -> None:
    """A text above a bar: from where it starts, or where that leaves too little room up to where it ends, or in the axes."""
    wide, most = (width(text, _SIZE) / 72 + 0.05) * inch, axes.get_xlim()[1]
    at = start if start + wide <= most else max(0.0, min(end, most) - wide)
    look = {"textcoords": "offset points", "fontsize": _SIZE, "va": "center", "zorder": 3}
    axes.annotate(text, (at, row - 0.2), (2, 0), **look)


def _time_axis(axes: Axes) -> None:
    axes.xaxis.set_major_formatter(lambda seconds, _: units.duration(seconds) if seconds else "0")
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")


def _bars(named: Mapping[str, Mapping[str, float]], steps: Mapping[str, float | None], title: str) -> style.Figure:
    """A bar for each rank, its parts from left to right."""
    fig, (axes,) = style.figure(width=9.2, height=1.5 + 0.34 * len(named))
    found, rows = looks(list(next(iter(named.values())))), list(range(len(named)))
    starts = [0.0] * len(named)
    for part, (label, colour, hatch) in found.items():
        seconds = [parts[part] for parts in named.values()]
        look = {"color": colour, "hatch": hatch, "edgecolor": style.INK, "linewidth": 0.5}
        axes.barh(rows, seconds, 0.66, starts, label=label, **look)
        starts = [start + each for start, each in zip(starts, seconds, strict=True)]
    for row, (end, name) in enumerate(zip(starts, named, strict=True)):
        look = {"textcoords": "offset points", "fontsize": _SIZE, "va": "center", "zorder": 3}
        axes.annotate(units.duration(end), (end, row), (5, 0), **look)
        if steps[name]:
            axes.plot([steps[name]] * 2, [row - 0.45, row + 0.45], color=style.INK, linestyle="--", linewidth=1.4)
    axes.set_yticks(rows, list(named))
    measured = " (dashed: measured)" * any(steps.values())
    axes.set(xlabel=f"time{measured}", xlim=(0, 1.12 * max(starts)), ylim=(len(named) - 0.5, -0.5), title=title)
    _time_axis(axes)
    axes.locator_params(axis="x", nbins=6)
    fig.legend(loc="outside upper left", ncols=3, handlelength=1.8)
    return fig
