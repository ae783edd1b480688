"""Chapter 03's explorer: what each stage of ZeRO holds and sends, and the largest model that fits."""

import functools
from collections import namedtuple

from manyranks.show import style, units
from manyranks.show.bars import Bars
from manyranks.show.explorer import Board, Explorer, Measure, Setting, choice, log_slider
from manyranks.show.labels import word
from manyranks.show.scenario import SHAPES, Scenario, controls
from manyranks.show.units import count
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
_PRINTS = {"states": "size(peak.states)", "activations": "size(peak.total - peak.states)"}


class Stage(namedtuple("Stage", "model cluster dp stage k precision"), Setting):
    """Holds what the controls say. stage: a key of STAGES; k: shards of HSDP; precision: a key of theory.plan.RECIPES."""

    choices, remedies = {"stage": [*STAGES]}, {"network": ("stage",)}

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

    def where(self) -> str:
        return f"{self.model} on {self.dp:,} GPU{'s' * (self.dp > 1)}, {self.stage}, {self.cluster}"

    def numbers(self) -> dict[str, str]:
        numbers = {"states": units.size(self.scenario.peak.states), "activations": units.size(self.held()["activations"])}
        if self.dp > 1:
            own, alone = (sum(each.sent().values()) for each in (self, self._replace(stage="data parallelism")))
            numbers["sent per GPU per step"] = f"{units.size(own)}, {units.three(own / alone)} × data parallelism"
        return numbers

    def code(self) -> str:
        plan = self.scenario.plan
        more = f", {plan.recipe.parameters}, {min(4, plan.recipe.gradients)}, replicas={self.dp // plan.shards}"
        lines = f"sent = sharding.sent(sharding.unit_sizes(shape), plan.dp, plan.zero{more})\n"
        prints = _PRINTS | ({"sent per GPU per step": "size(sent.total)"} if self.dp > 1 else {})
        return self.scenario.code(prints, "sharding", lines)

    def limits(self) -> str:
        """Says what limits, and what would help. Compute grows with a step's tokens, what is sent does not."""
        if not self.fits:
            held = self.held()
            most = f"memory, mainly {max(held, key=held.get)}".replace("optimizer", "optimizer states")
            ways = ((says, self._replace(**change)) for says, change in self._ways().items())
            way = next((says for says, each in ways if each.possible and each.fits), None)
            return f"{most}: {way or 'no control here helps; chapters 05 and 06 split the model itself'}"
        if self.dp == 1:
            return "compute: one GPU sends nothing"
        sequences = self.scenario.time.data / self.scenario.time.compute
        if sequences <= 1:
            return f"compute; messages take {sequences:.0%} as long"
        faster = self.takes("network", units.duration)
        return f"the network: messages take {units.three(sequences)} times as long as compute{faster}"

    def _ways(self) -> dict[str, dict]:
        """What shards more: another value of one control, then of two."""
        ranks, stages = [2**k for k in range(11)], [] if self.stage == "HSDP" else [*STAGES][1:4]
        ways = {f"{name} fits": {"stage": name} for name in stages} or {f"K = {k:,} fits": {"k": k} for k in ranks}
        return ways | {f"ZeRO-3 fits on {dp:,} GPUs or more": {"stage": "ZeRO-3", "dp": dp} for dp in ranks}


class Stages(Board):
    """Shows a row for each stage: the memory of one GPU, what it sends in a step, and the largest model that fits."""

    setting, over = Stage, "dp"

    @style.styled
    def __init__(self):
        self.figure = style.Figure(figsize=(6.45, 4.3), layout="constrained")
        axes = self.figure.subplot_mosaic("aa;bc", width_ratios=(1.25, 1), height_ratios=(1.15, 1))
        bars, phi = functools.partial(Bars, rows=[*STAGES], outline=word), {"parameters": _HELD["parameters"]}
        self._held = bars(axes["a"], _HELD, "memory (log; | is the sum)", columns=4, ends=(1e6, 3e13), ticks=(1e6, 1e9, 1e12))
        self._sent = bars(axes["b"], _SENT, "sent per GPU per step")
        self._largest = bars(axes["c"], phi, "largest Φ (log)", unit=count, ends=(1e8, 1.2e13), ticks=(1e9, 1e12))
        axes["c"].set_yticklabels([])
        look = {"color": style.INK, "markersize": 20, "markeredgewidth": 2, "gid": "sums"}
        self._sums = axes["a"].plot([], [], "|", **look)[0]
        self.panels, self.others = (self._held, self._sent, self._largest), (self._sums,)

    def draw(self, now: Stage) -> None:
        here, row, missing = now.scenario, [*STAGES].index(now.stage), "K > d"  # HSDP, where it isn't possible
        shown = [each for each in (now._replace(stage=name) for name in STAGES) if each.possible]
        room, phi = here.cluster.accelerator.memory, here.shape.parameters
        bars, mark = [each.held() for each in shown], (room, f"memory: {units.size(room)}")
        both = [(each.scenario.peak.states, bar["activations"]) for each, bar in zip(shown, bars, strict=True)]
        self._held.update(bars, ["|+ ".join(map(units.size, each)) for each in both], row, limit=mark, missing=missing)
        self._sums.set_data([self._held.place(sum(bar.values())) for bar in bars], range(len(bars)))
        bars = [each.sent() for each in shown]
        self._sent.update(bars, [units.size(sum(bar.values())) for bar in bars], row, missing=missing)
        sizes, mark = [each.largest() for each in shown], (phi, f"Φ = {count(phi)}")
        self._largest.update([{"parameters": size} for size in sizes], [*map(count, sizes)], row, limit=mark, missing=missing)

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
