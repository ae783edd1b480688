"""Chapter 06's pictures and explorer show the theory's figures, and every setting is shown or refused in words."""

import itertools
import re
from dataclasses import replace

import pytest
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from manyranks.show import bars, tensor, units
from manyranks.show.scenario import SHAPES, SMALL
from manyranks.show.tensor import AGAIN, CLUSTERS, DEGREES, MODELS, Cut, Degrees
from manyranks.show.units import percent
from manyranks.theory import Plan, clusters, memory, models, pace, published
from manyranks.theory import tensor as theory
from manyranks.theory.published import layers
from manyranks.training import GPTConfig
from tests.drawn import named, widths, words

PAPER = models["megatron-22b"]
PLAN = Plan(seq=2048, microbatch=4, precision="fp16", flash=False, recompute="none")
DEFAULT = {"model": "megatron-22b", "cluster": "a100-dgx", "tp": 8, "sequence_parallel": True}
DEFAULT |= {"regather": True, "overlap_tensor": True, "kept": "selective"}


def texts(figure) -> list[str]:
    return [text.get_text() for text in figure.axes[0].texts]


def drawn(**change) -> list[Axes]:
    """Both panels: time and kept bytes."""
    plot = Degrees()
    plot.update(**DEFAULT | change)
    return plot.figure.axes


# The pictures of a cut product


def parts_of(figure) -> list[tuple[float, float]]:
    """Sizes of the filled rectangles, in inches."""
    filled = [patch for patch in figure.axes[0].patches if isinstance(patch, Rectangle) and patch.get_facecolor()[3]]
    return [(round(patch.get_width(), 6), round(patch.get_height(), 6)) for patch in filled]


@pytest.mark.parametrize("t", [2, 3, 4, 8])
def test_column_parallel_cuts_the_weight_and_the_output_by_columns(t):
    sizes, wide, high = parts_of(tensor.cut("column", t)), 1.2, 1.25
    assert sizes == [(0.7, high), *[(round(wide / t, 6), 0.7)] * t, *[(round(wide / t, 6), high)] * t]


def test_row_parallel_gives_a_term_of_the_sum_on_each_rank():
    figure = tensor.cut("row", 4)
    assert [text for text in texts(figure) if text.startswith(("own", "whole", "a term"))] == [
        "own columns",
        "own rows",
        "a term on each",
        "whole on each",
    ]
    assert len(parts_of(figure)) == 4 + 4 + 4 + 1


def test_the_pair_needs_one_message_between_its_input_and_its_output():
    said = texts(tensor.cut("mlp"))
    assert said.count("all-\nreduce") == theory.block(64, 32, 4).forward.count == 1
    assert [text for text in said if text.startswith(("own", "whole", "a term"))] == [
        *("whole on each", "own columns", "own columns", "own rows", "a term on each", "whole on each")
    ]


@pytest.mark.parametrize(("kind", "t", "said"), [("columns", 4, "kind 'columns': did you mean 'column'"), ("row", 9, "t=9: ")])
def test_a_picture_that_cannot_be_drawn_is_refused(kind, t, said):
    with pytest.raises(ValueError, match=f"^{re.escape(said)}"):
        tensor.cut(kind, t)


# The picture of the heads


@pytest.mark.parametrize(
    ("given", "below"),
    [((8, 4, 2), "0123"), ((8, 2, 4), "0011"), ((8, 1, 4), "0000"), ((8, 2, 8), "00001111"), ((1, 1, 1), "0")],
)
def test_each_rank_has_the_key_value_heads_that_its_queries_read(given, below):
    said = texts(tensor.heads(*given))
    assert [text.split()[-1] for text in said if text.startswith("query")] == [str(query) for query in range(given[0])]
    assert "".join(text.split()[-1] for text in said if text.startswith("key")) == below


@pytest.mark.parametrize("given", [(64, 8, 8), (32, 32, 32), (8, 3, 2), (8, 8, 3), (12, 6, 4), (0, 1, 1), (8, 2.0, 2)], ids=str)
def test_heads_that_do_not_go_together_are_refused(given):
    with pytest.raises(ValueError, match=f"^heads={given[0]!r}, kv_heads={given[1]!r}, t={given[2]!r}: "):
        tensor.heads(*given)


# The picture of the collectives


