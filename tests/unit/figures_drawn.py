"""The places of a figure's texts, without looking at it."""

from itertools import combinations

import numpy as np
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from manyranks.show.labels import Labels

WIDEST = 9.5  # inches: a laptop's screen


def assert_readable(figure: Figure) -> None:
    """It is no wider than a laptop's screen; its texts lie inside it, and none on another."""
    figure.draw_without_rendering()
    assert figure.get_figwidth() <= WIDEST
    found = [text for axes in figure.axes for text in axes.texts if text.get_text()]
    _assert_apart(figure, [(text.get_text(), text.get_window_extent()) for text in found])


def assert_inside(figure: Figure) -> None:
    """It is readable, and what is written at the axes, too, is inside it."""
    assert_readable(figure)
    box = figure.get_tightbbox()  # inches
    assert min(box.x0, box.y0) > -0.02
    assert box.x1 < figure.get_figwidth() + 0.02
    assert box.y1 < figure.get_figheight() + 0.02


def assert_all_readable(figure: Figure) -> None:
    """The same of every text: those of ticks, titles, legends and Labels, too."""
    figure.draw_without_rendering()
    _assert_apart(figure, texts(figure))


def _assert_apart(figure: Figure, found: list[tuple[str, Bbox]]) -> None:
    page = figure.bbox.padded(1)
    assert [text for text, box in found if not (page.contains(*box.min) and page.contains(*box.max))] == []
    pairs = combinations([(text, box, box.shrunk(0.99, 0.9)) for text, box in found], 2)
    assert [(one, other) for (one, _, inner), (other, box, _) in pairs if inner.overlaps(box)] == []


def texts(figure: Figure) -> list[tuple[str, Bbox]]:
    """Each text that can be seen, with its box in pixels: of axes, legends, and those of Labels."""
    hidden = set()
    for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
        low, high = sorted(axis.get_view_interval()) if axis.axes.axison else (1, 0)
        out = (tick for tick in (*axis.majorTicks, *axis.minorTicks) if not low <= tick.get_loc() <= high)
        hidden |= {label for tick in out for label in (tick.label1, tick.label2)}
    found = [each for each in figure.findobj(Text) if each.get_visible() and each.get_text().strip() and each not in hidden]
    boxes = [(each.get_text(), each.get_window_extent()) for each in found if each.get_color() != "none"]
    for words in figure.findobj(Labels):
        places = words.get_offset_transform().transform(words.get_offsets())
        for text, path, place in zip(words.texts, words.get_paths(), places, strict=True):
            if text.strip() and np.isfinite(place).all():
                corners = path.get_extents().get_points() * figure.dpi / 72 + place
                boxes.append((text, Bbox(corners)))
    return [(text, box) for text, box in boxes if box.width > 1 and box.height > 1]
