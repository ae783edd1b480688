"""A rank's notes while a learner's function runs there, and how the check reads them afterwards.

Each call is on disk before it starts, with the lines that led to it: a rank that dies or hangs cannot tell any more.
"""

import json
import os
import stat
import sys
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from manyranks.measure import operators
from manyranks.measure.location import machinery

Frame = tuple[str, int, str]  # file, line, function

COPY = "copy instead of sending"
_ENOUGH = 200  # calls of one rank
_DEEP = 8
_LARGEST = 1 << 22  # bytes of a rank's notes
_RUNS = str(Path(__file__).parents[1] / "world")  # from here on outwards a frame is not the learner's
_SCALING = {"div", "mul", "floor_divide"}


class Entry(NamedTuple):
    """A call.

    op: "send", "all_reduce", …
    peer: of a message, None where it may be anyone
    frames: the learner's, innermost first
    sizes: whether an all-to-all was given its sizes, which may differ from rank to rank
    """

    op: str
    peer: int | None
    elements: int
    bytes: int
    dtype: str
    tag: int
    frames: list[Frame]
    sizes: bool = False


class Stopped(Exception):
    """A learner's function did what can only go wrong.

    hint: what to look at
    """

    def __init__(self, what: str, hint: str):
        super().__init__(what, hint)
        self.what, self.hint = what, hint


def kind_of(value: object) -> str:
    """Names the kind of a value: "nothing", "a tuple of 3"."""
    if value is None:
        return "nothing"
    if isinstance(value, torch.Tensor):
        return f"a tensor of {value.numel()} elements"
    many = f" of {len(value)}" if isinstance(value, tuple | list | dict) else ""
    name = type(value).__name__
    article = "an" if name.startswith((*"aeioAEIO", "ndarray")) else "a"
    return f"{article} {name}{many}"


def to_itself(op: str, rank: int) -> Stopped:
    """Returns the error for a message of a rank to itself: gloo says only that a pair is not connected."""
    return Stopped(f"rank {rank} {'sends to' if op == 'send' else 'receives from'} itself", COPY)


class Journal(TorchDispatchMode):
    """Notes this rank's calls in the folder. last: the latest; scaled: how many elements were divided, or multiplied, so far.

    Raises Stopped in the learner's function for a message of a rank to itself, and when there are far too many.
    """

    def __init__(self, folder: str, rank: int):
        super().__init__()
        self.folder = folder
        self.scaled, self._rank, self._count = 0, rank, 0
        self._file = os.open(Path(folder) / str(rank), os.O_CREAT | os.O_WRONLY | os.O_APPEND)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        operator = func._schema.name.partition("::")[2]
        if func.namespace == "c10d" and operator in operators.NAMES:
            self._note(operators.NAMES[operator], operators.arguments(func, args, kwargs or {}))
        result = func(*args, **(kwargs or {}))
        if operator.rstrip("_") in _SCALING and isinstance(result, torch.Tensor):
            self.scaled += result.numel()
        return result

    def _note(self, op: str, named: dict) -> None:
        size, dtype = operators.payload(op, named)
        peer = operators.peer_of(named, tuple(dist.get_process_group_ranks(operators.group_of(named))))
        elements = size // getattr(torch, dtype).itemsize if dtype else 0
        sizes = bool(named.get("input_split_sizes") or named.get("output_split_sizes"))
        self.last = Entry(op, peer, elements, size, dtype, named.get("tag", 0), frames(), sizes)
        os.write(self._file, json.dumps(self.last).encode() + b"\n")
        self._count += 1
        if peer == self._rank and op in operators.POINT_TO_POINT:
            raise to_itself(op, peer)
        if self._count == _ENOUGH:
            hint = "far more than a right answer needs: does the loop end?"
            raise Stopped(f"rank {self._rank} has started {_ENOUGH} messages, or other calls", hint)


def frames() -> list[Frame]:
    """The learner's lines that lead here, innermost first."""
    frame, found = sys._getframe(1), []
    while frame is not None and len(found) < _DEEP and not (code := frame.f_code).co_filename.startswith(_RUNS):
        if not machinery(code.co_filename):
            found.append((code.co_filename, frame.f_lineno, code.co_name))
        frame = frame.f_back
    return found


def read(folder: str, n: int) -> dict[int, list[Entry]]:
    """Returns rank -> what it noted in this folder, and nothing that's no note: a learner's code may have written there."""
    return {rank: _entries(Path(folder) / str(rank)) for rank in range(n)}


def _entries(file: Path) -> list[Entry]:
    try:
        place = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return []
    with open(place, "rb") as opened:
        if not stat.S_ISREG(os.fstat(place).st_mode):
            return []
        lines = opened.read(_LARGEST).split(b"\n")[:-1]
    try:
        return [_entry(*json.loads(line)) for line in lines]
    except (ValueError, TypeError, RecursionError):
        return []


def _entry(op, peer, elements, size, dtype, tag, steps, sizes) -> Entry:
    """Raises TypeError for what is none."""
    frames = [(file, line, name) for file, line, name in steps]
    words = [op, dtype, *(word for file, _, name in frames for word in (file, name))]
    numbers = [elements, size, tag, 0 if peer is None else peer, *(line for _, line, _ in frames)]
    if {*map(type, words)} != {str} or {*map(type, numbers)} != {int} or type(sizes) is not bool:
        raise TypeError("no note of a call")
    return Entry(op, peer, elements, size, dtype, tag, frames, sizes)
