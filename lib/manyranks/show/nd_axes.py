"""Where an axis of a mesh lies: how many ranks a group has, how far apart, on how many nodes; bars of all axes."""

import itertools
from collections.abc import Iterable, Sequence
from math import ceil, log2
from typing import NamedTuple, Protocol

from manyranks.show import style

# An axis's words, from the innermost to the outermost of the usual order, those shared by dp × cp last.
NAMES = {
    "tp": "TP, tensor",
    "cp": "CP, context",
    "dp": "DP, data",
    "pp": "PP, pipeline",
    "data": "DP × CP, same parameters",
    "shards": "shards of ZeRO",
    "replicas": "replicas of shards",
    "ep": "EP, experts",
    "ep_replicas": "same experts",
}
_SHARED = ("data", "shards", "replicas", "ep", "ep_replicas")
INSIDE, BETWEEN = ("#9ecae1", ""), ("#fdae6b", "////")  # colour and hatch


class Mesh(Protocol):
    """What is read of a parallel.mesh.Mesh."""

    ranks: int
    order: tuple[str, ...]

    def size(self, axis: str) -> int: ...
    def coordinates(self, rank: int) -> dict[str, int]: ...
    def group(self, axis: str, rank: int) -> tuple[int, ...]: ...
    def groups(self, axis: str) -> list[tuple[int, ...]]: ...


class Reach(NamedTuple):
    """Ranks of a group of this axis, and how many ranks one is after the other."""

    axis: str
    size: int
    stride: int

    @property
    def span(self) -> int:
        """Ranks from a group's first to the next group's first, or past its last."""
        return self.size * self.stride

    def nodes(self, node: int) -> int:
        """On which a group lies that starts at the first rank of one."""
        return self.size if self.stride >= node else ceil(self.span / node)

    def said(self, node: int) -> str:
        """In words: how far apart the ranks are, and whether they are in one node."""
        where = "inside a node" if (nodes := self.nodes(node)) == 1 else f"on {nodes:,} nodes"
        return f"neighbours, {where}" if self.stride == 1 else f"every {ordinal(self.stride)} rank, {where}"


def reach(mesh: Mesh, axis: str, rank: int = 0) -> Reach:
    """Of this rank's group. The stride of ranks that are not evenly apart is the smallest."""
    group = mesh.group(axis, rank)
    gaps = [b - a for a, b in itertools.pairwise(group)]
    return Reach(axis, len(group), min(gaps, default=1))


def used(mesh: Mesh, rank: int = 0) -> dict[str, str]:
    """Axes of more than one rank, from the innermost one, and their names; of those that have the same ranks the first."""
    found: dict[tuple[int, ...], list[str]] = {}
    for axis in (*reversed(mesh.order), *_SHARED):
        if mesh.size(axis) > 1:
            found.setdefault(mesh.group(axis, rank), []).append(axis)
    return {first: NAMES[first] + ", EP" * ("ep" in others) for first, *others in found.values()}


def nodes_of(ranks: Iterable[int], node: int) -> list[int]:
    return sorted({rank // node for rank in ranks})


def ordinal(n: int) -> str:
    ending = "th" if n // 10 % 10 == 1 else {1: "st", 2: "nd", 3: "rd"}.get(n % 10, "th")
    return f"{n:,}{ending}"


def check_node(node: int) -> None:
    if type(node) is not int or node < 1:
        raise ValueError(f"node={node!r}: a node has a whole number of accelerators, 1 or more")


@style.styled
def ladder(names: Sequence[str], reaches: Sequence[Reach], ranks: int, node: int, title: str) -> style.Figure:
    """Of each axis a bar from the distance of neighbours to the length of a group, in ranks; hatched beyond a node."""
    fig, (axes,) = style.figure(width=9.2, height=1.5 + 0.42 * len(reaches))
    end, inner = log2(max(ranks, 2)), log2(node)
    for row, each in enumerate(reaches):
        start, stop = log2(each.stride), log2(each.span)
        middle = min(max(inner, start), stop)
        for (left, right), (colour, hatch) in zip(((start, middle), (middle, stop)), (INSIDE, BETWEEN), strict=True):
            axes.barh(row, right - left, 0.56, left, color=colour, hatch=hatch, edgecolor=style.INK, linewidth=0.7)
        said = f"{ranks // each.size:,} groups of {each.size:,}; {each.said(node)}"
        axes.annotate(
            said, (1, row), (8, 0), xycoords=("axes fraction", "data"), textcoords="offset points", va="center", fontsize=9
        )
    axes.set_yticks(range(len(reaches)), list(names))
    axes.axvline(inner, color=style.INK, linestyle="--", linewidth=1.4)
    axes.text(inner, len(reaches) - 0.42, f" a node: {node:,}", fontsize=9, va="center")
    step = max(1, round(end / 7))
    axes.set_xticks(at := range(0, ceil(end) + 1, step), [f"{2**k:,}" for k in at])
    axes.set(xlim=(0, end), ylim=(len(reaches) - 0.2, -0.6), xlabel="ranks from the first one of a group", title=title)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    return fig
