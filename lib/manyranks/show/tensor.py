"""Chapter 06's pictures: cut products, heads, collectives; what a layer keeps; an explorer."""

import functools
from collections import namedtuple
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle

from manyranks.show import drawings, style, units
from manyranks.show.bars import LONGEST, Bars
from manyranks.show.explorer import Board, Explorer, Measure, Setting, choice
from manyranks.show.labels import Labels, word
from manyranks.show.lines import columns, write
from manyranks.show.scenario import SHAPES, SHARED, SMALL, SWITCH, Scenario, controls
from manyranks.show.setting import MUCH
from manyranks.show.style import box, sheet
from manyranks.show.units import percent
from manyranks.theory import ModelShape, Plan, clusters, pace, tensor
from manyranks.theory.names import Named

_SIZES = {"b·s": 1.25, "h": 0.7, "f": 1.2}  # inches of a matrix
_STEPS = {"×": 0.28, "=": 0.28, "SwiGLU": 0.8, "all-\nreduce": 0.8}  # inches of what stands between two
_EDGE = {"edgecolor": style.INK, "linewidth": 0.8}
_CENTER = {"ha": "center", "va": "center"}
_SAID = {"whole": "whole on each", "rows": "own rows", "columns": "own columns", "terms": "a term on each"}
_IN, _OUT = ("X b·s h whole", "×"), ("=", "Y b·s h terms", "all-\nreduce", "Y b·s h whole")
# What `cut` draws from left to right, below its title. A matrix: its name, or those of two below each other; its rows and
# columns, keys of _SIZES; and how it's cut, where "terms" are of a sum, one on each rank.
_CUTS = {"column": ("column-parallel: columns of W give columns of Y", *_IN, "W h f columns", "=", "Y b·s f columns")}
_CUTS["row"] = ("row-parallel: rows of W give a term of the sum", "X b·s f columns", "×", "W f h rows", *_OUT)
_CUTS["mlp"] = ("columns, then rows: nothing is sent in between", *_IN, "gate,up h f columns", "SwiGLU")
_CUTS = Named("kind", _CUTS | {"mlp": (*_CUTS["mlp"], "middle b·s f columns", "×", "down f h rows", *_OUT)})


@style.styled
def cut(kind: str) -> style.Figure:
    """Draws the matrices of a cut product, with the rank of 4 that holds each part.

    kind: "column" or "row", Y = X·W with W cut in one of two ways; "mlp", a gated MLP

    Raises ValueError for another kind.
    """
    title, *parts = _CUTS[kind]
    wide = (_STEPS.get(part) or _SIZES[part.split()[2]] + (0.32 if "terms" in part else 0) for part in parts)
    ends = list(accumulate(wide, initial=0.2))
    fig, axes = sheet(max(4.8, ends[-1] + 0.2), 2.4)
    axes.set_ylim(-1.22, 1.18)  # a matrix's middle is at 0, or two are 0.8 apart
    axes.text(0.15, 1.14, title, fontsize=11, fontweight="bold", va="top")
    for part, (x, end) in zip(parts, pairwise(ends), strict=True):
        middle = (x + end) / 2
        if part not in _STEPS:
            names, rows, columns, how = part.split()
            for y in (0.4, -0.4) if "," in names else (0,):
                _draw_matrix(axes, x, y, _SIZES[columns], _SIZES[rows], how)
            names = f"$\\bf{{{names.replace(',', ', ')}}}$  {rows} × {columns}"
            axes.text(middle, -0.79, names, ha="center", va="top", fontsize=9.5)
            axes.text(middle, -1.0, _SAID[how], ha="center", va="top", fontsize=9, style="italic")
        elif len(part) == 1:
            axes.text(middle, 0, part, fontsize=13, **_CENTER)
        else:
            arrow = {"arrowstyle": "->", "linewidth": 1.4, "color": style.INK}
            axes.annotate("", (end - 0.08, 0), (x + 0.08, 0), arrowprops=arrow)
            axes.text(middle, 0.06, part, ha="center", va="bottom", fontsize=9.5, linespacing=1.0)
    return fig


