"""Chapter 10's meshes: the ranks that share an axis, and the node that each lies in."""

import re
import textwrap
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import cycle, groupby
from math import inf
from string import ascii_lowercase, ascii_uppercase
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.patches import Rectangle

from manyranks.show import style, units
from manyranks.show.bars import Bars, corners
from manyranks.show.degree_curves import Curve
from manyranks.show.lines import curves as drawn
from manyranks.show.scenario import MFU, SHARED, Cost, Scenario
from manyranks.show.setting import tried
from manyranks.show.style import STEP, box, sheet
from manyranks.show.tables import Table, table
from manyranks.theory import ModelShape, Plan, pipeline
from manyranks.theory.cluster import Cluster
from manyranks.theory.nd.rules import Comparison
from manyranks.theory.nd.tokens import Balance, Check
from manyranks.theory.planner import Found
from manyranks.theory.published.error_bars import Checked, barely_fits, confidence, peak_confidence
from manyranks.theory.published.layouts import Neighbor
from manyranks.theory.step import StepTime
from manyranks.theory.written import degrees, kept

# An axis's words, from the innermost to the outermost of the usual order, those shared by dp × cp last.
NAMES = {"tp": "TP, tensor", "cp": "CP, context", "dp": "DP, data", "pp": "PP, pipeline", "data": "DP × CP, same parameters"}
NAMES |= {"shards": "shards of ZeRO", "replicas": "replicas of shards", "ep": "EP, experts", "ep_replicas": "same experts"}
INSIDE, BETWEEN = ("#9ecae1", ""), ("#fdae6b", "////")  # color and hatch
_ROWS, _RANKS = 4, 8  # nodes, and ranks of one, that are drawn at most
_WIDE, _LEFT, _BOX, _HIGH, _LANE, _GAP = 9.2, 0.75, 1.02, 0.72, 0.17, 0.3  # inches; a lane is for a line, a gap for links
_NEAR = {"color": style.INK, "linestyle": "-", "linewidth": 1.6}
_FAR = {"color": style.ORANGE, "linestyle": (0, (4, 2)), "linewidth": 1.8}
_LETTER = {"ha": "center", "va": "center", "bbox": style.PAPER, "color": style.BLACK, "zorder": 4, "fontsize": 8}
Mesh = Any  # parallel.mesh.Mesh, of a floor that is not imported here


