"""Other right answers to the tasks of 04_checkpointing, which must get full marks."""

import math
from itertools import accumulate, combinations

import torch
import torch.distributed as dist
from torch.autograd.graph import saved_tensors_hooks

from tests.grading.zoo.checkpointing_kept import Packs
from tests.grading.zoo.checkpointing_right import (
    Right,
    RightShares,
    chosen,
    flops,
    in_segments,
    in_turn,
    lengths_of,
    peak,
    table,
)


class Seldom(Right):
    """Without something more for apply where x needs a gradient; nothing kept where nobody asks."""

    def __call__(self, function, x):
        if not torch.is_grad_enabled():
            return function(x)
        return super().__call__(function, x)

    def more(self):
        return [torch.zeros(1, requires_grad=True)]


class Forks(Right):
    """Random numbers by fork_rng, gradients by autograd.grad, parameters looked up in the graph."""

    def backward(self, ctx, grad):
        x = self.leaf(ctx)
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.set_rng_state(ctx.state)
            y = ctx.function(x)
        if not y.requires_grad:
            return None
        leaves = [leaf for leaf in self.leaves(y) if leaf is not x]
        x_grads = [x] if x.requires_grad else []
        grads = torch.autograd.grad(y, [*x_grads, *leaves], grad)
        for leaf, found in zip(leaves, grads[len(x_grads) :], strict=True):
            leaf.grad = found if leaf.grad is None else leaf.grad + found
        return grads[0] if x_grads else None

    def leaves(self, y):
        todo, seen, found = [y.grad_fn], set(), []
        while todo:
            node = todo.pop()
            if node is not None and node not in seen:
                seen.add(node)
                found += [node.variable] if hasattr(node, "variable") else []
                todo += [before for before, _ in node.next_functions]
        return found


class SavesTheStateToo(Right):
    """As a tensor, through autograd."""

    def save(self, ctx, x):
        ctx.save_for_backward(x, ctx.state)
        ctx.state = None

    def restore(self, ctx):
        torch.set_rng_state(ctx.saved_tensors[1])


class KnowsParameters(Right):
    """They are inputs of the node; gradients are its results, as the chapter's are."""

    def __call__(self, function, x):
        if not torch.is_grad_enabled():
            return function(x)
        state = torch.get_rng_state()
        with saved_tensors_hooks(lambda tensor: None, lambda nothing: nothing):
            y = function(given := x.detach().requires_grad_(x.requires_grad))
        if not y.requires_grad:
            return y
        leaves = [leaf for leaf in Forks().leaves(y) if leaf is not given]
        return Whole.apply(function, state, y.detach(), x, *leaves)


class Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx, function, state, y, x, *leaves):
        ctx.function, ctx.state, ctx.leaves = function, state, leaves
        ctx.save_for_backward(x)
        return y

    @staticmethod
    def backward(ctx, grad):
        x = ctx.saved_tensors[0].detach().requires_grad_(ctx.needs_input_grad[3])
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.set_rng_state(ctx.state)
            y = ctx.function(x)
        inputs = [x, *ctx.leaves] if x.requires_grad else list(ctx.leaves)
        grads = torch.autograd.grad(y, inputs, grad)
        return None, None, None, *(grads if x.requires_grad else (None, *grads))


class AlwaysALeaf(Right):
    """x's gradient is computed also where nobody wants it."""

    def leaf(self, ctx):
        return self.saved(ctx).detach().requires_grad_()


class GivesALeaf(Right):
    """In place of something more: x itself, as a leaf, where it needs no gradient."""

    def __call__(self, function, x):
        return super().__call__(function, x if x.requires_grad else x.detach().requires_grad_())

    def more(self):
        return []


class DropsX(Right):
    """On ctx, and off it in time."""

    def save(self, ctx, x):
        ctx.x = x.detach()

    def saved(self, ctx):
        x, ctx.x = ctx.x, None
        return x


