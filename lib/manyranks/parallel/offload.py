"""Offload: an optimizer's states in files, with one parameter's in memory at a time.

Training with Adam takes 16 bytes per parameter. It needs 12 of them only in step(): the
master and two moments. A file on a fast disk can hold them. It is mapped into memory, so
that the optimizer works on it as on any tensor: a page comes when it is touched, and after
each parameter its pages are given back.

    optimizer = OffloadedOptimizer(model.parameters(), torch.optim.AdamW, folder, lr=1e-3)

Such an optimizer reads and writes 24 bytes per parameter per step, and waits for the disk.
Each rank offloads its own shards: N ranks on several disks share that, too.
Source: Rajbhandari et al., "ZeRO-Infinity: Breaking the GPU Memory Wall for Extreme Scale
Deep Learning", arXiv 2104.07857, sections 5.1.1 and 6.3.
"""

import mmap
import os
import tempfile
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from manyranks.parallel.shard import local

_FORGET = getattr(mmap, "MADV_DONTNEED", None)  # Windows has none, and forgets unasked


class Mapped(NamedTuple):
    """A file in memory, and the tensor that it holds."""

    memory: mmap.mmap
    tensor: Tensor


class OffloadedOptimizer:
    """Any elementwise torch optimizer, its states in memory-mapped files.

    params, **kwargs: as optimizer_class takes them; params may be groups
    folder: on a disk with room for the states; the files have no names any more and end
        with the process
    masters: the parameters go into files, too: the shards of FullyShardedDataParallel with
        a compute_dtype

    Nothing else may share their memory.
    Each parameter has its own optimizer, which steps before the next one does.
    Raises ValueError for parameters that are not on the CPU, and without parameters.
    """

    def __init__(
        self,
        params: Iterable,
        optimizer_class: type[torch.optim.Optimizer],
        folder: str | os.PathLike,
        masters: bool = False,
        **kwargs,
    ):
        self._folder, self._masters, self._kwargs = folder, masters, kwargs
        self._class = optimizer_class
        self.optimizers: list[torch.optim.Optimizer] = []
        self._files: list[list[Mapped]] = []  # of each optimizer
        listed = list(params)
        if not listed:
            raise ValueError("params is empty: give model.parameters(), not yet iterated")
        for group in listed if isinstance(listed[0], dict) else [{"params": listed}]:
            self.add_param_group(group)

    def add_param_group(self, param_group: dict) -> None:
        """Adds parameters, as a torch optimizer does."""
        params = param_group["params"]
        for p in [params] if isinstance(params, Tensor) else params:
            if p.device.type != "cpu":
                raise ValueError(f"a parameter on {p.device}: only the CPU's are mapped")
            group = {**param_group, "params": [p]}
            self.optimizers.append(self._class([group], **self._kwargs))
            self._files.append([])
            if self._masters:
                self._files[-1].append(to_file(local(p).detach(), self._folder))
                p.data = self._files[-1][-1].tensor

    @property
    def param_groups(self) -> list[dict]:
        """The groups, one for each parameter."""
        return [group for o in self.optimizers for group in o.param_groups]

    @property
    def state(self) -> dict[Tensor, dict]:
        """The optimizers' states, by parameter."""
        return {p: state for o in self.optimizers for p, state in o.state.items()}

    def step(self) -> None:
        """Takes one step, by parameter; what a file holds leaves memory behind it."""
        for optimizer, files in zip(self.optimizers, self._files, strict=True):
            optimizer.step()
            for state in optimizer.state.values():
                self._move(state, files)
            for memory, _ in files if _FORGET is not None else ():
                # They are shared with the file, which keeps what was written to them.
                memory.madvise(_FORGET)

    def _move(self, state: dict, files: list[Mapped]) -> None:
        """Moves what a parameter's state has in memory into files: all of it, at first."""
        there = {id(tensor) for _, tensor in files}
        for name, value in state.items():
            if isinstance(value, Tensor) and local(value).dim() and id(value) not in there:
                files.append(to_file(local(value), self._folder))
                state[name] = files[-1].tensor

    def zero_grad(self) -> None:
        """Forgets the gradients."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def resident_bytes(self) -> int | None:
        """Bytes of the files that are in this process's memory now; None but on Linux."""
        starts = {tensor.data_ptr() for files in self._files for _, tensor in files}
        if not os.path.exists("/proc/self/smaps"):
            return None
        size, ours = 0, False
        with open("/proc/self/smaps") as lines:
            for first, *rest in map(str.split, lines):
                if "-" in first and not first.endswith(":"):
                    ours = int(first.split("-")[0], 16) in starts
                elif first == "Rss:" and ours:
                    size += 1024 * int(rest[0])
        return size


def to_file(tensor: Tensor, folder: str | os.PathLike) -> Mapped:
    """A copy that lies in a file without a name, in this folder."""
    if not tensor.numel():
        return Mapped(mmap.mmap(-1, mmap.PAGESIZE), tensor)
    with tempfile.TemporaryFile(dir=folder) as file:
        file.truncate(tensor.nbytes)
        memory = mmap.mmap(file.fileno(), tensor.nbytes)
    copy = torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape)
    return Mapped(memory, copy.copy_(tensor))
