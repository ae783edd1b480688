"""What imbalance costs: one layer waits for its fullest rank."""

from typing import NamedTuple

from manyranks.theory import checks, passes
from manyranks.theory.architecture import ModelShape
from manyranks.theory.cluster import Cluster
from manyranks.theory.kernels import DEFAULT, Constants
from manyranks.theory.passes import Both
from manyranks.theory.plan import Plan


class Paced(NamedTuple):
    """One micro-batch in one layer with experts. fullest: the rank for which all wait; balanced: any rank, if all had the mean
    load."""

    fullest: Both
    balanced: Both

    @property
    def forward(self) -> float:
        return self.fullest.forward.seconds

    @property
    def backward(self) -> float:
        return self.fullest.backward.seconds

    @property
    def seconds(self) -> float:
        return self.fullest.seconds

    @property
    def waiting(self) -> float:
        """Seconds that a rank with the mean load waits, forward and backward."""
        return self.fullest.seconds - self.balanced.seconds


def layer_seconds(
    shape: ModelShape, plan: Plan, cluster: Cluster, imbalance: float = 1.0, constants: Constants = DEFAULT
) -> Paced:
    """Attention and experts of one layer, where the fullest rank has `imbalance` times the mean load.

    The products of its experts and the bytes that it receives and sends back are so many times a balanced load's; no message
    hides behind another micro-batch, as under DualPipe (step.estimate does that). Raises ValueError for a plan that does not
    fit, a shape without experts and an imbalance that cannot be.
    """
    checks.is_shape(shape)
    found = (passes.of_layer(shape, plan, cluster, constants, moe=True, imbalance=each) for each in (imbalance, 1.0))
    return Paced(*found)
