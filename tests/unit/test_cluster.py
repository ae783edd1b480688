"""Clusters and what programs cost on them: routes against walks over explicit ranks, replay against closed forms."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyranks import theory
from manyranks.theory import collectives, network, published, replay_costs
from manyranks.theory.cluster import Cluster, Level, clusters, laptop
from manyranks.theory.hardware import Accelerator, Link, accelerators
from manyranks.theory.kernels import Constants
from manyranks.timeline import Collective, Compute, Program, Recv, Send, Wait, Work, replay

CHIP = Accelerator("chip", 1e12, 1e9, 1e11, 100.0, 10.0, "invented")
NEAR, RAIL, POD = Link("near", 1e-6, 100.0), Link("rail", 5e-6, 10.0), Link("pod", 20e-6, 4.0)
THREE = Cluster("three", CHIP, (Level("node", 4, NEAR), Level("rail", 16, RAIL), Level("pod", 64, POD, 2.0)))
PLAIN = Constants(bandwidth=1.0, overhead=0.0)
H100 = clusters["h100-dgx"]


# The clusters by name ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "node", "near", "far"),
    [
        ("h100-dgx", 8, 450e9, 50e9),
        ("a100-dgx", 8, 300e9, 25e9),
        ("v100-dgx", 16, 150e9, 6.25e9),
        ("h200", 8, 450e9, 50e9),
        ("b200", 8, 900e9, 50e9),
        ("h800", 8, 200e9, 50e9),
    ],
)
def test_a_switched_cluster_has_the_links_that_its_sources_name(name, node, near, far):
    cluster = theory.clusters[name]
    assert cluster.node == node
    assert (cluster.between(0, node - 1).bandwidth, cluster.between(0, node).bandwidth) == (near, far)
    assert cluster.source
    assert cluster.accelerator.source


def test_every_named_cluster_can_be_walked_by_pairs_and_by_larger_groups():
    for cluster in clusters.values():
        for n, stride in ((1, 1), (2, 1), (2, cluster.node // 2), (64, 1)):
            route = cluster.route(n, stride)
            assert min(route.ring.bandwidth, route.pair.bandwidth, route.ring.latency) > 0, cluster.name


def test_tori_use_both_directions_of_as_many_axes_as_the_group_needs():
    v4, v5p, v5e = clusters["tpu-v4"], clusters["tpu-v5p"], clusters["tpu-v5e"]
    assert [v4.route(n).ring.bandwidth / 45e9 for n in (16, 256, 4096)] == [2, 4, 6]
    assert v4.route(4096).ring.bandwidth == pytest.approx(v4.accelerator.scale_up)
    assert v5p.route(16).ring.bandwidth == 180e9
    assert v5e.route(256).ring.bandwidth == 4 * 45e9


@pytest.mark.parametrize("dims", [(16,), (16, 16), (16, 16, 16)])
def test_an_all_gather_over_whole_axes_of_a_torus_takes_what_the_torus_formula_says(dims):
    cluster, n = clusters["tpu-v4"], 16 ** len(dims)
    expected = collectives.torus_seconds("all_gather", 1e9, dims, cluster.levels[0].link)
    assert network.gather(cluster.route(n), 1e9, PLAIN) == pytest.approx(expected)


def test_the_laptop_has_links_that_can_be_set_and_one_core_a_rank():
    mine = laptop(bandwidth=1e9, latency=1e-5)
    assert (mine.between(0, 7).bandwidth, mine.between(0, 7).latency) == (1e9, 1e-5)
    assert "laptop" in clusters


def test_unknown_names_suggest_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'h100-dgx'"):
        theory.clusters["h100-dgk"]
    with pytest.raises(ValueError, match="did you mean 'H100 SXM'"):
        accelerators["H100 SMX"]
    with pytest.raises(ValueError, match=r"level 'nodes' of three: did you mean 'node'. choose from node, rail, pod"):
        THREE.with_link("nodes", bandwidth=1.0)


def test_the_bandwidth_constant_is_the_mean_of_the_measured_rings():
    rings = [row for row in published.rows("measured_busbw") if "NVLS" not in row["node"]]
    shares = [float(row["busbw_GBps"]) / float(row["unidir_spec_GBps"]) for row in rings]
    assert len(rings) == 5
    assert Constants().bandwidth == pytest.approx(sum(shares) / len(shares), abs=0.01)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"levels": ()}, "levels of sizes"),
        ({"levels": (Level("pod", 8, NEAR), Level("node", 4, NEAR))}, "levels of sizes"),
        ({"levels": (Level("node", 4, NEAR, 0.5),)}, "oversubscription"),
        ({"reserved": 1.0}, "reserved"),
        ({"gpus": 0}, "gpus=0"),
        ({"gpus": 2.5}, "gpus=2.5"),
        ({"gpus": 65}, "from 1 to 64"),
        ({"torus": 1}, "two links for each axis"),
    ],
)
def test_clusters_that_cannot_be_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        replace(THREE, **wrong)


@pytest.mark.parametrize("changes", [{"bandwidth": 0.0}, {"bandwidth": float("nan")}, {"latency": -1.0}])
def test_a_link_that_cannot_be_is_refused(changes):
    with pytest.raises(ValueError, match="a bandwidth above 0"):
        THREE.with_link("node", **changes)


@pytest.mark.parametrize("group", [(0, 1), (2, 0), (65, 1), (5, 16)])
def test_groups_that_have_no_place_are_refused(group):
    with pytest.raises(ValueError, match=r"1 or more|ends at 64"):
        THREE.route(*group)


def test_ranks_outside_the_cluster_are_refused():
    small = THREE.of(8)
    for pair in ((0, 8), (-1, 0)):
        with pytest.raises(ValueError, match="on a cluster of 8"):
            small.between(*pair)
    with pytest.raises(ValueError, match="ends at 64"):
        THREE.between(0, 64)
    with pytest.raises(ValueError, match="on a cluster of 8"):
        small.route(9)


# Routes --------------------------------------------------------------------------------------------------------------


def walked(cluster: Cluster, ranks: tuple[int, ...]) -> float:
    """Mean latency of the hops of a ring over the ranks in order, closed."""
    hops = [cluster.between(a, b).latency for a, b in itertools.pairwise((*ranks, ranks[0]))]
    return sum(hops) / len(ranks)


@given(st.sets(st.integers(0, 63), min_size=2))
def test_the_latency_of_a_ring_is_the_mean_of_its_hops(ranks):
    ranks = tuple(sorted(ranks))
    assert THREE.route_of(ranks).ring.latency == pytest.approx(walked(THREE, ranks))


@given(st.sampled_from([1, 2, 4, 8, 16, 32]), st.integers(1, 64))
def test_a_route_by_stride_is_that_of_the_explicit_ranks(stride, n):
    n = min(n, 64 // stride)
    assert THREE.route(n, stride) == THREE.route_of(tuple(range(0, n * stride, stride)))


@given(st.sampled_from([1, 2, 4, 8, 16, 32]), st.integers(1, 64))
def test_a_ring_is_as_wide_as_the_narrowest_of_the_units_that_it_leaves(stride, n):
    ranks = tuple(range(0, min(n, 64 // stride) * stride, stride))
    widths = [100.0] if len({r // 4 for r in ranks}) < len(ranks) or len(ranks) == 1 else []
    for below, size, share in ((4, 16, 10.0), (16, 64, 2.0)):
        units = {r // below for r in ranks}
        if len({r // size for r in ranks}) < len(units):  # some hop stays inside this level, or closes there
            widths.append(share * min(sum(r // below == unit for r in ranks) for unit in units))
    if len({r // 16 for r in ranks}) > 1:
        widths.append(2.0 * min(sum(r // 16 == unit for r in ranks) for unit in {r // 16 for r in ranks}))
    assert THREE.route_of(ranks).ring.bandwidth == min(widths)


def test_a_ring_across_nodes_uses_its_members_shares_but_is_never_faster_than_inside():
    assert H100.route(8).ring.bandwidth == 450e9
    assert [H100.route(16 // s, s).ring.bandwidth for s in (1, 2, 4, 8)] == [400e9, 200e9, 100e9, 50e9]
    assert clusters["a100-dgx"].with_link("network", bandwidth=1e12).route(16).ring.bandwidth == 300e9
    assert H100.route(9).ring.bandwidth == 50e9  # one rank alone in the second node


def test_what_leaves_a_pod_shares_what_oversubscription_leaves():
    llama = clusters["llama3-cluster"]
    assert llama.route(2, 3072).ring.bandwidth == pytest.approx(50e9 / 7)
    assert llama.route(2, 1536).ring.bandwidth == 50e9
    assert llama.route(4, 1536).ring.bandwidth == pytest.approx(2 * 50e9 / 7)  # two members a pod
    assert llama.route(4, 1536).pair.bandwidth == pytest.approx(50e9 / 7)


def test_a_group_of_one_sends_nothing():
    for cluster in (THREE, H100, clusters["tpu-v4"]):
        assert network.gather(cluster.route(1, 4), 1e9, Constants()) == 0.0
        assert network.gather(cluster.route_of((3,)), 1e9, Constants()) == 0.0


# Programs on a cluster -----------------------------------------------------------------------------------------------


def everywhere(n: int, op: str, size: float) -> Program:
    return Program(((Collective(op, size, tuple(range(n))),),) * n)


@given(st.sampled_from([2, 3, 8, 12, 16, 64]), st.floats(0, 1e9), st.sampled_from(["all_reduce", "all_gather"]), st.booleans())
def test_a_collective_takes_the_seconds_of_its_ring_on_the_link_of_the_route(n, size, op, sharing):
    costs = replay_costs.ClusterCosts(H100)
    ring = H100.route_of(tuple(range(n))).ring
    link = Link("reached", ring.latency, 0.79 * ring.bandwidth)
    expected = 5e-6 + collectives.seconds(op, size, n, link)
    assert replay(everywhere(n, op, size), costs, sharing).makespan == pytest.approx(expected)


def test_messages_between_nodes_are_slower_than_inside():
    def seconds(to: int) -> float:
        ranks = [()] * 9
        ranks[0], ranks[to] = (Send(to, 1e9),), (Recv(0, 1e9),)
        return replay(Program(tuple(ranks)), replay_costs.ClusterCosts(H100)).makespan

    assert seconds(7) == pytest.approx(5e-6 + 3.4e-6 + 1e9 / 0.79 / 450e9)
    assert seconds(8) == pytest.approx(5e-6 + 14e-6 + 1e9 / 0.79 / 50e9)


def test_two_messages_of_one_rank_share_its_network_and_those_of_two_do_not():
    costs, size = replay_costs.ClusterCosts(H100, PLAIN), 5e9

    def seconds(*ways: tuple[int, int]) -> float:
        ranks = [[] for _ in range(24)]
        for number, (source, to) in enumerate(ways):
            ranks[source].append(Send(to, size, handle=number))
            ranks[to].append(Recv(source, size, handle=number))
        ended = [[*sent, *(Wait(instruction.handle) for instruction in sent)] for sent in ranks]
        return replay(Program(tuple(map(tuple, ended))), costs, sharing=True).makespan

    assert seconds((0, 8)) == pytest.approx(0.1, rel=1e-3)
    assert seconds((0, 8), (0, 16)) == pytest.approx(0.2, rel=1e-3)
    assert seconds((0, 8), (16, 8)) == pytest.approx(0.2, rel=1e-3)
    assert seconds((0, 8), (1, 9)) == pytest.approx(0.1, rel=1e-3)
    assert seconds((0, 8), (8, 0)) == pytest.approx(0.1, rel=1e-3)  # both ways at once
    assert seconds((0, 8), (0, 1)) == pytest.approx(0.1, rel=1e-3)  # the other goes inside the node


def test_a_collective_and_a_message_of_one_rank_share_its_network():
    costs, group = replay_costs.ClusterCosts(H100, PLAIN), tuple(range(16))
    reduce = Collective("all_reduce", 8e9, group, handle="reduce")
    alone = costs.collective("all_reduce", 8e9, group).seconds
    send, receive = Send(16, 50e9 * alone), Recv(0, 50e9 * alone)  # alone, as long as the collective
    ranks = [(reduce, send, Wait("reduce")), *[(reduce, Wait("reduce"))] * 15, (receive,)]
    assert replay(Program(tuple(ranks)), costs, sharing=True).makespan == pytest.approx(2 * alone, rel=0.01)
    assert replay(Program(tuple(ranks)), costs, sharing=False).makespan == pytest.approx(alone, rel=0.01)


def test_groups_of_different_width_may_share_one_rank():
    wide, narrow = tuple(range(16)), (0, 8)
    ranks = [(Collective("all_reduce", 1e9, wide),)] * 16
    ranks[0] = ranks[8] = (Collective("all_reduce", 1e9, wide, handle="w"), Collective("all_gather", 1e9, narrow), Wait("w"))
    assert replay(Program(tuple(ranks)), replay_costs.ClusterCosts(H100), sharing=True).makespan > 0


def test_work_is_charged_by_size_numbers_as_seconds_and_the_rest_refused():
    costs = replay_costs.ClusterCosts(H100)
    chip = H100.accelerator
    reached = chip.flops * 0.803 * 0.93
    assert costs.compute(0, Work(1e15, 0)) == pytest.approx(1e15 / reached + 5e-6)
    assert costs.compute(0, Work(0, 1e12)) == pytest.approx(1e12 / (0.79 * 3.35e12) + 5e-6)
    assert (costs.compute(0, Work(0, 0)), costs.compute(0, 0.25)) == (0.0, 0.25)
    assert replay_costs.ClusterCosts(clusters["h800"]).compute(0, Work(1e15)) > costs.compute(0, Work(1e15))
    with pytest.raises(ValueError, match="work 'F'"):
        replay(Program(((Compute("F", "F"),),)), costs)


def test_a_barrier_takes_only_latency_and_one_rank_nothing():
    costs = replay_costs.ClusterCosts(H100)
    assert costs.collective("barrier", 0, tuple(range(8))).seconds == pytest.approx(5e-6 + 14 * 3.4e-6)
    assert costs.collective("all_reduce", 1e9, (3,)).seconds == 0.0
    with pytest.raises(ValueError, match="all_reduce"):
        costs.collective("all_redcue", 1e9, (0, 1))
