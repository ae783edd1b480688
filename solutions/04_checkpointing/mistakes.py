"""Answers to 04_checkpointing: what is right, and the mistakes that are made."""

import math
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial, reduce
from itertools import combinations, count

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from manyranks.grade.answers import also_right, mistake, right

# fmt: off

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
    nodes = [y.grad_fn]
    for node in nodes:
        nodes += [before for before, _ in getattr(node, "next_functions", ()) if before not in nodes]
    return [node.variable for node in nodes if hasattr(node, "variable")]

def drawing_from(state, function, x):
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(state)
        return function(x)

@also_right("checkpoint")
class Forks(Right):
    """Random numbers by fork_rng, gradients by autograd.grad, parameters looked up in the graph."""

    def backward(self, ctx, grad):
        x = self.leaf(ctx)
        with torch.enable_grad():
            y = drawing_from(ctx.state, ctx.function, x)
        if not y.requires_grad:
            return None
        mine, others = [x] * x.requires_grad, [leaf for leaf in leaves(y) if leaf is not x]
        grads = torch.autograd.grad(y, [*mine, *others], grad)
        for leaf, found in zip(others, grads[len(mine) :], strict=True):
            leaf.grad = found if leaf.grad is None else leaf.grad + found
        return grads[0] if mine else None

@also_right("checkpoint")
class DropsX(Right):
    """x is on ctx, and off it in time, and the state is saved; in place of something more, x itself is a leaf."""

    def __call__(self, function, x):
        return Node.apply(self, function, x if x.requires_grad else x.detach().requires_grad_())

    def save(self, ctx, x):
        ctx.x = x.detach()
        ctx.save_for_backward(ctx.state)

    def leaf(self, ctx):
        x, ctx.x, (ctx.state,) = ctx.x, None, ctx.saved_tensors
        return x.requires_grad_()

@also_right("checkpoint")
def knows_parameters(function, x):
    """They are inputs of a node in the newer form; gradients are its results, as the chapter's are."""
    if not torch.is_grad_enabled():
        return function(x)
    state = torch.get_rng_state()
    with saved_tensors_hooks(lambda tensor: None, lambda nothing: nothing):
        y = function(given := x.detach().requires_grad_(x.requires_grad))
    others = [leaf for leaf in leaves(y) if leaf is not given]

    class Own(torch.autograd.Function):
        @staticmethod
        def forward(y, x, *others):
            return y

        @staticmethod
        def setup_context(ctx, given, output):
            ctx.save_for_backward(given[1])

        @staticmethod
        @torch.autograd.function.once_differentiable
        @torch.enable_grad()
        def backward(ctx, grad):
            x = ctx.saved_tensors[0].detach().requires_grad_(ctx.needs_input_grad[1])
            y = drawing_from(state, function, x)
            found = iter(torch.autograd.grad(y, [*[x] * x.requires_grad, *others], grad))
            return None, next(found) if x.requires_grad else None, *found

    return Own.apply(y.detach(), x, *others) if y.requires_grad else y

@slip("checkpoint", says="not judged, because the work wasn't done")
def never_goes_back(function, x):
    with torch.no_grad():
        y = function(x)
    return y.requires_grad_(torch.is_grad_enabled())

@slip("checkpoint", points=2.8, says="under torch.no_grad(), the result under no_grad: element 0 is")
def first_row_only(function, x):
    return Right()(function, x) if torch.is_grad_enabled() else function(x)[:1].expand(len(x), -1)

@also_right("checkpoint")
class Packs:
    """By saved_tensors_hooks."""

    def __call__(self, function, x):
        if not torch.is_grad_enabled():
            return function(x)
        state, found, places = torch.get_rng_state(), {}, count()

        def unpack(place):
            if not found:
                again = []
                with torch.enable_grad(), saved_tensors_hooks(lambda tensor: again.append(tensor.detach()), lambda none: none):
                    drawing_from(state, function, x.detach().requires_grad_(x.requires_grad))
                found.update(enumerate(again))
            return found.pop(place)

        with saved_tensors_hooks(lambda tensor: next(places), unpack):
            return function(x)

