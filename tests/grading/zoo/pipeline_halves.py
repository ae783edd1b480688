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


@wrong(TASK, "no product for a weight, and no forward again", right_values=True)
class ComputesWWithI(RightSplit):
    """Puts gradients of weights aside, and adds them later."""

    def input_gradient(self, grad):
        found = super().input_gradient(grad)
        self.ready = [g.t() @ x for x, g in zip(self.inputs, self.grads, strict=True)]
        return found

    @torch.no_grad()
    def weight_gradient(self):
        self.check()
        for layer, ready, grad in zip(self.layers, self.ready, self.grads, strict=True):
            if layer.weight.requires_grad:
                self.add(layer.weight, ready)
            if layer.bias is not None:
                self.add(layer.bias, grad.sum(0))
        self.after_w()
        self.ready = []


class ByAutograd(RightSplit):
    """Keeps a graph."""

    def forward(self, x):
        self.x = x.detach().requires_grad_()
        self.y = self.x
        for layer in self.layers:
            self.y = torch.tanh(layer(self.y))
        return self.y.detach()

    def input_gradient(self, grad):
        self.grads = grad
        return torch.autograd.grad(self.y, self.x, grad, retain_graph=True)[0]

    def weight_gradient(self):
        self.check()
        parameters = [p for layer in self.layers for p in layer.parameters() if p.requires_grad]
        for parameter, grad in zip(parameters, torch.autograd.grad(self.y, parameters, self.grads), strict=True):
            self.add(parameter, grad)
        self.x = self.y = self.grads = None


@wrong(TASK, "it does not go through the layers again", right_values=True)
class GoesThroughAutogradTwice(ByAutograd):
    pass


@wrong(TASK, "no product for a weight, and no forward again", right_values=True)
class ComputesForwardInI(ByAutograd):
    def forward(self, x):
        self.first = x
        with torch.no_grad():
            return super().forward(x)

    def input_gradient(self, grad):
        with torch.enable_grad():
            super().forward(self.first)
        return super().input_gradient(grad)


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


@wrong(TASK, "'NoneType' object has no attribute")
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


@wrong(TASK, "when W is over, nothing is needed any more", right_values=True)
class KeepsAllAfterW(RightSplit):
    def after_w(self):
        pass


@wrong(TASK, "what only I needs, as the last result, goes with I", right_values=True)
class KeepsTheResult(RightSplit):
    def after_i(self):
        pass


@wrong(TASK, "forward keeps each layer's input and the last layer's result", right_values=True)
class KeepsProducts(RightSplit):
    """What comes before tanh as well."""

    @torch.no_grad()
    def forward(self, x):
        self.products = []
        for layer in self.layers:
            self.inputs.append(x)
            self.products.append(layer(x))
            x = torch.tanh(self.products[-1])
        self.y = x
        return x

    def after_i(self):
        self.y = self.products = None


@wrong(TASK, "raise RuntimeError where they are not there yet", right_values=True)
class DoesNothingWithoutI(RightSplit):
    def weight_gradient(self):
        if self.grads is not None:
            super().weight_gradient()


@wrong(TASK, "TypeError was raised", right_values=True)
class StumblesWithoutI(RightSplit):
    def check(self):
        pass


@wrong(TASK, "two micro-batches and a frozen weight")
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


@wrong(TASK, "two micro-batches and a frozen weight, rank 0 raised")
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
