"""timeline.intervals and measure.budget against every instant of made-up runs, on whole seconds: sums come out exact."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyranks.measure.budget import Budget, Wait, budget
from manyranks.measure.kinds import COMMUNICATION, MATMUL, OTHER, Span
from manyranks.measure.profile import Profile
from manyranks.timeline.intervals import joined, outside, total, within

END = 20
MOMENTS = st.integers(0, END)
LENGTHS = st.integers(-1, 8)  # some end before they begin, or at once: they cover nothing
INTERVALS = st.lists(st.tuples(MOMENTS, LENGTHS).map(lambda drawn: (drawn[0], drawn[0] + drawn[1])), max_size=6)


def covered(intervals) -> set[int]:
    """The seconds t … t + 1 that one of them covers."""
    return {t for started, finished in intervals for t in range(started, finished)}


def in_order(intervals) -> bool:
    return all(a < b for a, b in intervals) and all(a[1] < b[0] for a, b in pairwise(intervals))


@given(INTERVALS, INTERVALS, MOMENTS, MOMENTS)
def test_intervals_cover_what_every_instant_says(first, second, started, finished):
    results = {
        "joined": (joined(first), covered(first)),
        "within": (within(first, second), covered(first) & covered(second)),
        "outside": (outside(first, started, finished), covered([(started, finished)]) - covered(first)),
    }
    for name, (found, expected) in results.items():
        assert covered(found) == expected, name
        assert in_order(found), name
        assert total(found) == len(expected), name


def test_many_intervals_are_cut_in_one_pass():
    """Each with each, it would take hours."""
    many = [(10 * i, 10 * i + 6) for i in range(100_000)]
    later = [(started + 3, finished + 3) for started, finished in many]
    assert total(within(many, later)) == 3 * len(many)


# Budgets


@st.composite
def runs(draw) -> tuple[list[Span], list[Wait]]:
    cuts = sorted(draw(st.sets(MOMENTS, max_size=10)))
    kinds = st.sampled_from([MATMUL, OTHER, COMMUNICATION, None])
    drawn = [(draw(kinds), *between) for between in pairwise(cuts)]
    waits = draw(
        st.lists(st.builds(lambda at, arrived: Wait(*sorted(at), arrived), st.tuples(MOMENTS, MOMENTS), MOMENTS), max_size=4)
    )
    return [Span("operator", *one) for one in drawn if one[0]], waits


def second_by_second(spans: list[Span], waits: list[Wait], started: int, finished: int) -> Budget:
    parts = dict.fromkeys(Budget._fields, 0)
    for t in range(started, finished):
        at_work = [span.kind for span in spans if span.started <= t < span.finished]
        open_ = [wait for wait in waits if wait.started <= t < wait.finished]
        somebody_is_late = any(t < wait.arrived for wait in open_)
        parts[at_work[0] if at_work else "waiting" if somebody_is_late else "communication" if open_ else "python"] += 1
    return Budget(**parts)


@given(runs(), st.sampled_from([(0, END), (5, 15)]))
def test_every_second_belongs_to_one_part_and_of_waits_beyond_the_run_only_its_own_count(run, here):
    spans = tuple(span for span in run[0] if span.started >= here[0] and span.finished <= here[1])
    found = budget(Profile(*here, spans, 0), run[1])
    assert found == second_by_second(spans, run[1], *here)
    assert found.seconds == here[1] - here[0]


def test_until_the_last_rank_comes_a_wait_is_waiting_but_an_operator_keeps_its_time():
    copy = Span("aten::copy_", OTHER, 3, 5)
    assert budget(Profile(0, 10, (copy,), 0), [Wait(2, 6, 4)]) == Budget(0, 2, communication=1, waiting=1, python=6)


@given(st.lists(st.floats(0, 1), min_size=2, max_size=12), st.lists(st.floats(0, 1), min_size=3, max_size=9))
def test_no_part_is_below_zero_for_times_that_round(cuts, moments):
    base = 1e5  # seconds since the machine was started, say
    cuts = sorted(base + cut for cut in cuts)
    spans = tuple(Span("aten::mm", MATMUL, a, b) for a, b in list(pairwise(cuts))[::2])
    waits = [Wait(*sorted((base + a, base + b)), base + c) for a, b, c in zip(*[iter(moments)] * 3, strict=False)]
    found = budget(Profile(base, base + 1, spans, 0), waits)
    assert min(found) >= 0
    assert found.seconds == pytest.approx(1, abs=1e-9)


def test_shares_are_of_the_whole():
    assert Budget(1, 2, 3, 4, 10).shares == Budget(0.05, 0.1, 0.15, 0.2, 0.5)
    assert Budget(0, 0, 0, 0, 0).shares == Budget(0, 0, 0, 0, 0)
