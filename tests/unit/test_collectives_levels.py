"""Seconds of a collective on nodes and the network between them, against the virtual clock and hand-computed cases."""

import pytest

from manyranks import theory
from manyranks.theory.collectives import ALGORITHMS, cluster_seconds, rounds, seconds
from manyranks.theory.kernels import Constants
from manyranks.theory.replay_costs import ClusterCosts
from manyranks.timeline import Program, Recv, Send, Wait, replay

H100 = theory.clusters["h100-dgx"]
NEAR, FAR = (level.link for level in H100.levels)
PURE = ClusterCosts(H100, Constants(bandwidth=1.0, overhead=0.0))
ELEMENTS = 2**14 * 3 * 5 * 7  # divides by every number of chunks below


def program(op: str, algorithm: str, n: int) -> Program:
    """Every rank's messages in the order of the rounds; what a round brings is waited for before the next."""
    ranks: list[list] = [[] for _ in range(n)]
    node = 8 if algorithm == "hierarchical" else None
    for k, messages in enumerate(rounds(op, ELEMENTS, n, algorithm, node=node)):
        for m in messages:
            ranks[m.source].append(Send(m.destination, m.count, handle=("send", k)))
        for m in messages:
            ranks[m.destination].append(Recv(m.source, m.count))
        for m in messages:
            ranks[m.source].append(Wait(("send", k)))
    return Program(tuple(map(tuple, ranks)))


ALL = [(op, algorithm) for op, algorithms in ALGORITHMS.items() for algorithm in algorithms]


# In these every rank has a message out and one in, in every round.
IN_STEP = ("ring", "hierarchical", "recursive_doubling", "halving_doubling", "pairwise", "halving")


@pytest.mark.parametrize(("op", "algorithm"), ALL)
def test_it_is_the_time_of_the_same_messages_on_the_virtual_clock(op, algorithm):
    clock = replay(program(op, algorithm, 16), PURE).makespan
    predicted = cluster_seconds(op, ELEMENTS, 16, H100, algorithm)
    # A rank need not wait for others of its round: where they do not hold each other up, the clock is ahead of the rounds.
    assert clock <= predicted * (1 + 1e-9)
    if algorithm in IN_STEP and op != "reduce":
        assert clock == pytest.approx(predicted)


# A broadcast by ring is a chain of n pieces here, and there of as many as are fastest.
@pytest.mark.parametrize(("op", "algorithm"), [c for c in ALL if c[1] != "hierarchical" and c != ("broadcast", "ring")])
@pytest.mark.parametrize("n", [1, 2, 4, 8])
def test_inside_one_node_it_is_the_time_on_equal_links(op, algorithm, n):
    assert cluster_seconds(op, 1e6, n, H100, algorithm) == pytest.approx(seconds(op, 1e6, n, NEAR, algorithm))


@pytest.mark.parametrize("op", ["all_reduce", "all_gather", "reduce_scatter"])
def test_one_ring_over_two_nodes_waits_for_the_network_in_every_round(op):
    assert cluster_seconds(op, 16e6, 16, H100, "ring") == pytest.approx(seconds(op, 16e6, 16, FAR, "ring"))


def test_two_levels_are_those_of_the_formula():
    by_formula = seconds("all_reduce", 16e6, 32, (NEAR, FAR), "hierarchical", node=8)
    assert cluster_seconds("all_reduce", 16e6, 32, H100, "hierarchical") == pytest.approx(by_formula)


def test_only_the_outer_rounds_of_halving_doubling_cross_between_two_nodes():
    # 1/2 of the tensor over the network, then 1/4, 1/8, 1/16 inside the node, and the same way back.
    M = 16e6
    one_way = FAR.seconds(M / 2) + sum(NEAR.seconds(M / d) for d in (4, 8, 16))
    assert cluster_seconds("all_reduce", M, 16, H100, "halving_doubling") == pytest.approx(2 * one_way)


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="n=0"):
        cluster_seconds("all_reduce", 1, 0, H100)
    with pytest.raises(ValueError, match="bytes=-1"):
        cluster_seconds("all_reduce", -1, 2, H100)
    with pytest.raises(ValueError, match="ranks of a node must divide n=12"):
        cluster_seconds("all_reduce", 1, 12, H100, "hierarchical")
    with pytest.raises(ValueError, match="ranks 0 and 2 on a cluster of 2"):
        cluster_seconds("broadcast", 1, 4, H100.of(2), "naive")
