"""Chooses which operators' results a checkpoint keeps: those costly to compute again.

A matrix product reads little and computes much; adding, normalizing or GELU is the other
way round. So a checkpoint that keeps its products computes little again and holds less than
everything.

Source: Korthikanti et al., arXiv 2205.05198, section 5, for attention; He and Yu,
"Transcending Runtime-Memory Tradeoffs in Checkpointing by being Fusion Aware", MLSys 2023.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

Policy = Callable[[OpOverload], bool]

_aten = torch.ops.aten
_PRODUCTS = {
    *(_aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm, _aten.convolution),
    *(_aten._scaled_mm, _aten._scaled_dot_product_flash_attention_for_cpu),
    *(_aten._scaled_dot_product_flash_attention, _aten._scaled_dot_product_cudnn_attention),
    _aten._scaled_dot_product_efficient_attention,
}


def products(operator: OpOverload) -> bool:
    """Keep matrix products, convolutions and fused attention."""
    return operator.overloadpacket in _PRODUCTS


def weight_products(operator: OpOverload) -> bool:
    """Keep products with weights, not attention's core, which multiplies activations."""
    return operator.overloadpacket in (_aten.mm, _aten.addmm)


class Keeping:
    """Keeps results of operators in a function's first run, and hands them out in others.

    keeps: which; None for none. An operator that draws random numbers always runs, for the
    next ones depend on it; so does one whose result is a view or is changed in place later.
    """

    def __init__(self, keeps: Policy | None):
        self._keeps = keeps
        self._noted: list[_Noted] = []
        self._taken = False

    def wrapped(self, function: Callable) -> Callable:
        """The function, whose chosen operators run in the first call only."""
        if self._keeps is None:
            return function

        def run(*args, **kwargs):
            with _Again(self) if self._taken else _First(self):
                return function(*args, **kwargs)

        return run

    def chosen(self, operator: OpOverload, args: tuple, kwargs: dict) -> bool:
        """Returns whether this operator's result is to be kept."""
        return (
            self._keeps(operator)
            and not any(result.alias_info for result in operator._schema.returns)
            and not _draws(operator, args, kwargs)
        )

    def note(self, operator: OpOverload, result: Any) -> None:
        """The first run has made this result."""
        leaves, structure = tree_flatten(result)
        leaves = [_alias(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._noted.append(_Noted(operator, leaves, structure))

    def take(self) -> list[Tensor]:
        """The tensors kept, for autograd to save; they are not held here any more."""
        self._taken = True
        return [tensor for noted in self._noted for tensor in noted.take()]

    def give(self, tensors: Sequence[Tensor]) -> None:
        """Takes back what take() returned, for the next run, which lets go what it used."""
        rest = iter(tensors)
        self._next = deque([(noted.operator, noted.filled(rest)) for noted in self._noted])

    def again(self, operator: OpOverload, args: tuple, kwargs: dict) -> Any:
        """The kept result. Raises RuntimeError where the first run had another operator."""
        first, result = self._next.popleft() if self._next else (None, None)
        if first is not operator:
            raise RuntimeError(
                f"the function ran {first} the first time and {operator} now: "
                "it must do the same each time"
            )
        return operator(*args, **kwargs) if result is None else result


class _Noted:
    """An operator's result, and how often its tensors had been changed in place."""

    def __init__(self, operator: OpOverload, leaves: list, structure: Any):
        self.operator, self._leaves, self._structure = operator, leaves, structure
        self._versions = [leaf._version for leaf in leaves if isinstance(leaf, Tensor)]

    def take(self) -> list[Tensor]:
        """Returns its tensors, which it lets go; none where one was changed since."""
        tensors = [leaf for leaf in self._leaves if isinstance(leaf, Tensor)]
        self._kept = [tensor._version for tensor in tensors] == self._versions
        self._leaves = [
            _PLACE if isinstance(leaf, Tensor) else leaf for leaf in self._leaves
        ]
        return tensors if self._kept else []

    def filled(self, tensors: Iterator[Tensor]) -> Any:
        """The result, made of the next tensors; None where it is to be computed again."""
        if not self._kept:
            return None
        leaves = [
            next(tensors).detach() if leaf is _PLACE else leaf for leaf in self._leaves
        ]
        return tree_unflatten(leaves, self._structure)


_PLACE = object()  # of a tensor


class _First(TorchDispatchMode):
    def __init__(self, keeping: Keeping):
        super().__init__()
        self.keeping = keeping

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs := kwargs or {}))
        if self.keeping.chosen(function, args, kwargs):
            self.keeping.note(function, result)
        return result


class _Again(TorchDispatchMode):
    def __init__(self, keeping: Keeping):
        super().__init__()
        self.keeping = keeping

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self.keeping.chosen(function, args, kwargs):
            return self.keeping.again(function, args, kwargs)
        return function(*args, **kwargs)


def _alias(tensor: Tensor) -> Tensor:
    """The same memory without a graph. Both count changes in place together.

    Below autograd, where a dispatch mode runs, views do so only when they are told to.
    """
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def _draws(operator: OpOverload, args: tuple, kwargs: dict) -> bool:
    """Returns whether it draws random numbers. Fused attention does only with dropout."""
    if torch.Tag.nondeterministic_seeded not in operator.tags:
        return False
    names = [argument.name for argument in operator._schema.arguments]
    if "dropout_p" not in names:
        return True
    return (dict(zip(names, args, strict=False)) | kwargs).get("dropout_p", 0) > 0
