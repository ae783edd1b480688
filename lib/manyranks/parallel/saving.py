"""Checkpoints on disk: each rank writes one file, which is there whole or not at all.

    saver = Saver(group)                      # on every rank
    saver.start(folder, parts, step=100)      # copies this rank's parts and returns
    ...                                       # training goes on while a thread writes
    saver.wait()                              # until the files of all ranks are on disk
    facts(folder)                             # {"step": 100}
    load(folder, parts)                       # by other ranks, with what they need

If several ranks have the same part, one of them writes it. A file is written under another
name, flushed to the disk, and renamed: so under its own name it's never half a file. All
files of one save share a number, and the folder is a checkpoint as soon as each rank's file
is there. If several saves are complete, the newest counts. While they write, ranks send
each other nothing.

A file has safetensors' format: eight bytes with the length of the header, the header in
JSON, the numbers. The last four bytes are the checksum of all others.
"""

import contextlib
import errno
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
from manyranks.parallel.collectives.messages import Group

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
_SUFFIX, UNFINISHED = ".safetensors", ".writing"


class _Key(NamedTuple):
    """Describes a box to the other ranks."""

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return math.prod(self.sizes) * self.dtype.itemsize


class Saver:
    """Writes checkpoints while training continues: copies, then writes from a thread.

    All ranks of the group make one, and call its methods together.

    group: the ranks that have parts; None for the default one, or a process alone
    """

    def __init__(self, group: Group = None):
        self.rank, self.ranks = rank_and_size(group)
        drawn = [os.urandom(4).hex()]
        if self.ranks > 1:
            dist.broadcast_object_list(drawn, group=group, group_src=0)
        self._group, self._number, self._saves = group, drawn[0], 0
        self._keys: list[_Key] | None = None
        self._mine: list[int] = []  # of the parts, those that this rank writes
        self._parts, self._own = None, []  # of the last call: all, and those to write
        self._copy = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._writing: Future | None = None
        self._thread = ThreadPoolExecutor(1, "checkpoint", _yield_to_training)

    def start(self, folder: Path, parts: Iterable[Box], **facts: object) -> None:
        """Copies this rank's parts, and has a thread write the copy into the folder.

        Waits for the previous write first, because there's one buffer.

        parts: what this rank has; on later calls the same boxes, with other numbers (a
            tuple of them is checked once). Those without elements are left out
        facts: what facts() returns later; JSON has to know it

        Raises ValueError for parts that overlap or don't fill their tensors, or differ
        from the first call's; OSError if this rank couldn't write the last checkpoint.
        """
        self._finish()
        known = parts is self._parts and type(parts) is tuple  # it can't have changed
        if not known:
            full = [box for box in parts if box.tensor.numel()]
            keys = [_key(box) for box in full]
            if self._keys is None:
                self._mine, self._keys = self._dealt(keys), keys
            if keys != self._keys:
                raise ValueError(
                    "these differ from the first call's boxes: make another Saver"
                )
            self._parts, self._own = parts, [full[i] for i in self._mine]
        own = self._own
        header, places = _header([self._keys[i] for i in self._mine], facts)
        if self._copy.numel() != places[-1]:
            pinned = any(box.tensor.is_cuda for box in own)
            self._copy = torch.empty(
                places[-1], dtype=torch.uint8, device="cpu", pin_memory=pinned
            )
        for box, at, end in zip(own, places, places[1:], strict=False):
            values = box.tensor.detach()
            _as(self._copy[at:end], values.dtype, values.shape).copy_(values)
        self._saves += 1
        number = f"{self._number}_{self._saves}"
        name = f"{number}-{self.rank}-of-{self.ranks}{_SUFFIX}"
        self._writing = self._thread.submit(_write, folder / name, header, self._copy)

    def check(self) -> None:
        """Raises OSError if this rank turned out to be unable to write the last one."""
        if self._writing and self._writing.done():
            self._finish()

    def wrote(self, folder: Path) -> bool:
        """Returns whether the folder has the files that all ranks wrote in one save."""
        return any(
            number.startswith(f"{self._number}_") and _is_whole(found, ranks)
            for (number, ranks), found in _written(folder).items()
        )

    def wait(self) -> None:
        """Returns when the files of all ranks are on disk.

        Raises OSError on all ranks if one of them couldn't write its own.
        """
        error = None
        try:
            self._finish()
        except OSError as raised:
            error = raised
        failed = torch.tensor(float(error is not None), device=device(self._group))
        if self.ranks > 1:
            dist.all_reduce(failed, group=self._group)
        if error or failed:
            raise error or OSError(f"{failed:.0f} of {self.ranks} ranks couldn't write")

    def close(self) -> None:
        """Waits for the write in progress and ends the thread.

        Raises OSError if this rank couldn't write its file.
        """
        self._thread.shutdown()
        self._finish()

    def _finish(self) -> None:
        writing = self._writing
        self._writing = None
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
        where = {key: i for i, key in enumerate(keys)}
        return [where[key] for key in mine]


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

    Raises ValueError for a folder without a complete checkpoint, and for a tensor that is
    missing there, or has another shape or dtype.
    """
    there: dict[str, list[Box]] = {}
    for part in _stored(folder):
        there.setdefault(part.name, []).append(part)
    for box in (box for box in parts if box.tensor.numel()):
        here = f"the shape {tuple(box.shape)} and {box.tensor.dtype}"
        found = there.get(box.name)
        has = f"the shape {found[0].shape} and {found[0].tensor.dtype}" if found else "none"
        if has != here:
            raise ValueError(
                f"{box.name} has {here} here, and {has} in {folder}: load a checkpoint of "
                "a model with the same sizes"
            )
        for part in found:
            _copy_common(box, part)


def files(folder: Path) -> list[Path]:
    """Returns the files of the folder's checkpoint, in the order of their ranks.

    Raises ValueError, with who hasn't written, if there isn't a complete one.
    """
    together = _written(folder)
    whole = [found for (_, ranks), found in together.items() if _is_whole(found, ranks)]
    if whole:
        last = max(whole, key=lambda found: max(map(os.path.getmtime, found.values())))
        return [last[rank] for rank in sorted(last)]
    if not together:
        raise ValueError(
            f"{folder} has no checkpoint: give a folder that save() has filled"
        )
    (_, ranks), found = max(together.items(), key=lambda item: len(item[1]))
    missing = ", ".join(str(rank) for rank in range(ranks) if rank not in found)
    raise ValueError(
        f"{folder} is incomplete: of {ranks} ranks, there's no file of {missing}"
    )


def _written(folder: Path) -> dict[tuple[str, int], dict[int, Path]]:
    """Returns the files of each save, by its number and its ranks, and then by rank."""
    together: dict[tuple[str, int], dict[int, Path]] = {}
    for file in sorted(Path(folder).glob(f"*{_SUFFIX}")):
        if named := re.fullmatch(r"(\w+)-(\d+)-of-(\d+)", file.stem):
            number, rank, ranks = named.groups()
            together.setdefault((number, int(ranks)), {})[int(rank)] = file
    return together


def _is_whole(found: dict[int, Path], ranks: int) -> bool:
    return found.keys() == set(range(ranks))


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
    return f"{file.name} is corrupt: its checksum doesn't match"


def rank_and_size(group: Group) -> tuple[int, int]:
    """Returns this process's rank and the group's size; 0 and 1 if it's alone."""
    if not dist.is_initialized():
        return 0, 1
    return dist.get_rank(group), dist.get_world_size(group)


