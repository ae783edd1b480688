"""The task checkpoint_sqrt: a chain of N layers in about √N segments, of which the last one is kept."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate, pairwise
from typing import ClassVar

import torch
from torch import nn

from manyranks.grade.checkpointing import judges, oracle
from manyranks.grade.checkpointing.judges import Hold, Must
from manyranks.grade.checkpointing.layers import HIDDEN, Function, checked, gradient, gradients, inputs, weigh
from manyranks.grade.checkpointing.task import CheckpointTask, values
from manyranks.grade.compare import sizes
from manyranks.grade.scripts import Scene, Tensors, Wrong, results
from manyranks.grade.trial import Trial
from manyranks.grade.verdict import Aspect, Verdict
from manyranks.theory.checkpointing import BACKWARD, FORWARD, KEEP, STORE, Action, Layer, run

_SEED = 41
_COUNTS = (10, 7, 1)  # layers: √10 rounds down, √7 rounds up
_SAVED = 3  # times its input, that a layer keeps
_LATE = (
    "backward runs other layers than forward: a lambda in a loop sees its variables' last values; functools.partial, or a "
    "function that is called with the segment, binds those of now"
)
_ALL_LAYERS = "every layer computes once in forward: is one left out, or in two segments?"
_ORDER = "layers run in their order, layers[0] first"
_LAST = "backward begins with the last segment: leave it without a checkpoint, what it keeps is needed at once"
_NONE = "every segment but the last is one call of checkpoint: backward has to run its layers again"
_EACH = "a layer that backward runs twice is in a checkpoint within another: one checkpoint for each segment"
_KEPT = "what is kept: the inputs of the segments before the last, and all that the last one's layers keep"
_ONE = "with N = 1 there is no checkpoint: the only segment is the last"
_CALL = "layers are functions, not modules: call one after the other, each with what the one before gave"
_BIND = "a checkpoint takes a function of one tensor: bind the segment to it, as by functools.partial(run, segment)"
_PEAK = "one segment is computed again at a time: is something kept when its backward is over?"


class Block(nn.Module):
    """A layer with few parameters and dropout, which keeps its input twice over beside it."""

    def __init__(self, number: int):
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, HIDDEN, dtype=torch.float64) + number / 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0.3 * nn.functional.dropout(torch.tanh(x * self.scale), 0.2)


def _trained(n: int, function: Callable, watch) -> Tensors:
    torch.manual_seed(_SEED)
    model, x = nn.ModuleList(map(Block, range(n))), inputs(7).requires_grad_()
    layers = [Function(str(number), layer, watch) for number, layer in enumerate(model)]
    upstream = inputs(8)
    weigh(watch, "before")
    with watch.peak():
        watch.mark("forward")
        y = checked(function, function(oracle.right, layers, x), x)
        watch.mark("forward over")
        loss, found = (y * upstream).sum(), {"the result": y.detach().clone()}
        del y
        weigh(watch, "after forward")
        watch.mark("backward")
        loss.backward()
        watch.mark("backward over")
    return found | {"the gradient of x": gradient(x)} | gradients(model)


def ends_of(n: int) -> list[int]:
    """Where the segments end: round(√N) of them, which differ by a layer at most, the longer ones first."""
    count = round(math.sqrt(n))
    return list(accumulate(n // count + (k < n % count) for k in range(count)))


def _in_segments(ends: list[int], checkpoint: Callable, layers: Sequence[Callable], x: torch.Tensor) -> torch.Tensor:
    for first, end in pairwise([0, *ends]):
        segment = partial(_in_turn, layers[first:end])
        x = segment(x) if end == len(layers) else checkpoint(segment, x)
    return x


def _in_turn(layers: Sequence[Callable], x: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        x = layer(x)
    return x


def _without(checkpoint: Callable, layers: Sequence[Callable], x: torch.Tensor) -> torch.Tensor:
    return _in_turn(layers, x)


@cache
def cases(n: int) -> list[Scene]:
    """Chains of several lengths."""
    return [_scene(count) for count in _COUNTS]


def _scene(n: int) -> Scene:
    script = partial(_trained, n)
    ends = ends_of(n)
    segments = [tuple(map(str, range(*pair))) for pair in pairwise([0, *ends])]
    must = Must(sum(segments, ()), sum(reversed(segments[:-1]), ()), (_hold(segments),), _peak(n, ends))
    note = f"with {n} layer{'s' * (n > 1)}"
    return Scene(1, script, results(script, _without), lambda: _wrong(script, n), must, note)


def _hold(segments: list[tuple]) -> Hold:
    """After forward: inputs of segments, but for x, which the caller has; what the last layers keep; the result."""
    kept = max(-1, len(segments) - 2) + _SAVED * len(segments[-1])
    size = inputs(7).nbytes
    return Hold("after forward", kept * size, "{there} were kept after forward; right is {here}", _KEPT, gone=-size)


def _peak(n: int, ends: list[int]) -> int:
    """Bytes beside those at the mark "before", as theory counts, and four tensors more for operators that compute."""
    size = inputs(7).nbytes
    starts = [0, *ends[:-1]]
    plan = []
    for first, end in pairwise(starts):
        plan += [*_all(FORWARD, first, end), Action(STORE, end)]
    for first, end in reversed(list(pairwise([0, *ends]))):
        plan += [*_all(KEEP, first, end), *reversed(list(_all(BACKWARD, first, end)))]
    return run([Layer(1, 1, size, _SAVED * size)] * n, plan, gradient=size).peak + 4 * size


def _all(kind: str, first: int, end: int) -> Iterator[Action]:
    return (Action(kind, number + 1) for number in range(first, end))


def _wrong(script: Callable, n: int) -> Iterator[Wrong]:
    def late(checkpoint: Callable, layers: Sequence[Callable], x: torch.Tensor) -> torch.Tensor:
        segment = layers
        for first, end in pairwise([0, *ends_of(n)]):
            segment = layers[first:end]
            x = _in_turn(segment, x) if end == n else checkpoint(lambda x: _in_turn(segment, x), x)  # noqa: B023
        return x

    yield Wrong(_LATE, results(script, late))


def _values(task: "Chain", trial: Trial) -> Verdict:
    """As usual; where no known mistake explains it, by what was called."""
    verdict = values(task, trial)
    if verdict.ok or verdict.hint:
        return verdict
    seen, must = trial.answers[0], trial.case.must
    for phase in ("forward", "backward"):
        called = judges.calls_in(seen, phase)
        if tuple(called) != getattr(must, phase):
            return verdict._replace(hint=task.why_calls(phase, called, must))
    return verdict


def _peaks(task: "Chain", trial: Trial) -> Verdict:
    for seen in trial.answers:
        rise, most = seen.peak_bytes - judges.bytes_at(seen, "before"), trial.case.must.peak
        if rise > most + judges.SMALL:
            there, here = sizes(rise, most)
            found = f"at its fullest, {there} were held; with one segment at a time at most {here}"
            return Verdict(False, found, _PEAK if judges.calls(task, trial).ok else "")  # else the segments explain it
    return Verdict(True)


@dataclass(frozen=True)
class Chain(CheckpointTask):
    advice: ClassVar[tuple[tuple[str, str], ...]] = (
        (r"'Tensor' object is not callable", "checkpoint(function, x): the function comes first"),
        (r"is not a Module subclass", _CALL),
        (r"(Checkpoint\.__call__|Function\.__call__)\(\) (takes|got|missing)", _BIND),
        (r"with 1 layer, ", _ONE),
        *CheckpointTask.advice,
    )
    aspects: ClassVar[tuple[Aspect, ...]] = (
        Aspect("computes and trains as without checkpoints", 0.1, _values),
        Aspect("runs each segment but the last again, when its turn comes", 0.7, judges.calls),
        Aspect("keeps the segments' inputs, and the last segment", 0.1, judges.held),
        Aspect("holds one segment at a time", 0.1, _peaks),
    )

    def why_calls(self, phase: str, got: list[str], must: Must) -> str:
        if phase == "forward":
            return _ORDER if sorted(got) == sorted(must.forward) else _ALL_LAYERS
        if not must.backward:
            return _ONE
        if not got:
            return _NONE
        if len(set(got)) < len(got):
            return _EACH if set(must.backward) <= set(got) else _LATE
        return _LAST if len(got) == len(must.forward) else _why_segments(len(must.forward))


def _why_segments(n: int) -> str:
    lengths = [str(end - first) for first, end in pairwise([0, *ends_of(n)])]
    return (
        f"{n} layers are {len(lengths)} segments, round(√{n}), of {', '.join(lengths)} layers: they differ by one at most, the "
        "longer ones first. Backward runs the one before the last again, then the one before that"
    )
