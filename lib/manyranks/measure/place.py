"""Where in the reader's code the program is: a file and a line, past torch's frames and our own."""

import os
import sys
from types import FrameType
from typing import NamedTuple

import torch

_TORCH = os.path.dirname(torch.__file__) + os.sep
_DISTRIBUTED = _TORCH + "distributed" + os.sep
_MANYRANKS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
MACHINERY = (_TORCH, _MANYRANKS + "measure" + os.sep, _MANYRANKS + "world" + os.sep)


class Place(NamedTuple):
    """A line of a program, as the rank knows it: a cell's file name is made readable in the kernel."""

    file: str
    line: int


def place_of(frame: FrameType | None) -> Place | None:
    """The innermost line at or above `frame` that is neither torch's nor the machinery's."""
    while frame is not None and frame.f_code.co_filename.startswith(MACHINERY):
        frame = frame.f_back
    return Place(frame.f_code.co_filename, frame.f_lineno) if frame else None


def here() -> Place | None:
    """The line of the reader's program that called into torch or the machinery."""
    return place_of(sys._getframe(1))


def called_from(name: str, frame: FrameType | None) -> bool:
    """Whether a function of torch called `name` is among the innermost torch frames."""
    while frame is not None and frame.f_code.co_filename.startswith(MACHINERY):
        if frame.f_code.co_name == name and frame.f_code.co_filename.startswith(_TORCH):
            return True
        frame = frame.f_back
    return False


def distributed_function(frame: FrameType | None) -> str | None:
    """The outermost torch.distributed function that the innermost torch frames are in, if any."""
    found = None
    while frame is not None and frame.f_code.co_filename.startswith(MACHINERY):
        if frame.f_code.co_filename.startswith(_DISTRIBUTED) and frame.f_code.co_name != "wrapper":
            found = frame.f_code.co_name
        frame = frame.f_back
    return found


def in_backward(frame: FrameType | None) -> bool:
    """Whether the innermost frame is the autograd engine: its C++ may be waiting for a collective."""
    return frame is not None and frame.f_code.co_filename.startswith(_TORCH + "autograd" + os.sep)
