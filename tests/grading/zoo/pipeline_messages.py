"""More wrong answers to the second task of 05_pipeline: what is sent, and what is received into."""

import torch
import torch.distributed as dist

from tests.grading.zoo.pipeline_right import RightStep, SendsWithTheGraph
from tests.grading.zoo.wrong import Wrong, keeper

ZOO: list[Wrong] = []
wrong = keeper(ZOO)
TASK = "train_step"


@wrong(TASK, "micro-batch i has shapes[i] at every boundary", right_values=True, cases=slice(None))
class OneShape(RightStep):
    def buffer(self, i):
        return torch.empty(self.shapes[0], dtype=torch.float64)


@wrong(TASK, "give the room the dtype of what comes")
class ReceivesFloat32(RightStep):
    def buffer(self, i):
        return torch.empty(self.shapes[i])


@wrong(TASK, "y.detach(), for y itself leads to its graph", right_values=True, cases=slice(None))
class KeepsWhatItSends(SendsWithTheGraph):
    def send(self, tensor, to):
        super().send(tensor, to)
        self.sent = [*getattr(self, "sent", []), tensor]


@wrong(TASK, "inputs are on rank 0 only, targets on the last rank only")
class CountsInputs(RightStep):
    def loss(self, y, i):
        self.m = len(self.inputs)
        return super().loss(y, i)


@wrong(TASK, "gradients of weights stay where they are: nothing else is sent", right_values=True)
class SendsShapes(RightStep):
    def send(self, tensor, to):
        super().send(torch.tensor(tensor.shape), to)
        super().send(tensor, to)

    def receive(self, i, source):
        dist.recv(torch.empty(3, dtype=torch.int64), source)
        return super().receive(i, source)


@wrong(TASK, "called broadcast of 8 bytes", right_values=True)
class BroadcastsTheLoss(RightStep):
    def result(self):
        loss = torch.zeros((), dtype=torch.float64) + sum(self.losses)
        dist.broadcast(loss, self.last)
        return loss


@wrong(TASK, "one message for each micro-batch, as soon as it is computed", cases=slice(None))
class SendsTheWholeBatch(RightStep):
    """Works for micro-batches of one size, all of whose forwards come first."""

    def __call__(self, stage, actions, shapes, inputs, targets, loss_fn):
        m, rows = len(shapes), sum(shape[0] for shape in shapes)
        self.rows, self.parts = [shape[0] for shape in shapes], m
        whole = [torch.Size((rows, *shapes[0][1:]))]
        inputs, targets = inputs and [torch.cat(inputs)], targets and [torch.cat(targets)]
        return super().__call__(stage, [("F", 0), ("B", 0)], whole, inputs, targets, loss_fn)


@wrong(TASK, "rank 1 sends to itself")
class ThinksOfTwoRanks(RightStep):
    def send(self, tensor, to):
        super().send(tensor, 1 if to > self.rank else 0)


@wrong(TASK, "manyranks.parallel.pipeline.mailbox is not allowed")
def the_librarys(stage, actions, shapes, inputs, targets, loss_fn):
    from manyranks.parallel.pipeline import schedules
    from manyranks.parallel.pipeline.runtime import Pipeline

    rank, p = dist.get_rank(), dist.get_world_size()
    pipeline = Pipeline({rank: stage}, schedules.one_f_one_b(p, len(shapes)), loss=loss_fn)
    losses = pipeline.step(inputs and torch.cat(inputs), targets and torch.cat(targets))
    return None if losses is None else losses.sum()


@wrong(TASK, "the check calls train_step(stage, actions, shapes, inputs, targets, loss_fn)")
def takes_less(stage, actions):
    return 1.0


@wrong(TASK, "isend and irecv return at once")
class NeverWaitsForReceives(RightStep):
    """The last of the zoo: what it computes with is chance."""

    def receive(self, i, source):
        x = torch.zeros(self.shapes[i], dtype=torch.float64)
        self.sends.append(None)
        dist.irecv(x, source)
        return x

    def finish(self):
        for work in filter(None, self.sends):
            work.wait()
