"""What every exercise's zoo asks of a report: full marks for what is right, none for nothing, an own hint for each slip.

The functions from `solution` on make the tests that exercises share: each returns one, and a file gives it its name.
"""

import functools
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from itertools import combinations

import pytest

from manyranks.grade import Report
from manyranks.grade.old import check, trial
from manyranks.grade.old.check import Task
from manyranks.grade.old.compare import same
from tests.conftest import ROOT, matrix
from tests.grading.exercise import Exercise
from tests.grading.zoo.wrong import Wrong

_GRADERS = "|".join(sorted(file.stem for file in (ROOT / "lib" / "manyranks" / "grade").rglob("[a-z]*.py")))
_NOT_THE_LEARNERS = re.compile(rf"grade/|\b({_GRADERS}|module)\.py|<string>|Blind")


def each_wrong(zoo: Sequence[Wrong]) -> pytest.MarkDecorator:
    """Above a test: it runs with each `answer` of the zoo."""
    return pytest.mark.parametrize("answer", zoo, ids=[f"{answer.task}-{answer.function.__name__}" for answer in zoo])


def each_right(answers: Sequence[tuple[str, Callable]]) -> pytest.MarkDecorator:
    """Above a test: it runs with each `task` and `answer`."""
    return pytest.mark.parametrize(("task", "answer"), answers, ids=[f"{task}-{answer.__name__}" for task, answer in answers])


def named(zoo: Sequence[Wrong], *words: str) -> Wrong:
    """The first of the zoo's answers whose task and name these are, or whose name this is."""
    return next(answer for answer in zoo if {*words} <= {answer.task, answer.function.__name__})


def assert_full_marks(report: Report, points: float | None = None) -> None:
    """points: what all of the task is worth."""
    assert (report.passed, report.points) == (True, report.out_of), report
    assert points in (None, report.out_of), report


def assert_no_marks(report: Report, says: str = "not written yet") -> None:
    """says: why."""
    assert (report.points, report.passed) == (0, False), report
    assert says in repr(report), report


def assert_own_hint(report: Report, answer: Wrong, in_parts: bool = False) -> None:
    """It says what the zoo says of the answer, shows no line that is not the learner's, and has points for what is right.

    in_parts: the values are judged in parts, of which some may be right.
    """
    text = repr(report).replace("\n    hint:", "; hint:")
    assert answer.says in text, report
    assert not report.passed, report
    assert report.points < report.out_of * (1 if answer.right_values or in_parts else 0.5), report
    assert not answer.right_values or report.lines[1].ok, report
    assert not _NOT_THE_LEARNERS.search(text), report


def assert_told_apart(known: Iterable) -> None:
    """Of all known mistakes, the first one that explains what came out is told: no two with other hints have one result."""
    for one, other in combinations(list(known), 2):
        names = [own.keys() & theirs.keys() for own, theirs in zip(one.results, other.results, strict=True)]
        alike = all(
            same(own[name], theirs[name], 1e-9)
            for shared, own, theirs in zip(names, one.results, other.results, strict=True)
            for name in shared
        )
        assert not (alike and all(names)) or one.hint == other.hint, (one.hint, other.hint)


def solution(exercise: Exercise, points: dict[str, float]) -> Callable:
    """That of each task gets full marks. points: task -> what it is worth."""

    @pytest.mark.parametrize("task", points)
    def test(task):
        assert_full_marks(exercise.check(task, exercise.definitions("solutions")[task]), points[task])

    return test


def untouched(exercise: Exercise, tasks: Collection[str]) -> Callable:
    """What learners get has no points and is not written yet."""

    @pytest.mark.parametrize("task", tasks)
    def test(task, shared_ranks):
        assert_no_marks(exercise.check(task, exercise.definitions("exercises")[task]))

    return test


def alone(exercise: Exercise, points: dict[str, float]) -> Callable:
    """The solution of each task gets full marks where no other task is written. points: task -> what it is worth."""

    @pytest.mark.parametrize("task", points)
    def test(task, shared_ranks):
        assert_full_marks(exercise.check(task, exercise.definitions("solutions", {task})[task]), points[task])

    return test


