"""Chapter 06's pictures: which rank holds what of a product, of attention's heads, and where a layer communicates."""

from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle

from manyranks.show import drawings, style
from manyranks.show.looks import LOOKS, box, sheet
from manyranks.theory.names import nearest

_SIZES = {"b·s": 1.25, "h": 0.7, "f": 1.2}  # inches of a matrix
_STEPS = {"×": 0.28, "=": 0.28, "GELU": 0.62, "all-\nreduce": 0.8}  # inches of what stands between two
_EDGE = {"edgecolor": style.INK, "linewidth": 0.8}
_CENTER = {"ha": "center", "va": "center"}
_SAID = {"whole": "whole on each", "rows": "own rows", "columns": "own columns", "terms": "a term on each"}
_TITLES = {
    "column": "column-parallel: columns of A give columns of Y",
    "row": "row-parallel: rows of B give a term of the sum",
    "mlp": "the pair: what the first layer has cut, the second takes as it is",
}


class Matrix(NamedTuple):
    """cut: "whole", "rows", "columns", or "terms" of a sum, one on each rank. rows, columns: keys of _SIZES."""

    name: str
    rows: str
    columns: str
    cut: str = "whole"


def _paper(wide: float, low: float, high: float, title: str = "") -> tuple[style.Figure, Axes]:
    """Inches, from (0, low) at the lower left corner to (wide, high)."""
    fig, axes = sheet(wide, high - low)
    axes.set_ylim(low, high)
    axes.text(0.15, high - 0.07, title, fontsize=11, fontweight="bold", va="top")
    return fig, axes


@style.styled
def cut(kind: str, t: int = 4) -> style.Figure:
    """Draws the matrices of a cut product, with the rank that holds each part.

    kind: "column" (Y = X·A), "row" (Z = Y·B) or "mlp" (both, with GELU between them)
    t: ranks, 2 to 8
    Raises ValueError for another kind or t.
    """
    if kind not in _TITLES:
        raise ValueError(f"kind={kind!r}: {nearest(kind, _TITLES)}")
    if t not in range(2, len(LOOKS) + 1):
        raise ValueError(f"t={t!r}: a picture shows 2 to {len(LOOKS)} ranks")
    y = Matrix("Y", "b·s", "f", "columns")
    first = [Matrix("X", "b·s", "h"), "×", Matrix("A", "h", "f", "columns"), "GELU" if kind == "mlp" else "=", y]
    second = [
        "×",
        Matrix("B", "f", "h", "rows"),
        "=",
        Matrix("Z", "b·s", "h", "terms"),
        "all-\nreduce",
        Matrix("Z", "b·s", "h"),
    ]
    parts = {"column": first, "row": [y, *second]}.get(kind, first + second)
    fig, axes = _paper(max(sum(map(_width, parts)) + 0.4, 4.8), -1.12, 1.02, _TITLES[kind])
    x = 0.2
    for part in parts:
        middle = x + _width(part) / 2
        if isinstance(part, Matrix):
            _draw_matrix(axes, part, x, middle, t)
        elif len(part) == 1:
            axes.text(middle, 0, part, fontsize=13, **_CENTER)
        else:
            axes.annotate("", (x + _width(part) - 0.08, 0), (x + 0.08, 0), arrowprops={"arrowstyle": "->", "linewidth": 1.4})
            axes.text(middle, 0.06, part, ha="center", va="bottom", fontsize=9, linespacing=1.0)
        x += _width(part)
    return fig


def _width(part: Matrix | str) -> float:
    return _STEPS[part] if isinstance(part, str) else _SIZES[part.columns] + 0.32 * (part.cut == "terms")


def _draw_matrix(axes: Axes, matrix: Matrix, x: float, middle: float, t: int) -> None:
    name, rows, columns, cut = matrix
    high, wide = _SIZES[rows], _SIZES[columns]
    if cut == "whole":
        axes.add_patch(Rectangle((x, -high / 2), wide, high, facecolor="#f2f2f2", **_EDGE))
    for rank in reversed(range(t * (cut != "whole"))):
        back = 0.32 * rank / (t - 1)
        places = {
            "columns": ((x + rank * wide / t, -high / 2), wide / t, high, rank, str(rank)),
            "rows": ((x, high / 2 - (rank + 1) * high / t), wide, high / t, rank, str(rank)),
            "terms": ((x + back, back / 2 - high / 2), wide, high - 0.16, rank, "" if rank else "+"),
        }
        box(axes, *places[cut])
    axes.text(middle, -0.68, f"$\\bf{{{name}}}$  {rows} × {columns}", ha="center", va="top", fontsize=9)
    axes.text(middle, -0.88, _SAID[cut], ha="center", va="top", fontsize=8, style="italic")


