"""Failures: the replay of a run by its own rules, and the formulas against the replay, brute force and published runs."""

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manyranks.theory import failures, published
from manyranks.theory.failures import best_interval, daly, goodput, lost_work, young
from manyranks.theory.published.failures import LLAMA3_GPU_MTBF, interruptions, runs
from manyranks.timeline import Failure, Period, poisson, survive

HOUR, DAY = 3600, 86400


def run(*seconds: float, **change):
    """100 s of training, saved every 30 s for 2 s, restarted in 5 s, under failures at these seconds."""
    setting = {"work": 100, "interval": 30, "stall": 2, "restart": 5} | change
    return survive([Failure(each) for each in seconds], **setting)


def test_a_failure_throws_away_what_was_done_since_the_last_checkpoint():
    assert run(50).periods == (
        Period("work", 0, 30),
        Period("save", 30, 32),
        Period("lost", 32, 50),
        Period("restart", 50, 55),
        Period("work", 55, 85),
        Period("save", 85, 87),
        Period("work", 87, 117),
        Period("save", 117, 119),
        Period("work", 119, 129),  # and no save at the end
    )


def test_a_checkpoint_that_is_still_being_written_is_of_no_use():
    assert run(50, write=18).of("lost") == 18  # it's there just in time
    assert run(50, write=19).of("lost") == 30 + 18
    assert run(31).of("lost") == 30  # nor is one that is half saved


def test_a_failure_during_a_restart_starts_it_again():
    assert run(10, 14).periods[:3] == (Period("lost", 0, 10), Period("restart", 10, 14), Period("restart", 14, 19))
    assert run(10, 15).of("restart") == 10  # and one just after it takes another


def test_without_a_spare_the_job_waits_for_a_repair():
    kinds = [period.kind for period in run(10, 20, spares=1, repair=50).periods[:5]]
    assert kinds == ["lost", "restart", "lost", "wait", "restart"]
    assert run(10, 20, spares=1, repair=50).of("wait") == 60 - 20
    assert run(10, 20, spares=0, repair=50).of("wait") == 70 - 10  # the second one failed while the job was waiting
    assert run(10, 20, spares=2, repair=50) == run(10, 20)
    assert run(10, 65, spares=1, repair=50).of("wait") == 0  # the first one is back


def test_failures_after_the_end_hit_nothing():
    assert run(50, 1000).failures == (Failure(50),)
    assert run(106) == run()  # it ends in this moment


TRACES = st.lists(st.floats(0, 2000), max_size=40).map(sorted)
RUNS = st.fixed_dictionaries(
    {
        "work": st.floats(1, 500),
        "interval": st.floats(1, 200),
        "stall": st.floats(0, 30),
        "restart": st.floats(0, 50),
        "spares": st.none() | st.integers(0, 3),
        "repair": st.floats(0, 300),
        "write": st.floats(0, 1),
    }
)


@given(TRACES, RUNS)
def test_periods_fill_the_time_and_no_work_is_missing(trace, setting):
    history = run(*trace, **setting)
    assert history.periods[0].started == 0
    assert all(one.finished == other.started for one, other in pairwise(history.periods))
    assert all(period.finished > period.started for period in history.periods)
    assert history.of("work") == pytest.approx(setting["work"])
    assert history.goodput == pytest.approx(setting["work"] / history.seconds)
    assert history == run(*trace, **setting)


@given(TRACES, RUNS, st.floats(0.1, 50))
def test_a_failure_costs_at_most_an_interval_and_a_write(trace, setting, restart):
    history = run(*trace, **setting | {"restart": restart})
    runs = []  # of lost training, from one failure to the next
    for period in history.periods:
        if period.kind in ("restart", "wait"):
            runs.append(0.0)
        elif period.kind == "lost":
            runs = [*runs[:-1], (runs or [0.0])[-1] + period.finished - period.started]
    assert all(lost <= setting["interval"] + setting["write"] + 1e-6 for lost in runs)


