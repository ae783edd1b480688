"""Schedules as data: every table can run, and its bubble and memory on the virtual clock are the published ones."""

import inspect
import re
from collections import Counter
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as torch_schedules

from manyranks.parallel.pipeline import schedules
from manyranks.parallel.pipeline.dualpipe import dualpipe
from manyranks.parallel.pipeline.program import Times, bubble, in_flight, program
from manyranks.parallel.pipeline.schedules import PARTS, Action, Pair, Schedule, singles
from manyranks.parallel.pipeline.verify import peaks, verify
from manyranks.theory import pipeline as theory
from manyranks.timeline import replay
from manyranks.timeline.spans import COMMUNICATION, COMPUTE

NAMES = {
    "naive": schedules.naive,
    "gpipe": schedules.gpipe,
    "1f1b": schedules.one_f_one_b,
    "interleaved": schedules.interleaved,
    "zb-h1": schedules.zb_h1,
    "zb-h2": schedules.zb_h2,
    "zb-v": schedules.zb_v,
    "dualpipe-v": schedules.dualpipe_v,
}


def micro_batches(p):
    return sorted({1, 2, p, 2 * p, 2 * p + 1, 4 * p})


CASES = [
    (name, p, m, v)
    for name, p in product(NAMES, (1, 2, 3, 4, 8))
    for m, v in product(micro_batches(p), (1, 2, 3) if name == "interleaved" else (1,))
]


def make(name, p, m, v=1):
    return NAMES[name](p, m, v) if name == "interleaved" else NAMES[name](p, m)


def stages_a_rank(schedule):
    return schedule.stages // len(schedule.ranks)


def replayed(schedule, times=None, bytes=0):
    return replay(program(schedule, bytes), times or Times())


def span_bubble(schedule, times=None):
    return bubble(replayed(schedule, times))


def letters(schedule, rank):
    return " ".join(f"{a.kind}{a.microbatch}" for a in schedule.actions(rank))


# Every table can run


@pytest.mark.parametrize("name", NAMES)
def test_every_schedule_can_run_with_any_number_of_micro_batches(name):
    for _, p, m, v in (case for case in CASES if case[0] == name):
        schedule = make(name, p, m, v)
        assert (len(schedule.ranks), schedule.microbatches, schedule.name) == (p, m, name)
        verify(schedule)


@settings(deadline=None, max_examples=150)
@given(st.sampled_from(sorted(NAMES)), st.integers(1, 7), st.integers(1, 20), st.integers(1, 4))
def test_odd_sizes_too_can_run_and_each_stage_takes_its_micro_batches_in_order(name, p, m, v):
    schedule = make(name, p, m, v)
    verify(schedule, memory=m * stages_a_rank(schedule))
    for rank in range(p):
        for part, stage in product("FIW", range(schedule.stages)):
            taken = [a.microbatch for a in schedule.actions(rank) if a.stage == stage and part in PARTS[a.kind]]
            assert taken == (list(range(m)) if schedule.placement[stage] == rank else [])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("p", "m"), [(4, 1), (4, 3), (8, 5)])
def test_a_table_for_few_micro_batches_is_a_longer_one_without_the_rest(name, p, m):
    """What makes any m possible: a micro-batch needs no other one, so without some the order holds."""
    few, many = make(name, p, m, 2), make(name, p, 2 * p, 2)
    for rank in range(p):
        kept = [action for action in many.actions(rank) if action.microbatch < m]
        if name in ("gpipe", "interleaved", "zb-v", "dualpipe-v", "1f1b", "naive"):
            assert list(few.actions(rank)) == kept
        else:  # their weight gradients are no later than they have to be
            assert [a for a in few.actions(rank) if a.kind != "W"] == [a for a in kept if a.kind != "W"]


