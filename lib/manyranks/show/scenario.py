"""The scenario of all explorers: a model, a plan and a cluster; what a step of it costs; the controls that set it.

A choice that you make in one chapter is still set in the next. A file beside the user's Jupyter settings keeps it.
"""

import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import ipywidgets as widgets

from manyranks import settings
from manyranks.show import units
from manyranks.theory import ModelShape, Plan, clusters, memory, models, step
from manyranks.theory.cluster import Cluster
from manyranks.theory.names import Named
from manyranks.theory.published.error_bars import barely_fits
from manyranks.theory.states import states_of

# The sizes of the GPT that this course trains: training.GPTConfig.
SMALL = ModelShape("small GPT", layers=4, hidden=128, ffn=352, heads=4, vocab=256, tied=True)
SHAPES = Named("model", {SMALL.name: SMALL} | dict(models))
CLUSTERS = ("laptop", "v100-dgx", "a100-dgx", "h100-dgx", "h800", "h200-dgx", "b200-dgx", "gb200-nvl72", "tpu-v5p", "tpu-v6e")


class Cost(NamedTuple):
    """The numbers of a scenario in the strip below an explorer.

    held, room: bytes of the fullest GPU and of its memory
    bubble, exposed: shares of a step
    seconds: of a step
    """

    held: float
    room: float
    bubble: float
    exposed: float
    seconds: float
    mfu: float


MEMORY, BUBBLE, STEP, MFU = "memory per GPU", "bubble (share of the step)", "step time", "MFU"
# Name of each number of the strip -> the share that its bar shows, how it's written, and the Python that computes it.
STRIP: dict[str, tuple[Callable[[Cost], float], Callable[[Cost], str], str]] = {
    MEMORY: (lambda c: c.held / c.room, lambda c: of(units.size(c.held), units.size(c.room)), "size(peak.total)"),
    BUBBLE: (lambda c: c.bubble, lambda c: units.percent(c.bubble), "percent(time.bubble / time.seconds)"),
    "exposed communication": (lambda c: c.exposed, lambda c: units.percent(c.exposed), "percent(exposed / time.seconds)"),
    STEP: (lambda c: c.seconds, lambda c: units.duration(c.seconds), "duration(time.seconds)"),
    MFU: (lambda c: c.mfu, lambda c: units.percent(c.mfu), "percent(time.mfu)"),
}
_UNITS = "count", "duration", "flop_rate", "percent", "short", "size", "three"
_CODE = """\
from manyranks.theory import {names}

shape, cluster = {shape}, {cluster}
plan = {plan}
time, peak = step.estimate(shape, plan, cluster{more}), memory.peak(shape, plan)
exposed = time.tensor + time.context + time.expert + time.pipeline + time.data
"""


def of(part: str, whole: str) -> str:
    """Joins "16.6 GB" and "32 GB" to "16.6 of 32 GB"."""
    (number, unit), other = part.split(), whole.split()[-1]
    return f"{number if unit == other else part} of {whole}"