def test_the_collectives_drawn_are_those_that_the_theory_counts():
    said = texts(tensor.collectives())
    plain, split = theory.layer(64, 32, 4), theory.layer(64, 32, 4, True)
    assert said.count("all-reduce") == plain.both.all_reduce == 4
    assert said.count("all-gather") + said.count("all-gather again") == split.both.all_gather == 6
    assert said.count("all-gather again") == 2
    assert said.count("reduce-scatter") == split.both.reduce_scatter == 4
    for calls in (*plain, *split):
        counts = {"all-reduces": calls.all_reduce, "all-gathers": calls.all_gather, "reduce-scatters": calls.reduce_scatter}
        assert "\n".join(f"{count} {op}" for op, count in counts.items() if count) in said


def test_what_is_sent_where_a_block_begins_and_ends_has_its_published_names():
    said = texts(tensor.collectives())
    assert [said.count(letter) for letter in ("f", "g", "ḡ")] == [4, 4 + 4, 4]
    assert said.count("read from\nright to left") == 2
    assert "gathered again" in [text.get_text() for text in tensor.collectives().legends[0].get_texts()]


# Memory and time over t


def heights(figure) -> list[list[float]]:
    """Of each stack of bars, from below."""
    return [[bar.get_height() for bar in container] for container in figure.axes[0].containers]


def test_kept_bytes_are_the_paper_s_and_the_statistics():
    figure = tensor.saved(PAPER, PLAN, (1, 8))
    sbh = 4 * 2048 * PAPER.hidden
    whole, cut_by_t = heights(figure)[0], heights(figure)[1]
    assert whole == [10 * sbh + 131072] * 2
    assert cut_by_t == pytest.approx([sbh * (24 + 5 * 64 * 2048 / PAPER.hidden) / t for t in (1, 8)])
    assert heights(figure)[2] == [(10 * sbh + 131072) / t for t in (1, 8)]
    assert units.size(theory.saved(PAPER, replace(PLAN, tp=8)).total) in texts(figure)


def test_what_was_measured_is_a_ring_on_its_bar():
    figure = tensor.saved(PAPER, PLAN, (1, 2, 4), {"TP": {2: 5e9}, "TP + SP": {4: 7e9, 8: 1.0}}, list(tensor.VARIANTS))
    rings = [(line.get_xdata()[0], line.get_ydata()[0]) for line in figure.axes[0].lines]
    wide = 0.86 / 3
    assert rings == [pytest.approx((1 - wide, 5e9)), pytest.approx((2, 7e9))]
    assert [text.get_text() for text in figure.legends[0].get_texts()].count("measured") == 1


def test_a_number_stands_above_its_ring():
    measured = theory.saved(PAPER, replace(PLAN, tp=2)).total
    figure = tensor.saved(PAPER, PLAN, (2,), {"TP": {2: measured}})
    figure.draw_without_rendering()
    ring, axes = figure.axes[0].lines[0], figure.axes[0]
    top = axes.transData.transform((0, measured))[1] + (ring.get_markersize() / 2 + 1) * figure.dpi / 72
    (number,) = (text for text in axes.texts if text.get_text() == units.size(measured) and text.get_position()[0] < 8)
    assert number.get_window_extent().y0 > top


def test_statistics_have_the_itemsize_given():
    each = [heights(tensor.saved(PAPER, PLAN, (1,), itemsize=size))[0][0] for size in (4, 2)]
    assert each[0] - each[1] == 131072 / 2


def test_three_variants_have_labels_that_do_not_meet():
    figure = tensor.saved(PAPER, PLAN, variants=list(tensor.VARIANTS))
    figure.draw_without_rendering()
    axes = figure.axes[0]
    boxes = [text.get_window_extent() for text in (*axes.get_xticklabels(which="both"), *axes.texts, axes.xaxis.label)]
    assert len(boxes) == 12 + 4 + 12 + 1
    assert not [pair for pair in itertools.combinations(boxes, 2) if pair[0].overlaps(pair[1])]


def test_unknown_variants_are_refused():
    for given in ({"variants": ["SP"]}, {"measured": {"SP": {}}}):
        with pytest.raises(ValueError, match=r"^variant 'SP': choose from TP, TP \+ SP"):
            tensor.saved(PAPER, PLAN, **given)


# The explorer


def now(**change) -> Cut:
    return Cut(**DEFAULT | change)


