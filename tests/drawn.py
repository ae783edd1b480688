"""Things a figure shows, read off its artists: parts that are named by gid or label, boxes, and short texts."""

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch

from manyranks.show.labels import Labels


def named(axes: Axes, name: str) -> Artist:
    """The one artist of these axes with this gid or label."""
    (found,) = (artist for artist in axes.get_children() if name in (artist.get_gid(), artist.get_label()))
    return found


def boxes(axes: Axes, name: str) -> np.ndarray:
    """(left, right, top, bottom) of each rectangle of the path with this name, on the axes' scales; y grows downwards."""
    polygons = named(axes, name).get_path().to_polygons()
    return np.reshape([(x.min(), x.max(), y.min(), y.max()) for x, y in (each.T for each in polygons)], (-1, 4))


def widths(axes: Axes) -> list[list[float]]:
    """For each row of bars that are drawn by parts, its parts that are not 0, from left to right."""
    rows: dict[int, list] = {}
    for part in (patch for patch in axes.patches if type(patch) is PathPatch):
        for left, right, top, bottom in boxes(axes, part.get_label()):
            rows.setdefault(round((top + bottom) / 2), []).append((left, right - left))
    return [[width for _, width in sorted(rows[row])] for row in sorted(rows)]


def marked(axes: Axes) -> float:
    """The row of bars that has a band behind it."""
    band = named(axes, "band")
    return band.get_y() + band.get_height() / 2


def words(axes: Axes, name: str = "") -> list[str]:
    """The short texts of these axes; name: only of the artist with this gid."""
    found = (artist for artist in axes.get_children() if isinstance(artist, Labels))
    return [text for artist in found if name in ("", artist.get_gid()) for text in artist.texts]


def texts(shown: Figure | Axes) -> list[str]:
    """What is written in these axes, or in a figure's first ones; without titles and ticks."""
    axes = shown.axes[0] if isinstance(shown, Figure) else shown
    return [text.get_text() for text in axes.texts]


def drawings(figure: Figure) -> list:
    """A list that grows whenever the whole figure is drawn."""
    drawn: list = []
    figure.canvas.mpl_connect("draw_event", drawn.append)
    return drawn
