"""Right answers to 04_checkpointing in forms that are seldom, which must get full marks as well."""

import contextlib
from functools import cache, reduce

import numpy as np
import torch
from torch.autograd.function import once_differentiable

from tests.grading.zoo.checkpointing_hidden import SavesTheState
from tests.grading.zoo.checkpointing_right import Right, RightShares, chosen, in_turn, lengths_of


class Plain(torch.autograd.Function):
    """A node as in the notebook, for the next ones to change."""

    @staticmethod
    def forward(ctx, function, x, more):
        ctx.function, ctx.state = function, torch.get_rng_state()
        ctx.save_for_backward(x)
        return function(x)

    @staticmethod
    def backward(ctx, grad):
        x = ctx.saved_tensors[0].detach().requires_grad_(ctx.needs_input_grad[1])
        with drawing_from(ctx.state), torch.enable_grad():
            y = ctx.function(x)
        if y.requires_grad:
            y.backward(gradient=grad)
        return None, x.grad, None


@contextlib.contextmanager
def drawing_from(state):
    now = torch.get_rng_state()
    torch.set_rng_state(state)
    try:
        yield
    finally:
        torch.set_rng_state(now)


def by_a_context_manager(function, x):
    return Plain.apply(function, x, torch.empty(0, requires_grad=True))


class Decorated(Plain):
    @staticmethod
    @torch.no_grad()
    def forward(ctx, function, x, more):
        return Plain.forward(ctx, function, x, more)

    @staticmethod
    @torch.enable_grad()
    def backward(ctx, grad):
        return Plain.backward(ctx, grad)


def by_decorators(function, x):
    return Decorated.apply(function, x, torch.empty(0, requires_grad=True))


class Once(Plain):
    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return Plain.backward(ctx, grad)


def differentiable_once(function, x):
    return Once.apply(function, x, torch.empty(0, requires_grad=True))


class SetUp(torch.autograd.Function):
    """The newer form of a node, with the random state as an argument."""

    @staticmethod
    def forward(function, x, state, more):
        return function(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.function, x, ctx.state, _ = inputs
        ctx.save_for_backward(x)

    @staticmethod
    def backward(ctx, grad):
        return *Plain.backward(ctx, grad), None


def by_setup_context(function, x):
    return SetUp.apply(function, x, torch.get_rng_state(), torch.empty(0, requires_grad=True))


MORE = torch.ones((), requires_grad=True)


def by_a_class_of_each_call(function, x):
    class Node(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, more):
            ctx.state = torch.get_rng_state()
            ctx.save_for_backward(x)
            return function(x)

        @staticmethod
        def backward(ctx, grad):
            ctx.function = function
            x = ctx.saved_tensors[0].detach().requires_grad_(ctx.needs_input_grad[0])
            with drawing_from(ctx.state), torch.enable_grad():
                y = function(x)
            if y.grad_fn is not None:
                y.backward(grad)
            return x.grad, torch.zeros(())

    return Node.apply(x, MORE)


def by_numpys_array_split(checkpoint, layers, x):
    parts = [list(part) for part in np.array_split(np.array(layers, dtype=object), len(lengths_of(len(layers))))]
    for part in parts[:-1]:
        x = checkpoint(lambda x, part=part: reduce(lambda x, layer: layer(x), part, x), x)
    return in_turn(parts[-1], x)


def with_a_contiguous_input(checkpoint, layer, x):
    return layer.output(checkpoint(layer.core, layer.project(x).contiguous()))


def by_an_array(layers, budget):
    return np.array(sorted(chosen(layers, budget)), dtype=np.int64)


def by_a_generator(layers, budget):
    mine = chosen(layers, budget)
    return (k for k in mine)


def by_the_keys_of_a_dict(layers, budget):
    return dict.fromkeys(chosen(layers, budget)).keys()


def from_the_back_with_a_cache(layers, budget):
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
    return found[1]


class PacksXOnly(RightShares):
    """Beside a checkpoint that saves its random state with x."""

    def __call__(self, function, x, group):
        rank, t, shape = self.rank(group), self.size(group), x.shape

        def pack(tensor):
            return (self.share(tensor.detach().flatten(), rank, t),) if tensor.is_floating_point() else tensor

        def unpack(kept):
            return self.cut(self.gather(kept[0], t, group), shape) if isinstance(kept, tuple) else kept

        return self.run(function, x, pack, unpack)

    def checkpoint(self, function, x):
        return SavesTheState()(function, x)


class LooksForGradients(RightShares):
    """Nothing in shares where nobody goes backward."""

    def run(self, function, x, pack, unpack):
        if not torch.is_grad_enabled():
            return function(x)
        return super().run(function, x, pack, unpack)


class Always(Right):
    """A zero-sized gradient for the tensor more."""

    def more(self):
        return [torch.zeros(0, requires_grad=True)]


SINGLE = (
    by_a_context_manager,
    by_decorators,
    differentiable_once,
    by_setup_context,
    by_a_class_of_each_call,
    Always,
)
ANSWERS = [
    *[("checkpoint", answer) for answer in SINGLE],
    ("checkpoint_sqrt", by_numpys_array_split),
    ("selective", with_a_contiguous_input),
    *[("choose", answer) for answer in (by_an_array, by_a_generator, by_the_keys_of_a_dict, from_the_back_with_a_cache)],
    *[("shared_checkpoint", answer) for answer in (PacksXOnly, LooksForGradients)],
]
