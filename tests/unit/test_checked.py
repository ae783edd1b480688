"""What is said of a prediction: how far the closest published runs were off, or what none of them has."""

import math

import pytest

from manyranks.theory import Plan, clusters, models, planner, step
from manyranks.theory.kernels import Constants
from manyranks.theory.published import confidence, error_bars, steps

FSDP = {"dp": 128, "zero": 3, "seq": 8192, "microbatch": 2, "precision": "bf16-fp32-gradients"}


def said(model, cluster, **plan):
    return confidence(step.estimate(models[model], Plan(**plan), clusters[cluster]))


def test_runs_of_the_same_stack_and_chip_that_use_as_much_are_the_error_bar():
    found = said("llama3-8b", "grand-teton", stack="torchtitan", **FSDP)
    own = [row for row in steps.rows() if row.plan.stack == "torchtitan"]
    assert found.runs == min(error_bars.CLOSEST, len(own))
    assert 0.02 < found.error < 0.15
    assert str(found) == f"± {found.error:.0%} ({found.runs} runs)"


def test_the_closest_runs_come_first(monkeypatch):
    monkeypatch.setattr(error_bars, "CLOSEST", 1)
    for row in steps.rows():
        found = confidence(step.estimate(row.shape, row.plan, row.cluster))
        twins = [abs(other.time_error()) for other in steps.rows() if same_sizes(row, other)]
        assert found.runs == 1
        assert any(found.error == pytest.approx(error) for error in twins), row.name


def same_sizes(one, other):
    sizes = [(row.shape.hidden, row.plan.seq, row.plan.microbatch / row.plan.cp, row.plan.gpus) for row in (one, other)]
    return sizes[0] == sizes[1] and one.plan.stack == other.plan.stack


@pytest.mark.parametrize(
    ("model", "cluster", "plan", "words"),
    [
        ("llama3-8b", "h100-dgx", FSDP, "no published run of megatron-core on H100 with ZeRO-3"),
        ("llama3-8b", "b200-dgx", FSDP, "no published run on B200"),
        ("llama3-8b", "a100-dgx", FSDP | {"stack": "torchtitan"}, "no published run of torchtitan on A100"),
        (
            "gpt2",
            "h100-dgx",
            {"dp": 2},
            "no published run of megatron-core on H100 of similar size",
        ),
        ("llama3-8b", "tpu-v5p", {"dp": 64}, "no published run on TPU v5p"),
    ],
)
def test_what_nobody_has_checked_is_said(model, cluster, plan, words):
    found = said(model, cluster, **plan)
    assert (found.runs, str(found)) == (0, f"not checked: {words}")
    assert math.isnan(found.error)


def test_the_words_are_in_what_is_printed():
    found = planner.search(models["llama3-8b"], clusters["b200-dgx"], gpus=8, batch=64, tp=1, pp=1, cp=1)[0]
    assert "checked='not checked: no published run on B200'" in repr(found)


ON_TITAN = {"stack": "torchtitan", "dp": 64, "zero": 3, "seq": 8192}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"offload": "all"}, "torchtitan on H100 with offloading"),
        ({"dp_shard": 8}, "torchtitan on H100 with HSDP"),
        ({"flash": False}, "torchtitan on H100 with stored scores"),
        ({"zero": 2}, "torchtitan on H100 with ZeRO-2"),
        ({"overlap": False}, "torchtitan on H100 with no overlap"),
        ({"cp": 2, "context": "ulysses"}, "torchtitan on H100 with Ulysses"),
        ({"pp": 2, "schedule": "zb-h1", "batch": 256}, "torchtitan on H100 with zb-h1"),
    ],
)
def test_what_no_run_of_the_stack_uses_is_not_checked(change, words):
    assert str(said("llama3-8b", "h100-dgx", **ON_TITAN | change)) == f"not checked: no published run of {words}"


def test_other_constants_chips_and_links_are_not_checked():
    shape, plan, cluster = models["llama3-8b"], Plan(**ON_TITAN), clusters["h100-dgx"]
    assert "Constants(matmul=0.5" in str(confidence(step.estimate(shape, plan, cluster, Constants(matmul=0.5))))
    for other in (cluster.with_link("network", bandwidth=1e9), cluster.with_link("node", bandwidth=1e9)):
        assert str(confidence(step.estimate(shape, plan, other))).endswith("of torchtitan on such a chip, with such links")


def test_errors_in_one_direction_are_no_error_bar():
    long = Plan(dp=1, cp=8, batch=1, seq=262144, zero=3, precision="fp8", recompute="full", stack="torchtitan")
    found = confidence(step.estimate(models["llama3-8b"], long, clusters["grand-teton"]))
    assert found.most < -0.1
    assert str(found) == f"{-found.most:.0%} to {-found.least:.0%} too short in {found.runs} runs"