class Checkpointed(torch.nn.Module):
    """A module around the function, with a hook on its result in place of a node of its own."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return Right()(self.function, x)


def by_a_module(function, x):
    return Checkpointed(function)(x)


def by_recursion(checkpoint, layers, x):
    n, lengths = len(layers), lengths_of(len(layers))

    def rest(x, first, lengths):
        if len(lengths) == 1:
            return in_turn(layers[first:], x)
        x = checkpoint(lambda x: in_turn(layers[first : first + lengths[0]], x), x)
        return rest(x, first + lengths[0], lengths[1:])

    return rest(x, 0, lengths) if n else x


def by_sequential(checkpoint, layers, x):
    """Modules of modules, bound by a default argument."""
    ends = list(accumulate(lengths_of(len(layers))))
    for first, end in zip([0, *ends], ends[:-1], strict=False):
        x = checkpoint(lambda x, part=layers[first:end]: in_turn(part, x), x)
    return in_turn(layers[ends[-2] if len(ends) > 1 else 0 :], x)


def with_its_own_checkpoint(checkpoint, layers, x):
    return in_segments(Right(), layers, x, lengths_of(len(layers)))


def with_divmod(checkpoint, layers, x):
    layers = list(layers)
    size, longer = divmod(len(layers), count := round(math.sqrt(len(layers))))
    while count > 1:
        part = [layers.pop(0) for _ in range(size + (longer > 0))]
        x = checkpoint(lambda x, part=part: in_turn(part, x), x)
        longer, count = longer - 1, count - 1
    return in_turn(layers, x)


def with_a_name_for_each(checkpoint, layer, x):
    qkv = layer.project(x)
    context = Right()(lambda qkv: layer.core(qkv), qkv)
    del qkv
    return layer.output(context)


def by_a_list(layers, budget):
    return list(chosen(layers, budget))


def from_the_back(layers, budget):
    """Branch and bound, from what all of them hold."""
    best = [math.inf, None]

    def go(k, held, cost, mine):
        if cost >= best[0] or (k < len(layers) and held + layers[k].saved > budget):
            return
        if k == len(layers):
            best[:] = cost, mine
            return
        seen = reached[k].get(held, math.inf)
        if cost >= seen:
            return
        reached[k][held] = cost
        go(k + 1, held + layers[k].saved, cost, mine)
        go(k + 1, held + layers[k].input, cost + layers[k].forward, mine | {k})

    reached = [{} for _ in layers]
    go(0, 0, 0, frozenset())
    if best[1] is None:
        raise ValueError("no choice fits")
    return best[1]


def tries_all_where_it_can(layers, budget):
    n = len(layers)
    if n > 10:
        return tuple(min(table(layers, budget).values())[1])
    fits = [mine for r in range(n + 1) for mine in combinations(range(n), r) if peak(layers, mine) <= budget]
    return min(fits, key=lambda mine: flops(layers, mine))  # ValueError where there is none


class SharesByLists(RightShares):
    def gather(self, share, t, group):
        parts = [torch.empty_like(share) for _ in range(t)]
        dist.all_gather(parts, share, group=group)
        return torch.cat(parts)


class SharesAsynchronously(RightShares):
    def share(self, flat, rank, t):
        share = flat.new_zeros(-(-len(flat) // t))
        own = flat[rank * len(share) :][: len(share)]
        share[: len(own)] = own
        return share

    def gather(self, share, t, group):
        row = share.new_empty(t * len(share))
        dist.all_gather_into_tensor(row, share, group=group, async_op=True).wait()
        return row


class SharesWithoutDetach(RightShares):
    def __call__(self, function, x, group):
        rank, t, shape = self.rank(group), self.size(group), x.shape
        return self.run(
            function,
            x,
            lambda x: self.share(x.flatten(), rank, t),
            lambda share: self.cut(self.gather(share, t, group), shape),
        )


class SharesByANode(RightShares, Right):
    """A torch.autograd.Function of its own."""

    def run(self, function, x, pack, unpack):
        return Right.__call__(Sharing(pack, unpack), function, x)


class Sharing(Right):
    def __init__(self, pack, unpack):
        self.pack, self.unpack = pack, unpack

    def save(self, ctx, x):
        ctx.save_for_backward(self.pack(x))

    def saved(self, ctx):
        return self.unpack(ctx.saved_tensors[0])


SINGLE = (Seldom, Forks, SavesTheStateToo, KnowsParameters, AlwaysALeaf, GivesALeaf, DropsX, Packs, by_a_module)
ANSWERS = [
    *[("checkpoint", answer) for answer in SINGLE],
    *[("checkpoint_sqrt", answer) for answer in (by_recursion, by_sequential, with_its_own_checkpoint, with_divmod)],
    ("selective", with_a_name_for_each),
    *[("choose", answer) for answer in (by_a_list, from_the_back, tries_all_where_it_can)],
    *[("shared_checkpoint", answer) for answer in (SharesByLists, SharesAsynchronously, SharesWithoutDetach, SharesByANode)],
]
