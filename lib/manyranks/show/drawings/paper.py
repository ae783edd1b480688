"""The paper under every drawing: sharp, transparent, with the same colors everywhere."""

from collections.abc import Sequence

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.patches import FancyArrowPatch, Rectangle
from matplotlib.path import Path
from matplotlib.text import Text

from manyranks.show import style

# Communication has the color of what it moves: a gather is "gathered", a reduce-scatter "gradients".
KINDS = {
    "parameters": style.BLUE,
    "gathered": "#4B9CD3",
    "gradients": style.ORANGE,
    "optimizer": style.GREEN,
    "activations": style.PINK,
    "compute": "#6E7A8A",
}
INK, EDGE = style.INK, style.BLACK
NORMAL, LARGE, LEAST = 11.0, 13.0, 7.0  # points
WIDTH, GAP = 7.2, 0.3  # inches: of a drawing, between its panels
_FAINT = 0.2


class Figure(style.Figure):
    """Holds a drawing whose axes count inches from the upper left corner."""

    def __init__(self, wide: float, high: float):
        super().__init__(figsize=(wide, high), dpi=style.DOTS, layout="none", facecolor="none")
        FigureCanvasAgg(self)  # the canvas of a bare figure measures texts slowly
        self.unnamed: dict[str, None] = {}  # kinds of blocks that had no room for their text
        self.paper = self.add_axes((0, 0, 1, 1))
        self.paper.set(xlim=(0, wide), ylim=(high, 0))
        self.paper.axis("off")

    def write(self, x: float, y: float, text: str, room: Sequence[float] = (9, 9), size: float = NORMAL, **look) -> Text | None:
        """Writes a text around (x, y), smaller if its room is too small, and not at all below 7 points.

        room: width and height, in inches
        size: in points
        look: what else matplotlib's Text takes, such as ha="left"
        """
        found = self.paper.text(x, y, text, **{"ha": "center", "va": "center", "fontsize": size, "color": INK} | look)
        while text and size >= LEAST:
            box = found.get_window_extent()
            fits = min(room[0] * style.DOTS / box.width, room[1] * style.DOTS / box.height)
            if fits >= 1:
                return found
            size = min(size * fits // 0.25 * 0.25, size - 0.25)  # glyphs are whole pixels wide: one try may not do
            found.set_fontsize(size)
        found.remove()
        return None

    def rank(self, x: float, y: float, number: int, wide: float) -> None:
        """Writes "rank 3" around (x, y), or only the number if the room isn't that wide."""
        self.write(x, y, f"rank {number}" if wide >= 0.6 else f"{number}")

    def block(self, x: float, y: float, wide: float, high: float, kind: str, text: str = "", name: str = "", **look) -> None:
        """Fills a block in its kind's color, and writes the text if it has room.

        name: its gid, to find it by
        look: hollow=True for an outline only, or the text's size in points
        """
        hollow = look.pop("hollow", False)
        fill, edge = ("none", KINDS[kind]) if hollow else (KINDS[kind], EDGE)
        self.paper.add_patch(Rectangle((x, y), wide, high, facecolor=fill, edgecolor=edge, linewidth=0.6, gid=name))
        color = INK if hollow else on(fill)
        written = self.write(x + wide / 2, y + high / 2, text, (wide - 0.03, high), color=color, **look)
        if text and not written:
            self.unnamed.setdefault(kind)

    def key(self, x: float) -> None:
        """Adds a line at the bottom, from x on, with the names of the blocks whose text had no room."""
        wide, high = self.get_size_inches()
        if self.unnamed:
            self.set_size_inches(wide, high + 0.3)
            self.paper.set_ylim(high + 0.3, 0)
        for kind in self.unnamed:
            self.paper.add_patch(Rectangle((x, high + 0.02), 0.22, 0.22, facecolor=KINDS[kind], edgecolor=EDGE, linewidth=0.6))
            name = self.write(x + 0.3, high + 0.13, kind, ha="left")
            x += name.get_window_extent().width / style.DOTS + 0.55

    def ghost(self, x: float, y: float, wide: float, high: float, color: str) -> None:
        """Fills a block faintly, for what could be there. A text on it would be hard to read."""
        self.paper.add_patch(Rectangle((x, y), wide, high, facecolor=color, alpha=_FAINT, linewidth=0))

    def frame(self, x: float, y: float, wide: float, high: float) -> None:
        self.paper.add_patch(Rectangle((x, y), wide, high, facecolor="none", edgecolor=INK, linewidth=1.2))

    def arrow(self, ends: Sequence[Sequence[float]], color: str = INK, thick: float = 2.0, name: str = "") -> None:
        head = {"arrowstyle": "-|>", "mutation_scale": 6 * thick, "joinstyle": "miter"}
        self.paper.add_patch(FancyArrowPatch(path=Path(ends), color=color, linewidth=thick, gid=name, **head))


def on(color: str) -> str:
    """Chooses white or nearly black for a text on this color, whichever has more contrast."""
    return max("white", EDGE, key=lambda ink: contrast(ink, color))


def contrast(one: str, other: str) -> float:
    """Computes how well two colors tell apart, 1 to 21, as the Web Content Accessibility Guidelines do."""
    low, high = sorted(_luminance(color) for color in (one, other))
    return (high + 0.05) / (low + 0.05)


def _luminance(color: str) -> float:
    linear = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(color))
    return sum(share * c for share, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
