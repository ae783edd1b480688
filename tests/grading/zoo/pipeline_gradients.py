"""Still more wrong answers to the second task of 05_pipeline: what is divided, summed up, handed on and kept."""

import time
from concurrent.futures import ThreadPoolExecutor

import torch

from tests.grading.zoo.pipeline_right import RightStep
from tests.grading.zoo.wrong import Wrong, keeper

ZOO: list[Wrong] = []
wrong = keeper(ZOO)
TASK = "train_step"


@wrong(TASK, "only the last one divides, its loss by m")
class DividesOnEachRank(RightStep):
    def go_back(self, y, grad):
        y.backward(None if grad is None else grad / self.m)


@wrong(TASK, "m is len(shapes); `actions` has an F and a B of each micro-batch")
class CountsActions(RightStep):
    def order(self, actions):
        self.m = len(actions)
        return actions


@wrong(TASK, "each micro-batch counts alike, however many rows it has", cases=slice(None))
class WeighsByRows(RightStep):
    def loss(self, y, i):
        loss = self.loss_fn(y, self.targets[i]) * len(y) / sum(map(len, self.targets))
        self.losses.append(loss.detach())
        return loss


@wrong(TASK, "add them up over the micro-batches, each divided by m")
class ReturnsTheLastLoss(RightStep):
    def result(self):
        return self.losses[-1] * self.m if self.losses else None


@wrong(TASK, "a middle rank sends x.grad")
class HandsOnWhatItGot(RightStep):
    def backward(self, i):
        x, y = self.kept(i)
        grad = None if self.rank == self.last else self.receive(i, self.rank + 1)
        self.go_back(y, grad)
        if self.rank > 0:
            self.send(x.grad if self.rank == self.last else grad, self.rank - 1)


@wrong(TASK, "a rank sends its stage's output")
class SendsItsInput(RightStep):
    def forward(self, i):
        if self.rank == self.last:
            return super().forward(i)
        x = self.inputs[i] if self.rank == 0 else self.leaf(self.receive(i, self.rank - 1))
        self.send(x.detach(), self.rank + 1)
        return self.keep(i, x, self.compute(x))


@wrong(TASK, "a tensor was changed while its send was under way")
class ClearsWhatItSends(RightStep):
    def send(self, tensor, to):
        super().send(tensor, to)
        if to < self.rank:
            tensor.zero_()
            self.sent = [*getattr(self, "sent", []), tensor]

    def receive(self, i, source):
        """Comes late to its receive: what has not been asked for has not left its sender yet, so the zeros leave."""
        if source > self.rank:
            time.sleep(0.05)
        return super().receive(i, source)


@wrong(TASK, "the tensors in `inputs` were changed")
class ChangesInputs(RightStep):
    def compute(self, x):
        return self.stage(x.mul_(1.5) if self.rank == 0 else x)


@wrong(TASK, "keep y itself, as the stage returns it with gradients on")
class ForwardWithoutGradients(RightStep):
    def compute(self, x):
        with torch.no_grad():
            return self.stage(x)


@wrong(TASK, "and y be kept with its graph")
class KeepsYDetached(RightStep):
    def compute(self, x):
        return self.stage(x).detach().requires_grad_()


@wrong(TASK, "sum loss.detach()", right_values=True, cases=slice(None))
class SumsLossesWithGraphs(RightStep):
    def loss(self, y, i):
        loss = self.loss_fn(y, self.targets[i]) / self.m
        self.losses.append(loss)
        return loss

    def result(self):
        return sum(self.losses).detach() if self.losses else None


@wrong(TASK, "follow `actions`, not a table of your own: the check gives other tables", right_values=True)
class HasATableOfItsOwn(RightStep):
    """1F1B's, whatever it is given."""

    def order(self, actions):
        ahead = self.last - self.rank
        kinds = "F" * min(ahead, self.m) + "FB" * max(0, self.m - ahead) + "B" * min(ahead, self.m)
        counts = {"F": iter(range(self.m)), "B": iter(range(self.m))}
        return [(kind, next(counts[kind])) for kind in kinds]


@wrong(TASK, "not a table of your own", right_values=True)
class HasGPipesTable(RightStep):
    def order(self, actions):
        return [(kind, i) for kind in "FB" for i in range(self.m)]


@wrong(TASK, "a rank waits for what another one sends later", right_values=True, cases=slice(None))
class ReceivesEverythingFirst(RightStep):
    """Runs with GPipe's table."""

    def order(self, actions):
        source = self.rank - 1
        self.first = {i: super(type(self), self).receive(i, source) for kind, i in actions if kind == "F" and source >= 0}
        return actions

    def receive(self, i, source):
        return self.first.pop(i) if source < self.rank else super().receive(i, source)


@wrong(TASK, "dist is called from the thread that the check calls you in")
class SendsFromAThread(RightStep):
    """Of its own, one send after the other."""

    def order(self, actions):
        self.sender = ThreadPoolExecutor(max_workers=1)
        return actions

    def send(self, tensor, to):
        self.sender.submit(super().send, tensor, to)

    def finish(self):
        self.sender.shutdown()
        super().finish()
