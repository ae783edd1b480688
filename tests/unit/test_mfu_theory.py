"""theory.roofline: roofs, intensities, a step's kernels and its time. published.mfu: the tables of papers."""

import math
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyranks import theory
from manyranks.theory import flops, kernels, layer, roofline, stages, step
from manyranks.theory.kernels import Constants
from manyranks.theory.plan import Plan
from manyranks.theory.published import fit, mfu, steps
from manyranks.theory.roofline import Roof

ROOF = Roof(peak=100.0, bandwidth=4.0)
SIZES = st.integers(1, 40)


# Roofs -------------------------------------------------------------------------------------------------------------------


def test_both_roofs_meet_at_the_ridge():
    assert ROOF.ridge == 25
    assert [ROOF.flops_per_second(i) for i in (0, 5, 25, 1e9)] == [0, 20, 100, 100]
    assert [ROOF.bound(i) for i in (0, 24.9, 25, math.inf)] == ["memory", "memory", "compute", "compute"]
    assert [ROOF.seconds(*work) for work in ((100, 1), (10, 40), (0, 4), (200, 8))] == [1, 10, 1, 2]


def test_a_chip_s_roof_is_that_of_its_data_sheet():
    h100 = theory.accelerators["H100 SXM"]
    assert roofline.roof(h100) == Roof(989e12, 3.35e12)
    assert roofline.roof(h100, "float32").ridge == pytest.approx(20)
    assert roofline.roof(theory.clusters["laptop"].accelerator) == Roof(50e9, 10e9)


# Intensity ---------------------------------------------------------------------------------------------------------------


def moved_elements(m, k, n, tile):
    """Elements that a product made tile by tile moves: each tile reads its rows and columns, and is written."""
    blocks = [[range(i, min(i + tile, size)) for i in range(0, size, tile)] for size in (m, n)]
    return sum(k * len(rows) + k * len(columns) + len(rows) * len(columns) for rows in blocks[0] for columns in blocks[1])


@given(SIZES, SIZES, SIZES, st.integers(1, 50), st.sampled_from([1, 2, 4]))
def test_the_intensity_of_a_tiled_product_is_that_of_its_loop(m, k, n, tile, itemsize):
    expected = 2 * m * k * n / (itemsize * moved_elements(m, k, n, tile))
    assert roofline.tiled_intensity(m, k, n, tile, itemsize) == pytest.approx(expected)
    assert roofline.tiled_intensity(m, k, n, max(m, n), itemsize) == roofline.product_intensity(m, k, n, itemsize)


def test_what_only_moves_memory_has_no_intensity():
    assert roofline.intensity(layer.moved("gelu", 10, 4)) == 0
    assert roofline.intensity(layer.matmul("mlp", 2, 3, 4)) == 2 * 24 / (2 * (8 + 12 + 6))


# Tiles and waves

A100, HOPPER = theory.accelerators["A100-80GB SXM"], theory.accelerators["H100 SXM"]


def in_use(m, n, count=1, chip=A100):
    return kernels.in_use(m, n, count, chip.processors, chip.reuse)


def test_products_whose_tiles_fill_the_processors_have_them_all_at_work():
    assert in_use(12 * 256, 9 * 128) == 1  # 108 tiles on 108 processors
    assert in_use(128, 128, 108) == 1
    fed = 64 * 128 / (64 + 128) / A100.reuse  # a row more: 49 · 9 tiles of 64 × 128 need 5 waves, larger ones lose more
    assert in_use(12 * 256 + 1, 9 * 128) == pytest.approx(fed * (12 * 256 + 1) * 9 * 128 / (5 * 108 * 64 * 128))
    assert in_use(16, 16) == pytest.approx(16 * 16 / (64 * 64) / 108 * 32 / A100.reuse)  # one tile, most of it over the edge
    assert in_use(1e5, 1e5) == pytest.approx(1, abs=0.01)


@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(1, 40), st.sampled_from([A100, HOPPER]))
def test_a_larger_product_never_takes_less_time(m, n, count, chip):
    share = in_use(m, n, count, chip)
    assert 0 < share <= 1
    for more in ((m + 100, n, count), (m, n + 100, count), (m, n, count + 1)):
        assert math.prod(more) / in_use(*more, chip) >= m * n * count / share * (1 - 1e-9)


def test_a_faster_chip_needs_larger_tiles():
    assert in_use(64, 64, 108 * 132) > 1.4 * in_use(64, 64, 108 * 132, HOPPER)
    assert in_use(128, 256, 108 * 132, HOPPER) == 1


def test_small_products_wait_for_the_host():
    small, h100 = theory.models["llama3.2-1b"], theory.clusters["h100-dgx"]
    plans = [Plan(tp=8, seq=seq) for seq in (64, 128)]
    passes = [theory.pace.of_layer(small, plan, h100).forward for plan in plans]
    each = layer.launches(layer.forward(small, plans[0], False))
    assert [one.seconds for one in passes] == pytest.approx([each * plans[0].framework.host] * 2)
    assert all(one.chip < one.seconds for one in passes)


