"""Chapter 02's explorer shows the theory's figures, and every setting is shown or refused in words."""

import itertools

import pytest
from matplotlib.collections import PolyCollection

from manyranks.show import data_parallel
from manyranks.show.data_parallel import RANKS, Scaling, Setting, explorer
from manyranks.theory import Plan, clusters, memory, models, step
from manyranks.timeline import Timeline
from manyranks.timeline.spans import COMMUNICATION, COMPUTE, Span
from tests.drawn import boxes, words

DEFAULT = {"model": "gpt2-xl", "cluster": "h100-dgx", "n": 64, "sequences": 8, "reduce": "overlapped", "critical": 2**20}


def widths(plot: Scaling, panel: int) -> list[list[float]]:
    """Of each part's boxes, from the top bar to the last."""
    parts = [artist for artist in plot.figure.axes[panel].collections if isinstance(artist, PolyCollection)]
    return [[path.get_extents().width for path in part.get_paths()] for part in parts]


def test_it_opens_on_a_setting_that_fits_and_says_what_limits():
    status = explorer().status
    assert status == (
        "gpt2-xl on 64 GPUs, 48.1 GB of 80 GB: 202 ms a step of 524 thousand tokens; 63.8 times the tokens/s of one GPU "
        "(efficiency 99.7%). Larger batches learn less a token: with a critical one of 1.05 million, the same loss takes 1.49 "
        "times the tokens, so it is reached 42.9 times as fast. Limit: compute-bound."
    )
    # 64 · 99.7 % as many tokens a second, of which the loss takes (1 + 1/2)/(1 + 1/128) as many.
    assert round(64 * 0.997 / (1.5 / (1 + 1 / 128)), 1) == 42.9


def test_the_controls_say_what_they_set():
    labels = {name: control.description for name, control in explorer().controls.items()}
    assert labels["critical"] == "critical batch"
    assert labels["sequences"] == "sequences a GPU"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model": "llama3-8b"}, "Does not fit: 169 GB of 80 GB a GPU. Every GPU holds the whole model"),
        ({"cluster": "v100-dgx"}, "Does not fit: 48.1 GB of 32 GB a GPU. The model's states alone, 24.9 GB, do: take fewer"),
        ({"n": 1024}, "; 1,020 times the tokens/s of one GPU"),
        ({"n": 512}, "the batch is 4 times the critical one: more GPUs hardly save time"),
        ({"reduce": "after backward", "sequences": 1}, "of a step waits for gradients"),
        ({"sequences": 1}, "Limit: 10% of a step waits for gradients"),
        ({"n": 1}, "gpt2-xl on 1 GPU, 48.1 GB of 80 GB: 202 ms a step of 8.19 thousand tokens. Limit: one GPU: nothing to"),
    ],
)
def test_the_status_line_names_the_limit(change, said):
    assert said in explorer().set(**change).status


def test_a_step_s_bars_are_the_theory_s_estimate():
    plot = Scaling()
    plot.update(**DEFAULT)
    parts = widths(plot, 0)
    for row, overlap in enumerate((True, False)):
        plan = Plan(dp=64, seq=1024, batch=512, microbatch=8, zero=0, recompute="none", overlap=overlap)
        time = step.estimate(models["gpt2-xl"], plan, clusters["h100-dgx"])
        shown = [part[row] for part in parts]
        expected = [time.compute, time.data, time.optimizer]
        assert [w / sum(shown) for w in shown] == pytest.approx([s / time.seconds for s in expected])


def test_memory_is_what_every_rank_holds_whatever_their_number():
    plot = Scaling()
    plot.update(**DEFAULT)
    one = widths(plot, 2)
    plot.update(**DEFAULT | {"n": 1024})
    assert widths(plot, 2) == one
    plan = Plan(dp=64, seq=1024, batch=512, microbatch=8, zero=0, recompute="none")
    shape = models["gpt2-xl"]
    states = memory.model_states(shape, plan)
    expected = [states.parameters, states.gradients, states.optimizer, memory.activations(shape, plan)]
    shares = [part[0] for part in one]
    assert [share / sum(shares) for share in shares] == pytest.approx([bytes / sum(expected) for bytes in expected])


def test_efficiency_falls_from_one_gpu_on_and_is_never_worse_with_overlap():
    now = Setting("gpt2-xl", "h100-dgx", 1, 8, True, 2**20)
    for overlap in (True, False):
        values = [now.efficiency(n, overlap) for n in RANKS]
        assert values[0] == 1
        assert all(a >= b - 1e-9 for a, b in itertools.pairwise(values))
    assert all(now.efficiency(n, True) >= now.efficiency(n, False) for n in RANKS)


def choices() -> dict[str, list]:
    controls = explorer().controls
    options = {name: list(controls[name].options) for name in ("model", "cluster", "reduce")}
    return {**{name: [value] for name, value in DEFAULT.items()}, **options, "n": [1, 8, 1024], "sequences": [1, 64]}


def test_every_choice_gives_a_status_line():
    plot, options = Scaling(), choices()
    for values in itertools.product(*options.values()):
        status = plot.update(**dict(zip(options, values, strict=True)))
        assert "nan" not in status
        assert len(status) > 40, status


