"""All ranks of a group in one process, in lockstep: what they exchange, forward and backward, right or wrong in known ways."""

from collections.abc import Callable

import torch
from torch import Tensor

Exchange = Callable[[list[Tensor]], list[Tensor]]  # from what each rank puts in to what each gets


class _Lockstep(torch.autograd.Function):
    """Of one tensor a rank."""

    @staticmethod
    def forward(ctx, there: Exchange, back: Exchange, *tensors: Tensor):
        ctx.back = back
        return tuple(there(list(tensors)))

    @staticmethod
    def backward(ctx, *grads: Tensor):
        return None, None, *ctx.back(list(grads))


def lockstep(tensors: list[Tensor], there: Exchange, back: Exchange) -> list[Tensor]:
    """What the ranks get of an exchange whose gradients are exchanged by `back`."""
    return list(_Lockstep.apply(there, back, *tensors))


def same(tensors: list[Tensor]) -> list[Tensor]:
    """Nothing is exchanged."""
    return [tensor.clone() for tensor in tensors]


def total(tensors: list[Tensor]) -> list[Tensor]:
    """An all-reduce."""
    return [sum(tensors[1:], tensors[0]).clone() for _ in tensors]


def mean(tensors: list[Tensor]) -> list[Tensor]:
    """An all-reduce of averages."""
    return [whole / len(tensors) for whole in total(tensors)]


def twice(tensors: list[Tensor]) -> list[Tensor]:
    """Two all-reduces, one after the other."""
    return total(total(tensors))


def most(tensors: list[Tensor]) -> list[Tensor]:
    """An all-reduce of maxima."""
    return [torch.stack(tensors).amax(0) for _ in tensors]


def divided(tensors: list[Tensor]) -> list[Tensor]:
    """Nothing is exchanged, but all is divided by t."""
    return [tensor / len(tensors) for tensor in tensors]


def shared(count: int) -> Exchange:
    """An all-reduce among every so many ranks: with 2, ranks 0 and 2, 1 and 3."""

    def among(tensors: list[Tensor]) -> list[Tensor]:
        return [total(tensors[rank % count :: count])[0] for rank in range(len(tensors))]

    return among


def gathered(tensors: list[Tensor]) -> list[Tensor]:
    """An all-gather along the first dim."""
    return [torch.cat(tensors) for _ in tensors]


def scattered(tensors: list[Tensor]) -> list[Tensor]:
    """A reduce-scatter along the first dim."""
    return [part.clone() for part in total(tensors)[0].chunk(len(tensors))]


def own_part(tensors: list[Tensor]) -> list[Tensor]:
    """Each rank's part of what it has itself."""
    return [tensor.chunk(len(tensors))[rank].clone() for rank, tensor in enumerate(tensors)]


def padded(tensors: list[Tensor]) -> list[Tensor]:
    """Each rank's part among zeros."""
    zeros = [torch.zeros_like(tensor) for tensor in tensors]
    return [torch.cat([*zeros[:rank], tensor, *zeros[rank + 1 :]]) for rank, tensor in enumerate(tensors)]


def nothing(back: Exchange) -> Exchange:
    """Zeros, in the shapes of this exchange's results: what a call that autograd does not see gives back."""
    return lambda grads: [torch.zeros_like(grad) for grad in back(grads)]


def repeated(tensors: list[Tensor]) -> list[Tensor]:
    """Each rank's own part, t times."""
    return [torch.cat([tensor] * len(tensors)) for tensor in tensors]
