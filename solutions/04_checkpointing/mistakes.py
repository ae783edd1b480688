"""Answers to 04_checkpointing: what is right, and the mistakes that are made."""

import math
import os
import tempfile
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial, reduce
from itertools import accumulate, combinations, pairwise

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks

from manyranks.grade.answers import also_right, mistake, right

KEPT = []


def slip(task, hint="", points=0.0, says="", on=()):
    """A mistake in few words. Its name is that of the variable (see the end)."""
    return mistake(task, hint, says=says, points=points, on=on)


def changed(base, *told, also=(), **steps):
    """A mistake: an answer with these steps changed. also: other bases, of two mistakes at once; told: as to `slip`."""
    return slip(base.task, *told)(type("", (base, *also), steps))


# Task 1


@right("checkpoint")
class Right:
    """Each other answer changes a step."""

    task = "checkpoint"

    def __call__(self, function, x):
        return Node.apply(self, function, x, *self.more())

    def more(self):
        return [torch.empty(0, requires_grad=True)]

    def forward(self, ctx, function, x):
        ctx.function, ctx.state = function, torch.get_rng_state()
        self.save(ctx, x)
        return self.first(ctx, function, x)

    def save(self, ctx, x):
        ctx.save_for_backward(x)

    def saved(self, ctx):
        return ctx.saved_tensors[0]

    def first(self, ctx, function, x):
        return function(x)

    def backward(self, ctx, grad):
        x = self.leaf(ctx)
        now = torch.get_rng_state()
        self.restore(ctx)
        y = self.again(ctx, x)
        self.put_back(now)
        return self.gradient(ctx, y, grad, x)

    def leaf(self, ctx):
        return self.saved(ctx).detach().requires_grad_(ctx.needs_input_grad[2])

    def restore(self, ctx):
        torch.set_rng_state(ctx.state)

    def put_back(self, now):
        torch.set_rng_state(now)

    def again(self, ctx, x):
        with torch.enable_grad():
            return ctx.function(x)

    def gradient(self, ctx, y, grad, x):
        if y.requires_grad:
            torch.autograd.backward(y, grad)
        return x.grad


class Node(torch.autograd.Function):
    @staticmethod
    def forward(ctx, way, function, x, *more):
        ctx.way, ctx.count = way, len(more)
        return way.forward(ctx, function, x)

    @staticmethod
    def backward(ctx, grad):
        return None, None, ctx.way.backward(ctx, grad), *[None] * ctx.count


def leaves(y):
    """Of its graph."""
    todo, seen, found = [y.grad_fn], set(), []
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            found += [node.variable] if hasattr(node, "variable") else []
            todo += [before for before, _ in node.next_functions]
    return found


@also_right("checkpoint")
class Forks(Right):
    """Random numbers by fork_rng, gradients by autograd.grad, parameters looked up in the graph."""

    def backward(self, ctx, grad):
        x = self.leaf(ctx)
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.set_rng_state(ctx.state)
            y = ctx.function(x)
        if not y.requires_grad:
            return None
        mine, others = [x] * x.requires_grad, [leaf for leaf in leaves(y) if leaf is not x]
        grads = torch.autograd.grad(y, [*mine, *others], grad)
        for leaf, found in zip(others, grads[len(mine) :], strict=True):
            leaf.grad = found if leaf.grad is None else leaf.grad + found
        return grads[0] if mine else None


@also_right("checkpoint")
class SavesTheStateToo(Right):
    """As a tensor, through autograd; x's gradient is computed also where nobody wants it."""

    def save(self, ctx, x):
        ctx.save_for_backward(x, ctx.state)
        ctx.state = None

    def restore(self, ctx):
        torch.set_rng_state(ctx.saved_tensors[1])

    def leaf(self, ctx):
        return self.saved(ctx).detach().requires_grad_()


@also_right("checkpoint")
class DropsX(Right):
    """It is on ctx, and off it in time; in place of something more, x itself as a leaf."""

    def __call__(self, function, x):
        return Node.apply(self, function, x if x.requires_grad else x.detach().requires_grad_())

    def save(self, ctx, x):
        ctx.x = x.detach()

    def saved(self, ctx):
        x, ctx.x = ctx.x, None
        return x


class drawing_from:
    def __init__(self, state):
        self.state = state

    def __enter__(self):
        self.now = torch.get_rng_state()
        torch.set_rng_state(self.state)

    def __exit__(self, *_):
        torch.set_rng_state(self.now)


@also_right("checkpoint")
def knows_parameters(function, x):
    """They are inputs of the node; gradients are its results, as the chapter's are."""
    if not torch.is_grad_enabled():
        return function(x)
    state = torch.get_rng_state()
    with saved_tensors_hooks(lambda tensor: None, lambda nothing: nothing):
        y = function(given := x.detach().requires_grad_(x.requires_grad))
    if not y.requires_grad:
        return y
    return Whole.apply(function, state, y.detach(), x, *[leaf for leaf in leaves(y) if leaf is not given])


class Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx, function, state, y, x, *others):
        ctx.function, ctx.state, ctx.others = function, state, others
        ctx.save_for_backward(x)
        return y

    @staticmethod
    def backward(ctx, grad):
        x = ctx.saved_tensors[0].detach().requires_grad_(ctx.needs_input_grad[3])
        with drawing_from(ctx.state), torch.enable_grad():
            y = ctx.function(x)
        mine = [x] * x.requires_grad
        grads = torch.autograd.grad(y, [*mine, *ctx.others], grad)
        return None, None, None, *(grads if mine else (None, *grads))


@also_right("checkpoint")
class Packs:
    """By saved_tensors_hooks."""

    task = "checkpoint"

    def __call__(self, function, x):
        if not torch.is_grad_enabled():
            return function(x)
        state, found, places = torch.get_rng_state(), {}, iter(range(100))

        def unpack(place):
            if not found:
                with torch.random.fork_rng(), torch.enable_grad():
                    self.restore(state)
                    numbers = iter(range(100))
                    with saved_tensors_hooks(lambda tensor: found.update({next(numbers): tensor.detach()}), self.never):
                        function(x.detach().requires_grad_(x.requires_grad))
            return self.take(found, place)

        with saved_tensors_hooks(lambda tensor: self.pack(tensor, next(places)), unpack):
            return function(x)

    def restore(self, state):
        torch.set_rng_state(state)

    def pack(self, tensor, place):
        return place

    def take(self, found, place):
        return found.pop(place)

    def never(self, nothing):
        raise RuntimeError("this graph cannot go backward")


MORE = torch.ones((), requires_grad=True)


