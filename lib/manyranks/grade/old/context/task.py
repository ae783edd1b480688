"""What the tasks of this exercise have in common."""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from manyranks.grade.old.compare import form
from manyranks.grade.old.scripted import ScriptTask
from manyranks.grade.old.scripts import judge_values
from manyranks.grade.old.tensor.task import slip, slips
from manyranks.grade.old.trial import Trial
from manyranks.grade.old.verdict import Verdict
from manyranks.measure.journal import Stopped

COPY = "leave what you are given as it is: no operation with _ at its end, no +=, on a tensor of the caller's"


def tensor_of(value: Any, like: Tensor, what: str, hint: str) -> Tensor:
    """The learner's. Raises Stopped where it is no tensor of this shape."""
    if not isinstance(value, Tensor):
        raise Stopped(f"{what} is a {type(value).__name__}, not a tensor", hint)
    if value.shape != like.shape:
        raise Stopped(f"{what} has the shape {list(value.shape)}; right is {list(like.shape)}", hint)
    return value.detach().clone()


def pair_of(value: Any, like: tuple[Tensor, Tensor], call: str) -> tuple[Tensor, Tensor]:
    """The learner's (o, lse). Raises Stopped where it is none."""
    hint = "it returns one pair, (o_SBAD, lse_SBA)"
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise Stopped(f"{call} returned {_kind(value)}", hint)
    return tensor_of(value[0], like[0], "o", hint), tensor_of(value[1], like[1], "lse", hint)


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor, {form(value)}"
    return f"a {type(value).__name__}" + (f" of {len(value)}" if isinstance(value, tuple | list) else "")


def untouched(watch, given: dict[str, Tensor], before: dict[str, Tensor]) -> None:
    """Notes a slip for the first of these tensors that is not what it was."""
    for name, tensor in given.items():
        if not tensor.equal(before[name]):
            return slip(watch, f"{name} changed", COPY)
    return None


def values(task: "ContextTask", trial: Trial) -> Verdict:
    """As usual; where no known mistake explains the values, what was sent may."""
    verdict = next(slips(trial), None) or judge_values(task, trial)
    if verdict.ok:
        return verdict
    return verdict._replace(hint=task.better(trial, verdict.hint) or task.unexplained)


@dataclass(frozen=True)
class ContextTask(ScriptTask):
    """unexplained: the hint for values that neither a known mistake nor the messages explain."""

    part: ClassVar[bool] = True
    unexplained: ClassVar[str] = ""
    advice: ClassVar[tuple[tuple[str, str], ...]] = (
        (r"modified by an inplace operation|a leaf Variable that requires grad", COPY),
        (r"must be contiguous|has to be contiguous", "what is sent has to be contiguous: x.contiguous()"),
        (
            r"returned an incorrect number of gradients",
            "backward returns one for each argument of apply, None for what has none",
        ),
        (r"does not require grad and does not have a grad_fn", "backward finds no way back: autograd does not see messages"),
    )

    def better(self, trial: Trial, hint: str) -> str:
        """The hint for wrong values, perhaps another one than the known mistakes'."""
        return hint
