"""theory.tensor: calls, payload, kept bytes and parameters of a cut layer against the papers' formulas."""

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyranks.theory import Plan, checkpointing, clusters, kernels, memory, models, pace, step, tensor
from manyranks.theory.architecture import ModelShape, parameters_of
from manyranks.theory.calls import Calls, Passes
from tests.unit import exposed

PAPER = models["megatron-22b"]
GROUPED = models["llama3-70b"]
GPT = ModelShape("gpt", 4, 32, 128, 4, 96, gated=False, norm="layernorm", bias=True, dropout=True, positions=64, tied=True)
LLAMA = ModelShape("llama", 4, 32, 80, 8, 96, kv_heads=2)
NO_FLASH = {"seq": 2048, "flash": False, "precision": "fp16", "recompute": "none"}


# Calls and payload


def test_a_layer_has_two_all_reduces_each_way():
    forward, backward = tensor.layer(64, 32, 4)
    assert forward == backward == Calls(all_reduce=2, bytes=2 * 2 * 3 * 64 * 32 * 2 // 4)


def test_with_sequence_parallelism_six_gathers_and_four_reduce_scatters_or_four_and_four():
    one = 3 * 64 * 32 * 2 // 4
    assert tensor.layer(64, 32, 4, True).both == Calls(0, 6, 4, 10 * one)
    assert tensor.layer(64, 32, 4, True) == (Calls(0, 2, 2, 4 * one), Calls(0, 4, 2, 6 * one))
    assert tensor.layer(64, 32, 4, True, regather=False).both == Calls(0, 4, 4, 8 * one)


@given(st.integers(1, 50), st.integers(1, 9), st.sampled_from([1, 2, 4, 8]), st.sampled_from([2, 4, 8]))
def test_sequence_parallelism_without_regathering_sends_as_much_as_tensor_parallelism(tokens, hidden, t, itemsize):
    sizes = (t * tokens, hidden, t)
    without, plain = (
        tensor.layer(*sizes, **options, itemsize=itemsize) for options in ({"sequence_parallel": True, "regather": False}, {})
    )
    assert without.both.bytes == plain.both.bytes == 4 * 2 * (t - 1) * tokens * hidden * itemsize
    again = tensor.layer(*sizes, sequence_parallel=True, itemsize=itemsize)
    assert 4 * again.both.bytes == 5 * plain.both.bytes


@given(st.integers(1, 40), st.integers(1, 7), st.integers(2, 5))
def test_where_t_does_not_divide_the_tensor_the_ranks_bytes_differ_and_add_up(tokens, hidden, t):
    sent = [tensor.layer(tokens, hidden, t, rank=rank).both.bytes for rank in range(t)]
    assert sum(sent) == 4 * 2 * (t - 1) * tokens * hidden * 2


def test_one_rank_sends_nothing():
    assert tensor.model(GPT, 16, 1, True).both == Calls()
    assert tensor.finish(GPT, 1, True) == Calls()


def test_a_model_is_its_embedding_layers_head_and_loss():
    sizes = (64, 32, 2, True, True, 4)
    parts = tensor.embedding(*sizes) + 4 * tensor.layer(*sizes) + tensor.head(*sizes) + tensor.loss(64, 2)
    assert tensor.model(GPT, 64, 2, True, True, 4) == parts
    assert parts.both.count == 2 + 4 * 10 + 3 + 2
    assert tensor.embedding(64, 32, 2) == Passes(Calls(all_reduce=1, bytes=64 * 32 * 2))
    assert tensor.head(64, 32, 2) == Passes(backward=Calls(all_reduce=1, bytes=64 * 32 * 2))
    parallel = replace(LLAMA, parallel_layers=True, norms_per_layer=1)
    assert tensor.model(parallel, 64, 2).both.count == 1 + 4 * 2 + 1 + 2


def test_the_loss_sends_three_numbers_a_token():
    assert tensor.loss(100, 4) == Passes(Calls(all_reduce=2, bytes=2 * 3 * 3 * 100 * 4 // 4))


@pytest.mark.parametrize("regather", [True, False])
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_the_time_of_a_layer_s_calls_is_that_of_its_bytes(sequence_parallel, regather):
    """A step charges what tensor.layer counts, where nothing overlaps."""
    cluster = clusters["h100-dgx"]
    plan = Plan(tp=8, seq=1024, overlap=False, sequence_parallel=sequence_parallel, regather=regather)
    free = kernels.Constants(overhead=0.0)
    links = cluster.with_link("node", latency=0.0)
    seconds = exposed.tensor(GROUPED, plan, links, constants=free)
    calls = tensor.layer(1024, GROUPED.hidden, 8, sequence_parallel, regather)
    rate = links.accelerator.scale_up * free.bandwidth
    assert seconds == pytest.approx([each.bytes / rate for each in calls])


# What a layer keeps


@pytest.mark.parametrize("t", [1, 2, 4, 8])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_what_is_kept_is_the_paper_s(sequence_parallel, t):
    plan = Plan(tp=t, microbatch=4, sequence_parallel=sequence_parallel, **NO_FLASH)
    kept = tensor.saved(PAPER, plan)
    assert kept.outside + kept.inside == memory.layer_activations(PAPER, plan)  # the paper's formulas: test_memory
    assert kept.outside == 10 * 4 * 2048 * PAPER.hidden // (t if sequence_parallel else 1)
    assert kept.statistics == 2 * 2 * 4 * 4 * 2048 // (t if sequence_parallel else 1)
    assert kept.total == sum(kept)


@given(st.sampled_from([1, 2, 4, 8]), st.integers(1, 4), st.sampled_from(["none", "selective"]), st.booleans())
def test_without_regathering_4sbh_more_are_kept_all_but_the_own_part(t, b, recompute, flash):
    plan = Plan(tp=t, microbatch=b, **NO_FLASH | {"recompute": recompute, "flash": flash})
    more = tensor.saved(PAPER, replace(plan, regather=False)).total - tensor.saved(PAPER, plan).total
    assert more == 4 * 2048 * b * PAPER.hidden * (t - 1) // t


def test_without_regathering_whole_inputs_stay():
    """The head's, too; a layer's, though selective recomputation redoes an RMSNorm. Plain tensor parallelism
    keeps them anyway."""
    plan = Plan(tp=4, **NO_FLASH)
    kept, again = (memory.activations(PAPER, each) for each in (replace(plan, regather=False), plan))
    assert kept - again == (PAPER.layers * 4 + 2) * 2048 * PAPER.hidden * 3 // 4
    kept, again = (tensor.saved(GROUPED, Plan(tp=4, seq=1024, regather=regather)).outside for regather in (False, True))
    assert kept - again == 2 * 2 * 1024 * GROUPED.hidden
    plain = replace(plan, sequence_parallel=False)
    assert tensor.saved(PAPER, plain) == tensor.saved(PAPER, replace(plain, regather=False))


def test_full_recomputation_keeps_the_layer_s_input():
    plan = Plan(tp=4, **NO_FLASH | {"recompute": "full"})
    assert tensor.saved(PAPER, plan) == (2 * 2048 * PAPER.hidden / 4, 0, 0)
    assert checkpointing.statistics(PAPER, plan) > 0


# What a rank holds


@given(st.sampled_from([GPT, LLAMA, PAPER, GROUPED]), st.sampled_from([1, 2, 4]))
def test_the_ranks_hold_the_layer_once_beside_what_is_whole_or_copied(shape, t):
    held = tensor.parameters(shape, t)
    assert held.whole == parameters_of(shape.norms) + 2 * shape.hidden * shape.bias
    assert t * held.cut + shape.kv_heads * held.copied + held.whole == shape.layer_parameters(0)


def test_more_ranks_than_key_value_heads_have_copies():
    assert tensor.parameters(LLAMA, 2).copied == 0
    four = tensor.parameters(LLAMA, 4)
    assert four.copied == 2 * 4 * 32  # one key head and its value head, of 4 numbers
    assert four.cut == (32 * 32 * 2 + 3 * 32 * 80) // 4
    assert tensor.partial_gradients(LLAMA, 4) == (0, 4 * four.copied)
    assert tensor.partial_gradients(LLAMA, 2) == (0, 0)
    assert tensor.finish(LLAMA, 4) == Calls(all_reduce=1, bytes=2 * 4 * four.copied * 2 // 2)


def test_norms_biases_and_positions_are_summed_with_sequence_parallelism_only():
    whole = 4 * (2 * 2 * 32 + 2 * 32) + 2 * 32 + 64 * 32
    assert tensor.partial_gradients(GPT, 4, True) == (whole, 0)
    assert tensor.partial_gradients(GPT, 4) == (0, 0)
    assert tensor.partial_gradients(GPT, 1, True) == (0, 0)
    assert tensor.finish(GPT, 4, True, itemsize=8) == Calls(all_reduce=1, bytes=2 * 3 * whole * 8 // 4)


# Bad input


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: tensor.layer(0, 32, 2), "tokens=0: must be a whole number, 1 or more"),
        (lambda: tensor.layer(6, 32, 4, True), "tokens=6 on t=4 ranks with sequence parallelism: give a multiple of 4"),
        (lambda: tensor.layer(8, 32, 4, rank=4), "rank=4 of 4 ranks: give 0 to 3"),
        (lambda: tensor.finish(GPT, 4, True, rank=-1), "rank=-1 of 4 ranks: give 0 to 3"),
        (lambda: tensor.loss(6, 2.0), "t=2.0: must be a whole number"),
        (lambda: tensor.model(GPT, 8, 3), "t=3 does not divide the 4 heads of gpt"),
        (lambda: tensor.parameters(LLAMA, 0), "t=0: must be"),
        (lambda: tensor.parameters(replace(LLAMA, ffn=81), 2), "t=2 does not divide ffn=81 of llama: choose a divisor"),
        (lambda: tensor.parameters(models["deepseek-v3"], 2), "deepseek-v3 has experts or latent attention"),
        (lambda: tensor.parameters("gpt2", 2), "shape='gpt2': give a ModelShape"),
        (lambda: tensor.saved(LLAMA, Plan(tp=16)), "tp=16 does not divide the 8 heads"),
        (lambda: pace.of_layer(LLAMA, Plan(tp=16), clusters["h100-dgx"]), "tp=16 does not divide the 8 heads"),
        (lambda: pace.of_layer(LLAMA, Plan(), clusters["h100-dgx"], moe=True), "moe=True: llama has no layer with experts"),
    ],
)
def test_what_cannot_be_is_refused_in_words(call, said):
    with pytest.raises(ValueError, match=f"^{re.escape(said)}"):
        call()


# The node's boundary


def test_an_estimate_warns_of_tensor_parallelism_that_leaves_the_node_and_says_what_it_costs():
    cluster, plan = clusters["h100-dgx"], Plan(dp=2, tp=16, seq=8192, batch=16)
    time = step.estimate(GROUPED, plan, cluster)
    large = replace(cluster, name="larger nodes", levels=(cluster.levels[0]._replace(size=16), cluster.levels[1]))
    lost = time.seconds - step.estimate(GROUPED, plan, large).seconds
    assert lost > 0
    assert time.warning == (
        f"tp=16 lies on 2 nodes of 8, which costs {lost:.3g} s per step ({lost / time.seconds:.0%}); "
        "a tp that divides 8 keeps tensor parallelism on NVLink"
    )
    assert time.warning in repr(time)


@pytest.mark.parametrize(("tp", "name"), [(8, "h100-dgx"), (4, "h100-dgx"), (16, "gb200-nvl72"), (64, "tpu-v4"), (8, "laptop")])
def test_no_warning_where_each_group_is_inside_a_node(tp, name):
    time = step.estimate(GROUPED, Plan(tp=tp, seq=1024), clusters[name])
    assert time.warning == ""
    assert "warning" not in repr(time)


def test_a_degree_that_does_not_divide_a_node_is_warned_of_as_soon_as_there_is_a_second_node():
    shape = replace(LLAMA, name="twelve", heads=12, kv_heads=12, head_size=64, ffn=96)
    alone, two = (step.estimate(shape, Plan(dp=dp, tp=6, seq=768), clusters["h100-dgx"]).warning for dp in (1, 2))
    assert alone == ""
    assert re.match(r"tp=6 does not divide a node of 8: groups on two nodes add [\d.e-]+ s per step; ", two)
