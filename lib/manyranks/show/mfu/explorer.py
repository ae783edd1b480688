"""Chapter 09's explorer: a model's products under a chip's roof, and where the time of a step goes."""

import functools
from collections import namedtuple
from collections.abc import Iterator, Sequence
from math import log, nan

from matplotlib.axes import Axes

from manyranks.measure.compared import SmallRun
from manyranks.show import style, units
from manyranks.show.bars import Bars
from manyranks.show.explorer import Board, Explorer, Measure, Part, Setting, choice, value_slider
from manyranks.show.labels import Labels, word
from manyranks.show.lines import powers
from manyranks.show.mfu.figures import Point, roofline
from manyranks.show.scenario import BUBBLE, MEMORY, MFU, SHAPES, Scenario, controls
from manyranks.show.setting import MUCH
from manyranks.show.style import STEP
from manyranks.theory import Plan, clusters, flops, kernels
from manyranks.theory import roofline as theory
from manyranks.theory.plan import RECIPES
from manyranks.theory.stacks import STACKS

MODELS = ("small GPT", "gpt2", "gpt2-xl", "llama3.2-1b", "llama3-8b", "megatron-22b", "llama3-70b", "gpt3-175b")
MODELS += ("llama3-405b", "palm-540b", "mixtral-8x7b", "deepseek-v3")
CLUSTERS = ("laptop", "v100-dgx", "a100-dgx", "h100-dgx", "h200-dgx", "b200-dgx", "gb200-nvl72", "mi300x", "h800")
CLUSTERS += ("tpu-v4", "tpu-v5p", "tpu-v6e")
PRECISIONS = ("bf16", "fp8", "mxfp8", "nvfp4")
OFFERED = {"model": MODELS, "cluster": CLUSTERS, "seq": [2**k for k in range(7, 18)], "microbatch": [2**k for k in range(8)]}
OFFERED |= {"recompute": ("none", "selective", "full"), "tp": [1, 2, 4, 8], "pp": [1, 2, 4, 8, 16], "cp": [1, 2, 4, 8, 16]}
OFFERED |= {"dp": [2**k for k in range(11)]}
MICROBATCHES = [2**k for k in range(8)]
_CHOICES = {name: OFFERED[name] for name in ("microbatch", "tp", "pp", "cp", "dp", "recompute")}
_CHOICES |= {"flash": (True,), "m": MICROBATCHES}
# The five parts of a step, and what each is made of: a part of theory.roofline.time_budget -> its name and color.
FIVE = {
    "FLOPs at peak": {"peak": ("needed FLOPs ÷ peak", style.BLUE)},
    "slower than peak": {"matmul": ("matmuls below peak", "#9ecae1"), "other": ("other operators", "#80cbc4")},
    "waiting for messages": {part: STEP[part][:2] for part in ("tensor", "context", "expert", "pipeline", "data")},
    "waiting for other ranks": {"bubble": STEP["bubble"][:2]},
    "everything else": {"overhead": ("kernel launches", "#fdae6b"), "optimizer": STEP["optimizer"][:2]},
}
_LIMITS = {"matmul": "", "other": "memory bandwidth: operators that only move data", "overhead": "overhead: kernel launches"}
_LIMITS |= {"tensor": "TP messages", "context": "CP messages", "expert": "tokens to experts", "pipeline": "PP messages"}
_LIMITS |= {"bubble": "waiting for other ranks: the bubble", "data": "DP messages"}
_LIMITS |= {"optimizer": "the optimizer's memory traffic"}
_REMEDIES = dict.fromkeys(("overhead", "attention projections", "MLP", "head", "router"), ("microbatch",))
_REMEDIES |= {"data": ("microbatch",), "optimizer": ("microbatch",), "bubble": ("m",), "pipeline": ("pp",)}
_REMEDIES |= {"other": ("flash",), "attention core": ("flash",), "tensor": ("tp",), "context": ("cp",), "expert": ("dp",)}
_PRINTS = {"MFU, this convention": 'f"{{flops.mfu(*run, {convention!r}):.1%}} ({convention})"'}
_PRINTS |= {"peak": "flop_rate(run[-1])", "speed per GPU": "three(time.tokens_per_second / plan.gpus), 'tokens/s'"}
_OPERATORS = {"attention projections": ("o", style.BLUE), "attention core": ("s", style.ORANGE), "MLP": ("D", style.GREEN)}
_OPERATORS |= {"head": ("^", style.PINK), "router": ("v", style.INK)}
_WIDE = 1.68  # of the roofline's axes, of which the scale of intensities takes 1


