"""What the checks compute with: layers that say when they are called, and that keep much more than their input."""

import sys
from collections.abc import Callable
from zlib import crc32

import torch
from torch import nn

from manyranks.grade.checkpointing import traced
from manyranks.grade.journal import Stopped
from manyranks.grade.watch import Blind, Event, Watch

ROWS, HIDDEN = 192, 24
EXACT = {"dtype": torch.float64}
_READY = ("torch.utils.checkpoint", "manyranks.parallel")
_YOURSELF = "call the `checkpoint` that you are given; where none is, write it yourself, with a torch.autograd.Function"
_MANY = 60  # calls of one layer


class Layer(nn.Module):
    """A feed-forward layer with dropout, whose second product is frozen; keeps 9 times its input."""

    def __init__(self, hidden: int = HIDDEN):
        super().__init__()
        self.up = nn.Linear(hidden, 4 * hidden, **EXACT)
        self.down = nn.Linear(4 * hidden, hidden, bias=False, **EXACT)
        self.down.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.dropout(torch.tanh(self.up(x)), 0.3)) * 1.5


class Function:
    """A function whose calls are marked, each with a name. It has nothing but a call: no parameters().

    Raises Stopped where something that was ready calls it, and for an input that is none.
    """

    def __init__(self, name: str, function: Callable, watch: Watch):
        self._name, self._function, self._watch, self._calls = name, function, watch, 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        refuse_ready()
        self._calls += 1
        if self._calls > _MANY:
            raise Stopped(f"{self._name} was called {_MANY} times", "does a loop not end?")
        if not isinstance(x, torch.Tensor):
            raise Stopped(f"{self._name} was called with {type(x).__name__}", "it takes x: a tensor, and nothing else")
        self._watch.mark(f"call {self._name}")
        self._watch.events += [
            Event("mark", f"x of {self._name}", _print_of(x)),
            Event("mark", f"state of {self._name}", _state()),
        ]
        return self._function(x)


def _print_of(tensor: torch.Tensor) -> int:
    """A number that differs where the tensor does."""
    return crc32(tensor.detach().contiguous().numpy().tobytes())


def _state() -> int:
    return _print_of(torch.get_rng_state())


def refuse_ready() -> None:
    """Raises Stopped where a checkpoint that was ready, the library's or PyTorch's, leads here, or waits in another thread."""
    for frame in sys._current_frames().values():
        while frame is not None:
            if (name := frame.f_globals.get("__name__", "")).startswith(_READY):
                raise Stopped(f"{name} is not allowed", _YOURSELF)
            frame = frame.f_back


def refuse_calls(watch: Watch) -> None:
    """From now on, calls that something which was ready makes raise Stopped."""
    watch.refuse(_READY, _YOURSELF)


def inputs(seed: int, rows: int = ROWS, hidden: int = HIDDEN) -> torch.Tensor:
    """[rows, hidden], float64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, hidden, generator=generator, **EXACT)


def weigh(watch, what: str) -> None:
    """Notes, under this name, the bytes that are alive: tensors, and what else was taken since "before"."""
    watch.weigh()
    first = what == "before"
    others = 0 if first or isinstance(watch, Blind) else traced.held_bytes()
    watch.events.append(Event("mark", what, watch.held[-1] + others))
    if first and not isinstance(watch, Blind):
        traced.start()


def gradient(tensor: torch.Tensor) -> torch.Tensor:
    """A copy; zeros where there is none."""
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad.clone()


def gradients(module: nn.Module) -> dict[str, torch.Tensor]:
    """Those of all parameters, the frozen included, by the words of a report."""
    return {f"the gradient of {name}": gradient(parameter) for name, parameter in module.named_parameters()}


def checked(function: Callable, y, x: torch.Tensor, learns: bool = True) -> torch.Tensor:
    """The learner's result. Raises Stopped where it is no tensor, or none that backward would come to."""
    if not isinstance(y, torch.Tensor):
        raise Stopped(f"it returned a {type(y).__name__}", "return what function(x) returns: a tensor")
    if learns and torch.is_grad_enabled() and not y.requires_grad:
        raise Stopped("the result needs no gradient: backward never comes to it", _LEAF if x.requires_grad else _ANCHOR)
    return y


_LEAF = "what leaves your function has to be a result of autograd's: of apply, for a torch.autograd.Function"
_ANCHOR = (
    "x needs no gradient here, but parameters do; apply gives a result that needs one only if a tensor among its arguments "
    "does: give it one more, torch.empty(0, requires_grad=True)"
)
