"""Chapter 09's figures show the numbers that they are given, and what cannot be shown is refused."""

import re
from dataclasses import replace
from math import inf

import numpy as np
import pytest

from manyranks import show
from manyranks.measure.budget import Budget
from manyranks.show import mfu, style
from manyranks.show.bars import LONGEST
from manyranks.show.mfu import Point
from manyranks.theory import Plan, clusters, models, roofline, step
from manyranks.theory.roofline import Roof
from tests.drawn import boxes, texts, widths, words
from tests.unit.figures_drawn import assert_inside, assert_readable

H100, V100, MACHINE = Roof(989e12, 3.35e12), Roof(125e12, 0.9e12), Roof(103e9, 10e9)
RUNS = [("PaLM, 540 B", "6,144 TPU v4", 0.462), ("this run", "", 0.05)]
OPERATORS = [Point("q, k, v", 890, None, "products"), Point("scores", 310, None, "products"), Point("up", 1400, None, "MLP")]
OPERATORS += [Point("RMSNorm", 1.0, None, "moves memory"), Point("residual", 0.25, None, "moves memory")]
MEASURED = [
    Point("mm", 85, 60e9, "forward"),
    Point("gelu", 0.9, 2e9, "forward"),
    Point("gelu backward", 0.8, 1.9e9, "backward"),
]
MANY = [Point(f"operator {k}", 0.2 * 1.3**k, 1e10 * 1.4**k if k % 2 else None, "abc"[k % 3]) for k in range(20)]


BUDGETS = {0: Budget(0.102, 0.066, 0.010, 0.018, 0.08), 1: Budget(0.092, 0.076, 0.0, 0.028, 0.08)}
THEORY = roofline.time_budget(models["llama3-8b"], Plan(dp=8, tp=8, zero=3, seq=8192), clusters["h100-dgx"])
PLAN = Plan(dp=8, tp=2, pp=4, seq=8192, batch=128, zero=1, recompute="none")
RUN = models["llama3-8b"], PLAN, clusters["h100-dgx"]
FIGURES = {
    "published": lambda: mfu.published(RUNS),
    "one run": lambda: mfu.published(RUNS[1:]),
    "a roof": lambda: mfu.roofline({"H100, bfloat16": H100}, OPERATORS),
    "a roof and what was measured": lambda: mfu.roofline({"this machine": MACHINE}, MEASURED),
    "roofs": lambda: mfu.roofline({"V100": V100, "H100": H100}),
    "a full roof": lambda: mfu.roofline({"H100": H100}, MANY),
    "one rank": lambda: mfu.waterfall({0: BUDGETS[0]}),
    "two ranks": lambda: mfu.waterfall(BUDGETS, title="A step"),
    "four ranks": lambda: mfu.waterfall({rank: BUDGETS[rank % 2] for rank in range(4)}),
    "eight ranks": lambda: mfu.waterfall({rank: BUDGETS[rank % 2] for rank in range(8)}),
    "a budget of theory": lambda: mfu.waterfall({"llama3-8b": THEORY}),
    "other parts": lambda: mfu.waterfall({"H100": {"at the peak": 0.4, "memory": 0.1, "messages": 0.06}}),
    "ten other parts": lambda: mfu.waterfall({"a step": {f"part {k}": 1 + k for k in range(10)}}),
    "over a degree": lambda: mfu.over_degree(*RUN, "dp", (2, 4, 8, 16)),
}


@pytest.mark.parametrize("name", FIGURES)
def test_texts_do_not_meet_and_all_of_a_figure_is_inside_it(name):
    assert_inside(FIGURES[name]())


