"""The tasks replicate and average: equal weights, and the mean over the examples of all ranks."""

from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch
import torch.distributed as dist

from manyranks.grade.old import toy
from manyranks.grade.old.data_parallel import traffic
from manyranks.grade.old.data_parallel.ready import own
from manyranks.grade.old.data_parallel.task import GradientTask
from manyranks.grade.old.data_parallel.traffic import Travel
from manyranks.grade.old.scripts import Script, Tensors, Wrong, values
from manyranks.grade.old.toy import Toy, loss_of
from manyranks.grade.old.verdict import Aspect
from manyranks.grade.watch import Watch
from manyranks.measure.journal import Stopped

SUM = "that is the sum: the mean over the ranks is asked for, so divide by N"
TWICE = "that is divided by N twice: ReduceOp.AVG divides, too"
OWN = "these are the rank's own gradients: no mean has been written into parameter.grad"
LEFT = "where a gradient was None, the mean has to become the gradient: put the zeros into parameter.grad first"
DETOUR = "the layer that not all ranks use was not averaged: a gradient of None counts as zeros, and is sent"
_BEFORE = "weigh before the all-reduce: each rank's gradient has the weight of its own examples, not the sum of all"


def _replicating(function, watch: Watch) -> Tensors:
    model = Toy(dist.get_rank())
    with own():
        function(model)
    return _state(model)


def _state(model: Toy) -> Tensors:
    return {**toy.weights(model), **{name: buffer.clone() for name, buffer in model.named_buffers()}}


@cache
def replicate_cases(n: int) -> list[Script]:
    ranks = [_state(Toy(rank)) for rank in range(n)]
    first, parameters = ranks[0], toy.weights(Toy(0))
    frozen = [name for name, p in Toy(0).named_parameters() if not p.requires_grad]
    buffers = {name: first[name] for name in first if name not in parameters}
    mean = {name: torch.stack([state[name] for state in ranks]).mean(0) for name in parameters if name not in frozen}
    wrong = (
        Wrong("the ranks still have weights of their own: rank 0's have to arrive in the model's own tensors", ranks),
        Wrong("buffers belong to the model, too: the ranks still have their own", [{**r, **parameters} for r in ranks]),
        Wrong("parameters belong to the model, too: the ranks still have their own", [{**r, **buffers} for r in ranks]),
        Wrong("frozen parameters are used, too: broadcast all", [{**first, **{k: r[k] for k in frozen}} for r in ranks]),
        Wrong("those of the last rank arrived: rank 0's are asked for", [ranks[-1]] * n),
        Wrong("that is the mean over the ranks: rank 0's are asked for", [mean] * n),
    )
    size = sum(tensor.nbytes for tensor in ranks[0].values())
    return [Script(n, _replicating, [ranks[0]] * n, lambda: wrong, Travel((), (), first=size, model=size))]


@dataclass(frozen=True)
class Replicate(GradientTask):
    aspects: ClassVar[tuple[Aspect, ...]] = (
        values("gives all ranks rank 0's parameters and buffers", 0.6),
        Aspect("sends each tensor once", 0.4, traffic.traffic),
    )


def _averaging(function, watch: Watch) -> Tensors:
    rank = dist.get_rank()
    model = Toy(0)
    loss_of(model, rank, 1, _rows(rank)).backward()
    before = toy.weights(model)
    with own():
        function(model, _rows(rank))
    moved = [name for name, p in model.named_parameters() if not torch.equal(p, before[name])]
    if moved:
        raise Stopped(f"the weights have changed: {moved[0]}", "the gradients are to be averaged, p.grad, and not the weights")
    return toy.gradients(model)


def _rows(rank: int) -> int:
    """How many examples the rank has."""
    return 2 + 3 * rank


@cache
def average_cases(n: int) -> list[Script]:
    rows = [_rows(rank) for rank in range(n)]
    grads = [toy.own(Toy(0), [lambda m, r=r: loss_of(m, r, 1, _rows(r))]) for r in range(n)]
    right, plain = toy.weighted(grads, rows), toy.mean(grads)
    sums = [times(mine, n) for mine in plain]
    wrong = (
        Wrong(OWN, [without_none(mine) for mine in grads]),
        Wrong("that is the sum of the ranks' gradients: multiply each by its examples, divide by those of all ranks", sums),
        Wrong("that is the mean over the ranks: an example on a rank with many of them must count as much", plain),
        Wrong(
            "that is the sum over the examples: divide by the examples of all ranks", [times(mine, sum(rows)) for mine in right]
        ),
        Wrong(TWICE, [times(mine, 1 / n) for mine in right]),
        Wrong(TWICE, [times(mine, 1 / n) for mine in plain]),
        Wrong(
            "the sum was divided by this rank's examples", [times(m, sum(rows) / c) for m, c in zip(right, rows, strict=True)]
        ),
        Wrong(
            "that is the sum of the ranks' means over all examples: multiply each by its rank's examples first",
            [times(mine, n / sum(rows)) for mine in plain],
        ),
        Wrong("that is divided by N: divide by the examples of all ranks", [times(mine, sum(rows) / n) for mine in right]),
        Wrong("N times too much: the examples of all ranks are their sum, not their mean", [times(mine, n) for mine in right]),
        Wrong(_BEFORE, [times(mine, count / sum(rows)) for mine, count in zip(sums, rows, strict=True)]),
        Wrong(_BEFORE, [times(mine, count / sum(rows)) for mine, count in zip(plain, rows, strict=True)]),
        Wrong(_BEFORE, [times(mine, count) for mine, count in zip(sums, rows, strict=True)]),
        Wrong(DETOUR, [without_detour(own, mine) for own, mine in zip(grads, right, strict=True)]),
        Wrong(LEFT, [left_none(own, mine) for own, mine in zip(grads, right, strict=True)]),
    )
    must = Travel((), tuple(p.nbytes for p in Toy(0).parameters() if p.requires_grad))
    note = f"with {_counts(rows)} examples, where only rank 1 uses the layer `detour`"
    return [Script(n, _averaging, right, lambda: wrong, must, note)]


def _counts(rows: list[int]) -> str:
    return f"{', '.join(map(str, rows[:-1]))} and {rows[-1]}"


def without_none(grads: dict) -> Tensors:
    named = {name: p for name, p in Toy(0).named_parameters() if p.requires_grad}
    return {name: torch.zeros_like(named[name]) if g is None else g for name, g in grads.items()}


def times(grads: dict, factor: float) -> Tensors:
    return {name: grad * factor for name, grad in grads.items()}


def without_detour(own: dict, averaged: dict) -> Tensors:
    """What is averaged, but for the layer that not all ranks use."""
    return {name: without_none(own)[name] if name.startswith("detour") else grad for name, grad in averaged.items()}


def left_none(own: dict, averaged: dict) -> Tensors:
    """What is averaged, but for what has no gradient on this rank."""
    return {name: torch.zeros_like(grad) if own[name] is None else grad for name, grad in averaged.items()}


@dataclass(frozen=True)
class Average(GradientTask):
    aspects: ClassVar[tuple[Aspect, ...]] = (
        values("averages over the examples", 0.7),
        Aspect("sends every gradient once, and the number of examples", 0.3, traffic.one_a_parameter),
    )
