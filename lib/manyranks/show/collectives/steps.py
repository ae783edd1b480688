"""A recorded run of messages, round by round: as a strip of pictures, and as a plot that an explorer steps through."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from manyranks.show import style, units
from manyranks.show.collectives.circle import MOST, Circle
from manyranks.show.collectives.holdings import Holdings
from manyranks.show.explorer import Explorer, slider
from manyranks.show.labels import heading
from manyranks.show.said import Said

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


class Steps:
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
        self.moving = [*self._circle.moving, *self._grid.moving, self._title.artist]

    def update(self, step: int) -> Said:
        """Shows the messages of this round, counted from 1, and the ranks after it; 0 is the start."""
        messages = self._run[step - 1] if step else []
        title = f"round {step} of {len(self._run)}" if step else "start"
        names = [self._changed(step, to) for _, to, _ in messages]
        self._circle.update(self._n, _shares(messages, self._whole), title, names=names)
        self._grid.update([row.tolist() for row in self._held[step]])
        self._title.update([(0, 1)], [f"held after round {step}" if step else "held at the start"])
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
