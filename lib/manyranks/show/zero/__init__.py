"""Chapter 03's pictures: who holds what, memory over a step, and what each stage of ZeRO holds and sends."""

from manyranks.show.zero.explorer import explorer
from manyranks.show.zero.figures import stage_1, step_over_time, unit_by_unit, who_holds_what
from manyranks.show.zero.memory import steps_over_time
from manyranks.show.zero.units import carefully, late_gradients, whole_units

__all__ = [
    "carefully",
    "explorer",
    "late_gradients",
    "stage_1",
    "step_over_time",
    "steps_over_time",
    "unit_by_unit",
    "who_holds_what",
    "whole_units",
]
