"""Seconds that a function takes, read off so that they mean something."""

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch


class Timings(NamedTuple):
    """Holds the seconds of each repetition, in order, and of the warm-up calls before them, which don't count."""

    all: tuple[float, ...]
    warmup: tuple[float, ...] = ()

    @property
    def median(self) -> float:
        return statistics.median(self.all)


def seconds(
    function: Callable, *args, repeats: int = 10, warmup: int = 2, device: torch.device | str = "cpu", **kwargs
) -> Timings:
    """Times each of many calls, to the end of what it asked the device to do.

    repeats: calls that count, 1 or more
    warmup: calls before them, 0 or more; they pay for what later ones find done, such as
        allocated memory, chosen algorithms, compiled code, caches
    device: what must have finished; the function itself must wait for what it leaves under
        way elsewhere, such as a collective with async_op=True

    Raises ValueError for other numbers of calls.
    """
    if repeats < 1 or warmup < 0:
        few = f"repeats={repeats}, warmup={warmup}"
        raise ValueError(f"{few}: give one repetition or more, and 0 warm-up calls or more")
    found = []
    for _ in range(warmup + repeats):
        synchronize(device)
        started = time.perf_counter()
        function(*args, **kwargs)
        synchronize(device)
        found.append(time.perf_counter() - started)
    return Timings(tuple(found[warmup:]), tuple(found[:warmup]))


def synchronize(device: torch.device | str = "cpu") -> None:
    """Waits until the device has done all it was asked for; a CPU's operators are done when they return."""
    if torch.device(device).type != "cpu":
        torch.accelerator.synchronize(device)
