"""Chapter 01's explorer: messages, contents, bytes and times are the theory's; every setting is shown or refused in words."""

import itertools

import numpy as np
import pytest
from matplotlib.collections import LineCollection

from manyranks.show import style
from manyranks.show.collectives.explorer import LOOKS, TOPOLOGIES, Circle, Collective, Knobs, explorer
from manyranks.show.setting import Said
from manyranks.theory.collectives import ALGORITHMS, Message, contents, least_bytes, rounds, sent_bytes
from manyranks.theory.collectives.timing import cube
from tests.drawn import words

PAIRS = [(operation, algorithm) for operation, algorithms in ALGORITHMS.items() for algorithm in algorithms]
NODE, NODES, TORUS, LAPTOP = TOPOLOGIES
GIB = 2**30


@pytest.mark.parametrize(("operation", "algorithm"), PAIRS)
def test_after_the_last_round_every_rank_holds_what_the_operation_promises(operation, algorithm):
    for n, node in groups(operation, algorithm):
        columns = contents.chunks(operation, algorithm, n)
        first = contents.at_first(operation, n, columns)
        last = contents.after(operation, first, rounds(operation, columns, n, algorithm, node=node))
        for rank, chunk in itertools.product(range(n), range(columns)):
            if has_a_claim(operation, rank, chunk):
                assert last[rank][chunk] == promised(operation, n, chunk), (n, node, rank, chunk)


@pytest.mark.parametrize(("operation", "algorithm"), PAIRS)
def test_before_the_last_round_something_is_still_missing(operation, algorithm):
    for n, node in groups(operation, algorithm):
        columns = contents.chunks(operation, algorithm, n)
        several = rounds(operation, columns, n, algorithm, node=node)[:-1]
        held = contents.after(operation, contents.at_first(operation, n, columns), several)
        places = [p for p in itertools.product(range(n), range(columns)) if has_a_claim(operation, *p)]
        assert n == 1 or any(held[r][c] != promised(operation, n, c) for r, c in places), (n, node)


def test_in_a_round_all_is_sent_before_anything_arrives():
    passed_on = (Message(0, 1, 0, 1, False), Message(1, 2, 0, 1, False))
    assert contents.after("all_gather", [[1], [0], [0]], [passed_on]) == [[1], [1], [0]]
    assert contents.after("all_gather", [[1], [0], [0]], [passed_on, passed_on]) == [[1], [1], [1]]


@pytest.mark.parametrize(("operation", "algorithm"), PAIRS)
@pytest.mark.few(8)
def test_the_messages_drawn_are_the_theory_s(operation, algorithm):
    plot = Knobs()
    shafts = next(artist for artist in plot.moving if isinstance(artist, LineCollection))
    for n in (2, 3, 8, 16):
        now = Collective(operation, algorithm, n, GIB, NODES)
        if algorithm not in now.times:
            continue
        theory, sent = rounds(operation, GIB, n, algorithm, node=now.node), [0.0] * n
        for step, expected in enumerate(theory, 1):
            plot.update(**now._replace(step=step)._asdict())
            assert len(shafts.get_segments()) == len(expected)
            for source, _, share in now.messages(step):
                sent[source] += share * GIB
        assert sent == pytest.approx(sent_bytes(operation, GIB, 1, n, algorithm, node=now.node))


@pytest.mark.parametrize(("operation", "algorithm"), PAIRS)
def test_no_bar_ends_below_the_least(operation, algorithm):
    for n, node in groups(operation, algorithm):
        assert max(sent_bytes(operation, 720720, 1, n, algorithm, node=node)) >= least_bytes(operation, 720720, n) - 1e-6


