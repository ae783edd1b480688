"""A task, and its check: from what was measured on real ranks to a report with points and hints.

`check` runs an answer and `report` concludes, in the steps below: verdicts, lines with their hints, points.
"""

import json
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import torch

from manyranks import scores
from manyranks.given.numbers import seed_of
from manyranks.grade.judges import Judge, Verdict
from manyranks.grade.learner import NOTHING_GIVEN, Advice, Allowed, advised
from manyranks.grade.trial import Again, Event, Job, Make, Run, Seen, Sent, Terms, Then, Trial, ran_again, trials
from manyranks.measure.fingerprints import Print, fact, listed
from manyranks.measure.journal import COPY, Stopped
from manyranks.measure.mistakes import Mistake, ending_so, explained
from manyranks.report import UNWRITTEN, Line, Report
from manyranks.world.strangers.trouble import SAME_CHUNK, Trouble, ending, short

FOLDER = Path(__file__).parent / "data"
_WITHOUT_VALUES = 0.4  # wrong values leave less than half of the points, whatever else holds
_ONLY_TWO = "on 2 ranks there is one other rank, the next one and the previous one, and one step is enough; draw it for 3"

Cases = Sequence[Any] | Callable[[int], Sequence[Any]]  # those of all worlds, or how to list those of n ranks


@dataclass(frozen=True)
class Record:
    """The record of a task. right: case -> what each rank does; mistakes: in the order that they are tried in."""

    right: dict[str, list[Seen]]
    mistakes: tuple[Mistake, ...] = ()


@dataclass(frozen=True)
class Task:
    """A task of an exercise. Called with the learner's function or class, it returns a Report.

    exercise: as the notebook has it
    call: how the check calls the answer; its name comes first, or last where that is a method: "Wrapped(module).close()"
    points: for all of it
    run: what a rank does with the answer
    judges: what it is judged by, the values first
    cases: what it runs in, on worlds of the sizes in `worlds`; reports say their `note`, or what str() makes of them
    make: what a rank gets in a case, made by who judges, so that nothing on a rank says what is right; else the case itself
    more: draws cases for the judge where `cases` are the same for all; they run first: a table of `cases` earns nothing
    then: makes results of a case, of what a rank got and of its results, where judges are; Again(…): on another rank
    part: whether cases that ended well count where a later one did not
    allowed: what may be called of what is ready-made
    advice: on what Python and torch say of wrong answers
    common: advice of the exercise, asked after the task's own
    unexplained: for values that no known mistake explains
    seed: of the scripts' numbers; code that makes its own records takes another one
    """

    exercise: str
    call: str
    points: float
    run: Run
    judges: tuple[Judge, ...]
    cases: Cases = ("",)
    worlds: tuple[int, ...] = (2, 3, 4)
    make: Make = lambda case, rank, n, seed: case
    more: Callable[[Random], Cases] | None = None
    then: Then | Again | None = None
    part: bool = False
    allowed: Allowed = NOTHING_GIVEN
    advice: Advice = ()
    common: Advice = ()
    unexplained: str = ""
    seed: int = 0

    def __post_init__(self) -> None:
        if abs((total := sum(judge.share for judge in self.judges)) - 1) > 1e-6:
            raise ValueError(f"the shares of {self.name}'s judges add up to {total:g}, not to 1")
        scores.TASKS.setdefault(self.exercise, {})[self.name] = self.points

    @property
    def name(self) -> str:
        """Returns the answer's name, as the notebook has it."""
        return (re.search(r"\.(\w+)\(\)$", self.call) or re.match(r"(\w+)", self.call))[1]

    @property
    def a_class(self) -> bool:
        """Returns whether the answer is a class, and not called like a function."""
        return self.call[0].isupper()

    def __call__(self, answer) -> Report:
        """Checks the learner's answer on real ranks."""
        return replace(check(self, answer, shipped(self.exercise)[self.name]), exercise=self.exercise)

    @property
    def own_seed(self) -> int:
        """A seed of its own for each task: what one is given tells nothing of what another is given. 0 stays the library's."""
        return self.seed and seed_of(self.seed, self.name)

    def cases_on(self, n: int) -> Sequence[Any]:
        drawn = self.more(Random(self.own_seed)) if self.more and self.seed else ()
        return [case for cases in (drawn, self.cases) for case in (cases(n) if callable(cases) else cases)]

    def tried(self, answer, terms: Terms | None = None) -> list[Trial]:
        """Runs the answer in all cases. terms: of who judges strangers' answers."""
        terms, make = terms or Terms(), lambda *where: self.make(*where, self.own_seed)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # a check's tensors are small, and its ranks use the cores
        try:
            found = trials(answer, Job(self.run, self.allowed, [], ""), make, self.cases_on, self.worlds, self.part, terms)
        finally:
            torch.set_num_threads(threads)
        if isinstance(self.then, Again):
            found = ran_again(found, self.then.then, lambda case: self.make(case, 0, 1, self.own_seed + 1), terms)
        elif self.then:
            found = [one.after(self.then) for one in found]
        return [replace(one, given=()) for one in found]  # which may be large


