"""Chapter 10's picture of operator splits: for each operator of a layer, how each axis of the mesh cuts it, and the cost."""

import textwrap
from collections import defaultdict, namedtuple
from collections.abc import Iterator, Sequence
from itertools import count

from matplotlib.patches import Patch

from manyranks.show import style, units
from manyranks.show.looks import HATCH, LOOKS, box
from manyranks.theory.nd.cuts import Solution

_MOST, _BLOCK = 4, 7  # solutions side by side, operators of a layer
_WIDE, _ROW, _COLUMN = 9.2, 0.21, 0.45  # inches: of a figure at most, a row, a column
_LOOKS = {"tokens": 0, "columns": 1, "rows": 2, "whole": 5}  # of looks.LOOKS; the first letter is in the cell
_SMALL = {"fontsize": 8.5, "va": "center"}


class Run(namedtuple("Run", "layers stages mesh operators")):
    """Layers that are split alike on equal meshes; operators: name and choice of each, in order."""


@style.styled
def splits(solutions: Solution | Sequence[Solution], title: str = "") -> style.Figure:
    """Draws a matrix for each way to cut the model: a row for each operator of a layer, a column for each axis of its mesh.

    Layers that are split alike are drawn once. solutions: what theory.nd.cuts.solve returns, or some of it: the first 4 are
    drawn. Raises ValueError for none.
    """
    shown = [solutions] if isinstance(solutions, Solution) else list(solutions)[:_MOST]
    if not shown:
        raise ValueError("no solutions: give those of theory.nd.cuts.solve; it finds none where none fits in memory")
    wide = min(_WIDE / 2, _WIDE / len(shown))
    tables = [list(_rows(one, int(wide / 0.078))) for one in shown]
    rows = max(map(len, tables))
    fig, panels = style.figure(len(shown), width=wide * len(shown), height=_ROW * rows + 0.9 + 0.3 * bool(title))
    for axes, one, table in zip(panels, shown, tables, strict=True):
        axes.set(xlim=(-1, wide / _COLUMN - 1), ylim=(rows, 0))
        axes.axis("off")
        times = f"{one.microbatches} micro-batch{'es' * (one.microbatches > 1)}"
        axes.set_title(f"{units.duration(one.seconds)}, {times}", fontsize=9.5)
        for y, (text, cells) in enumerate(table):
            axes.text(-1, y + 0.5, text, **_SMALL)
            for x, cell in enumerate(cells):
                if cell in _LOOKS:
                    box(axes, (x, y), 1, 1, _LOOKS[cell], cell[0].upper(), 7.5, 0.7)
                else:
                    axes.text(x + 0.5, y + 0.5, cell, ha="center", **_SMALL)
    fig.suptitle(title, fontsize=11, fontweight="bold", x=0.01, ha="left")
    looks = {f"{split[0].upper()}: {split}": LOOKS[look] for split, look in _LOOKS.items()}
    keys = [Patch(facecolor=colour, hatch=hatch, label=label, **HATCH) for label, (colour, hatch) in looks.items()]
    said = {"title": "below each layer: time per micro-batch + per step, memory per rank", "title_fontsize": 8.5}
    fig.legend(handles=keys, loc="outside lower left", ncols=4, columnspacing=1.2, alignment="left", **said)
    return fig


def _rows(one: Solution, letters: int) -> Iterator[tuple[str, Sequence]]:
    """What each row has: a text, and what is beside it in the columns. letters: that a line has room for."""
    for line in textwrap.wrap(one.name, letters, max_lines=3, placeholder=" …"):
        yield line, ()
    for run in runs(one):
        yield "", ()
        stage = one.stages[run.stages[0] - 1]
        yield f"layer{_several(run.layers)}" + f", stage{_several(run.stages)}" * (len(one.stages) > 1), ()
        yield f"{units.duration(stage.seconds)} + {units.duration(stage.once)}, {units.size(stage.memory)}", ()
        yield "ranks", run.mesh
        yield from run.operators


def runs(solution: Solution) -> list[Run]:
    """Layers of all stages, counted from 1; those that are split alike on equal meshes are one run."""
    found, layers = defaultdict(list), count(1)
    for number, stage in enumerate(solution.stages, 1):
        for first in range(0, len(stage.choices), _BLOCK):
            found[stage.mesh, stage.choices[first : first + _BLOCK]].append((next(layers), number))
    return [Run(tuple(n for n, _ in at), tuple(dict.fromkeys(s for _, s in at)), *alike) for alike, at in found.items()]


def _several(numbers: Sequence[int]) -> str:
    """What follows "layer": " 1", "s 1–4", "s 1, 3"."""
    in_a_row = numbers[-1] - numbers[0] == len(numbers) - 1
    named = f"{numbers[0]}–{numbers[-1]}" if in_a_row else ", ".join(map(str, numbers))
    return f"s {named}" if len(numbers) > 1 else f" {numbers[0]}"
