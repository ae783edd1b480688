"""theory.batch: the noise scale of gradients known in closed form, the trade of steps for examples, what more ranks gain."""

import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyranks.theory import batch

sizes = st.floats(1, 1e6)


@given(sizes, st.floats(1.5, 1e3), st.floats(0, 1e3), st.floats(1e-3, 1e3))
def test_exact_expectations_give_back_the_norm_and_the_variance(small, times, variance, squared):
    """The expected squared norm of a mean over B examples is |G|² + tr(Σ)/B."""
    large = small * times
    found = batch.noise(small, large, squared + variance / small, squared + variance / large)
    assert found.squared_norm == pytest.approx(squared, rel=1e-6, abs=1e-6 * (squared + variance))
    assert found.variance == pytest.approx(variance, rel=1e-6, abs=1e-6 * (squared * large + variance))


def gradients(n: int, shard: int, g: list[float], sigma: float, rng: random.Random) -> batch.Noise:
    """One step of n ranks whose examples' gradients are g plus noise of this standard deviation in each coordinate."""
    means = [[x + rng.gauss(0, sigma / math.sqrt(shard)) for x in g] for _ in range(n)]
    whole = [statistics.fmean(column) for column in zip(*means, strict=True)]
    of_ranks = statistics.fmean(sum(x * x for x in mean) for mean in means)
    return batch.noise(shard, n * shard, of_ranks, sum(x * x for x in whole))


@pytest.mark.parametrize("n", [2, 4])
def test_noise_of_ranks_gradients_is_that_of_the_distribution(n):
    g, sigma, rng = [0.5, -1.0, 2.0, 0.0], 3.0, random.Random(1)
    found = batch.mean_noise(gradients(n, 8, g, sigma, rng) for _ in range(4000))
    squared, variance = sum(x * x for x in g), len(g) * sigma**2
    assert found.squared_norm == pytest.approx(squared, rel=0.05)
    assert found.variance == pytest.approx(variance, rel=0.05)
    assert found.scale == pytest.approx(variance / squared, rel=0.08)


def test_both_estimates_are_unbiased_where_there_is_no_gradient_at_all():
    rng = random.Random(2)
    found = [gradients(4, 2, [0.0] * 3, 1.0, rng) for _ in range(4000)]
    assert min(e.squared_norm for e in found) < 0 < max(e.squared_norm for e in found)
    assert abs(batch.mean_noise(found).squared_norm) < 0.03
    assert batch.mean_noise(found).variance == pytest.approx(3, rel=0.05)


def test_without_a_gradient_the_noise_scale_is_infinite():
    assert batch.Noise(-0.1, 2.0).scale == batch.Noise(0.0, 2.0).scale == math.inf
    assert batch.Noise(4.0, 2.0).scale == 0.5


def test_the_mean_noise_averages_the_parts_and_not_the_ratios():
    assert batch.mean_noise([batch.Noise(1, 2), batch.Noise(3, 10)]) == (2, 6)


@given(st.floats(1e-2, 1e6), st.floats(1, 1e5), st.floats(1, 1e5))
def test_steps_times_batch_are_the_examples_and_lie_on_the_hyperbola(b, fewest_steps, critical):
    fewest_examples = critical * fewest_steps
    s, e = batch.steps(b, critical, fewest_steps), batch.examples(b, critical, fewest_examples)
    assert s * b == pytest.approx(e)
    assert (s / fewest_steps - 1) * (e / fewest_examples - 1) == pytest.approx(1, rel=1e-3)


@pytest.mark.parametrize("staleness", [0, 1, 2, 5])
def test_old_gradients_converge_below_the_stable_rate_and_not_above(staleness):
    def left(share):
        weights = [1.0] * (staleness + 1)
        for _ in range(4000):
            weights.append(weights[-1] - share * batch.stable_rate(staleness) * weights[-1 - staleness])
        return abs(weights[-1])

    assert left(0.98) < 0.01 < 100 < left(1.02)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: batch.noise(8, 8, 1, 1), "small=8, large=8: two batch sizes"),
        (lambda: batch.noise(0, 8, 1, 1), "small=0"),
        (lambda: batch.noise(8, 4, 1, 1), "0 < small < large"),
        (lambda: batch.mean_noise([]), "estimates is empty"),
        (lambda: batch.stable_rate(-1), "staleness=-1"),
        (lambda: batch.steps(1, 1, 0), "fewest=0"),
        (lambda: batch.examples(1, math.inf), "critical=inf"),
    ],
)
def test_numbers_that_mean_nothing_are_refused(call, text):
    with pytest.raises(ValueError, match=text.replace("(", r"\(")):
        call()