@dataclass(frozen=True)
class JudgedTrial:
    """A trial with a verdict by each judge; with none where it did not end well."""

    trial: Trial
    verdicts: tuple[Verdict, ...]


@dataclass(frozen=True)
class Finding:
    """A line of the report, and the trial that it is about; None where it is about several."""

    line: Line
    trial: Trial | None = None


def check(task: Task, answer, record: Record, terms: Terms | None = None) -> Report:
    """Runs the answer on the task's worlds and judges what happened. record: of what is right, and of known mistakes.

    Returns within 20 s on a machine that does nothing else; what the answer raises, prints or returns becomes a line of the
    report. Raises NotStarted where ranks can't start.
    """
    if not callable(answer):
        return _refused(task, Finding(Line(False, f"{task.name} is not a function", hint="run the cell above that defines it")))
    return report(task, answer, task.tried(answer, terms), record)


def report(task: Task, answer, tried: list[Trial], record: Record) -> Report:
    if refusal := _unwritten(answer, tried[-1]) or _other_calls(task, tried):
        return _refused(task, refusal)
    done = [JudgedTrial(trial, _verdicts(task, trial, record, tried)) for trial in tried]
    findings = [_runs(task, answer, tried, record)]
    findings += [found for i in range(len(task.judges)) if (found := _finding(task, i, done, record))]
    findings += _only_two_ranks(task, done)
    points = round(task.points * _share(task, done), 2)
    shown = next((finding.trial for finding in findings if not finding.line.ok), tried[-1])
    return Report(task.name, points, task.points, _once([finding.line for finding in findings]), *_printed(shown))


# Where nothing is judged


def _refused(task: Task, why: Finding) -> Report:
    return Report(task.name, 0.0, task.points, (why.line,), *_printed(why.trial))


def _unwritten(answer, trial: Trial) -> Finding | None:
    """Finds whether this answer, or a function that it calls, is not written yet."""
    if not trial.trouble or not (name := trial.trouble.unwritten):
        return None
    if name == getattr(answer, "__name__", "") or name in getattr(answer, "__dict__", {}):
        return Finding(Line(False, UNWRITTEN, hint="replace `raise NotImplementedError` with your answer"))
    return Finding(Line(False, f"{name} is {UNWRITTEN}", hint=f"this answer calls {name}: write that one first"))


def _other_calls(task: Task, tried: list[Trial]) -> Finding | None:
    """Finds an operation that was called and gives no points at all; a call that raised is in the notes alone."""
    for one in tried if task.allowed.only else ():
        for rank in range(one.n):
            noted = [entry.op for entry in one.notes.get(rank, [])]
            counted = [call.op for call in one.seen[rank].calls] if one.seen else []
            if others := [op for op in (*noted, *counted) if op not in task.allowed.only]:
                found = one.where(f"rank {rank} called {others[0]}")
                return Finding(Line(False, "is built from send and receive only", found, task.allowed.hint), one)
    return None


# Verdicts: what each judge says of each trial


