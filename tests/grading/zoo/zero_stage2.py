"""Wrong answers to the fourth task of 03_zero: gradients that leave while backward runs, of which shards stay."""

import torch
import torch.distributed as dist

from tests.grading.zoo.wrong import Wrong, keeper, me
from tests.grading.zoo.zero_right import Right1, Right2, add, filled, pad, reduced, shard

ZOO: list[Wrong] = []
wrong = keeper(ZOO)
TASK = "Stage2"


@wrong(TASK, "reduce it in the hook, register_post_accumulate_grad_hook", right_values=True)
class ReducesAfterBackwardOnly(Right2):
    def hook(self):
        pass


@wrong(TASK, "and gradients leave in the same order on all ranks")
class ReducesInTheOrderOfBackward(Right2):
    """What is there leaves; the rest in finish."""

    def arrived(self, parameter):
        self.queue.sort(key=lambda pair: pair[0] is not parameter and pair[0] not in self.there)
        self.there.add(parameter)
        self.send()

    def send(self):
        super().send()


@wrong(TASK, "gradients leave in the reversed order of params", right_values=True)
class QueuesForwards(Right2):
    """On all ranks alike, so that nearly all leaves in finish."""

    def order(self, pairs):
        return pairs


@wrong(TASK, "when one leaves, the next ones may be there already: while, not if", right_values=True)
class SendsOneAHook(Right2):
    def arrived(self, parameter):
        self.there.add(parameter)
        if self.left < len(self.queue) and self.queue[self.left][0] in self.there:
            self.send()


@wrong(TASK, "it was the turn of third.bias, which was not there")
class SendsWithoutWaiting(Right2):
    """Whatever is next in the queue, with zeros where its gradient is not there yet."""

    def arrived(self, parameter):
        while not any(p is parameter for p, _ in self.queue[: self.left]):
            self.send()


@wrong(TASK, "once a gradient has left, its shard is all that a rank keeps", right_values=True)
class KeepsWholeGradients(Right2):
    """In a list of its own, until the step."""

    def __init__(self, params, optimizer_class, **kwargs):
        self.kept = []
        super().__init__(params, optimizer_class, **kwargs)

    def drop(self, parameter):
        self.kept.append(parameter.grad)
        parameter.grad = None

    def zero_grad(self):
        super().zero_grad()
        self.kept = []


@wrong(TASK, "what has left counts again in the next backward")
class DropsNothing(Right2):
    def drop(self, parameter):
        pass


@wrong(TASK, "a gradient is dropped at once when it has left, not at the end of backward", right_values=True)
class DropsInFinish(Right2):
    def drop(self, parameter):
        pass

    def finish(self):
        super().finish()
        for p in self.params:
            p.grad = None


@wrong(TASK, "a gradient is dropped at once when it has left, not at the end of backward", right_values=True)
class KeepsPaddedRowsUntilFinish(Right2):
    """Asynchronous, with all rows alive."""

    def reset(self):
        super().reset()
        self.underway = []

    def take(self, parameter, shard_S):
        row = pad(filled(parameter)) / me()[1]
        mine = torch.empty_like(shard_S)
        self.underway.append((row, mine, shard_S, dist.reduce_scatter_single(mine, row, async_op=True)))

    def finish(self):
        while self.left < len(self.queue):
            self.send()
        for _, mine, shard_S, work in self.underway:
            work.wait()
            add(shard_S, mine)
        self.reset()


@wrong(TASK, "a call with async_op=True returns at once")
class NeverWaits(Right2):
    def take(self, parameter, shard_S):
        mine = torch.empty_like(shard_S)
        self.rows = [*getattr(self, "rows", []), row := pad(filled(parameter)) / me()[1]]
        dist.reduce_scatter_single(mine, row, async_op=True)
        add(shard_S, mine)


@wrong(TASK, "only the last backward pass counts")
class Overwrites(Right2):
    def take(self, parameter, shard_S):
        shard_S.grad = self.mean(parameter)


@wrong(TASK, "only the first backward pass counts")
class KeepsTheFirst(Right2):
    def take(self, parameter, shard_S):
        mean_S = self.mean(parameter)
        if shard_S.grad is None:
            shard_S.grad = mean_S


