"""Checks what verify refuses, what it says, and that it agrees with a simulation of synchronous sends."""

import re
from dataclasses import replace
from functools import partial
from textwrap import dedent

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyranks.parallel.pipeline import schedules
from manyranks.parallel.pipeline.dualpipe import dualpipe
from manyranks.parallel.pipeline.schedules import Action, Pair, Schedule
from manyranks.parallel.pipeline.verify import excerpt, held, verify
from tests.unit.test_pipeline_schedules import ALL, make

MAKERS = [partial(make, name, v=2) for name in ALL]


def read(text, placement, m, name="given"):
    """A schedule from rows such as "F0 F1 B0 B1"; "F0s2" is of stage 2, else the rank's first stage."""
    ranks = []
    for rank, row in enumerate(text.strip().splitlines()):
        cells = [re.fullmatch(r"(\w)(\d+)(?:s(\d+))?", cell).groups() for cell in row.split()]
        ranks.append(tuple(Action(kind, int(s or placement.index(rank)), int(i)) for kind, i, s in cells))
    return Schedule(name, m, placement, tuple(ranks))


def changed(schedule, rank, change):
    items = list(schedule.ranks[rank])
    change(items)
    return replace(schedule, ranks=(*schedule.ranks[:rank], tuple(items), *schedule.ranks[rank + 1 :]))


def swapped(schedule, rank, i, j):
    def change(items):
        items[i], items[j] = items[j], items[i]

    return changed(schedule, rank, change)


def refusal(schedule, memory=None):
    with pytest.raises(ValueError) as caught:
        verify(schedule, memory)
    return str(caught.value)


# Each action once, where it belongs


H1, ONE = schedules.zb_h1(2, 3), schedules.one_f_one_b(2, 3)


@pytest.mark.parametrize(
    ("schedule", "position", "action", "said"),
    [
        (H1, 9, Action("F", 1, 0), "F0 of stage 1 is done twice"),
        (H1, 9, Action("W", 1, 2), "W2 of stage 1 is done twice"),
        (H1, 9, Action("I", 1, 0), "I0 of stage 1 is done twice"),
        (H1, 9, Action("B", 1, 2), "I2 of stage 1 is done twice"),
        (ONE, 2, Action("F", 0, 0), "F0 of stage 0 is not this rank's: the stage is on rank 0"),
        (ONE, 2, Action("F", 1, 3), "F3 of stage 1: no such micro-batch; there are 0 to 2"),
        (ONE, 2, Action("F", 1, -1), "F-1 of stage 1: no such micro-batch; there are 0 to 2"),
        (ONE, 2, Action("F", 2, 0), "F0 of stage 2: no such stage; there are 0 to 1"),
        (ONE, 2, Action("F", -1, 0), "F0 of stage -1: no such stage; there are 0 to 1"),
        (ONE, 2, Action("G", 1, 0), "G0 of stage 1: no such action; its kind must be one of F, B, I, W"),
    ],
)
def test_an_action_that_does_not_belong_in_the_row_is_named(schedule, position, action, said):
    broken = changed(schedule, 1, lambda items: items.insert(position, action))
    assert refusal(broken).startswith(f"{schedule.name}, rank 1, position {position}: {said}\n")


def test_a_missing_action_and_halves_of_a_backward_are_named_as_the_table_has_them():
    broken = changed(H1, 1, lambda items: items.remove(Action("W", 1, 2)))
    assert refusal(broken).startswith("zb-h1, rank 1, position 8: W2 of stage 1 is missing\n")
    assert "B1 of stage 0 is missing" in refusal(read("F0 B0 F1", (0,), 2))
    assert "W1 of stage 0 is missing" in refusal(read("F0 B0 F1 I1", (0,), 2))
    assert "I1 of stage 0 is missing" in refusal(read("F0 I0 W0 F1", (0,), 2))
    assert "B0 of stage 0 is done twice" in refusal(read("F0 B0 F1 B0", (0,), 2))
    both_ways = changed(dualpipe(4, 8), 3, lambda items: items.pop())
    assert re.match(r"dualpipe, rank 3, position \d+: W7 of stage 0 is missing", refusal(both_ways))


