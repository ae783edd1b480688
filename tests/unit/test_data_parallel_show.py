"""Chapter 02's explorer shows the theory's figures, and every setting is shown or refused in words."""

import itertools

import pytest

from manyranks.show import data_parallel
from manyranks.show.data_parallel import RANKS, Scaling, explorer
from manyranks.theory import Plan, clusters, memory, models, step
from manyranks.timeline import Timeline
from manyranks.timeline.spans import COMMUNICATION, COMPUTE, Span
from tests.drawn import boxes, texts, widths, words
from tests.said import SAID

DEFAULT = {"model": "gpt2-xl", "cluster": "h100-dgx", "dp": 64, "microbatch": 8, "overlap": True, "critical": 2**20}


def drawn(**change) -> Scaling:
    plot = Scaling()
    plot.update(**DEFAULT | change)
    return plot


def test_the_speedup_that_it_opens_with_can_be_redone_by_hand():
    # 64 · 99.7 % as many tokens a second, of which the loss takes (1 + 1/2)/(1 + 1/128) as many.
    assert f"training speedup {64 * 0.997 / (1.5 / (1 + 1 / 128)):.1f} ×" in SAID["data_parallel"][""]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model": "llama3-8b"}, "Does not fit. Limit: memory. Every GPU holds the whole model"),
        ({"cluster": "v100-dgx"}, "Limit: memory. The model states (24.9 GB) would fit alone, so lower the micro-batch"),
        ({"dp": 1024}, "; tokens/s 1,020 × one GPU"),
        ({"dp": 512}, "the batch is 4 × the critical batch, so more GPUs save little"),
        ({"overlap": False, "microbatch": 1}, "of the step is spent waiting for gradients"),
        ({"microbatch": 1}, "Limit: 6% of the step is spent waiting for gradients"),
        (
            {"dp": 1},
            "8.19 k; same loss, twice the GPUs 49.6% less time. Limit: compute: one GPU sends nothing",
        ),
    ],
)
@pytest.mark.usefixtures("undrawn")
def test_the_sentence_names_the_limit(change, said):
    assert said in explorer().set(**change).status


def test_a_step_s_bars_are_the_theory_s_estimate():
    for row, overlap in zip(widths(drawn().figure.axes[0]), (True, False), strict=True):
        plan = Plan(dp=64, seq=1024, batch=512, microbatch=8, zero=0, recompute="none", overlap=overlap)
        time = step.estimate(models["gpt2-xl"], plan, clusters["h100-dgx"])
        expected = [part for part in (time.compute, time.data, time.optimizer) if part]
        assert [w / sum(row) for w in row] == pytest.approx([s / time.seconds for s in expected])


def test_memory_is_what_every_rank_holds_whatever_their_number():
    (one,), (many,) = (widths(drawn(**change).figure.axes[1]) for change in ({}, {"dp": 1024}))
    assert many == one
    plan = Plan(dp=64, seq=1024, batch=512, microbatch=8, zero=0, recompute="none")
    shape = models["gpt2-xl"]
    states, peak = memory.model_states(shape, plan), memory.peak(shape, plan)
    expected = [part for part in (*states[:3], peak.activations, peak.buffers) if part]
    assert [share / sum(one) for share in one] == pytest.approx([bytes / sum(expected) for bytes in expected])


def test_mfu_falls_from_one_gpu_on_and_is_never_worse_with_overlap():
    ways = [
        [cost.mfu for cost in Scaling().along("dp", RANKS, **DEFAULT | {"overlap": overlap})[0]] for overlap in (True, False)
    ]
    for values in ways:
        assert all(a >= b - 1e-9 for a, b in itertools.pairwise(values))
    assert all(a >= b for a, b in zip(*ways, strict=True))


# Steps -----------------------------------------------------------------------------------------------------------------


def communication(started: float, finished: float, name: str = "all_reduce", rank: int = 0) -> Span:
    return Span(rank, COMMUNICATION, name, started, finished)


def compute(started: float, finished: float, rank: int = 0) -> Span:
    return Span(rank, COMPUTE, "compute", started, finished)


# Two all-reduces after 30 ms of computing, and two from 20 ms on.
AFTER = Timeline((compute(0, 0.03), communication(0.03, 0.06), communication(0.06, 0.09), compute(0, 0.09, 1)))
DURING = Timeline((compute(0, 0.03), communication(0.02, 0.05), communication(0.05, 0.065), compute(0.065, 0.07)))


def names(*timelines: Timeline) -> list[str]:
    return words(data_parallel.steps({str(number): timeline for number, timeline in enumerate(timelines)}).axes[0], "names")


def scale(figure, until: float) -> tuple[float, float]:
    """Pixels of a second, and of the row of each text."""
    (axes,) = figure.axes
    return axes.get_xlim()[1] / until, axes.get_ylim()[0] / len(axes.texts)


def test_timelines_stand_under_each_other_on_one_scale():
    figure = data_parallel.steps({"Bucketed": AFTER, "Overlapped": DURING})
    (axes,) = figure.axes
    assert words(axes, "ranks") == ["Bucketed", "Overlapped"]
    assert axes.get_xlabel() == "time (ms)"
    assert words(axes, "numbers") == ["0", "20", "40", "60", "80", "100"]
    second, row = scale(figure, 1.3 * 0.09)
    expected = [(0.03, 0.06, 0), (0.06, 0.09, 0), (0.02, 0.05, 1), (0.05, 0.065, 1)]
    for (left, right, top, _), (started, finished, which) in zip(boxes(axes, COMMUNICATION), expected, strict=True):
        assert (left, right) == pytest.approx((started * second, finished * second), abs=1.51)
        assert which + 0.5 < top / row < which + 1


def test_the_exposed_time_is_written_and_lies_where_nothing_computes():
    figure = data_parallel.steps({"Bucketed": AFTER, "Overlapped": DURING, "alone": Timeline((compute(0, 0.01),))})
    assert texts(figure) == ["|—| 60 ms exposed", "|—| 35 ms exposed", "nothing exposed"]
    second, row = scale(figure, 1.3 * 0.09)
    lines = [(*line.get_xdata() / second, line.get_ydata()[0] // row) for line in figure.axes[0].lines]
    for found, wanted in zip(lines, [(0.03, 0.06, 0), (0.06, 0.09, 0), (0.03, 0.05, 1), (0.05, 0.065, 1)], strict=True):
        assert found == pytest.approx(wanted, rel=0.01)


def test_bars_bear_their_name_their_number_or_their_size():
    narrow = Timeline((communication(0, 0.08), communication(0.08, 0.085)))
    assert names(AFTER, narrow) == ["all_reduce 0", "all_reduce 1", "all_reduce 0", "1"]
    assert names(Timeline((communication(0, 1, "bucket 7"), communication(1, 2, "loss")))) == ["bucket 7", "loss"]
    recorded = [communication(k, k + 1, f"all_reduce #{k + 5} of 2,000,000 bytes") for k in range(2)]
    assert names(Timeline(tuple(recorded))) == ["#5, 2 MB", "#6, 2 MB"]
    tiny = [communication(k, k + 0.001) for k in range(9)]
    assert names(Timeline(tuple(tiny))) == []


@pytest.mark.parametrize("timelines", [{}, {"a": AFTER, "b": Timeline((compute(0, 1, 1),))}, {"a": Timeline(())}])
def test_a_timeline_without_rank_0_is_refused_in_words(timelines):
    with pytest.raises(ValueError, match=r"^timelines of ranks .*: give a Timeline or more, all with rank 0"):
        data_parallel.steps(timelines)
