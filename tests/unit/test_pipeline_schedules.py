"""Schedules as data: every table can run, and its bubble and memory on the virtual clock are the published ones."""

import re
from collections import Counter
from functools import partial
from itertools import product
from types import SimpleNamespace

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from manyranks.parallel.pipeline import schedules
from manyranks.parallel.pipeline.dualpipe import dualpipe
from manyranks.parallel.pipeline.program import Times, bubble, in_flight, program
from manyranks.parallel.pipeline.schedules import PARTS, Action, Pair, Schedule, singles
from manyranks.parallel.pipeline.verify import peaks, verify
from manyranks.theory import pipeline as theory
from manyranks.timeline import replay
from manyranks.timeline.spans import COMMUNICATION, COMPUTE

ALL = {
    "naive": schedules.naive,
    "gpipe": schedules.gpipe,
    "1f1b": schedules.one_f_one_b,
    "interleaved": schedules.interleaved,
    "zb-h1": schedules.zb_h1,
    "zb-h2": schedules.zb_h2,
    "zb-v": schedules.zb_v,
    "dualpipe-v": schedules.dualpipe_v,
    "dualpipe": dualpipe,
}

CASES = [(name, p) for name, p in product(ALL, (1, 2, 3, 4, 8)) if name != "dualpipe" or p % 2 == 0]


def make(name, p, m, v=1):
    return ALL[name](p, m, v) if name == "interleaved" else ALL[name](p, m)


def replayed(schedule, times=None, bytes=0):
    return replay(program(schedule, bytes), times or Times())


def span_bubble(schedule, times=None):
    return bubble(replayed(schedule, times))


def letters(schedule, rank):
    return " ".join(f"{a.kind}{a.microbatch}" for a in schedule.actions(rank))


EQUAL, UNEQUAL = [(1, 1, 1)], [(3, 2.5, 2.5), (1, 3, 4)]

# Schedules × ranks × micro-batches × stages a rank × times: what the table, verify, the virtual clock and theory agree on


@pytest.mark.parametrize(("name", "p"), CASES)
def test_a_table_can_run_and_has_the_published_bubble_and_memory_on_every_rank(name, p):
    for m, v in product(sorted({1, 2, p, 2 * p - 1, 2 * p, 2 * p + 1, 4 * p}), (1, 2, 3) if name == "interleaved" else (1,)):
        schedule = make(name, p, m, v)
        assert (len(schedule.ranks), schedule.microbatches, schedule.name) == (p, m, name)
        assert schedule == make(name, p, m, v)
        of, most = peaks(schedule), max(peaks(schedule))
        verify(schedule, memory=most)
        with pytest.raises(ValueError, match=f"F.* makes {most} activations in flight; the cap is {most - 1}"):
            verify(schedule, memory=most - 1)
        for rank, part, stage in product(range(p), "FIW", range(schedule.stages)):
            taken = [a.microbatch for a in schedule.actions(rank) if a.stage == stage and part in PARTS[a.kind]]
            assert taken == [i for i in range(m) if schedule.rank_of(stage, i) == rank]
        each, enough = schedule.stages // p, m >= theory.fewest(name, p)
        published = [each * theory.in_flight(name, p, m, v, rank) for rank in range(p)]
        assert list(of) == pytest.approx(published) if enough else all(map(float.__le__, map(float, of), published))
        for F, I, W in EQUAL if name.startswith(("zb", "dual")) else EQUAL + UNEQUAL:  # noqa: E741
            timeline, work = replayed(schedule, Times(F / each, I / each, W / each)), m * (F + I + W)
            assert max(map(timeline.busy, timeline.ranks)) == pytest.approx(work)
            assert timeline.makespan >= work + (waits := bubble(timeline)) - 1e-9
            if enough and (v == 1 or m < p or m % p == 0):
                assert theory.bubble(name, p, m, v, F, I + W, W) == pytest.approx(waits)
                assert theory.bubble_of_ideal(name, p, m, v, F, I + W, W) == pytest.approx(waits / work)
                assert theory.bubble_of_whole(name, p, m, v, F, I + W, W) == pytest.approx(waits / (work + waits))
            for rank, peak in enumerate(of):
                seconds, counts = zip(*in_flight(schedule, timeline, rank), strict=True)
                assert (seconds[0], counts[0], max(counts), counts[-1]) == (0, 0, peak, 0)
                assert list(seconds) == sorted(seconds)


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


# The virtual clock


def test_the_makespan_of_zb_v_has_no_bubble_but_its_last_rank_starts_later_and_ends_as_much_later():
    assert replayed(schedules.zb_v(4, 9)).makespan == 6 * 9 + 4 - 1


