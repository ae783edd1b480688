"""Chapter 01's pictures show what the ranks held and sent, and nothing else."""

import io

import PIL.Image
import pytest
import torch
from matplotlib.axes import Axes

from manyranks import show
from manyranks.show import collectives, style
from manyranks.show.collectives import figures
from manyranks.show.collectives.figures import Steps
from manyranks.theory.collectives import rounds
from tests.drawn import named, texts

N = 4


def numbers(rank: int) -> torch.Tensor:
    return torch.tensor([1, 2, 3, 4]) * 10**rank


BEFORE = [numbers(rank) for rank in range(N)]


def shown(rows: list, n=N, columns=4, *later: list) -> Axes:
    """The axes of a grid that shows these rows, and then others."""
    _, (axes,) = style.figure()
    grid = figures.Holdings(axes, n, columns)
    for each in (rows, *later):
        grid.update(each)
    return axes


def extents(axes: Axes, name: str) -> list:
    return [path.get_extents() for path in named(axes, name).get_paths()]


@pytest.mark.parametrize(("value", "ranks"), [(1, [0]), (30, [1]), (3033, [0, 1, 3]), (4444, [0, 1, 2, 3]), (0, [])])
def test_a_number_says_whose_terms_are_in_it(value, ranks):
    assert figures.terms(value, N) == ranks


def test_a_cell_has_one_stripe_for_each_term_side_by_side():
    axes = shown([[3033, 20, 0, 1], *([None] * 3)])
    stripes = extents(axes, "stripes")
    assert [stripe.width for stripe in stripes] == pytest.approx([1 / 3] * 3 + [1, 1])
    assert [stripe.x0 for stripe in stripes] == pytest.approx([0, 1 / 3, 2 / 3, 1, 3])
    assert len(extents(axes, "frames")) == 4


def test_a_shard_stands_in_its_owners_column_and_a_whole_tensor_in_all():
    axes = shown([[1], [20], None, [1000, 2000, 3000, 4000]])
    assert texts(axes) == ["1", "", "", "", "", "20", "", "", "", "", "", "", "1000", "2000", "3000", "4000"]


def test_chunks_of_unequal_size_stand_where_tensor_split_cuts_them():
    axes = shown(list(torch.tensor([1, 2, 3, 4, 5]).tensor_split(3)), 3, 5)
    assert texts(axes) == ["1", "2", "", "", "", "", "", "3", "4", "", "", "", "", "", "5"]


def test_what_was_shown_before_is_gone():
    axes = shown(BEFORE, N, 4, [None] * N)
    assert texts(axes) == [""] * 16
    assert extents(axes, "frames") == extents(axes, "stripes") == []


def test_more_ranks_than_have_room_are_refused():
    with pytest.raises(ValueError, match=r"7 ranks: .* for 1 to 6$"):
        shown([], n=7)


def test_before_and_after_are_drawn_two_to_a_line():
    figure = collectives.before_after({"a": (BEFORE, BEFORE), "b": (BEFORE, [None] * N), "c": (BEFORE, BEFORE)})
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["a", "b", "c", ""]
    assert PIL.Image.open(io.BytesIO(figure._repr_png_())).width == 2 * 880


def test_before_and_after_need_the_same_ranks():
    with pytest.raises(ValueError, match=r"'a': \(4, 3\)"):
        collectives.before_after({"a": (BEFORE, BEFORE[:3])})


def ring() -> tuple[list, list]:
    """A reduce-scatter's rounds in bytes, and made-up states."""
    run = [tuple((m.source, m.destination, 8 * m.count) for m in messages) for messages in rounds("reduce_scatter", 4, N)]
    return run, [BEFORE] * (len(run) + 1)


def test_a_stepper_shows_the_messages_of_its_round_and_counts_what_was_sent():
    shown = collectives.stepper(*ring())
    assert shown.values == {"step": 1}
    assert shown.status == "messages 4 of 8 B; sent so far, per rank 8 B; the whole tensor 32 B."
    assert shown.set(step=3).status == "messages 4 of 8 B; sent so far, per rank 24 B; the whole tensor 32 B."
    assert shown.set(step=0).status.startswith("messages none yet; sent so far, per rank 0 B")


def test_a_stepper_says_the_range_where_ranks_differ():
    shown = collectives.stepper([((0, 1, 32),), ((0, 2, 32), (1, 3, 32))], [BEFORE] * 3)
    assert shown.set(step=2).status == "messages 2 of 32 B; sent so far, per rank 0 B to 64 B; the whole tensor 32 B."


