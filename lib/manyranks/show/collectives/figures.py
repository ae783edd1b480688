"""A grid of what each rank holds: a row a rank, a column an element, in each cell the number and whose terms are in it.

The chapters give rank r the numbers 1, 2, 3, … times 10**r, so a sum shows its terms: 1101 is the sum of the ones of ranks 0, 2
and 3. A cell has a stripe in the color of each of these ranks."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from torch import Tensor

from manyranks.show import style, units
from manyranks.show.bars import corners
from manyranks.show.collectives.explorer import MOST, Circle
from manyranks.show.explorer import Explorer, Panels, Said, slider
from manyranks.show.labels import heading
from manyranks.show.style import LOOKS
from manyranks.theory.collectives import chunk_sizes

Row = Sequence[float] | None  # a tensor, a list of numbers, or None for nothing
_MOST = 6  # ranks whose numbers have room in a cell
_GAP = 1.4  # columns between before and after


def terms(value: float, n: int) -> list[int]:
    """The ranks whose decimal digit in the number is not 0."""
    return [rank for rank in range(n) if int(value) // 10**rank % 10]


class Holdings:
    """The grid on these axes, `left` from their left edge. Raises ValueError for more ranks than it has room for."""

    def __init__(self, axes: Axes, n: int, columns: int, left: float = 0.0):
        if not 1 <= n <= _MOST:
            raise ValueError(f"{n} ranks: this picture has room for 1 to {_MOST}")
        self._sizes, self._columns, self._left = chunk_sizes(columns, n), columns, left
        self._stripes = axes.add_collection(PolyCollection([], linewidths=0, gid="stripes"))
        look = {"facecolors": "none", "edgecolors": style.INK, "linewidths": 0.8, "gid": "frames"}
        self._frames = axes.add_collection(PolyCollection([], **look))
        look = {"color": style.BLACK, "ha": "center", "va": "center", "fontsize": 9}
        self._texts = {(r, c): axes.text(left + c + 0.5, r + 0.5, "", **look) for r in range(n) for c in range(columns)}
        axes.set(xlim=(-0.05, left + columns + 0.05), ylim=(n + 0.02, -0.02), xticks=[])
        axes.set_yticks([r + 0.5 for r in range(n)], [f"rank {r}" for r in range(n)])
        axes.tick_params(length=0)
        axes.grid(visible=False)
        axes.spines[:].set_visible(False)
        self.moving = [self._stripes, self._frames, *self._texts.values()]

    def update(self, rows: Sequence[Row]) -> None:
        """Shows these rows, one a rank. A row shorter than the grid is the rank's chunk, and stands where that chunk does."""
        cells, frames, stripes, colors = {}, [], [], []
        for rank, row in enumerate(rows):
            first = 0 if row is None or len(row) == self._columns else sum(self._sizes[:rank])
            cells |= {(rank, first + place): value for place, value in enumerate(() if row is None else row)}
        for place, text in self._texts.items():
            text.set_text(f"{cells[place]:g}" if place in cells else "")
        for (rank, column), value in cells.items():
            left, high, whose = self._left + column, (rank + 0.08, rank + 0.92), terms(value, len(rows))
            frames.append((left, left + 1, *high))
            stripes += [(*edges, *high) for edges in pairwise(np.linspace(left, left + 1, len(whose) + 1))]
            colors += [LOOKS[other][0] for other in whose]
        self._frames.set_verts(corners(frames))
        self._stripes.set_verts(corners(stripes))
        self._stripes.set_facecolor(colors)


