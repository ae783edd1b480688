"""Data parallelism's share of a step: buckets, rings and trees, worked out by hand from the links of a DGX."""

from itertools import pairwise

import pytest

from manyranks.theory import (
    ModelShape,
    Plan,
    clusters,
    collectives,
    memory,
    models,
    network,
    stages,
    states,
    step,
)
from manyranks.theory.kernels import DEFAULT, Constants
from manyranks.theory.states import BUCKET

H100 = clusters["h100-dgx"]
XL = models["gpt2-xl"]
PLAIN = Constants(bandwidth=1.0, overhead=0.0)
MICRO = 1e-6


def plan(n: int, sequences: int = 8, zero: int = 0, **more) -> Plan:
    return Plan(dp=n, batch=n * sequences, microbatch=sequences, seq=1024, zero=zero, recompute="none", **more)


def exposed(n: int, sequences: int = 8, zero: int = 0, **more) -> float:
    return step.estimate(XL, plan(n, sequences, zero, **more), H100).data


# Algorithms ------------------------------------------------------------------------------------------------------------


def test_a_tree_crosses_a_node_rank_by_rank_and_the_nodes_in_log_2_rounds():
    small = network.fastest(H100.route(64), 1000, PLAIN)
    assert small == pytest.approx((7 * 3.4 + 3 * 14) * MICRO + 1000 / 400e9)  # a node's eight shares of 50 GB/s
    assert network.fastest(H100.route(64, stride=8), 0, PLAIN) == pytest.approx(6 * 14 * MICRO)  # a rank a node
    assert network.fastest(H100.route(24), 0, PLAIN) == pytest.approx((7 * 3.4 + 2 * 14) * MICRO)  # three nodes


@pytest.mark.parametrize("size", [0, 1e6, 1e10])
@pytest.mark.parametrize("route", [H100.route(8), H100.route(3), clusters["tpu-v4"].route(64), clusters["laptop"].route(64)])
def test_within_a_node_and_on_a_torus_there_is_only_the_ring(route, size):
    assert network.fastest(route, size, DEFAULT) == network.gather(route, size, DEFAULT)


def test_rings_carry_the_largest_tensors_and_trees_the_others():
    route = H100.route(16)
    assert network.fastest(route, 1e10, PLAIN) == network.gather(route, 1e10, PLAIN)
    assert network.fastest(route, 1e7, PLAIN) < network.gather(route, 1e7, PLAIN)


@pytest.mark.parametrize("size", [2**10, 2**20, 2**26, 2**32])
@pytest.mark.parametrize("n", [16, 64, 128])
def test_no_slower_than_rings_and_hierarchies_of_one_message_at_a_time_and_no_faster_than_the_bytes(n, size):
    seconds = 2 * network.fastest(H100.route(n), size, PLAIN)
    for algorithm in ("ring", "hierarchical"):
        assert seconds <= collectives.cluster_seconds("all_reduce", size, n, H100, algorithm)
    assert seconds >= 2 * (n - 8) / n * size / 400e9  # what must leave a node, over all its shares


# Buckets ---------------------------------------------------------------------------------------------------------------


def test_a_bucket_is_a_layer_or_as_many_as_it_takes_to_fill_it():
    def number(name: str, zero: int = 0, **more) -> int:
        shape, chosen = models[name], plan(8, zero=zero, **more)
        return max(states.rows(states.hold(stages.deal(shape, chosen.stage_plan)), shape, chosen).units.values())

    assert number("gpt2-xl") == 48  # layers of 65 MB
    assert number("gpt2") == int(2 * models["gpt2"].parameters / BUCKET) == 9  # of 12 layers
    assert number("gpt2", precision="fp32") == 12
    assert number("gpt2", zero=3) == 12  # a unit is gathered whole


def test_a_model_smaller_than_a_bucket_is_one():
    tiny = ModelShape("tiny", 4, 64, 256, 4, 100)
    apart, together = (step.estimate(tiny, plan(64, overlap=overlap), H100).data for overlap in (False, True))
    size = 2 * memory.rank_parameters(tiny, plan(64))[0].dense
    assert together == apart == pytest.approx(2 * network.fastest(H100.route(64), size, DEFAULT))


# GPT-2 XL on H100s -----------------------------------------------------------------------------------------------------


def test_gpt2_xl_on_64_gpus_by_hand():
    size = 2 * XL.parameters
    each = 5 * MICRO + (7 * 3.4 + 3 * 14) * MICRO + size / 48 / (0.79 * 400e9)
    assert exposed(64, overlap=False) == pytest.approx(48 * 2 * each) == pytest.approx(26.5e-3, rel=1e-3)
    assert exposed(64) == pytest.approx(2 * each)
    assert exposed(1024, overlap=False) == pytest.approx(48 * 2 * (each + 4 * 14 * MICRO))  # 16 times the nodes: 4 rounds more


def test_communication_grows_with_the_logarithm_of_the_nodes():
    times = [exposed(8 * nodes, overlap=False) for nodes in (2, 4, 8, 16, 32, 64, 128)]
    each_doubling = [later - earlier for earlier, later in pairwise(times)]
    assert each_doubling == pytest.approx([48 * 2 * 14 * MICRO] * 6)


@pytest.mark.parametrize("n", [2, 8, 64, 1024])
def test_zero_1_takes_the_time_of_an_all_reduce_and_zero_3_half_as_much_again(n):
    times = [exposed(n, zero=zero, overlap=False) for zero in range(4)]
    assert times == pytest.approx([times[0]] * 3 + [1.5 * times[0]])


def test_one_sequence_does_not_hide_the_gradients_of_64_gpus_and_two_do():
    graph = {"stack": "megatron-bridge-graphs"}  # no backward takes its host's time
    whole = exposed(64, overlap=False)
    assert exposed(64, 2, **graph) == exposed(64, 8, **graph) == pytest.approx(whole / 48)
    assert exposed(64, 1, **graph) > 5 * whole / 48


def test_a_pipeline_that_sums_gradients_first_reduces_once_and_gathers_for_every_backward():
    def data(m: int, zero: int = 3, **more) -> float:
        chosen = Plan(dp=8, pp=2, batch=8 * m, microbatch=1, seq=1024, zero=zero, stack="pytorch", overlap=False, **more)
        return step.estimate(XL, chosen, H100).data

    kept = data(4, reshard_after_forward=False)  # one gather and one reduction
    assert data(8, reshard_after_forward=False) == kept
    assert (data(4) - kept) / 7 == pytest.approx((data(8) - kept) / 15)  # 2m gathers and one reduction
    assert data(8, zero=2) == data(4, zero=2)
