"""Tensors that are on their way, and are written to meanwhile: what arrives is then a matter of luck."""

import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from manyranks.grade.old.tensor.task import slip
from manyranks.grade.old.trial import Trial
from manyranks.measure.operators import POINT_TO_POINT, work_of

CHANGED = "what was sent has changed"  # a mark
ARRIVED = "waited for a message"  # a mark: once for each that is sent or received
HINT = (
    "what is sent must not change before the wait for it: receive into a tensor of its own, and give each message one of its "
    "own. A tensor that is cleared and filled again is the same tensor"
)


class Buffers(TorchDispatchMode):
    """A context manager. Notes a slip where a message is received into what has just been sent, and nobody has waited yet.

    Marks the first wait for each message: a second one, or one for another call, says nothing of what is under way.
    """

    def __init__(self, watch):
        super().__init__()
        self._watch = watch
        self._sent: list[tuple[StorageWeakRef, int]] = []  # with addresses, which others have once these are gone
        self._under_way: dict[int, dist.Work] = {}  # by id, which is another's once a Work is gone
        self._changed = False

    def __enter__(self):
        self._wait = wait = dist.Work.wait
        dist.Work.wait = lambda work, *args, **kwargs: self._waits(work) or wait(work, *args, **kwargs)
        return super().__enter__()

    def __exit__(self, *error):
        dist.Work.wait = self._wait
        return super().__exit__(*error)

    def _waits(self, work: dist.Work) -> None:
        self._sent = []
        if self._under_way.pop(id(work), None) is not None:
            self._watch.mark(ARRIVED)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name.partition("::")[2]
        if function.namespace == "c10d":
            self._look(name, args)
        result = function(*args, **(kwargs or {}))
        if function.namespace == "c10d" and name.rstrip("_") in POINT_TO_POINT and (work := work_of(result)) is not None:
            self._under_way[id(work)] = work
        return result

    def _look(self, name: str, args: tuple) -> None:
        self._changed |= self._watch.changed()
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