class Used(
    namedtuple("Used", "model cluster precision seq microbatch m stack recompute flash tp pp cp dp convention"), Setting
):
    """Holds what the controls say: a step of m micro-batches of `microbatch` sequences on each of dp replicas.

    With p = 1 states are sharded as in ZeRO-3, else as in ZeRO-1
    """

    choices, remedies, words = _CHOICES, _REMEDIES, {"m": "m = {}"}
    room = "flash", "recompute", "microbatch", "dp", "tp", "pp"

    @property
    @functools.lru_cache(maxsize=16384)  # noqa: B019 a setting is a few numbers
    def scenario(self) -> Scenario:
        """Raises ValueError for a name that there is not, and for what the model or the chip doesn't allow."""
        shape, cluster, positions = SHAPES[self.model], clusters[self.cluster], SHAPES[self.model].positions
        if 0 < positions < self.seq:
            raise ValueError(f"{self.model} has learned positions for {positions:,} tokens, not for {self.seq:,}: lower s")
        experts = min(self.dp, {"mixtral-8x7b": 8, "deepseek-v3": 64}.get(self.model, 1))  # ranks that share them
        how = self._asdict() | {"ep": experts, "zero": 1 if self.pp > 1 else 3, "batch": self.dp * self.microbatch * self.m}
        plan = Plan(**{name: value for name, value in how.items() if name not in ("model", "cluster", "m", "convention")})
        here = Scenario(shape, plan, cluster).checked()
        here.time  # noqa: B018 refuses what the chip has not
        return here

    @property
    def cost(self) -> float:
        """Returns the seconds that a token takes of one GPU."""
        return self.scenario.plan.gpus / self.scenario.time.tokens_per_second

    @property
    def roof(self) -> theory.Roof:
        chip = clusters[self.cluster].accelerator
        return theory.Roof(kernels.peak(chip, RECIPES[self.precision].rate), chip.memory_bandwidth)

    @property
    def uses(self) -> dict[str, float]:
        """Returns MFU and HFU under the convention, of the peak in this precision."""
        # Flash attention keeps no scores, so that selective recomputation has no core to run again.
        again = "none" if self.flash and self.recompute == "selective" else self.recompute
        run = SHAPES[self.model], self.seq, 1 / self.cost, 1, self.roof.peak
        return {"MFU": flops.mfu(*run, self.convention), "HFU": flops.hfu(*run, again, self.convention, self.flash)}

    @property
    def spent(self) -> dict[str, float]:
        """Returns the seconds of a step by what FIVE is made of. Needed FLOPs are causal, under every convention."""
        budget, _ = _spent(self.scenario)
        peak = flops.mfu(SHAPES[self.model], self.seq, 1 / self.cost, 1, self.roof.peak) * self.scenario.time.seconds
        slower = max(0.0, budget["matmul"] - peak)
        return budget | {"peak": budget["matmul"] - slower, "matmul": slower}

    def where(self) -> str:
        p = self.scenario.plan
        degrees = {"TP": p.tp, "PP": p.pp, "CP": p.cp, "EP": p.ep}
        ranks = "".join(f"{name} {degree}, " for name, degree in degrees.items() if degree > 1) + f"DP {p.dp:,}"
        return f"{self.model}, {self.cluster}, {ranks}; {self.m} × {self.microbatch} × {self.seq:,} tokens per replica"

    def numbers(self) -> dict[str, str]:
        numbers = {"MFU, this convention": f"{self.uses['MFU']:.1%} ({self.convention})", "HFU": f"{self.uses['HFU']:.1%}"}
        return numbers | {"peak": units.flop_rate(self.roof.peak), "speed per GPU": f"{units.three(1 / self.cost)} tokens/s"}

    @property
    def note(self) -> str:
        share = " In the strip and its curve, MFU is a share of the bf16 peak." if self.precision != "bf16" else ""
        return f"ZeRO-{self.scenario.plan.zero} shards the states.{share}"

    def limits(self) -> str:
        return self.limiting()[1]

    @functools.lru_cache(maxsize=4096)  # noqa: B019 a setting is a few numbers
    def limiting(self) -> tuple[str, str]:
        """Returns what limits, and a sentence: the longest part of the budget but matmuls, unless these wait for memory."""
        budget, operators = _spent(self.scenario)
        longest = max((each for each in operators.values() if each.flops), key=lambda each: each.seconds - each.overhead)
        part, whole, ridge = max([*_LIMITS][1:], key=budget.get), sum(budget.values()), units.short(self.roof.ridge)
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
        if self.uses["HFU"] > 1:
            said += "; HFU is above 100% because it counts scores that flash attention skips"
        return part, said

    def code(self) -> str:
        lines = "best = kernels.peak(cluster.accelerator, plan.recipe.rate)\n"
        lines += "run = shape, plan.seq, time.tokens_per_second, plan.gpus, best\n"
        prints = {name: text.format(convention=self.convention) for name, text in _PRINTS.items()}
        return self.scenario.code(prints, "flops kernels", lines)


