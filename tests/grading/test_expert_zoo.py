"""Exercise 08: the solution gets full marks, nothing gets none, and every plausible wrong answer gets its own hint."""

from itertools import combinations

import pytest

from manyranks.grade.old.compare import same
from manyranks.grade.old.expert import averaging, balancing, combining, dispatching, dropping, exchanging, routing
from manyranks.grade.old.expert.task import ExpertTask
from tests.grading import zoo_tests
from tests.grading.exercise import Exercise
from tests.grading.zoo import (
    expert_alike,
    expert_average,
    expert_balance,
    expert_balance_way,
    expert_combine,
    expert_dispatch,
    expert_dispatch_way,
    expert_drop,
    expert_exchange,
    expert_exchange_way,
    expert_route,
)
from tests.grading.zoo_tests import named

TASKS = {"route": 3, "drop": 3, "Exchange": 3, "dispatch": 5, "combine": 4, "balance": 3, "average": 3}
FILES = (
    *(expert_route, expert_drop, expert_exchange, expert_exchange_way, expert_dispatch),
    *(expert_dispatch_way, expert_combine, expert_balance, expert_balance_way, expert_average),
)
ZOO = [answer for file in FILES for answer in file.ZOO]
FOUR = {  # that the exercise is about -> task, answer, words of its report
    "tokens return in the wrong order": ("combine", "NotPutBack", "tokens return in the wrong order"),
    "gates applied twice": ("combine", "GatesTwice", "the gates are applied twice"),
    "capacity drops the wrong tokens": ("drop", "TokenByToken", "the wrong copies are dropped"),
    "expert gradients averaged over all ranks": ("average", "ExpertsOverAll", "expert gradients are averaged over all ranks"),
}
MISSED = [
    ("route", "WithoutTheBias"),
    ("drop", "NotMarked"),
    ("Exchange", "NoGradient"),
    ("dispatch", "EverythingToEveryone"),
    ("combine", "NotPutBack"),
    ("balance", "OwnCounts"),
    ("average", "ExpertsOverAll"),
]
SLIPS = [
    ("route", "ConstantSum"),
    ("drop", "GatesLeft"),
    ("Exchange", "WithABarrier"),
    ("dispatch", "GathersCounts"),
    ("combine", "InTwoExchanges"),
    ("balance", "TwoMessages"),
    ("average", "OneCallEach"),
]
GRADERS = (routing, dropping, exchanging, dispatching, combining, balancing, averaging)
EXERCISE = Exercise("08_expert", classes=("Exchange",))


test_the_solution_gets_full_marks = zoo_tests.solution(EXERCISE, TASKS)
test_the_untouched_release_gets_none = zoo_tests.untouched(EXERCISE, TASKS)
test_no_task_depends_on_another = zoo_tests.alone(EXERCISE, TASKS)


NOTHING = {  # task -> what returns its input, or as little as has the right shape
    "route": lambda logits, bias, top_k, n, limit: (logits.T[:top_k].long(), logits.T[:top_k]),
    "drop": lambda experts_KT, gates_KT, experts, factor: (experts_KT, gates_KT),
    "dispatch": lambda x, experts_KT, experts, exchange: (x, experts_KT, None),
    "combine": lambda y, gates, way, exchange: y.sum() + y.new_zeros(gates.shape[1], y.shape[1]),
    "balance": lambda probabilities, experts_KT, bias, speed: (probabilities.sum(), bias),
    "average": lambda dense, experts, replicas: None,
}


@pytest.mark.parametrize("task", NOTHING)
def test_who_does_nothing_gets_nothing(task, shared_ranks):
    report = EXERCISE.check(task, NOTHING[task])
    assert (report.points, report.passed) == (0, False), report


report_of = zoo_tests.reports(EXERCISE, ExpertTask, TASKS)
test_a_wrong_answer_gets_its_own_hint = zoo_tests.own_hints(ZOO)
test_the_four_mistakes_that_the_exercise_is_about = zoo_tests.mistakes(ZOO, FOUR)
test_who_misses_the_idea_of_a_task_gets_less_than_half = zoo_tests.less_than_half(ZOO, MISSED)
test_a_slip_leaves_more_than_half_of_the_points = zoo_tests.half_or_more(ZOO, SLIPS)


def test_a_rank_that_takes_no_part_is_named_with_the_call_that_the_others_wait_in(report_of):
    report = repr(report_of(named(ZOO, "Exchange", "SkipsWhereNothingHappens")))
    assert "rank 0 and rank 2 wait in all_to_all #1, which rank 1 did not call" in report, report


@pytest.mark.parametrize(
    ("task", "n"), [(routing, 1), *((task, 4) for task in GRADERS[1:]), *((task, 3) for task in GRADERS[1:-1])]
)
def test_no_two_hints_are_for_the_same_results(task, n):
    """Of all known mistakes, the first one that explains what came out is told; in the first case none is for another's."""
    for one, other in combinations(list(task.cases(n)[0].mistakes()), 2):
        alike = all(
            name in theirs and same(own[name], theirs[name], 1e-9)
            for own, theirs in zip(one.results, other.results, strict=True)
            for name in own
        )
        assert not alike or one.hint == other.hint, (one.hint, other.hint)


test_other_right_answers_get_full_marks = zoo_tests.full_marks(EXERCISE, expert_alike.ANSWERS, ExpertTask)
test_each_task_has_its_wrong_answers = zoo_tests.enough(ZOO, TASKS, 15)
