"""A task, and its check: from what was measured on real ranks to a report with points and hints."""

import html
import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch

from manyranks import progress
from manyranks.grade import trial
from manyranks.grade.judges import Judge, Verdict
from manyranks.grade.learner import NOTHING_GIVEN, Advice, Ready, advised
from manyranks.grade.trial import Again, Event, Make, Run, Seen, Sent, Then, Trial, ran_again, trials
from manyranks.measure.fingerprints import Fact, Print, fact, listed, same
from manyranks.measure.journal import COPY, Stopped
from manyranks.world.strangers.trouble import SAME_CHUNK, Trouble, ending

FOLDER = Path(__file__).parent / "data"
_WITHOUT_VALUES = 0.4  # wrong values leave less than half of the points, whatever else holds
_ONLY_TWO = "on 2 ranks there is one other rank, the next one and the previous one, and one step is enough; draw it for 3"


class Mistake(NamedTuple):
    """A mistake. name: of the answer; hint: what to tell who makes it; troubles: case -> how its run ends.

    changed: case -> by rank, for each judge what it sees instead
    """

    name: str
    hint: str
    changed: dict[str, list[dict[str, Fact]]]
    troubles: dict[str, str]


@dataclass(frozen=True)
class Record:
    """The record of a task. right: case -> what each rank does; mistakes: in the order that they are tried in."""

    right: dict[str, list[Seen]]
    mistakes: tuple[Mistake, ...] = ()


@dataclass(frozen=True)
class Line:
    """A thing that was checked. ok: None where it could not be judged; found: what was measured; hint: what to look at."""

    ok: bool | None
    what: str
    found: str = ""
    hint: str = ""


_UNWRITTEN, NOT_JUDGED = "not written yet", "not judged"  # said in place of points
_COLORS = {"✓": "#009E73", "✗": "#D55E00"}  # read on white and in the dark theme


class _Points(float):
    """A number that nbgrader reads and a page doesn't show: the report has said it."""

    def _repr_html_(self) -> str:
        return ""


@dataclass(frozen=True)
class Report:
    """The verdict on one task. points: reached, of `out_of`; printed: what the ranks printed in the run called `run`."""

    task: str
    points: float
    out_of: float
    lines: tuple[Line, ...]
    printed: str = ""
    run: str = ""
    exercise: str = ""

    @property
    def passed(self) -> bool:
        """Returns whether everything that was checked holds."""
        return all(line.ok for line in self.lines)

    def show(self) -> float:
        """Displays the report and the total, and returns the points, which nbgrader takes from a test cell's last line."""
        from IPython.display import display

        display(self)
        if total := progress.after(self.exercise, self.task, self.points, [line.hint for line in self.lines if not line.ok]):
            display(total)
        return _Points(self.points)

    def __repr__(self) -> str:
        parts = [f"{_mark(self._head())} {self._head().what}"]
        for line in self.lines:
            parts.append(f"{_mark(line)} {line.what}" + (f": {line.found}" if line.found else ""))
            parts += [f"    hint: {line.hint}"] if line.hint else []
        parts += [f"what the ranks printed {self.run}:", self.printed] * bool(self.printed)
        return "\n".join(parts)

    def _repr_html_(self) -> str:
        rows = "".join(f"<li style='list-style:none'>{_item(line)}</li>" for line in self.lines)
        printed = f"<div>what the ranks printed {self.run}:</div><pre>{html.escape(self.printed)}</pre>" if self.printed else ""
        return f"<div><b>{_item(self._head())}</b><ul style='padding-left:1em;margin:2px'>{rows}</ul>{printed}</div>"

    def _head(self) -> Line:
        said, points = [line.what.partition(":")[0] for line in self.lines], f"{self.points:g} of {self.out_of:g} points"
        instead = next((words for words in (_UNWRITTEN, NOT_JUDGED) if words in said), points)
        return Line(None if instead == NOT_JUDGED else self.passed, f"{self.task}: {instead}")