@functools.lru_cache(maxsize=4096)
def _spent(here: Scenario) -> tuple[dict[str, float], dict[str, theory.Part]]:
    """Seconds of a step by what they are spent on; and the operators that a GPU computes in it, by kind."""
    budget, parts = (each(here.shape, here.plan, here.cluster) for each in (theory.time_budget, theory.parts))
    return {part: budget[part] for part in _LIMITS}, {each.name: each for each in parts}


class _Roofline:
    """The roof of the chip, as shares of its peak, and the model's products under it, on scales that follow these."""

    def __init__(self, axes: Axes):
        self._axes, self._says = axes, []
        lines = (("roof", "-", 1.8), ("best", "--", 1.1), ("ridge", ":", 1.0), ("marks", "-", 0.8))
        self._lines = {name: axes.plot([], [], color=style.INK, linestyle=line, lw=w, gid=name)[0] for name, line, w in lines}
        look = {"fillstyle": "none", "markersize": 8, "markeredgewidth": 1.8, "linestyle": "none"}
        # Each has its place, and one in the list at the right.
        self._points = {name: axes.plot([], [], m, color=c, gid=name, **look)[0] for name, (m, c) in _OPERATORS.items()}
        self._names = Labels(axes, 8.5, left=0, outline=word, name="names")
        self._below, self._beside = Labels(axes, 8.5, outline=word), Labels(axes, 8.5, left=1, outline=word)
        axes.set(xlim=(0, _WIDE), ylim=(0, 1), xticks=[], title="Products under the roof")
        axes.set_yticks([0.5], ["100%"], color="none")  # keeps room for the numbers
        axes.tick_params(length=0, grid_linewidth=0)
        axes.spines["bottom"].set_bounds(0, 1)
        axes.set_xlabel("arithmetic intensity (FLOPs per byte)", labelpad=18, x=0.5 / _WIDE)
        axes.set_ylabel("rate (% of peak)")
        self.moving = [*self._lines.values(), *self._points.values(), self._names, self._below, self._beside]

    def update(self, now: Used) -> None:
        roof, best, operators = now.roof, now.scenario.cluster.accelerator.matmul_fraction, _spent(now.scenario)[1]
        shares = {name: operators[name].flops_per_second / roof.peak for name in _OPERATORS if name in operators}
        x = _Scale([roof.ridge, *(operators[name].intensity for name in shares)])
        y = _Scale([1, *shares.values()])
        ridge, left = x(roof.ridge), y(x.low / roof.ridge)
        ends = [(x(tick), -0.025, x(tick), 0, nan, nan) for tick in x.ticks]
        drawn = {"roof": ([0, ridge, 1], [left, y(1), y(1)]), "best": ([x(roof.ridge * best), 1], [y(best)] * 2)}
        drawn |= {
            "ridge": ([ridge] * 2, [0, y(1)]),
            "marks": ([v for end in ends for v in end[::2]], [v for end in ends for v in end[1::2]]),
        }
        for name, line in self._lines.items():
            line.set_data(*drawn[name])
        rows, self._says = [0.95 - 0.125 * row for row in range(len(shares) + 4)], []
        for line in self._points.values():
            line.set_data([], [])
        for name, row in zip(shares, rows, strict=False):
            at, does = (x(operators[name].intensity), y(shares[name])), units.short(operators[name].intensity)
            self._points[name].set_data([at[0], 1.1], [at[1], row])
            self._says.append((*at, f"{name}: {does} FLOPs per byte, {shares[name]:.1%} of the peak"))
        said = [f"{name}: {share:.1%}" for name, share in shares.items()]
        said += [f"best product (dashed): {best:.0%}", f"peak: {units.flop_rate(roof.peak)}"]
        said += [f"memory: {units.rate(roof.bandwidth)}", f"ridge (dotted): {units.short(roof.ridge)}"]
        self._names.write([(1.15 if k < len(shares) else 1.08, row) for k, row in enumerate(rows)], said)
        self._below.write([(x(tick), -0.085) for tick in x.ticks], [f"{tick:,g}" for tick in x.ticks])
        self._beside.write([(-0.015, y(tick)) for tick in y.ticks], [f"{100 * tick:g}%" for tick in y.ticks])

    def parts(self) -> Iterator[Part]:
        return (Part(self._axes, x - 0.02, x + 0.02, y - 0.05, y + 0.05, says) for x, y, says in self._says)


