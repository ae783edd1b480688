"""The looks of ranks and of the parts of a step in every picture, and boxes of pictures in inches."""

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from manyranks.show import style

# A rank's color and hatch.
LOOKS = (("#9ecae1", ""), ("#fdae6b", "////"), ("#a1d99b", "...."), ("#e7a6c8", "\\\\\\\\"))
LOOKS += (("#ffe08a", "xxxx"), ("#cccccc", "----"), ("#b39ddb", "||||"), ("#80cbc4", "oo"))
# For each of StepTime.parts its name in a picture, color and hatch.
STEP = {"compute": ("compute", style.BLUE, ""), "tensor": ("TP messages", style.ORANGE, "////")}
STEP |= {"context": ("CP messages", style.PINK, "oo"), "expert": ("tokens to experts", "#8172b3", "xxxx")}
STEP |= {"pipeline": ("PP messages", "#56B4E9", "++"), "bubble": ("bubble", "#b0b0b0", "\\\\\\\\")}
STEP |= {"data": ("DP messages", style.YELLOW, "----"), "optimizer": ("optimizer", style.GREEN, "")}
HATCH = {"edgecolor": "#666666", "linewidth": 0.0}


def sheet(wide: float, high: float) -> tuple[style.Figure, Axes]:
    """A figure of so many inches, whose axes count in them from its lower left corner."""
    fig = style.Figure(figsize=(wide, high), layout="none")
    axes = fig.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, wide), ylim=(0, high))
    axes.axis("off")
    return fig, axes


def box(axes: Axes, corner: tuple, wide: float, high: float, look: int, text: str = "", size: float = 8) -> None:
    """A rectangle that looks like rank `look`, with a text on white."""
    color, hatch = LOOKS[look % len(LOOKS)]
    axes.add_patch(Rectangle(corner, wide, high, facecolor=color, hatch=hatch, **HATCH))
    axes.add_patch(Rectangle(corner, wide, high, facecolor="none", edgecolor=style.INK, linewidth=0.8))
    if text:
        look = {"ha": "center", "va": "center", "fontsize": min(size, 36 * min(wide, high)), "color": style.BLACK}
        axes.text(corner[0] + wide / 2, corner[1] + high / 2, text, bbox=style.PAPER, **look)