@also_right("checkpoint")
def by_a_node_of_each_call(function, x):
    """In the newer form, with decorators, inside a module, with one tensor more for all calls, and a gradient for it."""

    class Own(torch.autograd.Function):
        @staticmethod
        @torch.no_grad()
        def forward(x, state, more):
            return function(x)

        @staticmethod
        def setup_context(ctx, inputs, output):
            x, ctx.state, _ = inputs
            ctx.save_for_backward(x)

        @staticmethod
        @once_differentiable
        @torch.enable_grad()
        def backward(ctx, grad):
            x = ctx.saved_tensors[0].detach().requires_grad_(ctx.needs_input_grad[0])
            with drawing_from(ctx.state):
                y = function(x)
            if y.grad_fn is not None:
                y.backward(gradient=grad)
            return x.grad, None, torch.zeros(())

    class Checkpointed(nn.Module):
        def forward(self, x):
            return Own.apply(x, torch.get_rng_state(), MORE)

    return Checkpointed()(x)


ANCHOR = "give it one more, torch.empty(0, requires_grad=True)"
BESIDE = (
    "something as large as x is kept beside it: the result, a copy of x, or a tensor that apply got. Keep x alone; a tensor "
    "more for apply may be empty: torch.empty(0, requires_grad=True)"
)
COPY = "x itself is enough: a copy takes the same bytes once more where somebody else holds x, too"
EVERYTHING = (
    "what the function computes in forward is kept somewhere, as large as without a checkpoint: where autograd is off, as "
    "inside a torch.autograd.Function's forward, the function leaves nothing. Keep x and nothing else"
)
LET_GO = (
    "when backward is over, x is not needed any more: what is in ctx.save_for_backward is let go then, what hangs on ctx or in "
    "a list is not"
)
NO_GRAD = "nobody will go backward here: under torch.no_grad() just call the function"
NO_LEAF = (
    "x gets no gradient: apply gets x itself; the second run needs a leaf that wants one, x.detach().requires_grad_(), and "
    "backward returns its .grad"
)
LEARNS = "nothing needs a gradient here, and the second run has no backward: ask y.requires_grad"
ONCE = "forward runs each function once: what backward needs, it computes itself, when its turn comes"
ONE_MORE = "one run more is enough: one backward through it gives the gradients of x and of the parameters"
ONES = "backward gets the gradient of the result: start from it, not from ones"
RESTORE = "backward's run draws other random numbers than forward's"


@slip(
    "checkpoint",
    "this is an ordinary call, which keeps all that the function computes: backward has to run it again, from x",
    1.75,
)
def does_nothing(function, x):
    return function(x)


def back_at_once(self, ctx, y, grad, x):
    torch.autograd.backward(y, grad)
    return x.grad


DetachesTheInput = changed(Right, NO_LEAF, 2.8, leaf=lambda self, ctx: self.saved(ctx).detach())
FailsWhereNothingLearns = changed(Right, LEARNS, 5.6, gradient=back_at_once)
GivesApplyNothingMore = changed(Right, "", 4.2, ANCHOR, more=lambda self: [])
NeverPutsBack = changed(Right, "", 2.8, "random numbers begin again from an earlier place", put_back=lambda self, now: None)
DoesNotRestore = changed(NeverPutsBack, "", 2.8, RESTORE, restore=lambda self, ctx: None)
TheChaptersFirstNode = changed(DoesNotRestore, "", 1.68, RESTORE, also=[GivesApplyNothingMore])
PacksAndDoesNotRestore = changed(Packs, "", 2.8, RESTORE, restore=lambda self, state: None)
DoesNotDetach = changed(
    Right,
    "something went backward twice: the second run needs a leaf of its own, x.detach().requires_grad_(), and its graph is good "
    "for one backward, which gives the gradients of x and of the parameters at once",
    leaf=lambda self, ctx: self.saved(ctx),
)
RecomputesWithoutGradients = changed(
    Right,
    "autograd is off inside backward: run the function again under torch.enable_grad(), and go back from its result y with "
    "grad; a sum of y that is made outside has no graph, and grad is not a sum's",
    again=lambda self, ctx, x: ctx.function(x),
    gradient=back_at_once,
)
IsQuietWithoutGradients = changed(
    Right,
    "neither x nor the parameters get a gradient: autograd is off inside backward, so the second run has no graph, and `if "
    "y.requires_grad` hides it. Run it under torch.enable_grad()",
    2.8,
    again=lambda self, ctx, x: ctx.function(x),
)
ForgetsTheParameters = changed(
    Right,
    "the parameters get no gradient: torch.autograd.backward(y, grad), with the second run's y, gives it to all of them",
    2.8,
    gradient=lambda self, ctx, y, grad, x: torch.autograd.grad(y, x, grad)[0] if x.requires_grad else None,
)


@slip("checkpoint", "the parameters get their gradient twice: one backward through the second run is enough", 2.8)
class GivesParametersTwice(Right):
    def gradient(self, ctx, y, grad, x):
        if y.requires_grad:
            torch.autograd.backward(y, grad, retain_graph=True)
            x_grad = None if x.grad is None else x.grad.clone()
            torch.autograd.backward(y, grad)
            return x_grad


@slip("checkpoint", "gradients add up: what the parameters' .grad was before is lost", 2.8)
class Overwrites(Right):
    def gradient(self, ctx, y, grad, x):
        for leaf in leaves(y) if y.requires_grad else []:
            leaf.grad = None
        return super().gradient(ctx, y, grad, x)


@slip("checkpoint", ONES, 2.8)
class StartsFromOnes(Right):
    def gradient(self, ctx, y, grad, x):
        return super().gradient(ctx, y, torch.ones_like(grad), x)


@slip("checkpoint", "", 2.8, "from where they are: no seeds and no fork_rng")
class SeedsBothRuns(Right):
    def first(self, ctx, function, x):
        torch.manual_seed(0)
        return super().first(ctx, function, x)

    def restore(self, ctx):
        torch.manual_seed(0)


@slip("checkpoint", "leave x as it is, also its requires_grad: work on x.detach()", 2.8)
def makes_x_want_a_gradient(function, x):
    if torch.is_grad_enabled() and not x.requires_grad:
        x.requires_grad_()
    return Right()(function, x)


@slip("checkpoint", "", 2.8, "the function's second x is not the first one: leave x as it is")
class ChangesX(Right):
    def first(self, ctx, function, x):
        y = function(x)
        x.mul_(1.0001)
        return y


@slip("checkpoint", says="function may be any callable: it need not be a module")
def asks_for_parameters(function, x):
    return Right()(function, x) if list(function.parameters()) else None