def test_it_opens_on_table_4_and_says_what_limits():
    assert tensor.explorer().values == DEFAULT
    row = layers.rows()[-1]  # selective recomputation with sequence parallelism
    assert f"{1e3 * row.predict().both:.1f}" == "20.7"
    assert published.rows("korthikanti_layer_times")[-1]["combined_ms"] == "20.3"


def test_the_small_model_is_the_course_s():
    assert replace(SMALL, name="") == replace(GPTConfig().shape(), name="")
    assert MODELS["small GPT"][0] == GPTConfig().seq


def test_bars_are_the_theory_s_for_every_t():
    time, kept = drawn()
    plan = Plan(seq=2048, microbatch=4, flash=False, recompute="selective")
    for row, t in enumerate(DEGREES):
        both = pace.of_layer(PAPER, replace(plan, tp=t), clusters["a100-dgx"])
        duration, waiting = words(time, "texts")[2 * row : 2 * row + 2]
        assert duration.removeprefix("» ") == units.duration(both.seconds)
        assert waiting == f"{percent((both.forward.tensor + both.backward.tensor) / both.seconds)} waiting"
        assert words(kept, "texts")[row] == units.size(theory.saved(PAPER, replace(plan, tp=t)).total)
    for bar, t in zip(widths(kept), DEGREES, strict=True):
        saved = theory.saved(PAPER, replace(plan, tp=t))
        total = theory.saved(PAPER, plan).total
        assert bar == pytest.approx([part / total * bars.LONGEST for part in (saved.outside + saved.statistics, saved.inside)])


def test_bars_are_gpu_time_cut_off_at_four_times_the_shortest_with_a_line_at_one_gpu_s():
    time, _ = drawn()
    together = [t * now(tp=t).layer().seconds for t in DEGREES]
    most = 4 * min(together)
    assert [text.startswith("»") for text in words(time, "texts")[: 2 * len(DEGREES) : 2]] == [one > most for one in together]
    assert [sum(row) for row in widths(time)] == pytest.approx([min(one / most, 1) * bars.LONGEST for one in together])
    assert named(time, "limit").get_xdata()[0] == pytest.approx(together[0] / most * bars.LONGEST)
    assert words(time, "texts")[-1] == f"t = 1: {units.duration(together[0])}"


def test_a_bar_s_parts_say_their_numbers():
    plot = Degrees()
    plot.update(**DEFAULT)
    said = [part.says for part in plot.parts()]
    assert f"t = 8, communication: {units.duration(8 * now().waits)}" in said
    assert f"t = 8, cut by SP only: {units.size(now().saved().outside + now().saved().statistics)}" in said


@pytest.mark.parametrize(
    ("cluster", "row", "said"), [("a100-dgx", 3.5, ["a node: 8 GPUs"]), ("v100-dgx", 4.5, ["a node: 16 GPUs"])]
)
def test_the_line_is_where_the_node_ends(cluster, row, said):
    panels = drawn(cluster=cluster)
    assert words(panels[1], "node") == said
    assert {tuple(named(panel, "node ends").get_ydata()) for panel in panels} == {(row, row)}


@pytest.mark.parametrize("cluster", ["gb200-nvl72", "tpu-v5p", "laptop"])
def test_no_line_where_no_group_leaves_a_node(cluster):
    panels = drawn(cluster=cluster)
    assert words(panels[1], "node") == []
    assert not any(named(panel, "node ends").get_visible() for panel in panels)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tp": 1}, "Does not fit. Limit: memory; t = 8 fits."),
        ({"tp": 1, "model": "small GPT"}, "Limit: compute: one GPU sends nothing"),
        ({"tp": 16}, "Limit: the node boundary: with 16 GPUs per node, a layer would take 12.4 ms"),
        ({"kept": "none"}, "Does not fit. Limit: memory; t = 16 fits."),
        ({"model": "llama3-405b"}, "Limit: memory; no value of t makes it fit: add pipeline stages"),
        (
            {"cluster": "b200-dgx", "overlap_tensor": False, "sequence_parallel": False},
            "Limit: communication; with overlap: 4.6 ms",
        ),
        (
            {"sequence_parallel": False},
            "Limit: small matmuls, norms repeated on every rank: 8 GPUs use 1.15 times the GPU time of one; "
            "with sequence parallelism: 20.7 ms.",
        ),
        (
            {"model": "small GPT", "cluster": "h100-dgx", "tp": 4},
            "Limit: kernel launches: each of the 4 GPUs launches as many kernels as one alone, so the layer gets no faster.",
        ),
        ({"model": "small GPT", "cluster": "laptop", "tp": 4}, "Limit: communication: "),
        ({"tp": 4, "cluster": "b200-dgx"}, "Limit: compute."),
        ({"model": "small GPT", "tp": 8}, "Not possible: t = 8 does not divide the 4 heads of small GPT"),
        ({"model": "llama3-405b", "tp": 64}, "Limit: memory"),
    ],
)
def test_the_sentence_names_the_limit(change, said):
    assert said in tensor.explorer().set(**change).status


