"""The words a learner reads about collectives that do not fit together."""

import pytest

from manyranks.measure.journal import Entry
from manyranks.world.strangers.trouble import uneven


def call(op: str, size: int, root: int | None = None, sizes: bool = False) -> Entry:
    return Entry(op, root, size // 8, size, "float64", 0, [("cell.py", 7, "answer")], sizes)


@pytest.mark.parametrize(
    ("first", "second", "problem"),
    [
        (call("all_reduce", 8), call("all_reduce", 16), "rank 0 gave 8 bytes to its all_reduce #1, rank 1 gave 16 bytes"),
        (
            call("all_reduce", 8),
            call("barrier", 0),
            "rank 0 called all_reduce of 8 bytes where rank 1 called barrier of 0 bytes",
        ),
        (
            call("broadcast", 8, 0),
            call("broadcast", 8, 1),
            "rank 0 called broadcast of 8 bytes with root 0 where rank 1 called broadcast of 8 bytes with root 1",
        ),
    ],
)
def test_the_first_collective_that_differs_is_named_with_its_line(first, second, problem):
    same = call("all_reduce", 8)
    found, hint = uneven({0: [same, first], 1: [same, second, same]})
    assert found == problem
    assert hint == "all ranks must make the same calls in the same order (cell.py, line 7, in answer)"


def test_ranks_that_make_the_same_calls_are_even_however_far_they_are():
    assert uneven({0: [call("all_reduce", 8)] * 3, 1: [call("all_reduce", 8)], 2: []}) is None
    assert uneven({0: [call("send", 8, 1)], 1: [call("recv", 16, 0)]}) is None


def test_an_all_to_all_with_sizes_of_its_own_may_differ_in_bytes_but_one_without_may_not():
    uneven_ones = [call("all_to_all", size, sizes=True) for size in (8, 16)]
    assert uneven({rank: [one, call("barrier", 0)] for rank, one in enumerate(uneven_ones)}) is None
    assert uneven({rank: [one, call("barrier", rank)] for rank, one in enumerate(uneven_ones)}) is not None
    assert uneven({0: [call("all_to_all", 8)], 1: [call("all_to_all", 16)]}) is not None
