"""Ranks on a circle, and the messages of one round as arrows between them."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PolyCollection

from manyranks.show import style
from manyranks.show.labels import Labels, heading

MOST = 16  # ranks that can still be read
_EDGE = 1.24  # half the side of the drawing; the discs' centres are at a distance of 1 from the middle
_CORNERS = np.exp(2j * np.pi * np.arange(32) / 32)
_NODE, _SIDES = np.array([-0.42 - 1j, 0.42 - 1j, 0.42 + 1j, -0.42 + 1j]), (-0.55, 0.7)
_BESIDE = 0.2  # of a name, from its arrow
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
        self.moving = [self._shafts, self._heads, self._discs, self._boxes]
        self.moving += [each.artist for each in (self._labels, self._names, self._title)]
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
        self._title.update([(0, 1)], [title])
        if n > MOST:
            self._labels.update([(0, 0)], [f"drawn up to {MOST} ranks"])
            n, messages = 0, []
        places = np.exp(1j * (np.pi / 2 - 2 * np.pi * np.arange(n) / max(n, 1)))
        radius = min(0.2, 0.62 * np.sin(np.pi / max(n, 2)))
        if node:
            places, radius = np.concatenate([side + 0.8j * np.linspace(1, -1, node) for side in _SIDES]), 0.13
        self._boxes.set_verts([_points(side - 0.11 + _NODE) for side in _SIDES] if node else [])
        self._discs.set_verts(_points(places[:, None] + radius * _CORNERS))
        if n:
            self._labels.update(_points(places), range(n), [style.BLACK] * n)
        *ends, shares = np.reshape(messages, (-1, 3)).T
        start, end = np.array(ends, int)
        neighbours = np.isin((end - start) % max(n, 1), (1, n - 1)) | (node > 0)
        shafts, heads, beside = _arrows(places[start], places[end], radius, shares, neighbours)
        named = [k for k, name in enumerate(names) if name != ""]
        self._names.update(beside[named], [names[k] for k in named])
        self._shafts.set_segments(shafts)
        self._shafts.set_linewidths(np.where(shares > 0, np.maximum((1.2 + min(4, 26 / max(n, 1))) * shares**0.75, 0.8), 0.9))
        self._shafts.set_linestyles(["-" if share > 0 else ":" for share in shares] or "-")
        self._heads.set_verts(heads)
        self._heads.set_facecolors([style.BLUE if share > 0 else "white" for share in shares])


def _arrows(start: np.ndarray, end: np.ndarray, radius: float, share: np.ndarray, neighbours: np.ndarray) -> tuple:
    """Returns each shaft's points, its head's, whose tip touches the disc around `end`, and a place beside the arrow."""
    middle, left = (start + end) / 2, 1j * (end - start)
    # Between others than neighbours it also bends inwards, past the discs that lie between.
    bend = np.where(neighbours, middle + 0.24 * left, 0.65 * middle + 0.14 * left)
    out, back = (place + radius * (bend - place) / abs(bend - place) for place in (start, end))
    along = (bend - back) / abs(bend - back)
    long = np.minimum(0.11 + 0.09 * share, 0.65 * abs(back - out))
    base, half = back + long * along, 0.42j * long * along
    shafts, heads = np.array([out, bend, base]).T @ _BEZIER, np.array([back, base + half, base - half]).T
    beside = (middle + bend) / 2 + _BESIDE * (bend - middle) / abs(bend - middle)
    return _points(shafts), _points(heads), _points(beside)


def _points(plane: np.ndarray) -> np.ndarray:
    return np.stack((plane.real, plane.imag), axis=-1)