@dataclass(frozen=True)
class Task:
    """A task of an exercise. Called with the learner's function or class, it returns a Report.

    exercise: as the notebook has it
    call: how the check calls the answer; its name comes first, or last where that is a method: "Wrapped(module).close()"
    points: for all of it
    run: what a rank does with the answer
    judge: what it is judged by, the values first
    cases: what it runs in, on a world of n ranks, of those in `worlds`
    make: what a rank gets in a case, made by who judges, so that nothing on a rank says what is right; else the case itself
    more: cases that the judge draws where these are the same for all, and runs first: a table of these is no way to any points
    then: makes results of a case, of what a rank got and of its results, where judges are; Again(…): on another rank
    part: whether cases that ended well count where a later one did not
    ready: what may be called
    advice: on what Python and torch say of wrong answers
    unexplained: for values that no known mistake explains
    """

    exercise: str
    call: str
    points: float
    run: Run
    judge: tuple[Judge, ...]
    cases: Sequence[Any] | Callable[[int], Sequence[Any]] = ("",)
    worlds: tuple[int, ...] = (2, 3, 4)
    make: Make = lambda case, rank, n, seed: case
    more: Callable[[Random], Sequence[Any]] | None = None
    then: Then | Again | None = None
    part: bool = False
    ready: Ready = NOTHING_GIVEN
    advice: Advice = ()
    unexplained: str = ""

    def __post_init__(self) -> None:
        if abs((total := sum(judge.share for judge in self.judge)) - 1) > 1e-6:
            raise ValueError(f"the shares of {self.name}'s judges add up to {total:g}, not to 1")
        progress.TASKS.setdefault(self.exercise, {})[self.name] = self.points

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

    def cases_on(self, n: int) -> Sequence[Any]:
        """Returns the cases of a world of n ranks."""
        cases = self.cases(n) if callable(self.cases) else self.cases
        return [*self.more(Random(trial.seed)), *cases] if self.more and trial.seed else cases

    def tried(self, answer) -> list[Trial]:
        """Runs the answer in all cases."""
        with _one_thread():
            found = trials(answer, self.run, self.make, self.cases_on, self.worlds, self.ready, self.part)
        if isinstance(self.then, Again):
            found = ran_again(found, self.then, self.make)
        elif self.then:
            found = [one.after(self.then) for one in found]
        return [replace(one, given=()) for one in found]  # which may be large


@dataclass(frozen=True)
class Judged:
    """A trial with a verdict by each judge; with none where it did not end well."""

    trial: Trial
    verdicts: tuple[Verdict, ...]


@dataclass(frozen=True)
class Finding:
    """A line of the report, and the trial that it is about; None where it is about several."""

    line: Line
    trial: Trial | None = None


def check(task: Task, answer, record: Record) -> Report:
    """Runs the answer on the task's worlds and judges what happened. record: of what is right, and of known mistakes.

    Returns within 20 s on a machine that does nothing else; what the answer raises, prints or returns becomes a line of the
    report. Raises NotStarted where ranks can't start.
    """
    if not callable(answer):
        return _refused(task, Finding(Line(False, f"{task.name} is not a function", hint="run the cell above that defines it")))
    with _one_thread():
        return report(task, answer, task.tried(answer), record)


def report(task: Task, answer, tried: list[Trial], record: Record) -> Report:
    """Reports on the trials of an answer."""
    if refusal := _unwritten(answer, tried[-1]) or _other_calls(task, tried):
        return _refused(task, refusal)
    done = [Judged(trial, _verdicts(task, trial, record, tried)) for trial in tried]
    findings = [_runs(task, answer, tried, record)]
    findings += [found for i in range(len(task.judge)) if (found := _finding(task, i, done, record))]
    findings += _only_two_ranks(task, done)
    wrong = [finding for finding in findings if not finding.line.ok]
    lines = [finding.line for finding in findings]
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


def _unwritten(answer, trial: Trial) -> Finding | None:
    """Finds whether this answer, or a function that it calls, is not written yet."""
    if not trial.trouble or not (name := trial.trouble.unwritten):
        return None
    if name == getattr(answer, "__name__", "") or name in getattr(answer, "__dict__", {}):
        return Finding(Line(False, _UNWRITTEN, hint="replace `raise NotImplementedError` by your answer"))
    return Finding(Line(False, f"{name} is {_UNWRITTEN}", hint=f"this answer calls {name}: write that one first"))


def _other_calls(task: Task, tried: list[Trial]) -> Finding | None:
    """Finds an operation that was called and gives no points at all; a call that raised is in the notes alone."""
    for one in tried if task.ready.only else ():
        for rank in range(one.n):
            noted = [entry.op for entry in one.notes.get(rank, [])]
            counted = [call.op for call in one.seen[rank].calls] if one.seen else []
            if others := [op for op in (*noted, *counted) if op not in task.ready.only]:
                return Finding(
                    Line(
                        False,
                        "is built from send and receive only",
                        one.where(f"rank {rank} called {others[0]}"),
                        task.ready.hint,
                    ),
                    one,
                )
    return None


def _verdicts(task: Task, trial: Trial, record: Record, tried: list[Trial]) -> tuple[Verdict, ...]:
    if trial.trouble:
        return ()
    right, found, ended = record.right[trial.key], [], {one.key for one in tried if not one.trouble}
    ours = [key for key in record.right if key.startswith(f"{trial.n}/")]
    for judge in task.judge:
        shown = {key in ended for key in ours if judge.look and any(map(judge.look, record.right[key]))}
        why = "not judged, for a line above is not right" * (not all(verdict.ok for verdict in found[: judge.needs]))
        why = "not judged, for no run that shows it came to its end" if shown == {False} else why
        try:
            found.append(Verdict(None, why) if why else judge.verdict(trial, right))
        except Stopped as error:  # a rank has sent less than its script makes
            found.append(Verdict(False, error.what, error.hint, firm=True))
    return tuple(found)


