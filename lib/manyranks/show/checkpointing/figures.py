"""Chapter 04's figures: memory through a step, who keeps what, when layers run again, plans and their peaks."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from manyranks.show import drawings, style, units
from manyranks.show.lines import curves
from manyranks.theory import memory
from manyranks.theory.architecture import ModelShape
from manyranks.theory.checkpointing import BACKWARD, KEEP, STORE, Action, Layer, run
from manyranks.theory.plan import Plan

_ACTIONS = {"F": ("forward", "#56B4E9", ""), "R": ("forward again", style.YELLOW, "////"), "B": ("backward", style.GREEN, "")}
Curves = Mapping[str, Sequence[float]]


def step(shape: ModelShape, plans: Mapping[str, Plan]) -> style.Figure:
    """Draws what one GPU holds through a step with one micro-batch: states, and what its layers have kept so far.

    plans: title -> how it trains; pp=1
    """
    n, series = shape.layers, {}
    for title, plan in plans.items():
        one, whole = (memory.layer_activations(shape, each) for each in (plan, replace(plan, recompute="none")))
        head = memory.activations(shape, plan) - n * one
        kept = [one * k for k in range(1, n + 1)]
        kept += [n * one + head] + [each + whole - one for each in reversed(kept)]
        states = memory.model_states(shape, plan)._asdict()
        flat = {kind: [states[kind]] * len(kept) for kind in ("parameters", "gradients", "optimizer")}
        series[title] = flat | {"activations": kept}
    return drawings.memory_over_time(series, [(0, n + 1, "forward"), (n + 1, 2 * n + 1, "backward")])


def again(layers: int = 4) -> style.Figure:
    """Draws when a GPU runs each layer, in a step that keeps everything and in one that runs every layer again."""
    forward = [(k, k + 1, f"forward {k}", "compute") for k in range(layers)]
    lanes, phases = {}, {}
    for title, twice in (("keep everything", False), ("run every layer again", True)):
        spans, now = list(forward), layers
        for k in reversed(range(layers)):
            for label, length, kind in [(f"again {k}", 1, "activations")] * twice + [(f"backward {k}", 2, "gradients")]:
                spans.append((now, now + length, label, kind))
                now += length
        lanes[title], phases[title] = {"GPU": spans}, [(0, layers, "forward"), (layers, now, "backward")]
    return drawings.when(lanes, phases)


@style.styled
def kept_by(sizes: Mapping[str, float], unit: str) -> style.Figure:
    """Draws a bar for each module: what it keeps in forward. unit: of the sizes."""
    fig, (axes,) = style.figure(1, 1, 7.2, 0.9 + 0.34 * len(sizes))
    bars = axes.barh(list(sizes), list(sizes.values()), color=style.PINK, edgecolor=style.BLACK, linewidth=0.6)
    axes.bar_label(bars, [f"{size:.3g}" for size in sizes.values()], padding=4)
    axes.set(xlabel=f"kept, in {unit}", xlim=(0, 1.1 * max(sizes.values())))
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    return fig


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
