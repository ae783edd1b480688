"""A folder for exercise 12: real files, whose names are kept here, and a record of what happens to them.

Python's open() and os reach it where a path begins with its name: a learner's rank may write files, but its fences let it
neither rename nor remove any, so names are kept here. The record says what was done, and what names and files held
before and after it. Another process, where no learner's code runs, works out from it what a power cut would leave.
"""

import builtins
import errno
import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any

from manyranks.measure.aliases import replaced
from manyranks.measure.audit import audited
from manyranks.measure.journal import Stopped

FOLDER = "/checkpoints"
_CALLS = "open write replace rename unlink remove listdir mkdir fsync fdatasync sync"
_READS = "stat lstat access chmod truncate utime"  # these take a path, and change nothing that the record doesn't see
_REFUSED = "link symlink statvfs rmdir scandir mkfifo mknod"
_BUFFER = 8192  # bytes that Python keeps: file systems ask for more, and for less than a part of a save
_new = count()  # of files that are made, in this process


class _Unbuffered(io.FileIO):
    """A file that Python doesn't buffer."""

    def write(self, data: Any) -> int:
        return os.write(self.fileno(), data)


class Disk:
    """A folder with these files.

    contents: all that files have held, each once; records of several disks share it; None for no record.
    notes: a folder; beside it is another one for all disks of this process, which goes where the notes go.
    trouble: "full" where a file's fsync finds no room, "short" where the first write that Python doesn't buffer ends halfway.
    folder: its name.
    look: called before each fsync, rename and removal.
    steps: what was done, "" before it is; to which file; name -> its file, and the number of what that holds.
    opened: bytes of the files that were opened to be read.
    """

    def __init__(
        self, files: dict[str, bytes], contents: list | None, notes: str, trouble="", look=lambda: None, folder: str = FOLDER
    ):
        self.steps: list[tuple[str, str, dict[str, tuple[str, int]]]] = []
        self.opened, self._contents, self._trouble, self._look, self._ours = 0, contents, trouble, look, False
        self._folder, self._home = folder, os.path.join(os.path.dirname(notes), f"disk-{os.getpid()}")
        os.makedirs(self._home, mode=0o700, exist_ok=True)
        self._names = {path: os.path.join(self._home, f"given-{i}") for i, path in enumerate(files)}
        for path, data in files.items():
            with open(self._names[path], "wb") as file:
                file.write(data)
        self._note("given")

    @property
    def files(self) -> dict[str, bytes]:
        found = {}
        for path, place in self._names.items():
            with self._opens(), io.FileIO(place) as file:
                found[path] = file.readall()
        return found

    @contextmanager
    def _opens(self) -> Iterator[None]:
        """Inside, real files of this folder may be opened."""
        before = self._ours
        self._ours = True
        try:
            yield
        finally:
            self._ours = before

    def _heard(self, event: str, args: tuple) -> None:
        """Raises Stopped where a file is opened by its real name, as with an open() that was kept from before."""
        named = event == "open" and not self._ours and isinstance(args[0], str | bytes)
        if named and os.path.realpath(os.fsdecode(args[0])).startswith(self._home):
            raise Stopped("a file of the check's was opened by its real name", f"files lie in {self._folder}: use these paths")

    @property
    def halfway(self) -> dict[str, bytes]:
        """Returns what files held just before the first step was made: a process that is killed there leaves this."""
        names = next((names for what, _, names in self.steps if not what), {})
        return {path: self._contents[number] for path, (_, number) in names.items()}

    def _note(self, what: str, place: str = "") -> None:
        now = {}
        for path, data in () if self._contents is None else self.files.items():
            if data not in self._contents:
                self._contents.append(data)
            now[path] = os.path.basename(self._names[path]), self._contents.index(data)
        self.steps.append((what, os.path.basename(place), now))

    def _before(self) -> None:
        self._note("")
        self._look()

    @contextmanager
    def mounted(self, function: Any) -> Iterator["Disk"]:
        """Inside, open() and os reach it where the learner's function calls them."""
        ours = {(module, "open"): self._open_file for module in (builtins, io)}
        ours |= {(os, name): getattr(self, f"_{name}") for name in _CALLS.split()}
        ours |= {(os, name): self._reads for name in _READS.split()}
        ours |= {(os, name): partial(self._refused, name) for name in _REFUSED.split() if hasattr(os, name)}
        stand_ins = {(module, name): partial(one, getattr(module, name)) for (module, name), one in ours.items()}
        try:
            with replaced(stand_ins, function), audited(self._heard):
                yield self
        finally:
            self._note("the end")

    # The stand-ins for open() and os. real: what it stands for

    def _own(self, path: Any) -> str:
        """The path where it is on this disk, else an empty one."""
        name = os.path.normpath(os.fsdecode(path)) if isinstance(path, str | bytes | os.PathLike) else ""
        return name if name == self._folder or name.startswith(self._folder + "/") else ""

    def _place(self, own: str) -> str:
        """Returns where it really is, or would be."""
        new = os.path.join(self._home, f"{os.getpid()}-{next(_new)}")
        return self._home if own == self._folder else self._names.get(own, new)

    def _reached(self, own: str, makes: bool, reads: bool, call: Callable[[str], Any]) -> Any:
        """Opens a file of ours. makes: whether it may be new, or emptied; reads: whether what it has may be read."""
        place = self._place(own)
        try:
            with self._opens():
                result = call(place)
        except OSError as error:
            error.filename = own
            raise
        if makes:
            self._names[own] = place
            self._note("open", place)
        if reads and own != self._folder:
            self.opened += os.path.getsize(place)
        return result

    def _open_file(self, real, file, mode="r", buffering=-1, *args, opener=None, **kwargs):
        buffering = _BUFFER if buffering == -1 and "b" in mode else buffering
        if not (own := self._own(file)) or opener:  # an opener calls os.open
            return real(file, mode, buffering, *args, opener=opener, **kwargs)
        if "b" not in mode:
            raise Stopped(f"open({file!r:.60}, {mode!r}) is for text", "a checkpoint is bytes: open(path, 'wb')")
        makes, reads = bool({*mode} & {*"wax"}), bool({*mode} & {*"r+"})
        if buffering == 0:
            return self._reached(own, makes, reads, lambda place: _Unbuffered(place, mode))
        return self._reached(own, makes, reads, lambda place: real(place, mode, buffering, *args, **kwargs))

    def _open(self, real, path, flags, *args, **kwargs):
        if (at := kwargs.get("dir_fd")) is not None and os.path.samestat(os.fstat(at), os.stat(self._home)):
            raise Stopped("os.open with dir_fd doesn't reach this disk", "give the whole path")
        if not (own := self._own(path)):
            return real(path, flags, *args, **kwargs)
        makes, reads = bool(flags & (os.O_CREAT | os.O_TRUNC)), flags & os.O_ACCMODE != os.O_WRONLY
        return self._reached(own, makes, reads, lambda place: real(place, flags, *args, **kwargs))

    def _reads(self, real, path, *args, **kwargs):
        return real(self._place(own) if (own := self._own(path)) else path, *args, **kwargs)

    def _refused(self, name, real, *args, **kwargs):
        if any(map(self._own, args)):
            raise Stopped(f"os.{name} doesn't reach this disk", "use the calls that the text lists")
        return real(*args, **kwargs)

    def _place_of(self, number: int) -> str:
        """Returns which of our files, or the folder, is open under this number, else an empty name."""
        opened = os.fstat(number)
        places = (self._home, *self._names.values())
        return next((place for place in places if os.path.samestat(os.stat(place), opened)), "")

    def _write(self, real, number, data):
        if self._trouble == "short" and self._place_of(number):
            self._trouble = ""
            data = bytes(data)[: (len(data) + 1) // 2]
        return real(number, data)

    def _fsync(self, real, number):
        number = number if isinstance(number, int) else number.fileno()
        if not (place := self._place_of(number)):
            return real(number)
        self._before()
        if self._trouble == "full" and place != self._home:
            self._note("refused", place)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self._note("fsync of the folder" if place == self._home else "fsync", place)

    _fdatasync = _fsync

    def _sync(self, real):
        self._before()
        self._note("sync")

    def _replace(self, real, source, to, **kwargs):
        paths = self._own(source), self._own(to)
        if not any(paths):
            return real(source, to, **kwargs)
        if not all(paths):
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), source, None, to)
        self._before()
        self._names[paths[1]] = self._taken(paths[0])
        return self._note("the rename")

    _rename = _replace

    def _unlink(self, real, path, **kwargs):
        if not (own := self._own(path)):
            return real(path, **kwargs)
        self._before()
        self._taken(own)
        return self._note("a removal")

    _remove = _unlink

    def _taken(self, own: str) -> str:
        if own not in self._names:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), own)
        return self._names.pop(own)

    def _listdir(self, real, path="."):
        own = self._own(path)
        return [name.removeprefix(f"{own}/") for name in self._names if name.startswith(f"{own}/")] if own else real(path)

    def _mkdir(self, real, path, *args, **kwargs):
        own = self._own(path)
        if own and own != self._folder:
            raise Stopped(f"a folder was made: {own:.60}", f"files lie in {self._folder}, and need no folder of their own")
        return real(self._home if own else path, *args, **kwargs)