def test_every_choice_can_be_drawn():
    shown = explorer()
    for name, values in choices().items():
        for value in values:
            assert not shown.set(**DEFAULT | {name: value}).status.startswith("Not possible")


def test_the_first_run_is_a_curve_and_the_others_are_sparse_markers_on_it():
    (axes,) = data_parallel.losses({"4 ranks": [5.0] * 120, "1 rank": [5.0] * 30, "2 ranks": [5.0] * 30}).axes
    assert [len(line.get_xdata()) for line in axes.lines] == [120, 30, 30]
    assert [line.get_linestyle() for line in axes.lines] == ["-", "None", "None"]
    assert [line.get_marker() for line in axes.lines] == [" ", "o", "s"]
    shown = [set(range(30)[start::every]) for start, every in (line.get_markevery() for line in axes.lines[1:])]
    assert all(5 <= len(each) <= 12 for each in shown)
    assert not shown[0] & shown[1]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["4 ranks", "1 rank", "2 ranks"]


@pytest.mark.parametrize("values", [[], [5.0], [5.0, 4.0]])
def test_short_runs_are_drawn_too(values):
    (axes,) = data_parallel.losses({"4 ranks": [5.0], "1 rank": values}).axes
    start, _ = axes.lines[1].get_markevery()
    assert start < max(1, len(values))


# Steps -----------------------------------------------------------------------------------------------------------------


def communication(started: float, finished: float, name: str = "all_reduce", rank: int = 0) -> Span:
    return Span(rank, COMMUNICATION, name, started, finished)


def compute(started: float, finished: float, rank: int = 0) -> Span:
    return Span(rank, COMPUTE, "compute", started, finished)


# Two all-reduces after 30 ms of computing, and two from 20 ms on.
AFTER = Timeline((compute(0, 0.03), communication(0.03, 0.06), communication(0.06, 0.09), compute(0, 0.09, 1)))
DURING = Timeline((compute(0, 0.03), communication(0.02, 0.05), communication(0.05, 0.065), compute(0.065, 0.07)))


def texts(figure) -> list[str]:
    return [text.get_text() for text in figure.axes[0].texts]


def names(*timelines: Timeline) -> list[str]:
    return words(data_parallel.steps({str(number): timeline for number, timeline in enumerate(timelines)}).axes[0])


def test_timelines_stand_under_each_other_on_one_scale():
    figure = data_parallel.steps({"Bucketed": AFTER, "Overlapped": DURING})
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["Bucketed", "Overlapped"]
    assert axes.get_xlabel() == "time (ms)"
    assert axes.get_xlim()[1] >= 90
    expected = [(30, 60, 0), (60, 90, 0), (20, 50, 1), (50, 65, 1)]
    for (left, right, top, _), wanted in zip(boxes(axes, COMMUNICATION), expected, strict=True):
        assert (left, right, round(top)) == pytest.approx(wanted, abs=0.5)


def test_the_exposed_time_is_written_and_lies_where_nothing_computes():
    figure = data_parallel.steps({"Bucketed": AFTER, "Overlapped": DURING, "alone": Timeline((compute(0, 0.01),))})
    assert texts(figure) == ["|—| 60 ms exposed", "|—| 35 ms exposed", "nothing exposed"]
    lines = [(*line.get_xdata(), round(line.get_ydata()[0])) for line in figure.axes[0].lines]
    for found, wanted in zip(lines, [(30, 60, 0), (60, 90, 0), (30, 50, 1), (50, 65, 1)], strict=True):
        assert found == pytest.approx(wanted, rel=0.01)


def test_bars_bear_their_name_their_number_or_their_size():
    narrow = Timeline((communication(0, 0.08), communication(0.08, 0.09)))
    assert names(AFTER, narrow) == ["all_reduce 0", "all_reduce 1", "all_reduce 0", "1"]
    assert names(Timeline((communication(0, 1, "bucket 7"), communication(1, 2, "loss")))) == ["bucket 7", "loss"]
    recorded = [communication(k, k + 1, f"all_reduce #{k + 5} of 2,000,000 bytes") for k in range(2)]
    assert names(Timeline(tuple(recorded))) == ["#5, 2 MB", "#6, 2 MB"]
    tiny = [communication(k, k + 0.001) for k in range(9)]
    assert names(Timeline(tuple(tiny))) == []


def test_the_axis_reaches_as_far_as_it_is_told_and_another_rank_may_be_shown():
    figure = data_parallel.steps({"Bucketed": AFTER}, rank=1, until=0.5)
    assert figure.axes[0].get_xlim()[1] == pytest.approx(500)
    assert texts(figure) == ["nothing exposed"]


@pytest.mark.parametrize(("timelines", "rank"), [({}, 0), ({"a": AFTER, "b": DURING}, 1), ({"a": Timeline(())}, 0)])
def test_a_rank_that_a_timeline_has_not_is_refused_in_words(timelines, rank):
    with pytest.raises(ValueError, match=rf"^rank={rank} and timelines of ranks .*: give a Timeline or more, and a rank"):
        data_parallel.steps(timelines, rank)
