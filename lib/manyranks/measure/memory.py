"""Bytes in memory, counted on live tensors: the same on every machine, unlike what the operating system reports."""

import weakref
from collections.abc import Callable, Iterable

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from manyranks.measure import completions


class PeakBytes(TorchDispatchMode):
    """A context manager; `.peak_bytes` is the most that the storages of the tensors used inside took at one time.

    Counted after each operator, every storage once; one that was resized counts from the operator that uses it next.
    Memory that an operator takes and returns inside itself is not seen. Tensors of a collective that is done don't
    count if only gloo's thread still holds them: how long it does depends on how busy the machine is.
    counts: while it is False, tensors are met but the peak stays.
    """

    def __init__(self, counts: bool = True):
        super().__init__()
        self.peak_bytes, self.counts, self._communicates = 0, counts, False
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}  # with the bytes of each when it was last seen
        self._most = 0  # the sum of these: no less than is alive, but for storages resized since they were seen

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(issubclass(kind, FakeTensor) for kind in types):
            return function(*args, **(kwargs or {}))  # of shapes only: a DTensor asks with them what an operator gives
        if any(kind not in (torch.Tensor, torch.nn.Parameter) for kind in types):
            return NotImplemented  # a DTensor comes back here as the plain tensors it is made of
        result = function(*args, **(kwargs or {}))
        self._communicates |= "c10d" in function.namespace
        self._meet((*args, *(kwargs or {}).values(), result))
        if self.counts and self._most > self.peak_bytes:
            self.peak_bytes = max(self.peak_bytes, self._settled_bytes())
        return result

    def _settled_bytes(self) -> int:
        live = self.live_bytes()
        if live > self.peak_bytes and self._communicates:
            completions.let_go()
            live = self.live_bytes()
        return live

    def _meet(self, values: Iterable) -> None:
        for value in values:
            if isinstance(value, (list, tuple)):
                self._meet(value)
            elif isinstance(value, torch.Tensor) and value.layout == torch.strided:
                self._see(value.untyped_storage())

    def meet(self, tensors: Iterable[torch.Tensor], storages: Iterable[torch.UntypedStorage] = ()) -> None:
        """Counts these, too, from now on, whether an operator has used them or not."""
        self._meet(tensors)
        for storage in storages:
            self._see(storage)

    def _see(self, storage: torch.UntypedStorage) -> None:
        # One that is there keeps its address, dead or not; a fake tensor's is on "meta" and takes no memory.
        reference, before = self._live.get(storage._cdata, (None, 0))
        now = storage.nbytes()
        if (reference is None or now > before) and storage.device.type != "meta":
            self._live[storage._cdata] = reference or StorageWeakRef(storage), now
            self._most += now - before

    def live_bytes(self) -> int:
        """Counts the bytes of the tensors used inside that are alive now."""
        # Ask each storage anew: fully_shard gives memory back by resizing storages, which no operator shows.
        met = {key: torch.UntypedStorage._new_with_weak_ptr(reference.cdata) for key, (reference, _) in self._live.items()}
        self._live = {key: (self._live[key][0], storage.nbytes()) for key, storage in met.items() if storage is not None}
        self._most = sum(size for _, size in self._live.values())
        return self._most


class SavedBytes(torch.autograd.graph.saved_tensors_hooks):
    """A context manager; `.bytes` says what the forward passes inside have saved for backward and still hold.

    Every storage counts once, however many tensors show parts of it; the storages of `parameters`, which are there
    anyway, do not. If a checkpoint inside saves something, it counts; what it drops does not. Hooks of the same kind
    inside hide what they save.
    """

    def __init__(self, parameters: Iterable[torch.Tensor] = ()):
        super().__init__(self._save, lambda saved: saved.tensor)
        self._saved: weakref.WeakSet[_Saved] = weakref.WeakSet()
        self._own = {parameter.untyped_storage()._cdata for parameter in parameters}

    def __enter__(self) -> "SavedBytes":
        super().__enter__()
        return self

    def _save(self, tensor: torch.Tensor) -> "_Saved":
        saved = _Saved(tensor.detach())  # with its graph, an operator's output would keep the operator, and this it
        self._saved.add(saved)
        return saved

    @property
    def bytes(self) -> int:
        tensors = [saved.tensor for saved in self._saved if saved.tensor.layout == torch.strided]
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
        return sum(storage.nbytes() for key, storage in storages.items() if key not in self._own)


class _Saved:
    """A stand-in that autograd's graph holds in place of a tensor, and lets go of with itself."""

    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor


def saved_bytes(function: Callable, *args, parameters: Iterable[torch.Tensor] = (), **kwargs) -> int:
    """Bytes that function(*args, **kwargs) leaves for its backward: the measured twin of theory.memory.layer_activations.

    Counted over storages, each once; without `parameters` and, where function is a module, its parameters and buffers. The
    arguments count where they are saved.
    """
    module = isinstance(function, torch.nn.Module)
    own = [*parameters, *(function.parameters() if module else ()), *(function.buffers() if module else ())]
    with SavedBytes(own) as saved:
        result = function(*args, **kwargs)
    total = saved.bytes
    del result  # until here it holds what was saved
    return total
