"""The task choose: which layers to checkpoint, so that a budget is kept and the least is computed again."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from numbers import Integral
from typing import ClassVar, NamedTuple

import torch
from torch import nn

from manyranks.grade.checkpointing.budget import Layer, peak
from manyranks.grade.checkpointing.task import CheckpointTask, Scene
from manyranks.grade.journal import Stopped
from manyranks.grade.scripts import Tensors
from manyranks.grade.trial import Trial
from manyranks.grade.verdict import Aspect, Verdict
from manyranks.measure.flops import WorkCounter
from manyranks.measure.memory import SavedBytes
from manyranks.parallel.checkpointing import checkpoint

_ROWS, _ITEMSIZE = 32, 8
_NUMBERS = "return the numbers of the layers to checkpoint, counted from 0, as a set or a list: {0, 2}"
_TABLE = (
    "go through the layers once; keep, for each number of bytes that may be held by now, the least FLOPs with which it can be "
    "had, and from which choice"
)
_EVERY = "where nothing fits, raise ValueError: not even what holds least at each layer is within the budget"
_PEAK = (
    "what is held when forward ends fits, and backward needs more: peak(layers, chosen) counts, at each layer, all that it "
    "saves, computed again or not, beside what those before it hold"
)
_LAST = "the last layer's checkpoint frees nothing: backward begins there, and needs at once all that it saves"
_MORE = "a part of your choice is enough"
_FEWEST = "it is not the number of layers that counts, but their FLOPs"


class Shape(NamedTuple):
    """A layer's: columns of its input, inside and of its output; times: how many activations it keeps inside."""

    input: int
    inside: int
    output: int
    times: int

    @property
    def layer(self) -> Layer:
        """What the learner is told of it."""
        forward = 2 * _ROWS * self.inside * (self.input + self.output)
        size = _ROWS * _ITEMSIZE
        return Layer(forward, size * self.input, size * (self.input + self.inside * self.times))


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

    layers: tuple[Layer, ...]
    budget: int
    shapes: tuple[Shape, ...] = ()


def best(layers: Sequence[Layer], budget: int) -> tuple[int, ...] | None:
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


def flops(layers: Sequence[Layer], chosen: Sequence[int]) -> int:
    """That the choice computes again."""
    return sum(layers[k].forward for k in chosen)


def _asked(chain: Chain, choose: Callable, watch) -> Tensors:
    """The choice; what it was measured to compute again and to hold. Without a choice, where it raised ValueError."""
    try:
        chosen = _numbers(choose(list(chain.layers), chain.budget), len(chain.layers))
    except ValueError:
        return {}
    found = measured(chain.shapes, chosen) if chain.shapes else ()
    return {"chosen": torch.tensor(chosen, dtype=torch.int64), "measured": torch.tensor(found, dtype=torch.int64)}


def _numbers(chosen, n: int) -> list[int]:
    try:
        numbers = list(chosen)
    except TypeError:
        raise Stopped(f"choose returned {chosen!r:.60}", _NUMBERS) from None
    if any(isinstance(k, bool) or not isinstance(k, Integral) or not 0 <= k < n for k in numbers):
        raise Stopped(f"choose returned {chosen!r:.60} for {n} layers", _NUMBERS)
    return sorted(set(map(int, numbers)))


def measured(shapes: Sequence[Shape], chosen: list[int]) -> tuple[int, int]:
    """FLOPs of layers that ran a second time, and the most bytes saved for backward, of real layers."""
    model = nn.ModuleList(map(Block, shapes))
    x = torch.randn(_ROWS, shapes[0].input, dtype=torch.float64, requires_grad=True)
    again, most, seen = 0, 0, set()

    def run(k: int, x: torch.Tensor) -> torch.Tensor:
        nonlocal again, most
        with WorkCounter() as work:
            y = model[k](x)
        again += work.flops if k in seen else 0
        seen.add(k)
        most = max(most, saved.bytes)
        return y

    with SavedBytes(model.parameters()) as saved:
        for k in range(len(shapes)):
            x = checkpoint(partial(run, k), x) if k in chosen else run(k, x)
        most = max(most, saved.bytes)
        x.sum().backward()
    return again, most


@cache
def cases(n: int) -> list[Scene]:
    """Chains of real layers, one of many that is not run, and budgets in which nothing fits."""
    return [Scene(1, partial(_asked, chain), [{}], must=chain, note=note) for note, chain in chains().items()]


