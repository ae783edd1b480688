"""theory.plan and theory.stages: what a plan refuses and says, what its degrees mean, and how layers are dealt to stages."""

import re
from dataclasses import fields, replace
from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyranks import theory
from manyranks.theory import memory, stages
from manyranks.theory.architecture import LatentAttention, ModelShape
from manyranks.theory.plan import Plan

TINY = ModelShape("tiny", layers=8, hidden=64, ffn=128, heads=8, vocab=100, kv_heads=2)
ROUTED = replace(TINY, name="routed", experts=6, top_k=2, expert_ffn=32, dense_layers=1)
GPT = replace(TINY, name="gpt", gated=False, norm="layernorm", dropout=True)
COUNTS = ("dp", "pp", "cp", "tp", "ep", "seq", "batch", "microbatch", "virtual", "dp_shard", "etp")
FLAGS = ("sequence_parallel", "reshard_after_forward", "overlap", "overlap_tensor", "flash", "embedding_slots", "regather")
NAMES = ("schedule", "recompute", "precision", "context", "offload", "stack")


def test_the_design_s_call_works_as_written():
    plan = theory.Plan(dp=64, pp=16, cp=1, tp=8, ep=1, seq=8192, batch=2048, microbatch=1, schedule="1f1b", virtual=1,
                       sequence_parallel=True, zero=1, dp_shard=None, reshard_after_forward=True, recompute="selective",
                       precision="bf16", overlap=True)  # fmt: skip
    assert (plan.gpus, plan.microbatches, plan.tokens, plan.stages) == (8192, 32, 2048 * 8192, 16)
    positional = theory.Plan(64, 16, 1, 8, 1, 8192, 2048, 1, "1f1b", 1, True, 1, None, True, "selective", "bf16", True)
    assert positional == plan
    shape = theory.models["llama3-405b"]
    assert min(memory.model_states(shape, plan).total, memory.activations(shape, plan)) > 0


def test_every_field_is_one_of_the_kinds_tested_here():
    assert {field.name for field in fields(Plan)} == {*COUNTS, *FLAGS, *NAMES, "zero", "offload_layers"}


@pytest.mark.parametrize(("name", "value"), [*product(COUNTS, [0, -1, -64, 1.0, 2.5, True, False, "2", "", [1], float("nan")])])
def test_a_count_that_is_no_whole_number_from_one_up_is_refused_by_its_name(name, value):
    with pytest.raises(ValueError, match=f"^{re.escape(f'{name}={value!r}: must be a whole number, 1 or more')}"):
        Plan(**{name: value})


@pytest.mark.parametrize("name", [name for name in COUNTS if name not in ("batch", "dp_shard", "etp")])
def test_only_the_batch_the_shards_and_etp_may_be_left_open(name):
    with pytest.raises(ValueError, match=f"^{name}=None"):
        Plan(**{name: None})
    assert (Plan(dp=3, microbatch=2).batch, Plan(dp=3, cp=2).shards) == (6, 6)


@pytest.mark.parametrize("value", [-1, 4, 100, 1.0, True, "1", None])
def test_a_zero_stage_that_does_not_exist_is_refused(value):
    with pytest.raises(ValueError, match=f"^zero={re.escape(repr(value))}: "):
        Plan(zero=value)


@pytest.mark.parametrize(("name", "value"), [*product(FLAGS, [0, 1, "yes", "", None, 1.0, [True]])])
def test_a_flag_that_is_not_true_or_false_is_refused(name, value):
    with pytest.raises(ValueError, match=f"^{re.escape(f'{name}={value!r}: must be True or False')}"):
        Plan(**{name: value})


@pytest.mark.parametrize(
    ("name", "value", "meant"),
    [
        ("schedule", "1F1B", "1f1b"),
        ("schedule", "interleave", "interleaved"),
        ("schedule", "zb_h1", "zb-h1"),
        ("schedule", "DualPipe", "dualpipe"),
        ("recompute", "ful", "full"),
        ("precision", "bfloat16", "bf16"),
        ("precision", "FP8", "fp8"),
        ("context", "allgather", "all-gather"),
        ("offload", "optimize", "optimizer"),
    ],
)
def test_an_unknown_name_gives_the_nearest_known_one(name, value, meant):
    with pytest.raises(ValueError, match=f"^{name}={value!r}: did you mean '{meant}'"):
        Plan(**{name: value})