REFUSED = {
    ("all_reduce", "ring", 0, NODES): "N = 0: a group has a whole number of ranks, at least 1",
    ("all_reduce", "ring", 0, TORUS): "N = 0: a group has a whole number of ranks, at least 1",
    ("all_reduce", "hierarchical", 0, NODES): "N = 0: a group has a whole number of ranks, at least 1",
    ("reduce_scatter", "halving", 6, NODES): "halving of reduce_scatter needs a power of two",
    ("all_to_all", "tree", 8, NODES): "all_to_all has no tree algorithm: choose pairwise",
    ("all_reduce", "hierarchical", 8, NODES): "hierarchical needs two or more whole nodes",
    ("all_reduce", "hierarchical", 16, LAPTOP): "hierarchical needs two or more whole nodes",
    ("all_reduce", "hierarchical", 12, NODES): "hierarchical needs two or more whole nodes of 8 ranks",
    ("all_reduce", "ring", 16, NODE): "has only 8 ranks",
    ("all_reduce", "tree", 16, TORUS): "all_reduce by tree isn't timed on a torus",
    ("broadcast", "ring", 16, TORUS): "broadcast by ring isn't timed on a torus; .* all_to_all by pairwise",
    ("all_reduce", "ring", 8, "a moon"): "topology 'a moon'",
}


@pytest.mark.parametrize(("setting", "reason"), REFUSED.items(), ids=lambda value: str(value)[:40])
def test_what_cannot_be_is_refused_with_its_reason(setting, reason):
    operation, algorithm, n, topology = setting
    with pytest.raises(ValueError, match=reason):
        update(Knobs(), operation, algorithm, n, GIB, topology)


# By hand, in the order of the lines; inside a node 3.4 µs and 450 GB/s, between nodes 14 µs and 50 GB/s a card:
# 14 · (3.4 µs + 2^27 B / 450 GB/s); 30 · (14 µs + 2^26 B / 50 GB/s);
# 3 · (3.4 µs + 2^30 B / 450 GB/s) + 14 µs + 2^30 B / 50 GB/s;
# 14 · (3.4 µs + 2^27 B / 450 GB/s) + 2 · (14 µs + 2^26 B / 50 GB/s);
# 2 · (50 µs + 2^20 B / 2 GB/s); 4 hops of 1 µs + 15/16 · 2^30 B / (3 axes · 2 links · 90 GB/s).
FIGURES = {
    ("all_reduce", "ring", 8, GIB, NODES): "each rank sends 1.88 GB; rounds 14; time 4.22 ms; latency 47.6 µs, 1%",
    ("all_reduce", "ring", 16, GIB, NODES): "sends 2.01 GB; rounds 30; time 40.7 ms; latency 420 µs, 1%. Limit: bandwidth;",
    ("all_reduce", "recursive_doubling", 16, GIB, NODES): "rounds 4; time 28.7 ms; latency 24.2 µs, 0%. Limit: bandwidth;",
    ("all_reduce", "hierarchical", 16, GIB, NODES): "rounds 16; time 6.94 ms; latency 75.6 µs, 1%. Limit: bandwidth;",
    ("broadcast", "tree", 4, 2**20, LAPTOP): "the busiest rank sends 2.1 MB; rounds 2; time 1.15 ms; latency 100 µs, 9%",
    ("all_gather", "ring", 16, GIB, TORUS): "each rank sends 1.01 GB; torus 4×2×2; time 1.87 ms; latency 4 µs, 0%",
}


@pytest.mark.parametrize(("setting", "text"), FIGURES.items(), ids=lambda value: str(value)[:40])
def test_the_figures_are_those_computed_by_hand(setting, text):
    assert text in str(update(Knobs(), *setting))


def test_the_explorer_names_the_fastest():
    shown = explorer()
    assert shown.set(size=1).status.endswith("Limit: latency; the fastest here is recursive_doubling, 10.2 µs.")
    assert shown.set(n=0).status.startswith("Not possible: N = 0")
    assert shown.set(n=1).status == "all_reduce by ring, 1 rank, 1 B. Limit: none: one rank sends nothing."


def test_a_bar_says_what_its_rank_sends():
    plot = Knobs()
    update(plot, "broadcast", "tree", 4, 1000, LAPTOP)
    assert [part.says for part in plot.parts()] == [f"rank {r}: {size:,} bytes" for r, size in enumerate((2000, 1000, 0, 0))]
    update(plot, "all_reduce", "ring", 64, GIB, NODES)
    assert list(plot.parts()) == []


