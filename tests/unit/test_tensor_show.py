"""Chapter 06's pictures and explorer show the theory's figures, and every setting is shown or refused in words."""

import itertools
import re
from dataclasses import replace

import pytest
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from manyranks.show import bars, tensor, units
from manyranks.show.tensor import DEGREES, Cut, Degrees
from manyranks.show.units import percent
from manyranks.theory import Plan, clusters, models, pace
from manyranks.theory import tensor as theory
from manyranks.training import GPTConfig
from tests.drawn import named, texts, widths, words

PLAN = Plan(seq=8192, recompute="none")
SHAPE, H100 = models["llama3-405b"], clusters["h100-dgx"]
DEFAULT = {"model": "llama3-405b", "cluster": "h100-dgx", "dp": 64, "tp": 8, "sequence_parallel": True, "pp": 16}
DEFAULT |= {"recompute": "none", "overlap_tensor": True}


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


def said_of_cuts(figure) -> list[str]:
    return [text for text in texts(figure) if text.startswith(("own", "whole", "a term"))]


def test_a_matrix_is_cut_by_columns_or_by_rows_and_a_row_parallel_product_is_a_sum():
    figure = tensor.cut("column")
    assert parts_of(figure) == [(0.7, 1.25), *[(0.3, 0.7)] * 4, *[(0.3, 1.25)] * 4]
    assert said_of_cuts(figure) == ["whole on each", "own columns", "own columns"]
    figure = tensor.cut("row")
    assert parts_of(figure) == [*[(0.3, 1.25)] * 4, *[(0.7, 0.3)] * 4, *[(0.7, 1.09)] * 4, (0.7, 1.25)]
    assert said_of_cuts(figure) == ["own columns", "own rows", "a term on each", "whole on each"]


def test_the_pair_needs_one_message_between_its_input_and_its_output_and_gate_and_up_are_cut_in_one_way():
    figure = tensor.cut("mlp")
    assert parts_of(figure)[1:9] == 8 * [(0.3, 0.7)]
    assert texts(figure).count("SwiGLU") == 1
    assert texts(figure).count("all-\nreduce") == theory.block(64, 32, 4).forward.count == 1
    assert said_of_cuts(figure) == ["whole on each", *2 * ["own columns"], "own rows", "a term on each", "whole on each"]


# The picture of the heads


@pytest.mark.parametrize(
    ("given", "below"),
    [((8, 4, 2), "0123"), ((8, 2, 4), "0011"), ((8, 1, 4), "0000"), ((8, 2, 8), "00001111"), ((1, 1, 1), "0")],
)
def test_each_rank_has_the_key_value_heads_that_its_queries_read(given, below):
    said = texts(tensor.heads(*given))
    assert [text.split()[-1] for text in said if text.startswith("query")] == [str(query) for query in range(given[0])]
    assert "".join(text.split()[-1] for text in said if text.startswith("key")) == below


HEADS = [(64, 8, 8), (32, 32, 32), (8, 3, 1), (8, 3, 2), (8, 8, 3), (12, 6, 4), (0, 1, 1), (8, 2.0, 2)]
REFUSED = [
    (lambda: tensor.cut("columns"), "kind 'columns': did you mean 'column'"),
    (lambda: tensor.saved(SHAPE, PLAN, variants=["SP"]), "variant 'SP': choose from TP, TP + SP"),
    *((lambda given=given: tensor.heads(*given), "heads={!r}, kv_heads={!r}, t={!r}: ".format(*given)) for given in HEADS),
]


@pytest.mark.parametrize(("call", "said"), REFUSED, ids=[said for _, said in REFUSED])
def test_a_picture_that_cannot_be_drawn_is_refused(call, said):
    with pytest.raises(ValueError, match=f"^{re.escape(said)}"):
        call()


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
    assert [said.count(letter) for letter in ("f", "g", "ḡ")] == [4, 4 + 4, 4]
    assert said.count("gate, up") == said.count("SwiGLU") == 4
    alone = [text.get_text() for text in tensor.collectives(["TP"]).legends[0].get_texts()]
    assert alone == ["all tokens, on each rank", "own heads or columns", "a collective"]


# Memory and time over t


def heights(figure) -> list[list[float]]:
    """The heights in each stack of bars, from below."""
    return [[bar.get_height() for bar in container] for container in figure.axes[0].containers]


def test_kept_bytes_are_the_theory_s_outside_and_inside():
    figure = tensor.saved(SHAPE, PLAN, (1, 8), list(tensor.VARIANTS))
    ways = (False, True), (True, True), (True, False)
    plans = [replace(PLAN, sequence_parallel=split, regather=again) for split, again in ways]
    each = [[theory.saved(SHAPE, replace(plan, tp=t)) for t in (1, 8)] for plan in plans]
    assert heights(figure)[::2] == [[one.outside + one.statistics for one in of] for of in each]
    assert heights(figure)[1::2] == [[one.inside for one in of] for of in each]
    assert [text.get_text() for text in figure.axes[0].texts] == [units.size(one.total) for of in each for one in of]


def test_three_variants_have_labels_that_do_not_meet():
    figure = tensor.saved(SHAPE, PLAN, variants=list(tensor.VARIANTS))
    figure.draw_without_rendering()
    axes = figure.axes[0]
    boxes = [text.get_window_extent() for text in (*axes.get_xticklabels(which="both"), *axes.texts, axes.xaxis.label)]
    assert len(boxes) == 12 + 4 + 12 + 1
    assert not [pair for pair in itertools.combinations(boxes, 2) if pair[0].overlaps(pair[1])]


# The explorer


def now(**change) -> Cut:
    return Cut(**DEFAULT | change)


@pytest.fixture(scope="module")
def opened():
    return tensor.explorer()