def heads(heads: int, kv_heads: int, t: int) -> style.Figure:
    """Draws the query heads of each rank, and below them the key/value heads that they read.

    heads: query heads, at most 32
    kv_heads: key/value heads; with t > kv_heads several ranks have the same
    t: ranks, at most 16
    Raises ValueError for other numbers, and for those that don't divide each other as they must.
    """
    numbers = f"heads={heads!r}, kv_heads={kv_heads!r}, t={t!r}"
    if not all(type(n) is int and n >= 1 for n in (heads, kv_heads, t)) or heads > 32 or t > 16:
        raise ValueError(f"{numbers}: give whole numbers from 1 up, at most 32 heads and 16 ranks")
    if heads % kv_heads or heads % t or (kv_heads % t and t % kv_heads):
        raise ValueError(f"{numbers}: kv_heads and t must divide heads, and one of kv_heads and t the other")
    held = []
    for rank in range(t):
        own = range(rank * heads // t, (rank + 1) * heads // t)
        read = dict.fromkeys(query * kv_heads // heads for query in own)
        held.append([(f"query {query}", "compute") for query in own] + [(f"key, value {head}", "parameters") for head in read])
    return drawings.who_holds(held, height=0.45 * len(held[0]))


# Where a layer communicates.

_BLOCKS, _END = (("q, k, v", "core", "output"), ("up", "GELU", "down")), 0.48  # inches for what is sent
_ALL, _OWN, _INSIDE = "all tokens, on each rank", "own tokens", "own heads or columns"
_SENDS, _AGAIN = "a collective", "gathered again"
_LOOKS = {_ALL: {"facecolor": "#e0e0e0"}, _INSIDE: {"facecolor": "#9ecae1"}, _OWN: {"facecolor": "#a1d99b", "hatch": "...."}}
_LOOKS |= {_SENDS: {"facecolor": style.ORANGE}, _AGAIN: {"facecolor": "#ffd9b3", "linestyle": "--"}}
_BACK = "read from\nright to left"
# (variant, direction) -> what is sent where a block begins (f) and where it ends (g), in backward's order of time; in all;
# their letters and whose they are: arXiv 1909.08053's, and those of arXiv 2205.05198, whose f and f̄ are not drawn.
_SENT = {
    ("TP", "forward ⟶"): ("", "all-reduce", "2 all-reduces", "fg", "f, g: names of\nMegatron-LM"),
    ("TP", "backward ⟵"): ("all-reduce", "", "2 all-reduces", "fg", _BACK),
    ("TP + SP", "forward ⟶"): ("all-gather", "reduce-scatter", "2 all-gathers", "gḡ", "g, ḡ: names of\nKorthikanti et al."),
    ("TP + SP", "backward ⟵"): ("reduce-scatter|all-gather again", "all-gather", "4 all-gathers", "gḡ", _BACK),
}


@style.styled
def collectives() -> style.Figure:
    """Draws where in a layer each collective stands, forward and backward, with tensor parallelism alone and with SP too.

    Source: arXiv 2205.05198, figures 4 and 5.
    """
    fig, axes = _paper(9.6, 0.3, 5.6)
    for number, ((variant, direction), (f, g, counted, letters, note)) in enumerate(_SENT.items()):
        y, split = 4.25 - 1.12 * number - 0.18 * (number > 1), variant != "TP"
        axes.text(0.08, y + 0.42, f"{variant}\n{direction}", va="center", fontsize=9)
        axes.text(0.08, y + 0.2, note, va="top", fontsize=7.5, style="italic", linespacing=1.1)
        axes.text(9.52, y + 0.42, counted + "\n2 reduce-scatters" * split, va="center", ha="right", fontsize=8)
        _draw_layer(axes, y, _boxes(_OWN if split else _ALL, _end(f, letters[0]), _end(g, letters[1])))
    handles = [Patch(label=name, **look, **_EDGE) for name, look in _LOOKS.items()]
    fig.legend(handles=handles, loc="upper left", ncols=5, bbox_to_anchor=(0.005, 1.0))
    return fig


def _end(sent: str, letter: str) -> list[tuple[str, float, str, str]]:
    """Name, inches, look and letter of each box where a block begins or ends."""
    names = sent.split("|")
    return [(name, _END / len(names), _AGAIN if k else _SENDS, "" if k else letter) for k, name in enumerate(names)]


def _boxes(outside: str, f: list, g: list) -> list[tuple[str, float, str, str]]:
    """The same of a layer's boxes, from its input to its output."""
    before, after = [("norm", 0.44, outside, "")], [("dropout", 0.52, outside, ""), ("+", 0.22, outside, "")]
    return [box for names in _BLOCKS for box in (*before, *f, *((name, 0.5, _INSIDE, "") for name in names), *g, *after)]


def _draw_layer(axes: Axes, y: float, boxes: list[tuple[str, float, str, str]]) -> None:
    x = 1.13
    for name, wide, look, letter in boxes:
        sends = look in (_SENDS, _AGAIN)
        low, high = (0, 0.84) if sends else (0.14, 0.56)
        if name:
            axes.add_patch(Rectangle((x, y + low), wide, high, **_LOOKS[look], **_EDGE))
        else:
            axes.plot([x, x + wide], [y + 0.42] * 2, color=style.INK, linestyle="-", linewidth=0.8)
        text = {"fontsize": 7.5, "rotation": 90 * sends, "bbox": style.PAPER if look == _OWN else None} | _CENTER
        axes.text(x + wide / 2, y + 0.42, name, color="white" if look == _SENDS else style.BLACK, **text)
        axes.text(x + _END / 2, y + 0.87, letter, ha="center", va="bottom", fontsize=9, style="italic")
        x += wide
