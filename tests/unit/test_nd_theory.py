"""theory.nd: what a rank of a composed run holds and sends against the theories of single axes; twins of published plans."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyranks.theory import Plan, context, memory, models, nd, sharding, states, tensor
from manyranks.theory.architecture import ModelShape, parameters_of
from manyranks.theory.calls import Calls
from manyranks.theory.nd import holds, sends
from manyranks.theory.published import fit, steps
from manyranks.training.config import GPTConfig
from manyranks.training.runnable import check_plan

LLAMA = GPTConfig(layers=6, hidden=32, heads=4, kv_heads=2, seq=32, vocab=96, tied=False).shape()
GPT2 = GPTConfig(layers=4, hidden=32, heads=4, seq=32, vocab=96, style="gpt2").shape()
EXPERTS = {"experts": 8, "expert_ffn": 16, "shared_experts": 1, "dense_layers": 1}
ROUTED = GPTConfig(layers=4, hidden=32, heads=4, seq=32, vocab=96, tied=False, **EXPERTS).shape()
USUAL = {"seq": 32, "precision": "fp32", "recompute": "none"}


def at_all(plan: Plan) -> list[dict[str, int]]:
    places = [(p, d, c, t) for p in range(plan.pp) for d in range(plan.dp) for c in range(plan.cp) for t in range(plan.tp)]
    return [dict(zip(("pp", "dp", "cp", "tp"), place, strict=True)) for place in places]


def elements(shape: ModelShape, plan: Plan, expert: bool | None = None, **at: int) -> int:
    every = [p for part in holds.parts(shape, plan, at) for p in part.parameters]
    return sum(p.elements for p in every if expert in (None, p.kind.expert))


# What a rank holds


@given(
    st.sampled_from([LLAMA, GPT2, replace(LLAMA, tied=True)]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from(
        [{}, {"pp": 2}, {"pp": 2, "schedule": "zb-v"}, {"pp": 2, "virtual": 2}, {"pp": 4, "embedding_slots": True}]
    ),
)
def test_a_rank_s_parameters_are_those_that_memory_counts(shape, t, stages):
    plan = Plan(tp=t, **USUAL, **stages)
    counted = [held.dense for held in memory.rank_parameters(shape, plan)]
    assert [elements(shape, plan, pp=rank) for rank in range(plan.pp)] == counted


def test_experts_are_dealt_to_expert_parallel_ranks_and_whole_on_each_tensor_parallel_one():
    one, dealt, cut = (Plan(dp=4, **USUAL), Plan(dp=4, ep=4, **USUAL), Plan(dp=4, ep=4, tp=2, **USUAL))
    routed = 3 * 8 * 3 * 16 * 32  # three layers, eight experts, three matrices
    assert elements(ROUTED, one) - elements(ROUTED, dealt) == routed * 3 // 4
    assert elements(ROUTED, dealt, expert=True) == elements(ROUTED, cut, expert=True) == routed // 4
    assert [held.experts for held in memory.rank_parameters(ROUTED, dealt)] == [routed // 4]


def test_a_vocabulary_that_does_not_divide_is_held_with_padding():
    odd = replace(LLAMA, vocab=97)
    assert elements(odd, Plan(tp=2, **USUAL)) == elements(replace(LLAMA, vocab=98), Plan(tp=2, **USUAL))


@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_states_are_what_memory_counts_where_shards_need_no_padding(zero, precision):
    plan = Plan(**USUAL | {"precision": precision}, dp=2, pp=2, tp=2, zero=zero)
    for rank, held in enumerate(memory.rank_parameters(LLAMA, plan)):
        found, counted = nd.of_rank(LLAMA, plan, {"pp": rank}), states.states_of(held, plan)
        if (zero, precision) == (3, "bf16"):  # shards in 32 bits are parameters and masters, and their gradients have as many
            counted = counted._replace(parameters=0, gradients=2 * counted.gradients)
        assert found.padding == 0
        assert (found.parameters, found.gradients, found.masters + found.states) == counted[:3]


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_padding_is_less_than_an_element_a_row_and_shard_and_what_is_stepped_has_a_counter(zero):
    plan = Plan(dp=5, zero=zero, **USUAL)
    rows, found = holds.rows(LLAMA, plan), nd.of_rank(LLAMA, plan, {"dp": 4})
    more = found.total - found.counters - memory.model_states(LLAMA, plan).total
    assert abs(more) < 16 * 5 * len(rows)
    assert found.counters == 4 * (len(rows) if zero < 3 else sum(len(row.parameters) for row in rows))
    assert len(rows) == (2 if zero < 3 else 1 + 6 + 1)
    assert found.padding > 0


def test_experts_are_sharded_over_the_ranks_that_have_them():
    plan = Plan(dp=4, ep=2, zero=1, **USUAL)
    own, others = (sum(r.elements for r in holds.rows(ROUTED, plan) if r.kind.expert == expert) for expert in (True, False))
    assert nd.of_rank(ROUTED, plan).states == 8 * (own // 2 + others // 4)


# What it sends


def test_tensor_parallelism_alone_sends_what_theory_tensor_counts():
    for shape in (LLAMA, GPT2):
        for t, sequence_parallel, regather in ((2, True, True), (4, True, False), (4, False, True)):
            plan = Plan(tp=t, batch=3, zero=0, sequence_parallel=sequence_parallel, regather=regather, **USUAL)
            options = {"sequence_parallel": sequence_parallel, "itemsize": 4}
            for rank in range(t):
                one = tensor.model(shape, 32, t, regather=regather, **options, rank=rank).both
                ends = tensor.finish(shape, t, **options, rank=rank)
                assert nd.calls(shape, plan, {"tp": rank})["tp"] == 3 * one + ends


def test_full_recomputation_says_forward_again_and_selective_does_not():
    none, selective, full = (Plan(tp=2, cp=2, zero=0, **USUAL | {"recompute": r}) for r in ("none", "selective", "full"))
    assert nd.calls(LLAMA, none) == nd.calls(LLAMA, selective)
    layers = 6 * tensor.layer(16, 32, 2, True, itemsize=4).forward
    assert nd.calls(LLAMA, full)["tp"] == nd.calls(LLAMA, none)["tp"] + layers
    ring = 6 * context.ring(1, 32, 2, 1, 8, 2, 4).forward
    assert nd.calls(LLAMA, full)["cp"] == nd.calls(LLAMA, none)["cp"] + ring


@pytest.mark.parametrize("variant", context.VARIANTS)
def test_context_parallelism_sends_each_layer_s_keys_of_the_rank_s_heads(variant):
    plan = Plan(cp=2, tp=2, pp=2, batch=4, context=variant, **USUAL)
    one = context.VARIANTS[variant](1, 32, 2, 1, 8, 2, 4).both
    assert nd.calls(LLAMA, plan)["cp"] == 4 * 3 * one


@pytest.mark.parametrize(("zero", "often"), [(0, 2), (1, 2), (2, 4 + 1), (3, 8 + 4)])
def test_data_parallelism_sends_what_theory_sharding_counts(zero, often):
    """Times (N − 1)/N of the parameters; ZeRO-2 and 3 for each of four micro-batches."""
    plan = Plan(dp=2, batch=8, zero=zero, **USUAL)
    found = nd.payload(LLAMA, plan)["data"]
    if zero == 3:  # the last unit stays from forward to backward
        head = parameters_of(LLAMA.final_norm + LLAMA.head)
        assert found == 4 * (often * LLAMA.parameters - 4 * head) // 2
        one = sharding.sent(sharding.unit_sizes(LLAMA), 2, 3, 4, 4)
        assert found == 4 * one.total
    else:
        assert found == 4 * often * LLAMA.parameters // 2


def test_replicas_average_the_shards_and_the_norm_is_one_number_of_all_ranks():
    plan = Plan(dp=4, dp_shard=2, tp=2, zero=1, **USUAL)
    found = nd.calls(LLAMA, plan, {"dp": 3, "tp": 1})
    held = elements(LLAMA, plan)
    assert found["data"] == Calls() == found["ep_replicas"]
    assert found["shards"] == Calls(all_gather=2, reduce_scatter=2, bytes=2 * 4 * held // 2)
    assert found["replicas"] == Calls(all_reduce=1, bytes=4 * held // 2)
    assert sum(nd.payload(LLAMA, plan, at)["world"] for at in at_all(plan)) == 2 * 7 * 8
    assert nd.payload(LLAMA, Plan(dp=4, zero=0, **USUAL))["world"] == 0


def test_with_zero_tensor_parallel_ranks_sum_shards_of_norms():
    whole, sharded = (nd.payload(LLAMA, Plan(dp=2, tp=2, zero=zero, **USUAL))["tp"] for zero in (0, 1))
    norms = 32 * (2 * 6 + 1)
    assert whole - sharded == 4 * norms // 2


def test_where_a_group_does_not_divide_what_it_sums_its_ranks_send_as_much_together():
    shape, plan = replace(LLAMA, kv_heads=4), Plan(dp=3, tp=4, zero=1, **USUAL)
    norms = -(-32 * (2 * 6 + 1) // 3)  # of a shard
    activations = tensor.model(shape, 32, 4, True, itemsize=4).both.bytes
    assert sum(nd.payload(shape, plan, {"tp": rank})["tp"] - activations for rank in range(4)) == 2 * 3 * norms * 4
    plan = Plan(dp=10, ep=2, zero=0, **USUAL)
    sent = sum(nd.payload(ROUTED, plan, at)["ep_replicas"] for at in at_all(plan))
    assert sent == 2 * 2 * 4 * elements(ROUTED, plan, expert=True) * 4


def test_an_expert_s_gradients_go_to_its_replicas_and_without_zero_its_load_to_all():
    plan = Plan(dp=4, ep=2, zero=0, **USUAL)
    own = elements(ROUTED, plan, expert=True)
    found = nd.calls(ROUTED, plan)
    assert found["ep_replicas"] == Calls(all_reduce=1, bytes=4 * own)
    assert found["data"].bytes == 3 * 2 * (4 * elements(ROUTED, plan, expert=False) + 8 * 3 * 8) // 4
    assert nd.calls(ROUTED, Plan(dp=4, ep=4, zero=0, **USUAL))["ep_replicas"] == Calls()


def test_a_layer_with_experts_has_attention_s_messages_only():
    plan = Plan(tp=2, zero=1, **USUAL)
    dense = tensor.block(32, 32, 2, True, itemsize=4).both
    ends = tensor.embedding(32, 32, 2, True, itemsize=4) + tensor.head(32, 32, 2, True, itemsize=4) + tensor.loss(32, 2)
    without_sums = nd.calls(ROUTED, plan)["tp"].bytes - 4 * sum(
        r.elements for r in holds.rows(ROUTED, plan) if r.kind.over == 2
    )
    assert without_sums == 5 * dense.bytes + ends.both.bytes


@pytest.mark.parametrize(
    ("stages", "messages"),
    [({"pp": 2}, 2), ({"pp": 3}, 4), ({"pp": 2, "virtual": 3}, 10), ({"pp": 3, "schedule": "zb-v"}, 8), ({}, 0)],
)
def test_stages_hand_on_each_micro_batch_and_a_v_keeps_its_turn(stages, messages):
    plan = Plan(batch=4, tp=2, zero=0, **USUAL, **stages)
    found = [nd.calls(LLAMA, plan, {"pp": rank})["pp"] for rank in range(plan.pp)]
    assert sum(found, Calls()) == 4 * messages * Calls(send=1, bytes=16 * 32 * 4)


def test_a_tied_embedding_is_swapped_by_the_ends_unless_one_rank_has_both():
    tied = replace(LLAMA, tied=True)
    extra = []
    for options in ({}, {"schedule": "zb-v"}):
        plan = Plan(pp=3, batch=4, **USUAL, **options)
        extra.append([nd.payload(tied, plan, {"pp": r})["pp"] - nd.payload(LLAMA, plan, {"pp": r})["pp"] for r in range(3)])
    assert extra == [[96 * 32 * 4, 0, 96 * 32 * 4], [0, 0, 0]]
    odd = replace(tied, vocab=97)
    plan = Plan(pp=2, tp=2, zero=1, **USUAL)
    assert nd.payload(odd, plan)["pp"] - nd.payload(replace(odd, tied=False), plan)["pp"] == 49 * 32 * 4
    assert [len(holds.rows(shape, plan)) for shape in (odd, LLAMA)] == [3, 2]  # what two stages have is in a row of its own


def test_what_zero_3_gathers_follows_the_order_of_the_stage_s_actions():
    plan = Plan(dp=2, pp=2, batch=8, zero=3, **USUAL)
    layer, ends = LLAMA.layer_parameters(0), LLAMA.vocab * LLAMA.hidden

    def gathered(order: str) -> int:
        elements = nd.payload(LLAMA, plan, orders={0: order})["data"] // 2  # 4 bytes, and a rank sends half
        return elements - (ends + 3 * layer)  # reduced once

    last = {"FBFBFBFB": 4, "FFFFBBBB": 1, "FFBFBFBB": 3, "FIWFIWFIWFIW": 4}
    for order, kept in last.items():  # a backward right after a forward finds the last layer
        assert gathered(order) == 8 * (ends + 3 * layer) - kept * layer
    # Where W is late, I leaves all, and the next forward finds it.
    assert gathered("FIFIWWFIFIWW") == 2 * ((ends + 3 * layer) + 2 * (ends + 2 * layer))


def test_a_stage_of_one_unit_is_not_freed_between_forwards():
    plan = Plan(
        dp=2, pp=2, batch=6, virtual=3, zero=3, **USUAL
    )  # stages 0, 2 and 4: the embedding and a layer, a layer, a layer
    found = nd.calls(LLAMA, plan, orders=dict.fromkeys((0, 2, 4), "FFFBBB"))["data"]
    assert found.all_gather == 6 + (6 - 1) + 2 * 3
    assert found.reduce_scatter == 1 + 3


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: nd.payload(LLAMA, Plan(**USUAL), {"pq": 0}), "at has 'pq'"),
        (lambda: nd.payload(LLAMA, Plan(dp=2, **USUAL), {"dp": 2}), "dp=2: the plan has dp = 0 to 1"),
        (lambda: nd.of_rank(models["deepseek-v3"], Plan(**USUAL)), "has latent=.* nd.twin"),
        (lambda: nd.of_rank(models["gemma2-2b"], Plan(**USUAL)), "has norms_per_layer=4"),
        (lambda: nd.calls(LLAMA, Plan(tp=3, **USUAL)), "tp=3 does not divide"),
        (lambda: nd.calls("llama3-8b", Plan(**USUAL)), "shape='llama3-8b'"),
        (lambda: nd.payload(LLAMA, Plan(pp=2, zero=3, **USUAL)), r"orders=None: .* stages \[0\]"),
        (lambda: nd.payload(LLAMA, Plan(virtual=2, zero=3, **USUAL)), r"orders=None: .* stages \[0, 1\]"),
        (lambda: nd.twin(LLAMA, Plan(dp=2, pp=2, tp=2, **USUAL), 4), "ranks=4: a twin with pp=2, dp=2, tp=2 needs 8"),
        (lambda: nd.twin(LLAMA, Plan(dp=8, dp_shard=4, tp=2, zero=3, **USUAL), 4), "dp=4, tp=2 needs 8"),
        (lambda: nd.twin(LLAMA, Plan(tp=3, **USUAL)), "tp=3 does not divide"),
        (lambda: nd.twin("llama3-8b", Plan(**USUAL)), "shape='llama3-8b'"),
    ],
)
def test_what_cannot_be_is_refused_in_words(call, said):
    with pytest.raises(ValueError, match=said):
        call()


# Twins

ROWS = {row.name: row for table in fit.TABLES for row in steps.of(table)}


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("ranks", [8, 16])
def test_each_published_run_has_a_twin_that_the_trainer_takes(name, ranks):
    shape, plan = ROWS[name].shape, ROWS[name].plan
    used = [axis for axis in ("dp", "pp", "cp", "tp", "ep") if getattr(plan, axis) > 1]
    if ranks < 2 ** (len(used) - (plan.ep > 1)):
        with pytest.raises(ValueError, match="needs 16"):
            nd.twin(shape, plan, ranks)
        return
    found = nd.twin(shape, plan, ranks)
    gpt = GPTConfig(**found.gpt)
    assert gpt.shape() == found.shape
    check_plan(gpt, found.plan, found.plan.gpus)
    assert found.plan.gpus == min(ranks, plan.gpus)
    assert [axis for axis in used if getattr(found.plan, axis) < 2] == []
    assert shape.heads // shape.kv_heads == found.shape.heads // found.shape.kv_heads
    for field in ("recompute", "zero", "sequence_parallel", "context", "embedding_slots"):
        assert getattr(found.plan, field) == getattr(plan, field)
    assert (found.plan.virtual > 1) == (plan.virtual > 1)


def test_llama_3_s_twin_keeps_its_stages_heads_and_slots():
    found = nd.twin(ROWS["16,384 GPUs, 8,192 tokens"].shape, ROWS["16,384 GPUs, 8,192 tokens"].plan)
    plan = found.plan
    assert (plan.dp, plan.pp, plan.cp, plan.tp, plan.virtual, plan.microbatches) == (2, 4, 1, 2, 2, 4)
    assert (found.shape.layers, found.shape.kv_heads, found.shape.heads, found.shape.tied) == (6, 2, 32, False)  # 126 = 128 − 2
    assert (found.shrunk["pp"], found.shrunk["ranks"]) == ("16 → 4", "16,384 → 16")
    assert found.kept["stages"] == "even, embedding and head count as layers"
    assert found.changed == {"precision": "bf16-fp32-gradients → fp32: so that numbers can be compared"}


def test_deepseek_v3_s_twin_has_experts_on_some_ranks_and_says_what_it_lost():
    found = nd.twin(ROWS["2,048 H800"].shape, ROWS["2,048 H800"].plan)
    plan, shape = found.plan, found.shape
    assert (plan.dp, plan.pp, plan.ep, plan.schedule) == (4, 4, 2, "dualpipe-v")
    assert (shape.experts, shape.top_k, shape.expert_groups, shape.groups_per_token) == (8, 2, 4, 2)
    assert (shape.shared_experts, shape.dense_layers, shape.layers) == (1, 1, 8 + 6)  # 61 = 3·16 + 13
    eight = nd.twin(ROWS["2,048 H800"].shape, ROWS["2,048 H800"].plan, 8).plan
    assert (eight.dp, eight.pp, eight.ep) == (4, 2, 2)
    assert set(found.changed) == {"precision", "schedule", "latent", "shape"}
    assert "mtp_depth" in found.changed["shape"]


def test_replicas_of_shards_stay_and_with_context_parallelism_that_makes_the_shards():
    shape = models["llama3-70b"]
    plain = nd.twin(shape, Plan(dp=64, dp_shard=8, tp=8, zero=3, seq=8192)).plan
    both = nd.twin(shape, Plan(dp=16, dp_shard=8, cp=2, tp=8, pp=4, zero=1, seq=8192)).plan
    assert (plain.dp, plain.dp_shard, plain.tp, plain.zero) == (4, 2, 4, 3)
    assert (both.dp, both.dp_shard, both.cp, both.shards) == (2, 1, 2, 2)


def test_what_the_trainer_cannot_is_changed_and_said():
    shape = models["llama3.2-1b"]
    found = nd.twin(shape, Plan(dp=8, pp=4, zero=3, reshard_after_forward=False, seq=4096, flash=False, offload="optimizer"))
    assert not found.shape.tied
    assert set(found.changed) == {"tied", "precision", "reshard_after_forward", "flash", "offload"}
    two = nd.twin(shape, Plan(dp=8, pp=4, zero=2, seq=4096))
    assert (two.plan.zero, "zero" in two.kept, two.changed["zero"][:5]) == (1, False, "2 → 1")
    routed = nd.twin(models["mixtral-8x7b"], Plan(dp=8, dp_shard=4, ep=4, tp=2, zero=1, seq=4096, sequence_parallel=False))
    assert (routed.plan.sequence_parallel, routed.plan.dp_shard) == (True, None)
    assert {"dp_shard", "sequence_parallel"} <= set(routed.changed)


def test_more_ranks_than_key_value_heads_still_have_copies_and_whole_heads_for_ulysses():
    copies = nd.twin(models["llama3-70b"], Plan(tp=16, seq=8192))
    assert (copies.plan.tp, copies.shape.kv_heads) == (16, 8)
    ulysses = nd.twin(models["llama3-70b"], Plan(cp=8, tp=2, context="ulysses", seq=8192))
    assert ulysses.shape.heads % (ulysses.plan.tp * ulysses.plan.cp) == 0


def test_a_vocabulary_that_does_not_divide_stays_one():
    assert nd.twin(models["gpt2"], Plan(tp=2, seq=1024)).shape.vocab == 257
    assert nd.twin(models["gpt2"], Plan(dp=2, seq=1024)).shape.vocab == 256


def test_a_twin_of_a_twin_has_the_same_degrees():
    row = ROWS["16,384 GPUs, 131,072 tokens"]
    once = nd.twin(row.shape, row.plan)
    twice = nd.twin(once.shape, once.plan)
    assert twice.plan == once.plan
    assert twice.shape == once.shape
    assert not {"ranks", "dp", "pp", "cp", "tp"} & set(twice.shrunk)


def test_every_axis_is_named():
    assert tuple(nd.calls(LLAMA, Plan(**USUAL))) == sends.AXES


def test_a_twin_does_not_keep_what_it_changes_and_does_not_shrink_what_grows():
    twin = nd.twin(models["mixtral-8x7b"], Plan(tp=2, dp=2, sequence_parallel=False, seq=4096))
    assert "sequence_parallel" in twin.changed
    assert "sequence_parallel" not in twin.kept
    grown = nd.twin(models["mixtral-8x7b"], Plan(dp=8, ep=8, batch=8, seq=4096))
    assert grown.changed["experts"].startswith("8 → 32")
    assert "experts" not in grown.shrunk


def test_an_itemsize_of_nothing_is_refused():
    with pytest.raises(ValueError, match="itemsize=0"):
        sends.calls(models["llama3-8b"], Plan(dp=2), itemsize=0)
