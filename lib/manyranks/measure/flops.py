"""FLOPs, as FlopCounterMode has them, with what it leaves out (the CPU's attention, sums in place), and bytes moved."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count, shape_wrapper


def _product(first: Sequence[int], second: Sequence[int]) -> int:
    """The second may be a vector; in a batch, or in groups of rows or columns, each has its own matrix."""
    columns_in_groups = len(first) > len(second) > 1
    return 2 * math.prod(first[-2:] if columns_in_groups else first) * (1 if len(second) == 1 else second[-1])


def _of_shapes(count: Callable[..., int], first: int, last: int) -> Callable[..., int]:
    """Counts by the shapes of the arguments from the first to before the last."""
    return shape_wrapper(lambda *shapes, out_shape=None, **named: count(*shapes[first:last]))


_LEFT_OUT = {
    _of_shapes(_product, 0, 2): "mv dot vdot _grouped_mm",
    _of_shapes(_product, 1, 3): "addmv addmv_ addbmm addbmm_ addmm_ baddbmm_",
    _of_shapes(sdpa_flop_count, 0, 3): "_scaled_dot_product_flash_attention_for_cpu",
    _of_shapes(sdpa_backward_flop_count, 0, 4): "_scaled_dot_product_flash_attention_for_cpu_backward",
}
FORMULAS = flop_registry | {
    getattr(torch.ops.aten, name): count for count, names in _LEFT_OUT.items() for name in names.split()
}
LOOKUPS = {f"aten::{name}" for name in ("index", "index_select", "embedding", "gather", "take")}


class Operator(NamedTuple):
    """An operator that ran.

    shapes: of the tensors among its arguments
    flops, bytes: as WorkCounter counts them
    """

    name: str
    shapes: tuple[tuple[int, ...], ...]
    flops: int
    bytes: int


class WorkCounter(TorchDispatchMode):
    """Counts what the operators inside its `with` block have done so far.

    flops: of matmuls, convolutions and attention; a multiply-add counts as two, attention in
        full also under a causal mask
    bytes: read and written as if nothing were fused or cached. Each tensor among an operator's
        arguments is read once, each result written once (in place: both). A view that shows
        elements several times (expand, unfold) has no more than lies under it. A look-up
        (x[i], embedding, gather, …) reads its indices, and as much of its source as it returns.
        Views, allocations and communication move nothing. Too high: what writes into a part of
        an argument (x[i] = y), and what leaves an argument unread (fill_, copy_).
    """

    def __init__(self, operators: list[Operator] | None = None):
        super().__init__()
        self.flops = self.bytes = 0
        self._operators = operators  # where each is noted

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, before = kwargs or {}, (self.flops, self.bytes, len(self._operators or ()))
        if is_composite(func):  # has the FLOPs of its parts, and moves bytes as a whole
            with self:
                out = func.decompose(*args, **kwargs)
            self.bytes = before[1]
        else:
            out = func(*args, **kwargs)
            if count := FORMULAS.get(func._overloadpacket):
                self.flops += count(*args, **kwargs, out_val=out)
        if moves(func):
            source, rest = (out, args[1:]) if func._schema.name in LOOKUPS else ((), args)
            self.bytes += sum(map(touched_bytes, tensors_in((source, rest, kwargs, out))))
        if self._operators is not None:
            shapes = tuple(tuple(x.shape) for x in tensors_in((args, kwargs)))
            counts = self.flops - before[0], self.bytes - before[1]
            done = [Operator(func._schema.name, shapes, *counts)] if any(counts) else []
            self._operators[before[2] :] = done  # in place of a composition's parts
        return out


def operators(function: Callable, *args, **kwargs) -> list[Operator]:
    """Calls the function and returns what each operator did that computed or moved something, in the order they ran in.

    An operator that PyTorch composes of others stands for its parts.
    """
    found: list[Operator] = []
    with WorkCounter(found):
        function(*args, **kwargs)
    return found


def as_one_operator(function: Callable) -> Callable:
    """Makes a function that a WorkCounter charges as one kernel: all of its FLOPs, and only its own tensors' bytes.

    Each argument is read once; what changes, and what it returns, is written. All else stays on the chip.
    """

    @functools.wraps(function)
    def fused(*args, **kwargs):
        modes = _get_current_dispatch_mode_stack()
        before = [(counter, counter.bytes) for counter in modes if isinstance(counter, WorkCounter)]
        given = tensors_in((args, kwargs))
        versions = [x._version for x in given]
        out = function(*args, **kwargs)
        written = [x for x, version in zip(given, versions, strict=True) if x._version != version]
        moved = sum(map(touched_bytes, (*given, *written, *tensors_in(out))))
        for counter, total in before:
            counter.bytes = min(counter.bytes, total + moved)  # one that had nothing to do has moved nothing
        return out

    return fused


def tensors_in(tree: object) -> list[torch.Tensor]:
    """Lists all tensors in lists, tuples and dicts."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def touched_bytes(x: torch.Tensor) -> int:
    """Counts the bytes of memory that one pass over x touches: elements on the same place count once."""
    elements = x.numel()
    if elements and x.layout == torch.strided:
        span = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
        elements = min(elements, span)
    return elements * x.element_size()


@functools.cache
def is_composite(func) -> bool:
    """Says whether PyTorch composes it of others: silu_backward; in inference mode also linear, matmul and so on."""
    return func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)


@functools.cache
def moves(func) -> bool:
    """Says whether the operator touches its tensors' memory: not views, not allocations, not communication."""
    view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
    name = func._schema.name.removeprefix("aten::")
    return not (view or name.startswith(("empty", "new_empty", "_unsafe_view", "c10d", "_c10d")))
