"""What every exercise's zoo asks of a report: full marks for what is right, none for nothing, an own hint for each slip."""

import re
from collections.abc import Callable, Sequence

import pytest

from manyranks.grade import Report
from tests.conftest import ROOT
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


def assert_own_hint(report: Report, answer: Wrong) -> None:
    """It says what the zoo says of the answer, shows no line that is not the learner's, and has points for what is right."""
    text = repr(report).replace("\n    hint:", "; hint:")
    assert answer.says in text, report
    assert not report.passed, report
    assert report.points < report.out_of * (1 if answer.right_values else 0.5), report
    assert not answer.right_values or report.lines[1].ok, report
    assert not _NOT_THE_LEARNERS.search(text), report


def assert_enough(zoo: Sequence[Wrong], task: str, least: int = 6) -> None:
    """The task has at least so many wrong answers."""
    assert sum(answer.task == task for answer in zoo) >= least
