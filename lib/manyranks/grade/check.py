"""The engine of every check: from what was measured on real ranks to a report with points."""

from collections.abc import Callable
from dataclasses import dataclass

from manyranks.grade import judge
from manyranks.grade.report import Line, Report, listed
from manyranks.grade.trial import SIZES, Case, Trial, trials

# Right values first: wrong ones leave less than half of the points, whatever else holds.
_VALUES, _TRAFFIC, _MESSAGES, _INPUT = 0.5, 0.25, 0.15, 0.1
_WITHOUT_VALUES = 0.4


@dataclass(frozen=True)
class Task:
    """One task. points: for all of it; cases: number of ranks -> what to run; algorithm: its name in a report, "a ring".

    reminder: the hint for messages that no known mistake explains; in_order: whether a rank's messages must come in the
    order of theory.
    """

    name: str
    points: float
    algorithm: str
    cases: Callable[[int], list[Case]]
    reminder: str
    in_order: bool = True


def check(task: Task, function) -> Report:
    """Runs the function on worlds of 2, 3 and 4 ranks and judges values, bytes, messages and what became of the input.

    Always returns, within 20 s; what the function raises, prints or returns becomes a line of the report.
    """
    if not callable(function):
        return _refused(task, Line(False, f"{task.name} is not a function", hint="run the cell above that defines it"))
    tried = trials(function, task.cases)
    if tried[-1].unwritten:
        return _refused(task, Line(False, "not written yet", hint="replace `raise NotImplementedError` by your answer"))
    if foreign := judge.foreign_call(tried):
        return _refused(task, foreign)
    done = [judge.judged(task, trial) for trial in tried]
    lines = [_runs(tried), *judge.lines(done), *judge.only_two_ranks(done)]
    failed = not all(line.ok for line in lines)
    return Report(task.name, round(task.points * _share(done), 2), task.points, tuple(lines), _printed(done) if failed else "")


def _refused(task: Task, line: Line) -> Report:
    return Report(task.name, 0.0, task.points, (line,))


def _runs(tried: list[Trial]) -> Line:
    what = f"runs on {listed([str(n) for n in SIZES])} ranks"
    for trial in tried:
        if trial.problem:
            return Line(False, what, f"on {trial.case.n} ranks, {trial.problem}", trial.hint)
    return Line(True, what)


def _share(done: list[judge.Judged]) -> float:
    """Of the points: values, and an untouched input beside them, count world by world; bytes and messages must hold on all."""
    worlds = [[one for one in done if one.trial.case.n == n] for n in SIZES]
    values = [_all_hold("values", world) for world in worlds]
    undamaged = [right and _all_hold("input", world) for right, world in zip(values, worlds, strict=True)]
    share = (_VALUES * sum(values) + _INPUT * sum(undamaged)) / len(SIZES)
    if all(worlds):
        share += _TRAFFIC * _all_hold("traffic", done) + _MESSAGES * _all_hold("messages", done)
    return share if all(values) else min(share, _WITHOUT_VALUES)


def _all_hold(aspect: str, done: list[judge.Judged]) -> bool:
    return bool(done) and all(one.holds(aspect) for one in done)


def _printed(done: list[judge.Judged]) -> str:
    """What the ranks printed in the first trial that went wrong."""
    wrong = [one.trial for one in done if not (one.verdicts and all(verdict.ok for verdict in one.verdicts.values()))]
    return wrong[0].printed if wrong else ""
