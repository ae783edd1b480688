"""What a row of bars shows: read off its artists."""

from matplotlib.patches import PathPatch
from matplotlib.path import Path

from manyranks.show import bars


def widths(panel: bars.Bars) -> list[list[float]]:
    """For each row, those of its parts that are not 0, from left to right."""
    rows: dict[int, list] = {}
    for boxes in (artist for artist in panel.moving if isinstance(artist, PathPatch)):
        for box in (Path(corners).get_extents() for corners in boxes.get_path().to_polygons()):
            rows.setdefault(round((box.y0 + box.y1) / 2), []).append((box.x0, box.width))
    return [[width for _, width in sorted(rows[row])] for row in sorted(rows)]


def noted_texts(monkeypatch) -> list[list[str]]:
    """A list that from now on gets the words of each Labels that is updated."""
    found: list[list[str]] = []
    monkeypatch.setattr(bars.Labels, "update", lambda self, places, words, colours=(): found.append(list(words)))
    return found
