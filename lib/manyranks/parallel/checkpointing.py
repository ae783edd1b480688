"""Activation checkpointing: forward keeps little, backward computes the rest again.

    y = checkpoint(layer, x)                  keeps x, and runs the layer again in backward
    y = checkpoint_segments(layers, x, 4)     so for each of four parts of a chain
    checkpoint_modules(model, which)          so for modules of a model, from outside
    y = selective_checkpoint(products, layer, x)      keeps x and the matrix products
    y = partitioned_checkpoint(group, layer, x)       keeps 1/t of x on each of t ranks

A checkpoint is one node in autograd's graph. Its inputs are all that its result depends on:
the function's arguments, and the parameters that the function uses. So nothing changes
outside: each parameter's gradient arrives once, whole, where the hooks of data parallelism
and of fully sharded training wait for it. (The reentrant form, which calls backward()
inside backward, lets a parameter of two checkpoints arrive twice.)

Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost", arXiv 1604.06174.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from manyranks.parallel.recomputation import (
    Call,
    detached,
    differentiable,
    edges,
    gradients,
)
from manyranks.parallel.recompute_policy import Keeping, Policy

Restore = Callable[[Tensor], Tensor]
Pack = Callable[[Tensor], tuple[Tensor, Restore]]


def checkpoint(function: Callable, *args, **kwargs) -> Any:
    """Calls function(*args, **kwargs) and keeps only the tensors among the arguments.

    Backward calls the function a second time, with the same random numbers and under the
    same autocast. Arguments and result: tensors, other values, and tuples, lists and dicts
    of them. Parameters that the function uses get their gradients; a tensor computed
    outside that needs one must be an argument, if anything else uses it or what it was
    computed from. Checkpoints may lie in each other. Without gradients it is an ordinary
    call. Not restored: random numbers of Python and NumPy, and whatever else
    the function changes (statistics of a batch norm are updated twice).
    Raises RuntimeError for a function that calls what PyTorch's fully_shard has sharded; in
    backward, where the second call differs from the first, or where a gradient of the
    gradient is asked for.
    """
    return _checkpoint(function, args, kwargs)


def selective_checkpoint(keeps: Policy, function: Callable, *args, **kwargs) -> Any:
    """Checkpoints as checkpoint does, but keeps the results of some operators, too.

    keeps: says whether to keep an operator's results, as recompute_policy.products does.
    They are not computed again, except one that the function later changes in place.
    """
    return _checkpoint(function, args, kwargs, keeps=keeps)


def partitioned_checkpoint(
    group: dist.ProcessGroup | None, function: Callable, *args, **kwargs
) -> Any:
    """Checkpoints as checkpoint does, but each rank keeps its share of the arguments.

    That's 1/t of their bytes. Backward gathers them. The floating-point tensors among the
    arguments must be the same on all ranks of the group, as they are between the layers of
    tensor parallelism.
    Source: ZeRO's P_a, arXiv 1910.02054, section 6.1.
    """
    return _checkpoint(function, args, kwargs, pack=partial(_shard, group))


def checkpoint_segments(layers: Sequence[Callable], x: Any, count: int, *rest) -> Any:
    """The layers one after another, each called with (x, *rest), in `count` checkpoints.

    Kept are `count` inputs, and in backward one segment's activations. Where a layer saves
    about as much as its output has, √N segments are best; a transformer's saves many times
    that, and wants more. Segments differ by a layer at most, the longer ones first.
    Raises ValueError for less than one segment, or more than there are layers.
    """
    for segment in cut(layers, count):
        x = checkpoint(partial(_in_turn, segment), x, *rest)
    return x


def checkpoint_modules(
    model: nn.Module, which: Callable[[nn.Module], bool], how: Callable = checkpoint
) -> list[str]:
    """Checkpoints these modules of the model from now on. Returns their names.

    how: called as checkpoint is, such as partial(selective_checkpoint, products). A
    module's own hooks run around the checkpoint, once; hooks of the modules inside it run
    twice. So a frozen module that FullyShardedDataParallel gathers is freed after its
    backward; where checkpoint is called around it, only by finish(). For PyTorch's
    fully_shard this is the only way: around what it shards, a checkpoint is refused. To
    undo it: del module.forward.
    """
    chosen = {name: module for name, module in model.named_modules() if which(module)}
    for module in chosen.values():
        module.forward = partial(how, module.forward)
    return list(chosen)


def cut(layers: Sequence[Callable], count: int) -> list[Sequence[Callable]]:
    """`count` segments of neighboring layers. Raises ValueError as checkpoint_segments."""
    n = len(layers)
    if type(count) is not int or not 1 <= count <= n:
        raise ValueError(
            f"count={count!r} segments of {n} layers: give a number from 1 to {n}"
        )
    ends = [k * (n // count) + min(k, n % count) for k in range(count + 1)]
    return [layers[ends[k] : ends[k + 1]] for k in range(count)]


def _in_turn(layers: Iterable[Callable], x: Any, *rest) -> Any:
    for layer in layers:
        x = layer(x, *rest)
    return x


def _whole(tensor: Tensor) -> tuple[Tensor, Restore]:
    return tensor, lambda tensor: tensor


def _checkpoint(
    function: Callable,
    args: tuple,
    kwargs: dict,
    keeps: Policy | None = None,
    pack: Pack = _whole,
) -> Any:
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    values, structure = tree_flatten((args, kwargs))
    keeping = Keeping(keeps)
    call = Call(keeping.wrapped(function))
    given_args, given_kwargs = tree_unflatten(list(map(detached, values)), structure)
    result = call.first(*given_args, **given_kwargs)
    results = differentiable(result)
    if not results:
        return result
    memory = _Memory(values, structure, keeping, pack)
    tensors = [value for value in values if isinstance(value, Tensor)]
    nodes = iter(_Checkpoint.apply(call, memory, results, *tensors, *call.parameters))
    return tree_map(lambda y: next(nodes) if differentiable([y]) else y, result)


class _Memory:
    """The memory of a checkpoint: other arguments are here, tensors with autograd."""

    def __init__(self, values: list, structure: Any, keeping: Keeping, pack: Pack):
        self._others = [None if isinstance(v, Tensor) else v for v in values]
        self._places = [k for k, v in enumerate(values) if isinstance(v, Tensor)]
        self._differs = [values[k].requires_grad for k in self._places]
        self._structure, self._keeping, self._pack = structure, keeping, pack

    def packed(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Returns what is kept of tensors among arguments, then results of operators."""
        packed = [self._pack(tensor) for tensor in tensors]
        self._restores = [restore for _, restore in packed]
        return [tensor for tensor, _ in packed] + self._keeping.take()

    def restored(self, kept: Sequence[Tensor]) -> tuple[list[Tensor], tuple, dict]:
        """The tensors as leaves, and the arguments with these leaves in their places."""
        count, values = len(self._places), list(self._others)
        self._keeping.give(kept[count:])
        pairs = zip(self._restores, kept[:count], self._differs, strict=True)
        leaves = [detached(restore(tensor), differs) for restore, tensor, differs in pairs]
        for place, leaf in zip(self._places, leaves, strict=True):
            values[place] = leaf
        return leaves, *tree_unflatten(values, self._structure)


