"""Short texts in a plot, all of them one artist: many Texts cost more than all else in a redraw."""

import functools
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PathCollection
from matplotlib.path import Path
from matplotlib.textpath import TextPath
from matplotlib.transforms import Affine2D, Bbox, Transform

from manyranks.show import style

_POINT = 1 / 72  # inch


class Labels:
    """Texts at places of these axes. size: points; left: the share of a text that is to the left of its place."""

    def __init__(self, axes: Axes, size: float = 9, left: float = 0.5, zorder: float = 4, within: Transform | None = None):
        self._size, self._left = size, left
        self.artist = PathCollection([], offsets=[], offset_transform=within or axes.transData, linewidths=0, zorder=zorder)
        self.artist.set(transform=Affine2D().scale(_POINT) + axes.figure.dpi_scale_trans, clip_on=False)
        axes.add_collection(self.artist, autolim=False)

    def update(self, places: Sequence[tuple[float, float]], texts: Sequence[object], colours: Sequence[str] = ()) -> None:
        """Shows each text at its place, in its colour (black where none is given)."""
        self.artist.set_paths([_outline(str(text), self._size, self._left) for text in texts])
        self.artist.set_offsets(np.reshape(places, (-1, 2)))
        self.artist.set_facecolors(list(colours) or style.BLACK)


@functools.lru_cache(maxsize=1024)
def _outline(text: str, size: float, left: float) -> Path:
    """The text around (0, 0), in points; its height is taken as a digit's, so that texts side by side have one baseline."""
    path = TextPath((0, 0), text, size=size)
    box = _extents(path)
    return path.transformed(Affine2D().translate(-box.x0 - left * box.width, -_digit_height(size) / 2))


def _extents(path: Path) -> Bbox:
    """As path.get_extents(), which looks at every curve for a hundred times as long: outlines of letters end on corners."""
    corners = path.vertices[path.codes != Path.CLOSEPOLY]
    return Bbox([corners.min(axis=0), corners.max(axis=0)]) if len(corners) else Bbox.null()


@functools.lru_cache(maxsize=64)
def _digit_height(size: float) -> float:
    return TextPath((0, 0), "0", size=size).get_extents().height