def test_it_opens_on_a_model_of_today_as_its_report_has_it(opened):
    assert opened.values == DEFAULT
    cost = opened.said.scenario.cost
    assert cost.held < cost.room < now(tp=4).scenario.cost.held
    assert opened.said.note == "1 × 8,192 tokens per micro-batch; 64 micro-batches, 1F1B, ZeRO-1."
    assert now(cluster="gb200-nvl72", tp=16, pp=1).note.endswith("one micro-batch, FSDP. Of a node's 72 GPUs, 64 are used.")
    small = now(model="small GPT", tp=4, pp=1).scenario
    assert (small.plan.seq, replace(small.shape, name="")) == (GPTConfig().seq, replace(GPTConfig().shape(), name=""))


def test_bars_are_the_theory_s_for_every_t():
    time, kept = drawn()
    plan = Plan(dp=64, pp=16, seq=8192, batch=4096, recompute="none")
    total, each = None, {}
    for row, t in enumerate(DEGREES):
        both, saved = (of(SHAPE, replace(plan, tp=t), *on) for of, *on in ((pace.of_layer, H100), (theory.saved,)))
        duration, waiting = words(time, "texts")[2 * row : 2 * row + 2]
        assert duration.removeprefix("» ") == units.duration(both.seconds)
        assert waiting == f"{percent((both.forward.tensor + both.backward.tensor) / both.seconds)} waiting"
        assert words(kept, "texts")[row] == units.size(saved.total)
        each[t], total = t * both.seconds, total or saved.total
        parts = saved.outside + saved.statistics, saved.inside
        assert widths(kept)[row] == pytest.approx([part / total * bars.LONGEST for part in parts])
    most = min(max(each.values()), 4 * each[1])
    assert [sum(row) for row in widths(time)] == pytest.approx([one / most * bars.LONGEST for one in each.values()])
    assert words(time, "texts")[-1] == f"t = 1: {units.duration(each[1])}"
    assert named(time, "limit").get_xdata()[0] == pytest.approx(widths(time)[0][0] + widths(time)[0][1])


@pytest.mark.parametrize(("cluster", "row"), [("a100-dgx", 3.5), ("gb200-nvl72", None), ("tpu-v5p", None), ("laptop", None)])
def test_the_line_is_where_the_node_ends(cluster, row):
    panels = drawn(cluster=cluster, pp=8, dp=1)
    assert words(panels[1], "node") == (["dotted: a node of 8 GPUs"] if row else [])
    for panel in panels:
        line = named(panel, "node ends")
        assert (row and tuple(line.get_ydata()), line.get_visible()) == (row and (row, row), row is not None)


SAID = [
    ({"tp": 1}, "Does not fit. Limit: memory; TP 8 fits."),
    ({"tp": 1, "model": "small GPT", "dp": 1, "pp": 1}, "Limit: compute: one GPU sends nothing"),
    ({"tp": 32}, "Limit: the node boundary: with 32 GPUs per node, a layer would take 15 ms"),
    ({"sequence_parallel": False}, "Does not fit. Limit: memory; sequence parallelism fits."),
    ({"pp": 1, "dp": 1, "sequence_parallel": False}, "Limit: memory; no single control helps: change two"),
    ({}, "Limit: the bubble of PP 16, 19% of a step (chapter 05); in a layer, communication: only rings of chunks would"),
    ({"dp": 128, "pp": 1, "recompute": "full"}, "Limit: gradients and parameters of DP 128, 18% of a step (ch"),
    ({"cluster": "b200-dgx", "pp": 1, "recompute": "full", "overlap_tensor": False}, "; with overlap: 2"),
    ({"model": "llama3-8b", "cluster": "a100-dgx", "pp": 1, "sequence_parallel": False}, "Limit: small matmuls, norms"),
    ({"model": "small GPT", "tp": 4, "pp": 1}, "Limit: kernel launches: each of the 4 GPUs launches as many kernels as one"),
    ({"model": "llama3-8b", "tp": 2, "pp": 1}, "Limit: compute."),
    ({"model": "small GPT"}, "Not possible: t = 8 does not divide the 4 heads of small GPT"),
    ({"model": "llama3-8b", "pp": 64}, "Not possible: 32 layers of llama3-8b on 64 stages: lower p = 64"),
    ({"cluster": "laptop"}, "Not possible: 8,192 GPUs: laptop has only 1,024; use fewer ranks"),
]


@pytest.mark.parametrize(("change", "said"), SAID)
def test_the_sentence_names_the_limit(opened, change, said):
    assert said in opened.set(**DEFAULT | change).status


def test_switches_change_what_they_are_called(opened):
    assert now(overlap_tensor=False).layer().seconds > now().layer().seconds
    pictures = {opened.set(**DEFAULT | change).png for change in ({}, {"sequence_parallel": False}, {"overlap_tensor": False})}
    assert len(pictures) == 3


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_a_rank_sends_what_the_theory_counts(recompute):
    for split in (True, False):
        calls = theory.layer(8192, SHAPE.hidden, 8, split)
        again = calls.forward.bytes if recompute == "full" else 0
        assert now(recompute=recompute, sequence_parallel=split).sent() == calls.both.bytes + again


def test_degrees_that_a_model_forbids_have_no_bar_and_what_does_nothing_is_switched_off(opened):
    panels = drawn(model="small GPT", tp=4, pp=1)
    assert [words(panel, "texts").count("not possible") for panel in panels] == [4] * 2
    assert [len(widths(panel)) for panel in panels] == [len(DEGREES) - 4] * 2
    idle = {name for name, control in opened.set(**DEFAULT | {"tp": 1}).controls.items() if control.disabled}
    assert idle == {"sequence_parallel", "overlap_tensor"}
