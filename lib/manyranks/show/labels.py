"""Short texts in a plot, all of them one artist: many Texts cost more than all else in a redraw."""

import functools
import string
from collections.abc import Callable, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PathCollection
from matplotlib.font_manager import FontProperties
from matplotlib.path import Path
from matplotlib.textpath import TextPath
from matplotlib.transforms import Affine2D, Bbox, ScaledTranslation, Transform

from manyranks.show import style

_POINT = 1 / 72  # inch
_LETTERS = string.ascii_letters + string.digits + " .,:%-–+×÷µ»!="
_BLANK = Path(np.empty((0, 2)), np.empty(0, Path.code_type))


@functools.lru_cache(maxsize=1024)
def _outline(text: str, size: float, left: float) -> Path:
    """The text around (0, 0), in points; its height is taken as a digit's, so that texts side by side have one baseline."""
    path = TextPath((0, 0), text, size=size)
    box = _extents(path)
    return path.transformed(Affine2D().translate(-box.x0 - left * box.width, -_digit_height(size) / 2))


@functools.lru_cache(maxsize=1024)
def word(text: str, size: float, left: float, weight: str = "normal") -> Path:
    """The same put together from letters, which takes a tenth of the time for a text that was never seen before."""
    letters, scale = [_letter(character, weight) for character in text or " "], size / 10
    starts = np.cumsum([0.0, *(wide for _, wide in letters)])
    moved = [np.add(path.vertices, (x, 0)) for (path, _), x in zip(letters, starts, strict=False)]
    vertices = np.concatenate(moved) - (left * starts[-1], 0)
    return Path(scale * vertices, np.concatenate([path.codes for path, _ in letters]))


@functools.lru_cache(maxsize=4096)
def width(text: str, size: float) -> float:
    """Returns the width of a word, in points."""
    return sum(_letter(character)[1] for character in text) * size / 10


class Labels(PathCollection):
    """Texts at places of these axes.

    size: points
    left: the share of a text that is to the left of its place
    outline: of a text of this size and left, around (0, 0); `word` for texts that are seldom the same
    name: the artist's gid
    color: style.BLACK for texts on a color
    """

    def __init__(
        self,
        axes: Axes,
        size: float = 9,
        left: float = 0.5,
        zorder: float = 4,
        within: Transform | None = None,
        outline: Callable[[str, float, float], Path] = _outline,
        name: str = "",
        color: str = style.INK,
    ):
        super().__init__([], offsets=[], offset_transform=within or axes.transData, linewidths=0, zorder=zorder, gid=name)
        self.texts, self.size, self.left, self.weight = [], size, left, "normal"
        self._outline, self._color = outline, color
        if outline is word:
            word(_LETTERS, 10, 0)  # a letter takes milliseconds, the first time: not while a control is moved
        self.set(transform=Affine2D().scale(_POINT) + axes.figure.dpi_scale_trans, clip_on=False)
        axes.add_collection(self, autolim=False)

    def write(self, places: Sequence[tuple[float, float]], texts: Sequence[object], colors: Sequence[str] = ()) -> None:
        """Shows each text at its place, in its color, where some are given."""
        self.texts = [str(text) for text in texts]
        self.set_paths([self._outline(text, self.size, self.left) for text in self.texts])
        self.set_offsets(np.reshape(places, (-1, 2)))
        self.set_facecolors(list(colors) or self._color)


def heading(axes: Axes, size: float = 11) -> Labels:
    """Makes Labels where the axes have their title, and like one, for a text at (0, 1) that changes.

    size: points
    """
    axes.set_title("title", color="none", fontsize=size)  # the layout leaves room for it
    word(_LETTERS, 10, 0, "bold")
    within = axes.transAxes + ScaledTranslation(0, (size - 1) * _POINT, axes.figure.dpi_scale_trans)
    labels = Labels(axes, size, 0, within=within, outline=functools.partial(word, weight="bold"), name="title")
    labels.weight = "bold"
    return labels


def _extents(path: Path) -> Bbox:
    """Returns path.get_extents() in a hundredth of its time: that looks at every curve, but letters end on corners."""
    corners = path.vertices[path.codes != Path.CLOSEPOLY]
    return Bbox([corners.min(axis=0), corners.max(axis=0)]) if len(corners) else Bbox.null()


@functools.cache
def _letter(character: str, weight: str = "normal") -> tuple[Path, float]:
    """Its outline in 10 points, from x = 0 and half a digit below y = 0, and its width with the space around it."""
    look = {"size": 10, "prop": FontProperties(weight=weight)}
    bars, between = (_extents(TextPath((0, 0), text, **look)) for text in ("||", f"|{character}|"))
    path = _BLANK if character.isspace() else TextPath((0, 0), character, **look)
    return Path(np.subtract(path.vertices, (0, _digit_height(10) / 2)), path.codes), between.width - bars.width


@functools.lru_cache(maxsize=64)
def _digit_height(size: float) -> float:
    return _extents(TextPath((0, 0), "0", size=size)).height
