"""Real code at a size that no laptop has room for: its tensors have shapes and no numbers."""

import contextlib
from collections.abc import Iterator
from types import ModuleType
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map_only

from manyranks.measure.flops import as_one_operator

_POINT_TO_POINT = ("send", "recv_", "alltoall_base_")
_COLLECTIVES = ("allreduce_", "_allgather_base_", "_reduce_scatter_base_")


@contextlib.contextmanager
def without_numbers(*groups: dist.ProcessGroup) -> Iterator[None]:
    """Inside, on a rank of a gloo world, new tensors are on the "meta" device, and their messages are noted but not sent.

    So world.measure(..., flops=True) records what the code would issue: each call with its bytes, and the FLOPs and bytes of
    the operators between; m.replay puts it on a cluster's clock. As on GPUs, reduce-scatters are the backend's own, and
    attention is one operator that never writes its scores. Code that depends on numbers (indexing by a mask, .item())
    fails. Known: point to point, and all-reduce, all-gather, reduce-scatter and all-to-all of tensors.

    Tensors made before keep their numbers, are sent, and serve as indices and masks of those without: a routing can be real.
    groups: others than the world, if ranks send point to point in them.
    """
    library = torch.library.Library("c10d", "IMPL")
    for group in (dist.group.WORLD, *groups):
        gloo = group._get_backend(torch.device("cpu"))
        group._register_backend(torch.device("meta"), dist.ProcessGroup.BackendType.GLOO, gloo)
    try:
        for name in _POINT_TO_POINT:
            library.impl(name, lambda *_, **__: _over(), "Meta")
        for name in _COLLECTIVES:
            library.impl(name, lambda out, *_, **__: (out, _over()), "Meta")
        with (
            torch.device("meta"),
            _Mixed(),
            patch.object(dist, "get_backend", lambda *_: "nccl"),
            patch.object(F, "scaled_dot_product_attention", _attention),
            patch.object(torch, "is_autocast_enabled", _autocasts),
        ):
            yield
    finally:
        library._destroy()


@contextlib.contextmanager
def fused(module: ModuleType, *names: str) -> Iterator[None]:
    """Inside, each of these functions of the module counts as one operator, with numbers or without.

    Its FLOPs are all that it does; the bytes are its arguments', read and where they change written, and its results'. So
    blockwise attention is charged as a kernel that keeps its scores on the chip.
    """
    with contextlib.ExitStack() as patches:
        for name in names:
            patches.enter_context(patch.object(module, name, as_one_operator(getattr(module, name))))
        yield


def uncounted() -> contextlib.AbstractContextManager:
    """Inside, operators count for nothing: for what is made once, before what is to be measured."""
    return _disable_current_modes()


def _attention(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, enable_gqa: bool = False) -> Tensor:
    group = q.shape[1] // k.shape[1] if enable_gqa else 1
    k, v = (x.repeat_interleave(group, dim=1) if group > 1 else x for x in (k, v))
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, is_causal=is_causal)[0]


class _Mixed(TorchDispatchMode):
    """Tensors with numbers that an operator of one without takes, as its indices or mask, count as without."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if args and isinstance(args[0], Tensor) and args[0].is_meta:
            args = tree_map_only(Tensor, lambda x: x if x.is_meta else torch.empty_like(x, device="meta"), args)
        return func(*args, **(kwargs or {}))


def _autocasts(device: str = "cuda", _enabled=torch.is_autocast_enabled) -> bool:
    """Stands in for PyTorch's own, which refuses a device that it has no autocast for."""
    return torch.amp.is_autocast_available(device) and _enabled(device)


def _over() -> torch.ScriptObject:
    """The Work of a message that is over."""
    future: torch.futures.Future = torch.futures.Future()
    future.set_result([])
    return torch._C._distributed_c10d._create_work_from_future(future).boxed()
