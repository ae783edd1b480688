"""One scenario for all explorers: a model, a plan and a cluster; what a step of it costs; the controls that set it.

What you choose in one chapter is still set in the next. A file beside the user's Jupyter settings keeps it.
"""

import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import ipywidgets as widgets

from manyranks import settings
from manyranks.show import units
from manyranks.theory import ModelShape, Plan, clusters, memory, models, step
from manyranks.theory.cluster import Cluster
from manyranks.theory.names import Named

# The sizes of the GPT that this course trains: training.GPTConfig.
SMALL = ModelShape("small GPT", layers=4, hidden=128, ffn=352, heads=4, vocab=256, tied=True)
SHAPES = Named("model", {SMALL.name: SMALL} | dict(models))
CLUSTERS = ("laptop", "v100-dgx", "a100-dgx", "h100-dgx", "h800", "h200-dgx", "b200-dgx", "gb200-nvl72", "tpu-v5p", "tpu-v6e")


class Cost(NamedTuple):
    """What the strip below an explorer shows of a scenario.

    held, room: bytes of the fullest GPU and of its memory; bubble, exposed: shares of a step; seconds: of a step
    """

    held: float
    room: float
    bubble: float
    exposed: float
    seconds: float
    mfu: float


STEP = "step time"
# Name of each number of the strip -> the share that its bar shows, and how it's written.
STRIP: dict[str, tuple[Callable[[Cost], float], Callable[[Cost], str]]] = {
    "memory per GPU": (lambda c: c.held / c.room, lambda c: of(units.size(c.held), units.size(c.room))),
    "bubble (share of the step)": (lambda c: c.bubble, lambda c: percent(c.bubble)),
    "exposed communication": (lambda c: c.exposed, lambda c: percent(c.exposed)),
    STEP: (lambda c: c.seconds, lambda c: units.duration(c.seconds)),
    "MFU": (lambda c: c.mfu, lambda c: percent(c.mfu)),
}


def of(part: str, whole: str) -> str:
    """ "16.6 GB" and "32 GB" -> "16.6 of 32 GB"."""
    (number, unit), other = part.split(), whole.split()[-1]
    return f"{number if unit == other else part} of {whole}"


@dataclass(frozen=True)
class Scenario:
    """A model's shape, how it's trained, and on what. imbalance: of experts, as step.estimate has it."""

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
    def fits(self) -> bool:
        return self.peak.total <= self.cluster.accelerator.memory

    @property
    def cost(self) -> Cost:
        time = self.time
        exposed = (time.tensor + time.context + time.expert + time.pipeline + time.data) / time.seconds
        held, room = self.peak.total, self.cluster.accelerator.memory
        return Cost(held, room, time.bubble / time.seconds, exposed, time.seconds, time.mfu)

    def code(self) -> str:
        """Python that computes the same numbers."""
        known = models.get(self.shape.name)
        shape = f"models[{self.shape.name!r}]" if known else repr(self.shape)
        own = {key: value for key, value in vars(self.shape).items() if known and value != getattr(known, key)}
        if own:
            shape = f"replace({', '.join([shape, *(f'{key}={value!r}' for key, value in own.items())])})"
        name = next((key for key, each in clusters.items() if each == self.cluster), "")
        other = f"clusters[{self.cluster.name.partition(',')[0]!r}].with_nodes_of({self.cluster.node})"
        more = f", imbalance={self.imbalance}" * (self.imbalance != 1)
        return (
            f"{'from dataclasses import replace' * bool(own)}{chr(10) * 2 * bool(own)}"
            f"from manyranks.theory import {'ModelShape, ' * (not known)}Plan, clusters, memory, models, step\n\n"
            f"shape, cluster = {shape}, {f'clusters[{name!r}]' if name else other}\n"
            f"plan = {self.plan!r}\n"
            f"time = step.estimate(shape, plan, cluster{more})\n"
            "print(time, time.seconds, time.mfu, memory.peak(shape, plan).total)\n"
        )


_time = functools.lru_cache(maxsize=16384)(step.estimate)
_peak = functools.lru_cache(maxsize=16384)(memory.peak)


# The controls

# Three controls side by side where there is room, else two.
_LOOK = {"layout": {"width": "33%", "min_width": "268px", "margin": "1px 0"}, "style": {"description_width": "128px"}}