def _verdicts(task: Task, trial: Trial, record: Record, tried: list[Trial]) -> tuple[Verdict, ...]:
    """Asks each judge about a trial; not where no case that ended shows what it judges, or an earlier judge is not content."""
    if trial.trouble:
        return ()
    found: list[Verdict] = []
    ended = {one.key for one in tried if not one.trouble}
    ours = [key for key in record.right if key.startswith(f"{trial.n}/")]
    for judge in task.judges:
        shown = {key in ended for key in ours if judge.look and any(map(judge.look, record.right[key]))}
        if shown == {False}:
            found.append(Verdict(None, "not judged: no run that would show it came to its end"))
        elif not all(verdict.ok for verdict in found[: judge.needs]):
            found.append(Verdict(None, "not judged, because a line above isn't right"))
        else:
            try:
                found.append(judge.verdict(trial, record.right[trial.key]))
            except Stopped as error:  # a rank has sent less than its script makes
                found.append(Verdict(False, error.what, error.hint, firm=True))
    return tuple(found)


# Lines and their hints


def _runs(task: Task, answer, tried: list[Trial], record: Record) -> Finding:
    what = f"runs on {listed([str(n) for n in task.worlds])} ranks" if task.worlds != (1,) else "runs"
    for one in tried:
        if found := one.trouble:
            return Finding(Line(False, what, one.where(found.problem), _why_not(task, answer, one, record)), one)
    return Finding(Line(True, what))


def _why_not(task: Task, answer, trial: Trial, record: Record) -> str:
    """The hint on a run that did not end well: of the mistake that ends so, or advice, with the place where it happened."""
    found, right = trial.trouble, record.right.get(trial.key, [])
    told = next((said for judge in task.judges if judge.early and (said := judge.early(trial, right))), "")
    known = ending_so(record.mistakes, ending(found), trial.key)
    advice = told or known or advised(found, (*task.advice, *task.common)) or _on_arguments(task, answer, found)
    general = rf"^({re.escape(SAME_CHUNK)}|{COPY}) \((.*)\)$"  # where more is known, the place is enough
    hint = re.sub(general, r"\2", found.hint) if advice else found.hint
    parts = [part for part in (advice, hint) if part]
    return "; ".join(part for part in parts if not any(part in other != part for other in parts))


def _on_arguments(task: Task, answer, found: Trouble) -> str:
    """Says how torch or the check called something of the learner's that takes other arguments: no line is theirs."""
    called = re.search(r"TypeError: (\S+\.)?(\S+)\(\) (takes|missing|got an unexpected) ", found.problem)
    if found.hint or not (called or "takes no arguments" in found.problem):
        return ""
    if not called or not isinstance(answer, type) or called[2] == "__init__":
        return f"the check calls {task.call}"
    return "PyTorch calls hook(parameter): with this parameter, and nothing else"


def _finding(task: Task, i: int, done: list[JudgedTrial], record: Record) -> Finding | None:
    """The line of the i-th judge; None where no trial ended well.

    Among wrong trials, the one with most ranks tells most mistakes apart; one that was judged goes first.
    """
    judge, ended = task.judges[i], [one for one in done if one.verdicts]
    if not ended:
        return None
    for one in sorted(reversed(ended) if judge.last else ended, key=lambda one: (one.verdicts[i].ok is None, -one.trial.n)):
        verdict = one.verdicts[i]
        if not verdict.ok:
            hint = verdict.hint
            if verdict.ok is False and not verdict.firm:
                known, partly = _known(task, i, one.trial, [e.trial for e in ended], record)
                hint = known or hint or partly or (task.unexplained if judge.values else "")
            return Finding(Line(verdict.ok, judge.what, one.trial.where(verdict.found), hint), one.trial)
    where = "" if task.worlds == (1,) else f"on {listed(sorted({str(one.trial.n) for one in ended}))} ranks, "
    last = ended[-1].verdicts[i]
    if len(ended) < len(done):
        return Finding(Line(True, judge.what, f"{where}as far as it ran"))
    return Finding(Line(True, judge.what, last.found, last.hint if last.found else ""))


def _known(task: Task, i: int, trial: Trial, ended: list[Trial], record: Record) -> tuple[str, str]:
    """The sentences of known mistakes that explain what the i-th judge saw in this trial, as `explained` has them."""
    if not task.judges[i].look:
        return "", ""
    seen = {one.key: [looks(task, rank) for rank in one.seen] for one in ended}
    right = {key: [looks(task, rank) for rank in record.right[key]] for key in seen}
    return explained(record.mistakes, seen, right, i, trial.key)


