"""FLOPs, as FlopCounterMode has them, with what it leaves out (the CPU's attention, sums in place), and bytes moved."""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count, shape_wrapper

_aten = torch.ops.aten


def _attention(query_shape, key_shape, value_shape, *args, out_shape=None, **kwargs) -> int:
    return sdpa_flop_count(query_shape, key_shape, value_shape)


def _attention_backward(grad_shape, query_shape, key_shape, value_shape, *args, out_shape=None, **kwargs) -> int:
    return sdpa_backward_flop_count(grad_shape, query_shape, key_shape, value_shape)


def _product(first_shape, second_shape, *args, out_shape=None, **kwargs) -> int:
    """The second may be a vector; of a batch, or of groups of rows or columns, each has a matrix of its own."""
    vector, columns_in_groups = len(second_shape) == 1, len(first_shape) > len(second_shape) > 1
    rows = first_shape[-2:] if columns_in_groups else first_shape
    return 2 * math.prod(rows) * (1 if vector else second_shape[-1])


def _added_product(sum_shape, first_shape, second_shape, *args, out_shape=None, **kwargs) -> int:
    return _product(first_shape, second_shape)


_LEFT_OUT = {
    _aten.mv: _product,
    _aten.dot: _product,
    _aten.vdot: _product,
    _aten._grouped_mm: _product,
    _aten.addmv: _added_product,
    _aten.addmv_: _added_product,
    _aten.addbmm: _added_product,
    _aten.addbmm_: _added_product,
    _aten.addmm_: _added_product,
    _aten.baddbmm_: _added_product,
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}
FORMULAS = {**flop_registry, **{operator: shape_wrapper(count) for operator, count in _LEFT_OUT.items()}}
LOOKUPS = {f"aten::{name}" for name in ("index", "index_select", "embedding", "gather", "take")}


class Operator(NamedTuple):
    """One operator that ran. shapes: of the tensors among its arguments; flops, bytes: as WorkCounter counts them."""

    name: str
    shapes: tuple[tuple[int, ...], ...]
    flops: int
    bytes: int


class WorkCounter(TorchDispatchMode):
    """A context manager: `flops` and `bytes` say what the operators inside it have done so
    far.

    flops: of matmuls, convolutions and attention; a multiply-add counts as two, attention
    in full also under a causal mask.
    bytes: that operators read and write, as if nothing were fused or cached: each tensor
    among an operator's arguments is read once, each result written once (in place: both).
    Of a view that shows some elements several times (expand, unfold) no more than lies
    under it. An operator that looks up elements (x[i], embedding, gather, …) reads its
    indices, and of its source as much as it returns. Views, allocations and communication
    move nothing. Counted too high: what only writes into a part of an argument (x[i] = y),
    and what leaves an argument unread (fill_, copy_).
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
            self.bytes += sum(map(touched_bytes, _tensors((source, rest, kwargs, out))))
        if self._operators is not None:
            shapes = tuple(tuple(x.shape) for x in _tensors((args, kwargs)))
            counts = self.flops - before[0], self.bytes - before[1]
            done = [Operator(func._schema.name, shapes, *counts)] if any(counts) else []
            self._operators[before[2] :] = done  # in place of a composition's parts
        return out


def operators(function: Callable, *args, **kwargs) -> list[Operator]:
    """Calls the function; what each operator did that computed or moved something, in the order in which they ran.

    One that PyTorch composes of others stands for its parts.
    """
    found: list[Operator] = []
    with WorkCounter(found):
        function(*args, **kwargs)
    return found


def as_one_operator(function: Callable) -> Callable:
    """The function, of which a WorkCounter counts the FLOPs, but of the bytes only those of its tensors.

    It reads each argument once, and writes those that change and what it returns: as a kernel that keeps all else on the chip.
    """

    @functools.wraps(function)
    def fused(*args, **kwargs):
        counters = [mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, WorkCounter)]
        before = [counter.bytes for counter in counters]
        given = _tensors((args, kwargs))
        versions = [x._version for x in given]
        out = function(*args, **kwargs)
        written = [x for x, version in zip(given, versions, strict=True) if x._version != version]
        moved = sum(map(touched_bytes, (*given, *written, *_tensors(out))))
        for counter, total in zip(counters, before, strict=True):
            counter.bytes = min(counter.bytes, total + moved)  # one that had nothing to do has moved nothing
        return out

    return fused


def _tensors(tree) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def touched_bytes(x: torch.Tensor) -> int:
    """Bytes of memory that one pass over x touches: elements that lie on the same place count once."""
    elements = x.numel()
    if elements and x.layout == torch.strided:
        span = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
        elements = min(elements, span)
    return elements * x.element_size()


@functools.cache
def is_composite(func) -> bool:
    """Whether PyTorch has it as a composition of others: silu_backward; in inference mode also linear, matmul and so on."""
    return func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)


@functools.cache
def moves(func) -> bool:
    """Whether the operator touches its tensors' memory: not views, not allocations, not communication."""
    view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
    name = func._schema.name.removeprefix("aten::")
    return not (view or name.startswith(("empty", "new_empty", "_unsafe_view", "c10d", "_c10d")))
