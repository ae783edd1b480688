"""Chapter 05's explorer: two schedules on one time axis, and what the upper one makes of a model on a cluster."""

import functools
from collections import namedtuple

from manyranks.parallel.pipeline import actions, program, schedules
from manyranks.show import style
from manyranks.show.explorer import Board, Explorer, Measure, Setting, choice, slider, value_slider
from manyranks.show.gantt import KINDS
from manyranks.show.labels import width
from manyranks.show.pipeline.figures import Charts, Run, run
from manyranks.show.said import Said
from manyranks.show.scenario import BUBBLE, MEMORY, MFU, SHAPES, Scenario, controls
from manyranks.show.setting import MUCH
from manyranks.theory import Plan, clusters
from manyranks.theory import pipeline as theory
from manyranks.theory.plan import SCHEDULES
from manyranks.timeline import replay

MODELS = [name for name, shape in SHAPES.items() if shape.layers >= 32]  # layers for 8 ranks of 4 stages each
NAMES = {theory.WRITTEN[name]: name for name in SCHEDULES if name != "dualpipe"}  # that one has no program
_TIMES, _MESSAGES = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0), (0.0, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0)
_CODE = """\
from manyranks.parallel.pipeline import program, schedules
from manyranks.timeline import replay

for place, (name, v) in {both}.items():
    schedule = schedules.named(name, {pp}, {m}, v)
    F, I, W = (each * {pp} / schedule.stages for each in ({F}, {I}, {W}))
    timeline = replay(program.program(schedule), program.Times(F, I, W, latency={message}))
    print(f"{{place}} makespan: work {{{work}:.4g}} + bubble {{program.bubble(timeline):.4g}}")

"""


# The controls that may make room in memory.
_ROOM = {"first": NAMES.values(), "pp": range(1, 9), "tp": (1, 2, 4, 8)}
_WORDS = {"pp": "p = {}", "tp": "t = {}"}


class Schedules(namedtuple("Schedules", "first second model cluster tp pp m v F I W message"), Setting):
    """Holds what the controls say. F, I, W: of a micro-batch on all stages of a rank; message: between two stages; one unit."""

    choices, room, words = _ROOM, tuple(_ROOM), _WORDS

    @property
    def scenario(self) -> Scenario:
        """The upper schedule's. Raises ValueError where theory has no step time."""
        if (shape := SHAPES[self.model]).heads % self.tp:
            raise ValueError(f"{self.tp} tensor ranks can't share the {shape.heads} heads of {self.model}")
        if self.m < (fewest := theory.fewest(self.first, self.pp)) and self.pp > 1:
            raise ValueError(f"the formula for {theory.WRITTEN[self.first]} needs m ≥ {fewest}")
        plan = Plan(pp=self.pp, tp=self.tp, batch=self.m, schedule=self.first, virtual=self.stages(self.first))
        return Scenario(shape, plan, clusters[self.cluster])

    def stages(self, name: str) -> int:
        return self.v if name == "interleaved" else 1

    def run(self, name: str) -> Run:
        return _run(name, self.pp, self.m, self.stages(name), self.message, self.F, self.I, self.W)

    def expected(self, name: str) -> float | None:
        """The papers' closed form of the bubble; None for micro-batches that it doesn't hold for."""
        if (self.stages(name) > 1 and self.m % self.pp) or (self.pp > 1 and self.m < theory.fewest(name, self.pp)):
            return None
        return theory.bubble(name, self.pp, self.m, self.stages(name), self.F, self.I + self.W, self.W)

    def said(self) -> Said:
        """Says what both schedules do, and what the upper one makes of a step, where theory has its time."""
        both, numbers = [(name, self.run(name)) for name in (self.first, self.second)], {}
        where = f"{theory.WRITTEN[self.first]} above {theory.WRITTEN[self.second]}, p = {self.pp}, m = {self.m}"
        for place, (_, shown) in zip(("upper", "lower"), both, strict=True):
            late = f" + late {shown.late:.4g}" * (shown.late > 0)
            numbers[f"{place} makespan"] = f"work {shown.work:.4g} + bubble {shown.bubble:.4g}{late}"
            numbers[f"{place} holds"] = f"{max(shown.peaks):.3g} micro-batch{'es' * (max(shown.peaks) != 1)}"
        try:
            here = self.scenario
        except ValueError as error:
            return Said(where, numbers, f"{_limits(both, self)}; no prediction: {error}")
        note = f"The step: the upper schedule on {self.model}, whatever F, I, W and message are."
        limit = _limits(both, self) if here.fits else self.memory("no single control helps")
        return Said(where, numbers, limit, here.fits, here, note)

    def change(self, other: "Schedules") -> str:
        """Writes a schedule as papers do."""
        change = super().change(other)
        return theory.WRITTEN.get(change, change)

    def code(self) -> str:
        """Returns Python that prints both bubbles and, where there is one, the step."""
        both = {place: (name, self.stages(name)) for place, name in (("upper", self.first), ("lower", self.second))}
        lines = _CODE.format(both=str(both).replace("'", '"'), work=self.m * (self.F + self.I + self.W), **self._asdict())
        return lines + (self.scenario.code() if self.possible else "")


_named, _program = functools.lru_cache(8)(schedules.named), functools.lru_cache(8)(program.program)


