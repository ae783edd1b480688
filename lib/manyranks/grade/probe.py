"""What a check runs on the ranks: the learner's function, and nothing of what it returns but plain data."""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from manyranks.grade.journal import Journal
from manyranks.grade.refused import refused

_ROOM = 4  # a result larger than this many times the arguments' elements is not sent back
_SPARE = 1 << 16
_READY = ("manyranks.parallel",)
_YOURSELF = "write it yourself, with dist.send, recv, isend, irecv or batch_isend_irecv"


@dataclass(frozen=True)
class Answer:
    """One rank's. result: a tensor, None where it is none; kind: what it is, in words; argument: the first one afterwards.

    scaled: how many elements the function divided or multiplied.
    """

    result: torch.Tensor | None
    kind: str
    argument: torch.Tensor
    scaled: int


def answer(function, arguments: tuple[tuple, ...], folder: str) -> Answer:
    """Calls the learner's function with this rank's arguments, the first of which is a tensor; notes messages in the folder."""
    rank = dist.get_rank()
    mine = arguments[rank]
    room = _SPARE + _ROOM * mine[0].numel() * len(arguments)
    with Journal(folder, rank) as journal, refused(_READY, _YOURSELF):
        value = function(*mine)
    return Answer(*_plain(value, room), mine[0].detach().clone(), journal.scaled)


def _plain(value, room: int) -> tuple[torch.Tensor | None, str]:
    try:
        if not isinstance(value, torch.Tensor):
            return None, "None" if value is None else f"a {str(type(value).__name__)[:60]}"
        if value.numel() > room:
            return None, f"a tensor of {value.numel():,} elements"
        return value.detach().as_subclass(torch.Tensor).cpu().contiguous().clone(), "a tensor"
    except Exception:  # an object that pretends to be a tensor
        return None, "something that cannot be read"
