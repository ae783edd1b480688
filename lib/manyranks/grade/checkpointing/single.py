"""The task checkpoint: one function, of which forward keeps only x."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import ClassVar

import torch
from torch import nn

from manyranks.grade.checkpointing import judges, oracle
from manyranks.grade.checkpointing.judges import Hold, Must
from manyranks.grade.checkpointing.layers import (
    EXACT,
    HIDDEN,
    Function,
    Layer,
    checked,
    gradient,
    gradients,
    inputs,
    weigh,
)
from manyranks.grade.checkpointing.task import CheckpointTask, values
from manyranks.grade.scripts import Scene, Tensors, Wrong, results
from manyranks.grade.trial import Trial
from manyranks.grade.verdict import Aspect, Verdict

_SEED, _DRAWS = 40, 3
_BACK = (
    "after backward, random numbers begin again from an earlier place: the second run has used the old state, and the one from "
    "before it has to be set back"
)
_X = (
    "x gets no gradient: apply gets x itself; the second run needs a leaf that wants one, x.detach().requires_grad_(), and "
    "backward returns its .grad"
)
_MISSING = (
    "the function's parameters get no gradient: torch.autograd.backward(y, grad), with the second run's y, gives it to all of "
    "them"
)
_TWICE = "the parameters get their gradient twice: one backward through the second run is enough"
_ADDS = "gradients add up: what the parameters' .grad was before is lost"
_ONES = "backward gets the gradient of the result: start from it, not from ones"
_UNLIKE = "the gradient of the result goes back through the second run, once, to the second run's x and to all parameters"
_NAMED = {
    "whether x needs": "leave x as it is, also its requires_grad: work on x.detach()",
    ": x: ": "leave x as it is",
    "drawn after forward": "forward draws as many random numbers as the function does, from where they are: no seeds",
    "drawn after backward": _BACK,
    "whether the result": "under torch.no_grad() just call the function",
    "the gradient of x": _UNLIKE,
    "the gradient of": _UNLIKE,
}
_NOTHING_ELSE = (
    "keep x and nothing else: where autograd is off, as inside a torch.autograd.Function's forward, the function leaves "
    "nothing; and what backward needs goes into ctx.save_for_backward, not into lists, closures or results"
)
_COPY = (
    "x itself is enough: a copy takes the same bytes once more where somebody else holds x, too. A tensor more for apply may "
    "be empty: torch.empty(0, requires_grad=True)"
)
_GIVE_BACK = (
    "when backward is over, x is not needed any more: what is in ctx.save_for_backward is let go then, what hangs on ctx or in "
    "a list is not"
)
_NO_GRAD = "nobody will go backward here: under torch.no_grad() just call the function"


def _alone(checkpoint: Callable, watch) -> Tensors:
    """One layer with dropout, twice, so that gradients add up; all is measured the first time."""
    torch.manual_seed(_SEED)
    layer = Layer()
    function = Function("function", layer, watch)
    leaf = inputs(1).requires_grad_()
    found = _measured(checkpoint, function, leaf, watch)
    result = checked(function, checkpoint(function, leaf), leaf)
    found["the result"] = result.detach().clone()
    (result * inputs(3)).sum().backward()
    return found | {"the gradient of x": gradient(leaf)} | gradients(layer)


def _measured(checkpoint: Callable, function: Function, leaf: torch.Tensor, watch) -> Tensors:
    x = leaf * 2
    upstream = inputs(2)
    weigh(watch, "before")
    watch.mark("forward")
    y = checked(function, checkpoint(function, x), x)
    watch.mark("forward over")
    loss = (y * upstream).sum()
    drawn = {"the random numbers drawn after forward": torch.rand(_DRAWS, dtype=torch.float64)}
    del y
    weigh(watch, "with x")
    del x
    weigh(watch, "without x")
    watch.mark("backward")
    loss.backward()
    watch.mark("backward over")
    weigh(watch, judges.AFTER_BACKWARD)
    return drawn | {"the random numbers drawn after backward": torch.rand(_DRAWS, dtype=torch.float64)}


def _another(checkpoint: Callable, watch) -> Tensors:
    """The function has another scale when backward comes: whose gradients are there, the first or the second run's?"""
    torch.manual_seed(_SEED)
    layer, x, scales = Layer(), inputs(7).requires_grad_(), [torch.ones(HIDDEN, **EXACT)]
    function = Function("function", lambda x: layer(x) * scales[0], watch)
    watch.mark("forward")
    y = checked(function, checkpoint(function, x), x)
    watch.mark("forward over")
    scales[0] = scales[0] * 2
    watch.mark("backward")
    y.backward(inputs(8))
    watch.mark("backward over")
    return {"the gradient of x": gradient(x)} | gradients(layer)


