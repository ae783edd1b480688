"""Chapter 06's explorer: what t ranks make of a layer's time and memory, and where the node ends."""

import functools
from collections import namedtuple

from manyranks.show import limits, style, units
from manyranks.show.bars import LONGEST, Bars
from manyranks.show.explorer import Explorer, Measure, Panels, Said, choice
from manyranks.show.labels import Labels, word
from manyranks.show.scenario import SHAPES, SWITCH, Scenario, controls, percent
from manyranks.theory import Plan, clusters, pace, tensor
from manyranks.theory.names import Named

DEGREES = [2**k for k in range(7)]  # 1 to 64
# name -> tokens of a sequence, sequences of a micro-batch; Megatron's: arXiv 2205.05198, Table 3
MODELS = {"megatron-22b": (2048, 4), "megatron-175b": (2048, 1), "llama3-405b": (8192, 1), "small GPT": (128, 4)}
CLUSTERS = ("a100-dgx", "v100-dgx", "h100-dgx", "b200-dgx", "gb200-nvl72", "tpu-v5p", "laptop")
# what is computed again -> Plan's recompute and flash
AGAIN = {"none": ("none", False), "selective": ("selective", False), "full": ("full", False)}
AGAIN = Named("kept", AGAIN | {"none, flash attention": ("none", True)})
_TIMES = {"forward": (style.BLUE, ""), "backward": ("#9ecae1", ""), "communication": (style.ORANGE, "////")}
_KEPT = {"cut by SP only": (style.ORANGE, "////"), "cut by t": (style.BLUE, "")}


class Setting(namedtuple("Setting", "model cluster tp sequence_parallel regather overlap_tensor kept"), limits.Setting):
    """Holds what the controls say. kept: a key of AGAIN."""

    @property
    @functools.lru_cache(maxsize=16384)  # noqa: B019 a setting is a few numbers
    def scenario(self) -> Scenario:
        """Tensor parallelism alone. Raises ValueError for an unknown name, a switch that isn't one, and a t that can't be."""
        shape, (seq, microbatch) = SHAPES[self.model], MODELS[self.model]
        names = "tp", "sequence_parallel", "regather", "overlap_tensor", "recompute", "flash"
        values = dict(zip(names, (*self[2:6], *AGAIN[self.kept]), strict=True))
        return Scenario(shape, Plan(seq=seq, microbatch=microbatch, **values), clusters[self.cluster]).checked()

    @property
    def cost(self) -> float:
        """GPU-seconds of a layer: its time on all t together."""
        return self.tp * self.layer().seconds

    @property
    def waits(self) -> float:
        """Seconds of a layer in which a rank waits for messages."""
        return sum(each.tensor for each in self.layer()[:2])

    def layer(self, node: int = 0) -> pace.Both:
        """Returns one layer's time; node: GPUs of a node, if not the cluster's. Raises ValueError for a t that can't be."""
        here = self.scenario
        return pace.of_layer(here.shape, here.plan, here.cluster.with_nodes_of(node) if node else here.cluster)

    def saved(self) -> tensor.Saved:
        """Returns what one layer keeps on one rank."""
        return tensor.saved(self.scenario.shape, self.scenario.plan)

    def sent(self) -> int:
        """Returns the bytes that one rank sends for a layer; a forward that's done again sends its messages again."""
        shape, plan = self.scenario.shape, self.scenario.plan
        one = tensor.layer(plan.tokens, shape.hidden, self.tp, self.sequence_parallel, self.regather)
        return one.both.bytes + one.forward.bytes * (plan.recompute == "full")

    def split(self) -> dict[str, float]:
        """GPU-seconds of a layer, by part."""
        parts = *(each.compute for each in self.layer()[:2]), self.waits
        return {name: self.tp * part for name, part in zip(_TIMES, parts, strict=True)}


_WAYS = {"tp": DEGREES, "overlap_tensor": [True], "sequence_parallel": [True]}
_SAID = dict(zip(_WAYS, ("t = {}", "overlap", "sequence parallelism"), strict=True))
_LIMITS = limits.Limits(_WAYS, {"communication": ["overlap_tensor"], "small matmuls": ["sequence_parallel"]}, ["tp"], _SAID)


