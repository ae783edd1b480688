"""Timeline: sums over spans, and the trace that viewers open."""

import json
from collections import defaultdict
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyranks.timeline import Span, Timeline
from manyranks.timeline.spans import COMMUNICATION, COMPUTE

TICK = 1 / 1024  # seconds; sums of ticks, and ticks in microseconds, are exact in floating point
NANOSECOND = 1e-3  # in microseconds
KINDS = st.sampled_from([COMPUTE, COMMUNICATION])


def span(rank: int, kind: str, started: float, finished: float, name: str = "x") -> Span:
    return Span(rank, kind, name, started, finished)


def on_ticks(rank: int, kind: str, start: int, length: int) -> Span:
    return span(rank, kind, start * TICK, (start + length) * TICK)


def at_any_time(rank: int, kind: str, start: float, length: float) -> Span:
    return span(rank, kind, start, start + length)


TICKED = st.lists(st.builds(on_ticks, st.integers(0, 2), KINDS, st.integers(0, 40), st.integers(0, 20)), max_size=20)
TIMES = st.floats(0, 300, allow_subnormal=False)
ANY = st.lists(st.builds(at_any_time, st.integers(0, 2), KINDS, TIMES, TIMES), max_size=20)


def test_makespan_runs_from_the_first_start_to_the_last_end_of_any_rank():
    timeline = Timeline((span(0, COMPUTE, 1.5, 9.0), span(1, COMMUNICATION, 1.0, 2.0), span(2, COMPUTE, 3.0, 4.0)))
    assert timeline.makespan == 8.0
    assert timeline.ranks == [0, 1, 2]


def test_spans_of_a_rank_come_in_order_of_start():
    late, early, talk = span(0, COMPUTE, 5, 6), span(0, COMPUTE, 1, 2), span(0, COMMUNICATION, 3, 4)
    timeline = Timeline((late, early, talk, span(1, COMPUTE, 0, 9)))
    assert timeline.of(0) == [early, talk, late]
    assert timeline.of(0, COMMUNICATION) == [talk]


def test_overlapping_spans_count_once():
    spans = (span(0, COMPUTE, 0, 4), span(0, COMPUTE, 1, 2), span(0, COMPUTE, 3, 6), span(0, COMPUTE, 8, 9))
    assert Timeline(spans).busy(0) == 7


def test_busy_is_of_one_rank_and_one_kind():
    timeline = Timeline((span(0, COMPUTE, 0, 4), span(0, COMMUNICATION, 4, 5), span(1, COMPUTE, 0, 9)))
    assert (timeline.busy(0), timeline.busy(0, COMMUNICATION), timeline.busy(2)) == (4, 1, 0)


def test_communication_under_compute_is_not_exposed():
    spans = (span(0, COMPUTE, 0, 4), span(0, COMMUNICATION, 1, 3))
    assert Timeline(spans).exposed_communication(0) == 0


def test_only_the_part_of_communication_outside_compute_is_exposed():
    spans = (span(0, COMPUTE, 0, 4), span(0, COMMUNICATION, 3, 6), span(0, COMMUNICATION, 5, 7), span(0, COMPUTE, 6.5, 9))
    assert Timeline(spans).exposed_communication(0) == 2.5


def test_another_rank_hides_no_communication():
    assert Timeline((span(0, COMMUNICATION, 0, 3), span(1, COMPUTE, 0, 3))).exposed_communication(0) == 3


def test_bubble_is_the_share_of_the_makespan_without_compute():
    timeline = Timeline((span(0, COMPUTE, 0, 8), span(1, COMPUTE, 2, 4), span(1, COMMUNICATION, 4, 8)))
    assert (timeline.bubble(0), timeline.bubble(1), timeline.bubble(2)) == (0.0, 0.75, 1.0)


def test_utilization_is_the_share_of_the_makespan_with_compute():
    timeline = Timeline((span(0, COMPUTE, 0, 8), span(1, COMPUTE, 2, 4), span(1, COMMUNICATION, 4, 8)))
    assert (timeline.utilization(0), timeline.utilization(1), timeline.utilization(2)) == (1.0, 0.25, 0.0)


def test_the_critical_path_follows_the_causes_back_from_the_last_end():
    first, idle, second, last = (
        span(0, COMPUTE, 0, 2),
        span(1, COMPUTE, 0, 1),
        span(0, COMMUNICATION, 2, 3),
        span(1, COMPUTE, 3, 5),
    )
    assert Timeline((last, idle, first, second), causes=(3, -1, -1, 2)).critical_path() == [first, second, last]
    assert Timeline(()).critical_path() == []


def test_a_timeline_without_causes_knows_no_critical_path():
    with pytest.raises(ValueError, match="only a replayed timeline knows"):
        Timeline((span(0, COMPUTE, 0, 2),)).critical_path()


