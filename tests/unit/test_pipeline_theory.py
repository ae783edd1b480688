"""theory.pipeline: closed forms against replayed schedules, and against the tables of papers."""

import re
from dataclasses import replace
from fractions import Fraction

import pytest

from manyranks.parallel.pipeline import schedules
from manyranks.parallel.pipeline.program import Times, program
from manyranks.theory import memory, pipeline, published, stages
from manyranks.theory.architecture import ModelShape
from manyranks.theory.plan import SCHEDULES, Plan
from manyranks.timeline import replay

LLAMA = ModelShape("llama", 8, 32, 80, 8, 96, kv_heads=4)
GPT = ModelShape("gpt", 4, 32, 128, 4, 96, gated=False, norm="layernorm", bias=True, dropout=True, positions=64, tied=True)


@pytest.mark.parametrize("backward", [1.5, 2.0, 3.0])
@pytest.mark.parametrize(("p", "v"), [(2, 3), (4, 2), (4, 8), (8, 3), (16, 8)])
def test_an_interleaved_step_is_foretold_for_any_number_of_micro_batches(p, v, backward):
    times = Times(1 / v, backward / 2 / v, backward / 2 / v)
    for m in {1, p - 1, p + 1, 3 * p // 2, 2 * p - 1}:
        step = replay(program(schedules.interleaved(p, m, v)), times).makespan
        found = pipeline.bubble("interleaved", p, m, v, 1.0, backward) + m * (1 + backward)
        assert found == pytest.approx(step, rel=1e-9 if m <= p else 0.03)


@pytest.mark.parametrize("v", [1, 2, 3])
def test_interleaved_is_1f1b_with_several_stages_a_rank(v):
    for rank in range(4):
        both = {pipeline.in_flight(schedule, 4, 8, v, rank) for schedule in ("1f1b", "interleaved")}
        assert len(both) == 1
    assert [pipeline.bubble(schedule, 4, 8, v) for schedule in ("gpipe", "1f1b", "interleaved")] == 3 * [9 / v]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_one_rank_waits_for_nobody(schedule):
    assert pipeline.bubble(schedule, 1, 4, F=1.0, B=3.0, W=0.5) == 0


# What ranks hold under a schedule


def test_dualpipe_holds_two_copies():
    plans = [Plan(pp=4, schedule=schedule) for schedule in ("1f1b", "dualpipe", "dualpipe-v")]
    once, twice, v = (sum(map(sum, memory.rank_parameters(LLAMA, plan))) for plan in plans)
    assert (twice, v) == (2 * once, once)


def test_gpipe_holds_every_micro_batch_to_the_logits_and_naive_holds_one():
    plans = [Plan(pp=1, batch=6, seq=64, schedule=schedule) for schedule in ("1f1b", "naive", "gpipe")]
    one, alone, six = (memory.activations(GPT, plan) for plan in plans)
    assert (alone, six) == (one, 6 * one)


@pytest.mark.parametrize("layers", range(8, 24))
def test_the_peak_is_that_of_the_fullest_pair_of_dualpipe_ranks(layers):
    shape, plan = replace(LLAMA, layers=layers, vocab=1), Plan(pp=8, schedule="dualpipe", batch=16, zero=0, seq=1)
    dealt = [stage.layers for stage in stages.deal_stages(shape, 8)]
    pairs = [front + back for front, back in zip(dealt, reversed(dealt), strict=True)]
    assert memory.peak(shape, plan).states == 16 * max(map(sum, memory.rank_parameters(shape, plan)))
    assert memory.peak(shape, plan).states // (16 * shape.layer_parameters(0)) == max(pairs)


def test_a_dualpipe_rank_holds_many_micro_batches_of_its_nearer_stage_and_few_of_the_other():
    shape = replace(LLAMA, layers=5, vocab=1)
    assert [stage.layers for stage in stages.deal_stages(shape, 4)] == [1, 2, 1, 1]
    plan = Plan(pp=4, schedule="dualpipe", batch=8, seq=64, recompute="none")
    # Rank 1 holds 3 of its own two layers and 2 of the one that rank 2 has; the others hold 5 of one layer, or as much as it.
    assert memory.activations(shape, plan) == (3 * 2 + 2 * 1) * memory.layer_activations(shape, plan)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "dualpipe"])
def test_a_pipeline_of_one_rank_holds_one_micro_batch_and_one_copy(schedule):
    one, naive_one = (Plan(pp=1, batch=8, seq=64, schedule=kind) for kind in (schedule, "naive"))
    for quantity in (memory.model_states, memory.activations, memory.peak):
        assert quantity(GPT, one) == quantity(GPT, naive_one)


# Published tables


def value(text, **letters):
    """A table's formula, whose products are written side by side, with these numbers."""
    text = text.replace("F&B", "FB")
    names = sorted(letters, key=len, reverse=True)
    text = re.sub(rf"(?<=[\d)])(?=\(|{'|'.join(names)})", "*", text)
    return eval(text, {name: Fraction(number) for name, number in letters.items()})


def rows(name, column):
    return {row[column]: row for row in published.rows(name)}