@pytest.mark.parametrize(
    ("draw", "said"),
    [
        (lambda: mfu.published([]), "0 runs: "),
        (
            lambda: mfu.published([("PaLM", "TPU v4", 46.2)]),
            "the shares are {'PaLM': 46.2}: give numbers from 0 to 1, not in perc",
        ),
        (lambda: mfu.roofline({}), "0 roofs: "),
        (lambda: mfu.roofline({"H100": H100}, MANY * 2), "40 points: "),
        (lambda: mfu.roofline({"H100": H100}, [Point("x", 1, None, c) for c in "abcdefg"]), "7 groups of points: "),
        (
            lambda: mfu.roofline({"H100": H100}, [Point("add", -1)]),
            "'add' at -1 FLOP/byte and None FLOP/s: an intensity is 0 or more",
        ),
        (lambda: mfu.roofline({"H100": H100}, [Point("add", 1, 0)]), "'add' at 1 FLOP/byte and 0 FLOP/s: "),
        (lambda: mfu.roofline({"H100": H100}, [Point("mm", inf)]), "'mm' at inf FLOP/byte and None FLOP/s: "),
        (lambda: mfu.waterfall({}), "0 budgets: "),
        (lambda: mfu.waterfall({0: {}}), "0 parts: "),
        (lambda: mfu.waterfall({0: {"a": 1}, 1: {"b": 1}}), "'rank 1' has {'b': 1}: give seconds of a, 0 or more"),
        (lambda: mfu.waterfall({0: {"a": 1, "b": -1}}), "'rank 0' has {'a': 1, 'b': -1}: give seconds of a, b, 0 or more"),
        (lambda: mfu.waterfall({0: {"a": 0}}), "'rank 0' has {'a': 0}: give seconds of a, 0 or more, not all of them 0"),
        (lambda: mfu.waterfall({0: {"a": inf}}), "'rank 0' has {'a': inf}: give seconds of a, 0 or more"),
        (lambda: mfu.over_degree(*RUN, "dp", ()), "0 values: "),
        (lambda: mfu.over_degree(*RUN, "tp", (3,)), "tp=3 does not divide the 32 heads of llama3-8b"),
    ],
)
def test_a_picture_that_cannot_be_drawn_is_refused(draw, said):
    with pytest.raises(ValueError, match=f"^{re.escape(said)}"):
        draw()


def test_flops_and_their_rates_are_written_as_people_read_them():
    assert [show.flops(n) for n in (5, 7.2e10, 3.8e25)] == ["5 FLOP", "72 GFLOP", "38,000,000 EFLOP"]
    assert show.flop_rate(989e12) == "989 TFLOP/s"


# Charts


def test_published_bars_are_shares_of_what_was_bought():
    (axes,) = mfu.published(RUNS).axes
    assert widths(axes) == [pytest.approx([LONGEST * 0.462, LONGEST * 0.538]), pytest.approx([LONGEST * 0.05, LONGEST * 0.95])]
    assert words(axes) == ["46.2%", "5.0%"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["PaLM, 540 B, 6,144 TPU v4", "this run"]


def points(axes) -> list[tuple[float, float, bool]]:
    """Intensity and FLOP/s of each marker, and whether it is filled."""
    found = [line for line in axes.lines if line.get_marker() in style.MARKERS and len(line.get_xdata())]
    return [(*line.get_xdata(), *line.get_ydata(), line.get_markerfacecolor() != "white") for line in found]


def listed(figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].texts]


def test_a_point_is_on_the_first_roof_and_a_measured_one_where_it_was_measured():
    roofs = {"V100": V100, "H100": H100}
    on = points(mfu.roofline(roofs, OPERATORS).axes[0])
    assert on == [(point.intensity, V100.flops_per_second(point.intensity), False) for point in OPERATORS]
    assert points(mfu.roofline({"machine": MACHINE}, MEASURED).axes[0]) == [(*point[1:3], True) for point in MEASURED]


def test_a_roof_bends_at_its_ridge_between_both_regions():
    axes = mfu.roofline({"H100": H100}).axes[0]
    roof = axes.lines[0]
    assert roof.get_xdata()[1] == H100.ridge
    assert list(roof.get_ydata()[1:]) == pytest.approx([989e12, 989e12])
    assert roof.get_ydata()[0] == pytest.approx(roof.get_xdata()[0] * 3.35e12)
    assert roof.get_label() == "H100: 989 TFLOP/s, 3.35 TB/s, ridge at 295 FLOP/byte"
    assert [text.strip() for text in texts(axes)] == ["memory-bound", "compute-bound"]


