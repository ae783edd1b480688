"""Other right answers to the tasks of 05_pipeline, which must get full marks."""

from itertools import pairwise

import torch
import torch.distributed as dist

from tests.grading.zoo.pipeline_right import RightSplit, RightStep, SendsWithTheGraph, capped, loops, steady


def by_a_generator(p, m, rank):
    yield from steady(p - 1 - rank, m)


def by_lists_in_a_tuple(p, m, rank):
    return tuple(map(list, steady(p - 1 - rank, m)))


def by_counting_what_is_in_flight(p, m, rank):
    table, forwards, backwards = [], 0, 0
    while backwards < m:
        if forwards < m and forwards - backwards < p - rank:
            table.append(("F", forwards))
            forwards += 1
        else:
            table.append(("B", backwards))
            backwards += 1
    return table


class InBatches(RightStep):
    """Each message by batch_isend_irecv."""

    def receive(self, i, source):
        x = self.buffer(i)
        for work in dist.batch_isend_irecv([dist.P2POp(dist.irecv, x, source)]):
            work.wait()
        return x

    def send(self, tensor, to):
        self.sends += dist.batch_isend_irecv([dist.P2POp(dist.isend, tensor, to)])


class PostsReceivesAhead(RightStep):
    """The next message of each side is on its way while the stage computes."""

    def order(self, actions):
        self.coming = {}
        self.todo = [(i, self.rank - 1 if kind == "F" else self.rank + 1) for kind, i in actions]
        self.todo = [(i, source) for i, source in self.todo if 0 <= source <= self.last]
        self.post()
        return actions

    def post(self):
        if self.todo:
            i, source = self.todo.pop(0)
            x = self.buffer(i)
            self.coming[i, source] = x, dist.irecv(x, source)

    def receive(self, i, source):
        x, work = self.coming.pop((i, source))
        work.wait()
        self.post()
        return x


class SendsAndReceivesTogether(RightStep):
    """As Megatron does in the steady state: one batch of a send down and a receive from there."""

    def order(self, actions):
        self.steady = {i for (kind, i), (other, _) in pairwise(actions) if (kind, other) == ("F", "B")}
        self.early = []
        return actions

    def send(self, tensor, to):
        i = max(self.flying, default=-1) + 1
        if to < self.rank or i not in self.steady or len(set(self.shapes)) > 1:
            return super().send(tensor, to)
        x = self.buffer(0)
        both = [dist.P2POp(dist.isend, tensor, to), dist.P2POp(dist.irecv, x, to)]
        for work in dist.batch_isend_irecv(both):
            work.wait()
        self.early.append(x)
        return None

    def receive(self, i, source):
        return self.early.pop(0) if source > self.rank and self.early else super().receive(i, source)


class ByGrad(RightStep):
    """autograd.grad, and adding by hand; the mean in the gradient; tags; sends are waited for as soon as they may be over."""

    def loss(self, y, i):
        loss = self.loss_fn(y, self.targets[i])
        self.losses.append(loss.item() / self.m)
        return loss

    def backward(self, i):
        x, y = self.kept(i)
        grad = torch.tensor(1 / self.m, dtype=torch.float64) if self.rank == self.last else self.receive(i, self.rank + 1)
        wanted = [*self.stage.parameters(), *([x] if self.rank else [])]
        found = list(torch.autograd.grad(y, wanted, grad))
        for parameter, one in zip(self.stage.parameters(), found, strict=False):
            parameter.grad = one if parameter.grad is None else parameter.grad + one
        if self.rank:
            self.send(found[-1], self.rank - 1)

    def send(self, tensor, to):
        self.sends.append(dist.isend(tensor, to, tag=7))

    def receive(self, i, source):
        x = self.buffer(i)
        dist.recv(x, source, tag=7)
        return x


class DividesInTheEnd(RightStep):
    """Sums of gradients, divided once."""

    def loss(self, y, i):
        loss = self.loss_fn(y, self.targets[i])
        self.losses.append(loss.detach() / self.m)
        return loss

    def finish(self):
        super().finish()
        for parameter in self.stage.parameters():
            parameter.grad.div_(self.m)


class EatsItsTable(RightStep):
    """Takes actions off the list, and what it was given out of the lists."""

    def order(self, actions):
        while actions:
            yield actions.pop(0)


def in_any_order_of_equal_cost(p, m, v, rank):
    return tuple(loops(p, m, v, rank))


class ByOneGraphALayer(RightSplit):
    """Each layer's tanh by autograd, from what is kept; einsum in place of products."""

    def slope(self, y):
        return 1 - y.square()

    def of_layer(self, layer, x, grad):
        if layer.weight.requires_grad:
            self.add(layer.weight, torch.einsum("ro,ri->oi", grad, x))
        if layer.bias is not None:
            self.add(layer.bias, torch.ones(len(grad), dtype=grad.dtype) @ grad)

    def add(self, parameter, grad):
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        parameter.grad.add_(grad)


class AddsInPlace(RightSplit):
    """addmm_ onto what is there; and works in what I is given."""

    def of_layer(self, layer, x, grad):
        for parameter in filter(None.__ne__, (layer.weight, layer.bias)):
            if parameter.grad is None and parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        if layer.weight.requires_grad:
            layer.weight.grad.addmm_(grad.t(), x)
        if layer.bias is not None:
            layer.bias.grad += grad.sum(0)

    @torch.no_grad()
    def input_gradient(self, grad):
        grad.mul_(1.0)
        return super().input_gradient(grad)


class InBatchesOfOne(RightSplit):
    """baddbmm_."""

    def of_layer(self, layer, x, grad):
        if layer.weight.requires_grad:
            room = torch.zeros_like(layer.weight)[None]
            self.add(layer.weight, room.baddbmm_(grad.t()[None], x[None])[0])
        if layer.bias is not None:
            self.add(layer.bias, grad.sum(0))


def with_whole_backwards(p, m, cap, times):
    """Where a W follows its I at once."""
    return [tuple(whole(table)) for table in capped(p, m, cap)]


def whole(table):
    rows = list(table)
    while rows:
        kind, i = rows.pop(0)
        if kind == "I" and rows[:1] == [("W", i)]:
            kind, _ = "B", rows.pop(0)
        yield kind, i


ANSWERS = [
    *[("one_f_one_b", answer) for answer in (by_a_generator, by_lists_in_a_tuple, by_counting_what_is_in_flight)],
    *[("train_step", answer) for answer in (InBatches, PostsReceivesAhead, SendsAndReceivesTogether)],
    *[("train_step", answer) for answer in (ByGrad, DividesInTheEnd, EatsItsTable, SendsWithTheGraph)],
    ("interleaved", in_any_order_of_equal_cost),
    *[("Split", answer) for answer in (ByOneGraphALayer, AddsInPlace, InBatchesOfOne)],
    ("under_a_cap", with_whole_backwards),
]
