"""What the tasks of this exercise have in common."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor

from manyranks.grade.old.compare import form
from manyranks.grade.old.context.task import ContextTask, tensor_of
from manyranks.grade.old.expert.traffic import Sent, instead
from manyranks.grade.old.report import Line, listed
from manyranks.grade.old.scripts import Wrong, judge_values, own_values
from manyranks.grade.old.tensor.task import slips
from manyranks.grade.old.trial import Trial
from manyranks.grade.old.verdict import Finding, Verdict
from manyranks.measure.journal import Stopped
from manyranks.world.trouble import place

SPLITS = (
    "dist.all_to_all_single(out, x, received, sent): how many rows come stands before how many go; out has sum(received) rows, "
    "x has sum(sent). On the way back the two lists are swapped"
)
_LISTS = "dist.all_to_all takes parts of one size only, here: dist.all_to_all_single takes sizes"
_ALL_TAKE_PART = "all ranks have to call it, also one that has no rows to send, or none to receive"
_IN_AN_EXCHANGE = r"(bytes to its|in) all_to_all #"
_NOT_SAVED = "save_for_backward takes tensors only: keep lists as attributes of ctx, ctx.sent = sent"
_NO_ROWS = "a rank may have no tokens: no −1 in view or reshape, say each size"
_ROOM = "out has the dtype of what comes, float64: rows.new_empty(…) makes it"
_ALONE = own_values("", 0).judge


def several(value: Any, count: int, call: str, shape: str) -> tuple:
    """The learner's. Raises Stopped where it is no tuple or list of so many."""
    if not isinstance(value, tuple | list) or len(value) != count:
        raise Stopped(f"{call} returned {_kind(value)}", shape)
    return tuple(value)


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor, {form(value)}"
    many = f" of {len(value)}" if isinstance(value, tuple | list) else ""
    return "nothing" if value is None else f"a {type(value).__name__}{many}"


def fitting(value: Any, like: Tensor, what: str, hint: str) -> Tensor:
    """The learner's. Raises Stopped where it is no tensor of this shape and dtype."""
    found = tensor_of(value, like, what, hint)
    if found.dtype != like.dtype:
        raise Stopped(f"{what} is {form(found)}; right is {form(like)}", hint)
    return found


def values(task: "ExpertTask", trial: Trial, alone: bool = False) -> Verdict:
    """As usual; where no known mistake explains the values, what was sent may. alone: without any communication."""
    verdict = next(slips(trial), None) or (_ALONE if alone else judge_values)(task, trial)
    if verdict.ok:
        return verdict
    return verdict._replace(hint=task.better(trial, verdict.hint) or task.unexplained)


def of(*names: str, alone: bool = False) -> Callable[["ExpertTask", Trial], Verdict]:
    """As values, of the results with these names; mistakes that show in them come first."""

    def judge(task: "ExpertTask", trial: Trial) -> Verdict:
        case = trial.case
        expected = [{name: own[name] for name in names} for own in case.expected]
        narrow = replace(case, expected=expected, wrong=lambda: sorted(case.mistakes(), key=elsewhere))
        return values(task, replace(trial, case=narrow), alone)

    def elsewhere(wrong: Wrong) -> bool:
        return not wrong.results[0].keys() & {*names}

    return judge


@dataclass(frozen=True)
class ExpertTask(ContextTask):
    """instead: operation -> what to say of its calls, where that is not what all tasks say."""

    only_two: ClassVar[str] = "the line above says in which case it went wrong: go through this case on paper"
    instead: ClassVar[dict[str, str]] = {}
    advice: ClassVar[tuple[tuple[str, str], ...]] = (
        (r"[Ss]plit sizes|inLengthPerRank|outLength|in->size == out->size|Number of (tensor )?splits", SPLITS),
        (r"::alltoall: invalid tensor size", _LISTS),
        (r"save_for_backward can only save variables", _NOT_SAVED),
        (r"Invalid usage of tensors with different dtypes", _ROOM),
        (r"because the unspecified dimension size -1", _NO_ROWS),
        (r"could not infer output dtype", "counts are whole numbers: .double() before a mean"),
        (r"out of bounds|out of range", "an index is larger than what it looks into: are −1 and N among the experts?"),
        *ContextTask.advice,
    )

    def line(self, finding: Finding, function) -> Line:
        """Where ranks wait for each other in an uneven all-to-all, its bytes say nothing."""
        line, trial = super().line(finding, function), finding.trial
        if trial is None or not trial.trouble or not re.search(_IN_AN_EXCHANGE, line.hint):
            return line
        return replace(line, hint=_who_is_missing(trial))

    def accepts(self, got: list[Sent], right: list[Sent]) -> bool:
        """Whether these calls of a rank are as good as what is right."""
        return got == right

    def why(self, trial: Trial, rank: int, phase: str, got: list[Sent], right: list[Sent]) -> str:
        """The hint for calls that are not as they must be."""
        return instead(self.instead, phase, got, right)


def _who_is_missing(trial: Trial) -> str:
    """Which ranks wait in which call, and which have not come to it."""
    calls = {rank: [entry for entry in notes if entry.op == "all_to_all"] for rank, notes in trial.notes.items()}
    most = max(map(len, calls.values()))
    waiting = {rank: mine[-1] for rank, mine in calls.items() if len(mine) == most}
    missing = [f"rank {rank}" for rank in calls if rank not in waiting]
    if not missing:
        return f"{SPLITS}. What rank r sends to rank s, rank s has to expect from rank r"
    one = next(iter(waiting.values()))
    wait = listed([f"rank {rank}" for rank in waiting])
    return (
        f"{wait} wait{'s' * (len(waiting) == 1)} in all_to_all #{most - 1}, which {listed(missing)} did not call: "
        f"{_ALL_TAKE_PART} ({place(one.frames)})"
    )
