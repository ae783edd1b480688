"""theory.collectives: seconds against the rounds added up one by one, brute force, and published numbers; rates; crossovers."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyranks.theory import collectives, published
from manyranks.theory.collectives import algorithm_bandwidth, bus_bandwidth, crossover, rounds, seconds, torus_seconds
from manyranks.theory.collectives.algorithms import chain_broadcast
from manyranks.theory.collectives.messages import Group, cut
from manyranks.theory.hardware import Link

LINK, SLOWER = Link("test", 10e-6, 1e9), Link("slower", 50e-6, 0.2e9)
NO_LATENCY = Link("no latency", 0.0, 1e9)
PAIRS = [(op, algorithm) for op, algorithms in collectives.ALGORITHMS.items() for algorithm in algorithms]
POWER_OF_TWO = [("all_gather", "recursive_doubling"), ("reduce_scatter", "halving")]
DIVISIBLE = 2520 * 8  # by 1 to 9, by their products where these are at most 9, and by 8


@pytest.mark.parametrize("elements", [DIVISIBLE, 100 * DIVISIBLE])
@pytest.mark.parametrize(("op", "algorithm"), [p for p in PAIRS if p != ("broadcast", "ring") and p[1] != "hierarchical"])
def test_the_time_is_that_of_the_rounds(op, algorithm, elements):
    for n in ranks_of(op, algorithm):
        expected = sum(max(LINK.seconds(4 * m.count) for m in messages) for messages in rounds(op, elements, n, algorithm))
        assert seconds(op, 4 * elements, n, LINK, algorithm) == pytest.approx(expected), n


@pytest.mark.parametrize("n", range(1, 10))
def test_a_hierarchical_all_reduce_takes_the_time_of_its_rounds_on_two_kinds_of_link(n):
    for node in (d for d in range(1, n + 1) if n % d == 0):
        expected = 0.0
        for messages in rounds("all_reduce", DIVISIBLE, n, "hierarchical", node=node):
            links = [LINK if m.source // node == m.destination // node else SLOWER for m in messages]
            expected += max(link.seconds(m.count) for link, m in zip(links, messages, strict=True))
        assert seconds("all_reduce", DIVISIBLE, n, (LINK, SLOWER), "hierarchical", node) == pytest.approx(expected)


@pytest.mark.parametrize("n", range(1, 10))
@pytest.mark.parametrize("elements", [1, 20_000, 1_000_000])
def test_a_chain_broadcast_takes_the_time_of_the_best_number_of_pieces(n, elements):
    def of(pieces: int) -> float:
        return len(chain_broadcast(Group(range(n), cut(0, 0, pieces)))) * LINK.seconds(elements / pieces)

    assert seconds("broadcast", elements, n, LINK) == pytest.approx(min(of(k) for k in range(1, min(elements, 60) + 1)))


def test_the_pieces_of_a_chain_follow_each_other_without_a_gap():
    several = chain_broadcast(Group(range(4), cut(0, 50, 5)))
    expected = sum(max(LINK.seconds(m.count) for m in messages) for messages in several)
    assert expected == pytest.approx((4 - 2 + 5) * LINK.seconds(10))


@pytest.mark.parametrize(("op", "algorithm"), PAIRS)
def test_sixteen_thousand_ranks_take_longer_than_eight(op, algorithm):
    link, node = ((LINK, SLOWER), 4) if algorithm == "hierarchical" else (LINK, None)
    assert seconds(op, 1e9, 8, link, algorithm, node) < seconds(op, 1e9, 16384, link, algorithm, node) < math.inf


@given(st.integers(2, 5000), st.floats(1, 1e12))
def test_a_ring_without_latency_has_the_link_s_bandwidth_on_the_bus(n, size):
    for op in ("all_reduce", "reduce_scatter", "all_gather"):
        assert bus_bandwidth(op, size, seconds(op, size, n, NO_LATENCY), n) == pytest.approx(NO_LATENCY.bandwidth)


def test_bus_bandwidths_are_nccl_tests():
    names = {"AllReduce": "all_reduce", "ReduceScatter": "reduce_scatter", "AllGather": "all_gather", "AllToAll": "all_to_all"}
    for row in published.rows("nccl_busbw_factors"):
        op, factor = names.get(row["collective"], row["collective"].lower()), row["busbw_over_algbw"].replace("2(", "2*(")
        for n in (2, 3, 8, 1000):
            expected = eval(factor, {"n": n}) * algorithm_bandwidth(6e9, 2.0)
            assert bus_bandwidth(op, 6e9, 2.0, n) == pytest.approx(expected), row["collective"]
    assert algorithm_bandwidth(6e9, 2.0) == 3e9


@pytest.mark.parametrize("n", [2, 3, 4, 6, 8, 64])
@pytest.mark.parametrize("op", collectives.ALGORITHMS)
def test_from_the_crossover_on_the_second_algorithm_is_faster_and_not_before(op, n):
    usable = [a for a in collectives.ALGORITHMS[op] if n in ranks_of(op, a, [n]) and a != "hierarchical"]
    for first, second in itertools.product(usable, usable):
        at = crossover(op, n, LINK, first, second)

        def faster(size, first=first, second=second):
            return seconds(op, size, n, LINK, second) < seconds(op, size, n, LINK, first) * (1 - 1e-13)

        if at is None:
            assert not faster(1e14), (first, second)
        else:
            assert all(faster(at * more + 1e-3) for more in (1.01, 2, 1000)), (first, second)
            assert at == 0 or not faster(at * 0.99), (first, second)


@pytest.mark.parametrize("dims", [(2,), (3,), (4,), (5,), (8,), (3, 3), (4, 4), (4, 4, 4), (3, 3, 3)])
def test_a_torus_all_gathers_in_the_time_of_its_busiest_link(dims):
    share = 1 / math.prod(dims) / len(dims)  # one part an axis of one chip's shard
    expected = max(all_gather_loads(dims).values()) * share * 1e6 / NO_LATENCY.bandwidth
    assert torus_seconds("all_gather", 1e6, dims, NO_LATENCY) == pytest.approx(expected)
    assert torus_seconds("reduce_scatter", 1e6, dims, NO_LATENCY) == pytest.approx(expected)
    assert torus_seconds("all_reduce", 1e6, dims, NO_LATENCY) == pytest.approx(2 * expected)


@pytest.mark.parametrize("dims", [(2, 3), (2, 4), (8, 4), (2, 4, 4)])
def test_no_all_gather_on_an_unequal_torus_is_faster(dims):
    share = 1 / math.prod(dims) / len(dims)
    reached = max(all_gather_loads(dims).values()) * share * 1e6 / NO_LATENCY.bandwidth
    assert torus_seconds("all_gather", 1e6, dims, NO_LATENCY) <= reached * (1 + 1e-12)


@pytest.mark.parametrize("dims", [(2,), (3,), (4,), (5,), (8,), (2, 3), (4, 4), (4, 2), (5, 4), (1, 6), (2, 3, 4)])
def test_a_torus_exchanges_all_to_all_in_the_time_of_its_busiest_link(dims):
    expected = max(all_to_all_loads(dims).values()) / math.prod(dims) * 1e6 / NO_LATENCY.bandwidth
    assert torus_seconds("all_to_all", 1e6, dims, NO_LATENCY) == pytest.approx(expected)


def test_all_gathers_on_tpu_v4p_take_what_the_scaling_book_says():
    # sharding.md, questions 2 and 3: 9e10 bytes/s both ways; it leaves out the (N−1)/N. 1 µs a hop.
    one_way = Link("ICI of v4p", 0.0, 4.5e10)
    assert torus_seconds("all_gather", 2 * 1024 * 4096 / 4, (4,), one_way) == pytest.approx(23e-6 * 3 / 4, rel=0.02)
    assert torus_seconds("all_gather", 2 * 1024 * 4096, (4, 4), one_way) == pytest.approx(46e-6 * 15 / 16, rel=0.02)
    assert torus_seconds("all_gather", 256, (4,), Link("ICI of v4p", 1e-6, 4.5e10)) == pytest.approx(2e-6, rel=0.01)


def test_an_axis_of_one_chip_changes_nothing():
    for op in ("all_reduce", "all_gather", "all_to_all"):
        assert torus_seconds(op, 1e6, (4, 1, 4), LINK) == torus_seconds(op, 1e6, (4, 4), LINK)
        assert torus_seconds(op, 1e6, (1, 1), LINK) == 0.0


@pytest.mark.parametrize(
    ("call", "texts"),
    [
        (lambda: seconds("allreduce", 8, 2, LINK), ["op='allreduce'", "did you mean 'all_reduce'?"]),
        (lambda: seconds("scatter", 8, 2, LINK, "ring"), ["algorithm='ring'", "scatter", "tree, naive"]),
        (lambda: seconds("all_reduce", -8, 2, LINK), ["bytes=-8"]),
        (lambda: seconds("all_reduce", math.nan, 2, LINK), ["bytes=nan"]),
        (lambda: seconds("all_reduce", 8, 0, LINK), ["n=0"]),
        (lambda: seconds("reduce_scatter", 8, 6, LINK, "halving"), ["n=6", "power of two"]),
        (lambda: seconds("all_reduce", 8, 6, (LINK, LINK), "hierarchical"), ["node=None"]),
        (lambda: seconds("all_reduce", 8, 6, (LINK, LINK), "hierarchical", 4), ["node=4", "1, 2, 3, 6"]),
        (lambda: seconds("all_reduce", 8, 6, LINK, "hierarchical", 3), ["pair of Links"]),
        (lambda: seconds("all_reduce", 8, 6, (LINK, LINK)), ["'ring' takes one Link"]),
        (lambda: crossover("all_reduce", 8, LINK, "ring", "treee"), ["did you mean 'tree'?"]),
        (lambda: crossover("all_reduce", 8, LINK, "ring", "hierarchical"), ["needs the ranks of a node"]),
        (lambda: crossover("broadcast", 8, (LINK, LINK), "tree", "ring"), ["'tree' takes one Link"]),
        (lambda: torus_seconds("broadcast", 8, (4, 4), LINK), ["op='broadcast'", "all_to_all"]),
        (lambda: torus_seconds("all_reduce", 8, (4, 0), LINK), ["dims=(4, 0)"]),
        (lambda: torus_seconds("all_reduce", -8, (4, 4), LINK), ["bytes=-8"]),
        (lambda: algorithm_bandwidth(8, 0), ["seconds=0", "above 0"]),
        (lambda: bus_bandwidth("all_reduce", 8, 1, 0), ["n=0"]),
        (lambda: bus_bandwidth("barrier", 8, 1, 2), ["op='barrier'"]),
    ],
)
def test_an_error_names_what_was_given_and_what_is_allowed(call, texts):
    with pytest.raises(ValueError) as caught:
        call()
    assert [text for text in texts if text not in str(caught.value)] == []


def ranks_of(op: str, algorithm: str, sizes=range(1, 10)) -> list[int]:
    return [n for n in sizes if (op, algorithm) not in POWER_OF_TWO or n & (n - 1) == 0]


def arcs(dim: int) -> list[tuple[int, int, float]]:
    """(distance, direction, share) of each other chip of a ring, the shorter way; half each way where both are as long."""
    short = [(d, 1, 1.0) for d in range(1, (dim + 1) // 2)] + [(d, -1, 1.0) for d in range(1, (dim + 1) // 2)]
    return short + ([(dim // 2, 1, 0.5), (dim // 2, -1, 0.5)] if dim % 2 == 0 else [])


def moved(chip: tuple[int, ...], axis: int, by: int, dim: int) -> tuple[int, ...]:
    return (*chip[:axis], (chip[axis] + by) % dim, *chip[axis + 1 :])


def all_to_all_loads(dims: tuple[int, ...]) -> dict:
    """Chunks over each (chip, axis, direction) when every chip sends one to every other, axis after axis, the shorter way."""
    loads: dict = {}
    chips = list(itertools.product(*map(range, dims)))
    ways = [[(0, 1, 1.0), *arcs(dim)] for dim in dims]
    for chip, route in itertools.product(chips, itertools.product(*ways)):
        share = math.prod(part for _, _, part in route)
        for axis, (distance, direction, _) in enumerate(route):
            for _ in range(distance):
                key = (chip, axis, direction)
                loads[key] = loads.get(key, 0.0) + share
                chip = moved(chip, axis, direction, dims[axis])
    return loads


def all_gather_loads(dims: tuple[int, ...]) -> dict:
    """Parts over each link when part i of every shard spreads along axis i, from all it reached along i + 1, and so on."""
    loads: dict = {}
    for start, first in itertools.product(itertools.product(*map(range, dims)), range(len(dims))):
        reached = [start]
        for axis in rotated(len(dims), first):
            for chip, (distance, direction, share) in itertools.product(reached, arcs(dims[axis])):
                # The last link of the way to this distance: those before it carried the part to the nearer chips.
                key = (moved(chip, axis, direction * (distance - 1), dims[axis]), axis, direction)
                loads[key] = loads.get(key, 0.0) + share
            reached = [moved(chip, axis, by, dims[axis]) for chip in reached for by in range(dims[axis])]
    return loads


def rotated(count: int, first: int) -> list[int]:
    return [(first + i) % count for i in range(count)]
