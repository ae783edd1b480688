"""Objects a learner may have made. A class leads to its file's names: in a test's, to pytest and every test."""

import ctypes
import io
from array import array

import torch

SIZE = 8000  # bytes of the tensor that is copied
STORE: list = []


class Keeper:
    """An object that a learner has made: it keeps a tensor, an optimizer of it, and a hook that sees a global list."""

    def __init__(self):
        self.tensor = torch.nn.Parameter(torch.zeros(SIZE // 8, dtype=torch.float64) + 1)
        self.optimizer = torch.optim.SGD([self.tensor])
        self.tensor.register_post_accumulate_grad_hook(self.seen)

    def seen(self, _):
        STORE.append(1)

    def array(self):
        return self.tensor.detach().numpy().copy()


def in_bytes(keeper):
    keeper.kept = io.BytesIO()
    keeper.kept.write(keeper.array().tobytes())


class File(io.BytesIO):
    """A file in memory that is a class of the learner's."""


def on_a_file(keeper):
    keeper.kept = File()
    keeper.kept.name = keeper.array().tobytes()


def in_a_closed_file(keeper):
    keeper.kept = io.BytesIO(keeper.array().tobytes())
    keeper.kept.close()  # lets go of its bytes


def in_a_closure(keeper):
    kept = keeper.array()
    keeper.kept = lambda: kept


WAYS = {
    "an array": lambda keeper: setattr(keeper, "kept", keeper.array()),
    "a part of an array": lambda keeper: setattr(keeper, "kept", keeper.array()[3:5]),
    "a list": lambda keeper: setattr(keeper, "kept", {"all": [keeper.tensor.tolist()]}),
    "bytes": lambda keeper: setattr(keeper, "kept", keeper.array().tobytes()),
    "an array of Python's": lambda keeper: setattr(keeper, "kept", array("d", keeper.tensor.tolist())),
    "an array of C's": lambda keeper: setattr(keeper, "kept", (ctypes.c_double * (SIZE // 8))()),
    "a memoryview": lambda keeper: setattr(keeper, "kept", memoryview(keeper.array())),
    "on a tensor": lambda keeper: setattr(keeper.tensor, "kept", keeper.array()),
    "on the class": lambda keeper: setattr(type(keeper), "kept", keeper.array()),
    "a global": lambda keeper: STORE.append(keeper.array()),
    "a sparse tensor": lambda keeper: setattr(keeper, "kept", keeper.tensor.detach().to_sparse()),
    "a tensor that no operator has used": lambda keeper: setattr(keeper, "kept", torch.from_numpy(keeper.array())),
    "a storage": lambda keeper: setattr(keeper, "kept", keeper.tensor.untyped_storage().clone()),
    "a file in memory": in_bytes,
    "a file of one's own": lambda keeper: setattr(keeper, "kept", File(keeper.array().tobytes())),
    "bytes on a file": on_a_file,
    "a closure": in_a_closure,
}
NO_COPIES = {
    "a closed file": in_a_closed_file,
    "a view": lambda keeper: setattr(keeper, "kept", keeper.tensor.detach()[:10]),
    "its array": lambda keeper: setattr(keeper, "kept", keeper.tensor.detach().numpy()),
    "its storage": lambda keeper: setattr(keeper, "kept", keeper.tensor.untyped_storage()),
}