@style.styled
def mesh(mesh: Mesh, node: int = 8, axis: str = "tp") -> style.Figure:
    """Draws ranks in their nodes, with their coordinates; groups of an axis have one look, one letter and lines between them.

    mesh: a parallel.mesh.Mesh
    node: accelerators of one

    Raises ValueError for an axis that the mesh does not have, and for more than 4 nodes or 8 accelerators in one.
    """
    groups = mesh.groups(axis)
    _check(node, _RANKS)
    if mesh.ranks > _ROWS * node:
        raise ValueError(f"{mesh.ranks:,} ranks in nodes of {node}: a picture shows {_ROWS} nodes; groups() shows any mesh")
    least, *_, most = sorted(2 * [len({rank // node for rank in group}) for group in groups])
    many = len(groups) > 1
    nodes = f"on {most} nodes" if least == most else f"on {least} to {most} nodes"
    nodes = f"each {nodes}" if many else nodes
    where = "nothing to send" if mesh.size(axis) == 1 else "inside a node" if most == 1 else nodes
    title = f"{NAMES[axis]}: {len(groups)} group{'s' if many else ''} of {mesh.size(axis)}, {where}"
    return _draw(mesh, min(node, mesh.ranks), list(_pieces(groups, node)), most > 1, title)


def _check(node: int, most: int | None = None) -> None:
    if type(node) is not int or node < 1 or (most and node > most):
        raise ValueError(f"node={node!r}: a node has a whole number of accelerators, 1 {f'to {most}' if most else 'or more'}")


def _pieces(groups: Sequence[tuple[int, ...]], node: int) -> Iterator[tuple[int, list[int], int]]:
    """Yields each group's number in each node, its ranks, and the lane of the line that joins them; -1 for a rank alone."""
    ends = defaultdict(list)  # of a node's lanes, the last rank
    for number, group in enumerate(groups):
        for at, together in groupby(group, lambda rank: rank // node):
            ranks, lanes, lane = list(together), ends[at], -1
            if len(ranks) > 1:
                lane = next((k for k, end in enumerate(lanes) if end < ranks[0]), len(lanes))
                lanes[lane : lane + 1] = [ranks[-1]]
            yield number, ranks, lane


def _draw(mesh: Mesh, node: int, pieces: list[tuple[int, list[int], int]], far: bool, title: str) -> style.Figure:
    """Draws a mesh, node by node.

    far: some links are between nodes
    """
    gap = _GAP if far else 0.0
    row = _HIGH + 0.14 + _LANE * (1 + max(lane for *_, lane in pieces)) + gap
    top = 0.32 + -(-mesh.ranks // node) * row - gap
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
            axes.text(*place, (ascii_uppercase + ascii_lowercase)[group], **_LETTER)
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
        for ranks, (color, hatch) in ((near, INSIDE), (set(group) - near, BETWEEN), ({rank}, (style.INK, ""))):
            axes.barh([row] * len(ranks), wide, 0.6, [r - wide / 2 for r in ranks], color=color, hatch=hatch, **edge)
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
    return {NAMES[first] + (", EP" if "ep" in others else ""): group for group, (first, *others) in found.items()}


def _listed(group: Sequence[int], node: int) -> str:
    """Lists ranks and nodes: "12, 13; in node 1", "8 ranks, 0 to 112; on 8 nodes"."""
    nodes, few = {rank // node for rank in group}, len(group) <= 4 and group[-1] < 1000
    named = ", ".join(map(str, group)) if few else f"{len(group):,} ranks, {group[0]:,} to {group[-1]:,}"
    return f"{named}; " + (f"in node {group[0] // node:,}" if len(nodes) == 1 else f"on {len(nodes):,} nodes")


_MOST = 6  # plans
_SAME = 0.005  # of the time: what loses less is as fast


class Steps(Bars):
    """The parts of the times of steps, a row for each plan, with its time, MFU and memory; a dashed frame around those that
    nobody has checked."""

    def __init__(self, axes: Axes, title: str, rows: Sequence[str], columns: int = 4, **labels):
        super().__init__(axes, {name: look for name, *look in STEP.values()}, title, rows, units.duration, columns, **labels)
        look = {"facecolors": "none", "edgecolors": style.INK, "linewidths": 1.3, "linestyles": [(0, (3, 1.5))]}
        self._frames = axes.add_collection(PolyCollection([], **look, gid="not checked"), autolim=False)

    @property
    def moving(self) -> list[Artist]:
        return [*super().moving, self._frames]

    def show(self, times: Sequence[StepTime | None], texts: Sequence[str], row: int = -9, most: float = 1e9) -> None:
        """Shows steps.

        times: None for a plan that can't be
        most: seconds beyond which bars are cut off
        """
        bars = [{name: time.parts[part] for part, (name, *_) in STEP.items()} if time else {} for time in times]
        self.update(bars, texts, row, min(most, max(time.seconds for time in times if time)) * (1 + 1e-9))
        rows = [(self.place(time.seconds), y) for y, time in enumerate(times) if time and confidence(time).missing]
        self._frames.set_verts(corners([(-0.006, end + 0.006, y - 0.42, y + 0.42) for end, y in rows]))


@style.styled
def plans(found: Sequence[Found] | Mapping[str, Found], title: str = "Plans, the fastest first") -> style.Figure:
    """Draws the parts of each plan's step, and beside them its time, MFU and memory with their error bars.

    A step that nobody has checked has a dashed frame. "of 80 GB!" says that a plan doesn't fit; "of 80 GB?" that it does, but
    by less than the error bar.

    found: what theory.planner.search returns, or name -> one of them, without those that are None: the first 6 are drawn
    title: stands above them

    Raises ValueError for no plans.
    """
    if isinstance(found, Mapping):
        found = {name: each for name, each in found.items() if each}
    if not found:
        raise ValueError("no plans: give those of theory.planner.search; it finds none where none fits in memory")
    shown = list(found.values() if isinstance(found, Mapping) else found)[:_MOST]
    names = [f"{name}: " for name in found] if isinstance(found, Mapping) else [""] * _MOST
    rows = [f"{name}{degrees(each.plan)}\n{kept(each.plan)}" for name, each in zip(names, shown, strict=False)]
    fig, (axes,) = style.figure(width=9.2, height=1.1 + 0.46 * len(shown))
    steps = Steps(axes, title, rows)
    axes.tick_params(axis="y", labelsize=8.5)
    texts = [f"{written(each.time, each.peak.total)}\n{bar(each.time)}|{peak_bar(each.time)}" for each in shown]
    steps.show([each.time for each in shown], texts)
    return fig


def written(time: StepTime, size: float, short: bool = False) -> str:
    """Time and MFU of a step, and bytes of a GPU: in two columns of Bars.

    Its memory follows where that's less ("of 80 GB!"), or is within the error bar ("of 80 GB?").
    """
    room = time.cluster.accelerator.memory
    full = "!" if size > room else "?" if barely_fits(time.shape, time.plan, room) else ""
    full = f" of {units.size(room)}{full}" if full else ""
    mfu = f"{time.mfu:.0%}" if short else f"MFU {time.mfu:.1%}"
    return f"{units.duration(time.seconds)}, {mfu}|{units.size(size)}{full}"


def bar(time: StepTime) -> str:
    """Says how far a predicted time is off, as "−16% to +17%", or "not checked"."""
    return _short(confidence(time))


def peak_bar(time: StepTime) -> str:
    """Says the same of the predicted peak of this step's plan."""
    return _short(peak_confidence(time.shape, time.plan))


def _short(checked: Checked) -> str:
    return re.split(r" \(|:", str(checked))[0]


_PANELS = {"tp": "TP", "cp": "CP", "pp": "PP", "ep": "EP", "zero": "ZeRO stage", "dp_shard": "shards of HSDP"}
_PANELS |= {"microbatch": "micro-batch b"}


@style.styled
def over_degrees(shape: ModelShape, plan: Plan, cluster: Cluster) -> style.Figure:
    """Draws MFU over each degree of a plan, side by side, with all others as they are.

    DP is what the same GPUs leave. A ring: the plan; a cross: what doesn't fit in memory; values that can't be are left out.

    shape: of the model
    plan: what is changed in one place at a time
    cluster: one with this many GPUs or more

    Raises ValueError for a plan that doesn't fit the shape or the cluster.
    """
    now = Scenario(shape, plan, cluster).cost
    left_out = {"ep": not shape.experts, "dp_shard": plan.zero < 3}
    names = [name for name in _PANELS if not left_out.get(name)]
    wide, high = 3.0, 0.35 + 1.7 * -(-len(names) // 3)
    fig = style.Figure(figsize=(3 * wide, high), layout="none")
    along = {name: _along(shape, plan, cluster, name) for name in names}
    least = max(cost.mfu for each in along.values() for cost in each.values())
    for k, (name, costs) in enumerate(along.items()):
        place = (wide * (k % 3) + 0.62, high - 1.7 * (k // 3) - 1.35, wide - 0.74, 0.98)
        axes = fig.add_axes(np.divide(place, 2 * (3 * wide, high)))
        Curve(axes, MFU, _PANELS[name], list(map(str, costs)), True).update(
            list(costs.values()), now, list(costs).index(getattr(plan, name) or plan.dp), least
        )
        large = [at for at, cost in enumerate(costs.values()) if cost.held > cost.room]
        (line,) = (line for line in axes.lines if line.get_gid() == "curve")
        look = {"color": style.ORANGE, "markersize": 8, "markeredgewidth": 2, "gid": "does not fit"}
        axes.plot(large, line.get_ydata()[large], "x", **look)
    said = f"ring: {degrees(plan)}; cross: does not fit in {units.size(cluster.accelerator.memory)}"
    fig.text(0.62 / (3 * wide), 0.1 / high, said, fontsize=9)
    return fig


def _along(shape: ModelShape, plan: Plan, cluster: Cluster, name: str) -> dict[int, Cost]:
    """Returns what a step costs with each value of this field that can be, on as many GPUs."""

    def cost(value: int) -> Cost:
        others = plan.gpus // plan.dp // getattr(plan, name) * value if name in ("tp", "cp", "pp") else plan.gpus // plan.dp
        other = replace(plan, **{name: value}, dp=plan.gpus // others)
        if other.gpus != plan.gpus or (other.pp > 1 and other.microbatches < pipeline.fewest(other.schedule, other.pp)):
            raise ValueError
        return Scenario(shape, other, cluster).cost

    values = {*SHARED.get(name, SHARED["dp"])[1], getattr(plan, name) or plan.dp}
    each = {value: tried(cost, value) for value in sorted(values)}
    return {value: known for value, known in each.items() if known}


@style.styled
def layouts(named: Mapping[str, Sequence[Neighbor]]) -> style.Figure:
    """Draws each layout and its neighbors: the parts of a step, its time against the first one's, and bytes of a GPU.

    named: name -> what theory.published.layouts.why_not returns; the first is the layout as it was published
    Raises ValueError for none, and where the first neighbor is not possible.
    """
    if not named or not all(each and each[0].time for each in named.values()):
        raise ValueError("give 1 layout or more, and of each what why_not returns: the first row is one that can be")
    heights = [0.9 + 0.24 * len(each) for each in named.values()]
    fig, panels = style.figure(1, len(named), 9.2, sum(heights), height_ratios=heights)
    for (name, rows), axes in zip(named.items(), panels, strict=True):
        steps = Steps(axes, name, [row.name for row in rows])
        steps.show([row.time for row in rows], [_label_of_step(row, rows[0]) for row in rows], 0, 2 * rows[0].time.seconds)
    return fig


def _label_of_step(row: Neighbor, first: Neighbor) -> str:
    if row.time is None:
        return "not possible: " + textwrap.shorten(row.impossible, 40, placeholder=" …")
    same = "" if row is first else " (as long)"
    change = f" ({row.slower:+.0%})".replace("-", "−") if abs(row.slower) >= _SAME else same
    size, again = written(row.time, row.peak.total).partition("|")[2], row.plan.recompute
    # What doesn't fit has no room for more words, either
    told = again != first.plan.recompute and not size.endswith(("!", "?"))
    said = {"none": "", "full": ", recompute full"}.get(again, f", {again}") if told else ""
    return f"{units.duration(row.time.seconds)}{change}|{size}{said}"


def regimes(rows: Sequence[Comparison]) -> Table:
    """Compares for each row of theory.nd.rules.compare the rule's regime and the planner's: what it loses at best, in all."""
    cells = []
    for row in rows:
        rule, best = units.duration(row.rule.seconds), units.duration(row.best.seconds)
        losses = [f"{loss:.0%}" if loss >= _SAME else "–" for loss in (row.regime_loss, row.loss)]
        regime = "the same" if row.same else row.best_regime
        cells.append([row.name, f"{row.tokens:,.0f}", row.rule_regime, rule, regime, best, *losses])
    return table(["", "tokens/GPU", "rule of thumb", "step", "planner", "step", "its regime loses", "the rule loses"], cells)


def twin(
    theory: Sequence[Mapping[str, int]], measured: Sequence[Mapping[str, int]], at: Sequence[Mapping[str, int]] = ()
) -> Table:
    """Shows bytes of every rank: one number where both agree, else "measured ≠ theory". Below them are the sums of all ranks.

    theory, measured: by rank, quantity ("tp", "states") -> bytes; a quantity that no rank has is left out
    at: by rank, its coordinates, as Mesh.coordinates gives them

    Raises ValueError unless both have the same ranks and quantities.
    """
    numbers, quantities = map(len, (theory, measured, at or theory)), map(frozenset, (*theory, *measured))
    if len(set(numbers)) > 1 or len(set(quantities)) != 1:
        places = f", {len(at)} places" if at else ""
        given = f"{len(theory)} ranks in theory, {len(measured)} measured{places}"
        raise ValueError(f"{given}: give as many of each, 1 or more, with the same quantities")
    pairs = list(zip(theory, measured, strict=True))
    shown = [name for name in theory[0] if any(each[name] for each in (*theory, *measured))]
    places = [[" ".join(f"{axis}{k}" for axis, k in each.items())] for each in at] or [[]] * len(pairs)
    rows = [[rank, *place] for rank, place in enumerate(places)]
    for row, (a, b) in zip(rows, pairs, strict=True):
        row += [b[name] if a[name] == b[name] else f"{b[name]:,} ≠ {a[name]:,}" for name in shown]
    sums = {"all, theory": lambda a, b: a, "all, measured": lambda a, b: b, "difference": lambda a, b: abs(b - a)}
    rows += [
        [said, *([""] if at else []), *(sum(of(a[n], b[n]) for a, b in pairs) for n in shown)] for said, of in sums.items()
    ]
    return table(["rank", *(["at"] if at else []), *shown], rows)


_CURVES, _LOWEST = 8, 1e-3  # curves, and a ratio


@style.styled
def tokens(curves: Mapping[str, Sequence[Balance]], checks: Mapping[str, Check] = {}) -> style.Figure:
    """Draws a line for each name: where it is above 1, all that is sent takes longer than all that it can hide under.

    curves: name ("TP 8") -> what theory.nd.tokens.curve returns; at most 8
    checks: name -> what theory.nd.tokens.check has: a dot where step.estimate crosses 1, a bar where the closed form does

    Raises ValueError for no or too many curves, for one without points, and for a check of none of them.
    """
    if not 1 <= len(curves) <= _CURVES:
        raise ValueError(f"{len(curves)} curves: a picture shows 1 to {_CURVES}")
    if empty := [name for name, points in curves.items() if not points]:
        raise ValueError(f"{empty[0]!r} has no points: theory.nd.tokens.curve leaves out tokens that the axis cannot take")
    if unknown := [name for name in checks if name not in curves]:
        raise ValueError(f"a check of {unknown[0]!r}: the curves are {', '.join(curves)}")
    ratios = {name: {each.tokens: each.ratio for each in points} for name, points in curves.items()}
    x = sorted({tokens for each in ratios.values() for tokens in each})
    named = {name: [max(each[t], _LOWEST / 10) if t in each else 0 for t in x] for name, each in ratios.items()}
    of = {"xlabel": "tokens per GPU", "ylabel": "communication ÷ compute", "title": "Tokens per GPU decide"}
    fig = drawn(x, named, **of, yunit="{:g}".format, xticks=x)
    (axes,) = fig.axes
    axes.get_legend().remove()
    axes.set(xlim=(x[0], x[-1]), ylim=(max(axes.get_ylim()[0], _LOWEST), min(axes.get_ylim()[1], 100)))
    lines = dict(zip(curves, axes.lines, strict=True))
    for (name, line), dashes in zip(lines.items(), cycle(("-", "--", "-.", ":")), strict=False):
        line.set(linestyle=dashes, marker="")
        if check := checks.get(name):
            line.set_label(_label(name, check, x[0]))
            for at, look in ((check.real, "o"), (check.formula, "|")):
                if x[0] <= at < inf:
                    axes.plot([at], [1], look, color=line.get_color(), markersize=9, markeredgewidth=2)
    axes.axhline(1, color=style.INK, linewidth=1.2)
    said = "above 1: communication-bound; below 1: compute-bound"
    if checks:
        said += "\n● step.estimate crosses 1, ❙ the closed form does"
    axes.text(0.99, 0.99, said, fontsize=9, ha="right", va="top", transform=axes.transAxes)
    fig.set_size_inches(9.2, 4.4)
    ordered = sorted(lines, key=lambda name: -curves[name][-1].ratio)  # as they end from above
    fig.legend(handles=[lines[name] for name in ordered], loc="outside right upper", fontsize=8.5, labelspacing=0.9)
    return fig


def _label(name: str, check: Check, least: float) -> str:
    below, above = f"below {least:,} tokens", "always above 1"
    both = check.real, check.formula
    real, closed = (above if at == inf else f"{at:,.0f} tokens" if at >= least else below for at in both)
    return f"{name}: {real}" if closed == real else f"{name}: {real}\n(closed form: {closed})"