def _draw_matrix(axes: Axes, x: float, y: float, wide: float, high: float, how: str) -> None:
    if how == "whole":
        axes.add_patch(Rectangle((x, y - high / 2), wide, high, facecolor="#e0e0e0", **_EDGE))
        return
    for rank in reversed(range(4)):
        back = 0.32 * rank / 3
        place = {"columns": ((x + rank * wide / 4, y - high / 2), wide / 4, high)}
        place |= {"rows": ((x, y + high / 2 - (rank + 1) * high / 4), wide, high / 4)}
        place |= {"terms": ((x + back, y + back / 2 - high / 2), wide, high - 0.16)}
        box(axes, *place[how], rank, str(rank) if how != "terms" else "" if rank else "+", 9)


def heads(heads: int, kv_heads: int, t: int) -> style.Figure:
    """Draws the query heads of each rank, and below them the key/value heads that they read.

    heads: query heads, at most 32
    kv_heads: key/value heads; with t > kv_heads several ranks have the same
    t: ranks, at most 16

    Raises ValueError for other numbers, and for those that don't divide each other as they must.
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
_BLOCKS = ("q, k, v", "core", "output"), ("gate, up", "SwiGLU", "down")
_LAYER = [name for block in _BLOCKS for name in ("norm", "f", *block, "g", "+")]
_INCHES = {"norm": 0.52, "+": 0.26, "f": 0.52, "g": 0.52}  # else 0.66
_ALL, _OWN, _INSIDE = "all tokens, on each rank", "own tokens", "own heads or columns"
_SENDS, _AGAIN = "a collective", "gathered again"
_LOOKS = {_ALL: {"facecolor": "#e0e0e0"}, _INSIDE: {"facecolor": "#9ecae1"}, _OWN: {"facecolor": "#a1d99b", "hatch": "...."}}
_LOOKS |= {_SENDS: {"facecolor": style.ORANGE}, _AGAIN: {"facecolor": "#ffd9b3", "linestyle": "--"}}
# (variant, direction) -> what is sent where a block begins (f) and where it ends (g), in backward's order of time; in all;
# their letters: arXiv 1909.08053's, and those of arXiv 2205.05198, whose f and f̄ are not drawn.
_SENT = {
    ("TP", "forward ⟶"): ("", "all-reduce", "2 all-reduces", "fg"),
    ("TP", "backward ⟵"): ("all-reduce", "", "2 all-reduces", "fg"),
    ("TP + SP", "forward ⟶"): ("all-gather", "reduce-scatter", "2 all-gathers\n2 reduce-scatters", "gḡ"),
    ("TP + SP", "backward ⟵"): ("reduce-scatter|all-gather again", "all-gather", "4 all-gathers\n2 reduce-scatters", "gḡ"),
}


@style.styled
def collectives(variants: Sequence[str] = ("TP", "TP + SP")) -> style.Figure:
    """Draws where in a layer each collective stands, forward and backward.

    variants: "TP", tensor parallelism alone, "TP + SP", with sequence parallelism, or both

    Source: arXiv 2205.05198, figures 4 and 5.
    """
    drawn = [(key, sent) for key, sent in _SENT.items() if key[0] in variants]
    fig, axes = sheet(9.0, y := 0.42 + 1.42 * len(drawn))
    y -= 0.3
    for (variant, direction), (f, g, counted, letters) in drawn:
        y -= 1.42
        split = variant != "TP"
        axes.text(0.08, y + 0.7, f"{variant}\n{direction}", va="center", fontsize=10)
        axes.text(0.08, y + 0.32, counted, va="center", fontsize=9, style="italic", linespacing=1.1)
        x, sent = 1.32, {"f": (f, letters[0]), "g": (g, letters[1])}
        for name in _LAYER:
            wide = _INCHES.get(name, 0.66)
            if name in sent:
                _draw_sent(axes, x, y, wide, *sent[name])
            else:
                look = _INSIDE if name not in _INCHES else _OWN if split else _ALL
                axes.add_patch(Rectangle((x, y + 0.26), wide, 0.62, **_LOOKS[look], **_EDGE))
                paper = style.PAPER if look == _OWN else None
                axes.text(x + wide / 2, y + 0.57, name, color=style.BLACK, fontsize=9, bbox=paper, **_CENTER)
            x += wide
    handles = [Patch(label=name, **_LOOKS[name], **_EDGE) for name in _LOOKS if split or name not in (_OWN, _AGAIN)]
    fig.legend(handles=handles, loc="upper left", ncols=5, bbox_to_anchor=(0.005, 1.0), columnspacing=1.2)
    return fig


def _draw_sent(axes: Axes, x: float, y: float, wide: float, names: str, letter: str) -> None:
    """Draws what's sent at one end of a block, side by side, below its letter; a line where nothing is."""
    axes.text(x + wide / 2, y + 1.14, letter, ha="center", va="bottom", fontsize=10, style="italic")
    axes.plot([x, x + wide], [y + 0.57] * 2, color=style.INK, linestyle="-", linewidth=0.8, zorder=0)
    each = [name for name in names.split("|") if name]
    for k, name in enumerate(each):
        left, part = x + k * wide / len(each), wide / len(each)
        axes.add_patch(Rectangle((left, y + 0.02), part, 1.1, **_LOOKS[_AGAIN if k else _SENDS], **_EDGE))
        axes.text(left + part / 2, y + 0.57, name, color=style.BLACK, fontsize=9, rotation=90, **_CENTER)


