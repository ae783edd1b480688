"""A checkpoint that is right, and wrong in known ways: what its results are tells mistakes apart."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from manyranks.parallel.recomputation import leaves_of, nodes_of


def plain(function: Callable, x: torch.Tensor) -> torch.Tensor:
    """Without a checkpoint: what must come out."""
    return function(x)


def _same(x: torch.Tensor) -> torch.Tensor:
    return x


@dataclass(frozen=True)
class Checkpoint:
    """checkpoint(function, x); the defaults are right.

    restores: whether the second run has the random numbers of the first; puts_back: whether they then go on where they were;
    hands_on: whether x gets its gradient; parameters: how many times the parameters get theirs; adds: whether to what is there;
    ones: whether backward starts from ones; kept: what x has become when backward comes to it.
    """

    restores: bool = True
    puts_back: bool = True
    hands_on: bool = True
    parameters: int = 1
    adds: bool = True
    ones: bool = False
    kept: Callable[[torch.Tensor], torch.Tensor] = _same

    def __call__(self, function: Callable, x: torch.Tensor) -> torch.Tensor:
        if not torch.is_grad_enabled():
            return function(x)
        return _Node.apply(self, function, x, torch.empty(0, requires_grad=True))

    def gradient(self, y: torch.Tensor, grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor | None:
        """That of x; those of the parameters arrive on the way."""
        grad = torch.ones_like(grad) if self.ones else grad
        parameters = [leaf for leaf in leaves_of(nodes_of([y])) if leaf is not x]
        if not self.adds:
            for parameter in parameters:
                parameter.grad = None
        passes = [[x] * x.requires_grad + parameters * bool(self.parameters), *[parameters] * (self.parameters - 1)]
        for inputs in filter(None, passes):
            torch.autograd.backward(y, grad, retain_graph=True, inputs=inputs)
        return x.grad if self.hands_on else None


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(ctx, way: Checkpoint, function: Callable, x: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
        ctx.way, ctx.function, ctx.state = way, function, torch.get_rng_state()
        ctx.save_for_backward(x)
        return function(x)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        x = ctx.way.kept(ctx.saved_tensors[0]).detach().requires_grad_(ctx.needs_input_grad[2])
        now = torch.get_rng_state()
        if ctx.way.restores:
            torch.set_rng_state(ctx.state)
        with torch.enable_grad():
            y = ctx.function(x)
        if ctx.way.restores and ctx.way.puts_back:
            torch.set_rng_state(now)
        return None, None, ctx.way.gradient(y, grad, x) if y.requires_grad else None, None


right = Checkpoint()
