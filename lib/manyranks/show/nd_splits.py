"""Chapter 10's picture of operator splits: for each operator of a layer, how each axis of the mesh cuts it, and the cost."""

import textwrap
from collections.abc import Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from manyranks.show import style, units
from manyranks.show.looks import HATCH, sheet
from manyranks.theory.nd.cuts import Solution
from manyranks.theory.nd.operators import Choice

_MOST = 4  # solutions side by side
_BLOCK = 7  # operators of a layer
_WIDE, _CELL, _ROW, _NAME = 9.2, 0.4, 0.21, 0.5  # inches
_LOOKS = {
    "tokens": ("T", "#9ecae1", ""),
    "columns": ("C", "#fdae6b", "////"),
    "rows": ("R", "#a1d99b", "...."),
    "whole": ("W", "none", ""),
}


class Run(NamedTuple):
    """Layers that are split alike on equal meshes; operators: name and choice of each, in order."""

    layers: tuple[int, ...]
    stages: tuple[int, ...]
    mesh: tuple[int, ...]
    operators: tuple[tuple[str, Choice], ...]


@style.styled
def splits(solutions: Solution | Sequence[Solution], title: str = "") -> style.Figure:
    """A matrix for each way to cut the model: a row for each operator of a layer, a column for each axis of its stage's mesh.

    solutions: what theory.nd.cuts.solve returns, or some of it: the first 4 are drawn. Layers that are split alike are drawn
    once. Raises ValueError for none.
    """
    shown = [solutions] if isinstance(solutions, Solution) else list(solutions)[:_MOST]
    if not shown:
        raise ValueError("no solutions: give those of theory.nd.cuts.solve; it finds none where none fits in memory")
    wide = _WIDE / max(2, len(shown))
    names = [textwrap.wrap(one.name, max(16, int(wide / 0.078)), max_lines=3, placeholder=" …") for one in shown]
    head = 0.32 + 0.16 * max(map(len, names))
    tall = max(sum(_tall(run) for run in runs(one)) for one in shown)
    top = head + tall + 0.54 + 0.3 * bool(title)
    fig, axes = sheet(max(wide * len(shown), 4.6), top)
    if title:
        axes.text(0.1, top - 0.16, title, fontsize=11, fontweight="bold", va="center")
    for k, (one, lines) in enumerate(zip(shown, names, strict=True)):
        x, y = 0.1 + k * wide, top - 0.3 * bool(title) - 0.14
        times = f"{one.microbatches} micro-batch{'es' * (one.microbatches > 1)}"
        axes.text(x, y, f"{units.duration(one.seconds)}, {times}", fontsize=9.5, fontweight="bold", va="center")
        axes.text(x, y - 0.12, "\n".join(lines), fontsize=8.5, va="top", linespacing=1.15)
        below = y + 0.14 - head
        for run in runs(one):
            _draw(axes, run, one, x, below)
            below -= _tall(run)
    _draw_legend(axes)
    return fig


def runs(solution: Solution) -> list[Run]:
    """Layers of all stages, counted from 1; those that are split alike on equal meshes are one run."""
    found: dict[tuple, list[tuple[int, int]]] = {}
    layer = 1
    for number, stage in enumerate(solution.stages, 1):
        for first in range(0, len(stage.choices), _BLOCK):
            found.setdefault((stage.mesh, stage.choices[first : first + _BLOCK]), []).append((layer, number))
            layer += 1
    return [
        Run(tuple(layer for layer, _ in at), tuple(dict.fromkeys(stage for _, stage in at)), mesh, operators)
        for (mesh, operators), at in found.items()
    ]


def _tall(run: Run) -> float:
    return 0.62 + _ROW * len(run.operators)


def _draw(axes: Axes, run: Run, one: Solution, x: float, top: float) -> None:
    """Captions, then the matrix."""
    stage = one.stages[run.stages[0] - 1]
    where = f", stage{_several(run.stages)}" if len(one.stages) > 1 else ""
    axes.text(x, top - 0.08, f"layer{_several(run.layers)}{where}", fontsize=8.5, va="center")
    cost = f"{units.duration(stage.seconds)} + {units.duration(stage.once)}, {units.size(stage.memory)}"
    axes.text(x, top - 0.24, cost, fontsize=8.5, va="center")
    for column, ranks in enumerate(run.mesh):
        axes.text(x + _NAME + (column + 0.5) * _CELL, top - 0.42, f"{ranks}", fontsize=8, ha="center", va="center")
    axes.text(x, top - 0.42, "ranks", fontsize=8, va="center")
    for row, (name, choice) in enumerate(run.operators):
        y = top - 0.52 - (row + 1) * _ROW
        axes.text(x, y + _ROW / 2, name, fontsize=8, va="center")
        for column, split in enumerate(choice):
            _draw_cell(axes, x + _NAME + column * _CELL, y, split)


def _draw_cell(axes: Axes, x: float, y: float, split: str) -> None:
    letter, colour, hatch = _LOOKS[split]
    axes.add_patch(Rectangle((x, y), _CELL, _ROW, facecolor=colour, hatch=hatch, **HATCH))
    axes.add_patch(Rectangle((x, y), _CELL, _ROW, facecolor="none", edgecolor=style.INK, linewidth=0.7))
    look = {"color": style.BLACK, "bbox": style.PAPER} if colour != "none" else {}
    axes.text(x + _CELL / 2, y + _ROW / 2, letter, fontsize=7.5, ha="center", va="center", **look)


def _several(numbers: Sequence[int]) -> str:
    """What follows "layer": " 1", "s 1–4", "s 1, 3"."""
    if len(numbers) == 1:
        return f" {numbers[0]}"
    if list(numbers) == list(range(numbers[0], numbers[-1] + 1)):
        return f"s {numbers[0]}–{numbers[-1]}"
    return "s " + ", ".join(map(str, numbers))


def _draw_legend(axes: Axes) -> None:
    x = 0.1
    for split, (letter, colour, hatch) in _LOOKS.items():
        axes.add_patch(Rectangle((x, 0.32), 0.28, 0.16, facecolor=colour, hatch=hatch, edgecolor="#666666", linewidth=0.6))
        axes.text(x + 0.34, 0.4, f"{letter}: {split}", fontsize=8.5, va="center")
        x += 1.12
    axes.text(0.1, 0.16, "under layers: a micro-batch + once a step, memory of a rank", fontsize=8.5, va="center")
