"""Chapter 10's explorer, the plan board: where each axis lies, a GPU's memory, a step's time, and the planner's plans."""

import functools
from collections import namedtuple
from collections.abc import Sequence
from contextlib import suppress
from itertools import accumulate
from math import log2
from operator import attrgetter

import ipywidgets as widgets
import numpy as np

from manyranks.show import page, style, units
from manyranks.show.bars import Bars, apart
from manyranks.show.explorer import Board, Explorer, Measure, Said, Setting, choice, value_slider
from manyranks.show.labels import Labels, word
from manyranks.show.nd.figures import BETWEEN, INSIDE, Steps, bar, peak_bar, written
from manyranks.show.scenario import BUBBLE, CLUSTERS, MEMORY, MFU, SHAPES, SHARED, Scenario, controls
from manyranks.show.setting import MUCH, tried
from manyranks.show.style import STEP
from manyranks.theory import ModelShape, Plan, clusters, pipeline, planner
from manyranks.theory.nd import rules
from manyranks.theory.planner import Found
from manyranks.theory.published import confidence
from manyranks.theory.step import StepTime
from manyranks.theory.written import degrees, kept

MODELS = ("small GPT", "llama3.2-1b", "llama3-8b", "yi-34b", "llama3-70b", "gpt3-175b", "llama3-405b")
MODELS += ("mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v2", "deepseek-v3")
# Trained so: arXiv 2412.19437, section 3.3; 2407.21783, section 3.3.2 (126 layers and two more places on a pipeline's stages).
EIGHT_BITS, EMBEDDING_SLOTS = "deepseek-v3", "llama3-405b"
ALL = "all"  # data-parallel ranks
_THREES = {"gpus": (10, 14), "batch": (8, 13)}
CHOICES = {name: list(SHARED[name][1]) for name in ("tp", "cp", "pp", "ep", "microbatch", "zero", "recompute")}
CHOICES |= {"dp_shard": [ALL, *(2**k for k in range(1, 12))], "virtual": [1, 2, 3, 4, 5, 6, 8]}
CHOICES |= {"schedule": ["1f1b", "gpipe", "zb-h1", "zb-v", "dualpipe"]}
CHOICES["cluster"] = [*CLUSTERS[:6], "llama3-cluster", *CLUSTERS[6:]]
# MegaScale's 12,288 GPUs and Llama 3's 24,576: its data-parallel ranks share batches of three times a power of two.
CHOICES |= {name: sorted([*SHARED[name][1], *(3 * 2**k for k in range(*ks))]) for name, ks in _THREES.items()}
# The first five are the task.
_CONTROLS = "model cluster gpus batch seq microbatch tp cp pp ep zero dp_shard schedule virtual recompute"
PLACES = "1st", "2nd", "3rd", "4th"
HIDDEN, SHOWN, TAKEN = "off", "show plans", tuple(f"use the {place}" for place in PLACES)
# What the planner tries here: values of the controls alone, and fewer where there are experts, so that it takes seconds.
_TRIED = {"tp": CHOICES["tp"][:5], "pp": CHOICES["pp"], "microbatch": (1, 2, 4), "virtual": (1, 2, 4, 8)}
_WITH_EXPERTS = {"tp": CHOICES["tp"][:4], "pp": CHOICES["pp"][:5], "ep": CHOICES["ep"][1:], "microbatch": (1, 2)}
_WITH_EXPERTS |= {"virtual": (1,), "schedule": ("1f1b", "dualpipe"), "recompute": ("none", "selective")}
_REMEDIES = {"compute": ("recompute", "microbatch"), "tensor": ("tp",), "context": ("cp",), "expert": ("ep", "schedule")}
_REMEDIES |= {"pipeline": ("pp", "virtual"), "bubble": ("virtual", "schedule", "pp", "microbatch"), "optimizer": ("zero", "pp")}
_REMEDIES |= {"data": ("zero", "microbatch", "dp_shard", "tp", "pp")}
_ROOM = ("dp_shard", "zero", "recompute", "pp", "tp", "cp", "ep", "microbatch")
_WORDS = {"dp_shard": "HSDP over {} ranks", "virtual": "v = {}"}
_AXES = {"tp": "TP", "cp": "CP", "dp": "DP", "pp": "PP", "ep": "EP", "shards": "ZeRO"}
_ROW = {"tensor": "tp", "context": "cp", "expert": "ep", "pipeline": "pp", "bubble": "pp", "data": "dp", "optimizer": "shards"}
_LINKS = {"inside a node": (INSIDE[0], ""), "between nodes": (BETWEEN[0], ""), "between pods": (style.PINK, "")}
_HELD = {"parameters": (style.BLUE, ""), "gradients": ("#9ecae1", ""), "optimizer": (style.GREEN, "")}
_HELD |= {"activations": (style.ORANGE, ""), "buffers": ("#b0b0b0", "")}
_EQUAL = 1.005  # of the best plan's time
_SIZE, _PLACES = (6.45, 3.84), ((0.6, 2.28, 2.75, 1.17), (4.45, 2.28, 2.0, 1.17), (2.6, 0.02, 3.85, 1.49))  # inches
_LETTERS = 40  # of a row's name


