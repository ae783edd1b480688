"""Chapter 09's explorer: the model's operators under the chip's roof, and where the time of a step goes."""

import functools
from collections import namedtuple
from collections.abc import Iterator

from matplotlib.axes import Axes

from manyranks.show import limits, style, units
from manyranks.show.explorer import Explorer, Panels, Part, Said, choice
from manyranks.show.labels import Labels, word
from manyranks.show.mfu.figures import Falls
from manyranks.show.scenario import SHAPES, Scenario, controls
from manyranks.theory import Plan, clusters, flops, hardware, kernels, roofline

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
_SAY = {"flash": "flash attention", "microbatch": "micro-batch {}", "recompute": "recompute = {}", "tp": "TP {}", "dp": "DP {}"}
_CHOICES = {name: OFFERED[name] for name in ("microbatch", "tp", "dp", "recompute")} | {"flash": (True,)}
_REMEDIES = dict.fromkeys(("overhead", "data", "optimizer", "attention projections", "MLP", "head", "router"), ("microbatch",))
_REMEDIES |= {"other": ["flash"], "attention core": ["flash"], "tensor": ["tp"], "expert": ["dp"]}
_WAYS = limits.Limits(_CHOICES, _REMEDIES, ("flash", "recompute", "microbatch", "dp", "tp"), _SAY)
_X, _Y = (1.0, 2e5), (0.05, 300.0)  # intensities, and shares of the peak in percent
_OPERATORS = {"attention projections": ("o", style.BLUE), "attention core": ("s", style.ORANGE), "MLP": ("D", style.GREEN)}
_OPERATORS |= {"head": ("^", style.PINK), "router": ("v", style.INK)}
_USES = {"MFU": style.BLUE, "HFU": "#56B4E9"}


class Setting(namedtuple("Setting", "model cluster precision seq microbatch recompute flash tp dp convention"), limits.Setting):
    """Holds what the controls say: each of tp·dp GPUs takes `microbatch` sequences a step; states are sharded (ZeRO-3)."""

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
    def roof(self) -> roofline.Roof:
        """The roof of matrix products in this precision."""
        chip = clusters[self.cluster].accelerator
        return roofline.Roof(kernels.peak(chip, self.precision), chip.memory_bandwidth)

    @property
    def uses(self) -> dict[str, float]:
        """MFU and HFU under the convention, of the peak in this precision."""
        # Flash attention keeps no scores, so that selective recomputation has no core to run again.
        again = "none" if self.flash and self.recompute == "selective" else self.recompute
        run = SHAPES[self.model], self.seq, 1 / self.cost, 1, self.roof.peak
        return {"MFU": flops.mfu(*run, self.convention), "HFU": flops.hfu(*run, again, self.convention, self.flash)}


@functools.lru_cache(maxsize=4096)
def _spent(here: Scenario) -> tuple[dict[str, float], dict[str, roofline.Part]]:
    """Seconds of a step by what they are spent on; and the operators that a GPU computes in it, by kind."""
    budget, parts = (each(here.shape, here.plan, here.cluster) for each in (roofline.time_budget, roofline.parts))
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
        axes.set(xlabel="arithmetic intensity (FLOP/byte)", ylabel="rate, as a share of the peak (%)")
        axes.set_xticks(at := [1, 10, 100, 1000, 1e4, 1e5], [f"{x:,.0f}" for x in at])
        axes.set_yticks(at := [0.1, 1, 10, 100], [f"{y:g}" for y in at])
        axes.minorticks_off()
        axes.grid(visible=False)
        axes.set_title("Operators under the roof", pad=46)
        axes.legend(loc="lower left", bbox_to_anchor=(-0.05, 0.98), ncols=3, columnspacing=1.0, handlelength=1.6, fontsize=8.5)
        self.moving = [*self._lines, *self._points.values(), self._labels.artist]

    def update(self, now: Setting) -> None:
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
        self._labels.update([(1.3, 190), (1.15 * roof.ridge, 0.08), (max(1.3 * roof.ridge, 3e3), 145)], names)

    def parts(self) -> Iterator[Part]:
        return (Part(self._axes, x / 1.25, 1.25 * x, y / 1.25, 1.25 * y, says) for (x, y), says in self._said.items())


