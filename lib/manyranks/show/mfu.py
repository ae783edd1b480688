"""Chapter 09: utilization. What was bought and what was used, the roofline, where a step's time goes; an explorer."""

import functools
from collections import namedtuple
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, cycle
from math import inf, nan, sqrt
from statistics import fmean, median
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes

from manyranks.show import scenario, style, units
from manyranks.show.bars import Bars
from manyranks.show.explorer import Board, Explorer, Part, Setting, choice
from manyranks.show.labels import Labels, word
from manyranks.show.lines import curves, powers, ticks
from manyranks.show.looks import LOOKS, STEP
from manyranks.show.scenario import SHAPES, Scenario, controls
from manyranks.show.setting import MUCH
from manyranks.theory import Cluster, ModelShape, Plan, clusters, flops, hardware, kernels, step
from manyranks.theory import roofline as theory
from manyranks.theory.roofline import Roof, time_budget

__all__ = [
    "Point",
    "bought",
    "conventions",
    "explorer",
    "over_degree",
    "published",
    "rates",
    "roofline",
    "timings",
    "waterfall",
]

# A part's name in the picture, colour and hatch; parts that are not known have the others in turn.
_KNOWN = STEP | {"matmul": ("matmul", style.BLUE, ""), "other": ("other operators", "#9ecae1", "....")}
_KNOWN |= {"communication": ("communication", style.ORANGE, "////"), "waiting": ("waiting", style.YELLOW, "||||")}
_KNOWN |= {"python": ("Python", "#b0b0b0", "\\\\\\\\"), "overhead": ("kernel launches", style.FAINT, "....")}
_COLOURS = (style.BLUE, style.ORANGE, style.GREEN, style.PINK, style.YELLOW, "#56B4E9")


def published(runs: Sequence[tuple[str, str, float]]) -> style.Figure:
    """Draws of each run the share of the peak that was used, and the rest of what was bought.

    runs: (name, chips, MFU as a share), from above. Raises ValueError for none, more than 16, and a share that is not 0 to 1.
    """
    count("runs", runs, 16)
    if wrong := {name: share for name, _, share in runs if not 0 <= share <= 1}:
        raise ValueError(f"the shares are {wrong}: give numbers from 0 to 1, not in percent")
    looks = {"model FLOPs (MFU)": (style.BLUE, ""), "all else": (style.FAINT, "")}
    bars = {", ".join(filter(None, run)): dict(zip(looks, (share, 1 - share), strict=True)) for *run, share in runs}
    return rows("MFU of published runs", looks, bars, [f"{share:.1%}" for *_, share in runs], 1.0)


def conventions(shares: Mapping[str, float]) -> style.Figure:
    """Draws MFU of one run under each convention, with what that counts.

    shares: one of theory.flops.CONVENTIONS -> MFU as a share, from above. Raises ValueError for none, and another one.
    """
    bars, scores = {}, {0: "no scores", 0.5: "causal half of the scores", 1: "all scores"}
    for name, share in shares.items():
        rule = flops.CONVENTIONS[name]
        products = "6 × all parameters" + " but the embedding" * (not rule.embedding) if rule.everything else "every product"
        bars[f"{name}\n{products}, {scores[rule.attention]}"] = {"MFU": share}
    said = [f"{share:.1%}" for share in shares.values()]
    return rows("One run's MFU under every convention", {"MFU": (style.BLUE, "")}, bars, said, max(shares.values()) or 1.0)


