"""Chapter 03's explorer: what each stage of ZeRO holds and sends, and the largest model that fits."""

import functools
from collections import namedtuple

from manyranks.show import limits, style, units
from manyranks.show.bars import Bars
from manyranks.show.explorer import Explorer, Measure, Panels, choice, log_slider
from manyranks.show.labels import word
from manyranks.show.said import Said
from manyranks.show.scenario import SHAPES, Scenario, controls
from manyranks.theory import Plan, clusters, memory, sharding
from manyranks.theory.names import Named

STAGES = Named("stage", {"data parallelism": 0, "ZeRO-1": 1, "ZeRO-2": 2, "ZeRO-3": 3, "HSDP": 3})
RECIPES = {"16: 2 + 2 + 12": "bf16", "18: 2 + 4 + 12 (fp32 gradients)": "bf16-fp32-gradients"}
RECIPES |= {"20: 2 + 2 + 16 (fp32 copies of both)": "fp16-fp32-gradients"}
ONLY = {"model": ("gpt2-xl", "megatron-7.5b", "llama3-70b", "gpt3-175b", "llama3-405b", "megatron-1t")}
ONLY |= {"cluster": ("v100-dgx", "a100-dgx", "h100-dgx", "h200-dgx", "b200-dgx", "gb200-nvl72")}
_HELD = {"parameters": (style.BLUE, ""), "gradients": (style.ORANGE, ""), "optimizer": (style.GREEN, "")}
_HELD |= {"activations": (style.PINK, "")}
_SENT = {"gathers, forward": (style.BLUE, ""), "gathers, backward": (style.PINK, "\\\\\\\\")}
_SENT |= {"reduce-scatter": (style.ORANGE, "////"), "all-reduce": (style.YELLOW, "xxxx")}

_WAYS = limits.Limits({"stage": [*STAGES]}, {"network": ("stage",)})


