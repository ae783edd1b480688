"""How the small GPT is spread over the ranks, by stage of ZeRO, what it computes again in backward,
and who steps its parameters."""

import contextlib
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from manyranks.parallel.checkpointing import checkpoint_modules
from manyranks.parallel.data_parallel import OverlappedDataParallel
from manyranks.parallel.fsdp import FullyShardedDataParallel
from manyranks.parallel.zero import ZeroOptimizer
from manyranks.training.config import TrainingConfig
from manyranks.training.gpt import CausalAttention, Layer

Wrapper = Callable[..., nn.Module]
_AGAIN = {"none": (), "selective": CausalAttention, "full": Layer}  # by TrainingConfig.recompute


class Spread(NamedTuple):
    """A model in its wrapper, what steps it, and what clips the gradients of all ranks.

    The model has .module, no_sync() and finish(), as parallel.data_parallel's.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer | ZeroOptimizer
    clip: Callable[[float], Tensor]


def parallelize(
    model: nn.Module,
    training: TrainingConfig,
    wrapper: Wrapper = OverlappedDataParallel,
    group: dist.ProcessGroup | None = None,
) -> Spread:
    """The model on the group's ranks, with AdamW.

    wrapper: what averages gradients where nothing is sharded. Raises ValueError for sharding
    without ranks, and for a wrapper with sharding.
    """
    _check(training.zero, wrapper)
    # First, so that a module's hooks, which gather it, run around its checkpoint.
    checkpoint_modules(model, lambda module: isinstance(module, _AGAIN[training.recompute]))
    settings = {"lr": training.learning_rate, "betas": training.betas, "fused": True}
    if training.zero == 3:
        sharded = _fully_sharded(model, training, group)
        pairs = [(unit.shard_S, unit.parameters[0]) for unit in sharded.units]
        optimizer = torch.optim.AdamW(decay_groups(pairs, training), **settings)
        return Spread(sharded, optimizer, sharded.clip_grad_norm_)
    groups = decay_groups([(p, p) for p in model.parameters()], training)
    if training.zero:
        zero = ZeroOptimizer(groups, torch.optim.AdamW, training.zero, group, **settings)
        return Spread(Alone(model), zero, zero.clip_grad_norm_)
    whole = wrapper(model, group) if dist.is_initialized() else Alone(model)
    # Every rank has the whole mean gradient, so its norm needs no message.
    clip = partial(nn.utils.clip_grad_norm_, list(model.parameters()))
    return Spread(whole, torch.optim.AdamW(groups, **settings), clip)


def _check(zero: int, wrapper: Wrapper) -> None:
    if zero and not dist.is_initialized():
        raise ValueError(
            f"zero={zero}: states are shared among ranks, and this process has none beside it; "
            "train on a world's ranks, or with zero=0"
        )
    if zero and wrapper is not OverlappedDataParallel:
        raise ValueError(f"wrapper with zero={zero}, which takes its place: leave one of both out")


def _fully_sharded(
    model: nn.Module, training: TrainingConfig, group: dist.ProcessGroup | None
) -> FullyShardedDataParallel:
    """Not under autocast, which would keep each weight in bfloat16 until its backward."""
    types = (torch.bfloat16, next(model.parameters()).dtype) if training.bf16 else (None, None)
    return FullyShardedDataParallel(
        model, group, compute_dtype=types[0], reduce_dtype=types[1], kind=decays
    )


def decays(parameter: nn.Parameter) -> bool:
    """Matrices do; norms and biases have no size to lose."""
    return parameter.ndim >= 2


def decay_groups(pairs: Iterable[tuple[Tensor, nn.Parameter]], training: TrainingConfig) -> list:
    """An optimizer's groups, with weight decay on matrices only.

    pairs: what the optimizer steps, each with a parameter that it is, or is a shard of.
    """
    of_kind: dict[bool, list[Tensor]] = {True: [], False: []}
    for stepped, parameter in pairs:
        of_kind[decays(parameter)].append(stepped)
    return [
        {"params": of_kind[True], "weight_decay": training.weight_decay},
        {"params": of_kind[False], "weight_decay": 0.0},
    ]


class Alone(nn.Module):
    """The interface of parallel.data_parallel's wrappers for a model that needs none of them."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module, self.forward, self.no_sync = module, module.forward, contextlib.nullcontext

    def finish(self) -> None:
        pass
