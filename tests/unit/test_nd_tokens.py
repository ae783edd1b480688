"""The fewest tokens per GPU that let an axis hide what it sends: closed forms, step.estimate, and published rules."""

from itertools import pairwise

import pytest

from manyranks.theory import ModelShape, Plan, context, planner, step
from manyranks.theory.cluster import clusters
from manyranks.theory.nd import formulas, rules, tokens
from manyranks.theory.shapes import models

H100 = clusters["h100-dgx"]
RATE, NODE, NETWORK = 989e12, 450e9, 8 * 50e9  # an H100's data sheet; a ring that leaves the node has eight network cards
IDEAL = tokens.ideal(H100)
FOUR = ModelShape("four layers", 4, 4096, 14336, 32, 1024, kv_heads=8)
CASES = [
    ("dp", "llama3-8b", 8),
    ("dp", "mixtral-8x7b", 64),
    ("fsdp", "llama3-8b", 64),
    ("fsdp", "llama3-70b", 128),
    ("tp", "llama3-8b", 8),
    ("tp", "llama3-8b", 16),  # more ranks than key/value heads
    ("cp", "llama3-8b", 8),
    ("cp", "llama3-70b", 16),
    ("ep", "mixtral-8x7b", 8),
    ("ep", "deepseek-v2", 32),
    ("pp", "llama3-8b", 8),
    ("bubble", "llama3-70b", 8),
]


def sheet(axis: str, model: str, degree: int) -> formulas.Formula:
    return formulas.formula(axis, models[model], IDEAL, degree, tokens.PERFECT)


# Both ways ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("axis", "model", "degree"), CASES)
def test_on_a_machine_that_reaches_its_data_sheet_the_formula_and_the_step_agree(axis, model, degree):
    both = tokens.check(axis, models[model], H100, degree)
    assert both.agreement == pytest.approx(1, abs=1e-9)
    assert both.sheet == sheet(axis, model, degree).crossing
    unit = tokens.least_tokens(axis, degree)
    assert both.sheet <= both.ideal <= both.sheet + unit or (both.ideal == 0 and both.sheet <= unit)


@pytest.mark.parametrize(("axis", "model", "degree"), [case for case in CASES if case[0] in ("dp", "fsdp", "cp")])
def test_the_real_crossing_is_where_the_steps_communication_and_computing_meet(axis, model, degree):
    found = int(tokens.crossing(axis, models[model], H100, degree))
    before, after = tokens.curve(axis, models[model], H100, degree, [found - 1, found])
    assert after.ratio <= 1 < before.ratio


@pytest.mark.parametrize(("axis", "model", "degree"), [case for case in CASES if case[0] != "ep"])
def test_more_tokens_never_make_an_axis_more_communication_bound(axis, model, degree):
    ratios = [one.ratio for one in tokens.curve(axis, models[model], H100, degree, [2**k for k in range(4, 17)])]
    assert len(ratios) >= 9
    assert all(later <= 1.15 * earlier for earlier, later in pairwise(ratios))  # waves of tiles are full at some sizes


def test_few_tokens_leave_experts_bound_by_their_memory():
    few, many = tokens.curve("ep", models["mixtral-8x7b"], H100, 8, [64, 8192])
    assert few.compute / 64 > 3 * many.compute / 8192  # all weights are read for them


def test_what_the_real_machine_adds_moves_the_crossing_both_ways():
    both = tokens.check("cp", models["llama3-8b"], H100, 8)
    assert both.formula > both.sheet  # latency, and less bandwidth
    assert both.real < both.formula  # kernels that read and write take longer than their FLOPs


# The formulas, by hand ---------------------------------------------------------------------------------------------------


def test_sharded_data_parallelism_needs_as_many_tokens_as_flops_go_on_a_byte():
    # jax-ml/scaling-book, gpus.md: 2,475 on H100 across nodes; attention's scores make it less.
    assert sheet("fsdp", "llama3-405b", 64).crossing == pytest.approx(RATE / NETWORK, rel=0.03)