class Setting(namedtuple("Setting", "model cluster dp stage k precision"), limits.Setting):
    """Holds what the controls say. stage: a key of STAGES; k: shards of HSDP; precision: a key of theory.plan.RECIPES."""

    @functools.cached_property
    def scenario(self) -> Scenario:
        """Takes one sequence a GPU; all layers run again; no overlap. Raises ValueError for K above d in HSDP."""
        if self.stage == "HSDP" and self.dp % self.k:
            now = f"K = {self.k:,} and d = {self.dp:,}"
            raise ValueError(f"HSDP needs K ≤ d (replicas × shards = d), but {now}: lower K or raise d")
        how = {"zero": STAGES[self.stage], "dp_shard": self.k if self.stage == "HSDP" else None, "overlap": False}
        plan = Plan(dp=self.dp, seq=1024, recompute="full", precision=self.precision, **how)
        return Scenario(SHAPES[self.model], plan, clusters[self.cluster])

    def held(self) -> dict[str, int]:
        """Returns bytes of one GPU; their sum is the peak."""
        here = self.scenario
        states = memory.model_states(here.shape, here.plan)[:3]
        return dict(zip(_HELD, (*states, here.peak.total - here.peak.states), strict=True))

    def sent(self) -> dict[str, int]:
        """Returns what a rank sends in a step, in bytes, with one forward and one backward, the units being the layers."""
        plan, cut = self.scenario.plan, sharding.unit_sizes(self.scenario.shape)
        itemsizes = plan.recipe.parameters, min(4, plan.recipe.gradients)
        sent = sharding.sent(cut, self.dp, plan.zero, *itemsizes, replicas=self.dp // plan.shards)
        return dict(zip(_SENT, sent, strict=True))

    def largest(self) -> int:
        """Returns the parameters of the largest model by its states alone, as in Table 2 of arXiv 1910.02054."""
        plan, room = self.scenario.plan, self.scenario.cluster.accelerator.memory
        return sharding.largest(plan.zero, self.dp, int(room), self.precision, self.dp // plan.shards)


class Stages(Panels):
    """Shows a row for each stage: the memory of one GPU, what it sends in a step, and the largest model that fits."""

    @style.styled
    def __init__(self):
        self.figure, (held, sent, largest) = style.figure(3, 1, 9.2, 4.2, sharey=True, width_ratios=(1.6, 1.2, 1))
        bars, phi = functools.partial(Bars, rows=[*STAGES], outline=word), {"parameters": _HELD["parameters"]}
        self._held = bars(held, _HELD, "memory (log; | is the sum)", ends=(1e6, 3e13), ticks=(1e6, 1e9, 1e12))
        self._sent = bars(sent, _SENT, "sent per GPU per step")
        self._largest = bars(largest, phi, "largest Φ (log)", unit=count, ends=(1e8, 1.2e13), ticks=(1e9, 1e12))
        self._sums = held.plot([], [], "|", color=style.INK, markersize=32, markeredgewidth=2, gid="sums")[0]
        self.panels, self.others = (self._held, self._sent, self._largest), (self._sums,)

    def update(self, **values) -> Said:
        """Shows the Setting of these values. Raises ValueError for an unknown name, and as Setting.scenario does."""
        now = Setting(**values)
        here, row, missing = now.scenario, [*STAGES].index(now.stage), "K > d"  # HSDP, where it isn't possible
        shown = [each for each in (now._replace(stage=name) for name in STAGES) if each.possible]
        room, phi = here.cluster.accelerator.memory, here.shape.parameters
        bars, mark = [each.held() for each in shown], (room, f"memory: {units.size(room)}")
        both = [(each.scenario.peak.states, bar["activations"]) for each, bar in zip(shown, bars, strict=True)]
        self._held.update(bars, ["|+ ".join(map(units.size, each)) for each in both], row, limit=mark, missing=missing)
        self._sums.set_data([self._held.place(sum(bar.values())) for bar in bars], range(len(bars)))
        bars = [each.sent() for each in shown]
        totals = [sum(bar.values()) for bar in bars]
        self._sent.update(bars, [*map(units.size, totals)], row, missing=missing)
        sizes, mark = [each.largest() for each in shown], (phi, f"Φ = {count(phi)}")
        self._largest.update([{"parameters": size} for size in sizes], [*map(count, sizes)], row, limit=mark, missing=missing)
        numbers = dict(zip(("states", "activations"), map(units.size, both[row]), strict=True))
        if now.dp > 1:
            more = f", {units.three(totals[row] / totals[0])} × data parallelism"
            numbers["sent per GPU per step"] = units.size(totals[row]) + more
        where = f"{now.model} on {now.dp:,} GPU{'s' * (now.dp > 1)}, {now.stage}, {now.cluster}"
        return Said(where, numbers, _limit(now), here.fits, here)

    def idle(self, stage: str, **values) -> tuple[str, ...]:
        """Switches K off but for HSDP."""
        return () if stage == "HSDP" else ("k",)


def explorer(measure: Measure | None = None) -> Explorer:
    """Returns the explorer of chapter 03, on figure 1 of arXiv 1910.02054. measure: what "Measure it" runs, small.zero."""
    presets = {"data parallelism": {"stage": "data parallelism"}, "ZeRO-3": {"stage": "ZeRO-3"}}
    presets["Llama 70B"] = {"model": "llama3-70b", "cluster": "h100-dgx", "stage": "ZeRO-3"}
    presets["a trillion"] = {"model": "megatron-1t", "cluster": "h100-dgx", "dp": 1024, "stage": "ZeRO-3"}
    presets["32-bit gradients"] = {"precision": "bf16-fp32-gradients"}
    shared = controls(ONLY, model="megatron-7.5b", cluster="v100-dgx", dp=64)
    own = {"stage": choice("stage", "ZeRO-2", list(STAGES)), "k": log_slider("HSDP shards K", 16, 0, 10, show="{:,}".format)}
    return Explorer(Stages(), presets, measure, **shared, **own, precision=choice("bytes/parameter", "bf16", RECIPES))


def count(parameters: float) -> str:
    """7.64e9 -> "7.64B", as papers write it."""
    return units.size(parameters).removesuffix("B").replace("G", "B").replace(" ", "")


def _limit(now: Setting) -> str:
    """Says what limits, and what would help. Compute grows with a step's tokens, what is sent does not."""
    if not now.fits:
        held = now.held()
        most = f"memory, mainly {max(held, key=held.get)}".replace("optimizer", "optimizer states")
        ways = ((says, now._replace(**change)) for says, change in _ways(now.stage == "HSDP").items())
        way = next((says for says, each in ways if each.possible and each.fits), None)
        return f"{most}: {way or 'no control here helps; chapters 05 and 06 split the model itself'}"
    if now.dp == 1:
        return "compute: one GPU sends nothing"
    sequences = now.scenario.time.data / now.scenario.time.compute
    if sequences <= 1:
        return f"compute; messages take {sequences:.0%} as long"
    faster = _WAYS.takes(now, "network", units.duration)
    return f"the network: messages take {units.three(sequences)} times as long as compute{faster}"


def _ways(hsdp: bool) -> dict[str, dict]:
    """What shards more: another value of one control, then of two."""
    ranks, stages = [2**k for k in range(11)], [] if hsdp else [*STAGES][1:4]
    ways = {f"{name} fits": {"stage": name} for name in stages} or {f"K = {k:,} fits": {"k": k} for k in ranks}
    return ways | {f"ZeRO-3 fits on {dp:,} GPUs or more": {"stage": "ZeRO-3", "dp": dp} for dp in ranks}
