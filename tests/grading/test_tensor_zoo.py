"""Exercise 06: the solution gets full marks, nothing gets none, and every plausible wrong answer gets its own hint."""

import functools
from itertools import combinations

import pytest
import torch

from manyranks.grade import Report, trial
from manyranks.grade.compare import same
from manyranks.grade.tensor import feed_forward, heads, sequence, vocabulary
from manyranks.grade.tensor.task import TensorTask
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
from tests.grading.zoo_tests import (
    assert_enough,
    assert_full_marks,
    assert_no_marks,
    assert_own_hint,
    each_right,
    each_wrong,
    named,
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
CLASSES = ("MLP", "Attention", "Block")
EXERCISE = Exercise("06_tensor")


def check(task: str, answer) -> Report:
    """An answer to a function may also be a class that is called like one."""
    called = isinstance(answer, type) and task not in CLASSES
    return EXERCISE.check(task, answer() if called else answer)


@pytest.mark.parametrize("task", TASKS)
def test_the_solution_gets_full_marks(task):
    assert_full_marks(check(task, EXERCISE.definitions("solutions")[task]), TASKS[task])


@pytest.mark.parametrize("task", TASKS)
def test_the_untouched_release_gets_none(task, shared_ranks):
    assert_no_marks(check(task, EXERCISE.definitions("exercises")[task]))


@pytest.mark.parametrize("task", TASKS)
def test_no_task_depends_on_another(task, shared_ranks):
    assert_full_marks(check(task, EXERCISE.definitions("solutions", {task})[task]), TASKS[task])


@pytest.fixture
def report_of(shared_ranks, monkeypatch):
    """What a check says of a wrong answer, on three ranks, or on four: the solution has shown that all sizes are run."""

    def report(answer) -> Report:
        monkeypatch.setattr(TensorTask, "sizes", (getattr(answer.function, "ranks", 3),))
        monkeypatch.setattr(trial, "_RUN_SECONDS", getattr(answer.function, "seconds", trial._RUN_SECONDS))
        return checked_once(answer)

    return report


@functools.cache
def checked_once(answer) -> Report:
    return check(answer.task, answer.function)


@each_wrong(ZOO)
def test_a_wrong_answer_gets_its_own_hint(answer, report_of):
    assert_own_hint(report_of(answer), answer)


@pytest.mark.parametrize("mistake", SIX)
def test_the_six_mistakes_that_the_exercise_is_about(mistake, report_of):
    task, name, words = SIX[mistake]
    assert words in repr(report_of(named(ZOO, task, name)))


@pytest.mark.parametrize("missed", MISSED)
def test_who_misses_the_idea_of_a_task_gets_less_than_half(missed, report_of):
    report = report_of(named(ZOO, *missed))
    assert report.points < report.out_of / 2, report


@pytest.mark.parametrize("slip", SLIPS)
def test_a_slip_leaves_more_than_half_of_the_points(slip, report_of):
    report = report_of(named(ZOO, *slip))
    assert report.out_of / 2 <= report.points < report.out_of, report


def test_the_checks_leave_random_numbers_as_they_were(shared_ranks):
    before = torch.get_rng_state()
    for cases in (feed_forward.cases, heads.cases, sequence.cases):
        cases.cache_clear()
        list(cases(2)[0].mistakes())
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("cases", [feed_forward.cases, heads.cases, vocabulary.cases, sequence.cases])
def test_no_two_hints_are_for_the_same_results(cases):
    """Of all known mistakes, the first one that explains what came out is told."""
    for case in cases(4)[:1]:
        known = list(case.mistakes())
        for one, other in combinations(known, 2):
            names = [own.keys() & theirs.keys() for own, theirs in zip(one.results, other.results, strict=True)]
            alike = all(
                same(own[name], theirs[name], 1e-9)
                for shared, own, theirs in zip(names, one.results, other.results, strict=True)
                for name in shared
            )
            assert not (alike and all(names)) or one.hint == other.hint, (one.hint, other.hint)


@each_right(tensor_alike.ANSWERS + tensor_alike_block.ANSWERS)
def test_other_right_answers_get_full_marks(task, answer, shared_ranks):
    assert_full_marks(check(task, answer))


@pytest.mark.parametrize("task", TASKS)
def test_each_task_has_its_wrong_answers(task):
    assert_enough(ZOO, task, 15)
