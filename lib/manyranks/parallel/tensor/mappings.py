"""What happens to activations where they enter and leave a tensor-parallel part of a layer.

    t             ranks of the group, which hold parts of the same matrices
    x_BSH         whole: every rank has all S tokens
    x_BsH         a shard of the sequence: this rank has s = S/t tokens, in rank order

Each function has two directions, for the gradient goes the other way:

    name                  forward           backward          paper
    copy_in               nothing           all-reduce        f
    reduce_out            all-reduce        nothing           f̄ (g in Megatron-LM's first)
    gather_in             all-gather        reduce-scatter    g
    reduce_scatter_out    reduce-scatter    all-gather        ḡ
    split_in              own part          all-gather

A group of one rank sends nothing. Source: Shoeybi et al., "Megatron-LM", arXiv 1909.08053,
section 3; Korthikanti et al., arXiv 2205.05198, section 4.2.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from manyranks.parallel import sharding
from manyranks.parallel.parts import Conjugate

Group = dist.ProcessGroup | None


def copy_in(x: Tensor, group: Group = None) -> Tensor:
    """x as it is; its gradient is the sum of what all ranks found."""
    return Conjugate.apply(x, same, partial(all_reduce, group=group))


def reduce_out(x: Tensor, group: Group = None) -> Tensor:
    """The sum of all ranks' x; each rank's term has the sum's gradient."""
    return Conjugate.apply(x, partial(all_reduce, group=group), same)


def gather_in(x_BsH: Tensor, group: Group = None) -> Tensor:
    """The whole sequence from its shards; a shard's gradient is summed over the ranks."""
    return Conjugate.apply(x_BsH, *_directions(all_gather, reduce_scatter, group))


def reduce_scatter_out(x_BSH: Tensor, group: Group = None) -> Tensor:
    """This rank's shard of the sum of all ranks' x; the gradient is gathered.

    Raises ValueError where t does not divide S.
    """
    return Conjugate.apply(x_BSH, *_directions(reduce_scatter, all_gather, group))


def split_in(x_BSH: Tensor, group: Group = None) -> Tensor:
    """This rank's shard of what every rank has; the gradient is gathered.

    Raises ValueError where t does not divide S.
    """
    return Conjugate.apply(x_BSH, *_directions(own_part, all_gather, group))


def all_reduce(x: Tensor, group: Group = None) -> Tensor:
    """The sum over the ranks, in a new tensor."""
    total = x.clone(memory_format=torch.contiguous_format)
    if size(group) > 1:
        dist.all_reduce(total, group=group)
    return total


def all_gather(x_BsH: Tensor, group: Group = None) -> Tensor:
    """All ranks' shards of the sequence, one after another."""
    return start_all_gather(x_BsH, group)()


def start_all_gather(x_BsH: Tensor, group: Group = None) -> Callable[[], Tensor]:
    """Starts to gather and returns at once: what it returns waits, and gives the whole."""
    t = size(group)
    if t == 1:
        return lambda: x_BsH
    parts_tBsH = x_BsH.new_empty(t, *x_BsH.shape)
    row = parts_tBsH.flatten(0, 1)  # the same memory
    work = dist.all_gather_single(row, x_BsH.contiguous(), group=group, async_op=True)

    def whole() -> Tensor:
        work.wait()
        # A copy, unless B is 1. Detached: no view, so that a caller may change it in place.
        return parts_tBsH.movedim(0, 1).flatten(1, 2).detach()

    return whole


def reduce_scatter(x_BSH: Tensor, group: Group = None) -> Tensor:
    """This rank's shard of the sequence, summed over the ranks."""
    return start_reduce_scatter(x_BSH, group)()


def start_reduce_scatter(x_BSH: Tensor, group: Group = None) -> Callable[[], Tensor]:
    """Starts to sum and returns at once: what it returns waits and gives the shard.

    On gloo our ring sums, for gloo's own sends twice the bytes; it begins when it is waited
    for.
    """
    t = size(group)
    check_sequence(x_BSH, t)
    if t == 1:
        return lambda: x_BSH
    parts_tBsH = torch.stack(x_BSH.chunk(t, 1))
    shape = parts_tBsH.shape[1:]
    if dist.get_backend(group) == "gloo":
        row_E = parts_tBsH.view(-1)
        return lambda: sharding.reduce_scatter(row_E, group).view(shape).detach()
    own_BsH = x_BSH.new_empty(shape)
    row = parts_tBsH.flatten(0, 1)
    work = dist.reduce_scatter_single(own_BsH, row, group=group, async_op=True)

    def own() -> Tensor:
        work.wait()
        return own_BsH

    return own


def own_part(x_BSH: Tensor, group: Group = None) -> Tensor:
    """This rank's shard of the sequence."""
    check_sequence(x_BSH, size(group))
    own_BsH = x_BSH.chunk(size(group), 1)[rank(group)]
    # A copy even where B is 1: a view would keep the whole in memory.
    return own_BsH.clone(memory_format=torch.contiguous_format)


def autocast(*tensors: Tensor | None) -> list[Tensor | None]:
    """The tensors in the dtype that autocast wants, where it is on.

    Autocast does not look into a Function. It leaves float64 alone.
    """
    kind = tensors[0].device.type
    on = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    if not on or tensors[0].dtype == torch.float64:
        return list(tensors)
    low = torch.get_autocast_dtype(kind)
    return [tensor if tensor is None else tensor.to(low) for tensor in tensors]


def size(group: Group) -> int:
    """t; 1 in a process without torch.distributed."""
    return dist.get_world_size(group) if dist.is_initialized() else 1


def rank(group: Group) -> int:
    """This rank's place in the group."""
    return dist.get_rank(group) if dist.is_initialized() else 0


def check_sequence(x_BSH: Tensor, t: int) -> None:
    """Raises ValueError where the sequence has no t equal shards."""
    if x_BSH.dim() < 2 or x_BSH.shape[1] % t:
        raise ValueError(
            f"a tensor of shape {tuple(x_BSH.shape)} on {t} ranks: sequence parallelism "
            f"cuts dim 1, the sequence, into {t} shards; give a multiple of {t} tokens"
        )


def _directions(there: Callable, back: Callable, group: Group) -> tuple[Callable, Callable]:
    return partial(there, group=group), partial(back, group=group)


def same(x: Tensor) -> Tensor:
    """x itself, as a result of its own."""
    return x.view_as(x)