ANCHOR = "give it one more, torch.empty(0, requires_grad=True)"
EVERYTHING = (
    "what the function computes in forward is kept somewhere, as large as without a checkpoint: where autograd is off, as "
    "inside a torch.autograd.Function's forward, the function leaves nothing. Keep x and nothing else"
)
HELD = "x is still held when backward is over: save_for_backward lets it go then, ctx's attributes and lists do not"
LEARNS = "nothing needs a gradient here, and the second run has no backward: ask y.requires_grad"
NO_LEAF = "x gets no gradient: the second run needs a leaf, x.detach().requires_grad_(), and backward returns its .grad"
OFF = (
    "autograd is off inside backward: run the function again under torch.enable_grad(), and call backward on its result y "
    "with grad; a sum of y taken outside has no graph, and grad belongs to y"
)
PARAMETERS = "the parameters get no gradient: torch.autograd.backward(y, grad), of the second run, gives it to all"
QUIET = "nothing gets a gradient: the second run has no graph. Autograd is off in backward: run it under torch.enable_grad()"
RESTORE, SEEDS = "backward's run draws other random numbers than forward's", "from where they are: no seeds and no fork_rng"
TWICE = "something went backward twice: run on a leaf of your own, x.detach().requires_grad_(), and go back once, for all"
COPY = "x itself is enough: a copy takes the same bytes once more where somebody else holds x, too"
ONES = "backward gets the gradient of the result: start from it, not from ones"

def at_once(self, ctx, y, grad, x):
    torch.autograd.backward(y, grad)
    return x.grad

def from_ones(self, ctx, y, grad, x):
    return Right.gradient(self, ctx, y, torch.ones_like(grad), x)

def seeded(self, ctx, *function_and_x):
    torch.manual_seed(0)
    return function_and_x[0](function_and_x[1]) if function_and_x else None

DetachesTheInput = changed(Right, NO_LEAF, 2.8, leaf=lambda self, ctx: self.saved(ctx).detach())
DoesNotDetach = changed(Right, TWICE, leaf=lambda self, ctx: self.saved(ctx))
FailsWhereNothingLearns = changed(Right, LEARNS, 5.83, gradient=at_once)
RecomputesWithoutGradients = changed(Right, OFF, again=lambda self, ctx, x: ctx.function(x), gradient=at_once)
IsQuietWithoutGradients = changed(Right, QUIET, 2.8, again=lambda self, ctx, x: ctx.function(x))
ForgetsTheParameters = changed(
    Right,
    PARAMETERS,
    2.8,
    gradient=lambda self, ctx, y, grad, x: torch.autograd.grad(y, x, grad)[0] if x.requires_grad else None,
)
StartsFromOnes = changed(Right, ONES, 2.8, gradient=from_ones)
GivesApplyNothingMore = changed(Right, "", 4.67, ANCHOR, more=lambda self: [])
NeverPutsBack = changed(Right, "", 2.8, "random numbers start again from an earlier place", put_back=lambda self, now: None)
DoesNotRestore = changed(NeverPutsBack, "", 2.8, RESTORE, restore=lambda self, ctx: None)
KeepsACopy = changed(Right, COPY, 3.85, save=lambda self, ctx, x: ctx.save_for_backward(x.clone()))

@slip("checkpoint", "backward comes to the results in any order: keep x on ctx, not on a stack that all calls share", 2.8)
class OnOneStack(Right):
    stack, on = [], True

    def __call__(self, function, x):
        self.on = torch.is_grad_enabled()
        return super().__call__(function, x)

    def save(self, ctx, x):
        self.stack += [x.detach()] * self.on

    def saved(self, ctx):
        return self.stack.pop()

# Two mistakes at once: the report names a cause first.
TheChaptersFirstNode = changed(DoesNotRestore, "", 1.87, RESTORE, also=[GivesApplyNothingMore])
SeedsAndStartsFromOnes = changed(StartsFromOnes, "", 2.8, SEEDS, first=seeded, restore=seeded)
one = partial(slip, "checkpoint")
does_nothing = one("this is an ordinary call: backward has to run the function again, from x alone", 1.75)(lambda f, x: f(x))
HangsXOnTheContext = changed(
    Right, HELD, 6.3, save=lambda self, ctx, x: setattr(ctx, "x", x.detach()), saved=lambda self, ctx: ctx.x
)

@one("leave x as it is, also its requires_grad: work on x.detach()", 2.8)
def makes_x_want_a_gradient(function, x):
    return Right()(function, x.requires_grad_() if torch.is_grad_enabled() and x.is_leaf else x)

