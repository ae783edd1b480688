"""Chapter 05's pictures show what replay finds; the explorer's line says the library's figures, and every setting is shown."""

import itertools
import re

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.textpath import TextPath

from manyranks.parallel.pipeline import schedules
from manyranks.parallel.pipeline.program import Times, bubble, in_flight, program
from manyranks.parallel.pipeline.schedules import Action, Pair, Schedule
from manyranks.parallel.pipeline.verify import peaks
from manyranks.show.labels import word
from manyranks.show.pipeline import MODELS, NAMES, Charts, Run, Schedules, Two, compare, explorer, run, title
from manyranks.show.setting import Said
from manyranks.theory import Plan, clusters
from manyranks.theory import pipeline as theory
from manyranks.timeline import Span, Timeline, replay
from manyranks.timeline.spans import COMMUNICATION, COMPUTE
from tests.drawn import boxes, drawings, named, words

DEFAULT = {"first": "1f1b", "second": "zb-h1", "model": "llama3-8b", "cluster": "h100-dgx", "dp": 1, "tp": 1, "pp": 4, "m": 8}
DEFAULT |= {"v": 2, "F": 1.0, "I": 1.0, "W": 1.0, "message": 0.0}
HALF = Times(0.5, 0.5, 0.5)
ONE = Span(0, COMPUTE, "F0", 0, 1)
NOW = Schedules(**DEFAULT)
THREE = [
    (schedules.one_f_one_b(3, 5), Times(latency=0.25)),
    (schedules.interleaved(2, 4, 3), Times(0.3, 0.4, 0.2)),
    (schedules.zb_v(3, 6), HALF),
    (schedules.dualpipe_v(3, 6), HALF),
]


def shown(*drawn: Run) -> list[Axes]:
    """For each chart, the axes of its bands, and the axes of what is held."""
    charts = Charts(len(drawn), 4, 0.5, "time", "FBIW", split=True, links=True)
    charts.show([("a run", each) for each in drawn])
    return charts.figure.axes


def height(bands: Axes) -> float:
    """The height of a rank's row."""
    return 2 * named(bands, "ranks").get_offsets()[0][1]


def titles(figure) -> list[str]:
    return [text for axes in figure.axes for text in words(axes, "title")]


def replayed(schedule: Schedule, times: Times) -> Timeline:
    return replay(program(schedule), times)


# Charts


@pytest.mark.parametrize(("schedule", "times"), THREE)
def test_a_box_is_where_its_action_was_replayed_in_its_kind_s_and_stage_s_look_and_what_is_held_is_drawn(schedule, times):
    timeline, p, most = replayed(schedule, times), len(schedule.ranks), max(peaks(schedule))
    bands, held = shown(run(schedule, timeline))
    row, (scale, narrow) = height(bands), [axes.get_xlim()[1] / timeline.makespan for axes in (bands, held)]
    drawn, areas = (
        {look: boxes(bands, "{}{}".format(*look)) for look in itertools.product("FBIW", range(4))},
        boxes(held, "areas"),
    )
    assert sum(map(len, drawn.values())) == sum(len(schedule.actions(rank)) for rank in range(p))
    assert (highest := max(areas[:, 3] - areas[:, 2])) < row
    assert words(bands, "ranks") == [f"rank {rank}" for rank in range(p)]
    for rank, items in enumerate(schedule.ranks):
        own, spans = schedule.stages_of(rank), iter(timeline.of(rank, COMPUTE))
        for item in items:
            actions = item if type(item) is Pair else (item,)
            both = [next(spans) for _ in actions]
            x = both[0].started * scale, both[-1].finished * scale
            for action in actions:
                left, right, top, bottom = drawn[action.kind, own.index(action.stage)].T
                near = (abs(left - x[0]) <= 1.51) & (abs(right - x[1]) <= 1.51)
                assert (near & (top >= rank * row) & (bottom <= (rank + 1) * row)).sum() == 1, (rank, action)
        mine = areas[(areas[:, 3] > rank * row) & (areas[:, 3] <= (rank + 1) * row)]
        steps = itertools.pairwise(in_flight(schedule, timeline, rank))
        left, right, count = np.array([(since * narrow, until * narrow, n) for (since, n), (until, _) in steps if n]).T
        seen = np.round(left) < np.round(right)  # what is over in the same pixel isn't drawn
        assert mine[:, :2] == pytest.approx(np.column_stack([left, right])[seen], abs=0.51)
        assert mine[:, 3] - mine[:, 2] == pytest.approx(count[seen] / most * highest, abs=1.01)