@pytest.mark.parametrize(("name", "value"), [*product(NAMES, [None, 0, True, "", 1.5, ["bf16"], {"none": 1}])])
def test_a_name_that_is_no_name_is_refused_by_the_field_s_name(name, value):
    with pytest.raises(ValueError, match=f"^{re.escape(f'{name}={value!r}: ')}.*choose from "):
        Plan(**{name: value})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"dp": 4, "batch": 10}, "batch=10 is not a multiple of dp·microbatch = 4·1 = 4: give 8 or 12"),
        ({"dp": 4, "microbatch": 2, "batch": 4}, "batch=4 is not a multiple of dp·microbatch = 4·2 = 8: give 8"),
        ({"cp": 3, "seq": 100}, "seq=100 is not a multiple of cp=3: give 99 or 102"),
        ({"dp": 4, "cp": 2, "ep": 3}, "ep=3 does not divide dp·cp = 4·2 = 8: choose a divisor of 8"),
        ({"dp": 2, "tp": 8, "ep": 8}, "ep=8 does not divide dp·cp = 2·1 = 2: choose a divisor of 2"),
        ({"dp": 2, "tp": 4, "etp": 3}, "etp·ep = 3·1 = 3 does not divide tp·cp·dp = 4·1·2 = 8: choose a divisor of 8"),
        ({"dp": 2, "tp": 4, "ep": 4, "etp": 4}, "ep=4 does not divide dp·cp = 2·1 = 2: choose a divisor of 2"),
        ({"dp": 2, "tp": 4, "ep": 16, "etp": 1}, "etp·ep = 1·16 = 16 does not divide tp·cp·dp = 4·1·2 = 8"),
        ({"tp": 4, "etp": 1, "sequence_parallel": False}, "etp=1 with tp=4 and sequence_parallel=False: tensor-parallel ranks"),
        (
            {"dp": 6, "dp_shard": 3, "tp": 2, "ep": 4, "etp": 1},
            "etp·ep = 4 and tp·dp_shard·cp = 6: choose them so that one divides the other",
        ),
        ({"dp": 6, "dp_shard": 4}, "dp_shard=4 does not divide dp=6: replicas × shards = dp, so choose a divisor of 6"),
        ({"dp": 2, "dp_shard": 4}, "dp_shard=4 does not divide dp=2"),
        ({"pp": 3, "schedule": "dualpipe"}, "pp=3 with schedule='dualpipe', which runs from both ends: give an even pp"),
        *(
            ({"pp": 2, "schedule": name, "virtual": 2}, f"virtual=2 with schedule='{name}': only '1f1b' and 'interleaved' take")
            for name in ("naive", "gpipe", "zb-h1", "zb-h2", "zb-v", "dualpipe", "dualpipe-v")
        ),
    ],
)
def test_degrees_that_do_not_go_together_are_refused_with_the_way_out(given, said):
    with pytest.raises(ValueError, match=f"^{re.escape(said)}"):
        Plan(**given)


def test_one_rank_may_be_said_to_run_any_schedule():
    assert Plan(pp=1, schedule="dualpipe").gpus == 1