@one(EVERYTHING, 1.75)
class KeepsTheGraph(Right):
    """On ctx; backward only goes through it."""

    def forward(self, ctx, function, x):
        with torch.enable_grad():
            ctx.leaf = x.detach().requires_grad_(x.requires_grad)
            ctx.y = function(ctx.leaf)
        return ctx.y.detach()

    def backward(self, ctx, grad):
        return self.gradient(ctx, ctx.y, grad, ctx.leaf)

@one(
    "what backward's run computes is not used: the gradients come from what forward has kept somewhere, in tensors, arrays or "
    "files. Go backward through the second run's graph, and keep x only",
    1.75,
)
def keeps_files(function, x):
    def pack(tensor):
        torch.save(tensor.detach(), file := tempfile.TemporaryFile(buffering=0))
        return file

    def load(file):
        file.seek(0)
        return torch.load(file)

    if not torch.is_grad_enabled():
        return function(x)
    with saved_tensors_hooks(pack, load):
        y, kept = function(x), pack(x)
    if y.requires_grad:
        again = torch.no_grad()(function)
        y.register_hook(lambda grad: drawing_from(torch.get_rng_state(), again, load(kept)).sum() * 0 + grad)
    return y

@one("a list of numbers takes four times the bytes of x: keep x itself, and nothing else", 3.85)
class KeepsXAsAList(Right):
    def save(self, ctx, x):
        ctx.list = x.tolist()

    def saved(self, ctx):
        return torch.tensor(ctx.list, dtype=torch.float64)

@one(says="checkpoint is not allowed")
def torchs_own_with_another_thread(function, x):
    from torch.utils.checkpoint import checkpoint

    return checkpoint(lambda x: ThreadPoolExecutor().submit(function, x).result(), x, use_reentrant=True)

# Task 2

SEGMENTS = "10 layers are round(√10) = 3 segments, of 4, 3 and 3 layers: the longer ones first, and they differ by one"
LAST = "backward begins with the last segment: leave it without a checkpoint, what it keeps is needed at once"
EACH = f"each layer is a checkpoint of its own, and all inputs are kept: a checkpoint takes a segment. {SEGMENTS}"
DOWN = "√7 is 2.6, and round(√7) is 3: math.isqrt and int() round down. 7 layers are 3, 2 and 2"
THREE = "the number of segments depends on L, it is not always 3: 2 layers are round(√2) = 1 segment, and no checkpoint"
CHUNKS = f"segments of one size leave a shorter one at the end, which differs by more than one layer: {SEGMENTS}"
NONE = "no layer is in a checkpoint: every segment but the last is one call of checkpoint, and runs again"
ONE = "with L = 1 there is no checkpoint: the only segment is the last"
REST = "L // C layers per segment leave the last L % C out: the first L % C segments have one more"
sqrt = partial(slip, "checkpoint_sqrt")

def in_turn(layers, x):
    return reduce(lambda x, layer: layer(x), layers, x)

def lengths_of(n, rounded=round):
    size, longer = divmod(n, parts := rounded(math.sqrt(n)))
    return [size + (k < longer) for k in range(parts)]

def in_segments(lengths=lengths_of, last=False):
    """An answer. lengths: of the segments of n layers; last: whether the last one is in a checkpoint, too."""

    def answer(checkpoint, layers, x):
        parts = lengths(len(layers))
        for number, length in enumerate(parts):
            segment, layers = partial(in_turn, layers[:length]), layers[length:]
            x = checkpoint(segment, x) if last or number < len(parts) - 1 else segment(x)
        return x

    return answer

right_sqrt = right("checkpoint_sqrt")(in_segments())
with_its_own_checkpoint = also_right("checkpoint_sqrt")(lambda checkpoint, layers, x: right_sqrt(Right(), layers, x))

@also_right("checkpoint_sqrt")
def by_numpys_array_split(checkpoint, layers, x):
    parts = [list(part) for part in np.array_split(np.array(layers, dtype=object), len(lengths_of(len(layers))))]
    for part in parts[:-1]:
        x = checkpoint(lambda x, part=part: in_turn(part, x), x)
    return in_turn(parts[-1], x)

