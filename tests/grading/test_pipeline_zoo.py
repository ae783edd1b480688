"""Exercise 05: the solution gets full marks, nothing gets none, and every plausible wrong answer gets its own hint."""

import pytest
import torch

from manyranks.grade.pipeline import halves
from manyranks.grade.pipeline.training import Training
from manyranks.world import World
from manyranks.world.errors import RankHung
from tests.grading import zoo_tests
from tests.grading.exercise import Exercise
from tests.grading.zoo import (
    pipeline_alike,
    pipeline_capped,
    pipeline_gradients,
    pipeline_halves,
    pipeline_messages,
    pipeline_products,
    pipeline_step,
    pipeline_tables,
)
from tests.grading.zoo_tests import assert_full_marks, named

FILES = (
    pipeline_tables,
    pipeline_capped,
    pipeline_halves,
    pipeline_products,
    pipeline_step,
    pipeline_gradients,
    pipeline_messages,
)
ZOO = [answer for file in FILES for answer in file.ZOO]
TASKS = {"one_f_one_b": 4, "train_step": 7, "interleaved": 4, "Split": 4, "under_a_cap": 5}
FIVE = {  # that the exercise is about -> words of the report on those answers
    "1F1B with GPipe's memory": ("KeepsGraphs", "rank 0 holds 7 micro-batches; with this table it holds 3"),
    "right order, wrong warm-up": ("warms_up_too_long", "rank 0 holds 5 micro-batches; 1F1B holds 4"),
    "deadlocking sends": ("BlocksInSend", "a send ends only when the other side receives"),
    "weight gradient before input gradient": ("does_w_before_i", "W0 of stage 0 comes before I0 of stage 0, which it needs"),
    "loss divided twice": ("DividesTwice", "divided by m twice"),
}
SLIPS = [
    ("one_f_one_b", "forgets_that_m_may_be_small"),
    ("interleaved", "warms_up_as_if_messages_took_no_time"),
    ("interleaved", "warms_up_a_little_long"),
    ("Split", "DoesNothingWithoutI"),
    ("train_step", "OneShape"),
    ("under_a_cap", "is_zb_h1_at_most"),
    ("one_f_one_b", "fails_where_m_is_small"),
    ("Split", "NeedsABias"),
]
BELOW_P = ["raises_below_p", "is_not_written_below_p", "returns_none_below_p", "never_ends_below_p"]
DEADLOCKS = ["BlocksInSend", "WaitsForEachIsend", "ReceivesEverythingFirst"]
MISSED = [
    ("one_f_one_b", "gpipe"),
    ("one_f_one_b", "one_at_a_time"),
    ("interleaved", "takes_each_through_all_stages"),
    ("Split", "DoesWWithI"),
    ("under_a_cap", "one_f_one_b"),
    ("train_step", "BlocksInSend"),
]
EXERCISE = Exercise("05_pipeline", classes=("Split",))


test_the_solution_gets_full_marks = zoo_tests.solution(EXERCISE, TASKS)
test_the_untouched_release_gets_none = zoo_tests.untouched(EXERCISE, TASKS)
test_no_task_depends_on_another = zoo_tests.alone(EXERCISE, TASKS)
report_of = zoo_tests.reports(EXERCISE, Training, ["train_step"])
test_a_wrong_answer_gets_its_own_hint = zoo_tests.own_hints(ZOO)
test_who_misses_the_idea_of_a_task_gets_a_third_at_most = zoo_tests.a_third_at_most(ZOO, MISSED)
test_a_slip_leaves_more_than_half_of_the_points = zoo_tests.half_or_more(ZOO, SLIPS)


@pytest.mark.parametrize("name", BELOW_P)
def test_a_cap_below_p_costs_its_own_points_only(name, report_of):
    report = report_of(named(ZOO, name))
    assert report.points == 4.5, report
    assert [line.ok for line in report.lines] == [True] * 5 + [False], report


@pytest.mark.parametrize("name", DEADLOCKS)
def test_a_deadlock_with_one_table_leaves_the_other_tables_share(name, report_of):
    report = report_of(named(ZOO, name))
    assert report.points == pytest.approx(7 / 3, abs=0.01), report


def test_a_deadlock_leaves_that_share_on_worlds_of_all_sizes(shared_ranks):
    assert EXERCISE.check("train_step", named(ZOO, "BlocksInSend").function).points == pytest.approx(7 / 3, abs=0.01)


def test_a_table_that_all_ranks_return_too_late_is_judged_all_the_same(shared_ranks, monkeypatch):
    """As on a busy machine: the world gives up while the last answer is on its way."""
    measure, late = World.measure, []

    def measured(world, *arguments, **counts):
        result = measure(world, *arguments, **counts)
        if not late:
            late.append(world)
            raise RankHung("the run was not over after 4 s", dict.fromkeys(range(world.size), "had returned"))
        return result

    monkeypatch.setattr(World, "measure", measured)
    assert_full_marks(EXERCISE.check("interleaved", EXERCISE.definitions("solutions")["interleaved"]))
    assert late


def test_the_checks_leave_random_numbers_as_they_were(shared_ranks):
    before = torch.get_rng_state()
    halves.cases.cache_clear()
    EXERCISE.check("Split", named(ZOO, "ForgetsTheSlope").function)
    assert torch.equal(torch.get_rng_state(), before)


test_the_five_mistakes_that_the_exercise_is_about = zoo_tests.mistakes(ZOO, FIVE)
test_other_right_answers_get_full_marks = zoo_tests.full_marks(EXERCISE, pipeline_alike.ANSWERS, Training)
test_each_task_has_its_wrong_answers = zoo_tests.enough(ZOO, TASKS)
