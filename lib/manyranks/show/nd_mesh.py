"""Chapter 10's pictures of meshes: which ranks share an axis, in which node they lie, and which links they use."""

from collections.abc import Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from manyranks.show import style
from manyranks.show.looks import HATCH, LOOKS, sheet
from manyranks.show.nd_axes import BETWEEN, INSIDE, NAMES, Mesh, check_node, ladder, nodes_of, reach, used

_WIDE, _LEFT = 9.2, 0.75  # inches: of the picture, and of nodes' names
_ROWS, _CELLS = 4, 128  # nodes that are drawn with links; ranks that are drawn at all
_COLUMNS = 16
_NEAR = {"color": style.INK, "linestyle": "-", "linewidth": 1.6}
_FAR = {"color": style.ORANGE, "linestyle": (0, (4, 2)), "linewidth": 1.8}


@style.styled
def mesh(mesh: Mesh, node: int = 8, axis: str = "tp", rank: int | None = None) -> style.Figure:
    """Ranks in their nodes, with their coordinates; groups of an axis have one look, one letter and lines between them.

    mesh: a parallel.mesh.Mesh, or what has its ranks, order, size, coordinates, group and groups. node: accelerators of one.
    rank: shows this one's group alone. Up to 4 nodes of up to 8 are drawn with links, up to 128 ranks as cells; of more, each
    axis is a bar: how far apart the ranks of a group are. Raises ValueError for an axis or rank that the mesh does not have.
    """
    check_node(node)
    own = mesh.group(axis, rank or 0)
    rows = -(-mesh.ranks // node)
    title = f"{NAMES[axis]}: {_count(mesh, axis)}, {_where(mesh, axis, node)}"
    if mesh.ranks > _CELLS or min(node, mesh.ranks) > _COLUMNS:
        total = f"{mesh.ranks:,} ranks" + (f" in {rows:,} nodes of {node}" if rows > 1 else "")
        names = used(mesh, rank or 0) or {axis: NAMES[axis]}
        return ladder(list(names.values()), [reach(mesh, each, rank or 0) for each in names], mesh.ranks, node, total)
    shown = {r: k for k, group in enumerate(mesh.groups(axis)) if rank is None or group == own for r in group}
    return _Sheet(mesh, min(node, mesh.ranks), axis, shown, rank).draw(title)


def _count(mesh: Mesh, axis: str) -> str:
    size = mesh.size(axis)
    return f"{mesh.ranks // size:,} group{'s' * (mesh.ranks > size)} of {size:,}"


def _where(mesh: Mesh, axis: str, node: int) -> str:
    if mesh.size(axis) == 1:
        return "nothing to send"
    nodes = {len(nodes_of(group, node)) for group in mesh.groups(axis)} if mesh.ranks <= _CELLS else set()
    if len(nodes) == 1:
        return "inside a node" if nodes == {1} else f"{'each ' * (mesh.size(axis) < mesh.ranks)}on {nodes.pop()} nodes"
    return f"on {min(nodes)} to {max(nodes)} nodes" if nodes else reach(mesh, axis).said(node)


class Piece(NamedTuple):
    """Of a group, what lies in one node: the place of the line that joins it."""

    group: int
    node: int
    ranks: tuple[int, ...]
    lane: int


class _Sheet:
    """Places in inches, and what is drawn there."""

    def __init__(self, mesh: Mesh, node: int, axis: str, shown: dict[int, int], rank: int | None):
        self._mesh, self._node, self._axis, self._shown, self._rank = mesh, node, axis, shown, rank
        self._rows = -(-mesh.ranks // node)
        self._linked = self._rows <= _ROWS and node <= 8
        self._wide = min(1.02, (_WIDE - _LEFT - 0.15) / node)
        self._high = 0.72 if self._linked else 0.36
        self._pieces = _pieces(mesh.groups(axis), node, shown) if self._linked else []
        lanes = 1 + max((piece.lane for piece in self._pieces), default=-1)
        far = any(len(nodes_of(ranks, node)) > 1 for ranks in mesh.groups(axis))
        self._below = 0.14 + 0.17 * lanes + 0.3 * far if self._linked else 0.12
        self._tall = self._rows * (self._high + self._below) - 0.3 * (far and self._linked) + 0.4

    def draw(self, title: str) -> style.Figure:
        foot = 0.32
        fig, self._axes = sheet(_WIDE, self._tall + foot)
        self._top = self._tall + foot - 0.4
        self._axes.text(0.1, self._top + 0.22, title, fontsize=11, fontweight="bold", va="center")
        for first in range(0, self._mesh.ranks, self._node):
            self._draw_node(range(first, min(first + self._node, self._mesh.ranks)))
        for piece in self._pieces:
            self._draw_piece(piece)
        self._draw_far_links()
        self._draw_foot()
        return fig

    def _corner(self, rank: int) -> tuple[float, float]:
        row, column = divmod(rank, self._node)
        return _LEFT + column * self._wide, self._top - row * (self._high + self._below) - self._high

    def _middle(self, rank: int) -> float:
        return self._corner(rank)[0] + self._wide / 2 - 0.03

    def _draw_node(self, ranks: range) -> None:
        x, y = self._corner(ranks[0])
        frame = {"facecolor": "none", "edgecolor": "#555555", "linewidth": 1.3}
        self._axes.add_patch(Rectangle((x - 0.07, y - 0.06), len(ranks) * self._wide + 0.08, self._high + 0.12, **frame))
        self._axes.text(0.1, y + self._high / 2, f"node {ranks[0] // self._node}", fontsize=9, va="center")
        for rank in ranks:
            self._draw_rank(rank)

    def _draw_rank(self, rank: int) -> None:
        corner, wide = self._corner(rank), self._wide - 0.06
        group = self._shown.get(rank)
        colour, hatch = LOOKS[group % len(LOOKS)] if group is not None else (style.FAINT, "")
        self._axes.add_patch(Rectangle(corner, wide, self._high, facecolor=colour, hatch=hatch, **HATCH))
        edge = {"edgecolor": style.INK, "linewidth": 2.6 if rank == self._rank else 0.8}
        self._axes.add_patch(Rectangle(corner, wide, self._high, facecolor="none", **edge))
        at = corner[0] + wide / 2, corner[1] + self._high / 2
        look = {"ha": "center", "va": "center"} | ({"color": style.BLACK, "bbox": style.PAPER} if group is not None else {})
        self._axes.text(*at, self._said(rank, group), fontsize=8 if self._linked else 7.5, **look)

    def _said(self, rank: int, group: int | None) -> str:
        if not self._linked:
            return f"{rank}" if group is None or self._wide < 0.5 else f"{rank} {letter(group)}"
        own = self._mesh.coordinates(rank)
        words = [f"{axis}{own[axis]}" for axis in self._mesh.order if self._mesh.size(axis) > 1]
        half = -(-len(words) // 2)
        return "\n".join([f"rank {rank}", *(" ".join(part) for part in (words[:half], words[half:]) if part)])

    def _line(self, piece: Piece) -> float:
        return self._corner(piece.ranks[0])[1] - 0.18 - 0.17 * piece.lane

    def _draw_piece(self, piece: Piece) -> None:
        """Joins the ranks of a group in one node, below their boxes."""
        if len(piece.ranks) == 1:
            return
        y, x = self._line(piece), [self._middle(rank) for rank in piece.ranks]
        self._axes.plot([x[0], x[-1]], [y, y], **_NEAR)
        self._axes.vlines(x, y, self._corner(piece.ranks[0])[1], color=style.INK, linewidth=1.6)
        self._name(piece.group, (x[0] + x[1]) / 2, y)

    def _draw_far_links(self) -> None:
        """From each node to the next one that has ranks of the group."""
        for one, other in zip(self._pieces, self._pieces[1:], strict=False):
            if one.group != other.group:
                continue
            x, alone = self._middle(one.ranks[0]), len(one.ranks) == 1
            start = self._corner(one.ranks[0])[1] if alone else self._line(one)
            end = self._corner(other.ranks[0])[1] + self._high
            self._axes.plot([x, self._middle(other.ranks[0])], [start, end], **_FAR)
            if alone:
                self._name(one.group, x, (start + end) / 2)

    def _name(self, group: int, x: float, y: float) -> None:
        self._axes.text(
            x, y, letter(group), fontsize=8, ha="center", va="center", bbox=style.PAPER, color=style.BLACK, zorder=4
        )

    def _draw_foot(self) -> None:
        if not self._linked:
            said = "letter: group" if self._wide >= 0.5 else "look: group"
            self._axes.text(0.1, 0.18, f"number: rank; {said}; frame: node", fontsize=8.5, va="center")
            return
        for x, look, said in ((0.1, _NEAR, "link inside a node"), (2.2, _FAR, "link between nodes")):
            self._axes.plot([x, x + 0.4], [0.18, 0.18], **look)
            self._axes.text(x + 0.5, 0.18, said, fontsize=8.5, va="center")
        self._axes.text(4.4, 0.18, "letter: group; frame: node", fontsize=8.5, va="center")


def letter(group: int) -> str:
    """A, B, …, Z, AA, AB, …"""
    before, own = divmod(group, 26)
    return (letter(before - 1) if before else "") + chr(ord("A") + own)


def _pieces(groups: Sequence[tuple[int, ...]], node: int, shown: dict[int, int]) -> list[Piece]:
    """Of each group that is shown, node by node; those that would meet have different lanes."""
    found: list[Piece] = []
    ends: dict[int, list[int]] = {}  # of a node's lanes, the last rank
    for group in groups:
        if group[0] not in shown:
            continue
        for at in nodes_of(group, node):
            ranks = tuple(rank for rank in group if rank // node == at)
            lanes = ends.setdefault(at, [])
            lane = next((k for k, end in enumerate(lanes) if end < ranks[0]), len(lanes)) if len(ranks) > 1 else -1
            if lane >= 0:
                lanes[lane:] = [ranks[-1], *lanes[lane + 1 :]]
            found.append(Piece(shown[group[0]], at, ranks, lane))
    return found


@style.styled
def groups(mesh: Mesh, rank: int = 0, node: int = 8) -> style.Figure:
    """A rank's group of every axis that has more than one rank: a row for each, with the ranks in it and where they lie.

    Raises ValueError for a rank that the mesh does not have, and for one that has no groups.
    """
    check_node(node)
    axes_of = used(mesh, rank)
    if not axes_of:
        raise ValueError("a mesh of one rank has no groups: give a degree above 1")
    fig, (axes,) = style.figure(width=9.2, height=1.35 + 0.42 * len(axes_of))
    for row, axis in enumerate(axes_of):
        group = mesh.group(axis, rank)
        near = [r for r in group if r // node == rank // node]
        _cells(axes, near, row, *INSIDE, mesh.ranks)
        _cells(axes, [r for r in group if r not in near], row, *BETWEEN, mesh.ranks)
        _cells(axes, [rank], row, style.INK, "", mesh.ranks)
        axes.annotate(
            _listed(group, node),
            (1, row),
            (8, 0),
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            va="center",
            fontsize=9,
        )
    edges = [first - 0.5 for first in range(node, mesh.ranks, node)]
    if len(edges) <= 64:
        axes.vlines(edges, -0.55, len(axes_of) - 0.45, color="#555555", linewidth=1.2)
    axes.set_yticks(range(len(axes_of)), list(axes_of.values()))
    axes.set(xlim=(-0.6, mesh.ranks - 0.4), ylim=(len(axes_of) - 0.4, -0.6), xlabel="rank (lines: nodes)")
    axes.set_title(f"The groups of rank {rank:,}: " + ", ".join(f"{a} {k}" for a, k in mesh.coordinates(rank).items()))
    axes.locator_params(axis="x", integer=True, nbins=6 if mesh.ranks > 16 else 16)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False)
    return fig


def _cells(axes: Axes, ranks: Sequence[int], row: int, colour: str, hatch: str, total: int) -> None:
    wide = max(0.8, total / 250)  # of very many ranks one would be too thin to be seen
    look = {"color": colour, "hatch": hatch, "edgecolor": style.INK, "linewidth": 0.5 if total <= 128 else 0.0}
    axes.barh([row] * len(ranks), wide, 0.6, [rank - wide / 2 for rank in ranks], **look)


def _listed(group: Sequence[int], node: int) -> str:
    """12, 13 in node 1; 8 ranks, every 16th, on 8 nodes."""
    nodes = nodes_of(group, node)
    named = (
        ", ".join(map(str, group))
        if len(group) <= 4 and group[-1] < 1000
        else f"{len(group):,} ranks, {group[0]:,} to {group[-1]:,}"
    )
    return f"{named}; " + (f"in node {nodes[0]:,}" if len(nodes) == 1 else f"on {len(nodes):,} nodes")