keeps_all_layers = sqrt(NONE, 0.4)(in_segments(lambda n: [n]))
checkpoints_the_last_too = sqrt(LAST, 1.2)(in_segments(last=True))
makes_one_checkpoint_of_all = sqrt(f"all layers are in one: {SEGMENTS}", 0.8)(in_segments(lambda n: [n], True))
makes_each_layer_a_checkpoint = sqrt(f"{EACH}; and the last is in none", 1.2)(in_segments(lambda n: [1] * n, True))
makes_each_but_the_last_a_checkpoint = sqrt(EACH, 0.8)(in_segments(lambda n: [1] * n))
has_the_shorter_ones_first = sqrt(f"the other way round: {SEGMENTS}", 0.8)(in_segments(lambda n: lengths_of(n)[::-1]))
rounds_down = sqrt(DOWN, 0.4)(in_segments(lambda n: lengths_of(n, math.floor)))
rounds_down_with_the_last = sqrt(f"{DOWN}. And {LAST}", 0.8)(in_segments(lambda n: lengths_of(n, math.floor), True))
makes_three_segments = sqrt(THREE, 1.2)(in_segments(lambda n: lengths_of(n, lambda root: min(3, n))))
leaves_the_rest_out = sqrt(REST, 0.8)(in_segments(lambda n: [n // len(lengths_of(n))] * len(lengths_of(n))))
checkpoints_a_single_layer = sqrt(ONE, 1.2)(lambda c, layers, x: in_segments(last=len(layers) == 1)(c, layers, x))
runs_nothing = sqrt(says="not judged, because the work wasn't done")(lambda checkpoint, layers, x: x * 1)
has_the_arguments_the_other_way_round = sqrt(says="the function comes first")(lambda c, layers, x: c(x, layers[0]))

@sqrt(CHUNKS, 1.2)
def cuts_chunks_of_the_ceiling(checkpoint, layers, x):
    size = -(-len(layers) // len(lengths_of(len(layers))))
    return in_segments(lambda n: [min(size, n - first) for first in range(0, n, size)])(checkpoint, layers, x)

@sqrt("backward runs other layers than forward: a lambda in a loop sees its variables' last values; a partial binds", 0.8)
def binds_late(checkpoint, layers, x):
    lengths = lengths_of(len(layers))
    for k, length in enumerate(lengths):
        segment, layers = layers[:length], layers[length:]
        x = checkpoint(lambda x: in_turn(segment, x), x) if k < len(lengths) - 1 else in_turn(segment, x)  # noqa: B023
    return x

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

def first_two(layer, x):
    return layer.core(layer.project(x))

keeps_the_scores = core(SCORES, 0.3)(lambda c, layer, x: layer.output(first_two(layer, x)))
checkpoints_the_whole = core(f"not all of it: {MORE}", 0.6)(
    lambda c, layer, x: c(lambda x: layer.output(first_two(layer, x)), x)
)
begins_too_early = core(f"it begins too early. {MORE}", 0.6)(lambda c, layer, x: layer.output(c(partial(first_two, layer), x)))
ends_too_late = core(f"it ends too late. {MORE}", 0.6)(
    lambda c, layer, x: c(lambda y: layer.output(layer.core(y)), layer.project(x))
)
gives_the_cores_result = core(says="and not what the core returns")(lambda c, layer, x: layer.output(c(first_two(layer, x), x)))

@core("no gradient comes through no_grad, or through detach: a checkpoint of the core is what autograd has to see")
def runs_the_core_under_no_grad(checkpoint, layer, x):
    qkv = layer.project(x)
    with torch.no_grad():
        context = layer.core(qkv)
    return layer.output(context)

# Task 4

TABLE = (
    "go through the layers once; keep, for each number of bytes that may be held by now, the least FLOPs with which it can be "
    "had, and from which choice"
)
GREEDY = f"taking one layer after the other, the best by some measure first, can miss the best choice: {TABLE}"
NOTHING_FITS = "where nothing fits, raise ValueError: not even what holds least at each layer is within the budget"
OTHERS = "return the layers to checkpoint; yours are the ones that keep everything: return the others"
KEEPS = "without checkpoints everything is kept: choose layers until peak(layers, chosen) is within the budget"
FREES = "the last layer's checkpoint frees nothing: backward begins there, and needs at once all that it saves"
END = "peak(layers, chosen) counts more than what is held when forward ends: in backward, layer k holds all that it saves"
choice = partial(slip, "choose")

def peak(layers, chosen):
    most = held = 0
    for k, layer in enumerate(layers):
        most = max(most, held + layer.saved)
        held += layer.input if k in chosen else layer.saved
    return most

def flops(layers, chosen):
    return sum(layers[k].forward for k in chosen)

@right("choose")
def right_choice(layers, budget):
    ways = {0: (0, ())}  # bytes held -> FLOPs and choice
    for k, layer in enumerate(layers):
        found = {}
        for held, (cost, chosen) in ways.items():
            for more, way in ((layer.saved, (cost, chosen)), (layer.input, (cost + layer.forward, (*chosen, k)))):
                if held + layer.saved <= budget:
                    found[held + more] = min(found.get(held + more, way), way)
        ways = found
    return min(ways.values())[1]  # ValueError where there is none

@also_right("choose")
def with_a_cache(layers, budget):
    """From the back; an array, or a generator."""

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
    return np.array(found[1], dtype=np.int64) if len(layers) > 10 else (k for k in found[1])

def least_of(layers, budget, held=peak, cost=flops):
    """Of all choices, where they can be tried: the one that fits with the least cost."""
    if len(layers) > 10:
        return right_choice(layers, budget)
    every = (mine for size in range(len(layers) + 1) for mine in combinations(range(len(layers)), size))
    return min((mine for mine in every if held(layers, mine) <= budget), key=lambda mine: cost(layers, mine))

def one_after_the_other(layers, budget, key):
    """Until it fits."""
    mine = []
    for k in sorted(range(len(layers)), key=lambda k: key(layers[k])):
        mine += [k] if peak(layers, mine) > budget else []
    return mine if peak(layers, mine) <= budget else min([])

chooses_none = choice(KEEPS)(lambda layers, budget: set())
chooses_the_fewest = choice(f"FLOPs count, not the number of layers: {TABLE}", 1.2)(
    lambda layers, budget: least_of(layers, budget, cost=lambda layers, mine: len(mine))
)
frees_most_a_flop_first = choice(f"{FREES}; and {GREEDY}", 1.2)(
    lambda layers, budget: one_after_the_other(layers, budget, lambda layer: (layer.input - layer.saved) / layer.forward)
)
allows_a_little_more = choice(says="must be within the budget")(lambda layers, budget: right_choice(layers, budget * 1.1))
leaves_no_byte_free = choice("a choice that holds just the budget fits, too: <=, not <", 0.4)(
    lambda layers, budget: right_choice(layers, budget - 1)
)
counts_from_one = choice("layers are counted from 0: subtract 1 from each of yours", 0.4)(
    lambda layers, budget: {k + 1 for k in right_choice(layers, budget)}
)
returns_the_others = choice(OTHERS, 0.4)(lambda layers, budget: {*range(len(layers))} - {*right_choice(layers, budget)})
raises_something_else = choice(NOTHING_FITS, 3.6)(
    lambda layers, budget: right_choice(layers, budget) if peak(layers, range(len(layers))) <= budget else {}[0]
)
returns_booleans = choice(says="not a list of yes and no")(
    lambda layers, budget: [k in right_choice(layers, budget) for k in range(len(layers))]
)

@choice(FREES, 1.2)
def chooses_the_last_too(layers, budget):
    mine = right_choice(layers, budget)
    return {*mine, len(layers) - 1} if mine else mine

@choice(END)
def counts_the_end_of_forward(layers, budget):
    def held(layers, mine):
        return sum(layer.input if k in mine else layer.saved for k, layer in enumerate(layers))

    return least_of(layers, budget, held)

@choice(f"40 layers have 2 to the 40 choices, too many to try each: {TABLE}", 1.14)
def tries_all(layers, budget):
    time.sleep(60 * (len(layers) > 10))  # so it would seem
    return least_of(layers, budget)

@choice(GREEDY, 1.2)
def drops_the_dearest_first(layers, budget):
    """From all; right for the short chains."""
    mine = set(range(len(layers)))
    if peak(layers, mine) > budget:
        raise ValueError("nothing fits")
    for k in sorted(mine, key=lambda k: -layers[k].forward):
        mine -= {k} if peak(layers, mine - {k}) <= budget else set()
    return mine

# Task 5

@right("shared_checkpoint")
class RightShares:
    """Each other answer changes a step."""

    task = "shared_checkpoint"

    def __call__(self, function, x, group):
        rank, t, shape = self.rank(group), dist.get_world_size(group), x.shape
        pack = lambda x: self.share(self.flat(x), rank, t)  # noqa: E731
        return self.run(function, x, pack, lambda share: self.cut(self.gather(share, t, group), shape))

    def run(self, function, x, pack, unpack):
        with saved_tensors_hooks(pack, unpack):
            return Right()(function, x)

    def rank(self, group):
        return dist.get_rank(group)

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
    """By a node of its own."""

    def run(self, function, x, pack, unpack):
        return Sharing(pack, unpack)(function, x)

    def flat(self, x):
        return x.flatten()

    def gather(self, share, t, group):
        row = share.new_empty(t * len(share))
        dist.all_gather_into_tensor(row, share, group=group, async_op=True).wait()
        return row

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
        with saved_tensors_hooks(pack_x, lambda kept: unpack(kept[0]) if isinstance(kept, tuple) else kept):
            return SavesTheState()(function, x)

FRONT = "the padding comes at the end: cut it off there, the first elements are x's"
GROUP = "gather within the group: dist.get_rank(group), dist.get_world_size(group), and group=group in the call"
ORDER = "the shares come back in another order: rank r of the group keeps share r, from the front"
PAD = (
    "t need not divide x's elements: pad with zeros to a multiple of t first, and cut the padding off before view, for the "
    "first x.numel() elements are x's. And only x goes in shares: a random state that is saved must pass `pack` as it is"
)
ORDINARY = "this is an ordinary call: nothing runs again, and each rank keeps all that the function computes"
ALL_OF_X = "nothing was gathered: each rank keeps all of x, and only its share is asked for"
FEW = "few elements make fewer chunks than t: pad with zeros to a multiple of t first"
OWN = "that is this rank's own share, t times: gather the others'"
NOT_CONTIGUOUS = "x need not be contiguous: flatten() or reshape(-1) in place of view(-1)"
shares = partial(slip, "shared_checkpoint")
shares_nothing = shares(ORDINARY, 1.0)(lambda function, x, group: function(x))
keeps_all_of_x = shares(ALL_OF_X, 1.0)(lambda function, x, group: Right()(function, x))
KeepsAView = changed(
    RightShares, "", 3.0, "A slice keeps all of x", share=lambda self, flat, rank, t: padded(flat, t).chunk(t)[rank]
)
TakesEveryTthElement = changed(RightShares, ORDER, 2.0, share=lambda self, flat, rank, t: padded(flat, t)[rank::t].clone())
CutsAtTheFront = changed(RightShares, FRONT, 2.0, cut=lambda self, row, shape: row[len(row) - shape.numel() :].view(shape))
NeverCuts = changed(RightShares, PAD, cut=lambda self, row, shape: row.view(shape))
CutsChunks = changed(
    RightShares, FEW, 1.67, share=lambda self, flat, rank, t: padded(flat.chunk(t)[rank], -(-len(flat) // t)).clone()
)
RepeatsItsOwn = changed(RightShares, OWN, 2.0, gather=lambda self, share, t, group: share.repeat(t))
ViewsX = changed(RightShares, NOT_CONTIGUOUS, flat=lambda self, x: x.detach().view(-1))
TakesTheWorldsRank = changed(RightShares, GROUP, 0, "", (4,), rank=lambda self, group: dist.get_rank())

@shares("forward only takes the rank's own share: the gather belongs into backward, when x is needed", 1.0)
class GathersInForward(RightShares):
    def run(self, function, x, pack, unpack):
        KEPT.append(unpack(pack(x)))
        return Right()(function, x)

@shares("a share has 1/t of x, and here all of it is kept: in a closure, on ctx, in a list or an array?", 3.0)
class KeepsXAsAnArray(RightShares):
    def run(self, function, x, pack, unpack):
        own = x.detach().numpy().copy()
        return super().run(function, x, pack, lambda share: unpack(share) if len(own) else own)

@shares("an all-reduce sends twice the bytes: dist.all_gather_single brings all shares at once", 3.5)
class AllReduces(RightShares):
    def gather(self, share, t, group):
        row = share.new_zeros(t * len(share))
        row.view(t, -1)[dist.get_rank(group)] = share
        dist.all_reduce(row, group=group)
        return row

@shares(says=GROUP, points=2, on=(4,))
class GathersInTheWorld(RightShares):
    """And takes the group's part."""

    def gather(self, share, t, group):
        row = super().gather(share, dist.get_world_size(), None)
        return row.view(-1, t, len(share))[dist.get_rank() // t].flatten()

@shares("when backward is over, neither x nor a share is needed any more: are they in a list, in a closure or on ctx?", 4.5)
class KeepsWhatItGathers(RightShares):
    def cut(self, row, shape):
        KEPT.append(super().cut(row, shape))
        return KEPT[-1]

for _name, _answer in list(globals().items()):
    if "__answers__" in getattr(_answer, "__dict__", {}):
        _answer.__name__ = _name
