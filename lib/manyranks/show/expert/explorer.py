"""Chapter 08's explorer: what the degrees of a model with experts make of a GPU's memory, a step's time, and its traffic."""

import functools
from collections import namedtuple
from collections.abc import Callable, Iterable
from dataclasses import replace

from manyranks.show import style, units
from manyranks.show.bars import Bars
from manyranks.show.explorer import Board, Explorer, Measure, Setting, choice, value_slider
from manyranks.show.labels import word
from manyranks.show.looks import STEP
from manyranks.show.scenario import BUBBLE, MEMORY, MFU, Cost, Scenario, controls
from manyranks.show.setting import MUCH, tried
from manyranks.show.units import percent
from manyranks.theory import Plan, clusters, expert, models
from manyranks.theory.names import Named

# GPUs, sequences of a step (4,096 tokens each), precision. DeepSeek-V3: arXiv 2412.19437, sections 3 and 4.2; V2's batch: arXiv
# 2405.04434, section 3.1.2. The rest are round numbers.
MODELS = {"deepseek-v3": (2048, 15360, "fp8"), "deepseek-v2": (1024, 9216, "bf16"), "qwen3-235b-a22b": (1024, 4096, "bf16")}
MODELS = Named("model", MODELS | {"mixtral-8x22b": (512, 2048, "bf16"), "mixtral-8x7b": (256, 1024, "bf16")})
CLUSTERS = {name: clusters[name] for name in ("h800", "h100-dgx", "a100-dgx", "b200-dgx", "gb200-nvl72", "tpu-v5p")}
CLUSTERS = Named("cluster", CLUSTERS | {"gb200-nvl72": clusters["gb200-nvl72"].with_nodes_of(64)})  # of its 72, 64 work
# limit: nodes that a token may reach, 0 for all
CHOICES = {"pp": [1, 2, 4, 8, 16, 32], "ep": [1, 2, 4, 8, 16, 32, 64, 128], "tp": [1, 2, 4, 8], "limit": (0, 4, 2, 1)}
CHOICES |= {"imbalance": (1, 1.1, 1.2, 1.5, 2, 3, 4), "schedule": ("dualpipe", "zb-v", "1f1b")}
WAYS = {"one hop": (1, 0), "two hops": (2, 0), "4 nodes at most": (2, 4), "2 nodes at most": (2, 2), "1 node at most": (2, 1)}


_seconds = "{:,.3g} s".format  # of a step, always in the same unit, so that steps can be compared
_TIME = {name: STEP[name] for name in ("compute", "tensor", "expert", "bubble")}
_TIME |= {"waits": ("waits for the fullest", style.YELLOW, "||||"), "rest": ("all else", style.INK, "")}
_TRAFFIC = {"inside a node": ("#9ecae1", "----"), "between nodes": (style.ORANGE, "////")}
_REMEDIES = {"waits": ["imbalance"], "tensor": ["tp"], "expert": ["schedule"], "bubble": ["pp"], "rest": ["ep"]}
_WORDS = {"imbalance": "a balanced load"}
_NAMED = {"waits": "waiting for the fullest rank", "tensor": "TP messages", "rest": "DP, PP and optimizer"}
_NAMED |= {"expert": "tokens to experts", "bubble": "bubble"}