@wrong(TASK, "not their mean")
class AveragesThePasses(Right2):
    def take(self, parameter, shard_S):
        add(shard_S, self.mean(parameter) / 2)


@wrong(TASK, "finish() has to forget what it counted")
class CountsOnce(Right2):
    """The second backward sends nothing in its hooks, and finish finds nothing missing."""

    def finish(self):
        while self.left < len(self.queue):
            self.send()


@wrong(TASK, "the first backward was right: finish() has to forget what it counted")
class ForgetsToForgetWhatIsThere(Right2):
    def reset(self):
        self.left = 0
        self.there = getattr(self, "there", set())


@wrong(TASK, "is something left out where a gradient is None")
class LeavesOutWhatIsMissing(Right2):
    def finish(self):
        while self.left < len(self.queue):
            if self.queue[self.left][0].grad is None:
                self.left += 1
            else:
                self.send()
        self.reset()


@wrong(TASK, "has a gradient of None there: zeros take its place, and are sent")
class TakesNoneForATensor(Right2):
    def mean(self, parameter):
        return reduced(pad(parameter.grad.flatten()) / me()[1])


@wrong(TASK, "finish() sends what has not left")
class SendsTheRestInStep(Right2):
    """Which is too late for a second backward."""

    def finish(self):
        pass

    def step(self):
        Right2.finish(self)
        super().step()


@wrong(TASK, "does the hook get what you think")
class HooksSeeTheLast(Right2):
    def hook(self):
        for parameter in self.params:
            parameter.register_post_accumulate_grad_hook(lambda _: self.arrived(parameter))


@wrong(TASK, "something left before .grad was there: which hook is it?")
class HooksBeforeTheGradientIsThere(Right2):
    def hook(self):
        for parameter in self.params:
            parameter.register_hook(lambda grad, parameter=parameter: self.arrived(parameter))


@wrong(TASK, "PyTorch calls hook(parameter)")
class HooksTakeNothing(Right2):
    def hook(self):
        for parameter in self.params:
            parameter.register_post_accumulate_grad_hook(self.came)

    def came(self):
        pass


@wrong(TASK, "frozen parameters get no gradient: ask parameter.requires_grad")
class HooksTheFrozen(Right2):
    def __init__(self, params, optimizer_class, **kwargs):
        self.all = list(params)
        super().__init__(self.all, optimizer_class, **kwargs)

    def hook(self):
        for parameter in self.all:
            parameter.register_post_accumulate_grad_hook(self.arrived)


@wrong(
    TASK,
    "40 of them in step(); every gradient was sent twice: one reduce-scatter for each parameter in each backward",
    right_values=True,
)
class ReducesInStepToo(Right2):
    """What Stage1 did."""

    def step(self):
        for _ in range(2):
            for p in self.params:
                self.mean(p)
        super().step()


@wrong(TASK, "an all-reduce gives every rank the whole sum", right_values=True)
class AllReduces(Right2):
    def mean(self, parameter):
        row = pad(filled(parameter)) / me()[1]
        dist.all_reduce(row)
        return shard(row)


@wrong(TASK, "that is the sum over the ranks")
class NeverDivides(Right2):
    def mean(self, parameter):
        return reduced(pad(filled(parameter)))


@wrong(TASK, "that is divided by N twice")
class AveragesTwice(Right2):
    def mean(self, parameter):
        return super().mean(parameter) / me()[1]


@wrong(TASK, "give it shards, one Parameter for each parameter", right_values=True)
class HasWholeStates(Right2):
    """Gradients are sharded, and gathered again for an optimizer of whole parameters."""

    def make(self, optimizer_class, kwargs):
        return optimizer_class(self.params, **kwargs)

    def step(self):
        for p, s in zip(self.params, self.shards, strict=True):
            p.grad, s.grad = self.gather(p, torch.nn.Parameter(s.grad)), None
        self.optimizer.step()


@wrong(TASK, "gather them from the shards")
class ForgetsToGather(Right2):
    def spread(self):
        pass


@wrong(TASK, "the parameters are one step behind")
class GathersBeforeTheStep(Right2):
    def step(self):
        self.spread()
        self.optimizer.step()


@wrong(TASK, "20 of them in step()")
@wrong(TASK, "does step() reduce again, as in Stage1?")
class InheritsStep(Right2):
    step = Right1.step
