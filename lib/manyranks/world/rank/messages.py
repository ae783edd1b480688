"""Objects over a socket: cloudpickle for functions and values, tensors' bytes beside the pickle and never through it.

A message is a header of lengths, then frames. `pack` makes an object's: the pickle, then one per storage; `process`
puts a kind before them, and `watch` a number behind. A received tensor stands directly on the frame it was read into,
and tensors that share a storage still share it on the other side.
"""

import builtins
import importlib
import io
import pickle
import socket
import struct
import sys
import time
import types
from collections.abc import Callable
from typing import Any

import cloudpickle
import numpy as np

Frame = bytes | np.ndarray | pickle.PickleBuffer

_FRAMES = 64  # of a message of strangers
_LATER = 1.0  # seconds after its time that a message is still read, if it's there: the reader may have had no processor
_COUNT = struct.Struct("<I")
EXACTLY = _COUNT.size
_IPYTHON = "IPython.core.interactiveshell"  # a notebook's open() is a function of this module
_AT_ONCE = 1 << 16  # a message up to this size is one system call on each side


class _Pickler(cloudpickle.Pickler):
    def reducer_override(self, value):
        if travels := getattr(type(value), "__travels__", None):
            return travels(value)  # it stands for something that only the other side has
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(value, torch.UntypedStorage) and value.device.type != "meta":
            return _storage, (pickle.PickleBuffer(_bytes_of(value)),)
        if torch is not None and isinstance(value, torch.storage.TypedStorage):
            return _typed_storage, (value._untyped_storage, value.dtype)
        if isinstance(value, types.FunctionType) and value.__globals__.get("__name__") == _IPYTHON and value.__name__ == "open":
            return getattr, (sys.modules[__name__], "_open")
        if _is_special_module(value):
            return importlib.import_module, (value.__name__,)
        if _is_part_of_a_module(value):
            return getattr, (sys.modules[value.__name__.rpartition(".")[0]], value.__name__.rpartition(".")[2])
        return super().reducer_override(value)


def _open(*args, **kwargs):
    """Stands on a rank for a notebook's open(): Python's own, also where something stands in for that later."""
    return builtins.open(*args, **kwargs)


def _is_special_module(value) -> bool:
    """An imported module of a special class, as torch.distributed.config: cloudpickle takes it for any other object.

    It also sends modules that a function does not use, but whose names look like something in it, such as `config`.
    """
    special = isinstance(value, types.ModuleType) and type(value) is not types.ModuleType
    return special and sys.modules.get(value.__name__) is value


def _is_part_of_a_module(value) -> bool:
    """A module that only the one above it has, as torch._C._functions, which PyTorch's decorators use: nobody can import it."""
    if not isinstance(value, types.ModuleType) or value.__name__ in sys.modules:
        return False
    above, _, name = value.__name__.rpartition(".")
    return getattr(sys.modules.get(above), name, None) is value


def pack(value) -> list[Frame]:
    """The frames of a message: the pickle first. Raises what pickling the value raises."""
    # The buffers stay PickleBuffers: a memoryview of one, caught in a reference cycle, crashes CPython's collector.
    buffers: list[Frame] = []
    stream = io.BytesIO()
    _Pickler(stream, protocol=5, buffer_callback=buffers.append).dump(value)
    return [stream.getvalue(), *buffers]


def unpack(frames: list[Frame]):
    """The object of a message; tensors stand on its frames."""
    return pickle.loads(frames[0], buffers=frames[1:])


def send(sock: socket.socket, frames: list[Frame], seconds: float | None = None) -> None:
    """Sends a message, a small one in one piece.

    seconds: that the whole message may take, TimeoutError afterwards
    """
    to = sock if seconds is None else _Punctual(sock, seconds)
    lengths = [memoryview(frame).nbytes for frame in frames]
    header = _COUNT.pack(len(frames)) + struct.pack(f"<{len(frames)}Q", *lengths)
    if sum(lengths) < _AT_ONCE:
        return to.sendall(header + b"".join(frames))
    to.sendall(header)
    for frame in frames:
        to.sendall(frame)


