"""Exercise 10."""

from tests.grading.answered import *  # noqa: F403


def test_the_plan_that_others_are_compared_with_is_the_planner_s_best():
    code = {answer.name: answer.code for answer in of_task("10_nd_parallel", "plan")}  # noqa: F405
    assert code["plan"]() == code["searched"]()
