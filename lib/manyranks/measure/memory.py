"""Bytes in memory, counted on live tensors: the same on every machine, unlike what the operating system reports."""

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakBytes(TorchDispatchMode):
    """A context manager; `.peak_bytes` is the most that the storages of the tensors used inside took at one time.

    Counted after each operator, every storage once; what an operator takes and returns inside itself is not seen.
    """

    def __init__(self):
        super().__init__()
        self.peak_bytes = 0
        self._live: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(kind not in (torch.Tensor, torch.nn.Parameter) for kind in types):
            return NotImplemented  # a DTensor comes back here as the plain tensors it is made of
        result = function(*args, **(kwargs or {}))
        self._meet([*tree_leaves(args), *tree_leaves(kwargs or {}), *tree_leaves(result)])
        self.peak_bytes = max(self.peak_bytes, self.live_bytes())
        return result

    def _meet(self, values: list) -> None:
        for value in values:
            if isinstance(value, torch.Tensor) and value.layout == torch.strided:
                storage = value.untyped_storage()
                self._live[storage._cdata] = StorageWeakRef(storage)

    def live_bytes(self) -> int:
        """Of the tensors used inside, those that are alive now."""
        self._live = {key: reference for key, reference in self._live.items() if not reference.expired()}
        # Ask each storage anew: fully_shard gives memory back by resizing storages, which no operator shows.
        live = [torch.UntypedStorage._new_with_weak_ptr(reference.cdata) for reference in self._live.values()]
        return sum(storage.nbytes() for storage in live if storage is not None)