@style.styled
def before_after(operations: Mapping[str, tuple[Sequence[Row], Sequence[Row]]]) -> style.Figure:
    """Draws what each rank holds before and after each operation, two operations a line.

    operations: name -> (before, after)
    Give rank r numbers times 10**r: then each digit of a sum is one rank's. A rank that has fewer elements than the largest
    holds a chunk. Raises ValueError for more than 6 ranks, or where two pictures differ in their number of ranks.
    """
    counts = {name: (len(before), len(after)) for name, (before, after) in operations.items()}
    if len({n for both in counts.values() for n in both}) != 1:
        raise ValueError(f"ranks before and after: {counts}; give one row a rank, the same number everywhere")
    n, lines = next(iter(counts.values()))[0], -(-len(operations) // 2)
    fig, axes = style.figure(columns=2, rows=lines, width=8.8, height=lines * (0.65 + 0.26 * n))
    fig.get_layout_engine().set(wspace=0.08)
    for place, (name, both) in zip(axes, operations.items(), strict=False):
        columns = max(len(row) for rows in both for row in rows if row is not None)
        for left, rows in zip((0.0, columns + _GAP), both, strict=True):
            Holdings(place, n, columns, left).update(rows)
        start, end = ((columns + share * _GAP, n / 2) for share in (0.18, 0.82))
        place.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": style.INK})
        place.set_title(name)
    for empty in axes[len(operations) :]:
        empty.set_axis_off()
    return fig


Rounds = Sequence[Sequence[tuple[int, ...]]]  # (source, destination, bytes) of each message, as Measurement.rounds


@style.styled
def rounds(runs: Mapping[str, Rounds], n: int, whole: int, node: int = 0) -> style.Figure:
    """Draws each run as a line of pictures, one per round.

    runs: name -> m.rounds; a message may have a fourth item, such as a chunk's number, to write beside its arrow
    n: number of ranks
    whole: bytes of the whole tensor
    node: ranks per node, where there are two nodes to draw
    Raises ValueError for more nodes than two.
    """
    if node and n != 2 * node:
        raise ValueError(f"n={n}, node={node}: two nodes are drawn, so n must be {2 * node}; node=0 draws one circle")
    most = min(max(len(run) for run in runs.values()), 4 if node else MOST)
    rows = [(name, run, start) for name, run in runs.items() for start in range(0, len(run), most)]
    width = min(8.8, 0.5 + 1.75 * most)
    fig, axes = style.figure(columns=most, rows=len(rows), width=width, height=len(rows) * ((width - 0.5) / most + 0.3))
    for line, (name, run, start) in enumerate(rows):
        axes[line * most].set_ylabel("" if start else name, labelpad=14)
        for k, place in enumerate(axes[line * most : (line + 1) * most], start):
            if k < len(run):
                names = [name for _, _, _, *named in run[k] for name in named]
                Circle(place).update(n, _shares(run[k], whole), f"{k + 1}" if k else f"round {k + 1}", node, names)
            else:
                place.set_axis_off()
    return fig


class Steps(Panels):
    """A run stepped through: left the messages of a round, right what each rank holds after it.

    run: m.rounds; held[k][r]: rank r's tensor after k rounds, held[0] before the first. Raises ValueError where there are not
    so many rounds.
    """

    @style.styled
    def __init__(self, run: Rounds, held: Sequence[Sequence[Tensor]]):
        if len(held) != len(run) + 1:
            raise ValueError(f"{len(run)} rounds and {len(held)} states: give one state before the first round, one after each")
        self._run, self._held, self._n = run, held, len(held[0])
        self._whole = max(row.nbytes for row in held[0])
        self.figure, (left, right) = style.figure(columns=2, width=7.6, height=3.1)
        self._circle, self._grid = Circle(left), Holdings(right, self._n, max(row.numel() for row in held[0]))
        self._title = heading(right)
        self.panels, self.others = (self._circle, self._grid), [self._title]

    def update(self, step: int) -> Said:
        """Shows the messages of this round, counted from 1, and the ranks after it; 0 is the start."""
        messages = self._run[step - 1] if step else []
        title = f"round {step} of {len(self._run)}" if step else "start"
        names = [self._changed(step, to) for _, to, _ in messages]
        self._circle.update(self._n, _shares(messages, self._whole), title, names=names)
        self._grid.update([row.tolist() for row in self._held[step]])
        self._title.write([(0, 1)], [f"held after round {step}" if step else "held at the start"])
        sent = [sum(b for done in self._run[:step] for s, _, b in done if s == rank) for rank in range(self._n)]
        now = f"{len(messages)} of {_span([b for *_, b in messages])}" if messages else "none yet"
        return Said("", {"messages": now, "sent so far, per rank": _span(sent), "the whole tensor": units.size(self._whole)})

    def _changed(self, step: int, rank: int) -> str:
        """Returns which elements this round changed on a rank, such as "2" or "2, 3"."""
        before, after = (state[rank].tolist() for state in self._held[step - 1 : step + 1])
        return ", ".join(str(k) for k, (old, new) in enumerate(zip(before, after, strict=True)) if old != new)


def stepper(run: Rounds, held: Sequence[Sequence[Tensor]]) -> Explorer:
    """Steps with a slider for the round."""
    return Explorer(Steps(run, held), step=slider("round", min(1, len(run)), 0, len(run)))


def _shares(messages: Sequence[tuple[int, ...]], whole: int) -> list[tuple[int, int, float]]:
    return [(source, to, bytes / whole) for source, to, bytes, *_ in messages]


def _span(sizes: Sequence[int]) -> str:
    return " to ".join(map(units.size, sorted({min(sizes), max(sizes)})))
