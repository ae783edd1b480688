"""Exercise 01: the solution gets full marks, nothing gets none, and every plausible wrong answer gets its own hint."""

import pytest
import torch.distributed as dist

from manyranks import grade
from tests.grading.exercise import Exercise
from tests.grading.zoo import all_gather, all_reduce, all_to_all, broadcast, reduce_scatter

ZOO = broadcast.ZOO + all_gather.ZOO + reduce_scatter.ZOO + all_reduce.ZOO + all_to_all.ZOO
TASKS = ["tree_broadcast", "ring_all_gather", "ring_reduce_scatter", "ring_all_reduce", "pairwise_all_to_all"]
EXERCISE = Exercise("01_collectives")


def check(task: str, function) -> grade.Report:
    return getattr(grade.collectives, task)(function)


@pytest.mark.parametrize("task", TASKS)
def test_the_solution_gets_full_marks(task):
    report = check(task, EXERCISE.definitions("solutions")[task])
    assert report.passed, report
    assert report.points == report.out_of


@pytest.mark.parametrize(
    ("place", "says"),
    [
        ("end", "N times as many divisions as needed: divide the shard, between the two rings"),
        ("shard", "divides at the cheapest place: on 4 ranks with 250,007 elements, each rank divided its shard only"),
    ],
)
def test_an_all_reduce_is_told_where_it_divides_and_what_it_printed(place, says):
    answers = EXERCISE.definitions("solutions")

    def answer(x_E):
        print("place:", place)
        if place == "shard":
            return answers["ring_all_reduce"](x_E)
        return answers["ring_all_gather"](answers["ring_reduce_scatter"](x_E), len(x_E)) / dist.get_world_size()

    report = check("ring_all_reduce", answer)
    assert (report.passed, report.points) == (True, 4)
    assert says in repr(report), report
    assert f"what the ranks printed on 4 ranks with 250,007 elements:\n── rank 0 ──\nplace: {place}\n" in repr(report)


@pytest.mark.parametrize("task", TASKS)
def test_the_untouched_release_gets_none(task):
    report = check(task, EXERCISE.definitions("exercises")[task])
    assert (report.points, report.passed) == (0, False)
    assert "not written yet" in repr(report)


@pytest.mark.parametrize("answer", ZOO, ids=[answer.function.__name__ for answer in ZOO])
def test_a_wrong_answer_gets_its_own_hint(answer, shared_ranks):
    report = check(answer.task, answer.function)
    assert answer.says in repr(report).replace("\n    hint:", "; hint:"), report
    assert not report.passed
    assert report.points < report.out_of * (1 if answer.right_values else 0.5)
    values = next((line.ok for line in report.lines if "values" in line.what), None)
    assert values is True or not answer.right_values


@pytest.mark.parametrize("task", TASKS)
def test_each_task_has_at_least_six_wrong_answers(task):
    assert sum(answer.task == task for answer in ZOO) >= 6
