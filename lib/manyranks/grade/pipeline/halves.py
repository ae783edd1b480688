"""The task Split: the backward of a stack of linear layers in two halves, by hand."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from typing import ClassVar, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from manyranks.grade.checkpointing.layers import Blind
from manyranks.grade.compare import sizes
from manyranks.grade.journal import Stopped
from manyranks.grade.pipeline import ready, whole
from manyranks.grade.pipeline.task import Scene, TableTask
from manyranks.grade.scripted import ScriptTask
from manyranks.grade.scripts import Tensors, Wrong, own_values
from manyranks.grade.trial import Trial
from manyranks.grade.verdict import Aspect, Verdict
from manyranks.grade.watch import Event

_EXACT = {"dtype": torch.float64}
_ROWS, _WIDTHS = 96, (16, 48, 32, 16)
_SLACK = 0.05  # of the FLOPs: the gradient of a bias may be a product with ones
_SMALL = 2048  # bytes of numbers and flags
_OWN = own_values("", 0.0).judge
_REFUSED = "W before I"  # a mark
_FIRST = "weight_gradient() before input_gradient(grad) was not refused"
_NEEDS_I = "W needs the gradients that I has computed: raise RuntimeError where they are not there yet"
_NOT_YET = "I leaves the parameters' .grad as it was: they get theirs in W"
_ADDS = "gradients add up: W adds to what is in .grad, and sets it where that is None"
_NAMED = {
    "bias": "the gradient of a bias is the sum of dz over the rows",
    "layers[1].weight: ": "a weight that does not learn gets no gradient; of the others, dz.t() @ x",
    "layers": "dU of a layer is dz.t() @ x, with the input x that this layer had for this micro-batch",
    "of x": "I goes through the layers from the last to the first: dz = g * (1 - y * y), then g = dz @ weight",
    "micro-batch": "one Split is for one micro-batch: what it keeps is its own, not the layers' or the class's",
    "y: ": "each layer's product, with its bias where it has one, then tanh, also after the last",
}
_FLOPS = {
    "I": "I is one product a layer, grad @ weight: no product for a weight, and no forward again",
    "W": (
        "W is one product a layer that learns, gradᵀ @ input, of what I has put aside: it does not go through the layers "
        "again, and computes nothing for a frozen weight"
    ),
    "F": "F is one product a layer",
}
_HELD = {
    "F": "forward keeps each layer's input and the last layer's result: an input is the tanh of the layer before it, once",
    "I": (
        "between I and W there are a layer's input and the gradient of its product, of each layer: what only I needs, as the "
        "last result, goes with I"
    ),
    "W": "when W is over, nothing is needed any more: let the inputs and the gradients go",
}


class Counts(NamedTuple):
    """FLOPs, and bytes held afterwards beside what was there before, of F, I and W."""

    flops: dict[str, int]
    held: dict[str, int]


def stack(seed: int, kind: str = "") -> nn.ModuleList:
    """The layers. kind: "frozen", with a weight that does not learn, and a layer without a bias."""
    torch.manual_seed(seed)
    layers = nn.ModuleList(nn.Linear(*pair, bias=not (kind and k == 2), **_EXACT) for k, pair in enumerate(pairwise(_WIDTHS)))
    layers[1].weight.requires_grad_(not kind)
    return layers


def _random(seed: int, width: int) -> torch.Tensor:
    return torch.randn(_ROWS, width, generator=torch.Generator().manual_seed(seed), **_EXACT)


def _one(kind: Callable, watch) -> Tensors:
    """One micro-batch there and back; each step's FLOPs, and what is held after it."""
    layers = stack(51)
    given = {"x": _random(1, _WIDTHS[0]), "grad": _random(2, _WIDTHS[-1])}
    split = _made(kind, layers)
    _weigh(watch, "before")
    found = {"y": _checked(_counted(watch, "F", split.forward, given.pop("x")), "forward(x)")}
    _weigh(watch, "F")
    x_grad = _counted(watch, "I", split.input_gradient, given.pop("grad"))
    found["the gradient of x"] = _checked(x_grad, "input_gradient(grad)")
    del x_grad
    found |= {f"{name} after I": value for name, value in _gradients(layers).items()}
    _weigh(watch, "I")
    _counted(watch, "W", split.weight_gradient)
    _weigh(watch, "W")
    return found | _gradients(layers)


def _several(kind: Callable, watch) -> Tensors:
    """Two micro-batches through one stack: F0 F1 I0 I1 W0 W1, onto gradients that are there; a frozen weight."""
    layers = stack(52, "frozen")
    for parameter in layers.parameters():
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    halves, found = [_made(kind, layers) for _ in range(2)], {}
    with ready.refused():
        for i, split in enumerate(halves):
            found[f"y of micro-batch {i}"] = _checked(split.forward(_random(10 + i, _WIDTHS[0])), "forward(x)")
        for i, split in enumerate(halves):
            x_grad = split.input_gradient(_random(20 + i, _WIDTHS[-1]))
            found[f"the gradient of micro-batch {i}'s x"] = _checked(x_grad, "input_gradient(grad)")
        for split in halves:
            split.weight_gradient()
    return found | _gradients(layers)


def _too_early(kind: Callable, watch) -> Tensors:
    """W before I."""
    layers = stack(53)
    split = _made(kind, layers)
    split.forward(_random(30, _WIDTHS[0]))
    try:
        split.weight_gradient()
    except NotImplementedError:
        raise
    except RuntimeError:
        return {}
    except Exception as error:
        watch.mark(f"{_REFUSED}{type(error).__name__} was raised")
        return {}
    watch.mark(f"{_REFUSED}{_FIRST}")
    return {}


