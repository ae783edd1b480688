"""Seconds that a function takes, read off so that they mean something."""

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch


class Times(NamedTuple):
    """Seconds of each repetition, in order, and of the calls before them, which do not count."""

    all: tuple[float, ...]
    warmup: tuple[float, ...] = ()

    @property
    def median(self) -> float:
        return statistics.median(self.all)

    @property
    def least(self) -> float:
        return min(self.all)

    @property
    def most(self) -> float:
        return max(self.all)


def seconds(
    function: Callable,
    *args,
    repeats: int = 10,
    warmup: int = 2,
    device: torch.device | str = "cpu",
    **kwargs,
) -> Times:
    """Calls the function warmup + repeats times, and times each call to the end of what it
    asked the device to do.

    The first calls pay for what later ones find done: allocated memory, chosen algorithms,
    compiled code, caches. What the function leaves under way elsewhere, such as a
    collective with async_op=True, it must wait for itself.
    Raises ValueError for fewer than one repetition, or a negative number of warm-up calls.
    """
    if repeats < 1 or warmup < 0:
        given = f"repeats={repeats}, warmup={warmup}"
        raise ValueError(f"{given}: give one repetition or more, and 0 warm-up calls or more")
    found = []
    for _ in range(warmup + repeats):
        synchronise(device)
        started = time.perf_counter()
        function(*args, **kwargs)
        synchronise(device)
        found.append(time.perf_counter() - started)
    return Times(tuple(found[warmup:]), tuple(found[:warmup]))


def synchronise(device: torch.device | str = "cpu") -> None:
    """Waits until the device has done all that it was asked for; a CPU's operators are done
    when they return.
    """
    if torch.device(device).type != "cpu":
        torch.accelerator.synchronize(device)
