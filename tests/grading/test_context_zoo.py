"""Exercise 07: the solution gets full marks, nothing gets none, and every plausible wrong answer gets its own hint."""

import functools
from itertools import combinations

import pytest

from manyranks.grade import Report, trial
from manyranks.grade.compare import same
from manyranks.grade.context import by_heads, cutting, forward, homeward, merging
from manyranks.grade.context.task import ContextTask
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
from tests.grading.zoo_tests import (
    assert_enough,
    assert_full_marks,
    assert_no_marks,
    assert_own_hint,
    each_right,
    each_wrong,
    named,
)

TASKS = {"merge": 3, "positions": 2, "unshard": 2, "ring_forward": 6, "Ring": 6, "ulysses": 5}
ALONE = ("merge", "positions", "unshard")
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
EXERCISE = Exercise("07_context")


def check(task: str, answer) -> Report:
    """An answer to a function may also be a class that is called like one."""
    called = isinstance(answer, type) and task != "Ring"
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
        if answer.task not in ALONE:
            ranks = getattr(answer.function, "ranks", 3)
            monkeypatch.setattr(ContextTask, "sizes", getattr(answer.function, "sizes", (ranks,)))
        monkeypatch.setattr(trial, "_RUN_SECONDS", getattr(answer.function, "seconds", trial._RUN_SECONDS))
        return checked_once(answer)

    return report


@functools.cache
def checked_once(answer) -> Report:
    return check(answer.task, answer.function)


@each_wrong(ZOO)
def test_a_wrong_answer_gets_its_own_hint(answer, report_of):
    assert_own_hint(report_of(answer), answer)


@pytest.mark.parametrize("mistake", FIVE)
def test_the_five_mistakes_that_the_exercise_is_about(mistake, report_of):
    task, name, words = FIVE[mistake]
    assert words in repr(report_of(named(ZOO, task, name)))


@pytest.mark.parametrize("missed", MISSED)
def test_who_misses_the_idea_of_a_task_gets_less_than_half(missed, report_of):
    report = report_of(named(ZOO, *missed))
    assert report.points < report.out_of / 2, report


@pytest.mark.parametrize("slip", SLIPS)
def test_a_slip_leaves_more_than_half_of_the_points(slip, report_of):
    report = report_of(named(ZOO, *slip))
    assert report.out_of / 2 <= report.points < report.out_of, report


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
    """Of all known mistakes, the first one that explains what came out is told."""
    for case in cases(n)[-1:]:
        for one, other in combinations(list(case.mistakes()), 2):
            names = [own.keys() & theirs.keys() for own, theirs in zip(one.results, other.results, strict=True)]
            alike = all(
                same(own[name], theirs[name], 1e-9)
                for shared, own, theirs in zip(names, one.results, other.results, strict=True)
                for name in shared
            )
            assert not (alike and all(names)) or one.hint == other.hint, (one.hint, other.hint)


@each_right(context_alike.ANSWERS + context_alike_rings.ANSWERS)
def test_other_right_answers_get_full_marks(task, answer, shared_ranks):
    assert_full_marks(check(task, answer))


@pytest.mark.parametrize("task", TASKS)
def test_each_task_has_its_wrong_answers(task):
    assert_enough(ZOO, task, 15)
