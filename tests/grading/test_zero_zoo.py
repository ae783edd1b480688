"""Exercise 03: the solution gets full marks, nothing gets none, and every plausible wrong answer gets its own hint."""

import functools
import inspect

import pytest

from manyranks.grade import Report
from manyranks.grade.zero import driver
from manyranks.grade.zero.task import ZeroTask
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
from tests.grading.zoo_tests import (
    assert_enough,
    assert_full_marks,
    assert_no_marks,
    assert_own_hint,
    each_right,
    each_wrong,
    named,
)

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
EXERCISE = Exercise("03_zero")


@pytest.mark.parametrize("task", TASKS)
def test_the_solution_gets_full_marks(task):
    assert_full_marks(EXERCISE.check(task, EXERCISE.definitions("solutions")[task]), TASKS[task])


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


@pytest.fixture
def report_of(shared_ranks, monkeypatch):
    """What a check says of a wrong answer, on three ranks: the solution has shown that all sizes are run."""
    monkeypatch.setattr(ZeroTask, "sizes", (3,))
    return checked_once


@functools.cache
def checked_once(answer) -> Report:
    return EXERCISE.check(answer.task, answer.function)


@each_wrong(ZOO)
def test_a_wrong_answer_gets_its_own_hint(answer, report_of):
    assert_own_hint(report_of(answer), answer)


@pytest.mark.parametrize("missed", MISSED)
def test_who_misses_the_idea_of_a_task_gets_a_third_at_most(missed, report_of):
    report = report_of(named(ZOO, *missed))
    assert report.points <= report.out_of / 3, report


@pytest.mark.parametrize("mistake", FIVE)
def test_the_five_mistakes_that_the_exercise_is_about(mistake, report_of):
    name, words = FIVE[mistake]
    assert words in repr(report_of(named(ZOO, name)))


@each_right(zero_alike.ANSWERS)
def test_other_right_answers_get_full_marks(task, answer, shared_ranks, monkeypatch):
    monkeypatch.setattr(ZeroTask, "sizes", (3,))
    assert_full_marks(EXERCISE.check(task, answer))


class NeverWaits(zero_right.RightUnit):
    def wait(self):
        pass


def test_a_unit_that_never_waits_is_never_right(monkeypatch):
    """What it computes with is chance: it may also die."""
    monkeypatch.setattr(ZeroTask, "sizes", (3,))
    report = EXERCISE.check("Unit", NeverWaits)
    assert not report.passed
    assert "wait" in repr(report)


@pytest.mark.parametrize("task", TASKS)
def test_each_task_has_its_wrong_answers(task):
    assert_enough(ZOO, task)
