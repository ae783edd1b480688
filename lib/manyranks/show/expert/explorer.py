"""Chapter 08's explorer: what the degrees of a model with experts make of a GPU's memory, a step's time, and its traffic."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

from matplotlib.artist import Artist

from manyranks.show import style, units
from manyranks.show.bars import Bars
from manyranks.show.explorer import Explorer, Measure, choice, value_slider
from manyranks.show.labels import word
from manyranks.show.limits import MUCH, Limits
from manyranks.show.said import Part, Said
from manyranks.show.scenario import Scenario, controls, percent
from manyranks.theory import Plan, clusters, expert, layer, models, traffic
from manyranks.theory.kernels import DEFAULT
from manyranks.theory.names import Named

# GPUs, sequences of a step (4,096 tokens each), precision. DeepSeek-V3: arXiv 2412.19437, sections 3 and 4.2; V2's batch: arXiv
# 2405.04434, section 3.1.2. The rest are round numbers.
MODELS = {"deepseek-v3": (2048, 15360, "fp8"), "deepseek-v2": (1024, 9216, "bf16"), "qwen3-235b-a22b": (1024, 4096, "bf16")}
MODELS = Named("model", MODELS | {"mixtral-8x22b": (512, 2048, "bf16"), "mixtral-8x7b": (256, 1024, "bf16")})
RACK = "gb200-nvl72"  # 64 of whose 72 GPUs work: its nodes are 64
CLUSTERS = {name: clusters[name] for name in ("h800", "h100-dgx", "a100-dgx", "b200-dgx", RACK, "tpu-v5p")}
CLUSTERS = Named("cluster", CLUSTERS | {RACK: clusters[RACK].with_nodes_of(64)})
# limit: nodes that a token may reach, 0 for all
CHOICES = {"pp": [1, 2, 4, 8, 16, 32], "ep": [1, 2, 4, 8, 16, 32, 64, 128], "tp": [1, 2, 4, 8], "limit": (0, 4, 2, 1)}
CHOICES |= {"imbalance": (1, 1.1, 1.2, 1.5, 2, 3, 4), "schedule": ("dualpipe", "zb-v", "1f1b")}
WAYS = {"one hop": (1, 0), "two hops": (2, 0), "4 nodes at most": (2, 4), "2 nodes at most": (2, 2), "1 node at most": (2, 1)}


class Setting(NamedTuple):
    """Holds what the controls say. ep: as asked; with fewer data-parallel ranks or experts it is as many as these."""

    model: str
    cluster: str
    pp: int
    ep: int
    tp: int
    limit: int
    imbalance: float
    schedule: str

    @property
    def most(self) -> tuple[int, str]:
        """The largest e that there can be, and why."""
        dp, experts = MODELS[self.model][0] // (self.pp * self.tp), models[self.model].experts
        return min((dp, f"{dp} DP ranks"), (experts, f"{experts} experts"))

    @property
    def ranks(self) -> int:
        """e: those that share the experts."""
        return min(self.ep, self.most[0])

    @property
    def nodes(self) -> int:
        """Over which these are spread."""
        return self.ranks // CLUSTERS[self.cluster].route(self.ranks, self.tp).inside

    @property
    @functools.lru_cache(maxsize=16384)  # noqa: B019 a setting is a few numbers; a redraw asks dozens of them
    def scenario(self) -> Scenario:
        """Makes a node's experts a group if a token may not reach all. Raises ValueError if it reaches too few experts."""
        (gpus, batch, precision), whole, nodes = MODELS[self.model], models[self.model], self.nodes
        groups, chosen = (nodes, self.limit) if 0 < self.limit < nodes and whole.experts % self.ranks == 0 else (1, 1)
        if (found := whole.experts // groups * chosen) < whole.top_k:
            raise ValueError(f"{self.limit} of {nodes} nodes have {found} experts, a token takes {whole.top_k}: allow more")
        degrees = {"dp": gpus // (self.pp * self.tp), "pp": self.pp, "tp": self.tp, "ep": self.ranks}
        plan = Plan(**degrees, seq=4096, batch=batch, precision=precision, schedule=self.schedule)
        shape = replace(whole, expert_groups=groups, groups_per_token=chosen)
        return Scenario(shape, plan, CLUSTERS[self.cluster], self.imbalance)

    @property
    def possible(self) -> bool:
        return self.ranks == self.ep and tried(lambda: self.cost) is not None

    @property
    def fits(self) -> bool:
        return self.scenario.fits

    @property
    def cost(self) -> float:
        return self.scenario.time.seconds

    def parts(self) -> dict[str, float]:
        """Seconds of each part of a step with a balanced load, and "waits": what an unequal load adds."""
        balanced = self._replace(imbalance=1).scenario.time
        named = {name: getattr(balanced, name) for name in ("compute", "tensor", "expert", "bubble")}
        return named | {"waits": max(0.0, self.cost - balanced.seconds), "rest": balanced.seconds - sum(named.values())}

    def way(self, hops: int = 2) -> tuple[float, float, float]:
        """Bytes to a layer's experts and back, inside the node and between nodes, and seconds: of a micro-batch, forward."""
        if self.ranks == 1:
            return 0.0, 0.0, 0.0
        here, copies_of = self.scenario, expert.one_hop_copies if hops == 1 else expert.two_hops_copies
        shape, plan, route = here.shape, here.plan, here.cluster.route(self.ranks, self.tp)
        groups, row = (shape.expert_groups, shape.groups_per_token), self.imbalance * layer.split_tokens(plan) * shape.hidden
        inside, between = copies_of(shape.experts, shape.top_k, self.ranks, self.nodes, *groups)
        there, back = (row * size for size in (min(traffic.HALF, plan.recipe.matmul), traffic.HALF))
        near, far = (traffic.reached(link, DEFAULT).bandwidth for link in (route.near, route.pair))
        start = DEFAULT.overhead + route.pair.latency
        seconds = sum(start + max(inside * size / near, between * size / far) for size in (there, back))
        return inside * (there + back), between * (there + back), seconds


_MEMORY = {"states": (style.BLUE, ""), "activations, buffers": (style.ORANGE, "////")}
_TIME = {"compute": "computing", "waits": "waits for the fullest", "tensor": "tensor-parallel messages"}
_TIME |= {"expert": "tokens to experts", "bubble": "bubble", "rest": "all else"}
_COLOURS = style.BLUE, style.YELLOW, style.ORANGE, "#9ecae1", "#b0b0b0", style.INK
_HATCHES = "", "||||", "////", "----", "\\\\\\\\", ""
_TRAFFIC = {"inside a node": ("#9ecae1", "----"), "between nodes": (style.ORANGE, "////")}
_LIMITS = Limits(
    choices=CHOICES,
    remedies={"waits": ("imbalance",), "tensor": ("tp",), "expert": ("schedule",), "bubble": ("pp",), "rest": ("ep",)},
    room=("ep", "pp", "tp"),
    said={"pp": "PP {}", "ep": "EP {}", "tp": "TP {}", "imbalance": "a balanced load"},
)
_NAMED = {"waits": "all wait for the fullest rank", "tensor": "tensor-parallel messages", "rest": "gradients and parameters"}
_NAMED |= {"expert": "tokens on their way to experts", "bubble": "the pipeline's bubble"}


class Degrees:
    """Three panels: memory over e, a step's time over t, and what travels to experts over hops and the limit of nodes."""

    @style.styled
    def __init__(self):
        self.figure = style.Figure(figsize=(9.2, 3.95), layout="constrained")
        grid = self.figure.add_gridspec(2, 2, width_ratios=(1, 1.25), height_ratios=(1, 1.05))
        left, above, below = (self.figure.add_subplot(place) for place in (grid[:, 0], grid[0, 1], grid[1, 1]))
        over_e, over_t = ([f"{name.upper()} {each}" for each in CHOICES[name]] for name in ("ep", "tp"))
        looks = dict(zip(_TIME.values(), zip(_COLOURS, _HATCHES, strict=True), strict=True))
        self._memory = Bars(left, _MEMORY, "memory of a GPU, over e", over_e, outline=word)
        self._time = Bars(above, looks, "time of a step, over t", over_t, _seconds, columns=3, outline=word)
        self._traffic = Bars(below, _TRAFFIC, "a layer's way to experts and back, over hops", list(WAYS), outline=word)
        left.set_xlabel("»: longer than the axis", fontsize=9)
        below.set_xlabel("bytes and time of a GPU and micro-batch, forward", fontsize=9)
        word("abcdefghijklmnopqrstuvwxyzDRPETGMBk0123456789 .,µ»", 9, 0)  # a letter takes milliseconds, the first time
        self._panels = self._memory, self._time, self._traffic
        self.moving: list[Artist] = [artist for panel in self._panels for artist in panel.moving]

    def update(self, **values) -> Said:
        """Shows the Setting of these values. Raises ValueError for an unknown name and what the model doesn't allow."""
        said = _said(now := Setting(**values))
        self._show_memory(now)
        self._show_time(now)
        ways = [tried(now._replace(limit=limit).way, hops) for hops, limit in WAYS.values()]
        bars = [dict(zip(_TRAFFIC, way or (), strict=False)) for way in ways]
        texts = [f"{units.size(sum(way[:2]))}, {units.duration(way[2])}" if way and way[2] else "nothing" for way in ways]
        texts = [text if way else "not possible" for text, way in zip(texts, ways, strict=True)]
        longest = max(sum(bar.values()) for bar in bars) or 1.0
        self._traffic.update(bars, texts, [*WAYS.values()].index((2, now.limit)), longest)
        return said

    def _show_memory(self, now: Setting) -> None:
        bars, texts, room, (most, why) = [], [], now.scenario.cost.room, now.most
        for ep in CHOICES["ep"]:
            peak = tried(lambda ep=ep: now._replace(ep=ep, limit=0).scenario.peak) if ep <= most else None
            bars.append(dict(zip(_MEMORY, (peak.states, peak.activations + peak.buffers), strict=True)) if peak else {})
            texts.append(units.size(peak.total) if peak else f"only {why}" if ep > most else "not possible")
        self._memory.update(bars, texts, CHOICES["ep"].index(now.ranks), 2 * room, (room, units.size(room)))

    def _show_time(self, now: Setting) -> None:
        bars, texts = [], []
        for each in (now._replace(tp=tp) for tp in CHOICES["tp"]):
            parts = tried(each.parts)
            bars.append({label: parts[part] for part, label in _TIME.items()} if parts else {})
            fewer = f", EP {each.ranks}" * (each.ranks < now.ep)
            texts.append(f"{_seconds(sum(parts.values()))}{fewer}" if parts else "not possible")
        totals = [sum(bar.values()) for bar in bars if bar]
        longest = min(max(totals), 3 * min(totals))  # a longer one is cut off, so that the others' parts can be seen
        self._time.update(bars, texts, CHOICES["tp"].index(now.tp), longest)

    def parts(self) -> Iterator[Part]:
        """Yields what the bars say."""
        return (part for panel in self._panels for part in panel.parts())

    def idle(self, **values) -> list[str]:
        """Returns the limit of nodes where all expert ranks are in one, and the load where there's only one rank."""
        now = Setting(**values)
        return ["limit"] * (tried(lambda: now.nodes) == 1) + ["imbalance"] * (now.ep == now.imbalance == 1)


def explorer(measure: Measure | None = None) -> Explorer:
    """Returns the explorer of chapter 08. It opens on DeepSeek-V3 as it was trained: 2,048 H800s, PP 16 × EP 64, TP 1.

    measure: what "Measure it" runs, manyranks.small's expert
    """
    presets = {"8 tensor ranks": {"tp": 8}, "8 expert ranks": {"ep": 8}, "twice the load": {"imbalance": 2}}
    presets |= {"one node": {"limit": 1}, "Mixtral 8x7B": {"model": "mixtral-8x7b"}}
    return Explorer(
        Degrees(),
        presets,
        measure,
        **controls({"model": MODELS, "cluster": CLUSTERS} | CHOICES, model="deepseek-v3", cluster="h800", pp=16, ep=64, tp=1),
        limit=value_slider("nodes for a token", 4, CHOICES["limit"], lambda m: str(m) if m else "all"),
        imbalance=value_slider("fullest ÷ mean", 1, CHOICES["imbalance"]),
        schedule=choice("schedule", "dualpipe", CHOICES["schedule"]),
    )


def tried(find: Callable, *args):
    """Returns what `find` returns, or None for a setting that the model doesn't allow."""
    try:
        return find(*args)
    except ValueError:
        return None


def _seconds(of_a_step: float) -> str:
    """A step's time, always in the same unit, so that steps can be compared."""
    return f"{of_a_step:,.3g} s"


def _said(now: Setting) -> Said:
    limit = _limit(now)  # refuses what cannot be
    here, (inside, between, _), experts = now.scenario, now.way(), models[now.model].experts
    nodes = f"{now.ranks} in {now.nodes} node{'s' * (now.nodes > 1)}"
    numbers = {
        "expert ranks": nodes if now.ranks == now.ep else f"{now.ranks}: only {now.most[1]}",
        "experts of a GPU": f"{experts // now.ranks} of {experts}",
        "sent inside a node": units.size(inside),
        "sent between nodes": units.size(between),
    }
    degrees = f"PP {now.pp} × EP {now.ranks}, TP {now.tp}, DP {here.plan.dp}, {now.schedule}"
    return Said(f"{now.model} on {here.plan.gpus:,} GPUs, {here.cluster.name}, {degrees}", numbers, limit, here.fits, here)


def _limit(now: Setting) -> str:
    """Says what limits. Raises ValueError for a setting that the model doesn't allow."""
    parts = now.parts()
    if not now.fits:
        room = _LIMITS.fitting(now)
        return f"memory; {_LIMITS.change(now, room)} fits" if room else "memory; no single degree helps: raise two of them"
    part = max((name for name in parts if name != "compute"), key=parts.get)
    if (share := parts[part] / sum(parts.values())) < MUCH:
        return "computing"
    better = _LIMITS.faster(now, part)
    way_out = f"; {_LIMITS.change(now, better)} takes {_seconds(better.cost)}" if better else ""
    return f"{_NAMED[part]}, {percent(share)} of the time{way_out}"
