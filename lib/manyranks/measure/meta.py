"""Real code at a size that no laptop has room for: its tensors have shapes and no numbers."""

import contextlib
from collections.abc import Iterator
from types import ModuleType
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import _disable_current_modes

from manyranks.measure.flops import as_one_operator

_POINT_TO_POINT = ("send", "recv_", "alltoall_base_")
_COLLECTIVES = ("allreduce_", "_allgather_base_", "_reduce_scatter_base_")


@contextlib.contextmanager
def without_numbers() -> Iterator[None]:
    """Inside, on a rank of a gloo world, new tensors are on the "meta" device, and their messages are noted but not sent.

    So world.measure(..., flops=True) records what the code would issue: each call with its bytes, and the FLOPs and bytes of
    the operators between; m.replay puts it on a cluster's clock. As on GPUs, reduce-scatters are the backend's own, and
    attention is one operator that never writes its scores. What depends on numbers (indexing by a mask, .item()) fails. Known:
    point to point, and all-reduce, all-gather, reduce-scatter and all-to-all of tensors.
    """
    group, library = dist.group.WORLD, torch.library.Library("c10d", "IMPL")
    gloo = group._get_backend(torch.device("cpu"))
    group._register_backend(torch.device("meta"), dist.ProcessGroup.BackendType.GLOO, gloo)
    try:
        for name in _POINT_TO_POINT:
            library.impl(name, lambda *_, **__: _over(), "Meta")
        for name in _COLLECTIVES:
            library.impl(name, lambda out, *_, **__: (out, _over()), "Meta")
        with (
            torch.device("meta"),
            patch.object(dist, "get_backend", lambda *_: "nccl"),
            patch.object(F, "scaled_dot_product_attention", _attention),
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


def _over() -> torch.ScriptObject:
    """The Work of a message that is over."""
    future: torch.futures.Future = torch.futures.Future()
    future.set_result([])
    return torch._C._distributed_c10d._create_work_from_future(future).boxed()
