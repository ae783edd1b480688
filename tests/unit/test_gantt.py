"""The Gantt chart, and explorers that draw one: what moves, what stays, and what a setting that cannot be looks like."""

import asyncio
import io

import ipywidgets as widgets
import numpy as np
import PIL.Image
import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyranks import show
from manyranks.show import gantt, style
from manyranks.show.explorer import Panels, Said
from manyranks.show.gantt import KINDS, Gantt
from manyranks.timeline import Span, Timeline
from tests.drawn import boxes, drawings, words


def compute(rank, name, started, finished):
    return Span(rank, "compute", name, started, finished)


def transfer(rank, started, finished):
    return Span(rank, "communication", "send", started, finished)


def shown(*spans, until=0.0):
    """The axes of a picture of these spans."""
    return show.timeline(Timeline(tuple(spans)), until=until).axes[0]


def test_a_box_is_where_its_span_is():
    axes = shown(compute(0, "step", 0, 2e-3), compute(4, "step", 1e-3, 4e-3), transfer(4, 2e-3, 3e-3))
    assert axes.get_xlabel() == "time (ms)"
    assert words(axes, "ranks") == ["rank 0", "rank 4"]
    assert words(axes, "numbers") == ["0", "0.5", "1", "1.5", "2", "2.5", "3", "3.5", "4"]
    (_, end), (bottom, _) = axes.get_xlim(), axes.get_ylim()
    scale = end / 4, end / 4, bottom / 2, bottom / 2
    assert boxes(axes, "compute")[:, :2] == pytest.approx(np.array([[0, 2], [1, 4]]) * scale[0], abs=1.51)
    ((left, right, top, low),) = boxes(axes, "communication") / scale
    assert (left, right) == pytest.approx((2, 3), abs=1.51 / scale[0])
    assert 1.5 < top < low < 2
    assert ((boxes(axes, "compute") / scale)[:, 2:] < [[0.5, 0.5], [1.5, 1.5]]).all()


def test_compute_has_the_whole_band_where_nothing_communicates():
    axes = shown(compute(0, "step", 0, 1))
    ((_, _, top, bottom),) = boxes(axes, "compute")
    assert top + bottom == pytest.approx(axes.get_ylim()[0], abs=1)


def test_the_actions_of_a_pipeline_differ_in_more_than_color():
    axes = shown(compute(0, "F0", 0, 1), compute(0, "B0", 1, 2))
    assert [text.get_text() for text in axes.figure.legends[0].get_texts()] == ["F forward", "B backward"]
    axes = shown(compute(0, "F0", 0, 1), compute(0, "I0", 1, 2), compute(0, "W0", 2, 3), compute(0, "sum", 3, 4))
    labels = [text.get_text() for text in axes.figure.legends[0].get_texts()]
    assert labels == ["compute", "F forward", "I input gradient", "W weight gradient"]
    (f,), (i,), (w,) = (boxes(axes, kind)[:, 2:] for kind in "FIW")
    assert i[0] == f[0] < w[0] < i[1] < f[1] == w[1]
    assert sorted(words(axes, "names")) == ["F0", "I0", "W0"]


def test_a_large_chart_has_no_names():
    few, long, high = [(0, i) for i in range(8)], [(0, i) for i in range(200)], [(rank, 0) for rank in range(64)]
    named = [words(shown(*(compute(rank, f"F{i}", i, i + 1) for rank, i in each)), "names") for each in (few, long, high)]
    assert named == [[f"F{i}" for i in range(8)], [], []]


def test_ranks_are_named_as_far_as_there_is_room():
    for ranks, step in ((16, 1), (64, 2)):
        axes = shown(*(compute(rank, "step", 0, 1) for rank in range(ranks)))
        assert words(axes, "ranks") == [f"rank {rank}" for rank in range(0, ranks, step)]


times = st.tuples(st.integers(0, 2), st.integers(0, 30), st.integers(1, 8))


@given(st.lists(times, max_size=12))
def test_transfers_of_a_rank_at_the_same_time_lie_in_different_lanes(drawn):
    spans = [transfer(rank, float(start), float(start + length)) for rank, start, length in drawn]
    busiest = max((sum(s.rank == o.rank and s.started <= o.started < s.finished for s in spans) for o in spans), default=0)
    found = boxes(shown(*spans), "communication")
    assert len(found) == len(spans)
    if busiest <= 6:
        for k, (left, right, top, bottom) in enumerate(found):
            others = np.delete(found, k, axis=0)
            beside = (others[:, 1] <= left) | (others[:, 0] >= right) | (others[:, 3] <= top) | (others[:, 2] >= bottom)
            assert beside.all()


@given(st.floats(1e-9, 1e6))
def test_the_axis_reaches_the_end_and_no_further(end):
    axes = shown(compute(0, "step", 0.0, end))
    assert boxes(axes, "compute")[0, 1] == pytest.approx(axes.get_xlim()[1], abs=1.51)
    unit = {"s": 1, "ms": 1e-3, "µs": 1e-6, "ns": 1e-9}[axes.get_xlabel()[6:-1]]
    last = float(words(axes, "numbers")[-1]) * unit
    assert 0.6 * end <= last <= end * (1 + 1e-6)
    assert end / unit < 1000 or unit == 1


def test_two_charts_can_share_a_scale():
    axes = shown(compute(0, "step", 0, 1), until=3.0)
    assert boxes(axes, "compute")[0, 1] == pytest.approx(axes.get_xlim()[1] / 3, abs=1.51)