def reports(exercise: Exercise, kind: type[Task], first: Collection[str] = ()):
    """The fixture `report_of`. kind: the tasks whose `sizes` an answer may set; first: those whose first case is enough."""
    checked = check._checked

    @pytest.fixture
    def report_of(shared_ranks, monkeypatch):
        """What a check says of a wrong answer on three ranks, or as the answer says: in which cases it shows, and on how many
        ranks. The solution has shown that all cases and sizes are run. whole: all cases, as learners have it.
        """

        def report(answer: Wrong, whole: bool = False) -> Report:
            usual = slice(1) if answer.task in first else slice(None)
            ranks, some = getattr(answer.function, "ranks", 3), getattr(answer.function, "cases", usual)
            run = slice(None) if whole else some
            monkeypatch.setattr(kind, "sizes", getattr(answer.function, "sizes", (ranks,)))
            monkeypatch.setattr(check, "_checked", lambda task, function: checked(shortened(task, run), function))
            return checked_once(exercise, answer, whole)

        return report

    return report_of


def shortened(task: Task, some: slice) -> Task:
    """With these of its cases."""
    return replace(task, cases=lambda n: task.cases(n)[some])


@functools.cache
def checked_once(exercise: Exercise, answer: Wrong, whole: bool) -> Report:
    """whole: with all cases. It may run for its `seconds`: tests of all checks have shown how long a run may take."""
    seconds = getattr(answer.function, "seconds", trial._RUN_SECONDS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trial, "_RUN_SECONDS", seconds)
        patch.setattr(trial, "_ALL_SECONDS", max(seconds, trial._ALL_SECONDS))
        if "loop" in answer.says:  # it would be late on any machine
            patch.setattr(trial, "slowness", lambda: 1.0)
        return exercise.check(answer.task, answer.function)


def own_hints(zoo: Sequence[Wrong], in_parts: Collection[str] = ()) -> Callable:
    """Each wrong answer gets the hint that is meant for it. in_parts: tasks whose values are judged in parts."""

    @pytest.mark.few(60)
    @pytest.mark.parametrize("cases", matrix(["where it shows", "all cases"], ["where it shows"]))
    @each_wrong(zoo)
    def test(answer, cases, report_of):
        assert_own_hint(report_of(answer, cases == "all cases"), answer, answer.task in in_parts)

    return test


def mistakes(zoo: Sequence[Wrong], known: dict[str, tuple[str, ...]]) -> Callable:
    """Those that the exercise is about are told. known: mistake -> words for `named`, then words of the report."""

    @pytest.mark.parametrize("mistake", known)
    def test(mistake, report_of):
        *words, says = known[mistake]
        report = report_of(named(zoo, *words))
        assert says in repr(report), report

    return test


def a_third_at_most(zoo: Sequence[Wrong], ideas_missed: Sequence[tuple[str, str]]) -> Callable:
    """Of the points, for who misses the idea of a task. ideas_missed: words for `named`."""

    @pytest.mark.parametrize("missed", ideas_missed)
    def test(missed, report_of):
        report = report_of(named(zoo, *missed))
        assert report.points <= report.out_of / 3, report

    return test


def less_than_half(zoo: Sequence[Wrong], ideas_missed: Sequence[tuple[str, str]]) -> Callable:
    """Of the points, for who misses the idea of a task. ideas_missed: words for `named`."""

    @pytest.mark.parametrize("missed", ideas_missed)
    def test(missed, report_of):
        report = report_of(named(zoo, *missed))
        assert report.points < report.out_of / 2, report

    return test


def half_or_more(zoo: Sequence[Wrong], slips: Sequence[tuple[str, str]]) -> Callable:
    """Of the points, but not all, for who has the idea. slips: words for `named`."""

    @pytest.mark.parametrize("slip", slips)
    def test(slip, report_of):
        report = report_of(named(zoo, *slip))
        assert report.out_of / 2 <= report.points < report.out_of, report

    return test


def full_marks(exercise: Exercise, answers: Sequence[tuple[str, Callable]], *kinds: type[Task]) -> Callable:
    """For other right answers than the solution, on 3 ranks or on all sizes. kinds: the tasks whose `sizes` say so."""

    @pytest.mark.parametrize("sizes", matrix(["3 ranks", "all sizes"], ["3 ranks"]) if kinds else ["all sizes"])
    @each_right(answers)
    def test(task, answer, sizes, shared_ranks, monkeypatch):
        for kind in kinds if sizes == "3 ranks" else ():
            monkeypatch.setattr(kind, "sizes", (3,))
        assert_full_marks(exercise.check(task, answer))

    return test


def enough(zoo: Sequence[Wrong], tasks: Collection[str], least: int = 6) -> Callable:
    """Each task has at least so many wrong answers."""

    @pytest.mark.parametrize("task", tasks)
    def test(task):
        assert sum(answer.task == task for answer in zoo) >= least

    return test
