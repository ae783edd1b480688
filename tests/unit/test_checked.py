"""Words about a prediction: the errors that the closest published runs lie between, or what none of them has."""

import math
from dataclasses import replace

import pytest

from manyranks.theory import Plan, clusters, memory, models, planner, step
from manyranks.theory.kernels import Constants
from manyranks.theory.published import confidence, error_bars, peak_confidence, steps

FSDP = {"dp": 128, "zero": 3, "seq": 8192, "microbatch": 2, "precision": "bf16-fp32-gradients"}


def said(model, cluster, **plan):
    return confidence(step.estimate(models[model], Plan(**plan), clusters[cluster]))


def test_the_closest_runs_are_the_error_bar():
    found = said("llama3-8b", "grand-teton", stack="torchtitan", **FSDP)
    assert found.runs == error_bars.CLOSEST
    assert 0.05 < found.error < 0.15
    short, long = found.ends(10.0)
    assert (10 / short - 1, 10 / long - 1) == pytest.approx((found.most, found.least))
    assert str(found) == f"{short / 10 - 1:+.0%} to {long / 10 - 1:+.0%} (9 runs)".replace("-", "−")


def test_bars_hold_four_of_five_runs_of_tables_that_they_were_not_made_on():
    bars = [(row, bar) for row, bar in error_bars.without_own_table() if not bar.missing]
    assert sum(bar.least <= row.time_error() <= bar.most for row, bar in bars) / len(bars) >= 0.8
    assert len(bars) >= 0.5 * len(steps.rows())
    assert all(bar.error >= error_bars.LEAST for _, bar in bars)


def test_a_plan_that_is_further_away_has_a_wider_bar():
    near, far = (said("llama3-8b", "grand-teton", stack="torchtitan", **FSDP | {"dp": dp}) for dp in (128, 1024))
    assert near.error < far.error


@pytest.mark.parametrize(
    ("model", "cluster", "plan", "words"),
    [
        (
            "llama3-8b",
            "a100-dgx",
            FSDP | {"stack": "torchtitan"},
            "no published run of FSDP on A100, on such a chip with such links",
        ),
        ("llama3-8b", "tpu-v5p", {"dp": 64}, "no published run of Megatron on TPU v5p, on such a chip with such links"),
        ("gpt2", "h100-dgx", {"dp": 2, "seq": 256}, "no published run of Megatron on H100 like this; 3 would say something"),
    ],
)
def test_what_nobody_has_checked_is_said(model, cluster, plan, words):
    found = said(model, cluster, **plan)
    assert (found.runs, str(found)) == (0, f"not checked: {words}")
    assert math.isnan(found.error)


def test_the_words_are_in_what_is_printed():
    found = planner.search(models["llama3-8b"], clusters["tpu-v5p"], gpus=8, batch=64, tp=1, pp=1, cp=1)[0]
    assert "checked='not checked: no published run of Megatron on TPU v5p" in repr(found)


ON_TITAN = {"stack": "torchtitan", "dp": 64, "zero": 3, "seq": 8192}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"offload": "all"}, "offloading"),
        ({"dp_shard": 8}, "HSDP"),
        ({"flash": False}, "stored scores"),
        ({"zero": 2}, "ZeRO-2"),
        ({"overlap": False}, "no overlap"),
        ({"cp": 2, "context": "ulysses"}, "Ulysses"),
        ({"pp": 2, "schedule": "zb-h1", "batch": 256}, "zb-h1"),
    ],
)
def test_what_no_run_of_the_stack_uses_is_not_checked(change, words):
    assert (
        str(said("llama3-8b", "h100-dgx", **ON_TITAN | change)) == f"not checked: no published run of FSDP on H100 with {words}"
    )


def test_other_constants_chips_and_links_are_not_checked():
    shape, plan, cluster = models["llama3-8b"], Plan(**ON_TITAN), clusters["h100-dgx"]
    assert "Constants(matmul=0.5" in str(confidence(step.estimate(shape, plan, cluster, Constants(matmul=0.5))))
    for other in (cluster.with_link("network", bandwidth=1e9), cluster.with_link("node", bandwidth=1e9)):
        assert str(confidence(step.estimate(shape, plan, other))).endswith("on such a chip with such links")


def test_a_bar_that_does_not_hold_the_prediction_says_so():
    assert str(error_bars.Checked(9, "", -0.2, -0.1)) == "+11% to +25% (9 runs)"


def test_a_peak_s_bar_comes_from_the_closest_peaks_on_whatever_chip():
    shape, plan = models["llama3-8b"], Plan(**FSDP, stack="torchtitan")
    found = peak_confidence(shape, plan)
    assert found.runs == error_bars.CLOSEST
    assert found.least <= 0 <= found.most
    assert found.error >= error_bars.LEAST
    assert peak_confidence(shape, replace(plan, overlap=False)) == found  # it holds no bytes
    least, most = found.ends(100.0)
    assert str(found) == f"{least / 100 - 1:+.0%} to {most / 100 - 1:+.0%} (9 runs)".replace("-", "−")


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({"dp": 64}, "no published peak of Megatron"),
        (ON_TITAN | {"offload": "all"}, "no published peak of FSDP with offloading"),
        (ON_TITAN | {"zero": 2}, "no published peak of FSDP with ZeRO-2"),
        (ON_TITAN | {"dp": 2**16, "tp": 8, "microbatch": 256}, "2 published peaks of FSDP like this; 3 would say something"),
    ],
)
def test_a_peak_that_nobody_has_checked_says_so(plan, words):
    assert str(peak_confidence(models["llama3-8b"], Plan(**plan))) == f"not checked: {words}"


def test_a_plan_fits_barely_where_the_memory_is_within_the_error_bar_of_its_peak():
    shape, plan = models["llama3-8b"], Plan(**FSDP, stack="torchtitan")
    held = memory.peak(shape, plan).total
    _, most = peak_confidence(shape, plan).ends(held)
    said = [error_bars.barely_fits(shape, plan, room) for room in (held - 1, held, most * 0.999, most * 1.001)]
    assert said == ["", *["fits by less than the error bar"] * 2, ""]
    assert error_bars.barely_fits(shape, Plan(dp=128), memory.peak(shape, Plan(dp=128)).total) == ""  # nobody has checked