def chains() -> dict[str, Chain]:
    """By what is said of them."""
    unequal = _shapes((16, 24, 1), (16, 40, 3), (24, 16, 4), (8, 48, 2), (40, 32, 1), (16, 20, 6), (12, 30, 2))
    wide = _shapes((8, 16, 1), (48, 40, 2), (8, 24, 5), (32, 16, 3), (8, 64, 2))
    many = tuple(Layer(7 + k * 37 % 53, 8 + k * 5 % 7, 20 + k * 29 % 41) for k in range(40))
    return {
        "with 7 layers": _real(unequal, 5, 8),
        "with 7 layers and less": _real(unequal, 3, 5),
        "with 5 layers": _real(wide, 3, 4),
        "with a budget for everything": _real(wide, 1, 1),
        "with 40 layers": Chain(many, 800),
        "with a budget in which nothing fits": Chain(tuple(s.layer for s in wide), _least(wide) - 1),
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


def _choice(trial: Trial) -> tuple[int, ...] | None:
    chosen = trial.answers[0].tensors.get("chosen")
    return None if chosen is None else tuple(chosen.tolist())


def _fits(task: "Choose", trial: Trial) -> Verdict:
    """The peak, measured where the layers are real, is within the budget."""
    chain, chosen = trial.case.must, _choice(trial)
    if (right := best(chain.layers, chain.budget)) is None:
        return Verdict(True)
    if chosen is None:
        return Verdict(False, f"choose raised ValueError; to checkpoint {_set(right)} fits", _TABLE)
    measured = trial.answers[0].tensors["measured"].tolist()
    most = measured[1] if measured else peak(chain.layers, chosen)
    if most <= chain.budget:
        return Verdict(True)
    how = "measured" if measured else "by peak(layers, chosen)"
    return Verdict(False, f"{_set(chosen)} holds {most:,} bytes, {how}; the budget is {chain.budget:,}", _why(chain, chosen))


def _why(chain: Chain, chosen: tuple[int, ...]) -> str:
    """Why a choice does not fit."""
    ends = sum(layer.input if k in chosen else layer.saved for k, layer in enumerate(chain.layers))
    if not chosen:
        return "without checkpoints everything is kept: choose layers until peak(layers, chosen) is within the budget"
    return _PEAK if ends <= chain.budget else "peak(layers, chosen) says what a choice holds: compare it with the budget"


def _least_flops(task: "Choose", trial: Trial) -> Verdict:
    """No choice that fits computes less again."""
    chain, chosen = trial.case.must, _choice(trial)
    right = best(chain.layers, chain.budget)
    if right is None:
        return Verdict(True)
    if chosen is None or peak(chain.layers, chosen) > chain.budget:
        return Verdict(False, f"nothing that fits was chosen; {_set(right)} fits", _TABLE)
    measured = trial.answers[0].tensors["measured"].tolist()
    mine, theirs = measured[0] if measured else flops(chain.layers, chosen), flops(chain.layers, right)
    if mine == theirs:
        return Verdict(True)
    found = f"{_set(chosen)} computes {mine:,} FLOPs again; {_set(right)} fits, too, and computes {theirs:,}"
    return Verdict(False, found, _why_more(chain, chosen, right))


def _why_more(chain: Chain, chosen: tuple[int, ...], right: tuple[int, ...]) -> str:
    if set(right) < set(chosen):
        return _LAST if set(chosen) - set(right) == {len(chain.layers) - 1} else f"{_MORE}; {_TABLE}"
    if len(chosen) < len(right):
        return f"{_FEWEST}; {_TABLE}"
    return f"taking one layer after the other, the best by some measure first, can miss the best choice: {_TABLE}"


def _set(chosen: Sequence[int]) -> str:
    return "{" + ", ".join(map(str, chosen)) + "}"


def _refuses(task: "Choose", trial: Trial) -> Verdict:
    """ValueError where nothing fits."""
    chain, chosen = trial.case.must, _choice(trial)
    if chosen is None or best(chain.layers, chain.budget) is not None:
        return Verdict(True)
    least = peak(chain.layers, range(len(chain.layers)))
    return Verdict(
        False, f"choose returned {_set(chosen)}; the least that fits is {least:,}, the budget is {chain.budget:,}", _EVERY
    )


@dataclass(frozen=True)
class Choose(CheckpointTask):
    advice: ClassVar[tuple[tuple[str, str], ...]] = (
        (r"a loop does not end", f"40 layers have 2 to the 40 choices, too many to try each: {_TABLE}"),
        (r"choose returned \[(True|False)", "not a list of yes and no"),
        (r"choose returned None", "where nothing fits, raise ValueError"),
    )
    aspects: ClassVar[tuple[Aspect, ...]] = (
        Aspect("fits the budget", 0.25, _fits),
        Aspect("computes as little again as possible", 0.55, _least_flops),
        Aspect("raises ValueError where nothing fits", 0.2, _refuses),
    )
