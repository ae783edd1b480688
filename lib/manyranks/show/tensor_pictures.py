"""Chapter 06's pictures: which rank holds what of a product, of attention's heads, and where a layer communicates."""

from collections.abc import Iterator
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle

from manyranks.show import style
from manyranks.show.looks import HATCH, LOOKS, box
from manyranks.theory.names import nearest

_WHOLE = "#f2f2f2"
_SIZES = {"b·s": 1.25, "h": 0.7, "f": 1.2}  # inches
_EDGE = {"edgecolor": style.INK, "linewidth": 0.8}


class Matrix(NamedTuple):
    """cut: "whole", "rows", "columns", or "terms" of a sum, one on each rank. rows, columns: keys of _SIZES."""

    name: str
    rows: str
    columns: str
    cut: str = "whole"


class Step(NamedTuple):
    """What stands between two matrices. wide: inches."""

    text: str
    wide: float = 0.28


_SAID = {"whole": "whole on each", "rows": "own rows", "columns": "own columns", "terms": "a term on each"}
_TIMES, _GIVES = Step("×"), Step("=")
_KINDS = ("column", "row", "mlp")
_TITLES = {
    "column": "column-parallel: columns of A give columns of Y",
    "row": "row-parallel: rows of B give a term of the sum",
    "mlp": "the pair: what the first layer has cut, the second takes as it is",
}


@style.styled
def cut(kind: str, t: int = 4, sequence_parallel: bool = False, messages: bool = True) -> style.Figure:
    """The matrices of a cut product, with the rank that holds each part.

    kind: "column" (Y = X·A), "row" (Z = Y·B) or "mlp" (both, with GELU between them). sequence_parallel: activations outside
    the pair are cut by tokens. messages: a last line says what is sent. Raises ValueError for another kind, or t not 2 to 8.
    """
    if kind not in _KINDS:
        raise ValueError(f"kind={kind!r}: {nearest(kind, _KINDS)}")
    if t not in range(2, len(LOOKS) + 1):
        raise ValueError(f"t={t!r}: a picture shows 2 to {len(LOOKS)} ranks")
    parts = _parts(kind, sequence_parallel)
    wide = max(sum(_width(part) for part in parts) + 0.4, 4.8)
    low, high = -1.4 if messages else -1.12, 1.02
    fig = style.Figure(figsize=(wide, high - low), layout="none")
    axes = fig.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, wide), ylim=(low, high))
    axes.axis("off")
    axes.text(0.15, 0.96, _TITLES[kind], fontsize=11, fontweight="bold", va="top")
    x = 0.2
    for part in parts:
        if isinstance(part, Matrix):
            _draw_matrix(axes, part, x, t)
        else:
            _draw_step(axes, part, x)
        x += _width(part)
    if messages:
        axes.text(0.15, -1.33, _messages(kind, sequence_parallel), fontsize=9, va="bottom")
    return fig


def _parts(kind: str, sequence_parallel: bool) -> list[Matrix | Step]:
    into = [Matrix("X", "b·s", "h")]
    if sequence_parallel:
        into = [Matrix("X", "b·s", "h", "rows"), Step("all-gather", 0.85), *into]
    gives = Step("GELU", 0.62) if kind == "mlp" else _GIVES
    first = [*into, _TIMES, Matrix("A", "h", "f", "columns"), gives, Matrix("Y", "b·s", "f", "columns")]
    out = Matrix("Z", "b·s", "h", "rows" if sequence_parallel else "whole")
    summed = Step("reduce-\nscatter" if sequence_parallel else "all-\nreduce", 0.8)
    second = [_TIMES, Matrix("B", "f", "h", "rows"), _GIVES, Matrix("Z", "b·s", "h", "terms"), summed, out]
    if kind == "column":
        return first
    if kind == "row":
        return [Matrix("Y", "b·s", "f", "columns"), *second]
    return [*first, *second]


