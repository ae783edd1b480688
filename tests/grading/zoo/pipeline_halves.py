"""Wrong answers to the fourth task of 05_pipeline: a backward in two halves."""

from typing import ClassVar

import torch

from tests.grading.zoo.pipeline_right import RightSplit
from tests.grading.zoo.wrong import Wrong, keeper

ZOO: list[Wrong] = []
wrong = keeper(ZOO)
TASK = "Split"


@wrong(TASK, "forward(x) returned a NoneType")
class DoesNothing:
    def __init__(self, layers):
        pass

    def forward(self, x):
        pass


@wrong(TASK, "each layer's product, with its bias where it has one, then tanh")
class ReturnsWhatItWasGiven:
    def __init__(self, layers):
        pass

    def forward(self, x):
        return x

    def input_gradient(self, grad):
        return grad

    def weight_gradient(self):
        return self


@wrong(TASK, "has no attribute 'input_gradient'")
class HasNoI(RightSplit):
    @property
    def input_gradient(self):
        raise AttributeError("'Split' object has no attribute 'input_gradient'")


@wrong(TASK, "I leaves the parameters' .grad as it was")
class DoesWWithI(RightSplit):
    """A whole backward, and a W that has nothing left to do."""

    def input_gradient(self, grad):
        found = super().input_gradient(grad)
        super().weight_gradient()
        self.done = True
        return found

    def weight_gradient(self):
        if not hasattr(self, "done"):
            raise RuntimeError


@wrong(TASK, "put aside what W needs, and let W add to it")
class SetsWeightsInI(RightSplit):
    def input_gradient(self, grad):
        found = super().input_gradient(grad)
        for layer, x, dz in zip(self.layers, self.inputs, self.grads, strict=True):
            if layer.weight.requires_grad:
                self.add(layer.weight, dz.t() @ x)
        return found

    def of_layer(self, layer, x, grad):
        if layer.bias is not None:
            self.add(layer.bias, grad.sum(0))


@wrong(TASK, "its layers and what it keeps are in self, not in the class")
class KeepsLayersInTheClass(RightSplit):
    @property
    def layers(self):
        return type(self).everyones

    @layers.setter
    def layers(self, layers):
        type(self).everyones = layers


@wrong(TASK, "· keeps what is needed for what comes, no more: one micro-batch, what was computed is wrong")
class UsesAnotherSlope(RightSplit):
    def slope(self, y):
        return 1 - y


@wrong(TASK, "hint: this line raised (pipeline_halves.py, line")
class RaisesInW(RightSplit):
    def of_layer(self, layer, x, grad):
        return {}[layer]


@wrong(TASK, "gradients add up")
class Assigns(RightSplit):
    def add(self, parameter, grad):
        parameter.grad = grad


@wrong(TASK, "whose derivative is 1 − tanh²")
class ForgetsTheSlope(RightSplit):
    def slope(self, y):
        return torch.ones_like(y)


@wrong(TASK, "the gradient of a bias is the sum of dz over the rows")
class ForgetsTheBias(RightSplit):
    def of_layer(self, layer, x, grad):
        if layer.weight.requires_grad:
            self.add(layer.weight, grad.t() @ x)


@wrong(TASK, "weight_gradient() raised AttributeError: 'NoneType' object has no attribute", right_values=True)
class NeedsABias(RightSplit):
    def of_layer(self, layer, x, grad):
        self.add(layer.weight, grad.t() @ x)
        layer.bias.grad = grad.sum(0) if layer.bias.grad is None else layer.bias.grad + grad.sum(0)


@wrong(TASK, "a weight that does not learn gets no gradient")
class TrainsTheFrozen(RightSplit):
    def of_layer(self, layer, x, grad):
        self.add(layer.weight, grad.t() @ x)
        if layer.bias is not None:
            self.add(layer.bias, grad.sum(0))


@wrong(TASK, "raise RuntimeError where they are not there yet", right_values=True)
class DoesNothingWithoutI(RightSplit):
    def weight_gradient(self):
        if self.grads is not None:
            super().weight_gradient()


@wrong(TASK, "TypeError was raised", right_values=True)
class StumblesWithoutI(RightSplit):
    def check(self):
        pass


@wrong(TASK, "several micro-batches and a frozen weight, input_gradient(grad) raised TypeError", right_values=True)
class KeepsItOnTheLayers(RightSplit):
    """Where the next micro-batch overwrites it."""

    @torch.no_grad()
    def forward(self, x):
        for layer in self.layers:
            layer.x = x
            x = torch.tanh(layer(x))
        self.layers[-1].y = x
        return x

    def input_gradient(self, grad):
        self.inputs = [layer.x for layer in self.layers]
        self.y = self.layers[-1].y
        for layer in self.layers:
            layer.x = layer.y = None
        return super().input_gradient(grad)


@wrong(TASK, "the check calls .input_gradient(grad)")
class TakesXForI(RightSplit):
    def input_gradient(self, grad, x):
        return super().input_gradient(grad)


@wrong(TASK, "several micro-batches and a frozen weight, input_gradient(grad) raised", right_values=True)
class SharesAList(RightSplit):
    """A list of the class, for all."""

    everyones: ClassVar[list] = []

    def __init__(self, layers):
        super().__init__(layers)
        self.inputs = self.everyones

    def after_w(self):
        self.everyones.clear()


@wrong(TASK, "is not allowed; ")
class TheLibrarys:
    def __init__(self, layers):
        from manyranks.parallel.pipeline.split_backward import SplitBackward

        self.layers = torch.nn.Sequential(*(part for layer in layers for part in (layer, torch.nn.Tanh())))
        self.split = SplitBackward(self.layers)

    def forward(self, x):
        self.x = x.requires_grad_()
        with self.split:
            self.y = self.layers(self.x)
        return self.y

    def input_gradient(self, grad):
        return self.split.input_gradient(self.y, grad, self.x)

    def weight_gradient(self):
        self.split.weight_gradients()


@wrong(TASK, "the check calls Split(layers)")
class TakesNoLayers(RightSplit):
    def __init__(self):
        pass
