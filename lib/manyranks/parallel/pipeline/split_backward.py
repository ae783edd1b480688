"""A backward in two halves: I, the gradient of a stage's input; W, its weights' gradients.

    split = SplitBackward(stage)
    with split:
        y = stage(x)
    grad_x = split.input_gradient(y, grad_y, x)  # I: the stage before waits for it
    split.weight_gradients()                     # W: nobody waits for it

For a linear layer y = x Uᵀ, I is grad_y U, and W is grad_yᵀ x: two products of one size,
and only the first is on the way to the stage before. So each linear layer gets a separate
graph, which ends at its weight and keeps x. I puts grad_y aside, and W sends it through
that graph. All else that I needed of the forward pass is free after I.

Only nn.Linear is worth that. The gradients of other weights (norms, embeddings) are cheap:
I computes them on its way and keeps them for W. So any module comes out right, and every
gradient arrives at its parameter in W, once, where data parallelism's hooks wait for it.
Source: Qi et al., "Zero Bubble Pipeline Parallelism", arXiv 2401.10241, section 2.
"""

from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional as F

from manyranks.parallel.recomputation import gradients

Aside = list[tuple[GradientEdge | Tensor, Tensor]]  # where a gradient goes in W, and it


class SplitBackward:
    """A context manager for one forward pass of a module, whose backward has two halves."""

    def __init__(self, module: nn.Module):
        computing = [getattr(p, "whole", p) for p in module.parameters()]  # not shards
        self._parameters = [p for p in computing if p.requires_grad]
        self._linears = [part for part in module.modules() if _splits(part)]
        self._aside: Aside = []

    def __enter__(self) -> "SplitBackward":
        for linear in self._linears:
            vars(linear)["forward"] = partial(_forward, self._aside, linear)
        return self

    def __exit__(self, *exception) -> None:
        for linear in self._linears:
            vars(linear).pop("forward", None)  # I, inside the block, has removed it

    def input_gradient(
        self, output: Tensor | GradientEdge, grad: Tensor | None, x: Tensor | None
    ) -> Tensor | None:
        """Computes I: the gradient of the input, and what W needs to go on.

        output: the stage's, or its place in the graph
        grad: of the output, None where that is a tensor with one number
        x: the module's input, or None where nobody wants its gradient

        Returns the gradient of x, None where the output does not depend on it.
        """
        grad = torch.ones_like(output) if grad is None else grad
        wanted = [*self._parameters, *([] if x is None else [x])]
        with self, torch.no_grad():  # a checkpoint computes its part again
            found = gradients([output], [grad], wanted)
        ready = zip(self._parameters, found, strict=False)
        self._aside += [pair for pair in ready if pair[1] is not None]
        return None if x is None else found[-1]

    def weight_gradients(self) -> None:
        """W: adds to the parameters' gradients, as backward() does. Needs I before it."""
        if self._aside:
            torch.autograd.backward(*zip(*self._aside, strict=True))
        self._aside.clear()


class _Linear(torch.autograd.Function):
    """F.linear, whose backward leaves the gradients of weight and bias for later."""

    @staticmethod
    def forward(ctx, aside: Aside, x: Tensor, weight: Tensor, bias: Tensor | None):
        with torch.enable_grad():
            y = F.linear(x.detach(), weight, bias)
        ctx.aside, ctx.later, ctx.type = aside, get_gradient_edge(y), x.dtype
        ctx.save_for_backward(weight)
        return y.detach()

    @staticmethod
    def backward(ctx, grad: Tensor):
        ctx.aside.append((ctx.later, grad))
        if not ctx.needs_input_grad[1]:
            return None, None, None, None
        (weight,) = ctx.saved_tensors
        grad_x = grad @ weight.to(grad.dtype)  # under autocast, they have fewer bits
        return None, grad_x.to(ctx.type), None, None


def _splits(module: nn.Module) -> bool:
    """Returns whether it is a linear layer that computes as nn.Linear does."""
    return type(module).forward is nn.Linear.forward and "forward" not in vars(module)


def _forward(aside: Aside, linear: nn.Linear, input: Tensor) -> Tensor:
    weight, bias = linear.weight, linear.bias
    # Above one that is no leaf is a graph, which I would free before W.
    leaves = weight.is_leaf and (bias is None or bias.is_leaf)
    if not (leaves and weight.requires_grad and torch.is_grad_enabled()):
        return F.linear(input, weight, bias)
    return _Linear.apply(aside, input, weight, bias)
