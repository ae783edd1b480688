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

from manyranks.grade.compare import sizes
from manyranks.grade.journal import Stopped
from manyranks.grade.pipeline import failed, ready, whole
from manyranks.grade.pipeline.task import TableTask
from manyranks.grade.scripted import ScriptTask
from manyranks.grade.scripts import Scene, Tensors, Wrong, own_values, results
from manyranks.grade.trial import Trial
from manyranks.grade.verdict import Aspect, Verdict
from manyranks.grade.watch import Event

_EXACT = {"dtype": torch.float64}
_ROWS, _WIDTHS = 96, (16, 48, 32, 16)
_THREE = ("micro-batch 0", "micro-batch 1", "the other stack's micro-batch")
_CALLS = {"F": "forward(x)", "I": "input_gradient(grad)", "W": "weight_gradient()"}
_SLACK = 0.05  # of the FLOPs: the gradient of a bias may be a product with ones
_SMALL = 2048  # bytes of numbers and flags
_OWN = own_values("", 0.0).judge
_REFUSED = "W before I"  # a mark
_FIRST = "weight_gradient() before input_gradient(grad) was not refused"
_NEEDS_I = "W needs the gradients that I has computed: raise RuntimeError where they are not there yet"
_NOT_YET = "I leaves the parameters' .grad as it was: put aside what W needs, and let W add to it"
_ADDS = "gradients add up: W adds to what is in .grad, and sets it where that is None"
_NAMED = {
    " after I": _NOT_YET,
    "bias": "the gradient of a bias is the sum of dz over the rows",
    "layers[1].weight: ": "a weight that does not learn gets no gradient; of the others, dz.t() @ x",
    "layers": "dU of a layer is dz.t() @ x, with the input x that this layer had for this micro-batch",
    "of x": "I goes through the layers from the last to the first: dz = g * (1 - y * y), then g = dz @ weight",
    "micro-batch": (
        "one Split is for one micro-batch and one stack: its layers and what it keeps are in self, not in the class or the "
        "layers"
    ),
    "y: ": "each layer's product, with its bias where it has one, then tanh, also after the last",
}
_GRAPH = "; and no result leads to a graph: compute under torch.no_grad()"
_FLOPS = {
    "I": "I is one product a layer, grad @ weight: no product for a weight, and no forward again",
    "W": (
        "W is one product a layer that learns, gradᵀ @ input, of what I has put aside: it does not go through the layers "
        "again, and computes nothing for a frozen weight"
    ),
    "F": "F is one product a layer",
}
_HELD = {
    "F": (
        "forward keeps each layer's input and the last layer's result: an input is the tanh of the layer before it, once"
        f"{_GRAPH}"
    ),
    "I": (
        "between I and W there are a layer's input and the gradient of its product, of each layer: what only I needs, as the "
        f"last result, goes with I{_GRAPH}"
    ),
    "W": "when W is over, nothing is needed any more: let the inputs and the gradients go",
}


class Counts(NamedTuple):
    """FLOPs, and bytes held afterwards beside what was there before, of F, I and W; none where these are not counted."""

    flops: dict[str, int]
    held: dict[str, int] = {}  # noqa: RUF012 a NamedTuple's default


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
    found = {"y": _checked(_counted(watch, "F", split.forward, given.pop("x")), "F")}
    _weigh(watch, "F")
    x_grad = _counted(watch, "I", split.input_gradient, given.pop("grad"))
    found["the gradient of x"] = _checked(x_grad, "I")
    del x_grad
    found |= {f"{name} after I": value for name, value in _gradients(layers).items()}
    _weigh(watch, "I")
    _counted(watch, "W", split.weight_gradient)
    _weigh(watch, "W")
    return found | _gradients(layers)


