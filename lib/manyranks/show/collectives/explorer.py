"""Chapter 01's explorer: a collective, its algorithm, ranks, size and topology; its messages, contents, bytes and time.

Times are theory.collectives.cluster_seconds'; ranks 0 to 7 are the first node. On a torus there is one algorithm, which runs on
all axes at once (torus_seconds), over the shape that is nearest to a cube.
"""

import functools
from collections import namedtuple
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.collections import LineCollection, PathCollection, PolyCollection
from matplotlib.colors import ListedColormap

from manyranks.show import style, units
from manyranks.show.bars import corners, joined
from manyranks.show.explorer import Board, Explorer, Measure, Setting, choice, log_slider, slider, value_slider
from manyranks.show.labels import Labels, heading, word
from manyranks.show.lines import SECONDS, ring, ticks
from manyranks.show.scenario import in_code
from manyranks.show.setting import Part
from manyranks.theory import clusters, collectives
from manyranks.theory.cluster import Cluster
from manyranks.theory.collectives import ALGORITHMS, Round, checks, contents, timing
from manyranks.theory.names import Named

MOST = 16  # ranks that can still be read
_EDGE = 1.24  # half the side of the drawing; the discs' centres are at a distance of 1 from the middle
_CORNERS = np.exp(2j * np.pi * np.arange(32) / 32)
_NODE, _SIDES = np.array([-0.42 - 1j, 0.42 - 1j, 0.42 + 1j, -0.42 + 1j]), (-0.55, 0.7)
_NAME_GAP = 0.2  # from an arrow to its name
_ALONG = np.linspace(0, 1, 12)
_BEZIER = np.array([(1 - _ALONG) ** 2, 2 * _ALONG * (1 - _ALONG), _ALONG**2])


class Circle:
    """Ranks 0 … n−1 clockwise from the top, and an arrow for each message; `update` moves them.

    An arrow bends to the left of its way, so that two opposite ones lie apart; the larger its share, the thicker it is.
    `moving` are the artists that update changes, made once.
    """

    def __init__(self, axes: Axes):
        self._shafts = axes.add_collection(LineCollection([], colors=style.BLUE, zorder=2), autolim=False)
        self._heads = axes.add_collection(PolyCollection([], linewidths=0.8, edgecolors=style.BLUE, zorder=2), autolim=False)
        self._discs = axes.add_collection(PolyCollection([], facecolors="white", edgecolors=style.INK, zorder=3), autolim=False)
        self._boxes = axes.add_collection(PolyCollection([], facecolors="none", edgecolors=style.INK, zorder=1), autolim=False)
        self._labels, self._names, self._title = Labels(axes), Labels(axes, name="names"), heading(axes)
        self.moving = [self._shafts, self._heads, self._discs, self._boxes, self._labels, self._names, self._title]
        axes.set(xlim=(-_EDGE, _EDGE), ylim=(-_EDGE, _EDGE), aspect="equal", xticks=[], yticks=[])
        axes.spines[:].set_visible(False)
        axes.grid(visible=False)

    def update(
        self,
        n: int,
        messages: Sequence[tuple[int, int, float]],
        title: str = "",
        node: int = 0,
        names: Sequence[object] = (),
    ) -> None:
        """Shows up to 16 ranks, and messages (source, destination, share of the tensor); those without a share are dotted.

        node: ranks of each of two nodes, which stand side by side in boxes; 0 for one circle of all
        names: what stands beside each message's arrow, such as its chunk's number, or ""
        """
        self._title.write([(0, 1)], [title])
        if n > MOST:
            self._labels.write([(0, 0)], [f"drawn up to {MOST} ranks"])
            n, messages = 0, []
        places = np.exp(1j * (np.pi / 2 - 2 * np.pi * np.arange(n) / max(n, 1)))
        radius = min(0.2, 0.62 * np.sin(np.pi / max(n, 2)))
        if node:
            places, radius = np.concatenate([side + 0.8j * np.linspace(1, -1, node) for side in _SIDES]), 0.13
        self._boxes.set_verts([_points(side - 0.11 + _NODE) for side in _SIDES] if node else [])
        self._discs.set_verts(_points(places[:, None] + radius * _CORNERS))
        if n:
            self._labels.write(_points(places), range(n), [style.BLACK] * n)
        *ends, shares = np.reshape(messages, (-1, 3)).T
        start, end = np.array(ends, int)
        neighbors = np.isin((end - start) % max(n, 1), (1, n - 1)) | (node > 0)
        shafts, heads, names_at = _arrows(places[start], places[end], radius, shares, neighbors)
        named = [k for k, name in enumerate(names) if name != ""]
        self._names.write(names_at[named], [names[k] for k in named])
        self._shafts.set_segments(shafts)
        self._shafts.set_linewidths(np.where(shares > 0, np.maximum((1.2 + min(4, 26 / max(n, 1))) * shares**0.75, 0.8), 0.9))
        self._shafts.set_linestyles(["-" if share > 0 else ":" for share in shares] or "-")
        self._heads.set_verts(heads)
        self._heads.set_facecolors([style.BLUE if share > 0 else "white" for share in shares])


