"""Tensors that are on their way, and are written to meanwhile: what arrives is then a matter of luck."""

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from manyranks.grade.tensor.task import slip
from manyranks.grade.trial import Trial

CHANGED = "what was sent has changed"  # a mark
HINT = (
    "what is sent must not change before the wait for it: receive into a tensor of its own, and give each message one of its "
    "own. A tensor that is cleared and filled again is the same tensor"
)


class Buffers(TorchDispatchMode):
    """A context manager. Notes a slip where a message is received into what has just been sent, and nobody has waited yet."""

    def __init__(self, watch):
        super().__init__()
        self._watch = watch
        self._sent: list[tuple[StorageWeakRef, int]] = []  # with addresses, which others have once these are gone
        self._waits = 0
        self._changed = False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d":
            self._look(function._schema.name.partition("::")[2], args)
        return function(*args, **(kwargs or {}))

    def _look(self, name: str, args: tuple) -> None:
        self._changed |= self._watch.changed()
        waits = sum(event.kind == "wait" for event in self._watch.events)
        if waits > self._waits:
            self._sent, self._waits = [], waits
        tensors = [one for one in tree_leaves(args) if isinstance(one, Tensor)]
        if name == "send":
            self._sent += [(StorageWeakRef(one.untyped_storage()), one.data_ptr()) for one in tensors]
        under_way = {place for storage, place in self._sent if not storage.expired()}
        if name == "recv_" and under_way & {one.data_ptr() for one in tensors}:
            slip(self._watch, "a block is received into the tensor that is being sent", HINT)

    def note(self) -> None:
        """Of what has been sent, whether anything is another thing now."""
        if self._changed or self._watch.changed():
            self._watch.mark(CHANGED)


def changed(trial: Trial) -> bool:
    """Whether any rank has changed what it had sent, perhaps after it had waited for it."""
    return any(event.what == CHANGED for seen in trial.answers for event in seen.events)