@pytest.mark.parametrize("p", [2, 3, 4, 8])
def test_pairs_that_take_less_than_their_halves_leave_less_of_dualpipe_v_s_bubble(p):
    whole = theory.bubble("dualpipe-v", p, 2 * p, F=2, B=4, W=2)
    shares = [span_bubble(schedules.dualpipe_v(p, 2 * p), Times(pair=pair)) for pair in (1, 0.9, 0.8, 0.7)]
    assert shares[0] == whole
    assert sorted(shares, reverse=True) == shares


@pytest.mark.parametrize(("p", "m"), [(4, 5), (4, 11), (3, 2), (8, 9)])
@pytest.mark.parametrize("v", [2, 3])
def test_interleaving_a_remainder_costs_no_more_than_the_next_multiple(p, m, v):
    full = schedules.interleaved(p, -(-m // p) * p, v)
    part = schedules.interleaved(p, m, v)
    assert all(a <= b for a, b in zip(peaks(part), peaks(full), strict=True))
    assert replayed(part).makespan <= replayed(full).makespan


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


@pytest.mark.parametrize("name", ALL)
def test_each_boundary_between_ranks_is_crossed_once_there_and_once_back_by_a_micro_batch(name):
    schedule = make(name, 4, 5, 2)
    timeline = replayed(schedule, Times(latency=0.01, bandwidth=100.0), bytes=7)
    spans = [span for rank in range(4) for span in timeline.of(rank, COMMUNICATION)]
    steps = product(range(schedule.stages - 1), range(5))
    crossed = sum(schedule.rank_of(s, i) != schedule.rank_of(s + 1, i) for s, i in steps)
    assert len(spans) == 2 * 2 * crossed  # there and back, at the sender and at the receiver
    assert all(span.seconds == pytest.approx(0.08) for span in spans)


def test_stages_have_times_of_their_own():
    uneven = replayed(schedules.gpipe(2, 3), Times(F=(1, 4), I=2, W=(0.5, 0.25), B=None))
    assert [uneven.busy(rank) for rank in range(2)] == [3 * 3.5, 3 * 6.25]
    assert Times(B=(5, 6)).compute(0, ("B", 1, False)) == 6


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

WHOLE = [(0, 4, "p=0"), (4, 0, "m=0"), (4, -1, "m=-1"), (4, 2.0, "m=2.0"), (True, 4, "p=True")]
REFUSED = [
    (partial(make, name), p, m, f"{said}: must be a whole number, 1 or more") for name, (p, m, said) in product(ALL, WHOLE)
]
REFUSED += [(lambda p, m: schedules.interleaved(p, m, 0), 4, 8, "v=0: must be a whole number, 1 or more")]
REFUSED += [(dualpipe, 3, 8, "p=3: two ranks share their two stages; give an even p")]


def test_degrees_that_no_pipeline_has_are_refused():
    for refused, p, m, said in REFUSED:
        with pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
            refused(p, m)


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
    """Rank 0's stages, as far as PyTorch's schedules look at them when no module is run."""
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


# DualPipe: each stage twice, the micro-batches from both ends


@pytest.mark.parametrize("p", [2, 4, 6, 8])
def test_what_dualpipe_s_pairs_hide_shortens_its_bubble_as_the_report_s_formula_says_or_more(p):
    for m, pair in product((2 * p, 2 * p + 2, 4 * p), (0.9, 0.75)):
        found, closed = span_bubble(dualpipe(p, m), Times(pair=pair)), theory.bubble("dualpipe", p, m, FB=3 * pair)
        assert found == pytest.approx(closed) if p <= 4 else found < closed


@pytest.mark.parametrize(("p", "m"), [(2, 5), (4, 3), (4, 8), (4, 10), (8, 17), (16, 60)])
def test_of_two_mirrored_ranks_of_dualpipe_one_does_what_the_other_does_at_the_same_time(p, m):
    timeline, schedule = replayed(dualpipe(p, 2 * m), bytes=1), dualpipe(p, 2 * m)
    for rank in range(p // 2):
        mirrored = [a._replace(microbatch=(a.microbatch + m) % (2 * m)) for a in schedule.actions(p - 1 - rank)]
        assert list(schedule.actions(rank)) == mirrored
        times = [[span[3:] for span in timeline.of(r, COMPUTE)] for r in (rank, p - 1 - rank)]
        assert times[0] == times[1]
        if m >= p:  # how often it does what, on its own stage and on the other
            often = Counter(("pairs", a.forward.stage) if isinstance(a, Pair) else a[:2] for a in schedule.ranks[rank])
            closed = theory.dualpipe_actions(p, 2 * m, rank)._asdict()
            assert closed == theory.dualpipe_actions(p, 2 * m, p - 1 - rank)._asdict()
            assert closed == {what: (often[what, rank], often[what, p - 1 - rank]) for what in closed}
