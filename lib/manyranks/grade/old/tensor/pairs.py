"""The tasks copy_in and reduce_out: f and g, of several tensors at once."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from manyranks.grade.old.scripts import Scene, Tensors, Wrong
from manyranks.grade.old.tensor import traffic
from manyranks.grade.old.tensor.layout import Layout, drawn
from manyranks.grade.old.tensor.lockstep import Exchange, divided, lockstep, mean, most, same, total, twice
from manyranks.grade.old.tensor.ready import READY, YOURSELF
from manyranks.grade.old.tensor.task import COPY, Must, TensorTask, gradient, slip, telling, untouched, values
from manyranks.grade.old.tensor.traffic import Phases, reduced
from manyranks.grade.old.verdict import Aspect
from manyranks.measure.journal import Stopped

_SHAPES = ((5, 2, 3), (4, 2, 3), (7,))  # the last needs no gradient
_ALONE = _SHAPES[1:2]
_LEARNING = (0, 1)
_BYTES = 8 * sum(torch.Size(shape).numel() for shape in _SHAPES)
_F, _G = "f is for what all ranks have alike and use for different things", "g is for what each rank has a part of"
_NO_F = f"that is this rank's part of the gradient: {_F}, so that the gradient is the sum of what the ranks find"
_F_FORWARD = f"that is summed in forward, which is g: {_F}. Forward changes nothing, backward sums"
_F_BOTH = "the values are summed in forward: f is silent there, and sums in backward only"
_NO_G = f"that is this rank's part: {_G}, and forward adds the parts up"
_G_BACKWARD = (
    "the gradient is summed, which is f's work: all ranks go on from the same sum and find the same gradient for it, and each "
    "part of a sum has the sum's gradient, once"
)
_G_SWAPPED = f"that is f: {_G}. Forward sums, backward passes the gradient on as it is"
_NO_SUM = {"forward": "g is missing: forward sums", "backward": "f is missing: backward sums"}
_MEAN = "that is a mean: sums are not divided by t"
_TWICE = "that is summed twice: once more makes t times as much"
_MAX = "those are the largest, not the sums: dist.ReduceOp.SUM, which is the default"
_UNUSED = "an output that a rank does not use has a gradient of zeros there, and other ranks may have used it: they add up"
_UNUSED_SIZE = f"all ranks put in as many elements: {_UNUSED}"
_LIST = "it returns a list with as many tensors, each in the shape of the one that was given"
_GIVEN = "the gradient that backward gets is not yours alone: sum a copy"
_VIEW = "flatten gives a view where a tensor is contiguous, torch.cat a copy"
_GIVEN_VIEW, _COPY_VIEW = f"{_GIVEN}; {_VIEW}", f"{COPY}; {_VIEW}"
_OFF_BY_ONE = "ctx.needs_input_grad has one entry for each argument of apply, the group's first"
_ONE_BY_ONE = "apply takes tensors one by one: apply(group, *tensors)"
_FROZEN = "what needs no gradient has none to be summed: ask ctx.needs_input_grad, and leave it out of the row"


@dataclass(frozen=True)
class Pair:
    """One call of f, or of g, on each rank. unused: whether rank 1 of the group does not use the second result.

    alone: whether there is one tensor only, which is contiguous, as is its gradient.
    """

    layout: Layout
    summing: bool
    unused: bool = False
    alone: bool = False

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        return _ALONE if self.alone else _SHAPES

    @property
    def learning(self) -> tuple[int, ...]:
        """Which of them need a gradient."""
        return _LEARNING[: len(self.shapes)]

    @property
    def sizes(self) -> list[int]:
        """Bytes."""
        return [8 * torch.Size(shape).numel() for shape in self.shapes]

    def given(self, number: int, rank: int) -> list[Tensor]:
        """Leaves: to f the same on all ranks of a group."""
        seed = 100 * number + (10 * rank if self.summing else 0)
        leaves = [drawn(seed + i, *shape) for i, shape in enumerate(self.shapes)]
        return [leaf.requires_grad_(i in self.learning) for i, leaf in enumerate(leaves)]

    def upstream(self, number: int, rank: int) -> dict[int, Tensor]:
        """The gradient of each result that the rank uses, of which one is not contiguous. After g they are alike."""
        seed = 5000 + 100 * number + (0 if self.summing else 10 * rank)
        if self.alone:
            return {0: drawn(seed, *_ALONE[0])}
        first, second = drawn(seed, *reversed(_SHAPES[0])).permute(2, 1, 0), drawn(seed + 1, *_SHAPES[1])
        return {0: first} if self.unused and rank == 1 else {0: first, 1: second}


def _run(pair: Pair, function: Callable, watch) -> Tensors:
    watch.refuse(READY, YOURSELF)
    group, number, rank, _ = pair.layout.place()
    leaves = pair.given(number, rank)
    tensors = [torch.tanh(leaf) for leaf in leaves]
    before, ups = [tensor.detach().clone() for tensor in tensors], pair.upstream(number, rank)
    watch.mark("forward")
    results = _listed(function(list(tensors), group), tensors)
    found = {f"result {i}": y.detach().clone() for i, y in enumerate(results)}
    untouched(watch, "the tensors that were given", tensors, before, _COPY_VIEW)
    watch.mark("backward")
    if lacking := [i for i in ups if not results[i].requires_grad]:
        raise Stopped(f"result {lacking[0]} has no graph", "the results have to be those of a torch.autograd.Function's apply")
    torch.autograd.backward([results[i] for i in ups], list(ups.values()))
    untouched(
        watch,
        "the gradient that backward was given",
        list(ups.values()),
        list(pair.upstream(number, rank).values()),
        _GIVEN_VIEW,
    )
    if len(leaves) > len(pair.learning) and leaves[-1].grad is not None:
        slip(watch, "the tensor that needs no gradient has one", _FROZEN)
    return found | {f"the gradient of tensor {i}": gradient(leaves[i]) for i in pair.learning}


def _listed(results: Any, tensors: list[Tensor]) -> list[Tensor]:
    if isinstance(results, list | tuple) and any(isinstance(y, list | tuple) for y in results):
        raise Stopped(f"it returned a {type(results).__name__} of lists", f"{_ONE_BY_ONE}; {_LIST}")
    if not isinstance(results, list | tuple) or not all(isinstance(y, Tensor) for y in results):
        raise Stopped(f"it returned a {type(results).__name__}", _LIST)
    if [y.shape for y in results] != [x.shape for x in tensors]:
        raise Stopped(f"it returned tensors of {[list(y.shape) for y in results]}", _LIST)
    return list(results)


def _results(pair: Pair, there: Exchange, back: Exchange, number: int) -> list[Tensors]:
    """Of the ranks of a group, where this is what they exchange."""
    t = pair.layout.t
    leaves = [pair.given(number, rank) for rank in range(t)]
    columns = [lockstep([torch.tanh(mine[i]) for mine in leaves], there, back) for i in range(len(pair.shapes))]
    used = [(columns[i][rank], up) for rank in range(t) for i, up in pair.upstream(number, rank).items()]
    torch.autograd.backward([y for y, _ in used], [up for _, up in used])
    return [
        {f"result {i}": column[rank].detach() for i, column in enumerate(columns)}
        | {f"the gradient of tensor {i}": gradient(leaves[rank][i]) for i in pair.learning}
        for rank in range(t)
    ]


def _spread(pair: Pair, there: Exchange, back: Exchange) -> list[Tensors]:
    return pair.layout.spread(partial(_results, pair, there, back))


def _wrong(pair: Pair) -> Iterator[Wrong]:
    for hint, there, back in _G_WAYS if pair.summing else _F_WAYS:
        yield Wrong(hint, _spread(pair, there, back))
    if not pair.summing:
        first = "the gradient of tensor 0"
        yield Wrong(_OFF_BY_ONE, [own | {first: torch.zeros_like(own[first])} for own in _spread(pair, same, total)])


_F_WAYS = [
    (_NO_F, same, same),
    (_F_FORWARD, total, same),
    (_F_BOTH, total, total),
    (_MEAN, same, mean),
    (_TWICE, same, twice),
    (_MAX, same, most),
]
_G_WAYS = [
    (_NO_G, same, same),
    (_G_SWAPPED, same, total),
    (_G_BACKWARD, total, total),
    (_MEAN, mean, same),
    (_MEAN, mean, divided),
    (_MEAN, mean, mean),
    (_TWICE, twice, same),
    (_MAX, most, same),
]


@cache
def cases(n: int, summing: bool) -> list[Scene]:
    """Three tensors, one of which needs no gradient; where f's rank 1 does not use one of them, and in pairs; one alone."""
    pairs = Layout(n, 2 if n == 4 else n)
    first = _scene(Pair(Layout(n, n), summing))
    second = [] if summing and n != 4 else [_scene(Pair(pairs, summing, not summing))]
    return [first, *second, _scene(Pair(Layout(n, n), summing, alone=True))]


