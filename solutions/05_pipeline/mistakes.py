"""Answers to 05_pipeline: what is right, and the mistakes that are made."""

import time
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, pairwise

import torch
import torch.distributed as dist

from manyranks.grade.answers import also_right, mistake, right

HINT_2 = (
    "an action names its micro-batch: take the output of that one, neither the oldest nor the newest, and "
    "follow `actions`, not a table of your own"
)
HINT_3 = (
    "only the last stage learns: a stage goes back from the gradient that it receives, y.backward(grad), and "
    "sends its input's gradient up, x.grad. For that the received x must be a leaf that wants one, "
    "x.requires_grad_(), and y be kept with its graph"
)
HINT_4 = (
    "between I and W there are a layer's input and the gradient of its product, of each layer: what only I "
    "needs, as the last result, goes with I; and no result leads to a graph: compute under torch.no_grad()"
)


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


@right("under_a_cap")
def capped(p, m, cap, times=None):
    """Between ZB-H1 and ZB-H2."""
    cap = min(cap, 2 * p - 1)
    found = []
    for below in reversed(range(p)):
        ahead = min(cap - 1, below + max(0, cap - p) * below // max(1, p - 1))
        found.append(numbered("F" * ahead + "FI" * (cap - 1 - ahead) + "FIW" * m, m))
    return found


@right("train_step")
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


@also_right("train_step")
class SendsWithTheGraph(RightStep):
    """Also right: what autograd knows of a tensor is not sent."""

    def forward(self, i):
        if self.rank == self.last:
            return super().forward(i)
        x = self.inputs[i] if self.rank == 0 else self.leaf(self.receive(i, self.rank - 1))
        y = self.compute(x)
        self.send(y, self.rank + 1)
        return self.keep(i, x, y)


@right("Split")
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


@right("one_f_one_b")
def right_one(p, m, rank):
    return steady(p - 1 - rank, m)


@right("interleaved")
def right_loops(p, m, v, rank):
    return loops(p, m, v, rank)


@mistake(
    "one_f_one_b",
    (
        "that is GPipe's memory: when the warm-up is over, a backward follows each forward, and gives its "
        "activations back before the next forward"
    ),
    points=0.8,
)
def gpipe(p, m, rank):
    return numbered("F" * m + "B" * m, m)


@mistake(
    "one_f_one_b",
    (
        "each micro-batch comes back before the next one leaves, and all ranks but one wait: warm up first, rank "
        "r with p − 1 − r forwards"
    ),
    points=0.8,
)
def one_at_a_time(p, m, rank):
    return steady(0, m)


@mistake(
    "one_f_one_b",
    "the warm-up is too long: rank r warms up with p − 1 − r forwards, then does one forward and one backward in turn",
    points=0.8,
)
def warms_up_too_long(p, m, rank):
    return steady(p - rank, m)


@mistake(
    "one_f_one_b",
    (
        "rank r warms up with p − 1 − r forwards, then does one forward and one backward in turn: the warm-up "
        "here is too short. A micro-batch that has left comes back as a gradient only after all ranks below; "
        "until then, other forwards fill the time"
    ),
    points=0.8,
)
def warms_up_too_short(p, m, rank):
    return steady(max(0, p - 2 - rank), m)


@mistake(
    "one_f_one_b",
    "these ranks wait for each other. Rank r warms up with p − 1 − r forwards: the first rank has most, the last one none",
    points=0.0,
)
def counts_ranks_from_below(p, m, rank):
    return steady(rank, m)


@mistake(
    "one_f_one_b",
    (
        "after the warm-up, F and B strictly take turns, one of each, until there are no forwards left: two of "
        "one kind in a row let another rank wait"
    ),
    points=3.0,
)
def bunches(p, m, rank):
    """Holds what 1F1B holds, and waits longer."""
    return numbered("F" * p + "BBFF" * m, m) if rank == 0 and p > 1 else steady(p - 1 - rank, m)


@mistake(
    "one_f_one_b",
    (
        "each micro-batch, from 0 to m − 1, has each of its actions once on each stage; with few micro-batches, "
        "the warm-up has no more than there are"
    ),
    points=3.4,
)
def forgets_that_m_may_be_small(p, m, rank):
    ahead = p - 1 - rank
    table = [("F", i) for i in range(ahead)]
    for i in range(m - ahead):
        table += [("F", ahead + i), ("B", i)]
    return table + [("B", i) for i in range(m - ahead, m)]


@mistake(
    "one_f_one_b", "micro-batches cross a boundary in one order: each rank takes them as its neighbour gives them", points=0.0
)
def goes_back_from_the_newest(p, m, rank):
    table, flying = [], []
    for kind, i in steady(p - 1 - rank, m):
        flying += [i] if kind == "F" else []
        table.append((kind, i if kind == "F" else flying.pop()))
    return table


@mistake("one_f_one_b", "", says="is not allowed", points=0.0)
def the_librarys(p, m, rank):
    from manyranks.parallel.pipeline import schedules

    return [(action.kind, action.microbatch) for action in schedules.one_f_one_b(p, m).ranks[rank]]


@mistake("interleaved", "", points=0.0, says="a backward needs its own forward")
def warms_up_as_with_one_stage(p, m, v, rank):
    return loops(p, m, v, rank, p - 1 - rank)


@mistake(
    "interleaved",
    (
        "the warm-up has p − 1 − r in place of 2(p − 1 − r): it fits only as long as messages take no time. Rank "
        "r warms up with 2(p − 1 − r) + (v − 1)p forwards: one forward more for each rank below hides the "
        "messages' time"
    ),
    points=3.2,
)
def warms_up_as_if_messages_took_no_time(p, m, v, rank):
    return loops(p, m, v, rank, (p - 1 - rank) + (v - 1) * p)


@mistake(
    "interleaved",
    "all forwards come first: after the warm-up, a backward follows each forward, and gives its activations back",
    points=2.0,
)
def all_forwards_first(p, m, v, rank):
    return loops(p, m, v, rank, m * v)


@mistake(
    "interleaved",
    (
        "a micro-batch that has left a rank's stage comes round after p steps: take p of them through one stage "
        "before the next stage begins"
    ),
    points=0.8,
)
def takes_each_through_all_stages(p, m, v, rank):
    return loops(p, m, v, rank, m * v, [(k, i) for i in range(m) for k in range(v)])


@mistake(
    "interleaved",
    (
        "backwards go through a rank's stages in the order of forwards, from its first: they begin with its last "
        "stage, when its forward is over, and end with its first"
    ),
    points=0.0,
)
def goes_back_from_the_first_stage(p, m, v, rank):
    turns = [(k, i + j) for i in range(0, m, p) for k in range(v) for j in range(p)]
    return loops(p, m, v, rank, m * v, turns, [(v - 1 - k, i) for k, i in turns])


@mistake(
    "interleaved",
    "stage s is on rank s % p: with p = 2 and v = 2, rank 0 has the stages 0 and 2, rank 1 has 1 and 3",
    points=0.0,
)
def has_neighbouring_stages(p, m, v, rank):
    return [(kind, rank * v + stage // p, i) for kind, stage, i in loops(p, m, v, rank)]


@mistake(
    "interleaved",
    "with the numbers the other way round, the table can run: the second is the stage, the third the micro-batch",
    points=0.0,
)
def swaps_stage_and_micro_batch(p, m, v, rank):
    return [(kind, i, stage) for kind, stage, i in loops(p, m, v, rank)]


TASK = "train_step"


@mistake("train_step", "no rank has called its stage", points=0.0)
def returns_a_number(stage, actions, shapes, inputs, targets, loss_fn):
    return 1.0


@mistake(
    "train_step",
    (
        "a send ends only when the other side receives. Where a rank has a forward's output to send down while "
        "the next one has a gradient to send up, both wait in send for ever, as in 1F1B's steady state. Start the "
        "send with isend, go on, and wait for it at the end (keep the tensor until then); or give a send and a "
        "receive to batch_isend_irecv together; rank 0 waits in send #2 of 1,536 bytes to rank 1; rank 1 waits in "
        "send #1 of 1,536 bytes to rank 2; rank 2 waits in send #0 of 1,536 bytes to rank 1"
    ),
    points=2.33,
)
class BlocksInSend(RightStep):
    def send(self, tensor, to):
        dist.send(tensor, to)


@mistake(
    "train_step",
    (
        "a graph lives as long as something leads to it: after a micro-batch's backward, no list or dict may have "
        "its output or loss (pop it, and detach what is summed up), and without retain_graph backward itself lets "
        "its tensors go"
    ),
    points=4.2,
)
class KeepsGraphs(RightStep):
    """1F1B's table with GPipe's memory."""

    def go_back(self, y, grad):
        y.backward(grad, retain_graph=True)
        self.old = [*getattr(self, "old", []), y]


@mistake(
    "train_step",
    (
        "after a micro-batch's backward neither its input nor its output is needed any more: pop both, make a new "
        "buffer for each message, and keep for the sends only y.detach(), for y itself leads to its graph, and "
        "that to the input"
    ),
    points=4.2,
)
class KeepsInputs(RightStep):
    def keep(self, i, x, y):
        super().keep(i, x, y)
        self.old = [*getattr(self, "old", []), x]


@mistake(
    "train_step",
    (
        "each micro-batch goes forward and back before the next: go through `actions` from front to back, and do "
        "what each one says before you come to the next"
    ),
    points=5.95,
)
class OneAtATime(RightStep):
    def order(self, actions):
        return [(kind, i) for i in range(self.m) for kind in "FB"]


@mistake("train_step", HINT_2, points=5.95)
class TakesTheOldest(RightStep):
    """On all ranks, so that gradients find their graphs."""

    def kept(self, i):
        return self.flying.pop(min(self.flying))


@mistake("train_step", "the gradients are divided by m twice: either each loss is, or the sum of gradients", points=2.8)
class DividesTwice(RightStep):
    def finish(self):
        super().finish()
        for parameter in self.stage.parameters():
            parameter.grad /= self.m


@mistake(
    "train_step", "the step's loss is the mean over the m micro-batches: divide each loss by m before its backward", points=2.8
)
class NeverDivides(RightStep):
    def loss(self, y, i):
        loss = self.loss_fn(y, self.targets[i])
        self.losses.append(loss.detach() / self.m)
        return loss


@mistake(
    "train_step",
    "only one micro-batch has left its gradient: backward adds to .grad, do not set it, or set it to None, in between",
    points=2.8,
)
class Assigns(RightStep):
    def go_back(self, y, grad):
        self.stage.zero_grad()
        super().go_back(y, grad)


@mistake("train_step", HINT_3, points=0.0)
class WantsNoGradient(RightStep):
    def leaf(self, x):
        return x


@mistake(
    "train_step",
    "a stage goes back from the gradient that the next rank has sent, y.backward(grad), not from ones or its own sum",
    points=2.8,
)
class StartsFromOnes(RightStep):
    def go_back(self, y, grad):
        y.sum().backward()


@mistake(
    "train_step",
    (
        "an input was received where another one in flight still lies: its graph needs it until its backward. "
        "Make a new buffer for each micro-batch"
    ),
    points=2.8,
)
class OneBuffer(RightStep):
    def buffer(self, i):
        self.room = getattr(self, "room", None)
        if self.room is None or self.room.shape != self.shapes[i]:
            self.room = super().buffer(i)
        return self.room.detach()


@mistake("train_step", "", points=2.8, says="isend, irecv and calls with async_op=True return at once")
class NeverWaitsForSends(RightStep):
    def finish(self):
        pass


TASK = "train_step"


@mistake(
    "train_step",
    (
        "divided on each rank: only the last one divides, its loss by m; the gradient that it sends carries that "
        "up, and the others go back from what they receive as it is"
    ),
    points=2.8,
)
class DividesOnEachRank(RightStep):
    def go_back(self, y, grad):
        y.backward(None if grad is None else grad / self.m)


@mistake("train_step", "each micro-batch counts alike, however many rows it has: divide its loss by m", points=2.8)
class WeighsByRows(RightStep):
    def loss(self, y, i):
        loss = self.loss_fn(y, self.targets[i]) * len(y) / sum(map(len, self.targets))
        self.losses.append(loss.detach())
        return loss


@mistake("train_step", "that is the last micro-batch's loss: add them up over the micro-batches, each divided by m", points=2.8)
class ReturnsTheLastLoss(RightStep):
    def result(self):
        return self.losses[-1] * self.m if self.losses else None


@mistake(
    "train_step", "a middle rank sends x.grad, the gradient of its own stage's input, not the one that it received", points=2.8
)
class HandsOnWhatItGot(RightStep):
    def backward(self, i):
        x, y = self.kept(i)
        grad = None if self.rank == self.last else self.receive(i, self.rank + 1)
        self.go_back(y, grad)
        if self.rank > 0:
            self.send(x.grad if self.rank == self.last else grad, self.rank - 1)


@mistake("train_step", "", points=2.8, says="changed a tensor while it was being sent")
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


@mistake("train_step", "the tensors in `inputs` were changed: compute with new ones", points=2.8)
class ChangesInputs(RightStep):
    def compute(self, x):
        return self.stage(x.mul_(1.5) if self.rank == 0 else x)


@mistake("train_step", HINT_3, points=0.0)
class KeepsYDetached(RightStep):
    def compute(self, x):
        return self.stage(x).detach().requires_grad_()


@mistake(
    "train_step",
    (
        "the last rank needs a micro-batch's input, output and loss until its backward: pop them there, and sum "
        "loss.detach(), for the loss itself leads to its graph, and that to the input"
    ),
    points=4.2,
)
class SumsLossesWithGraphs(RightStep):
    def loss(self, y, i):
        loss = self.loss_fn(y, self.targets[i]) / self.m
        self.losses.append(loss)
        return loss

    def result(self):
        return sum(self.losses).detach() if self.losses else None


@mistake("train_step", HINT_2, points=3.15)
class HasGPipesTable(RightStep):
    def order(self, actions):
        return [(kind, i) for kind in "FB" for i in range(self.m)]


@mistake(
    "train_step",
    "dist is called from the thread that the check calls you in, not from one of your own; leave the check as it is",
    points=2.8,
)
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


TASK = "train_step"


@mistake(
    "train_step",
    "micro-batch i has shapes[i] at every boundary, there and back; do both mean the same chunk in this step? (rank 0:",
    points=4.67,
)
class OneShape(RightStep):
    def buffer(self, i):
        return torch.empty(self.shapes[0], dtype=torch.float64)


TASK = "Split"


@mistake("Split", "I leaves the parameters' .grad as it was: put aside what W needs, and let W add to it", points=0.4)
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


@mistake(
    "Split",
    "one Split is for one micro-batch and one stack: its layers and what it keeps are in self, not in the class or the layers",
    points=0.4,
)
class KeepsLayersInTheClass(RightSplit):
    @property
    def layers(self):
        return type(self).everyones

    @layers.setter
    def layers(self, layers):
        type(self).everyones = layers


@mistake("Split", "gradients add up: W adds to what is in .grad, and sets it where that is None", points=1.6)
class AssignsOfhalves(RightSplit):
    def add(self, parameter, grad):
        parameter.grad = grad


@mistake("Split", "each layer ends in tanh, whose derivative is 1 − tanh²: of y, its result, that is 1 − y * y", points=1.6)
class ForgetsTheSlope(RightSplit):
    def slope(self, y):
        return torch.ones_like(y)


@mistake("Split", "the gradient of a bias is the sum of dz over the rows", points=1.6)
class ForgetsTheBias(RightSplit):
    def of_layer(self, layer, x, grad):
        if layer.weight.requires_grad:
            self.add(layer.weight, grad.t() @ x)


@mistake("Split", "", says="raised AttributeError", points=2.67)
class NeedsABias(RightSplit):
    def of_layer(self, layer, x, grad):
        self.add(layer.weight, grad.t() @ x)
        layer.bias.grad = grad.sum(0) if layer.bias.grad is None else layer.bias.grad + grad.sum(0)


@mistake("Split", "a weight that does not learn gets no gradient; of the others, dz.t() @ x", points=0.4)
class TrainsTheFrozen(RightSplit):
    def of_layer(self, layer, x, grad):
        self.add(layer.weight, grad.t() @ x)
        if layer.bias is not None:
            self.add(layer.bias, grad.sum(0))


@mistake("Split", "W needs the gradients that I has computed: raise RuntimeError where they are not there yet", points=3.6)
class DoesNothingWithoutI(RightSplit):
    def weight_gradient(self):
        if self.grads is not None:
            super().weight_gradient()


TASK = "Split"


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


@mistake(
    "Split",
    (
        "W is one product a layer that learns, gradᵀ @ input, of what I has put aside: it does not go through the "
        "layers again, and computes nothing for a frozen weight"
    ),
    points=2.4,
)
class GoesThroughAutogradTwice(ByAutograd):
    pass


@mistake("Split", HINT_4, points=2.8)
class LeadsToGraphs(RightSplit):
    forward = RightSplit.forward.__wrapped__
    input_gradient = RightSplit.input_gradient.__wrapped__
    weight_gradient = RightSplit.weight_gradient.__wrapped__


@mistake("Split", HINT_4, points=2.8)
class KeepsTheResult(RightSplit):
    def after_i(self):
        pass


TASK = "under_a_cap"


def halved(table, late=0):
    """Each B an I, and each W so many I later."""
    rows, waiting = [], []
    for kind, i in table:
        rows.append(("I" if kind == "B" else kind, i))
        waiting += [i] if kind == "B" else []
        rows += [("W", waiting.pop(0))] if kind == "B" and len(waiting) > late else []
    return rows + [("W", i) for i in waiting]


@mistake(
    "under_a_cap",
    "a whole B keeps the rank above waiting while this one does its W: give I first, and do a W where the rank would wait",
    points=1.0,
)
def one_f_one_b(p, m, cap, times):
    return [steady(min(cap - 1, p - 1 - rank), m) for rank in range(p)]


@mistake(
    "under_a_cap",
    (
        "rank 3 puts its W off by 0 rounds, and has room for 3: a W right after its I is a whole B in two pieces. "
        "Within a cap of p, rank r can do its first W r rounds of F and I later than rank 0, for it has warmed up "
        "with r forwards less"
    ),
    points=2.25,
)
def does_w_after_its_i(p, m, cap, times):
    return [halved(table) for table in one_f_one_b(p, m, cap, times)]


@mistake("under_a_cap", "", says="makes 3 activations in flight; the cap is 2", points=3.25)
def is_always_zb_h1(p, m, cap, times):
    return capped(p, m, p)


@mistake(
    "under_a_cap",
    "",
    says="keeps to a cap below p: with p = 4, m = 6, cap = 2, under_a_cap(4, 6, 2, times) raised ValueError",
    points=4.5,
)
def raises_below_p(p, m, cap, times):
    if cap < p:
        raise ValueError("cap")
    return capped(p, m, cap)


@mistake(
    "under_a_cap",
    (
        "rank 0 has only one micro-batch under way, and waits until it is back: warm up first, rank r with p − 1 "
        "− r forwards at least, as 1F1B does"
    ),
    points=1.0,
)
def goes_one_by_one(p, m, cap, times):
    return [[(kind, i) for i in range(m) for kind in "FB"] for _ in range(p)]


@mistake(
    "under_a_cap",
    (
        "there is room for more: with 2p − 1 activations, rank r warms up with 2(p − 1 − r) forwards, so that no "
        "rank waits for its first gradient, and puts each W off by 2r rounds"
    ),
    points=3.75,
)
def is_zb_h1_at_most(p, m, cap, times):
    return capped(p, m, min(cap, p))


@also_right("one_f_one_b")
def by_a_generator(p, m, rank):
    yield from steady(p - 1 - rank, m)


@also_right("one_f_one_b")
def by_lists_in_a_tuple(p, m, rank):
    return tuple(map(list, steady(p - 1 - rank, m)))


@also_right("one_f_one_b")
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


@also_right("train_step")
class InBatches(RightStep):
    """Each message by batch_isend_irecv."""

    def receive(self, i, source):
        x = self.buffer(i)
        for work in dist.batch_isend_irecv([dist.P2POp(dist.irecv, x, source)]):
            work.wait()
        return x

    def send(self, tensor, to):
        self.sends += dist.batch_isend_irecv([dist.P2POp(dist.isend, tensor, to)])


@also_right("train_step")
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


@also_right("train_step")
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


@also_right("train_step")
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


@also_right("train_step")
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


@also_right("train_step")
class EatsItsTable(RightStep):
    """Takes actions off the list, and what it was given out of the lists."""

    def order(self, actions):
        while actions:
            yield actions.pop(0)


@also_right("interleaved")
def in_any_order_of_equal_cost(p, m, v, rank):
    return tuple(loops(p, m, v, rank))


@also_right("Split")
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


@also_right("Split")
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


@also_right("Split")
class InBatchesOfOne(RightSplit):
    """baddbmm_."""

    def of_layer(self, layer, x, grad):
        if layer.weight.requires_grad:
            room = torch.zeros_like(layer.weight)[None]
            self.add(layer.weight, room.baddbmm_(grad.t()[None], x[None])[0])
        if layer.bias is not None:
            self.add(layer.bias, grad.sum(0))


@also_right("under_a_cap")
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
