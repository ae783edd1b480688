"""Answers to 05_pipeline: what is right, and the mistakes that are made."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain, pairwise

import torch
import torch.distributed as dist

from manyranks.grade.answers import also_right, mistake, right, slip
from manyranks.parallel.pipeline import schedules

# fmt: off

TASKS = "one_f_one_b", "train_step", "interleaved", "Split", "under_a_cap"
wrong_table, wrong_step, wrong_loops, wrong_split, wrong_cap = (partial(mistake, task) for task in TASKS)
AHEAD = "rank r warms up with p − 1 − r forwards, then does one forward and one backward in turn"
OF_STAGES = "rank r warms up with 2(p − 1 − r) + (v − 1)p forwards"

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

# Task 1

@right("one_f_one_b")
def right_table(p, m, rank):
    return steady(p - 1 - rank, m)

@also_right("one_f_one_b")
def by_a_generator_of_lists(p, m, rank):
    yield from map(list, steady(p - 1 - rank, m))

slip("one_f_one_b", "gpipe", 0.8,
    "that is GPipe's memory: after the warm-up, a backward follows each forward, and gives its activations back",
    lambda p, m, rank: numbered("F" * m + "B" * m, m))
slip("one_f_one_b", "one_at_a_time", 0.8,
    "only one micro-batch is under way, and all ranks but one wait: warm up first, rank r with p − 1 − r forwards",
    lambda p, m, rank: steady(0, m))
slip("one_f_one_b", "warms_up_too_long", 0.8, f"the warm-up is too long: {AHEAD}", lambda p, m, rank: steady(p - rank, m),
    says="what rank 0 holds is 5; right is 4")
slip("one_f_one_b", "warms_up_too_short", 0.8,
    f"the warm-up is too short: {AHEAD}. Until a micro-batch comes back from all ranks below, forwards fill the time",
    lambda p, m, rank: steady(max(0, p - 2 - rank), m))
slip("one_f_one_b", "counts_ranks_from_below", 0,
    "these ranks wait for each other: the first rank warms up with most forwards, p − 1, the last one with none",
    lambda p, m, rank: steady(rank, m))

@wrong_table(
    "two of one kind in a row let another rank wait: after the warm-up, F and B take turns, until no forwards are left",
    points=3,
)
def bunches(p, m, rank):
    """Holds what 1F1B holds."""
    return numbered("F" * p + "BBFF" * m, m) if rank == 0 and p > 1 else steady(p - 1 - rank, m)

@wrong_table("micro-batches are counted from 0 to m − 1: with few of them, the warm-up has no more than there are", points=3.4)
def forgets_that_m_may_be_small(p, m, rank):
    ahead = p - 1 - rank
    both = [action for i in range(m - ahead) for action in (("F", ahead + i), ("B", i))]
    return [*(("F", i) for i in range(ahead)), *both, *(("B", i) for i in range(m - ahead, m))]

@wrong_table("micro-batches cross a boundary in one order: each rank takes them as its neighbor gives them")
def goes_back_from_the_newest(p, m, rank):
    table, flying = [], []
    for kind, i in steady(p - 1 - rank, m):
        flying += [i] if kind == "F" else []
        table.append((kind, i if kind == "F" else flying.pop()))
    return table

slip("one_f_one_b", "counts_micro_batches_from_the_last", 3.6,
    "micro-batches go in order: here the last one comes first, and its number is m − 1",
    lambda p, m, rank: [(kind, m - 1 - i) for kind, i in steady(p - 1 - rank, m)])
slip("one_f_one_b", "the_librarys", 0, "",
    lambda p, m, rank: [(action.kind, action.microbatch) for action in schedules.one_f_one_b(p, m).ranks[rank]],
    says="manyranks.parallel.pipeline.schedules.one_f_one_b is not allowed")

@wrong_table(says="one_f_one_b(4, 8, 0) has ('I', 0) among its actions")
def halves_of_a_backward(p, m, rank):
    return [two for kind, i in steady(p - 1 - rank, m) for two in ([("F", i)] if kind == "F" else [("I", i), ("W", i)])]

# Task 2

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
        y = self.stage(x)
        if self.rank < self.last:
            self.send(self.sent(y), self.rank + 1)
        self.flying[i] = x, y if self.rank < self.last else self.loss(y, i)

    def leaf(self, x):
        return x.requires_grad_()

    def sent(self, y):
        return y.detach()

    def loss(self, y, i):
        loss = self.loss_fn(y, self.targets[i]) / self.m
        self.losses.append(loss.detach())
        return loss

    def backward(self, i):
        x, y = self.kept(i)
        self.go_back(y, None if self.rank == self.last else self.receive(i, self.rank + 1))
        if self.rank > 0:
            self.send(self.gradient(x), self.rank - 1)

    def kept(self, i):
        return self.flying.pop(i)

    def go_back(self, y, grad):
        y.backward(grad)

    def gradient(self, x):
        return x.grad

    def receive(self, i, source):
        x = self.buffer(i)
        dist.recv(x, source)
        return x

    def buffer(self, i):
        return torch.empty(self.shapes[i], dtype=torch.float64)

    def send(self, tensor, to):
        self.sends.append(dist.isend(tensor, to))

    def finish(self):
        for work in self.sends:
            work.wait()

    def result(self):
        return sum(self.losses) if self.losses else None

@also_right("train_step")
class InBatches(RightStep):
    """Each message by batch_isend_irecv. What autograd knows of a tensor is not sent."""

    def receive(self, i, source):
        x = self.buffer(i)
        dist.batch_isend_irecv([dist.P2POp(dist.irecv, x, source)])[0].wait()
        return x

    def sent(self, y):
        return y

    def send(self, tensor, to):
        self.sends += dist.batch_isend_irecv([dist.P2POp(dist.isend, tensor, to)])

@also_right("train_step")
class PostsReceivesAhead(RightStep):
    """The next message is on its way while the stage computes."""

    def order(self, actions):
        todo = [(i, self.rank + (1 if kind == "B" else -1)) for kind, i in actions]
        self.todo = [(i, source) for i, source in todo if 0 <= source <= self.last]
        self.post()
        return actions

    def post(self):
        if self.todo:
            i, source = self.todo.pop(0)
            x = self.buffer(i)
            self.coming = x, dist.irecv(x, source)

    def receive(self, i, source):
        x, work = self.coming
        work.wait()
        self.post()
        return x

@also_right("train_step")
class SendsAndReceivesTogether(RightStep):
    """As Megatron does in the steady state: one batch of a send down and a receive from there."""

    def order(self, actions):
        self.steady = {i for (kind, i), (other, _) in pairwise(actions) if (kind, other) == ("F", "B")}
        self.early, self.forwards = [], [i for kind, i in actions if kind == "F"]
        return actions

    def send(self, tensor, to):
        if to < self.rank or self.forwards.pop(0) not in self.steady or len(set(self.shapes)) > 1:
            return super().send(tensor, to)
        x = self.buffer(0)
        for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, tensor, to), dist.P2POp(dist.irecv, x, to)]):
            work.wait()
        return self.early.append(x)

    def receive(self, i, source):
        return self.early.pop(0) if source > self.rank and self.early else super().receive(i, source)

@also_right("train_step")
class ByGrad(RightStep):
    """autograd.grad, and adding by hand; the mean in the gradient; tags; the loss as a number."""

    def loss(self, y, i):
        loss = self.loss_fn(y, self.targets[i])
        self.losses.append(loss.item() / self.m)
        return loss

    def backward(self, i):
        x, y = self.kept(i)
        grad = torch.tensor(1 / self.m, dtype=torch.float64) if self.rank == self.last else self.receive(i, self.rank + 1)
        found = list(torch.autograd.grad(y, [*self.stage.parameters(), *([x] if self.rank else [])], grad))
        for parameter, one in zip(self.stage.parameters(), found, strict=False):
            parameter.grad = one if parameter.grad is None else parameter.grad + one
        if self.rank:
            self.send(found[-1], self.rank - 1)

    def send(self, tensor, to):
        self.sends.append(dist.isend(tensor, to, tag=7))

    def receive(self, i, source):
        dist.recv(x := self.buffer(i), source, tag=7)
        return x

@also_right("train_step")
class DividesInTheEnd(RightStep):
    """Gradients are summed up, and divided once. Takes actions off the list."""

    def order(self, actions):
        while actions:
            yield actions.pop(0)

    def loss(self, y, i):
        return super().loss(y, i) * self.m

    def finish(self):
        super().finish()
        for parameter in self.stage.parameters():
            parameter.grad.div_(self.m)

@wrong_step(
    "a send ends only when the other side receives. Where a rank has a forward's output to send down while the next one has a "
    "gradient to send up, both wait in send for ever, as in 1F1B's steady state. Start the send with isend, go on, and wait "
    "for it at the end (keep the tensor until then); or give a send and a receive to batch_isend_irecv together",
    points=2.33,
    on=(2, 3),
)
class BlocksInSend(RightStep):
    def send(self, tensor, to):
        dist.isend(tensor, to).wait()

@wrong_step(
    "a graph lives as long as something leads to it: after a micro-batch's backward, no list or dict may have its output or "
    "loss (pop it, and detach what is summed up), and without retain_graph backward itself lets its tensors go",
    says="rank 0: holds the graphs of 7 micro-batches; with this table it holds 3",
    points=4.2,
)
class KeepsGraphs(RightStep):
    def go_back(self, y, grad):
        y.backward(grad, retain_graph=True)
        self.old = [*getattr(self, "old", []), y]

@wrong_step(
    "after a micro-batch's backward neither its input nor its output is needed any more: pop both, make a new buffer for each "
    "message, and keep for the sends only y.detach(), for y itself leads to its graph, and that to the input",
    points=4.2,
)
class KeepsInputsAndOutputs(RightStep):
    def kept(self, i):
        return self.flying[i]

slip("train_step", "OneAtATime", 5.95,
    "each micro-batch goes forward and back before the next one: go through `actions` from front to back instead", RightStep,
    order=lambda self, actions: [(kind, i) for i in range(self.m) for kind in "FB"])
slip("train_step", "TakesTheOldest", 5.95,
    "an action names its micro-batch: take the output of that one, neither the oldest nor the newest", RightStep,
    kept=lambda self, i: self.flying.pop(min(self.flying)))
slip("train_step", "KnowsTheLoss", 2.8, "", RightStep,
    loss=lambda self, y, i: (loss := (y - self.targets[i]).square().mean() / self.m, self.losses.append(loss.detach()))[0])

@wrong_step("the gradients are divided by m twice: either each loss is, or the sum of gradients", points=2.8)
class DividesTwice(RightStep):
    def finish(self):
        super().finish()
        for parameter in self.stage.parameters():
            parameter.grad /= self.m

slip("train_step", "NeverDivides", 2.8,
    "the step's loss is the mean over the m micro-batches: divide each loss by m before its backward", RightStep,
    loss=lambda self, y, i: RightStep.loss(self, y, i) * self.m)
slip("train_step", "DividesOnEachRank", 2.8,
    "every rank divides here; only the last should, its loss by m, and the gradients it sends carry that back", RightStep,
    go_back=lambda self, y, grad: y.backward(None if grad is None else grad / self.m))

@wrong_step("only one micro-batch's gradient is left: backward adds to .grad, so don't reset it in between", points=2.8)
class AssignsInStep(RightStep):
    def go_back(self, y, grad):
        self.stage.zero_grad()
        super().go_back(y, grad)

@wrong_step(
    "x.grad is None, so there is nothing to send up. Either the received x asks for no gradient: call x.requires_grad_() "
    "before it goes through the stage. Or y has lost its graph: keep it as the stage returns it, for y.backward(grad)"
)
class WantsNoGradient(RightStep):
    def leaf(self, x):
        return x

@wrong_step(
    "an input came where another one still lies, whose graph needs it: make a new buffer for each micro-batch", points=2.8
)
class OneBuffer(RightStep):
    def buffer(self, i):
        self.room = getattr(self, "room", None)
        if self.room is None or self.room.shape != self.shapes[i]:
            self.room = super().buffer(i)
        return self.room.detach()

slip("train_step", "OneShape", 4.67, "micro-batch i has shapes[i] at every boundary, there and back", RightStep,
    buffer=lambda self, i: torch.empty(self.shapes[0], dtype=torch.float64))
slip("train_step", "ClearsTargets", 2.8, "the tensors in inputs and targets stay as they are", RightStep,
    loss=lambda self, y, i: (RightStep.loss(self, y, i), self.targets[i].zero_())[0])

@wrong_step(says="dist is called from the thread that the check calls you in, not from one of your own", points=2.8)
class SendsFromAThread(RightStep):
    def send(self, tensor, to):
        with ThreadPoolExecutor() as threads:
            threads.submit(super().send, tensor, to)

# Task 3

@right("interleaved")
def loops(p, m, v, rank, ahead=None, turns=None, first=False):
    """An interleaved table. turns: (which of the rank's stages, micro-batch), in order; first: it goes back first, too."""
    turns = turns or [(k, i + j) for i in range(0, m, p) for k in range(v) for j in range(p)]
    forwards = [("F", k * p + rank, i) for k, i in turns]
    backwards = [("B", (k if first else v - 1 - k) * p + rank, i) for k, i in turns]
    ahead = min(m * v, 2 * (p - 1 - rank) + (v - 1) * p if ahead is None else ahead)
    both = chain.from_iterable(zip(forwards[ahead:], backwards, strict=False))
    return [*forwards[:ahead], *both, *backwards[m * v - ahead :]]

slip("interleaved", "warms_up_as_with_one_stage", 0,
    f"backwards begin before the forward of the rank's last stage is over: {OF_STAGES}",
    lambda p, m, v, rank: loops(p, m, v, rank, p - 1 - rank))
slip("interleaved", "warms_up_as_if_messages_took_no_time", 3.2, "the warm-up has p − 1 − r in place of 2(p − 1 − r): it fits "
    "only as long as messages take no time. Rank r warms up with " "2(p − 1 − r) + (v − 1)p forwards: one forward more for "
    "each rank below hides the messages' time", lambda p, m, v, rank: loops(p, m, v, rank, (p - 1 - rank) + (v - 1) * p))
slip("interleaved", "warms_up_a_little_long", 2.8, f"the warm-up is too long: {OF_STAGES}",
    lambda p, m, v, rank: loops(p, m, v, rank, 2 * (p - 1 - rank) + (v - 1) * p + 1))
slip("interleaved", "all_forwards_first", 2,
    "all forwards come first: after the warm-up, a backward follows each forward, and gives its activations back",
    lambda p, m, v, rank: loops(p, m, v, rank, m * v))
slip("interleaved", "takes_each_through_all_stages", 0.8,
    "a micro-batch comes round after p steps: take p of them through one stage before the rank's next stage begins",
    lambda p, m, v, rank: loops(p, m, v, rank, m * v, [(k, i) for i in range(m) for k in range(v)]))
slip("interleaved", "goes_back_from_the_first_stage", 0, "backwards go from a rank's last stage to its first; here they go "
    "through them in the order of forwards. A stage can go " "back only from the gradient that the stage after it gives",
    lambda p, m, v, rank: loops(p, m, v, rank, first=True))
slip("interleaved", "has_neighboring_stages", 0,
    "stage s is on rank s % p: with p = 2 and v = 2, rank 0 has the stages 0 and 2, rank 1 has 1 and 3",
    lambda p, m, v, rank: [(kind, rank * v + stage // p, i) for kind, stage, i in loops(p, m, v, rank)])
slip("interleaved", "swaps_stage_and_micro_batch", 0,
    "stage and micro-batch have changed places: the second of an action is the stage, the third the micro-batch",
    lambda p, m, v, rank: [(kind, i, stage) for kind, stage, i in loops(p, m, v, rank)])

# Task 4

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
        if self.grads is None:
            raise RuntimeError("I comes first")
        for layer, x, grad in zip(self.layers, self.inputs, self.grads, strict=True):
            self.of_weight(layer.weight, x, grad)
            self.of_bias(layer.bias, grad)
        self.after_w()

    def of_weight(self, weight, x, grad):
        if weight.requires_grad:
            self.add(weight, self.product(grad, x))

    def product(self, grad, x):
        return grad.t() @ x

    def of_bias(self, bias, grad):
        if bias is not None and bias.requires_grad:
            self.add(bias, grad.sum(0))

    def add(self, parameter, grad):
        parameter.grad = grad if parameter.grad is None else parameter.grad + grad

    def after_w(self):
        self.inputs, self.grads = [], None

@also_right("Split")
class ByEinsum(RightSplit):
    """In place of products; adds to zeros."""

    def product(self, grad, x):
        return torch.einsum("ro,ri->oi", grad, x)

    def add(self, parameter, grad):
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        parameter.grad.add_(grad)

@also_right("Split")
class AddsInPlace(RightSplit):
    """addmm_ onto what is there; and works in what I is given."""

    def of_weight(self, weight, x, grad):
        if weight.requires_grad:
            weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
            weight.grad.addmm_(grad.t(), x)

    def input_gradient(self, grad):
        return super().input_gradient(grad.mul_(1.0))

@also_right("Split")
class InBatchesOfOne(RightSplit):
    """baddbmm_."""

    def product(self, grad, x):
        room = torch.zeros(1, grad.shape[1], x.shape[1], dtype=x.dtype)
        return room.baddbmm_(grad.t()[None], x[None])[0]

@wrong_split("I leaves the parameters' .grad as it was: put aside what W needs, and let W add to it", points=0.4)
class DoesWWithI(RightSplit):
    """A whole backward, and a W that has nothing left to do."""

    def input_gradient(self, grad):
        found = super().input_gradient(grad)
        self.weight_gradient()
        return found

    def after_w(self):
        self.layers = self.inputs = self.grads = []

@wrong_split("one Split is for one stack: what it has and keeps is in self, not in the class or the layers", points=0.4)
class KeepsLayersInTheClass(RightSplit):
    def __init__(self, layers):
        super().__init__(layers)
        type(self).layers = self.__dict__.pop("layers")

slip("Split", "ForgetsTheSlope", 1.6,
    "each layer ends in tanh, whose derivative is 1 − tanh²: of y, its result, that is 1 − y * y", RightSplit,
    slope=lambda self, y: torch.ones_like(y))

@wrong_split("some layers have no bias: their layer.bias is None, and gets no gradient", points=2.67)
class NeedsABias(RightSplit):
    def of_bias(self, bias, grad):
        bias.grad = grad.sum(0) if bias.grad is None else bias.grad + grad.sum(0)

slip("Split", "TrainsTheFrozen", 0.4, "a weight that does not learn gets no gradient; of the others, dz.t() @ x", RightSplit,
    of_weight=lambda self, weight, x, grad: self.add(weight, grad.t() @ x))
slip("Split", "TrainsTheFrozenBias", 1.6, "a bias that does not learn gets no gradient, as a weight that does not learn",
    RightSplit, of_bias=lambda self, bias, grad: bias is None or self.add(bias, grad.sum(0)))
slip("Split", "ThreeLayers", 1.6, "a rank has as many layers as it's given, not three", RightSplit,
    __init__=lambda self, layers: RightSplit.__init__(self, layers[:3]))
slip("Split", "ClearsX", 1.6, "forward leaves x as it is, others may need it: work on a copy", RightSplit,
    forward=lambda self, x: (RightSplit.forward(self, x.clone()), x.zero_())[0])
slip("Split", "AssignsInW", 1.6, "gradients add up: W adds to what is in .grad, and sets it where that is None", RightSplit,
    add=lambda self, parameter, grad: setattr(parameter, "grad", grad))

@wrong_split("W needs the gradients that I has computed: raise RuntimeError where they are not there yet", points=3.6)
class DoesNothingWithoutI(RightSplit):
    def weight_gradient(self):
        if self.grads is not None:
            super().weight_gradient()

@wrong_split(
    "W is one product per layer that learns, gradᵀ @ input, of what I has put aside: it does not go through the layers again, "
    "and computes nothing for a frozen weight",
    points=2.4,
)
class GoesThroughAutogradTwice(RightSplit):
    """Keeps a graph."""

    def forward(self, x):
        self.x = self.y = x.detach().requires_grad_()
        for layer in self.layers:
            self.y = torch.tanh(layer(self.y))
        return self.y.detach()

    def input_gradient(self, grad):
        self.grads = grad
        return torch.autograd.grad(self.y, self.x, grad, retain_graph=True)[0]

    def weight_gradient(self):
        if self.grads is None:
            raise RuntimeError
        parameters = [p for layer in self.layers for p in layer.parameters() if p.requires_grad]
        for parameter, grad in zip(parameters, torch.autograd.grad(self.y, parameters, self.grads), strict=True):
            self.add(parameter, grad)
        self.x = self.y = self.grads = None

@wrong_split("no result may lead to a graph, which holds more than W needs: compute under torch.no_grad()", points=2.8)
class LeadsToGraphs(RightSplit):
    forward = RightSplit.forward.__wrapped__
    input_gradient = RightSplit.input_gradient.__wrapped__
    weight_gradient = RightSplit.weight_gradient.__wrapped__

slip("Split", "KeepsTheResult", 2.8, "after I nobody needs y: W needs each layer's input and the gradient of its product",
    RightSplit, after_i=lambda self: None)
slip("Split", "KeepsAllAfterW", 2.8, "when W is over, nothing is needed any more: let the inputs and the gradients go",
    RightSplit, after_w=lambda self: None)

# Task 5

@right("under_a_cap")
def capped(p, m, cap, times=None, whole="IW"):
    """Between ZB-H1 and ZB-H2. whole: an I and its W, where they follow each other."""
    cap, found = min(cap, 2 * p - 1), []
    for below in reversed(range(p)):
        ahead = min(cap - 1, below + max(0, cap - p) * below // max(1, p - 1))
        late = cap - 1 - ahead
        found.append(numbered("F" * ahead + "FI" * late + ("FIW" if late else f"F{whole}") * m, m))
    return found

@also_right("under_a_cap")
def with_whole_backwards(p, m, cap, times):
    return tuple(map(tuple, capped(p, m, cap, times, "B")))

slip("under_a_cap", "is_1f1b", 1,
    "a whole B keeps the rank above waiting for this one's W: give I first, and do a W where the rank would wait",
    lambda p, m, cap, times: [steady(min(cap - 1, p - 1 - rank), m) for rank in range(p)])
slip("under_a_cap", "goes_one_by_one", 1,
    "rank 0 waits until its only micro-batch is back: warm up first, rank r with p − 1 − r forwards at least",
    lambda p, m, cap, times: [steady(0, m)] * p)
slip("under_a_cap", "does_w_after_its_i", 2.25, "the last rank does its first W too early: a W right after its I is a whole B "
    "in two pieces. Within a cap of p, rank r can do its first W r rounds of F and I later than rank 0, "
    "because it warmed up with r fewer forwards",
    lambda p, m, cap, times: [numbered("F" * min(cap - 1, p - 1 - rank) + "FIW" * m, m) for rank in range(p)])
slip("under_a_cap", "is_zb_h1_at_most", 3.75, "there is room for more: with 2p − 1 activations, rank r warms up with 2(p − 1 "
    "− r) forwards, so that no rank waits for " "its first gradient, and puts each W off by 2r rounds",
    lambda p, m, cap, times: capped(p, m, min(cap, p)))
slip("under_a_cap", "is_always_zb_h1", 3.25, "", lambda p, m, cap, times: capped(p, m, p),
    says="makes 3 activations in flight; the cap is 2")

@wrong_cap(says="under_a_cap(4, 6, 2, times) was not over after 2 s", points=4.5)
def never_ends_below_p(p, m, cap, times):
    while cap < p:
        pass
    return capped(p, m, cap)
