"""Chapter 09's figures show the numbers that they are given, and what cannot be shown is refused."""

import re
from math import inf, nan

import numpy as np
import pytest

from manyranks import show
from manyranks.measure.budget import Budget
from manyranks.show import mfu, mfu_waterfall, style
from manyranks.show.mfu import Point
from manyranks.theory import Plan, clusters, flops, models, roofline
from manyranks.theory.roofline import Roof
from tests.unit.figures_drawn import assert_readable

H100, V100, MACHINE = Roof(989e12, 3.35e12), Roof(125e12, 0.9e12), Roof(103e9, 10e9)
RUNS = [("PaLM, 540 B", "6,144 TPU v4", 0.462), ("this run", "", 0.05)]
PARTS = {"model FLOPs": 0.41, "slower products": 0.31, "messages": 0.11, "bubble": 0.09, "else": 0.08}
RATES = {"float32": {64: 20e9, 1024: 103e9, 256: 90e9}, "bfloat16": {64: 10e9, 256: 200e9, 1024: 343e9}}
OPERATORS = [Point("q, k, v", 890, None, "products"), Point("scores", 310, None, "products"), Point("up", 1400, None, "MLP")]
OPERATORS += [Point("RMSNorm", 1.0, None, "moves memory"), Point("residual", 0.25, None, "moves memory")]
MEASURED = [
    Point("mm", 85, 60e9, "forward"),
    Point("gelu", 0.9, 2e9, "forward"),
    Point("gelu backward", 0.8, 1.9e9, "backward"),
]
MANY = [Point(f"operator {k}", 0.2 * 1.3**k, 1e10 * 1.4**k if k % 2 else None, "abc"[k % 3]) for k in range(20)]


BUDGETS = {0: Budget(0.102, 0.066, 0.010, 0.018, 0.08), 1: Budget(0.092, 0.076, 0.0, 0.028, 0.08)}
SAMPLES = {"not synchronised": [0.4, 3e-5, 2e-5, 4e-5], "synchronised": [0.5, 3e-3, 3.2e-3, 9e-3]}
THEORY = roofline.time_budget(models["llama3-8b"], Plan(dp=8, tp=8, zero=3, seq=8192), clusters["h100-dgx"])
SHARES = {name: 0.4 + k / 50 for k, name in enumerate(flops.CONVENTIONS)}
FIGURES = {
    "published": lambda: mfu.published(RUNS),
    "one run": lambda: mfu.published(RUNS[1:]),
    "bought": lambda: mfu.bought(PARTS),
    "bought, few": lambda: mfu.bought({"model FLOPs": 0.41, "all else": 0.59}, 256),
    "rates": lambda: mfu.rates(RATES, "this machine", {"peak": 400e9}),
    "one rate": lambda: mfu.rates({"float32": {64: 1e9}}),
    "a roof": lambda: mfu.roofline({"H100, bfloat16": H100}, OPERATORS, "Llama 3 8B"),
    "a roof and what was measured": lambda: mfu.roofline({"this machine": MACHINE}, MEASURED),
    "roofs": lambda: mfu.roofline({"V100": V100, "H100": H100}),
    "a full roof": lambda: mfu.roofline({"H100": H100}, MANY),
    "one rank": lambda: mfu.waterfall({0: BUDGETS[0]}, step=0.28),
    "two ranks": lambda: mfu.waterfall(BUDGETS, step={0: 0.277, 1: 0.278}, title="A step"),
    "four ranks": lambda: mfu.waterfall({rank: BUDGETS[rank % 2] for rank in range(4)}, step=0.28),
    "eight ranks": lambda: mfu.waterfall({rank: BUDGETS[rank % 2] for rank in range(8)}, step=0.28),
    "a budget of theory": lambda: mfu.waterfall({"llama3-8b": THEORY}),
    "other parts": lambda: mfu.waterfall({"H100": {"at the peak": 0.4, "memory": 0.1, "messages": 0.06}}),
    "ten other parts": lambda: mfu.waterfall({"a step": {f"part {k}": 1 + k for k in range(10)}}),
    "timings": lambda: mfu.timings(SAMPLES),
    "one series": lambda: mfu.timings({"matmul": [0.004, 0.003]}),
    "conventions": lambda: mfu.conventions(SHARES),
    "other conventions": lambda: mfu.conventions({"mine": 0.1, "another": 0.08}, {"mine": "products only"}),
}


