"""The engine of every check: from what was measured on real ranks to a report with points."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from manyranks.grade.old import verdict
from manyranks.grade.old.report import Line, Report, listed
from manyranks.grade.old.trial import Case, Trial, trials
from manyranks.grade.old.verdict import Aspect, Finding, Judged

_WITHOUT_VALUES = 0.4  # wrong values leave less than half of the points, whatever else holds


@dataclass(frozen=True)
class Task:
    """One task. points: for all of it; cases: number of ranks -> what to run there, in order.

    aspects: what it is judged by, the values first, whole or in parts; sizes: of the worlds; only_two: the hint where 2 ranks
    alone are right.
    """

    name: str
    points: float
    cases: Callable[[int], list[Case]]

    aspects: ClassVar[tuple[Aspect, ...]]
    sizes: ClassVar[tuple[int, ...]] = (2, 3, 4)
    only_two: ClassVar[str] = "on 2 ranks the next rank is also the previous one, and one step is enough; draw it for 3"
    part: ClassVar[bool] = False  # whether cases that ended well count where a later one did not

    def refusal(self, tried: list[Trial]) -> Finding | None:
        """Why there are no points at all, if so."""

    def line(self, finding: Finding, function) -> Line:
        """The report's first wrong line, perhaps with a better hint."""
        return finding.line

    def remarks(self, trial: Trial) -> list[Line]:
        """Lines on a right answer, for no points."""
        return []


def check(task: Task, function) -> Report:
    """Runs the function on the task's worlds and judges what happened under each aspect.

    Always returns, within 20 s on a machine that does nothing else; what the function raises, prints or returns becomes a line
    of the report.
    """
    if not callable(function):
        return _refused(task, Finding(Line(False, f"{task.name} is not a function", hint="run the cell above that defines it")))
    with _one_thread():
        return _checked(task, function)


def _checked(task: Task, function) -> Report:
    tried = trials(function, task.cases, task.sizes, task.part)
    if refusal := _unwritten(function, tried[-1]) or task.refusal(tried):
        return _refused(task, refusal)
    done = [verdict.judged(task, trial) for trial in tried]
    findings = [_runs(task, tried), *verdict.findings(task, done), *_only_two_ranks(task, done)]
    wrong = [finding for finding in findings if not finding.line.ok]
    lines = [task.line(f, function) if wrong and f is wrong[0] else f.line for f in findings]
    lines += [] if wrong else task.remarks(tried[-1])
    shown = wrong[0].trial if wrong else tried[-1]
    return Report(task.name, round(task.points * _share(task, done), 2), task.points, _once(lines), *_printed(shown))


@contextmanager
def _one_thread() -> Iterator[None]:
    """Inside, torch computes with one thread: a check's tensors are small, and its ranks use the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _refused(task: Task, why: Finding) -> Report:
    return Report(task.name, 0.0, task.points, (why.line,), *_printed(why.trial))


def _unwritten(function, trial: Trial) -> Finding | None:
    """Where this function, or one that it calls, has no answer yet."""
    if not trial.trouble or not (name := trial.trouble.unwritten):
        return None
    if name == getattr(function, "__name__", "") or name in getattr(function, "__dict__", {}):
        return Finding(Line(False, "not written yet", hint="replace `raise NotImplementedError` by your answer"))
    return Finding(Line(False, f"{name} is not written yet", hint=f"this answer calls {name}: write that one first"))


def _runs(task: Task, tried: list[Trial]) -> Finding:
    what = f"runs on {listed([str(n) for n in task.sizes])} ranks" if task.sizes != (1,) else "runs"
    for trial in tried:
        if found := trial.trouble:
            return Finding(Line(False, what, f"{trial.case}, {found.problem}", found.hint), trial)
    return Finding(Line(True, what))


def _only_two_ranks(task: Task, done: list[Judged]) -> list[Finding]:
    """A finding where all is right on 2 ranks and nothing but 2 ranks."""
    right = {n: _values_hold(task, one) for n in task.sizes if (one := [d for d in done if d.trial.case.n == n])}
    if len(right) > 1 and right.pop(2, False) and not any(right.values()):
        return [Finding(Line(False, "works on any number of ranks", "right on 2 ranks only", task.only_two))]
    return []


def _once(lines: list[Line]) -> tuple[Line, ...]:
    """The lines, each hint at the first that has it."""
    hints = [line.hint for line in lines]
    return tuple(replace(line, hint="" if line.hint in hints[:i] else line.hint) for i, line in enumerate(lines))


def _share(task: Task, done: list[Judged]) -> float:
    """Of the points; where cases count in part, those that ended well as if they were all, times their part of all."""
    if not task.part:
        return _share_of(task, done)
    ended = [one for one in done if one.verdicts]
    return _share_of(task, ended) * len(ended) / sum(len(task.cases(n)) for n in task.sizes)


def _share_of(task: Task, done: list[Judged]) -> float:
    worlds = [[one for one in done if one.trial.case.n == n] for n in task.sizes]
    values = [_values_hold(task, world) for world in worlds]
    share = 0.0
    for aspect in task.aspects:
        if aspect.each_world or aspect.for_itself:
            counts = [value or aspect.for_itself for value in values]
            right = [count and _all_hold(aspect, world) for count, world in zip(counts, worlds, strict=True)]
            share += aspect.share * sum(right) / len(worlds)
        elif all(worlds):
            share += aspect.share * _all_hold(aspect, done)
    return share if all(values) or _parts(task) else min(share, _WITHOUT_VALUES)


def _parts(task: Task) -> list[Aspect]:
    """Of the values, where they are judged one by one."""
    return [aspect for aspect in task.aspects if aspect.for_itself]


def _values_hold(task: Task, done: list[Judged]) -> bool:
    return all(_all_hold(aspect, done) for aspect in _parts(task) or task.aspects[:1])


def _all_hold(aspect: Aspect, done: list[Judged]) -> bool:
    return bool(done) and all(one.holds(aspect) for one in done)


def _printed(trial: Trial | None) -> tuple[str, str]:
    """What the ranks printed in the trial that the report is about, and which one that is."""
    return (trial.printed, str(trial.case)) if trial and trial.printed else ("", "")
