"""Chapter 08's pictures: which token goes to which expert, and how many rows travel from rank to rank."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from manyranks.show import style
from manyranks.show.looks import HATCH, LOOKS, box, sheet

_WIDE = 9.3  # inches of a figure
_TOKENS, _EXPERTS = 32, 32  # at most in a picture
_LEFT, _BELOW, _LOAD, _SAID = 1.05, 0.72, 2.55, 1.25  # inches: ranks' and experts' names, captions, bars with their texts
_STAYS, _NEAR, _FAR = ("#e0e0e0", ""), ("#cfe3f1", ""), ("#fdc998", "////")
_DROPPED = {"facecolor": "none", "edgecolor": style.ORANGE, "linestyle": (0, (2, 1)), "linewidth": 1.3}


class _Choices(NamedTuple):
    """Of every token: its experts as chosen, and whether each copy is kept. ranks: that share the experts."""

    chosen: np.ndarray
    kept: np.ndarray
    experts: int
    ranks: int

    def owner(self, expert: int) -> int:
        return expert * self.ranks // self.experts

    def loads(self, which: np.ndarray) -> np.ndarray:
        """Copies of each expert."""
        return np.bincount(self.chosen[which], minlength=self.experts)


@style.styled
def routing(
    chosen_TK: Sequence[Sequence[int]],
    experts: int,
    ranks: int = 1,
    kept_TK: Sequence[Sequence[int]] | None = None,
    capacity: int | None = None,
    sources: int = 1,
) -> style.Figure:
    """Which token goes to which expert, in the look of the rank that has the expert; beside it the copies that experts get.

    chosen_TK: each token's experts, its first choice first; a cell says which choice it is. ranks: that share the experts in
    blocks. kept_TK: the same with −1 where a copy was dropped (Routing.experts_TK); their numbers are crossed out. capacity:
    copies that an expert takes of one source's tokens. sources: ranks whose tokens these are, as many of each, in their order.
    Raises ValueError for more than 32 tokens or experts, 8 ranks, experts that are not there, and copies that nobody chose.
    """
    choices = _choices(chosen_TK, experts, ranks, kept_TK)
    T = len(choices.chosen)
    if T % sources:
        raise ValueError(f"sources={sources} do not share {T} tokens evenly: give a divisor")
    wide, high = min(max(0.32, 1.95 / T), (_WIDE - _LEFT - _LOAD - 0.1) / T), min(0.34, 5.4 / experts)
    top = _BELOW + experts * high
    fig, axes = sheet(_LEFT + T * wide + _LOAD + 0.1, top + 0.62)
    _draw_grid(axes, choices, wide, high, top, sources)
    _draw_copies(axes, choices, wide, high, top)
    _draw_loads(axes, choices, (_LEFT + T * wide + 0.2, top), high, None if capacity is None else sources * capacity)
    said = "1: first choice, 2: second, …" + "\ncrossed out: dropped" * bool((~choices.kept).any())
    axes.text(_LEFT, _BELOW - 0.1, said, fontsize=8, va="top", linespacing=1.3)
    return fig


def _choices(chosen: Sequence, experts: int, ranks: int, kept: Sequence | None) -> _Choices:
    chosen = np.asarray(chosen)
    if chosen.ndim != 2 or not 1 <= len(chosen) <= _TOKENS or not 1 <= experts <= _EXPERTS:
        raise ValueError(
            f"chosen_TK of shape {chosen.shape}, {experts} experts: a picture shows 1 to {_TOKENS} tokens with K choices each, "
            f"and 1 to {_EXPERTS} experts"
        )
    if chosen.min() < 0 or chosen.max() >= experts:
        raise ValueError(
            f"chosen_TK has {chosen.min()} to {chosen.max()}: experts are 0 to {experts - 1}; what was dropped is −1 in kept_TK"
        )
    if not 1 <= ranks <= len(LOOKS) or experts % ranks:
        raise ValueError(f"ranks={ranks} of {experts} experts: 1 to {len(LOOKS)} that divide them")
    found = chosen if kept is None else np.asarray(kept)
    if found.shape != chosen.shape or ((found != chosen) & (found != -1)).any():
        raise ValueError(
            "kept_TK is not chosen_TK with −1 where a copy was dropped: give the experts before and after dropping"
        )
    return _Choices(chosen, found >= 0, experts, ranks)


def _draw_grid(axes: Axes, choices: _Choices, wide: float, high: float, top: float, sources: int) -> None:
    """Lines, numbers of tokens and experts, and names of ranks."""
    T, E, each = len(choices.chosen), choices.experts, choices.experts // choices.ranks
    right = _LEFT + T * wide
    thin = {"color": "#cccccc", "linestyle": "-", "linewidth": 0.5}
    axes.hlines([top - k * high for k in range(E + 1)], _LEFT, right, **thin)
    axes.vlines([_LEFT + k * wide for k in range(T + 1)], _BELOW, top, **thin)
    thick = {"color": style.INK, "linestyle": "-", "linewidth": 1.4}
    axes.hlines([top - k * each * high for k in range(choices.ranks + 1)], _LEFT, right, **thick)
    axes.vlines([_LEFT + k * T // sources * wide for k in range(sources + 1)], _BELOW, top, **thick)
    for expert in range(E):
        axes.text(_LEFT - 0.06, top - (expert + 0.5) * high, expert, fontsize=min(8, 36 * high), ha="right", va="center")
    for rank in range(choices.ranks if choices.ranks > 1 else 0):
        middle = top - (rank + 0.5) * each * high
        axes.text(_LEFT - 0.32, middle, f"rank {rank}", fontsize=8.5, ha="right", va="center")
    every = 1 if wide > 0.2 else 2
    for token in range(0, T, every):
        axes.text(_LEFT + (token + 0.5) * wide, top + 0.03, token, fontsize=7.5, ha="center", va="bottom")
    for source in range(sources):
        said = "token" if sources == 1 else f"tokens of rank {source}"
        middle = _LEFT + (source + 0.5) * T / sources * wide
        axes.text(middle, top + 0.24, said, fontsize=9, ha="center", va="bottom")
    axes.text(_LEFT - 0.06, top + 0.03, "expert", fontsize=8.5, ha="right", va="bottom")


def _draw_copies(axes: Axes, choices: _Choices, wide: float, high: float, top: float) -> None:
    for token, (chosen, kept) in enumerate(zip(choices.chosen, choices.kept, strict=True)):
        for choice, (expert, held) in enumerate(zip(chosen, kept, strict=True), 1):
            corner = _LEFT + token * wide, top - (expert + 1) * high
            if held:
                box(axes, corner, wide, high, choices.owner(expert), str(choice), 8)
            else:
                _draw_dropped(axes, corner, wide, high, str(choice))


def _draw_dropped(axes: Axes, corner: tuple[float, float], wide: float, high: float, choice: str) -> None:
    (x, y), edge, size = corner, 0.02, min(8, 36 * min(wide, high))
    axes.add_patch(Rectangle((x + edge, y + edge), wide - 2 * edge, high - 2 * edge, **_DROPPED))
    axes.text(x + wide / 2, y + high / 2, choice, fontsize=size, ha="center", va="center")
    line = {"color": style.ORANGE, "linestyle": "-", "linewidth": 1.2, "zorder": 4}
    axes.plot([x + edge, x + wide - edge], [y + high - edge, y + edge], **line)


def _draw_loads(axes: Axes, choices: _Choices, corner: tuple[float, float], high: float, capacity: int | None) -> None:
    """A bar for each expert, what was dropped at its end, with the mean and the capacity as lines. corner: upper left."""
    (x, top), kept, lost = corner, choices.loads(choices.kept), choices.loads(~choices.kept)
    mean = choices.chosen.size / choices.experts
    inch = (_LOAD - _SAID) / max(*(kept + lost), capacity or 0, mean)
    for expert, (held, dropped) in enumerate(zip(kept, lost, strict=True)):
        y, look = top - (expert + 0.86) * high, LOOKS[choices.owner(expert)]
        axes.add_patch(Rectangle((x, y), held * inch, 0.72 * high, facecolor=look[0], hatch=look[1], **HATCH))
        axes.add_patch(Rectangle((x, y), held * inch, 0.72 * high, facecolor="none", edgecolor=style.INK, linewidth=0.8))
        if dropped:
            axes.add_patch(Rectangle((x + held * inch, y), dropped * inch, 0.72 * high, **_DROPPED))
        text = f"{held}" + (f", {dropped} dropped" if dropped else "")
        place = x + (held + dropped) * inch + 0.07
        axes.text(place, y + 0.36 * high, text, fontsize=min(8, 36 * high), va="center", zorder=5)
    axes.text(x, top + 0.24, "load: copies of each expert", fontsize=9, va="bottom")
    bottom = top - choices.experts * high
    axes.vlines([x], bottom, top, color=style.INK, linestyle="-", linewidth=0.8)
    axes.vlines([x + mean * inch], bottom - 0.06, top, color=style.INK, linestyle="--", linewidth=1.3, zorder=4)
    said = [f"dashed, the mean: {mean:.3g}", f"largest ÷ mean: {max(kept + lost) / mean:.2f}"]
    if capacity is not None:
        axes.vlines([x + capacity * inch], bottom - 0.06, top, color=style.ORANGE, linestyle="-", linewidth=2, zorder=4)
        said.insert(1, f"thick line, the capacity: {capacity}")
    axes.text(x, bottom - 0.1, "\n".join(said), fontsize=8, va="top", linespacing=1.3)


@style.styled
def dispatch(named: Mapping[str, Sequence[Sequence[int]]], node: int | None = None, unit: str = "rows") -> style.Figure:
    """Rows that each rank (a row of the matrix) sends to each (a column): a panel for each name, as "one hop" or "two hops".

    node: ranks of a node, whose borders are thick and between which cells are hatched; None: all are in one. What a rank sends
    to itself stays and is grey. Raises ValueError for none, more than 3 names, and matrices that are not n × n with n 2 to 8.
    """
    if not 1 <= len(named) <= 3:
        raise ValueError(f"{len(named)} matrices: a picture shows 1 to 3")
    each = {name: np.asarray(sent) for name, sent in named.items()}
    n = len(next(iter(each.values())))
    for name, sent in each.items():
        if sent.shape != (n, n) or not 2 <= n <= len(LOOKS):
            raise ValueError(
                f"{name!r} has the shape {sent.shape}: give n × n numbers, all of the same n from 2 to {len(LOOKS)}"
            )
    if node is not None and (node < 1 or n % node):
        raise ValueError(f"node={node} of {n} ranks: give a divisor")
    side = min(0.5, (_WIDE - 0.95 * len(each)) / (n * len(each)))
    panel = max(n * side + 0.95, 2.6)
    fig, axes = sheet(0.1 + len(each) * panel, n * side + 1.6)
    for place, (name, sent) in enumerate(each.items()):
        _draw_matrix(axes, name, sent, node or n, (0.75 + place * panel, 0.75), side, unit)
    return fig


def _draw_matrix(
    axes: Axes, name: str, sent: np.ndarray, node: int, corner: tuple[float, float], side: float, unit: str
) -> None:
    (x, y), n = corner, len(sent)
    top, far = y + n * side, np.arange(n)[:, None] // node != np.arange(n) // node
    axes.text(x, top + 0.5, name, fontsize=11, fontweight="bold", va="bottom")
    axes.text(x + n * side / 2, top + 0.26, "to rank", fontsize=9, ha="center", va="bottom")
    axes.text(x - 0.34, y + n * side / 2, "from rank", fontsize=9, rotation=90, ha="right", va="center")
    for k in range(n):
        axes.text(x + (k + 0.5) * side, top + 0.06, k, fontsize=8.5, ha="center", va="bottom")
        axes.text(x - 0.08, top - (k + 0.5) * side, k, fontsize=8.5, ha="right", va="center")
        for other in range(n):
            look = _STAYS if k == other else _FAR if far[k, other] else _NEAR
            _draw_cell(axes, (x + other * side, top - (k + 1) * side), side, look, int(sent[k, other]))
    _draw_nodes(axes, corner, n * side, range(0, n + 1, node), side)
    between, stays = int(sent[far].sum()), int(np.trace(sent))
    inside = int(sent.sum()) - between - stays
    said = (
        [f"between nodes (hatched): {between:,} {unit}", f"inside a node: {inside:,}"]
        if far.any()
        else [f"sent: {inside:,} {unit}"]
    )
    axes.text(x, y - 0.1, "\n".join([*said, f"stay (grey): {stays:,}"]), fontsize=8.5, va="top", linespacing=1.3)


def _draw_cell(axes: Axes, corner: tuple[float, float], side: float, look: tuple[str, str], number: int) -> None:
    colour, hatch = look
    axes.add_patch(Rectangle(corner, side, side, facecolor=colour, hatch=hatch if number else "", **HATCH))
    axes.add_patch(Rectangle(corner, side, side, facecolor="none", edgecolor="#999999", linewidth=0.5))
    size = min(9, 72 * side / max(3, 0.75 * len(f"{number:,}") + 1))
    middle = corner[0] + side / 2, corner[1] + side / 2
    look = {"bbox": style.PAPER} if number else {}
    axes.text(*middle, f"{number:,}" if number else "·", color=style.BLACK, fontsize=size, ha="center", va="center", **look)


def _draw_nodes(axes: Axes, corner: tuple[float, float], long: float, ends: Sequence[int], side: float) -> None:
    (x, y), look = corner, {"color": style.INK, "linestyle": "-", "linewidth": 2.0}
    axes.vlines([x + end * side for end in ends], y, y + long, **look)
    axes.hlines([y + end * side for end in ends], x, x + long, **look)
