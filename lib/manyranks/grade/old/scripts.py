"""Tasks whose case is a script: what a rank does with the learner's function or class, and what must come of it.

A script is a function (learner's, watch) -> {name: tensor}. It runs on every rank; the judges work on what was recorded.
"""

from collections.abc import Callable, Iterable, Iterator
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from itertools import tee
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from manyranks.grade.old.compare import difference, form, same
from manyranks.grade.old.trial import Trial
from manyranks.grade.old.verdict import Aspect, Verdict
from manyranks.grade.watch import Blind, Event, Watch

if TYPE_CHECKING:
    from manyranks.grade.old.check import Task

Tensors = dict[str, torch.Tensor]
WAIT = "a call with async_op=True returns at once: keep what it returns and call .wait() on it"
NOTHING = "nothing was sent: no rank can know what the others have"
_OWN_THREAD = "dist is called from the thread that the check calls you in, not from one of your own; leave the check as it is"
_ROUNDED = "nearly right, as if rounded: float64 has to stay float64 on its way"
_TOLERANCE, _NEAR = 1e-9, 1e-6  # of float64, and of float32
_KINDS = {"gradient", "call", "wait", "mark"}


class Seen(NamedTuple):
    """One rank's part of a script. tensors: its result; held, peak_bytes: as Watch counted them."""

    tensors: Tensors
    events: list[Event]
    held: list[int]
    peak_bytes: int

    def calls(self, *ops: str) -> list[int]:
        """Bytes of the calls of these operations, in order."""
        return [event.bytes for event in self.events if event.kind == "call" and event.what in ops]


class Wrong(NamedTuple):
    """A typical wrong result. results: by rank, what the script returns then; hint: what to tell the learner."""

    hint: str
    results: list[Tensors]


@dataclass(frozen=True)
class Script:
    """One script on n ranks. expected: its results by rank; wrong: makes those of typical mistakes; must: what else must hold.

    note: what distinguishes it from the task's others, "where rank 1 does not use a layer".
    """

    n: int
    script: Callable[[Callable, Watch], Tensors]
    expected: list[Tensors]
    wrong: Callable[[], Iterable[Wrong]] = tuple
    must: Any = None
    note: str = ""

    @cached_property
    def _mistakes(self) -> Iterator[Wrong]:
        return tee(self.wrong(), 1)[0]

    def mistakes(self) -> Iterator[Wrong]:
        """What `wrong` makes, each made once, when somebody first comes to it: they are trained, too."""
        return copy(self._mistakes)

    @property
    def job(self) -> tuple:
        """What a rank runs."""
        return rehearse, self.script

    def __str__(self) -> str:
        return f"on {self.n} rank{'s' * (self.n > 1)}" + (f", {self.note}" if self.note else "")


class Scene(Script):
    """A script whose name is what is done there; the number of ranks where there are several."""

    def __str__(self) -> str:
        return f"on {self.n} ranks, {self.note}" if self.n > 1 else self.note


def rehearse(function, script: Callable, folder: str) -> Seen:
    """Runs the script with the learner's function on this rank."""
    watch = Watch(folder, dist.get_rank())
    with watch.watching():
        tensors = script(function, watch)
    plain = {name: _plain(tensor) for name, tensor in tensors.items()}
    return Seen(plain, watch.events, watch.held, watch.peak_bytes)


def is_sound(answer) -> bool:
    """Whether it is what `rehearse` returns, in all its parts: a learner's code may have changed the check on its rank."""
    return (
        type(answer) is Seen
        and type(answer.tensors) is dict
        and all(map(_is_plain, answer.tensors.values()))
        and type(answer.events) is type(answer.held) is list
        and all(map(_is_event, answer.events))
        and all(type(count) is int for count in [*answer.held, answer.peak_bytes])
    )


def _is_plain(tensor) -> bool:
    return type(tensor) is torch.Tensor and tensor.layout is torch.strided and tensor.device.type == "cpu"


def _is_event(event) -> bool:
    return (
        type(event) is Event
        and (type(event.kind), type(event.what), type(event.bytes)) == (str, str, int)
        and event.kind in _KINDS
    )


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().as_subclass(torch.Tensor).to_dense().clone()


def values(what: str, share: float) -> Aspect:
    """The aspect of the results; what: the report's line."""
    return Aspect(what, share, judge_values, each_world=True)


def own_values(what: str, share: float) -> Aspect:
    """The aspect of results that need no communication."""
    return Aspect(what, share, _own_values, each_world=True)


def _own_values(task: "Task", trial: Trial) -> Verdict:
    return next(filter(None, (_of_rank(trial, rank) for rank in range(trial.case.n))), Verdict(True))


def judge_values(task: "Task", trial: Trial) -> Verdict:
    """Whether all ranks' results are right, and did not become so by chance."""
    verdict = _own_values(task, trial)
    if not verdict.ok:
        return verdict
    if trial.case.n > 1 and not any(trial.calls.values()):
        return Verdict(False, "the values are right, but not by communication", NOTHING)
    if trial.unwaited:
        rank, op = trial.unwaited[0]
        return Verdict(False, f"rank {rank} did not wait for its {op}: the values are right by luck", WAIT)
    return Verdict(True)


def _of_rank(trial: Trial, rank: int) -> Verdict | None:
    """What is wrong with a rank's result, or with the notes that the rank made of its calls."""
    seen, right = trial.answers[rank], trial.case.expected[rank]
    if missing := right.keys() - seen.tensors.keys():
        return Verdict(False, f"rank {rank} has no {min(missing)} any more", "leave the model's layers as they are")
    for name in right:
        if not _same(seen.tensors[name], right[name]):
            hint = _hint(trial) or (_ROUNDED if _other_dtype(seen.tensors[name], right[name]) else "")
            return Verdict(False, f"rank {rank}: {name}: {_wrong(seen.tensors[name], right[name])}", hint)
    noted = [(event.what, event.bytes) for event in seen.events if event.kind == "call"]
    if noted != [(call.op, call.bytes) for call in trial.calls[rank]]:  # the world counts them, too
        return Verdict(False, f"rank {rank}: what the check noted is not what was sent", _OWN_THREAD)
    return None


def _hint(trial: Trial) -> str:
    """That of the mistake that explains all ranks' results; waiting comes first, for without it they are chance."""
    if trial.unwaited:
        return WAIT
    results = [seen.tensors for seen in trial.answers]
    near = Wrong(_ROUNDED, trial.case.expected)
    known = (wrong.hint for wrong in trial.case.mistakes() if _explains(wrong, results, _TOLERANCE))
    return next(known, _ROUNDED if _explains(near, results, _NEAR) else "")


def _explains(wrong: Wrong, results: list[Tensors], tolerance: float) -> bool:
    pairs = zip(results, wrong.results, strict=True)
    return all(name in got and same(got[name], theirs[name], tolerance) for got, theirs in pairs for name in theirs)


def _other_dtype(got: torch.Tensor, right: torch.Tensor) -> bool:
    return got.dtype != right.dtype and got.shape == right.shape


def _wrong(got: torch.Tensor, right: torch.Tensor) -> str:
    if got.shape != right.shape or got.dtype != right.dtype:
        return f"{form(got)}; right is {form(right)}"
    return difference(got, right, _TOLERANCE)


def _same(got: torch.Tensor, right: torch.Tensor) -> bool:
    return same(got, right, _TOLERANCE)


def results(script: Callable, function: Callable) -> list[Tensors]:
    """What the script gives with this function, on the only rank; random numbers outside go on as they were."""
    with torch.random.fork_rng([]):
        return [script(function, Blind())]
