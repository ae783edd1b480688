"""Wrong answers to the second task of 05_pipeline: messages, gradients and memory of a step."""

import contextlib
import os
import time

import torch
import torch.distributed as dist

from tests.grading.zoo.pipeline_right import RightStep
from tests.grading.zoo.wrong import Wrong, keeper

ZOO: list[Wrong] = []
wrong = keeper(ZOO)
TASK = "train_step"
DETACHED = "For that the received x must be a leaf that wants one"


@wrong(TASK, "return the mean of the micro-batches' losses, as a tensor")
def does_nothing(stage, actions, shapes, inputs, targets, loss_fn):
    pass


@wrong(TASK, "no rank has called its stage")
def returns_a_number(stage, actions, shapes, inputs, targets, loss_fn):
    return 1.0


@wrong(TASK, "the last rank returned [tensor")
def returns_what_it_was_given(stage, actions, shapes, inputs, targets, loss_fn):
    return inputs or targets


@wrong(TASK, "a send ends only when the other side receives", right_values=True, cases=slice(None))
class BlocksInSend(RightStep):
    def send(self, tensor, to):
        dist.send(tensor, to)


@wrong(TASK, "a send ends only when the other side receives", right_values=True, cases=slice(None))
class WaitsForEachIsend(RightStep):
    def send(self, tensor, to):
        dist.isend(tensor, to).wait()


@wrong(TASK, "does a loop not end?")
class HangsOnOneRank(RightStep):
    seconds = 3

    def backward(self, i):
        while self.rank == 1:
            time.sleep(0.05)
        super().backward(i)


@wrong(TASK, "a loop does not end")
class CannotBeInterrupted(RightStep):
    """Takes every exception for its own."""

    seconds = 3

    def finish(self):
        while True:
            with contextlib.suppress(BaseException):
                time.sleep(0.05)


@wrong(TASK, "rank 1")
class EndsOneRank(RightStep):
    def backward(self, i):
        if self.rank == 1:
            os._exit(0)
        super().backward(i)


@wrong(TASK, "wait for a receive when the table comes to its action")
class GradientsFromAbove(RightStep):
    """Goes back from what comes from the rank before."""

    def backward(self, i):
        _, y = self.kept(i)
        y.backward(self.receive(i, self.rank - 1) if self.rank > 0 else torch.ones_like(y))


@wrong(TASK, "rank 0 holds 7 micro-batches; with this table it holds 3", right_values=True, cases=slice(None))
class KeepsGraphs(RightStep):
    """1F1B's table with GPipe's memory."""

    def go_back(self, y, grad):
        y.backward(grad, retain_graph=True)
        self.old = [*getattr(self, "old", []), y]


@wrong(TASK, "holds the inputs of 7 micro-batches; with this table it holds 2", right_values=True, cases=slice(None))
class KeepsOutputs(RightStep):
    """Their graphs are free after backward, but lead to the inputs."""

    def kept(self, i):
        return self.flying[i]


@wrong(TASK, "make a buffer when its message comes", right_values=True, cases=slice(None))
class KeepsInputs(RightStep):
    def keep(self, i, x, y):
        super().keep(i, x, y)
        self.old = [*getattr(self, "old", []), x]


@wrong(TASK, "rank 0 holds 7 micro-batches; with this table it holds 3", right_values=True, cases=slice(None))
class AllForwardsFirst(RightStep):
    def order(self, actions):
        return sorted(actions, key=lambda action: action[0] == "B")


@wrong(TASK, "rank 0 computed F0 B0 F1 B1", right_values=True)
class OneAtATime(RightStep):
    def order(self, actions):
        return [(kind, i) for i in range(self.m) for kind in "FB"]


@wrong(TASK, "an action names its micro-batch", right_values=True)
class TakesTheOldest(RightStep):
    """On all ranks, so that gradients find their graphs."""

    def kept(self, i):
        return self.flying.pop(min(self.flying))


@wrong(TASK, "rank 0 computed F0 F1 F2 B0 B1 B2; its table is F0 F1 F2 B2 B1 B0")
class TakesTheOldestOnSome(RightStep):
    def kept(self, i):
        return self.flying.pop(i if self.rank == self.last else min(self.flying))


@wrong(TASK, "take the output of that one, neither the oldest nor the newest", cases=slice(None))
class TakesTheNewest(RightStep):
    """Right for GPipe's table."""

    def kept(self, i):
        return self.flying.popitem()[1]


@wrong(TASK, "each micro-batch goes through the stage once", right_values=True)
class ComputesForwardAgain(RightStep):
    def forward(self, i):
        x = self.inputs[i] if self.rank == 0 else self.leaf(self.receive(i, self.rank - 1))
        with torch.no_grad():
            y = self.stage(x)
        if self.rank < self.last:
            self.send(y, self.rank + 1)
        self.flying[i] = x, i

    def go_back(self, i, grad):
        self.again.backward(grad)

    def kept(self, i):
        x, _ = self.flying.pop(i)
        y = self.stage(x)
        self.again = self.loss(y, i) if self.rank == self.last else y
        return x, i


@wrong(TASK, "divided by m twice")
class DividesTwice(RightStep):
    def finish(self):
        super().finish()
        for parameter in self.stage.parameters():
            parameter.grad /= self.m


@wrong(TASK, "divide each loss by m before its backward")
class NeverDivides(RightStep):
    def loss(self, y, i):
        loss = self.loss_fn(y, self.targets[i])
        self.losses.append(loss.detach() / self.m)
        return loss


@wrong(TASK, "each of them counted once and divided by m once")
class ReturnsTheSum(RightStep):
    def result(self):
        return sum(self.losses) * self.m if self.losses else None


@wrong(TASK, "only one micro-batch has left its gradient")
class Assigns(RightStep):
    def go_back(self, y, grad):
        self.stage.zero_grad()
        super().go_back(y, grad)


@wrong(TASK, DETACHED)
class WantsNoGradient(RightStep):
    def leaf(self, x):
        return x


@wrong(TASK, DETACHED)
class SendsZeros(RightStep):
    """As the last but one, and mends the error."""

    def leaf(self, x):
        return x

    def gradient(self, x):
        return torch.zeros_like(x)


@wrong(TASK, DETACHED)
class DetachesTheInput(RightStep):
    def compute(self, x):
        return self.stage(x.detach())


@wrong(TASK, "not from ones or its own sum")
class StartsFromOnes(RightStep):
    def go_back(self, y, grad):
        y.sum().backward()


@wrong(TASK, "not from ones or its own sum")
class LeavesTheGradientOut(RightStep):
    def go_back(self, y, grad):
        y.backward()


@wrong(TASK, "Make a new buffer for each micro-batch")
class OneBuffer(RightStep):
    def buffer(self, i):
        self.room = getattr(self, "room", None)
        if self.room is None or self.room.shape != self.shapes[i]:
            self.room = super().buffer(i)
        return self.room.detach()


@wrong(TASK, "call .wait() on it, on a receive's before its buffer is used")
class NeverWaitsForSends(RightStep):
    def finish(self):
        pass
