"""A disk whose power can fail, for exercise 12_failures.

It's in memory. Python's open() and os reach it where a path begins with FOLDER, and the real one elsewhere.
"""

import builtins
import errno
import io
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from manyranks.measure.journal import Stopped

FOLDER = "/checkpoints"
_FIRST = 1_000_000  # file descriptors from here on are the disk's
_CALLS = (
    "open read write lseek close fsync fdatasync sync replace rename unlink remove stat lstat fstat listdir mkdir ftruncate"
)
_CALLS += " chmod access"
_REFUSED = "link symlink writev pwrite pread truncate statvfs rmdir utime scandir"
_PATHS = (int, str, bytes, os.PathLike)
_ROOM = 1 << 20  # bytes


class _Node:
    """A file. data: as programs see it; safe: what of it has come to the disk."""

    def __init__(self, data: bytes = b""):
        self.data, self.safe = bytearray(data), bytes(data)

    def after_a_cut(self) -> list[bytes]:
        """Returns each content that a power cut can leave: all, the safe part, and something between."""
        now = bytes(self.data)
        return [now] if now == self.safe else [self.safe, now, now[: len(now) // 2]]


class _Raw(io.RawIOBase):
    """An open file, without a buffer."""

    def __init__(self, disk: "Disk", number: int, node: _Node, reads: bool, writes: bool, name: str):
        self._disk, self._number, self.node, self._reads, self._writes = disk, number, node, reads, writes
        self._at, self.name, self.mode = 0, name, "rb+" if reads and writes else "wb" if writes else "rb"

    def readable(self):
        return self._reads

    def writable(self):
        return self._writes

    def seekable(self):
        return True

    def fileno(self):
        self._checkClosed()
        return self._number

    def close(self):
        self._disk.closed(self._number)
        super().close()

    def seek(self, offset, whence=0):
        self._checkClosed()
        self._at = max(0, offset + (0, self._at, len(self.node.data))[whence])
        return self._at

    def tell(self):
        return self._at

    def readinto(self, buffer):
        self._checkClosed()
        found = self.node.data[self._at : self._at + len(buffer)]
        buffer[: len(found)] = found
        self._at += len(found)
        self._disk.read += len(found)
        return len(found)

    def write(self, data):
        self._checkClosed()
        data = bytes(data)
        self._disk.take_room(len(data))
        self.node.data[self._at : self._at + len(data)] = data
        self._at += len(data)
        self._disk.did("a write")
        return len(data)

    def truncate(self, size=None):
        self._checkClosed()
        del self.node.data[self._at if size is None else size :]
        self._disk.did("a truncate")
        return len(self.node.data)


def _least_first(content: bytes | None) -> tuple[int, bytes]:
    return (-1, b"") if content is None else (len(content), content)


def in_words(content: bytes | None, known: dict[bytes | None, str]) -> str:
    """Says what a file holds. None: no file; known: contents that have a name."""
    if content in known:
        return known[content]
    if not content:
        return "no file at all" if content is None else "an empty file"
    full = max(len(one or b"") for one in known)
    return f"{len(content):,} of {full:,} bytes" if len(content) < full else "the bytes of two saves"


class Disk:
    """A folder, and what a power cut can leave of it.

    Data is safe after fsync of its file, and a name after fsync of the folder. Names that aren't safe yet come to the disk in
    order, but any number of them; data that isn't safe comes in full, in part, or not at all.

    room: bytes that can still be written; look: called with the name of each step once it's done
    """

    def __init__(self, files: dict[str, bytes], room: int = _ROOM, look: Callable[[str], Any] = lambda step: None):
        self.names = {path: _Node(data) for path, data in files.items()}
        self.read, self.look = 0, look
        self._room, self._since, self._numbers = room, [dict(self.names)], dict[int, _Raw | None]()
        self._made_so_far = 0

    @property
    def files(self) -> dict[str, bytes]:
        """Path -> content, as programs see it."""
        return {path: bytes(node.data) for path, node in self.names.items()}

    def after_a_cut(self, path: str, known: dict[bytes | None, str]) -> list[str]:
        """Returns what a file can hold if the power fails now, in words, the least first. known: contents that have a name."""
        nodes = [names.get(path) for names in self._since]
        contents = {content for node in nodes for content in (node.after_a_cut() if node else [None])}
        return [in_words(one, known) for one in sorted(contents, key=_least_first)]

    def did(self, step: str, names: bool = False) -> None:
        """Notes a step. names: whether it has changed a name."""
        self._since += [dict(self.names)] * names
        self.look(step)

    def take_room(self, size: int) -> None:
        self._room -= size
        if self._room < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    @contextmanager
    def mounted(self) -> Iterator["Disk"]:
        """Inside, open() and os reach it."""
        ours = [(module, "open", self._opened) for module in (builtins, io)]
        ours += [(os, name, getattr(self, f"_{name}")) for name in _CALLS.split()]
        ours += [(os, name, partial(self._refused, name)) for name in _REFUSED.split() if hasattr(os, name)]
        before = [(module, name, getattr(module, name)) for module, name, _ in ours]
        try:
            for (module, name, stand_in), (*_, real) in zip(ours, before, strict=True):
                setattr(module, name, partial(stand_in, real))
            yield self
        finally:
            for one in before:
                setattr(*one)

    # What stands in for open() and os. real: what a call for another path goes to

    @staticmethod
    def _own(path: Any) -> str:
        """The path, where it's on this disk; else an empty one."""
        if isinstance(path, int):
            return ""
        name = os.path.normpath(os.fsdecode(path))
        return name if name == FOLDER or name.startswith(FOLDER + "/") else ""

    def _refused(self, name, real, *args, **kwargs):
        if any(one in self._numbers if isinstance(one, int) else self._own(one) for one in args if isinstance(one, _PATHS)):
            raise Stopped(f"os.{name} doesn't reach this disk", "use the calls that the text lists")
        return real(*args, **kwargs)

    def closed(self, number: int) -> None:
        """Forgets an open file's number."""
        self._numbers.pop(number, None)

    def _found(self, path: str) -> _Node:
        if path not in self.names:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return self.names[path]

    def _opened(self, real, file, mode="r", buffering=-1, *args, opener=None, **kwargs):
        writes, reads = bool({*mode} & {*"wax+"}), bool({*mode} & {*"r+"})
        flags = os.O_RDWR if writes and reads else os.O_WRONLY if writes else os.O_RDONLY
        flags |= os.O_CREAT * bool({*mode} & {*"wax"}) | os.O_TRUNC * ("w" in mode) | os.O_EXCL * ("x" in mode)
        if isinstance(file, int) and file in self._numbers:
            number = file
        elif not isinstance(file, int) and self._own(file):
            number = opener(file, flags) if opener else os.open(file, flags)
        else:
            return real(file, mode, buffering, *args, opener=opener, **kwargs)
        if "b" not in mode:
            raise Stopped(f"open({file!r:.60}, {mode!r}) is for text", "a checkpoint is bytes: open(path, 'wb')")
        if not (raw := self._numbers.get(number)):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), file)
        if "a" in mode:
            raw.seek(0, 2)
        kind = io.BufferedRandom if writes and reads else io.BufferedWriter if writes else io.BufferedReader
        return raw if buffering == 0 else kind(raw)

    def _made(self, path: str, flags: int) -> int:
        number, self._made_so_far = _FIRST + self._made_so_far, self._made_so_far + 1
        if path == FOLDER:
            self._numbers[number] = None
            return number
        if flags & os.O_CREAT and flags & os.O_EXCL and path in self.names:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        access, new = flags & os.O_ACCMODE, bool(flags & os.O_CREAT) and path not in self.names
        if new:
            self.names[path] = _Node()
        node = self._found(path)
        if flags & os.O_TRUNC:
            node.data.clear()
        self._numbers[number] = _Raw(self, number, node, access != os.O_WRONLY, access != os.O_RDONLY, path)
        if new or flags & os.O_TRUNC:
            self.did("open", names=new)
        return number

    def _open(self, real, path, flags, *args, **kwargs):
        own = self._own(path)
        return self._made(own, flags) if own else real(path, flags, *args, **kwargs)

    def _raw(self, number: Any) -> tuple[int, Any]:
        """The descriptor, and what is open there; False where it isn't this disk's."""
        number = number if isinstance(number, int) else number.fileno()
        return number, self._numbers.get(number, False)

    def _write(self, real, number, data):
        number, raw = self._raw(number)
        return raw.write(data) if raw else real(number, data)

    def _read(self, real, number, size):
        number, raw = self._raw(number)
        return raw.read(size) if raw else real(number, size)

    def _lseek(self, real, number, offset, whence):
        number, raw = self._raw(number)
        return raw.seek(offset, whence) if raw else real(number, offset, whence)

    def _close(self, real, number):
        number, raw = self._raw(number)
        if raw is False:
            return real(number)
        return raw.close() if raw else self.closed(number)

    def _fsync(self, real, number):
        number, raw = self._raw(number)
        if raw is False:
            return real(number)
        if raw is None:
            self._since = [dict(self.names)]
            return self.did("fsync of the folder")
        raw.node.safe = bytes(raw.node.data)
        return self.did("fsync")

    _fdatasync = _fsync

    def _sync(self, real):
        for node in self.names.values():
            node.safe = bytes(node.data)
        self._since = [dict(self.names)]
        self.did("sync")

    def _replace(self, real, source, to, **kwargs):
        paths = self._own(source), self._own(to)
        if not any(paths):
            return real(source, to, **kwargs)
        if not all(paths):
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), source, None, to)
        self._found(paths[0])
        self.names[paths[1]] = self.names.pop(paths[0])
        return self.did("the rename", names=True)

    _rename = _replace

    def _unlink(self, real, path, **kwargs):
        if not (own := self._own(path)):
            return real(path, **kwargs)
        self._found(own)
        del self.names[own]
        return self.did("a removal", names=True)

    _remove = _unlink

    def _stat(self, real, path, **kwargs):
        if isinstance(path, int):
            return self._fstat(real, path)
        if not (own := self._own(path)):
            return real(path, **kwargs)
        if own == FOLDER:
            return os.stat_result((stat.S_IFDIR | 0o700, 1, 1, 1, 0, 0, 0, 0, 0, 0))
        node = self._found(own)
        return os.stat_result((stat.S_IFREG | 0o600, id(node), 1, 1, 0, 0, len(node.data), 0, 0, 0))

    _lstat = _stat

    def _fstat(self, real, number):
        number, raw = self._raw(number)
        return self._stat(real, raw.name if raw else FOLDER) if raw is not False else real(number)

    def _access(self, real, path, *args, **kwargs):
        return own == FOLDER or own in self.names if (own := self._own(path)) else real(path, *args, **kwargs)

    def _listdir(self, real, path="."):
        own = self._own(path)
        return [name.removeprefix(f"{own}/") for name in self.names if name.startswith(f"{own}/")] if own else real(path)

    def _mkdir(self, real, path, *args, **kwargs):
        if own := self._own(path):
            if own == FOLDER:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
            raise Stopped(f"a folder was made: {own:.60}", f"files lie in {FOLDER}, and need no folder of their own")
        return real(path, *args, **kwargs)

    def _chmod(self, real, path, *args, **kwargs):
        return None if self._own(path) else real(path, *args, **kwargs)

    def _ftruncate(self, real, number, size):
        number, raw = self._raw(number)
        return raw.truncate(size) if raw else real(number, size)
