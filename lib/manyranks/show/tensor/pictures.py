"""Chapter 06's pictures: which rank holds what of a product, of attention's heads, and where a layer communicates."""

from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle

from manyranks.show import drawings, style
from manyranks.show.looks import LOOKS, box, sheet
from manyranks.theory.names import Named

_SIZES = {"b·s": 1.25, "h": 0.7, "f": 1.2}  # inches of a matrix
_STEPS = {"×": 0.28, "=": 0.28, "GELU": 0.62, "all-\nreduce": 0.8}  # inches of what stands between two
_EDGE = {"edgecolor": style.INK, "linewidth": 0.8}
_CENTER = {"ha": "center", "va": "center"}
_SAID = {"whole": "whole on each", "rows": "own rows", "columns": "own columns", "terms": "a term on each"}


class Matrix(NamedTuple):
    """cut: "whole", "rows", "columns", or "terms" of a sum, one on each rank. rows, columns: keys of _SIZES."""

    name: str
    rows: str
    columns: str
    cut: str = "whole"


_Y, _FIRST = Matrix("Y", "b·s", "f", "columns"), (Matrix("X", "b·s", "h"), "×", Matrix("A", "h", "f", "columns"))
_SECOND = "×", Matrix("B", "f", "h", "rows"), "=", Matrix("Z", "b·s", "h", "terms"), "all-\nreduce", Matrix("Z", "b·s", "h")
# What `cut` draws from left to right, below its title.
_CUTS = Named("kind", {"column": ("column-parallel: columns of A give columns of Y", (*_FIRST, "=", _Y))})
_CUTS |= {"row": ("row-parallel: rows of B give a term of the sum", (_Y, *_SECOND))}
_CUTS |= {"mlp": ("the pair: what the first layer has cut, the second takes as it is", (*_FIRST, "GELU", _Y, *_SECOND))}


@style.styled
def cut(kind: str, t: int = 4) -> style.Figure:
    """Draws the matrices of a cut product, with the rank that holds each part.

    kind: "column" (Y = X·A), "row" (Z = Y·B) or "mlp" (both, with GELU between them); t: ranks, 2 to 8
    Raises ValueError for another kind or t.
    """
    title, parts = _CUTS[kind]
    if t not in range(2, len(LOOKS) + 1):
        raise ValueError(f"t={t!r}: a picture shows 2 to {len(LOOKS)} ranks")
    fig, axes = sheet(max(sum(map(_width, parts)) + 0.4, 4.8), 2.14)
    axes.set_ylim(-1.12, 1.02)  # a matrix's middle is at 0
    axes.text(0.15, 0.95, title, fontsize=11, fontweight="bold", va="top")
    x = 0.2
    for part in parts:
        end = x + _width(part)
        middle = (x + end) / 2
        if isinstance(part, Matrix):
            _draw_matrix(axes, part, x, t)
            axes.text(middle, -0.68, f"$\\bf{{{part.name}}}$  {part.rows} × {part.columns}", ha="center", va="top", fontsize=9)
            axes.text(middle, -0.88, _SAID[part.cut], ha="center", va="top", fontsize=8, style="italic")
        elif len(part) == 1:
            axes.text(middle, 0, part, fontsize=13, **_CENTER)
        else:
            axes.annotate("", (end - 0.08, 0), (x + 0.08, 0), arrowprops={"arrowstyle": "->", "linewidth": 1.4})
            axes.text(middle, 0.06, part, ha="center", va="bottom", fontsize=9, linespacing=1.0)
        x = end
    return fig


def _width(part: Matrix | str) -> float:
    return _STEPS[part] if isinstance(part, str) else _SIZES[part.columns] + 0.32 * (part.cut == "terms")


def _draw_matrix(axes: Axes, matrix: Matrix, x: float, t: int) -> None:
    high, wide = _SIZES[matrix.rows], _SIZES[matrix.columns]
    if matrix.cut == "whole":
        axes.add_patch(Rectangle((x, -high / 2), wide, high, facecolor="#f2f2f2", **_EDGE))
        return
    for rank in reversed(range(t)):
        back = 0.32 * rank / (t - 1)
        place = {"columns": ((x + rank * wide / t, -high / 2), wide / t, high)}
        place |= {"rows": ((x, high / 2 - (rank + 1) * high / t), wide, high / t)}
        place |= {"terms": ((x + back, back / 2 - high / 2), wide, high - 0.16)}
        text = str(rank) if matrix.cut != "terms" else "" if rank else "+"
        box(axes, *place[matrix.cut], rank, text)


