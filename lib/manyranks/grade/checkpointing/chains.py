"""What choose is asked: chains of layers, real ones and a long one, and budgets. And what a choice costs and holds."""

from collections.abc import Sequence
from contextlib import nullcontext
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import nn

from manyranks.grade.checkpointing.budget import Cost, peak
from manyranks.measure.flops import WorkCounter
from manyranks.measure.memory import SavedBytes
from manyranks.parallel.checkpointing import checkpoint

_ROWS, _ITEMSIZE = 32, 8


class Shape(NamedTuple):
    """A layer's: columns of its input, inside and of its output; times: how many activations it keeps inside."""

    input: int
    inside: int
    output: int
    times: int

    @property
    def layer(self) -> Cost:
        """What the learner is told of it."""
        forward = 2 * _ROWS * self.inside * (self.input + self.output)
        size = _ROWS * _ITEMSIZE
        return Cost(forward, size * self.input, size * (self.input + self.inside * self.times))


class Block(nn.Module):
    """A layer of this shape. Its output is not among what it saves."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.up = nn.Linear(shape.input, shape.inside, bias=False, dtype=torch.float64)
        self.down = nn.Linear(shape.inside, shape.output, bias=False, dtype=torch.float64)
        self._times = shape.times

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.up(x)
        for _ in range(self._times):
            x = torch.tanh(x)
        return self.down(x)


class Chain(NamedTuple):
    """What choose is asked; shapes: of the real layers, none where it is not run."""

    layers: tuple[Cost, ...]
    budget: int
    shapes: tuple[Shape, ...] = ()


@cache
def best(layers: tuple[Cost, ...], budget: int) -> tuple[int, ...] | None:
    """A choice that fits with the least FLOPs; None where none fits."""
    ways: dict[int, tuple] = {0: (0, ())}  # bytes held -> FLOPs, choice
    for k, layer in enumerate(layers):
        found: dict[int, tuple] = {}
        for held, (flops, chosen) in ways.items():
            kept = held + layer.saved, (flops, chosen)
            again = held + layer.input, (flops + layer.forward, (*chosen, k))
            for there, way in (kept, again) if held + layer.saved <= budget else ():
                found[there] = min(found.get(there, way), way)
        ways = found
    return min(ways.values())[1] if ways else None


def flops(layers: Sequence[Cost], chosen: Sequence[int]) -> int:
    """That the choice computes again."""
    return sum(layers[k].forward for k in chosen)


def measured(shapes: Sequence[Shape], chosen: list[int]) -> tuple[int, int]:
    """FLOPs of layers that ran a second time, and the most bytes saved for backward, of real layers."""
    model = nn.ModuleList(map(Block, shapes))
    x = torch.randn(_ROWS, shapes[0].input, dtype=torch.float64, requires_grad=True)
    again, most, seen = 0, 0, set()

    def run(k: int, x: torch.Tensor) -> torch.Tensor:
        nonlocal again, most
        with WorkCounter() if k in seen else nullcontext() as work:
            y = model[k](x)
        again += work.flops if work else 0
        seen.add(k)
        most = max(most, saved.bytes)
        return y

    with SavedBytes(model.parameters()) as saved:
        for k in range(len(shapes)):
            x = checkpoint(partial(run, k), x) if k in chosen else run(k, x)
        most = max(most, saved.bytes)
        x.sum().backward()
    return again, most


def chains() -> dict[str, Chain]:
    """By what is said of them."""
    unequal = _shapes((16, 24, 1), (16, 40, 3), (24, 16, 4), (8, 48, 2), (40, 32, 1), (16, 20, 6), (12, 30, 2))
    wide = _shapes((8, 16, 1), (48, 40, 2), (8, 24, 5), (32, 16, 3), (8, 64, 2))
    many = tuple(Cost(7 + k * 37 % 53, 8 + k * 5 % 7, 20 + k * 29 % 41) for k in range(40))
    return {
        "with 7 layers": _real(unequal, 5, 8),
        "with a budget in which nothing fits": Chain(tuple(s.layer for s in wide), _least(wide) - 1),
        "with 40 layers": Chain(many, 800),  # the third of seven: who tries all choices has a part of the points, a small one
        "with 7 layers and less": _real(unequal, 3, 5),
        "with 5 layers": _real(wide, 3, 4),
        "with a budget for everything": _real(wide, 1, 1),
        "with the least budget": Chain(tuple(s.layer for s in wide), _least(wide), wide),
    }


def _shapes(*rows: tuple[int, int, int]) -> tuple[Shape, ...]:
    """rows: columns of the input and inside, and activations; the last layer's output is as wide as its input."""
    outputs = [*(row[0] for row in rows[1:]), rows[-1][0]]
    return tuple(Shape(a, b, output, times) for (a, b, times), output in zip(rows, outputs, strict=True))


def _real(shapes: tuple[Shape, ...], part: int, of: int) -> Chain:
    """With a budget between what is least and what everything takes."""
    layers = tuple(shape.layer for shape in shapes)
    return Chain(layers, peak(layers, ()) * part // of, shapes)


def _least(shapes: tuple[Shape, ...]) -> int:
    return peak([shape.layer for shape in shapes], range(len(shapes)))
