"""The place in the reader's code where the program is: a file and a line, past torch's frames and our own."""

import os
import sys
import sysconfig
from functools import cache
from types import FrameType
from typing import NamedTuple

import torch

_TORCH = os.path.dirname(torch.__file__) + os.sep
_DISTRIBUTED = _TORCH + "distributed" + os.sep
_MANYRANKS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_WORLD = _MANYRANKS + "world" + os.sep
_STANDARD = sysconfig.get_paths()["stdlib"] + os.sep
_MACHINERY = (_TORCH, *(_MANYRANKS + package + os.sep for package in ("measure", "world", "parallel", "given", "grade")))
_PROGRAMS = os.path.join(_MANYRANKS, "given", "start_here.py")  # exercise 00's, whose lines its reports name
OURS = tuple(_MANYRANKS + package + os.sep for package in ("measure", "world"))  # what stands between a call and PyTorch
_MODES = tuple(_TORCH + part for part in ("_ops.py", "_compile.py", "_dynamo" + os.sep, "utils" + os.sep))
_MODES += (_MANYRANKS + "measure" + os.sep,)
_NO_PEERS = tuple(_DISTRIBUTED + part for part in ("checkpoint", "elastic", "launcher"))  # these may wait for a disk


@cache  # asked of each frame below each call
def machinery(file: str) -> bool:
    """Returns whether the file is torch's, Python's, or the part of this library that runs the reader's code."""
    return (file.startswith(_MACHINERY) and file != _PROGRAMS) or (file.startswith(_STANDARD) and "site-packages" not in file)


def idle(frame: FrameType | None) -> bool:
    """Returns whether a thread runs nothing but Python's library and what this one needs: nothing that communicates."""
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(OURS) and not (file.startswith(_STANDARD) and "site-packages" not in file):
            return False
        frame = frame.f_back
    return True


def readers_first(files: list[str]) -> int:
    """Finds the reader's first file in a stack, outermost first: the one called by what runs a rank's tasks. Returns its index.

    Code that interrupted the reader's, at the stack's end, is no such call.
    """
    end = next((k + 1 for k in range(len(files) - 1, -1, -1) if not files[k].startswith(_WORLD)), 0)
    return next((k + 1 for k in range(end - 1, -1, -1) if files[k].startswith(_WORLD)), 0)


class Place(NamedTuple):
    """A line of a program, as the rank knows it: a cell's file name is made readable in the kernel."""

    file: str
    line: int


def place_of(frame: FrameType | None) -> Place | None:
    """The innermost line at or above `frame` that is not machinery; the innermost of all if there is none."""
    innermost = frame
    while frame is not None and machinery(frame.f_code.co_filename):
        frame = frame.f_back
    frame = frame or innermost
    return Place(frame.f_code.co_filename, frame.f_lineno) if frame else None


def here() -> Place | None:
    """The line of the reader's program that called into torch or the machinery."""
    return place_of(sys._getframe(1))


def called_from(name: str, frame: FrameType | None) -> bool:
    """Returns whether a function of torch called `name` is among the innermost torch frames."""
    while frame is not None and machinery(frame.f_code.co_filename):
        if frame.f_code.co_name == name and frame.f_code.co_filename.startswith(_TORCH):
            return True
        frame = frame.f_back
    return False


def distributed_function(frame: FrameType | None) -> str | None:
    """The outermost torch.distributed function that the innermost torch frames are in, if they may wait for a peer."""
    names: list[str] = []
    while frame is not None and machinery(file := frame.f_code.co_filename):
        if file.startswith(_NO_PEERS) and not names:
            return None
        if file.startswith(_DISTRIBUTED) and frame.f_code.co_name not in ("wrapper", "__torch_dispatch__"):
            names.append(frame.f_code.co_name)
        frame = frame.f_back
    return names[-1] if names else None


def in_backward(frame: FrameType | None) -> bool:
    """Returns whether the innermost frame, without dispatch modes', is the autograd engine's: its C++ may wait."""
    while frame is not None and frame.f_code.co_filename.startswith(_MODES):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(_TORCH + "autograd" + os.sep)