class _Chain(nn.Module):
    """Three layers, of which the first and the last share a weight, and a head."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = Layer(), Layer(), Layer()
        self.third.up.weight = self.first.up.weight
        self.head = nn.Linear(HIDDEN, 2, dtype=torch.float64)


def _chained(checkpoint: Callable, watch) -> Tensors:
    """Three checkpoints; x needs no gradient, and the second function has a tensor of its own beside its parameters."""
    torch.manual_seed(_SEED)
    model, x = _Chain(), inputs(4)
    scale = torch.full((HIDDEN,), 1.25, dtype=torch.float64, requires_grad=True)
    functions = [model.first, lambda x: x + model.second(x) * scale, model.third]
    functions = [Function(name, f, watch) for name, f in zip(("first", "second", "third"), functions, strict=True)]
    weigh(watch, "before")
    watch.mark("forward")
    h = x
    for function in functions:
        h = checked(function, checkpoint(function, h), h)
    watch.mark("forward over")
    loss = model.head(h).pow(2).sum()
    del h
    weigh(watch, "without x")
    watch.mark("backward")
    loss.backward()
    watch.mark("backward over")
    found = {"whether x needs a gradient": torch.tensor(x.requires_grad), "x": x.detach().clone()}
    return found | gradients(model) | {"the gradient of a tensor in the second function": gradient(scale)}


def _not_training(checkpoint: Callable, watch) -> Tensors:
    """Under no_grad, with an input and parameters that need gradients."""
    torch.manual_seed(_SEED)
    layer, x = Layer(), inputs(5).requires_grad_()
    function = Function("function", layer, watch)
    weigh(watch, "before")
    watch.mark("forward")
    with torch.no_grad():
        y = checked(function, checkpoint(function, x), x)
    watch.mark("forward over")
    weigh(watch, "after")
    return {"the result": y.detach().clone(), "whether the result needs a gradient": torch.tensor(y.requires_grad)}


def _frozen(checkpoint: Callable, watch) -> Tensors:
    """A frozen layer in front, whose input needs no gradient, and a head that learns."""
    torch.manual_seed(_SEED)
    layer, head = Layer().requires_grad_(False), nn.Linear(HIDDEN, 2, dtype=torch.float64)
    x = inputs(6)
    watch.mark("forward")
    y = checked(layer, checkpoint(Function("function", layer, watch), x), x, learns=False)
    watch.mark("forward over")
    head(y).pow(2).sum().backward()
    drawn = torch.rand(_DRAWS, dtype=torch.float64)
    return {"the random numbers drawn after backward": drawn, **gradients(layer), **gradients(head)}


@cache
def cases(n: int) -> list[Scene]:
    """One function, one that changes, without gradients, a chain of three, and with nothing that learns."""
    x = inputs(1).nbytes
    layer = Layer()
    grads = x + sum(p.nbytes for p in layer.parameters() if p.requires_grad)
    kept = "{there} were kept after forward; x has {here}"
    alone = (
        Hold("without x", x, kept, f"{_NOTHING_ELSE}. {_COPY}", gone=x),
        Hold("with x", 0, "{there} were kept after forward beside x, which the caller has, too", _COPY),
        Hold(judges.AFTER_BACKWARD, grads, "{there} were held after backward; the gradients have {here}", _GIVE_BACK, gone=x),
    )
    inputs_of = "the inputs of two functions and of the head have {here}"
    chained = Hold("without x", 3 * x, "{there} were kept; " + inputs_of, f"{_NOTHING_ELSE}. {_COPY}")
    off = Hold("after", x, "{there} were held with the result; it has {here}", _NO_GRAD)
    names = ("first", "second", "third")
    first = results(_another, oracle.plain)[0]
    changes = Must(("function",), ("function",), first=first)
    return [
        _scene(_alone, Must(("function",), ("function",), alone), "a layer with dropout"),
        Scene(1, _another, results(_another, oracle.right), must=changes, note="a function that changes before backward"),
        _scene(_not_training, Must(("function",), None, (off,)), "under torch.no_grad()"),
        _scene(_chained, Must(names, names[::-1], (chained,)), "three checkpoints and a head"),
        _scene(_frozen, Must(("function",), None), "a frozen layer in front of a head"),
    ]


def _scene(script: Callable, must: Must, note: str) -> Scene:
    return Scene(1, script, results(script, oracle.plain), partial(_wrong, script), must, note)


def _wrong(script: Callable) -> Iterator[Wrong]:
    def when(hint: str, **how) -> Wrong:
        return Wrong(hint, results(script, oracle.Checkpoint(**how)))

    yield when(_BACK, puts_back=False)
    yield when(judges.RESTORE, restores=False)
    yield when(_MISSING, parameters=0)
    yield when(_TWICE, parameters=2)
    yield when(_ADDS, adds=False)
    yield when(_X, hands_on=False)
    yield when(f"{_X}; and {_MISSING}", hands_on=False, parameters=0)
    yield when(_ONES, ones=True)


def _values(task: CheckpointTask, trial: Trial) -> Verdict:
    """As usual, with a hint for what no mistake explains; a function that changes shows whose gradients they are, no more."""
    verdict = Verdict(True) if trial.case.must.first else values(task, trial)
    if verdict.ok or verdict.hint:
        return verdict
    named = (hint for name, hint in _NAMED.items() if name in verdict.found)
    return verdict._replace(hint=judges.why_values(trial.answers[0]) or next(named, ""))


def _held(task: CheckpointTask, trial: Trial) -> Verdict:
    """As usual; and gradients that are the first run's come from something that was kept, whatever it is."""
    verdict = judges.held(task, trial)
    return judges.second_run(trial) if verdict.ok else verdict


def _given_back(task: CheckpointTask, trial: Trial) -> Verdict:
    return judges.given_back(task, trial) if _held(task, trial).ok else Verdict(False, "more than that was kept")


def _calls(task: CheckpointTask, trial: Trial) -> Verdict:
    """Both runs, of which the second gives the gradients."""
    verdict = judges.calls(task, trial)
    return judges.second_run(trial) if verdict.ok else verdict


@dataclass(frozen=True)
class Single(CheckpointTask):
    aspects: ClassVar[tuple[Aspect, ...]] = (
        Aspect("computes and trains as without a checkpoint", 0.25, _values),
        Aspect("keeps x and nothing else", 0.35, _held),
        Aspect("lets x go when backward is over", 0.1, _given_back),
        Aspect("runs the function once in forward and once in backward", 0.3, _calls),
    )
