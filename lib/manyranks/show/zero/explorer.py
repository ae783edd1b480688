"""Chapter 03's explorer: what each stage of ZeRO holds and sends, and the largest model that fits."""

from collections.abc import Iterator
from math import log10
from typing import NamedTuple

from matplotlib.artist import Artist
from matplotlib.collections import PolyCollection

from manyranks.show import style, units
from manyranks.show.bars import LONGEST, Bars
from manyranks.show.explorer import Explorer, Measure, choice, log_slider
from manyranks.show.said import Part, Said
from manyranks.show.scenario import SHAPES, Scenario, controls
from manyranks.theory import Plan, clusters, memory, sharding
from manyranks.theory.names import Named

STAGES = Named("stage", {"data parallelism": 0, "ZeRO-1": 1, "ZeRO-2": 2, "ZeRO-3": 3, "HSDP": 3})
RECIPES = {"16: 2 + 2 + 12": "bf16", "18: 2 + 4 + 12 (fp32 gradients)": "bf16-fp32-gradients"}
RECIPES |= {"20: 2 + 2 + 16 (fp32 copies of both)": "fp16-fp32-gradients"}
ONLY = {"model": ("gpt2-xl", "megatron-7.5b", "llama3-70b", "gpt3-175b", "llama3-405b", "megatron-1t")}
ONLY |= {"cluster": ("v100-dgx", "a100-dgx", "h100-dgx", "h200-dgx", "b200-dgx", "gb200-nvl72")}
_HELD = {"parameters": (style.BLUE, ""), "gradients": (style.ORANGE, ""), "optimizer": (style.GREEN, "")}
_HELD |= {"one sequence": (style.PINK, "")}
_SENT = {"gathers, forward": (style.BLUE, ""), "gathers, backward": (style.PINK, "\\\\\\\\")}
_SENT |= {"reduce-scatter": (style.ORANGE, "////"), "all-reduce": (style.YELLOW, "xxxx")}
_BYTES, _PHI = (1e6, 3e13), (1e8, 1.2e13)  # the ends of logarithmic axes


class Setting(NamedTuple):
    """Holds what the controls say. stage: a key of STAGES; k: shards of HSDP; precision: a key of theory.plan.RECIPES."""

    model: str
    cluster: str
    dp: int
    stage: str
    k: int
    precision: str

    @property
    def possible(self) -> bool:
        return self.stage != "HSDP" or self.dp % self.k == 0

    @property
    def scenario(self) -> Scenario:
        """Takes one sequence a GPU; all layers run again; no overlap. Raises ValueError for K above d in HSDP."""
        if not self.possible:
            ways = f"replicas × shards = d, so choose K up to {self.dp:,}, or more ranks"
            raise ValueError(f"HSDP with K = {self.k:,} shards on d = {self.dp:,} ranks: {ways}")
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


class Stages:
    """Shows a row for each stage: the memory of one GPU, what it sends in a step, and the largest model that fits."""

    @style.styled
    def __init__(self):
        self.figure = style.Figure(figsize=(9.2, 4.2), layout="constrained")
        held, sent, largest = self.figure.subplots(1, 3, sharey=True, width_ratios=(1.6, 1.2, 1))
        self._texts = Bars(held, _HELD, "memory (log; | is the sum)", list(STAGES))
        self._held = held.add_collection(PolyCollection([], linewidths=0, gid="held"), autolim=False)
        self._sums = held.plot([], [], "|", color=style.INK, markersize=32, markeredgewidth=2, gid="sums")[0]
        self._sent = Bars(sent, _SENT, "sent in a step", list(STAGES))
        phi = {"parameters": _HELD["parameters"]}
        self._largest = Bars(
            largest, phi, "largest Φ (log)", list(STAGES), lambda at: count(_PHI[0] * (_PHI[1] / _PHI[0]) ** at)
        )
        for axes, ends, ticks, unit in ((held, _BYTES, (1e6, 1e9, 1e12), units.size), (largest, _PHI, (1e9, 1e12), count)):
            axes.set_xticks([LONGEST * _place(value, ends) for value in ticks], list(map(unit, ticks)))
        band, *others = self._texts.moving
        self.moving: list[Artist] = [band, self._held, self._sums, *others, *self._sent.moving, *self._largest.moving]

    def update(self, **values) -> Said:
        """Shows the Setting of these values. Raises ValueError for an unknown name, and as Setting.scenario does."""
        now = Setting(**values)
        here, row = now.scenario, list(STAGES).index(now.stage)
        self._shown = [each for each in (now._replace(stage=name) for name in STAGES) if each.possible]
        missing = ["K > d"] * (len(STAGES) - len(self._shown))  # HSDP, where it isn't possible
        room, phi = here.cluster.accelerator.memory, here.shape.parameters
        texts = ["|+ ".join(map(units.size, _sizes(each.scenario))) for each in self._shown]
        self._texts.update([], texts + missing, row, 1.0, (_place(room, _BYTES), f"memory: {units.size(room)}"))
        corners = ((x0, x1, y0, y1) for _, x0, x1, y0, y1, _ in self._lanes())
        self._held.set_verts([[(x0, y0), (x1, y0), (x1, y1), (x0, y1)] for x0, x1, y0, y1 in corners])
        self._held.set_facecolors([colour for _ in self._shown for colour, _ in _HELD.values()])
        peaks = [each.scenario.peak.total for each in self._shown]
        self._sums.set_data([LONGEST * _place(peak, _BYTES) for peak in peaks], range(len(peaks)))
        sent, sizes = [each.sent() for each in self._shown], [each.largest() for each in self._shown]
        totals = [sum(parts.values()) for parts in sent]
        self._sent.update(sent, [*map(units.size, totals), *missing], row, max(1, *totals))
        bars = [{"parameters": _place(size, _PHI)} for size in sizes]
        self._largest.update(bars, [*map(count, sizes), *missing], row, 1.0, (_place(phi, _PHI), f"Φ = {count(phi)}"))
        where = f"{now.model} on {now.dp:,} GPU{'s' * (now.dp > 1)}, {now.stage}, {now.cluster}"
        traffic = f"{units.three(totals[row] / max(1, totals[0]))} × data parallelism"
        numbers = (*map(units.size, (*_sizes(here), totals[row])), traffic)[: 4 if now.dp > 1 else 2]
        numbers = dict(zip(("states", "one sequence", "sent", "traffic"), numbers, strict=False))
        return Said(where, numbers, _limit(now), here.fits, here)

    def _lanes(self) -> Iterator[Part]:
        """A thin bar for each part of a row, one below the other: where a part is small beside another, it's seen, too."""
        for y, each in enumerate(self._shown):
            for lane, (part, size) in enumerate(each.held().items()):
                top, says = y - 0.38 + 0.19 * lane, f"{each.stage}, {part}: {units.size(size)}"
                yield Part(self._held.axes, 0, LONGEST * _place(size, _BYTES), top + 0.16, top, says)

    def parts(self) -> Iterator[Part]:
        """Yields what each bar says."""
        for each in (self._lanes(), self._sent.parts(), self._largest.parts()):
            yield from each

    def idle(self, stage: str, **values) -> tuple[str, ...]:
        """Switches K off but for HSDP."""
        return () if stage == "HSDP" else ("k",)


