"""What the tasks of this exercise have in common: slips that a script notes, and hints for values that nothing explains."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from manyranks.grade.old.compare import same
from manyranks.grade.old.scripted import ScriptTask
from manyranks.grade.old.scripts import Tensors, Wrong, judge_values
from manyranks.grade.old.tensor import traffic
from manyranks.grade.old.tensor.layout import Layout
from manyranks.grade.old.tensor.traffic import Phases, Sent
from manyranks.grade.old.trial import Trial
from manyranks.grade.old.verdict import Verdict
from manyranks.measure.journal import Stopped

_SLIP = "slip: "  # a mark
_TOLERANCE = 1e-9
LISTS = (r"\bnot list\b|'list' (and|object)|and 'list'|returned a list", "f and g return a list: [y] = f([x], group)")
COPY = "leave what you are given as it is: sum a copy, or into a new row"


class Must(NamedTuple):
    """layout: the groups; phases: the calls; limit, whole: bytes of a shard, and of what it is cut from; seeds: of dropout."""

    layout: Layout
    phases: Phases
    limit: int = 0
    whole: int = 0
    seeds: tuple[int, ...] = ()


def slip(watch, what: str, hint: str = COPY) -> None:
    """Notes what is wrong whatever the values are."""
    watch.mark(_SLIP + json.dumps([what, hint]))


def untouched(watch, what: str, tensors: list[Tensor], before: list[Tensor], hint: str = COPY) -> None:
    """Notes a slip where one of the tensors is not what it was."""
    if not all(map(torch.equal, tensors, before)):
        slip(watch, f"{what} changed", hint)


def gradient(tensor: Tensor) -> Tensor:
    """A copy; zeros where there is none."""
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad.clone()


def parameters(module: Any, names: tuple[str, ...], what: str) -> dict[str, nn.Parameter]:
    """Those of these names. Raises Stopped where the learner's module has others."""
    if not isinstance(module, nn.Module):
        raise Stopped(f"{what} made a {type(module).__name__}", "it is a class derived from nn.Module, given above")
    own = dict(module.named_parameters())
    if missing := [name for name in names if name not in own]:
        has = ", ".join(own) or "none"
        raise Stopped(f"{what} has no parameter {missing[0]}; it has {has}", f"its parameters are {', '.join(names)}")
    if more := [name for name in own if name not in names]:
        raise Stopped(f"{what} has a parameter {more[0]} more", f"its parameters are {', '.join(names)}, and no others")
    return own


def result_of(y: Any, like: Tensor, what: str = "forward") -> Tensor:
    """The learner's. Raises Stopped where it is no tensor of this shape, or backward cannot come to it."""
    if not isinstance(y, Tensor):
        raise Stopped(f"{what} returned a {type(y).__name__}", "it returns a tensor")
    if y.shape != like.shape:
        found = f"{what} returned {list(y.shape)}; right is {list(like.shape)}"
        raise Stopped(found, "every rank returns the result in the shape that the text says, whole or its shard")
    if not y.requires_grad:
        raise Stopped(f"what {what} returned has no graph: backward cannot begin", _GRAPH)
    return y


_GRAPH = (
    "a torch.autograd.Function's result comes from apply; detach, no_grad, .data and a new tensor that something was "
    "copied into lose the graph"
)


def slips(trial: Trial) -> Iterator[Verdict]:
    """What the scripts noted, by rank."""
    for rank, seen in enumerate(trial.answers):
        for event in seen.events:
            if event.what.startswith(_SLIP):
                what, hint = json.loads(event.what.removeprefix(_SLIP))
                yield Verdict(False, f"rank {rank}: {what}", hint)


def values(task: "TensorTask", trial: Trial) -> Verdict:
    """As usual; where no known mistake explains the values, the calls may."""
    verdict = next(slips(trial), None) or judge_values(task, trial)
    if verdict.ok or verdict.hint:
        return verdict
    return verdict._replace(hint=traffic.traffic(task, trial).hint or task.unexplained)


def telling(right: list[Tensors], wrong: Iterable[Wrong]) -> Iterator[Wrong]:
    """Those whose results are not right, for in some cases a mistake does not show."""
    for one in wrong:
        pairs = zip(one.results, right, strict=True)
        if not all(same(theirs[name], own[name], _TOLERANCE) for theirs, own in pairs for name in theirs):
            yield one


def prefixed(tensors: Tensors, what: str) -> Tensors:
    """With "the parameter" or "the gradient of" before each name."""
    return {f"{what} {name}": tensor for name, tensor in tensors.items()}


@dataclass(frozen=True)
class TensorTask(ScriptTask):
    """unexplained: the hint for values that neither a known mistake nor the calls explain."""

    part: ClassVar[bool] = True
    unexplained: ClassVar[str] = ""
    advice: ClassVar[tuple[tuple[str, str], ...]] = (
        (r"returned an incorrect number of gradients", "backward returns one for each argument of apply, None for the group"),
        (r"modified by an inplace operation|a leaf Variable that requires grad", COPY),
        (r"view size is not compatible", "a gradient need not be contiguous: flatten() or reshape(-1) in place of view(-1)"),
        (r"must be contiguous", "collectives want contiguous tensors: x.contiguous(), or a copy in a flat row"),
        (r"'NoneType' object has no attribute '(size|rank)'", traffic.GROUP),
        (r"'NoneType' object has no attribute 'wait'", "a call returns something to wait for with async_op=True only"),
        (r"[Gg]roup.*(not part|not a member|invalid|default)|Invalid rank|not registered", traffic.GROUP),
        (r"does not require grad and does not have a grad_fn", _GRAPH),
    )

    def why_traffic(self, phase: str, got: dict[str, list[Sent]], phases: Phases) -> str:
        """The hint for calls that are not as they must be."""
        return traffic.why(phase, got, phases)
