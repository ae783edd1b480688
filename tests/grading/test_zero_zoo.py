"""Exercise 03: the solution gets full marks, nothing gets none, and every plausible wrong answer gets its own hint."""

import inspect

import pytest

from manyranks.grade.zero import driver
from manyranks.grade.zero.task import ZeroTask
from tests.grading import zoo_tests
from tests.grading.exercise import Exercise
from tests.grading.zoo import (
    zero_alike,
    zero_own,
    zero_pieces,
    zero_prefetch,
    zero_ready,
    zero_right,
    zero_stage1,
    zero_stage1_held,
    zero_stage2,
    zero_unit,
    zero_unit_calls,
)
from tests.grading.zoo_tests import assert_full_marks, assert_no_marks

FILES = (
    zero_pieces,
    zero_stage1,
    zero_stage1_held,
    zero_stage2,
    zero_unit,
    zero_unit_calls,
    zero_prefetch,
    zero_ready,
    zero_own,
)
ZOO = [answer for file in FILES for answer in file.ZOO]
TASKS = {"shard": 2, "gather": 2, "Stage1": 5, "Stage2": 4, "Unit": 4, "Prefetch": 3}
FIVE = {  # that the exercise is about -> words of the report on those answers
    "shards nothing": ("ShardsNothing", "✗ holds optimizer states of its shards only"),
    "a shard that never trains": ("TrainsACopy", "The optimizer has to have the very tensors that you gather from"),
    "averaged twice": ("AveragesTwice", "that is divided by N twice"),
    "stale parameters after the gather": ("GathersBeforeTheStep", "the parameters are one step behind"),
    "full parameters kept": ("NeverFrees", "✗ keeps nothing whole that is not needed"),
}
MISSED = [
    ("Stage1", "ShardsNothing"),
    ("Stage1", "SendsAsItShouldAndShardsNothing"),
    ("Stage2", "ReducesAfterBackwardOnly"),
    ("Unit", "NeverFrees"),
    ("Prefetch", "WhatWasGiven"),
    ("Prefetch", "OneAtATime"),
]
EXERCISE = Exercise("03_zero", classes=("Stage1", "Stage2", "Unit", "Prefetch"))


test_the_solution_gets_full_marks = zoo_tests.solution(EXERCISE, TASKS)


@pytest.mark.parametrize("task", TASKS)
def test_the_untouched_release_gets_none(task):
    assert_no_marks(EXERCISE.check(task, EXERCISE.definitions("exercises")[task]))


@pytest.mark.parametrize(
    ("task", "missing"), [("Stage1", "shard"), ("Stage1", "gather"), ("Stage2", "shard"), ("Unit", "shard")]
)
def test_an_answer_that_calls_an_unwritten_one_is_told_so(task, missing):
    written = {"shard", "gather", "Stage1", "Stage2", "Unit"} - {missing}
    report = EXERCISE.check(task, EXERCISE.definitions("solutions", written)[task])
    assert_no_marks(report, f"{missing} is not written yet")


def test_prefetch_does_not_depend_on_the_other_tasks(shared_ranks):
    assert_full_marks(
        EXERCISE.check("Prefetch", EXERCISE.definitions("solutions", {"Prefetch"})["Prefetch"]), TASKS["Prefetch"]
    )


def test_the_notebook_shows_the_driver_that_checks_use():
    for kind in (driver.Sharded, driver.OneAtATime):
        assert EXERCISE.source("exercises", kind.__name__) == inspect.getsource(kind).strip()


report_of = zoo_tests.reports(EXERCISE, ZeroTask, TASKS)
test_a_wrong_answer_gets_its_own_hint = zoo_tests.own_hints(ZOO)
test_who_misses_the_idea_of_a_task_gets_a_third_at_most = zoo_tests.a_third_at_most(ZOO, MISSED)
test_the_five_mistakes_that_the_exercise_is_about = zoo_tests.mistakes(ZOO, FIVE)


test_other_right_answers_get_full_marks = zoo_tests.full_marks(EXERCISE, zero_alike.ANSWERS, ZeroTask)


class NeverWaits(zero_right.RightUnit):
    def wait(self):
        pass


def test_a_unit_that_never_waits_is_never_right(monkeypatch):
    """What it computes with is chance: it may also die."""
    monkeypatch.setattr(ZeroTask, "sizes", (3,))
    report = EXERCISE.check("Unit", NeverWaits)
    assert not report.passed
    assert "wait" in repr(report)


test_each_task_has_its_wrong_answers = zoo_tests.enough(ZOO, TASKS)
