"""theory.collectives: rounds run on what each rank holds; bytes sent against the rounds; the errors."""

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manyranks.theory import collectives
from manyranks.theory.collectives import Message, chunk_sizes, rounds, sent_bytes

ALL_PAIRS = [(op, algorithm) for op, algorithms in collectives.ALGORITHMS.items() for algorithm in algorithms]
POWER_OF_TWO = [("all_gather", "recursive_doubling"), ("reduce_scatter", "halving")]
ODD_SIZES = [0, 1, 7, 23]


@pytest.mark.parametrize(("op", "algorithm"), ALL_PAIRS)
def test_the_rounds_bring_about_the_operation_s_result(op, algorithm):
    for n, root, node in groups(op, algorithm):
        for elements in ODD_SIZES:
            messages = rounds(op, elements, n, algorithm, root, node)
            assert missing(op, messages, elements, n, root) == [], (n, root, node, elements)


@pytest.mark.parametrize(("op", "algorithm"), ALL_PAIRS)
def test_sent_bytes_are_those_of_the_rounds(op, algorithm):
    for n, root, node in groups(op, algorithm):
        for elements in ODD_SIZES:
            sent = Counter(dict.fromkeys(range(n), 0))
            for message in flat(rounds(op, elements, n, algorithm, root, node)):
                sent[message.source] += 4 * message.count
            assert sent_bytes(op, elements, 4, n, algorithm, root, node) == [sent[r] for r in range(n)], (n, root, node)


@pytest.mark.parametrize(("op", "algorithm"), ALL_PAIRS)
def test_in_a_round_a_rank_sends_one_message_and_receives_one_at_most(op, algorithm):
    for n, root, node in groups(op, algorithm):
        for messages in rounds(op, 23, n, algorithm, root, node):
            assert messages, "a round without messages"
            assert max(Counter(m.source for m in messages).values()) == 1
            assert max(Counter(m.destination for m in messages).values()) == 1
            assert all(m.source != m.destination for m in messages)


def test_the_check_of_results_sees_a_message_too_few_and_one_too_many():
    ring = rounds("all_reduce", 7, 3)
    assert missing("all_reduce", ring[:-1], 7, 3, 0)
    with pytest.raises(AssertionError, match="added twice"):
        missing("all_reduce", ring[:1] + ring, 7, 3, 0)


@pytest.mark.parametrize("algorithm", collectives.ALGORITHMS["all_reduce"])
def test_an_all_reduce_moves_each_element_2_n_minus_1_times_unless_it_doubles(algorithm):
    for n, _, node in groups("all_reduce", algorithm):
        least, total = 2 * (n - 1) * 23, sum(sent_bytes("all_reduce", 23, 1, n, algorithm, node=node))
        assert total > least if algorithm == "recursive_doubling" and n > 3 else total == least, n


def test_of_three_ranks_the_first_folds_into_the_second():
    assert rounds("all_reduce", 5, 3, "halving_doubling") == [
        (Message(0, 1, 0, 5, True),),
        (Message(1, 2, 3, 2, True), Message(2, 1, 0, 3, True)),
        (Message(1, 2, 0, 3, False), Message(2, 1, 3, 2, False)),
        (Message(1, 0, 0, 5, False),),
    ]


def test_of_six_ranks_the_even_ones_of_the_first_four_fold_into_the_odd_ones():
    first, *middle, last = rounds("all_reduce", 8, 6, "halving_doubling")
    assert [(m.source, m.destination, m.count) for m in first] == [(0, 1, 8), (2, 3, 8)]
    assert [(m.source, m.destination, m.count) for m in last] == [(1, 0, 8), (3, 2, 8)]
    assert {rank for m in flat(middle) for rank in (m.source, m.destination)} == {1, 3, 4, 5}
    assert sent_bytes("all_reduce", 8, 1, 6, "halving_doubling") == [8, 20, 8, 20, 12, 12]


@pytest.mark.parametrize("op", ["reduce_scatter", "all_gather", "all_to_all"])
def test_pairs_of_a_power_of_two_of_ranks_exchange(op):
    for messages in rounds(op, 24, 8, "pairwise"):
        assert {(m.source, m.destination) for m in messages} == {(m.destination, m.source) for m in messages}


@given(st.integers(0, 200), st.integers(1, 12))
def test_chunks_are_those_of_tensor_split(elements, n):
    assert chunk_sizes(elements, n) == [len(chunk) for chunk in torch.tensor_split(torch.empty(elements), n)]


def test_sixteen_thousand_ranks_are_counted_without_their_rounds():
    n, elements = 16384, 16384 * 3 + 5
    assert sum(sent_bytes("all_reduce", elements, 2, n)) == 2 * 2 * (n - 1) * elements
    assert sum(sent_bytes("all_reduce", elements, 2, n, "hierarchical", node=8)) == 2 * 2 * (n - 1) * elements
    assert sum(sent_bytes("all_to_all", elements, 1, n, "pairwise")) == (n - 1) * elements


