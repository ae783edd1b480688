"""Published peaks of memory: what each run was, what the allocator held at most, and what theory says of it.

torchtitan prints its own. For this course, benchmarks/one_gpu.py measured those of one H100; one H200 used as many bytes, so
that it says no more.
"""

from typing import NamedTuple

from manyranks.theory import memory
from manyranks.theory.architecture import ModelShape
from manyranks.theory.plan import Plan
from manyranks.theory.published import one_gpu, steps


class MeasuredPeak(NamedTuple):
    """A run, and the bytes that the allocator held at most on its fullest accelerator."""

    table: str
    name: str
    shape: ModelShape
    plan: Plan
    measured: float

    def predict(self) -> int:
        """Returns the bytes, from the configuration alone."""
        return memory.peak(self.shape, self.plan).total

    def error(self) -> float:
        """Predicted ÷ measured − 1."""
        return self.predict() / self.measured - 1


def rows() -> list[MeasuredPeak]:
    printed = [MeasuredPeak(row.table, row.name, row.shape, row.plan, row.memory) for row in steps.rows() if row.memory]
    return printed + [MeasuredPeak("one H100", run.name, run.shape, run.plan, run.held) for run in one_gpu.runs("H100")]
