"""Chapter 01's explorer: a collective, its algorithm, ranks, size and topology; its messages, contents, bytes and time."""

from collections.abc import Iterator
from typing import NamedTuple

from matplotlib.artist import Artist

from manyranks.show import style, units
from manyranks.show.collectives import contents, topologies
from manyranks.show.collectives.circle import Circle
from manyranks.show.collectives.panels import LOOKS, MOST, SIZES, Grid, Sent, Times
from manyranks.show.collectives.topologies import TOPOLOGIES
from manyranks.show.explorer import Explorer, Measure, choice, log_slider, slider, value_slider
from manyranks.show.said import Part, Said
from manyranks.theory.cluster import Cluster
from manyranks.theory.collectives import ALGORITHMS, rounds, sent_bytes

_RANKS = [0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 64]


class Setting(NamedTuple):
    """What the controls say; size: bytes of the whole tensor."""

    operation: str
    algorithm: str
    n: int
    size: int
    topology: str

    @property
    def on(self) -> Cluster:
        return TOPOLOGIES[self.topology]

    @property
    def node(self) -> int | None:
        return topologies.node_of(self.topology, self.algorithm)

    @property
    def rounds(self) -> int:
        return topologies.round_count(self.operation, self.algorithm, self.n, self.node)

    def seconds(self, size: float, algorithm: str | None = None) -> float:
        return topologies.seconds(self.operation, algorithm or self.algorithm, self.n, size, self.topology)


class Knobs:
    """One collective: a round's messages, what the ranks then hold, the bytes that each sends, and time against size.

    Rank 0 is the root. On a torus the messages and bytes shown are those of one ring (of pairs for all_to_all), the time is
    the torus's own. The model: `topologies`.
    """

    @style.styled
    def __init__(self):
        self.figure, (circle, grid, sent, times) = style.figure(columns=2, rows=2, width=9, height=4.4)
        self._circle, self._grid, self._sent, self._times = Circle(circle), Grid(grid), Sent(sent), Times(times)
        panels = self._circle, self._grid, self._sent, self._times
        self.moving: list[Artist] = [artist for panel in panels for artist in panel.moving]

    def update(self, operation: str, algorithm: str, n: int, size: int, topology: str, step: int) -> Said:
        """Shows round `step`, counted from 1, or the last where there are fewer.

        size: bytes of the whole tensor. Raises ValueError for what cannot be, and then leaves the figure as it was.
        """
        now = Setting(operation, algorithm, n, int(size), topology)
        _check(now, step)
        sent = sent_bytes(operation, now.size, 1, n, algorithm, node=now.node)
        names = topologies.offered(operation, n, topology)
        times = {name: [now.seconds(at, name) for at in SIZES] for name in names}
        self._rounds(now, step)
        self._sent.update(sent, topologies.least(operation, now.size, n))
        self._times.update(times, algorithm, (now.size, now.seconds(now.size)))
        return _said(now, sent, names)

    def parts(self) -> Iterator[Part]:
        """What each rank sends."""
        return self._sent.parts()

    def _rounds(self, now: Setting, step: int) -> None:
        total = now.rounds
        if now.n > MOST:
            self._circle.update(now.n, [], f"{total:,} rounds")
            return self._grid.update([], 1, _held(now.operation))
        last = min(step, total)
        self._circle.update(now.n, messages(now, last), _title(now, last, total))
        self._grid.update(counts(now, last), contents.complete(now.operation, now.n), _held(now.operation))


def messages(now: Setting, step: int) -> list[tuple[int, int, float]]:
    """The messages of round `step`, counted from 1, as (source, destination, share of the whole tensor); none in round 0."""
    if step == 0:
        return []
    drawn = rounds(now.operation, now.size, now.n, now.algorithm, node=now.node)[step - 1]
    return [(m.source, m.destination, m.count / now.size) for m in drawn]


def counts(now: Setting, step: int) -> list[list[int]]:
    """[rank][chunk]: how many ranks' terms are in what that rank holds after round `step`; as they were at first for 0."""
    columns = contents.chunks(now.operation, now.algorithm, now.n)
    past = rounds(now.operation, columns, now.n, now.algorithm, node=now.node)[:step]
    held = contents.after(now.operation, contents.at_first(now.operation, now.n, columns), past)
    return [[terms.bit_count() for terms in row] for row in held]


def explorer(measure: Measure | None = None) -> Explorer:
    """Returns the explorer of chapter 01.

    measure: what "Measure it" runs, manyranks.small's collectives
    """
    return Explorer(
        Knobs(),
        presets={
            "the same bytes": {"algorithm": "halving_doubling"},
            "6 ranks": {"algorithm": "halving_doubling", "n": 6},
            "1 MB, 64 ranks": {"algorithm": "recursive_doubling", "n": 64, "size": 2**20},
            "17 GB, 64 ranks": {"algorithm": "hierarchical", "n": 64, "size": 2**34},
            "a torus": {"topology": "TPU v5p torus", "n": 64},
        },
        measure=measure,
        operation=choice("operation", "all_reduce", list(ALGORITHMS)),
        algorithm=choice("algorithm", "ring", list(LOOKS)),
        n=value_slider("ranks N", 8, _RANKS),
        size=log_slider("size of the tensor", 2**30, 0, 36, show=units.size),
        topology=choice("topology", "H100 nodes of 8 (InfiniBand)", list(TOPOLOGIES)),
        step=slider("round", 1, 1, 30),
    )


def _check(now: Setting, step: int) -> None:
    topologies.check(now.operation, now.algorithm, now.n, now.topology)
    if now.size < 1:
        raise ValueError(f"size={now.size}: a tensor has at least 1 byte")
    if step < 1:
        raise ValueError(f"step={step}: rounds count from 1")


def _title(now: Setting, step: int, total: int) -> str:
    if not total:
        return "no rounds"
    return f"round {step} of {total}" + (" on one ring" if now.on.torus and now.algorithm == "ring" else "")


def _held(operation: str) -> str:
    if operation in contents.ADDING:
        return "ranks in each chunk's sum"
    return "arrived, by sender" if operation == "all_to_all" else "chunks that have arrived"


def _said(now: Setting, sent: list[int], names: list[str]) -> Said:
    where = f"{now.operation} by {now.algorithm}, {now.n:,} rank{'s' * (now.n != 1)}, {units.size(now.size)}"
    if now.n == 1:
        return Said(where, limit="one rank: nothing is sent")
    seconds, latency = now.seconds(now.size), now.seconds(0)
    most = units.size(max(sent))
    sends = "each rank sends" if units.size(min(sent)) == most else "the busiest rank sends"
    over = "×".join(str(side) for side in topologies.shape(now.n) if side > 1)
    way = {"torus": over} if now.on.torus else {"rounds": f"{now.rounds:,}"}
    share = {"latency": f"{units.duration(latency)}, {latency / seconds:.0%}"}
    numbers = {sends: most} | way | {"time": units.duration(seconds)} | share
    return Said(where, numbers, f"{'latency' if latency > seconds / 2 else 'bandwidth'}; {_fastest(now, names, seconds)}")


def _fastest(now: Setting, names: list[str], seconds: float) -> str:
    if len(names) == 1:
        return "there is no other algorithm here"
    best = min(names, key=lambda name: now.seconds(now.size, name))
    shortest = now.seconds(now.size, best)
    if best == now.algorithm:
        return f"{best} is the fastest here"
    if seconds <= 1.01 * shortest:
        return f"{now.algorithm} is the fastest here, to within 1%"
    return f"the fastest here is {best}, {units.duration(shortest)}"