class Degrees(Panels):
    """A row for each t: t × a layer's time, the same in all rows if nothing were sent or done twice, and what a rank keeps."""

    @style.styled
    def __init__(self):
        self.figure, (time, kept) = style.figure(2, width=9.2, height=3.95, sharey=True, width_ratios=(1.7, 1))
        rows = [f"t = {t}" for t in DEGREES]
        self._time = Bars(time, _TIMES, "GPU time of a layer: t × its time", rows, units.duration, columns=3, outline=word)
        self._kept = Bars(kept, _KEPT, "kept by a layer, per rank", rows, outline=word)
        kept.set_xlim(0, LONGEST + 0.25)
        time.set_xlim(0, 1.25)
        time.set_xlabel("right: layer time, share spent waiting, step MFU (»: off the scale)", loc="left")
        self._ends = [axes.axhline(0, color=style.INK, linestyle=":", linewidth=1.6, gid="node ends") for axes in (time, kept)]
        self._node = Labels(kept, left=1, name="node")
        self.panels, self.others = (self._time, self._kept), (*self._ends, self._node.artist)

    def update(self, **values) -> Said:
        """Shows the Setting of these values. Raises ValueError for an unknown name, and a t that the model forbids."""
        now = Setting(**values)
        said, cluster = _said(now), now.scenario.cluster  # refuses what can't be
        shown, row = [each for t in DEGREES if (each := now._replace(tp=t)).possible], DEGREES.index(now.tp)
        costs, missing = [each.cost for each in shown], "not possible"
        longest, mark = min(max(costs), 4 * min(costs)), (costs[0], f"t = 1: {units.duration(costs[0])}")
        self._time.update([each.split() for each in shown], [*map(_texts, shown)], row, longest, mark, missing)
        kept = [each.saved() for each in shown]
        bars = [dict(zip(_KEPT, (each.outside + each.statistics, each.inside), strict=True)) for each in kept]
        self._kept.update(bars, [units.size(each.total) for each in kept], row, missing=missing)
        ends = (inside := sum(t <= cluster.node or cluster.torus > 0 for t in DEGREES)) < len(DEGREES)
        for line in self._ends:
            line.set(ydata=[inside - 0.5] * 2, visible=ends)
        self._node.update([(LONGEST, inside - 0.76)] * ends, [f"node boundary ({cluster.node} GPUs)"] * ends)
        return said

    def code(self, **values) -> str:
        """Python for the step's numbers, and for the layer's."""
        layer = "print(pace.of_layer(shape, plan, cluster), tensor.saved(shape, plan))\n"
        return f"{Setting(**values).scenario.code()}\nfrom manyranks.theory import pace, tensor\n\n{layer}"

    def idle(self, sequence_parallel: bool, **others) -> set[str]:
        """Without sequence parallelism nothing is gathered."""
        return set() if sequence_parallel else {"regather"}


def explorer(measure: Measure | None = None) -> Explorer:
    """Opens on Table 4 of arXiv 2205.05198: a 22B model on 8 A100s. measure: of manyranks.small, what "Measure it" runs."""
    presets = {"two nodes": {"tp": 16}, "TP alone": {"sequence_parallel": False}}
    presets["small model"] = {"model": "small GPT", "tp": 4}
    only = {"model": MODELS, "cluster": CLUSTERS, "tp": DEGREES}
    shared = controls(only, model="megatron-22b", cluster="a100-dgx", tp=8, sequence_parallel=True)
    own = {"regather": choice("gather again", True, SWITCH), "overlap_tensor": choice("overlap", True, SWITCH)}
    return Explorer(Degrees(), presets, measure, **shared, **own, kept=choice("recompute", "selective", list(AGAIN)))


def _texts(now: Setting) -> str:
    seconds = now.layer().seconds
    return f"{units.duration(seconds)}|{percent(now.waits / seconds)} waiting|MFU {percent(now.scenario.time.mfu)}"


def _said(now: Setting) -> Said:
    time, waits, _ = _texts(now).split("|")
    numbers = {"layer time": time, "waiting": waits.removesuffix(" waiting"), "kept per layer": units.size(now.saved().total)}
    where = f"{now.model}, t = {now.tp}, {now.cluster}"
    return Said(where, numbers | {"sent per layer": units.size(now.sent())}, _limit(now), now.fits, now.scenario)


def _limit(now: Setting) -> str:
    if not now.fits:
        return _LIMITS.memory(now, "no value of t makes it fit: add pipeline stages (chapter 05)")
    if now.tp == 1:
        return "compute: one GPU sends nothing"
    seconds, cluster = now.layer().seconds, now.scenario.cluster
    if now.tp > cluster.node and not cluster.torus and (inside := now.layer(now.tp).seconds) < 0.95 * seconds:
        return f"the node boundary: with {now.tp} GPUs per node, a layer would take {units.duration(inside)}"
    together, alone = now.tp * (seconds - now.waits), now._replace(tp=1).cost
    more = (together - alone) / now.tp
    if max(now.waits, more) < limits.MUCH * seconds:
        return "compute"
    limit = "communication" if now.waits >= more else "small matmuls"
    if limit != "communication" and together > 0.99 * now.tp * alone:  # the host sets the pace
        return f"kernel launches: each of the {now.tp} GPUs launches as many kernels as one alone, so the layer gets no faster"
    helps = _LIMITS.takes(now, limit, lambda together: units.duration(together / now.tp))
    if limit == "communication":
        return limit + (helps or f": only rings of chunks would hide its other {units.duration(now.waits)}")
    repeated = ", norms repeated on every rank" * (not now.sequence_parallel)
    return f"{limit}{repeated}: {now.tp} GPUs use {units.three(together / alone)} times the GPU time of one{helps}"
