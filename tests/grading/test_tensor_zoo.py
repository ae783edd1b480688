"""Exercise 06: the solution gets full marks, nothing gets none, and every plausible wrong answer gets its own hint."""

import pytest
import torch

from manyranks.grade.old.tensor import feed_forward, heads, sequence, vocabulary
from manyranks.grade.old.tensor.task import TensorTask
from tests.grading import zoo_tests
from tests.grading.exercise import Exercise
from tests.grading.zoo import (
    tensor_alike,
    tensor_alike_block,
    tensor_attention,
    tensor_block,
    tensor_loss,
    tensor_mlp,
    tensor_pairs,
)

TASKS = {"copy_in": 2, "reduce_out": 2, "MLP": 5, "Attention": 5, "cross_entropy": 4, "Block": 6}
FILES = (tensor_pairs, tensor_mlp, tensor_attention, tensor_loss, tensor_block)
ZOO = [answer for file in FILES for answer in file.ZOO]
SIX = {  # that the exercise is about -> task, answer, words of its report
    "all-reduce in the wrong direction": ("MLP", "Swaps", "f and g are swapped"),
    "bias added t times": ("MLP", "BiasTTimes", "so that the sum has it t times: add it after g"),
    "GELU after the partial sum": ("MLP", "GeluAfterTheSum", "GELU of a sum is not the sum of GELUs"),
    "norm gradients not reduced": ("Block", "SumsTheBiasOnly", "norm's gradients are this rank's positions' only"),
    "full logits built": (
        "cross_entropy",
        "GathersTheLogits",
        "made a tensor of 9.07 kB; the largest logits of a rank have 3.02 kB",
    ),
    "same dropout mask on all ranks": ("Block", "OneMaskForAll", "ranks 0 and 1 dropped the same elements"),
}
MISSED = [
    ("copy_in", "does_nothing"),
    ("reduce_out", "does_nothing"),
    ("MLP", "ComputesEverythingEverywhere"),
    ("MLP", "ForgetsG"),
    ("Attention", "DoesNotSumSharedHeads"),
    ("cross_entropy", "GathersTheLogits"),
    ("Block", "SumsNoGradients"),
]
SLIPS = [
    ("copy_in", "SendsAllGradients"),
    ("MLP", "KeepsViews"),
    ("Attention", "FEach"),
    ("cross_entropy", "MakesOneHot"),
    ("Block", "SeedsThatMeet"),
    ("Block", "KeepsTheGathered"),
]
EXERCISE = Exercise("06_tensor", classes=("MLP", "Attention", "Block"))


test_the_solution_gets_full_marks = zoo_tests.solution(EXERCISE, TASKS)
test_the_untouched_release_gets_none = zoo_tests.untouched(EXERCISE, TASKS)
test_no_task_depends_on_another = zoo_tests.alone(EXERCISE, TASKS)
report_of = zoo_tests.reports(EXERCISE, TensorTask, TASKS.keys() - {"copy_in", "reduce_out"})
test_a_wrong_answer_gets_its_own_hint = zoo_tests.own_hints(ZOO)
test_the_six_mistakes_that_the_exercise_is_about = zoo_tests.mistakes(ZOO, SIX)
test_who_misses_the_idea_of_a_task_gets_less_than_half = zoo_tests.less_than_half(ZOO, MISSED)
test_a_slip_leaves_more_than_half_of_the_points = zoo_tests.half_or_more(ZOO, SLIPS)


def test_the_checks_leave_random_numbers_as_they_were(shared_ranks):
    before = torch.get_rng_state()
    for cases in (feed_forward.cases, heads.cases, sequence.cases):
        cases.cache_clear()
        list(cases(2)[0].mistakes())
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("cases", [feed_forward.cases, heads.cases, vocabulary.cases, sequence.cases])
def test_no_two_hints_are_for_the_same_results(cases):
    zoo_tests.assert_told_apart(cases(4)[0].mistakes())


test_other_right_answers_get_full_marks = zoo_tests.full_marks(
    EXERCISE, tensor_alike.ANSWERS + tensor_alike_block.ANSWERS, TensorTask
)
test_each_task_has_its_wrong_answers = zoo_tests.enough(ZOO, TASKS, 15)
