"""Exercise 07: the solution gets full marks, nothing gets none, and every plausible wrong answer gets its own hint."""

import pytest

from manyranks.grade.old.context import by_heads, cutting, forward, homeward, merging
from manyranks.grade.old.context.task import ContextTask
from tests.grading import zoo_tests
from tests.grading.exercise import Exercise
from tests.grading.zoo import (
    context_alike,
    context_alike_rings,
    context_forward,
    context_forward_way,
    context_layout,
    context_merge,
    context_ring,
    context_ring_way,
    context_ulysses,
    context_ulysses_way,
)

TASKS = {"merge": 3, "positions": 2, "unshard": 2, "ring_forward": 6, "Ring": 6, "ulysses": 5}
FILES = (
    *(context_merge, context_layout, context_forward, context_forward_way),
    *(context_ring, context_ring_way, context_ulysses, context_ulysses_way),
)
ZOO = [answer for file in FILES for answer in file.ZOO]
FIVE = {  # that the exercise is about -> task, answer, words of its report
    "merge without the maximum": ("merge", "without_the_maximum", "take the largest lse off before exp"),
    "wrong source index after k hops": ("ring_forward", "WrongSource", "after k hops rank r has the block of rank r + k"),
    "mask by local positions": ("ring_forward", "LocalPositions", "the mask is of places within a rank"),
    "gradients of K and V not returned home": ("Ring", "NeverComesHome", "never came home"),
    "zigzag undone wrongly": ("unshard", "undone_chapters_zigzag", "that is the chapter's layout"),
}
MISSED = [
    ("merge", "mean_of_outputs"),
    ("positions", "chapters_zigzag"),
    ("unshard", "joins"),
    ("ring_forward", "own_block_only"),
    ("ring_forward", "Gathers"),
    ("Ring", "OwnPartOnly"),
    ("ulysses", "own_tokens_only"),
]
SLIPS = [
    ("merge", "without_the_maximum"),
    ("positions", "refuses_nothing"),
    ("ring_forward", "InTwoMessages"),
    ("ring_forward", "ComputesThenRequests"),
    ("Ring", "OwnPartTravels"),
    ("ulysses", "RepeatsAllHeads"),
]
EXERCISE = Exercise("07_context", classes=("Ring",))


test_the_solution_gets_full_marks = zoo_tests.solution(EXERCISE, TASKS)
test_the_untouched_release_gets_none = zoo_tests.untouched(EXERCISE, TASKS)
test_no_task_depends_on_another = zoo_tests.alone(EXERCISE, TASKS)
report_of = zoo_tests.reports(EXERCISE, ContextTask, TASKS.keys() - {"merge"})
test_a_wrong_answer_gets_its_own_hint = zoo_tests.own_hints(ZOO)
test_the_five_mistakes_that_the_exercise_is_about = zoo_tests.mistakes(ZOO, FIVE)
test_who_misses_the_idea_of_a_task_gets_less_than_half = zoo_tests.less_than_half(ZOO, MISSED)
test_a_slip_leaves_more_than_half_of_the_points = zoo_tests.half_or_more(ZOO, SLIPS)


@pytest.mark.parametrize(
    ("cases", "n"),
    [
        (merging.cases, 1),
        (cutting.places_cases, 1),
        (cutting.whole_cases, 1),
        (forward.cases, 4),
        (homeward.cases, 4),
        (by_heads.cases, 4),
    ],
)
def test_no_two_hints_are_for_the_same_results(cases, n):
    zoo_tests.assert_told_apart(cases(n)[-1].mistakes())


test_other_right_answers_get_full_marks = zoo_tests.full_marks(
    EXERCISE, context_alike.ANSWERS + context_alike_rings.ANSWERS, ContextTask
)
test_each_task_has_its_wrong_answers = zoo_tests.enough(ZOO, TASKS, 15)