def _runs(task: Task, answer, tried: list[Trial], record: Record) -> Finding:
    what = f"runs on {listed([str(n) for n in task.worlds])} ranks" if task.worlds != (1,) else "runs"
    for one in tried:
        if found := one.trouble:
            return Finding(Line(False, what, one.where(found.problem), _why_not(task, answer, one, record)), one)
    return Finding(Line(True, what))


def _why_not(task: Task, answer, trial: Trial, record: Record) -> str:
    """The hint on a run that did not end well: of the mistake that ends so, or advice, with the place where it happened."""
    found, right = trial.trouble, record.right.get(trial.key, [])
    told = next((said for judge in task.judge if judge.early and (said := judge.early(trial, right))), "")
    end = ending(found)
    fitting = [one for one in record.mistakes if one.hint and end in one.troubles.values()]
    here = "/" + trial.key.partition("/")[2]  # this case, on however many ranks: who ends so in it goes first
    ends = [{key[key.index("/") :] for key, one in each.troubles.items() if one == end} for each in fitting]
    known = max(zip(fitting, ends, strict=True), key=lambda both: here in both[1])[0].hint if fitting else ""
    advice = told or known or advised(found, task.advice) or _on_arguments(task, answer, found)
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


def _finding(task: Task, i: int, done: list[Judged], record: Record) -> Finding | None:
    """The line of the i-th judge; None where no trial ended well.

    Among wrong trials, the one with most ranks tells most mistakes apart; one that was judged goes first.
    """
    judge, ended = task.judge[i], [one for one in done if one.verdicts]
    if not ended:
        return None
    for one in sorted(reversed(ended) if judge.last else ended, key=lambda one: (one.verdicts[i].ok is None, -one.trial.n)):
        verdict = one.verdicts[i]
        if not verdict.ok:
            hint = verdict.hint
            if verdict.ok is False and not verdict.firm:
                known, partly = _known(task, i, one.trial, [e.trial for e in ended], record)
                hint = known or hint or partly or (task.unexplained if judge.values else "")
            return Finding(Line(verdict.ok, judge.what, one.trial.where(verdict.found, verdict.where), hint), one.trial)
    where = "" if task.worlds == (1,) else f"on {listed(sorted({str(one.trial.n) for one in ended}))} ranks, "
    last = ended[-1].verdicts[i]
    if len(ended) < len(done):
        return Finding(Line(True, judge.what, f"{where}as far as it ran"))
    return Finding(Line(True, judge.what, last.found, last.hint * bool(last.found)))


def _known(task: Task, i: int, trial: Trial, ended: list[Trial], record: Record) -> tuple[str, str]:
    """The sentence of the mistake that explains what the i-th judge saw, and of one that explains only that.

    A mistake explains what was seen where everything that it changes is changed in the same way, and something in this
    trial's case. The second one also changes other things, which are wrong in another way, or nothing in this case.
    Where several fit, one that explains all that is wrong goes first.
    """
    if not task.judge[i].look:
        return "", ""
    seen = {one.key: [looks(task, rank) for rank in one.seen] for one in ended}
    right = {key: [looks(task, rank) for rank in record.right[key]] for key in seen}
    wrong = {name for key in seen for got, must in zip(seen[key], right[key], strict=True) for name in changed(got, must)}
    mine = {name for name in wrong if name.startswith(f"{i} ")}
    fitting = [one for one in record.mistakes if one.hint and _fits(one, seen, f"{i} ")]

    def worth(one: Mistake) -> tuple[bool, bool, bool]:
        names = {name for ranks in one.changed.values() for facts in ranks for name in facts}
        return mine <= names, wrong <= names, trial.key in one.changed

    whole = [one for one in fitting if _fits(one, seen, "") and _changes(one, trial.key.partition("/")[2], f"{i} ")]
    partly = [one for one in fitting if not _denied(one, seen, right)]
    return tuple(max(some, key=worth).hint if some else "" for some in (whole, partly))


def _denied(one: Mistake, seen: dict[str, list[dict[str, Any]]], right: dict[str, list[dict[str, Any]]]) -> bool:
    """Returns whether something that the mistake changes is as it must be."""
    ranks = [(key, r, facts) for key, changed in one.changed.items() if key in seen for r, facts in enumerate(changed)]
    return any(same(seen[key][r].get(name), right[key][r].get(name)) for key, r, facts in ranks for name in facts)