def test_tables_as_in_the_papers_figures():
    assert letters(schedules.one_f_one_b(4, 8), 0) == "F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7"
    assert letters(schedules.one_f_one_b(4, 8), 3) == "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7"
    assert letters(schedules.gpipe(2, 3), 1) == "F0 F1 F2 B0 B1 B2"
    assert letters(schedules.naive(2, 2), 0) == "F0 B0 F1 B1"
    assert letters(schedules.zb_h1(4, 5), 0) == "F0 F1 F2 F3 I0 W0 F4 I1 W1 I2 W2 I3 W3 I4 W4"
    assert letters(schedules.zb_h1(4, 5), 3) == "F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 W2 W3 W4"
    assert letters(schedules.zb_h2(2, 4), 0) == "F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3"
    assert letters(schedules.zb_h2(2, 4), 1) == "F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3"
    first = schedules.interleaved(2, 2, 2).actions(0)
    assert [(a.kind, a.stage, a.microbatch) for a in first[:4]] == [("F", 0, 0), ("F", 0, 1), ("F", 2, 0), ("F", 2, 1)]


def test_a_stage_of_dualpipe_v_is_paired_with_the_other_of_its_rank():
    schedule = schedules.dualpipe_v(4, 10)
    pairs = [(r, item) for r, items in enumerate(schedule.ranks) for item in items if isinstance(item, Pair)]
    assert len(pairs) > 2 * 10
    for rank, (forward, backward) in pairs:
        assert (forward.kind, backward.kind) == ("F", "B")
        assert {forward.stage, backward.stage} == {rank, 7 - rank}


@pytest.mark.parametrize("name", NAMES)
def test_a_schedule_is_a_short_pure_function(name):
    assert len(inspect.getsource(NAMES[name]).splitlines()) < 40
    assert make(name, 3, 7, 2) == make(name, 3, 7, 2)


# The virtual clock: F = I = W = 1, B = 2, no communication


@pytest.mark.parametrize("name", NAMES)
def test_the_replayed_bubble_is_the_closed_form(name):
    checked = 0
    for _, p, m, v in (case for case in CASES if case[0] == name):
        schedule = make(name, p, m, v)
        if m < theory.fewest(name, p) or (v > 1 and m % p):
            continue
        each = stages_a_rank(schedule)
        closed = theory.bubble(name, p, m, v, F=each, B=2 * each, W=each)
        assert span_bubble(schedule) == closed, (p, m, v)
        checked += 1
    assert checked >= 15


@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
def test_zb_v_has_no_bubble_and_2p_stages_in_flight_but_its_makespan_has_some(p):
    for m in range(2 * p, 3 * p + 2):
        schedule, timeline = schedules.zb_v(p, m), replayed(schedules.zb_v(p, m))
        assert bubble(timeline) == 0
        assert peaks(schedule) == (2 * p,) * p
        assert timeline.makespan == 6 * m + p - 1  # the last rank starts p − 1 later and ends as much later


@pytest.mark.parametrize("p", [2, 3, 4, 8])
def test_pairs_that_take_less_than_their_halves_leave_less_of_dualpipe_v_s_bubble(p):
    whole = theory.bubble("dualpipe-v", p, 2 * p, F=2, B=4, W=2)
    shares = [span_bubble(schedules.dualpipe_v(p, 2 * p), Times(pair=pair)) for pair in (1, 0.9, 0.8, 0.7)]
    assert shares[0] == whole
    assert sorted(shares, reverse=True) == shares


@pytest.mark.parametrize("name", NAMES)
def test_the_makespan_is_never_below_the_longest_span(name):
    timeline = replayed(make(name, 4, 9, 2))
    work = max(timeline.busy(rank) for rank in timeline.ranks)
    assert timeline.makespan >= work + bubble(timeline)
    shares = [timeline.bubble(rank) for rank in timeline.ranks]  # of the makespan
    assert bubble(timeline) <= timeline.makespan * max(shares) + 1e-9


@pytest.mark.parametrize("name", NAMES)
def test_peaks_are_the_published_ones_on_every_rank(name):
    for _, p, m, v in (case for case in CASES if case[0] == name):
        schedule = make(name, p, m, v)
        each = stages_a_rank(schedule)
        published_ones = tuple(each * theory.in_flight(name, p, m, v, rank) for rank in range(p))
        if m >= theory.fewest(name, p):
            assert peaks(schedule) == pytest.approx(published_ones), (p, m, v)
        else:
            assert all(peak <= bound for peak, bound in zip(peaks(schedule), published_ones, strict=True))