@dataclass(frozen=True)
class Scenario:
    """A model's shape, how it's trained, and on what.

    imbalance: of experts, as step.estimate has it
    """

    shape: ModelShape
    plan: Plan
    cluster: Cluster
    imbalance: float = 1.0

    def checked(self) -> "Scenario":
        """Returns this one. Raises ValueError for a plan that the shape doesn't allow, and for more GPUs than there are."""
        if self.plan.gpus > (most := self.cluster.levels[-1].size):
            raise ValueError(f"{self.plan.gpus:,} GPUs: {self.cluster.name} has only {most:,}; use fewer ranks")
        self.plan.check(self.shape)
        return self

    @functools.cached_property
    def time(self) -> step.StepTime:
        """Raises ValueError as checked does."""
        return _time(self.checked().shape, self.plan, self.cluster, imbalance=self.imbalance)

    @property
    def peak(self) -> memory.Peak:
        return _peak(self.shape, self.plan)

    @property
    def held(self) -> dict[str, int]:
        """Returns bytes of the fullest GPU by what they are for; their sum is the peak."""
        each = (states_of(held, self.plan) for held in set(memory.rank_parameters(self.shape, self.plan)))
        # The rank with the most of these may have fewer activations.
        states = next(one for one in each if one.total == self.peak.states)
        named = dict(zip(("parameters", "gradients", "optimizer"), states, strict=False))
        return named | {"activations": self.peak.activations, "buffers": self.peak.buffers}

    @property
    def fits(self) -> bool:
        return self.peak.total <= self.cluster.accelerator.memory

    @property
    def tight(self) -> str:
        """Says so where it fits by less than the error bar of the peak; else empty."""
        return barely_fits(self.shape, self.plan, self.cluster.accelerator.memory)

    @property
    def cost(self) -> Cost:
        time = self.time
        exposed = (time.tensor + time.context + time.expert + time.pipeline + time.data) / time.seconds
        held, room = self.peak.total, self.cluster.accelerator.memory
        return Cost(held, room, time.bubble / time.seconds, exposed, time.seconds, time.mfu)

    def code(self, prints: Mapping[str, str] = {}, names: str = "", lines: str = "") -> str:
        """Returns Python that prints the strip's numbers, and before them the chapter's own.

        prints: name of a number -> Python that computes its text
        names: what that needs of theory
        lines: before it
        """
        known, plan = models.get(self.shape.name), _own(self.plan, Plan())
        if plan.get("batch") == self.plan.dp * self.plan.microbatch:
            del plan["batch"]  # one micro-batch each
        shape = f'models["{self.shape.name}"]' if known else f"ModelShape({_given(_own(self.shape))})"
        if known and (own := _own(self.shape, known)):
            shape = f"replace({shape}, {_given(own)})"
        name = next((key for key, each in clusters.items() if each == self.cluster), "")
        other = f'clusters["{self.cluster.name.partition(",")[0]}"].with_nodes_of({self.cluster.node})'
        text = _CODE.format(
            names=", ".join(
                sorted({"Plan", "clusters", "memory", "models" if known else "ModelShape", "step", *names.split()})
            ),
            shape=shape,
            cluster=f'clusters["{name}"]' if name else other,
            plan=f"Plan({_given(plan)})",
            more=f", imbalance={self.imbalance}" if self.imbalance != 1 else "",
        )
        own = {name: how for name, how in prints.items() if name not in STRIP}
        return in_code(text + lines, own | {name: prints.get(name, how) for name, (_, _, how) in STRIP.items()})


def _own(value: object, usual: object = None) -> dict[str, object]:
    """Returns the fields that differ from the usual value's, or from their defaults."""
    each = {field.name: getattr(value, field.name) for field in fields(value)}
    default = {field.name: field.default if usual is None else getattr(usual, field.name) for field in fields(value)}
    return {name: own for name, own in each.items() if own != default[name]}


def _given(values: Mapping[str, object]) -> str:
    return ", ".join(f"{name}={value!r}".replace("'", '"') for name, value in values.items())


def in_code(text: str, prints: Mapping[str, str]) -> str:
    """Returns Python that prints each number by its name, after this text; it imports what of units it uses."""
    text += "\n" + "".join(f'print("{name}:", {how})\n' for name, how in prints.items())
    used = ", ".join(name for name in _UNITS if re.search(rf"\b{name}\(", text))
    replaces = "from dataclasses import replace\n\n" if "replace(" in text else ""
    return f"{replaces}from manyranks.show.units import {used}\n{text}"


_time = functools.lru_cache(maxsize=16384)(step.estimate)
_peak = functools.lru_cache(maxsize=16384)(memory.peak)


# The controls

_LOOK = {"layout": {"width": "auto"}, "style": {"description_width": "initial"}}  # the page places them: page.KEYS


def slider(label: str, value: int, low: int, high: int) -> widgets.IntSlider:
    """A control for a whole number."""
    return widgets.IntSlider(value, low, high, description=label, **_LOOK)


def value_slider(label: str, value: float, values: Sequence[float], show: Callable = str) -> widgets.SelectionSlider:
    """A control for one of several numbers, in their order.

    show: value -> text beside the slider
    """
    options = [(show(number), number) for number in values]
    return widgets.SelectionSlider(options=options, value=value, description=label, **_LOOK).add_class("manyranks-steps")


def log_slider(label: str, value: float, low: int, high: int, show: Callable = str) -> widgets.SelectionSlider:
    """A control for a power of two, from 2**low to 2**high.

    show: value -> text beside the slider
    """
    return value_slider(label, value, [2**k for k in range(low, high + 1)], show)


def choice(label: str, value: object, options: Sequence[str] | Mapping[str, object]) -> widgets.Dropdown:
    """A control for one of several names, or for what they stand for."""
    options = list(options.items() if isinstance(options, Mapping) else options)
    return widgets.Dropdown(options=options, value=value, description=label, **_LOOK)