def test_the_halves_of_a_pair_lie_one_above_the_other_and_i_above_w():
    whole, _ = shown(run(pair := schedules.dualpipe_v(2, 4), replayed(pair, HALF)))
    ((_, _, top, middle), *_), ((_, _, below, bottom), *_) = (
        [box for look in looks for box in boxes(whole, look) if box[3] - box[2] < 0.5 * height(whole)]
        for looks in (("F0", "F1"), ("B0", "B1"))
    )
    assert top < middle <= below < bottom
    split, _ = shown(run(one := schedules.zb_h1(1, 1), replayed(one, Times())))
    ((*_, i_top, i_bottom),), ((*_, w_top, w_bottom),) = (boxes(split, f"{kind}0") for kind in "IW")
    assert i_top < w_top < i_bottom < w_bottom


def test_a_later_stage_is_lighter_and_has_a_bar_for_each_stage_before_it_and_a_fifth_looks_as_the_fourth():
    schedule = schedules.interleaved(1, 1, 6)
    bands, _ = shown(run(schedule, replayed(schedule, Times())))
    marks = boxes(bands, "bars")
    for level, count in enumerate((1, 1, 1, 3)):
        found = boxes(bands, f"F{level}")
        assert len(found) == count
        for left, right, top, bottom in found:
            inside = (marks[:, 0] == left) & (marks[:, 1] == right) & (marks[:, 2] > top) & (marks[:, 3] <= bottom)
            assert inside.sum() == level
    for kind in "FBIW":
        greys = [np.dot(named(bands, f"{kind}{level}").get_facecolor()[:3], (0.3, 0.59, 0.11)) for level in range(4)]
        assert greys == sorted(set(greys))