# A step ------------------------------------------------------------------------------------------------------------------

ROWS = [row for table in fit.TABLES for row in steps.of(table)]
RUNS = [(row.shape, row.plan, row.cluster) for row in ROWS]
LLAMA = theory.models["llama3-8b"], Plan(dp=64, seq=8192, batch=128, zero=3), theory.clusters["h100-dgx"]
NOTHING = Constants(overhead=0.0)


@pytest.mark.parametrize("run", RUNS, ids=[f"{row.table}: {row.name}" for row in ROWS])
def test_parts_add_up_to_the_step_s_computing_and_the_budget_to_its_time(run):
    time, found, budget = step.estimate(*run), roofline.parts(*run), roofline.time_budget(*run)
    assert sum(part.seconds for part in found) == pytest.approx(time.compute, rel=1e-9)
    assert sum(budget.values()) == pytest.approx(time.seconds, rel=1e-9)
    assert budget["matmul"] + budget["other"] + budget["overhead"] == pytest.approx(time.compute, rel=1e-9)
    assert {name: seconds for name, seconds in time.parts.items() if name in budget} == dict(list(budget.items())[3:])


def test_an_uneven_load_other_constants_and_a_slow_host_are_taken_over():
    h100 = theory.clusters["h100-dgx"]
    given = theory.models["mixtral-8x7b"], Plan(dp=8, ep=8, seq=4096, batch=8), h100
    for options in ({"imbalance": 2.0}, {"constants": NOTHING}):
        time = step.estimate(*given, **options)
        assert sum(roofline.time_budget(*given, **options).values()) == pytest.approx(time.seconds, rel=1e-9)
    assert roofline.time_budget(*given, NOTHING)["overhead"] == pytest.approx(0, abs=1e-12)
    given = theory.models["llama3.2-1b"], Plan(seq=128), h100
    time, budget, found = step.estimate(*given), roofline.time_budget(*given), roofline.parts(*given)
    assert sum(part.seconds for part in found) < time.compute
    assert sum(budget.values()) == pytest.approx(time.seconds, rel=1e-9)
    assert budget["overhead"] > sum(part.overhead for part in found)


def test_one_rank_s_products_are_its_share_of_the_hardware_flops():
    shape, plan, cluster = LLAMA
    found = roofline.parts(shape, plan, cluster)
    causal = flops.hardware_per_token(shape, plan.seq, "none", "causal", flash=True)
    assert sum(part.flops for part in found) == pytest.approx(causal * plan.tokens / plan.gpus)


def test_products_of_a_large_model_are_bound_by_computing_and_the_rest_by_memory():
    found = {part.name: part for part in roofline.parts(*LLAMA)}
    products = {"attention projections", "attention core", "MLP", "head"}
    assert {name for name, part in found.items() if part.bound == "compute"} == products
    assert found.keys() - products == {"activation", "norms", "residual", "rotary", "loss", "embedding"}
    assert all(part.intensity == 0 for name, part in found.items() if name not in products)
    assert all(part.overhead < part.seconds and part.flops_per_second < 989e12 for part in found.values())


@pytest.mark.parametrize("flash", [True, False])
def test_parts_come_the_longest_first_and_fused_attention_writes_no_softmax(flash):
    shape, plan, cluster = LLAMA
    found = roofline.parts(shape, replace(plan, flash=flash), cluster)
    assert [part.seconds for part in found] == sorted((part.seconds for part in found), reverse=True)
    assert ("softmax" in [part.name for part in found]) is not flash


def test_parts_are_those_of_the_rank_that_sets_the_pace_even_if_its_host_does():
    plan = Plan(dp=8, pp=8, tp=8, ep=4, batch=128, schedule="interleaved", zero=3, precision="bf16-moments", stack="hai-llm")
    given = theory.models["mixtral-8x7b"], plan, theory.clusters["b200-dgx"]
    time, found = step.estimate(*given), roofline.parts(*given)
    assert sum(part.seconds for part in found) < time.compute  # it waits for its host
    assert stages.of_ranks(*given[:2])[time.slowest].embedding == 1
    assert {"head", "embedding"} & {part.name for part in found} == {"embedding"}


# Published utilizations --------------------------------------------------------------------------------------------------


def test_every_run_of_every_table_has_a_row():
    count = {"PaLM Table 3": 6, "Korthikanti Table 5": 5, "SC21 Table 1": 10, "Llama 3 Table 4": 3, "DeepSeek-V3 (ISCA'25)": 2}
    assert Counter(row.paper for row in mfu.rows()) == count
    assert all(row.source and (row.printed or row.printed_hfu) for row in mfu.rows())


