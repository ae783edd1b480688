"""The batch size that is worth it: the noise of gradients, and steps against examples.

B: examples (or tokens) of the global batch, in whatever unit the critical batch is given; S: steps; E: examples, E = S·B.
Source: McCandlish et al., "An Empirical Model of Large-Batch Training", arXiv 1812.06162.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

from manyranks.theory.names import not_negative, positive


class Noise(NamedTuple):
    """The noise of gradients, as two batch sizes tell it.

    squared_norm: |G|² of the true gradient
    variance: tr(Σ) of one example's gradient
    Both are unbiased estimates, and may be negative by chance where they come from few steps.
    """

    squared_norm: float
    variance: float

    @property
    def scale(self) -> float:
        """The simple noise scale B_noise = tr(Σ)/|G|², in examples.

        Infinite where the estimate of |G|² is 0 or less: no gradient stands out of the noise. Else negative where the
        estimate of tr(Σ) is negative. Either says that there were too few steps.
        Source: section 2.2.
        """
        return self.variance / self.squared_norm if self.squared_norm > 0 else math.inf


def noise(small: float, large: float, squared_small: float, squared_large: float) -> Noise:
    """Estimates noise from one gradient at two batch sizes, such as one rank's shard and the batch of all ranks.

    small, large: examples
    squared_small: the mean over the small batches of their gradients' squared norms
    squared_large: the squared norm of the large batch's gradient
    Gradients are means over batches, not sums. Raises ValueError unless 0 < small < large. Source: appendix A.1.
    """
    if not 0 < small < large < math.inf:
        raise ValueError(f"small={small}, large={large}: two batch sizes are needed, 0 < small < large")
    squared = (large * squared_large - small * squared_small) / (large - small)
    return Noise(squared, (squared_small - squared_large) / (1 / small - 1 / large))


def mean_noise(estimates: Iterable[Noise]) -> Noise:
    """The mean of several steps' estimates, part by part: a mean of their ratios would be biased. Source: appendix A.1.

    Raises ValueError where there is none.
    """
    if not (estimates := list(estimates)):
        raise ValueError("estimates is empty: give the noise of one step or more")
    return Noise(*(math.fsum(part) / len(estimates) for part in zip(*estimates, strict=True)))


def steps(batch: float, critical: float, fewest: float = 1.0) -> float:
    """Steps to a given loss, S = S_min(1 + B_crit/B); fewest: S_min, with an infinite batch. Section 2.3."""
    positive(batch=batch, fewest=fewest)
    not_negative(critical=critical)
    return fewest * (1 + critical / batch)


def examples(batch: float, critical: float, fewest: float = 1.0) -> float:
    """Examples to a given loss, E = E_min(1 + B/B_crit); fewest: E_min, with the smallest batch. Section 2.3."""
    positive(batch=batch, critical=critical, fewest=fewest)
    return fewest * (1 + batch / critical)


def stable_rate(staleness: int) -> float:
    """Computes the largest learning rate, times the curvature, at which SGD with gradients this old still converges.

    staleness: updates between the weights that a gradient was made from and the one that uses it; 0 for ordinary SGD
    Raises ValueError for a number below 0.
    Source: Levin and May, "A note on difference-delay equations", Theoretical Population Biology 9, 1976.
    """
    if staleness < 0:
        raise ValueError(f"staleness={staleness}: a gradient can't be newer than the weights; give 0 or more")
    return 2 * math.sin(math.pi / (2 * (2 * staleness + 1)))