def test_a_line_is_a_message_from_its_sender_s_row_to_its_receiver_s():
    schedule, times = schedules.interleaved(3, 3, 2), Times(latency=0.5)
    timeline = replayed(schedule, times)
    by_rank = Timeline(tuple(sorted(timeline.spans, key=lambda span: (span.rank, span.started))))  # in any order
    bands, _ = shown(run(schedule, by_rank))
    end, row, wide = max(span.finished for span in timeline.spans), height(bands), bands.get_xlim()[1]
    lines = named(bands, "messages").get_path().vertices.reshape(-1, 2, 2)
    sent = [s for s in timeline.spans if s.kind == COMMUNICATION and s.name.startswith("send")]
    assert len(lines) == len(sent) == 2 * 5 * 3
    found = sorted((int(a[1] // row), a[0], int(b[1] // row), b[0]) for a, b in lines)
    expected = sorted((s.rank, s.started / end * wide, int(s.name[-1]), s.finished / end * wide) for s in sent)
    assert np.array(found) == pytest.approx(np.array(expected))
    for (_, y), (_, to) in lines:
        assert (y % row > row / 2) == (y < to) == (to % row < row / 2), "between bands, not across its own"
    bands, _ = shown(run(schedule, replayed(schedule, Times())))
    assert not len(named(bands, "messages").get_path().vertices)


def test_charts_share_their_scales_of_time_and_memory():
    slow, fast = schedules.gpipe(2, 6), schedules.one_f_one_b(2, 6)
    above, held, below, held_below = shown(run(slow, replayed(slow, Times(2, 2, 2))), run(fast, replayed(fast, Times())))
    ends = [boxes(bands, "B0")[:, 1].max() for bands in (above, below)]
    wide = above.get_xlim()[1]
    assert ends == pytest.approx([wide, wide / 2], abs=3)
    high, low = (np.ptp(boxes(axes, "areas")[:, 2:], axis=1).max() for axes in (held, held_below))
    assert (high, low) == (pytest.approx(3 * low, abs=2), pytest.approx(high / 3, abs=1))
    assert high < height(above)
    first, second = (named(bands, "ticks").get_path().vertices for bands in (above, below))
    assert first == pytest.approx(second)


def test_boxes_bear_their_micro_batches_where_there_is_room_and_peaks_and_ticks_are_written():
    bands, _ = shown(run(one := schedules.one_f_one_b(2, 3), replayed(one, Times())))
    assert sorted(words(bands, "names")) == sorted(2 * [f"{kind}{i}" for kind in "FB" for i in range(3)])
    bands, _ = shown(run(many := schedules.zb_v(4, 8), replayed(many, HALF)))
    names = words(bands, "names")
    assert sorted(name[-1] for name in names) == sorted(3 * 8 * [str(i) for i in range(8)])
    assert {name[0] for name in names if len(name) > 1} == {"I"}, "the only letter that is narrow enough"
    bands, _ = shown(run(large := schedules.one_f_one_b(8, 32), replayed(large, Times())))
    assert words(bands, "names") == []
    bands, held = shown(run(v := schedules.dualpipe_v(4, 8), replayed(v, HALF)))
    assert words(held, "peaks") == ["4.5"] * 4
    assert words(bands, "numbers")[:4] == ["0", "5", "10", "15"]


def test_a_word_of_letters_is_as_wide_and_high_as_a_text():
    for text in ("F12", "1F1B: bubble 37.5% of ideal time, 27.3% of total; makespan 33", "0.25"):
        ours, theirs = word(text, 9.0, 0.0).get_extents(), TextPath((0, 0), text, size=9).get_extents()
        assert (ours.width, ours.height) == pytest.approx((theirs.width, theirs.height), rel=0.03)


# Static figures


TWO = schedules.one_f_one_b(2, 2)
SLOW = Timeline(tuple(s._replace(started=2 * s.started, finished=2 * s.finished) for s in replayed(TWO, Times()).spans))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            ({"a": schedules.one_f_one_b(4, 8), "b": schedules.zb_v(4, 8)}, {"a": Times(), "b": HALF}, None, "F"),
            {"a": "37.5% of ideal time, 27.3% of total; makespan 33 F", "b": "0% of ideal time, 0% of total; makespan 25.5 F"},
        ),
        (
            ({"a": schedules.gpipe(2, 2)}, Times(0.01, 0.01, 0.01, latency=0.005)),
            {"a": "66.7% of ideal time, 40% of total; makespan 100 ms"},
        ),
        (  # a measured timeline stands in the place of the replayed one
            ({"a": TWO, "b": TWO}, Times(), {"b": SLOW}, "F"),
            {f"{name}": f"50% of ideal time, 33.3% of total; makespan {F} F" for name, F in (("a", 9), ("b", 18))},
        ),
    ],
)
def test_titles_say_the_bubble_and_the_makespan_of_each(given, said):
    assert titles(compare(*given)) == [f"{name}: bubble {words}" for name, words in said.items()]


def test_the_legend_names_what_is_drawn_and_the_axes_say_the_unit():
    figure = compare({"gpipe": schedules.gpipe(2, 2)}, Times(0.01, 0.01, 0.01, latency=0.005))
    assert [axes.get_xlabel() for axes in figure.axes] == ["time (ms)", "time"]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["F forward", "B backward", "message"]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda s: compare({}), "give a schedule or more"),
        (lambda s: compare({"a": s}, {"b": Times()}), r"schedules \['a'\], times \['b'\], timelines \[\]"),
        (lambda s: compare({"a": s}, timelines={"b": Timeline(())}), r"timelines \['b'\]"),
        (lambda s: compare({"a": s}, Times(F=0)), "give every action more than 0 s"),
        (lambda s: compare({"a": s}, timelines={"a": Timeline((ONE,))}), "rank 0 has 4 actions and 1 spans"),
        (lambda s: compare({"a": Schedule("none", 1, (0,), ((Action("B", 0, 0),),))}), "none, rank 0"),
    ],
)
def test_what_cannot_be_drawn_is_refused_in_words(make, said):
    with pytest.raises(ValueError, match=said):
        make(schedules.one_f_one_b(2, 2))


# The explorer


def value(form: str, **letters: float) -> float:
    """The value of a closed form as it is written, such as (p − 1)(F + I − 2W)/2."""
    return eval(re.sub(r"(?<=[\w)])(?=[A-Za-z(])", "*", form.replace("−", "-")), letters)


