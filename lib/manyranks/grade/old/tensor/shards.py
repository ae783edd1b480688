"""What a learner's module holds once the whole weights are gone."""

import gc
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import nn

from manyranks.grade.old.compare import sizes
from manyranks.grade.old.scripts import Tensors
from manyranks.grade.old.trial import Trial
from manyranks.grade.old.verdict import Aspect, Verdict

if TYPE_CHECKING:
    from manyranks.grade.old.tensor.task import TensorTask

_LOOKS, _MOMENT = 6, 0.08  # seconds
_ROOM = 8  # what is more than its shards may be an eighth of the rest
_HINT = (
    "the whole weights are still alive: no attribute may hold them, and a part that is a view keeps all of its "
    "memory: clone() it"
)


def size(tensors: Tensors) -> int:
    """Bytes."""
    return sum(tensor.nbytes for tensor in tensors.values())


def kept(watch, make: Callable[[], nn.Module], shards: int) -> nn.Module:
    """The module that this makes; notes what it holds when whatever it was made of is gone. shards: bytes that it may."""
    watch.mark("made")
    watch.weigh()
    module = make()
    watch.weigh()
    for _ in range(_LOOKS):
        if watch.held[-1] - watch.held[0] <= shards:
            break
        gc.collect()  # what stands in a cycle is gone only then; it takes much time
        time.sleep(_MOMENT)  # on a busy machine a thread or a frame lets go late
        watch.weigh()
    return module


def held(task: "TensorTask", trial: Trial) -> Verdict:
    """No more than its shards."""
    shards, whole = trial.case.must.limit, trial.case.must.whole
    for rank, seen in enumerate(trial.answers):
        got = seen.held[-1] - seen.held[0]
        if got > shards + (whole - shards) // _ROOM:
            there, here = sizes(got, shards)
            return Verdict(
                False, f"rank {rank} holds {there}; its shards have {here}, the whole weights {sizes(whole, 0)[0]}", _HINT
            )
    return Verdict(True)


def keeps(share: float) -> Aspect:
    """The aspect."""
    return Aspect("holds its shards of the weights only", share, held)