def _several(kind: Callable, watch) -> Tensors:
    """Two micro-batches through one stack, and one through another: F0 F1 F2 I0 I1 I2 W0 W1 W2, onto gradients that are there;
    a frozen weight in the first."""
    layers, others, found = stack(52, "frozen"), stack(54), {}
    for parameter in layers.parameters():
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    halves = [_made(kind, of) for of in (layers, layers, others)]
    for name, seed, split in zip(_THREE, range(10, 13), halves, strict=True):
        y = _counted(watch, "F", split.forward, _random(seed, _WIDTHS[0]))
        found[f"y of {name}"] = _checked(y, "F")
    for name, seed, split in zip(_THREE, range(20, 23), halves, strict=True):
        x_grad = _counted(watch, "I", split.input_gradient, _random(seed, _WIDTHS[-1]))
        found[f"the gradient of {name}'s x"] = _checked(x_grad, "I")
    for split in halves:
        _counted(watch, "W", split.weight_gradient)
    of_others = {f"of the other stack, {name}": value for name, value in _gradients(others).items()}
    return found | _gradients(layers) | of_others


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
    with Products() as products, ready.refused(), failed.named(_CALLS[what]):
        result = step(*arguments)
    watch.events.append(Event("mark", f"FLOPs of {what}", products.flops))
    return result


def _checked(value, what: str) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise Stopped(f"{_CALLS[what]} returned a {type(value).__name__}", "it returns a tensor")
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
        if (count := flop_registry.get(_not_in_place(func))) is not None:
            self.flops += count(*args, **(kwargs or {}), out_val=result)
        return result


def _not_in_place(func):
    """The operator's packet; of addmm_, that of addmm, for PyTorch counts no other."""
    packet = func._overloadpacket
    return getattr(torch.ops.aten, packet.__name__.rstrip("_"), packet) if func.namespace == "aten" else packet


def _wrong(script: Callable) -> Iterator[Wrong]:
    slope = "each layer ends in tanh, whose derivative is 1 − tanh²: of y, its result, that is 1 − y * y"
    for hint, kind in ((_NOT_YET, whole.Early), (_ADDS, whole.Assigns), (slope, whole.NoSlopes)):
        yield Wrong(hint, results(script, kind))


@cache
def cases(n: int) -> list[Scene]:
    """One micro-batch, measured; W before I; several, one in the other."""
    products = [2 * _ROWS * a * b for a, b in pairwise(_WIDTHS)]
    product, frozen = sum(products), products[1]
    inputs, results = 8 * _ROWS * sum(_WIDTHS[:-1]), 8 * _ROWS * sum(_WIDTHS[1:])
    grad = {"y": 8 * _ROWS * _WIDTHS[-1], "x": 8 * _ROWS * _WIDTHS[0]}
    weights = 8 * sum((a + 1) * b for a, b in pairwise(_WIDTHS))
    held = {
        "F": inputs - grad["x"] + 2 * grad["y"],  # x was there before; y is kept, and a copy of it in the script
        "I": inputs + results + weights,  # the script has copies of gradients: in place of x and grad, and of the weights'
        "W": 2 * weights,
    }
    several = {"F": 3 * product, "I": 3 * product, "W": 3 * product - 2 * frozen}
    return [
        _scene(_one, "one micro-batch", Counts(dict.fromkeys("FIW", product), held)),
        Scene(1, _too_early, [{}], note="W before I"),
        _scene(_several, "several micro-batches and a frozen weight", Counts(several)),
    ]


def _scene(script: Callable, note: str, must: Counts) -> Scene:
    return Scene(1, script, results(script, whole.Whole), partial(_wrong, script), must, note)


def _values(task: "Halves", trial: Trial) -> Verdict:
    verdict = _OWN(task, trial)
    hint = verdict.hint or next((hint for name, hint in _NAMED.items() if name in verdict.found), "")
    return verdict._replace(found=verdict.found.removeprefix("rank 0: "), hint=hint)


def _noted(trial: Trial, what: str) -> int:
    return sum(event.bytes for event in trial.answers[0].events if event.what == what)


def _flops(task: "Halves", trial: Trial) -> Verdict:
    if trial.case.must is None:
        return Verdict(True)
    for step, right in trial.case.must.flops.items():
        got = _noted(trial, f"FLOPs of {step}")
        if abs(got - right) > _SLACK * right:
            return Verdict(False, f"{step} computes {got:,} FLOPs in products; right is {right:,}", _FLOPS[step])
    return Verdict(True)


def _held(task: "Halves", trial: Trial) -> Verdict:
    if not _values(task, trial).ok:
        return Verdict(None, "what was computed is wrong")
    if trial.case.must is None:
        return Verdict(True)
    for step, right in trial.case.must.held.items():
        got = _noted(trial, f"held after {step}") - _noted(trial, "held after before")
        if got > right + _SMALL:
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
