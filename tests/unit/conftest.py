"""Fixtures that the tests of this folder share."""

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg


class Blank(FigureCanvasAgg):
    """A canvas that nothing is drawn on."""

    def draw(self):
        pass

    def copy_from_bbox(self, bbox):
        pass

    def restore_region(self, region):
        pass

    def buffer_rgba(self):
        return np.zeros((1, 1, 4), np.uint8)


@pytest.fixture
def undrawn(monkeypatch):
    """Explorers compute and write, and draw nothing, which takes four fifths of their time: for tests that see no picture."""
    monkeypatch.setattr("manyranks.show.explorer.FigureCanvasAgg", Blank)
    monkeypatch.setattr(Axes, "draw_artist", lambda axes, artist: None)