# name -> what it says of a plan
VARIANTS = Named("variant", {"TP": {"sequence_parallel": False}, "TP + SP": {"sequence_parallel": True, "regather": True}})
VARIANTS |= {"TP + SP, gathered inputs kept": {"sequence_parallel": True, "regather": False}}
_PARTS = {"cut by SP only": (style.ORANGE, "////"), "cut by t": (style.BLUE, "")}


@style.styled
def saved(
    shape: ModelShape,
    plan: Plan,
    degrees: Sequence[int] = (1, 2, 4, 8),
    variants: Sequence[str] = ("TP", "TP + SP"),
) -> style.Figure:
    """Draws the bytes that one layer keeps for backward on one rank, over t: a bar for each variant.

    plan: all but tp and what the variant says
    degrees: the t that get a bar
    variants: keys of VARIANTS

    Raises ValueError for an unknown variant, and where a plan doesn't fit the shape.
    """
    fig, (axes,) = style.figure(width=8.8, height=3.9)
    each = [[tensor.saved(shape, replace(plan, tp=t, **VARIANTS[name])) for t in degrees] for name in variants]
    sides = [{name: [one[name] for one in _parts(of)] for name in _PARTS} for of in each]
    places = columns(axes, [f"t = {t}" for t in degrees], sides, units.size, _PARTS)
    for x, of in zip(places, each, strict=True):
        totals = [one.total for one in of]
        write(axes, x, totals, list(map(units.size, totals)), size=7.5 if len(variants) > 2 else 9)
    axes.xaxis.remove_overlapping_locs = False  # the middle one of three bars stands where its t does
    names = [name.replace("TP +", "+").replace(" gathered inputs ", "\n") for name in variants] * len(degrees)
    axes.set_xticks([x for of in zip(*places, strict=True) for x in of], names, minor=True, fontsize=8.5)
    axes.tick_params(axis="x", pad=29 if any("\n" in name for name in names) else 18)
    axes.set(xlabel="tensor-parallel ranks", ylabel="kept by one layer, per rank", ylim=(0, 1.12 * axes.get_ylim()[1]))
    fig.legend(loc="outside upper left", ncols=3, handlelength=1.6)
    return fig


def _parts(kept: Sequence[tensor.Saved]) -> list[dict[str, float]]:
    return [dict(zip(_PARTS, (one.outside + one.statistics, one.inside), strict=True)) for one in kept]


DEGREES = SHARED["tp"][1]  # 1 to 64
MODELS = ("llama3-8b", "llama3-70b", "llama3-405b", "small GPT")
CLUSTERS = ("a100-dgx", "h100-dgx", "h200-dgx", "b200-dgx", "gb200-nvl72", "tpu-v5p", "laptop")
_TIMES = {"forward": (style.BLUE, ""), "backward": ("#9ecae1", ""), "communication": (style.ORANGE, "////")}
_ROOM = {"sequence_parallel": [True], "tp": DEGREES, "pp": SHARED["pp"][1], "recompute": ("selective", "full")}
_REMEDIES = {"communication": ["overlap_tensor"], "small matmuls": ["sequence_parallel"]}
_WORDS = {"overlap_tensor": "overlap"}
_PRINTS = {"layer time": "duration(layer.seconds)", "kept per layer": "size(tensor.saved(shape, plan).total)"}
_PRINTS |= {"waiting": "percent((layer.forward.tensor + layer.backward.tensor) / layer.seconds)"}
_ASIDE = {"bubble": "the bubble of PP {pp}, {share} of a step (chapter 05)"}
_ASIDE |= {"data": "gradients and parameters of DP {dp}, {share} of a step (chapters 02 and 03)"}
_ASIDE |= {"pipeline": "messages between stages, {share} of a step (chapter 05)"}


