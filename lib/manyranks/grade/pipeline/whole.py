"""A stack's backward by autograd, in one piece: right, and wrong in known ways."""

import torch
from torch import nn


class Whole:
    """A right answer to Split."""

    early, adds, slopes = False, True, True

    def __init__(self, layers: list[nn.Linear]):
        self.layers = layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.x = x.detach().requires_grad_()
        with torch.enable_grad():
            self.y = self.x
            for layer in self.layers:
                self.y = torch.tanh(layer(self.y)) if self.slopes else _Unsloped.apply(layer(self.y))
        return self.y

    def input_gradient(self, grad: torch.Tensor) -> torch.Tensor:
        parameters = [p for layer in self.layers for p in layer.parameters() if p.requires_grad]
        x_grad, *found = torch.autograd.grad(self.y, [self.x, *parameters], grad)
        self.found = list(zip(parameters, found, strict=True))
        if self.early:
            self._add()
        return x_grad

    def weight_gradient(self) -> None:
        if not self.early:
            self._add()

    def _add(self) -> None:
        for parameter, grad in self.found:
            parameter.grad = grad if parameter.grad is None or not self.adds else parameter.grad + grad


class Early(Whole):
    """Gives weights their gradients in I."""

    early = True


class Assigns(Whole):
    """Does not add to what is there."""

    adds = False


class NoSlopes(Whole):
    """Forgets tanh's derivative."""

    slopes = False


class _Unsloped(torch.autograd.Function):
    """tanh, whose derivative is forgotten."""

    @staticmethod
    def forward(ctx, x):
        return torch.tanh(x)

    @staticmethod
    def backward(ctx, grad):
        return grad