def _scene(pair: Pair) -> Scene:
    learning, t = sum(pair.sizes[i] for i in pair.learning), pair.layout.t
    call = (reduced(sum(pair.sizes) if pair.summing else learning, t),)
    phases = Phases((call,), ((),)) if pair.summing else Phases(((),), (call,))
    right = _spread(pair, *((total, same) if pair.summing else (same, total)))
    count = "one tensor" if pair.alone else "three tensors"
    note = f"{pair.layout}{count}" + (", one of them not used on one rank" if pair.unused else "")
    return Scene(
        pair.layout.n, partial(_run, pair), right, lambda: telling(right, _wrong(pair)), Must(pair.layout, phases), note
    )


@dataclass(frozen=True)
class Pairs(TensorTask):
    unexplained: ClassVar[str] = "cut the row in the order in which it was joined, and give each part its tensor's shape"
    advice: ClassVar[tuple[tuple[str, str], ...]] = (
        (r"modified by an inplace operation|a leaf Variable that requires grad", _COPY_VIEW),
        (r"expected a non-empty list of Tensors", _OFF_BY_ONE),
        *TensorTask.advice,
        (r"gave [\d,]+ bytes to its all_reduce", _UNUSED_SIZE),
        (r"'NoneType' object has no attribute|got NoneType|expected Tensor as element", _UNUSED),
    )
    aspects: ClassVar[tuple[Aspect, ...]] = (
        Aspect("results and gradients are right", 0.5, values, each_world=True),
        Aspect("makes one all-reduce for all tensors, in its direction", 0.5, traffic.traffic),
    )

    def why_traffic(self, phase, got, phases):
        mine, right = got[phase], getattr(phases, phase)[0]
        if phase == "backward" and len(mine) == len(right) == 1 and mine[0][1] == _BYTES:
            return _FROZEN
        if not any(got.values()):
            return _NO_SUM[phase]
        return super().why_traffic(phase, got, phases)
