"""One exercise: its solution gets all points, what learners get none, and each answer what its author says of it.

Each file in tests/grading/answers/ imports all of this, and has the name of its exercise: so workers share the exercises.
"""

from dataclasses import replace
from functools import cache
from itertools import chain

import pytest

from manyranks.grade import answers, check
from manyranks.grade.answers import MISTAKE, RIGHT, Answer
from manyranks.grade.check import looks, shipped
from manyranks.measure.fingerprints import fact, same
from manyranks.world.rank import messages
from tests.conftest import matrix
from tests.grading import records
from tests.grading.exercise import Exercise

FEWEST = 4  # mistakes of a task
ALIKE_FOR_ALL = "culprits", "plan"  # CLASSROOM.md says so: reports and one job that all see
RECORDED = "misplaced", "drifting", "straggler"
IN_WORDS = "atomic_save"  # says what became of the bytes, and these are drawn


@cache
def of_task(exercise: str, task: str) -> list[Answer]:
    return [answer for answer in records.answers_of(exercise) if answer.task == task]


@cache
def definitions(exercise: str, folder: str) -> dict:
    """The definitions in its notebook's cells, by task: two tasks may be about one class."""
    defined = Exercise(exercise).definitions(folder)
    found = {
        name: defined.get(name, defined.get(task.call.partition("(")[0])) for name, task in records.tasks(exercise).items()
    }
    return {name: code for name, code in found.items() if code is not None}


@cache
def task_of(exercise: str, task: str) -> check.Task:
    """The task. What it records on ranks is recorded once for all tests."""
    own = records.tasks(exercise)[task]
    return replace(own, make=cache(own.make)) if task in RECORDED else own


def drawn(exercise: str, task: str, seed: int) -> check.Task:
    """The task on its fewest ranks, asked with this seed."""
    own = task_of(exercise, task)
    return replace(own, seed=seed, worlds=own.worlds[:1])


def pytest_generate_tests(metafunc) -> None:
    """Makes an exercise's cases, by the file's name: one mistake per task in `make test`, all in `make test-all`."""
    exercise = metafunc.module.__name__.rpartition("test_")[2]
    tasks = records.tasks(exercise)
    if "answer" in metafunc.fixturenames:
        params = [
            pytest.param(exercise, answer, id=f"{answer.task}-{answer.name}", marks=[] if kept else pytest.mark.whole)
            for task in tasks
            for answer, kept in _kept(of_task(exercise, task))
        ]
        metafunc.parametrize(("exercise", "answer"), params)
    elif "task" in metafunc.fixturenames:
        metafunc.parametrize(("exercise", "task"), [(exercise, task) for task in tasks], ids=list(tasks))


def _kept(own: list[Answer]) -> list[tuple[Answer, bool]]:
    """Each with whether it belongs to every run: the task's first mistake that has a sentence, or its last one."""
    mistakes = [answer for answer in own if answer.kind == MISTAKE]
    first = next((answer for answer in mistakes if answer.hint), mistakes[-1])
    return [(answer, answer is first) for answer in own]


@pytest.mark.parametrize("ranks", matrix(["all", "most"], ["most"]))
def test_the_solution_gets_all_points(exercise, task, ranks, shared_ranks):
    """On the most ranks; mistakes are judged on three as a rule."""
    own = task_of(exercise, task)
    report = replace(own, worlds=own.worlds[-1:] if ranks == "most" else own.worlds)(definitions(exercise, "solutions")[task])
    assert (report.passed, report.points) == (True, report.out_of), report


def test_what_learners_get_is_not_written_yet(exercise, task, shared_ranks):
    report = task_of(exercise, task)(definitions(exercise, "exercises")[task])
    assert (report.passed, report.points) == (False, 0), report
    assert "not written yet" in repr(report)


def test_an_answer_is_judged_as_its_author_says(exercise, answer, shared_ranks):
    narrow, done = answers.tried(task_of(exercise, answer.task), answer)
    record = shipped(exercise)[answer.task]
    report = check.report(narrow, answers.given(narrow, answer.code), done, record)
    assert not (why := records.problem(answer, report)), f"{why}\n{report}"
    if answer.kind == MISTAKE and answer.hint:
        stored = next(one for one in record.mistakes if one.name == answer.name)
        made = answers.mistake_of(narrow, answer, done, record)
        assert (made.hint, made.troubles) == (stored.hint, stored.troubles)
        assert same(fact(made.changed), fact(stored.changed)), "`make exercises` would store something else"
    if answer.kind == RIGHT:
        for one in done:
            for seen, stored in zip(one.seen, record.right[one.key], strict=True):
                assert same(looks(narrow, seen), looks(narrow, stored)), "`make exercises` would store something else"


def test_the_judge_asks_what_no_table_of_ours_answers(exercise, task):
    asked = []
    for seed in (0, 777):
        own = drawn(exercise, task, seed)
        given = [own.make(case, rank, n, own.own_seed) for n in own.worlds for case in own.cases_on(n) for rank in range(n)]
        asked.append({b"".join(map(bytes, messages.pack(one))) for one in given})
    assert (asked[1] <= asked[0]) == (task in ALIKE_FOR_ALL)


def test_the_answers_that_the_judge_expects_are_not_those_that_all_see(exercise, task, shared_ranks):
    own = drawn(exercise, task, 777)
    known = [*chain(*(ranks for key, ranks in shipped(exercise)[task].right.items() if key.startswith(f"{own.worlds[0]}/")))]
    code = next(answer.code for answer in of_task(exercise, task) if answer.kind == RIGHT)
    done = [one for each in own.tried(answers.given(own, code)) for one in each.seen]
    asked, seen = ([looks(own, one) for one in every] for every in (done, known))
    for i in (i for i, judge in enumerate(own.judges) if judge.values and not judge.needs):
        new, old = ([v for one in of for name, v in one.items() if name.startswith(f"{i} ")] for of in (asked, seen))
        assert not same(new, old) or task in (*ALIKE_FOR_ALL, IN_WORDS), own.judges[i].what


def test_it_has_one_right_answer_and_some_mistakes_and_all_that_is_stored_is_theirs(exercise, task):
    own = of_task(exercise, task)
    mistakes = [answer for answer in own if answer.kind == MISTAKE]
    assert [answer.kind for answer in own].count(RIGHT) == 1
    assert len(mistakes) >= FEWEST
    assert len({answer.name for answer in own}) == len(own)
    assert [one.name for one in shipped(exercise)[task].mistakes] == [answer.name for answer in mistakes if answer.hint]
