"""Chapter 03's pictures show the theory's figures, Table 2 among them, and every setting is shown or refused in words."""

import itertools

import pytest
from matplotlib.axes import Axes

from manyranks.show import bars, zero
from manyranks.show.zero import STAGES, Stages, explorer, memory_over_a_step
from manyranks.theory import Plan, clusters, memory, models, published, sharding
from tests.drawn import named, widths, words

SIXTEEN = next(iter(zero.RECIPES))
DEFAULT = {"model": "megatron-7.5b", "cluster": "v100-dgx", "n": 64, "stage": "ZeRO-2", "k": 16, "precision": SIXTEEN}


def drawn(**change) -> list[Axes]:
    """The panels of this setting: memory, sent, largest."""
    plot = Stages()
    plot.update(**DEFAULT | change)
    return plot.figure.axes


def written(**change) -> list[list[str]]:
    """What each panel's texts are."""
    return [words(panel) for panel in drawn(**change)]


# The explorer


def test_it_opens_on_zero_s_figure_1_and_says_what_limits():
    assert explorer().status == (
        "megatron-7.5b on 64 GPUs, ZeRO-2: 16.6 GB of states and 1.08 GB for one sequence of 1,024 tokens; 14.3 GB are free. "
        "A GPU sends 29.4 GB a step, as much as data parallelism. Limit: computing; the network is busy for 44% of the time "
        "that one sequence a GPU takes."
    )


def test_the_controls_set_what_they_are_called():
    labels = {name: control.description for name, control in explorer().controls.items()}
    assert labels.keys() == DEFAULT.keys()
    assert (labels["k"], labels["precision"]) == ("shards K (HSDP)", "bytes a parameter")
    assert explorer().values == DEFAULT


def test_the_largest_model_on_64_v100s_is_table_2_s():
    first, *_ = published.rows("zero_table2_max_model")
    *_, largest = written()
    shown = [f"{float(text[:-1]):.{len(digits)}f}B" for text, digits in zip(largest[:4], ("", "1", "1", ""), strict=True)]
    assert shown == [first[f"theory_{stage}"] for stage in ("baseline", "Pos", "Pos+g", "Pos+g+p")]
    assert largest[4] == "32B"  # HSDP with 16 shards
    assert largest[5] == "Φ = 7.47B"


@pytest.mark.parametrize("precision", zero.RECIPES)
def test_memory_is_the_theory_s_for_every_stage(precision):
    texts, *_ = written(precision=precision, n=32, k=8)
    shape, name = models["megatron-7.5b"], zero.RECIPES[precision]
    for place, (stage, shards) in enumerate([(0, 32), (1, 32), (2, 32), (3, 32), (3, 8)]):
        plan = Plan(dp=32, dp_shard=shards, zero=stage, seq=1024, recompute="full", precision=name)
        peak = memory.peak(shape, plan)
        both = zero.units.size(peak.states), f"+ {zero.units.size(peak.activations + peak.buffers)}"
        assert tuple(text.removeprefix("» ") for text in texts[2 * place : 2 * place + 2]) == both
    assert texts[-1] == "memory: 32 GB"
    assert str(memory.model_states(100, Plan(zero=0, precision=name)).total) == precision[:2] + "00"


def test_bars_are_as_long_as_their_parts_and_the_line_is_the_device_s_memory():
    held, _, _ = drawn(n=8, k=2)
    (line,) = {round(x, 9) for x in named(held, "limit").get_xdata()}
    shape, memory_of_one = models["megatron-7.5b"], clusters["v100-dgx"].accelerator.memory
    for bar, (stage, shards) in zip(widths(held), [(0, 8), (1, 8), (2, 8), (3, 8), (3, 2)], strict=True):
        states = memory.model_states(shape, Plan(dp=8, dp_shard=shards, zero=stage))
        assert bar == pytest.approx([size / memory_of_one * line for size in states[:3]])


def test_bars_beyond_four_times_the_memory_are_cut_and_say_so():
    held, *_ = drawn(model="llama3-405b")
    texts = words(held)
    assert [text.startswith("» ") for text in texts[:10:2]] == [True, True, True, False, True]
    totals = [sum(bar) for bar in widths(held)]
    assert totals[:3] == pytest.approx([bars.LONGEST] * 3)
    assert totals[3] < bars.LONGEST