@functools.lru_cache(maxsize=256)
def _run(name: str, p: int, m: int, v: int, message: float, *times: float) -> Run:
    schedule = _named(name, p, m, v)
    F, I, W = (each / (schedule.stages / p) for each in times)  # noqa: E741
    return run(schedule, replay(_program(schedule), program.Times(F, I, W, latency=message)))


class Two(Charts, Board):
    """Two schedules under each other on one time axis."""

    setting, over, curves = Schedules, "pp", (MEMORY, BUBBLE, MFU)

    @style.styled
    def __init__(self):
        super().__init__(2, 4, 0.281, "time (in units of F, I and W)", actions.KINDS, True, True, wide=6.45)
        width("".join([*NAMES, *theory.FORMS.values()]) + "0123456789=≠.;", 1)  # their outlines are made now, not in a redraw

    def idle(self, first: str, second: str, **_) -> tuple[str, ...]:
        """Names the controls that do nothing."""
        return () if "interleaved" in (first, second) else ("v",)

    def draw(self, now: Schedules) -> None:
        each = [(name, now.run(name)) for name in (now.first, now.second)]
        self.show([(title(name, shown, now), shown) for name, shown in each])


def explorer(measure: Measure | None = None) -> Explorer:
    """Returns the explorer of chapter 05. measure: what "Measure it" runs, manyranks.small's pipeline."""
    presets = {"GPipe's memory": {"first": "gpipe", "second": "1f1b", "m": 32}}
    presets["interleaved"] = {"second": "interleaved", "v": 4}
    presets["slow messages"] = presets["interleaved"] | {"message": 0.5}
    presets["zero bubble"] = {"first": "zb-h1", "second": "zb-h2", "pp": 8, "m": 16}
    presets["ZB-V"] = {"first": "zb-v", "second": "1f1b", "m": 16}
    names = {"first": choice("upper schedule", "1f1b", NAMES), "second": choice("lower schedule", "zb-h1", NAMES)}
    shared = controls({"model": MODELS, "tp": (1, 2, 4, 8)}, model="llama3-8b", cluster="h100-dgx", tp=1)
    counts = {"pp": slider("pipeline ranks p", 4, 1, 8), "m": slider("micro-batches m", 8, 1, 32)}
    counts["v"] = slider("v (interleaved only)", 2, 1, 4)
    times = {kind: value_slider(KINDS[kind].label, 1.0, _TIMES, "{:g}".format) for kind in "FIW"}
    times["message"] = value_slider("message", 0.0, _MESSAGES, "{:g}".format)
    return Explorer(Two(), presets, measure, **names, **shared, **counts, **times)


def title(name: str, shown: Run, now: Schedules) -> str:
    """Says the bubble, and whether it's what the papers' form gives."""
    expected = now.expected(name)
    same = "=" if expected is not None and abs(expected - shown.bubble) < 1e-6 * shown.work else "≠"
    form = "" if expected is None else f" {same} {theory.FORMS[name]}"
    halves = " (stacked: at once)" * (name == "dualpipe-v")
    return f"{theory.WRITTEN[name]}{halves}: bubble {shown.bubble:.4g}{form}"


def _limits(both: list[tuple[str, Run]], now: Schedules) -> str:
    said = {theory.WRITTEN[name]: _limit(name, shown, now) for name, shown in both}
    words = "; ".join(f"{name}: {limit}" for name, limit in said.items()) if len(set(said.values())) > 1 else min(said.values())
    (_, one), (name, other) = sorted(both, key=lambda each: each[1].late)
    if other.late == one.late or abs(one.makespan - other.makespan) > 1e-9:
        return words
    late = f"{theory.WRITTEN[name]}'s late start of {other.late:.4g}"
    return f"{words}; the makespans are equal, but {late} counts in the first step only"


def _limit(name: str, shown: Run, now: Schedules) -> str:
    """Names the reason of this schedule's bubble."""
    if now.pp == 1:
        return "compute: one rank sends nothing"
    if name == "naive":
        return "one rank works at a time"
    if shown.bubble < 0.005 * shown.work:
        return "compute" + " (the price is memory)" * (max(shown.peaks) > now.pp)
    without = now._replace(message=0.0).run(name).bubble
    if without <= shown.bubble / 2:
        return f"messages (bubble {without:.4g} without them)"
    if now.m < (fewest := theory.fewest(name, now.pp)):
        return f"too few micro-batches (it's designed for m ≥ {fewest})"
    third, whole, besides = (now.F + now.I + now.W) / 3, -(-now.m // now.pp) * now.pp, " and no messages" * (now.message > 0)
    best = now._replace(F=third, I=third, W=third, m=whole if name == "interleaved" else now.m)
    if (bubble := best.expected(name)) <= shown.bubble / 2:
        return f"unequal times (bubble {bubble:.4g} with F = I = W{besides})"
    if best.m != now.m and now.v > 1:
        return f"p does not divide m (bubble {bubble:.4g} with m = {whole}{besides})"
    if without < (1 - MUCH) * shown.bubble:
        rest = f"messages {shown.bubble - without:.4g}"
        return f"warm-up and drain {without:.4g}, {rest} (more micro-batches dilute only the warm-up and drain)"
    return "warm-up and drain (more micro-batches dilute them)"
