"""Exercise 02: the solution gets full marks, nothing gets none, and every plausible wrong answer gets its own hint."""

import pytest

from manyranks.grade.old.data_parallel.task import GradientTask
from tests.grading import zoo_tests
from tests.grading.exercise import Exercise
from tests.grading.zoo import average, cut, data_parallel_ready, forgotten, in_buckets, no_sync, overlapped, replicate, wrapped
from tests.grading.zoo_tests import assert_full_marks, assert_no_marks

FILES = (replicate, average, cut, in_buckets, overlapped, wrapped, no_sync, forgotten, data_parallel_ready)
ZOO = [answer for file in FILES for answer in file.ZOO]
ANSWERS = {  # task -> what the notebook calls its answer
    "replicate": "replicate",
    "average": "average",
    "cut": "cut",
    "average_in_buckets": "average_in_buckets",
    "Overlapped": "Overlapped",
    "no_sync": "Overlapped",
}
EXERCISE = Exercise("02_data_parallel", classes=("Overlapped", "no_sync"))


@pytest.mark.parametrize("task", ANSWERS)
def test_the_solution_gets_full_marks(task):
    assert_full_marks(EXERCISE.check(task, EXERCISE.definitions("solutions")[ANSWERS[task]]))


@pytest.mark.parametrize("task", ANSWERS)
def test_the_untouched_release_gets_none(task):
    assert_no_marks(EXERCISE.check(task, EXERCISE.definitions("exercises")[ANSWERS[task]]))


@pytest.mark.parametrize("missing", ["replicate", "cut"])
def test_an_answer_that_calls_an_unwritten_one_is_told_so(missing):
    written = {"replicate", "cut", "Overlapped"} - {missing}
    report = EXERCISE.check("Overlapped", EXERCISE.definitions("solutions", written)["Overlapped"])
    assert_no_marks(report, f"{missing} is not written yet")
    assert f"this answer calls {missing}: write that one first" in repr(report)


def test_a_class_without_no_sync_gets_the_points_of_the_task_before():
    class Overlapped(EXERCISE.definitions("solutions")["Overlapped"]):
        def no_sync(self):
            raise NotImplementedError  # your code here

    assert EXERCISE.check("Overlapped", Overlapped).points == 6
    assert "✗ not written yet" in repr(EXERCISE.check("no_sync", Overlapped))


report_of = zoo_tests.reports(EXERCISE, GradientTask, ["no_sync"])
test_a_wrong_answer_gets_its_own_hint = zoo_tests.own_hints(ZOO)
test_each_task_has_its_wrong_answers = zoo_tests.enough(ZOO, ANSWERS)
