"""Exercise 09: the solution gets full marks, nothing gets none, and every plausible wrong answer gets its own hint."""

import pytest

from manyranks.grade.mfu import budgets, forward, roofline, timing, training, utilisation
from manyranks.grade.mfu.amounts import alike
from manyranks.grade.mfu.task import MfuTask
from tests.grading import zoo_tests
from tests.grading.exercise import Exercise
from tests.grading.zoo import (
    mfu_alike,
    mfu_budget,
    mfu_budget_way,
    mfu_forward,
    mfu_forward_whole,
    mfu_lost,
    mfu_share,
    mfu_share_whole,
    mfu_step,
    mfu_time,
    mfu_time_way,
)

TASKS = {"forward_flops": 4, "step_flops": 4, "mfu": 4, "time_it": 4, "time_budget": 5, "lost_time": 3}
FILES = (
    *(mfu_forward, mfu_forward_whole, mfu_step, mfu_share, mfu_share_whole),
    *(mfu_time, mfu_time_way, mfu_budget, mfu_budget_way, mfu_lost),
)
ZOO = [answer for file in FILES for answer in file.ZOO]
FIVE = {  # that the exercise is about -> task, answer, words of its report
    "backward counted once": ("step_flops", "BackwardOnce", "backward is counted once"),
    "recomputation counted as useful": ("step_flops", "RecomputationIsUseful", "recomputation is counted as useful"),
    "causal attention in full": ("mfu", "CausalInFull", "causal attention is counted full"),
    "peak of the wrong dtype": ("mfu", "PeakOfTheWeights", "the dtype in which the weights are kept"),
    "embedding as a matrix product": ("forward_flops", "EmbeddingIsAProduct", "the embedding is counted as a matrix product"),
}
MISSED = [
    ("forward_flops", "MultiplyAddsAreOne"),
    ("step_flops", "BackwardOnce"),
    ("mfu", "PeakOfTheWeights"),
    ("time_it", "NeverSynchronises"),
    ("time_budget", "NestedTwice"),
    ("lost_time", "WholeTime"),
]
SLIPS = [
    ("forward_flops", "NoGate"),
    ("step_flops", "HeadAgain"),
    ("mfu", "CausalInFull"),
    ("time_it", "OneCallEach"),
    ("time_budget", "NoPython"),
    ("lost_time", "ReadsTwice"),
]
GRADERS = {  # module -> its task
    forward: forward.ForwardFlops,
    training: training.StepFlops,
    utilisation: utilisation.Mfu,
    timing: timing.TimeIt,
    budgets: budgets.TimeBudget,
    roofline: roofline.LostTime,
}
IN_PARTS = TASKS.keys() - {"time_it"}
EXERCISE = Exercise("09_mfu")


test_the_solution_gets_full_marks = zoo_tests.solution(EXERCISE, TASKS)
test_the_untouched_release_gets_none = zoo_tests.untouched(EXERCISE, TASKS)
test_no_task_depends_on_another = zoo_tests.alone(EXERCISE, TASKS)


ZEROS = {  # task -> what computes nothing
    "forward_flops": lambda m, batch, seq, predicted: dict.fromkeys(forward.PARTS, 0),
    "step_flops": lambda layers, head, recompute, flash: (0, 0),
    "mfu": lambda run, sheet, convention: 0.0,
    "time_it": lambda launch, synchronise, clock, warmup, repeats, inner: 0.0,
    "time_budget": lambda spans, arrived, step, zero: dict.fromkeys(budgets.PARTS, 0.0),
    "lost_time": lambda operators, needed, peak, bandwidth: ([0.0] * len(operators), 0.0),
}


@pytest.mark.parametrize("task", ZEROS)
def test_who_computes_nothing_gets_nothing(task, shared_ranks):
    report = EXERCISE.check(task, ZEROS[task])
    assert (report.points, report.passed) == (0, False), report


report_of = zoo_tests.reports(EXERCISE, MfuTask, TASKS)
test_a_wrong_answer_gets_its_own_hint = zoo_tests.own_hints(ZOO, IN_PARTS)
test_the_five_mistakes_that_the_exercise_is_about = zoo_tests.mistakes(ZOO, FIVE)
test_who_misses_the_idea_of_a_task_gets_less_than_half = zoo_tests.less_than_half(ZOO, MISSED)
test_a_slip_leaves_more_than_half_of_the_points = zoo_tests.half_or_more(ZOO, SLIPS)


@zoo_tests.each_wrong([answer for answer in ZOO if answer.task in IN_PARTS])
def test_what_is_right_in_part_has_the_points_of_these_parts(answer, report_of):
    aspects = dict(zip(TASKS, GRADERS.values(), strict=True))[answer.task].aspects
    report = report_of(answer)
    right = {line.what for line in report.lines if line.ok} if report.lines[0].ok else set()  # it has run
    least = sum(aspect.share for aspect in aspects if aspect.for_itself and aspect.what in right)
    most = sum(aspect.share for aspect in aspects if aspect.what in right)
    assert least - 0.01 <= report.points / report.out_of <= most + 0.01, report


@pytest.mark.parametrize("module", GRADERS)
def test_no_two_hints_are_for_the_same_results(module):
    """Of all known mistakes, the first one that explains what came out is told; in no case is one for another's."""
    n = max(GRADERS[module].sizes)
    for case in module.cases(n):
        known = list(case.mistakes())
        for i, other in enumerate(known):
            for one in known[:i]:
                assert one.hint == other.hint or not explains(one, other), (str(case), one.hint, other.hint)


def explains(one, other) -> bool:
    pairs = list(zip(one.results, other.results, strict=True))
    return all(own.keys() <= theirs.keys() and all(alike(theirs[name], own[name]) for name in own) for own, theirs in pairs)


test_other_right_answers_get_full_marks = zoo_tests.full_marks(EXERCISE, mfu_alike.ANSWERS)
test_each_task_has_its_wrong_answers = zoo_tests.enough(ZOO, TASKS, 20)
