"""Objects over a socket: cloudpickle for functions and values, tensors' bytes beside the pickle and never through it.

A message is a header of lengths, the pickle, then one frame a storage. A received tensor stands directly on the frame it
was read into, and tensors that share a storage still share it on the other side.
"""

import io
import pickle
import socket
import struct
import sys

import cloudpickle

Buffer = bytes | bytearray | memoryview

_COUNT = struct.Struct("<I")
_LENGTH = struct.Struct("<Q")


class _Pickler(cloudpickle.Pickler):
    def reducer_override(self, value):
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(value, torch.UntypedStorage) and value.device.type != "meta":
            return _storage, (pickle.PickleBuffer(_bytes_of(value)),)
        if torch is not None and isinstance(value, torch.storage.TypedStorage):
            return _typed_storage, (value._untyped_storage, value.dtype)
        return super().reducer_override(value)


def pack(value) -> list[Buffer]:
    """The frames of a message: the pickle first. Raises what pickling the value raises."""
    frames: list[Buffer] = []
    stream = io.BytesIO()
    _Pickler(stream, protocol=5, buffer_callback=lambda buffer: frames.append(buffer.raw())).dump(value)
    return [stream.getbuffer(), *frames]


def unpack(frames: list[Buffer]):
    return pickle.loads(frames[0], buffers=frames[1:])


def send(sock: socket.socket, frames: list[Buffer]) -> None:
    lengths = b"".join(_LENGTH.pack(len(memoryview(f).cast("B"))) for f in frames)
    sock.sendall(_COUNT.pack(len(frames)) + lengths)
    for frame in frames:
        sock.sendall(frame)


def receive(sock: socket.socket) -> list[Buffer]:
    """The frames of the next message. Raises EOFError when the other side is gone."""
    (count,) = _COUNT.unpack(_read(sock, _COUNT.size))
    lengths = [_LENGTH.unpack(_read(sock, _LENGTH.size))[0] for _ in range(count)]
    return [_read(sock, length) for length in lengths]


def _read(sock: socket.socket, length: int) -> bytearray:
    frame = bytearray(length)
    view, got = memoryview(frame), 0
    while got < length:
        n = sock.recv_into(view[got:])
        if n == 0:
            raise EOFError("the other side of the connection is gone")
        got += n
    return frame


def _bytes_of(storage) -> memoryview:
    import torch

    return memoryview(torch.tensor([], dtype=torch.uint8).set_(storage.cpu()).numpy())


def _storage(buffer: Buffer):
    import torch

    if len(memoryview(buffer)) == 0:
        return torch.UntypedStorage(0)
    return torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()


def _typed_storage(untyped, dtype):
    import torch

    return torch.storage.TypedStorage(wrap_storage=untyped, dtype=dtype, _internal=True)
