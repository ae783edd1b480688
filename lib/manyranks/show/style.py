"""The style of every figure, and a new figure in it."""

import functools
import io
from collections.abc import Callable
from pathlib import Path

import matplotlib.figure
import matplotlib.style
from matplotlib.axes import Axes

STYLE = Path(__file__).with_name("style.mplstyle")
BLUE, ORANGE, GREEN, PINK, BLACK, YELLOW = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00"
MARKERS = "osD^vP"


class Figure(matplotlib.figure.Figure):
    """A figure that a notebook shows as a picture, also where nobody has chosen a matplotlib backend."""

    def _repr_png_(self) -> bytes:
        picture = io.BytesIO()
        self.savefig(picture, format="png")
        return picture.getvalue()


def styled(draw: Callable) -> Callable:
    """Draws in the course's style: every function that makes a figure is wrapped in this."""

    @functools.wraps(draw)
    def drawn(*args, **kwargs):
        with matplotlib.style.context(STYLE):
            return draw(*args, **kwargs)

    return drawn


def figure(columns: int = 1, rows: int = 1, width: float = 7.2, height: float = 3.6) -> tuple[Figure, list[Axes]]:
    """A Figure with its axes from left to right, top to bottom; pyplot never hears of it."""
    fig = Figure(figsize=(width, height), layout="constrained")
    return fig, list(fig.subplots(rows, columns, squeeze=False).flat)
