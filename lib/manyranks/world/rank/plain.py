"""What a confined rank sends is data, and no more: numbers, words, lists, dicts, and tensors as their bytes.

A rank that runs code of strangers can send any bytes. So nothing in a message names a type: whoever reads it says what it has
to be, and what is not exactly that is refused. The form is MessagePack, read by msgspec.
"""

import math
import struct
from typing import Any

import msgspec

from manyranks.world.rank.messages import Frame

LARGEST = 8 * 2**20  # bytes of a message: a picture is the largest that an honest rank sends
_TENSOR = 1  # MessagePack's number for a tensor: dtype, dimensions, sizes, elements
_HEAD = struct.Struct("<BB")
_DEEPEST = 8  # dimensions
_DTYPES = (
    *("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"),
    *("complex64", "complex128"),
)


class NotPlain(ValueError):
    """What has come is no plain data, or not what was asked for."""


def pack(value) -> list[Frame]:
    """The frames of a message. Raises TypeError for what is no plain data."""
    return [msgspec.msgpack.encode(value, enc_hook=_told)]


def unpack(frames: list[Frame], kind: Any = Any):
    """The value of a message, which must be a `kind`: a dataclass, a named tuple, or a type such as dict[str, int].

    Tuples come back as lists where the kind does not say otherwise. Raises NotPlain.
    """
    try:
        (frame,) = frames
        return msgspec.msgpack.decode(memoryview(frame), type=kind, ext_hook=_tensor)
    except (msgspec.MsgspecError, ValueError, RecursionError, MemoryError, OverflowError) as error:
        raise NotPlain(f"{type(error).__name__}: {error}"[:300]) from None


def _told(value) -> msgspec.msgpack.Ext:
    import torch

    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{type(value).__name__} is no plain data")
    name = str(value.dtype).removeprefix("torch.")
    if name not in _DTYPES or value.layout is not torch.strided or value.dim() > _DEEPEST:
        raise TypeError(f"a tensor of {name}, {value.layout}, with {value.dim()} dimensions is no plain data")
    flat = value.detach().as_subclass(torch.Tensor).cpu().resolve_conj().resolve_neg().contiguous().flatten()
    head = _HEAD.pack(_DTYPES.index(name), value.dim()) + struct.pack(f"<{value.dim()}Q", *value.shape)
    return msgspec.msgpack.Ext(_TENSOR, head + (flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""))


def _tensor(code: int, data: memoryview):
    import torch

    dtype, dims = _HEAD.unpack_from(data)
    if code != _TENSOR or dtype >= len(_DTYPES) or dims > _DEEPEST:
        raise ValueError("no tensor")
    shape = struct.unpack_from(f"<{dims}Q", data, _HEAD.size)
    elements, kind = bytearray(data[_HEAD.size + 8 * dims :]), getattr(torch, _DTYPES[dtype])
    if any(size > LARGEST for size in shape) or math.prod(shape) * kind.itemsize != len(elements):
        raise ValueError("a tensor with another number of elements than its shape has")
    return (torch.frombuffer(elements, dtype=kind) if elements else torch.empty(0, dtype=kind)).reshape(shape)
