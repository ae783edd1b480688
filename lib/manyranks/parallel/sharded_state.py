"""Checkpoints of sharded models: each rank writes its shards, any number of ranks reads.

    state = sharded_state(model, optimizer)            # Zero3, FullyShardedDataParallel
    torch.distributed.checkpoint.save(state, checkpoint_id=folder)     # or .load, in place

    state = sharded_state(zero)                        # ZeroOptimizer
    torch.distributed.checkpoint.load(state, checkpoint_id=folder)
    zero.spread()                                      # the model's parameters, too

The state's tensors are the shards themselves, not copies, so that a load fills them. A row
is a DTensor of its elements without padding, cut like torch.chunk: PyTorch's checkpoint
knows which elements a rank has, and gives others what they need. Rows must be cut alike:
the same units, or the same bucket_bytes. Learning rates and other options are not in it.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from manyranks.parallel.sharding import ShardedRow
from manyranks.parallel.zero import Zero3, ZeroOptimizer


def sharded_state(
    model: Zero3 | ZeroOptimizer, optimizer: torch.optim.Optimizer | None = None
) -> dict:
    """What a checkpoint is to hold of this rank: {"model": …, "optimizer": …}.

    model: a Zero3 or FullyShardedDataParallel, or a ZeroOptimizer, which does not know the
    model's buffers: add them. optimizer: of the parameters() of one of the former. One that
    has not stepped gets the states that it would have before its first step.
    """
    if isinstance(model, ZeroOptimizer):
        rows, optimizer = {str(k): row for k, row in enumerate(model.rows)}, model.optimizer
        others = {f"frozen {k}": p.detach() for k, p in enumerate(model.frozen)}
    else:
        rows = {f"{k}.{unit.name}": unit for k, unit in enumerate(model.units)}
        others = {f"buffer {name}": b for name, b in model.module.named_buffers()}
    state = {"model": {name: _whole(row.shard_S, row) for name, row in rows.items()}}
    state["model"] |= others
    if optimizer is not None:
        make_states(optimizer)
        state["optimizer"] = {
            f"{name} {kind}": _whole(value, row) if value.dim() else value
            for name, row in rows.items()
            for kind, value in optimizer.state.get(row.shard_S, {}).items()
            if isinstance(value, Tensor)
        }
    return state


def _whole(shard_S: Tensor, row: ShardedRow) -> Tensor:
    """The row that this shard is a part of, as a DTensor; shares the shard's memory."""
    from torch.distributed.tensor import DTensor, Shard  # a second, for those who save only

    group = dist.group.WORLD if row.group is None else row.group
    mesh = DeviceMesh.from_group(group, shard_S.device.type)
    size, first = shard_S.numel(), mesh.get_local_rank() * shard_S.numel()
    mine_S = shard_S.detach()[: max(0, min(size, row.elements - first))]
    return DTensor.from_local(
        mine_S, mesh, [Shard(0)], run_check=False, shape=(row.elements,), stride=(1,)
    )


def make_states(optimizer: torch.optim.Optimizer) -> None:
    """Has an optimizer that has not stepped make its states, which begin with zeros.

    By a step with a rate, a decay and gradients of zero. Parameters and gradients stay.
    """
    if optimizer.state:
        return
    groups = optimizer.param_groups
    options = [{k: g[k] for k in ("lr", "weight_decay") if k in g} for g in groups]
    learning = [p for g in groups for p in g["params"] if p.requires_grad]
    grads = [p.grad for p in learning]
    for group, own in zip(groups, options, strict=True):
        group |= {k: v * 0 for k, v in own.items()}
    for p in learning:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for group, own in zip(groups, options, strict=True):
        group |= own
    for p, grad in zip(learning, grads, strict=True):
        p.grad = grad
        if "step" in optimizer.state[p]:
            optimizer.state[p]["step"].zero_()