class Degrees(namedtuple("Degrees", "model cluster pp ep tp limit imbalance schedule"), Setting):
    """Holds what the controls say. ep: as asked; with fewer data-parallel ranks or experts it is as many as these."""

    choices, remedies, room, words = CHOICES, _REMEDIES, ("ep", "pp", "tp"), _WORDS

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
            held = f"{self.limit} of {nodes} nodes hold{'s' * (self.limit == 1)} {found} experts"
            raise ValueError(f"{held}, but a token needs {whole.top_k}: allow more nodes per token")
        if batch % (dp := gpus // (self.pp * self.tp)):
            left = f"PP {self.pp} × TP {self.tp} leaves {dp:,} DP ranks"
            raise ValueError(f"{left}, which don't evenly divide the batch of {batch:,} sequences: raise PP or TP")
        chip = CLUSTERS[self.cluster].accelerator
        precision = precision if chip.flops_fp8 > chip.flops else "bf16"
        degrees = {"dp": dp, "pp": self.pp, "tp": self.tp, "ep": self.ranks}
        plan = Plan(**degrees, seq=4096, batch=batch, precision=precision, schedule=self.schedule)
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

    def way(self, hops: int = 2) -> expert.Way:
        here = self.scenario
        return expert.way(here.shape, here.plan, here.cluster, here.imbalance, hops)

    def where(self) -> str:
        return f"{self.model} on {self.scenario.cluster.name}, EP {self.ranks}, {self.schedule}"

    def numbers(self) -> dict[str, str]:
        plan, (inside, between, _), experts = self.scenario.plan, self.way(), models[self.model].experts
        nodes = f"{self.ranks} in {self.nodes} node{'s' * (self.nodes > 1)}"
        numbers = {"GPUs = DP × PP × TP": f"{plan.gpus:,} = {plan.dp} × {self.pp} × {self.tp}"}
        numbers |= {"expert ranks": nodes if self.ranks == self.ep else f"{self.ranks}: only {self.most[1]}"}
        numbers |= {"experts per GPU": f"{experts // self.ranks} of {experts}"}
        return numbers | {"sent inside a node": units.size(inside), "sent between nodes": units.size(between)}

    def code(self) -> str:
        lines = f"way = expert.way(shape, plan, cluster, {self.imbalance}, 2)\n"
        prints = {f"sent {name}": f"size(way[{k}])" for k, name in enumerate(_TRAFFIC)}
        return self.scenario.code(prints, "expert", lines)

    def limits(self) -> str:
        """Says what limits. Raises ValueError for a setting that the model doesn't allow."""
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

    def at(self, now: Degrees, degree: int) -> Cost | None:
        """Returns the cost of so many ranks; those that share a node's experts reach all of these."""
        return super().at(now, degree) or super().at(now._replace(limit=0), degree)

    def degree(self, now: Degrees) -> int:
        """Returns the ranks that there are."""
        return now.ranks

    def idle(self, **values) -> list[str]:
        """The limit of nodes where all expert ranks are in one, and the load where there's only one rank."""
        now = Degrees(**values)
        return ["limit"] * (tried(lambda: now.nodes) == 1) + ["imbalance"] * (now.ep == now.imbalance == 1)


def explorer(measure: Measure | None = None) -> Explorer:
    """Opens on DeepSeek-V3 as trained: 2,048 H800s, PP 16 × EP 64. measure: of manyranks.small, what "Measure it" runs."""
    presets = {"8 tensor ranks": {"tp": 8}, "8 expert ranks": {"ep": 8}, "twice the load": {"imbalance": 2}}
    presets |= {"one node": {"limit": 1}, "Mixtral 8x7B": {"model": "mixtral-8x7b"}}
    only = {"model": MODELS, "cluster": CLUSTERS} | CHOICES
    shared = controls(only, model="deepseek-v3", cluster="h800", pp=16, ep=64, tp=1)
    own = {"limit": value_slider("nodes per token", 4, CHOICES["limit"], lambda m: str(m) if m else "all")}
    own["imbalance"] = value_slider("fullest ÷ mean", 1, CHOICES["imbalance"])
    own["schedule"] = choice("schedule", "dualpipe", CHOICES["schedule"])
    return Explorer(Experts(), presets, measure, **shared, **own)


def _rows(show: Callable, values: Iterable) -> tuple[tuple, tuple]:
    """A bar and a text for each value."""
    return tuple(zip(*(tried(show, value) or ({}, "not possible") for value in values), strict=True))


def _step(now: Degrees) -> tuple[dict, str]:
    parts = now.parts()
    bar = {name: parts[part] for part, (name, *_) in _TIME.items()}
    return bar, _seconds(sum(bar.values())) + f", EP {now.ranks}" * (now.ranks < now.ep)


def _way(now: Degrees, hops: int, limit: int) -> tuple[dict, str]:
    inside, between, seconds = way = now._replace(limit=limit).way(hops)
    text = f"{units.size(inside + between)}, {units.duration(seconds)}" if seconds else "nothing"
    return dict(zip(_TRAFFIC, way, strict=False)), text
