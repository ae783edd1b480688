"""Counts what a Triton kernel asks of the memory, lane by lane, while the interpreter runs it.

A warp is 32 consecutive lanes of the flattened block, each with one element, in the order the kernel has them.
(CUDA would run them so. Triton's compiler may deal elements to lanes in another order, and turn tiles in shared memory.)
Every address is counted from the start of its tensor's storage, which lies at a multiple of 512 bytes on a GPU, so the counts
are the same on every machine. They are requests, before any cache, and a load that is masked off asks for nothing.
"""

import bisect
import math
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch

from manyranks.measure.location import Place

_WARP, _SECTOR, _LINE = 32, 5, 7  # lanes; the bits of an address within a sector of 32 bytes and a line of 128
_NOWHERE = np.iinfo(np.int64).max


class OutOfBounds(ValueError):
    """A lane asks for an address that belongs to none of the kernel's tensors."""


@dataclass
class Access:
    """Counts what one line of a kernel loads or stores, in all programs of one launch.

    kind: "load", "store" or "atomic".
    tensor: the kernel's argument.
    where: file and line.
    itemsize: bytes of an element.
    lanes, masked: that took part, and that the mask left out.
    warps: with a lane that took part.
    sectors, lines: of 32 and of 128 bytes, that these warps touched, each warp counted apart.
    first: the first warp's addresses in bytes from the start of the storage; None for a lane that is masked off.
    """

    kind: str
    tensor: str
    where: Place
    itemsize: int
    lanes: int = 0
    masked: int = 0
    warps: int = 0
    sectors: int = 0
    lines: int = 0
    first: tuple[int | None, ...] = ()

    @property
    def requested_bytes(self) -> int:
        """Bytes that the lanes ask for."""
        return self.lanes * self.itemsize

    @property
    def moved_bytes(self) -> int:
        """Bytes that move for it, in whole sectors."""
        return self.sectors << _SECTOR

    @property
    def coalescing(self) -> float:
        """Bytes asked for ÷ bytes moved: at best 1 if no two lanes share an element."""
        return self.requested_bytes / self.moved_bytes if self.sectors else 1.0


@dataclass
class Launch:
    """A launch of one kernel on its grid.

    grid: programs, in up to three dimensions.
    accesses: by kind, tensor and line, in the kernel's order.
    flops: of tl.dot, a multiply-add counts as two.
    dot_bytes: of the two operands of the largest tl.dot, which a block keeps in shared memory, once per stage.
    trans_bytes: of the largest tile that tl.trans turns.
    tile: elements of the largest tile that a program makes; with three dimensions, along the two largest of them.
    stored: the most elements that one program stores.
    """

    kernel: str
    grid: tuple[int, ...]
    accesses: list[Access] = field(default_factory=list)
    flops: int = 0
    dot_bytes: int = 0
    trans_bytes: int = 0
    tile: int = 0
    stored: int = 0


class Counted(NamedTuple):
    """The results of `count`.

    result: what the function returned
    launches: the kernels it started, in their order
    """

    result: Any
    launches: list[Launch]

    @property
    def accesses(self) -> list[Access]:
        return [access for launch in self.launches for access in launch.accesses]

    @property
    def flops(self) -> int:
        """FLOPs of tl.dot."""
        return sum(launch.flops for launch in self.launches)

    def requested_bytes(self, tensor: str | None = None, kind: str | None = None) -> int:
        """Bytes that lanes ask for.

        tensor: count only this argument
        kind: only "load", "store" or "atomic"
        """
        return sum(access.requested_bytes for access in self._of(tensor, kind))

    def sectors(self, tensor: str | None = None, kind: str | None = None) -> int:
        """Sectors of 32 bytes that warps touch.

        tensor, kind: as in requested_bytes
        """
        return sum(access.sectors for access in self._of(tensor, kind))

    def moved_bytes(self, tensor: str | None = None, kind: str | None = None) -> int:
        """Bytes of these sectors."""
        return self.sectors(tensor, kind) << _SECTOR

    @property
    def coalescing(self) -> float:
        """Bytes asked for ÷ bytes moved, in all."""
        return self.requested_bytes() / self.moved_bytes() if self.sectors() else 1.0

    def _of(self, tensor: str | None, kind: str | None) -> Iterator[Access]:
        names = {access.tensor for access in self.accesses}
        if tensor is not None and tensor not in names:
            raise ValueError(f"tensor={tensor!r}: the kernels use {', '.join(sorted(names)) or 'none'}")
        if kind not in (None, "load", "store", "atomic"):
            raise ValueError(f"kind={kind!r}: give 'load', 'store' or 'atomic'")
        return (each for each in self.accesses if tensor in (None, each.tensor) and kind in (None, each.kind))