def test_what_is_sent_is_the_theory_s_by_parts():
    _, sent, _ = drawn(k=8, precision="18: 2 + 4 + 12 (fp32 gradients)")
    cut = sharding.unit_sizes(models["megatron-7.5b"])
    expected = [sharding.sent(cut, 64, stage, 2, 4) for stage in range(4)] + [sharding.sent(cut, 64, 3, 2, 4, replicas=8)]
    longest = max(parts.total for parts in expected)
    for bar, parts in zip(widths(sent), expected, strict=True):
        assert bar == pytest.approx([part / longest * bars.LONGEST for part in parts if part])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"stage": "data parallelism"}, "Does not fit: megatron-7.5b on 64 GPUs, data parallelism: 119 GB of states and"),
        ({"stage": "data parallelism"}, "of 32 GB. Limit: memory, most of it for optimizer states. ZeRO-1 fits."),
        ({"stage": "ZeRO-3"}, "A GPU sends 44.1 GB a step, 1.5 times what data parallelism sends. Limit: computing"),
        ({"precision": "18: 2 + 4 + 12 (fp32 gradients)"}, "0.75 times what data parallelism sends"),
        ({"model": "llama3-70b", "n": 8, "stage": "ZeRO-3"}, "ZeRO-3 fits from 64 GPUs on."),
        ({"model": "llama3-70b", "n": 256, "stage": "HSDP", "k": 4}, "K = 64 fits."),
        ({"model": "megatron-1t", "n": 1024, "stage": "ZeRO-3"}, "on however many GPUs: split the layers themselves"),
        ({"model": "gpt2-xl", "n": 1}, "Limit: one GPU: nothing to share, nothing to send."),
        (
            {"model": "gpt2-xl", "cluster": "b200-dgx", "n": 1024},
            "Limit: the network, busy for as long as computing 1.4 sequences",
        ),
        (
            {"stage": "HSDP", "k": 128},
            "Not possible: HSDP with K = 128 shards on N = 64: replicas × shards = N, so choose K up to 64",
        ),
    ],
)
def test_the_status_line_names_the_limit_and_a_way_out(change, said):
    assert said in explorer().set(**change).status


def test_a_way_out_is_one():
    shown = explorer().set(model="llama3-70b", n=8, stage="ZeRO-3")
    assert "ZeRO-3 fits from 64 GPUs on" in shown.status
    assert "are free" in shown.set(n=64).status
    assert shown.set(n=32).status.startswith("Does not fit")
    assert "K = 64 fits" in shown.set(n=256, stage="HSDP", k=4).status
    assert "are free" in shown.set(k=64).status
    assert shown.set(k=32).status.startswith("Does not fit")


def test_hsdp_that_cannot_be_is_left_out_where_another_stage_is_looked_at():
    texts = written(n=8)
    assert all("K > N" in panel for panel in texts)


@pytest.mark.parametrize(
    ("name", "value"), [("stage", "ZeRO-4"), ("precision", "bf16"), ("model", "gpt5"), ("cluster", "abacus")]
)
def test_unknown_names_are_refused_in_words(name, value):
    with pytest.raises(ValueError, match=value):
        Stages().update(**DEFAULT | {name: value})


def test_every_choice_gives_a_status_line_or_a_reason():
    plot, controls = Stages(), explorer().controls
    options = {name: list(controls[name].options) for name in ("model", "cluster", "stage", "precision")}
    options |= {"n": [1, 8, 1024], "k": [16], "cluster": ["v100-dgx", "b200-dgx"], "precision": options["precision"][::2]}
    for values in itertools.product(*options.values()):
        setting = dict(zip(options, values, strict=True))
        if setting["stage"] == "HSDP" and setting["k"] > setting["n"]:
            with pytest.raises(ValueError, match="choose K up to"):
                plot.update(**setting)
        else:
            status = plot.update(**setting)
            assert "Limit: " in status
            assert "nan" not in status


# Memory over a step

STEP = [("forward 1", 10), ("forward 2", 20), ("backward 2", 40), ("backward 1", 30), ("optimizer", 25)]
OTHER = [("forward", 5), ("backward", 8), ("optimizer step", 6), ("optimizer zero_grad", 4)]


