"""The bytes that a step sends: against the counts of the papers, sums over programs, and tokens drawn at random."""

from dataclasses import replace

import pytest

from manyranks.theory import ModelShape, Plan, calls, clusters, collectives, data_parallel, memory, network, states
from manyranks.theory.hardware import Link
from manyranks.theory.kernels import DEFAULT
from manyranks.theory.shapes import models
from manyranks.theory.states import SentRow
from tests.unit import exposed

H100, H800 = clusters["h100-dgx"], clusters["h800"]
DENSE = ModelShape("dense", 8, 4096, 16384, 32, 1000, kv_heads=8)
MIXTRAL, DEEPSEEK = models["mixtral-8x7b"], models["deepseek-v3"]
PHI = 1e9


# Data parallelism --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "times"),  # gradients reduced, parameters gathered for forward, and for backward
    [
        ({"zero": 0}, (1, 0, 0)),
        ({"zero": 1}, (1, 1, 0)),
        ({"zero": 2}, (6, 1, 0)),
        ({"zero": 3}, (6, 6, 6)),
        ({"zero": 3, "reshard_after_forward": False}, (6, 6, 0)),
        # In a pipeline the parameters stay until the last micro-batch is over.
        ({"zero": 3, "reshard_after_forward": False, "pp": 2}, (6, 1, 0)),
    ],
)
def test_zero_2_and_3_send_for_each_micro_batch(fields, times):
    assert data_parallel.calls_per_step(Plan(dp=4, batch=4 * 6, **fields)) == times


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_a_row_is_all_reduced_or_scattered_and_gathered_and_hsdp_reduces_a_shard_between_replicas(zero):
    plan = Plan(dp=32, dp_shard=8 if zero else None, zero=zero, precision="bf16-fp32-gradients")
    said = [
        (one.group, one.op, one.bytes, one.when)
        for one in calls.data_parallel(SentRow(6400, states.groups(plan)[0], plan.recipe, zero > 0))
    ]
    gradients = ("shards", "reduce_scatter", 4 * 6400, "backward"), ("replicas", "all_reduce", 4 * 800, "backward")
    sharded = [*gradients, ("shards", "all_gather", 2 * 6400, "forward")]
    assert said == (sharded if zero else [("data", "all_reduce", 4 * 6400, "backward")])


def test_experts_are_reduced_only_among_their_copies():
    plan = Plan(dp=8, ep=8, zero=0)
    held = memory.rank_parameters(MIXTRAL, plan)[0]
    assert held.experts > held.dense
    assert [group.ranks for group in states.groups(plan)] == [8, 1]
    assert [group.ranks for group in states.groups(replace(plan, ep=4))] == [8, 2]


def test_overlap_hides_all_but_the_last_unit_and_no_more_than_there_is_to_hide_behind():
    held, plan = memory.Held(1e9, 0.0), Plan(dp=8, zero=0, seq=512)
    (whole,) = exposed.data(DENSE, replace(plan, overlap=False), H100, [(held, 0.0, 0.0)])
    behind_much, behind_some = exposed.data(DENSE, plan, H100, [(held, 0.0, 10.0), (held, 0.0, 1e-3)])
    assert whole == pytest.approx(collectives.seconds("all_reduce", 2e9, 8, Link("", 0.0, 0.79 * 450e9)), rel=0.05)
    assert behind_much == pytest.approx(whole / DENSE.layers)
    assert behind_some == pytest.approx(whole - 1e-3)


# Tensor parallelism ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("t", [2, 4, 8])
def test_a_layer_takes_two_all_reduces_each_way(t):
    plan = Plan(tp=t, sequence_parallel=False, overlap=False, microbatch=2, seq=1024)
    reached = Link("", 3.4e-6, 0.79 * 450e9)
    once = collectives.seconds("all_reduce", 2 * 2 * 1024 * DENSE.hidden, t, reached)
    forward, backward = exposed.tensor(DENSE, plan, H100, False, 0.0)
    assert forward == backward == pytest.approx(2 * (once + 2 * 5e-6))  # counted as two collectives each


def test_sequence_parallelism_sends_as_much_and_gathers_its_inputs_once_more():
    plan = Plan(tp=8, overlap=False, seq=1024)
    forward, backward = exposed.tensor(DENSE, plan, H100, False, 0.0)
    other = replace(plan, sequence_parallel=False)
    assert forward == exposed.tensor(DENSE, other, H100, False, 0.0)[0]
    assert backward == pytest.approx(1.5 * forward)


def test_of_backward_only_what_meets_a_weight_gradient_is_hidden():
    plan = Plan(tp=8, seq=1024)
    forward, all_hidden = exposed.tensor(DENSE, plan, H100, False, behind=1.0)
    assert all_hidden == pytest.approx(forward / 2)
    other = replace(plan, sequence_parallel=False)
    assert exposed.tensor(DENSE, other, H100, False, 1.0)[1] == 0.0
    assert exposed.tensor(DENSE, plan, H100, False, 1e-5)[1] == pytest.approx(1.5 * forward - 1e-5)


