"""Clips gradients that are spread over ranks by their norm over all ranks.

torch.nn.utils.clip_grad_norm_ would take the norm of this rank's part, and each rank would
silently clip by a different norm. So it refuses the parameters that are named here.
"""

from collections.abc import Iterable
from functools import wraps
from itertools import repeat

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import clip_grad

from manyranks.parallel.collectives.messages import Group
from manyranks.parallel.shard import local

_clip = clip_grad._clip_grads_with_norm_


@torch.no_grad()
def clip_grad_norm(
    shards: Iterable[Tensor],
    most: float,
    group: Group = None,
    holders: Iterable[int] = repeat(1),
) -> Tensor:
    """Scales the shards' gradients so that the norm over all ranks is at most `most`.

    holders: how many ranks have each shard
    Returns the norm before. Raises ValueError for most below 0.
    """
    if not most >= 0:
        raise ValueError(f"most={most}: give the largest norm that a gradient may have")
    pairs = zip(shards, holders, strict=False)
    grads = [(local(shard.grad), count) for shard, count in pairs if shard.grad is not None]
    device = grads[0][0].device if grads else None
    total = torch.zeros((), dtype=torch.float64, device=device)
    for grad, count in grads:
        total += grad.square().sum(dtype=torch.float64) / count
    if dist.is_initialized() and dist.get_world_size(group) > 1:
        dist.all_reduce(total, group=group)
    norm = total.sqrt()
    for grad, _ in grads:
        grad.mul_((most / (norm + 1e-6)).clamp(max=1).to(grad.dtype))
    return norm


def refuse_alone(parameters: Iterable[Tensor], instead: str) -> None:
    """Lets PyTorch's function raise ValueError for these.

    instead: what to call
    """
    for parameter in parameters:
        parameter.clipped_by = instead


@wraps(_clip)
def _clip_whole(parameters: Iterable[Tensor], *args, **kwargs) -> None:
    listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    for parameter in listed:
        if instead := getattr(parameter, "clipped_by", ""):
            raise ValueError(
                "torch.nn.utils.clip_grad_norm_ of a gradient that is spread over ranks: "
                f"it would clip by the norm of this rank's part; call {instead}"
            )
    _clip(listed, *args, **kwargs)


clip_grad._clip_grads_with_norm_ = _clip_whole  # which all forms of the function call
