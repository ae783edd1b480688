"""Chapter 03's pictures show the theory's figures, Table 2 among them, and every setting is shown or refused in words."""

import itertools

import pytest
from matplotlib.axes import Axes

from manyranks.show import bars, units, zero
from manyranks.show.zero import RECIPES, Stages, explorer
from manyranks.theory import Plan, clusters, memory, models, published, sharding
from tests.drawn import boxes, named, widths, words

DEFAULT = {"model": "megatron-7.5b", "cluster": "v100-dgx", "dp": 64, "stage": "ZeRO-2", "k": 16, "precision": "bf16"}


def drawn(**change) -> list[Axes]:
    """The panels of this setting: memory, sent, largest."""
    plot = Stages()
    plot.update(**DEFAULT | change)
    return plot.figure.axes


def written(**change) -> list[list[str]]:
    """The texts of each panel."""
    return [words(panel) for panel in drawn(**change)]


def lanes(held: Axes) -> list[float]:
    """How long each lane is, from top to bottom."""
    parts = ("parameters", "gradients", "optimizer", "activations")
    return [right for _, right in sorted((top, right) for part in parts for _, right, top, _ in boxes(held, part))]


# The explorer


def test_the_largest_model_on_64_v100s_is_table_2_s():
    first, *_ = published.rows("zero_table2_max_model")
    *_, largest = written()
    shown = [f"{float(text[:-1]):.{len(digits)}f}B" for text, digits in zip(largest[:4], ("", "1", "1", ""), strict=True)]
    assert shown == [first[f"theory_{stage}"] for stage in ("baseline", "Pos", "Pos+g", "Pos+g+p")]
    assert largest[4] == "32B"  # HSDP with 16 shards
    assert largest[5] == "Φ = 7.47B"


@pytest.mark.parametrize(("precision", "name"), RECIPES.items())
def test_memory_is_the_theory_s_for_every_stage(precision, name):
    texts, *_ = written(precision=name, dp=32, k=8)
    shape = models["megatron-7.5b"]
    for place, (stage, shards) in enumerate([(0, 32), (1, 32), (2, 32), (3, 32), (3, 8)]):
        plan = Plan(dp=32, dp_shard=shards, zero=stage, seq=1024, recompute="full", precision=name)
        peak = memory.peak(shape, plan)
        both = units.size(peak.states), f"+ {units.size(peak.activations + peak.buffers)}"
        assert tuple(texts[2 * place : 2 * place + 2]) == both
    assert texts[-1] == "memory: 32 GB"
    assert str(memory.model_states(100, Plan(zero=0, precision=name)).total) == precision[:2] + "00"


def test_a_shard_is_seen_beside_what_is_whole_and_64_ranks_cut_every_kind_by_the_same_length():
    held, *_ = drawn()
    each = [lanes(held)[4 * row : 4 * row + 3] for row in range(4)]  # parameters, gradients, optimizer of stages 0 to 3
    cuts = {round(whole - cut, 6) for row in (1, 2, 3) for whole, cut in zip(each[0], each[row], strict=True)}
    assert len(cuts - {0.0}) == 1
    assert [sum(a > b for a, b in zip(each[0], row, strict=True)) for row in each] == [0, 1, 2, 3]
    smallest = lanes(drawn(model="gpt2-xl", dp=1024, stage="ZeRO-3")[0])
    assert min(smallest) > 0.02


def test_a_row_s_mark_is_the_sum_and_the_line_is_the_memory_of_one_gpu():
    held, *_ = drawn(dp=8, k=2)
    (line,) = {round(x, 9) for x in named(held, "limit").get_xdata()}
    ways = [{"zero": stage, "dp_shard": shards} for stage, shards in ((0, 8), (1, 8), (2, 8), (3, 8), (3, 2))]
    plans = [Plan(dp=8, seq=1024, recompute="full", overlap=False, **way) for way in ways]
    peaks = [memory.peak(models["megatron-7.5b"], plan).total for plan in plans]
    marks, room = named(held, "sums").get_xdata(), clusters["v100-dgx"].accelerator.memory
    assert [mark <= line for mark in marks] == [peak <= room for peak in peaks]
    assert sorted(range(5), key=marks.__getitem__) == sorted(range(5), key=peaks.__getitem__)
    assert all(mark >= lane for row, mark in enumerate(marks) for lane in lanes(held)[4 * row : 4 * row + 4])