class Layout(namedtuple("Layout", _CONTROLS), Setting):
    """Holds what the controls say; DP is the GPUs that are left."""

    choices, remedies, room, words = CHOICES, _REMEDIES, _ROOM, _WORDS

    @property
    @functools.lru_cache(maxsize=16384)  # noqa: B019 a setting is a few numbers; a redraw asks dozens of them
    def scenario(self) -> Scenario:
        """Raises ValueError, in words of the controls or of Plan, for what can't be."""
        shape, given = _task(self.model, self.cluster, self.gpus, self.seq)
        dp, left = divmod(self.gpus, others := self.tp * self.cp * self.pp)
        if left or not dp:
            on = f"on {self.gpus:,} GPU{'s' if self.gpus > 1 else ''}: lower TP, CP or PP, or use at least {others:,} GPUs"
            raise ValueError(f"TP {self.tp} × CP {self.cp} × PP {self.pp} = {others:,} ranks {on}")
        if self.batch % (once := dp * self.microbatch):
            multiple = f"a multiple of DP {dp:,} × b {self.microbatch} = {once:,}"
            raise ValueError(f"batch {self.batch:,} isn't {multiple}: raise it, or TP, CP or PP, or lower b")
        given |= dict(zip(self._fields[3:], self[3:], strict=True)) | {"dp": dp}
        plan = Plan(**given | {"dp_shard": None if self.dp_shard == ALL else self.dp_shard})
        plan.check(shape)
        m, p, least = plan.microbatches, self.pp, pipeline.fewest(self.schedule, self.pp)
        if p > 1 and m < least:
            needs = f"{pipeline.WRITTEN[self.schedule]} needs {least} or more"
            raise ValueError(f"{m} micro-batches on PP {p}: {needs}. Raise the batch, TP or CP")
        return Scenario(shape, plan, clusters[self.cluster])

    @property
    def part(self) -> str:
        """The part of the step that limits: the longest one apart from compute, unless that is short."""
        time = self.scenario.time
        return time.limit if time.parts[time.limit] > MUCH * time.seconds else "compute"

    @property
    def reaches(self) -> dict[str, tuple[int, int]]:
        """The ranks of each of _AXES, and how many ranks one is after the other: TP is innermost, PP outermost."""
        plan, data = self.scenario.plan, self.tp * self.cp
        found = {"tp": (plan.tp, 1), "cp": (plan.cp, plan.tp), "dp": (plan.dp, data), "pp": (plan.pp, data * plan.dp)}
        return found | {"ep": (plan.ep, plan.tp), "shards": (plan.shards if plan.zero else 1, plan.tp)}

    def link(self, axis: str) -> str:
        """The slowest link that a group of this axis uses; empty for one rank alone, and for no axis."""
        (size, stride), on = self.reaches.get(axis, (1, 1)), clusters[self.cluster]
        if size == 1:
            return ""
        level = on.level_of(0, (size - 1) * stride)
        name = on.levels[level].link.name
        return f"{name} between pods" if level > 1 else name

    def best(self) -> tuple[Found, ...]:
        """The planner's plans, the fastest first, only one for each TP, PP and EP, and among them the fastest that's checked;
        takes seconds the first time."""
        return _best(*self[:5])

    def rule(self) -> Found | None:
        """The plan by the rules of thumb; None where none fits."""
        return _rule(*self[:5])

    def taking(self, plan: Plan) -> "Layout":
        """The same task with this plan."""
        values = {name: getattr(plan, name) for name in self._fields[5:]}
        return self._replace(**values | {"dp_shard": plan.dp_shard or ALL})

    def near(self) -> list["Layout"]:
        """Settings that fit and differ in one control that may help: the fastest of each control, then others."""
        places, cost = [], attrgetter("cost")
        for name in _REMEDIES[self.part] if self.fits else _ROOM:
            places += enumerate(sorted((each for each in self.others(name) if each.fits), key=cost))
            if not self.fits and len(places) >= len(TAKEN):  # of _ROOM the first: to try all would take long
                break
        places.sort(key=lambda place: (place[0], place[1].cost))
        return sorted((each for _, each in places[: len(TAKEN)]), key=cost)

    def change(self, other: "Layout") -> str:
        said = super().change(other)
        return pipeline.WRITTEN.get(said, said)

    def where(self) -> str:
        return f"{self.model} on {self.gpus:,} GPU{'s' if self.gpus > 1 else ''}, {self.cluster}, {degrees(self.scenario.plan)}"

    def numbers(self) -> dict[str, str]:
        plan, tokens = self.scenario.plan, f"{self.batch * self.seq / self.gpus:,.0f} per GPU"
        stages = f" on {plan.stages} stages" if self.pp > 1 else ""
        return {"tokens": tokens, "micro-batches": f"{plan.microbatches:,}{stages}"}

    def limits(self) -> str:
        if not self.fits:
            return self.memory("no single control helps: change two of them, or use more GPUs")
        part, time, layers = self.part, self.scenario.time, self.scenario.shape.layers
        slots, stages = layers + (2 if time.plan.embedding_slots else 0), self.pp * self.virtual
        share, more = time.parts[part] / time.seconds, -(-slots // stages) * stages / slots - 1
        if more > max(MUCH, share):
            return (
                f"uneven stages: with {layers} layers on {stages} stages, the fullest has {more:.0%} more layers than the mean"
            )
        link = "" if part in ("bubble", "optimizer") else self.link(_ROW.get(part, ""))
        way = self.takes(part, units.duration)
        return f"{STEP[part][0]}{f' on {link}' if link else ''}, {share:.0%} of the step{way}"

    def code(self) -> str:
        prints = {"tokens": "plan.tokens // plan.gpus, 'per GPU'", "micro-batches": "plan.microbatches"}
        return self.scenario.code(prints)


def _task(model: str, cluster: str, gpus: int, seq: int) -> tuple[ModelShape, dict[str, object]]:
    """The shape, and fields of Plan that are as it was trained; bf16 where the chip multiplies no faster in 8 bits."""
    shape, on = SHAPES[model], clusters[cluster]
    if gpus > (most := on.levels[-1].size):
        raise ValueError(f"{gpus:,} GPUs: {cluster} has only {most:,}; use fewer")
    if 0 < shape.positions < seq:
        raise ValueError(f"{model} has learned positions for {shape.positions:,} tokens: lower s")
    eight = model == EIGHT_BITS and on.accelerator.flops_fp8 > on.accelerator.flops
    own = {"stack": "hai-llm"} if model == EIGHT_BITS else {}
    return shape, own | {"precision": "fp8" if eight else "bf16", "embedding_slots": model == EMBEDDING_SLOTS}


@functools.lru_cache(maxsize=64)
def _best(model: str, cluster: str, gpus: int, batch: int, seq: int) -> tuple[Found, ...]:
    shape, given = _task(model, cluster, gpus, seq)
    choices = _TRIED | {"cp": [c for c in CHOICES["cp"] if c == 1 or seq // c >= planner.SMALLEST_SHARD]} | given
    choices |= _WITH_EXPERTS if shape.experts else {}
    choices |= {"etp": None}  # there is no control for it
    ranking = planner.search(shape, clusters[cluster], gpus=gpus, seq=seq, batch=batch, **choices)
    different: dict[tuple, Found] = {}
    for found in ranking:
        different.setdefault((found.plan.tp, found.plan.pp, found.plan.ep), found)
        if len(different) == len(TAKEN):
            break
    best, checked = list(different.values()), ranking.checked
    if checked and checked.plan not in [found.plan for found in best]:
        best[len(TAKEN) - 1 :] = [checked]
    return tuple(sorted(best, key=attrgetter("seconds")))


@functools.lru_cache(maxsize=64)
def _rule(model: str, cluster: str, gpus: int, batch: int, seq: int) -> Found | None:
    shape, given = _task(model, cluster, gpus, seq)
    return tried(lambda: rules.rule(shape, clusters[cluster], gpus, seq, batch, **given, etp=None))


class Plans(Board):
    """Three panels: axes on links, a GPU's memory, and a step's time beside other plans'."""

    over, curves = "tp", (MEMORY, BUBBLE, MFU)

    @staticmethod
    def setting(best: str = HIDDEN, **values) -> Layout:
        """Leaves out what the planner is to do."""
        return Layout(**values)

    @style.styled
    def __init__(self):
        self.figure = style.Figure(figsize=_SIZE, layout="none")
        left, right, below = map(self.figure.add_axes, np.divide(_PLACES, 2 * _SIZE))
        look = {"size": 8, "outline": word}
        self._mesh = Bars(left, _LINKS, "", list(_AXES.values()), lambda twos: f"{2**twos:,.0f} ranks", 0, **look)
        self._memory = Bars(right, _HELD, "", [*_HELD, "together"], columns=0, **look)
        self._steps = Steps(below, "", [""] * (1 + len(TAKEN)), 0, **look)
        self._steps.column = 0.355  # its texts are long
        below.set_xlim(0, 1.16)
        self._names = Labels(below, left=1.0, name="names", **look)
        self.panels, self.others = (self._mesh, self._memory, self._steps), [self._names]
        right.set_xlim(0, 0.85)  # its texts are short
        titles = (
            "Axes on links (log: ranks apart)",
            "Memory of the fullest GPU",
            "Step time, MFU and memory of this plan and others",
        )
        for axes, title, pad, x in zip((left, right, below), titles, (18, 6, 33), (-0.2, -0.3, -2.5 / 3.85), strict=True):
            axes.set_title(title, pad=pad, x=x, fontsize=10.5)
            axes.tick_params(axis="y", labelsize=9)
            axes.spines["bottom"].set_visible(False)
        for axes, place, at in ((left, "lower left", (-0.21, 1)), (below, "lower left", (-2.6 / 3.85, 1))):
            look = {"borderaxespad": 0.1, "columnspacing": 0.9, "handlelength": 1.3, "fontsize": 8}
            axes.legend(loc=place, bbox_to_anchor=at, ncols=4, **look)
        below.spines[:].set_visible(False)

    def update(self, best: str, **values) -> Said:
        """Shows these values' Setting; unless best is HIDDEN, the planner searches. Raises ValueError for what can't be."""
        now = Layout(**values)
        found = now.best() if best != HIDDEN else ()
        if best != HIDDEN and not found:
            room = f"in {units.size(clusters[now.cluster].accelerator.memory)} per GPU"
            raise ValueError(f"the planner finds no plan that fits {room}: use more GPUs, or another model or chip")
        try:
            said = _said(now, found)
        except ValueError as error:
            raise ValueError(f"{error}; “{TAKEN[0]}” loads the planner's best") if found else error from error
        own = kept(now.scenario.plan)
        named = {_numbered(k, found): each for k, each in enumerate(found)}
        others = [(_label_of_plan(f"{name}: ", each.plan, own), now.taking(each.plan)) for name, each in named.items()]
        others = others or [(f"with {now.change(each)}", each) for each in now.near()]
        self._show_axes(now)
        self._show_memory(now)
        self._show_steps([(f"this plan: {degrees(now.scenario.plan)}\n{own}", now), *others], found)
        return said

    def _show_axes(self, now: Layout) -> None:
        """A bar from the distance of neighbors to the length of a group, in doublings of ranks."""
        bars, texts, levels = [], [], [level.size for level in clusters[now.cluster].levels]
        node, pod = levels[0], levels[:2][-1]
        for axis, (size, stride) in now.reaches.items():
            start, end = log2(stride), log2(size * stride)
            near, far = (min(max(log2(border), start), end) for border in (node, pod))
            bars.append(dict(zip(("", *_LINKS), (start, near - start, far - near, end - far), strict=True)))
            link = f": {now.link(axis).partition(' b')[0]}" if size > 1 else ""
            texts.append(f"{size:,}{link}, {stride:,} apart" if size > 1 < stride else f"{size:,}{link}")
        row = list(_AXES).index(_ROW[now.part]) if now.part in _ROW else -9
        pods = [(log2(pod), f"a pod: {pod:,}")] if pod < now.gpus else []
        self._mesh.update(bars, texts, row, log2(max(now.gpus, node, 2)), (log2(node), f"a node: {node:,}"), others=pods)

    def _show_memory(self, now: Layout) -> None:
        held, room = now.scenario.held, now.scenario.cost.room
        *before, whole = accumulate(held.values(), initial=0)
        bars = [{"": start, part: size} for start, (part, size) in zip(before, held.items(), strict=True)]
        texts = [units.size(size) if size else "none" for size in held.values()] + [f"{units.size(whole)}, {whole / room:.0%}"]
        row = np.argmax([*held.values()])
        self._memory.update([*bars, held], texts, row, max(whole, room), (room, units.size(room)))

    def _show_steps(self, rows: Sequence[tuple[str, Layout]], found: Sequence[Found]) -> None:
        times, sizes = zip(*((each.scenario.time, each.scenario.peak.total) for _, each in rows), strict=True)
        texts = [written(*each, short=True) for each in zip(times, sizes, strict=True)]
        close = [", tied" if _tied(time, found) else "" for time in times]
        texts = [f"{text}\n{bar(time)}{tied}|{peak_bar(time)}" for time, text, tied in zip(times, texts, close, strict=True)]
        self._steps.show(times, texts, 0, 3 * min(time.seconds for time in times))
        lines = [line for row, (text, _) in enumerate(rows) for line in apart(row, text)]  # a name has one or two
        self._names.write([(-0.008, y) for y, _ in lines], [line for _, line in lines])

    def idle(self, **values) -> dict[str, bool]:
        """A pipeline's controls without one, shards of nothing, experts that the model doesn't have."""
        idle = dict.fromkeys(("schedule", "virtual"), values["pp"] == values["virtual"] == 1)
        idle["dp_shard"] = values["zero"] == 0 and values["dp_shard"] == ALL
        return idle | {"ep": values["ep"] == 1 and not SHAPES[values["model"]].experts}


def _label_of_plan(name: str, plan: Plan, own: str) -> str:
    """A plan's degrees, and what else of it isn't as in `own`."""
    others, plain = ", ".join(part for part in kept(plan).split(", ") if part not in own), name + degrees(plan)
    if not others:
        return plain
    return plain + ("\n" if len(plain + others) > _LETTERS else ", ") + others


def _checked(found: Sequence[Found]) -> Found | None:
    """The fastest like which runs were published."""
    return next((each for each in found if not confidence(each.time).missing), None)


def _numbered(k: int, found: Sequence[Found]) -> str:
    return f"{k + 1}, best checked" if found[k] is _checked(found) else f"{k + 1}"


def _tied(time: StepTime, found: Sequence[Found]) -> bool:
    """Returns whether another plan's step and the planner's best are too close to call."""
    if not found or time.plan == found[0].plan:
        return False
    return planner.tie(*sorted((time, found[0].time), key=attrgetter("seconds"), reverse=True))


def _said(now: Layout, found: Sequence[Found]) -> Said:
    said = now.said()
    if found:
        each = {"planner's best": found[0], "best checked": _checked(found), "rule of thumb": now.rule()}
        numbers = {name: f"{units.duration(one.seconds)}, {bar(one.time)}" if one else "none" for name, one in each.items()}
        said = said._replace(numbers=said.numbers | numbers, limit=said.limit + (_compared(now, found) if said.fits else ""))
    return said


def _compared(now: Layout, found: Sequence[Found]) -> str:
    """Compares with the planner's fastest, and says where this plan loses most; the planner doesn't try all values."""
    best, time = found[0].seconds, now.scenario.time
    close = "; too close to call" if _tied(time, found) else ""
    if now.cost <= _EQUAL * best:
        return f". {'Faster than' if now.cost * _EQUAL < best else 'As fast as'} the planner's best{close}"
    own = Found(now.scenario.plan, time, now.scenario.peak, found[0].time)
    part, _, rest = own.why.partition(" ")
    rest = rest.partition("; ")[0]  # what follows says how sure that is
    return f". The planner's best takes {units.duration(best)}{close}. This plan loses most on {STEP[part][0]}: {rest}"


class PlanBoard(Explorer):
    """An explorer whose last control has the planner search, and puts one of its plans into the others."""

    def __init__(self, best: widgets.ValueWidget, others: dict[str, widgets.ValueWidget], **more):
        self._best, self._others, self._taking = best, others, False
        for control in others.values():  # before the explorer's own observers: what it draws is of one setting
            control.observe(self._moved, "value")
        best.observe(self._take, "value")
        super().__init__(Plans(), **more, **others, best=best)

    def _moved(self, change) -> None:
        """Another task has other plans, and a plan that was taken is one by hand from now on."""
        if change.owner in list(self._others.values())[:5]:
            self._best.value = HIDDEN
        elif self._best.value in TAKEN and not self._taking:
            self._best.value = SHOWN

    def _take(self, change) -> None:
        """Searches, and moves the other controls; where no plan fits, the plot says so."""
        if change.new == HIDDEN:
            return
        self._line.value = page.with_limit("Searching for plans …")
        now = Layout(**{name: control.value for name, control in self._others.items()})
        with suppress(ValueError):  # a task that can't be: the plot says so
            found = now.best()
            self._taking = change.new in TAKEN[: len(found)]
            if self._taking:
                self.set(**now.taking(found[TAKEN.index(change.new)].plan)._asdict())
        self._taking = False


def explorer(measure: Measure | None = None) -> PlanBoard:
    """Opens on Llama 3 70B on 1,024 H100s, split by a rule of thumb.

    measure: what "Measure it" runs, of few_ranks
    """
    only = {name: CHOICES[name] for name in ("cluster", "gpus", "batch")} | {
        "model": MODELS,
        "seq": [2**k for k in range(7, 18)],
    }
    task = {"model": "llama3-70b", "cluster": "h100-dgx", "gpus": 1024, "batch": 1024, "seq": 8192}
    others = controls(only, **task, microbatch=1, tp=8, cp=1, pp=4, ep=1, zero=1)
    others |= {"dp_shard": value_slider("HSDP shards", ALL, CHOICES["dp_shard"])}
    others |= {"schedule": choice("schedule", "1f1b", {pipeline.WRITTEN[name]: name for name in CHOICES["schedule"]})}
    others |= {"virtual": value_slider("virtual stages v", 1, CHOICES["virtual"])} | controls(recompute="selective")
    presets = {"TP 16": {"tp": 16}, "ZeRO-3 alone": {"tp": 1, "pp": 1, "zero": 3}, "few tokens": {"batch": 64}}
    presets |= {"Llama 3 405B": {"model": "llama3-405b", "gpus": 16384, "batch": 2048, "pp": 16}}
    pods = {"cluster": "llama3-cluster", "gpus": 24576, "batch": 3072}
    presets["Llama 3's cluster"] = presets["Llama 3 405B"] | pods | {"virtual": 8}
    best = choice("planner", HIDDEN, (HIDDEN, SHOWN, *TAKEN))
    return PlanBoard(best, others, presets=presets, measure=measure)