@given(RUNS)
def test_without_failures_there_is_only_work_and_saves(setting):
    history = run(**setting)
    saves = math.ceil(setting["work"] / setting["interval"] - 1e-9) - 1
    assert history.seconds == pytest.approx(setting["work"] + saves * setting["stall"])
    assert {period.kind for period in history.periods} <= {"work", "save"}


def test_a_trace_is_exponential_and_the_same_seed_gives_the_same():
    trace = poisson(100, 1e6, seed=3, nodes=4)
    assert trace == poisson(100, 1e6, seed=3, nodes=4) != poisson(100, 1e6, seed=4, nodes=4)
    gaps = [other.seconds - one.seconds for one, other in pairwise(trace)]
    assert len(trace) == pytest.approx(1e4, rel=0.03)
    assert sum(gap > 100 for gap in gaps) / len(gaps) == pytest.approx(math.exp(-1), abs=0.01)
    assert {failure.node for failure in trace} == {0, 1, 2, 3}


# Formulas ----------------------------------------------------------------------------------------------------------------

SETTINGS = [  # interval, stall, restart, M, write
    (600, 20, 120, 3600, 0),
    (600, 20, 120, 3600, 300),
    (1000, 300, 0, 1500, 700),
    (100, 50, 200, 300, 100),
]


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_replay_s_goodput_losses_and_shares_of_its_time_are_those_of_the_formulas(setting):
    interval, stall, restart, mtbf, write = setting
    trace, work = poisson(mtbf, 20_000 * mtbf, seed=1), 2000 * mtbf
    history = survive(trace, work, interval, stall, restart, write)
    assert history.goodput == pytest.approx(goodput(*setting), rel=0.015)
    at_once = survive(trace, work, interval, stall, 0, write)  # where no failure hits a restart
    assert at_once.of("lost") / len(at_once.failures) == pytest.approx(lost_work(interval, stall, mtbf, write), rel=0.03)
    found = failures.shares(*setting)
    assert sum(found.values()) == pytest.approx(1)
    for kind, share in found.items():
        assert history.of(kind) / history.seconds == pytest.approx(share, rel=0.03, abs=1e-12), kind


@given(st.floats(1, 1000), st.floats(0, 1))
def test_a_failure_costs_half_an_interval_and_the_write_to_first_order(interval, share):
    write = share * interval
    assert lost_work(interval, 0, 1e6 * interval, write) == pytest.approx(interval / 2 + write, rel=1e-4)


@given(st.floats(1e-3, 10))
def test_the_best_interval_is_the_best(stall):
    best = best_interval(stall, 1)
    most = goodput(best, stall, 0.1, 1)
    assert all(goodput(best * factor, stall, 0.1, 1) < most for factor in (0.98, 1.02))


def test_young_and_daly_are_near_the_best_where_failures_are_rare():
    for stall, mtbf in ((60, 3 * HOUR), (1, DAY)):
        assert young(stall, mtbf) == pytest.approx(best_interval(stall, mtbf), rel=0.05)
        assert daly(stall, mtbf) == pytest.approx(best_interval(stall, mtbf), rel=1e-4)
    assert daly(100, 100) == pytest.approx(best_interval(100, 100), rel=0.02)
    assert daly(300, 100) == 100
    best = goodput(best_interval(60, 3 * HOUR), 60, 300, 3 * HOUR)
    assert goodput(young(60, 3 * HOUR), 60, 300, 3 * HOUR) > best - 0.0005  # the top is flat


def test_a_write_costs_as_much_as_a_restart_that_is_longer_by_it():
    assert goodput(600, 20, 100, 3600, write=50) == goodput(600, 20, 150, 3600)


def test_hopeless_settings_have_no_goodput_and_no_error():
    assert goodput(DAY, 60, 60, 1) == 0
    assert goodput(1e-3, 0, 0, 1e9) == pytest.approx(1)
    assert failures.shares(DAY, 60, 60, 1) == pytest.approx({"work": 0, "lost": 0, "save": 0, "restart": 1})


