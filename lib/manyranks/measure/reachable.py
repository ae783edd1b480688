"""Numbers that somebody keeps as something else than tensors: arrays, bytes, lists of numbers; found by what leads to them."""

import gc
import sys
from collections.abc import Iterable
from io import BytesIO
from types import CodeType, FrameType, FunctionType, ModuleType

import torch

from manyranks.measure.location import machinery

_LEAST = 1024  # bytes: shorter texts are names and descriptions


class Elsewhere:
    """All that the owners lead to, and nothing that `but` leads to. bytes: of numbers that are in no tensor's storage.

    tensors, storages: the others; all: whatever counts. Modules, and classes and functions of libraries, are not looked into.
    """

    def __init__(self, owners: Iterable, but: Iterable = ()):
        self.bytes, self.tensors, self.storages, self.all = 0, [], [], []
        self._numpy = sys.modules.get("numpy")
        met, todo = {id(one): one for one in (*but, vars(sys.modules["builtins"]))}, list(owners)
        while todo:
            one = todo.pop()
            if id(one) not in met:
                met[id(one)] = one  # alive, so that nothing else gets its id
                before = self.bytes, len(self.tensors), len(self.storages)
                todo += self._look(one)
                if before != (self.bytes, len(self.tensors), len(self.storages)):
                    self.all.append(one)

    def _look(self, one) -> list:
        """Counts an object, and returns what it leads to."""
        kind = type(one)
        if issubclass(kind, (ModuleType, CodeType, FrameType)) or (issubclass(kind, (type, FunctionType)) and not _is_own(one)):
            return []
        if issubclass(kind, torch.Tensor):
            self._tensor(one)
        elif issubclass(kind, torch.UntypedStorage):
            self.storages.append(one)
        elif kind in (float, int, complex):
            self.bytes += 8
        elif self._numpy and issubclass(kind, (self._numpy.ndarray, self._numpy.generic)):
            if (base := getattr(one, "base", None)) is not None:
                return [base]  # the memory is there
            self.bytes += one.nbytes
        elif kind is memoryview:
            return [one.obj]
        elif (size := _size(one)) >= _LEAST:
            self.bytes += size
        if issubclass(kind, BytesIO):  # from Python 3.13 on it leads to its own buffer, whose bytes are counted
            return [each for each in gc.get_referents(one) if type(each) is not bytes]
        return gc.get_referents(one)

    def _tensor(self, tensor: torch.Tensor) -> None:
        if tensor.layout == torch.strided:
            self.tensors.append(tensor)
        else:
            sparse = tensor.layout != torch._mkldnn
            self.bytes += (tensor._nnz() if sparse else tensor.numel()) * tensor.element_size()


def _is_own(one: type | FunctionType) -> bool:
    """Returns whether a class or function is of no library."""
    name = one.__module__ or ""
    file = getattr(sys.modules.get(name), "__file__", None) or ""
    return name == "__main__" or name not in sys.modules or (bool(file) and not machinery(file) and "-packages" not in file)


def _size(one) -> int:
    """Bytes of what has a buffer, or is a text; 0 for other objects."""
    if type(one) is str:
        return len(one)
    try:
        return (one.getbuffer() if isinstance(one, BytesIO) else memoryview(one)).nbytes
    except (TypeError, ValueError, BufferError):
        return 0