def test_zero_1_sends_two_thirds_of_what_zero_3_sends():
    short = [sheet(axis, "llama3-70b", 8)._replace(bend=0.0).crossing for axis in ("dp", "fsdp")]
    assert short[0] == pytest.approx(2 / 3 * short[1])
    assert short[1] == pytest.approx(7 / 8 * RATE / NODE, rel=0.02)


def test_experts_raise_the_crossing_by_all_parameters_over_those_in_use():
    mixtral, dense = sheet("fsdp", "mixtral-8x7b", 64), sheet("fsdp", "mistral-7b", 64)
    shape, other = models["mixtral-8x7b"], models["mistral-7b"]
    more = shape.parameters / shape.active_parameters * other.active_parameters / other.parameters
    assert mixtral.fixed / mixtral.slope == pytest.approx(more * dense.fixed / dense.slope, rel=0.03)


def test_a_rings_least_tokens_are_those_of_one_hop_for_all_hops():
    shape = models["llama3-8b"]
    by_hand = 16 / 7 * shape.kv_heads / shape.heads * RATE / NODE * 7 / 8
    assert sheet("cp", "llama3-8b", 8).crossing == pytest.approx(by_hand)
    one_way = [context.least_shard(RATE, NODE, shape.heads, shape.kv_heads, True, backward=back) for back in (False, True)]
    assert one_way[0] < by_hand / (7 / 8) < one_way[1]


def test_a_pipelines_bubble_is_as_long_as_its_work_with_one_micro_batch_fewer_than_ranks():
    assert formulas.formula("bubble", FOUR, IDEAL, 4, tokens.PERFECT).crossing == pytest.approx(3 / 4 * 2048, rel=0.02)


# Refusals ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("axis", "degree", "count", "message"),
    [
        ("zero", 8, 64, "axis='zero': .*fsdp"),
        ("dp", 1, 64, "degree=1.*2 or more"),
        ("tp", 8, 12, "tokens=12.*multiples of 8"),
        ("pp", 8, 100, "multiples of 256"),
        ("dp", 8, 0, "tokens=0"),
    ],
)
def test_bad_input_is_refused(axis, degree, count, message):
    with pytest.raises(ValueError, match=message):
        tokens.plan(axis, degree, count)


def test_experts_of_a_dense_model_have_no_formula():
    with pytest.raises(ValueError, match="axis='ep': llama3-8b has no experts"):
        formulas.formula("ep", models["llama3-8b"], H100, 8)


def test_an_axis_that_is_none_is_refused_before_tokens_are():
    for call in (lambda: tokens.least_tokens("nope", 2), lambda: tokens.curve("tp", models["llama3-8b"], H100, 0, [1024])):
        with pytest.raises(ValueError, match=r"axis='nope'|degree=0"):
            call()


def test_a_degree_that_does_not_divide_the_usual_tokens_is_checked_with_others():
    assert tokens.check("tp", models["gpt3-175b"], H100, 6).agreement == pytest.approx(1, rel=0.05)


def test_the_numbers_that_lesson_10_says_in_prose():
    llama, h100, rack = models["llama3-70b"], clusters["h100-dgx"], clusters["gb200-nvl72"]
    found = [each.accelerator.flops / each.of(gpus).route(gpus).ring.bandwidth for each, gpus in ((h100, 64), (rack, 288))]
    assert [round(t, -1) for t in found] == [2470, 2780]
    assert round(rules.rule(llama, h100, 1024, 8192, 1024).time.tensor, 1) == 1.3
    plan = Plan(dp=64, cp=2, tp=8, seq=8192, batch=1024, zero=3)
    assert plan.tokens / plan.gpus / plan.microbatches == 512
    assert f"{step.estimate(llama, plan, h100).mfu:.0%}" == "17%"
    found = planner.search(llama, h100, gpus=1024, seq=8192, batch=1024, stack="torchtitan")
    sharded = next(each for each in found if each.plan.zero == 3)
    assert found[0].plan.zero == 1
    assert planner.tie(sharded.time, found[0].time)