def test_every_point_is_numbered_once_and_listed_with_its_numbers():
    figure = mfu.roofline({"H100": H100}, MANY)
    assert sorted(map(int, texts(figure.axes[0])[2:])) == list(range(1, 21))
    groups, said = listed(figure)[:3], listed(figure)[3:]
    assert groups == ["a", "b", "c"]
    assert [text.partition(":")[0] for text in said] == [f"{k}  {point.name}" for k, point in enumerate(MANY, 1)]
    assert "2  operator 1: 0.26; 14 GFLOP/s" in said


def test_numbers_of_points_side_by_side_are_around_them():
    near = [Point(f"{k}", 300 + 3 * k, 8e14) for k in range(12)]
    figure = mfu.roofline({"H100": H100}, near)
    assert_readable(figure)
    axes, (first, *others) = figure.axes[0], figure.axes[0].texts[2:]
    assert first.xyann == (0, 10)
    assert all(axes.bbox.contains(*corner) for other in others for corner in other.get_window_extent().corners())


def test_what_only_moves_memory_is_listed_and_has_no_point():
    figure = mfu.roofline({"H100": H100}, [Point("add", 0, 0.0), Point("mm", 400)])
    assert points(figure.axes[0]) == [(400, 989e12, False)]
    assert texts(figure.axes[0])[2:] == ["2"]
    assert listed(figure) == ["–  add: 0; moves memory", "2  mm: 400; 989 TFLOP/s"]


# Waterfall and MFU over a degree


def test_a_waterfall_s_parts_follow_each_other_from_0_to_their_sum():
    one, other = mfu.waterfall(BUDGETS).axes
    names = ("matmul", "other operators", "communication", "waiting", "Python")
    for axes, budget in ((one, BUDGETS[0]), (other, BUDGETS[1])):
        drawn = [(left, right) for name in names for left, right, *_ in boxes(axes, name)]
        ends = LONGEST * np.cumsum([each for each in budget if each]) / 0.276
        assert [left for left, _ in drawn] == pytest.approx([0, *ends[:-1]])
        assert [right for _, right in drawn] == pytest.approx(list(ends))
    said = ["102 ms, 37.0%", "66 ms, 23.9%", "10 ms, 3.6%", "18 ms, 6.5%", "80 ms, 29.0%", "together 276 ms"]
    assert words(one) == said
    assert words(other)[2] == "none"
    assert tuple(label.get_text() for label in one.get_yticklabels()) == names


def test_of_many_ranks_each_is_a_bar():
    (axes,) = mfu.waterfall({rank: BUDGETS[rank % 2] for rank in range(8)}).axes
    for rank, row in enumerate(widths(axes)):
        assert row == pytest.approx([LONGEST * each / 0.276 for each in BUDGETS[rank % 2] if each])
    assert axes.get_yticklabels()[7].get_text() == "rank 7"


def test_of_a_long_budget_what_takes_no_time_is_left_out():
    (axes,) = mfu.waterfall({"llama3-8b": THEORY}).axes
    shown = [label.get_text() for label in axes.get_yticklabels()]
    names = ["matmul", "other operators", "kernel launches", "TP", "DP", "optimizer"]
    assert shown == names
    assert len(shown) == sum(map(bool, THEORY.values())) < len(THEORY)


@pytest.mark.parametrize(("degree", "values"), [("dp", (2, 8, 16)), ("tp", (1, 2, 8)), ("pp", (1, 4, 8))])
def test_over_a_degree_mfu_and_what_is_lost_are_the_step(degree, values):
    (axes,) = mfu.over_degree(*RUN, degree, values).axes
    found = {line.get_label(): list(line.get_ydata()) for line in axes.lines}
    shape, plan, cluster = RUN
    times = [step.estimate(shape, replace(plan, **{degree: value}), cluster) for value in values]
    assert found["MFU"] == pytest.approx([100 * time.utilization("causal") for time in times])
    assert found.get("bubble", [0] * 3) == pytest.approx([100 * time.bubble / time.seconds for time in times])
    together = [sum(each) for each in zip(*found.values(), strict=True)]
    assert all(95 < each <= 100 + 1e-9 for each in together)  # parts that are never more than 1% aren't drawn
    assert max(found["MFU"]) == found["MFU"][0] > found["MFU"][-1]