@pytest.mark.parametrize(("n", "node"), [(4, 2), (6, 3), (8, 2), (8, 4)])
def test_a_hierarchical_all_reduce_sends_a_node_th_as_much_between_nodes(n, node):
    elements, nodes, crossing = 24 * n, n // node, Counter()
    for m in flat(rounds("all_reduce", elements, n, "hierarchical", node=node)):
        crossing[m.source] += m.count if m.source // node != m.destination // node else 0
    assert dict(crossing) == dict.fromkeys(range(n), 2 * (nodes - 1) * elements // nodes // node)


@pytest.mark.parametrize(
    ("arguments", "texts"),
    [
        (("all_reduce", 8, 2, "halving-doubling"), ["did you mean 'halving_doubling'?"]),
        (("allgather", 8, 2), ["did you mean 'all_gather'?"]),
        (("all_reduce", -1, 2), ["elements=-1"]),
        (("all_reduce", 8, 0), ["n=0", "at least 1"]),
        (("reduce_scatter", 8, 6, "halving"), ["n=6", "power of two", "ring or pairwise"]),
        (("all_gather", 8, 3, "recursive_doubling"), ["n=3", "power of two", "ring or pairwise"]),
        (("all_reduce", 8, 6, "hierarchical"), ["node=None", "n=6"]),
        (("all_reduce", 8, 6, "hierarchical", 0, 4), ["node=4", "1, 2, 3, 6"]),
        (("all_reduce", 8, 6, "hierarchical", 0, 0), ["node=0", "1, 2, 3, 6"]),
        (("all_reduce", 8, 6, "ring", 0, 2), ["node=2", "only algorithm='hierarchical'"]),
    ],
)
def test_an_error_says_what_to_use_instead(arguments, texts):
    with pytest.raises(ValueError) as caught:
        rounds(*arguments)
    assert [text for text in texts if text not in str(caught.value)] == []


@pytest.mark.parametrize(
    ("arguments", "texts"),
    [
        (("all_reduce", 8, -4, 2), ["itemsize=-4", "not be negative"]),
        (("broadcast", 8, 4, 3, "tree", 3), ["root=3", "0 to 2"]),
        (("broadcast", 8, 4, 3, "tree", -1), ["root=-1", "0 to 2"]),
        (("broadcast", 8, 4, 2, "binomial"), ["algorithm='binomial'", "broadcast", "ring, tree, naive"]),
    ],
)
def test_bytes_that_cannot_be_counted_are_refused(arguments, texts):
    with pytest.raises(ValueError) as caught:
        sent_bytes(*arguments)
    assert [text for text in texts if text not in str(caught.value)] == []


def groups(op: str, algorithm: str) -> list[tuple[int, int, int | None]]:
    """Every (n, root, node) that the algorithm takes, of 1 to 9 ranks."""
    sizes = [n for n in range(1, 10) if (op, algorithm) not in POWER_OF_TWO or n in (1, 2, 4, 8)]
    if algorithm == "hierarchical":
        return [(n, 0, node) for n in sizes for node in range(1, n + 1) if n % node == 0]
    return [(n, root, None) for n in sizes for root in range(n)]


def flat(several: list[tuple[Message, ...]]) -> list[Message]:
    return [message for messages in several for message in messages]


def missing(op: str, several: list[tuple[Message, ...]], elements: int, n: int, root: int) -> list[tuple[int, int]]:
    """Runs the rounds; the (rank, element) that do not end with what the operation promises.

    For each rank and element, `have` is the set of ranks whose numbers are in it; in an all_to_all, element e of rank
    r's input is number r·elements + e of a common tensor, and each rank is to have its part of that.
    """
    owner = [r for r, size in enumerate(chunk_sizes(elements, n)) for _ in range(size)]
    if op == "all_to_all":
        several = [tuple(m._replace(start=m.source * elements + m.start) for m in messages) for messages in several]
        have = [[{r} if e // elements == r else set() for e in range(n * elements)] for r in range(n)]
        wanted = {(r, e): {e // elements} for r in range(n) for e in range(n * elements) if owner[e % elements] == r}
    else:
        have = [[at_first(op, r, owner[e], root) for e in range(elements)] for r in range(n)]
        from_root = op in ("broadcast", "scatter")
        wanted = {
            (r, e): {owner[e]} if "gather" in op else {root} if from_root else set(range(n))
            for r in range(n)
            for e in range(elements)
            if op in ("all_reduce", "all_gather", "broadcast") or r == (owner[e] if "scatter" in op else root)
        }
    for messages in several:
        run(messages, have)
    return [(r, e) for (r, e), ranks in wanted.items() if have[r][e] != ranks]


def at_first(op: str, rank: int, owner: int, root: int) -> set[int]:
    if op in ("broadcast", "scatter"):
        return {root} if rank == root else set()
    return {rank} if "gather" not in op or rank == owner else set()


def run(messages: tuple[Message, ...], have: list[list[set[int]]]) -> None:
    """One round: all are sent before any arrives."""
    at = [[(m.start + i) % len(have[0]) for i in range(m.count)] for m in messages]
    sent = [[have[m.source][e] for e in where] for m, where in zip(messages, at, strict=True)]
    for message, where, values in zip(messages, at, sent, strict=True):
        for e, ranks in zip(where, values, strict=True):
            assert ranks, f"{message} sends what its source does not have"
            assert not message.adds or ranks.isdisjoint(have[message.destination][e]), f"{message}: added twice"
            have[message.destination][e] = have[message.destination][e] | ranks if message.adds else ranks