@pytest.mark.parametrize(
    ("shape", "given", "said"),
    [
        (TINY, {"tp": 3}, "tp=3 does not divide the 8 heads of tiny: choose a divisor"),
        (replace(TINY, heads=12, head_size=4, kv_heads=6), {"tp": 4}, "tp=4 and 6 key/value heads of tiny"),
        (replace(TINY, ffn=130), {"tp": 4}, "tp=4 does not divide ffn=130 of tiny: choose a divisor of it and of the heads"),
        (replace(ROUTED, expert_ffn=33), {"tp": 2}, "tp=2 does not divide expert_ffn=33 of routed"),
        (replace(ROUTED, shared_experts=1, shared_ffn=35), {"tp": 2}, "tp=2 does not divide shared_ffn=35 of routed"),
        (
            TINY,
            {"tp": 8, "seq": 100},
            "seq=100 must be a multiple of cp·tp = 1·8 = 8 for sequence parallelism: use 96 or 104",
        ),
        (TINY, {"tp": 2, "cp": 5, "seq": 105}, "seq=105 must be a multiple of cp·tp = 5·2 = 10 for sequence parallelism"),
        (TINY, {"cp": 3, "seq": 99, "context": "ulysses"}, "Ulysses: cp=3 does not divide a rank's 8 heads"),
        (
            replace(TINY, heads=12, head_size=8, kv_heads=6),
            {"cp": 4, "context": "ulysses"},
            "Ulysses: cp=4 and a rank's 6 key/value heads: one must divide the other",
        ),
        (TINY, {"pp": 9}, "8 layers of tiny on 9 stages: lower pp=9"),
        (TINY, {"pp": 4, "virtual": 3}, "8 layers of tiny on 12 stages: lower pp=4 or virtual=3"),
        (TINY, {"pp": 5, "schedule": "zb-v"}, "8 layers of tiny on 10 stages: lower pp=5"),
        (TINY, {"pp": 11, "embedding_slots": True}, "8 layers of tiny on 11 stages: lower pp=11"),
        (TINY, {"dp": 2, "ep": 2}, "ep=2: tiny has no experts; say ep=1"),
        (TINY, {"tp": 2, "etp": 1}, "etp=1: tiny has no experts; leave etp out"),
        (TINY, {"etp": 1}, "etp=1: tiny has no experts; leave etp out"),
        (
            replace(ROUTED, expert_ffn=33),
            {"dp": 2, "etp": 2},
            "etp=2 does not divide expert_ffn=33 of routed: choose a divisor",
        ),
        (ROUTED, {"tp": 4, "ep": 4, "etp": 1}, "ep=4 does not divide the 6 routed experts of routed: choose a divisor"),
        (ROUTED, {"dp": 4, "ep": 4}, "ep=4 does not divide the 6 routed experts of routed: choose a divisor"),
    ],
)
def test_a_plan_that_does_not_fit_the_shape_is_refused_before_any_work(shape, given, said):
    plan = Plan(**given)
    for work in (plan.check, lambda s: memory.model_states(s, plan), lambda s: memory.activations(s, plan)):
        with pytest.raises(ValueError, match=f"^{re.escape(said)}"):
            work(shape)
    for work in (memory.peak, memory.rank_parameters, stages.of_ranks):
        with pytest.raises(ValueError, match=f"^{re.escape(said)}"):
            work(shape, plan)


def test_a_sequence_that_t_does_not_divide_goes_without_sequence_parallelism():
    Plan(tp=8, seq=100, sequence_parallel=False).check(TINY)


def test_what_no_layer_has_need_not_be_cut():
    Plan(tp=2).check(replace(ROUTED, dense_layers=0, ffn=33))
    Plan(tp=2, etp=1).check(replace(ROUTED, expert_ffn=33))


def test_a_plan_for_another_number_of_accelerators_is_refused():
    plan = Plan(dp=2, pp=2, tp=4)
    plan.check(TINY, 16)
    with pytest.raises(ValueError, match=re.escape("dp·cp·tp·pp = 2·1·4·2 = 16 ranks for 32 GPUs: choose degrees")):
        plan.check(TINY, 32)


@pytest.mark.parametrize(
    ("given", "ranks", "shards"),
    [
        ({"dp": 8, "tp": 4, "ep": 8}, 1, 1),
        ({"dp": 8, "tp": 4, "ep": 8, "etp": 4}, 1, 1),
        ({"dp": 8, "tp": 4, "ep": 8, "etp": 1}, 4, 4),
        ({"dp": 8, "tp": 4, "ep": 8, "etp": 2, "cp": 2}, 4, 4),
        ({"dp": 8, "dp_shard": 2, "tp": 4, "ep": 4, "etp": 1}, 8, 2),
        ({"dp": 8, "dp_shard": 2, "tp": 4, "ep": 32, "etp": 1}, 1, 1),
        ({"dp": 4, "ep": 2, "etp": 2}, 1, 1),
    ],
)
def test_experts_divide_the_same_ranks_of_a_stage_in_their_own_way(given, ranks, shards):
    plan = Plan(seq=64, **given)
    assert (plan.expert_ranks, plan.expert_shards) == (ranks, shards)
    assert plan.expert_tp * plan.ep * plan.expert_ranks == plan.tp * plan.cp * plan.dp
    assert plan.gpus == plan.dp * plan.cp * plan.tp * plan.pp


def test_an_etp_that_is_left_out_follows_tp():
    plan = Plan(dp=2, tp=2)
    assert (plan.expert_tp, replace(plan, tp=4).expert_tp, replace(plan, tp=4, etp=2).expert_tp) == (2, 4, 2)
    assert repr(replace(plan, etp=1)).endswith("etp=1)")


