"""Chapter 10's meshes: which ranks share an axis, and in which node they lie."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from manyranks.show import style
from manyranks.show.looks import box, sheet

# An axis's words, from the innermost to the outermost of the usual order, those shared by dp × cp last.
NAMES = {"tp": "TP, tensor", "cp": "CP, context", "dp": "DP, data", "pp": "PP, pipeline", "data": "DP × CP, same parameters"}
NAMES |= {"shards": "shards of ZeRO", "replicas": "replicas of shards", "ep": "EP, experts", "ep_replicas": "same experts"}
INSIDE, BETWEEN = ("#9ecae1", ""), ("#fdae6b", "////")  # colour and hatch
_ROWS, _RANKS = 4, 8  # nodes, and ranks of one, that are drawn at most
_WIDE, _LEFT, _BOX, _HIGH, _LANE, _GAP = 9.2, 0.75, 1.02, 0.72, 0.17, 0.3  # inches; a lane is for a line, a gap for links
_NEAR = {"color": style.INK, "linestyle": "-", "linewidth": 1.6}
_FAR = {"color": style.ORANGE, "linestyle": (0, (4, 2)), "linewidth": 1.8}
_LETTER = {"ha": "center", "va": "center", "bbox": style.PAPER, "color": style.BLACK, "zorder": 4, "fontsize": 8}
Mesh = Any  # parallel.mesh.Mesh, of a floor that is not imported here


@style.styled
def mesh(mesh: Mesh, node: int = 8, axis: str = "tp") -> style.Figure:
    """Draws ranks in their nodes, with their coordinates; groups of an axis have one look, one letter and lines between them.

    mesh: a parallel.mesh.Mesh; node: accelerators of one. Raises ValueError for an axis that the mesh does not have, and for
    more than 4 nodes or 8 accelerators in one.
    """
    groups = mesh.groups(axis)
    _check(node, _RANKS)
    if mesh.ranks > _ROWS * node:
        raise ValueError(f"{mesh.ranks:,} ranks in nodes of {node}: a picture shows {_ROWS} nodes; groups() shows any mesh")
    least, *_, most = sorted(2 * [len({rank // node for rank in group}) for group in groups])
    many, nodes = len(groups) > 1, f"on {most} nodes" if least == most else f"on {least} to {most} nodes"
    where = "nothing to send" if mesh.size(axis) == 1 else "inside a node" if most == 1 else "each " * many + nodes
    title = f"{NAMES[axis]}: {len(groups)} group{'s' * many} of {mesh.size(axis)}, {where}"
    return _draw(mesh, min(node, mesh.ranks), list(_pieces(groups, node)), most > 1, title)


def _check(node: int, most: int | None = None) -> None:
    if type(node) is not int or node < 1 or (most and node > most):
        raise ValueError(f"node={node!r}: a node has a whole number of accelerators, 1 {f'to {most}' if most else 'or more'}")


def _pieces(groups: Sequence[tuple[int, ...]], node: int) -> Iterator[tuple[int, list[int], int]]:
    """Of each group in each node its number, its ranks, and the lane of the line that joins them; -1 for a rank alone."""
    ends = defaultdict(list)  # of a node's lanes, the last rank
    for number, group in enumerate(groups):
        for at, together in groupby(group, lambda rank: rank // node):
            ranks, lanes, lane = list(together), ends[at], -1
            if len(ranks) > 1:
                lane = next((k for k, end in enumerate(lanes) if end < ranks[0]), len(lanes))
                lanes[lane : lane + 1] = [ranks[-1]]
            yield number, ranks, lane


def _draw(mesh: Mesh, node: int, pieces: list[tuple[int, list[int], int]], far: bool, title: str) -> style.Figure:
    """far: some links are between nodes."""
    row = _HIGH + 0.14 + _LANE * (1 + max(lane for *_, lane in pieces)) + _GAP * far
    top = 0.32 + -(-mesh.ranks // node) * row - _GAP * far
    fig, axes = sheet(_WIDE, top + 0.4)
    corners = [(_LEFT + rank % node * _BOX, top - rank // node * row - _HIGH) for rank in range(mesh.ranks)]
    axes.text(0.1, top + 0.22, title, fontsize=11, fontweight="bold", va="center")
    for first in range(0, mesh.ranks, node):
        x, y = corners[first]
        size = min(node, mesh.ranks - first) * _BOX + 0.08, _HIGH + 0.12
        axes.add_patch(Rectangle((x - 0.07, y - 0.06), *size, facecolor="none", edgecolor="#555555", linewidth=1.3))
        axes.text(0.1, y + _HIGH / 2, f"node {first // node}", fontsize=9, va="center")
    for rank, group in sorted((rank, group) for group, ranks, _ in pieces for rank in ranks):
        words = [f"{axis}{at}" for axis, at in mesh.coordinates(rank).items() if mesh.size(axis) > 1]
        half = -(-len(words) // 2)
        lines = f"rank {rank}", " ".join(words[:half]), " ".join(words[half:])
        box(axes, corners[rank], _BOX - 0.06, _HIGH, group, "\n".join(lines).rstrip())
    _draw_links(axes, corners, pieces)
    for x, look, said in ((0.1, _NEAR, "link inside a node"), (2.2, _FAR, "link between nodes")):
        axes.plot([x, x + 0.4], [0.18, 0.18], **look)
        axes.text(x + 0.5, 0.18, said, fontsize=8.5, va="center")
    axes.text(4.4, 0.18, "letter: group; frame: node", fontsize=8.5, va="center")
    return fig


def _draw_links(axes: Axes, corners: Sequence[tuple[float, float]], pieces: Sequence[tuple[int, list[int], int]]) -> None:
    """Joins a group's ranks in a node below their boxes, and nodes to the next one; its letter is on a line, for 32 groups."""
    last, start = None, (0.0, 0.0)
    for group, ranks, lane in pieces:
        x, bottom = [corners[rank][0] + _BOX / 2 - 0.03 for rank in ranks], corners[ranks[0]][1]
        y, place = bottom - (0.18 + _LANE * lane if lane >= 0 else 0), None
        if group == last:
            axes.plot([start[0], x[0]], [start[1], bottom + _HIGH], **_FAR)
            place = (start[0] + x[0]) / 2, (start[1] + bottom + _HIGH) / 2
        if lane >= 0:
            axes.plot([x[0], x[-1]], [y, y], **_NEAR)
            axes.vlines(x, y, bottom, color=style.INK, linewidth=1.6)
            place = (x[0] + x[1]) / 2, y
        if place:
            axes.text(*place, chr(ord("A") + group + 6 * (group > 25)), **_LETTER)
        last, start = group, (x[0], y)


