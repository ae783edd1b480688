"""Exercise 10: the solution gets full marks, nothing gets none, and every plausible wrong answer gets its own hint."""

from contextlib import nullcontext

import pytest

from manyranks import theory
from manyranks.grade import Report, trial
from manyranks.grade.nd import averaging, drifts, grouping, misplacing, placing, planning, ready, standing, straggling
from manyranks.world.world import World
from tests.conftest import ROOT
from tests.grading import zoo_tests
from tests.grading.exercise import Exercise
from tests.grading.zoo import (
    nd_alike,
    nd_average,
    nd_average_way,
    nd_drifting,
    nd_groups,
    nd_misplaced,
    nd_place,
    nd_plan,
    nd_standing,
    nd_straggler,
)

TASKS = {
    **{"coordinates": 2, "rank_of": 2, "groups": 3, "average": 5, "place": 3, "plan": 4},
    **{"misplaced": 3, "drifting": 3, "straggler": 3},
}
FILES = (nd_standing, nd_groups, nd_average, nd_average_way, nd_place, nd_plan, nd_misplaced, nd_drifting, nd_straggler)
ZOO = [answer for file in FILES for answer in file.ZOO]
SEVEN = {  # that the exercise is about -> task, answer, words of its report
    "the first axis taken as the innermost": ("coordinates", "columns_first", "changes fastest"),
    "groups made by their members only": ("average", "OnlyMembers", "is called by all ranks"),
    "averaged without context parallelism": ("average", "WithoutCp", "averaged over dp only"),
    "the axis with most bytes is inside, whatever its size": ("place", "most_inside", "Count the bytes of each order"),
    "tensor parallelism across nodes": ("plan", "across_nodes", "Keep tp inside the node"),
    "rank 0 speaks for all": ("misplaced", "Rank0sCalls", "Add up the calls of all ranks"),
    "the victim is taken for the culprit": ("straggler", "LongestWait", "the one that suffers"),
}
CLUSTERS = {  # task, and the cluster in which an answer to it goes wrong -> task, answer, words of its report
    f"{task}, {cluster}": (task, answer, f": {cluster}, with ")
    for task, cluster, answer in (
        ("misplaced", "the cluster that you have", "StaysAsItIs"),
        ("misplaced", "another cluster", "AlwaysTp"),
        ("drifting", "the cluster that you have", "AsTheyWere"),
        ("drifting", "another cluster", "AlwaysCp"),
        ("straggler", "the cluster that you have", "LongestWait"),
        ("straggler", "another cluster", "AlwaysComputes"),
    )
}
MISSED = [
    ("coordinates", "columns_first"),
    ("rank_of", "as_they_come"),
    ("groups", "that_share_them"),
    ("average", "over_all"),
    ("average", "OnlyMembers"),
    ("place", "most_outside"),
    ("plan", "baseline"),
    ("misplaced", "AlwaysTp"),
    ("drifting", "AlwaysCp"),
    ("straggler", "LongestWait"),
]
SLIPS = [
    ("groups", "from_first_to_last"),
    ("average", "OneCallEach"),
    ("place", "most_inside"),
    ("plan", "much_tensor"),
    ("misplaced", "StaysAsItIs"),
    ("drifting", "AsTheyWere"),
    ("straggler", "AlwaysComputes"),
]
GRADERS = (standing, grouping, averaging, placing, planning, misplacing, drifts, straggling)
EXERCISE = Exercise("10_nd_parallel", module="nd")


@pytest.fixture(scope="module")
def many():
    """n -> a world of so many ranks, made anew where its ranks no longer agree on their groups."""
    made: dict[int, World] = {}
    yield made
    for world in made.values():
        world.close()


@pytest.fixture
def shared_ranks(many, monkeypatch):
    """Checks run on worlds that are there already, and have as much time for the last case as for the first."""
    monkeypatch.setattr(trial, "_LEAST_SECONDS", trial._RUN_SECONDS)

    def world(n, **_):
        if n not in many:
            many[n] = World(n, backend="gloo")
        return nullcontext(many[n])

    monkeypatch.setattr(trial, "World", world)


test_the_solution_gets_full_marks = zoo_tests.solution(EXERCISE, TASKS)
test_the_untouched_release_gets_none = zoo_tests.untouched(EXERCISE, TASKS)
test_no_task_depends_on_another = zoo_tests.alone(EXERCISE, TASKS)