@pytest.mark.parametrize(("p", "m"), [(4, 5), (4, 11), (3, 2), (8, 9)])
@pytest.mark.parametrize("v", [2, 3])
def test_interleaving_a_remainder_costs_no_more_than_the_next_multiple(p, m, v):
    full = schedules.interleaved(p, -(-m // p) * p, v)
    part = schedules.interleaved(p, m, v)
    assert all(a <= b for a, b in zip(peaks(part), peaks(full), strict=True))
    assert replayed(part).makespan <= replayed(full).makespan


def test_activations_over_time_reach_the_peaks_and_end_at_none():
    for name in NAMES:
        schedule = make(name, 4, 8, 2)
        timeline = replayed(schedule)
        for rank, peak in enumerate(peaks(schedule)):
            steps = in_flight(schedule, timeline, rank)
            assert max(count for _, count in steps) == peak
            assert steps[0] == (0.0, 0)
            assert steps[-1][1] == 0
            assert [seconds for seconds, _ in steps] == sorted(seconds for seconds, _ in steps)


def test_an_activation_comes_when_its_forward_starts_and_goes_when_its_weight_gradient_ends():
    schedule = schedules.zb_h1(2, 1)  # rank 1: F from 1 to 2, I to 3, W to 4; rank 0: F from 0 to 1, I from 3, W to 5
    timeline = replayed(schedule)
    assert in_flight(schedule, timeline, 1) == [(0.0, 0), (1.0, 1), (4.0, 0)]
    assert in_flight(schedule, timeline, 0)[-1] == (5.0, 0)
    with pytest.raises(ValueError, match=r"rank 0 has 3 actions and 2 spans of compute; give every action more than 0 s"):
        in_flight(schedule, replayed(schedule, Times(W=0)), 0)


# The program


def test_a_rank_computes_its_actions_under_their_names():
    timeline = replayed(schedules.zb_v(2, 4))
    assert [span.name for span in timeline.of(0)] == letters(schedules.zb_v(2, 4), 0).split()


@pytest.mark.parametrize("name", NAMES)
def test_each_boundary_between_ranks_is_crossed_once_there_and_once_back_by_a_micro_batch(name):
    schedule = make(name, 3, 5, 2)
    timeline = replayed(schedule, Times(latency=0.01, bandwidth=100.0), bytes=7)
    spans = [span for rank in range(3) for span in timeline.of(rank, COMMUNICATION)]
    crossed = sum(a != b for a, b in zip(schedule.placement, schedule.placement[1:], strict=False))
    assert len(spans) == 2 * 2 * 5 * crossed  # there and back, at the sender and at the receiver
    assert all(span.seconds == pytest.approx(0.08) for span in spans)


def test_stages_have_times_of_their_own_and_a_pair_may_take_less():
    uneven = replayed(schedules.gpipe(2, 3), Times(F=(1, 4), I=2, W=(0.5, 0.25), B=None))
    assert [uneven.busy(rank) for rank in range(2)] == [3 * 3.5, 3 * 6.25]
    assert Times(B=(5, 6)).compute(0, ("B", 1, False)) == 6
    pairs = schedules.dualpipe_v(2, 8)
    assert replayed(pairs, Times(pair=0.5)).makespan < replayed(pairs).makespan


def test_a_rank_does_not_wait_for_what_it_sends():
    assert [span.started for span in replayed(schedules.gpipe(2, 3), Times(latency=0.5)).of(0, COMPUTE)][:3] == [0, 1, 2]


def test_both_outputs_of_a_pair_leave_when_both_are_over():
    pair = Pair(Action("F", 0, 1), Action("B", 3, 0))
    rows = (
        (Action("F", 0, 0), Action("F", 3, 0), pair),
        (Action("F", 1, 0), Action("F", 2, 0), Action("F", 1, 1)),
    )
    schedule = Schedule("part", 2, (0, 1, 1, 0), rows)
    f1 = [span for span in replayed(schedule, Times(B=10)).of(1) if span.name == "F1"][-1]
    assert f1.started == 1 + 1 + 1 + 1 + 1 + 10  # F0 on four stages, then F1 with B0


def test_a_message_that_takes_longer_than_there_is_slack_makes_the_step_longer():
    spans = [replayed(schedules.one_f_one_b(4, 8), Times(latency=seconds)).makespan for seconds in (0, 0.1, 1)]
    assert spans == sorted(set(spans))


# Refusals


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("p", "m", "said"), [(0, 4, "p=0"), (4, 0, "m=0"), (4, -1, "m=-1"), (4, 2.0, "m=2.0"), (True, 4, "p=True")]
)
def test_degrees_that_no_pipeline_has_are_refused(name, p, m, said):
    with pytest.raises(ValueError, match=f"^{re.escape(said)}: must be a whole number, 1 or more$"):
        make(name, p, m)


def test_interleaving_no_stage_is_refused():
    with pytest.raises(ValueError, match=r"^v=0: must be a whole number, 1 or more$"):
        schedules.interleaved(4, 8, 0)


# PyTorch's tables, in the cells that it prints: 2F0, (0F7;7B3)OVERLAP_F_B

TORCH = {
    "ScheduleGPipe": schedules.one_stage_a_rank,
    "Schedule1F1B": schedules.one_stage_a_rank,
    "ScheduleInterleaved1F1B": lambda p: schedules.looped(p, 2),
    "ScheduleInterleavedZeroBubble": lambda p: schedules.looped(p, 2),
    "ScheduleZBVZeroBubble": schedules.v_shape,
    "ScheduleDualPipeV": schedules.v_shape,
}


def local_stages(placement):
    """Of rank 0, as far as PyTorch's schedules look at them when no module is run."""
    last, common = len(placement) - 1, {"group_size": max(placement) + 1, "group_rank": 0, "submod": None}
    own = [stage for stage, rank in enumerate(placement) if rank == 0]
    return [SimpleNamespace(stage_index=s, is_first=s == 0, is_last=s == last, num_stages=last + 1, **common) for s in own]


def torch_schedule(name, p, m):
    """PyTorch's pipeline_order as a Schedule. Schedule1F1B counts the forwards of its last stage from 1; its runtime has no use
    for the table. If that fails here, PyTorch may have mended it."""
    stages = local_stages(TORCH[name](p))
    order = getattr(torch_schedules, name)(stages if len(stages) > 1 else stages[0], m).pipeline_order
    ranks = []
    for rank in range(p):
        found = (re.findall(r"(\d+)([FBIW])(\d+)", str(cell)) for cell in order[rank] if cell is not None)
        late = name == "Schedule1F1B" and rank == p - 1
        items = [[Action(kind, int(s), int(k) - (late and kind == "F")) for s, kind, k in cell] for cell in found]
        ranks.append(tuple(Pair(*both) if len(both) == 2 else both[0] for both in items if both))
    return Schedule(name, m, TORCH[name](p), tuple(ranks))


def cells(schedule):
    """As PyTorch writes and reads them, a row a rank."""
    names = ([[f"{a.stage}{a.kind}{a.microbatch}" for a in singles(item)] for item in row] for row in schedule.ranks)
    return [[f"({';'.join(both)})OVERLAP_F_B" if len(both) == 2 else both[0] for both in row] for row in names]


@pytest.mark.parametrize("name", TORCH)
@pytest.mark.parametrize(("p", "m"), [(1, 2), (2, 4), (3, 6), (4, 12), (8, 16)])
def test_pytorch_s_tables_can_run_and_those_that_have_a_twin_here_are_the_same(name, p, m):
    theirs = torch_schedule(name, p, m)
    verify(theirs)
    twins = {"GPipe": schedules.gpipe, "1F1B": schedules.one_f_one_b, "DualPipeV": schedules.dualpipe_v}
    twins |= {"Interleaved1F1B": lambda p, m: schedules.interleaved(p, m, 2), "ZBVZeroBubble": schedules.zb_v}
    if (twin := twins.get(name.removeprefix("Schedule"))) is None:  # ZB-H1 with two stages a rank
        assert (span_bubble(theirs), max(peaks(theirs)) <= 2 * p + 1) == (p - 1, True)
    elif twin is not schedules.zb_v:
        assert theirs.ranks == twin(p, m).ranks
    else:  # their cool-down takes weight gradients by stage, ours the oldest
        tables = [[[a for a in table.actions(r) if a.kind != "W"] for r in range(p)] for table in (theirs, twin(p, m))]
        assert tables[0] == tables[1]


@pytest.mark.parametrize("p", [1, 2, 3, 4])
@pytest.mark.parametrize("name", NAMES)
def test_pytorch_s_runtime_loads_every_table_and_finds_the_messages(name, p, tmp_path):
    file = tmp_path / "schedule.csv"
    for m in (1, p, 2 * p + 1):
        schedule = make(name, p, m, 2)
        file.write_text("\n".join(map(",".join, cells(schedule))), newline="")
        runtime = torch_schedules._PipelineScheduleRuntime(local_stages(schedule.placement), m)
        runtime._load_csv(str(file))
        assert runtime.stage_index_to_group_rank == dict(enumerate(schedule.placement))


# DualPipe: each stage twice, the micro-batches from both ends


@pytest.mark.parametrize("p", [2, 4, 6, 8])
def test_dualpipe_can_run_with_any_number_of_micro_batches_and_has_the_published_bubble_and_memory(p):
    for m in range(1, 4 * p + 2):
        schedule = dualpipe(p, m)
        verify(schedule)
        for rank, stage in product(range(p), range(p)):
            done = [a.microbatch for a in schedule.actions(rank) if a.stage == stage and a.kind == "F"]
            half = {rank: range((m + 1) // 2), p - 1 - rank: range((m + 1) // 2, m)}
            assert done == [*half.get(stage, ())]
        if m >= theory.fewest("dualpipe", p):
            assert span_bubble(schedule) == theory.bubble("dualpipe", p, m)
            assert peaks(schedule) == (p + 1,) * p == (theory.in_flight("dualpipe", p, m),) * p


@pytest.mark.parametrize("p", [2, 4, 6, 8])
def test_what_dualpipe_s_pairs_hide_shortens_its_bubble_as_the_report_s_formula_says_or_more(p):
    for m, pair in product((2 * p, 2 * p + 2, 4 * p), (0.9, 0.75)):
        found, closed = span_bubble(dualpipe(p, m), Times(pair=pair)), theory.bubble("dualpipe", p, m, FB=3 * pair)
        assert found == pytest.approx(closed) if p <= 4 else found < closed


@pytest.mark.parametrize(("p", "m"), [(2, 5), (4, 8), (4, 10), (8, 17)])
def test_of_two_mirrored_ranks_of_dualpipe_one_does_what_the_other_does_at_the_same_time(p, m):
    timeline, schedule = replayed(dualpipe(p, 2 * m), bytes=1), dualpipe(p, 2 * m)
    for rank in range(p // 2):
        mirrored = [a._replace(microbatch=(a.microbatch + m) % (2 * m)) for a in schedule.actions(p - 1 - rank)]
        assert list(schedule.actions(rank)) == mirrored
        times = [[span[3:] for span in timeline.of(r, COMPUTE)] for r in (rank, p - 1 - rank)]
        assert times[0] == times[1]
        often = theory.dualpipe_actions(p, 2 * m, rank) if 2 * m >= 2 * p else None
        pairs = Counter(item.forward.stage for item in schedule.ranks[rank] if isinstance(item, Pair))
        assert often is None or (pairs[rank], pairs[p - 1 - rank]) == often.pairs


@pytest.mark.parametrize(("p", "m", "said"), [(3, 8, "p=3: two ranks share .* give an even p"), (4, 0, "m=0: must be a whole")])
def test_a_dualpipe_that_cannot_be_is_refused(p, m, said):
    with pytest.raises(ValueError, match=said):
        dualpipe(p, m)


def test_a_table_of_dualpipe_that_deadlocks_is_refused():
    schedule = dualpipe(4, 8)
    rows = [list(row) for row in schedule.ranks]
    rows[0][0], rows[0][1] = rows[0][1], rows[0][0]
    with pytest.raises(ValueError, match=r"^dualpipe, rank 1, position 0: deadlock: F0 of stage 1 waits for F0 of stage 0"):
        verify(replace(schedule, ranks=tuple(map(tuple, rows))))
    rows = [*schedule.ranks[:3], schedule.ranks[3][:-1]]
    with pytest.raises(ValueError, match=r"^dualpipe, rank 3, position \d+: W7 of stage 0 is missing"):
        verify(replace(schedule, ranks=tuple(rows)))