@slip("checkpoint", says="backward returns one for each argument of apply, None for what has none")
def returns_too_few(function, x):
    class OneGradient(Node):
        backward = staticmethod(lambda ctx, grad: ctx.way.backward(ctx, grad))

    return OneGradient.apply(Right(), function, x)


@slip("checkpoint", EVERYTHING, 1.75)
class KeepsTheGraph(Right):
    """On ctx; backward only goes through it."""

    def forward(self, ctx, function, x):
        with torch.enable_grad():
            ctx.leaf = x.detach().requires_grad_(x.requires_grad)
            ctx.y = function(ctx.leaf)
        return ctx.y.detach()

    def backward(self, ctx, grad):
        return self.gradient(ctx, ctx.y, grad, ctx.leaf)


PacksTheTensorsToo = changed(Packs, EVERYTHING, 3.85, pack=lambda self, tensor, k: KEPT.append(tensor.detach()) or k)


@slip("checkpoint", EVERYTHING, 1.75)
class KeepsArrays:
    """All that the function keeps goes elsewhere; the second run is for nothing."""

    task = "checkpoint"

    def __call__(self, function, x):
        if not torch.is_grad_enabled():
            return function(x)

        def again(grad):
            with drawing_from(torch.get_rng_state()), torch.no_grad():
                function(self.unpack(kept))

        with saved_tensors_hooks(self.pack, self.unpack):
            y, kept = function(x), self.pack(x)
            if y.requires_grad:
                y.register_hook(again)
        return y

    def pack(self, tensor):
        return tensor.detach().numpy().copy()

    def unpack(self, array):
        return torch.from_numpy(array)


@slip(
    "checkpoint",
    "what backward's run computes is not used: the gradients come from what forward has kept somewhere, in tensors, arrays or "
    "files. Go backward through the second run's graph, and keep x only",
    1.75,
)
class KeepsFiles(KeepsArrays):
    def pack(self, tensor):
        path = os.path.join(tempfile.gettempdir(), uuid.uuid4().hex)
        torch.save(tensor.detach(), path)
        return path

    def unpack(self, path):
        tensor = torch.load(path)
        os.remove(path)
        return tensor


@slip("checkpoint", BESIDE, 3.85)
class KeepsTheResultOnItself(Right):
    def __call__(self, function, x):
        self.last = super().__call__(function, x)
        return self.last


@slip("checkpoint", BESIDE, 3.85)
class KeepsXAsAnArrayToo(Right):
    def save(self, ctx, x):
        super().save(ctx, x)
        ctx.array = x.detach().numpy().copy()


@slip("checkpoint", BESIDE, 3.85)
def gives_a_large_tensor_more(function, x):
    return Node.apply(Right(), function, x, torch.empty_like(x, requires_grad=True))


@slip("checkpoint", "a list of numbers takes four times the bytes of x: keep x itself, and nothing else", 3.85)
class KeepsXAsAList(Right):
    def save(self, ctx, x):
        ctx.list = x.tolist()

    def saved(self, ctx):
        return torch.tensor(ctx.list, dtype=torch.float64)


@slip("checkpoint", LET_GO, 6.3)
class HangsXOnTheContext(Right):
    def save(self, ctx, x):
        ctx.x = x.detach()

    def saved(self, ctx):
        return ctx.x


@slip("checkpoint", "the second run's result is kept after backward, with its graph: let it go with the call", 6.3)
class KeepsTheSecondRun(Right):
    def again(self, ctx, x):
        ctx.again = super().again(ctx, x)
        return ctx.again


@slip("checkpoint", "the result needs a gradient here: under torch.no_grad() just call the function", 2.8)
def ignores_no_grad(function, x):
    with torch.enable_grad():
        return Right()(function, x)


@slip("checkpoint", NO_GRAD, 3.85)
def keeps_under_no_grad(function, x):
    KEPT.extend([x.clone()] * (not torch.is_grad_enabled()))
    return Right()(function, x)


@slip("checkpoint", ONCE, 4.9)
class RunsTwiceInForward(Right):
    def first(self, ctx, function, x):
        with drawing_from(ctx.state):
            function(x)
        return function(x)


@slip("checkpoint", ONE_MORE, 4.9)
class RunsTwiceInBackward(Right):
    def gradient(self, ctx, y, grad, x):
        with drawing_from(ctx.state):
            return super().gradient(ctx, self.again(ctx, x), grad, x)


KeepsACopy = changed(Right, COPY, 3.85, save=lambda self, ctx, x: ctx.save_for_backward(x.clone()))
RunsAgainForEachTensor = changed(Packs, ONE_MORE, 4.9, take=lambda self, found, k: (found[k], found.clear())[0])
NeverEnds = changed(Right, "", 0, "does a loop not end?", again=lambda self, ctx, x: [ctx.function(x) for _ in iter(int, 1)])
SeedsAndStartsFromOnes = changed(SeedsBothRuns, "", 2.8, "no seeds", also=[StartsFromOnes])
DoesNotRestoreNorDetach = changed(DoesNotRestore, NO_LEAF, 2.8, also=[DetachesTheInput])
NeverPutsBackAndKeepsACopy = changed(NeverPutsBack, "", 1.4, "has to be set back", also=[KeepsACopy])


@slip("checkpoint", says="checkpoint is not allowed")
def torchs_own_with_another_thread(function, x):
    from torch.utils.checkpoint import checkpoint

    return checkpoint(lambda x: ThreadPoolExecutor().submit(function, x).result(), x, use_reentrant=True)


@slip("checkpoint", says="Call is not allowed")
class UsesTheChaptersCall(Right):
    def first(self, ctx, function, x):
        from manyranks.parallel.recomputation import Call

        return Call(function).first(x.detach())


# Task 2

SEGMENTS = "10 layers are 3 segments, round(√10), of 4, 3 and 3 layers: they differ by one at most, the longer ones first"
LAST = "backward begins with the last segment: leave it without a checkpoint, what it keeps is needed at once"
ONE = "with N = 1 there is no checkpoint: the only segment is the last"
EACH = (
    f"each layer is a checkpoint of its own, so that all inputs are kept: a checkpoint takes a segment of several. {SEGMENTS}"
)
DOWN = "√7 is 2.6, and round(√7) is 3: math.isqrt and int() round down. 7 layers are 3, 2 and 2"


def in_turn(layers, x):
    return reduce(lambda x, layer: layer(x), layers, x)