def test_what_is_sent_is_the_theory_s_by_parts():
    _, sent, _ = drawn(k=8, precision="bf16-fp32-gradients")
    cut = sharding.unit_sizes(models["megatron-7.5b"])
    expected = [sharding.sent(cut, 64, stage, 2, 4) for stage in range(4)] + [sharding.sent(cut, 64, 3, 2, 4, replicas=8)]
    longest = max(parts.total for parts in expected)
    for bar, parts in zip(widths(sent), expected, strict=True):
        assert bar == pytest.approx([part / longest * bars.LONGEST for part in parts if part])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"stage": "data parallelism"}, "states 119 GB; activations 533 MB;"),
        ({"stage": "data parallelism"}, "Does not fit. Limit: memory, mainly optimizer states: ZeRO-1 fits."),
        ({"stage": "ZeRO-3"}, "sent per GPU per step 44.1 GB, 1.5 × data parallelism. Limit: compute"),
        ({"precision": "bf16-fp32-gradients"}, ", 0.75 × data parallelism"),
        ({"model": "llama3-70b", "dp": 8, "stage": "ZeRO-3"}, ": ZeRO-3 fits on 64 GPUs or more."),
        ({"model": "llama3-70b", "dp": 256, "stage": "HSDP", "k": 4}, ": K = 64 fits."),
        (
            {"model": "megatron-1t", "dp": 1024, "stage": "ZeRO-3"},
            "no control here helps; chapters 05 and 06 split the model itself",
        ),
        ({"model": "gpt2-xl", "dp": 1}, "activations 371 MB. Limit: compute: one GPU sends nothing."),
        (
            {"model": "gpt2-xl", "cluster": "b200-dgx", "dp": 1024, "stage": "ZeRO-3"},
            "Limit: compute; messages take 36% as long.",
        ),
        ({"cluster": "b200-dgx"}, "Limit: the network: messages take 1.01 times as long as compute."),
        (
            {"stage": "HSDP", "k": 128},
            "Not possible: HSDP needs K ≤ d (replicas × shards = d), but K = 128 and d = 64: lower K or raise d",
        ),
    ],
)
@pytest.mark.usefixtures("undrawn")
def test_the_sentence_names_the_limit_and_a_way_out(change, said):
    assert said in explorer().set(**DEFAULT | change).status


@pytest.mark.usefixtures("undrawn")
def test_a_way_out_is_one():
    shown = explorer().set(model="llama3-70b", dp=8, stage="ZeRO-3")
    assert "Does not fit" not in shown.set(dp=64).status
    assert "Does not fit" in shown.set(dp=32).status
    assert "K = 64 fits" in shown.set(dp=256, stage="HSDP", k=4).status
    assert "Does not fit" not in shown.set(k=64).status
    assert "Does not fit" in shown.set(k=32).status


@pytest.mark.usefixtures("undrawn")
def test_shards_are_hsdp_s_alone_and_hsdp_that_cannot_be_is_left_out():
    shown = explorer()
    assert shown.controls["k"].disabled
    assert not shown.set(stage="HSDP").controls["k"].disabled
    assert all("K > d" in panel for panel in written(dp=8))


# Drawings


def test_the_drawing_of_a_step_hides_messages_only_when_it_fetches_ahead():
    units, gather, compute = 4, 1.0, 1.4
    figure = zero.step_over_time()
    for axes, gathers, forward, end in zip(
        figure.axes,
        (2 * units, 2 * units - 1),
        (units * (gather + compute), gather + units * compute),
        (3 * units * (gather + compute), 2 * gather + 3 * units * compute),
        strict=True,
    ):
        bars = [bar for bar in axes.patches if not bar.get_alpha()]
        words = [text.get_text()[0] for text in axes.texts]
        lanes = [sorted((b.get_x(), b.get_x() + b.get_width()) for b in bars if round(b.get_y()) == row) for row in (0, 1)]
        assert (words.count("g"), words.count("r")) == (gathers, units)
        assert [lanes[0][units - 1][1], max(lane[-1][1] for lane in lanes)] == pytest.approx([forward, end])
        for lane in lanes:
            assert all(end <= start + 1e-9 for (_, end), (start, _) in itertools.pairwise(lane))


def test_what_each_stage_holds_is_drawn_as_the_theory_has_it():
    figure = zero.who_holds_what()
    heights = {patch.get_gid(): patch.get_height() for patch in figure.paper.patches if patch.get_gid()}
    for stage, name in enumerate(("data parallelism", "stage 1", "stage 2", "stage 3")):
        held = memory.model_states(1e9, Plan(dp=4, batch=4, zero=stage))
        for rank in range(4):
            drawn = [heights[f"{name} {rank} {kind}"] for kind in ("parameters", "gradients", "optimizer")]
            expected = [held.parameters, held.gradients, held.optimizer]
            assert drawn == pytest.approx([size / expected[0] * drawn[0] for size in expected])
