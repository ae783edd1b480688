"""The planner against a naive enumeration of all plans, and against what two teams ran."""

import itertools
import random
import re
from dataclasses import replace

import pytest

from manyranks.theory import ModelShape, Plan, bounds, clusters, compute, memory, pace, pipeline, planner, step
from manyranks.theory.kernels import DEFAULT
from manyranks.theory.published import confidence, peak_confidence
from manyranks.theory.shapes import models
from manyranks.theory.stacks import STACKS

H100 = clusters["h100-dgx"]
LLAMA, DEEPSEEK = models["llama3-405b"], models["deepseek-v3"]
SMALL = ModelShape("small", 6, 1536, 8192, 12, 32000, kv_heads=4)
EXPERTS = ModelShape("experts", 4, 1024, 4096, 8, 32000, experts=4, top_k=2, expert_ffn=2048)
PUBLISHED_STACK = {
    "overlap_tensor": False,
    "context": "all-gather",
    "schedule": "1f1b",
    "precision": "bf16-fp32-gradients",
}


def every_plan(shape: ModelShape, cluster, gpus: int, seq: int, batch: int, **fixed):
    """All plans of the documented choices that Plan, the shape, the schedule and the memory allow."""
    degrees = range(1, max(gpus, shape.layers + 2) + 1)
    experts = itertools.product(range(1, max(1, shape.experts) + 1), (None, 1))
    for dp, pp, cp, tp, (ep, etp) in itertools.product(degrees, degrees, degrees, degrees, list(experts)):
        if (
            tp == etp == 1
            or dp * pp * cp * tp != gpus
            or tp > 2 * cluster.node
            or (cp > 1 and seq // cp < planner.SMALLEST_SHARD)
        ):
            continue
        schedules = [name for name in planner.TRIED_SCHEDULES if name in STACKS[fixed.get("stack", Plan.stack)].schedules]
        others = (planner.MICROBATCHES, schedules, planner.VIRTUAL, planner.RECOMPUTE, planner.ZERO)
        for microbatch, schedule, virtual, recompute, zero in itertools.product(*others):
            named = {"microbatch": microbatch, "schedule": schedule, "virtual": virtual, "recompute": recompute, "zero": zero}
            named = {"etp": etp} | named
            try:
                plan = Plan(dp=dp, pp=pp, cp=cp, tp=tp, ep=ep, seq=seq, batch=batch, **named | fixed)
                plan.check(shape, gpus)
            except ValueError:
                continue
            if not sensible(plan) or memory.peak(shape, plan).total > cluster.accelerator.memory:
                continue
            yield plan


def sensible(plan: Plan) -> bool:
    """A pipeline of one rank has no schedule to choose; others need enough micro-batches."""
    if plan.pp == 1:
        return plan.schedule == "1f1b" and plan.virtual == 1
    if plan.schedule == "dualpipe" and plan.pp % 2:
        return False
    return plan.microbatches >= pipeline.fewest(plan.schedule, plan.pp)


SMALLER = replace(H100, accelerator=replace(H100.accelerator, memory=6e9))


@pytest.mark.parametrize(
    ("shape", "cluster", "gpus", "batch", "fixed"),
    [
        (SMALL, SMALLER, 8, 16, {}),
        (SMALL, SMALLER, 12, 24, {"recompute": "full", "zero": 1}),
        (SMALL, H100, 8, 32, {"embedding_slots": True, "zero": 3, "precision": "fp8"}),
        (SMALL, H100, 8, 8, {"context": "ulysses", "dp_shard": 2}),
        (EXPERTS, SMALLER, 8, 16, {"recompute": "selective"}),
    ],
)
def test_the_search_finds_exactly_the_plans_that_fit(shape, cluster, gpus, batch, fixed):
    found = planner.search(shape, cluster, gpus=gpus, seq=1024, batch=batch, **fixed)
    expected = set(every_plan(shape, cluster, gpus, 1024, batch, **fixed))
    assert {one.plan for one in found} == expected
    assert len(found) == len(expected) > 10
    seconds = [step.estimate(shape, one.plan, cluster).seconds for one in found]
    assert seconds == sorted(seconds) == [one.seconds for one in found]
    assert all(one.peak == memory.peak(shape, one.plan) for one in found)


CASES = random.Random(60)


def _case() -> tuple[ModelShape, int, int, dict[str, object]]:
    """A shape, GPUs, a batch and choices; closed forms of other stacks and schedules decide some of them."""
    moe = CASES.random() < 0.5
    experts = {"experts": 4, "top_k": 2, "expert_ffn": 1024, "dense_layers": CASES.choice((0, 1))} if moe else {}
    shape = ModelShape("one", CASES.randint(3, 7), 1024, 4096, 8, 32000, kv_heads=CASES.choice((2, 8)), **experts)
    given = {
        "embedding_slots": CASES.choice((False, True, (False, True))),
        "overlap": CASES.choice((True, False)),
        "precision": CASES.choice(("bf16", "fp8")),
        "sequence_parallel": CASES.choice((True, False)),
        "stack": CASES.choice(("megatron-core", "nemo-fp8") if moe else ("megatron-core", "torchtitan", "pytorch")),
        "offload": CASES.choice(("none", "optimizer")),
        "offload_layers": CASES.choice((2, (0, 1))),
        "schedule": CASES.choice((planner.TRIED_SCHEDULES, ("1f1b", "dualpipe"), ("naive", "gpipe", "zb-h2", "dualpipe-v"))),
        "zero": CASES.choice(((1, 2, 3), (3, 0))),
        "recompute": CASES.choice((("none", "selective", "full"), ("full", "none"))),
    }
    return shape, CASES.choice((4, 6, 8, 16)), CASES.choice((8, 12, 48)), {n: given[n] for n in CASES.sample([*given], 4)}


@pytest.mark.parametrize(("shape", "gpus", "batch", "given"), [_case() for _ in range(16)])
@pytest.mark.parametrize("room", [3e9, 80e9])
def test_bounds_change_no_plan_no_digit_and_no_place(shape, gpus, batch, given, room):
    cluster = replace(H100, accelerator=replace(H100.accelerator, memory=room))
    pruned = planner.search(shape, cluster, gpus=gpus, seq=2048, batch=batch, **given)
    first = pruned[:3]
    with pytest.MonkeyPatch.context() as patch:
        for name in ("passes", "seconds", "bytes_held"):
            patch.setattr(bounds, name, lambda *args: 0.0)
        whole = list(planner.search(shape, cluster, gpus=gpus, seq=2048, batch=batch, **given))
    assert first == whole[:3]
    assert pruned == whole
    assert [one.seconds for one in whole] == sorted(one.seconds for one in whole)
    assert pruned.checked == next((one for one in whole if not confidence(one.time).missing), None)


@pytest.mark.parametrize("room", [6e9, 80e9])
@pytest.mark.parametrize("shape", [SMALL, EXPERTS])
def test_bounds_are_below_what_they_bound(shape, room):
    for one in planner.search(shape, H100, gpus=16, seq=2048, batch=32):
        plan, time = one.plan, one.time
        model = pace.of_model(compute.site(shape, plan.layer_plan, H100, DEFAULT))
        least = bounds.seconds(model, plan.layer_plan, plan.schedule, plan.pp, plan.microbatches, plan.virtual)
        assert 0.3 * (time.seconds - time.data - time.optimizer - time.pipeline) < least <= time.seconds
        assert 0 < bounds.bytes_held(shape, plan) <= memory.peak(shape, plan).total


@pytest.mark.few(2)
def test_few_of_all_plans_are_estimated(monkeypatch):
    asked = []
    monkeypatch.setattr(step, "estimate", lambda *args, own=step.estimate: asked.append(args) or own(*args))
    found = planner.search(LLAMA, H100, gpus=16384, embedding_slots=True)
    assert len(asked) < 250
    assert found[0].seconds < found[9].seconds
    assert len(asked) < 600  # of 16,460 that fit


def test_plans_within_their_error_bars_are_tied_and_the_best_checked_plan_stands_beside_the_best():
    found = planner.search(models["llama3-70b"], H100, gpus=1024, batch=1024, tp=(1, 8), pp=(1, 4), cp=(1, 2), microbatch=1)
    best, checked = found[0], found.checked
    assert confidence(best.time).missing
    assert not confidence(checked.time).missing
    assert checked == next(one for one in found if not confidence(one.time).missing)
    assert all(one.seconds <= 1.001 * best.seconds or not confidence(one.time).missing for one in found.tied)
    assert found[: len(found.tied)] == found.tied
    assert f"{len(found.tied)} too close to call" in repr(found)
    bridge = {"precision": "fp8", "stack": "megatron-bridge", "tp": (2, 4, 8), "pp": (2, 4, 8), "cp": 1, "microbatch": 1}
    only = planner.search(models["llama3-70b"], H100, gpus=64, batch=128, zero=1, **bridge)
    assert only.checked == only[0]
    error = max(confidence(one.time).error for one in only.tied)
    assert 1 < len(only.tied) < len(only)
    assert only[len(only.tied)].seconds > (1 + confidence(only[0].time).error) * only[0].seconds
    assert only.tied[-1].seconds <= (1 + error) * only[0].seconds


def test_where_nothing_fits_there_is_no_checked_plan():
    found = planner.search(LLAMA, H100, gpus=8, batch=8, seq=8192)
    assert not found
    assert (found.tied, found.checked, repr(found)[:20]) == ([], None, "Ranking(no plan for ")


def test_a_search_with_values_given_is_the_part_of_the_whole_that_has_them():
    whole = planner.search(SMALL, H100, gpus=16, seq=2048, batch=32)
    part = planner.search(SMALL, H100, gpus=16, seq=2048, batch=32, tp=(2, 4), pp=2, zero=(1, 3), recompute="selective")
    fields = {"tp": (2, 4), "pp": (2,), "zero": (1, 3), "recompute": ("selective",)}
    expected = [one.plan for one in whole if all(getattr(one.plan, name) in values for name, values in fields.items())]
    assert [one.plan for one in part] == expected
    assert expected


def test_places_for_embedding_and_head_may_be_tried_both_ways():
    both, without, with_them = (
        planner.search(SMALL, H100, gpus=8, seq=1024, batch=8, embedding_slots=slots) for slots in ((True, False), False, True)
    )
    assert {one.plan for one in both} == {one.plan for one in (*without, *with_them)}
    assert {one.plan.pp for one in with_them} > {one.plan.pp for one in without}


def test_the_number_of_gpus_may_be_the_clusters_own():
    whole, own = (planner.search(SMALL, c, gpus=g, seq=1024, batch=8, pp=1) for c, g in ((H100, 8), (H100.of(8), None)))
    assert [one.plan for one in whole] == [one.plan for one in own]


# What was run ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stack", [{}, PUBLISHED_STACK], ids=["free", "published stack"])
@pytest.mark.parametrize(("gpus", "dp"), [(8192, 64), (16384, 128)])
@pytest.mark.few(2)
def test_the_layout_that_llama_3_ran_is_within_ten_percent_of_the_best(gpus, dp, stack):
    # Micro-batches of one sequence and degrees that are powers of two: the whole search takes seconds and finds the same.
    powers = (1, 2, 4, 8, 16)
    degrees = {"tp": powers, "cp": powers[:4], "pp": (*powers, 32, 64), "microbatch": 1}
    found = planner.search(LLAMA, H100, gpus=gpus, batch=2048, embedding_slots=True, **degrees, **stack)
    ran = Plan(dp=dp, pp=16, tp=8, virtual=8, seq=8192, batch=2048, embedding_slots=True, **stack)
    (own,) = [one for one in found if one.plan == ran]
    assert own.peak.total <= 80e9
    assert own.seconds <= 1.10 * found[0].seconds
    assert found[0].plan.tp <= H100.node
    assert not found[0].why
    assert all(one.why for one in found[1:50])


@pytest.fixture(scope="module")
def for_deepseek() -> list[planner.Found]:
    degrees = {"microbatch": (1, 2), "cp": (1, 2), "tp": (1, 2, 4, 8), "pp": (4, 8, 16, 32)}
    choices = degrees | {"recompute": ("selective", "full"), "zero": (1, 3), "precision": "fp8", "stack": "hai-llm"}
    return planner.search(DEEPSEEK, clusters["h800"], gpus=2048, seq=4096, batch=15360, **choices)


def test_the_layout_that_deepseek_ran_is_within_ten_percent_of_the_best_that_cuts_experts_as_attention(for_deepseek):
    ran = Plan(dp=128, pp=16, ep=64, seq=4096, batch=15360, schedule="dualpipe", precision="fp8", stack="hai-llm")
    found = [one for one in for_deepseek if one.plan.etp is None]
    (own,) = [one for one in found if one.plan == ran]
    assert own.seconds <= 1.10 * found[0].seconds
    assert found[0].plan.tp == 1


def test_interleaving_needs_no_multiple_of_p_micro_batches():
    found = planner.search(LLAMA, H100, gpus=1024, batch=48, tp=8, cp=1, pp=8, microbatch=1, schedule="1f1b", recompute="full")
    assert found[0].plan.microbatches == 3  # fewer than the 8 stages
    assert found[0].plan.virtual > 1


def test_tensor_parallelism_ties_for_deepseek_only_where_it_leaves_experts_whole(for_deepseek):
    best = {(one.plan.tp, one.plan.etp): one.seconds for one in reversed(for_deepseek)}
    assert best[1, None] < best[2, 1] < best[4, 1] < best[2, None] < best[8, 1] < best[4, None] < best[8, None]
    assert best[2, 1] < 1.01 * best[1, None] < 1.1 * best[1, None] < best[4, 1]
    plan = for_deepseek[0].plan
    assert (plan.tp, plan.etp, plan.ep, plan.pp, plan.dp, plan.cp) == (1, None, 64, 8, 128, 2)
    why = {cut: next(one.why for one in for_deepseek if (one.plan.tp, one.plan.etp) == cut) for cut in ((8, 1), (8, None))}
    assert re.match(r"tensor \+10.* s \(TP 8 with ETP 1 on 8192 tokens\)", why[8, 1])
    assert re.match(r"tensor \+5.* s \(TP 8 on 8192 tokens\)", why[8, None])


def test_a_keyword_fixes_how_experts_are_cut():
    def cuts(**choices) -> set[tuple[int, int | None]]:
        found = planner.search(EXPERTS, H100, gpus=8, seq=1024, batch=8, microbatch=1, zero=1, recompute="none", **choices)
        return {(one.plan.tp, one.plan.etp) for one in found}

    both = {(1, None), *itertools.product((2, 4, 8), (None, 1))}
    assert cuts() == both
    assert cuts(etp=None) == {pair for pair in both if pair[1] is None}
    assert cuts(etp=2) == {(tp, 2) for tp in (1, 2, 4, 8)}
    assert cuts(etp=(None, 1), sequence_parallel=False) == {(1, None), (1, 1), (2, None), (4, None), (8, None)}
    assert planner.search(SMALL, H100, gpus=8, seq=1024, batch=8, etp=1) == []


def test_shards_that_fit_no_group_of_experts_are_left_out():
    found = planner.search(EXPERTS, H100, gpus=24, seq=1024, batch=24, dp_shard=6, recompute="none", zero=1)
    assert found
    assert all(one.plan.ep != 4 or one.plan.tp * one.plan.cp % 2 == 0 for one in found)


# Why ---------------------------------------------------------------------------------------------------------------------


def slowest(**choices) -> planner.Found:
    fixed = {"pp": 16, "cp": 1, "schedule": "1f1b", "embedding_slots": True, "microbatch": 1, "zero": 1}
    return planner.search(LLAMA, H100, gpus=1024, batch=1024, **fixed, **choices)[-1]


@pytest.mark.parametrize(
    ("choices", "why"),
    [
        ({"tp": (8, 16), "virtual": 8, "recompute": "full"}, r"tensor \+.* s \(TP 16 leaves the node\)"),
        ({"tp": 8, "virtual": (1, 8), "recompute": "full"}, r"bubble \+.* s \(PP 16, 1 stage per rank"),
        ({"tp": 8, "virtual": 4, "recompute": ("selective", "full")}, r"compute \+.* s \(full recomputation\)"),
    ],
)
def test_each_plan_says_why_it_is_slower(choices, why):
    with pytest.MonkeyPatch.context() as patch:  # the reasons are those of time: let all of them fit
        patch.setattr(memory, "peak", lambda shape, plan: memory.Peak(0, 0, 0))
        one = slowest(**choices)
    assert re.search(why, one.why), one.why


# Refusals ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"gpus": 8, "microbatches": 2}, "did you mean 'microbatch'"),
        ({}, "give gpus="),
        ({"gpus": 0}, "a whole number from 1"),
        ({"gpus": -8}, "a whole number from 1"),
        ({"gpus": 8, "schedule": "1f2b"}, "did you mean '1f1b'"),
        ({"gpus": 8, "precision": ("bf16", "bf17")}, "bf17"),
        ({"gpus": 8, "zero": 4}, "zero=4"),
        ({"gpus": 8, "tp": 0}, "0"),
        ({"gpus": 8, "microbatch": 0}, "microbatch=0"),
        ({"gpus": 8, "seq": 0}, "seq=0"),
        ({"gpus": 8, "batch": 0}, "batch=0"),
    ],
)
def test_bad_input_is_refused(choices, message):
    with pytest.raises(ValueError, match=message):
        planner.search(SMALL, H100, **{"seq": 1024, "batch": 8} | choices)