@style.styled
def bought(parts: Mapping[str, float], gpus: int = 16384) -> style.Figure:
    """Draws what all GPUs of a run do, as if each part of the time were so many GPUs that do nothing else: 8 a cell.

    parts: name -> share of the whole, at most 6; together 1. gpus: how many there are, from 256 to 32,768. Raises ValueError
    for other parts, and for too few or too many GPUs.
    """
    count("parts", parts, 6)
    if abs(sum(parts.values()) - 1) > 1e-6 or not 32 <= (cells := gpus // 8) <= 4096:
        raise ValueError(f"gpus={gpus}, {dict(parts)}: give 256 to 32,768 GPUs, and shares that are 1 together")
    wide = round(sqrt(2 * cells))
    rows, ends = np.arange(-(-cells // wide)), np.rint(np.cumsum([0.0, *parts.values()]) * cells)
    fig, (axes,) = style.figure(width=8.8, height=3.4)
    for (name, share), look, start, end in zip(parts.items(), ((style.BLUE, ""), *LOOKS[1:]), ends, ends[1:], strict=False):
        left, right = (np.clip(at - rows * wide, 0, wide) for at in (start, end))  # of each row of cells, from above
        look = {"color": look[0], "hatch": look[1], "edgecolor": "#666666", "linewidth": 0}
        axes.barh(rows + 0.5, right - left, 1.0, left, label=f"{name}\n{share:.0%}, {gpus * share:,.0f} GPUs", **look)
    axes.vlines(range(wide + 1), 0, len(rows), colors="white", linewidth=0.8)
    axes.hlines(range(len(rows) + 1), 0, wide, colors="white", linewidth=0.8)
    axes.set(xlim=(0, wide), ylim=(len(rows), 0), aspect="equal", title=f"{gpus:,} GPUs, 8 per cell")
    axes.axis("off")
    fig.legend(loc="outside right upper")
    return fig


def rates(found: Mapping[str, Mapping[float, float]], title: str = "") -> style.Figure:
    """Draws FLOP/s of matrix products over their size, a line for each name, on logarithmic axes.

    found: name ("bfloat16") -> size -> FLOP/s. Raises ValueError for none, more than 6 lines, and a line without points.
    """
    count("lines", found, 6)
    sizes = sorted({size for points in found.values() for size in points})
    best = {name: f"{name}: at best {units.flop_rate(max(points.values()))}" for name, points in found.items()}
    named = {best[name]: [points.get(size, nan) for size in sizes] for name, points in found.items()}
    of = "rows and columns of both matrices", "matmul rate"
    return curves(sizes, named, *of, yunit=units.flop_rate, title=title, xticks=sizes[:: -(-len(sizes) // 9)])


@style.styled
def timings(samples: Mapping[str, Sequence[float]]) -> style.Figure:
    """Draws times of repeated calls in their order, with the first one ringed, and lines for their median and mean.

    samples: name -> seconds. Raises ValueError for none, more than 4 names, and no times.
    """
    count("names", samples, 4)
    calls = range(1, max(map(len, samples.values())) + 1)
    named = {name: [*seconds, *[nan] * (len(calls) - len(seconds))] for name, seconds in samples.items()}
    of = {"xlabel": "call", "ylabel": "time of a call", "xlog": False, "xticks": calls[:: -(-len(calls) // 8)]}
    (axes,) = curves(calls, named, yunit=units.duration, **of).axes
    for line, (name, seconds) in zip(list(axes.lines), samples.items(), strict=True):
        times = [units.duration(each) for each in (seconds[0], fmean(seconds), median(seconds))]
        said = "{}: first call {} (ringed), mean {} (dashed), median {} (line)".format(name, *times)
        line.set(linestyle="none", markevery=1, label=said)
        axes.plot([1], seconds[:1], "o", color=line.get_color(), fillstyle="none", markersize=11)
        for at, dash in ((fmean(seconds), "--"), (median(seconds), "-")):
            axes.axhline(at, color=line.get_color(), linestyle=dash, linewidth=1.2)
    axes.legend(handles=axes.lines[: len(samples)], loc="lower left", bbox_to_anchor=(-0.02, 1.0))
    return axes.figure


@style.styled
def rows(title: str, looks: Mapping[str, tuple], bars: Mapping[str, Mapping], said: Sequence[str], most: float) -> style.Figure:
    """A bar for each name, and what is said of it. looks: part -> colour and hatch; most: of the longest bar."""
    fig, (axes,) = style.figure(width=8.8, height=0.9 + 0.38 * len(bars))
    Bars(axes, looks, title, list(bars), columns=3).update(list(bars.values()), said, -9, most)
    axes.tick_params(axis="y", labelsize=8.5)
    return fig


def count(what: str, given: Sequence | Mapping, most: int, least: int = 1) -> None:
    """Raises ValueError where a picture can't show so many."""
    if not least <= len(given) <= most:
        raise ValueError(f"{len(given)} {what}: a picture shows {least} to {most}")


class Point(NamedTuple):
    """An operator: FLOP/byte, and the FLOP/s that it was measured at; None: as fast as the roof lets it be."""

    name: str
    intensity: float
    flops_per_second: float | None = None
    group: str = ""


@style.styled
def roofline(roofs: Mapping[str, Roof], points: Sequence[Point] = ()) -> style.Figure:
    """Draws FLOP/s over arithmetic intensity: a roof for each name, and numbered points, listed at the right.

    roofs: name ("H100, bfloat16") -> theory.roofline.Roof; points: one without FLOP/s is hollow, on the first roof; one with
    them is filled, and hangs by a dotted line from where that roof would let it be. One of intensity 0 has no place on
    logarithmic axes: it is only listed.
    Raises ValueError for no or more than 4 roofs, more than 20 points or 6 groups, an intensity below 0, a rate not above 0.
    """
    groups = list(dict.fromkeys(point.group for point in points))
    for what, given, least, most in (("roofs", roofs, 1, 4), ("points", points, 0, 20), ("groups of points", groups, 0, 6)):
        count(what, given, most, least)
    for name, x, rate, _ in points:
        if not 0 <= x < inf or (x and rate is not None and not 0 < rate < inf):
            raise ValueError(f"{name!r} at {x!r} FLOP/byte and {rate!r} FLOP/s: an intensity is 0 or more, a rate above 0")
    roof = next(iter(roofs.values()))
    places = [(each.intensity, each.flops_per_second or roof.flops_per_second(each.intensity)) for each in points]
    fig, (axes,) = style.figure(width=9.2 if points else 6.4, height=4.0 + 0.2 * len(roofs))
    _draw_roofs(axes, roofs, [place for place in places if place[0]])
    axes.legend(loc="lower left", bbox_to_anchor=(-0.02, 1.0), handlelength=3)
    listed = [axes.plot([], [], style.MARKERS[k], color=_COLOURS[k], label=group)[0] for k, group in enumerate(groups) if group]
    for k, (point, (x, y)) in enumerate(zip(points, places, strict=True), 1):
        marker, colour = ((style.MARKERS, _COLOURS)[each][groups.index(point.group)] for each in (0, 1))
        measured, said = point.flops_per_second is not None, units.flop_rate(y) if x else "moves memory"
        look = {"color": colour, "markerfacecolor": colour if measured else "white", "markersize": 7, "markeredgewidth": 1.6}
        look |= {"label": f"{k if x else '–'}  {point.name}: {units.short(x)}; {said}", "linestyle": "none", "zorder": 3}
        listed += axes.plot([x] * bool(x), [y] * bool(x), marker, **look)
        axes.vlines([x] * (measured and x > 0), y, roof.flops_per_second(x), colors=colour, linestyles=":", linewidth=1.2)
    if listed:
        fig.legend(handles=listed, loc="outside right upper", title="FLOP/byte; FLOP/s", fontsize=8, labelspacing=0.3)
    fig.draw_without_rendering()  # places the axes: which numbers would meet depends on it
    _number(axes, {number: place for number, place in enumerate(places, 1) if place[0]})
    return fig


def _draw_roofs(axes: Axes, roofs: Mapping[str, Roof], places: Sequence[tuple[float, float]]) -> None:
    """On axes with at least a decade on both sides of every ridge, all places, and room above for texts."""
    ridges, peaks = [roof.ridge for roof in roofs.values()], [roof.peak for roof in roofs.values()]
    left = min([min(ridges) / 20, *(x / 2.5 for x, _ in places)])
    right = max([max(ridges) * 20, *(2 * x for x, _ in places)])
    low = min([roof.flops_per_second(left) for roof in roofs.values()] + [y / 2 for _, y in places])
    high = max(peaks) * (max(peaks) / low) ** 0.2
    for (name, roof), line in zip(roofs.items(), ("-", "--", "-.", ":"), strict=False):
        said = f"{name}: {units.flop_rate(roof.peak)}, {units.rate(roof.bandwidth)}, ridge at {units.short(roof.ridge)}"
        rates = [roof.flops_per_second(each) for each in (left, roof.ridge, right)]
        axes.plot([left, roof.ridge, right], rates, color=style.INK, linestyle=line, label=f"{said} FLOP/byte")
    axes.vlines(ridges, low, peaks, colors="#666666", linestyles=":", linewidth=1.0)
    axes.axvspan(left, min(ridges), color=style.FAINT, zorder=0, linewidth=0)
    for x, text, side in ((min(ridges), "memory-bound  ", "right"), (max(ridges), "  compute-bound", "left")):
        axes.text(x, 0.97 * high, text, fontsize=9, fontstyle="italic", ha=side, va="top")
    axes.set(xscale="log", yscale="log", xlim=(left, right), ylim=(low, high))
    axes.set(xlabel="arithmetic intensity (FLOP/byte)", ylabel="rate of an operator")
    ticks(axes, (powers((left, right)), "{:,g}".format), (powers((low, high)), units.flop_rate))
    axes.grid(visible=False)


def _number(axes: Axes, places: Mapping[int, tuple[float, float]]) -> None:
    """A number above each point; where it would meet a point or another number, above that."""
    taken = [tuple(72 / axes.figure.dpi * axes.transData.transform(place)) for place in places.values()]
    for (number, place), (x, y) in zip(places.items(), list(taken), strict=True):
        up = 10.0  # points; a number is 12 wide and 9 high
        while any(abs(x - a) < 12 and abs(y + up - b) < 9 for a, b in taken):
            up += 4.5
        taken.append((x, y + up))
        look = {"fontsize": 8.5, "ha": "center", "va": "center", "fontweight": "bold", "zorder": 4}
        axes.annotate(str(number), place, (0, up), textcoords="offset points", **look)


def _looks(parts: Iterable[str]) -> dict[str, tuple[str, str, str]]:
    others = cycle(LOOKS)
    return {part: _KNOWN.get(part) or (part, *next(others)) for part in parts}


class Falls(Bars):
    """Rows of a step's parts, each beginning where the one above ends. A row's name says what its bar is: no hatches."""

    def __init__(self, axes: Axes, parts: Sequence[str], title: str, uses: Mapping[str, str] = {}, **labels):
        looks = {name: (colour, "") for name, colour, *_ in (*uses.items(), *_looks(parts).values())}
        super().__init__(axes, looks, title, [""] * len(looks), units.duration, columns=0, **labels)
        axes.set_title(title, pad=8)
        axes.set_yticks(range(len(looks)), [row.removesuffix(" messages") for row in looks], fontsize=9)
        self._names = list(looks)[len(uses) :]

    def show(self, seconds: Mapping[str, float], longest: float, row: int, uses: Mapping[str, float] = {}) -> None:
        """seconds: of each part; longest: of the axis; row: of the band; uses: shares of the step, in rows above the parts."""
        *begun, _ = accumulate(seconds.values(), initial=0.0)
        whole = sum(seconds.values())  # as StepTime.seconds: since Python 3.12 that's rounded better
        bars = [{use: share * whole} for use, share in uses.items()]
        bars += [{"": start, name: x} for name, start, x in zip(self._names, begun, seconds.values(), strict=True)]
        texts = [f"{share:.1%}" for share in uses.values()]
        texts += [f"{units.duration(x)}, {x / whole:.1%}" if x else "none" for x in seconds.values()]
        self.update(bars, texts, row, longest, (whole, f"together {units.duration(whole)}"))


@style.styled
def waterfall(budgets: Mapping[object, Mapping[str, float] | tuple], title: str = "") -> style.Figure:
    """Draws the parts of a step's time, one after another from 0 to their sum, with their seconds and shares.

    budgets: rank -> measure.budget.Budget, or name -> {part: seconds}. Up to 4 have a waterfall each, side by side; up to 16 a
    bar each. Where there are more than 5 parts, those without time are left out
    Raises ValueError for none, more than 16, other parts than the first one's, more than 10 of them, and negative seconds.
    """
    names = [f"rank {key}" if isinstance(key, int) else str(key) for key in budgets]
    spent = [dict(found) if isinstance(found, Mapping) else found._asdict() for found in budgets.values()]
    count("budgets", spent, 16)
    count("parts", spent[0], 10)
    for name, parts in zip(names, spent, strict=True):
        if [*parts] != [*spent[0]] or any(not 0 <= x < inf for x in parts.values()) or not sum(parts.values()):
            raise ValueError(f"{name!r} has {parts}: give seconds of {', '.join(spent[0])}, 0 or more, not all of them 0")
    shown = [part for part in spent[0] if len(spent[0]) <= 5 or any(parts[part] for parts in spent)]
    spent, longest = [{part: parts[part] for part in shown} for parts in spent], max(sum(parts.values()) for parts in spent)
    if len(names) > 4:
        looks = {name: look for name, *look in _looks(shown).values()}
        bars = {name: dict(zip(looks, parts.values(), strict=True)) for name, parts in zip(names, spent, strict=True)}
        return rows(title, looks, bars, [units.duration(sum(parts.values())) for parts in spent], longest)
    fig = style.Figure(figsize=(min(9.2, 3.4 + 3.0 * len(names)), 0.9 + 0.36 * len(shown)), layout="constrained")
    for axes, name, parts in zip(fig.subplots(1, len(names), squeeze=False)[0], names, spent, strict=True):
        Falls(axes, shown, name if len(names) > 1 else title or name, size=8).show(parts, longest, -9)
        axes.label_outer()
    fig.suptitle(title if len(names) > 1 else "", fontsize=11, fontweight="bold", x=0.01, ha="left")
    return fig


@style.styled
def over_degree(shape: ModelShape, plan: Plan, cluster: Cluster, degree: str, values: Sequence[int]) -> style.Figure:
    """Draws MFU over one degree of a plan, and the shares of a step that are lost to all else; the batch stays what it is.

    shape, plan, cluster: as theory.step.estimate takes them; degree: "dp", "tp", "pp", or another degree of the plan; values:
    what it is set to, one or more, from low to high. "matmuls below peak" is the time of matmuls beyond that of MFU's FLOPs at
    the peak. Raises ValueError for no values, and for one that model, batch or cluster don't allow.
    """
    count("values", values, 16)
    steps = []
    for each in (replace(plan, **{degree: value}) for value in values):
        time, budget = step.estimate(shape, each, cluster), time_budget(shape, each, cluster)
        used = time.mfu * time.seconds
        spent = {"MFU": used, "matmuls below peak": budget.pop("matmul") - used}
        spent |= {"other operators": budget.pop("other") + budget.pop("overhead")}
        spent |= {name: budget[part] for part, (name, *_) in _looks(budget).items()}
        steps.append({name: 100 * seconds / time.seconds for name, seconds in spent.items()})
    shown = {name: [each[name] for each in steps] for name in steps[0] if max(each[name] for each in steps) > 1}  # percent
    fig = curves(values, shown, scenario.SHARED[degree][0], "share of a step (%)", title=shape.name, xticks=values, ylog=False)
    fig.axes[0].legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))  # inside it would lie on curves
    return fig


MODELS = ("small GPT", "gpt2", "gpt2-xl", "llama3.2-1b", "llama3-8b", "megatron-22b", "llama3-70b", "gpt3-175b")
MODELS += ("llama3-405b", "palm-540b", "mixtral-8x7b", "deepseek-v3")
CLUSTERS = ("laptop", "v100-dgx", "a100-dgx", "h100-dgx", "h200-dgx", "b200-dgx", "gb200-nvl72", "mi300x", "h800")
CLUSTERS += ("tpu-v4", "tpu-v5p", "tpu-v6e")
OFFERED = {"model": MODELS, "cluster": CLUSTERS, "seq": [2**k for k in range(7, 18)], "microbatch": [2**k for k in range(8)]}
OFFERED |= {"recompute": ("none", "selective", "full"), "tp": [1, 2, 4, 8], "dp": [2**k for k in range(11)]}
BUDGET = ("matmul", "other", "overhead", "tensor", "expert", "data", "optimizer")
_LIMITS = {"other": "memory bandwidth: operators that only move data", "overhead": "overhead: kernel launches"}
_LIMITS |= {"tensor": "TP messages", "expert": "tokens to experts"}
_LIMITS |= {"data": "DP messages", "optimizer": "the optimizer's memory traffic"}
_PRINTS = {"MFU, this convention": 'f"{{flops.mfu(*run, {convention!r}):.1%}} ({convention})"'}
_PRINTS |= {"peak": "flop_rate(run[-1])", "speed per GPU": "three(time.tokens_per_second / plan.gpus), 'tokens/s'"}
_X, _Y = (1.0, 2e5), (0.05, 1000.0)  # intensities, and shares of the peak in percent
_OPERATORS = {"attention projections": ("o", style.BLUE), "attention core": ("s", style.ORANGE), "MLP": ("D", style.GREEN)}
_OPERATORS |= {"head": ("^", style.PINK), "router": ("v", style.INK)}
_USES = {"MFU": style.BLUE, "HFU": "#56B4E9"}


class Used(namedtuple("Used", "model cluster precision seq microbatch recompute flash tp dp convention"), Setting):
    """Holds what the controls say: each of tp·dp GPUs takes `microbatch` sequences a step; states are sharded (ZeRO-3)."""

    choices = {name: OFFERED[name] for name in ("microbatch", "tp", "dp", "recompute")} | {"flash": (True,)}
    remedies = dict.fromkeys(
        ("overhead", "data", "optimizer", "attention projections", "MLP", "head", "router"), ("microbatch",)
    ) | {"other": ["flash"], "attention core": ["flash"], "tensor": ["tp"], "expert": ["dp"]}
    room = "flash", "recompute", "microbatch", "dp", "tp"

    @property
    def scenario(self) -> Scenario:
        """Raises ValueError for a name that there is not, and for what the model or the chip doesn't allow."""
        shape, cluster = SHAPES[self.model], clusters[self.cluster]
        chip, positions = cluster.accelerator, shape.positions
        if self.precision == "fp32" and chip.name in hardware.accelerators and not hardware.peak(chip, "tf32"):
            raise ValueError(f"fp32 matmuls run in TF32 here, and {chip.name} has no confirmed TF32 peak: choose bf16")
        if 0 < positions < self.seq:
            raise ValueError(f"{self.model} has learned positions for {positions:,} tokens, not for {self.seq:,}: lower s")
        experts = min(self.dp, {"mixtral-8x7b": 8, "deepseek-v3": 64}.get(self.model, 1))  # ranks that share them
        more = {"recompute": self.recompute, "flash": self.flash, "precision": self.precision, "zero": 3}
        plan = Plan(dp=self.dp, tp=self.tp, ep=experts, seq=self.seq, microbatch=self.microbatch, **more)
        return Scenario(shape, plan, cluster).checked()

    @property
    def cost(self) -> float:
        """Seconds that a token takes of one GPU."""
        return self.tp * self.dp / self.scenario.time.tokens_per_second

    @property
    def roof(self) -> theory.Roof:
        """The roof of matrix products in this precision."""
        chip = clusters[self.cluster].accelerator
        return theory.Roof(kernels.peak(chip, self.precision), chip.memory_bandwidth)

    @property
    def uses(self) -> dict[str, float]:
        """MFU and HFU under the convention, of the peak in this precision."""
        # Flash attention keeps no scores, so that selective recomputation has no core to run again.
        again = "none" if self.flash and self.recompute == "selective" else self.recompute
        run = SHAPES[self.model], self.seq, 1 / self.cost, 1, self.roof.peak
        return {"MFU": flops.mfu(*run, self.convention), "HFU": flops.hfu(*run, again, self.convention, self.flash)}

    def where(self) -> str:
        ep = self.scenario.plan.ep
        where = f"{self.model}, {self.cluster}, TP {self.tp} × DP {self.dp:,}" + f", EP {ep}" * (ep > 1)
        return where + f", {self.microbatch} × {self.seq:,} tokens per DP rank"

    def numbers(self) -> dict[str, str]:
        numbers = {"MFU, this convention": f"{self.uses['MFU']:.1%} ({self.convention})", "HFU": f"{self.uses['HFU']:.1%}"}
        return numbers | {"peak": units.flop_rate(self.roof.peak), "speed per GPU": f"{units.three(1 / self.cost)} tokens/s"}

    @property
    def note(self) -> str:
        return "" if self.precision == "bf16" else "Its MFU is a share of the bf16 peak."

    def limits(self) -> str:
        return self.limiting()[1]

    def limiting(self) -> tuple[str, str]:
        """Returns the part of the budget that limits, the longest beside matmuls unless these wait for memory; a sentence."""
        budget, operators = _spent(self.scenario)
        longest = max((each for each in operators.values() if each.flops), key=lambda each: each.seconds - each.overhead)
        part, whole, ridge = max(BUDGET[1:], key=budget.get), sum(budget.values()), units.short(self.roof.ridge)
        starved = longest.bound == "memory" and budget["matmul"] >= budget[part]
        part = "matmul" if starved or budget[part] < MUCH * whole else part
        if not self.fits:
            return part, self.memory("no single control helps: change two")
        if part != "matmul":
            said = f"{_LIMITS[part]}, {budget[part] / whole:.0%} of the step"
        elif longest.bound == "memory":
            does = f"the {longest.name} does {units.short(longest.intensity)} FLOPs per byte"
            said = f"memory bandwidth: {does}, below the ridge at {ridge}"
        else:
            rate = longest.flops_per_second / self.roof.peak
            said = f"compute: matmuls take {budget[part] / whole:.0%} of the step, the {longest.name} at {rate:.0%} of the peak"
        if other := self.faster(longest.name if part == "matmul" else part):
            said += f"; with {self.change(other)}: {units.three(1 / other.cost)} tokens/s per GPU"
        return part, said + "; HFU is above 100% because it counts scores that flash attention skips" * (self.uses["HFU"] > 1)

    def code(self) -> str:
        lines = "run = shape, plan.seq, time.tokens_per_second, plan.gpus, kernels.peak(cluster.accelerator, plan.precision)\n"
        prints = {name: text.format(convention=self.convention) for name, text in _PRINTS.items()}
        return self.scenario.code(prints, "flops kernels", lines)


@functools.lru_cache(maxsize=4096)
def _spent(here: Scenario) -> tuple[dict[str, float], dict[str, theory.Part]]:
    """Seconds of a step by what they are spent on; and the operators that a GPU computes in it, by kind."""
    budget, parts = (each(here.shape, here.plan, here.cluster) for each in (theory.time_budget, theory.parts))
    return {part: budget[part] for part in BUDGET}, {each.name: each for each in parts}


class _Roofline:
    """The roof of the chip, as shares of its peak, and the products of the model under it."""

    def __init__(self, axes: Axes):
        self._axes, self._said = axes, {}
        lines = (("roof", "-", 1.8), ("achievable", "--", 1.1), ("_ridge", ":", 1.0))
        self._lines = [axes.plot([1], [1], color=style.INK, linestyle=line, lw=w, label=name)[0] for name, line, w in lines]
        look = {"fillstyle": "none", "markersize": 8, "markeredgewidth": 1.8, "linestyle": "none"}
        self._points = {name: axes.plot([], [], m, color=c, label=name, **look)[0] for name, (m, c) in _OPERATORS.items()}
        self._labels = Labels(axes, size=9, left=0, outline=word)
        axes.set(xscale="log", yscale="log", xlim=_X, ylim=_Y)
        axes.set(xlabel="arithmetic intensity (FLOP/byte)", ylabel="rate (% of peak)")
        ticks(axes, ([1, 10, 100, 1000, 1e4, 1e5], "{:,.0f}".format), ([0.1, 1, 10, 100], "{:g}".format))
        axes.grid(visible=False)
        axes.set_title("Operators under the roof", pad=34)
        axes.legend(loc="lower left", bbox_to_anchor=(-0.05, 0.98), ncols=4, columnspacing=1.0, handlelength=1.6, fontsize=8.5)
        self.moving = [*self._lines, *self._points.values(), self._labels.artist]

    def update(self, now: Used) -> None:
        roof, best, operators = now.roof, now.scenario.cluster.accelerator.matmul_fraction, _spent(now.scenario)[1]
        x = _X[0], roof.ridge, _X[1]
        rates = [100 * roof.flops_per_second(each) / roof.peak for each in x]
        places = (x, rates), ((roof.ridge * best, _X[1]), (100 * best, 100 * best)), ((roof.ridge, roof.ridge), _Y)
        for line, place in zip(self._lines, places, strict=True):
            line.set_data(*place)
        self._said = {}
        for name, line in self._points.items():
            line.set_data([], [])
            if found := operators.get(name):
                share = found.flops_per_second / roof.peak
                x, y = (min(max(at, low), high) for at, (low, high) in ((found.intensity, _X), (100 * share, _Y)))
                line.set_data([x], [y])
                self._said[x, y] = f"{name}: {units.short(found.intensity)} FLOPs per byte, {share:.1%} of the peak"
        names = [f"memory: {units.rate(roof.bandwidth)}", f"ridge: {units.short(roof.ridge)}", units.flop_rate(roof.peak)]
        self._labels.update([(1.3, 350), (1.15 * roof.ridge, 0.14), (max(1.3 * roof.ridge, 3e3), 350)], names)

    def parts(self) -> Iterator[Part]:
        return (Part(self._axes, x / 1.25, 1.25 * x, y / 1.25, 1.25 * y, says) for (x, y), says in self._said.items())


class Utilisation(Board):
    """Two panels: operators under the roof, and the time of a step."""

    setting, over = Used, "dp"

    @style.styled
    def __init__(self):
        self.figure, (above, below) = style.figure(1, 2, 6.45, 4.4, height_ratios=(1, 1.5))
        self._roofline, self._time = _Roofline(above), Falls(below, BUDGET, "Where the step time goes", _USES, outline=word)
        below.set_xlabel("MFU and HFU bars: time their FLOPs would take at peak", fontsize=9, loc="right")
        self.panels = self._roofline, self._time

    def draw(self, now: Used) -> None:
        budget = _spent(now.scenario)[0]
        self._roofline.update(now)
        self._time.show(budget, sum(budget.values()), len(_USES) + BUDGET.index(now.limiting()[0]), now.uses)


def explorer() -> Explorer:
    """Returns the explorer of chapter 09. It opens on Llama 3 8B, one sequence of 8,192 tokens on each of 64 H100s."""
    shared = {"model": "llama3-8b", "cluster": "h100-dgx", "seq": 8192, "microbatch": 1, "recompute": "none", "flash": True}
    shared, one_gpu = controls(OFFERED, **shared, tp=1, dp=64), {"model": "llama3.2-1b", "dp": 1}
    presets = {"few tokens": one_gpu | {"seq": 128}, "long sequences": {"tp": 2, "recompute": "full", "seq": 131072}}
    presets |= {"an old chip": one_gpu | {"seq": 256, "cluster": "v100-dgx"}, "two sequences": {"microbatch": 2}}
    own = {"precision": choice("precision", "bf16", ("bf16", "fp8", "fp32"))}
    own |= {"convention": choice("convention", "causal", tuple(flops.CONVENTIONS))}
    return Explorer(Utilisation(), presets, **shared, **own)