def count(function: Callable, *args, **kwargs) -> Counted:
    """Runs a function, and counts what the Triton kernels that it starts load, store and multiply.

    function: called with the rest; it may be a kernel's launcher, or anything else.
    Raises OutOfBounds, before memory is touched, if a lane's address lies outside the storages of the kernel's tensors.
    Raises RuntimeError if kernels are compiled, because only the interpreter shows addresses.
    Raises ValueError for tensors on a GPU.
    Raises what a kernel itself raises.
    """
    launches: list[Launch] = []
    try:
        with _watched(launches):
            result = function(*args, **kwargs)
    except Exception as error:
        cause = error
        while type(cause).__name__ == "InterpreterError" and cause.__cause__ is not None:
            cause = cause.__cause__  # the interpreter wraps what a kernel raises, once for every function in between
        if cause is error:
            raise
        raise cause from None
    return Counted(result, launches)


def bank_conflicts(addresses: Iterable[int]) -> int:
    """Counts the turns that shared memory takes for one warp; 1 is no conflict.

    addresses: in bytes, of 4-byte words, one per lane. Word i lies in bank i mod 32; a bank gives one word a turn, to all lanes
    that ask for it. Source: NVIDIA, CUDA C++ Programming Guide, section "Shared Memory", 5.x and later.
    """
    words = {address // 4 for address in addresses}
    return max(Counter(word % 32 for word in words).values(), default=0)


@contextmanager
def _watched(launches: list[Launch]) -> Iterator[None]:
    """Inside, the interpreter tells a _Watch what it's about to do."""
    from manyranks.measure.interpreter import INTERPRETED, GridExecutor, InterpreterBuilder, TensorHandle

    if not INTERPRETED:
        raise RuntimeError("kernels are compiled here: start Python with TRITON_INTERPRET=1 to count what they move")
    watch = _Watch(launches)
    notes = {(InterpreterBuilder, name): note for name, note in _NOTES.items() if hasattr(InterpreterBuilder, name)}
    notes[GridExecutor, "__call__"] = _Watch.launch
    notes[TensorHandle, "__init__"] = lambda watch, _, data, *rest, **more: watch.made(data)
    with ExitStack() as patches:
        for (owner, name), note in notes.items():
            patches.enter_context(patch.object(owner, name, _noted(partial(note, watch), getattr(owner, name))))
        yield


def _noted(note: Callable, original: Callable) -> Callable:
    """Returns the method with a note of its arguments before each call."""

    def call(*args, **kwargs):
        note(*args, **kwargs)
        return original(*args, **kwargs)

    return call


class _Watch:
    """Counts into the latest launch."""

    def __init__(self, launches: list[Launch]):
        self.launches = launches
        self.not_theirs = __file__, os.path.dirname(sys.modules["triton"].__file__) + os.sep
        self.found: dict[tuple, Access] = {}
        self.starts: list[int] = []  # of the tensors' storages, ascending
        self.storages: list[tuple[int, str]] = []  # where each ends, and its argument's name
        self.stored: Counter[tuple] = Counter()  # elements, by program

    def launch(self, executor, *args, **kwargs) -> None:
        named = dict(zip(executor.arg_names, args, strict=False)) | kwargs
        spans = sorted(_spans(named))
        self.starts, self.storages = [start for start, *_ in spans], [(end, name) for _, end, name in spans]
        self.found, self.stored = {}, Counter()
        executor.grid = tuple(executor.grid(named) if callable(executor.grid) else executor.grid)
        self.launches.append(Launch(executor.fn.__name__, executor.grid))

    def made(self, data) -> None:
        if self.launches:
            launch, sides = self.launches[-1], sorted(np.shape(data))
            launch.tile = max(launch.tile, math.prod(sides[-2:] if len(sides) == 3 else sides))

    def turn(self, tile) -> None:
        if not tile.dtype.is_ptr():  # addresses stay in registers
            launch = self.launches[-1]
            launch.trans_bytes = max(launch.trans_bytes, tile.data.nbytes)

    def product(self, a, b) -> None:
        launch = self.launches[-1]
        launch.flops += 2 * a.data.size * b.data.shape[-1]
        launch.dot_bytes = max(launch.dot_bytes, a.data.nbytes + b.data.nbytes)

    def store(self, kind: str, builder, pointers, value, mask: np.ndarray) -> None:
        launch, program = self.launches[-1], builder.grid_idx
        self.stored[program] += self.access(kind, pointers, mask, value.data.itemsize)
        launch.stored = max(launch.stored, self.stored[program])

    def access(self, kind: str, pointers, mask: np.ndarray, least: int = 1) -> int:
        """Notes what lanes load or store, and returns how many do. least: bytes that a lane writes, or swaps."""
        itemsize = max(least, pointers.get_element_ty().primitive_bitwidth // 8)
        addresses = pointers.data.astype(np.int64).reshape(-1)
        active = np.broadcast_to(mask, pointers.data.shape).reshape(-1)
        where = self.line()
        lanes = int(np.count_nonzero(active))
        start, tensor = self.storage(addresses if lanes == addresses.size else addresses[active], itemsize, kind, where)
        launch, key = self.launches[-1], (kind, tensor, where)
        if (access := self.found.get(key)) is None:
            access = self.found[key] = Access(kind, tensor, where, itemsize)
            launch.accesses.append(access)
        access.lanes += lanes
        access.masked += addresses.size - lanes
        if lanes:
            self.touch(access, addresses - start, active, lanes)
        return lanes

    def touch(self, access: Access, offsets: np.ndarray, active: np.ndarray, lanes: int) -> None:
        if not access.first:
            first = zip(offsets[:_WARP].tolist(), active[:_WARP].tolist(), strict=True)
            access.first = tuple(offset if on else None for offset, on in first)
        if lanes < offsets.size:
            offsets = np.where(active, offsets, _NOWHERE)
        if missing := -offsets.size % _WARP:
            offsets = np.concatenate([offsets, np.full(missing, _NOWHERE)])
        warps = offsets.reshape(-1, _WARP)
        if (np.diff(warps) < 0).any():
            warps = np.sort(warps)
        access.warps += int(np.count_nonzero(warps[:, 0] != _NOWHERE))
        # The sorted order changes once for every new piece. The piece that masked lanes form isn't counted.
        nowhere = int(np.count_nonzero(warps[:, -1] == _NOWHERE))
        for name, bits in ("sectors", _SECTOR), ("lines", _LINE):
            pieces = warps >> bits
            found = len(warps) + int(np.count_nonzero(pieces[:, 1:] != pieces[:, :-1])) - nowhere
            setattr(access, name, getattr(access, name) + found)

    def line(self) -> Place:
        """The kernel's line: the innermost one that isn't Triton's or ours."""
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_code.co_filename.startswith(self.not_theirs):
            frame = frame.f_back
        return Place(frame.f_code.co_filename, frame.f_lineno)

    def storage(self, addresses: np.ndarray, itemsize: int, kind: str, where: Place) -> tuple[int, str]:
        """The storage that all addresses are in: where it starts, and the argument's name."""
        if not addresses.size:
            return 0, "?"
        low, high = int(addresses.min()), int(addresses.max())
        index = bisect.bisect_right(self.starts, low) - 1
        if index >= 0 and high + itemsize <= self.storages[index][0]:
            return self.starts[index], self.storages[index][1]
        raise self.outside(addresses, itemsize, kind, where)

    def outside(self, addresses: np.ndarray, itemsize: int, kind: str, where: Place) -> OutOfBounds:
        launch = self.launches[-1]
        if not self.starts:
            return OutOfBounds(
                f"{launch.kernel}, line {where.line}: the kernel got no tensor to {kind}: give it one as an argument"
            )
        nearest = max(0, bisect.bisect_right(self.starts, int(np.median(addresses))) - 1)
        start, (end, tensor) = self.starts[nearest], self.storages[nearest]
        wrong = addresses[(addresses < start) | (addresses + itemsize > end)]
        element, size = (int(wrong[0]) - start) // itemsize, (end - start) // itemsize
        lanes = f"{len(wrong)} lanes {kind}" if len(wrong) > 1 else f"1 lane {kind}s"
        return OutOfBounds(
            f"{launch.kernel}, line {where.line}: {lanes} outside {tensor}, the first at element {element}, "
            f"and its storage has {size}: give the {kind} a mask, or correct the address"
        )


# The interpreter's operations that are noted, by name, each with the watch and with what the method gets. It can't run those
# that it lacks: before Triton 3.8 create_dot_scaled.
_NOTES: dict[str, Callable] = {
    "create_masked_load": lambda watch, _, pointers, mask, *rest, **more: watch.access("load", pointers, mask.data),
    "create_masked_store": lambda watch, builder, to, value, mask, *rest: watch.store("store", builder, to, value, mask.data),
    "create_atomic_rmw": lambda watch, builder, _, to, value, mask, *rest: watch.store("atomic", builder, to, value, mask.data),
    "create_atomic_cas": lambda watch, builder, to, known, *rest: watch.store("atomic", builder, to, known, np.True_),
    "create_dot": lambda watch, _, a, b, *rest: watch.product(a, b),
    "create_dot_scaled": lambda watch, _, a, a_scale, a_format, b, *rest: watch.product(a, b),
    "create_trans": lambda watch, _, tile, *rest: watch.turn(tile),
}


def _spans(arguments: dict[str, Any]) -> Iterator[tuple[int, int, str]]:
    """Yields where each argument's storage starts and ends. Arguments that share one are called by the first one's name."""
    seen = set()
    for name, value in arguments.items():
        base = getattr(value, "base", value)  # a tensor descriptor's
        if isinstance(base, torch.Tensor) and base.device.type != "cpu":
            raise ValueError(
                f"{name} is on {base.device}: count with tensors on the CPU, where a kernel asks for the same bytes"
            )
        if isinstance(base, torch.Tensor) and (start := base.untyped_storage().data_ptr()) not in seen:
            seen.add(start)
            yield start, start + base.untyped_storage().nbytes(), name
