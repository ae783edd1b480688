"""More wrong answers to the fourth task of 05_pipeline: right gradients, with products and memory that are not needed."""

import torch

from tests.grading.zoo.pipeline_right import RightSplit
from tests.grading.zoo.wrong import Wrong, keeper

ZOO: list[Wrong] = []
wrong = keeper(ZOO)
TASK = "Split"


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


@wrong(TASK, "computes nothing for a frozen weight", right_values=True)
class ThrowsTheFrozenAway(RightSplit):
    """Computes its product all the same."""

    def of_layer(self, layer, x, grad):
        found = grad.t() @ x
        if layer.weight.requires_grad:
            self.add(layer.weight, found)
        if layer.bias is not None:
            self.add(layer.bias, grad.sum(0))


@wrong(TASK, "no result leads to a graph: compute under torch.no_grad()", right_values=True)
class LeadsToGraphs(RightSplit):
    forward = RightSplit.forward.__wrapped__
    input_gradient = RightSplit.input_gradient.__wrapped__
    weight_gradient = RightSplit.weight_gradient.__wrapped__


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
