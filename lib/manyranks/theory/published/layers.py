"""Published times of one layer: arXiv 2205.05198, Table 4, the 22B model's layer on eight A100s, with what was run."""

from dataclasses import dataclass
from typing import NamedTuple

from manyranks.theory import pace
from manyranks.theory.cluster import clusters
from manyranks.theory.kernels import DEFAULT, Constants
from manyranks.theory.plan import Plan
from manyranks.theory.published import steps
from manyranks.theory.shapes import models

TABLE = "Korthikanti Table 4"


class LayerTimes(NamedTuple):
    """Seconds; overhead: of both together over the baseline's, a share, None for the baseline itself."""

    forward: float
    backward: float
    overhead: float | None

    @property
    def both(self) -> float:
        return self.forward + self.backward


@dataclass(frozen=True)
class Experiment:
    """An experiment; measured: what the table prints."""

    name: str
    plan: Plan
    measured: LayerTimes

    def predict(self, constants: Constants = DEFAULT) -> LayerTimes:
        """Predicts from the plan alone."""
        _, lines = steps.lines(TABLE)
        shape, cluster = models[lines[0]["shape"]], clusters[lines[0]["cluster"]]
        found = [pace.of_layer(shape, plan, cluster, constants) for plan in (self.plan, steps.plan_of(lines[0]))]
        own, base = ((both.forward.seconds, both.backward.seconds) for both in found)
        return LayerTimes(*own, None if self.measured.overhead is None else sum(own) / sum(base) - 1)


def rows() -> list[Experiment]:
    found = []
    for line in steps.lines(TABLE)[1]:
        overhead = float(line["overhead_pct"]) / 100 if "overhead_pct" in line else None
        measured = LayerTimes(float(line["forward_ms"]) / 1e3, float(line["backward_ms"]) / 1e3, overhead)
        found.append(Experiment(line["experiment"], steps.plan_of(line), measured))
    return found
