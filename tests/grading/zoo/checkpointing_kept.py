"""More wrong answers to the first task of 04_checkpointing: what is kept, and what was ready."""

import os

import torch
from torch.autograd.graph import saved_tensors_hooks

from tests.grading.zoo.checkpointing_right import Right
from tests.grading.zoo.wrong import Wrong, keeper

ZOO: list[Wrong] = []
wrong = keeper(ZOO)
TASK = "checkpoint"
KEPT = []


@wrong(TASK, "keep x and nothing else", right_values=True)
class KeepsTheGraph(Right):
    """On ctx; backward only goes through it."""

    def forward(self, ctx, function, x):
        with torch.enable_grad():
            ctx.leaf = x.detach().requires_grad_(x.requires_grad)
            ctx.y = function(ctx.leaf)
        return ctx.y.detach()

    def backward(self, ctx, grad):
        if ctx.y.requires_grad:
            torch.autograd.backward(ctx.y, grad)
        return ctx.leaf.grad


@wrong(TASK, "keep x and nothing else", right_values=True)
class KeepsTheGraphAndRunsAgain(Right):
    """Calls are right; forward's graph lies beside."""

    def first(self, ctx, function, x):
        with torch.enable_grad():
            ctx.first = function(x.detach().requires_grad_())
        return ctx.first.detach()


@wrong(TASK, "keep x and nothing else", right_values=True)
class KeepsEverythingInAList(Right):
    def first(self, ctx, function, x):
        with saved_tensors_hooks(self.keep, lambda tensor: tensor), torch.enable_grad():
            return function(x.detach().requires_grad_()).detach()

    def keep(self, tensor):
        KEPT.append(tensor)
        return tensor


@wrong(TASK, "keep x and nothing else", right_values=True)
class KeepsTheResult(Right):
    def first(self, ctx, function, x):
        y = function(x)
        ctx.save_for_backward(x, y.clone())
        return y


@wrong(TASK, "keep x and nothing else", right_values=True)
class KeepsTheResultOnItself(Right):
    def __call__(self, function, x):
        self.last = super().__call__(function, x)
        return self.last


@wrong(TASK, "x itself is enough: a copy takes the same bytes once more", right_values=True)
class KeepsACopy(Right):
    def save(self, ctx, x):
        ctx.save_for_backward(x.clone())


@wrong(TASK, "when backward is over, x is not needed any more", right_values=True)
class HangsXOnTheContext(Right):
    def save(self, ctx, x):
        ctx.x = x.detach()

    def saved(self, ctx):
        return ctx.x


@wrong(TASK, "when backward is over, x is not needed any more", right_values=True)
class KeepsTheSecondRun(Right):
    def again(self, ctx, x):
        ctx.again = super().again(ctx, x)
        return ctx.again


@wrong(TASK, "when backward is over, x is not needed any more", right_values=True)
class KeepsInputsInAList(Right):
    def save(self, ctx, x):
        ctx.number = len(KEPT)
        KEPT.append(x.detach())

    def saved(self, ctx):
        return KEPT[ctx.number]


@wrong(TASK, "forward runs each function once", right_values=True)
class RecomputesInForward(Right):
    """So that everything is there for backward."""

    def forward(self, ctx, function, x):
        y = super().forward(ctx, function, x)
        torch.set_rng_state(ctx.state)
        with torch.enable_grad():
            ctx.leaf = x.detach().requires_grad_(x.requires_grad)
            ctx.y = function(ctx.leaf)
        return y

    def backward(self, ctx, grad):
        return self.gradient(ctx, ctx.y, grad, ctx.leaf)


@wrong(TASK, "under torch.no_grad() just call the function", cases=slice(None))
class IgnoresNoGrad(Right):
    def __call__(self, function, x):
        with torch.enable_grad():
            return super().__call__(function, x)


@wrong(TASK, "nobody will go backward here", right_values=True, cases=slice(None))
class KeepsUnderNoGrad(Right):
    def __call__(self, function, x):
        if not torch.is_grad_enabled():
            KEPT.append(x.clone())
        return super().__call__(function, x)


@wrong(TASK, "forward runs each function once", right_values=True, cases=slice(None))
class RunsTwiceUnderNoGrad(Right):
    def __call__(self, function, x):
        if not torch.is_grad_enabled():
            state = torch.get_rng_state()
            function(x)
            torch.set_rng_state(state)
        return super().__call__(function, x)


class Packs:
    """An answer by saved_tensors_hooks."""

    def __call__(self, function, x):
        if not torch.is_grad_enabled():
            return function(x)
        state, found, count = torch.get_rng_state(), {}, iter(range(100))

        def unpack(number):
            if not found:
                with torch.random.fork_rng(), torch.enable_grad():
                    self.restore(state)
                    numbers = iter(range(100))
                    with saved_tensors_hooks(lambda tensor: found.update({next(numbers): tensor.detach()}), self.never):
                        function(x.detach().requires_grad_(x.requires_grad))
            return self.take(found, number)

        with saved_tensors_hooks(lambda tensor: self.pack(tensor, next(count)), unpack):
            return function(x)

    def restore(self, state):
        torch.set_rng_state(state)

    def pack(self, tensor, number):
        return number

    def take(self, found, number):
        return found.pop(number)

    def never(self, nothing):
        raise RuntimeError("this graph cannot go backward")


@wrong(TASK, "other random numbers than forward's")
class PacksAndDoesNotRestore(Packs):
    def restore(self, state):
        pass


@wrong(TASK, "keep x and nothing else", right_values=True)
class PacksTheTensorsToo(Packs):
    def pack(self, tensor, number):
        KEPT.append(tensor.detach())
        return number


@wrong(TASK, "one run more is enough", right_values=True)
class RunsAgainForEachTensor(Packs):
    """What it has found is lost after each."""

    def take(self, found, number):
        tensor = found[number]
        found.clear()
        return tensor


@wrong(TASK, "torch.utils.checkpoint is not allowed")
def torchs_own(function, x):
    from torch.utils.checkpoint import checkpoint

    return checkpoint(function, x, use_reentrant=False)


@wrong(TASK, "torch.utils.checkpoint is not allowed")
def torchs_own_reentrant(function, x):
    from torch.utils.checkpoint import checkpoint

    return checkpoint(function, x, use_reentrant=True)


@wrong(TASK, "is not allowed; ")
def the_chapters_own(function, x):
    from manyranks.parallel.checkpointing import checkpoint

    return checkpoint(function, x)


@wrong(TASK, "is not allowed; ")
class UsesTheChaptersCall(Right):
    """The library's machinery for the second run."""

    def first(self, ctx, function, x):
        from manyranks.parallel.recomputation import Call

        return Call(function).first(x.detach())


@wrong(TASK, "not written yet")
def checkpoint(function, x):
    raise NotImplementedError  # your code here


@wrong(TASK, "died")
class Dies(Right):
    def backward(self, ctx, grad):
        os._exit(3)


@wrong(TASK, "does a loop not end?")
class NeverEnds(Right):
    def again(self, ctx, x):
        while True:
            y = super().again(ctx, x)
            if not y.requires_grad:
                return y
