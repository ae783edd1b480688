"""Activation offloading: what forward keeps waits in the host's memory.

    memory = HostMemory()
    offload_modules(model, which, memory)     from now on, for these modules of the model

Inside such a module, each tensor that autograd wants to keep goes to the host, and a handle
stays. When backward reaches the module, its tensors come back. The tensors of the module
before it set out, so that they're there when they're needed. A storage that several
operators keep travels once. Parameters stay.

The copies wait for each other here, so that the order can be read. Megatron-Core's run on a
separate stream and hide behind computing. On a CPU the host is the device.

Source of the idea: Megatron-Core's fine-grained activation offloading.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks


class Away(NamedTuple):
    """Stands in for a tensor that's at the host: its call, its storage, and its view."""

    call: int
    storage: int
    dtype: torch.dtype
    view: tuple


class Event(NamedTuple):
    """A storage that traveled.

    way: "out" to the host, or "in"
    call: of a module, by number
    bytes: of the storage
    """

    way: str
    call: int
    bytes: int


class HostMemory:
    """The tensors of all offloaded modules, by call in forward's order.

    least: bytes of the smallest storage that travels
    .events: what has traveled since they were last cleared
    """

    def __init__(self, least: int = 1024):
        self.least, self.events = least, []
        # call -> its storages, at the host and those that came back
        self._there: dict[int, list[torch.UntypedStorage]] = {}
        self._here: dict[int, list[torch.UntypedStorage]] = {}
        self._calls, self._device = 0, torch.device("cpu")

    def offloaded(self, function: Callable, stay: set[int]) -> Callable:
        """Wraps a function: what it keeps waits at the host, but for these addresses."""

        def run(*args, **kwargs):
            call = self._calls
            self._calls += 1
            sources: dict[int, tuple[int, torch.UntypedStorage]] = {}  # alive until the end

            def pack(tensor: Tensor) -> Tensor | Away:
                storage = tensor.untyped_storage()
                if storage.data_ptr() in stay or storage.nbytes() < self.least:
                    return tensor
                if storage.data_ptr() not in sources:
                    sources[storage.data_ptr()] = self._out(call, storage), storage
                view = tensor.storage_offset(), tensor.shape, tensor.stride()
                return Away(call, sources[storage.data_ptr()][0], tensor.dtype, view)

            with saved_tensors_hooks(pack, self._unpack):
                return function(*args, **kwargs)

        return run

    def _out(self, call: int, storage: torch.UntypedStorage) -> int:
        there = self._there.setdefault(call, [])
        self._device = storage.device
        there.append(storage.clone() if storage.device.type == "cpu" else storage.cpu())
        self.events.append(Event("out", call, storage.nbytes()))
        return len(there) - 1

    def _in(self, call: int) -> None:
        """Starts to bring a call's storages back; what is here already stays."""
        if call in self._there:
            there = self._there.pop(call)
            self._here[call] = [_copied(storage, self._device) for storage in there]
            self.events.append(
                Event("in", call, sum(storage.nbytes() for storage in there))
            )

    def _unpack(self, kept: Tensor | Away) -> Tensor:
        if not isinstance(kept, Away):
            return kept
        near = kept.call, kept.call - 1
        for call in near:
            self._in(call)
        self._here = {call: here for call, here in self._here.items() if call in near}
        if kept.call not in self._here:
            raise RuntimeError(
                f"backward came back to call {kept.call}, whose tensors have been let go: "
                "run it once, without retain_graph, and one call after the other"
            )
        storage = self._here[kept.call][kept.storage]
        tensor = torch.empty(0, dtype=kept.dtype, device=self._device)
        return tensor.set_(storage, *kept.view)


def _copied(storage: torch.UntypedStorage, device: torch.device) -> torch.UntypedStorage:
    return storage.clone() if device.type == "cpu" else storage.cuda(device)


def offload_modules(
    model: nn.Module, which: Callable[[nn.Module], bool], memory: HostMemory
) -> list[str]:
    """Lets what these modules keep wait at the host from now on. Returns their names.

    A checkpoint inside such a module works, too: then its input is what travels.
    To undo it: del module.forward.
    Raises ValueError where no module is chosen, or one of them lies in another.
    """
    chosen = {name: module for name, module in model.named_modules() if which(module)}
    if not chosen:
        raise ValueError(
            "which(module) is true for no module of the model: nothing to offload"
        )
    inner = [
        b for a in chosen for b in chosen if b != a and (not a or b.startswith(f"{a}."))
    ]
    if inner:
        raise ValueError(
            f"{inner[0]!r} lies in another chosen module: choose one of the two"
        )
    stay = {p.untyped_storage().data_ptr() for p in model.parameters()}
    for module in chosen.values():
        module.forward = memory.offloaded(module.forward, stay)
    return list(chosen)