@style.styled
def groups(mesh: Mesh, rank: int = 0, node: int = 8) -> style.Figure:
    """Draws a rank's group of every axis that has more than one rank: a row for each, with the ranks in it and where they lie.

    Raises ValueError for a rank that the mesh does not have, and for one that has no groups.
    """
    _check(node)
    rows = _used(mesh, rank)
    if not rows:
        raise ValueError("a mesh of one rank has no groups: give a degree above 1")
    fig, (axes,) = style.figure(width=_WIDE, height=1.35 + 0.42 * len(rows))
    wide = max(0.8, mesh.ranks / 250)  # of very many ranks one would be too thin to be seen
    edge = {"edgecolor": style.INK, "linewidth": 0.5 if mesh.ranks <= 128 else 0.0}
    for row, group in enumerate(rows.values()):
        near = {r for r in group if r // node == rank // node}
        for ranks, (colour, hatch) in ((near, INSIDE), (set(group) - near, BETWEEN), ({rank}, (style.INK, ""))):
            axes.barh([row] * len(ranks), wide, 0.6, [r - wide / 2 for r in ranks], color=colour, hatch=hatch, **edge)
        at = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "va": "center", "fontsize": 9}
        axes.annotate(_listed(group, node), (1, row), (8, 0), **at)
    if len(edges := [first - 0.5 for first in range(node, mesh.ranks, node)]) <= 64:
        axes.vlines(edges, -0.55, len(rows) - 0.45, color="#555555", linewidth=1.2)
    axes.set_yticks(range(len(rows)), list(rows))
    axes.set(xlim=(-0.6, mesh.ranks - 0.4), ylim=(len(rows) - 0.4, -0.6), xlabel="rank (lines: nodes)")
    axes.set_title(f"The groups of rank {rank:,}: " + ", ".join(f"{a} {k}" for a, k in mesh.coordinates(rank).items()))
    axes.locator_params(axis="x", integer=True, nbins=6 if mesh.ranks > 16 else 16)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False)
    return fig


def _used(mesh: Mesh, rank: int) -> dict[str, tuple[int, ...]]:
    """A rank's groups of more than one rank by their axes' names, from the innermost one; of equal ones the first."""
    found: dict[tuple[int, ...], list[str]] = {}
    for axis in (*reversed(mesh.order), *list(NAMES)[4:]):
        if mesh.size(axis) > 1:
            found.setdefault(mesh.group(axis, rank), []).append(axis)
    return {NAMES[first] + ", EP" * ("ep" in others): group for group, (first, *others) in found.items()}


def _listed(group: Sequence[int], node: int) -> str:
    """12, 13 in node 1; 8 ranks, every 16th, on 8 nodes."""
    nodes, few = {rank // node for rank in group}, len(group) <= 4 and group[-1] < 1000
    named = ", ".join(map(str, group)) if few else f"{len(group):,} ranks, {group[0]:,} to {group[-1]:,}"
    return f"{named}; " + (f"in node {group[0] // node:,}" if len(nodes) == 1 else f"on {len(nodes):,} nodes")