class Cut(namedtuple("Cut", "model cluster dp tp sequence_parallel pp recompute overlap_tensor"), Setting):
    choices, remedies, room, words = _ROOM | {"overlap_tensor": [True]}, _REMEDIES, tuple(_ROOM), _WORDS

    @property
    @functools.lru_cache(maxsize=16384)  # noqa: B019 a setting is a few numbers
    def scenario(self) -> Scenario:
        """Takes sequences of 8,192 tokens. Raises ValueError for an unknown name, and for degrees that can't be."""
        shape = SHAPES[self.model]
        seq, microbatch = (128, 4) if shape is SMALL else (8192, 1)
        batch = self.dp * microbatch * (4 * self.pp if self.pp > 1 else 1)
        how = self._asdict() | {"seq": seq, "microbatch": microbatch, "batch": batch, "zero": 1 if self.pp > 1 else 3}
        del how["model"], how["cluster"]
        return Scenario(shape, Plan(**how), clusters[self.cluster]).checked()

    @property
    def note(self) -> str:
        node, t, plan = self.scenario.cluster.node, self.tp, self.scenario.plan
        step = f"{4 * self.pp} micro-batches, 1F1B, ZeRO-1" if self.pp > 1 else "one micro-batch, FSDP"
        part = f" Of a node's {node} GPUs, {node - node % t} are used." if t <= node and node % t > 0 else ""
        return f"{plan.microbatch} × {plan.seq:,} tokens per micro-batch; {step}.{part}"

    def layer(self, node: int = 0) -> pace.ForwardBackward:
        """Returns one layer's time.

        node: GPUs of a node, if not the cluster's
        """
        here = self.scenario
        return pace.of_layer(here.shape, here.plan, here.cluster.with_nodes_of(node) if node else here.cluster)

    @property
    def cost(self) -> float:
        """Returns GPU-seconds of a layer: its time on all t together."""
        return self.tp * self.layer().seconds

    @property
    def waits(self) -> float:
        """Returns the seconds that a rank waits for messages in a layer."""
        return sum(each.tensor for each in self.layer()[:2])

    @property
    def more(self) -> float:
        """Returns a layer's seconds of computing beyond a t-th of one GPU's."""
        return (self.cost - self._replace(tp=1).cost) / self.tp - self.waits

    def saved(self) -> tensor.Saved:
        return tensor.saved(self.scenario.shape, self.scenario.plan)

    def sent(self) -> int:
        """Returns the bytes that a rank sends for a layer; a forward that's done again sends them again."""
        shape, plan = self.scenario.shape, self.scenario.plan
        there, back = tensor.layer(plan.microbatch * plan.seq, shape.hidden, self.tp, self.sequence_parallel)
        return back.bytes + there.bytes * (2 if plan.recompute == "full" else 1)

    def where(self) -> str:
        return f"{self.model}, TP {self.tp}, {self.cluster}"

    def numbers(self) -> dict[str, str]:
        seconds = self.layer().seconds
        numbers = {"layer time": units.duration(seconds), "waiting": percent(self.waits / seconds)}
        return numbers | {"kept per layer": units.size(self.saved().total), "sent per layer": units.size(self.sent())}

    def code(self) -> str:
        return self.scenario.code(_PRINTS, "pace tensor", "layer = pace.of_layer(shape, plan, cluster)\n")

    def limits(self) -> str:
        """Says what limits a layer, after what costs a step more."""
        if not self.fits:
            return self.memory("no single control helps: change two of them")
        time, limit = self.scenario.time, self.of_layer()
        name = max(_ASIDE, key=time.parts.get)
        share = time.parts[name] / time.seconds
        if share < max(MUCH, max(self.waits, self.more) / self.layer().seconds):
            return limit
        return _ASIDE[name].format(share=percent(share), **self._asdict()) + f"; in a layer, {limit}"

    def of_layer(self) -> str:
        t, seconds, cluster = self.tp, self.layer().seconds, self.scenario.cluster
        if t == 1:
            return "compute: one GPU sends nothing"
        if t > cluster.node and not cluster.torus and (inside := self.layer(t).seconds) < 0.95 * seconds:
            return f"the node boundary: with {t} GPUs per node, a layer would take {units.duration(inside)}"
        if max(self.waits, self.more) < MUCH * seconds:
            return "compute"
        limit = "communication" if self.waits >= self.more else "small matmuls"
        helps = self.takes(limit, lambda together: units.duration(together / t))
        if limit == "communication":
            return limit + (helps or f": only rings of chunks would hide its other {units.duration(self.waits)}")
        alone = self._replace(tp=1).cost
        times = t * (seconds - self.waits) / alone
        if seconds > 0.99 * alone:  # the host sets the pace
            return f"kernel launches: each of the {t} GPUs launches as many kernels as one alone, so the layer gets no faster"
        repeated = "" if self.sequence_parallel else ", norms repeated on every rank"
        return f"{limit}{repeated}: {t} GPUs use {units.three(times)} times the GPU time of one{helps}"


