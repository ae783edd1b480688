"""theory.collectives: bytes sent, against closed forms and against rings run chunk by chunk."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manyranks.theory.collectives import chunk_sizes, sent_bytes

ELEMENTS, ITEM_BYTES, RANKS = st.integers(0, 200), st.sampled_from([1, 2, 4, 8]), st.integers(1, 12)
ALGORITHMS = {
    "all_reduce": ["ring"],
    "reduce_scatter": ["ring"],
    "all_gather": ["ring"],
    "reduce": ["ring"],
    "broadcast": ["ring", "tree", "naive"],
    "scatter": ["naive"],
    "gather": ["naive"],
    "all_to_all": ["pairwise"],
}
PAIRS = [(op, algorithm) for op, algorithms in ALGORITHMS.items() for algorithm in algorithms]


@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_all_reduce_sends_2_n_minus_1_over_n_of_the_message(n):
    assert sent_bytes("all_reduce", 120 * n, 4, n) == [2 * (n - 1) * 480] * n


@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter"])
@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_half_an_all_reduce_sends_n_minus_1_over_n_of_the_message(op, n):
    assert sent_bytes(op, 120 * n, 4, n) == [(n - 1) * 480] * n


@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_all_to_all_keeps_its_own_part(n):
    assert sent_bytes("all_to_all", 120 * n, 4, n, "pairwise") == [(n - 1) * 480] * n


def test_binomial_broadcast_of_eight_ranks():
    assert sent_bytes("broadcast", 1000, 4, 8, "tree") == [4000 * k for k in (3, 2, 1, 1, 0, 0, 0, 0)]


def test_chain_broadcast_ends_at_the_rank_before_the_root():
    assert sent_bytes("broadcast", 10, 4, 4, "ring", root=1) == [0, 40, 40, 40]


def test_naive_broadcast_is_all_the_root_s():
    assert sent_bytes("broadcast", 10, 4, 4, "naive", root=2) == [0, 0, 120, 0]


def test_scatter_and_gather_move_each_chunk_once():
    assert sent_bytes("scatter", 10, 4, 4, "naive", root=1) == [0, 28, 0, 0]
    assert sent_bytes("gather", 10, 4, 4, "naive", root=1) == [12, 0, 8, 8]


@given(ELEMENTS, RANKS)
def test_chunks_are_those_of_tensor_split(elements, n):
    assert chunk_sizes(elements, n) == [len(chunk) for chunk in torch.tensor_split(torch.empty(elements), n)]


@given(ELEMENTS, ITEM_BYTES, RANKS)
def test_totals_of_the_rings_hold_for_any_size(elements, itemsize, n):
    once = (n - 1) * elements * itemsize
    assert sum(sent_bytes("all_reduce", elements, itemsize, n)) == 2 * once
    assert sum(sent_bytes("reduce_scatter", elements, itemsize, n)) == once
    assert sum(sent_bytes("all_gather", elements, itemsize, n)) == once


@pytest.mark.parametrize("algorithm", ALGORITHMS["broadcast"])
@given(ELEMENTS, ITEM_BYTES, RANKS, st.data())
def test_every_broadcast_brings_the_message_to_each_other_rank_once(algorithm, elements, itemsize, n, data):
    root = data.draw(st.integers(0, n - 1))
    assert sum(sent_bytes("broadcast", elements, itemsize, n, algorithm, root)) == (n - 1) * elements * itemsize


@given(ELEMENTS, ITEM_BYTES, RANKS)
def test_reduce_scatter_sends_what_a_ring_of_chunks_sends(elements, itemsize, n):
    sent, kept = ring_reduce_scatter(whole_tensors(elements, n))
    assert kept == cut([sum(column) for column in zip(*whole_tensors(elements, n), strict=True)], n)
    assert sent_bytes("reduce_scatter", elements, itemsize, n) == [itemsize * count for count in sent]


@given(ELEMENTS, ITEM_BYTES, RANKS)
def test_all_gather_sends_what_a_ring_of_chunks_sends(elements, itemsize, n):
    chunks = cut(list(range(elements)), n)
    sent, gathered = ring_all_gather(chunks)
    assert all(have == dict(enumerate(chunks)) for have in gathered)
    assert sent_bytes("all_gather", elements, itemsize, n) == [itemsize * count for count in sent]


@given(ELEMENTS, ITEM_BYTES, RANKS)
def test_all_reduce_is_a_reduce_scatter_and_an_all_gather(elements, itemsize, n):
    first, kept = ring_reduce_scatter(whole_tensors(elements, n))
    second, _ = ring_all_gather(kept)
    assert sent_bytes("all_reduce", elements, itemsize, n) == [itemsize * (a + b) for a, b in zip(first, second, strict=True)]


@pytest.mark.parametrize(("op", "algorithm"), PAIRS)
def test_one_rank_sends_nothing(op, algorithm):
    assert sent_bytes(op, 1000, 4, 1, algorithm) == [0]


@pytest.mark.parametrize(("op", "algorithm"), PAIRS)
def test_an_empty_tensor_sends_nothing(op, algorithm):
    assert sent_bytes(op, 0, 4, 3, algorithm) == [0, 0, 0]


@pytest.mark.parametrize("algorithm", ALGORITHMS["broadcast"])
@given(ELEMENTS, RANKS, st.data())
def test_moving_the_root_rotates_a_broadcast(algorithm, elements, n, data):
    root = data.draw(st.integers(0, n - 1))
    from_zero = sent_bytes("broadcast", elements, 4, n, algorithm)
    assert sent_bytes("broadcast", elements, 4, n, algorithm, root) == rotated(from_zero, root)


@given(ELEMENTS, RANKS, st.data())
def test_moving_the_root_rotates_a_reduce_of_equal_chunks(elements, n, data):
    root = data.draw(st.integers(0, n - 1))
    from_zero = sent_bytes("reduce", elements * n, 4, n)
    assert sent_bytes("reduce", elements * n, 4, n, root=root) == rotated(from_zero, root)


@given(ELEMENTS, RANKS, st.data())
def test_in_a_reduce_only_the_root_keeps_its_chunk(elements, n, data):
    root = data.draw(st.integers(0, n - 1))
    kept = chunk_sizes(elements, n)[root]
    assert sent_bytes("reduce", elements, 1, n, root=root) == [elements - (kept if r == root else 0) for r in range(n)]


def test_sixteen_thousand_ranks_are_counted_without_their_rounds():
    n, elements = 16384, 16384 * 3 + 5
    assert sum(sent_bytes("all_reduce", elements, 2, n)) == 2 * 2 * (n - 1) * elements
    assert sum(sent_bytes("all_reduce", elements, 2, n, "hierarchical", node=8)) == 2 * 2 * (n - 1) * elements
    assert sum(sent_bytes("all_to_all", elements, 1, n, "pairwise")) == (n - 1) * elements


@pytest.mark.parametrize(
    ("arguments", "texts"),
    [
        (("all_reduce", -1, 4, 2), ["elements=-1", "not be negative"]),
        (("all_reduce", 8, -4, 2), ["itemsize=-4", "not be negative"]),
        (("all_reduce", 8, 4, 0), ["n=0", "at least 1"]),
        (("broadcast", 8, 4, 3, "tree", 3), ["root=3", "0 to 2"]),
        (("broadcast", 8, 4, 3, "tree", -1), ["root=-1", "0 to 2"]),
        (("allreduce", 8, 4, 2), ["op='allreduce'", *ALGORITHMS]),
        (("broadcast", 8, 4, 2, "binomial"), ["algorithm='binomial'", "broadcast", *ALGORITHMS["broadcast"]]),
        (("scatter", 8, 4, 2, "ring"), ["algorithm='ring'", "scatter", "naive"]),
    ],
)
def test_an_error_names_what_was_given_and_what_is_allowed(arguments, texts):
    with pytest.raises(ValueError) as caught:
        sent_bytes(*arguments)
    assert [text for text in texts if text not in str(caught.value)] == []


def ring_reduce_scatter(tensors: list[list[int]]) -> tuple[list[int], list[list[int]]]:
    """Elements each rank sent, and the summed chunk r that rank r keeps."""
    n = len(tensors)
    chunks, sent = [cut(tensor, n) for tensor in tensors], [0] * n
    for step in range(n - 1):
        moving = [list(chunks[r][(r - step - 1) % n]) for r in range(n)]
        for r, chunk in enumerate(moving):
            sent[r] += len(chunk)
            target = chunks[(r + 1) % n][(r - step - 1) % n]
            target[:] = [a + b for a, b in zip(target, chunk, strict=True)]
    return sent, [chunks[r][r] for r in range(n)]


def ring_all_gather(chunks: list[list[int]]) -> tuple[list[int], list[dict[int, list[int]]]]:
    """Elements each rank sent, and the chunks each rank then has, by number."""
    n = len(chunks)
    have, sent = [{r: chunk} for r, chunk in enumerate(chunks)], [0] * n
    for step in range(n - 1):
        moving = [((r - step) % n, have[r][(r - step) % n]) for r in range(n)]
        for r, (number, chunk) in enumerate(moving):
            sent[r] += len(chunk)
            have[(r + 1) % n][number] = chunk
    return sent, have


def whole_tensors(elements: int, n: int) -> list[list[int]]:
    """A different tensor a rank, so that a chunk added twice or left out shows in the sum."""
    return [[2**r * (i + 1) for i in range(elements)] for r in range(n)]


def cut(values: list[int], n: int) -> list[list[int]]:
    small, larger = divmod(len(values), n)
    starts = [r * small + min(r, larger) for r in range(n + 1)]
    return [values[starts[r] : starts[r + 1]] for r in range(n)]


def rotated(values: list[int], by: int) -> list[int]:
    return [values[(r - by) % len(values)] for r in range(len(values))]