def _arrows(start: np.ndarray, end: np.ndarray, radius: float, share: np.ndarray, neighbors: np.ndarray) -> tuple:
    """Returns each shaft's points, its head's, whose tip touches the disc around `end`, and a place beside the arrow."""
    middle, left = (start + end) / 2, 1j * (end - start)
    # Between others than neighbors it also bends inwards, past the discs that lie between.
    bend = np.where(neighbors, middle + 0.24 * left, 0.65 * middle + 0.14 * left)
    out, back = (place + radius * (bend - place) / abs(bend - place) for place in (start, end))
    along = (bend - back) / abs(bend - back)
    long = np.minimum(0.11 + 0.09 * share, 0.65 * abs(back - out))
    base, half = back + long * along, 0.42j * long * along
    shafts, heads = np.array([out, bend, base]).T @ _BEZIER, np.array([back, base + half, base - half]).T
    names_at = (middle + bend) / 2 + _NAME_GAP * (bend - middle) / abs(bend - middle)
    return _points(shafts), _points(heads), _points(names_at)


def _points(plane: np.ndarray) -> np.ndarray:
    return np.stack((plane.real, plane.imag), axis=-1)


_SYSTEMS = {
    "one H100 node (NVLink)": clusters["h100-dgx"].of(8),
    "H100 nodes of 8 (InfiniBand)": clusters["h100-dgx"],
    "TPU v5p torus": clusters["tpu-v5p"],
    "laptop": clusters["laptop"],
}
_RANKS = [0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 64]
_CODE = """\
from manyranks.theory import clusters
from manyranks.theory.collectives import {name}, sent_bytes

cluster = {cluster}
sent = {sent}
"""
_CLUSTERS = {name: f'clusters["{each.name}"]' for name, each in _SYSTEMS.items()}
_CLUSTERS |= {"one H100 node (NVLink)": 'clusters["h100-dgx"].of(8)'}
TOPOLOGIES: dict[str, Cluster] = Named("topology", _SYSTEMS)
_ON_TORUS = {each: collectives.usual(each) for each in ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")}
SIZES = [2**k for k in range(0, 37, 2)]  # 1 B to 64 GiB
_rounds = functools.lru_cache(maxsize=256)(collectives.rounds)


class Collective(namedtuple("Collective", "operation algorithm n size topology step", defaults=(1,)), Setting):
    """Holds what the controls say. size: bytes of the whole tensor; step: a round."""

    @property
    def cluster(self) -> Cluster:
        return TOPOLOGIES[self.topology]

    @property
    def node(self) -> int | None:
        """Ranks of a node, for the algorithm that has nodes."""
        return self.cluster.node if self.algorithm == "hierarchical" else None

    def rounds(self, elements: int) -> list[Round]:
        return _rounds(self.operation, elements, self.n, self.algorithm, node=self.node)

    @property
    def steps(self) -> int:
        return timing.round_count(self.operation, self.n, self.cluster, self.algorithm)

    def messages(self, step: int) -> list[tuple[int, int, float]]:
        """Those of round `step`, counted from 1, as (source, destination, share of the whole tensor); none in round 0."""
        drawn = self.rounds(self.size)[step - 1] if step else ()
        return [(m.source, m.destination, m.count / self.size) for m in drawn]

    def counts(self, step: int) -> list[list[int]]:
        """[rank][chunk]: how many ranks' terms are in what that rank holds after so many rounds."""
        chunks = contents.chunks(self.operation, self.algorithm, self.n)
        held = contents.after(self.operation, contents.at_first(self.operation, self.n, chunks), self.rounds(chunks)[:step])
        return [[terms.bit_count() for terms in row] for row in held]

    def seconds(self, size: float) -> float:
        """Raises ValueError for what cannot be: an algorithm, ranks or a topology that do not suit."""
        self._check()
        if self.cluster.torus:
            return collectives.torus_seconds(self.operation, size, timing.cube(self.n), self.cluster.levels[0].link)
        return collectives.cluster_seconds(self.operation, size, self.n, self.cluster, self.algorithm)

    @property
    def times(self) -> dict[str, list[float]]:
        """The seconds at SIZES of each of the operation's algorithms that can run here."""
        return _times(self.operation, self.n, self.topology)

    @property
    def sent(self) -> list[int]:
        return collectives.sent_bytes(self.operation, self.size, 1, self.n, self.algorithm, node=self.node)

    def where(self) -> str:
        return f"{self.operation} by {self.algorithm}, {self.n:,} rank{'s' if self.n != 1 else ''}, {units.size(self.size)}"

    def numbers(self) -> dict[str, str]:
        if self.n == 1:
            return {}
        seconds, latency, most = self.seconds(self.size), self.seconds(0), units.size(max(self.sent))
        numbers = {"each rank sends" if units.size(min(self.sent)) == most else "the busiest rank sends": most}
        if self.cluster.torus:
            numbers["torus"] = "×".join(str(side) for side in timing.cube(self.n) if side > 1)
        else:
            numbers["rounds"] = f"{self.steps:,}"
        return numbers | {"time": units.duration(seconds), "latency": f"{units.duration(latency)}, {latency / seconds:.0%}"}

    def limits(self) -> str:
        """Says what limits, and which algorithm is the fastest. Raises ValueError for what cannot be."""
        seconds = {name: self._replace(algorithm=name).seconds(self.size) for name in self.times}
        own, best = self.seconds(self.size), min(seconds, key=seconds.get)
        if self.n == 1:
            return "none: one rank sends nothing"
        limit = "latency" if self.seconds(0) > own / 2 else "bandwidth"
        if len(seconds) == 1:
            return f"{limit}; there is no other algorithm here"
        if best == self.algorithm:
            return f"{limit}; {best} is the fastest here"
        if own <= 1.01 * seconds[best]:
            return f"{limit}; {self.algorithm} is within 1% of the fastest here"
        return f"{limit}; the fastest here is {best}, {units.duration(seconds[best])}"

    def code(self) -> str:
        """Returns Python that prints what is shown; nothing for one rank, which sends nothing."""
        if self.n == 1:
            return ""
        torus, group = self.cluster.torus, f"{self.n}, cluster"
        if torus:
            group = f"{timing.cube(self.n)}, cluster.levels[0].link"
        name, way = ("torus_seconds", "") if torus else ("cluster_seconds", f', "{self.algorithm}"')
        sent = f'sent_bytes("{self.operation}", {self.size}, 1, {self.n}, "{self.algorithm}", node={self.node})'
        text = _CODE.format(name=name, cluster=_CLUSTERS[self.topology], sent=sent)
        seconds = f'duration({name}("{self.operation}", {{}}, {group}{way}))'
        prints = {next(iter(self.numbers())): "size(max(sent))", "time": seconds.format(self.size)}
        return in_code(text, prints | {"latency": seconds.format(0)})

    def _check(self) -> None:
        operation, algorithm, n, _, topology, _ = self
        if algorithm not in (known := ALGORITHMS[operation]):
            raise ValueError(f"{operation} has no {algorithm} algorithm: choose {', '.join(known)}")
        if self.node and n and (n <= self.node or n % self.node):
            raise ValueError(f"N = {n}: hierarchical needs two or more whole nodes of {self.node} ranks; {topology} has none")
        try:
            checks.group(operation, n, algorithm, node=n if self.node else None)
        except ValueError as error:
            raise ValueError(str(error).replace("n=", "N = ")) from None
        if n > (room := self.cluster.gpus or self.cluster.levels[-1].size):
            raise ValueError(f"N = {n}: {topology} has only {room} ranks; choose fewer, or another topology")
        if self.cluster.torus and _ON_TORUS.get(operation) != algorithm:
            timed = ", ".join(f"{each} by {way}" for each, way in _ON_TORUS.items())
            raise ValueError(f"{operation} by {algorithm} isn't timed on a torus; choose {timed}")


@functools.lru_cache(maxsize=256)
def _times(operation: str, n: int, topology: str) -> dict[str, list[float]]:
    found = {}
    for name in ALGORITHMS[operation]:
        with suppress(ValueError):
            found[name] = [Collective(operation, name, n, size, topology).seconds(size) for size in SIZES]
    return found


_DIGITS = 8  # ranks whose cells have room for a digit
_SHADES = ListedColormap(colormaps["Blues"](np.linspace(0, 1, 64)))
# Color, line and marker of an algorithm. Two that look the same are never algorithms of the same operation.
LOOKS = {
    "ring": (style.BLUE, "-", "o"),
    "tree": (style.ORANGE, "--", "s"),
    "naive": (style.GREEN, "-.", "D"),
    "recursive_doubling": (style.PINK, ":", "^"),
    "halving_doubling": (style.INK, "-", "v"),
    "hierarchical": (style.YELLOW, "--", "P"),
    "halving": (style.INK, "-", "v"),
    "pairwise": (style.YELLOW, "--", "P"),
}
_PARTS = (0, 0.5, 1)  # of the highest bar, where there is a line with its amount


class Grid:
    """A row for each rank, a column for each chunk; the darker a cell, the more of what belongs there has come."""

    def __init__(self, axes: Axes):
        self._cells = axes.add_collection(PathCollection([]), autolim=False)
        self._inside, self._numbers, self._title = Labels(axes), Labels(axes, size=8), heading(axes)
        self.moving = [self._cells, self._inside, self._numbers, self._title]
        axes.set(xlim=(0, 1), ylim=(1, 0), xticks=[], yticks=[])
        axes.set_xlabel("chunk", labelpad=15)
        axes.set_ylabel("rank", labelpad=18)
        axes.spines[:].set_visible(False)
        axes.grid(visible=False)
        bar = axes.figure.colorbar(ScalarMappable(cmap=_SHADES), ax=axes, ticks=[0, 1], shrink=0.7, pad=0.02)
        bar.ax.set_yticklabels(["none", "all"])

    def update(self, counts: Sequence[Sequence[int]], most: int, title: str) -> None:
        """Shows in cell [rank][chunk] how many of `most` terms are in it; no counts at all: only a text instead of the grid."""
        self._title.write([(0, 1)], [title])
        rows, columns = np.shape(counts) if counts else (0, 0)
        flat, (down, across) = np.ravel(counts), np.indices((rows, columns)).reshape(2, -1)
        boxes = np.stack((across / columns, (across + 1) / columns, down / rows, (down + 1) / rows), axis=1)
        middles, shades = boxes.reshape(-1, 2, 2).mean(axis=2), np.unique(flat)
        grid = [joined(boxes)] if rows else []
        self._cells.set_paths([joined(boxes[flat == count]) for count in shades] + grid)
        self._cells.set(facecolors=[*_SHADES(shades / most), (0, 0, 0, 0)], edgecolors=["none"] * len(shades) + ["#b0b0b0"])
        self._cells.set_linewidths([0] * len(shades) + [0.6])
        if rows:
            shown = flat if rows <= _DIGITS and most > 1 else flat[:0]
            self._inside.write(middles[: len(shown)], shown, np.where(2 * shown > most, "white", style.BLACK))
        else:
            self._inside.write([(0.5, 0.5)], [f"drawn up to {MOST} ranks"])
        sides = [(x, 1.05) for x in middles[:columns, 0]] + [(-0.035, y) for y in middles[::columns, 1]] if rows else []
        self._numbers.write(sides, [*range(columns), *range(rows)])


class Sent:
    """The bytes that each rank sends: a bar a rank, many ranks from most to least; and the least possible."""

    def __init__(self, axes: Axes):
        self._bars = axes.add_collection(PolyCollection([], facecolors=style.BLUE, linewidths=0), autolim=False)
        self._line = axes.plot([0, 1], [0, 0], color=style.ORANGE, linestyle="--", linewidth=1.5)[0]
        self._right, self._left = Labels(axes, left=0, outline=word, color=style.ORANGE), Labels(axes, left=1, outline=word)
        self._numbers, self._under = Labels(axes, size=8), Labels(axes, size=10)
        for x, align, longest in ((1.01, "left", "least for the busiest: "), (-0.015, "right", "1,000 MB")):
            axes.text(x, 1, longest, ha=align, fontsize=9, color="none")  # the layout leaves this much room for texts
        self._axes, self._sent = axes, ()
        self.moving = [self._bars, self._line, self._right, self._left, self._numbers, self._under]
        axes.set(xlim=(0, 1), ylim=(0, 1.08), xticks=[], title="bytes that each rank sends")
        axes.set_yticks(_PARTS, [""] * len(_PARTS))
        axes.tick_params(length=0)

    def parts(self) -> Iterator[Part]:
        """The bytes of each rank, where a bar is one rank's."""
        n, top = len(self._sent), max(*self._sent, 1)
        for rank, size in enumerate(self._sent if n <= MOST else ()):
            place = (rank + 0.14) / n, (rank + 0.86) / n, 0, max(size / top, 0.03)
            yield Part(self._axes, *place, f"rank {rank}: {size:,} bytes")

    def update(self, sent: Sequence[int], least: float) -> None:
        """Shows the bytes of rank 0, 1, …, and the bytes that the busiest rank cannot do without."""
        n, top = len(sent), max(*sent, least, 1)
        self._sent = sent
        few = n <= MOST
        apart, each = (0.14, sent) if few else (0, sorted(sent, reverse=True))
        self._bars.set_verts(corners([((r + apart) / n, (r + 1 - apart) / n, 0, size / top) for r, size in enumerate(each)]))
        self._line.set_ydata([least / top] * 2)
        places = [(1.01, least / top + up) for up in (0.055, -0.055)]
        self._right.write(places, ["least for the busiest:", units.size(least)])
        self._left.write([(-0.015, part) for part in _PARTS], [units.size(part * top) for part in _PARTS])
        self._numbers.write([((r + 0.5) / n, -0.07) for r in range(n)] if few else [], range(n if few else 0))
        self._under.write([(0.5, -0.18)], ["rank" if few else f"{n} ranks, from most to least"])


class TimeCurves:
    """Time against the size of the tensor, a curve for each algorithm, which always looks the same."""

    def __init__(self, axes: Axes):
        self._band = axes.plot([], [], linewidth=7, linestyle="-", alpha=0.3)[0]
        self._curves, self._samples = {}, {}
        for k, (name, (color, line, marker)) in enumerate(LOOKS.items()):
            # Markers of different curves stand at different sizes, so that those which lie on each other can all be seen.
            look = {"color": color, "linestyle": line, "marker": marker, "markersize": 5}
            self._curves[name] = axes.plot([], [], markevery=(k % 6, 6), **look)[0]
            self._samples[name] = axes.plot([], [], markevery=[1], transform=axes.transAxes, **look)[0]
        self._ring = ring(axes)
        self._names = Labels(axes, left=0, within=axes.transAxes)
        self.moving = [self._band, *self._curves.values(), *self._samples.values(), self._ring, self._names]
        axes.set(xscale="log", yscale="log", xlim=(0.6, 2e11), ylim=(5e-7, 1e4), xlabel="size of the tensor", ylabel="time")
        axes.set_title("time (circled: this tensor)")
        ticks(axes, ([1, 1e3, 1e6, 1e9], units.size), (SECONDS, SECONDS.__getitem__))

    def update(self, seconds: Mapping[str, Sequence[float]], chosen: str, at: tuple[float, float]) -> None:
        """Shows these algorithms' seconds at SIZES, the chosen one on a band, and a mark at `at`, (bytes, seconds)."""
        heights = {name: 0.95 - 0.1 * place for place, name in enumerate(seconds)}
        for name, line in self._curves.items():
            shown = name in seconds
            wide = 2.6 if name == chosen else 1.2
            line.set(data=(SIZES, seconds[name]) if shown else ([], []), linewidth=wide)
            self._samples[name].set(data=([0.02, 0.07, 0.12], [heights[name]] * 3) if shown else ([], []), linewidth=wide)
        self._band.set(data=(SIZES, seconds[chosen]), color=LOOKS[chosen][0])
        self._ring.set_data([at[0]], [at[1]])
        self._names.write([(0.14, y) for y in heights.values()], list(heights))


class Knobs(Board):
    """A collective: a round's messages, what the ranks then hold, the bytes that each sends, and time against size.

    On a torus the messages and bytes shown are one ring's (pairs' for all_to_all), the time is the torus's own.
    """

    setting = Collective

    @style.styled
    def __init__(self):
        self.figure, (circle, grid, sent, times) = style.figure(columns=2, rows=2, width=9, height=4.4)
        self.panels = self._circle, self._grid, self._sent, self._times = (
            Circle(circle),
            Grid(grid),
            Sent(sent),
            TimeCurves(times),
        )
        _ = Collective("all_reduce", "ring", _RANKS[-1], 1, [*TOPOLOGIES][1]).times  # many messages, counted once

    def draw(self, now: Collective) -> None:
        """Shows its round, or the last one."""
        total, drawn, last = now.steps, now.n <= MOST, min(now.step, now.steps)
        title = f"round {last} of {total}" if drawn else f"{total:,} rounds"
        if drawn and now.cluster.torus > 0 and now.algorithm == "ring":
            title += " on one ring"
        self._circle.update(now.n, now.messages(last) if drawn else [], title if total else "no rounds")
        arrived = "chunks received, by sender" if now.operation == "all_to_all" else "chunks that have arrived"
        held = "ranks summed into each chunk" if now.operation in contents.ADDING else arrived
        self._grid.update(now.counts(last) if drawn else [], contents.complete(now.operation, now.n), held)
        self._sent.update(now.sent, collectives.least_bytes(now.operation, now.size, now.n))
        self._times.update(now.times, now.algorithm, (now.size, now.seconds(now.size)))


def explorer(measure: Measure | None = None) -> Explorer:
    """Returns the explorer of chapter 01.

    measure: what "Measure it" runs, few_ranks.collectives
    """
    halves = {"algorithm": "halving_doubling"}
    presets = {"the same bytes": halves, "6 ranks": halves | {"n": 6}}
    presets["1 MB, 64 ranks"] = {"algorithm": "recursive_doubling", "n": 64, "size": 2**20}
    presets["17 GB, 64 ranks"] = {"algorithm": "hierarchical", "n": 64, "size": 2**34}
    presets["a torus"] = {"topology": "TPU v5p torus", "n": 64}
    names = {name.partition(" (")[0]: name for name in TOPOLOGIES}
    own = {"operation": choice("operation", "all_reduce", [*ALGORITHMS]), "algorithm": choice("algorithm", "ring", [*LOOKS])}
    own |= {"n": value_slider("ranks N", 8, _RANKS), "size": log_slider("tensor size", 2**30, 0, 36, show=units.size)}
    own["topology"] = choice("topology", "H100 nodes of 8 (InfiniBand)", names)
    return Explorer(Knobs(), presets, measure, **own, step=slider("round", 1, 1, 30))
