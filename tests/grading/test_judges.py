"""The judges alone, on notes and events made by hand."""

import pytest
import torch

from manyranks import grade
from manyranks.grade.compare import difference
from manyranks.grade.data_parallel.order import order
from manyranks.grade.data_parallel.traffic import Travel, memory
from manyranks.grade.journal import Entry
from manyranks.grade.scripts import WAIT, Script, Seen, is_sound
from manyranks.grade.trial import Trial
from manyranks.grade.trouble import uneven
from manyranks.grade.watch import Event, Watch

MUST = Travel((("b", "a"), ("c",), ("d",)), (16, 8, 8), late="too late")


def call(op: str, size: int, root: int | None = None, sizes: bool = False) -> Entry:
    return Entry(op, root, size // 8, size, "float64", 0, [("cell.py", 7, "answer")], sizes)


def events(text: str) -> list[Event]:
    """ "a" is a gradient, "2" a call of so many elements of 8 bytes, "w" a wait, "|" the end of backward."""
    marks = {"|": [Event("mark", "finish")], "w": [Event("wait", "")]}
    made = [marks.get(c) or [Event("call", "all_reduce", 8 * int(c)) if c.isdigit() else Event("gradient", c)] for c in text]
    return [Event("mark", "backward"), *(event for one in made for event in one), Event("mark", "step")]


def steps(text: str) -> list[Event]:
    """The same of several steps, with "/" between them."""
    return [event for step in text.split("/") for event in events(step)]


def judged(text: str):
    must = MUST._replace(rounds=1 + text.count("/"))
    script = Script(1, lambda function, watch: {}, [{}], must=must)
    return order(None, Trial(script, answers=[Seen({}, steps(text), [], 0)]))


@pytest.mark.parametrize("text", ["ba2c1d1|www", "ba2d|11www", "c|211www", "dcba211|w", "ab2dc11|www"])
def test_buckets_that_leave_as_soon_as_they_can_are_right(text):
    assert judged(text).ok, judged(text)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("b2ac1d1|www", "in step 1, bucket 0 (b to a) left before it was full, without a"),
        ("bac2d11|www", "in step 1, bucket 0 (b to a) was full, but had not left when the gradient of c was made"),
        ("bacd|211www", "in step 1, bucket 0 (b to a) was full, but had not left when the gradient of c was made"),
        ("ba2d1c1|www", "in step 1, bucket 2 (d) overtook bucket 1 (c)"),
        ("ba2wc1d1|ww", "waits for an all-reduce while backward runs"),
        ("ba2c1d|www", "made other all-reduces than those of the buckets"),
        ("bca2d11|www", "in step 1, bucket 1 (c) was full, but had not left when the gradient of d was made"),
    ],
)
def test_what_comes_too_early_too_late_or_in_between_is_named(text, found):
    assert not judged(text).ok
    assert found in judged(text).found


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("bca2d11|www", "two buckets can leave at once: while, not if"),
        ("bacd|211www", "too late"),
        ("b2ac1d1|www", "count the gradients of the bucket"),
        ("ba2c1d1|www/b2ac1d1|www", "step 1 was right: finish() must forget what it counted"),
        ("ba2c1d1|www/bac2d11|www", "step 1 was right: finish() must forget what it counted"),
    ],
)
def test_a_hint_says_whether_the_first_step_was_right(text, hint):
    assert judged(text).hint.startswith(hint), judged(text)


def seen(**parts) -> Seen:
    return Seen({"a": torch.zeros(2)}, [Event("call", "all_reduce", 8)], [80, 800], 0)._replace(**parts)


def test_what_is_held_by_calls_without_wait_is_blamed_on_these():
    script = Script(1, lambda function, watch: {}, [{}], must=MUST)
    assert "empty your lists" in memory(None, Trial(script, answers=[seen()])).hint
    assert memory(None, Trial(script, answers=[seen()], unwaited=((0, "all_reduce"),))).hint == WAIT


def test_only_what_a_rank_notes_in_all_its_parts_is_sound():
    assert is_sound(seen())
    assert is_sound(seen(events=[], held=[]))
    forged = [
        None,
        "all right",
        tuple(seen()),
        seen(tensors={"a": 7}),
        seen(tensors={"a": torch.zeros(2).to_sparse()}),
        seen(events=None),
        seen(events=[Event("_start", "")]),
        seen(events=[Event("call", "all_reduce", None)]),
        seen(events=[("call", "all_reduce", 8)]),
        seen(held=None),
        seen(held=["much"]),
        seen(peak_bytes=None),
    ]
    assert not any(map(is_sound, forged))


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


def test_numbers_are_shown_with_as_many_digits_as_tell_them_apart():
    right = torch.tensor([1.0], dtype=torch.float64)
    assert "element 0 is 1.00000001, right is 1" in difference(right + 1e-8, right, 1e-9)
    assert "element 0 is 2, right is 1" in difference(right + 1, right, 1e-9)


def test_a_watch_counts_what_is_alive_and_the_most_inside_peak(tmp_path):
    watch = Watch(str(tmp_path), 0)
    with watch.watching():
        kept = torch.zeros(100)
        with watch.peak():
            torch.ones(1000).sum()
        watch.weigh()
        del kept
        watch.weigh()
    assert watch.held == [400, 0]
    assert 4400 <= watch.peak_bytes < 4500


def test_a_check_leaves_the_number_of_threads_as_it_was():
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        assert grade.data_parallel.cut(lambda *_: []).points == 0
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)