def said(**change) -> Said:
    """The words about the upper schedule alone: the lower one is the same."""
    values = DEFAULT | change
    return Two().update(**values | {"second": values["first"]})


def test_stages_a_rank_can_be_moved_only_where_a_schedule_is_interleaved():
    shown = explorer()
    assert shown.controls["v"].disabled
    assert not any(control.disabled for control in shown.set(second="interleaved").controls.values())
    assert shown.set(second="1f1b").controls["v"].disabled


@pytest.mark.parametrize("name", NAMES.values())
@pytest.mark.parametrize("change", [{}, {"pp": 3, "m": 7, "v": 3, "F": 0.5, "I": 1.5, "message": 0.2}])
def test_what_is_said_is_what_the_library_computes(name, change):
    now = NOW._replace(first=name, **change)
    schedule = schedules.named(name, now.pp, now.m, now.v)
    each = schedule.stages // now.pp
    timeline = replayed(schedule, Times(now.F / each, now.I / each, now.W / each, latency=now.message))
    found, work = now.run(name), now.m * (now.F + now.I + now.W)
    assert found.bubble == pytest.approx(bubble(timeline))
    assert (found.work, found.makespan) == pytest.approx((work, timeline.makespan))
    assert found.peaks == pytest.approx([count / each for count in peaks(schedule)])
    numbers = said(first=name, **change).numbers
    parts = [float(part) for part in re.findall(r"[\d.]+", numbers["upper makespan"])]
    assert sum(parts) == pytest.approx(timeline.makespan, rel=1e-3)
    assert parts[:2] == pytest.approx([work, bubble(timeline)], rel=1e-3)
    assert numbers["upper holds"].startswith(f"{max(found.peaks):.3g} micro-batch")
    assert f"bubble {found.bubble:.4g}" in title(name, found, now)
    if now.possible:  # what the strip costs
        v = now.v if name == "interleaved" else 1
        assert now.scenario.plan == Plan(pp=now.pp, batch=now.m, schedule=name, virtual=v)


@pytest.mark.parametrize("name", NAMES.values())
def test_a_closed_form_is_said_to_be_the_bubble_where_it_is(name):
    for p, m, unequal, message in itertools.product((1, 2, 4), (1, 4, 10), (False, True), (0.0, 0.3)):
        now = NOW._replace(pp=p, m=m, F=0.5 if unequal else 1.0, message=message)
        found = now.run(name)
        written = title(name, found, now)
        if (expected := now.expected(name)) is None:
            assert m < theory.fewest(name, p) or m % p
            assert not set("=≠") & set(written)
            continue
        same, form = re.search(r"bubble [\d.]+ ([=≠]) (.+)$", written).groups()
        assert (same == "=") == (expected == pytest.approx(found.bubble))
        assert max(0, value(form, p=p, m=m, v=now.v, F=now.F, I=now.I, W=now.W, B=now.I + now.W)) == pytest.approx(expected)
        assert same == "=" or message or (unequal and name.startswith(("zb", "dual")))


@pytest.mark.parametrize(
    ("name", "change", "limit"),
    [
        ("1f1b", {"pp": 1, "model": "gpt2-xl"}, "compute: one rank sends nothing"),
        ("naive", {}, "one rank works at a time"),
        ("zb-h2", {}, "compute (the price is memory)"),
        ("zb-v", {}, "compute"),
        ("zb-v", {"m": 5}, "too few micro-batches (it's designed for m ≥ 8); no prediction: the formula for ZB-V needs m ≥ 8"),
        ("1f1b", {"message": 1.0}, "messages (bubble 9 without them)"),
        ("1f1b", {"message": 0.5}, "warm-up and drain 9, messages 8 (more micro-batches dilute only the warm-up and drain)"),
        ("zb-h2", {"message": 0.5, "pp": 8, "m": 32}, "messages (bubble 0 without them)"),
        ("zb-h1", {"I": 1.5, "W": 0.5}, "unequal times (bubble 3 with F = I = W)"),
        ("interleaved", {"m": 6, "v": 3}, "p does not divide m (bubble 3 with m = 8)"),
        ("gpipe", {}, "warm-up and drain (more micro-batches dilute them)"),
        ("gpipe", {"m": 32}, "memory; 1F1B fits"),
        ("1f1b", {"pp": 1}, "memory; PP 2 fits"),
        ("1f1b", {"model": "llama3-70b"}, "memory; TP 8 fits"),
        ("1f1b", {"model": "llama3-405b"}, "memory; no single control helps"),
        (
            "1f1b",
            {"model": "gpt2-large", "tp": 8},
            "warm-up and drain (more micro-batches dilute them); no prediction: 8 tensor ranks can't share the 20",
        ),
        (
            "1f1b",
            {"cluster": "tpu-v6e", "dp": 128},
            "warm-up and drain (more micro-batches dilute them); no prediction: 512 GPUs: tpu-v6e has only 256",
        ),
    ],
)
def test_the_sentence_names_the_limit(name, change, limit):
    answer = said(first=name, **change)
    assert answer.limit.startswith(limit) if "no prediction" in limit else answer.limit == limit
    assert answer.fits == (not limit.startswith("memory"))
    assert (answer.scenario is None) == ("no prediction" in limit)