class _Checkpoint(torch.autograd.Function):
    """The node. Forward was already computed; backward computes it again."""

    @staticmethod
    def forward(ctx, call: Call, memory: _Memory, results: list[Tensor], *inputs: Tensor):
        """Keeps inputs: the tensors among the arguments, then the call's parameters."""
        ctx.call, ctx.memory, ctx.count = call, memory, len(results)
        ctx.set_materialize_grads(False)
        arguments = inputs[: len(inputs) - len(call.parameters)]
        ctx.save_for_backward(*memory.packed(arguments))
        return tuple(result.detach() for result in results)

    @staticmethod
    def backward(ctx, *grads: Tensor | None):
        leaves, args, kwargs = ctx.memory.restored(ctx.saved_tensors)
        ctx.maybe_clear_saved_tensors()  # from here on, each goes when it has been used
        with torch.enable_grad():
            results = edges(ctx.call.again(*args, **kwargs))
        if len(results) != ctx.count:
            raise RuntimeError(
                f"the function gave {ctx.count} tensors that need a gradient, and then, "
                f"in backward, {len(results)}: it must do the same each time"
            )
        inputs, needed = [*leaves, *ctx.call.parameters], ctx.needs_input_grad[3:]
        wanted = [x for x, needs in zip(inputs, needed, strict=True) if needs]
        found = iter(gradients(results, grads, wanted))
        return None, None, None, *(next(found) if needs else None for needs in needed)


def _shard(group: dist.ProcessGroup | None, tensor: Tensor) -> tuple[Tensor, Restore]:
    """This rank's share of the elements, and how to get them all; integers stay whole."""
    n, elements, shape = dist.get_world_size(group), tensor.numel(), tensor.shape
    if not tensor.is_floating_point():
        return _whole(tensor)
    share = -(-elements // n)
    shard_S = tensor.new_zeros(share)
    own = tensor.detach().reshape(-1)[dist.get_rank(group) * share :][:share]
    shard_S[: own.numel()] = own

    def gathered(shard_S: Tensor) -> Tensor:
        row_E = shard_S.new_empty(n * share)
        dist.all_gather_single(row_E, shard_S, group=group)
        return row_E[:elements].view(shape)

    return shard_S, gathered