def _messages(kind: str, sequence_parallel: bool) -> str:
    """What is sent, in each direction."""
    first = "nothing", "an all-reduce (f)"
    second = "an all-reduce (g)", "nothing"
    if sequence_parallel:
        first = "an all-gather", "a reduce-scatter, and the all-gather again"
        second = "a reduce-scatter", "an all-gather"
    forward, backward = {"column": first, "row": second}.get(kind, tuple(zip(first, second, strict=True)))
    if kind == "mlp":
        said = [tuple(word for word in pair if word != "nothing") for pair in (forward, backward[::-1])]
        forward, backward = (" and ".join(words) for words in said)
    return f"forward sends: {forward};   backward: {backward}"


def _width(part: Matrix | Step) -> float:
    if isinstance(part, Step):
        return part.wide
    return _SIZES[part.columns] + (0.32 if part.cut == "terms" else 0.0)


def _draw_step(axes: Axes, step: Step, x: float) -> None:
    if step.wide < 0.5:
        axes.text(x + step.wide / 2, 0, step.text, ha="center", va="center", fontsize=13)
        return
    axes.annotate("", (x + step.wide - 0.08, 0), (x + 0.08, 0), arrowprops={"arrowstyle": "->", "linewidth": 1.4})
    axes.text(x + step.wide / 2, 0.06, step.text, ha="center", va="bottom", fontsize=9, linespacing=1.0)


def _draw_matrix(axes: Axes, matrix: Matrix, x: float, t: int) -> None:
    high, wide = _SIZES[matrix.rows], _SIZES[matrix.columns]
    below = -high / 2
    if matrix.cut == "whole":
        axes.add_patch(Rectangle((x, below), wide, high, facecolor=_WHOLE, **_EDGE))
    elif matrix.cut == "terms":
        for rank in reversed(range(t)):
            step = 0.32 * rank / (t - 1)
            box(axes, (x + step, below + step / 2), wide, high - 0.16, rank, "" if rank else "+")
    else:
        for rank in range(t):
            if matrix.cut == "columns":
                box(axes, (x + rank * wide / t, below), wide / t, high, rank, str(rank))
            else:
                box(axes, (x, below + high - (rank + 1) * high / t), wide, high / t, rank, str(rank))
    middle = x + _width(matrix) / 2
    axes.text(middle, -0.68, f"$\\bf{{{matrix.name}}}$  {matrix.rows} × {matrix.columns}", ha="center", va="top", fontsize=9)
    axes.text(middle, -0.88, _SAID[matrix.cut], ha="center", va="top", fontsize=8, style="italic")


@style.styled
def heads(heads: int, kv_heads: int, t: int) -> style.Figure:
    """Query heads, below them the key/value heads that they read, rank by rank; with t > kv_heads several ranks have the same.

    Raises ValueError for more than 32 heads or 16 ranks, and for numbers that do not divide each other as they must.
    """
    numbers = f"heads={heads!r}, kv_heads={kv_heads!r}, t={t!r}"
    if not all(type(n) is int and n >= 1 for n in (heads, kv_heads, t)) or heads > 32 or t > 16:
        raise ValueError(f"{numbers}: give whole numbers from 1 up, at most 32 heads and 16 ranks")
    if heads % kv_heads or heads % t or (kv_heads % t and t % kv_heads):
        raise ValueError(f"{numbers}: kv_heads and t must divide heads, and one of kv_heads and t the other")
    smaller = min(1, 8.0 / (0.36 * heads + 0.26 * t))
    side, gap = 0.36 * smaller, 0.26 * smaller
    wide = max(heads * side + t * gap + 1.2, 5.2)
    low = 0.1 if t > kv_heads else 0.4
    fig = style.Figure(figsize=(wide, 2.5 - low), layout="none")
    axes = fig.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, wide), ylim=(low, 2.5))
    axes.axis("off")
    own, group = heads // t, heads // kv_heads
    for rank in range(t):
        left = 1.18 + rank * (own * side + gap)
        _rank_of_heads(axes, rank, left, side, range(rank * own, (rank + 1) * own), group)
    for y, text in ((1.98 - side / 2 + 0.07, "rank"), (1.42, "queries"), (0.62, "keys, values")):
        axes.text(1.0, y + side / 2, text, ha="right", va="center", fontsize=9)
    title = f"{_several(heads, 'query head')} and {_several(kv_heads, 'key/value head')} on {_several(t, 'rank')}"
    axes.text(0.15, 2.42, title, fontsize=11, fontweight="bold", va="top")
    return fig


