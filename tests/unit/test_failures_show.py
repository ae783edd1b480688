"""Chapter 12's drawings and explorer: what they draw is what they are given."""

import re

import numpy as np
import pytest

from manyranks import show
from manyranks.show.failures import Intervals
from manyranks.theory import failures
from manyranks.timeline import Failure, survive

DEFAULTS = {"gpus": 16384, "hours": 50000, "stall": 30, "write": 0, "restart": 300, "interval": 0, "mfu": 0.4, "repair": 24}


def test_a_history_s_bars_are_as_long_as_its_periods():
    runs = {"one": survive([Failure(50), Failure(90)], 100, 20, 2, 5, spares=1, repair=60), "other": survive([], 100, 20, 2, 5)}
    (axes,) = show.failures.history(runs).axes
    for patch in axes.patches:
        x = patch.get_path().vertices[:, 0].reshape(-1, 5)  # four corners and the first one again
        assert np.ptp(x[:, :4], axis=1).sum() == pytest.approx(sum(run.of(patch.get_gid()) for run in runs.values()))
    assert {patch.get_gid() for patch in axes.patches} == {"work", "lost", "save", "restart", "wait"}
    assert [len(line.get_xdata()) for line in axes.lines if line.get_gid() == "failures"] == [2, 0]
    assert [text.get_text() for text in axes.texts] == [f"{run.goodput:.0%} kept" for run in runs.values()]


def test_intervals_are_marked_where_the_theory_has_them():
    (axes,) = show.failures.intervals(60, 300, 11_000).axes
    marks = {line.get_gid(): line.get_xydata()[0] for line in axes.lines if line.get_gid() in ("best", "Daly", "Young")}
    assert marks["Young"] == pytest.approx([at := failures.young(60, 11_000), 100 * failures.goodput(at, 60, 300, 11_000)])
    assert marks["best"][1] == pytest.approx(max(axes.lines[0].get_ydata()), rel=1e-4)


def test_the_steps_since_the_last_checkpoint_are_drawn_as_lost_and_again():
    names = [patch.get_gid() or "" for patch in show.failures.lost().axes[0].patches]
    assert [name for name in names if name.startswith("lost")] == ["lost 9", "lost 10"]
    assert [name for name in names if name.startswith("again")][:2] == ["again 9", "again 10"]


def test_all_ranks_but_the_dead_one_wait_for_it():
    names = [patch.get_gid() or "" for patch in show.failures.standstill().axes[0].patches]
    assert [name for name in names if "waits" in name] == [f"rank {rank} waits for rank 2" for rank in (0, 1, 3)]


def test_the_slowest_rank_is_named_also_where_another_was_slower_once():
    seconds = np.ones((300, 20))
    seconds[7, 3], seconds[211] = 9.0, 1.1
    assert show.failures.heat(seconds).axes[0].texts[0].get_text() == "rank 211: 1.1 s per step, +10%"
    with pytest.raises(ValueError, match=r"shape \(3,\): give a row per rank"):
        show.failures.heat([1.0, 2.0, 3.0])


def test_llama_3_s_causes_are_all_there():
    (axes,) = show.failures.interruptions().axes
    assert sum(patch.get_width() for patch in axes.patches) == 419
    assert "GPU: 268 of 419, 64%" in [text.get_text() for text in axes.texts]


def test_the_explorer_says_what_the_theory_says():
    plot = Intervals()
    said = plot.update(**DEFAULTS)
    mtbf = failures.job_mtbf(50000 * 3600, 16384)
    share = failures.goodput(failures.young(30, mtbf), 30, 300, mtbf)
    assert said.numbers["goodput"] == f"{100 * share:.0f}%"
    assert said.numbers["effective MFU"] == f"{40 * share:.0f}%"
    assert said.numbers["54 days of training"] == f"{54 / share - 54:.3g} days more"
    assert said.numbers["spare nodes"] == f"{failures.spares(2048, 50000 / 8, 24)} for 2,048"
    assert next(plot.parts()).says == f"this, training kept: {100 * share:.0f}%"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"interval": 10}, r"saves, .*; Young's interval of 13.5 min gives a goodput of 90%"),
        ({"interval": 14400}, r"training lost, .*; Young's interval of 13.5 min gives"),
        ({"stall": 300}, "training lost, 12% of the time; the interval is already the best"),
        ({"restart": 3600}, "restarts, 28% of the time: find failures sooner"),
        ({"stall": 0.1, "write": 1800, "restart": 10}, "training lost, .*: a checkpoint doesn't count until it's written"),
        ({"write": 60, "interval": 30}, "Not possible: write = 60, interval = 30: a write must end"),
        ({"gpus": 131072, "hours": 1}, "54 days of training never ends; .* spare nodes more than its 16,384"),
    ],
)
@pytest.mark.usefixtures("undrawn")
def test_the_explorer_says_what_costs_most_and_what_cannot_be(change, says):
    assert re.search(says, show.failures.explorer().set(**change).status)