def test_gpus_that_are_not_the_clusters_are_refused():
    with pytest.raises(ValueError, match="gpus=16 on a cluster of 8"):
        planner.search(SMALL, H100.of(8), gpus=16)


@pytest.mark.parametrize(
    "choices",
    [{"tp": 5}, {"pp": 200}, {"ep": 2}, {"gpus": 7, "batch": 8}, {"cp": 3}, {"dp_shard": 16}, {"offload": "none", "tp": ()}],
)
def test_values_that_no_plan_here_can_have_give_an_empty_list(choices):
    assert planner.search(SMALL, H100, **{"gpus": 8, "seq": 1024, "batch": 8, "virtual": 1} | choices) == []


@pytest.mark.parametrize("fixed", [{"schedule": "zb-h1"}, {"virtual": 2}, {"schedule": "1f1b", "virtual": 1}])
def test_a_fixed_schedule_is_that_of_every_plan(fixed):
    found = planner.search(SMALL, H100, gpus=8, seq=1024, batch=16, **fixed)
    assert found
    assert {tuple(getattr(one.plan, name) for name in fixed) for one in found} == {tuple(fixed.values())}


def test_short_sequences_are_searched_too():
    assert planner.search(SMALL, H100, gpus=8, seq=128, batch=8)


def test_a_plan_says_when_it_is_closer_to_the_best_than_the_error_bars():
    found = planner.search(LLAMA, H100, gpus=1024, batch=1024, tp=(8, 16), cp=1, pp=(8, 16), microbatch=1, zero=1)
    best = found[0].time
    assert confidence(best).runs
    bars = [(one.seconds, max(confidence(one.time).error, confidence(best).error), one.why) for one in found[1:]]
    close = [seconds <= (1 + bar) * best.seconds for seconds, bar, _ in bars]
    assert close == ["closer than the error bar of ±" in why for *_, why in bars]
    assert 0 < sum(close) < len(close)


