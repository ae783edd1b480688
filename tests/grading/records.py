"""Runs solutions/*/mistakes.py and writes grade/data/*.json, as `make exercises` does.

python -m tests.grading.records 05_pipeline            writes one exercise's records, and says what is not as it should be
python -m tests.grading.records 05_pipeline Assigns    shows the report of one answer, or of all of a task, and writes nothing
"""

import sys
import time
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from manyranks.grade import answers, check
from manyranks.grade.answers import ALSO, MISTAKE, Answer, dumped, tasks
from manyranks.grade.check import FOLDER, Record, Task, loaded, shipped
from manyranks.grade.trial import Trial
from manyranks.measure.fingerprints import same
from manyranks.report import Report
from tests.conftest import ROOT


class Ran(NamedTuple):
    """An answer's runs. task: on their worlds."""

    task: Task
    done: list[Trial]
    seconds: float


def exercises() -> list[str]:
    """Those that have mistakes."""
    return sorted(file.parent.name for file in (ROOT / "solutions").glob("*/mistakes.py"))


def answers_of(exercise: str) -> list[Answer]:
    if not (file := ROOT / "solutions" / exercise / "mistakes.py").exists():
        raise ValueError(f"{file} is missing: it holds the exercise's answers")
    return answers.answers(file)


def ran(exercise: str, names: Collection[str] = ()) -> dict[Answer, Ran]:
    """All answers, or the ones with these names or tasks, each run once."""
    known, own, found = tasks(exercise), answers_of(exercise), {}
    if not known:
        raise ValueError(f"no module of manyranks.grade has a Task of {exercise!r}; grade/__init__.pyi must name the module")
    if strange := {answer.task for answer in own} - set(known):
        raise ValueError(f"mistakes.py has answers to {sorted(strange)}; the tasks of {exercise} are {list(known)}")
    if strange := set(names) - set(known) - {answer.name for answer in own}:
        raise ValueError(f"{exercise} has no answer and no task called {sorted(strange)}; its tasks are {list(known)}")
    for answer in own:
        if not names or answer.name in names or answer.task in names:
            started = time.monotonic()
            narrow, done = answers.tried(known[answer.task], answer)
            found[answer] = Ran(narrow, done, time.monotonic() - started)
    return found


def made(exercise: str, runs: dict[Answer, Ran]) -> dict[str, Record]:
    """Task -> record, of these runs."""
    by_task = {name: [(answer, one.done) for answer, one in runs.items() if answer.task == name] for name in tasks(exercise)}
    return {name: answers.record_of(task, by_task[name]) for name, task in tasks(exercise).items()}


def kept(new: Mapping[str, Record], old: Mapping[str, Record]) -> dict[str, Record]:
    """The new records, or the old ones that they equal but for rounding: processors differ in the last digits."""
    return {name: old[name] if name in old and same(_facts(old[name]), _facts(one)) else one for name, one in new.items()}


def _facts(record: Record) -> list:
    return [{case: [vars(seen) for seen in ranks] for case, ranks in record.right.items()}, record.mistakes]


def problem(answer: Answer, report: Report, others: Iterable[Answer] = ()) -> str:
    """Where the report of an answer is not what its author says; empty where it is. others: whose sentence it may have."""
    if answer.kind != MISTAKE:
        return "" if report.points == report.out_of and report.passed else f"it is right, and gets {report.points:g}"
    said = repr(report)
    if report.passed:
        where = "" if answer.on else "; where other worlds show it, write on=(2, 3, 4)"
        return f"nobody has noticed that it is wrong{where}"
    if missing := [words for words in (answer.hint, answer.says) if words not in said]:
        instead = [other.name for other in others if other.hint and other.hint != answer.hint and other.hint in said]
        shown = f"; it has the sentence of {' and '.join(dict.fromkeys(instead))}" if instead else ""
        return f"the report does not say {missing[0]!r}{shown}"
    return "" if abs(report.points - answer.points) < 0.011 else f"it gets {report.points:g} points, not {answer.points:g}"


def main(exercise: str, *names: str) -> int:
    """Writes an exercise's records, or shows reports. Returns how many answers are not judged as they should be."""
    runs = ran(exercise, names)
    if names:
        found = shipped(exercise)
    else:
        file = FOLDER / f"{exercise}.json"
        old = loaded(file.read_text()) if file.exists() else {}
        file.write_text(text := dumped(kept(made(exercise, runs), old)))
        found = loaded(text)
    wrong = 0
    for answer, one in runs.items():
        report = check.report(one.task, answers.given(one.task, answer.code), one.done, found[answer.task])
        why = problem(answer, report, [other for other in runs if other.task == answer.task])
        wrong += bool(why)
        if names or why:
            print(
                f"── {answer.task} {answer.name} ({answer.kind}, {one.seconds:.1f} s): {why or 'as it should be'}\n{report}\n"
            )
    kinds = [answer.kind for answer in runs]
    number = f"{kinds.count(MISTAKE)} mistakes, {kinds.count(ALSO)} other right answers"
    print(f"{exercise}: {number}, {wrong} not as they should be, {sum(one.seconds for one in runs.values()):.0f} s")
    return wrong


if __name__ == "__main__":
    try:
        sys.exit(min(1, sum(main(exercise, *sys.argv[2:]) for exercise in sys.argv[1:2] or exercises())))
    except ValueError as error:
        sys.exit(str(error))