def values(control: widgets.ValueWidget) -> list:
    """Returns all that a control can be set to."""
    if hasattr(control, "options"):
        return [option[1] if isinstance(option, tuple) else option for option in control.options]
    return list(range(control.min, control.max + 1))


SWITCH = {"on": True, "off": False}
# Plan's fields, and other controls -> the control's label; all that it can be set to, a mapping for names to choose from;
# and how a value is written in a sentence.
SHARED: dict[str, tuple[str, Sequence | Mapping, str]] = {
    "model": ("model", {name: name for name in SHAPES}, "{}"),
    "cluster": ("cluster", {name: name for name in CLUSTERS}, "{}"),
    "gpus": ("GPUs", [2**k for k in range(15)], "{:,} GPUs"),
    "batch": ("batch (sequences)", [2**k for k in range(15)], "{:,} sequences"),
    "seq": ("sequence length s", [2**k for k in range(7, 21)], "s = {:,}"),
    "microbatch": ("micro-batch b", [2**k for k in range(7)], "micro-batch {}"),
    "dp": ("data ranks d", [2**k for k in range(11)], "DP {}"),
    "tp": ("tensor ranks t", [2**k for k in range(7)], "TP {}"),
    "cp": ("context ranks c", [2**k for k in range(7)], "CP {}"),
    "pp": ("pipeline ranks p", [2**k for k in range(7)], "PP {}"),
    "ep": ("expert ranks e", [2**k for k in range(9)], "EP {}"),
    "zero": ("ZeRO stage", [0, 1, 2, 3], "ZeRO-{}"),
    "recompute": ("recompute", {name: name for name in ("none", "selective", "full")}, "recompute = {}"),
    "sequence_parallel": ("sequence parallel", SWITCH, "sequence parallelism"),
    "flash": ("flash attention", SWITCH, "flash attention"),
    "overlap": ("overlap", SWITCH, "overlap"),
}


def controls(only: Mapping[str, Iterable] | None = None, **defaults) -> dict[str, widgets.ValueWidget]:
    """The shared controls of these names, in this order, with these values: the same label and values in each chapter.

    only: name -> the values that this explorer offers, in this order; all of SHARED's where a name is missing
    """
    made = {}
    for name, value in defaults.items():
        (label, options, _), own = SHARED[name], (only or {}).get(name)
        if isinstance(options, Mapping):
            made[name] = choice(label, value, {_said(name, each): each for each in (own or options.values())})
        else:
            made[name] = value_slider(label, value, list(own or options), "{:,}".format)
    return made


# What is carried from one explorer to the next


def saved() -> dict[str, object]:
    """Returns what the reader has set in any explorer: name of a shared control -> value."""
    kept = settings.read("scenario").items()
    return {name: value for name, value in kept if name in SHARED and type(value) in (str, int, bool)}


def save(values: Mapping[str, object]) -> None:
    """Keeps these values of shared controls, and leaves what else was kept."""
    if own := {name: value for name, value in values.items() if name in SHARED}:
        settings.write("scenario", saved() | own)


def forget() -> None:
    """Removes what was kept: explorers open at their defaults."""
    settings.forget("scenario")


def shown(values: Mapping[str, object]) -> str:
    """Values of shared controls in a few words: "llama3-8b, h100-dgx, tensor ranks t = 8"."""
    named = [str(values[name]) for name in ("model", "cluster") if name in values]
    others = (name for name in values if name in SHARED and name not in ("model", "cluster"))
    return ", ".join(named + [f"{SHARED[name][0]} = {_said(name, values[name])}" for name in others])


def _said(name: str, value: object) -> str:
    options = SHARED[name][1]
    if isinstance(options, Mapping):
        return next((text for text, each in options.items() if each == value), str(value))
    return f"{value:,}"


def in_words(message: str) -> str:
    """A message of the theory with the controls' names in it: "t = 8 does not divide the 4 heads"."""
    labels = {name: label[-1] if label[-2] == " " else label.partition(" (")[0] for name, (label, *_) in SHARED.items()}
    labels |= {"dp_shard": "HSDP shards", "virtual": "v"}
    spaced = re.sub(r"(?<=\w)=(?=\S)", " = ", message.replace("·", " × "))
    return re.sub(rf"\b({'|'.join(labels)})(?= = )|\b(tp|cp|pp|dp|ep|seq|microbatch)\b", lambda name: labels[name[0]], spaced)
