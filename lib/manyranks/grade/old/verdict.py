"""What a check makes of its trials: a verdict on each aspect, and the line of the report that follows from them."""

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from manyranks.grade.old.report import Line, listed
from manyranks.grade.old.trial import Trial

if TYPE_CHECKING:
    from manyranks.grade.old.check import Task


class Verdict(NamedTuple):
    """ok, and where it is not: what was found and a hint. ok: None where it could not be judged, which gives no points.

    where: in which part of the case, in place of the case's name.
    """

    ok: bool | None
    found: str = ""
    hint: str = ""
    where: str = ""


class Aspect(NamedTuple):
    """One thing that a task's trials are judged by. what: the report's line; share: of the points.

    each_world: whether it counts world by world, where the values are right; else it must hold on all of them. for_itself:
    whether it is a part of the values, and counts whatever the others are. last: whether the last case of a world shows it
    best, not the first.
    """

    what: str
    share: float
    judge: Callable[["Task", Trial], Verdict]
    each_world: bool = False
    for_itself: bool = False
    last: bool = False


class Finding(NamedTuple):
    """A line of the report, and the trial that it is about; None where it is about several."""

    line: Line
    trial: Trial | None = None


class Judged(NamedTuple):
    """A trial with a verdict on each aspect; with none where it did not end well."""

    trial: Trial
    verdicts: dict[Aspect, Verdict]

    def holds(self, aspect: Aspect) -> bool:
        """Whether the trial ended well and is right under this aspect."""
        return bool(self.verdicts) and self.verdicts[aspect].ok


def judged(task: "Task", trial: Trial) -> Judged:
    """The trial with its verdicts."""
    return Judged(trial, {} if trial.trouble else {aspect: aspect.judge(task, trial) for aspect in task.aspects})


def findings(task: "Task", done: list[Judged]) -> list[Finding]:
    """One an aspect; none where no trial ended well."""
    ended = [one for one in done if one.verdicts]
    return [_finding(aspect, ended, len(ended) == len(done)) for aspect in task.aspects] if ended else []


def _finding(aspect: Aspect, ended: list[Judged], all_ended: bool) -> Finding:
    """Of the trials that are wrong, the one with most ranks tells most mistakes apart; one that was judged goes first."""
    for trial, verdicts in sorted(reversed(ended) if aspect.last else ended, key=_tells(aspect)):
        if not verdicts[aspect].ok:
            found = f"{verdicts[aspect].where or trial.case}, {verdicts[aspect].found}"
            return Finding(Line(verdicts[aspect].ok, aspect.what, found, verdicts[aspect].hint), trial)
    sizes = sorted({str(one.trial.case.n) for one in ended})
    where = "" if sizes == ["1"] else f"on {listed(sizes)} ranks, "
    return Finding(Line(True, aspect.what, "" if all_ended else f"{where}as far as it ran"))


def _tells(aspect: Aspect) -> Callable[[Judged], tuple]:
    return lambda one: (one.verdicts[aspect].ok is None, -one.trial.case.n)