def explorer(measure: Measure | None = None) -> Explorer:
    """Returns the explorer of chapter 03. It opens on figure 1 of arXiv 1910.02054: 7.5 billion parameters on 64 GPUs.

    measure: what "Measure it" runs, manyranks.small's zero
    """
    presets = {"data parallelism": {"stage": "data parallelism"}, "ZeRO-3": {"stage": "ZeRO-3"}}
    presets["Llama 70B"] = {"model": "llama3-70b", "cluster": "h100-dgx", "stage": "ZeRO-3"}
    presets["a trillion"] = {"model": "megatron-1t", "cluster": "h100-dgx", "dp": 1024, "stage": "ZeRO-3"}
    presets["32-bit gradients"] = {"precision": "bf16-fp32-gradients"}
    return Explorer(
        Stages(),
        presets,
        measure,
        **controls(ONLY, model="megatron-7.5b", cluster="v100-dgx", dp=64),
        stage=choice("stage", "ZeRO-2", list(STAGES)),
        k=log_slider("shards K (HSDP)", 16, 0, 10, show="{:,}".format),
        precision=choice("bytes a parameter", "bf16", RECIPES),
    )


def count(parameters: float) -> str:
    """7.64e9 -> "7.64B", as papers write it."""
    return units.size(parameters).removesuffix("B").replace("G", "B").replace(" ", "")


def _place(value: float, ends: tuple[float, float]) -> float:
    """From 0 to 1 on a logarithmic axis with these ends."""
    return log10(max(value, ends[0]) / ends[0]) / log10(ends[1] / ends[0])


def _sizes(here: Scenario) -> tuple[int, int]:
    """Bytes of the states, and of what one sequence needs beside them."""
    return here.peak.states, here.peak.total - here.peak.states


def _limit(now: Setting) -> str:
    """Says what limits, and what would help. Computing grows with a step's tokens, what is sent does not."""
    if not now.scenario.fits:
        held = now.held()
        most = f"memory, most of it {max(held, key=held.get)}".replace("optimizer", "optimizer states")
        way = next((name for name, each in _ways(now) if each.possible and each.scenario.fits), None)
        return f"{most}: {way or 'ZeRO does not help, on however many GPUs; split the layers themselves (chapters 05 and 06)'}"
    if now.dp == 1:
        return "one GPU: nothing to share, nothing to send"
    sequences = now.scenario.time.data / now.scenario.time.compute
    if sequences <= 1:
        return f"computing; the network is busy for {sequences:.0%} of that time"
    return f"the network, busy for as long as computing {sequences:.2g} sequences a GPU: give each that many a step, or more"


def _ways(now: Setting) -> Iterator[tuple[str, Setting]]:
    """Settings that shard more: of one control, then of both."""
    ranks = [2**k for k in range(11)]
    later = ((f"{name} fits", now._replace(stage=name)) for name in list(STAGES)[1:4])
    yield from ((f"K = {k:,} fits", now._replace(k=k)) for k in ranks) if now.stage == "HSDP" else later
    yield from ((f"ZeRO-3 fits from {dp:,} GPUs on", now._replace(stage="ZeRO-3", dp=dp)) for dp in ranks)