def device(group: Group) -> str:
    """Returns where a collective of the group takes its tensors."""
    alone = not dist.is_initialized()
    return "cpu" if alone or "gloo" in str(dist.get_backend_config(group)) else "cuda"


def _key(box: Box) -> _Key:
    if box.tensor.dtype not in _CODES:
        known = ", ".join(str(dtype) for dtype in _CODES)
        raise ValueError(f"{box.name} has {box.tensor.dtype}: a checkpoint takes {known}")
    return _Key(*box[:3], tuple(box.tensor.shape), box.tensor.dtype)


def _check_whole(keys: Iterable[_Key]) -> None:
    """Checks that the parts of each tensor fill it without overlap."""
    of_name: dict[tuple, list[_Key]] = {}
    for key in keys:
        of_name.setdefault((key.name, key.shape, key.dtype), []).append(key)
    if len({name for name, *_ in of_name}) < len(of_name):
        raise ValueError(
            "ranks disagree about a tensor's shape or dtype: give all the same"
        )
    for (name, shape, _), parts in of_name.items():
        if _overlap(parts) or sum(math.prod(p.sizes) for p in parts) != math.prod(shape):
            raise ValueError(
                f"the ranks' parts of {name} overlap or don't fill it: give each element "
                "once"
            )


def _overlap(parts: list[_Key]) -> bool:
    """Compares each box with those that begin before it and don't end there."""
    open_: list[_Key] = []
    for part in sorted(parts, key=lambda part: part.offsets):
        first = part.offsets[:1]
        open_ = [o for o in open_ if not first or o.offsets[0] + o.sizes[0] > first[0]]
        if any(_common(other, part) is not None for other in open_):
            return True
        open_.append(part)
    return False


