"""Chapter 04's figures: peaks over the number of layers, and a plan as a grid."""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from manyranks.show import style, units
from manyranks.show.lines import curves
from manyranks.theory.checkpointing import BACKWARD, KEEP, STORE, Action, Layer, run

_ACTIONS = {"F": ("forward", "#56B4E9", ""), "R": ("forward again", style.YELLOW, "////"), "B": ("backward", style.GREEN, "")}
Curves = Mapping[str, Sequence[float]]


@style.styled
def peaks(n: Sequence[int], expected: Curves, measured: Curves, ylabel: str, yunit=units.size) -> style.Figure:
    """A quantity over the layers n, as peak memory: expected as curves, measured as rings. Raises ValueError as curves does."""
    (axes,) = curves(n, expected, "layers N", ylabel, yunit=yunit, xticks=n).axes
    rings = [[*n] * len(measured), [value for values in measured.values() for value in values]]
    axes.plot(*rings, "o", color=style.INK, fillstyle="none", markersize=11, markeredgewidth=1.2, label="measured")
    axes.legend(loc="best")
    return axes.figure


@style.styled
def plan(actions: Sequence[Action], chain: Sequence[Layer] = (), gradient: int = 0, yunit=units.size) -> style.Figure:
    """A plan as a grid: a column for each action, a row for each layer; below it what is held, at each action's fullest moment.

    chain, gradient: as for checkpointing.run; without a chain, all that a layer saves is its output, of size 1. yunit: size ->
    text. Raises ValueError as run does, and for no layer or more than 16.
    """
    n = max((action.layer for action in actions), default=0)
    if not 1 <= n <= 16:
        raise ValueError(f"a plan for {n} layers: give one for 1 to 16, as checkpointing.segments(9, 3)")
    outcome = run(chain or [Layer(1, 2, 1, 1)] * n, actions, gradient)
    held = [size for action, size in zip(actions, outcome.held, strict=True) if action.kind != STORE]
    fig, (grid, below) = style.figure(1, 2, 8.6, 2.6 + 0.24 * n, sharex=True, height_ratios=(max(n, 3), 5))
    _draw(grid, actions)
    grid.set(ylabel="layer", yticks=range(1, n + 1), ylim=(0.4, n + 0.7), xlim=(0, len(held)))
    handles = dict(zip(*reversed(grid.get_legend_handles_labels()), strict=True))
    fig.legend(handles.values(), handles, loc="outside upper left", ncols=5)
    below.stairs(held, color=style.BLUE, fill=True)
    below.axhline(outcome.peak, color=style.INK, linestyle="--", linewidth=1)
    unit = yunit if chain else "{:g} activations".format
    below.set(xlabel="actions, one after another", title=f"held: at most {unit(outcome.peak)}")
    below.yaxis.set_major_formatter(lambda size, _: unit(size))
    below.xaxis.set_major_locator(MaxNLocator(integer=True))
    return fig


def _draw(axes: Axes, actions: Sequence[Action]) -> None:
    """The actions, and from when to when a layer's saved bytes, and a stored output, are held."""
    moments = [action for action in actions if action.kind != STORE]
    done, seen, x = {action: end for end, action in enumerate(moments, start=1)}, set(), 0
    for kind, i in actions:
        if kind == STORE:
            at = [x, done.get((BACKWARD, i + 1), x)], [i + 0.5] * 2
            axes.plot(*at, "o-", color=style.INK, markevery=[0], markersize=4, label="stored")
            continue
        if kind == KEEP:
            axes.barh(i, done[BACKWARD, i] - x, 0.9, x, color="#78787855", label="kept")
        letter = "B" if kind == BACKWARD else "R" if i in seen else "F"
        label, colour, hatch = _ACTIONS[letter]
        axes.bar(x + 0.5, 0.8, 0.96, i - 0.4, color=colour, hatch=hatch, edgecolor="white", linewidth=0.3, label=label)
        if len(moments) <= 75:
            axes.text(x + 0.5, i, letter, color=style.BLACK, ha="center", va="center_baseline", fontsize=8)
        seen.add(i)
        x += 1
