"""The engine of every check: from what was measured on real ranks to a report with points."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from manyranks.grade import judge
from manyranks.grade.judge import Finding
from manyranks.grade.report import Line, Report, listed
from manyranks.grade.trial import SIZES, Case, Trial, trials

# Right values first: wrong ones leave less than half of the points, whatever else holds.
_VALUES, _TRAFFIC, _MESSAGES, _INPUT = 0.5, 0.25, 0.15, 0.1
_WITHOUT_VALUES = 0.4
_CUTS = "cut with torch.tensor_split: torch.chunk and torch.split make other sizes where N does not divide E"


@dataclass(frozen=True)
class Task:
    """One task. points: for all of it; cases: number of ranks -> what to run; algorithm: its name in a report, "this ring".

    reminder: the hint for messages that no known mistake explains; argument: the name of the function's tensor; in_order:
    whether a rank's messages must come in the order of theory; remark: a line on a right answer, for no points.
    """

    name: str
    points: float
    algorithm: str
    cases: Callable[[int], list[Case]]
    reminder: str
    argument: str = "x_E"
    in_order: bool = True
    remark: Callable[[Trial], Line] | None = None


def check(task: Task, function) -> Report:
    """Runs the function on worlds of 2, 3 and 4 ranks and judges values, bytes, messages and what became of the input.

    Always returns, within 20 s; what the function raises, prints or returns becomes a line of the report.
    """
    if not callable(function):
        return _refused(task, Finding(Line(False, f"{task.name} is not a function", hint="run the cell above that defines it")))
    tried = trials(function, task.cases)
    if refusal := _unwritten(function, tried[-1]) or judge.foreign_call(tried):
        return _refused(task, refusal)
    done = [judge.judged(task, trial) for trial in tried]
    findings = [_runs(tried), *judge.findings(done), *judge.only_two_ranks(done)]
    wrong = [finding for finding in findings if not finding.line.ok]
    lines = [_recut(f, function) if wrong and f is wrong[0] else f.line for f in findings]
    lines += [task.remark(tried[-1])] if task.remark and not wrong else []
    shown = wrong[0].trial if wrong else tried[-1]
    return Report(task.name, round(task.points * _share(done), 2), task.points, _once(lines), *_printed(shown))


def _refused(task: Task, why: Finding) -> Report:
    return Report(task.name, 0.0, task.points, (why.line,), *_printed(why.trial))


def _unwritten(function, trial: Trial) -> Finding | None:
    """Where this function, or one that it calls, has no answer yet."""
    if not trial.trouble or not (name := trial.trouble.unwritten):
        return None
    if name == getattr(function, "__name__", ""):
        return Finding(Line(False, "not written yet", hint="replace `raise NotImplementedError` by your answer"))
    return Finding(Line(False, f"{name} is not written yet", hint=f"this answer calls {name}: write that one first"))


def _runs(tried: list[Trial]) -> Finding:
    what = f"runs on {listed([str(n) for n in SIZES])} ranks"
    for trial in tried:
        if found := trial.trouble:
            return Finding(Line(False, what, f"{trial.case}, {found.problem}", found.hint), trial)
    return Finding(Line(True, what))


def _recut(finding: Finding, function) -> Line:
    """The line with another hint where torch.chunk explains it: of the sizes tried, only 7 on 3 ranks show the difference."""
    names = getattr(getattr(function, "__code__", None), "co_names", ())
    cuts = {"chunk", "split"}.intersection(names)
    trial = finding.trial
    shows = trial is not None and trial.case.n == 3 and not (trial.trouble and trial.trouble.hung)
    return replace(finding.line, hint=_CUTS) if cuts and shows else finding.line


def _once(lines: list[Line]) -> tuple[Line, ...]:
    """The lines, each hint at the first that has it."""
    hints = [line.hint for line in lines]
    return tuple(replace(line, hint="" if line.hint in hints[:i] else line.hint) for i, line in enumerate(lines))


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


def _printed(trial: Trial | None) -> tuple[str, str]:
    """What the ranks printed in the trial that the report is about, and which one that is."""
    return (trial.printed, str(trial.case)) if trial and trial.printed else ("", "")