def texts(axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


@pytest.mark.parametrize("name", FIGURES)
def test_texts_do_not_meet_and_all_of_a_figure_is_inside_it(name):
    figure = FIGURES[name]()
    assert_readable(figure)
    box = figure.get_tightbbox()  # inches; with what is written at the axes
    assert min(box.x0, box.y0) > -0.02
    assert box.x1 < figure.get_figwidth() + 0.02
    assert box.y1 < figure.get_figheight() + 0.02


@pytest.mark.parametrize(
    ("draw", "said"),
    [
        (lambda: mfu.published([]), "0 runs: "),
        (
            lambda: mfu.published([("PaLM", "TPU v4", 46.2)]),
            "'PaLM' has the share 46.2: give a number from 0 to 1, not in percent",
        ),
        (lambda: mfu.bought({"model FLOPs": 0.4}), "the parts are 0.4000 of the whole together: give shares of 1"),
        (lambda: mfu.bought(PARTS, gpus=64), "gpus=64, each=8: a picture has 32 to 4,096 cells"),
        (lambda: mfu.rates({}), "0 lines: "),
        (lambda: mfu.rates({"float32": {}}), "'float32' has the rates {}: "),
        (
            lambda: mfu.rates({"float32": {64: 0}}),
            "'float32' has the rates {64: 0}: give one or more sizes, all numbers above 0",
        ),
        (lambda: mfu.rates({"float32": {64: 1e9, 128: nan}}), "'float32' has the rates {64: 1000000000.0, 128: nan}: "),
        (lambda: mfu.rates(RATES, peaks={"data sheet": 0}), "the peaks are {'data sheet': 0}: give FLOP/s, above 0"),
        (lambda: mfu.timings({}), "0 panels: "),
        (lambda: mfu.timings({"matmul": [1.0, 0.0]}), "'matmul' has the times [1.0, 0.0]: "),
        (lambda: mfu.timings({"matmul": [1.0, nan]}), "'matmul' has the times [1.0, nan]: "),
        (lambda: mfu.conventions({"full": -0.1}), "'full' has the share -0.1: "),
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
        (lambda: mfu.waterfall({0: {"a": 1}, 1: {"b": 1}}), "'rank 1' has the parts ['b']: give ['a'], as the first one"),
        (lambda: mfu.waterfall({0: {"a": 1, "b": -1}}), "'rank 0' has {'a': 1, 'b': -1}: give seconds, 0 or more"),
        (lambda: mfu.waterfall({0: {"a": 0}}), "'rank 0' has {'a': 0}: give seconds, 0 or more, not all of them 0"),
        (lambda: mfu.waterfall({0: {"a": inf}}), "'rank 0' has {'a': inf}: give seconds, 0 or more"),
        (lambda: mfu.waterfall({0: {"a": 1}}, step=-1), "'rank 0' has the step -1: give its seconds, above 0, or leave it out"),
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
    used, rest = ([bar.get_width() for bar in bars] for bars in axes.containers)
    assert used == pytest.approx([46.2, 5.0])
    assert [one + other for one, other in zip(used, rest, strict=True)] == pytest.approx([100, 100])
    assert texts(axes) == ["46.2%", "5.0%"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["PaLM, 540 B, 6,144 TPU v4", "this run"]


def test_a_part_of_what_was_bought_has_its_share_of_the_cells():
    (axes,) = mfu.bought({"model FLOPs": 0.41, "all else": 0.59}, 16384, each=8).axes
    *rows, used, rest = axes.patches  # the last two say what the colours mean
    areas = [
        sum(row.get_width() * row.get_height() for row in rows if row.get_facecolor() == part.get_facecolor())
        for part in (used, rest)
    ]
    cells = [area / sum(areas) * 2048 for area in areas]
    assert cells == pytest.approx([round(0.41 * 2048), 2048 - round(0.41 * 2048)])
    assert texts(axes)[1:] == ["model FLOPs\n41%, 6,717 GPUs", "all else\n59%, 9,667 GPUs"]


def test_rates_are_lines_in_the_order_of_sizes_with_the_best_in_the_legend():
    figure = mfu.rates(RATES, peaks={"data sheet": 400e9})
    (axes,) = figure.axes
    assert list(axes.lines[0].get_xdata()) == [64, 256, 1024]
    assert list(axes.lines[0].get_ydata()) == [20e9, 90e9, 103e9]
    legend = [text.get_text() for text in figure.legends[0].texts]
    assert legend == ["float32: at best 103 GFLOP/s", "bfloat16: at best 343 GFLOP/s"]
    assert list(axes.lines[2].get_ydata()) == [400e9, 400e9]
    assert texts(axes) == ["data sheet: 400 GFLOP/s"]


def test_timings_ring_the_first_call_and_show_median_and_mean():
    left, right = mfu.timings(SAMPLES).axes
    for axes, seconds in zip((left, right), SAMPLES.values(), strict=True):
        dots, ring, mean, median = axes.lines
        assert list(dots.get_ydata()) == seconds
        assert list(ring.get_ydata()) == seconds[:1]
        assert mean.get_ydata()[0] == pytest.approx(np.mean(seconds))
        assert median.get_ydata()[0] == pytest.approx(np.median(seconds))
    assert left.get_ylim() == right.get_ylim()
    said = [text.get_text() for text in right.get_legend().texts]
    assert said == ["first call: 500 ms", "mean: 129 ms", "median: 6.1 ms"]


def test_each_convention_is_shown_with_what_it_counts():
    (axes,) = mfu.conventions({"full": 0.4373, "causal": 0.3894, "palm": 0.44, "mine": 0.2}, {"mine": "products only"}).axes
    assert list(axes.lines[0].get_xdata()) == pytest.approx([43.73, 38.94, 44, 20])
    assert texts(axes) == ["43.7%", "38.9%", "44.0%", "20.0%"]
    assert [label.get_text().partition("\n")[2] for label in axes.get_yticklabels()] == [
        "every product, all scores",
        "every product, causal half of the scores",
        "6 × all parameters, all scores",
        "products only",
    ]


# Roofline


def points(axes) -> list[tuple[float, float, bool]]:
    """Intensity and FLOP/s of each marker, and whether it is filled."""
    found = [line for line in axes.lines if line.get_marker() in style.MARKERS]
    return [(*line.get_xdata(), *line.get_ydata(), line.get_markerfacecolor() != "white") for line in found]


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
    assert texts(axes) == ["memory-bound", "compute-bound"]


def test_every_point_is_numbered_once_and_listed_with_its_numbers():
    axes, listed = mfu.roofline({"H100": H100}, MANY).axes
    numbers = []
    for text in texts(axes)[2:]:
        for part in text.split(", "):
            first, _, last = part.partition("–")
            numbers += range(int(first), int(last or first) + 1)
    assert sorted(numbers) == list(range(1, 21))
    said = texts(listed)
    assert [text for text in said if text.startswith("operator")] == [
        point.name for group in "abc" for point in MANY if point.group == group
    ]
    assert "0.26; 14 GFLOP/s" in said


def test_points_whose_numbers_would_meet_share_a_label():
    apart, near = [Point("a", 1), Point("b", 50)], [Point("a", 30), Point("b", 31), Point("c", 32), Point("d", 1)]
    assert texts(mfu.roofline({"H100": H100}, apart).axes[0])[2:] == ["1", "2"]
    assert sorted(texts(mfu.roofline({"H100": H100}, near).axes[0])[2:]) == ["1–3", "4"]


def test_what_only_moves_memory_is_listed_and_has_no_point():
    axes, listed = mfu.roofline({"H100": H100}, [Point("add", 0, 0.0), Point("mm", 400)]).axes
    assert points(axes) == [(400, 989e12, False)]
    assert texts(axes)[2:] == ["2"]
    assert texts(listed)[:6] == ["–", "add", "0; moves memory", "2", "mm", "400; 989 TFLOP/s"]


# Waterfall


def test_a_waterfall_s_parts_follow_each_other_from_0_to_their_sum():
    one, other = mfu.waterfall(BUDGETS, step=0.28).axes
    for axes, budget in ((one, BUDGETS[0]), (other, BUDGETS[1])):
        *bars, together = [bars.patches[0] for bars in axes.containers]
        ends = np.cumsum(budget)
        assert [bar.get_x() for bar in bars] == pytest.approx([0, *ends[:-1]])
        assert [bar.get_width() for bar in bars] == pytest.approx(list(budget))
        assert together.get_width() == pytest.approx(ends[-1])
        assert len({(bar.get_facecolor(), bar.get_hatch()) for bar in bars}) == 5
        assert len({bar.get_hatch() for bar in bars}) == 5
    assert texts(one) == ["102 ms, 36.4%", "66 ms, 23.6%", "10 ms, 3.6%", "18 ms, 6.4%", "80 ms, 28.6%", "276 ms, 98.6%"]
    assert texts(other)[2] == "none"
    assert [label.get_text() for label in one.get_yticklabels()] == [
        "matmul",
        "other operators",
        "communication",
        "waiting",
        "Python",
        "together",
    ]


def test_what_is_said_of_a_short_part_at_the_end_stays_in_its_panel():
    figure = mfu.waterfall({rank: {"matmul": 0.9, "other": 0.002, "python": 0.003} for rank in range(3)})
    figure.draw_without_rendering()
    for axes in figure.axes:
        assert all(text.get_window_extent().x1 < axes.bbox.x1 + 3 for text in axes.texts)


def test_of_many_ranks_each_is_a_bar():
    (axes,) = mfu.waterfall({rank: BUDGETS[rank % 2] for rank in range(8)}).axes
    for part, bars in zip(Budget._fields, axes.containers, strict=True):
        assert [bar.get_width() for bar in bars] == pytest.approx([getattr(BUDGETS[rank % 2], part) for rank in range(8)])
    assert axes.get_yticklabels()[7].get_text() == "rank 7"


def test_of_a_long_budget_what_takes_no_time_is_left_out():
    (axes,) = mfu.waterfall({"llama3-8b": THEORY}).axes
    shown = [mfu_waterfall.looks([part])[part][0] for part, seconds in THEORY.items() if seconds]
    assert [label.get_text() for label in axes.get_yticklabels()] == [*shown, "together"]
    assert len(shown) < len(THEORY)