def test_a_ring_s_contents_grow_by_a_term_a_round():
    now = Collective("all_reduce", "ring", 4, GIB, NODES)
    assert now.counts(0) == [[1] * 4] * 4
    assert now.counts(2)[0] == [1, 3, 2, 1]
    assert now.counts(3)[0] == [4, 3, 2, 1]
    assert now.counts(6) == [[4] * 4] * 4


def test_a_round_after_the_last_shows_the_last():
    shown = explorer().set(n=4, step=6)
    last = shown.png
    assert shown.set(step=5).png != last
    assert shown.set(step=30).png == last


@pytest.mark.parametrize(("n", "axes"), [(1, (1, 1, 1)), (7, (7, 1, 1)), (12, (3, 2, 2)), (16, (4, 2, 2)), (1024, (16, 8, 8))])
def test_a_torus_is_as_near_to_a_cube_as_n_allows(n, axes):
    assert cube(n) == axes


def test_algorithms_of_an_operation_differ_in_color_and_in_marker():
    assert set(LOOKS) == {name for names in ALGORITHMS.values() for name in names}
    for algorithms in ALGORITHMS.values():
        colors, _, markers = zip(*(LOOKS[name] for name in algorithms), strict=True)
        assert len(set(colors)) == len(set(markers)) == len(algorithms)


def test_opposite_arrows_lie_apart_and_those_without_bytes_are_dotted():
    _, (axes,) = style.figure()
    circle = Circle(axes)
    for n in (2, 3, 8, 16):
        for other in range(1, n):
            circle.update(n, [(0, other, 1.0), (other, 0, 0.0)])
            shafts = circle.moving[0]
            there, back = shafts.get_segments()
            assert distance(there[6], back) > 0.04, (n, other)
            assert shafts.get_linewidths()[0] > 2 * shafts.get_linewidths()[1]
            assert shafts.get_linestyles()[0][1] is None
            assert shafts.get_linestyles()[1][1] is not None


def test_a_circle_draws_up_to_16_ranks_and_says_so_above():
    _, (axes,) = style.figure()
    circle = Circle(axes)
    circle.update(17, [(0, 16, 1.0)], "round 1 of 5")
    assert not circle.moving[0].get_segments()
    assert set(words(axes)) == {"round 1 of 5", "drawn up to 16 ranks"}


def update(plot: Knobs, operation: str, algorithm: str, n: int, size: int, topology: str, step: int = 1) -> Said:
    return plot.update(**Collective(operation, algorithm, n, size, topology, step)._asdict())


def groups(operation: str, algorithm: str) -> list[tuple[int, int | None]]:
    """Every (n, node) that the algorithm takes, of 1 to 9 ranks and 16."""
    paired = (operation, algorithm) in (("all_gather", "recursive_doubling"), ("reduce_scatter", "halving"))
    numbers = [1, 2, 4, 8, 16] if paired else [*range(1, 10), 16]
    if algorithm == "hierarchical":
        return [(n, node) for n in numbers for node in range(1, n + 1) if n % node == 0]
    return [(n, None) for n in numbers]


def has_a_claim(operation: str, rank: int, chunk: int) -> bool:
    """Whether the operation promises this rank this chunk; rank 0 is the root."""
    if operation in ("reduce", "gather"):
        return rank == 0
    return rank == chunk if operation in ("reduce_scatter", "scatter") else True


def promised(operation: str, n: int, chunk: int) -> int:
    """The terms, as bits, of a finished chunk."""
    if operation in ("all_reduce", "reduce_scatter", "reduce"):
        return 2**n - 1
    return 1 if operation in ("broadcast", "scatter") else 2**chunk


def distance(point: np.ndarray, line: np.ndarray) -> float:
    """The distance of a point from a line through several."""
    at = np.linspace(0, len(line) - 1, 500)
    finely = np.column_stack([np.interp(at, range(len(line)), coordinates) for coordinates in line.T])
    return np.linalg.norm(finely - point, axis=1).min()