def _several(number: int, name: str) -> str:
    return f"{number} {name}{'s' * (number > 1)}"


def _rank_of_heads(axes: Axes, rank: int, left: float, side: float, queries: range, group: int) -> None:
    """Lines join each query head with its key/value head; a look is a key/value head's."""
    wide = len(queries) * side
    axes.add_patch(Rectangle((left - 0.07, 0.5), wide + 0.14, 1.4, facecolor="none", edgecolor="#999999", linestyle="-"))
    axes.text(left + wide / 2, 1.95, rank, ha="center", va="bottom", fontsize=9)
    shared = sorted({query // group for query in queries})
    for place, query in enumerate(queries):
        first = shared.index(query // group)
        below = left + wide * (first + 0.5) / len(shared)
        axes.plot(
            [left + (place + 0.5) * side, below], [1.42, 0.62 + side], color="#666666", linestyle="-", linewidth=0.8, zorder=0
        )
        box(axes, (left + place * side, 1.42), side, side, query // group, str(query), 7.5)
    for place, head in enumerate(shared):
        middle = left + wide * (place + 0.5) / len(shared)
        box(axes, (middle - side / 2, 0.62), side, side, head, str(head), 7.5)
    if queries[0] % group:
        first = shared[0] * group // len(queries)
        text, size = (f"same as rank {first}", 8) if wide > 0.66 else (f"same as\nrank {first}", 7)
        axes.text(left + wide / 2, 0.42, text, ha="center", va="top", fontsize=size, style="italic")


# Where a layer communicates.

_OUTSIDE, _INSIDE = "outside", "inside"
_AGAIN = "#ffd9b3"
_BLOCKS = (("q, k, v", "core", "output"), ("up", "GELU", "down"))
_REGIONS = {
    "TP": {_OUTSIDE: ("#e0e0e0", "", "all tokens, on each rank"), _INSIDE: ("#9ecae1", "", "own heads or columns")},
    "TP + SP": {_OUTSIDE: ("#a1d99b", "....", "own tokens"), _INSIDE: ("#9ecae1", "", "own heads or columns")},
}
# (variant, direction) -> what is sent where a block begins (f) and where it ends (g); in backward's order of time
_SENT = {
    ("TP", "forward"): ((), ("all-reduce",)),
    ("TP", "backward"): (("all-reduce",), ()),
    ("TP + SP", "forward"): (("all-gather",), ("reduce-scatter",)),
    ("TP + SP", "backward"): (("reduce-scatter", "all-gather again"), ("all-gather",)),
}
# Where a block begins and ends: the names of arXiv 1909.08053, and those of arXiv 2205.05198, whose f and f̄ are not drawn.
_LETTERS = {"TP": "fg", "TP + SP": "gḡ"}
_NAMED = {"TP": "f, g: names of\nMegatron-LM", "TP + SP": "g, ḡ: names of\nKorthikanti et al."}
_COUNTS = {
    ("TP", "forward"): "2 all-reduces",
    ("TP", "backward"): "2 all-reduces",
    ("TP + SP", "forward"): "2 all-gathers\n2 reduce-scatters",
    ("TP + SP", "backward"): "4 all-gathers\n2 reduce-scatters",
}


@style.styled
def collectives() -> style.Figure:
    """Where in a layer each collective stands, forward and backward, with tensor parallelism alone and sequence-parallel too.

    Source: arXiv 2205.05198, figures 4 and 5.
    """
    fig = style.Figure(figsize=(9.6, 5.3), layout="none")
    axes = fig.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, 9.6), ylim=(0.3, 5.6))
    axes.axis("off")
    for number, key in enumerate(_SENT):
        _draw_direction(axes, *key, 4.25 - 1.12 * number - 0.18 * (number > 1))
    looks = {look[2]: look[:2] for regions in _REGIONS.values() for look in regions.values()}
    handles = [Patch(facecolor=c, hatch=h, edgecolor="#666666", label=said) for said, (c, h) in looks.items()]
    handles.append(Patch(facecolor=style.ORANGE, edgecolor=style.INK, label="a collective"))
    handles.append(Patch(facecolor=_AGAIN, edgecolor=style.INK, linestyle="--", label="gathered again"))
    fig.legend(handles=handles, loc="upper left", ncols=5, bbox_to_anchor=(0.005, 1.0))
    return fig


def _draw_direction(axes: Axes, variant: str, direction: str, y: float) -> None:
    axes.text(0.08, y + 0.42, f"{variant}\n{direction} {'⟶' if direction == 'forward' else '⟵'}", va="center", fontsize=9)
    note = "read from\nright to left" if direction == "backward" else _NAMED[variant]
    axes.text(0.08, y + 0.2, note, va="top", fontsize=7.5, style="italic", linespacing=1.1)
    axes.text(9.52, y + 0.42, _COUNTS[variant, direction], va="center", ha="right", fontsize=8)
    x, at_f, at_g = 1.13, *_SENT[variant, direction]
    for place, (what, wide) in enumerate(_boxes(at_f, at_g)):
        if isinstance(what, tuple):
            _draw_sent(axes, what, x, y, wide)
            letter = _LETTERS[variant][place % 8 != 1]
            axes.text(x + wide / 2, y + 0.87, letter, ha="center", va="bottom", fontsize=9, style="italic")
        else:
            region = _INSIDE if what in _BLOCKS[0] + _BLOCKS[1] else _OUTSIDE
            colour, hatch, _ = _REGIONS[variant][region]
            axes.add_patch(Rectangle((x, y + 0.14), wide, 0.56, facecolor=colour, hatch=hatch, **HATCH))
            axes.add_patch(Rectangle((x, y + 0.14), wide, 0.56, facecolor="none", **_EDGE))
            box = style.PAPER if hatch else None
            axes.text(x + wide / 2, y + 0.42, what, color=style.BLACK, ha="center", va="center", fontsize=7.5, bbox=box)
        x += wide


def _boxes(at_f: tuple, at_g: tuple) -> Iterator[tuple[str | tuple, float]]:
    """The parts of a layer from its input to its output, with their widths."""
    for inner in _BLOCKS:
        yield "norm", 0.44
        yield at_f, 0.48
        yield from ((name, 0.5) for name in inner)
        yield at_g, 0.48
        yield "dropout", 0.52
        yield "+", 0.22


def _draw_sent(axes: Axes, sent: tuple[str, ...], x: float, y: float, wide: float) -> None:
    if not sent:
        axes.plot([x, x + wide], [y + 0.42] * 2, color=style.INK, linestyle="-", linewidth=0.8)
        return
    each = (wide - 0.08) / len(sent)
    for place, name in enumerate(sent):
        again = name.endswith("again")
        left = x + 0.04 + place * each
        colour, line = (_AGAIN, "--") if again else (style.ORANGE, "-")
        axes.add_patch(Rectangle((left, y), each, 0.84, facecolor=colour, edgecolor=style.INK, linestyle=line, linewidth=1))
        size, colour = (7, style.BLACK) if again else (7.5, "white")
        axes.text(left + each / 2, y + 0.42, name, rotation=90, ha="center", va="center", fontsize=size, color=colour)