def test_a_placement_and_a_number_of_micro_batches_that_cannot_be_are_refused():
    assert refusal(replace(ONE, placement=(0, 2))) == "placement=(0, 2): give each stage a rank from 0 to 1"
    assert refusal(replace(ONE, placement=())).startswith("placement=(): give each stage a rank")
    assert refusal(replace(ONE, microbatches=0)) == "microbatches=0: must be a whole number, 1 or more"


# Order


def test_a_weight_gradient_before_its_input_gradient_is_shown_in_its_cell():
    schedule = schedules.zb_h1(3, 4)
    at, late = (schedule.ranks[1].index(Action(kind, 1, 1)) for kind in "IW")
    said = refusal(swapped(schedule, 1, at, late))
    assert said.splitlines()[0] == f"zb-h1, rank 1, position {at}: W1 of stage 1 comes before I1 of stage 1, which it needs"
    assert "[W1]" in said


@pytest.mark.parametrize(
    ("row", "said"),
    [  # a stage of the same rank is no message and must come first
        ("F0s0 B0s0 F0s1 B0s1", "B0 of stage 0 comes before B0 of stage 1"),
        ("F0s0 B0s1 F0s1 B0s0", "B0 of stage 1 comes before F0 of stage 1"),
        ("F0s1 F0s0 B0s1 B0s0", "F0 of stage 1 comes before F0 of stage 0"),
    ],
)
def test_what_comes_before_what_it_needs_on_its_own_rank_is_refused(row, said):
    assert f"{said}, which it needs" in refusal(read(row, (0, 0), 1))


def test_a_pair_needs_what_both_halves_need():
    pair = Pair(Action("F", 0, 1), Action("B", 0, 0))
    good = Schedule("pairs", 2, (0,), ((Action("F", 0, 0), pair, Action("B", 0, 1)),))
    verify(good, memory=2)
    early = Schedule("pairs", 2, (0,), ((Pair(Action("F", 0, 0), Action("B", 0, 0)), Action("F", 0, 1), Action("B", 0, 1)),))
    assert "F0 of stage 0 with B0 of stage 0 comes before F0 of stage 0, which it needs" in refusal(early)
    assert "makes 2 activations in flight; the cap is 1" in refusal(good, memory=1)


def test_ranks_that_wait_for_each_other_are_all_named():
    circle = read("F0 F1 B1 B0\nF0 B0 F1 B1", (0, 1), 2)
    # A lane's order is wrong first: rank 0 takes the gradients as 1, 0.
    assert "deadlock: B1 of stage 0 waits for B1 of stage 1" in refusal(circle)
    circle = read("F0 B0 F1 B1\nF0 F1 B0 B1", (0, 1), 2)
    assert refusal(circle) == dedent("""\
        given, rank 0, position 1: deadlock:
          rank 0 at position 1, B0 of stage 0, waits for B0 of stage 1, which rank 1 does at position 2
          rank 1 at position 1, F1 of stage 1, waits for F1 of stage 0, which rank 0 does at position 2
          position  0   1   2   3   4
            rank 0 F0 [B0] F1  B1   .
            rank 1 F0  F1  B0  B1   .""")


def test_of_three_ranks_only_those_of_the_circle_are_named_in_the_order_of_waiting():
    for third in ("F0 B0 F1 B1", "F0 F1 B0 B1"):  # rank 2 waits too, but nobody in the circle for it
        said = refusal(read(f"F0 B0 F1 B1\nF0 F1 B0 B1\n{third}", (0, 1, 2), 2))
        assert [line.split()[1] for line in said.splitlines() if "waits for" in line] == ["0", "1"]


def test_messages_that_overtake_each_other_deadlock_synchronous_sends():
    crossed = read("F0 F1 B0 B1\nF1 F0 B0 B1", (0, 1), 2)
    assert refusal(crossed) == dedent("""\
        given, rank 1, position 0: deadlock: F1 of stage 1 waits for F1 of stage 0, but
          rank 0 first sends what F0 of stage 0 gives, which is taken
          later, at position 1; no message overtakes another
          position  0   1   2   3
            rank 0 F0  F1  B0  B1
            rank 1[F1] F0  B0  B1""")