def test_what_is_shorter_than_a_pixel_is_seen():
    axes = shown(compute(0, "step", 0, 500), transfer(0, 700, 700.01))
    picture = np.asarray(PIL.Image.open(io.BytesIO(axes.figure._repr_png_())).convert("RGBA").convert("RGB")).astype(int)
    red, green, blue = np.moveaxis(picture[60:], 2, 0)  # below the legend
    assert ((red > 200) & (green < 200) & (blue < 150)).any()


def test_of_very_many_short_spans_their_share_is_seen():
    many = [span for i in range(2000) for span in (compute(0, "step", i, i + 0.9), transfer(0, i + 0.9, i + 1))]
    left, right, *_ = boxes(axes := shown(*many), "communication").T
    assert (right - left).sum() < 0.2 * axes.get_xlim()[1]


class Schedules(Panels):
    """A plot of a timeline of n boxes on p ranks."""

    @style.styled
    def __init__(self):
        self.figure = gantt.frame(2.0, ["time (s)"], [])
        self.gantt, self.updates = Gantt(self.figure.axes[0]), []
        self.panels = [self.gantt]

    def update(self, n, p=2):
        self.updates.append(n)
        if n == 13:
            raise ValueError("13 is no number of boxes")
        if n == 14:
            raise KeyError("a slip")
        spans = tuple(compute(rank, f"F{i}", i, i + 1) for rank in range(p) for i in range(n))
        self.gantt.update("boxes", [f"rank {rank}" for rank in range(p)], gantt.boxes(Timeline(spans)), max(n, 1))
        return Said(f"{n} boxes")


def explorer(plot=None):
    return show.Explorer(plot or Schedules(), n=show.slider("n", 5, 0, 20), p=show.slider("p", 2, 1, 4))


def pixels(shown):
    """Red, green, blue and alpha."""
    return np.asarray(PIL.Image.open(io.BytesIO(shown.png))).astype(int)


def test_axes_are_never_drawn_again():
    shown = explorer().set(n=20)
    drawn, before = drawings(shown.figure), pixels(shown)
    shown.set(n=19)
    assert (pixels(shown) != before).any()
    shown.set(n=0).set(n=20, p=4)
    (axes,) = shown.figure.axes
    assert words(axes, "ranks") == [f"rank {k}" for k in range(4)]
    assert words(axes, "numbers")[-1] == "20"
    shown.set(n=20, p=2)
    assert (pixels(shown) == before).all(), "nothing is left of the picture before"
    assert not drawn


def test_axes_are_drawn_again_when_they_change():
    shown = explorer(plot := Schedules())
    drawn = drawings(shown.figure)
    plot.figure.axes[0].set_xlabel("time (ms)")
    shown.set(n=6)
    assert len(drawn) == 1


def test_a_picture_that_does_not_belong_to_the_setting_is_dimmed():
    shown = explorer()
    before = pixels(shown)
    shown.set(n=13)
    assert shown.status == "Not possible: 13 is no number of boxes"
    assert (pixels(shown)[..., 3] == before[..., 3] // 4).all()
    assert (pixels(shown)[..., :3] == before[..., :3]).all()
    shown.set(n=13, p=3)
    assert pixels(shown)[..., 3].max() < 64
    assert (pixels(shown.set(n=5, p=2)) == before).all()


def test_an_error_of_the_plot_is_raised_by_set_and_said_after_a_moved_control():
    shown = explorer()
    with pytest.raises(KeyError, match="a slip"):
        shown.set(n=14)
    shown.set(n=5)
    shown.controls["n"].value = 14
    assert shown.status == "Error: KeyError: 'a slip'"
    assert pixels(shown)[..., 3].max() < 64
    with pytest.raises(KeyError):
        show.Explorer(Schedules(), n=show.slider("n", 14, 0, 20))


@pytest.mark.parametrize(
    ("values", "allowed"), [({"n": 21}, "n=21: from 0 to 20 in steps of 1"), ({"n": 2.5}, "n=2.5"), ({"n": "x"}, "n='x'")]
)
def test_a_value_outside_a_slider_is_refused_and_moves_nothing(values, allowed):
    shown = explorer()
    with pytest.raises(ValueError, match=allowed):
        shown.set(p=3, **values)
    assert shown.values == {"n": 5, "p": 2}
    assert shown.status == "5 boxes."


def test_a_value_that_a_list_does_not_have_is_refused_with_those_it_has():
    shown = show.Explorer(Schedules(), n=widgets.Dropdown(options=[("one", 1), ("two", 2)], value=1))
    with pytest.raises(ValueError, match="n=3: choose one of 1, 2"):
        shown.set(n=3)


def test_a_dragged_control_is_drawn_once_when_it_rests():
    shown = explorer(plot := Schedules())
    plot.updates.clear()

    async def drag():
        for n in range(6, 12):
            shown.controls["n"].value = n
        await asyncio.sleep(0.2)

    asyncio.run(drag())
    assert (plot.updates, shown.status) == ([11], "11 boxes.")


def test_the_picture_says_the_status_line_to_those_who_cannot_see_it():
    made = []
    widgets.Widget.on_widget_constructed(made.append)
    shown = explorer().set(n=7)
    widgets.Widget.on_widget_constructed(None)
    (picture,) = (widget for widget in made if isinstance(widget, widgets.Image))
    assert picture.tooltip == shown.status == "7 boxes."
    assert picture.get_state()["description"] == ""


def test_every_kind_has_a_look_of_its_own():
    assert len({(kind.color, kind.hatch, kind.top, kind.bottom) for kind in KINDS.values()}) == len(KINDS)