def looks(task: Task, seen: Seen) -> dict[str, Any]:
    """Returns all that the judges see of a rank: "2 calls" is what the third one sees."""
    found = {}
    for i, judge in enumerate(task.judges):
        with suppress(Stopped):  # of what is missing
            found |= {f"{i} {name}": fact(value) for name, value in (judge.look(seen) if judge.look else {}).items()}
    return found


def _only_two_ranks(task: Task, done: list[JudgedTrial]) -> list[Finding]:
    """A finding where all is right on 2 ranks and nothing but 2 ranks, of ranks that send each other messages."""
    right = {n: _values_hold(task, one) for n in task.worlds if (one := [d for d in done if d.trial.n == n])}
    sends = any(call.op == "send" for one in done for seen in one.trial.seen for call in seen.calls)
    if sends and len(right) > 1 and right.pop(2, False) and not any(right.values()):
        return [Finding(Line(False, "works on any number of ranks", "right on 2 ranks only", _ONLY_TWO))]
    return []


def _once(lines: list[Line]) -> tuple[Line, ...]:
    """The lines, each hint at the first that has it; what a rank has sent may be long."""
    hints = [line.hint for line in lines]
    return tuple(
        replace(line, found=short(line.found), hint="" if line.hint in hints[:i] else short(line.hint))
        for i, line in enumerate(lines)
    )


# Points


def _share(task: Task, done: list[JudgedTrial]) -> float:
    """Returns the share of points; where cases count in part, the share of the ended ones, times their part of all."""
    if not task.part:
        return _share_of(task, done)
    ended, every = [one for one in done if one.verdicts], sum(len(task.cases_on(n)) for n in task.worlds)
    return _share_of(task, ended) * len(ended) / every


def _share_of(task: Task, done: list[JudgedTrial]) -> float:
    worlds = [[one for one in done if one.trial.n == n] for n in task.worlds]
    right = [_values_hold(task, world) for world in worlds]
    share = 0.0
    for i, judge in enumerate(task.judges):
        if judge.values or judge.each_world:
            held = [(judge.part or value) and _hold(i, world) for value, world in zip(right, worlds, strict=True)]
            share += judge.share * sum(held) / len(worlds)
        elif all(worlds):
            share += judge.share * _hold(i, done)
    return share if all(right) or any(judge.part for judge in task.judges) else min(share, _WITHOUT_VALUES)


def _values_hold(task: Task, done: list[JudgedTrial]) -> bool:  # the first judge's, or all that judges of parts of them see
    return all(_hold(i, done) for i in [i for i, judge in enumerate(task.judges) if judge.part] or [0])


def _hold(i: int, done: list[JudgedTrial]) -> bool:
    return bool(done) and all(one.verdicts and one.verdicts[i].ok for one in done)


def _printed(trial: Trial | None) -> tuple[str, str]:  # in the trial that the report is about, and which one that is
    return (trial.printed, str(trial)) if trial and trial.printed else ("", "")


# What the library has of each task


@cache
def shipped(exercise: str) -> dict[str, Record]:
    """Returns task -> its record here. They serve learning: who looks for it can find an answer that fits them."""
    file = FOLDER / f"{exercise}.json"
    if not file.exists():
        raise ValueError(f"{file} is missing: `python -m tests.grading.records {exercise}` writes it")
    return loaded(file.read_text())


def loaded(text: str) -> dict[str, Record]:
    return {name: _record(task) for name, task in json.loads(text).items()}


def _record(task: dict) -> Record:
    mistakes = (Mistake(one["name"], one["hint"], _from_json(one["changed"]), one["troubles"]) for one in task["mistakes"])
    return Record({case: [*map(_seen, ranks)] for case, ranks in task["right"].items()}, tuple(mistakes))


def _seen(rank: dict) -> Seen:
    calls = [Sent(*call[:4], tuple(call[4])) for call in rank["calls"]]
    return Seen(_from_json(rank["results"]), [Event(*one) for one in rank["events"]], calls)


def _from_json(value):
    if isinstance(value, dict):
        if value.keys() == {"print"}:
            form, *numbers = value["print"]
            return Print(form, tuple(map(float, numbers)))
        return {name: _from_json(one) for name, one in value.items()}
    return [_from_json(one) for one in value] if isinstance(value, list) else value