def test_a_way_out_is_one():
    assert not tensor.explorer().set(kept="none", tp=16).status.startswith("Does not fit")
    assert f"layer time {units.duration(now(cluster='b200-dgx', sequence_parallel=False).layer().seconds)};" in (
        tensor.explorer().set(cluster="b200-dgx", sequence_parallel=False).status
    )


def test_switches_change_what_they_are_called():
    opened = now(tp=4, kept="none")
    sbh = 4 * 2048 * PAPER.hidden
    assert opened._replace(regather=False).saved().total - opened.saved().total == 4 * sbh * 3 / 4
    assert opened._replace(sequence_parallel=False).saved().formula == sbh * (10 + 24 / 4 + 5 * 64 * 2048 / (4 * PAPER.hidden))
    assert opened._replace(overlap_tensor=False).layer().seconds > opened.layer().seconds
    shown = tensor.explorer()
    pictures = {shown.png}
    for name in ("sequence_parallel", "regather", "overlap_tensor"):
        pictures.add(shown.set(**DEFAULT | {name: False}).png)
    assert len(pictures) == 4


@pytest.mark.parametrize("kept", AGAIN)
def test_a_rank_sends_what_the_theory_counts(kept):
    calls = theory.layer(4 * 2048, PAPER.hidden, 8, True)
    assert now(kept=kept).sent() == calls.both.bytes + (calls.forward.bytes if kept == "full" else 0)
    plain = theory.layer(4 * 2048, PAPER.hidden, 8, False)
    assert now(sequence_parallel=False).sent() == plain.both.bytes


def test_what_does_nothing_is_switched_off():
    shown = tensor.explorer()
    assert not any(control.disabled for control in shown.controls.values())
    shown.set(sequence_parallel=False)
    assert [name for name, control in shown.controls.items() if control.disabled] == ["regather"]
    assert shown.png == shown.set(regather=False).png


def test_degrees_that_a_model_forbids_have_no_bar():
    panels = drawn(model="small GPT", tp=4)
    assert [words(panel, "texts").count("not possible") for panel in panels] == [4] * 2
    assert [len(widths(panel)) for panel in panels] == [len(DEGREES) - 4] * 2


@pytest.mark.parametrize(
    ("name", "value"), [("model", "gpt5"), ("cluster", "abacus"), ("kept", "all"), ("overlap_tensor", "yes")]
)
def test_unknown_names_are_refused_in_words(name, value):
    with pytest.raises(ValueError, match=value):
        Degrees().update(**DEFAULT | {name: value})


def test_every_choice_is_shown_or_refused():
    plot, switch = Degrees(), (True, False)
    options = {"model": list(MODELS), "cluster": CLUSTERS, "tp": [1, 8, 64], "sequence_parallel": switch}
    options |= {"regather": [False], "overlap_tensor": switch, "kept": list(AGAIN)}
    for values in itertools.product(*options.values()):
        setting = dict(zip(options, values, strict=True))
        if SHAPES[setting["model"]].heads % setting["tp"]:
            with pytest.raises(ValueError, match=r"does not divide the \d+ heads"):
                plot.update(**setting)
        else:
            said = plot.update(**setting)
            assert said.limit
            assert "nan" not in str(said)


def test_presets_are_shown():
    shown = tensor.explorer()
    assert "the node boundary" in shown.preset("two nodes").status
    assert "norms repeated on every rank" in shown.preset("TP alone").status
    assert "kernel launches" in shown.preset("small model").status


def test_memory_of_the_strip_is_the_theory_s():
    peak = memory.peak(PAPER, Plan(tp=8, seq=2048, microbatch=4, flash=False, recompute="selective")).total
    assert now().scenario.cost.held == peak
    assert f"<b>{units.size(peak).removesuffix(' GB')} of 80 GB</b>" in tensor.explorer().tiles.value