def _common(a: _Key, b: _Key) -> list[tuple[int, int]] | None:
    """Finds where two boxes of one tensor overlap, per dimension; None if they don't."""
    dims = zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True)
    found = [(max(at, start), min(at + n, start + m)) for at, n, start, m in dims]
    return found if all(start < stop for start, stop in found) else None


def _copy_common(box: Box, part: Box) -> None:
    if (common := _common(_key(box), _key(part))) is not None:
        into, out_of = (
            tuple(slice(a - at, b - at) for (a, b), at in zip(common, offsets, strict=True))
            for offsets in (box.offsets, part.offsets)
        )
        box.tensor[into].copy_(part.tensor[out_of])


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
    """Lowers this thread's priority, so that training comes first (on Linux)."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # it may be forbidden
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)


def _write(file: Path, header: bytes, numbers: Tensor) -> None:
    """Writes under another name, flushes, and renames: whoever finds it finds all of it.

    Raises OSError with the file's name, and leaves nothing of it on a full disk.
    """
    body = memoryview(numbers.numpy())
    checksum = struct.pack("<I", zlib.crc32(body, zlib.crc32(header)))
    unfinished = file.with_suffix(UNFINISHED)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with open(unfinished, "wb") as opened:
            opened.write(header)
            opened.write(body)
            opened.write(checksum)
            opened.flush()
            os.fsync(opened.fileno())
        os.replace(unfinished, file)
        _flush_names(file.parent)
        _flush_names(file.parent.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise OSError(error.errno, error.strerror, str(file)) from error


def _flush_names(folder: Path) -> None:
    """Lets the names in a folder reach the disk, as fsync of a file doesn't."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    except OSError as error:  # some file systems have no such thing
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(opened)


def _read_header(file: Path) -> tuple[dict, int]:
    """Returns the header and where the numbers begin."""
    with open(file, "rb") as opened:
        (length,) = struct.unpack("<Q", opened.read(8))
        return json.loads(opened.read(length)), 8 + length


def _stored(folder: Path) -> Iterator[Box]:
    """Returns what's in all files; the numbers stay on disk until somebody uses them."""
    for file in files(folder):
        header, start = _read_header(file)
        whole = torch.from_file(str(file), size=file.stat().st_size, dtype=torch.uint8)
        parts = json.loads(header["__metadata__"]["parts"])
        for stored_as, (name, shape, offsets) in parts.items():
            entry = header[stored_as]
            at, end = (start + offset for offset in entry["data_offsets"])
            tensor = _as(whole[at:end], _DTYPES[entry["dtype"]], entry["shape"])
            yield Box(name, tuple(shape), tuple(offsets), tensor)


def _as(bytes_: Tensor, dtype: torch.dtype, shape: Iterable[int]) -> Tensor:
    return bytes_.view(dtype).view(tuple(shape))
