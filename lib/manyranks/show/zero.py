"""Chapter 03: memory over a step; an explorer: what each stage of ZeRO holds and sends, and the largest model that fits."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from math import log10
from typing import NamedTuple

from matplotlib.artist import Artist

from manyranks.show import drawings, style, units
from manyranks.show.bars import LONGEST, Bars
from manyranks.show.explorer import Explorer, choice, log_slider
from manyranks.theory import Plan, clusters, memory, models, sharding, step

STAGES = {"data parallelism": 0, "ZeRO-1": 1, "ZeRO-2": 2, "ZeRO-3": 3, "HSDP": 3}
RECIPES = {
    "16: 2 + 2 + 12": "bf16",
    "18: 2 + 4 + 12 (fp32 gradients)": "bf16-fp32-gradients",
    "20: 2 + 2 + 16 (fp32 copies of both)": "fp16-fp32-gradients",
}
SEQ = 1024  # tokens of a sequence
_MODELS = ("gpt2-xl", "megatron-7.5b", "llama3-70b", "gpt3-175b", "llama3-405b", "megatron-1t")
_CLUSTERS = ("v100-dgx", "a100-dgx", "h100-dgx", "h200-dgx", "b200-dgx", "gb200-nvl72")
_HELD = {"parameters": (style.BLUE, ""), "gradients": (style.ORANGE, "////"), "optimizer": (style.GREEN, "....")}
_SENT = {
    "gathers, forward": (style.BLUE, ""),
    "gathers, backward": (style.PINK, "\\\\\\\\"),
    "reduce-scatter": (style.ORANGE, "////"),
    "all-reduce": (style.YELLOW, "xxxx"),
}
_LEAST, _MOST = 1e8, 1.2e13  # parameters of the shortest and of the longest bar; their axis is logarithmic
_SHOWN = 4  # times a device's memory; what is more is cut off


class Setting(NamedTuple):
    """Holds what the controls say. stage: a key of STAGES; k: shards of HSDP; precision: a key of theory.plan.RECIPES."""

    model: str
    cluster: str
    n: int
    stage: str
    k: int
    precision: str

    @property
    def replicas(self) -> int:
        return self.n // self.k if self.stage == "HSDP" else 1

    @property
    def possible(self) -> bool:
        return self.stage != "HSDP" or self.n % self.k == 0

    @property
    def device(self) -> int:
        """Bytes of one accelerator's memory."""
        return int(clusters[self.cluster].accelerator.memory)

    def plan(self) -> Plan:
        """One sequence an accelerator, every layer recomputed; nothing overlaps."""
        common = {"seq": SEQ, "recompute": "full", "overlap": False, "precision": self.precision}
        return Plan(dp=self.n, zero=STAGES[self.stage], dp_shard=self.n // self.replicas, **common)

    def states(self) -> dict[str, int]:
        parameters, gradients, optimizer, _ = memory.model_states(models[self.model], self.plan())
        return dict(zip(_HELD, (parameters, gradients, optimizer), strict=True))

    def peak(self) -> memory.Peak:
        return memory.peak(models[self.model], self.plan())

    def sent(self) -> dict[str, int]:
        recipe, cut = self.plan().recipe, sharding.unit_sizes(models[self.model])
        itemsizes = recipe.parameters, min(4, recipe.gradients)
        parts = sharding.sent(cut, self.n, STAGES[self.stage], *itemsizes, replicas=self.replicas)
        return dict(zip(_SENT, parts, strict=True))

    def largest(self) -> int:
        return sharding.largest(STAGES[self.stage], self.n, self.device, self.precision, self.replicas)


class Stages:
    """A row for each stage: the memory of one accelerator, what it sends in a step, and the largest model that fits.

    memory: of the states, in bars, and of what one sequence needs beside them; sent: with one forward and one backward, the
    units being the layers; largest: by its states alone, as in Table 2 of arXiv 1910.02054.
    """

    @style.styled
    def __init__(self):
        self.figure = style.Figure(figsize=(9.4, 4.2), layout="constrained")
        held, sent, largest = self.figure.subplots(1, 3, sharey=True, width_ratios=(1.7, 1.2, 1))
        self._held = Bars(held, _HELD, "memory: states + one sequence", list(STAGES))
        self._sent = Bars(sent, _SENT, "sent in a step", list(STAGES))
        self._largest = Bars(largest, {"parameters": _HELD["parameters"]}, "largest Φ, log scale", list(STAGES))
        ticks = {"1B": 1e9, "1T": 1e12}
        largest.set_xticks([_place(value) for value in ticks.values()], list(ticks))
        self.moving: list[Artist] = [*self._held.moving, *self._sent.moving, *self._largest.moving]

    def update(self, model: str, cluster: str, n: int, stage: str, k: int, precision: str) -> str:
        """Shows this setting; returns what limits.

        precision: a key of RECIPES. Raises ValueError for an unknown name, and for HSDP with shards that N cannot have.
        """
        _check(stage, n, k, precision)
        now = Setting(model, cluster, n, stage, k, RECIPES[precision])
        row, each = list(STAGES).index(stage), [now._replace(stage=name) for name in STAGES]
        shown = [setting for setting in each if setting.possible]
        peaks, sent, sizes = ([find(setting) for setting in shown] for find in (Setting.peak, Setting.sent, Setting.largest))
        device, phi = (now.device, f"memory: {units.size(now.device)}"), models[model].parameters
        missing = ["K > N"] * (len(STAGES) - len(shown))  # HSDP, where it is not possible
        texts = [f"{units.size(peak.states)}|+ {units.size(peak.total - peak.states)}" for peak in peaks]
        held = [setting.states() for setting in shown]
        longest = max(now.device, min(_SHOWN * now.device, max(sum(parts.values()) for parts in held)))
        self._held.update(held, texts + missing, row, longest, device)
        totals = [sum(parts.values()) for parts in sent]
        self._sent.update(sent, [*map(units.size, totals), *missing], row, max(1, *totals))
        bars = [{"parameters": _place(size)} for size in sizes]
        self._largest.update(bars, [*map(count, sizes), *missing], row, LONGEST, (_place(phi), f"Φ = {count(phi)}"))
        return _status(now, peaks[row], totals[row], totals[0])


def explorer() -> Explorer:
    """The explorer of chapter 03. It opens on figure 1 of arXiv 1910.02054: 7.5 billion parameters on 64 GPUs."""
    return Explorer(
        Stages(),
        model=choice("model", "megatron-7.5b", _MODELS),
        cluster=choice("cluster", "v100-dgx", _CLUSTERS),
        n=log_slider("accelerators N", 64, 0, 10, show="{:,}".format),
        stage=choice("stage", "ZeRO-2", list(STAGES)),
        k=log_slider("shards K (HSDP)", 16, 0, 10, show="{:,}".format),
        precision=choice("bytes a parameter", next(iter(RECIPES)), list(RECIPES)),
    )


@style.styled
def memory_over_a_step(samples: Mapping[str, Sequence[tuple[str, int]]]) -> style.Figure:
    """Bytes that one rank holds from moment to moment of a step, a line for each name, with their peaks.

    samples: name -> [(moment, bytes), …] in their order. A moment's first word is its phase, as in "forward layer 3": phases
    have equal widths, so that all lines change phase at one place, whose end is marked. Raises ValueError for no samples,
    negative bytes, a phase that comes back, and lines with other phases than the first's.
    """
    phases = _phases(samples)
    fig, (axes,) = style.figure(width=8.4, height=4.0)
    for number, (name, moments) in enumerate(samples.items()):
        edges, values = _edges(moments), [size for _, size in moments]
        peak = values.index(max(values))
        marker = style.MARKERS[number % len(style.MARKERS)]
        label = f"{name}: at most {units.size(values[peak])}"
        (line,) = axes.step(edges, [*values, values[-1]], where="post")
        look = {"marker": marker, "markersize": 7, "color": line.get_color(), "linestyle": line.get_linestyle()}
        axes.plot([(edges[peak] + edges[peak + 1]) / 2], [values[peak]], label=label, **look)
    for end, phase in enumerate(phases[:-1] or phases, start=1):
        axes.axvline(end, color=style.INK, linestyle=(0, (1, 2)), linewidth=1.2)
        axes.text(end, 1.01, f"{phase} ends", transform=axes.get_xaxis_transform(), ha="center", va="bottom", fontsize=9)
    axes.set(xlim=(0, len(phases)), ylabel="alive on one rank", xlabel="moments of one step")
    axes.set_xticks([place + 0.5 for place in range(len(phases))], phases)
    axes.set_ylim(0, 1.08 * max(size for moments in samples.values() for _, size in moments) or 1)
    axes.yaxis.set_major_formatter(lambda size, _: units.size(size))
    axes.tick_params(axis="x", length=0)
    axes.grid(visible=False, axis="x")
    fig.legend(loc="outside upper left", ncols=2, handlelength=2.6)
    return fig


def _phases(samples: Mapping[str, Sequence[tuple[str, int]]]) -> list[str]:
    """The phases that all have. Raises ValueError as memory_over_a_step does."""
    if not samples or not all(samples.values()):
        raise ValueError(f"samples of {list(samples)}: give a name or more, each with [(moment, bytes), …]")
    found = {name: [phase for phase, _ in groupby(map(_phase, moments))] for name, moments in samples.items()}
    first = next(iter(found.values()))
    for name, phases in found.items():
        if len(set(phases)) < len(phases) or phases != first:
            raise ValueError(f"{name!r} goes through {phases}: give every line each of the phases {first} once, in this order")
        if below := [moment for moment, size in samples[name] if size < 0]:
            raise ValueError(f"{name!r} has fewer than 0 bytes at {below[0]!r}: give what is alive, not what changes")
    return first


def _phase(moment: tuple[str, int]) -> str:
    return (moment[0].split() or [""])[0]


def _edges(moments: Sequence[tuple[str, int]]) -> list[float]:
    """Where each moment begins and the last one ends; a phase is 1 wide."""
    counts = [len(list(each)) for _, each in groupby(map(_phase, moments))]
    return [phase + k / count for phase, count in enumerate(counts) for k in range(count)] + [len(counts)]


def _check(stage: str, n: int, k: int, precision: str) -> None:
    for name, value, known in (("stage", stage, STAGES), ("precision", precision, RECIPES)):
        if value not in known:
            raise ValueError(f"{name}={value!r}: give one of {', '.join(known)}")
    if stage == "HSDP" and n % k:
        allowed = f"replicas × shards = N, so choose K up to {n:,}, or more accelerators"
        raise ValueError(f"HSDP with K = {k:,} shards on N = {n:,}: {allowed}")


def count(parameters: float) -> str:
    """7.64e9 -> "7.64B", as papers write it."""
    return units.size(parameters).removesuffix("B").replace("G", "B").replace(" ", "")


def _place(parameters: float) -> float:
    """On the logarithmic axis."""
    return LONGEST * log10(max(parameters, _LEAST) / _LEAST) / log10(_MOST / _LEAST)


def _status(now: Setting, peak: memory.Peak, sent: int, baseline: int) -> str:
    where = f"{now.model} on {now.n:,} GPU{'s' * (now.n > 1)}, {now.stage}"
    needs = f"{units.size(peak.states)} of states and {units.size(peak.total - peak.states)} for one sequence of {SEQ:,} tokens"
    if peak.total > now.device:
        return f"Does not fit: {where}: {needs}, of {units.size(now.device)}. {_memory_limit(now, peak)}"
    fits = f"{where}: {needs}; {units.size(now.device - peak.total)} are free"
    if now.n == 1:
        return f"{fits}. Limit: one GPU: nothing to share, nothing to send."
    times = f"{sent / baseline:.3g} times what data parallelism sends"
    times = times if sent > 1.001 * baseline or sent < 0.999 * baseline else "as much as data parallelism"
    return f"{fits}. A GPU sends {units.size(sent)} a step, {times}. Limit: {_time_limit(now)}."


def _memory_limit(now: Setting, peak: memory.Peak) -> str:
    """Says what takes most, and what would help."""
    parts = now.states() | {"work of one sequence": peak.total - peak.states}
    most = f"Limit: memory, most of it for {max(parts, key=parts.get)}".replace("optimizer", "optimizer states")
    if fit := [name for name, other in _further(now) if other.peak().total <= now.device]:
        return f"{most}. {fit[0]} fits."
    if enough := [2**k for k in range(15) if now._replace(stage="ZeRO-3", n=2**k).peak().total <= now.device]:
        return f"{most}. ZeRO-3 fits from {enough[0]:,} GPUs on."
    return f"{most}. ZeRO does not help, on however many GPUs: split the layers themselves (chapters 05 and 06)."


def _further(now: Setting) -> Iterator[tuple[str, Setting]]:
    """Settings that shard more, with their names."""
    if now.stage == "HSDP":
        larger = (now.k * 2**j for j in range(1, 11) if now.k * 2**j <= now.n)
        yield from ((f"K = {k:,}", now._replace(k=k)) for k in larger)
    else:
        later = [name for name, stage in STAGES.items() if stage > STAGES[now.stage] and name != "HSDP"]
        yield from ((name, now._replace(stage=name)) for name in later)


def _time_limit(now: Setting) -> str:
    """Computing grows with a step's tokens, what is sent does not."""
    took = step.estimate(models[now.model], now.plan(), clusters[now.cluster])
    sequences = took.data / took.compute
    if sequences <= 1:
        return f"computing; the network is busy for {sequences:.0%} of the time that one sequence a GPU takes"
    return f"the network, busy for as long as computing {sequences:.2g} sequences a GPU: give each that many a step, or more"


def who_holds_what(n: int = 4) -> style.Figure:
    """Draws what each of n ranks holds of a model's states in stages 0 to 3, with Adam in mixed precision.

    n: ranks, 2 or more
    """
    sizes = {"parameters": 2, "gradients": 2, "optimizer": 12}  # bytes per parameter
    panels = {}
    for stage, name in enumerate(("data parallelism", "stage 1", "stage 2", "stage 3")):
        cut = list(sizes)[len(sizes) - stage :]
        ranks = [[(kind, kind, (r, n) if kind in cut else None, size) for kind, size in sizes.items()] for r in range(n)]
        panels[name] = ranks
    return drawings.who_holds(panels, below=("16", "4 + 12/N", "2 + 14/N", "16/N"), unit="bytes per\nparameter")


def stage_1(n: int = 4) -> style.Figure:
    """Draws where each piece of the gradients goes in stage 1, and where the new weights come from.

    n: ranks, 2 to 8
    """
    gradients = [[f"{rank}{k}" for k in range(n)] for rank in "abcdefgh"[:n]]
    means = [[f"Σ{k}" if k == rank else None for k in range(n)] for rank in range(n)]
    weights = [[f"w{k}" for k in range(n)] for _ in range(n)]
    steps = [("reduce-scatter", "", "+"), ("all-gather", "after Adam", "")]
    return drawings.pieces(
        {"gradients": gradients, "sums": means, "weights": weights}, steps, ["gradients", "gradients", "parameters"]
    )


def unit_by_unit(layers: int = 4, here: int = 2, n: int = 4) -> style.Figure:
    """Draws what n ranks hold of a GPT's parts in stage 3: between steps, and while one layer computes.

    layers: of the GPT; here: the number of the layer that computes
    """
    names = ["embedding", *(f"layer {k}" for k in range(layers)), "head"]
    panels = {}
    for title, whole in (("between steps", None), (f"layer {here} computes", f"layer {here}")):
        panels[title] = [
            [(name, "gathered", None) if name == whole else (name, "parameters", (r, n)) for name in names] for r in range(n)
        ]
    return drawings.who_holds(panels)


def over_a_step(run: Callable, train: Callable, stage: type, held: Callable) -> list:
    """Returns what `held` says on rank 0 in the second step, after each part's forward and after each part's backward.

    run: a world's
    train: called with a stage and a number of steps
    stage: a class with after_forward(k) and after_backward(k)
    held: called with an object of that class
    """
    return run(_watched, train, stage, held)[0]


def _watched(train: Callable, stage: type, held: Callable) -> list:
    seen = []

    class Watched(stage):
        def after_forward(self, k: int) -> None:
            seen.append(held(self))
            super().after_forward(k)

        def after_backward(self, k: int) -> None:
            seen.append(held(self))
            super().after_backward(k)

    train(Watched, steps=2)
    return seen[len(seen) // 2 :]


def whole_units(run: Callable, train: Callable, stage: type) -> str:
    """Returns the units that have memory at the moments of over_a_step, such as "0 1 2 2 1 0" for three, one at a time."""
    return " ".join("".join(map(str, units)) or "-" for units in over_a_step(run, train, stage, _whole))


def _whole(stage) -> list[int]:
    return [k for k, unit in enumerate(stage.rows) if unit.row.untyped_storage().nbytes()]


def steps_over_time(run: Callable, train: Callable, held: Callable, stages: Mapping[str, type]) -> style.Figure:
    """Draws over_a_step() of several stages, by name, side by side."""
    samples = {}
    for name, stage in stages.items():
        moments = over_a_step(run, train, stage, held)
        samples[name] = {kind: [moment[kind] for moment in moments] for kind in moments[0]}
        events = len(moments)
    return drawings.memory_over_time(samples, [(0, events / 2, "forward"), (events / 2, events, "backward")])


def step_over_time(units: int = 4, gather: float = 1.0, compute: float = 1.4) -> style.Figure:
    """Draws one step of stage 3, without and with prefetching, on one axis of time.

    units: of the model, 2 or more; gather: time of a gather, and of a reduce-scatter; compute: of a unit's forward, half of
    its backward's
    """
    lanes, phases = {}, {}
    for title, ahead in (("one at a time: stage 3", False), ("fetch ahead: FSDP", True)):
        lanes[title], forward_ends, end = _lanes(units, gather, compute, ahead)
        phases[title] = [(0, forward_ends, "forward"), (forward_ends, end, "backward")]
    return drawings.when(lanes, phases)


def _lanes(units: int, gather: float, compute: float, ahead: bool) -> tuple[dict[str, list], float, float]:
    """Two lanes; every span starts as soon as its lane is free and what it needs is there."""
    computing, network, free = [], [], {"compute": 0.0, "network": 0.0}

    def run(lane: str, seconds: float, label: str, kind: str, after: float) -> float:
        start = max(free[lane], after)
        free[lane] = start + seconds
        (computing if lane == "compute" else network).append((start, start + seconds, label, kind))
        return start + seconds

    order = [*range(units)]
    done, here = 0.0, {}
    for k in order:
        if k not in here:
            here[k] = run("network", gather, f"gather {k}", "gathered", done)
        start = max(here[k], free["compute"])
        if ahead and k + 1 < units:
            here[k + 1] = run("network", gather, f"gather {k + 1}", "gathered", start)
        done = run("compute", compute, f"{k}", "compute", here[k])
    forward_ends, here = done, {units - 1: done} if ahead else {}
    for k in reversed(order):
        if k not in here:
            here[k] = run("network", gather, f"gather {k}", "gathered", done)
        start = max(here[k], free["compute"])
        if ahead and k > 0:
            here[k - 1] = run("network", gather, f"gather {k - 1}", "gathered", start)
        computed = run("compute", 2 * compute, f"{k}", "compute", here[k])
        reduced = run("network", gather, f"reduce {k}", "gradients", computed)
        done = computed if ahead else reduced
    return {"compute": computing, "network": network}, forward_ends, max(free.values())
