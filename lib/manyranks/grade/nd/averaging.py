"""The task average: process groups of a mesh on real ranks, and each gradient over the right one."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from manyranks.grade.nd import layouts, making, setups
from manyranks.grade.nd.answers import heard, said
from manyranks.grade.nd.given import Weight
from manyranks.grade.nd.ready import own
from manyranks.grade.nd.setups import MIXED, WEIGHTS, Setup, named
from manyranks.grade.nd.task import NdTask
from manyranks.grade.report import listed
from manyranks.grade.scripts import NOTHING, WAIT, Scene, Tensors, judge_values
from manyranks.grade.tensor.layout import drawn
from manyranks.grade.tensor.task import gradient, slip, slips, telling
from manyranks.grade.trial import Trial
from manyranks.grade.verdict import Aspect, Verdict

CALL = "average(sizes, weights)"
_MADE = "the groups"
_ONE_EACH = "one call for each parameter: put all gradients into one flat row, and cut it again afterwards"
_GATHERED = "no rank needs each of the others' gradients, only their sum: dist.all_reduce"
_MESSAGES = "an all-reduce is one call, dist.all_reduce, not a loop of messages"
_BARRIER = "a barrier is not needed: an all-reduce waits for its ranks"
_TWO = (
    "two all-reduces: what is partial, over tp; and everything, over dp × cp, in one flat row each. A missing axis has one rank"
)
_TOO_MANY_BYTES = "over tp goes only what is partial: the rest is complete there"
_GROUPS = "of the groups, those of tp, and those of dp × cp, each once, and no others"
_OTHERS = (
    "the calls are in order, but these are not the groups: on {n} ranks, {mesh}, those of dp × cp are {rows}, and those of "
    "tp {tp}"
)
_TOGETHER = "dp and cp make one group together: one all-reduce in place of two"
_SWAPPED = "the two groups are swapped: what is partial goes over tp, everything over dp × cp"
_TOO_FEW_BYTES = "over dp × cp goes everything, what is cut, whole and partial: all of it is averaged"
_NO_GROUPS = (
    "no group was made by dist.new_group(ranks): call it like that, for every group of tp, and for every group of dp × cp"
)
_FLOAT64 = "rows have half the bytes: float64 stays float64"
_MEMBER = "this rank is not in the group that it uses: new_group gives such ranks no group. Keep the one that the rank is in"
_NOT_IN_IT = "does not belong to the given group"  # torch warns, and does nothing
_UNEXPLAINED = "partial: the sum over tp; then all: the sum over the ranks of dp × cp, divided by their number"


def _run(setup: Setup, function: Callable, watch) -> Tensors:
    parameters = [nn.Parameter(drawn(40 + i, *shape)) for i, (_, shape) in enumerate(WEIGHTS)]
    for parameter, one in zip(parameters, setup.own(dist.get_rank()), strict=True):
        parameter.grad = one
    before = [one.detach().clone() for one in parameters]
    weights = [Weight(parameter, kind) for parameter, (kind, _) in zip(parameters, WEIGHTS, strict=True)]
    with making.watched() as made, own():
        function(dict(setup.sizes), weights)
    for i, (parameter, value) in enumerate(zip(parameters, before, strict=True)):
        if not parameter.detach().equal(value):
            slip(watch, f"weight {i} changed", "gradients are averaged, weights stay as they are")
        if parameter.grad is None or parameter.grad.shape != parameter.shape:
            slip(watch, f"the gradient of weight {i} is {_form(parameter.grad)}", MIXED)
            parameter.grad = torch.zeros_like(parameter)
    return named([gradient(one) for one in parameters]) | {_MADE: said(made.made)}


def _form(grad: Tensor | None) -> str:
    return "None" if grad is None else f"of the shape {list(grad.shape)}"


_CASES = {
    6: [(("dp", 3), ("tp", 2))],
    8: [(("dp", 2), ("tp", 2), ("cp", 2)), (("cp", 2), ("pp", 2), ("tp", 2))],
}


@cache
def cases(n: int) -> list[Scene]:
    """tp inside and outside, with cp, with stages."""
    return [_scene(Setup(axes)) for axes in _CASES[n]]


def _scene(setup: Setup) -> Scene:
    right = setup.results()
    wrong = partial(setups.wrong, setup, right)
    return Scene(setup.n, partial(_run, setup), right, lambda: telling(right, wrong()), setup, f"{setup}")


def _values(task: "Averaging", trial: Trial) -> Verdict:
    """The gradients; where no mistake explains them, what was sent may."""
    verdict = next(slips(trial), None) or judge_values(task, trial)
    if not verdict.ok and _NOT_IN_IT in trial.printed:
        return verdict._replace(hint=_MEMBER)
    if verdict.ok or verdict.hint:
        return verdict
    return verdict._replace(hint=_calls(task, trial).hint or task.unexplained)


def _groups(task: "Averaging", trial: Trial) -> Verdict:
    """All ranks made all groups, in one order."""
    right, first = trial.case.must.groups(), heard(trial.answers[0].tensors[_MADE])
    for rank, seen in enumerate(trial.answers):
        made = heard(seen.tensors[_MADE])
        if made != first:
            found = f"rank {rank} made {len(made)} groups, and rank 0 {len(first)}"
            return Verdict(False, found, making.ALL_RANKS)
    if not first:
        return Verdict(False, "no rank made a group", _NO_GROUPS)
    if sorted(first) != right:
        missing = [ranks for ranks in right if ranks not in first]
        more = [ranks for ranks in first if ranks not in right]
        what = f"no group of ranks {missing[0]}" if missing else f"a group of ranks {(more or first)[0]}, too"
        return Verdict(False, f"{len(first)} groups were made, {what}", _why_groups(trial.case.must, first, missing))
    return Verdict(True)


def _why_groups(setup: Setup, made: list, missing: list) -> str:
    """All ranks made them in one order."""
    if _apart(setup, made):
        return _TOGETHER
    rows, tp = (listed([f"{row}" for row in layouts.groups(setup.sizes, axes)]) for axes in (setup.data, ("tp",)))
    return _OTHERS.format(n=setup.n, mesh=setup, rows=rows, tp=tp) if missing else _GROUPS


def _apart(setup: Setup, made: list) -> bool:
    """Whether there are groups of dp and of cp."""
    both = [layouts.groups(setup.sizes, (axis,)) for axis in setup.data]
    return len(both) == 2 and all(row in made for rows in both for row in rows)


def _calls(task: "Averaging", trial: Trial) -> Verdict:
    """Each rank sends what it must, in two all-reduces."""
    for rank in range(trial.case.n):
        calls = [call for call in trial.calls[rank] if len(call.ranks) > 1]
        got, right = sorted((call.bytes, sorted(call.ranks)) for call in calls), trial.case.must.calls(rank)
        if got != right or {call.op for call in calls} != {"all_reduce"}:
            there = listed([f"{c.op} of {c.bytes:,} bytes among ranks {list(c.ranks)}" for c in calls[:3]]) if calls else ""
            more = f" and {len(calls) - 3} more" if len(calls) > 3 else ""
            here = listed([f"{size:,} bytes among {ranks}" for size, ranks in right])
            found = f"rank {rank} called {there or 'nothing'}{more}; right are all-reduces of {here}"
            apart = _apart(trial.case.must, heard(trial.answers[0].tensors[_MADE]))
            return Verdict(False, found, _TOGETHER if apart else _why_calls({call.op for call in calls}, got, right))
    if trial.unwaited:
        rank, op = trial.unwaited[0]
        return Verdict(False, f"rank {rank} did not wait for its {op}", WAIT)
    return Verdict(True)


def _why_calls(ops: set[str], got: list, right: list) -> str:
    if not ops:
        return NOTHING
    if "barrier" in ops:
        return _BARRIER
    if ops & {"send", "recv"}:
        return _MESSAGES
    if ops != {"all_reduce"}:
        return _GATHERED
    sent, needed = ({tuple(ranks): 0 for _, ranks in both} for both in (got, right))
    for both, total in ((got, sent), (right, needed)):
        for size, ranks in both:
            total[tuple(ranks)] += size
    if sent == needed:
        return _ONE_EACH
    if sent.keys() != needed.keys() or len(got) != 2:
        return _TWO
    return _of_bytes([sent[ranks] for ranks in needed], [*needed.values()])


def _of_bytes(sent: list[int], needed: list[int]) -> str:
    """Of two all-reduces over the right groups."""
    if [2 * size for size in sent] == needed:
        return _FLOAT64
    if sent == needed[::-1]:
        return _SWAPPED
    return _TOO_MANY_BYTES if sum(sent) > sum(needed) else _TOO_FEW_BYTES


@dataclass(frozen=True)
class Averaging(NdTask):
    sizes: ClassVar[tuple[int, ...]] = (6, 8)
    only_two: ClassVar[str] = ""
    unexplained: ClassVar[str] = _UNEXPLAINED
    advice: ClassVar[tuple[tuple[str, str], ...]] = (
        (r"torch\.distributed's new_group", making.ALL_RANKS),
        (r"[Gg]roup.*(not part|not a member|invalid)|Invalid rank|not registered", _MEMBER),
        (r"NON_GROUP_MEMBER|'int' object has no attribute|GroupMember", _MEMBER),
        (r"bytes to its all_reduce", "what goes over a group has to be of one size on all its ranks"),
        *NdTask.advice,
    )
    aspects: ClassVar[tuple[Aspect, ...]] = (
        Aspect("each gradient is that of the whole batch, as one process has it", 0.5, _values, each_world=True),
        Aspect("all ranks make all groups, in one order", 0.2, _groups),
        Aspect("two all-reduces: what is partial over tp, everything over dp × cp", 0.3, _calls),
    )
