"""Chapter 03's figures of memory over a step."""

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, cycle, groupby

import numpy as np

from manyranks.show import drawings, style, units


def _watched(train: Callable, stage: type, held: Callable) -> list:
    """Returns what held(stage) says after each part's forward and backward, in the second step."""
    seen = []

    class Watched(stage):
        def after_forward(self, k: int) -> None:
            seen.append(held(self))
            super().after_forward(k)

        def after_backward(self, k: int) -> None:
            seen.append(held(self))
            super().after_backward(k)

    train(Watched, steps=2)
    return seen[len(seen) // 2 :]


def whole_units(run: Callable, train: Callable, stage: type) -> str:
    """Returns the units that have memory at the moments of a step, such as "0 1 2 2 1 0" for three, one at a time."""
    return " ".join("".join(map(str, units)) or "-" for units in run(_watched, train, stage, _whole)[0])


def _whole(stage) -> list[int]:
    return [k for k, unit in enumerate(stage.rows) if unit.row.untyped_storage().nbytes()]


def steps_over_time(run: Callable, train: Callable, held: Callable, stages: Mapping[str, type]) -> style.Figure:
    """Draws what rank 0 holds over the second step of several stages, by name, side by side."""
    steps = {name: run(_watched, train, stage, held)[0] for name, stage in stages.items()}
    samples = {name: {kind: [moment[kind] for moment in step] for kind in step[0]} for name, step in steps.items()}
    events = len(next(iter(steps.values())))
    return drawings.memory_over_time(samples, [(0, events / 2, "forward"), (events / 2, events, "backward")])


@style.styled
def memory_over_a_step(samples: Mapping[str, Sequence[tuple[str, int]]]) -> style.Figure:
    """Draws the bytes that one rank holds from moment to moment of a step, a line for each name, with their peaks.

    samples: name -> [(moment, bytes), …] in their order. A moment's first word is its phase, as in "forward layer 3": phases
        have equal widths, so that all lines change phase at one place, whose end is marked
    Raises ValueError unless all go through the same phases, each of them once.
    """
    names = [[moment.partition(" ")[0] for moment, _ in moments] for moments in samples.values()]
    found = [[phase for phase, _ in groupby(each)] for each in names]
    phases = found[0] if found else []
    if not phases or len(set(phases)) < len(phases) or any(each != phases for each in found):
        raise ValueError(f"samples go through {found}: give each name the same phases, each once, as [(moment, bytes), …]")
    fig, (axes,) = style.figure(width=8.4, height=4.0)
    for (name, moments), each, marker in zip(samples.items(), names, cycle(style.MARKERS), strict=False):
        values, ends = [size for _, size in moments], [0, *accumulate(map(each.count, phases))]
        edges = np.interp(range(len(values) + 1), ends, range(len(ends)))
        (line,) = axes.step(edges, [*values, values[-1]], where="post")
        at, label = values.index(max(values)), f"{name}: at most {units.size(max(values))}"
        look = {"color": line.get_color(), "linestyle": line.get_linestyle(), "marker": marker, "markersize": 7}
        axes.plot([(edges[at] + edges[at + 1]) / 2], [values[at]], label=label, **look)
    for end, phase in enumerate(phases[:-1] or phases, start=1):
        axes.axvline(end, color=style.INK, linestyle=(0, (1, 2)), linewidth=1.2)
        axes.text(end, 1.01, f"{phase} ends", transform=axes.get_xaxis_transform(), ha="center", va="bottom", fontsize=9)
    top = 1.08 * max(size for moments in samples.values() for _, size in moments) or 1
    axes.set(xlim=(0, len(phases)), ylim=(0, top), ylabel="alive on one rank", xlabel="moments of one step")
    axes.set_xticks([place + 0.5 for place in range(len(phases))], phases)
    axes.yaxis.set_major_formatter(lambda size, _: units.size(size))
    axes.tick_params(axis="x", length=0)
    axes.grid(visible=False, axis="x")
    fig.legend(loc="outside upper left", ncols=2, handlelength=2.6)
    return fig
