"""The style of every figure, the looks of ranks and of the parts of a step, and a new figure."""

import base64
import functools
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib.figure
import matplotlib.style
import PIL.Image
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

STYLE = Path(__file__).with_name("style.mplstyle")
BLUE, ORANGE, GREEN, PINK, YELLOW = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00"
# A page is white, or #111111 in JupyterLab's dark theme, and a figure doesn't know which: INK can be read on both. An explorer
# is brighter in the dark theme (page.PICTURE): no gray has 4.5 times the light of both pages.
INK = "#767676"
BLACK = "#111111"  # on a color
FAINT = "#7878782a"  # behind what is meant
PAPER = {"boxstyle": "square,pad=0.08", "facecolor": "white", "edgecolor": "none"}  # behind a text on a hatch
MARKERS = "osD^vP"
_LONGEST = 400  # letters of a figure in words
DOTS = 100  # per inch, as a page shows a figure; a picture has twice as many

# A rank's color and hatch.
LOOKS = (("#9ecae1", ""), ("#fdae6b", "////"), ("#a1d99b", "...."), ("#e7a6c8", "\\\\\\\\"))
LOOKS += (("#ffe08a", "xxxx"), ("#cccccc", "----"), ("#b39ddb", "||||"), ("#80cbc4", "oo"))
# For each of StepTime.parts its name in a picture, color and hatch.
STEP = {"compute": ("compute", BLUE, ""), "tensor": ("TP messages", ORANGE, "////")}
STEP |= {"context": ("CP messages", PINK, "oo"), "expert": ("tokens to experts", "#8172b3", "xxxx")}
STEP |= {"pipeline": ("PP messages", "#56B4E9", "++"), "bubble": ("bubble", "#b0b0b0", "\\\\\\\\")}
STEP |= {"data": ("DP messages", YELLOW, "----"), "optimizer": ("optimizer", GREEN, "")}
HATCH = {"edgecolor": "#666666", "linewidth": 0.0}


class Figure(matplotlib.figure.Figure):
    """A figure that a notebook shows as a sharp picture, also where nobody has chosen a matplotlib backend."""

    def _repr_png_(self) -> bytes:
        picture = io.BytesIO()
        self.savefig(picture, format="png", dpi=2 * DOTS, metadata={"Software": None})
        return in_few_colors(picture.getvalue())

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> tuple[dict, dict]:
        wide, high = (round(inches * DOTS) for inches in self.get_size_inches())
        png = base64.b64encode(self._repr_png_()).decode()
        return {"image/png": png}, {"image/png": {"width": wide, "height": high, "alt": self.described()}}

    def described(self) -> str:
        """The figure in words, for those who don't see it: what its axes show, and all names in legends and drawings."""
        found = []
        for axes in self.axes:
            over = " over ".join(filter(None, (axes.get_ylabel(), axes.get_xlabel())))
            found += [axes.get_title("left"), axes.get_title(), over]
            found += axes.get_legend_handles_labels()[1] + [text.get_text() for text in axes.texts]
        said = "; ".join(dict.fromkeys(" ".join(text.split()) for text in found if text.strip()))
        return said if len(said) <= _LONGEST else f"{said[: _LONGEST - 1]}…"


def in_few_colors(png: bytes) -> bytes:
    """Returns the picture with 128 colors, which is a third as large: drawings have no more."""
    small, picture = io.BytesIO(), PIL.Image.open(io.BytesIO(png)).convert("RGBA")
    picture.quantize(128, PIL.Image.Quantize.FASTOCTREE, dither=PIL.Image.Dither.NONE).save(small, "png", optimize=True)
    return small.getvalue()


def styled(draw: Callable) -> Callable:
    """Draws in the course's style: every function that makes a figure is wrapped in this."""

    @functools.wraps(draw)
    def drawn(*args, **kwargs):
        with context():
            return draw(*args, **kwargs)

    return drawn


def context():
    return matplotlib.style.context(STYLE)


def figure(columns: int = 1, rows: int = 1, width: float = 7.2, height: float = 3.6, **more) -> tuple[Figure, list[Axes]]:
    """A Figure with its axes from left to right, top to bottom; pyplot never hears of it.

    more: as subplots takes it
    """
    fig = Figure(figsize=(width, height), layout="constrained")
    return fig, list(fig.subplots(rows, columns, squeeze=False, **more).flat)


def sheet(wide: float, high: float) -> tuple[Figure, Axes]:
    """A figure of so many inches, whose axes count in them from its lower left corner."""
    fig = Figure(figsize=(wide, high), layout="none")
    axes = fig.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, wide), ylim=(0, high))
    axes.axis("off")
    return fig, axes


def box(axes: Axes, corner: tuple, wide: float, high: float, look: int, text: str = "", size: float = 8) -> None:
    """A rectangle that looks like rank `look`, with a text on white."""
    color, hatch = LOOKS[look % len(LOOKS)]
    axes.add_patch(Rectangle(corner, wide, high, facecolor=color, hatch=hatch, **HATCH))
    axes.add_patch(Rectangle(corner, wide, high, facecolor="none", edgecolor=INK, linewidth=0.8))
    if text:
        look = {"ha": "center", "va": "center", "fontsize": min(size, 36 * min(wide, high)), "color": BLACK}
        axes.text(corner[0] + wide / 2, corner[1] + high / 2, text, bbox=PAPER, **look)
