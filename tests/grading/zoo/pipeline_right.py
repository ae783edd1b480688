"""What the zoo of pipelines is made of: right answers, in parts that wrong ones leave out or replace."""

from itertools import chain

import torch
import torch.distributed as dist


def numbered(kinds, m):
    """ "FFB" -> [("F", 0), ("F", 1), ("B", 0)], without what m micro-batches have not."""
    done, table = dict.fromkeys("FBIW", 0), []
    for kind in kinds:
        if done[kind] < m:
            table.append((kind, done[kind]))
            done[kind] += 1
    return table


def steady(ahead, m):
    """So many forwards, then one forward and one backward in turn."""
    return numbered("F" * ahead + "FB" * m, m)


def loops(p, m, v, rank, ahead=None, turns=None, back=None):
    """An interleaved table. turns: (which of the rank's stages, micro-batch), in order; back: the same of backwards."""
    turns = turns or [(k, i + j) for i in range(0, m, p) for k in range(v) for j in range(p)]
    forwards = [("F", k * p + rank, i) for k, i in turns]
    backwards = [("B", (v - 1 - k) * p + rank, i) for k, i in back or turns]
    ahead = min(m * v, 2 * (p - 1 - rank) + (v - 1) * p if ahead is None else ahead)
    both = chain.from_iterable(zip(forwards[ahead:], backwards, strict=False))
    return [*forwards[:ahead], *both, *backwards[m * v - ahead :]]


def capped(p, m, cap, times=None):
    """Between ZB-H1 and ZB-H2."""
    cap = min(cap, 2 * p - 1)
    found = []
    for below in reversed(range(p)):
        ahead = min(cap - 1, below + max(0, cap - p) * below // max(1, p - 1))
        found.append(numbered("F" * ahead + "FI" * (cap - 1 - ahead) + "FIW" * m, m))
    return found


class RightStep:
    """A right answer to train_step; each wrong one changes a method."""

    def __call__(self, stage, actions, shapes, inputs, targets, loss_fn):
        self.stage, self.shapes, self.inputs, self.targets, self.loss_fn = stage, shapes, inputs, targets, loss_fn
        self.rank, self.last, self.m = dist.get_rank(), dist.get_world_size() - 1, len(shapes)
        self.flying, self.sends, self.losses = {}, [], []
        for kind, i in self.order(actions):
            (self.forward if kind == "F" else self.backward)(i)
        self.finish()
        return self.result()

    def order(self, actions):
        return actions

    def forward(self, i):
        x = self.inputs[i] if self.rank == 0 else self.leaf(self.receive(i, self.rank - 1))
        y = self.compute(x)
        if self.rank < self.last:
            self.send(y.detach(), self.rank + 1)
        else:
            y = self.loss(y, i)
        self.keep(i, x, y)

    def leaf(self, x):
        return x.requires_grad_()

    def compute(self, x):
        return self.stage(x)

    def loss(self, y, i):
        loss = self.loss_fn(y, self.targets[i]) / self.m
        self.losses.append(loss.detach())
        return loss

    def keep(self, i, x, y):
        self.flying[i] = x, y

    def kept(self, i):
        return self.flying.pop(i)

    def backward(self, i):
        x, y = self.kept(i)
        self.go_back(y, None if self.rank == self.last else self.receive(i, self.rank + 1))
        if self.rank > 0:
            self.send(self.gradient(x), self.rank - 1)

    def go_back(self, y, grad):
        y.backward(grad)

    def gradient(self, x):
        return x.grad

    def buffer(self, i):
        return torch.empty(self.shapes[i], dtype=torch.float64)

    def receive(self, i, source):
        x = self.buffer(i)
        dist.recv(x, source)
        return x

    def send(self, tensor, to):
        self.sends.append(dist.isend(tensor, to))

    def finish(self):
        for work in self.sends:
            work.wait()

    def result(self):
        return sum(self.losses) if self.losses else None


class SendsWithTheGraph(RightStep):
    """Also right: what autograd knows of a tensor is not sent."""

    def forward(self, i):
        if self.rank == self.last:
            return super().forward(i)
        x = self.inputs[i] if self.rank == 0 else self.leaf(self.receive(i, self.rank - 1))
        y = self.compute(x)
        self.send(y, self.rank + 1)
        return self.keep(i, x, y)


class RightSplit:
    """A right answer to Split, in parts."""

    def __init__(self, layers):
        self.layers, self.inputs, self.y, self.grads = layers, [], None, None

    @torch.no_grad()
    def forward(self, x):
        for layer in self.layers:
            self.inputs.append(x)
            x = torch.tanh(layer(x))
        self.y = x
        return x

    @torch.no_grad()
    def input_gradient(self, grad):
        outputs, self.grads = [*self.inputs[1:], self.y], []
        self.after_i()
        for layer, y in zip(reversed(self.layers), reversed(outputs), strict=True):
            grad = grad * self.slope(y)
            self.grads.insert(0, grad)
            grad = grad @ layer.weight
        return grad

    def after_i(self):
        self.y = None

    def slope(self, y):
        return 1 - y * y

    @torch.no_grad()
    def weight_gradient(self):
        self.check()
        for layer, x, grad in zip(self.layers, self.inputs, self.grads, strict=True):
            self.of_layer(layer, x, grad)
        self.after_w()

    def check(self):
        if self.grads is None:
            raise RuntimeError("I comes first")

    def of_layer(self, layer, x, grad):
        if layer.weight.requires_grad:
            self.add(layer.weight, grad.t() @ x)
        if layer.bias is not None:
            self.add(layer.bias, grad.sum(0))

    def add(self, parameter, grad):
        parameter.grad = grad if parameter.grad is None else parameter.grad + grad

    def after_w(self):
        self.inputs, self.grads = [], None
