"""Checkpoints of sharded models: each rank writes its shards, any number of ranks reads.

    state = sharded_state(model, optimizer)
    torch.distributed.checkpoint.save(state, checkpoint_id=folder)     # or .load, in place

The state's tensors are the shards themselves, not copies, so that a load fills them. A row
is a DTensor of its elements without padding, cut like torch.chunk: PyTorch's checkpoint
knows which elements a rank has, and gives others what they need.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from manyranks.parallel.units import Unit
from manyranks.parallel.zero import Zero3


def sharded_state(model: Zero3, optimizer: torch.optim.Optimizer | None = None) -> dict:
    """What a checkpoint is to hold of this rank: {"model": …, "optimizer": …}.

    model: a Zero3 or FullyShardedDataParallel; optimizer: of its parameters(). One that has
    not stepped gets the states that it would have before its first step.
    """
    group = dist.group.WORLD if model.group is None else model.group
    mesh = DeviceMesh.from_group(group, model.units[0].shard_S.device.type)
    named = dict(
        zip((name for name, _ in model.named_parameters()), model.units, strict=True)
    )
    state = {"model": {name: _whole(u.shard_S, u, mesh) for name, u in named.items()}}
    state["model"] |= {f"buffer {name}": b for name, b in model.module.named_buffers()}
    if optimizer is not None:
        _fill(optimizer)
        state["optimizer"] = {
            f"{name} {kind}": _whole(value, unit, mesh) if value.dim() else value
            for name, unit in named.items()
            for kind, value in optimizer.state.get(unit.shard_S, {}).items()
        }
    return state


def _whole(shard_S: Tensor, unit: Unit, mesh: DeviceMesh) -> DTensor:
    """The row that this shard is a part of, as a DTensor; shares the shard's memory."""
    size, first = shard_S.numel(), mesh.get_local_rank() * shard_S.numel()
    mine = shard_S.detach()[: max(0, min(size, unit.elements - first))]
    return DTensor.from_local(
        mine, mesh, [Shard(0)], run_check=False, shape=(unit.elements,), stride=(1,)
    )


def _fill(optimizer: torch.optim.Optimizer) -> None:
    """Has the optimizer make its states: by a step with a rate and gradients of zero."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if optimizer.state or any(p.grad is not None for p in parameters):
        return
    rates = [group["lr"] for group in optimizer.param_groups]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros_like(r) if isinstance(r := group["lr"], Tensor) else 0.0
    optimizer.step()
    optimizer.zero_grad()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for state in optimizer.state.values():
        if "step" in state:
            state["step"].zero_()