def test_a_stepper_needs_a_state_for_every_round():
    run, held = ring()
    with pytest.raises(ValueError, match="3 rounds and 3 states: give one state before the first round"):
        Steps(run, held[:-1])


def test_runs_are_drawn_a_line_each_with_a_picture_a_round():
    figure = collectives.rounds({"ring": ring()[0], "naive": [((0, 1, 32),)]}, n=N, whole=32)
    shown = [axes.axison for axes in figure.axes]
    assert shown == [True, True, True, True, False, False]
    assert [figure.axes[k].get_ylabel() for k in (0, 3)] == ["ring", "naive"]


def test_curves_have_ticks_in_the_units_given():
    figure = show.curves([1, 10, 1000], {"a": [1e-6, 1e-5, 1e-3]}, "size", "time", show.size, show.duration)
    (axes,) = figure.axes
    assert [t.get_text() for t in axes.get_xticklabels()] == ["1 B", "10 B", "100 B", "1 kB"]
    assert [t.get_text() for t in axes.get_yticklabels()] == ["1 µs", "10 µs", "100 µs", "1 ms"]


def test_curves_leave_out_what_a_logarithm_cannot_show():
    (axes,) = show.curves([1, 2, 4], {"a": [0, 5, 6]}, "n", "bytes", xticks=[1, 2, 4]).axes
    assert list(axes.lines[0].get_xdata()) == [2, 4]
    assert [t.get_text() for t in axes.get_xticklabels()] == ["1", "2", "4"]


def test_curves_on_a_linear_axis_begin_at_zero_and_keep_what_is_zero():
    (axes,) = show.curves([1, 2, 4], {"a": [0, 5, 6]}, "n", "share", yunit="{:.0f} %".format, ylog=False).axes
    assert list(axes.lines[0].get_ydata()) == [0, 5, 6]
    assert (axes.get_yscale(), axes.get_ylim()[0]) == ("linear", 0)
    assert axes.yaxis.get_major_formatter()(5, 0) == "5 %"


def test_curves_refuse_one_of_another_length():
    with pytest.raises(ValueError, match="'a' has 1 values for 2 places"):
        show.curves([1, 2], {"a": [1]}, "", "")


def test_a_source_comes_with_others_folded_under_their_names():
    listing = show.source(collectives.stepper, figures.terms, figures.Holdings)
    assert repr(listing).index("def stepper(") < repr(listing).index("def terms(") < repr(listing).index("class Holdings")
    shown = listing._repr_html_()
    assert shown.index("stepper") < shown.index("<details><summary><code>def terms …</code></summary>")
    assert "<summary><code>class Holdings …</code></summary>" in shown
    assert "<details" not in show.source(figures.terms)._repr_html_()


def test_two_nodes_are_drawn_and_no_other_number():
    with pytest.raises(ValueError, match="n=12, node=4: two nodes are drawn, so n must be 8"):
        show.collectives.rounds({"": [[(0, 1, 4)]]}, n=12, whole=4, node=4)


def beside_arrows(axes) -> list[str]:
    return [each for words in axes.collections if words.get_gid() == "names" for each in words.texts]


def test_arrows_bear_the_number_of_the_chunk_that_they_move():
    planned = rounds("reduce_scatter", N, N)
    moves = [[(m.source, m.destination, m.count, m.start) for m in messages] for messages in planned]
    figure = collectives.rounds({"": moves}, n=N, whole=N)
    assert [beside_arrows(axes) for axes in figure.axes] == [list("3012"), list("2301"), list("1230")]
    assert not any(map(beside_arrows, collectives.rounds({"": ring()[0]}, n=N, whole=32).axes))


def test_a_stepper_s_arrows_bear_the_number_of_what_changed_where_they_end():
    run, held = [((0, 1, 16), (1, 0, 8), (2, 3, 8))], [BEFORE, [row.clone() for row in BEFORE]]
    held[1][1][:2] += 1
    held[1][0][3] = 7
    steps = Steps(run, held)
    steps.update(1)
    assert beside_arrows(steps.figure.axes[0]) == ["0, 1", "3"]
    assert texts(steps.figure.axes[1]) == [f"{number}" for row in held[1] for number in row.tolist()]
    steps.update(0)
    assert beside_arrows(steps.figure.axes[0]) == []


def test_an_eighth_has_a_thinner_arrow_than_a_quarter():
    figure = collectives.rounds({"": [[(0, 1, 250), (2, 3, 125)]]}, n=8, whole=1000, node=4)
    quarter, eighth = figure.axes[0].collections[0].get_linewidths()
    assert quarter > 1.5 * eighth
