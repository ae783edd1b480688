"""Checkpoints on disk: each rank writes one file, either complete or not there at all.

    saver = Saver(group)                      # on every rank
    saver.start(folder, parts, step=100)      # copies this rank's parts and returns
    ...                                       # training goes on while a thread writes
    saver.wait()                              # until the files of all ranks are on disk
    facts(folder)                             # {"step": 100}
    load(folder, parts)                       # by other ranks, with what they need

If several ranks have the same part, one of them writes it. A file is written under another
name, flushed to the disk, and renamed: so under its own name it's never half a file. All
files that were written together share a number, and the folder is a checkpoint as soon as
each rank's file is there. While they write, ranks send each other nothing.

A file has safetensors' format: eight bytes with the length of the header, the header in
JSON, the numbers. The last four bytes are the checksum of all others.
"""

import contextlib
import json
import math
import os
import re
import struct
import sys
import threading
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from manyranks.parallel.boxes import Box

Group = dist.ProcessGroup | None
_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {code: dtype for dtype, code in _CODES.items()}
_SUM, _CHUNK = "checksum", 1 << 20
_SUFFIX, _UNFINISHED = ".safetensors", ".writing"


class _Key(NamedTuple):
    """Describes a box to other ranks."""

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return math.prod(self.sizes) * self.dtype.itemsize


class Saver:
    """Writes checkpoints beside the training: first a copy in memory, then a thread.

    All ranks of the group make one, and call its methods together.

    group: the ranks that have parts; None for the default one, or a process alone
    """

    def __init__(self, group: Group = None):
        self.rank, self.ranks = _place(group)
        drawn = [os.urandom(4).hex()]
        if self.ranks > 1:
            dist.broadcast_object_list(drawn, group=group, group_src=0)
        self._group, self._number = group, drawn[0]
        self._keys: list[_Key] | None = None
        self._mine: list[int] = []  # of the parts, those that this rank writes
        self._copy = torch.empty(0, dtype=torch.uint8)
        self._writing: Future | None = None
        self._thread = ThreadPoolExecutor(1, "checkpoint", _yield_to_training)

    def start(self, folder: Path, parts: Iterable[Box], **facts: object) -> None:
        """Copies this rank's parts, and has a thread write the copy into the folder.

        If the last one isn't written yet, it waits for that first: there's one copy.

        parts: what this rank has; the second time the same ones, with other numbers
        facts: what facts() returns later; JSON has to know it

        Raises ValueError for parts that overlap or leave some of a tensor out, and OSError
        if this rank couldn't write the last one.
        """
        self._finish()
        parts = list(parts)
        keys = [_key(box) for box in parts]
        if keys != self._keys:
            self._mine, self._keys = self._dealt(keys), keys
        own = [parts[i] for i in self._mine]
        header, places = _header([keys[i] for i in self._mine], facts)
        if self._copy.numel() != places[-1]:
            pinned = any(box.tensor.is_cuda for box in own)
            self._copy = torch.empty(places[-1], dtype=torch.uint8, pin_memory=pinned)
        for box, at, end in zip(own, places, places[1:], strict=False):
            values = box.tensor.detach()
            _as(self._copy[at:end], values.dtype, values.shape).copy_(values)
        name = f"{self._number}-{self.rank}-of-{self.ranks}{_SUFFIX}"
        self._writing = self._thread.submit(_write, folder / name, header, self._copy)

    def wait(self) -> None:
        """Returns when the files of all ranks are on disk.

        Raises OSError if this rank couldn't write its own.
        """
        self._finish()
        if self.ranks > 1:
            dist.barrier(self._group)

    def close(self) -> None:
        """Ends the thread, once it has written what it has begun."""
        self._thread.shutdown()

    def _finish(self) -> None:
        writing, self._writing = self._writing, None
        if writing:
            writing.result()

    def _dealt(self, keys: list[_Key]) -> list[int]:
        """Returns which of its parts this rank writes, in the order of the file."""
        of_ranks = [keys]
        if self.ranks > 1:
            of_ranks = [[] for _ in range(self.ranks)]
            dist.all_gather_object(of_ranks, keys, self._group)
        holders: dict[_Key, list[int]] = {}
        for rank, own in enumerate(of_ranks):
            for key in dict.fromkeys(own):
                holders.setdefault(key, []).append(rank)
        _check_whole(holders)
        load, mine = [0] * self.ranks, []
        for key in sorted(holders, key=lambda key: -key.bytes):
            writer = min(holders[key], key=lambda rank: load[rank])
            load[writer] += key.bytes
            if writer == self.rank:
                mine.append(key)
        # Each starts at a multiple of its elements' size.
        mine.sort(key=lambda key: -key.dtype.itemsize)
        return [keys.index(key) for key in mine]


