"""Exercise 02: the solution gets full marks, nothing gets none, and every plausible wrong answer gets its own hint."""

import re

import pytest

from manyranks import grade
from manyranks.grade.data_parallel.task import GradientTask
from tests.grading.exercise import Exercise
from tests.grading.zoo import average, cut, forgotten, in_buckets, no_sync, overlapped, replicate, wrapped

ZOO = replicate.ZOO + average.ZOO + cut.ZOO + in_buckets.ZOO + overlapped.ZOO + wrapped.ZOO + no_sync.ZOO + forgotten.ZOO
ANSWERS = {  # task -> what the notebook calls its answer
    "replicate": "replicate",
    "average": "average",
    "cut": "cut",
    "average_in_buckets": "average_in_buckets",
    "Overlapped": "Overlapped",
    "no_sync": "Overlapped",
}
EXERCISE = Exercise("02_data_parallel")


def check(task: str, answer) -> grade.Report:
    return getattr(grade.data_parallel, task.lower())(answer)


@pytest.mark.parametrize("task", ANSWERS)
def test_the_solution_gets_full_marks(task):
    report = check(task, EXERCISE.definitions("solutions")[ANSWERS[task]])
    assert report.passed, report
    assert report.points == report.out_of


@pytest.mark.parametrize("task", ANSWERS)
def test_the_untouched_release_gets_none(task):
    report = check(task, EXERCISE.definitions("exercises")[ANSWERS[task]])
    assert (report.points, report.passed) == (0, False)
    assert "not written yet" in repr(report)


@pytest.mark.parametrize("missing", ["replicate", "cut"])
def test_an_answer_that_calls_an_unwritten_one_is_told_so(missing):
    written = {"replicate", "cut", "Overlapped"} - {missing}
    report = check("Overlapped", EXERCISE.definitions("solutions", written)["Overlapped"])
    assert (report.points, report.passed) == (0, False)
    assert f"{missing} is not written yet" in repr(report)
    assert f"this answer calls {missing}: write that one first" in repr(report)


def test_a_class_without_no_sync_gets_the_points_of_the_task_before():
    class Overlapped(EXERCISE.definitions("solutions")["Overlapped"]):
        def no_sync(self):
            raise NotImplementedError  # your code here

    assert check("Overlapped", Overlapped).points == 6
    assert "✗ not written yet" in repr(check("no_sync", Overlapped))


@pytest.mark.parametrize("answer", ZOO, ids=[answer.function.__name__ for answer in ZOO])
def test_a_wrong_answer_gets_its_own_hint(answer, shared_ranks, monkeypatch):
    monkeypatch.setattr(GradientTask, "sizes", (3,))  # the solution has shown that all sizes are run
    report = check(answer.task, answer.function)
    text = repr(report).replace("\n    hint:", "; hint:")
    assert answer.says in text, report
    assert not report.passed
    assert report.points < report.out_of * (1 if answer.right_values else 0.5)
    assert not answer.right_values or report.lines[1].ok
    assert not re.search(r"\b(wrapper|averages|buckets|cutting|toy|scripts|watch|module)\.py|<string>", text), report


@pytest.mark.parametrize("task", ANSWERS)
def test_each_task_has_its_wrong_answers(task):
    assert sum(answer.task == task for answer in ZOO) >= 6