@pytest.mark.parametrize("row", mfu.rows(), ids=lambda row: f"{row.paper}: {row.run}, {row.convention}")
def test_a_printed_utilization_is_ours_to_a_point_but_for_one(row):
    if (row.run, "MFU") in mfu.UNEXPLAINED:
        assert (round(row.mfu, 3), row.printed) == (0.197, 0.213)
    elif row.printed:
        assert row.mfu == pytest.approx(row.printed, abs=0.006)
    if row.printed_hfu and row.hfu:
        assert row.hfu == pytest.approx(row.printed_hfu, abs=0.006)


def test_beside_each_stands_what_it_is_with_half_of_the_scores_where_its_speed_is_known():
    assert all((row.causal is None) == (row.tokens_per_second is None) for row in mfu.rows())
    all_scores = [row for row in mfu.rows() if row.convention in ("palm", "korthikanti", "megatron-sc21")]
    assert all(0.9 * row.mfu < row.causal < row.mfu for row in all_scores)
    full, causal = mfu.deepseek()
    assert full.causal == causal.causal == causal.mfu == pytest.approx(causal.printed, abs=0.002)


def test_palm_s_hardware_utilization_is_no_recomputation_of_ours_but_five_quarters_of_its_mfu():
    row, peak = next(mfu.palm()), theory.clusters["tpu-v4"].accelerator.flops
    run = theory.models["palm-540b"], 2048, row.tokens_per_second, row.chips, peak
    assert [round(flops.hfu(*run, kind, "palm"), 3) for kind in ("none", "full")] == [0.462, 0.615]
    assert row.printed_hfu == 0.578 == round(row.mfu * 5 / 4, 3)


def test_llama_3_has_no_convention_and_conventions_disagree_on_its_speed():
    rows = list(mfu.llama3())
    assert all((row.convention, row.tokens_per_second) == (None, None) for row in rows)
    speeds = mfu.implied_speed(theory.models["llama3-405b"], 131072, rows[2].mfu, rows[2].chips, 989e12)
    assert speeds["parameters"] > 1.3 * speeds["causal"] > 1.3 * 1.3 * speeds["full"]
    assert flops.mfu(theory.models["llama3-405b"], 131072, speeds["nemo"], 16384, 989e12, "nemo") == pytest.approx(rows[2].mfu)


def test_one_run_under_every_convention():
    found = mfu.under_every_convention(theory.models["palm-540b"], 2048, 238300, 6144, 275e12)
    assert found.keys() == flops.CONVENTIONS.keys() >= {convention for convention, _ in mfu.COUNTED_AS.values()}
    assert found["palm"] == next(mfu.palm()).mfu
    assert found["full"] > found["causal"] > found["parameters"]


@pytest.mark.parametrize(("model", "speed", "tflops"), [("llama3-8b", 12273, 711), ("llama3-70b", 1524, 734)])
def test_nemo_s_release_24_12_counts_as_torchtitan_does(model, speed, tflops):
    convention, _ = mfu.COUNTED_AS["NeMo 24.12"]
    assert flops.per_token(theory.models[model], 8192, convention) * speed / 1e12 == pytest.approx(tflops, abs=0.6)


# Bad input ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: Roof(0, 1), "peak=0, bandwidth=1"),
        (lambda: Roof(1, math.nan), "bandwidth=nan"),
        (lambda: ROOF.bound(-1), "intensity=-1"),
        (lambda: ROOF.flops_per_second(math.nan), "intensity=nan"),
        (lambda: ROOF.seconds(-1, 0), "flops=-1"),
        (
            lambda: roofline.roof(theory.accelerators["V100 SXM2"]),
            "V100 SXM2 has no confirmed peak for it, but for float16, float32",
        ),
        (lambda: roofline.roof(theory.accelerators["H100 SXM"], "fp8"), "dtype='fp8': .*choose from bfloat16"),
        (lambda: roofline.product_intensity(0, 1, 1), "m=0"),
        (lambda: roofline.tiled_intensity(1, 1, 1, 0), "tile=0"),
        (lambda: roofline.parts("llama", LLAMA[1], LLAMA[2]), "shape='llama'"),
        (lambda: roofline.time_budget(LLAMA[0], Plan(tp=3, seq=9, sequence_parallel=False), LLAMA[2]), "tp=3 does not divide"),
        (lambda: roofline.roof("H100 SXM"), "accelerator='H100 SXM': give an Accelerator"),
        (lambda: mfu.under_every_convention(LLAMA[0], 8, 1.0, 0, 1e15), "gpus=0"),
        (lambda: mfu.under_every_convention(LLAMA[0], 8, 1.0, 1, math.nan), "peak=nan"),
    ],
)
def test_what_cannot_be_is_refused(call, said):
    with pytest.raises(ValueError, match=said):
        call()
