"""Exercise 04: the solution gets full marks, nothing gets none, and every plausible wrong answer gets its own hint."""

import inspect
from itertools import combinations

import pytest

from manyranks.grade.checkpointing import budget, chains, sharing
from tests.grading import zoo_tests
from tests.grading.exercise import Exercise
from tests.grading.zoo import (
    checkpointing_alike,
    checkpointing_chain,
    checkpointing_choose,
    checkpointing_hidden,
    checkpointing_kept,
    checkpointing_ready,
    checkpointing_selective,
    checkpointing_shared,
    checkpointing_single,
    checkpointing_slips,
    checkpointing_unusual,
)
from tests.grading.zoo_tests import assert_no_marks

FILES = (
    checkpointing_single,
    checkpointing_kept,
    checkpointing_chain,
    checkpointing_selective,
    checkpointing_choose,
    checkpointing_shared,
    checkpointing_ready,
    checkpointing_hidden,
    checkpointing_slips,
)
RIGHT = [*checkpointing_alike.ANSWERS, *checkpointing_unusual.ANSWERS]
ZOO = [answer for file in FILES for answer in file.ZOO]
TASKS = {"checkpoint": 7, "checkpoint_sqrt": 4, "selective": 2, "choose": 4, "shared_checkpoint": 5}
OTHERS = {task: TASKS[task] for task in ("checkpoint_sqrt", "selective", "choose")}  # that need not call the first
FIVE = {  # that the exercise is about -> words of the report on those answers
    "random numbers not restored": ("DoesNotRestore", "run draws other random numbers"),
    "random numbers not set back": ("NeverPutsBack", "random numbers begin again from an earlier place"),
    "detaches the input": ("DetachesTheInput", "x gets no gradient"),
    "recomputes under no_grad": ("RecomputesWithoutGradients", "autograd is off inside backward"),
    "saves everything anyway": ("KeepsTheGraph", "✗ keeps x and nothing else"),
}
MISSED = [
    ("checkpoint", "does_nothing"),
    ("checkpoint", "KeepsTheGraph"),
    ("checkpoint", "KeepsArrays"),
    ("checkpoint", "KeepsFiles"),
    ("checkpoint_sqrt", "does_nothing"),
    ("checkpoint_sqrt", "makes_every_layer_a_checkpoint"),
    ("checkpoint_sqrt", "makes_one_segment_of_all_but_the_last"),
    ("selective", "does_nothing"),
    ("selective", "checkpoints_the_whole_layer"),
    ("choose", "chooses_all"),
    ("choose", "chooses_none"),
    ("choose", "tries_all"),
    ("choose", "frees_most_bytes_first"),
    ("choose", "drops_the_dearest_first"),
    ("shared_checkpoint", "does_nothing"),
    ("shared_checkpoint", "KeepsAllOfX"),
]
PARTS = [
    ("checkpoint", "FailsWhereNothingLearns"),
    ("checkpoint", "GivesApplyNothingMore"),
    ("checkpoint_sqrt", "divides_by_the_checkpoints"),
    ("choose", "raises_something_else"),
    ("choose", "returns_none_where_nothing_fits"),
    ("shared_checkpoint", "FailsWhereNothingLearnsOnRanks"),
]
EXERCISE = Exercise("04_checkpointing")


test_the_solution_gets_full_marks = zoo_tests.solution(EXERCISE, TASKS)
test_the_untouched_release_gets_none = zoo_tests.untouched(EXERCISE, TASKS)


def test_an_answer_that_calls_an_unwritten_checkpoint_is_told_so(shared_ranks):
    report = EXERCISE.check("shared_checkpoint", EXERCISE.definitions("solutions", {"shared_checkpoint"})["shared_checkpoint"])
    assert_no_marks(report, "checkpoint is not written yet")


test_other_tasks_do_not_depend_on_the_first = zoo_tests.alone(EXERCISE, OTHERS)


def test_the_notebook_shows_what_checks_use():
    for kind in (budget.Cost, budget.peak):
        assert EXERCISE.source("exercises", kind.__name__) == inspect.getsource(kind).strip()


report_of = zoo_tests.reports(EXERCISE, sharing.Shared, TASKS)
test_a_wrong_answer_gets_its_own_hint = zoo_tests.own_hints(ZOO)
test_who_misses_the_idea_of_a_task_gets_a_third_at_most = zoo_tests.a_third_at_most(ZOO, MISSED)
test_a_slip_in_a_late_scene_leaves_more_than_half_of_the_points = zoo_tests.half_or_more(ZOO, PARTS)
test_the_five_mistakes_that_the_exercise_is_about = zoo_tests.mistakes(ZOO, FIVE)
test_other_right_answers_get_full_marks = zoo_tests.full_marks(EXERCISE, RIGHT, sharing.Shared)


@pytest.mark.parametrize("note", chains.chains())
def test_the_best_choice_is_that_of_trying_all_where_they_can_be_tried(note):
    chain = chains.chains()[note]
    n = len(chain.layers)
    if n > 10:
        assert chains.best(chain.layers, chain.budget)
        return
    every = [chosen for count in range(n + 1) for chosen in combinations(range(n), count)]
    fits = [chosen for chosen in every if budget.peak(chain.layers, chosen) <= chain.budget]
    best = chains.best(chain.layers, chain.budget)
    assert (best is None) == (not fits)
    if fits:
        assert best in fits
        assert chains.flops(chain.layers, best) == min(chains.flops(chain.layers, chosen) for chosen in fits)


@pytest.mark.parametrize("chosen", [(), (0,), (1, 3), (4,), (0, 1, 2, 3, 4)])
def test_what_a_choice_costs_and_holds_is_what_is_measured(chosen):
    shapes = chains.chains()["with 5 layers"].shapes
    layers = [shape.layer for shape in shapes]
    measured = chains.measured(shapes, list(chosen))
    assert measured == (chains.flops(layers, chosen), budget.peak(layers, chosen))


test_each_task_has_its_wrong_answers = zoo_tests.enough(ZOO, TASKS, 15)
