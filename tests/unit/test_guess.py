"""The reader's guess on a figure: where it's drawn, what its label says, and that no guess ends in a traceback."""

import pytest

from manyranks import show

from .figures_drawn import assert_readable


class Word:
    def __repr__(self):
        return "a while\nor so"


def curves(**more):
    return show.curves([1, 10, 100, 1000], {"naive": [1, 10, 100, 1000], "ring": [1] * 4}, "ranks", "time", **more)


def bars():
    return show.kernels.requested({"softmax": {"five operators": 4e6, "one kernel": 1e6}})


def marks(figure):
    return [line for line in figure.axes[0].lines if line.get_gid() == "guess"]


def said(figure):
    return "".join(text.get_text() for text in [*figure.axes[0].texts, *figure.texts] if "guess" in text.get_text())


def test_no_guess_changes_nothing():
    assert show.guess(None, curves(), lambda s: (100, s))._repr_png_() == curves()._repr_png_()


@pytest.mark.parametrize("number", [30, 30.0, "30"])
def test_a_point_is_a_star_with_a_line_to_its_label(number):
    figure = show.guess(number, curves(), lambda s: (100, 2 * s), "{:g} s".format)
    line, star = marks(figure)
    assert (line.get_xdata()[0], *line.get_ydata()) == (100, 60, 60)
    assert (*star.get_xdata(), *star.get_ydata(), star.get_marker()) == (100, 60, "*")
    assert said(figure) == "your guess:\n30 s"
    assert_readable(figure)


def test_a_guess_on_one_axis_is_a_line_across():
    (upright,) = marks(show.guess(4, figure := bars(), lambda g: (4e6 / g, None)))
    assert list(upright.get_xdata()) == [1e6, 1e6]
    assert said(figure) == "your guess: 4"
    assert figure.axes[0].get_title("left") == "softmax"
    assert_readable(figure)
    (level,) = marks(figure := show.guess(4, curves(), lambda g: (None, g)))
    assert list(level.get_xdata()) == list(figure.axes[0].get_xlim())
    assert list(level.get_ydata()) == [4, 4]


@pytest.mark.parametrize(
    ("value", "label"), [(1e-3, "0.001"), (3e5, "300,000"), (1e-9, "1e-09 ↓"), (1e300, "1e+300 ↑"), (-7, "-7 ↓")]
)
def test_an_axis_grows_to_reach_a_guess_but_to_three_times_its_length_at_most(value, label):
    before, figure = curves().axes[0].get_ylim(), show.guess(value, curves(), lambda g: (10, g))
    (low, high), (y, *_) = figure.axes[0].get_ylim(), marks(figure)[0].get_ydata()
    assert said(figure) == f"your guess:\n{label}"
    assert (y in before and (low, high) == before) if label[-1] in "↓↑" else (low < value == y < high)
    assert_readable(figure)


def test_a_linear_axis_grows_too_and_an_upright_line_stops_at_its_end():
    figure = show.guess(1500, curves(ylog=False), lambda g: (10, g))
    assert figure.axes[0].get_ylim()[0] == 0
    assert figure.axes[0].get_ylim()[1] > 1500
    assert said(show.guess(0.01, bars(), lambda g: (4e6 / g, None))) == "your guess: 0.01 →"
    assert said(show.guess(1e-9, curves(), lambda g: (g, None))) == "← your guess: 1e-09"


@pytest.mark.parametrize(
    "words", ["a month", (10, 2), 0, [], "nan", float("inf"), "1" * 400, "$x_1$ and $", Word(), "so long " * 40]
)
def test_what_is_no_number_is_written_below(words):
    figure = show.guess(words, bars(), lambda g: (4e6 / g, None))
    assert marks(figure) == []
    assert said(figure).startswith("your guess: " + f"{words}"[:6])
    assert_readable(figure)
    assert figure.texts[0].get_window_extent().width < figure.bbox.width
