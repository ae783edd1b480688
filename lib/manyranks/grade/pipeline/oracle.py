"""What one process makes of a step: right, and wrong in known ways."""

from dataclasses import dataclass

import torch
from torch import Tensor

from manyranks.grade.pipeline.stages import Layers, Step, loss_of
from manyranks.grade.scripts import Tensors

INPUTS, TARGETS = 71, 72  # seeds


@dataclass(frozen=True)
class Way:
    """How a step is trained; the defaults are right.

    scale: what the gradients are multiplied by; handed: the same of each that another rank sends; hands_back: whether a stage's
    input gets its gradient; ones: whether a stage goes back from ones; last: only the last micro-batch of the table counts;
    by_rows: micro-batches count by their rows; passes_on: a middle rank sends on what it got; sends_input: and its input down.
    """

    scale: float = 1.0
    hands_back: bool = True
    ones: bool = False
    last: bool = False
    handed: float = 1.0
    by_rows: bool = False
    passes_on: bool = False
    sends_input: bool = False


RIGHT = Way()


def inputs_of(step: Step, way: Way = RIGHT) -> list[list[Tensor]]:
    """Of each rank's stage, by micro-batch."""
    found = [step.batch(INPUTS)]
    with torch.no_grad(), torch.random.fork_rng([]):
        for rank in range(step.n - 1):
            layers = Layers(rank)
            found.append([x if way.sends_input else layers(x) for x in found[-1]])
    return found


def last_loss(step: Step) -> Tensor:
    """That of the last micro-batch alone."""
    with torch.no_grad(), torch.random.fork_rng([]):
        return loss_of(Layers(step.n - 1)(inputs_of(step)[-1][-1]), step.batch(TARGETS)[-1])


def trained(step: Step, way: Way = RIGHT) -> list[Tensors]:
    """The gradients of each rank's stage, and on the last one the loss."""
    inputs, targets = inputs_of(step, way), step.batch(TARGETS)
    parts = [rows / sum(step.rows) if way.by_rows else 1 / step.m for rows in step.rows]
    with torch.random.fork_rng([]):
        stages = [Layers(rank) for rank in range(step.n)]
    grads: list[Tensor | None] = [None] * step.m
    found = []
    for rank in reversed(range(step.n)):
        outputs, leaves = _forward(stages[rank], inputs[rank])
        losses = [loss_of(y, t) * part for y, t, part in zip(outputs, targets, parts, strict=True)]
        last = rank == step.n - 1
        for i in (i for kind, i in step.tables[rank] if kind == "B"):
            if way.last:
                stages[rank].zero_grad()
            if last:
                losses[i].backward()
            else:
                outputs[i].backward(torch.ones_like(outputs[i]) if way.ones else grads[i] * way.handed)
        if last or not way.passes_on:
            grads = [x.grad if way.hands_back else torch.zeros_like(x) for x in leaves]
        tensors = {name: grad * way.scale for name, grad in gradients(stages[rank]).items()}
        found.append(tensors | ({"the loss": torch.stack(losses).sum().detach()} if last else {}))
    return found[::-1]


def _forward(stage: Layers, inputs: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    leaves = [x.clone().requires_grad_() for x in inputs]
    return [stage(x) for x in leaves], leaves


def gradients(layers: Layers) -> Tensors:
    """Those of all parameters, zeros where there is none, by the words of a report."""
    return {
        f"the gradient of {name}": torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in layers.named_parameters()
    }