NOTHING = {  # task -> what computes nothing
    "coordinates": lambda rank, sizes: dict.fromkeys(sizes, 0),
    "rank_of": lambda coordinates, sizes: 0,
    "groups": lambda sizes, axes: [],
    "average": lambda sizes, weights: None,
    "place": lambda traffic, sizes, node: tuple(sizes),
    "plan": lambda: theory.Plan(),
    "misplaced": lambda run: (next(iter(run.sizes)), tuple(run.sizes)),
    "drifting": lambda run: (None, []),
    "straggler": lambda run: (0, "computes"),
}


@pytest.mark.parametrize("task", NOTHING)
def test_who_does_nothing_gets_less_than_half(task, shared_ranks):
    report = EXERCISE.check(task, NOTHING[task])
    assert not report.passed, report
    assert report.points < report.out_of / 2, report


KNOWN = {  # task -> the answer to the cluster that learners see, and an error in others
    "misplaced": lambda run: ("tp", ("pp", "dp", "tp")),
    "drifting": lambda run: {("dp", "cp", "tp"): ("cp", [(0, 2, 4, 6), (1, 3, 5, 7)])}[tuple(run.sizes)],
    "straggler": lambda run: {("pp", "dp", "tp"): (5, "computes")}[tuple(run.sizes)],
}


@pytest.mark.parametrize("task", KNOWN)
def test_who_knows_only_the_cluster_that_is_shown_gets_nothing(task, shared_ranks):
    assert EXERCISE.check(task, KNOWN[task]).points == 0


@pytest.fixture
def report_of(many, shared_ranks, monkeypatch):
    """What a check says of a wrong answer in its first cases, or as the answer says: in which cases it shows, and on how many
    ranks. The solution has shown that all sizes and cases are run. whole: all cases, as learners have it.
    """

    def report(answer, whole: bool = False) -> Report:
        ranks = getattr(answer.function, "ranks", 6)
        some = slice(None) if whole else getattr(answer.function, "cases", slice(2))
        monkeypatch.setattr(averaging.Averaging, "sizes", (ranks,))
        for module in GRADERS:
            monkeypatch.setattr(module, "cases", shortened(module.cases, some))
        found = zoo_tests.checked_once(EXERCISE, answer, whole)
        if answer.task == "average" and not found.lines[0].ok and ranks in many:
            many.pop(ranks).close()
        return found

    def shortened(cases, part):
        return lambda n: cases(n)[part]

    return report


test_a_wrong_answer_gets_its_own_hint = zoo_tests.own_hints(ZOO)
test_the_seven_mistakes_that_the_exercise_is_about = zoo_tests.mistakes(ZOO, SEVEN)
test_a_report_says_in_which_cluster_an_answer_goes_wrong = zoo_tests.mistakes(ZOO, CLUSTERS)
test_who_misses_the_idea_of_a_task_gets_less_than_half = zoo_tests.less_than_half(ZOO, MISSED)
test_a_slip_leaves_more_than_half_of_the_points = zoo_tests.half_or_more(ZOO, SLIPS)


def test_what_is_refused_is_there():
    there = {file.stem for file in (ROOT / "lib" / "manyranks" / "grade" / "nd").glob("[a-z]*.py")}
    mine = {"answers", "given", "making", "ready", "task"}  # of no use to who looks for an answer
    assert {name for name in there if name.startswith(ready._HERE)} == there - mine


def test_the_plan_that_is_held_is_the_planner_s_best():
    assert planning.best() == planning.BEST


@pytest.mark.parametrize("n", averaging.Averaging.sizes)
def test_no_two_mistakes_in_gradients_have_one_result(n):
    zoo_tests.assert_told_apart(averaging.cases(n)[0].mistakes())


@pytest.mark.parametrize("module", [module for module in GRADERS if module not in (averaging, planning)])
def test_a_mistake_is_told_from_another_in_some_case(module):
    """Two mistakes that make the same answers in every case would have one hint for both."""
    known = [case.must.known() for case in module.cases(1)[:2]]
    by_hint: dict[str, set] = {}
    for found in known:
        for hint, wrong in found:
            by_hint.setdefault(hint, set()).add(f"{wrong}")
    assert len({frozenset(answers) for answers in by_hint.values()}) == len(by_hint)


test_other_right_answers_get_full_marks = zoo_tests.full_marks(EXERCISE, nd_alike.ANSWERS)
test_each_task_has_its_wrong_answers = zoo_tests.enough(ZOO, TASKS, 12)