def test_every_line_s_phases_begin_and_end_at_the_same_places():
    figure = memory_over_a_step({"ZeRO-1": STEP, "ZeRO-3": OTHER})
    (axes,) = figure.axes
    first, _, second, _, *marks = axes.lines
    assert list(first.get_xdata()) == [0, 0.5, 1, 1.5, 2, 3]
    assert list(first.get_ydata()) == [10, 20, 40, 30, 25, 25]
    assert list(second.get_xdata()) == [0, 1, 2, 2.5, 3]
    assert {line.get_drawstyle() for line in (first, second)} == {"steps-post"}
    assert [mark.get_xdata()[0] for mark in marks] == [1, 2]
    assert [text.get_text() for text in axes.texts] == ["forward ends", "backward ends"]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["forward", "backward", "optimizer"]


def test_peaks_are_marked_where_they_are_and_named():
    figure = memory_over_a_step({"ZeRO-1": STEP, "ZeRO-3": OTHER})
    peaks = figure.axes[0].lines[1:4:2]
    assert [(*peak.get_xdata(), *peak.get_ydata()) for peak in peaks] == [(1.25, 40), (1.5, 8)]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["ZeRO-1: at most 40 B", "ZeRO-3: at most 8 B"]
    looks = [(peak.get_marker(), peak.get_linestyle()) for peak in peaks]
    assert len({marker for marker, _ in looks}) == len({line for _, line in looks}) == 2


def test_one_moment_is_drawn_and_nothing_at_all_too():
    (axes,) = memory_over_a_step({"alone": [("forward", 0)]}).axes
    assert [text.get_text() for text in axes.texts] == ["forward ends"]


@pytest.mark.parametrize(
    ("samples", "said"),
    [
        ({}, "samples of []: give a name or more"),
        ({"a": []}, "samples of ['a']: give a name or more, each with [(moment, bytes), …]"),
        (
            {"a": STEP, "b": STEP[:4]},
            "'b' goes through ['forward', 'backward']: give every line each of the phases ['forward',",
        ),
        ({"a": [*STEP, ("forward 3", 1)]}, "'a' goes through ['forward', 'backward', 'optimizer', 'forward']"),
        ({"a": [("forward", -1)]}, "'a' has fewer than 0 bytes at 'forward'"),
    ],
)
def test_samples_that_make_no_picture_are_refused_in_words(samples, said):
    with pytest.raises(ValueError) as error:
        memory_over_a_step(samples)
    assert str(error.value).startswith(said)


def test_a_bar_is_drawn_for_every_stage():
    assert [len(widths(panel)) for panel in drawn()] == [len(STAGES)] * 3


@pytest.mark.parametrize("units", [2, 3, 6])
def test_the_drawing_of_a_step_hides_messages_only_when_it_fetches_ahead(units):
    gather, compute = 1.0, 1.5
    figure = zero.step_over_time(units, gather, compute)
    blocks = [(p.get_gid(), p.get_x(), p.get_x() + p.get_width()) for p in figure.paper.patches if p.get_gid()]
    second = (blocks[0][2] - blocks[0][1]) / compute
    for title, gathers, forward, end in (
        ("one at a time: stage 3", 2 * units, units * (gather + compute), 3 * units * (gather + compute)),
        ("fetch ahead: FSDP", 2 * units - 1, gather + units * compute, 2 * gather + 3 * units * compute),
    ):
        lanes = [sorted(block[1:] for block in blocks if block[0].startswith(f"{title} {of}")) for of in ("compute", "network")]
        counts = [sum(name.startswith(f"{title} network {word}") for name, *_ in blocks) for word in ("gather", "reduce")]
        assert counts == [gathers, units]
        began, ended = lanes[1][0][0], max(lane[-1][1] for lane in lanes)
        assert [lanes[0][units - 1][1] - began, ended - began] == pytest.approx([forward * second, end * second])
        for lane in lanes:
            assert all(end <= start + 1e-9 for (_, end), (start, _) in itertools.pairwise(lane))


def test_what_each_stage_holds_is_drawn_as_the_theory_has_it():
    figure = zero.who_holds_what(4)
    heights = {patch.get_gid(): patch.get_height() for patch in figure.paper.patches if patch.get_gid()}
    for stage, name in enumerate(("data parallelism", "stage 1", "stage 2", "stage 3")):
        held = memory.model_states(1e9, Plan(dp=4, batch=4, zero=stage))
        for rank in range(4):
            drawn = [heights[f"{name} {rank} {kind}"] for kind in ("parameters", "gradients", "optimizer")]
            expected = [held.parameters, held.gradients, held.optimizer]
            assert drawn == pytest.approx([size / expected[0] * drawn[0] for size in expected])
