"""Tensors that a learner's code makes: the largest of them, and those that are still there."""

import gc
import time
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

_LOOKS, _MOMENT = 10, 0.05  # seconds


class Made(TorchDispatchMode):
    """A context manager. largest: bytes of the largest memory that an operator inside took."""

    def __init__(self):
        super().__init__()
        self.largest = 0
        self._given: dict[int, StorageWeakRef] = {}  # which keep their numbers from being used again
        self._made: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        for tensor in _tensors((*args, *(kwargs or {}).values())):
            if (key := tensor.untyped_storage()._cdata) not in self._made:
                self._given[key] = StorageWeakRef(tensor.untyped_storage())
        result = function(*args, **(kwargs or {}))
        for tensor in _tensors([result]):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._given:
                self._made[storage._cdata] = StorageWeakRef(storage)
                self.largest = max(self.largest, storage.nbytes())
        return result

    def largest_alive(self, limit: int) -> int:
        """Bytes of the largest that is there; looks again while it reaches the limit: a call's thread lets go a little late."""
        for _ in range(_LOOKS):
            if (size := self._largest_alive()) < limit:
                break
            gc.collect()
            time.sleep(_MOMENT)
        return size

    def _largest_alive(self) -> int:
        found = (torch.UntypedStorage._new_with_weak_ptr(reference.cdata) for reference in self._made.values())
        return max((storage.nbytes() for storage in found if storage is not None), default=0)


def _tensors(values: Iterable) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from _tensors(value)
        elif isinstance(value, Tensor) and value.layout == torch.strided:
            yield value
