"""Chapter 08's pictures: where tokens go, how many rows travel, how even the load is; and the explorer."""

import functools
from collections import namedtuple
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from matplotlib.ticker import EngFormatter

from manyranks.show import style, units
from manyranks.show.bars import Bars
from manyranks.show.drawings import Figure
from manyranks.show.explorer import Board, Explorer, Measure, Setting, choice, value_slider
from manyranks.show.labels import word
from manyranks.show.lines import columns, write
from manyranks.show.scenario import BUBBLE, MEMORY, MFU, Cost, Scenario, controls
from manyranks.show.setting import MUCH, tried
from manyranks.show.style import LOOKS, STEP, box
from manyranks.show.units import percent
from manyranks.theory import ModelShape, Plan, clusters, flops, models
from manyranks.theory import expert as theory
from manyranks.theory.names import Named

Rows = Sequence[Sequence[int]]
_CROSSES, _INSIDE = (style.ORANGE, 2.5, "crosses"), (style.INK, 1.0, "inside")  # looks of arrows, and their names
_LOST = {"facecolor": "none", "edgecolor": style.ORANGE, "linestyle": (0, (2, 1)), "linewidth": 1.3}
_SMALL = {"fontsize": 8, "va": "center"}


@style.styled
def routing(
    chosen_TK: Rows, experts: int, ranks: int = 1, kept_TK: Rows | None = None, capacity: int | None = None
) -> style.Figure:
    """Draws which token goes to which expert, in the look of the rank that has it; beside it the copies that experts get.

    chosen_TK: each token's experts, its first choice first; a cell says which choice it is
    kept_TK: the same with −1 where a copy was dropped, as Routing.experts_TK; their numbers are crossed out
    experts, ranks: how many there are; up to 8 ranks share the experts in blocks
    capacity: copies that an expert takes

    Raises ValueError for experts that are not there, ranks that do not share them, and copies that nobody chose.
    """
    chosen = np.asarray(chosen_TK)
    found = chosen if kept_TK is None else np.asarray(kept_TK)
    T, own = len(chosen), experts // ranks
    if chosen.min() < 0 or chosen.max() >= experts or experts % ranks or ranks > len(LOOKS):
        there = f"give experts from 0 to {experts - 1}, and 1 to {len(LOOKS)} ranks that share them evenly"
        raise ValueError(f"chosen_TK has {chosen.min()} to {chosen.max()}, ranks={ranks}: {there}")
    if found.shape != chosen.shape or ((found != chosen) & (found != -1)).any():
        raise ValueError("kept_TK is not chosen_TK with −1 where a copy was dropped: give experts before and after dropping")
    wide, high = min(9.4, 4.4 + 0.3 * T), 1.7 + 0.27 * experts
    fig, (cells, loads) = style.figure(2, 1, wide, high, sharey=True, width_ratios=(0.3 * T, 2.6))
    for (token, nth), expert in np.ndenumerate(chosen):
        if found[token, nth] >= 0:
            box(cells, (token - 0.5, expert - 0.5), 1, 1, expert // own, str(nth + 1))
        else:
            cells.add_patch(Rectangle((token - 0.45, expert - 0.45), 0.9, 0.9, **_LOST))
            cells.text(token, expert, nth + 1, ha="center", **_SMALL)
            cells.plot([token - 0.45, token + 0.45], [expert + 0.45, expert - 0.45], "-", color=style.ORANGE, linewidth=1.2)
    names = [f"rank {k // own}, expert {k}" if k % own == 0 and ranks > 1 else f"{k}" for k in range(experts)]
    dropped = "; crossed out: dropped" if (found < 0).any() else ""
    cells.set(title="tokens and their choices", xlabel=f"token; 1: its first choice, 2: second, …{dropped}", xticks=range(T))
    cells.set(xlim=(-0.5, T - 0.5), ylim=(experts - 0.5, -0.5), yticks=range(experts), yticklabels=names)
    _rule(cells, T, experts, own)
    _loads(loads, *(np.bincount(chosen[which], minlength=experts) for which in (found >= 0, found < 0)), own, capacity)
    return fig


def _loads(axes: Axes, kept: np.ndarray, lost: np.ndarray, own: int, capacity: int | None) -> None:
    """A bar for each expert, what was dropped at its end, with the mean and the capacity as lines."""
    mean, longest = (kept + lost).mean(), max(*(kept + lost), capacity or 0)
    said = [f"dashed, the mean: {mean:.3g}", f"largest ÷ mean: {max(kept + lost) / mean:.2f}"]
    for expert, (held, dropped) in enumerate(zip(kept, lost, strict=True)):
        color, hatch = LOOKS[expert // own]
        axes.barh(expert, held, 0.72, color=color, hatch=hatch, edgecolor="#666666", linewidth=0.6)
        axes.barh(expert, dropped, 0.72, left=held, visible=bool(dropped), **_LOST)
        axes.text(1.08 * longest, expert, f"{held}, {dropped} dropped" if dropped else f"{held}", **_SMALL)
    axes.axvline(mean, color=style.INK, linestyle="--", linewidth=1.3)
    if capacity is not None:
        axes.axvline(capacity, color=style.ORANGE, linestyle="-", linewidth=2)
        said.insert(1, f"thick line, the capacity: {capacity}")
    axes.set(title="token copies per expert", xlabel="\n".join(said), xlim=(0, 1.9 * longest), xticks=[])
    axes.grid(visible=False)


def _rule(axes: Axes, columns: int, rows: int, own: int) -> None:
    """Lines between cells, and thick ones after every so many rows."""
    axes.vlines(np.arange(columns + 1) - 0.5, -0.5, rows - 0.5, colors=style.INK, linestyles="-", linewidths=0.4)
    wide = [0.4 if row % own else 1.4 for row in range(rows + 1)]
    axes.hlines(np.arange(rows + 1) - 0.5, -0.5, columns - 0.5, colors=style.INK, linestyles="-", linewidths=wide)
    axes.tick_params(length=0, labelsize=8, grid_linewidth=0)
    axes.spines[:].set_visible(False)


@style.styled
def travels(rows: Rows) -> style.Figure:
    """Draws the rows that travel as bands, from the ranks that send them to those that get them.

    rows: n × n numbers: what rank i (a row) sends to rank j (a column)
    """
    sent, curve = np.asarray(rows), np.linspace(0, 1, 60)
    n, gap = len(sent), 0.05 * sent.sum()
    fig, (axes,) = style.figure(width=7.4, height=3.6)
    ends = [np.cumsum([0, *(sums + gap)[:-1]]) for sums in (sent.sum(1), sent.sum(0))]
    for (rank, other), count in np.ndenumerate(sent):
        starts = ends[0][rank] + sent[rank, :other].sum(), ends[1][other] + sent[:rank, other].sum()
        lower = starts[0] + (starts[1] - starts[0]) * (3 * curve**2 - 2 * curve**3)
        color, hatch = LOOKS[rank]
        axes.fill_between(curve, lower, lower + count, color=color, hatch=hatch, edgecolor="white", linewidth=0.8, alpha=0.85)
        for x, y in zip((0.04, 0.96), starts, strict=True) if count > 0.025 * sent.sum() else ():
            look = {"ha": "center", "va": "center", "color": style.BLACK, "bbox": style.PAPER | {"pad": 0.8}, "fontsize": 8}
            axes.text(x, y + count / 2, f"{count}", **look)
    for side, sums, verb in ((0, sent.sum(1), "sends"), (1, sent.sum(0), "gets")):
        for rank, (start, count) in enumerate(zip(ends[side], sums, strict=True)):
            said = f"rank {rank}\n{verb} {count}"
            axes.text((-0.02, 1.02)[side], start + count / 2, said, ha=("right", "left")[side], va="center", fontsize=9)
    axes.set(xlim=(-0.16, 1.16), ylim=(sent.sum() + (n - 1) * gap, 0))
    axes.axis("off")
    return fig


@style.styled
def hops(chosen: Sequence[int] = (1, 9, 10, 14)) -> style.Figure:
    """Draws how a token of rank 0 gets to its experts on 2 nodes of 2 ranks: by one hop, a copy for each; by two, one copy for
    the other node, which goes on from the rank with the same place there. Thick arrows cross to the other node.

    chosen: the token's experts, up to 8 of 0 to 15; each rank has 4
    Raises ValueError for experts that are not there or chosen twice.
    """
    if not 1 <= len(chosen) <= 8 or len(set(chosen)) < len(chosen) or not set(chosen) <= set(range(16)):
        raise ValueError(f"chosen={list(chosen)}: 1 to 8 different experts of 0 to 15")
    fig, away = Figure(9.0, 3.2), sum(expert >= 8 for expert in chosen)
    for x, name, copies in ((0.1, "one hop", away), (4.9, "two hops", min(1, away))):
        said = f"{copies} copies cross" if copies != 1 else "1 copy crosses"
        fig.write(x, 0.2, f"{name}: {said}", size=11, ha="left", weight="bold")
        token = copy = (x + 1.05, 1.175)  # left end of what rank 0 has, and of what is at its place in the other node
        fig.block(*token, 0.5, 0.24, "optimizer", "token", size=8.5)
        if two := name == "two hops" and away > 0:
            copy = (x + 2.45, 1.175)
            fig.block(*copy, 0.5, 0.24, "optimizer", "copy", size=8.5)
            fig.arrow(((token[0] + 0.5, 1.295), (copy[0], 1.295)), *_CROSSES)
        for expert in range(16):
            far, y = expert // 8, 0.78 + expert % 8 * 0.2625
            left, look = x + 2.35 * far, {"size": 8.5, "hollow": expert not in chosen}
            fig.block(left + (0.3, 0.99)[far], y - 0.13, 0.36, 0.26, "parameters", f"{expert}", **look)
            if expert % 4 == 0:
                fig.frame(left, y - 0.13, 1.65, 1.05)
                fig.write(left + (0.15, 1.5)[far], y + 0.4, f"rank {expert // 4}", size=8.5, rotation=90)
            if expert % 8 == 0:
                fig.write(left + 0.83, y - 0.25, f"node {far}", size=9)
            if expert in chosen:
                start, end = (copy[0] + 0.5, x + 3.34) if far else (token[0], x + 0.66)
                fig.arrow(((start, 1.295), (end, y)), *(_CROSSES if far and not two else _INSIDE))
    for x, look, said in ((0.1, _CROSSES, "to another node"), (2.2, _INSIDE, "inside a node")):
        fig.arrow(((x, 3.02), (x + 0.45, 3.02)), *look)
        fig.write(x + 0.53, 3.02, said, size=9, ha="left")
    fig.write(4.2, 3.02, "filled: the experts that the token chose", size=9, ha="left")
    return fig


Numbers = Mapping[str, Mapping[str, float]]
Floats = Sequence[float]
_HELD = {"color": "#cfe3f1", "hatch": "////", "edgecolor": style.BLUE, "linewidth": 0.8}
_USED = {"color": style.BLUE, "edgecolor": style.INK, "linewidth": 0.8}
# What a rank does, from below: color, hatch and its color.
_PARTS = {"rank 1 computes": (style.BLUE, "", style.BLUE), "its messages are on the way": ("#cfe3f1", "....", style.BLUE)}
_PARTS |= {"it waits for rank 0's products": ("#fdd9b5", "////", style.ORANGE)}


@style.styled
def parameters(*shapes: ModelShape) -> style.Figure:
    """Draws what models hold next to what a token uses of it: parameters, and FLOPs of training on it, s = 4,096, causal."""
    fig, (held, used) = style.figure(columns=2, width=9.2, height=1.3 + 0.62 * len(shapes), sharey=True)
    rows, work = range(len(shapes)), [flops.per_token(shape, 4096, "causal") for shape in shapes]
    every, active = ([getattr(shape, name) for shape in shapes] for name in ("parameters", "active_parameters"))
    bars = held.barh(rows, every, 0.62, label="held: all parameters", **_HELD), used.barh(rows, work, 0.34, **_USED)
    held.barh(rows, active, 0.34, label="used: those that a token meets", **_USED)
    names = [f"{s.name}\n" + (f"{s.top_k} of {s.experts} experts" if s.experts else "dense") for s in shapes]
    billions = ([f"{n / 1e9:.3g} B" for n in numbers] for numbers in (every, active))
    texts = [f"{n}, used: {m}" if n != m else f"{n}: all" for n, m in zip(*billions, strict=True)], map(units.flops, work)
    for axes, drawn, said in zip((held, used), bars, texts, strict=True):
        axes.bar_label(drawn, said, padding=5, fontsize=9)
        axes.set_xlim(0, 1.42 * max(drawn.datavalues))
        axes.locator_params(axis="x", nbins=5)
        axes.tick_params(axis="y", length=0, grid_linewidth=0)
    held.set(title="Held", xlabel="parameters", ylim=(len(shapes) - 0.5, -0.5), yticks=rows, yticklabels=names)
    used.set(title="Used", xlabel="FLOPs per token, forward + backward,\ns = 4,096, causal")
    held.xaxis.set_major_formatter(lambda number, _: f"{number / 1e9:,.0f} B" if number else "0")
    used.xaxis.set_major_formatter(EngFormatter("FLOP"))
    fig.legend(loc="outside upper left", ncols=2, handlelength=1.8)
    return fig


@style.styled
def copies(measured: Numbers, predicted: Numbers, ylabel: str, said: Callable[[float], str]) -> style.Figure:
    """Draws what leaves its node, measured as bars and theory's as rings: a group for each way, a bar for each routing.

    measured, predicted: way ("one hop", "two hops") -> routing ("free", "node-limited"; up to 5) -> copies, or bytes
    ylabel, said: what the numbers are, and number -> text; units.size for bytes
    """
    fig, (axes,) = style.figure(width=7.6, height=3.5)
    routings = list(next(iter(measured.values())))
    found, theory = (np.array([[of[way][name] for way in measured] for name in routings]) for of in (measured, predicted))
    sides = [{f"{name}, measured": numbers} for name, numbers in zip(routings, found, strict=True)]
    x = np.ravel(columns(axes, list(measured), sides, said))
    axes.plot(x, theory.flat, "o", color=style.INK, markerfacecolor="white", markersize=10, markeredgewidth=1.8, label="theory")
    texts = [f"{said(one)}\ntheory {said(other)}" for one, other in zip(found.flat, theory.flat, strict=True)]
    write(axes, x, np.fmax(found, theory).flat, texts, 8, 8.5)
    axes.set(ylabel=ylabel, ylim=(0, 1.2 * axes.get_ylim()[1]))
    fig.legend(loc="outside upper left", ncols=5, handlelength=1.8)
    return fig


@style.styled
def balancing(runs: Mapping[str, Floats], loads: Mapping[str, Sequence[Floats]]) -> style.Figure:
    """Draws imbalance over steps, a line for each run, and below it the load of each expert, a panel for each run.

    runs: name -> max load ÷ mean load of each step
    loads: name -> step -> copies that each expert got; shown as multiples of the mean, white for none, black for 3 or more
    """
    fig = style.Figure(figsize=(8.8, 5.2), layout="constrained")
    axes, *panels = fig.subplot_mosaic([[-1] * len(loads), range(len(loads))], height_ratios=(1.35, 1)).values()
    for marker, (name, found) in zip(style.MARKERS, runs.items(), strict=False):
        look = {"marker": marker, "markersize": 5, "markevery": max(1, len(found) // 10), "linewidth": 1.5}
        axes.plot(range(1, len(found) + 1), found, label=f"{name}: {found[-1]:.2f} at the end", **look)
    axes.set(xlabel="step", ylabel="largest load ÷ mean load")
    axes.locator_params(axis="x", integer=True)
    axes.legend(loc="lower left", bbox_to_anchor=(-0.01, 1.0), ncols=2, handlelength=3)
    for panel, (name, each) in zip(panels, loads.items(), strict=True):
        found = np.asarray(each, float).T  # of an expert in each step
        ticks = range(0, len(found), -(-len(found) // 8))
        panel.set(title=name, xlabel="step", ylabel="expert" if panel is panels[0] else "", yticks=ticks)
        look = {"cmap": "Greys", "vmin": 0, "vmax": 3, "aspect": "auto", "interpolation": "nearest"}
        drawn = panel.imshow(found / found.mean(axis=0), extent=(0.5, len(each) + 0.5, len(found) - 0.5, -0.5), **look)
        panel.locator_params(axis="x", nbins=4, integer=True)
        panel.grid(visible=False)
    bar = fig.colorbar(drawn, ax=panels, aspect=12, pad=0.01, label="load ÷ mean")
    bar.set_ticks(range(4), labels=["0", "1", "2", "3 or more"])
    return fig


@style.styled
def waiting(
    imbalance: Floats, replayed: Floats, computes: Floats, messages: Floats, predicted: Mapping[float, float], ylabel: str
) -> style.Figure:
    """Draws a step's time over the imbalance of the load: replayed points, theory's line, and what rank 1 does meanwhile.

    imbalance: load of the fullest rank, rank 0, ÷ the mean; one for each run, as in the next three
    replayed: seconds of a step
    computes, messages: seconds that rank 1 computes, and that its messages are on the way
    predicted: imbalance -> seconds
    ylabel: what the seconds are
    """
    order = np.argsort(imbalance)
    x, whole, works, sends = (np.asarray(each, float)[order] for each in (imbalance, replayed, computes, messages))
    fig, (axes,) = style.figure(width=7.6, height=3.9)
    ends = pairwise((0 * x, works, works + sends, whole))
    for (label, (face, hatch, edge)), (low, high) in zip(_PARTS.items(), ends, strict=True):
        axes.fill_between(x, low, high, label=label, linewidth=0, facecolor=face, hatch=hatch, edgecolor=edge)
        axes.plot(x, high, color=style.INK, linestyle="-", linewidth=0.6)
    axes.plot(sorted(predicted), [predicted[at] for at in sorted(predicted)], color=style.INK, linestyle="-", label="theory")
    axes.plot(x, whole, "o", color=style.ORANGE, markersize=8, linestyle="none", label="replayed")
    room, last = 0.1 * (x[-1] - x[0]) or 0.1, -np.inf
    for at, seconds, busy in zip(x, whole, works, strict=True):
        if at - last >= 1.4 * room:  # else numbers would lie on those before
            last, look = at, {"ha": "center", "va": "center", "color": style.BLACK, "bbox": style.PAPER, "fontsize": 8.5}
            axes.annotate(units.duration(seconds), (at, seconds), (2, 8), textcoords="offset points", ha="right", fontsize=8.5)
            axes.text(at, busy / 2, units.duration(busy), **look)
    top = 1.3 * max([*whole, *predicted.values()])
    axes.set(xlabel="largest load ÷ mean load", ylabel=ylabel, xlim=(x[0] - room, x[-1] + room), ylim=(0, top))
    axes.yaxis.set_major_formatter(lambda seconds, _: units.duration(seconds) if seconds else "0")
    fig.legend(loc="outside upper left", ncols=3, handlelength=2.2)
    return fig


# GPUs, sequences of a step (4,096 tokens each), precision. DeepSeek-V3: arXiv 2412.19437, sections 3 and 4.2; V2's batch: arXiv
# 2405.04434, section 3.1.2. The rest are round numbers.
MODELS = {"deepseek-v3": (2048, 15360, "fp8"), "deepseek-v2": (1024, 9216, "bf16"), "qwen3-235b-a22b": (1024, 4096, "bf16")}
MODELS = Named("model", MODELS | {"mixtral-8x22b": (512, 2048, "bf16"), "mixtral-8x7b": (256, 1024, "bf16")})
CLUSTERS = {name: clusters[name] for name in ("h800", "h100-dgx", "a100-dgx", "b200-dgx", "gb200-nvl72", "tpu-v5p")}
CLUSTERS = Named("cluster", CLUSTERS | {"gb200-nvl72": clusters["gb200-nvl72"].with_nodes_of(64)})  # of its 72, 64 work
# limit: nodes that a token may reach, 0 for all
CHOICES = {"pp": [1, 2, 4, 8, 16, 32], "ep": [1, 2, 4, 8, 16, 32, 64, 128], "tp": [1, 2, 4, 8], "etp": (1, 2, 4, 8)}
CHOICES |= {"limit": (0, 4, 2, 1), "imbalance": (1, 1.1, 1.2, 1.5, 2, 3, 4), "schedule": ("dualpipe", "zb-v", "1f1b")}
WAYS = {"one hop": (1, 0), "two hops": (2, 0), "4 nodes at most": (2, 4), "2 nodes at most": (2, 2), "1 node at most": (2, 1)}


_seconds = "{:,.3g} s".format  # of a step, always in the same unit, so that steps can be compared
_TIME = {name: STEP[name] for name in ("compute", "tensor", "expert", "bubble")}
_TIME |= {"waits": ("waits for the fullest", style.YELLOW, "||||"), "rest": ("all else", style.INK, "")}
_TRAFFIC = {"inside a node": ("#9ecae1", "----"), "between nodes": (style.ORANGE, "////")}
_REMEDIES = {"waits": ["imbalance"], "tensor": ["etp", "tp"], "expert": ["schedule"], "bubble": ["pp"], "rest": ["ep"]}
_WORDS = {"imbalance": "a balanced load", "etp": "whole experts"}
_NAMED = {"waits": "waiting for the fullest rank", "tensor": "TP messages", "rest": "DP, PP and optimizer"}
_NAMED |= {"expert": "tokens to experts", "bubble": "bubble"}


class Degrees(namedtuple("Degrees", "model cluster pp ep tp etp limit imbalance schedule"), Setting):
    """Holds what the controls say. ep: as asked, or as many as there are ranks of a stage for them, or experts."""

    choices, remedies, room, words = CHOICES, _REMEDIES, ("ep", "pp", "tp"), _WORDS

    @property
    def most(self) -> tuple[int, str]:
        """The largest e that there can be, and why."""
        ranks, experts = MODELS[self.model][0] // (self.pp * self.etp), models[self.model].experts
        return min((ranks, f"{ranks} ranks of a stage"), (experts, f"{experts} experts"))

    @property
    def ranks(self) -> int:
        """The e ranks that share the experts."""
        return min(self.ep, self.most[0])

    @property
    def nodes(self) -> int:
        """The nodes over which these are spread."""
        return self.ranks // CLUSTERS[self.cluster].route(self.ranks, self.etp).inside

    @property
    @functools.lru_cache(maxsize=16384)  # noqa: B019 a setting is a few numbers; a redraw asks dozens of them
    def scenario(self) -> Scenario:
        """Makes a node's experts a group if a token may not reach all. Raises ValueError if it reaches too few experts."""
        (gpus, batch, precision), whole, nodes = MODELS[self.model], models[self.model], self.nodes
        groups, chosen = (nodes, self.limit) if 0 < self.limit < nodes and whole.experts % self.ranks == 0 else (1, 1)
        if (found := whole.experts // groups * chosen) < whole.top_k:
            held = f"{self.limit} of {nodes} nodes hold{'s' if self.limit == 1 else ''} {found} experts"
            raise ValueError(f"{held}, but a token needs {whole.top_k}: allow more nodes per token")
        if batch % (dp := gpus // (self.pp * self.tp)):
            left = f"PP {self.pp} × TP {self.tp} leaves {dp:,} DP ranks"
            raise ValueError(f"{left}, which don't evenly divide the batch of {batch:,} sequences: raise PP or TP")
        chip = CLUSTERS[self.cluster].accelerator
        precision = precision if chip.flops_fp8 > chip.flops else "bf16"
        degrees = {"dp": dp, "pp": self.pp, "tp": self.tp, "ep": self.ranks, "etp": None if self.etp == self.tp else self.etp}
        plan = Plan(**degrees, seq=4096, batch=batch, precision=precision, schedule=self.schedule, stack="hai-llm")
        shape = replace(whole, expert_groups=groups, groups_per_token=chosen)
        return Scenario(shape, plan, CLUSTERS[self.cluster], self.imbalance)

    @property
    def possible(self) -> bool:
        return self.ranks == self.ep and tried(lambda: self.cost) is not None

    def parts(self) -> dict[str, float]:
        """Seconds of each part of a step with a balanced load, and "waits": what an unequal load adds."""
        balanced = self._replace(imbalance=1).scenario.time
        named = {name: getattr(balanced, name) for name in ("compute", "tensor", "expert", "bubble")}
        return named | {"waits": max(0.0, self.cost - balanced.seconds), "rest": balanced.seconds - sum(named.values())}

    def way(self, hops: int = 2) -> theory.Way:
        here = self.scenario
        return theory.way(here.shape, here.plan, here.cluster, here.imbalance, hops)

    def where(self) -> str:
        return f"{self.model} on {self.scenario.cluster.name}, EP {self.ranks}, {self.schedule}"

    def numbers(self) -> dict[str, str]:
        plan, (inside, between, _), experts = self.scenario.plan, self.way(), models[self.model].experts
        nodes = f"{self.ranks} in {self.nodes} node{'s' if self.nodes > 1 else ''}"
        numbers = {"GPUs = DP × PP × TP": f"{plan.gpus:,} = {plan.dp} × {self.pp} × {self.tp}"}
        numbers |= {"expert ranks": nodes if self.ranks == self.ep else f"{self.ranks}: only {self.most[1]}"}
        numbers |= {"experts per GPU": f"{experts // self.ranks} of {experts}"}
        return numbers | {"sent inside a node": units.size(inside), "sent between nodes": units.size(between)}

    def code(self) -> str:
        lines = f"way = expert.way(shape, plan, cluster, {self.imbalance}, 2)\n"
        prints = {f"sent {name}": f"size(way[{k}])" for k, name in enumerate(_TRAFFIC)}
        return self.scenario.code(prints, "expert", lines)

    def limits(self) -> str:
        parts = self.parts()
        if not self.fits:
            return self.memory("no single control helps: raise two degrees")
        part = max((name for name in parts if name != "compute"), key=parts.get)
        if (share := parts[part] / sum(parts.values())) < MUCH:
            return "compute"
        return f"{_NAMED[part]}, {percent(share)} of the step{self.takes(part, _seconds)}"


class Experts(Board):
    """Two panels: a step's time over t, and what travels to experts over hops and the limit of nodes."""

    setting, over, curves = Degrees, "ep", (MEMORY, BUBBLE, MFU)

    @style.styled
    def __init__(self):
        self.figure, (above, below) = style.figure(rows=2, width=6.45, height=3.95, height_ratios=(1, 1.05))
        looks, rows = {name: look for name, *look in _TIME.values()}, [f"TP {each}" for each in CHOICES["tp"]]
        self._time = Bars(above, looks, "step time, by TP", rows, _seconds, columns=3, outline=word)
        title = "to the experts and back: one layer, forward"
        self._traffic = Bars(below, _TRAFFIC, title, list(WAYS), outline=word)
        self.panels = self._time, self._traffic

    def draw(self, now: Degrees) -> None:
        bars, texts = _rows(lambda tp: _step(now._replace(tp=tp)), CHOICES["tp"])
        totals = [sum(bar.values()) for bar in bars if bar]
        longest = min(max(totals), 3 * min(totals))  # a longer one is cut off (»), so that the others' parts are seen
        self._time.update(bars, texts, CHOICES["tp"].index(now.tp), longest)
        bars, texts = _rows(lambda way: _way(now, *way), WAYS.values())
        self._traffic.update(bars, texts, [*WAYS.values()].index((2, now.limit)))

    def at(self, now: Degrees, control: str, degree: int) -> Cost | None:
        """Returns the cost of so many ranks; those that share a node's experts reach all of these."""
        return super().at(now, control, degree) or super().at(now._replace(limit=0), control, degree)

    def degree(self, now: Degrees, control: str) -> int:
        return now.ranks

    def idle(self, **values) -> dict[str, bool]:
        """The limit of nodes where all expert ranks are in one, and the load where there's only one rank."""
        now = Degrees(**values)
        return {"limit": tried(lambda: now.nodes) == 1, "imbalance": now.ep == now.imbalance == 1}


def explorer(measure: Measure | None = None) -> Explorer:
    """Opens on DeepSeek-V3 as trained: 2,048 H800s, PP 16 × EP 64.

    measure: what "Measure it" runs, of few_ranks
    """
    presets = {"8 tensor ranks": {"tp": 8}, "cut experts": {"tp": 8, "etp": 8}, "8 expert ranks": {"ep": 8}}
    presets |= {
        "twice the load": {"imbalance": 2},
        "NVL72": {"cluster": "gb200-nvl72"},
        "Mixtral 8x7B": {"model": "mixtral-8x7b"},
    }
    only = {"model": MODELS, "cluster": CLUSTERS} | CHOICES
    shared = controls(only, model="deepseek-v3", cluster="h800", pp=16, ep=64, tp=1)
    own = {"etp": value_slider("cut each expert by", 1, CHOICES["etp"])}
    own["limit"] = value_slider("nodes per token", 4, CHOICES["limit"], lambda m: str(m) if m else "all")
    own["imbalance"] = value_slider("fullest ÷ mean", 1, CHOICES["imbalance"])
    own["schedule"] = choice("schedule", "dualpipe", CHOICES["schedule"])
    return Explorer(Experts(), presets, measure, **shared, **own)


def _rows(show: Callable, values: Iterable) -> tuple[tuple, tuple]:
    """A bar and a text for each value."""
    return tuple(zip(*(tried(show, value) or ({}, "not possible") for value in values), strict=True))


def _step(now: Degrees) -> tuple[dict, str]:
    parts = now.parts()
    bar = {name: parts[part] for part, (name, *_) in _TIME.items()}
    fewer = f", EP {now.ranks}" if now.ranks < now.ep else ""
    return bar, _seconds(sum(bar.values())) + fewer


def _way(now: Degrees, hops: int, limit: int) -> tuple[dict, str]:
    inside, between, seconds = way = now._replace(limit=limit).way(hops)
    text = f"{units.size(inside + between)}, {units.duration(seconds)}" if seconds else "nothing"
    return dict(zip(_TRAFFIC, way, strict=False)), text
