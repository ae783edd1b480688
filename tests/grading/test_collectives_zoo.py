"""Exercise 01: the solution gets full marks, nothing gets none, and every plausible wrong answer gets its own hint."""

import nbformat
import pytest

from manyranks import grade
from tests.conftest import ROOT
from tests.grading.zoo import adding, moving

ZOO = moving.ZOO + adding.ZOO
TASKS = ["tree_broadcast", "ring_all_gather", "ring_reduce_scatter", "ring_all_reduce", "pairwise_all_to_all"]
EXERCISE = "01_collectives/01_collectives.ipynb"


def functions(folder: str) -> dict:
    """What the cells of the exercise define, without its checks."""
    names = {"__name__": "__main__"}
    for cell in nbformat.read(ROOT / folder / EXERCISE, 4).cells:
        if cell.cell_type == "code" and not cell.metadata.nbgrader.grade:
            exec(cell.source, names)
    return names


def check(task: str, function) -> grade.Report:
    return getattr(grade.collectives, task)(function)


@pytest.mark.parametrize("task", TASKS)
def test_the_solution_gets_full_marks(task):
    report = check(task, functions("solutions")[task])
    assert report.passed, report
    assert report.points == report.out_of


@pytest.mark.parametrize("task", TASKS)
def test_the_untouched_release_gets_none(task):
    report = check(task, functions("exercises")[task])
    assert (report.points, report.passed) == (0, False)
    assert "not written yet" in repr(report)


@pytest.mark.parametrize("answer", ZOO, ids=[answer.function.__name__ for answer in ZOO])
def test_a_wrong_answer_gets_its_own_hint(answer):
    report = check(answer.task, answer.function)
    assert answer.says in repr(report), report
    assert not report.passed
    assert report.points < report.out_of * (1 if answer.right_values else 0.5)
    values = next((line.ok for line in report.lines if "values" in line.what), None)
    assert values is True or not answer.right_values


@pytest.mark.parametrize("task", TASKS)
def test_each_task_has_at_least_six_wrong_answers(task):
    assert sum(answer.task == task for answer in ZOO) >= 6
