"""The places of a figure's texts, without looking at it."""

from itertools import combinations

from matplotlib.figure import Figure

WIDEST = 9.5  # inches: a laptop's screen


def assert_readable(figure: Figure) -> None:
    """It is no wider than a laptop's screen; its texts lie inside it, and none on another."""
    figure.draw_without_rendering()
    assert figure.get_figwidth() <= WIDEST
    found = [text for axes in figure.axes for text in axes.texts if text.get_text()]
    boxes = [(text.get_text(), text.get_window_extent()) for text in found]
    assert all(figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1 for _, box in boxes)
    assert all(figure.bbox.y0 <= box.y0 and box.y1 <= figure.bbox.y1 for _, box in boxes)
    pairs = combinations([(text, box, box.shrunk(0.99, 0.9)) for text, box in boxes], 2)
    assert [(one, other) for (one, _, inner), (other, box, _) in pairs if inner.overlaps(box)] == []