def test_a_plan_that_fits_by_less_than_the_error_bar_says_so():
    found = planner.search(models["llama3-70b"], H100, gpus=64, batch=512, stack="torchtitan-2025", zero=3, pp=1, cp=1)
    room = H100.accelerator.memory
    ends = [peak_confidence(models["llama3-70b"], one.plan).ends(one.peak.total) for one in found]
    close = [one.peak.total <= room < most for one, (_, most) in zip(found, ends, strict=True)]
    assert close == ["tight='fits by less than the error bar'" in repr(one) for one in found]
    assert 0 < sum(close) < len(close)
    bar = peak_confidence(models["llama3-70b"], found[0].plan)
    assert f"Peak(total={found[0].peak.total}, checked='{bar}', states={found[0].peak.states}" in repr(found[0])


def test_a_plan_like_which_no_run_was_published_is_not_said_to_be_slower_than_an_error_bar():
    found = planner.search(LLAMA, H100, gpus=1024, batch=1024, tp=8, cp=1, pp=16, microbatch=1, zero=(1, 2), schedule="1f1b")
    missing = "not checked: no published run of Megatron on H100 with ZeRO-2"
    assert all(one.why.endswith(missing) for one in found if one.plan.zero == 2)


def test_what_computes_less_is_no_cause_and_equal_plans_are_as_fast():
    found = planner.search(
        LLAMA, H100, gpus=512, batch=512, tp=(4, 8), pp=(4, 8), cp=1, virtual=1, schedule="1f1b", zero=(1, 2)
    )
    best = found[0]
    less = [
        one.why for one in found if planner.RECOMPUTE.index(one.plan.recompute) < planner.RECOMPUTE.index(best.plan.recompute)
    ]
    assert not any("recomputation)" in why for why in less)
    alike = [one for one in found[1:] if one.seconds <= 1.001 * best.seconds]
    assert all(one.why.startswith("as fast as the best") for one in alike)


def test_another_stack_is_the_cause_where_stacks_are_compared():
    found = planner.search(
        SMALL, H100, gpus=8, seq=1024, batch=8, tp=1, pp=1, cp=1, zero=3, recompute="full", stack=("fsdp1", "pytorch")
    )
    slower = [one.why for one in found if one.plan.stack != found[0].plan.stack]
    assert slower
    assert all(f"(stack {'fsdp1' if found[0].plan.stack == 'pytorch' else 'pytorch'})" in why for why in slower)


@pytest.mark.parametrize("other", [1, None, "8.95 s"])
def test_two_steps_are_compared(other):
    with pytest.raises(ValueError, match="give two StepTimes"):
        planner.undecided(other, other)