def test_parallel_layers_need_half_and_routed_tokens_more():
    plan = Plan(tp=8, overlap=False, seq=1024)
    forward = exposed.tensor(DENSE, plan, H100, False, 0.0)[0]
    parallel = exposed.tensor(replace(DENSE, parallel_layers=True), plan, H100, False, 0.0)[0]
    assert parallel == pytest.approx(forward / 2)
    dense, moe = (exposed.tensor(MIXTRAL, plan, H100, moe, 0.0)[0] for moe in (False, True))
    assert moe == pytest.approx(1.5 * dense)  # the MLP's pair twice, for two experts a token


# Context, expert and pipeline parallelism --------------------------------------------------------------------------------


def test_keys_and_values_of_the_whole_sequence_reach_every_rank():
    plan = Plan(cp=4, seq=4096, context="all-gather")
    size = 2 * 4096 * 2 * DENSE.kv_heads * DENSE.head_size
    for tp in (1, 2):
        keys, gradients = (
            5e-6 + collectives.seconds("all_gather", each / tp, 4, Link("", 3.4e-6, 0.79 * 450e9))
            for each in (size, 2 * size)  # gradients are summed in 32 bits
        )
        other = replace(plan, tp=tp)
        found = exposed.context(DENSE, other, H100, (1.0, 1.0))
        assert found == pytest.approx((keys, keys + gradients))


def test_ulysses_is_four_all_to_alls_that_send_to_the_node_and_to_others_at_the_same_time():
    plan = Plan(cp=16, seq=2**16, context="ulysses")
    size = 2 * 4096 * DENSE.head_size  # of one head; 16 ranks need 16 copies of the 8 heads of keys and values
    inside, outside = (2 * 48 * size * share / (0.79 * beta) for share, beta in ((7 / 16, 450e9), (8 / 16, 50e9)))
    assert outside > inside
    starts = 4 * (5e-6 + 14e-6)
    assert exposed.context(DENSE, plan, H100, (1.0, 1.0)) == pytest.approx([starts + outside] * 2)
    slow = H100.with_link("node", bandwidth=45e9)
    assert exposed.context(DENSE, plan, slow, (1.0, 1.0)) == pytest.approx([starts + max(10 * inside, outside)] * 2)
    assert network.exchange(H100.route(1), size, DEFAULT) == 0.0


def test_an_all_to_all_waits_for_the_slower_of_network_and_node():
    plan = Plan(dp=64, ep=64, seq=4096, precision="fp8", stack="hai-llm")
    rows = 4096 * DEEPSEEK.hidden
    forward, backward = exposed.expert(DEEPSEEK, plan, H800)
    network = rows * (1 + 2) * 3.5 / (0.79 * 50e9)  # one copy to each other node: there in 8 bits, back in 16
    inside = rows * (1 + 2) * 8 * 7 / 8 / (0.79 * 200e9)
    assert forward == backward == pytest.approx(max(network, inside), rel=0.01)
    slow = H800.with_link("node", bandwidth=20e9)
    assert exposed.expert(DEEPSEEK, plan, slow)[0] == pytest.approx(inside * 10, rel=0.01)
    other = replace(plan, ep=8)
    one_node = exposed.expert(DEEPSEEK, other, H800)[0]
    assert one_node == pytest.approx(rows * 3 * 8 * 7 / 8 / (0.79 * 200e9), rel=0.01)


def test_a_stage_sends_its_share_and_gathers_without_sequence_parallelism():
    plan = Plan(pp=4, tp=8, dp=2, batch=8, seq=2048)
    size = 2 * 2048 * DENSE.hidden
    split = exposed.stage_message(DENSE, plan, H100, (4, 16))
    assert split == pytest.approx(5e-6 + 14e-6 + size / 8 / (0.79 * 50e9))
    whole = exposed.stage_message(DENSE, replace(plan, sequence_parallel=False), H100, (4, 16))
    assert whole == pytest.approx(split + network.gather(H100.route(8), size, DEFAULT))
    assert exposed.stage_message(DENSE, plan, H100, (8, 1)) < split  # inside a node


def test_the_optimizer_takes_the_time_of_its_bytes():
    plan = Plan(dp=8, zero=1)
    elements = memory.rank_parameters(DENSE, plan)[0].dense
    own = elements / 8
    seconds = data_parallel.optimizer_seconds(memory.model_states(DENSE, plan).optimizer, plan, H100, DEFAULT)
    # Gradients, a master copy and two moments in 32 bits read, the last three and the parameters written: 28 bytes.
    assert 28 * own / 3.35e12 < seconds * 0.79 < (28 * own + 2 * elements) / 3.35e12 * 1.01
