"""Copies of one model on several ranks: are they of one kind, and may they become equal?"""

import math
from collections.abc import Iterable
from itertools import zip_longest
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from manyranks.parallel.collectives.messages import Group, in_place
from manyranks.parallel.shard import is_shard


def check_same(module: nn.Module, group: Group = None, option: str = "") -> None:
    """Checks that all ranks' parameters and buffers have the same names, shapes and dtypes.

    In the same order, too, and with the same ones frozen. All ranks call it.

    option: what else must be the same, in words

    Raises ValueError on every rank, naming the first that differs, and for a module that
    has no shapes yet.
    """
    mine = [option, *_descriptions(module)]
    theirs = [mine] * dist.get_world_size(group)
    dist.all_gather_object(theirs, mine, group=group)
    for rank, other in enumerate(theirs):
        for first, here in zip_longest(theirs[0], other, fillvalue="nothing more"):
            if here != first:
                raise ValueError(
                    f"the ranks' models differ: rank 0 of the group has {first}, where "
                    f"rank {rank} has {here}; build the same model on every rank, its "
                    "parameters in the same order"
                )


def check_gradients(named: dict[str, nn.Parameter]) -> None:
    """Raises ValueError for a parameter whose gradient would be complex."""
    for name, parameter in named.items():
        if parameter.is_complex():
            raise ValueError(
                f"{name} is {parameter.dtype}, and only real gradients are averaged: "
                "keep it as two real parameters"
            )


class Kept(NamedTuple):
    """A parameter as it was when the model was wrapped."""

    parameter: nn.Parameter
    learns: bool
    kind: tuple[torch.dtype, torch.device]


def kept(module: nn.Module) -> dict[str, Kept]:
    """All parameters as they are now."""
    named = _named(module).items()
    return {name: Kept(p, p.requires_grad, (p.dtype, p.device)) for name, p in named}


def _named(module: nn.Module) -> dict[str, nn.Parameter]:
    """Its parameters by names that torch.compile of a part of it leaves as they are."""
    return {name.replace("_orig_mod.", ""): p for name, p in module.named_parameters()}


def check_kept(module: nn.Module, before: dict[str, Kept]) -> None:
    """Raises ValueError for a parameter that is new, or not what it was any more."""
    now = _named(module)
    for name in before | now:
        parameter, was = now.get(name), before.get(name)
        if was is None or parameter is not was.parameter:
            change = "was added, replaced or removed since the model was wrapped"
        elif parameter.requires_grad and not was.learns:
            change = "was frozen when the model was wrapped, and is not any more"
        elif (parameter.dtype, parameter.device) != was.kind:
            change = f"was of {was.kind[0]} on {was.kind[1]} when the model was wrapped"
        else:
            continue
        raise ValueError(f"{name} {change}: wrap again, so that its gradient is averaged")


def check_bytes(bucket_bytes: float) -> None:
    """Raises ValueError for what is no size of a bucket."""
    if not isinstance(bucket_bytes, int | float) or not 0 < bucket_bytes <= math.inf:
        raise ValueError(f"bucket_bytes={bucket_bytes!r}: give a number of bytes above 0")


@torch.no_grad()
def broadcast(tensors: Iterable[Tensor], group: Group = None) -> None:
    """Copies the tensors of the group's rank 0 to every rank. All ranks call it."""
    for tensor in tensors:
        with in_place(tensor) as row:
            # As bytes, for a backend knows only some dtypes.
            dist.broadcast(row.view(torch.uint8), group=group, group_src=0)
        if isinstance(tensor, nn.Parameter):
            # So that a backward that needs what it was before can tell.
            torch.autograd.graph.increment_version(tensor)


def _descriptions(module: nn.Module) -> list[str]:
    parameters = [(name, p) for name, p in module.named_parameters() if not is_shard(p)]
    buffers = list(module.named_buffers())
    if lazy := [name for name, tensor in [*parameters, *buffers] if is_lazy(tensor)]:
        raise ValueError(
            f"{lazy[0]} has no shape yet: run one forward pass before wrapping"
        )
    kinds = ["parameter" if p.requires_grad else "frozen parameter" for _, p in parameters]
    kinds += ["buffer"] * len(buffers)
    return [
        f"{kind} {name} of {str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
        for kind, (name, tensor) in zip(kinds, [*parameters, *buffers], strict=True)
    ]