@settings(max_examples=30)
@given(st.integers(1, 3000))
def test_spares_are_enough_for_99_percent_of_the_time_and_one_fewer_is_not(nodes):
    mean = nodes * 24 / 5000
    found = failures.spares(nodes, 5000, 24)

    def share(most):
        return sum(math.exp(-mean) * mean**k / math.factorial(k) for k in range(most + 1))

    assert share(found) >= 0.99 - 1e-12
    assert found == 0 or share(found - 1) < 0.99 + 1e-12


def test_the_replay_waits_as_seldom_as_the_spares_say():
    nodes, node_mtbf, repair = 100, 1000 * HOUR, 24 * HOUR
    enough = failures.spares(nodes, node_mtbf, repair)
    trace = poisson(node_mtbf / nodes, 1e5 * HOUR, seed=2)
    waits = [survive(trace, 5e4 * HOUR, HOUR, 0, 0, 0, count, repair) for count in (enough, enough - 2)]
    shares = [history.of("wait") / history.seconds for history in waits]
    assert shares[0] < 0.01 < shares[1]


def test_a_run_s_mfu_is_a_step_s_times_the_goodput():
    assert failures.effective_mfu(0.4, 0.9) == pytest.approx(0.36)


# Published runs ----------------------------------------------------------------------------------------------------------


def test_llama_3_s_interruptions_add_up_and_all_shares_but_one_are_of_them():
    causes = interruptions()
    total = sum(cause.count for cause in causes)
    assert (len(causes), total) == (18, 419)
    wrong = [cause.component for cause in causes if abs(cause.count / total - cause.share) > 0.0005]
    assert wrong == ["Faulty GPU"]
    assert sum(cause.share for cause in causes if cause.category == "GPU") == pytest.approx(0.587)  # as the text says


def test_every_run_and_rate_names_its_source_and_who_was_interrupted_how_often():
    llama3 = runs()[0]
    assert int(llama3.unexpected) == sum(cause.count for cause in interruptions())
    assert failures.job_mtbf(LLAMA3_GPU_MTBF, 16384) == 54 * DAY / 419
    assert [run.name for run in runs() if run.effective] == ["Llama 3 405B", "MegaScale, a proprietary model", "ByteRobust"]
    seconds = [int(row["seconds"]) for row in published.rows("group_initialization")]
    assert seconds == [1047, 361, 5, 30]


def test_llama_3_could_do_more_than_90_percent_with_saves_of_seconds_and_restarts_of_minutes():
    mtbf = failures.job_mtbf(LLAMA3_GPU_MTBF, 16384)
    assert mtbf / HOUR == pytest.approx(3.09, abs=0.01)
    for stall, restart, write in ((10, 300, 60), (5, 600, 0), (30, 120, 0)):
        assert goodput(young(stall, mtbf), stall, restart, mtbf, write) > 0.9
    assert goodput(young(300, mtbf), 300, 600, mtbf) < 0.75  # had every save taken 5 minutes


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: run(50, 40), "a failure at 40 s after one at 50 s: sort the trace"),
        (lambda: run(-1), "a failure at -1 s after one at 0.0 s"),
        (lambda: run(work=0), "work=0: give a number above 0"),
        (lambda: run(interval=math.inf), "interval=inf"),
        (lambda: run(stall=-1), "stall=-1: give 0 or more"),
        (lambda: run(spares=-1), "spares=-1"),
        (lambda: run(write=31), "write=31, interval=30: a write must end before the next one begins"),
        (lambda: poisson(0, 1, 1), "mtbf=0"),
        (lambda: goodput(30, 2, 5, 100, write=31), "write=31, interval=30"),
        (lambda: goodput(30, 2, -5, 100), "restart=-5"),
        (lambda: lost_work(0, 2, 100), "interval=0"),
        (lambda: best_interval(0, 100), "stall=0: give a number above 0"),
        (lambda: failures.job_mtbf(1e8, 0), "units=0"),
        (lambda: failures.effective_mfu(40, 0.9), "mfu=40: give a share from 0 to 1"),
    ],
)
def test_what_cannot_be_is_refused(call, says):
    with pytest.raises(ValueError, match=says):
        call()
