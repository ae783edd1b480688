"""The learner's shard and gather, as later tasks call them: what is wrong there is said there, not where it shows."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import FunctionType

import torch
import torch.distributed as dist

from manyranks.grade.journal import Stopped
from manyranks.grade.zero import models


def checked(script: Callable) -> Callable:
    """The script; Stopped is raised where the learner's class calls a shard or gather that does not do what it must."""

    @wraps(script)
    def run(kind, *args, **kwargs):
        with _checking(kind):
            return script(kind, *args, **kwargs)

    return run


@contextmanager
def _checking(kind) -> Iterator[None]:
    before = [(names, name, names[name]) for names in _namespaces(kind) for name in _RIGHT if _is_own(names.get(name))]
    for names, name, function in before:
        names[name] = _with_check(function, name)
    try:
        yield
    finally:
        for names, name, function in before:
            names[name] = function


def _namespaces(kind) -> list[dict]:
    """The global names that the functions of a class see, or a function does."""
    members = [member for base in kind.__mro__ for member in vars(base).values()] if isinstance(kind, type) else [kind]
    return list({id(f.__globals__): f.__globals__ for f in members if _is_own(f)}.values())


def _is_own(function) -> bool:
    return isinstance(function, FunctionType) and not function.__module__.startswith(("torch.", "manyranks."))


def _with_check(function: Callable, name: str) -> Callable:
    @wraps(function)
    def call(*args, **kwargs):
        result = function(*args, **kwargs)
        if _is_usual(args, kwargs, *_TAKES[name]) and not _RIGHT[name](result, *args):
            raise Stopped(
                f"the {name} that is called here does not return what it must",
                f"your {name} does not pass its own check: mend it first",
            )
        return result

    return call


def _is_usual(args: tuple, kwargs: dict, *kinds: type) -> bool:
    """Whether it is called as the task says; a learner's may take more."""
    return not kwargs and len(args) == len(kinds) and all(map(isinstance, args, kinds))


@torch.no_grad()
def _is_shard(result, tensor: torch.Tensor) -> bool:
    first, end = models.bounds(tensor.shape, dist.get_world_size())[dist.get_rank()]
    size = -(-tensor.numel() // dist.get_world_size())
    if not isinstance(result, torch.Tensor) or result.shape != (size,) or result.dtype != tensor.dtype:
        return False
    return _same(result[: end - first], tensor.flatten()[first:end]) and not result[end - first :].any()


@torch.no_grad()
def _is_whole(result, shard_S: torch.Tensor, shape: torch.Size) -> bool:
    """As far as this rank knows."""
    first, end = models.bounds(shape, dist.get_world_size())[dist.get_rank()]
    if not isinstance(result, torch.Tensor) or result.shape != shape or result.dtype != shard_S.dtype:
        return False
    return _same(result.flatten()[first:end], shard_S[: end - first])


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one, other) or bool(one.isnan().any())


_RIGHT = {"shard": _is_shard, "gather": _is_whole}
_TAKES = {"shard": (torch.Tensor,), "gather": (torch.Tensor, torch.Size)}