def slider(label: str, value: int, low: int, high: int, step: int = 1) -> widgets.IntSlider:
    """A control for a whole number."""
    return widgets.IntSlider(value, low, high, step, description=label, **_LOOK)


def value_slider(label: str, value: float, values: Sequence[float], show: Callable = str) -> widgets.SelectionSlider:
    """A control for one of several numbers, in their order; show: value -> text beside the slider."""
    options = [(show(number), number) for number in values]
    return widgets.SelectionSlider(options=options, value=value, description=label, **_LOOK).add_class("manyranks-steps")


def log_slider(label: str, value: float, low: int, high: int, base: int = 2, show: Callable = str) -> widgets.SelectionSlider:
    """A control for a power of `base`, from base**low to base**high; show: value -> text beside the slider."""
    return value_slider(label, value, [base**k for k in range(low, high + 1)], show)


def choice(label: str, value: object, options: Sequence[str] | Mapping[str, object]) -> widgets.Dropdown:
    """A control for one of several names, or for what they stand for."""
    options = list(options.items() if isinstance(options, Mapping) else options)
    return widgets.Dropdown(options=options, value=value, description=label, **_LOOK)


SWITCH = {"on": True, "off": False}
# Plan's fields, and what is beside them -> the control's label and all that it can be set to. A mapping: names to choose from.
SHARED: dict[str, tuple[str, Sequence | Mapping]] = {
    "model": ("model", {name: name for name in SHAPES}),
    "cluster": ("cluster", {name: name for name in CLUSTERS}),
    "gpus": ("GPUs", [2**k for k in range(15)]),
    "batch": ("batch (sequences)", [2**k for k in range(15)]),
    "seq": ("sequence length s", [2**k for k in range(7, 21)]),
    "microbatch": ("micro-batch b", [2**k for k in range(7)]),
    "dp": ("data ranks d", [2**k for k in range(11)]),
    "tp": ("tensor ranks t", [2**k for k in range(7)]),
    "cp": ("context ranks c", [2**k for k in range(7)]),
    "pp": ("pipeline ranks p", [2**k for k in range(7)]),
    "ep": ("expert ranks e", [2**k for k in range(9)]),
    "zero": ("ZeRO stage", [0, 1, 2, 3]),
    "recompute": ("recompute", {name: name for name in ("none", "selective", "full")}),
    "sequence_parallel": ("sequence parallel", SWITCH),
    "flash": ("flash attention", SWITCH),
    "overlap": ("overlap", SWITCH),
}


def controls(only: Mapping[str, Iterable] | None = None, **defaults) -> dict[str, widgets.ValueWidget]:
    """The shared controls of these names, in this order, with these values: the same label and values in each chapter.

    only: name -> the values that this explorer offers, in this order; all of SHARED's where a name is missing
    """
    return {name: _control(name, value, (only or {}).get(name)) for name, value in defaults.items()}


def _control(name: str, value: object, only: Iterable | None) -> widgets.ValueWidget:
    label, options = SHARED[name]
    if isinstance(options, Mapping):
        return choice(label, value, {_said(name, each): each for each in (only or options.values())})
    return value_slider(label, value, list(only or options), "{:,}".format)


# What is carried from one explorer to the next


def saved() -> dict[str, object]:
    """What the reader has set in any explorer: name of a shared control -> value."""
    kept = settings.read("scenario").items()
    return {name: value for name, value in kept if name in SHARED and type(value) in (str, int, bool)}


def save(values: Mapping[str, object]) -> None:
    """Keeps these values of shared controls, beside what was kept before."""
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
    labels = {name: label[-1] if label[-2] == " " else label.partition(" (")[0] for name, (label, _) in SHARED.items()}
    labels |= {"dp_shard": "HSDP shards", "virtual": "v"}
    spaced = re.sub(r"(?<=\w)=(?=\S)", " = ", message.replace("·", " × "))
    return re.sub(rf"\b({'|'.join(labels)})(?= = )|\b(tp|cp|pp|dp|ep|seq|microbatch)\b", lambda name: labels[name[0]], spaced)


def percent(share: float) -> str:
    """0.318 -> "32%", 0.0318 -> "3.2%"."""
    return f"{100 * share:.1f}%" if 0.0005 <= share < 0.0995 else f"{100 * share:,.0f}%"