def test_an_empty_timeline_lasts_no_time():
    empty = Timeline(())
    assert (empty.ranks, empty.makespan, empty.busy(0), empty.exposed_communication(0), empty.bubble(0)) == ([], 0, 0, 0, 0)
    assert empty.trace_events() == []


def test_an_empty_timeline_can_be_saved(tmp_path):
    assert json.loads(Timeline(()).save(tmp_path / "trace.json").read_text())["traceEvents"] == []


@given(TICKED)
def test_sums_equal_a_count_of_ticks(spans):
    timeline = Timeline(tuple(spans))
    for rank in timeline.ranks:
        compute, communication = ticks(spans, rank, COMPUTE), ticks(spans, rank, COMMUNICATION)
        assert timeline.busy(rank) == len(compute) * TICK
        assert timeline.busy(rank, COMMUNICATION) == len(communication) * TICK
        assert timeline.exposed_communication(rank) == len(communication - compute) * TICK
        assert 0 <= timeline.bubble(rank) <= 1


@given(TICKED)
def test_no_two_events_overlap_in_one_lane(spans):
    for events in lanes(Timeline(tuple(spans))).values():
        assert all(a["ts"] + a["dur"] <= b["ts"] for a, b in pairwise(events))


@given(ANY)
def test_rounding_makes_no_overlap_that_a_viewer_could_show(spans):
    for events in lanes(Timeline(tuple(spans))).values():
        assert all(a["ts"] + a["dur"] <= b["ts"] + NANOSECOND for a, b in pairwise(events))


@given(TICKED)
def test_there_are_no_more_lanes_than_spans_open_at_one_time(spans):
    timeline = Timeline(tuple(spans))
    used = defaultdict(set)
    for (rank, lane), events in lanes(timeline).items():
        used[rank, events[0]["cat"]].add(lane)
    for (rank, kind), numbers in used.items():
        of_kind = timeline.of(rank, kind)
        assert len(numbers) <= max(sum(s is t or s.started <= t.started < s.finished for s in of_kind) for t in of_kind)


@given(TICKED)
def test_every_span_is_one_complete_event(spans):
    complete = [e for e in Timeline(tuple(spans)).trace_events() if e["ph"] == "X"]
    expected = [(s.rank, s.kind, s.name, s.started * 1e6, (s.finished - s.started) * 1e6) for s in spans]
    assert sorted((e["pid"], e["cat"], e["name"], e["ts"], e["dur"]) for e in complete) == sorted(expected)


def test_a_lane_holds_one_kind_however_many_spans_are_open():
    spans = [span(0, COMPUTE, 0, 1) for _ in range(150)] + [span(0, COMMUNICATION, 0, 1)]
    assert all(len({event["cat"] for event in events}) == 1 for events in lanes(Timeline(tuple(spans))).values())


def test_every_rank_and_every_lane_has_a_name():
    events = Timeline((span(3, COMPUTE, 0, 1), span(3, COMMUNICATION, 0, 1))).trace_events()
    names = {(e["name"], e["args"]["name"]) for e in events if e["ph"] == "M" and e["pid"] == 3}
    assert names == {("process_name", "rank 3"), ("thread_name", COMPUTE), ("thread_name", COMMUNICATION)}
    labeled = {e["tid"] for e in events if e["name"] == "thread_name"}
    assert labeled == {e["tid"] for e in events if e["ph"] == "X"}


@pytest.mark.parametrize("as_text", [False, True])
def test_a_saved_trace_has_the_fields_of_the_chrome_trace_format(tmp_path, as_text):
    path = tmp_path / "trace.json"
    timeline = Timeline((span(0, COMPUTE, 0.5, 2.0, "forward"), span(1, COMMUNICATION, 1.0, 1.25, "send #0 → 1")))
    assert timeline.save(str(path) if as_text else path) == path
    trace = json.loads(path.read_text())
    assert trace["displayTimeUnit"] in ("ms", "ns")
    for event in trace["traceEvents"]:
        assert event["ph"] in ("X", "M")
        assert {"name", "pid", "tid"} <= event.keys()
        assert ({"ts", "dur", "cat"} if event["ph"] == "X" else {"args"}) <= event.keys()
    forward = next(event for event in trace["traceEvents"] if event["name"] == "forward")
    assert (forward["pid"], forward["cat"], forward["ts"], forward["dur"]) == (0, COMPUTE, 0.5e6, 1.5e6)


def ticks(spans: list[Span], rank: int, kind: str) -> set[int]:
    chosen = [s for s in spans if (s.rank, s.kind) == (rank, kind)]
    return {tick for s in chosen for tick in range(round(s.started / TICK), round(s.finished / TICK))}


def lanes(timeline: Timeline) -> dict[tuple[int, int], list[dict]]:
    """(pid, tid) -> its complete events in the order of time."""
    found = defaultdict(list)
    for event in timeline.trace_events():
        if event["ph"] == "X":
            found[event["pid"], event["tid"]].append(event)
    return {lane: sorted(events, key=lambda e: (e["ts"], e["dur"])) for lane, events in found.items()}
