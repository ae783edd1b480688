"""Exercise 04: the solution gets full marks, nothing gets none, and every plausible wrong answer gets its own hint."""

import functools
import inspect
from itertools import combinations

import pytest

from manyranks.grade import Report, trial
from manyranks.grade.checkpointing import budget, chains, sharing
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
from tests.grading.zoo_tests import (
    assert_enough,
    assert_full_marks,
    assert_no_marks,
    assert_own_hint,
    each_right,
    each_wrong,
    named,
)

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
HANG = {"tries_all", "never_ends"}  # tests of all checks have shown how long a run may take
EXERCISE = Exercise("04_checkpointing")


def check(task: str, answer) -> Report:
    """An answer may also be a class that is called like a function."""
    return EXERCISE.check(task, answer() if isinstance(answer, type) else answer)


@pytest.mark.parametrize("task", TASKS)
def test_the_solution_gets_full_marks(task):
    assert_full_marks(check(task, EXERCISE.definitions("solutions")[task]), TASKS[task])


@pytest.mark.parametrize("task", TASKS)
def test_the_untouched_release_gets_none(task, shared_ranks):
    assert_no_marks(check(task, EXERCISE.definitions("exercises")[task]))


def test_an_answer_that_calls_an_unwritten_checkpoint_is_told_so(shared_ranks):
    report = check("shared_checkpoint", EXERCISE.definitions("solutions", {"shared_checkpoint"})["shared_checkpoint"])
    assert_no_marks(report, "checkpoint is not written yet")


@pytest.mark.parametrize("task", ["checkpoint_sqrt", "selective", "choose"])
def test_other_tasks_do_not_depend_on_the_first(task, shared_ranks):
    assert_full_marks(check(task, EXERCISE.definitions("solutions", {task})[task]), TASKS[task])


def test_the_notebook_shows_what_checks_use():
    for kind in (budget.Cost, budget.peak):
        assert EXERCISE.source("exercises", kind.__name__) == inspect.getsource(kind).strip()


@pytest.fixture
def report_of(shared_ranks, monkeypatch):
    """What a check says of a wrong answer; the last task's on three ranks, or where only groups show it on four."""

    def report(answer) -> Report:
        monkeypatch.setattr(sharing.Shared, "sizes", getattr(answer.function, "sizes", (3,)))
        if answer.function.__name__ in HANG:
            monkeypatch.setattr(trial, "_RUN_SECONDS", 3.0)
        return checked_once(answer)

    return report


@functools.cache
def checked_once(answer) -> Report:
    return check(answer.task, answer.function)


@each_wrong(ZOO)
def test_a_wrong_answer_gets_its_own_hint(answer, report_of):
    assert_own_hint(report_of(answer), answer)


@pytest.mark.parametrize("missed", MISSED)
def test_who_misses_the_idea_of_a_task_gets_a_third_at_most(missed, report_of):
    report = report_of(named(ZOO, *missed))
    assert report.points <= report.out_of / 3, report


@pytest.mark.parametrize("slip", PARTS)
def test_a_slip_in_a_late_scene_leaves_more_than_half_of_the_points(slip, report_of):
    report = report_of(named(ZOO, *slip))
    assert report.out_of / 2 <= report.points < report.out_of, report


@pytest.mark.parametrize("mistake", FIVE)
def test_the_five_mistakes_that_the_exercise_is_about(mistake, report_of):
    name, words = FIVE[mistake]
    assert words in repr(report_of(named(ZOO, name)))


@each_right(RIGHT)
def test_other_right_answers_get_full_marks(task, answer, shared_ranks):
    assert_full_marks(check(task, answer))


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


@pytest.mark.parametrize("task", TASKS)
def test_each_task_has_its_wrong_answers(task):
    assert_enough(ZOO, task, 15)