def save(folder: Path, parts: Iterable[Box], group: Group = None, **facts: object) -> None:
    """Writes a checkpoint and waits for it, as Saver's start() and wait() do."""
    with contextlib.closing(Saver(group)) as saver:
        saver.start(folder, parts, **facts)
        saver.wait()


def facts(folder: Path) -> dict[str, object]:
    """Returns the facts that save() was given.

    Raises ValueError for a folder without a complete checkpoint.
    """
    header, _ = _read_header(files(folder)[0])
    return json.loads(header["__metadata__"]["facts"])


@torch.no_grad()
def load(folder: Path, parts: Iterable[Box]) -> None:
    """Fills the boxes from the folder, each rank for itself.

    Raises ValueError for a folder without a complete checkpoint, and for a tensor that it
    doesn't have, or has in another shape or dtype.
    """
    stored = list(_stored(folder))
    there: dict[str, list[tuple[_Key, Tensor]]] = {}
    for key, tensor in stored:
        there.setdefault(key.name, []).append((key, tensor))
    for box in parts:
        shape, dtype = box.shape, box.tensor.dtype
        found = there.get(box.name, [])
        has = f"the shape {found[0][0].shape} and {found[0][0].dtype}" if found else "none"
        if not found or (found[0][0].shape, found[0][0].dtype) != (shape, dtype):
            raise ValueError(
                f"{box.name} has the shape {shape} and {dtype} here, and {has} in "
                f"{folder}: give a checkpoint of a model of the same sizes"
            )
        for key, tensor in found:
            _copy_common(box, key, tensor)


def files(folder: Path) -> list[Path]:
    """Returns the files of the folder's checkpoint, in the order of their ranks.

    Raises ValueError, with who hasn't written, if there isn't a complete one.
    """
    together: dict[tuple[str, int], dict[int, Path]] = {}
    for file in sorted(Path(folder).glob(f"*{_SUFFIX}")):
        if named := re.fullmatch(r"(\w+)-(\d+)-of-(\d+)", file.stem):
            number, rank, ranks = named.groups()
            together.setdefault((number, int(ranks)), {})[int(rank)] = file
    complete = [found for (_, ranks), found in together.items() if len(found) == ranks]
    if complete:
        last = max(complete, key=lambda found: max(map(os.path.getmtime, found.values())))
        return [last[rank] for rank in sorted(last)]
    if not together:
        raise ValueError(
            f"{folder} has no checkpoint: give a folder that save() has filled"
        )
    (_, ranks), found = max(together.items(), key=lambda item: len(item[1]))
    missing = ", ".join(str(rank) for rank in range(ranks) if rank not in found)
    raise ValueError(f"{folder} is incomplete: of {ranks} ranks, no file of {missing}")


def damage(file: Path) -> str:
    """Reads a file, compares its checksum, and says what's wrong; "" if nothing is."""
    try:
        size, total = file.stat().st_size, 0
        with open(file, "rb") as opened:
            for at in range(0, size - 4, _CHUNK):
                total = zlib.crc32(opened.read(min(_CHUNK, size - 4 - at)), total)
            stored = opened.read(4)
    except OSError as error:
        return f"{file.name} can't be read: {error.strerror}"
    if stored == struct.pack("<I", total):
        return ""
    with contextlib.suppress(Exception):  # whatever damaged JSON can be
        header, start = _read_header(file)
        if (expected := start + header[_SUM]["data_offsets"][1]) != size:
            return f"{file.name} has {size:,} bytes instead of {expected:,}"
    return f"{file.name} has changed since it was written: its checksum doesn't match"


def _place(group: Group) -> tuple[int, int]:
    if not dist.is_initialized():
        return 0, 1
    return dist.get_rank(group), dist.get_world_size(group)


def _key(box: Box) -> _Key:
    if box.tensor.dtype not in _CODES:
        known = ", ".join(str(dtype) for dtype in _CODES)
        raise ValueError(f"{box.name} has {box.tensor.dtype}: a checkpoint takes {known}")
    return _Key(*box[:3], tuple(box.tensor.shape), box.tensor.dtype)


