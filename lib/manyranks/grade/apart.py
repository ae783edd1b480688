"""The score of record: checks in a process that never runs what learners wrote. Their code runs on confined ranks only."""

import secrets
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import NamedTuple

from nbformat import NotebookNode

from manyranks import grade
from manyranks.grade import check as checking
from manyranks.grade import trial
from manyranks.grade.absent import Known, known, stand_in
from manyranks.grade.answers import Solved
from manyranks.grade.check import Line, Report, Task
from manyranks.grade.old import trial as old
from manyranks.grade.submission import Check, checks
from manyranks.world.confine import Confined
from manyranks.world.errors import WorldError
from manyranks.world.world import World

_SECONDS = 12.0  # that the cells themselves may take
SOLUTIONS = Path("solutions")  # beside exercises/, where a course has them


class Judged(NamedTuple):
    """One check: its report, and the seconds that it took."""

    check: Check
    report: Report
    seconds: float

    @property
    def points(self) -> float:
        """Of those that the cell is worth, the share that the report gives."""
        return round(self.report.points / self.report.out_of * self.check.points, 2) if self.report.out_of else 0.0


def judge(notebook: NotebookNode) -> list[Judged]:
    """All checks of a notebook, in their order. Nothing that a cell does comes back but plain data."""
    with _scratch():
        return [_judged(check) for check in checks(notebook)]


@contextmanager
def _scratch() -> Iterator[None]:
    """Inside, the worlds of checks are confined to a folder that is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="manyranks-judge-") as folder:
        before = trial.confined, trial.seed
        trial.confined = old.confined = Confined(folder)
        trial.seed = _seed()
        try:
            yield
        finally:
            (trial.confined, trial.seed), old.confined = before, before[0]


def _judged(check: Check) -> Judged:
    started = time.monotonic()
    return Judged(check, _report(check), time.monotonic() - started)


def _report(check: Check) -> Report:
    """Whatever goes wrong is a line of it, and no points."""
    try:
        return _checked(check)
    except Exception as error:  # what came back from the ranks was not what a check notes
        line = Line(
            False, "can be judged", f"{type(error).__name__}: {error}"[:300], "leave the check and the library as they are"
        )
        return Report(check.name, 0.0, check.points, (line,))


def _checked(check: Check) -> Report:
    task = grade
    for part in check.call:
        task = getattr(task, part)
    told = _asked(check)
    if told.kind == "missing":
        line = Line(False, f"{check.name} is there", told.error, "restart the kernel, run all cells, and look at this one")
        return Report(check.name, 0.0, check.points, (line,))
    answer = stand_in(check.source, check.name, told) if told.kind in ("class", "function") else told.kind
    return _judged_by(task, answer) if isinstance(task, Task) else task(answer)


def _judged_by(task: Task, answer) -> Report:
    """By what the solution does with numbers that nobody has seen; what the library has serves where there is no solution."""
    solved = _solved(task.exercise)
    if solved is None or not callable(answer):
        trial.seed = 0
        return task(answer)
    right, tried = solved.right(task), task.tried(answer)
    report = checking.report(task, answer, tried, right)
    if report.passed or (tried[-1].trouble and tried[-1].trouble.unwritten):
        return report
    return checking.report(task, answer, tried, solved.whole(task))


@cache
def _seed() -> int:
    """Of this process; 0 is the library's own."""
    return 1 + secrets.randbelow(2**20)


@cache
def _solved(exercise: str) -> Solved | None:
    file = SOLUTIONS / exercise / "mistakes.py"
    return Solved(file) if file.exists() else None


def _asked(check: Check) -> Known:
    """What a rank says of the learner's object, once the cells have run."""
    try:
        with World(1, backend="gloo", timeout=_SECONDS, confined=trial.confined) as world:
            told = world.run(known, check.source, check.name)[0]
    except WorldError as error:
        return Known("missing", error=f"{error}".splitlines()[0][:300])
    return told if isinstance(told, Known) else Known("missing", error="the cells returned what is no answer")