def test_a_local_plan_keeps_what_a_layer_depends_on():
    plan = Plan(dp=8, pp=4, cp=2, tp=4, ep=4, seq=4096, microbatch=2, recompute="full", precision="fp8", flash=False)
    local = plan.layer_plan
    assert all(getattr(local, name) == getattr(plan, name) for name in (*local._fields, "recipe", "framework"))
    assert replace(plan, dp=16, batch=32, pp=1, zero=3, schedule="gpipe").layer_plan == local
    assert replace(plan, stack="torchtitan").layer_plan != local


@pytest.mark.parametrize(("layers", "count"), [(126, 16), (61, 16), (126, 1), (1, 1), (5, 5), (7, 2)])
def test_layers_are_dealt_evenly_and_the_ends_get_the_fewer(layers, count):
    dealt = [stage.layers for stage in stages.deal_stages(replace(TINY, layers=layers), count)]
    assert sum(dealt) == layers
    assert max(dealt) - min(dealt) <= 1
    if layers % count <= max(0, count - 2):
        assert dealt[0] == dealt[-1] == min(dealt)


@given(st.integers(1, 130), st.data(), st.booleans())
def test_stages_sum_to_the_whole_and_differ_by_one_slot(layers, data, slots):
    shape = replace(ROUTED, layers=layers, dense_layers=data.draw(st.integers(0, layers)), mtp_depth=1)
    dealt = stages.deal_stages(shape, data.draw(st.integers(1, layers + 2 * slots)), slots)
    assert sum(stage.dense for stage in dealt) == shape.dense_layers
    assert sum(stage.moe for stage in dealt) == shape.moe_layers
    assert all(later.dense == 0 for stage, later in pairwise(dealt) if stage.moe)
    assert [stage.embedding for stage in dealt] == [1] + [0] * (len(dealt) - 1)
    assert [stage.head for stage in dealt] == [stage.mtp for stage in dealt] == [0] * (len(dealt) - 1) + [1]
    sizes = [stage.layers + slots * (stage.embedding + stage.head) for stage in dealt]
    assert min(stage.layers for stage in dealt) >= 0
    assert max(sizes) - min(sizes) <= 1


def test_llama_3_s_first_stage_has_only_the_embedding_and_its_last_only_the_head():
    dealt = stages.deal_stages(theory.models["llama3-405b"], 128, slots=True)
    assert (dealt[0], dealt[-1]) == (stages.Stage(embedding=1), stages.Stage(head=1))
    assert {stage.layers for stage in dealt[1:-1]} == {1}


@pytest.mark.parametrize(("count", "slots"), [(0, False), (-1, False), (9, False), (11, True)])
def test_more_stages_than_layers_are_refused(count, slots):
    with pytest.raises(ValueError, match=f"^stages={count}: tiny has {10 if slots else 8}"):
        stages.deal_stages(TINY, count, slots)


