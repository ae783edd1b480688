"""What train_step is given: a stage that says which micro-batch it computes, and counts those whose graphs are alive."""

import weakref
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from manyranks.grade.journal import Stopped
from manyranks.grade.watch import Event

EXACT = {"dtype": torch.float64}
LENGTH, HIDDEN = 6, 16
UNKNOWN = "?"
_SEED, _MANY = 61, 60
_TOLERANCE = 1e-9


class Layers(nn.Module):
    """One stage of the model: from [b, s, h] to [b, s, h]. It keeps several times its input."""

    def __init__(self, rank: int):
        super().__init__()
        torch.manual_seed(_SEED + rank)
        self.up, self.down = nn.Linear(HIDDEN, 2 * HIDDEN, **EXACT), nn.Linear(2 * HIDDEN, HIDDEN, **EXACT)

    def forward(self, x_BSH: Tensor) -> Tensor:
        return x_BSH + self.down(torch.tanh(self.up(x_BSH)))


def loss_of(y_BSH: Tensor, target_BSH: Tensor) -> Tensor:
    """The mean over the micro-batch."""
    return (y_BSH - target_BSH).square().mean()


@dataclass(frozen=True)
class Step:
    """One step on n ranks. tables: of each rank; rows: of each micro-batch."""

    n: int
    tables: tuple[tuple[tuple[str, int], ...], ...]
    rows: tuple[int, ...]

    @property
    def m(self) -> int:
        return len(self.rows)

    @property
    def shapes(self) -> list[torch.Size]:
        """Of what passes a boundary, by micro-batch."""
        return [torch.Size((rows, LENGTH, HIDDEN)) for rows in self.rows]

    @property
    def bytes(self) -> list[int]:
        """Of the same."""
        return [shape.numel() * 8 for shape in self.shapes]

    def batch(self, seed: int) -> list[Tensor]:
        """Inputs, or targets."""
        generator = torch.Generator().manual_seed(seed)
        return [torch.randn(shape, generator=generator, **EXACT) for shape in self.shapes]

    def in_flight(self, rank: int) -> int:
        """Micro-batches that the rank's table holds at most."""
        count = most = 0
        for kind, _ in self.tables[rank]:
            count += 1 if kind == "F" else -1
            most = max(most, count)
        return most


class _Flight:
    """A forward of the stage; alive while something of its graph is."""


class _Kept:
    """What autograd's graph holds in place of a tensor."""

    def __init__(self, tensor: Tensor, flight: _Flight):
        self.tensor, self.flight = tensor, flight


class Stage(nn.Module):
    """Layers that are watched. known: the input of each micro-batch, here.

    Marks "F 3" when micro-batch 3 comes forward, with the number that are in flight; "inputs", how many inputs are still held
    or used; "reused", where a new input lies where one in flight is; "B 3" when its gradient arrives.
    """

    def __init__(self, rank: int, known: list[Tensor], watch):
        super().__init__()
        self.layers = Layers(rank)
        self._known, self._watch, self._first, self._calls = known, watch, rank == 0, 0
        self._flights: weakref.WeakSet[_Flight] = weakref.WeakSet()
        self._inputs: dict[int, StorageWeakRef] = {}

    def forward(self, x: Tensor) -> Tensor:
        self._calls += 1
        if self._calls > _MANY:
            raise Stopped(f"the stage was called {_MANY} times", "does a loop not end?")
        if not isinstance(x, Tensor):
            raise Stopped(f"the stage was called with a {type(x).__name__}", "it takes one tensor, a micro-batch's")
        name, flight = self._name(x), _Flight()
        self._note_input(x)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: _Kept(t.detach(), flight), lambda kept: kept.tensor):
            y = self.layers(x)
        if y.requires_grad:
            self._flights.add(flight)
            y.register_hook(lambda grad: self._watch.mark(f"B {name}"))
        self._watch.events.append(Event("mark", f"F {name}", len(self._flights)))
        self._watch.events.append(Event("mark", "inputs", len(self._inputs)))
        return y

    def _name(self, x: Tensor) -> str:
        """The number of the micro-batch whose input it is."""
        for i, known in enumerate(self._known):
            if x.shape == known.shape and torch.allclose(x.detach(), known, rtol=_TOLERANCE, atol=_TOLERANCE):
                return str(i)
        return UNKNOWN

    def _note_input(self, x: Tensor) -> None:
        self._inputs = {key: ref for key, ref in self._inputs.items() if not ref.expired()}
        storage = x.untyped_storage()
        if storage._cdata in self._inputs:
            self._watch.mark("reused")
        if not self._first:
            self._inputs[storage._cdata] = StorageWeakRef(storage)
