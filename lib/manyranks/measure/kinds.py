"""The kind of work that an operator does, and a thread's nested calls as stretches of work that do not overlap."""

import functools
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from typing import NamedTuple

import torch

from manyranks.measure.flops import FORMULAS, is_composite, moves
from manyranks.timeline.intervals import joined, outside

MATMUL, OTHER, COMMUNICATION = "matmul", "other", "communication"
Called = tuple[int, int, str]  # started, finished, name
Stretch = tuple[str, int, int, bool]  # name, started, finished, whether it is a further part of a call
_COMPILED = "## Call CompiledFxGraph"  # so torch.compile's range of a graph's own kernels begins


class Span(NamedTuple):
    """A time when one operator worked. kind: "matmul", "other" or "communication"; seconds of time.perf_counter.

    goes_on: whether it is a further part of a call that an operator inside it has interrupted.
    """

    name: str
    kind: str
    started: float
    finished: float
    goes_on: bool = False


@functools.cache
def kind_of(name: str) -> str:
    """Names a kind: "matmul" for what has FLOPs in WorkCounter, as products and attention.

    name: "aten::mm", or a kernel's
    """
    if "nccl" in name:
        return COMMUNICATION
    # The operators of one library's convolutions have no formula here, for aten::convolution calls them.
    return MATMUL if _packet(name) in FORMULAS or "convolution" in name else OTHER


@functools.cache
def works(name: str) -> bool:
    """Returns whether an operator itself touches numbers: not one that only calls others, views or allocates, or is none."""
    packet = _packet(name)
    if packet is None:
        return name.startswith(_COMPILED)
    # What writes into an `out` says nothing of the others: linear has such an overload, and only calls addmm or mm.
    overloads = [getattr(packet, overload) for overload in packet.overloads() if "out" not in overload.split("_")]
    return any(moves(each) and not _only_calls(each) for each in overloads if torch._C._dispatch_has_kernel(each.name()))


def _only_calls(overload) -> bool:
    """Returns whether it only composes others, without a kernel for any device; silu_backward has one for the CPU."""
    own = (torch._C._dispatch_has_kernel_for_dispatch_key(overload.name(), device) for device in ("CPU", "CUDA"))
    return is_composite(overload) and not any(own)


def _packet(name: str):
    library, _, operator = name.partition("::")
    return getattr(getattr(torch.ops, library), operator, None) if library == "aten" else None


def innermost(called: list[Called]) -> list[Stretch]:
    """Cuts time where the innermost call that works becomes another.

    called: properly nested, as one thread's are
    """
    found: list[tuple[Called, int, int]] = []
    stack: list[tuple[int, Called | None]] = []  # when a call ends, and whose work its time is
    at = 0

    def until(moment: int) -> None:
        nonlocal at
        owner = stack[-1][1] if stack else None
        if owner and moment > at:
            goes_on = found and found[-1][0] is owner
            found.append((owner, found.pop()[1] if goes_on else at, moment))
        at = max(at, moment)

    for call in [*sorted(called, key=lambda call: (call[0], -call[1])), (2**63, 2**63, "")]:
        while stack and stack[-1][0] <= call[0]:
            until(stack[-1][0])
            stack.pop()
        until(call[0])
        stack.append((call[1], call if works(call[2]) else stack[-1][1] if stack else None))
    stretches, met = [], set()
    for owner, started, finished in found:
        stretches.append((owner[2], started, finished, id(owner) in met))
        met.add(id(owner))
    return stretches


def one_after_another(kernels: list[Called]) -> list[Stretch]:
    """Kernels of an accelerator's streams: where two overlap the first goes on, and computing hides communication."""
    computing = _in_turn(kernel for kernel in kernels if kind_of(kernel[2]) != COMMUNICATION)
    exchanging = _in_turn(kernel for kernel in kernels if kind_of(kernel[2]) == COMMUNICATION)
    found = [(name, started, finished, False) for started, finished, name in computing]
    busy = joined((started, finished) for started, finished, _ in computing)
    ends = [finished for _, finished in busy]
    for started, finished, name in exchanging:
        near = busy[bisect_right(ends, started) : bisect_left(busy, (finished, 0))]
        found += [(name, *left, i > 0) for i, left in enumerate(outside(near, started, finished))]
    return sorted(found, key=lambda stretch: stretch[1])


def _in_turn(kernels: Iterable[Called]) -> list[Called]:
    """Takes from each kernel what those that started before it cover."""
    left, at = [], 0
    for started, finished, name in sorted(kernels):
        if finished > max(at, started):
            left.append((max(at, started), finished, name))
            at = finished
    return left