def _check_whole(keys: Iterable[_Key]) -> None:
    """Checks that the parts of each tensor fill it, and don't overlap."""
    of_name: dict[tuple, list[_Key]] = {}
    for key in keys:
        of_name.setdefault((key.name, key.shape, key.dtype), []).append(key)
    if len({name for name, *_ in of_name}) < len(of_name):
        raise ValueError(
            "ranks disagree about a tensor's shape or dtype: give all the same"
        )
    for (name, shape, _), parts in of_name.items():
        apart = not any(_common(a, b) for i, a in enumerate(parts) for b in parts[:i])
        if not apart or sum(math.prod(p.sizes) for p in parts) != math.prod(shape):
            wrong = "leave some of it out" if apart else "overlap"
            raise ValueError(f"the ranks' parts of {name} {wrong}: give each element once")


def _common(a: _Key, b: _Key) -> list[tuple[int, int]]:
    """Returns where two boxes of one tensor overlap, per dimension; [] if they don't."""
    dims = zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True)
    found = [(max(at, start), min(at + n, start + m)) for at, n, start, m in dims]
    return found if all(start < stop for start, stop in found) else []


def _copy_common(box: Box, key: _Key, tensor: Tensor) -> None:
    if common := _common(_key(box), key):
        into, out_of = (
            tuple(slice(a - at, b - at) for (a, b), at in zip(common, offsets, strict=True))
            for offsets in (box.offsets, key.offsets)
        )
        box.tensor[into].copy_(tensor[out_of])


def _header(keys: list[_Key], facts: dict) -> tuple[bytes, list[int]]:
    """Returns a file's first bytes, then each tensor's start behind them, and the end."""
    places, entries = [0], {}
    for key in keys:
        places.append(places[-1] + key.bytes)
        entries[_stored_as(key)] = {
            "dtype": _CODES[key.dtype],
            "shape": key.sizes,
            "data_offsets": places[-2:],
        }
    of = {_stored_as(key): [key.name, key.shape, key.offsets] for key in keys}
    known = {"facts": json.dumps(facts), "parts": json.dumps(of)}
    end = [places[-1], places[-1] + 4]
    entries[_SUM] = {"dtype": "U8", "shape": [4], "data_offsets": end}
    text = json.dumps({"__metadata__": known} | entries).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, places


def _stored_as(key: _Key) -> str:
    return f"{key.name}{list(key.offsets)}"


def _yield_to_training() -> None:
    """Has this thread run when nobody else wants the processor, on Linux."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)


def _write(file: Path, header: bytes, numbers: Tensor) -> None:
    """Writes under another name, flushes, and renames: whoever finds it finds all of it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    body = memoryview(numbers.numpy())
    checksum = struct.pack("<I", zlib.crc32(body, zlib.crc32(header)))
    unfinished = file.with_suffix(_UNFINISHED)
    with open(unfinished, "wb") as opened:
        opened.write(header)
        opened.write(body)
        opened.write(checksum)
        opened.flush()
        os.fsync(opened.fileno())
    os.replace(unfinished, file)
    folder = os.open(file.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the name, too
    finally:
        os.close(folder)


def _read_header(file: Path) -> tuple[dict, int]:
    """Returns the header and where the numbers begin."""
    with open(file, "rb") as opened:
        (length,) = struct.unpack("<Q", opened.read(8))
        return json.loads(opened.read(length)), 8 + length


def _stored(folder: Path) -> Iterator[tuple[_Key, Tensor]]:
    """Returns what's in all files; the numbers stay on disk until somebody uses them."""
    for file in files(folder):
        header, start = _read_header(file)
        whole = torch.from_file(str(file), size=file.stat().st_size, dtype=torch.uint8)
        parts = json.loads(header["__metadata__"]["parts"])
        for stored_as, (name, *place) in parts.items():
            entry = header[stored_as]
            at, end = (start + offset for offset in entry["data_offsets"])
            dtype = _DTYPES[entry["dtype"]]
            key = _Key(name, *map(tuple, (*place, entry["shape"])), dtype)
            yield key, _as(whole[at:end], dtype, key.sizes)


def _as(bytes_: Tensor, dtype: torch.dtype, shape: Iterable[int]) -> Tensor:
    return bytes_.view(dtype).view(tuple(shape))
