"""Wrong answers to the first task of 04_checkpointing: values, random numbers and calls."""

import torch

from tests.grading.zoo.checkpointing_right import Right
from tests.grading.zoo.wrong import Wrong, keeper

ZOO: list[Wrong] = []
wrong = keeper(ZOO)
TASK = "checkpoint"


@wrong(TASK, "backward has to run the function again, for forward keeps nothing but x", right_values=True)
def does_nothing(function, x):
    return function(x)


@wrong(TASK, "other random numbers than forward's: keep torch.get_rng_state()")
class DoesNotRestore(Right):
    def restore(self, ctx):
        pass

    def put_back(self, now):
        pass


class FirstNode(torch.autograd.Function):
    @staticmethod
    def forward(ctx, function, x):
        ctx.function = function
        ctx.save_for_backward(x)
        return function(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.function(x)
        y.backward(grad)
        return None, x.grad


@wrong(TASK, "other random numbers than forward's")
def the_chapters_first_node(function, x):
    return FirstNode.apply(function, x)


@wrong(TASK, "other random numbers than forward's")
class RestoresTheStateOfTheEnd(Right):
    """Noted after the first run."""

    def forward(self, ctx, function, x):
        y = super().forward(ctx, function, x)
        ctx.state = torch.get_rng_state()
        return y


@wrong(TASK, "random numbers begin again from an earlier place")
class NeverPutsBack(Right):
    def put_back(self, now):
        pass


@wrong(TASK, "random numbers begin again from an earlier place")
class PutsBackTheOldState(Right):
    """What it noted is the state after the old one had been set."""

    def backward(self, ctx, grad):
        x = self.leaf(ctx)
        self.restore(ctx)
        y = self.again(ctx, x)
        return self.gradient(ctx, y, grad, x)


@wrong(TASK, "no seeds")
class SeedsBothRuns(Right):
    def first(self, ctx, function, x):
        torch.manual_seed(0)
        return function(x)

    def restore(self, ctx):
        torch.manual_seed(0)


@wrong(TASK, "other random numbers than forward's")
class SeedsTheSecondRun(Right):
    def restore(self, ctx):
        torch.manual_seed(40)


@wrong(TASK, "no seeds")
class ForksInForward(Right):
    """The first run's draws are taken back."""

    def first(self, ctx, function, x):
        with torch.random.fork_rng():
            return function(x)


@wrong(TASK, "x gets no gradient")
class DetachesTheInput(Right):
    def leaf(self, ctx):
        return self.saved(ctx).detach()


@wrong(TASK, "x gets no gradient")
class ReturnsNoGradient(Right):
    def gradient(self, ctx, y, grad, x):
        super().gradient(ctx, y, grad, x)


@wrong(TASK, "x gets no gradient")
def calls_with_a_detached_x(function, x):
    return function(x.detach())


@wrong(TASK, "the result needs no gradient: backward never comes to it")
def detaches_the_result(function, x):
    return Right()(function, x).detach()


@wrong(TASK, "the result needs no gradient: backward never comes to it")
def computes_without_gradients(function, x):
    with torch.no_grad():
        return function(x)


@wrong(TASK, "autograd is off inside backward")
class RecomputesWithoutGradients(Right):
    def again(self, ctx, x):
        return ctx.function(x)

    def gradient(self, ctx, y, grad, x):
        torch.autograd.backward(y, grad)
        return x.grad


@wrong(TASK, "x gets no gradient")
class RecomputesWithoutGradientsAndIsQuiet(Right):
    """As `if y.requires_grad` hides it."""

    def again(self, ctx, x):
        return ctx.function(x)


@wrong(TASK, "the function's parameters get no gradient")
class ForgetsTheParameters(Right):
    def gradient(self, ctx, y, grad, x):
        return torch.autograd.grad(y, x, grad)[0] if x.requires_grad else None


@wrong(TASK, "the parameters get their gradient twice")
class GivesParametersTwice(Right):
    """Once with that of x, once by themselves."""

    def gradient(self, ctx, y, grad, x):
        if y.requires_grad:
            torch.autograd.backward(y, grad, retain_graph=True)
            x_grad = None if x.grad is None else x.grad.clone()
            torch.autograd.backward(y, grad)
            return x_grad


@wrong(TASK, "gradients add up: what the parameters' .grad was before is lost")
class Overwrites(Right):
    def gradient(self, ctx, y, grad, x):
        from manyranks.parallel.recomputation import leaves_of, nodes_of

        for leaf in leaves_of(nodes_of([y])) if y.requires_grad else []:
            leaf.grad = None
        return super().gradient(ctx, y, grad, x)


@wrong(TASK, "start from it, not from ones")
class StartsFromOnes(Right):
    def gradient(self, ctx, y, grad, x):
        return super().gradient(ctx, y, torch.ones_like(grad), x)


@wrong(TASK, "start from it, not from ones")
class SumsTheResult(Right):
    def gradient(self, ctx, y, grad, x):
        if y.requires_grad:
            with torch.enable_grad():
                y.sum().backward()
        return x.grad


@wrong(TASK, "grad can be implicitly created only for scalar outputs")
class LeavesTheGradientOut(Right):
    def gradient(self, ctx, y, grad, x):
        y.backward()
        return x.grad


@wrong(TASK, "give it one more, torch.empty(0, requires_grad=True)", right_values=True, cases=slice(None))
class GivesApplyNothingMore(Right):
    def more(self):
        return []


@wrong(TASK, "nothing needs a gradient here, and the second run has no backward", right_values=True, cases=slice(None))
class FailsWhereNothingLearns(Right):
    def gradient(self, ctx, y, grad, x):
        torch.autograd.backward(y, grad)
        return x.grad


@wrong(TASK, "leave x as it is", cases=slice(None))
def makes_x_want_a_gradient(function, x):
    """In place of something more for apply."""
    if torch.is_grad_enabled() and not x.requires_grad:
        x.requires_grad_()
    return Right()(function, x)


@wrong(TASK, "leave x as it is")
class ChangesX(Right):
    """What it saves is the result's place."""

    def first(self, ctx, function, x):
        y = function(x)
        x.mul_(1.0001)
        return y


@wrong(TASK, "function may be any callable: it need not be a module")
class AsksForParameters(Right):
    def __call__(self, function, x):
        return super().__call__(function, x) if list(function.parameters()) else None


@wrong(TASK, "the second run needs a leaf of its own, x.detach()")
class DoesNotDetach(Right):
    """Backward inside backward goes on to what x was computed from."""

    def leaf(self, ctx):
        return self.saved(ctx)


@wrong(TASK, "forward runs each function once", right_values=True)
class RunsTwiceInForward(Right):
    """Once without and once with a graph."""

    def first(self, ctx, function, x):
        function(x)
        torch.set_rng_state(ctx.state)
        return function(x)


@wrong(TASK, "one run more is enough", right_values=True)
class RunsTwiceInBackward(Right):
    """For x, and for the parameters."""

    def backward(self, ctx, grad):
        now, x = torch.get_rng_state(), self.leaf(ctx)
        self.restore(ctx)
        if x.requires_grad:
            (x_grad,) = torch.autograd.grad(self.again(ctx, x), x, grad)
            self.restore(ctx)
        y = self.again(ctx, x.detach())
        self.put_back(now)
        self.gradient(ctx, y, grad, x)
        return x_grad if x.requires_grad else None


@wrong(TASK, "its graph is good for one backward")
class GoesBackTwice(Right):
    def gradient(self, ctx, y, grad, x):
        torch.autograd.grad(y, x, grad)
        return super().gradient(ctx, y, grad, x)


@wrong(TASK, "backward returns one for each argument of apply")
class ReturnsTooFew(Right):
    def more(self):
        return []

    def __call__(self, function, x):
        return OneGradient.apply(self, function, x, torch.empty(0, requires_grad=True))


class OneGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, way, function, x, more):
        return way.forward(ctx, function, x)

    @staticmethod
    def backward(ctx, grad):
        return ctx.saved_tensors[0]