class _Scale:
    """A logarithmic scale from 0 to 1 around these numbers, with room on both sides.

    ticks: what is numbered on it
    """

    def __init__(self, values: Sequence[float]):
        self.low, self._high = min(values) / 1.5, max(values) * 1.3
        self.ticks = powers((self.low, self._high))

    def __call__(self, value: float) -> float:
        return log(value / self.low) / log(self._high / self.low)


class Utilization(Board):
    """Two panels: products under the roof, and the five parts of a step's time."""

    setting, over, curves = Used, "pp", (MEMORY, BUBBLE, MFU)

    @style.styled
    def __init__(self):
        self.figure, (above, below) = style.figure(1, 2, 6.45, 4.18, height_ratios=(1.15, 1))
        parts = {name: (color, "") for parts in FIVE.values() for name, color in parts.values()}
        self._roofline = _Roofline(above)
        self._time = Bars(below, parts, "Where the step time goes", list(FIVE), units.duration, columns=0, outline=word)
        self.panels = self._roofline, self._time

    def draw(self, now: Used) -> None:
        spent, whole, begun, bars, texts = now.spent, now.scenario.time.seconds, 0.0, [], []
        for parts in FIVE.values():
            each = {name: spent[part] for part, (name, _) in parts.items()}
            seconds, longest = sum(each.values()), max(each, key=each.get)
            most = f", {longest}" if len(each) > 1 else ""
            bars.append({"": begun} | each)
            texts.append(f"{units.duration(seconds)}, {seconds / whole:.1%}{most}" if seconds else "none")
            begun += seconds
        part = now.limiting()[0]
        self._roofline.update(now)
        row = next(k for k, parts in enumerate(FIVE.values()) if part in parts)
        self._time.update(bars, texts, row, whole, (whole, f"together {units.duration(whole)}"))

    def pictured(self, small: SmallRun) -> bytes:
        """Returns a PNG: the points that were measured, under the roof of the machine."""
        return roofline(
            {"this machine, float32": theory.Roof(*small.roof)}, [Point(*each) for each in small.points]
        )._repr_png_()


def explorer(measure: Measure | None = None) -> Explorer:
    """Opens on Llama 3 8B, 8 × 8,192 tokens on each of 64 H100s.

    measure: what "Measure it" runs, of few_ranks
    """
    one_gpu = {"model": "llama3.2-1b", "dp": 1, "m": 1}
    presets = {"few tokens": one_gpu | {"seq": 128}, "an old chip": one_gpu | {"seq": 256, "cluster": "v100-dgx"}}
    presets |= {"long sequences": {"cp": 16, "dp": 4, "seq": 131072}, "two sequences": {"microbatch": 2}}
    presets |= {"pipeline": {"model": "llama3-70b", "tp": 8, "pp": 4, "dp": 8}}
    presets |= {"NVFP4": {"cluster": "b200-dgx", "precision": "nvfp4"}}
    shared = {"model": "llama3-8b", "cluster": "h100-dgx", "seq": 8192, "microbatch": 1, "recompute": "none", "flash": True}
    made = controls(OFFERED, **shared, tp=1, pp=1, cp=1, dp=64)
    made |= {"precision": choice("precision", "bf16", PRECISIONS), "stack": choice("stack", Plan().stack, tuple(STACKS))}
    made |= {"m": value_slider("micro-batches m", 8, MICROBATCHES)}
    made |= {"convention": choice("convention", "causal", tuple(flops.CONVENTIONS))}
    return Explorer(Utilization(), presets, measure, **{name: made[name] for name in Used._fields})