class Utilisation(Panels):
    """Two panels: operators under the roof, and the time of a step."""

    @style.styled
    def __init__(self):
        self.figure, (left, right) = style.figure(2, width=9.2, height=3.65, width_ratios=(1.1, 1))
        self._roofline, self._time = _Roofline(left), Falls(right, BUDGET, "Where the step time goes", _USES, outline=word)
        right.set_xlabel("MFU and HFU bars: time their FLOPs would take at peak", fontsize=9, loc="right")
        self.panels = self._roofline, self._time

    def update(self, **values) -> Said:
        """Shows the Setting of these values. Raises ValueError for an unknown name and what model or chip forbid."""
        now = Setting(**values)
        here, (part, said), budget = now.scenario, _limit(now), _spent(now.scenario)[0]
        self._roofline.update(now)
        self._time.show(budget, sum(budget.values()), len(_USES) + BUDGET.index(part), now.uses)
        numbers = {"MFU, this convention": f"{now.uses['MFU']:.1%} ({now.convention})", "HFU": f"{now.uses['HFU']:.1%}"}
        numbers |= {"peak": units.flop_rate(now.roof.peak), "speed per GPU": f"{units.three(1 / now.cost)} tokens/s"}
        where = f"{now.model}, {now.cluster}, TP {now.tp} × DP {now.dp:,}" + f", EP {here.plan.ep}" * (here.plan.ep > 1)
        where += f", {now.microbatch} × {now.seq:,} tokens per DP rank"
        note = "" if now.precision == "bf16" else "Its MFU is a share of the bf16 peak."
        return Said(where, numbers, said, here.fits, here, note)

    def code(self, **values) -> str:
        """Python that computes the same numbers."""
        return Setting(**values).scenario.code() + (
            "\nfrom manyranks.theory import flops, kernels, roofline\n\n"
            "run = shape, plan.seq, time.tokens_per_second, plan.gpus, kernels.peak(cluster.accelerator, plan.precision)\n"
            f"print(flops.mfu(*run, {values['convention']!r}), roofline.time_budget(shape, plan, cluster))\n"
            "print(*roofline.parts(shape, plan, cluster), sep='\\n')\n"
        )


def explorer() -> Explorer:
    """Returns the explorer of chapter 09. It opens on Llama 3 8B, one sequence of 8,192 tokens on each of 64 H100s."""
    shared = {"model": "llama3-8b", "cluster": "h100-dgx", "seq": 8192, "microbatch": 1, "recompute": "none", "flash": True}
    shared, one_gpu = controls(OFFERED, **shared, tp=1, dp=64), {"model": "llama3.2-1b", "dp": 1}
    presets = {"few tokens": one_gpu | {"seq": 128}, "long sequences": {"tp": 2, "recompute": "full", "seq": 131072}}
    presets |= {"an old chip": one_gpu | {"seq": 256, "cluster": "v100-dgx"}, "two sequences": {"microbatch": 2}}
    own = {"precision": choice("precision", "bf16", ("bf16", "fp8", "fp32"))}
    own |= {"convention": choice("convention", "causal", tuple(flops.CONVENTIONS))}
    return Explorer(Utilisation(), presets, **shared, **own)


def _limit(now: Setting) -> tuple[str, str]:
    """The part of the budget that limits, the longest one beside matmuls unless these wait for memory; a sentence of it."""
    budget, operators = _spent(now.scenario)
    longest = max((each for each in operators.values() if each.flops), key=lambda each: each.seconds - each.overhead)
    part, whole, ridge = max(BUDGET[1:], key=budget.get), sum(budget.values()), units.short(now.roof.ridge)
    starved = longest.bound == "memory" and budget["matmul"] >= budget[part]
    part = "matmul" if starved or budget[part] < limits.MUCH * whole else part
    if not now.fits:
        return part, _WAYS.memory(now, "no single control helps: change two")
    if part != "matmul":
        said = f"{_LIMITS[part]}, {budget[part] / whole:.0%} of the step"
    elif longest.bound == "memory":
        does = f"the {longest.name} does {units.short(longest.intensity)} FLOPs per byte"
        said = f"memory bandwidth: {does}, below the ridge at {ridge}"
    else:
        rate = longest.flops_per_second / now.roof.peak
        said = f"compute: matmuls take {budget[part] / whole:.0%} of the step, the {longest.name} at {rate:.0%} of the peak"
    if other := _WAYS.faster(now, longest.name if part == "matmul" else part):
        said += f"; with {_WAYS.change(now, other)}: {units.three(1 / other.cost)} tokens/s per GPU"
    return part, said + "; HFU is above 100% because it counts scores that flash attention skips" * (now.uses["HFU"] > 1)