def _made(kind: Callable, layers: nn.ModuleList) -> object:
    with ready.refused():
        return kind(list(layers))


def _weigh(watch, what: str) -> None:
    watch.weigh()
    watch.events.append(Event("mark", f"held after {what}", watch.held[-1]))


def _counted(watch, what: str, step: Callable, *arguments):
    if isinstance(watch, Blind):
        return step(*arguments)
    with Products() as products, ready.refused():
        result = step(*arguments)
    watch.events.append(Event("mark", f"FLOPs of {what}", products.flops))
    return result


def _checked(value, call: str) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise Stopped(f"{call} returned a {type(value).__name__}", "it returns a tensor")
    return value.detach().clone()


def _gradients(layers: nn.ModuleList) -> Tensors:
    named = [(f"the gradient of layers[{name.replace('.', '].')}", p) for name, p in layers.named_parameters()]
    return {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in named}


class Products(TorchDispatchMode):
    """A context manager: `flops` are those of the matrix products inside, also of code that calls modules within autograd."""

    def __init__(self):
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if (count := flop_registry.get(func._overloadpacket)) is not None:
            self.flops += count(*args, **(kwargs or {}), out_val=result)
        return result


def _wrong(script: Callable) -> Iterator[Wrong]:
    slope = "each layer ends in tanh, whose derivative is 1 − tanh²: of y, its result, that is 1 − y * y"
    for hint, kind in ((_NOT_YET, whole.Early), (_ADDS, whole.Assigns), (slope, whole.NoSlopes)):
        yield Wrong(hint, [script(kind, Blind())])


@cache
def cases(n: int) -> list[Scene]:
    """One micro-batch, measured; two, one in the other; W before I."""
    product = sum(2 * _ROWS * a * b for a, b in pairwise(_WIDTHS))
    inputs, results = 8 * _ROWS * sum(_WIDTHS[:-1]), 8 * _ROWS * sum(_WIDTHS[1:])
    grad = {"y": 8 * _ROWS * _WIDTHS[-1], "x": 8 * _ROWS * _WIDTHS[0]}
    weights = sum(p.nbytes for p in stack(0).parameters())
    held = {
        "F": inputs - grad["x"] + 2 * grad["y"],  # x was there before; y is kept, and a copy of it in the script
        "I": inputs + results + weights,  # the script has copies of gradients: in place of x and grad, and of the weights'
        "W": 2 * weights,
    }
    return [
        _scene(_one, "one micro-batch", Counts(dict.fromkeys("FIW", product), held)),
        _scene(_several, "two micro-batches and a frozen weight", None),
        Scene(1, _too_early, [{}], note="W before I"),
    ]


def _scene(script: Callable, note: str, must: Counts | None) -> Scene:
    return Scene(1, script, [script(whole.Whole, Blind())], partial(_wrong, script), must, note)


def _values(task: "Halves", trial: Trial) -> Verdict:
    verdict = _OWN(task, trial)
    hint = verdict.hint or next((hint for name, hint in _NAMED.items() if name in verdict.found), "")
    return verdict._replace(found=verdict.found.removeprefix("rank 0: "), hint=hint)


def _noted(trial: Trial, what: str) -> int:
    return next(event.bytes for event in trial.answers[0].events if event.what == what)


def _flops(task: "Halves", trial: Trial) -> Verdict:
    for step in "FIW" if trial.case.must else "":
        got, right = _noted(trial, f"FLOPs of {step}"), trial.case.must.flops[step]
        if abs(got - right) > _SLACK * right:
            return Verdict(False, f"{step} computes {got:,} FLOPs in products; right is {right:,}", _FLOPS[step])
    return Verdict(True)


def _held(task: "Halves", trial: Trial) -> Verdict:
    if not _values(task, trial).ok:
        return Verdict(False, "what was computed is wrong")
    for step in "FIW" if trial.case.must else "":
        got = _noted(trial, f"held after {step}") - _noted(trial, "held after before")
        if got > (right := trial.case.must.held[step]) + _SMALL:
            there, here = sizes(got, right)
            return Verdict(False, f"after {step}, {there} more are held than before F; right is {here}", _HELD[step])
    return Verdict(True)


def _order(task: "Halves", trial: Trial) -> Verdict:
    """W without its I is refused, where the script tries it."""
    for event in trial.answers[0].events:
        if event.what.startswith(_REFUSED):
            return Verdict(False, event.what.removeprefix(_REFUSED), _NEEDS_I)
    return Verdict(True)


@dataclass(frozen=True)
class Halves(TableTask):
    advice: ClassVar[tuple[tuple[str, str], ...]] = ScriptTask.advice
    methods: ClassVar[dict[str, str]] = {
        "forward": "the check calls .forward(x)",
        "input_gradient": "the check calls .input_gradient(grad)",
        "weight_gradient": "the check calls .weight_gradient()",
    }
    aspects: ClassVar[tuple[Aspect, ...]] = (
        Aspect("computes as autograd does, weights in W only", 0.2, _values),
        Aspect("I does half of the products, W the other half", 0.4, _flops),
        Aspect("keeps what is needed for what comes, no more", 0.3, _held),
        Aspect("refuses W before I", 0.1, _order),
    )