@pytest.mark.parametrize(("schedule", "row"), [("1f1b", "1F1B"), ("zb-h1", "ZB-H1"), ("zb-h2", "ZB-H2")])
@pytest.mark.parametrize(("TF", "TB", "TW"), [(1, 1, 1), (3, 4, 2), (10, 12, 7)])
@pytest.mark.parametrize("p", [1, 2, 4, 7])
def test_zero_bubble_s_table_2(schedule, row, TF, TB, TW, p):
    printed, m = rows("zb_formulas", "schedule")[row], 3 * p
    bubble = pipeline.bubble(schedule, p, m, F=TF, B=TB + TW, W=TW)
    assert bubble == value(printed["bubble_time"], p=p, TF=TF, TB=TB, TW=TW)
    assert pipeline.in_flight(schedule, p, m) == value(printed["peak_activation_per_worker"], p=p, MB=1)


@pytest.mark.parametrize(("schedule", "row"), [("zb-h1", "ZB-H1 worker i"), ("zb-h2", "ZB-H2 worker i")])
@pytest.mark.parametrize("kept", [0, Fraction(1, 2), 1])
def test_zero_bubble_s_finer_count_is_never_above_ours_and_equal_where_weight_gradients_need_all(schedule, row, kept):
    p = 5
    printed = rows("zb_formulas", "schedule")[row]["peak_activation_per_worker"]
    for rank in range(p):
        finer, ours = value(printed, p=p, i=rank + 1, MB=1, MW=kept), pipeline.in_flight(schedule, p, 3 * p, rank=rank)
        assert finer <= ours
        assert finer == ours or (kept < 1 and rank > 0)


@pytest.mark.parametrize(
    ("schedule", "row"), [("1f1b", "1F1B"), ("zb-h1", "ZB1P"), ("dualpipe", "DualPipe"), ("dualpipe-v", "DualPipeV")]
)
@pytest.mark.parametrize(("F", "B", "W"), [(1, 2, 1), (3, 7, 2), (10, 22, 9)])
@pytest.mark.parametrize("PP", [2, 4, 8, 16])
def test_dualpipe_s_table(schedule, row, F, B, W, PP):
    printed = rows("dualpipe_table", "method")[row]
    p = value(printed["devices"], PP=PP)
    each = Fraction(PP, p)  # stages a rank: the table's seconds are one stage's
    times = {"F": each * F, "B": each * B, "W": each * W}
    assert pipeline.bubble(schedule, int(p), 2 * PP, **times) == value(printed["bubble"], PP=PP, F=F, B=B, W=W, FB=F + B)
    if "dualpipe" in schedule:
        found = pipeline.bubble(schedule, int(p), 2 * PP, **times, FB=each * (F + B - 1))
        assert found == value(printed["bubble"], PP=PP, F=F, B=B, W=W, FB=F + B - 1)
    assert each * Fraction(pipeline.in_flight(schedule, int(p), 2 * PP)) == value(printed["activation_relative"], PP=PP)


# Refusals


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("1F1B", 4, 8), "schedule='1F1B': did you mean '1f1b'"),
        (("zb-h3", 4, 8), "schedule='zb-h3': did you mean 'zb-h"),
        (("1f1b", 0, 8), "p=0: must be a whole number, 1 or more"),
        (("1f1b", 4, -8), "m=-8: must be a whole number"),
        (("1f1b", 4, 8.0), "m=8.0: must be a whole number"),
        (("1f1b", 4, 8, True), "v=True: must be a whole number"),
        (("zb-h1", 4, 8, 2), "v=2 with schedule='zb-h1'"),
        (("dualpipe", 3, 8), "p=3 with schedule='dualpipe', which runs from both ends: give an even p"),
    ],
)
def test_numbers_that_no_pipeline_has_are_refused(given, said):
    for call in (pipeline.bubble, pipeline.in_flight, pipeline.bubble_of_ideal, pipeline.bubble_of_whole):
        with pytest.raises(ValueError, match=f"^{re.escape(said)}"):
            call(*given)


SECONDS = [(-1, 2, 1), (1, -2, 0), (1, 2, 3), (1, 2, -1), (0, 0, 0), (float("nan"), 2, 1)]
PAIRS = [("1f1b", 3.0), ("dualpipe", -1.0), ("dualpipe-v", float("nan"))]
FEWEST = [("zb-h1", 4), ("zb-h2", 7), ("zb-v", 8), ("dualpipe", 8), ("dualpipe-v", 8)]
REFUSED = [("1f1b", 8, dict(zip("FBW", times, strict=True)), "F={}, B={}, W={}: ".format(*times)) for times in SECONDS]
REFUSED += [
    (name, 8, {"FB": FB}, f"FB={FB} with schedule={name!r}: give 0 or more seconds, and to 'dualpipe'") for name, FB in PAIRS
]
REFUSED += [(name, m - 1, {}, f"m={m - 1} micro-batches: the closed form of {name} holds from {m}") for name, m in FEWEST]


@pytest.mark.parametrize(("schedule", "m", "seconds", "said"), REFUSED)
def test_seconds_and_micro_batches_without_a_closed_form_are_refused(schedule, m, seconds, said):
    with pytest.raises(ValueError, match=f"^{re.escape(said)}"):
        pipeline.bubble(schedule, 4, m, **seconds)


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_that_the_pipeline_does_not_have_is_refused(rank):
    with pytest.raises(ValueError, match=f"^rank={rank}: must be 0 to 3"):
        pipeline.in_flight("1f1b", 4, 8, rank=rank)