@pytest.mark.parametrize(
    ("schedule", "virtual", "own"),
    [
        ("1f1b", 1, [[0], [1], [2], [3]]),
        ("interleaved", 2, [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("zb-v", 1, [[0, 7], [1, 6], [2, 5], [3, 4]]),
        ("dualpipe-v", 1, [[0, 7], [1, 6], [2, 5], [3, 4]]),
    ],
)
def test_ranks_have_the_stages_that_their_schedule_gives_them(schedule, virtual, own):
    plan = Plan(pp=4, schedule=schedule, virtual=virtual)
    assert [stages.stages_of(rank, 4, plan.stages, schedule) for rank in range(4)] == own
    held = stages.of_ranks(TINY, plan)
    assert [stage.layers for stage in held] == [2] * 4
    assert sum(stage.embedding for stage in held) == sum(stage.head for stage in held) == 1


@pytest.mark.parametrize(
    ("given", "same"),
    [
        ({"schedule": "interleaved", "pp": 4, "batch": 8}, {"schedule": "1f1b", "pp": 4, "batch": 8}),
        ({"dp": 4, "dp_shard": 4, "zero": 3}, {"dp": 4, "zero": 3}),
        ({"dp": 4, "ep": 1, "cp": 1, "tp": 1, "pp": 1, "virtual": 1}, {"dp": 4}),
        ({"tp": 1, "sequence_parallel": True}, {"tp": 1, "sequence_parallel": False}),
        ({"cp": 1, "context": "ring"}, {"cp": 1, "context": "ulysses"}),
        ({"dp": 1, "zero": 0}, {"dp": 1, "zero": 1}),
    ],
)
@pytest.mark.parametrize("shape", [TINY, ROUTED], ids=lambda shape: shape.name)
def test_a_degree_of_one_changes_nothing(shape, given, same):
    one, other = Plan(seq=64, **given), Plan(seq=64, **same)
    for quantity in (memory.model_states, memory.activations, memory.rank_parameters, stages.of_ranks):
        assert quantity(shape, one) == quantity(shape, other)
    assert memory.peak(shape, one) == memory.peak(shape, other)


@given(st.sampled_from([TINY, ROUTED, GPT]), st.data())
def test_activations_never_rise_with_more_ranks_or_more_recomputation(shape, data):
    orders = {"tp": (1, 2, 4, 8), "cp": (1, 2, 4, 8), "recompute": ("none", "selective", "full")}
    raised = data.draw(st.sampled_from(sorted(orders)))
    given = {name: data.draw(st.sampled_from(order)) for name, order in orders.items() if name != raised}
    given |= {"flash": data.draw(st.booleans()), "pp": data.draw(st.sampled_from([1, 2, 4])), "seq": 64, "batch": 8}
    given |= {"precision": data.draw(st.sampled_from(["bf16", "fp32", "fp8"]))}
    kept = [memory.activations(shape, Plan(**given, **{raised: value})) for value in orders[raised]]
    assert kept == sorted(kept, reverse=True)


@given(st.sampled_from([TINY, ROUTED, GPT]), st.integers(0, 3), st.sampled_from(["1f1b", "dualpipe", "gpipe"]), st.booleans())
def test_recomputation_never_raises_the_peak(shape, zero, schedule, flash):
    given = {"dp": 2, "pp": 2, "tp": 2, "zero": zero, "schedule": schedule, "batch": 16, "seq": 64, "flash": flash}
    totals = [memory.peak(shape, Plan(recompute=kind, **given)).total for kind in ("none", "selective", "full")]
    assert totals == sorted(totals, reverse=True)


@pytest.mark.parametrize("cp", [2, 4, 8])
def test_context_ranks_share_the_activations_evenly(cp):
    one, shared = (memory.activations(TINY, Plan(cp=c, seq=512, recompute="none")) for c in (1, cp))
    assert one == cp * shared


def test_tensor_ranks_beyond_the_key_and_value_heads_keep_a_copy_of_one():
    copied, own = (memory.activations(replace(TINY, kv_heads=heads), Plan(tp=8, seq=64)) for heads in (1, 8))
    assert copied == own


@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_a_routed_layer_keeps_what_a_dense_one_as_wide_does_and_a_copy_of_the_input_for_each_expert(recompute):
    plan, tokens = Plan(seq=64, microbatch=2, recompute=recompute), 64 * 2
    routed = replace(ROUTED, top_k=3, shared_experts=2, shared_ffn=5)
    dense = memory.layer_activations(replace(TINY, ffn=3 * 32 + 2 * 5), plan)
    assert memory.layer_activations(routed, plan, moe=True) - dense == tokens * 3 * 2 * TINY.hidden


def test_experts_are_sharded_over_the_ranks_that_have_the_same_ones():
    shape, bf16 = replace(ROUTED, experts=8), 16
    experts = shape.moe_layers * 8 * shape.expert_parameters
    dense = shape.parameters - experts
    for ep in (1, 2, 8):
        assert memory.model_states(shape, Plan(dp=8, ep=ep, zero=3)).total == bf16 * (dense + experts) // 8
        assert memory.model_states(shape, Plan(dp=8, ep=ep, zero=0)).total == bf16 * (dense + experts // ep)


def test_latent_attention_is_compressed_on_every_tensor_rank_and_what_it_expands_is_shared_and_recomputed():
    shape = replace(TINY, latent=LatentAttention(12, 16, 6, 2, 4), kv_heads=8, head_size=8)
    kept = {}
    for recompute, tp in product(("none", "selective"), (1, 2)):
        kept[recompute, tp] = memory.layer_activations(shape, Plan(tp=tp, seq=64, recompute=recompute))
    for recompute in ("none", "selective"):  # x + y/t: the compressed queries, keys and values, and the one rotary key, are x
        assert 2 * kept[recompute, 2] - kept[recompute, 1] == 64 * 2 * (12 + 16 + 2)
    expanded = 8 * (2 * (6 + 2) + 4)  # queries, keys and values of all heads
    assert kept["none", 1] - kept["selective", 1] == 64 * 2 * (expanded + 2 * shape.hidden + shape.ffn)
