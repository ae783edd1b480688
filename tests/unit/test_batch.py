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


@pytest.mark.parametrize("b", [0.1, 1, 7.0, 1e5])
def test_the_best_step_maximises_the_expected_gain_on_a_quadratic(b):
    """Of L = x²/2 at x = 1 with noise of variance Σ: a step ε gains ε − ε²(1 + Σ/B)/2, most at ε = 1/(1 + Σ/B)."""
    noise_scale = 5.0

    def gain(step: float) -> float:
        return step - step**2 * (1 + noise_scale / b) / 2

    best = batch.step_gain(b, noise_scale)
    assert gain(best) > max(gain(0.99 * best), gain(1.01 * best))
    assert gain(best) / 0.5 == pytest.approx(best)  # of an infinite batch's gain, the same share


def test_at_the_noise_scale_a_step_gains_half():
    assert batch.step_gain(300, 300) == 0.5
    assert batch.step_gain(300, 0) == 1.0


@given(st.floats(1e-2, 1e6), st.floats(1, 1e5), st.floats(1, 1e5))
def test_steps_times_batch_are_the_examples_and_lie_on_the_hyperbola(b, fewest_steps, critical):
    fewest_examples = critical * fewest_steps
    assert batch.critical_batch(fewest_steps, fewest_examples) == pytest.approx(critical)
    s, e = batch.steps(b, critical, fewest_steps), batch.examples(b, critical, fewest_examples)
    assert s * b == pytest.approx(e)
    assert (s / fewest_steps - 1) * (e / fewest_examples - 1) == pytest.approx(1, rel=1e-3)
    assert batch.examples_for(2 * fewest_steps, fewest_steps, fewest_examples) == pytest.approx(2 * fewest_examples)


def test_the_hyperbola_is_symmetric():
    assert batch.examples_for(300, 100, 5000) == pytest.approx(7500)
    assert batch.examples_for(150, 100, 5000) == pytest.approx(15000)


def test_the_critical_batch_of_language_models_grows_as_the_loss_falls():
    assert batch.critical_tokens(1.0) == 2e8
    assert batch.critical_tokens(2.0) == pytest.approx(2e8 / 2 ** (1 / 0.21))
    assert batch.critical_tokens(3.0) == pytest.approx(1.07e6, rel=0.01)


@pytest.mark.parametrize("staleness", [0, 1, 2, 5])
def test_old_gradients_converge_below_the_stable_rate_and_not_above(staleness):
    def left(share):
        weights = [1.0] * (staleness + 1)
        for _ in range(4000):
            weights.append(weights[-1] - share * batch.stable_rate(staleness) * weights[-1 - staleness])
        return abs(weights[-1])

    assert left(0.98) < 0.01 < 100 < left(1.02)


def test_efficiency_is_the_share_that_computes():
    assert batch.efficiency(3.0, 1.0) == 0.75
    assert batch.efficiency(3.0, 0.0) == 1.0


def test_small_batches_speed_up_with_the_ranks_and_large_ones_stop_at_the_critical_batch():
    assert batch.speed_up(64, 1, 1e9, 1.0, 0.0) == pytest.approx(64, rel=1e-4)
    assert batch.speed_up(64, 1, 1e9, 1.0, 0.25) == pytest.approx(64 * 0.8, rel=1e-4)
    assert batch.speed_up(10**9, 1, 100, 1.0, 0.0) == pytest.approx(101)
    assert batch.speed_up(100, 1, 100, 1.0, 0.0) == pytest.approx(101 / 2)
    assert batch.speed_up(1, 8, 100, 1.0, 0.5) == 1.0


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: batch.noise(8, 8, 1, 1), "small=8, large=8: two batch sizes"),
        (lambda: batch.noise(0, 8, 1, 1), "small=0"),
        (lambda: batch.noise(8, 4, 1, 1), "0 < small < large"),
        (lambda: batch.mean_noise([]), "estimates is empty"),
        (lambda: batch.stable_rate(-1), "staleness=-1"),
        (lambda: batch.step_gain(0, 1), "batch=0: must be a number above 0"),
        (lambda: batch.step_gain(1, -1), "noise_scale=-1: must be 0 or more"),
        (lambda: batch.steps(1, 1, 0), "fewest=0"),
        (lambda: batch.examples(1, math.inf), "critical=inf"),
        (lambda: batch.examples_for(100, 100, 5), "steps=100: no batch reaches the loss in S_min=100"),
        (lambda: batch.critical_batch(0, 5), "fewest_steps=0"),
        (lambda: batch.critical_tokens(-1), "loss=-1"),
        (lambda: batch.efficiency(0, 1), "compute=0"),
        (lambda: batch.speed_up(0, 1, 1, 1, 1), "ranks=0"),
    ],
)
def test_numbers_that_mean_nothing_are_refused(call, text):
    with pytest.raises(ValueError, match=text.replace("(", r"\(")):
        call()
