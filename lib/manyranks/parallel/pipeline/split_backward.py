"""A backward in two halves: I, the gradient of a stage's input; W, those of its weights.

    split = SplitBackward(stage)
    with split:
        y = stage(x)
    grad_x = split.input_gradient(y, grad_y, x)  # I: the stage before waits for it
    split.weight_gradients()                     # W: nobody waits for it

For a linear layer y = x Uᵀ, I is grad_y U, and W is grad_yᵀ x: two products of one size, of
which only the first is on the way to the stage before. So I puts (x, grad_y) aside, and W
multiplies them. What else I needed of the forward pass is free after I.

Only nn.Linear is worth that. The gradients of other weights (norms, biases, embeddings) are
cheap: I computes them on its way and keeps them for W. So any module comes out right, and
every gradient arrives at its parameter in W, once, where hooks wait for it, as those of
data parallelism do.
Source: Qi et al., "Zero Bubble Pipeline Parallelism", arXiv 2401.10241, section 2.
"""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.nn import functional as F

from manyranks.parallel.recomputation import gradients


class _Aside(NamedTuple):
    """A product that W has yet to make: gradᵀ x, the gradient of a linear's weight."""

    weight: Tensor
    x: Tensor
    grad: Tensor

    def product(self) -> Tensor:
        grad, x = self.grad.flatten(0, -2), self.x.flatten(0, -2)
        return (grad.t() @ x).to(self.weight.dtype)


class SplitBackward:
    """A context manager for one forward pass of a module, whose backward has two halves."""

    def __init__(self, module: nn.Module):
        self._parameters = [p for p in module.parameters() if p.requires_grad]
        self._linears = [part for part in module.modules() if _splits(part)]
        self._aside: list[_Aside] = []
        self._ready: list[Tensor | None] = []

    def __enter__(self) -> "SplitBackward":
        for linear in self._linears:
            linear.forward = partial(_forward, self._aside, linear)
        return self

    def __exit__(self, *exception) -> None:
        for linear in self._linears:
            del linear.forward

    def input_gradient(
        self, output: Tensor | GradientEdge, grad: Tensor | None, x: Tensor | None
    ) -> Tensor | None:
        """I. grad: of the output, None where that is a scalar.

        x: the module's input, or None where nobody wants its gradient.
        Returns the gradient of x, None where the output does not depend on it.
        """
        grad = torch.ones_like(output) if grad is None else grad
        wanted = [*self._parameters, *([] if x is None else [x])]
        with self, torch.no_grad():  # a checkpoint computes its part again
            found = gradients([output], [grad], wanted)
        self._ready = found[: len(self._parameters)]
        return None if x is None else found[-1]

    def weight_gradients(self) -> None:
        """W: adds to the parameters' gradients, as backward() does. Needs I before it."""
        aside = {
            p: [one for one in self._aside if one.weight is p] for p in self._parameters
        }
        parts = list(zip(self._ready, aside.values(), self._parameters, strict=True))
        self._aside.clear()
        self._ready = []
        with torch.enable_grad():
            nodes = [
                _Weight.apply(*part) for part in parts if part[0] is not None or part[1]
            ]
        if nodes:
            torch.autograd.backward(nodes)


class _Linear(torch.autograd.Function):
    """F.linear, whose backward leaves the weight's gradient for later."""

    @staticmethod
    def forward(ctx, aside: list[_Aside], x: Tensor, weight: Tensor, bias: Tensor | None):
        y = F.linear(x, weight, bias)
        ctx.aside, ctx.type = aside, x.dtype
        ctx.save_for_backward(x.to(y.dtype), weight)  # under autocast, y has fewer bits
        return y

    @staticmethod
    def backward(ctx, grad: Tensor):
        x, weight = ctx.saved_tensors
        ctx.aside.append(_Aside(weight, x, grad))
        _, differs, _, has_bias = ctx.needs_input_grad
        grad_x = (grad @ weight.to(grad.dtype)).to(ctx.type) if differs else None
        return None, grad_x, None, grad.flatten(0, -2).sum(0) if has_bias else None


class _Weight(torch.autograd.Function):
    """A node above a parameter: its backward adds to the gradient, and calls its hooks.

    The last parameter's runs first, as in a plain backward, and its product is gone before
    the next one is made.
    """

    @staticmethod
    def forward(ctx, ready: Tensor | None, aside: list[_Aside], parameter: Tensor):
        ctx.ready, ctx.aside = ready, aside
        return parameter.new_zeros(())

    @staticmethod
    def backward(ctx, one: Tensor):
        grad, ctx.ready = ctx.ready, None
        while ctx.aside:
            product = ctx.aside.pop(0).product()
            grad = product if grad is None else grad + product
        return None, None, grad


def _splits(module: nn.Module) -> bool:
    """Is it a linear layer that computes as nn.Linear does, with a weight that learns?"""
    own = type(module).forward is nn.Linear.forward and "forward" not in vars(module)
    return own and module.weight.requires_grad and module.weight.is_leaf


def _forward(aside: list[_Aside], linear: nn.Linear, x: Tensor) -> Tensor:
    if x.dim() == 1 or not torch.is_grad_enabled():
        return F.linear(x, linear.weight, linear.bias)
    return _Linear.apply(aside, x, linear.weight, linear.bias)
