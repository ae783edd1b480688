"""The task selective: a layer with attention, of which only attention's core is computed again."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch
from torch import nn

from manyranks.grade.checkpointing import judges, oracle
from manyranks.grade.checkpointing.judges import Hold, Must
from manyranks.grade.checkpointing.layers import EXACT, HIDDEN, Function, checked, gradient, gradients, inputs, weigh
from manyranks.grade.checkpointing.task import CheckpointTask, values
from manyranks.grade.scripts import Scene, Tensors, Wrong, results
from manyranks.grade.trial import Trial
from manyranks.grade.verdict import Aspect, Verdict

_SEED, _HEADS = 44, 2
_KEPT = "what is kept: what project and output need for backward, and the core's input; not its scores"
_NONE = "the core has to run again: its scores, of s × s numbers for each head, are most of what is kept"
_MORE = "project and output are products with weights: they cost most of the FLOPs and keep little. Only the core runs again"
_NO_GRAD = "no gradient comes through no_grad, or through detach: a checkpoint of the core is what autograd has to see"
_RESULT = "checkpoint(function, x): give it layer.core, which it calls itself, and not what the core returns"
_OTHER = "output(core(project(x))), each once in forward"


class Attention(nn.Module):
    """Attention in three parts: products with weights, and the core between them."""

    def __init__(self):
        super().__init__()
        self.before, self.after = nn.Linear(HIDDEN, 3 * HIDDEN, **EXACT), nn.Linear(HIDDEN, HIDDEN, **EXACT)

    def core(self, qkv: torch.Tensor) -> torch.Tensor:
        """[S, 3H] -> [S, H]."""
        q_ASD, k_ATD, v_ATD = (part.view(len(part), _HEADS, -1).transpose(0, 1) for part in qkv.chunk(3, 1))
        scores_AST = torch.softmax(q_ASD @ k_ATD.transpose(1, 2), -1)
        return (nn.functional.dropout(scores_AST, 0.2) @ v_ATD).transpose(0, 1).flatten(1)


class Parts:
    """What the learner gets: three functions."""

    def __init__(self, model: Attention, watch):
        parts = {"project": model.before, "core": model.core, "output": model.after}
        self.project, self.core, self.output = (Function(name, part, watch) for name, part in parts.items())


def _trained(function: Callable, watch) -> Tensors:
    torch.manual_seed(_SEED)
    model, x, upstream = Attention(), inputs(11).requires_grad_(), inputs(12)
    layer = Parts(model, watch)
    weigh(watch, "before")
    watch.mark("forward")
    y = checked(function, function(oracle.right, layer, x), x)
    watch.mark("forward over")
    loss, found = (y * upstream).sum(), {"the result": y.detach().clone()}
    del y
    weigh(watch, "after forward")
    watch.mark("backward")
    loss.backward()
    watch.mark("backward over")
    return found | {"the gradient of x": gradient(x)} | gradients(model)


def _plain(checkpoint: Callable, layer: Parts, x: torch.Tensor) -> torch.Tensor:
    return layer.output(layer.core(layer.project(x)))


def _no_grad(checkpoint: Callable, layer: Parts, x: torch.Tensor) -> torch.Tensor:
    qkv = layer.project(x)
    with torch.no_grad():
        context = layer.core(qkv)
    return layer.output(context)


def _wrong() -> Iterator[Wrong]:
    yield Wrong(_NO_GRAD, results(_trained, _no_grad))


@cache
def cases(n: int) -> list[Scene]:
    """One layer. Kept are the core's input, three times as wide as x, and output's, beside the result."""
    size = inputs(11).nbytes
    hold = Hold("after forward", 4 * size, "{there} were kept after forward; right is {here}", _KEPT, gone=-size)
    must = Must(("project", "core", "output"), ("core",), (hold,))
    return [Scene(1, _trained, results(_trained, _plain), _wrong, must=must, note="a layer with attention")]


def _values(task: "Selective", trial: Trial) -> Verdict:
    verdict = values(task, trial)
    if verdict.ok:
        return verdict
    known = judges.why_values(trial.answers[0]) or verdict.hint
    return verdict._replace(hint=known or judges.calls(task, trial).hint)


@dataclass(frozen=True)
class Selective(CheckpointTask):
    advice: ClassVar[tuple[tuple[str, str], ...]] = (
        (r"'Tensor' object is not callable", _RESULT),
        *CheckpointTask.advice,
    )
    aspects: ClassVar[tuple[Aspect, ...]] = (
        Aspect("computes and trains as without a checkpoint", 0.15, _values),
        Aspect("runs the core again, and nothing else", 0.7, judges.calls),
        Aspect("keeps what products with weights need, and no scores", 0.15, judges.held),
    )

    def why_calls(self, phase: str, got: list[str], must: Must) -> str:
        if phase == "forward":
            return _OTHER
        if not got:
            return _NONE
        return super().why_calls(phase, got, must) if set(got) == {"core"} else _MORE