def test_a_table_of_dualpipe_that_deadlocks_is_refused():
    said = refusal(swapped(dualpipe(4, 8), 0, 0, 1))
    assert said.startswith("dualpipe, rank 1, position 0: deadlock: F0 of stage 1 waits for F0 of stage 0")


def test_stages_of_one_rank_may_take_micro_batches_in_another_order():
    verify(read("F0s0 F1s0 F1s1 F0s1 B0s1 B1s1 B1s0 B0s0", (0, 0), 2))


# Memory


def test_1f1b_with_gpipe_s_memory_is_caught_by_the_cap():
    assert "rank 0, position 4: F4 of stage 0 makes 5 activations in flight; the cap is 4" in refusal(schedules.gpipe(4, 8), 4)
    verify(schedules.one_f_one_b(4, 8), memory=4)


def test_held_counts_until_the_weight_gradient():
    assert list(held(schedules.zb_h1(2, 2), 1)) == [1, 1, 2, 2, 1, 0]
    assert list(held(schedules.one_f_one_b(2, 2), 0)) == [1, 2, 1, 0]


# The excerpt


def test_the_excerpt_has_the_neighboring_ranks_and_positions_and_names_stages_where_there_are_several():
    assert (
        excerpt(schedules.one_f_one_b(4, 4), 1, 3)
        == """\
  position  0   1   2   3   4   5   6
    rank 0 F0  F1  F2  F3  B0  B1  B2
    rank 1 F0  F1  F2 [B0] F3  B1  B2
    rank 2 F0  F1  B0  F2  B1  F3  B2"""
    )
    assert "[F0s3]" in excerpt(schedules.interleaved(2, 2, 2), 1, 2)
    assert "F2s3+B0s0" in excerpt(schedules.dualpipe_v(2, 4), 0, 9)


# Against a simulation


def runs_with_synchronous_sends(schedule):
    """One small step of any rank at a time, a queue a lane; a rank ends when all it sent has been received."""
    last, where = schedule.stages - 1, schedule.placement
    queues, done, position = {}, set(), [0] * len(schedule.ranks)
    moved = True
    while moved:
        moved = False
        for rank, items in enumerate(schedule.ranks):
            if position[rank] == len(items):
                continue
            kind, stage, i = items[position[rank]]
            if kind == "W":
                ready = ("I", stage, i) in done
            else:
                forward = kind == "F"
                source = stage - 1 if forward else stage + 1
                ready = forward or ("F", stage, i) in done
                if 0 <= source <= last and where[source] == rank:
                    ready = ready and ("F" if forward else "I", source, i) in done
                elif 0 <= source <= last:
                    lane = queues.setdefault((forward, source), [])
                    ready = ready and lane[:1] == [i]
                    if ready:
                        lane.pop(0)
            if not ready:
                continue
            done |= {(part, stage, i) for part in {"B": "IW"}.get(kind, kind)}
            to = stage + 1 if kind == "F" else stage - 1
            if kind != "W" and 0 <= to <= last and where[to] != rank:
                queues.setdefault((kind == "F", stage), []).append(i)
            position[rank] += 1
            moved = True
    return position == [len(items) for items in schedule.ranks] and not any(queues.values())


@given(st.data())
def test_verify_accepts_a_reordered_table_exactly_if_it_runs(data):
    schedule = data.draw(st.sampled_from(MAKERS[:-2]))(data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4)))
    for _ in range(data.draw(st.integers(0, 3))):
        rank = data.draw(st.integers(0, len(schedule.ranks) - 1))
        i = data.draw(st.integers(0, len(schedule.ranks[rank]) - 1))
        j = data.draw(st.integers(max(0, i - 3), i))
        schedule = swapped(schedule, rank, i, j)
    if runs_with_synchronous_sends(schedule):
        verify(schedule)
    else:
        assert "\n" in refusal(schedule)


@given(st.sampled_from(MAKERS), st.data())
def test_no_action_can_be_left_out_or_doubled(make, data):
    schedule = make(4, 4)
    rank = data.draw(st.integers(0, 3))
    at = data.draw(st.integers(0, len(schedule.ranks[rank]) - 1))
    assert "is missing" in refusal(changed(schedule, rank, lambda items: items.pop(at)))
    assert "is done twice" in refusal(changed(schedule, rank, lambda items: items.append(items[at])))
