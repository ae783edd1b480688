"""Reads what a confined rank sends: tensors, numbers, words, containers of them and the library's own values, and no more.

A pickle may call anything that can be imported, and a rank that runs code of strangers can send any pickle. So a name in it
must be one of these, or a dataclass, a named tuple or an enumeration of this library, which only hold what they are given.
"""

import dataclasses
import enum
import io
import pickle

from manyranks.world.messages import Frame

LARGEST = 256 * 2**20  # bytes of a message
_PLAIN = {
    ("builtins", "slice"),
    ("builtins", "set"),
    ("builtins", "frozenset"),
    ("builtins", "complex"),
    ("builtins", "bytearray"),
    ("collections", "OrderedDict"),
    ("collections", "Counter"),
    ("collections", "deque"),
    ("fractions", "Fraction"),
    ("torch", "Size"),
    ("torch", "device"),
    ("torch._utils", "_rebuild_tensor_v2"),
    ("torch._utils", "_rebuild_parameter"),
    ("manyranks.world.messages", "_storage"),
    ("manyranks.world.messages", "_typed_storage"),
}
_ERRORS = ("NotImplementedError", "ValueError", "TypeError", "RuntimeError", "AttributeError", "KeyError", "IndexError")


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str):
        if module == "torch" and name in _dtypes():
            return super().find_class(module, name)
        if (module, name) in _PLAIN or (module == "builtins" and name in _ERRORS):
            return super().find_class(module, name)
        if module.startswith("manyranks.") and "." not in name and _holds(found := super().find_class(module, name)):
            return found
        raise pickle.UnpicklingError(f"{module}.{name} is no plain data")


def unpack(frames: list[Frame]):
    """As messages.unpack. Raises pickle.UnpicklingError for what is no plain data, or no pickle."""
    try:
        return _Reader(io.BytesIO(bytes(frames[0])), buffers=frames[1:]).load()
    except pickle.UnpicklingError:
        raise
    except Exception as error:  # the calls of a pickle raise anything
        raise pickle.UnpicklingError(f"{type(error).__name__}: {error}") from None


def _holds(kind) -> bool:
    """A class that only holds values."""
    if not isinstance(kind, type) or "__post_init__" in vars(kind) or "__setstate__" in vars(kind):
        return False
    return dataclasses.is_dataclass(kind) or hasattr(kind, "_fields") or issubclass(kind, (enum.Enum, Exception))


def _dtypes() -> frozenset[str]:
    import torch

    return frozenset(name for name in vars(torch) if isinstance(getattr(torch, name), torch.dtype))