def lengths_of(n, rounded=round):
    count = rounded(math.sqrt(n))
    return [n // count + (k < n % count) for k in range(count)]


@right("checkpoint_sqrt")
def right_sqrt(checkpoint, layers, x, last=False, lengths=None):
    """last: whether the last segment is a checkpoint, too."""
    lengths = lengths or lengths_of(len(layers))
    for number, length in enumerate(lengths):
        segment, layers = partial(in_turn, layers[:length]), layers[length:]
        x = checkpoint(segment, x) if last or number < len(lengths) - 1 else segment(x)
    return x


@also_right("checkpoint_sqrt")
def by_recursion(checkpoint, layers, x):
    """With a checkpoint of its own."""

    def rest(x, first, lengths):
        if len(lengths) == 1:
            return in_turn(layers[first:], x)
        x = Right()(lambda x: in_turn(layers[first : first + lengths[0]], x), x)
        return rest(x, first + lengths[0], lengths[1:])

    return rest(x, 0, lengths_of(len(layers)))


@also_right("checkpoint_sqrt")
def by_divmod(checkpoint, layers, x):
    layers = list(layers)
    size, longer = divmod(len(layers), count := round(math.sqrt(len(layers))))
    while count > 1:
        part = [layers.pop(0) for _ in range(size + (longer > 0))]
        x = checkpoint(lambda x, part=part: in_turn(part, x), x)
        longer, count = longer - 1, count - 1
    return in_turn(layers, x)


@also_right("checkpoint_sqrt")
def by_numpys_array_split(checkpoint, layers, x):
    parts = [list(part) for part in np.array_split(np.array(layers, dtype=object), len(lengths_of(len(layers))))]
    for part in parts[:-1]:
        x = checkpoint(nn.Sequential(*[Wrapped(layer) for layer in part]), x)
    return in_turn(parts[-1], x)


class Wrapped(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.forward = layer


def segments(hint, points, lengths, last=False):
    """A mistake: other lengths, of so many layers."""
    return slip("checkpoint_sqrt", hint, points)(
        lambda checkpoint, layers, x: right_sqrt(checkpoint, layers, x, last, lengths(len(layers)))
    )


def chunks(n, size):
    return [end - first for first, end in pairwise([0, *range(size, n, size), n])]


NOTHING_AGAIN = "no layer is in a checkpoint: every segment but the last is one call of checkpoint, and runs again"
CHUNKS = f"segments of one size leave a shorter one at the end, which differs by more than one layer: {SEGMENTS}"
keeps_all_layers = segments(NOTHING_AGAIN, 0.4, lambda n: [n])
checkpoints_the_last_too = segments(LAST, 1.2, lengths_of, last=True)
makes_one_checkpoint_of_all = segments(
    f"all layers are one checkpoint, the last too. {SEGMENTS}", 0.8, lambda n: [n], last=True
)
makes_each_layer_a_checkpoint = segments(f"{EACH}; and the last segment is in no checkpoint", 1.2, lambda n: [1] * n, last=True)
makes_each_but_the_last_a_checkpoint = segments(EACH, 0.8, lambda n: [1] * n)
has_the_shorter_ones_first = segments(f"the longer segments come first: {SEGMENTS}", 0.8, lambda n: lengths_of(n)[::-1])
rounds_down = segments(DOWN, 0.4, lambda n: lengths_of(n, math.floor))
rounds_up = segments(f"math.ceil rounds up, and round(√10) is 3: {SEGMENTS}", 1.2, lambda n: lengths_of(n, math.ceil))
rounds_down_with_the_last = segments(f"{DOWN}. And {LAST}", 0.8, lambda n: lengths_of(n, math.floor), last=True)
cuts_chunks_of_the_ceiling = segments(CHUNKS, 1.2, lambda n: chunks(n, -(-n // len(lengths_of(n)))))
cuts_chunks_of_the_floor = segments(CHUNKS, 1.2, lambda n: chunks(n, n // len(lengths_of(n))))
leaves_the_rest_out = segments(
    "N // C layers a segment leave the last N % C out: the first N % C segments have one more",
    0.8,
    lambda n: [n // len(lengths_of(n))] * len(lengths_of(n)),
)


@slip("checkpoint_sqrt", "every layer computes once in forward: a segment begins where the one before ended", 0.4)
def overlaps(checkpoint, layers, x):
    ends = [0, *accumulate(lengths_of(len(layers)))]
    for first, end in pairwise(ends[:-1]):
        x = checkpoint(partial(in_turn, layers[max(0, first - 1) : end]), x)
    return in_turn(layers[max(0, ends[-2] - 1) :], x)


@slip(
    "checkpoint_sqrt",
    "backward runs other layers than forward: a lambda in a loop sees its variables' last values; functools.partial, or a "
    "function that is called with the segment, binds those of now",
    0.8,
)
def binds_late(checkpoint, layers, x):
    lengths = lengths_of(len(layers))
    for k, length in enumerate(lengths):
        segment, layers = layers[:length], layers[length:]
        x = checkpoint(partial(in_turn, segment), x) if k < len(lengths) - 1 else in_turn(segment, x)
    return x


@slip("checkpoint_sqrt", "a layer that backward runs twice is in a checkpoint within another: one checkpoint a segment", 1.2)
def nests(checkpoint, layers, x):
    inner = sum(lengths_of(len(layers))[:-1])
    return right_sqrt(checkpoint, [*(partial(checkpoint, layer) for layer in layers[:inner]), *layers[inner:]], x)


@slip("checkpoint_sqrt", ONE, 2.67)
def takes_more_than_one_layer_for_granted(checkpoint, layers, x):
    return right_sqrt(checkpoint, layers, x) + 0 * lengths_of(len(layers))[1]


@slip("checkpoint_sqrt", ONE, 1.2)
def checkpoints_a_single_layer(checkpoint, layers, x):
    return right_sqrt(checkpoint, layers, x, last=len(layers) == 1)


@slip("checkpoint_sqrt", "one segment is computed again at a time: something is kept when its backward is over", 3.6)
def keeps_what_backward_computes(checkpoint, layers, x):
    def keeping(layer, calls, x):
        y = layer(x)
        KEPT.extend(calls and [y, x, y.detach().clone(), y.detach().clone()])
        calls.append(0)
        return y

    return right_sqrt(checkpoint, [partial(keeping, layer, []) for layer in layers], x)


@slip(
    "checkpoint_sqrt",
    "layers' outputs are kept: the inputs of the segments before the last are enough, and the last segment",
    3.2,
)
def keeps_every_layers_output(checkpoint, layers, x):
    def keeping(layer, x):
        KEPT.append(layer(x))
        return KEPT[-1]

    return right_sqrt(checkpoint, [partial(keeping, layer) for layer in layers], x)


ORDER_OF_LAYERS, FIRST = "layers run in their order, layers[0] first", "checkpoint(function, x): the function comes first"
sqrt = partial(slip, "checkpoint_sqrt")
begins_at_the_end = sqrt(ORDER_OF_LAYERS, 0.8)(lambda checkpoint, layers, x: right_sqrt(checkpoint, layers[::-1], x))
has_the_arguments_the_other_way_round = sqrt(says=FIRST)(lambda checkpoint, layers, x: checkpoint(x, layers[0]))
takes_layers_for_modules = sqrt(says="functions, not modules")(lambda checkpoint, layers, x: nn.Sequential(*layers)(x))
gives_checkpoint_a_third_argument = sqrt(says="bind the segment")(lambda checkpoint, layers, x: checkpoint(in_turn, x, layers))


@sqrt(says="checkpoint_sequential is not allowed")
def uses_torchs_own(checkpoint, layers, x):
    from torch.utils.checkpoint import checkpoint_sequential

    return checkpoint_sequential(layers, len(lengths_of(len(layers))), x, use_reentrant=False)


# Task 3

MORE = "project and output are products with weights: they cost most of the FLOPs and keep little. Only the core runs again"
SCORES = "the core has to run again: its scores, of s × s numbers for each head, are most of what is kept"
core = partial(slip, "selective")


@right("selective")
def right_selective(checkpoint, layer, x):
    return layer.output(checkpoint(layer.core, layer.project(x)))


@also_right("selective")
def with_a_name_for_each(checkpoint, layer, x):
    qkv = layer.project(x).contiguous()
    context = Right()(lambda qkv: layer.core(qkv), qkv)
    del qkv
    return layer.output(context)


def plain(layer, x):
    return layer.output(layer.core(layer.project(x)))


keeps_the_scores = core(SCORES, 0.3)(lambda checkpoint, layer, x: plain(layer, x))
checkpoints_the_whole_layer = core(MORE, 0.6)(lambda checkpoint, layer, x: checkpoint(partial(plain, layer), x))
checkpoints_the_products = core(f"the other way round: {MORE}", 0.3)(
    lambda checkpoint, layer, x: checkpoint(layer.output, layer.core(checkpoint(layer.project, x)))
)
begins_too_early = core(f"the checkpoint begins too early. {MORE}", 0.6)(
    lambda checkpoint, layer, x: layer.output(checkpoint(lambda x: layer.core(layer.project(x)), x))
)
ends_too_late = core(f"the checkpoint ends too late. {MORE}", 0.6)(
    lambda checkpoint, layer, x: checkpoint(lambda x: layer.output(layer.core(x)), layer.project(x))
)
nests_the_core = core("the core is in a checkpoint within another: one run more is enough", 0.6)(
    lambda checkpoint, layer, x: layer.output(checkpoint(lambda x: checkpoint(layer.core, x), layer.project(x)))
)
leaves_the_core_out = core("the core is missing: output(core(project(x))), each once in forward", 0.3)(
    lambda checkpoint, layer, x: layer.output(layer.project(x)[:, : x.shape[1]])
)
gives_the_cores_result = core(says="give it layer.core, which it calls itself, and not what the core returns")(
    lambda checkpoint, layer, x: layer.output(checkpoint(layer.core(layer.project(x)), x))
)


@core(says="not its scores", points=1.7)
def keeps_the_first_run_too(checkpoint, layer, x):
    qkv = layer.project(x)
    KEPT.append(qkv.detach() @ qkv.detach().T)
    return layer.output(checkpoint(layer.core, qkv))


@core("no gradient comes through no_grad, or through detach: a checkpoint of the core is what autograd has to see", 0.3)
def runs_the_core_under_no_grad(checkpoint, layer, x):
    with torch.no_grad():
        context = layer.core(layer.project(x))
    return layer.output(context)


@core(says="the function's second x is not the first one", points=0.8)
def changes_the_cores_input(checkpoint, layer, x):
    qkv = layer.project(x).detach().requires_grad_()
    context = checkpoint(layer.core, qkv)
    qkv.data.mul_(0.5)
    return layer.output(context)


# Task 4

TABLE = (
    "go through the layers once; keep, for each number of bytes that may be held by now, the least FLOPs with which it can be "
    "had, and from which choice"
)
GREEDY = f"taking one layer after the other, the best by some measure first, can miss the best choice: {TABLE}"
NOTHING_FITS = "where nothing fits, raise ValueError: not even what holds least at each layer is within the budget"
WITHIN = "peak(layers, chosen) says what a choice holds, and must be within the budget"
END = (
    "what is held when forward ends fits, and backward needs more: peak(layers, chosen) counts, at each layer, all that it "
    "saves, computed again or not, beside what those before it hold"
)
choice = partial(slip, "choose")


def peak(layers, chosen):
    most = held = 0
    for k, layer in enumerate(layers):
        most = max(most, held + layer.saved)
        held += layer.input if k in chosen else layer.saved
    return most


def flops(layers, chosen):
    return sum(layers[k].forward for k in chosen)


def table(layers, budget):
    """All ways that fit, by bytes held: FLOPs and choice."""
    ways = {0: (0, ())}
    for k, layer in enumerate(layers):
        found = {}
        for held, (cost, chosen) in ways.items():
            for more, way in ((layer.saved, (cost, chosen)), (layer.input, (cost + layer.forward, (*chosen, k)))):
                if held + layer.saved <= budget:
                    found[held + more] = min(found.get(held + more, way), way)
        ways = found
    if not ways:
        raise ValueError("nothing fits")
    return ways


@right("choose")
def right_choice(layers, budget):
    return min(table(layers, budget).values())[1]


@also_right("choose")
def from_the_back(layers, budget):
    """Branch and bound; an array."""
    best, reached = [math.inf, None], [{} for _ in layers]

    def go(k, held, cost, mine):
        if cost >= best[0] or (k < len(layers) and held + layers[k].saved > budget):
            return
        if k == len(layers):
            best[:] = cost, mine
        elif cost < reached[k].get(held, math.inf):
            reached[k][held] = cost
            go(k + 1, held + layers[k].saved, cost, mine)
            go(k + 1, held + layers[k].input, cost + layers[k].forward, [*mine, k])

    go(0, 0, 0, [])
    if best[1] is None:
        raise ValueError("no choice fits")
    return np.array(best[1], dtype=np.int64)


@also_right("choose")
def tries_all_where_it_can(layers, budget):
    if len(layers) > 10:
        return (k for k in right_choice(layers, budget))
    fits = [mine for mine in every(len(layers)) if peak(layers, mine) <= budget]
    return dict.fromkeys(min(fits, key=lambda mine: flops(layers, mine))).keys()  # ValueError where there is none


@also_right("choose")
def with_a_cache(layers, budget):
    class Nothing(ValueError):
        pass

    @cache
    def least(k, held):
        if k == len(layers):
            return 0, ()
        if held + layers[k].saved > budget:
            return None
        kept, again = least(k + 1, held + layers[k].saved), least(k + 1, held + layers[k].input)
        again = again and (again[0] + layers[k].forward, (k, *again[1]))
        return min(filter(None, (kept, again)), default=None)

    if (found := least(0, 0)) is None:
        raise Nothing("nothing fits")
    return list(found[1])


def every(n):
    return [mine for count in range(n + 1) for mine in combinations(range(n), count)]


def one_after_the_other(layers, budget, key=None):
    """Until it fits. key: of a layer, those with the least come first."""
    mine = []
    for k in sorted(range(len(layers)), key=lambda k: key(layers[k]) if key else k):
        if peak(layers, mine) > budget:
            mine.append(k)
    if peak(layers, mine) > budget:
        raise ValueError("nothing fits")
    return mine


def least_of(layers, fits, key):
    """Of all choices, where they can be tried."""
    found = [right_choice(layers, 800)] if len(layers) > 10 else [mine for mine in every(len(layers)) if fits(mine)]
    return min(found, key=key)


def where_nothing_fits(layers, budget, instead):
    try:
        return right_choice(layers, budget)
    except ValueError:
        return instead()


chooses_none = choice("without checkpoints everything is kept: choose layers until peak(layers, chosen) is within the budget")(
    lambda layers, budget: set()
)
chooses_all = choice(f"all layers are chosen, and a part of them is enough: {TABLE}", 0.8)(
    lambda layers, budget: range(len(layers))
)
chooses_the_last_too = choice(
    "the last layer's checkpoint frees nothing: backward begins there, and needs all that it saves", 1.2
)(lambda layers, budget: {*(mine := right_choice(layers, budget)), *[len(layers) - 1][: len(mine)]})
frees_most_bytes_first = choice(f"what frees most bytes is not what costs least: {GREEDY}", 1.2)(
    lambda layers, budget: one_after_the_other(layers, budget, lambda layer: layer.input - layer.saved)
)
frees_most_a_flop_first = choice(f"the last layer's checkpoint frees nothing, whatever it seems to free; and {GREEDY}", 1.2)(
    lambda layers, budget: one_after_the_other(layers, budget, lambda layer: (layer.input - layer.saved) / layer.forward)
)
takes_the_cheapest_first = choice(f"the cheapest layers may free little, and a part of them is enough. {GREEDY}", 1.2)(
    lambda layers, budget: one_after_the_other(layers, budget, lambda layer: layer.forward)
)
goes_from_the_front = choice(f"the first layers are chosen until it fits: {GREEDY}", 1.2)(one_after_the_other)
chooses_the_fewest = choice(f"it is not the number of layers that counts, but their FLOPs: {TABLE}", 1.2)(
    lambda layers, budget: least_of(layers, lambda mine: peak(layers, mine) <= budget, len)
)
frees_as_much_as_it_can = choice(f"what counts is the FLOPs: where less is freed, less is computed again. {TABLE}", 1.2)(
    lambda layers, budget: min((held, way) for held, way in table(layers, budget).items())[1][1]
)
counts_the_end_of_forward = choice(END)(
    lambda layers, budget: least_of(
        layers,
        lambda mine: sum(layer.input if k in mine else layer.saved for k, layer in enumerate(layers)) <= budget,
        lambda mine: flops(layers, mine),
    )
)
ignores_the_budget = choice(says=WITHIN)(lambda layers, budget: set(range(0, len(layers), 2)))
allows_a_little_more = choice(says=WITHIN)(lambda layers, budget: right_choice(layers, budget * 1.1))
leaves_no_byte_free = choice("a choice that holds just the budget fits, too: <=, not <", 0.4)(
    lambda layers, budget: right_choice(layers, budget - 1)
)
counts_from_one = choice("layers are counted from 0: with 1 less, your numbers would be right", 0.4)(
    lambda layers, budget: {k + 1 for k in right_choice(layers, budget)}
)
returns_those_that_are_kept = choice("return the layers to checkpoint, not those that keep everything", 0.4)(
    lambda layers, budget: {*range(len(layers))} - {*right_choice(layers, budget)}
)
always_raises = choice("ValueError is for a budget in which nothing fits", 0.4)(lambda layers, budget: int("nothing fits"))
returns_none_where_nothing_fits = choice(NOTHING_FITS, 3.6)(
    lambda layers, budget: where_nothing_fits(layers, budget, lambda: None)
)
chooses_all_where_nothing_fits = choice(NOTHING_FITS, 3.6)(
    lambda layers, budget: where_nothing_fits(layers, budget, lambda: range(len(layers)))
)
raises_something_else = choice(NOTHING_FITS, 3.6)(lambda layers, budget: where_nothing_fits(layers, budget, lambda: [][0]))
returns_booleans = choice(says="not a list of yes and no")(
    lambda layers, budget: [k in right_choice(layers, budget) for k in range(len(layers))]
)
returns_flops = choice(says="return the numbers of the layers")(
    lambda layers, budget: flops(layers, right_choice(layers, budget))
)


@choice(GREEDY, 1.2)
def drops_the_dearest_first(layers, budget):
    """From all; right for the short chains."""
    mine = set(range(len(layers)))
    if peak(layers, mine) > budget:
        raise ValueError("nothing fits")
    for k in sorted(mine, key=lambda k: -layers[k].forward):
        mine -= {k} if peak(layers, mine - {k}) <= budget else set()
    return mine


@choice(f"40 layers have 2 to the 40 choices, too many to try each: {TABLE}", 1.14)
def tries_all(layers, budget):
    time.sleep(60 * (len(layers) > 10))  # so it would seem
    return least_of(layers, lambda mine: peak(layers, mine) <= budget, lambda mine: flops(layers, mine))


# Task 5


@right("shared_checkpoint")
class RightShares:
    """Each other answer changes a step."""

    task = "shared_checkpoint"

    def __call__(self, function, x, group):
        rank, t, shape = self.rank(group), self.size(group), x.shape
        pack = lambda x: self.share(self.flat(x), rank, t)  # noqa: E731
        return self.run(function, x, pack, lambda share: self.cut(self.gather(share, t, group), shape))

    def run(self, function, x, pack, unpack):
        with saved_tensors_hooks(pack, unpack):
            return self.checkpoint(function, x)

    def checkpoint(self, function, x):
        return Right()(function, x)

    def rank(self, group):
        return dist.get_rank(group)

    def size(self, group):
        return dist.get_world_size(group)

    def flat(self, x):
        return x.detach().flatten()

    def share(self, flat, rank, t):
        return padded(flat, t).view(t, -1)[rank].clone()

    def gather(self, share, t, group):
        row = share.new_empty(t * len(share))
        dist.all_gather_single(row, share, group=group)
        return row

    def cut(self, row, shape):
        return row[: shape.numel()].view(shape)


def padded(flat, t):
    return nn.functional.pad(flat, (0, -len(flat) % t))


@also_right("shared_checkpoint")
class SharesByLists(RightShares):
    def gather(self, share, t, group):
        parts = [torch.empty_like(share) for _ in range(t)]
        dist.all_gather(parts, share, group=group)
        return torch.cat(parts)


@also_right("shared_checkpoint")
class SharesAsynchronously(RightShares):
    def flat(self, x):
        return x.flatten()

    def share(self, flat, rank, t):
        share = flat.new_zeros(-(-len(flat) // t))
        own = flat[rank * len(share) :][: len(share)]
        share[: len(own)] = own
        return share

    def gather(self, share, t, group):
        row = share.new_empty(t * len(share))
        dist.all_gather_into_tensor(row, share, group=group, async_op=True).wait()
        return row


@also_right("shared_checkpoint")
class SharesByANode(RightShares):
    def run(self, function, x, pack, unpack):
        return Sharing(pack, unpack)(function, x)


class Sharing(Right):
    def __init__(self, pack, unpack):
        self.pack, self.unpack = pack, unpack

    def save(self, ctx, x):
        ctx.save_for_backward(self.pack(x))

    def saved(self, ctx):
        return self.unpack(ctx.saved_tensors[0])


class SavesTheState(Right):
    """With x, for pack to see."""

    def save(self, ctx, x):
        ctx.save_for_backward(x, ctx.state)

    def restore(self, ctx):
        torch.set_rng_state(self.state)

    def saved(self, ctx):
        x, self.state = ctx.saved_tensors
        return x


@also_right("shared_checkpoint")
class PacksXOnly(RightShares):
    """Beside a checkpoint that saves its random state with x; nothing where nobody goes backward."""

    def run(self, function, x, pack, unpack):
        if not torch.is_grad_enabled():
            return function(x)
        pack_x = lambda tensor: (pack(tensor),) if tensor.is_floating_point() else tensor  # noqa: E731
        unpack_x = lambda kept: unpack(kept[0]) if isinstance(kept, tuple) else kept  # noqa: E731
        with saved_tensors_hooks(pack_x, unpack_x):
            return SavesTheState()(function, x)


CLOSURE = "a share has 1/t of x, and here all of it is kept: in a closure, on ctx, in a list or an array?"
FRONT = "the padding comes at the end: cut it off there, the first elements are x's"
GROUP = "gather within the group: dist.get_rank(group), dist.get_world_size(group), and group=group in the call"
ORDER = "the shares come back in another order: rank r of the group keeps share r, from the front"
PAD = (
    "t need not divide x's elements: pad with zeros to a multiple of t first, and cut the padding off before view, for the "
    "first x.numel() elements are x's. And only x goes in shares: a random state that is saved must pass `pack` as it is"
)
ORDINARY = "this is an ordinary call: nothing runs again, and each rank keeps all that the function computes"
NOT_SHARED = "nothing was gathered: each rank keeps all of x, and only its share is asked for"
GONE = (
    "when backward is over, neither x nor a share is needed any more: is a gathered x, or a share, in a list, in a closure or "
    "on ctx?"
)
shares = partial(slip, "shared_checkpoint")

shares_nothing = shares(ORDINARY, 1.0)(lambda function, x, group: function(x))
keeps_all_of_x = shares(NOT_SHARED, 1.0)(lambda function, x, group: Right()(function, x))
KeepsAView = changed(
    RightShares,
    "the share is a view, which keeps all of x: clone() it",
    3.0,
    share=lambda self, flat, r, t: padded(flat, t).chunk(t)[r],
)
TakesEveryTthElement = changed(RightShares, ORDER, 2.0, share=lambda self, flat, rank, t: padded(flat, t)[rank::t].clone())
TakesTheNextRanksShare = changed(
    RightShares, ORDER, 2.0, rank=lambda self, group: (dist.get_rank(group) + 1) % dist.get_world_size(group)
)
PadsAtTheFront = changed(
    RightShares, FRONT, 2.0, share=lambda self, flat, rank, t: padded(flat.flip(0), t).flip(0).view(t, -1)[rank].clone()
)
CutsAtTheFront = changed(RightShares, FRONT, 2.0, cut=lambda self, row, shape: row[len(row) - shape.numel() :].view(shape))
NeverCuts = changed(RightShares, PAD, cut=lambda self, row, shape: row.view(shape))
ReshapesWithoutPadding = changed(RightShares, PAD, share=lambda self, flat, rank, t: flat.reshape(t, -1)[rank].clone())
TakesTheStateForX = changed(RightShares, PAD, checkpoint=lambda self, function, x: SavesTheState()(function, x))
CutsUnevenly = changed(
    RightShares,
    "",
    0,
    "shares have the same size on all ranks",
    share=lambda self, flat, rank, t: flat.tensor_split(t)[rank].clone(),
)
RepeatsItsOwn = changed(
    RightShares,
    "that is this rank's own share, t times: gather the others'",
    2.0,
    gather=lambda self, share, t, group: share.repeat(t),
)
AsksTheGroup = changed(RightShares, "", 0, "group may be None, for all ranks", size=lambda self, group: group.size())
ViewsX = changed(
    RightShares,
    "x need not be contiguous: flatten() or reshape(-1) in place of view(-1)",
    flat=lambda self, x: x.detach().view(-1),
)
IgnoresTheGroup = changed(
    RightShares, GROUP, 2.0, "", (4,), __call__=lambda self, function, x, group: RightShares.__call__(self, function, x, None)
)
TakesTheWorldsRank = changed(RightShares, GROUP, 0, "", (4,), rank=lambda self, group: dist.get_rank())
ForgetsTheGroupInTheGather = changed(
    RightShares,
    f"an all-gather's output has t times as many elements as its input; {GROUP}",
    0,
    "",
    (4,),
    gather=lambda self, share, t, group: RightShares.gather(self, share, t, None),
)
SharesWithNothingMore = changed(
    RightShares, "", 3.33, ANCHOR, checkpoint=lambda self, function, x: GivesApplyNothingMore()(function, x)
)
FailsWhereNothingLearnsOnRanks = changed(
    RightShares, LEARNS, 3.33, checkpoint=lambda self, function, x: FailsWhereNothingLearns()(function, x)
)
DoesNotRestoreOnRanks = changed(
    RightShares, "", 2.0, RESTORE, checkpoint=lambda self, function, x: DoesNotRestore()(function, x)
)


@shares("all that the function computes is gathered: only x goes in shares, and backward has to run the function again", 1.0)
class SharesAllActivations(RightShares):
    def run(self, function, x, pack, unpack):
        whole = lambda kept: self.cut(self.gather(kept[0], dist.get_world_size(), None), kept[1])  # noqa: E731
        with saved_tensors_hooks(lambda tensor: (pack(tensor), tensor.shape), whole):
            return function(x)


@shares("forward only takes the rank's own share: the gather belongs into backward, when x is needed", 1.0)
class GathersInForward(RightShares):
    def run(self, function, x, pack, unpack):
        KEPT.append(unpack(pack(x)))
        return Right()(function, x)


@shares(CLOSURE, 3.0)
class KeepsXInAClosure(RightShares):
    def run(self, function, x, pack, unpack):
        own = x.detach().numpy().copy()
        return super().run(function, x, pack, lambda share: unpack(share) if len(own) else own)


@shares("each rank puts in its share, and gets all of them: yours is the whole x, or as large", 1.5)
class GathersWholes(RightShares):
    def share(self, flat, rank, t):
        return flat.clone()

    def gather(self, share, t, group):
        return super().gather(share, t, group)[: len(share)]


@shares("an all-reduce sends twice the bytes: dist.all_gather_single brings all shares at once", 3.5)
class AllReduces(RightShares):
    def gather(self, share, t, group):
        row = share.new_zeros(t * len(share))
        row.view(t, -1)[dist.get_rank(group)] = share
        dist.all_reduce(row, group=group)
        return row


@shares("if one rank keeps x for all, its memory is full first: each keeps a share, and one all-gather brings them", 1.5)
class BroadcastsFromTheFirst(RightShares):
    def share(self, flat, rank, t):
        self.elements = len(flat)
        return flat[: len(flat) * (rank == 0)].clone()

    def gather(self, share, t, group):
        row = share if len(share) else share.new_empty(self.elements)
        dist.broadcast(row, 0, group=group)
        return row


@shares(
    "one gather for each checkpoint, when backward comes to it. Each look at ctx.saved_tensors calls unpack again: look once, "
    "x, state = ctx.saved_tensors",
    3.0,
)
class GathersTwice(RightShares):
    def gather(self, share, t, group):
        super().gather(share, t, group)
        return super().gather(share, t, group)


@shares(says=".wait() on it", points=2.0)
class NeverWaits(RightShares):
    def gather(self, share, t, group):
        row = share.new_zeros(t * len(share))
        dist.all_gather_single(row, share, group=group, async_op=True)
        return row


@shares("elements // t leaves the last elements out: a share has ⌈elements / t⌉, the last one padded with zeros", 2.0)
class LeavesTheRestOut(RightShares):
    def share(self, flat, rank, t):
        return flat[: len(flat) // t * t].view(t, -1)[rank].clone()

    def cut(self, row, shape):
        return nn.functional.pad(row, (0, shape.numel() - len(row))).view(shape)


@shares("few elements make fewer chunks than t: pad with zeros to a multiple of t first", 1.67)
class CutsChunks(RightShares):
    def share(self, flat, rank, t):
        chunk = flat.chunk(t)[rank]
        return nn.functional.pad(chunk, (0, -(-len(flat) // t) - len(chunk))).clone()


@shares(says=GROUP, points=3.5, on=(4,))
class GathersInTheWorld(RightShares):
    """And takes the group's part."""

    def gather(self, share, t, group):
        row = super().gather(share, dist.get_world_size(), None)
        return row.view(-1, t, len(share))[dist.get_rank() // t].flatten()


@shares(says="float64 has to stay float64 on its way", points=2.0)
class SendsFloat32(RightShares):
    def share(self, flat, rank, t):
        return super().share(flat, rank, t).float()

    def cut(self, row, shape):
        return super().cut(row.double(), shape)


@shares("all gathers come with the first checkpoint's: each one gathers when backward comes to it, one x at a time", 4.0)
class GathersAllAtTheFirst(RightShares):
    def __init__(self):
        self.mine, self.ready = [], {}

    def run(self, function, x, pack, unpack):
        number, shape = len(self.mine), x.shape
        self.mine.extend([pack(x)] * torch.is_grad_enabled())

        def ready(nothing):
            if number not in self.ready:
                self.ready |= {k: unpack(self.mine[k]) for k in reversed(range(number + 1))}
            return self.ready.pop(number).view(shape)

        return super().run(function, x, lambda x: None, ready)


@shares("under torch.no_grad() nothing is sent, nor kept: just call the function", 3.5)
class GathersUnderNoGrad(RightShares):
    def run(self, function, x, pack, unpack):
        if not torch.is_grad_enabled():
            unpack(pack(x))
        return super().run(function, x, pack, unpack)


@shares(NO_GRAD, 3.0)
class KeepsSharesUnderNoGrad(RightShares):
    def run(self, function, x, pack, unpack):
        KEPT.extend([x.clone()] * (not torch.is_grad_enabled()))
        return super().run(function, x, pack, unpack)


@shares(GONE, 4.5)
class KeepsWhatItGathers(RightShares):
    def cut(self, row, shape):
        KEPT.append(super().cut(row, shape))
        return KEPT[-1]


@shares(GONE, 4.5)
class HangsItOnTheContext(RightShares):
    def run(self, function, x, pack, unpack):
        class Hanging(Sharing):
            def saved(self, ctx):
                ctx.whole = super().saved(ctx)
                return ctx.whole

        return Hanging(pack, unpack)(function, x)


@shares(says="shares have the same size on all ranks")
class RankZeroGathersAlone(RightShares):
    def gather(self, share, t, group):
        return super().gather(share, t, group) if dist.get_rank() == 0 else share.repeat(t)


for _name, _answer in list(globals().items()):
    if "__answers__" in getattr(_answer, "__dict__", {}):
        _answer.__name__ = _name
