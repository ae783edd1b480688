"""Chapter 08's drawing of one hop and two hops: the ways of one token's copies to its experts on other nodes."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from manyranks.show import style
from manyranks.show.looks import sheet

_NODES, _RANKS, _CELLS, _CHOICES = 3, 4, 12, 8  # at most: nodes; ranks and experts beyond the first node; choices
# Inches: from panel to panel, a node, above a node that is below another one, and of all ranks of the first node.
_PANEL, _NODE, _BETWEEN, _HIGH = 4.8, 1.65, 0.3, 2.1
_LEFT, _RIGHT, _TOP, _BELOW = 0.1, 2.45, 2.55, 0.45  # where nodes begin and end in a panel
_CELL, _NAME, _EDGE = 0.36, 0.3, 0.04  # inches: an expert, a rank's name, between boxes
_TOKEN = (0.5, 0.24)  # inches
_CROSSES = {"color": style.ORANGE, "linewidth": 3.0, "mutation_scale": 15}
_INSIDE = {"color": style.INK, "linewidth": 1.0, "mutation_scale": 9}
_BOX = {"facecolor": "none", "edgecolor": style.INK}


class _Layout(NamedTuple):
    """Ranks of so many nodes, `inside` of them in each, share the experts in blocks; the first node is at the left."""

    experts: int
    nodes: int
    inside: int

    @property
    def own(self) -> int:
        return self.experts // (self.nodes * self.inside)

    def ends(self, node: int) -> tuple[float, float]:
        """Lower and upper end of its ranks."""
        if node == 0:
            return _BELOW, _BELOW + _HIGH
        high = (_HIGH - (self.nodes - 2) * _BETWEEN) / (self.nodes - 1)
        top = _BELOW + _HIGH - (node - 1) * (high + _BETWEEN)
        return top - high, top

    def rank(self, rank: int) -> tuple[float, float]:
        """Lower end of a rank, and its height."""
        low, top = self.ends(rank // self.inside)
        each = (top - low) / self.inside
        return top - (rank % self.inside + 1) * each, each

    def middle(self, rank: int) -> float:
        low, high = self.rank(rank)
        return low + high / 2

    def cell(self, expert: int) -> tuple[float, float]:
        """Lower end of an expert, and its height."""
        low, high = self.rank(expert // self.own)
        each = (high - 2 * _EDGE) / self.own
        return low + high - _EDGE - (expert % self.own + 1) * each, each

    def target(self, expert: int) -> tuple[float, float]:
        """Where an arrow to it ends: experts of the first node are left of the token, the others right."""
        low, high = self.cell(expert)
        first = expert // self.own < self.inside
        return _LEFT + _NAME + _CELL if first else _RIGHT + _NODE - _NAME - _CELL, low + high / 2


@style.styled
def hops(chosen: Sequence[int] = (1, 9, 10, 14), experts: int = 16, nodes: int = 2, inside: int = 2) -> style.Figure:
    """How a token of rank 0 gets to its experts: by one hop, a copy for each choice, and by two hops, a copy for each node
    that goes to the rank with the same place there, and inside the node on to the experts. Thick: what crosses to another node.

    chosen: the token's experts. experts: of all ranks, in blocks. nodes: of `inside` ranks each.
    Raises ValueError for experts that are not there or chosen twice, more than 8 choices, and nodes, ranks or experts that are
    too many for the picture or do not share them evenly.
    """
    _check(list(chosen), experts, nodes, inside)
    layout, beyond = _Layout(experts, nodes, inside), experts // nodes
    away = [expert for expert in chosen if expert >= beyond]
    crossing = len(away), len({expert // beyond for expert in away})
    fig, axes = sheet(_PANEL + _RIGHT + _NODE + 0.1, _TOP + 0.6)
    middle = (_PANEL + _LEFT + _RIGHT + _NODE) / 2
    axes.plot([middle] * 2, [_BELOW, _TOP + 0.5], color="#999999", linestyle=":", linewidth=1.2)
    for place, (name, copies, draw) in enumerate(zip(("one hop", "two hops"), crossing, (_one_hop, _two_hops), strict=True)):
        x, said = place * _PANEL, f"{copies} copies cross" if copies != 1 else "1 copy crosses"
        axes.text(x + _LEFT, _TOP + 0.4, f"{name}: {said}", fontsize=11, fontweight="bold", va="center")
        _draw_nodes(axes, layout, x, set(chosen))
        draw(axes, layout, x, chosen)
    _draw_legend(axes)
    return fig


def _check(chosen: list[int], experts: int, nodes: int, inside: int) -> None:
    numbers = f"experts={experts!r}, nodes={nodes!r}, inside={inside!r}"
    if not all(type(each) is int and each > 0 for each in (experts, nodes, inside)) or experts % (nodes * inside):
        raise ValueError(f"{numbers}: nodes · inside ranks must share the experts evenly")
    ranks, cells = (nodes - 1) * inside, experts // nodes * (nodes - 1)
    if not 2 <= nodes <= _NODES or ranks > _RANKS or cells > _CELLS:
        raise ValueError(
            f"{numbers}: a picture shows 2 to {_NODES} nodes, beyond the first one up to {_RANKS} ranks, {_CELLS} experts"
        )
    if not 1 <= len(chosen) <= _CHOICES or len(set(chosen)) < len(chosen) or not set(chosen) <= set(range(experts)):
        raise ValueError(f"chosen={chosen}: 1 to {_CHOICES} different experts of 0 to {experts - 1}")


def _draw_nodes(axes: Axes, layout: _Layout, x: float, chosen: set[int]) -> None:
    for node in range(layout.nodes):
        left, (low, top) = x + (_RIGHT if node else _LEFT), layout.ends(node)
        axes.add_patch(Rectangle((left, low), _NODE, top - low, linewidth=2.0, **_BOX))
        axes.text(left + _NODE / 2, top + 0.04, f"node {node}", fontsize=9, ha="center", va="bottom")
        for rank in range(node * layout.inside, (node + 1) * layout.inside):
            _draw_rank(axes, layout, rank, left, chosen)


def _draw_rank(axes: Axes, layout: _Layout, rank: int, left: float, chosen: set[int]) -> None:
    (low, high), first = layout.rank(rank), rank < layout.inside
    axes.add_patch(Rectangle((left, low), _NODE, high, linewidth=0.8, **_BOX))
    name = left + (_NAME / 2 if first else _NODE - _NAME / 2)
    axes.text(name, low + high / 2, f"rank {rank}", fontsize=8.5, rotation=90, ha="center", va="center")
    x = left + (_NAME if first else _NODE - _NAME - _CELL)
    for expert in range(rank * layout.own, (rank + 1) * layout.own):
        (y, each), weight = layout.cell(expert), "bold" if expert in chosen else "normal"
        colour, ink = ("#cfe3f1", style.BLACK) if expert in chosen else ("none", style.INK)
        edge = 1.4 if expert in chosen else 0.5
        axes.add_patch(Rectangle((x, y), _CELL, each, facecolor=colour, edgecolor=style.INK, linewidth=edge))
        size, middle = min(8.5, 54 * each), (x + _CELL / 2, y + each / 2)
        axes.text(*middle, expert, fontsize=size, fontweight=weight, color=ink, ha="center", va="center_baseline")


def _one_hop(axes: Axes, layout: _Layout, x: float, chosen: Sequence[int]) -> None:
    start = _draw_token(axes, x + _LEFT + _NODE - _TOKEN[0] - 0.12, layout.middle(0), "token")
    for expert in chosen:
        there, y = layout.target(expert)
        first = expert // layout.own < layout.inside
        _draw_arrow(axes, start(first), (x + there, y), _INSIDE if first else _CROSSES)


def _two_hops(axes: Axes, layout: _Layout, x: float, chosen: Sequence[int]) -> None:
    token = _draw_token(axes, x + _LEFT + _NODE - _TOKEN[0] - 0.12, layout.middle(0), "token")
    copies, beyond = {0: token}, layout.experts // layout.nodes
    for node in sorted({expert // beyond for expert in chosen} - {0}):
        copies[node] = _draw_token(axes, x + _RIGHT + 0.12, layout.middle(node * layout.inside), "copy")
        _draw_arrow(axes, token(False), copies[node](True), _CROSSES)
    for expert in chosen:
        there, y = layout.target(expert)
        node = expert // beyond
        _draw_arrow(axes, copies[node](not node), (x + there, y), _INSIDE)


def _draw_token(axes: Axes, x: float, middle: float, name: str) -> Callable[[bool], tuple[float, float]]:
    """Returns where arrows from and to it touch it: at its left side, or its right one."""
    wide, high = _TOKEN
    axes.add_patch(Rectangle((x, middle - high / 2), wide, high, facecolor="#ffe08a", edgecolor=style.INK, zorder=4))
    axes.text(x + wide / 2, middle, name, fontsize=8.5, color=style.BLACK, ha="center", va="center", zorder=5)
    return lambda left: (x if left else x + wide, middle)


def _draw_arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], look: dict) -> None:
    axes.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "shrinkA": 0, "shrinkB": 0} | look, zorder=3)


def _draw_legend(axes: Axes) -> None:
    for x, look, said in ((_LEFT, _CROSSES, "to another node"), (2.2, _INSIDE, "inside a node")):
        _draw_arrow(axes, (x, 0.18), (x + 0.45, 0.18), look)
        axes.text(x + 0.53, 0.18, said, fontsize=9, va="center")
    axes.text(4.2, 0.18, "bold: the experts that the token chose", fontsize=9, va="center")
