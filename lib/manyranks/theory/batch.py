"""How large a batch is worth it: the noise of gradients, steps against examples, and what more data-parallel ranks gain.

B: examples (or tokens) of the global batch, in whatever unit the critical batch is given; S: steps; E: examples, E = S·B.
Source: McCandlish et al., "An Empirical Model of Large-Batch Training", arXiv 1812.06162.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple


class Noise(NamedTuple):
    """What two batch sizes tell of the gradient: squared_norm, |G|² of the true one; variance, tr(Σ), of one example's.

    Both are unbiased estimates, and may be negative by chance where they come from few steps.
    """

    squared_norm: float
    variance: float

    @property
    def scale(self) -> float:
        """The simple noise scale B_noise = tr(Σ)/|G|², in examples.

        Infinite where the estimate of |G|² is 0 or less: no gradient stands out of the noise. Else negative where that of tr(Σ)
        is. Either says that there were too few steps.
        Source: section 2.2.
        """
        return self.variance / self.squared_norm if self.squared_norm > 0 else math.inf


def noise(small: float, large: float, squared_small: float, squared_large: float) -> Noise:
    """Noise from the squared norms of one gradient at two batch sizes, such as one rank's shard and the batch of all ranks.

    small, large: examples; squared_small: the mean over the small batches of their gradients' squared norms; squared_large:
    that of the gradient of all. Means over batches, not sums. Source: appendix A.1.
    Raises ValueError unless 0 < small < large.
    """
    if not 0 < small < large < math.inf:
        raise ValueError(f"small={small}, large={large}: two batch sizes are needed, 0 < small < large")
    squared = (large * squared_large - small * squared_small) / (large - small)
    return Noise(squared, (squared_small - squared_large) / (1 / small - 1 / large))


def mean_noise(estimates: Iterable[Noise]) -> Noise:
    """The mean of several steps' estimates, each part by itself: a mean of their ratios would be biased. Source: appendix A.1.

    Raises ValueError where there is none.
    """
    if not (estimates := list(estimates)):
        raise ValueError("estimates is empty: give the noise of one step or more")
    return Noise(*(math.fsum(part) / len(estimates) for part in zip(*estimates, strict=True)))


def step_gain(batch: float, noise_scale: float) -> float:
    """Best learning rate, and loss gained a step, as a share of an infinite batch's: 1/(1 + B_noise/B). Section 2.2."""
    _positive(batch=batch)
    _positive(True, noise_scale=noise_scale)
    return 1 / (1 + noise_scale / batch)


def steps(batch: float, critical: float, fewest: float = 1.0) -> float:
    """Steps to a given loss, S = S_min(1 + B_crit/B); fewest: S_min, those of an infinite batch. Section 2.3."""
    _positive(batch=batch, fewest=fewest)
    _positive(True, critical=critical)
    return fewest * (1 + critical / batch)


def examples(batch: float, critical: float, fewest: float = 1.0) -> float:
    """Examples to a given loss, E = E_min(1 + B/B_crit); fewest: E_min, those of the smallest batch. Section 2.3."""
    _positive(batch=batch, critical=critical, fewest=fewest)
    return fewest * (1 + batch / critical)


def examples_for(steps: float, fewest_steps: float, fewest_examples: float) -> float:
    """Examples that so many steps take: E of (S/S_min − 1)(E/E_min − 1) = 1, section 2.3. Needs more than S_min steps."""
    _positive(fewest_steps=fewest_steps, fewest_examples=fewest_examples)
    if not steps > fewest_steps:
        raise ValueError(f"steps={steps}: no batch reaches the loss in S_min={fewest_steps} steps or fewer")
    return fewest_examples * (1 + 1 / (steps / fewest_steps - 1))


def critical_batch(fewest_steps: float, fewest_examples: float) -> float:
    """B_crit = E_min/S_min, at which training takes twice the fewest steps and twice the fewest examples. Section 2.3."""
    _positive(fewest_steps=fewest_steps, fewest_examples=fewest_examples)
    return fewest_examples / fewest_steps


def critical_tokens(loss: float, at_one: float = 2e8, exponent: float = 0.21) -> float:
    """Tokens of the critical batch of a language model at this loss (nats a token): B*/L^(1/α_B).

    Source: Kaplan et al., arXiv 2001.08361, equation 1.4.
    """
    _positive(loss=loss, at_one=at_one, exponent=exponent)
    return at_one / loss ** (1 / exponent)


def efficiency(compute: float, exposed: float) -> float:
    """Share of a data-parallel step that computes; compute, exposed: seconds, exposed of communication that nothing hides.

    With the batch of a rank kept, examples a second of N ranks ÷ N times those of one.
    """
    _positive(compute=compute)
    _positive(True, exposed=exposed)
    return compute / (compute + exposed)


def speed_up(ranks: int, batch: float, critical: float, compute: float, exposed: float) -> float:
    """Time to a given loss on one rank ÷ that on `ranks`, each with `batch` examples a step: of steps and of communication.

    compute, exposed: seconds of a step. The batch grows with the ranks, so steps get fewer up to about critical/batch ranks.
    """
    _positive(ranks=ranks)
    alone, together = steps(batch, critical), steps(ranks * batch, critical)
    return alone / together * (efficiency(compute, exposed) if ranks > 1 else 1.0)


def stable_rate(staleness: int) -> float:
    """Computes the largest learning rate, times the curvature, at which SGD with gradients this old still converges.

    staleness: updates between the weights that a gradient was made from and the one that uses it; 0 for ordinary SGD
    Raises ValueError for a number below 0.
    Source: Levin and May, "A note on difference-delay equations", Theoretical Population Biology 9, 1976.
    """
    if staleness < 0:
        raise ValueError(f"staleness={staleness}: a gradient can't be newer than the weights; give 0 or more")
    return 2 * math.sin(math.pi / (2 * (2 * staleness + 1)))


def _positive(or_zero: bool = False, **values: float) -> None:
    for name, value in values.items():
        if not (value >= 0 if or_zero else 0 < value < math.inf):
            raise ValueError(f"{name}={value}: must be {'0 or more' if or_zero else 'a number above 0'}")