def heads(heads: int, kv_heads: int, t: int) -> style.Figure:
    """Draws the query heads of each rank, and below them the key/value heads that they read.

    heads: query heads, at most 32; kv_heads: key/value heads; with t > kv_heads several ranks have the same; t: ranks, at most
    16. Raises ValueError for other numbers, and for those that don't divide each other as they must.
    """
    whole = all(type(n) is int and n >= 1 for n in (heads, kv_heads, t)) and heads <= 32 and t <= 16
    if not whole or heads % kv_heads or heads % t or (kv_heads % t and t % kv_heads):
        give = "give whole numbers, at most 32 heads and 16 ranks; kv_heads and t divide heads, and one of them the other"
        raise ValueError(f"heads={heads!r}, kv_heads={kv_heads!r}, t={t!r}: {give}")
    held = []
    for rank in range(t):
        own = range(rank * heads // t, (rank + 1) * heads // t)
        read = dict.fromkeys(query * kv_heads // heads for query in own)
        held.append([(f"query {query}", "compute") for query in own] + [(f"key, value {head}", "parameters") for head in read])
    return drawings.who_holds(held, height=0.45 * len(held[0]))


# Where a layer communicates: what happens in it, from its input to its output. f and g are what is sent.
_BLOCKS = ("q, k, v", "core", "output"), ("up", "GELU", "down")
_LAYER = [name for block in _BLOCKS for name in ("norm", "f", *block, "g", "dropout", "+")]
_INCHES = {"norm": 0.44, "dropout": 0.52, "+": 0.22, "f": 0.48, "g": 0.48}  # else 0.5
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
    fig, axes = sheet(9.6, 5.3)
    for number, ((variant, direction), (f, g, counted, letters, note)) in enumerate(_SENT.items()):
        y, split = 3.95 - 1.12 * number - 0.18 * (number > 1), variant != "TP"
        axes.text(0.08, y + 0.42, f"{variant}\n{direction}", va="center", fontsize=9)
        axes.text(0.08, y + 0.2, note, va="top", fontsize=7.5, style="italic", linespacing=1.1)
        axes.text(9.52, y + 0.42, counted + "\n2 reduce-scatters" * split, va="center", ha="right", fontsize=8)
        x, sent = 1.13, {"f": (f, letters[0]), "g": (g, letters[1])}
        for name in _LAYER:
            wide = _INCHES.get(name, 0.5)
            if name in sent:
                _draw_sent(axes, x, y, wide, *sent[name])
            else:
                look = _INSIDE if name not in _INCHES else _OWN if split else _ALL
                axes.add_patch(Rectangle((x, y + 0.14), wide, 0.56, **_LOOKS[look], **_EDGE))
                paper = style.PAPER if look == _OWN else None
                axes.text(x + wide / 2, y + 0.42, name, color=style.BLACK, fontsize=7.5, bbox=paper, **_CENTER)
            x += wide
    handles = [Patch(label=name, **look, **_EDGE) for name, look in _LOOKS.items()]
    fig.legend(handles=handles, loc="upper left", ncols=5, bbox_to_anchor=(0.005, 1.0))
    return fig


def _draw_sent(axes: Axes, x: float, y: float, wide: float, names: str, letter: str) -> None:
    """What is sent where a block begins or ends, side by side, below its letter; a line where nothing is."""
    axes.text(x + wide / 2, y + 0.87, letter, ha="center", va="bottom", fontsize=9, style="italic")
    axes.plot([x, x + wide], [y + 0.42] * 2, color=style.INK, linestyle="-", linewidth=0.8, zorder=0)
    each = [name for name in names.split("|") if name]
    for k, name in enumerate(each):
        left, part, (look, ink) = x + k * wide / len(each), wide / len(each), (_AGAIN, style.BLACK) if k else (_SENDS, "white")
        axes.add_patch(Rectangle((left, y), part, 0.84, **_LOOKS[look], **_EDGE))
        axes.text(left + part / 2, y + 0.42, name, color=ink, fontsize=7.5, rotation=90, **_CENTER)