def looks(task: Task, seen: Seen) -> dict[str, Any]:
    """Returns all that the judges see of a rank: "2 calls" is what the third one sees."""
    found = {}
    for i, judge in enumerate(task.judge):
        with suppress(Stopped):  # of what is missing
            found |= {f"{i} {name}": fact(value) for name, value in (judge.look(seen) if judge.look else {}).items()}
    return found


def changed(got: dict[str, Any], right: dict[str, Any]) -> dict[str, Any]:
    """Returns what is not as it must be; None for what is missing."""
    return {name: got.get(name) for name in {**right, **got} if name not in right or not same(got.get(name), right[name])}


def _changes(one: Mistake, case: str, prefix: str) -> bool:
    """Returns whether it changes something in this case, on however many ranks. prefix: of the names that count."""
    here = [ranks for key, ranks in one.changed.items() if key.partition("/")[2] == case]
    return any(name.startswith(prefix) for ranks in here for facts in ranks for name in facts)


def _fits(one: Mistake, seen: dict[str, list[dict[str, Any]]], prefix: str) -> bool:
    """Returns whether all that the mistake changes is seen so. prefix: of the names that count."""
    there = False
    for key, ranks in one.changed.items():
        facts = [{name: value for name, value in rank.items() if name.startswith(prefix)} for rank in ranks]
        if not any(facts) or key not in seen:  # the run broke off before: it counts as far as it came
            continue
        there = True
        pairs = zip(facts, seen[key], strict=True)
        if not all(same(got.get(name), value) for theirs, got in pairs for name, value in theirs.items()):
            return False
    return there


def _only_two_ranks(task: Task, done: list[Judged]) -> list[Finding]:
    """A finding where all is right on 2 ranks and nothing but 2 ranks."""
    right = {n: _values_hold(task, one) for n in task.worlds if (one := [d for d in done if d.trial.n == n])}
    if len(right) > 1 and right.pop(2, False) and not any(right.values()):
        return [Finding(Line(False, "works on any number of ranks", "right on 2 ranks only", _ONLY_TWO))]
    return []


def _once(lines: list[Line]) -> tuple[Line, ...]:
    """The lines, each hint at the first that has it."""
    hints = [line.hint for line in lines]
    return tuple(replace(line, hint=line.hint * (line.hint not in hints[:i])) for i, line in enumerate(lines))


def _share(task: Task, done: list[Judged]) -> float:
    """Returns the share of points; where cases count in part, the share of the ended ones, times their part of all."""
    if not task.part:
        return _share_of(task, done)
    ended, every = [one for one in done if one.verdicts], sum(len(task.cases_on(n)) for n in task.worlds)
    return _share_of(task, ended) * len(ended) / every


def _share_of(task: Task, done: list[Judged]) -> float:
    worlds = [[one for one in done if one.trial.n == n] for n in task.worlds]
    right = [_values_hold(task, world) for world in worlds]
    share = 0.0
    for i, judge in enumerate(task.judge):
        if judge.values or judge.each_world:
            held = [(judge.part or value) and _hold(i, world) for value, world in zip(right, worlds, strict=True)]
            share += judge.share * sum(held) / len(worlds)
        elif all(worlds):
            share += judge.share * _hold(i, done)
    return share if all(right) or any(judge.part for judge in task.judge) else min(share, _WITHOUT_VALUES)


def _values_hold(task: Task, done: list[Judged]) -> bool:  # the first judge's, or all that judges of parts of them see
    return all(_hold(i, done) for i in [i for i, judge in enumerate(task.judge) if judge.part] or [0])


def _hold(i: int, done: list[Judged]) -> bool:
    return bool(done) and all(one.verdicts and one.verdicts[i].ok for one in done)


def _printed(trial: Trial | None) -> tuple[str, str]:  # in the trial that the report is about, and which one that is
    return (trial.printed, str(trial)) if trial and trial.printed else ("", "")


def _mark(line: Line) -> str:
    return "○" if line.what.endswith(_UNWRITTEN) else {True: "✓", False: "✗", None: "·"}[line.ok]


def _item(line: Line) -> str:
    mark, found = _mark(line), f": {line.found}" if line.found else ""
    said = html.escape(line.what + found) + (f"<br><i>hint: {html.escape(line.hint)}</i>" if line.hint else "")
    said = re.sub("`([^`]+)`", r"<code>\1</code>", said)
    return f"<span style='white-space:pre-wrap'><span style='color:{_COLORS.get(mark, 'inherit')}'>{mark}</span> {said}</span>"


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
    return Seen(_from_json(rank["results"]), [Event(*one) for one in rank["events"]], calls, rank["held"], rank["peak"])


def _from_json(value):
    if isinstance(value, dict):
        if value.keys() == {"print"}:
            form, *numbers = value["print"]
            return Print(form, tuple(map(float, numbers)))
        return {name: _from_json(one) for name, one in value.items()}
    return [_from_json(one) for one in value] if isinstance(value, list) else value