class Degrees(Board):
    """A row for each t: t × a layer's time, the same in all rows if nothing were sent or done twice, and what a rank keeps."""

    setting, over = Cut, "tp"

    @style.styled
    def __init__(self):
        self.figure, (time, kept) = style.figure(2, width=6.45, height=3.95, sharey=True, width_ratios=(1.55, 1))
        rows = [f"t = {t}" for t in DEGREES]
        self._time = Bars(time, _TIMES, "t × a layer's time", rows, units.duration, columns=3, outline=word)
        self._kept = Bars(kept, _PARTS, "kept by a layer, per rank", rows, outline=word)
        kept.set_xlim(0, LONGEST + 0.35)
        time.set_xlim(0, 1.1)
        time.set_xlabel("right: layer time, share spent waiting (»: off the scale)", loc="left", fontsize=9)
        self._ends = [axes.axhline(0, color=style.INK, linestyle=":", linewidth=1.6, gid="node ends") for axes in (time, kept)]
        self._node = Labels(kept, left=0, name="node")
        self.panels, self.others = (self._time, self._kept), (*self._ends, self._node)

    def draw(self, now: Cut) -> None:
        cluster = now.scenario.cluster
        shown, row = [each for t in DEGREES if (each := now._replace(tp=t)).possible], DEGREES.index(now.tp)
        costs, missing = [each.cost for each in shown], "not possible"
        longest, mark = min(max(costs), 4 * min(costs)), (costs[0], f"t = 1: {units.duration(costs[0])}")
        times = [[each.tp * part for part in (*(one.compute for one in each.layer()[:2]), each.waits)] for each in shown]
        texts = ["|".join((each["layer time"], f"{each['waiting']} waiting")) for each in (one.numbers() for one in shown)]
        self._time.update([dict(zip(_TIMES, each, strict=True)) for each in times], texts, row, longest, mark, missing)
        kept = [each.saved() for each in shown]
        self._kept.update(_parts(kept), [units.size(each.total) for each in kept], row, missing=missing)
        ends = (inside := sum(t <= cluster.node or cluster.torus > 0 for t in DEGREES)) < len(DEGREES)
        for line in self._ends:
            line.set(ydata=[inside - 0.5] * 2, visible=ends)
        at = 0.01, len(DEGREES) - 0.3  # below the bars: nothing else is ever there
        self._node.write([at] if ends else [], [f"dotted: a node of {cluster.node} GPUs"] if ends else [])

    def idle(self, tp: int, **others) -> dict[str, bool]:
        """A single rank has nothing to split and nothing to send."""
        return dict.fromkeys(("sequence_parallel", "overlap_tensor"), tp == 1)


def explorer(measure: Measure | None = None) -> Explorer:
    """Opens on Llama 3 405B as reported: t = 8, p = 16, d = 64.

    measure: what "Measure it" runs, of few_ranks
    """
    presets = {"TP alone": {"sequence_parallel": False}, "two nodes": {"cluster": "b200-dgx", "tp": 16}}
    presets |= {"NVL72": {"cluster": "gb200-nvl72", "tp": 16}, "small model": {"model": "llama3-8b", "pp": 1}}
    only = {"model": MODELS, "cluster": CLUSTERS}
    opens = {"dp": 64, "tp": 8, "sequence_parallel": True, "pp": 16, "recompute": "none"}
    shared = controls(only, model="llama3-405b", cluster="h100-dgx", **opens)
    return Explorer(Degrees(), presets, measure, **shared, overlap_tensor=choice("overlap", True, SWITCH))
