"""Published times of one layer: arXiv 2205.05198, Table 4, the 22B model's layer on eight A100s, with what was run."""

from dataclasses import dataclass
from typing import NamedTuple

from manyranks.theory import pace, published
from manyranks.theory.cluster import clusters
from manyranks.theory.kernels import DEFAULT, Constants
from manyranks.theory.plan import Plan
from manyranks.theory.shapes import models

TABLE, SHAPE, CLUSTER = "Korthikanti Table 4", "megatron-22b", "a100-dgx"
# Megatron-LM in 2022: no flash attention; the gradient's all-reduce, and the second gather of an input, travel while a weight's
# or an input's gradient is computed (sections 4.2.2 and 6.1).
_COMMON = {"tp": 8, "seq": 2048, "microbatch": 4, "precision": "fp16", "flash": False}
_RUNS = {
    "baseline, no recompute": ("none", False),
    "sequence parallelism": ("none", True),
    "baseline, full recompute": ("full", False),
    "baseline, selective recompute": ("selective", False),
    "selective + sequence parallelism": ("selective", True),
}


class Times(NamedTuple):
    """Seconds; overhead: of both together over the baseline's, a share, None for the baseline itself."""

    forward: float
    backward: float
    overhead: float | None

    @property
    def both(self) -> float:
        return self.forward + self.backward


@dataclass(frozen=True)
class Row:
    """One experiment; measured: what the table prints."""

    name: str
    plan: Plan
    measured: Times

    def predict(self, constants: Constants = DEFAULT) -> Times:
        """From the plan alone."""
        own, base = (_seconds(plan, constants) for plan in (self.plan, _plan(*next(iter(_RUNS.values())))))
        return Times(*own, None if self.measured.overhead is None else sum(own) / sum(base) - 1)


def rows() -> list[Row]:
    return [_row(printed) for printed in published.rows("korthikanti_layer_times")]


def _row(printed: dict[str, str]) -> Row:
    overhead = float(printed["overhead_pct"]) / 100 if printed["overhead_pct"] else None
    measured = Times(float(printed["forward_ms"]) / 1e3, float(printed["backward_ms"]) / 1e3, overhead)
    return Row(printed["experiment"], _plan(*_RUNS[printed["experiment"]]), measured)


def _plan(recompute: str, sequence_parallel: bool) -> Plan:
    return Plan(recompute=recompute, sequence_parallel=sequence_parallel, **_COMMON)


def _seconds(plan: Plan, constants: Constants) -> tuple[float, float]:
    found = pace.of_layer(models[SHAPE], plan, clusters[CLUSTER], constants)
    return found.forward.seconds, found.backward.seconds
