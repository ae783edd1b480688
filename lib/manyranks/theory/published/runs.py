"""A published run: its configuration, what its authors measured, and what theory says of it."""

from dataclasses import dataclass

from manyranks.theory import flops, step
from manyranks.theory.architecture import ModelShape
from manyranks.theory.cluster import Cluster
from manyranks.theory.kernels import DEFAULT, Constants
from manyranks.theory.plan import Plan

SC21, KORTHIKANTI = "SC21 Table 1", "Korthikanti Table 5"
LLAMA3, DEEPSEEK = "Llama 3 Table 4", "DeepSeek-V3 (ISCA'25 Table 4)"
TORCHTITAN, FOUNDRY = "torchtitan, H100", "llm-foundry, H100"


@dataclass(frozen=True)
class Row:
    """One run. measured: seconds a step; tokens/s of an accelerator; or its FLOP/s under `counting`.

    It holds nothing that was measured but this; predict() is given the configuration alone.
    """

    table: str
    name: str
    shape: ModelShape
    plan: Plan
    cluster: Cluster
    measured: float
    unit: str  # "s", "tokens/s" or "TFLOP/s"
    counting: str = "full"
    recompute: str = "none"  # counted a second time in FLOP/s
    memory: float = 0.0  # bytes of the allocator's peak on the fullest accelerator, if they're printed

    def predict(self, constants: Constants = DEFAULT) -> float:
        time = step.estimate(self.shape, self.plan, self.cluster, constants)
        if self.unit == "s":
            return time.seconds
        if self.unit == "tokens/s":
            return time.tokens_per_second / self.plan.gpus
        each = flops.hardware_per_token(self.shape, self.plan.seq, self.recompute, self.counting)
        return each * time.tokens_per_second / self.plan.gpus / 1e12

    def error(self, constants: Constants = DEFAULT) -> float:
        """Predicted ÷ measured − 1, of what is printed."""
        return self.predict(constants) / self.measured - 1

    def time_error(self) -> float:
        """The same of the step's time, which is the inverse of a rate."""
        return self.error() if self.unit == "s" else self.measured / self.predict() - 1
