"""Chapter 10's picture of operator splits: for each operator of a layer, how each axis of the mesh cuts it, and the cost."""

import textwrap
from collections.abc import Sequence
from itertools import count
from typing import NamedTuple

from matplotlib.axes import Axes

from manyranks.show import style, units
from manyranks.show.looks import box, sheet
from manyranks.theory.nd.cuts import Solution
from manyranks.theory.nd.operators import Choice

_MOST, _BLOCK = 4, 7  # solutions side by side, operators of a layer
_WIDE, _CELL, _ROW, _NAME, _HEAD = 9.2, 0.4, 0.21, 0.5, 0.62  # inches
_LOOKS = {"tokens": 0, "columns": 1, "rows": 2, "whole": 5}  # of looks.LOOKS; the first letter is in the cell
_SMALL = {"fontsize": 8.5, "va": "center"}


class Run(NamedTuple):
    """Layers that are split alike on equal meshes; operators: name and choice of each, in order."""

    layers: tuple[int, ...]
    stages: tuple[int, ...]
    mesh: tuple[int, ...]
    operators: tuple[tuple[str, Choice], ...]


@style.styled
def splits(solutions: Solution | Sequence[Solution], title: str = "") -> style.Figure:
    """Draws a matrix for each way to cut the model: a row for each operator of a layer, a column for each axis of its mesh.

    Layers that are split alike are drawn once.

    solutions: what theory.nd.cuts.solve returns, or some of it: the first 4 are drawn
    Raises ValueError for none.
    """
    shown = [solutions] if isinstance(solutions, Solution) else list(solutions)[:_MOST]
    if not shown:
        raise ValueError("no solutions: give those of theory.nd.cuts.solve; it finds none where none fits in memory")
    wide = _WIDE / max(2, len(shown))
    names = [textwrap.wrap(one.name, max(16, int(wide / 0.078)), max_lines=3, placeholder=" …") for one in shown]
    head = 0.32 + 0.16 * max(map(len, names))
    top = head + max(sum(map(_high, runs(one))) for one in shown) + 0.54 + 0.3 * bool(title)
    fig, axes = sheet(max(wide * len(shown), 4.6), top)
    axes.text(0.1, top - 0.16, title, fontsize=11, fontweight="bold", va="center")
    for k, (one, lines) in enumerate(zip(shown, names, strict=True)):
        x, y = 0.1 + k * wide, top - 0.3 * bool(title) - 0.14
        times = f"{one.microbatches} micro-batch{'es' * (one.microbatches > 1)}"
        axes.text(x, y, f"{units.duration(one.seconds)}, {times}", fontsize=9.5, fontweight="bold", va="center")
        axes.text(x, y - 0.12, "\n".join(lines), fontsize=8.5, va="top", linespacing=1.15)
        y += 0.14 - head
        for run in runs(one):
            _draw(axes, run, one, x, y)
            y -= _high(run)
    for k, (split, look) in enumerate(_LOOKS.items()):
        box(axes, (0.1 + 1.12 * k, 0.32), 0.28, 0.16, look)
        axes.text(0.44 + 1.12 * k, 0.4, f"{split[0].upper()}: {split}", **_SMALL)
    axes.text(0.1, 0.16, "under layers: a micro-batch + once a step, memory of a rank", **_SMALL)
    return fig


def runs(solution: Solution) -> list[Run]:
    """Layers of all stages, counted from 1; those that are split alike on equal meshes are one run."""
    found: dict[tuple, list[tuple[int, int]]] = {}
    layers = count(1)
    for number, stage in enumerate(solution.stages, 1):
        for first in range(0, len(stage.choices), _BLOCK):
            found.setdefault((stage.mesh, stage.choices[first : first + _BLOCK]), []).append((next(layers), number))
    return [Run(tuple(n for n, _ in at), tuple(dict.fromkeys(s for _, s in at)), *alike) for alike, at in found.items()]


def _high(run: Run) -> float:
    return _HEAD + _ROW * len(run.operators)


def _draw(axes: Axes, run: Run, one: Solution, x: float, top: float) -> None:
    """Captions, then the matrix."""
    stage, left = one.stages[run.stages[0] - 1], x + _NAME
    where = f", stage{_several(run.stages)}" if len(one.stages) > 1 else ""
    axes.text(x, top - 0.08, f"layer{_several(run.layers)}{where}", **_SMALL)
    cost = f"{units.duration(stage.seconds)} + {units.duration(stage.once)}, {units.size(stage.memory)}"
    axes.text(x, top - 0.24, cost, **_SMALL)
    for column, ranks in enumerate(run.mesh):
        axes.text(left + (column + 0.5) * _CELL, top - 0.42, f"{ranks}", fontsize=8, ha="center", va="center")
    for row, (name, choice) in enumerate((("ranks", ()), *run.operators)):
        y = top - 0.52 - row * _ROW
        axes.text(x, y + _ROW / 2, name, fontsize=8, va="center")
        for column, split in enumerate(choice):
            box(axes, (left + column * _CELL, y), _CELL, _ROW, _LOOKS[split], split[0].upper(), 7.5, 0.7)


def _several(numbers: Sequence[int]) -> str:
    """What follows "layer": " 1", "s 1–4", "s 1, 3"."""
    if len(numbers) == 1:
        return f" {numbers[0]}"
    in_a_row = list(numbers) == list(range(numbers[0], numbers[-1] + 1))
    return f"s {numbers[0]}–{numbers[-1]}" if in_a_row else "s " + ", ".join(map(str, numbers))
