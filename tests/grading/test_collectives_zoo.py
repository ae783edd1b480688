"""Exercise 01: the solution gets full marks, nothing gets none, and every plausible wrong answer gets its own hint."""

import pytest
import torch.distributed as dist

from tests.grading import zoo_tests
from tests.grading.exercise import Exercise
from tests.grading.zoo import all_gather, all_reduce, all_to_all, broadcast, collectives_ready, reduce_scatter
from tests.grading.zoo_tests import assert_full_marks, assert_no_marks, assert_own_hint, each_wrong

ZOO = broadcast.ZOO + all_gather.ZOO + reduce_scatter.ZOO + all_reduce.ZOO + all_to_all.ZOO + collectives_ready.ZOO
TASKS = {"tree_broadcast": 3, "ring_all_gather": 4, "ring_reduce_scatter": 5, "ring_all_reduce": 4, "pairwise_all_to_all": 4}
EXERCISE = Exercise("01_collectives")


test_the_solution_gets_full_marks = zoo_tests.solution(EXERCISE, TASKS)


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

    report = EXERCISE.check("ring_all_reduce", answer)
    assert_full_marks(report, TASKS["ring_all_reduce"])
    assert says in repr(report), report
    assert f"what the ranks printed on 4 ranks with 250,007 elements:\n── rank 0 ──\nplace: {place}\n" in repr(report)


@pytest.mark.parametrize("task", TASKS)
def test_the_untouched_release_gets_none(task):
    assert_no_marks(EXERCISE.check(task, EXERCISE.definitions("exercises")[task]))


@each_wrong(ZOO)
def test_a_wrong_answer_gets_its_own_hint(answer, shared_ranks):
    assert_own_hint(EXERCISE.check(answer.task, answer.function), answer)


test_each_task_has_its_wrong_answers = zoo_tests.enough(ZOO, TASKS)
