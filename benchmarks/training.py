"""Defines the model of 10 M parameters, its step and its timing, which all comparisons of training steps share."""

import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

Step = Callable[[], None]

_WIDTH, _DEPTH, _ROWS = 1024, 10, 32  # 10 · (1024² + 1024) = 10.5 M parameters


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.ReLU()) for _ in range(_DEPTH)))


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, finish: Step = lambda: None) -> Step:
    """One step of training. finish: what follows backward."""
    x = torch.ones(_ROWS, _WIDTH)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        finish()
        optimizer.step()

    return step


def fastest(step: Step, steps: int) -> float:
    """Seconds of the fastest of some steps: the one that whatever else runs on the machine disturbed least."""
    seconds = []
    for _ in range(steps):
        dist.barrier()
        started = time.perf_counter()
        step()
        dist.barrier()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def slowest(of_ranks: list[dict[str, tuple[float, ...]]]) -> dict[str, tuple[float, ...]]:
    """Returns, for each value, the largest of all ranks."""
    return {which: tuple(map(max, zip(*(rank[which] for rank in of_ranks), strict=True))) for which in of_ranks[0]}