def test_two_schedules_limits_bear_their_names_where_they_differ_and_equal_makespans_are_explained():
    plot = Two()
    said = plot.update(**DEFAULT | {"first": "zb-h1", "second": "zb-h2"})
    assert said.numbers["upper makespan"] == "work 24 + bubble 3"
    assert said.numbers["lower makespan"] == "work 24 + bubble 0 + late start 3"
    assert said.limit.endswith("the makespans are equal, but ZB-H2's late start of 3 counts in the first step only")
    assert "equal" not in plot.update(**DEFAULT | {"first": "gpipe"}).limit
    limit = plot.update(**DEFAULT | {"second": "zb-h2"}).limit
    assert limit == "1F1B: warm-up and drain (more micro-batches dilute them); ZB-H2: compute (the price is memory)"


def test_boxes_say_what_they_are_and_when_and_of_many_the_ranks_speak():
    opened = explorer()
    assert "rank 3, backward 0: from 4 to 6" in opened.parts.value
    assert "rank 0, weight gradient 0: from 8 to 9" in opened.parts.value
    points = 2 * 8 + 32  # of the frame's curves
    assert 100 < opened.parts.value.count("<s") - points <= 200
    opened.set(m=32)
    assert opened.parts.value.count("<s") - points == 8
    assert "rank 0: holds at most 4 micro-batches" in opened.parts.value


def test_every_control_changes_the_picture_and_the_axes_are_never_drawn_again():
    opened = explorer().set(second="interleaved")
    drawn, before = drawings(opened.figure), (opened.png, opened.tiles.value.partition("(was")[0])
    changes = {"first": "gpipe", "second": "naive", "model": "mistral-7b", "cluster": "a100-dgx"}
    changes |= {"dp": 2, "tp": 2, "pp": 8, "m": 9, "v": 3, "F": 1.5, "I": 0.5, "W": 2.0, "message": 0.1}
    assert changes.keys() == DEFAULT.keys()
    for name, changed in changes.items():
        back = opened.values[name]
        opened.set(**{name: changed})
        assert opened.png != before[0], name
        assert opened.tiles.value.partition("(was")[0] != before[1], name
        opened.set(**{name: back})
        assert opened.png == before[0], f"{name}: and back"
    assert not drawn


def test_every_setting_has_a_sentence_and_its_titles_have_room():
    plot, widest = Two(), 0.0
    above, _, below, _ = plot.figure.axes
    counts = itertools.cycle(itertools.product((1, 3, 8), (1, 6, 32), (0.25, 3.0)))
    for k, (model, (pp, m, W)) in enumerate(zip(MODELS, counts, strict=False)):
        first, second = list(NAMES.values())[k % 8], list(NAMES.values())[(3 * k + 3) % 8]
        shared = {"model": model, "cluster": [*clusters][k % len(clusters)]}
        change = shared | {"first": first, "second": second, "pp": pp, "m": m, "W": W, "v": 1 + k % 3, "message": k % 2}
        line = str(plot.update(**DEFAULT | change))
        assert line.count("Limit: ") == 1
        assert not re.search(r"nan|inf\b|\de-", line)
        outlines = (named(axes, "title").get_paths()[0] for axes in (above, below))
        widest = max(widest, *(outline.get_extents().width for outline in outlines))
    assert widest < above.bbox.width * 72 / plot.figure.dpi  # points
