"""1F1B with an all-to-all beside another micro-batch's compute: verified, on the virtual clock, and on ranks that sleep."""

from collections import Counter
from itertools import product

import pytest

from manyranks.parallel.pipeline.all_to_all_overlap import WORK, overlapped, program
from manyranks.parallel.pipeline.paced import carried_out, timeline
from manyranks.parallel.pipeline.schedules import Pair, interleaved
from manyranks.parallel.pipeline.verify import verify
from manyranks.timeline import Collective, Compute, Durations, Program, Wait, replay

TIMES = dict(zip(WORK, (0.02, 0.03, 0.04, 0.06), strict=True))
COSTS = Durations(TIMES, bandwidth=1e6)  # an all-to-all of 20,000 bytes is hidden by any of these
SIZE = 20_000


@pytest.mark.parametrize(
    ("p", "m", "v"),
    [case for case in product((1, 2, 3, 4), (1, 2, 5, 8, 12), (1, 2, 3)) if case[2] == 1 or case[1] % case[0] == 0],
)
def test_each_forward_after_the_warm_up_has_a_backward_beside_it_and_nothing_is_left_out(p, m, v):
    schedule = overlapped(p, m, v)
    verify(schedule)
    for rank, of in enumerate(interleaved(p, m, v).ranks):
        assert Counter(schedule.actions(rank)) == Counter(of)
        pairs = sum(isinstance(item, Pair) for item in schedule.ranks[rank])
        assert pairs == max(0, m * v - 2 * (p - 1 - rank) - (v - 1) * p - 1)


@pytest.mark.parametrize("size", [SIZE, 50_000])
@pytest.mark.parametrize(("m", "layers"), [(1, 1), (3, 2), (6, 4)])
def test_one_stage_waits_for_the_first_forward_the_last_backward_and_what_is_longer_than_its_compute(m, layers, size):
    made, took = overlapped(1, m), size / 1e6
    replayed, apart = (replay(program(made, 2, layers, size, pairs), COSTS) for pairs in (True, False))
    longer = sum(max(0, took - seconds) for seconds in TIMES.values())
    for rank in range(2):
        assert replayed.busy(rank) == pytest.approx(m * layers * sum(TIMES.values()))
        assert replayed.exposed_communication(rank) == pytest.approx(layers * (4 * took + (m - 1) * longer))
    assert apart.exposed_communication(0) == pytest.approx(4 * m * layers * took)


def test_a_pair_s_turns_are_those_of_the_table():
    (of_rank,) = program(overlapped(1, 2), 1, 1, SIZE).ranks
    names = [one.name for one in of_rank if not isinstance(one, Wait)]
    assert names[:4] == ["F0 attention", "F0 tokens", "F0 experts", "F0 results"]
    assert names[4::2][:4] == ["B0 gradients", "F1 tokens", "B0 their rows'", "F1 results"]
    assert names[5::2][:4] == ["F1 attention", "B0 experts' backward", "F1 experts", "B0 attention's backward"]
    assert names[12:] == ["B1 gradients", "B1 experts' backward", "B1 their rows'", "B1 attention's backward"]


@pytest.mark.parametrize("v", [1, 2])
def test_it_s_faster_than_1f1b_by_most_of_what_that_waits_for_all_to_alls(v):
    old, new = (replay(program(make(2, 12, v), 2, 2, SIZE), COSTS) for make in (interleaved, overlapped))
    waits = max(map(old.exposed_communication, old.ranks))
    assert new.makespan < old.makespan - waits / 2


@pytest.mark.lenient  # messages have tags, which NCCL has not
@pytest.mark.parametrize("pairs", [True, False])
def test_on_ranks_that_sleep_it_is_what_was_replayed(four, pairs):
    whole = program(overlapped(2, 4, 2), 2, 1, SIZE, pairs)
    replayed, measured = replay(whole, COSTS), timeline(four.run(carried_out, whole, COSTS))
    for rank in range(4):
        mine, theirs = measured.of(rank, "compute"), replayed.of(rank, "compute")
        assert [span.name for span in mine] == [span.name for span in theirs]
        assert all(a.seconds > b.seconds - 1e-4 for a, b in zip(mine, theirs, strict=True))
        assert len(measured.of(rank, "communication")) >= len(replayed.of(rank, "communication"))
    assert replayed.makespan - 1e-3 < measured.makespan < 2 * replayed.makespan


def test_an_all_to_all_starts_when_its_last_rank_is_there_and_the_one_before_is_done(four):
    moved = [Collective("all_to_all", SIZE, (0, 1, 2, 3), name, name) for name in "ab"]
    rest = (*moved, *(Wait(one.handle) for one in moved))
    late = Program((rest, rest, rest, (Compute("late", WORK[0]), *rest)))
    spans = timeline(four.run(carried_out, late, COSTS)).of(0, "communication")
    assert spans[1].finished - spans[0].started > 2 * 0.02 - 1e-3
    assert replay(late, COSTS).makespan - 1e-3 < spans[1].finished


def test_what_cannot_be_is_refused(four):
    with pytest.raises(ValueError, match=r"m=5 micro-batches with v=2 on p=4 ranks: .* give a multiple of 4"):
        overlapped(4, 5, 2)
    with pytest.raises(ValueError, match="ranks=0, layers=1, bytes=1: give 1 rank and layer or more"):
        program(overlapped(2, 2), 0, 1, 1)
    with pytest.raises(Exception, match="a Program of 2 ranks on 4: start as many"):
        four.run(carried_out, Program(((Compute("x", WORK[0]),),) * 2), COSTS)
