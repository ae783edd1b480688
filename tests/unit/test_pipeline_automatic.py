"""The automatic schedule: never worse than a hand-written one, under any cap, on any placement; the paper's table 5."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manyranks.parallel.pipeline import automatic as module
from manyranks.parallel.pipeline import schedules
from manyranks.parallel.pipeline.automatic import automatic, greedy, handwritten
from manyranks.parallel.pipeline.program import Times, bubble, program
from manyranks.parallel.pipeline.schedules import Schedule
from manyranks.parallel.pipeline.verify import peaks, verify
from manyranks.theory import published
from manyranks.timeline import replay


def span_bubble(schedule, times):
    return bubble(replay(program(schedule), times))


TIMES = [(1, 1, 1), (1, 1.1, 0.9), (1, 2, 0.5), (1.3, 1, 1)]


@pytest.mark.parametrize(("F", "I", "W"), TIMES)
@pytest.mark.parametrize("communication", [0, 0.15])
@pytest.mark.parametrize("shape", ["one", "v", "looped"])
@pytest.mark.few(8)
def test_the_automatic_schedule_is_at_least_as_good_as_each_hand_written_one(F, I, W, communication, shape):  # noqa: E741
    p, m = 4, 10
    placement = {"one": schedules.one_stage_a_rank(p), "v": schedules.v_shape(p), "looped": schedules.looped(p, 2)}[shape]
    times = Times(F, I, W, latency=communication)
    others = handwritten(p, m, placement)
    assert len(others) == {"one": 6, "v": 2, "looped": 1}[shape]  # interleaved with v = 1 is 1F1B
    for memory in sorted({max(peaks(other)) for other in others}):
        found = automatic(p, m, F, I, W, communication, memory, placement)
        verify(found, memory)
        assert found.placement == placement
        for other in others:
            if max(peaks(other)) <= memory:
                assert span_bubble(found, times) <= span_bubble(other, times) + 1e-6


@settings(max_examples=40)
@given(st.data())
def test_the_automatic_schedule_keeps_to_any_cap_on_any_placement(data):
    p, m = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 6))
    extra = data.draw(st.lists(st.integers(0, p - 1), max_size=4))
    placement = data.draw(st.permutations([*range(p), *extra]))
    most = max(map(placement.count, placement))
    memory = data.draw(st.integers(most, 3 * most))
    F, I, W = (data.draw(st.floats(0.1, 3)) for _ in range(3))  # noqa: E741
    arguments = (p, m, F, I, W, data.draw(st.sampled_from([0, 0.2])), memory, placement)
    found = automatic(*arguments)
    verify(found, memory)
    assert found == automatic(*arguments)


def test_a_hand_written_schedule_is_kept_where_the_search_finds_none_as_good(monkeypatch):
    monkeypatch.setattr(module, "TUNED", 0)
    placement, times = schedules.v_shape(4), Times(latency=0.1)
    found = automatic(4, 8, communication=0.1, memory=8, placement=placement)
    assert found.ranks == schedules.zb_v(4, 8).ranks
    monkeypatch.setattr(module, "handwritten", lambda p, m, placement: [])
    searched = automatic(4, 8, communication=0.1, memory=8, placement=placement)
    assert span_bubble(searched, times) > span_bubble(found, times)


def test_tuning_makes_it_better(monkeypatch):
    arguments, times = (4, 8, 1, 1.1, 0.9), Times(1, 1.1, 0.9)
    tuned = span_bubble(automatic(*arguments, memory=8), times)
    monkeypatch.setattr(module, "TUNED", 0)
    assert tuned < span_bubble(automatic(*arguments, memory=8), times) - 0.1


@pytest.mark.parametrize("communication", [0.0, 0.25])
def test_the_list_scheduler_s_clock_is_that_of_replay(communication):
    p, m, placement = 3, 7, schedules.v_shape(3)
    times = Times(1.0, 1.5, 0.75, latency=communication)
    waits, makespan, ranks = greedy(m, times, placement, cap=6, tolerance=(0.5,) * p)
    schedule = Schedule("greedy", m, placement, ranks)
    verify(schedule, memory=6)
    timeline = replay(program(schedule), times)
    assert timeline.makespan == makespan
    assert bubble(timeline) == waits


MODELS = {row["model"]: row for row in published.rows("zb_models")}


@pytest.mark.parametrize("row", published.rows("zb_bubble_rates"), ids=lambda row: f"{row['model']}-{row['m']}")
@pytest.mark.few(2)
def test_the_zero_bubble_paper_s_table_5_has_the_order_of_our_replayed_bubbles(row):
    model = MODELS[row["model"]]
    p, m, h, s = int(row["p"]), int(row["m"]), int(model["hidden"]), int(model["seq"])
    F, I, W = (24 * h + 4 * s) / 24 / h, (24 * h + 8 * s) / 24 / h, 1.0  # noqa: E741 table 2's FLOPs
    ours = {
        "1F1B": schedules.one_f_one_b(p, m),
        "ZB-H1": schedules.zb_h1(p, m),
        "ZB-H2": schedules.zb_h2(p, m),
        "ZB-2p": automatic(p, m, F, I, W, memory=2 * p),
    }
    verify(ours["ZB-2p"], memory=2 * p)
    times = Times(F, I, W)
    seconds = {name: span_bubble(schedule, times) for name, schedule in ours.items()}
    interleaved = span_bubble(schedules.interleaved(p, m, 2), Times(F / 2, I / 2, W / 2))
    for smaller, larger in (("ZB-H1", "1F1B"), ("ZB-H2", "ZB-H1"), ("ZB-2p", "ZB-H2")):
        assert float(row[smaller]) < float(row[larger])
        assert seconds[smaller] < seconds[larger]
    assert float(row["1F1B-I"]) < float(row["1F1B"])
    assert interleaved < seconds["1F1B"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"memory": 1, "placement": (0, 1, 1, 0)}, "memory=1: a rank has 2 stages; give 2 or more"),
        ({"placement": (0, 0)}, "placement=(0, 0): each of the 2 ranks must have a stage, and no other"),
        ({"placement": (0, 1, 2)}, "placement=(0, 1, 2): each of the 2 ranks"),
        ({"F": (1, 2, 3)}, "F=(1, 2, 3): give seconds above 0, one number or 2 of them"),
        ({"W": -1}, "W=-1: give seconds above 0"),
        ({"I": float("nan")}, "I=nan: give seconds above 0"),
        ({"communication": -0.1}, "communication=-0.1: give 0 or more seconds"),
        ({"m": 0}, "m=0: must be a whole number"),
    ],
)
def test_automatic_refuses_what_cannot_be(arguments, said):
    with pytest.raises(ValueError, match=f"^{re.escape(said)}"):
        automatic(**{"p": 2, "m": 4} | arguments)
