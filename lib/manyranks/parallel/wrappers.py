"""The common parts of wrappers: how they find modules, send in autograd, and add up."""

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from manyranks.parallel.collectives.messages import Group
from manyranks.parallel.shard import local


def matching(model: nn.Module, pattern: str) -> list[tuple[str, nn.Module]]:
    """The modules whose names fit; a * of the pattern stands for one part of a dotted name.

    Raises ValueError where there are none.
    """
    fits = re.compile(re.escape(pattern).replace(r"\*", r"[^.]*")).fullmatch
    named = [(name, module) for name, module in model.named_modules() if fits(name)]
    if not named:
        raise ValueError(f"{pattern!r} matches no module: see the model's named_modules()")
    return named


def check_mesh(mesh: DeviceMesh, group: Group) -> None:
    """Raises ValueError where its ranks are not the group's, in their order."""
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    if mesh.mesh.flatten().tolist() != ranks:
        raise ValueError(
            f"a mesh of the ranks {mesh.mesh.tolist()} for a group of {ranks}: give these, "
            "in this order"
        )


State = dict[str, Tensor]


def saves(model: nn.Module, change: Callable[[nn.Module, State | None], State]) -> None:
    """Lets its save_pretrained, if it has one, write what change makes of a state.

    change: called with the model and the state_dict= that save_pretrained was given.
    """
    if hasattr(model, "save_pretrained"):
        model.save_pretrained = partial(_save, model.save_pretrained, change, model)


def _save(save: Callable, change: Callable, model: nn.Module, *args, **options):
    options["state_dict"] = change(model, options.get("state_dict"))
    return save(*args, **options)


def only_whole(model: nn.Module, state: State | None) -> State:
    """Raises ValueError, for saves(), where a rank would write what it has."""
    if state is None:
        raise ValueError(
            f"save_pretrained of a {type(model).__name__} that's in parts would write this "
            "rank's: call its wrapper's full_state_dict() on all ranks, and on one of them "
            "save_pretrained(folder, state_dict=what that gave)"
        )
    return state


class Accumulating(nn.Module):
    """A model whose finish() reduces gradients, after the last of several micro-batches."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module, self.training = module, module.training
        self._accumulates = False

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of the micro-batches inside are added up; finish() does nothing."""
        before = self._accumulates
        self._accumulates = True
        try:
            yield
        finally:
            self._accumulates = before


class Conjugate(torch.autograd.Function):
    """Communicates in one way forward, and in another one for the gradient."""

    @staticmethod
    def forward(ctx, x: Tensor, there: Callable, back: Callable) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple:
        return ctx.back(grad), None, None


def autocast(x: Tensor | None) -> Tensor | None:
    """The tensor in the dtype that autocast wants, where it is on.

    Autocast does not look into a Function. It leaves float64 alone.
    """
    kind = "cpu" if x is None else x.device.type
    on = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    skipped = x is None or not on or x.dtype == torch.float64
    return x if skipped else x.to(torch.get_autocast_dtype(kind))


def in_backward() -> bool:
    """Tells whether autograd is running a backward, as when a checkpoint recomputes."""
    return torch._C._current_graph_task_id() != -1


def sum_gradients(parameters: Iterable[nn.Parameter], group: Group = None) -> None:
    """Sums their gradients, end to end in one row for each dtype, in one all-reduce.

    Raises ValueError for a gradient that a bucket of data parallelism sends at this moment.
    """
    grads = [local(p.grad) for p in parameters if p.grad is not None]
    if any(getattr(grad, "underway", False) for grad in grads):
        raise ValueError(
            "a gradient is still on its way to the data-parallel ranks: call the outer "
            "wrapper's finish() first, and then this one's"
        )
    for dtype in dict.fromkeys(grad.dtype for grad in grads):
        own = [grad for grad in grads if grad.dtype == dtype]
        row = torch.cat([grad.flatten() for grad in own])
        dist.all_reduce(row, group=group)
        for grad, total in zip(own, row.split([g.numel() for g in own]), strict=True):
            grad.copy_(total.view_as(grad))


def average_gradients(parameters: Iterable[nn.Parameter], group: Group = None) -> None:
    """Turns their gradients into the group's mean. A group of one rank sends nothing.

    Raises ValueError as sum_gradients does.
    """
    parameters, n = list(parameters), dist.get_world_size(group)
    if n > 1:
        sum_gradients(parameters, group)
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.div_(n)