def receive(
    sock: socket.socket, ahead: int = _AT_ONCE, largest: int | None = None, seconds: float | None = None
) -> list[Frame]:
    """The frames of the next message. Raises EOFError when the other side is gone.

    ahead: how much to read at once. More than a message may take what follows it, so this is for a Stream, and for connections
        on which the other side waits for an answer before it sends more; EXACTLY is for the others
    largest: bytes of a message; a larger one raises EOFError, too
    seconds: that the whole message may take, TimeoutError afterwards
    """
    source = sock if seconds is None else _Punctual(sock, seconds)
    start = _at_least(source, source.recv(ahead), _COUNT.size)
    (count,) = _COUNT.unpack_from(start)
    header = _COUNT.size + 8 * count
    _check_size(header, largest)
    if largest is not None and count > _FRAMES:
        raise EOFError(f"a message of {count:,} frames, where at most {_FRAMES} are read")
    start = _at_least(source, start, header)
    lengths, frames = struct.unpack_from(f"<{count}Q", start, _COUNT.size), []
    _check_size(sum(lengths), largest)
    for length in lengths:
        frames.append(_frame(source, start[header : header + length], length))
        header += length
    if isinstance(sock, Stream):
        sock.rest = start[header:]
    return frames


class Stream:
    """A socket whose reads may bring more than one message: the rest stays for the next one."""

    def __init__(self, sock: socket.socket):
        self._sock, self.rest = sock, b""
        self.settimeout = sock.settimeout

    def recv(self, length: int) -> bytes:
        if not self.rest:
            return self._sock.recv(length)
        start, self.rest = self.rest[:length], self.rest[length:]
        return start

    def recv_into(self, room) -> int:
        if not self.rest:
            return self._sock.recv_into(room)
        start = self.recv(len(room))
        room[: len(start)] = np.frombuffer(start, np.uint8)
        return len(start)


class _Punctual:
    """A socket whose reads and writes all end by one moment, however few bytes come or go at a time.

    This process may have had no processor until then: bytes that are there by that moment are still read.
    """

    def __init__(self, sock: socket.socket, seconds: float):
        self._sock, self._until = sock, time.monotonic() + seconds

    def _in_time(self, do: Callable[[Any], Any], what: Any) -> Any:
        left = self._until - time.monotonic()
        self._sock.settimeout(max(left, 0.0))
        try:
            if left > -_LATER:
                return do(what)
        except BlockingIOError:
            pass
        raise TimeoutError("a message was not whole in its time")

    def sendall(self, data: Frame) -> None:
        self._in_time(self._sock.sendall, data)

    def recv(self, length: int) -> bytes:
        return self._in_time(self._sock.recv, length)

    def recv_into(self, room) -> int:
        return self._in_time(self._sock.recv_into, room)


def _check_size(size: int, largest: int | None) -> None:
    if largest is not None and size > largest:
        raise EOFError(f"a message of {size:,} bytes, where at most {largest:,} are read")


def _at_least(sock: socket.socket, start: bytes, length: int) -> bytes:
    while len(start) < length:
        if not (more := sock.recv(length - len(start))):
            raise EOFError("the other side of the connection is gone")
        start += more
    return start


def _frame(sock: socket.socket, start: bytes, length: int) -> np.ndarray:
    frame, got = np.empty(length, np.uint8), len(start)
    frame[:got] = np.frombuffer(start, np.uint8)
    while got < length:
        n = sock.recv_into(frame[got:])
        if n == 0:
            raise EOFError("the other side of the connection is gone")
        got += n
    return frame


def _bytes_of(storage) -> np.ndarray:
    import torch

    return torch.tensor([], dtype=torch.uint8).set_(storage.cpu()).numpy()


def _storage(buffer: Frame):
    import torch

    if memoryview(buffer).nbytes == 0:
        return torch.UntypedStorage(0)
    return torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()


def _typed_storage(untyped, dtype):
    import torch

    return torch.storage.TypedStorage(wrap_storage=untyped, dtype=dtype, _internal=True)
