"""f and g as the checks give them to the tasks past the first, so that none depends on another."""

import torch
import torch.distributed as dist
from torch import Tensor

from manyranks.measure.journal import Stopped


def f(tensors: list[Tensor], group: dist.ProcessGroup | None = None) -> list[Tensor]:
    """The tensors as they are; one all-reduce for the gradients of those that need one."""
    return list(_F.apply(group, *_listed("f", tensors)))


def g(tensors: list[Tensor], group: dist.ProcessGroup | None = None) -> list[Tensor]:
    """Their sums over the ranks, by one all-reduce; gradients as they are."""
    return list(_G.apply(group, *_listed("g", tensors)))


def _listed(name: str, tensors) -> list[Tensor]:
    if not isinstance(tensors, list | tuple) or not all(isinstance(tensor, Tensor) for tensor in tensors):
        said = type(tensors).__name__
        raise Stopped(f"{name} was called with a {said}", f"{name} takes a list of tensors: [y] = {name}([x], group)")
    return list(tensors)


def _summed(tensors: list[Tensor], group) -> list[Tensor]:
    row = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(row, group=group)
    parts = row.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


class _F(torch.autograd.Function):
    @staticmethod
    def forward(ctx, group, *tensors):
        ctx.group = group
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx, *grads):
        needed = [i for i in range(len(grads)) if ctx.needs_input_grad[1 + i]]
        found = dict(zip(needed, _summed([grads[i] for i in needed], ctx.group), strict=True))
        return None, *(found.get(i) for i in range(len(grads)))


class _G(torch.autograd.Function):
    @staticmethod
    def forward(ctx, group, *tensors):
        return tuple(_summed(list(tensors), group))

    @staticmethod
    def backward(ctx, *grads):
        return None, *grads
