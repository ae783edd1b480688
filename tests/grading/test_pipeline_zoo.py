"""Exercise 05: the solution gets full marks, nothing gets none, and every plausible wrong answer gets its own hint."""

import functools

import pytest

from manyranks import grade
from manyranks.grade import trial
from manyranks.grade.pipeline.training import Training
from tests.grading import zoo_tests
from tests.grading.exercise import Exercise
from tests.grading.zoo import (
    pipeline_alike,
    pipeline_capped,
    pipeline_halves,
    pipeline_messages,
    pipeline_step,
    pipeline_tables,
)

FILES = (pipeline_tables, pipeline_capped, pipeline_halves, pipeline_step, pipeline_messages)
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
]
MISSED = [
    ("one_f_one_b", "gpipe"),
    ("one_f_one_b", "one_at_a_time"),
    ("interleaved", "takes_each_through_all_stages"),
    ("Split", "DoesWWithI"),
    ("under_a_cap", "one_f_one_b"),
    ("train_step", "BlocksInSend"),
]
EXERCISE = Exercise("05_pipeline")


def check(task: str, answer) -> grade.Report:
    return getattr(grade.pipeline, task.lower())(answer)


def made(task: str, answer):
    """A function, of a class that is called like one."""
    return answer() if isinstance(answer, type) and task != "Split" else answer


@pytest.mark.parametrize("task", TASKS)
def test_the_solution_gets_full_marks(task):
    zoo_tests.assert_full_marks(check(task, EXERCISE.definitions("solutions")[task]), TASKS[task])


@pytest.mark.parametrize("task", TASKS)
def test_the_untouched_release_gets_none(task, shared_ranks):
    zoo_tests.assert_no_marks(check(task, EXERCISE.definitions("exercises")[task]))


@pytest.mark.parametrize("task", TASKS)
def test_no_task_depends_on_another(task, shared_ranks):
    zoo_tests.assert_full_marks(check(task, EXERCISE.definitions("solutions", {task})[task]), TASKS[task])


@pytest.fixture
def report_of(shared_ranks, monkeypatch):
    """What a check says of a wrong answer; steps on three ranks: the solution has shown that all sizes are run."""
    monkeypatch.setattr(Training, "sizes", (3,))

    def report(answer) -> grade.Report:
        monkeypatch.setattr(trial, "_RUN_SECONDS", getattr(answer.function, "seconds", trial._RUN_SECONDS))
        return checked_once(answer)

    return report


@functools.cache
def checked_once(answer) -> grade.Report:
    return check(answer.task, made(answer.task, answer.function))


@zoo_tests.each_wrong(ZOO)
def test_a_wrong_answer_gets_its_own_hint(answer, report_of):
    zoo_tests.assert_own_hint(report_of(answer), answer)


@pytest.mark.parametrize("missed", MISSED)
def test_who_misses_the_idea_of_a_task_gets_a_third_at_most(missed, report_of):
    report = report_of(zoo_tests.named(ZOO, *missed))
    assert report.points <= report.out_of / 3, report


@pytest.mark.parametrize("slip", SLIPS)
def test_a_slip_leaves_more_than_half_of_the_points(slip, report_of):
    report = report_of(zoo_tests.named(ZOO, *slip))
    assert report.out_of / 2 <= report.points < report.out_of, report


@pytest.mark.parametrize("mistake", FIVE)
def test_the_five_mistakes_that_the_exercise_is_about(mistake, report_of):
    name, words = FIVE[mistake]
    assert words in repr(report_of(zoo_tests.named(ZOO, name)))


@zoo_tests.each_right(pipeline_alike.ANSWERS)
def test_other_right_answers_get_full_marks(task, answer, shared_ranks):
    zoo_tests.assert_full_marks(check(task, made(task, answer)))


@pytest.mark.parametrize("task", TASKS)
def test_each_task_has_its_wrong_answers(task):
    zoo_tests.assert_enough(ZOO, task)
