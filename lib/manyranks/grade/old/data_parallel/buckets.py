"""The task average_in_buckets: one call for each bucket."""

from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import nn

from manyranks.grade.old import toy
from manyranks.grade.old.data_parallel import traffic
from manyranks.grade.old.data_parallel.averages import (
    DETOUR,
    LEFT,
    OWN,
    SUM,
    TWICE,
    left_none,
    times,
    without_detour,
    without_none,
)
from manyranks.grade.old.data_parallel.ready import own
from manyranks.grade.old.data_parallel.task import GradientTask
from manyranks.grade.old.data_parallel.traffic import Travel
from manyranks.grade.old.scripts import Script, Tensors, Wrong, values
from manyranks.grade.old.toy import Toy, loss_of
from manyranks.grade.old.verdict import Aspect
from manyranks.grade.watch import Watch

FIRST, CAP = 300, 10_000  # bytes: of the first bucket, and of the others


def buckets(parameters: list[nn.Parameter], first: float, cap: float) -> list[list[nn.Parameter]]:
    """From the last parameter on; a bucket ends with the parameter that brings it to `cap` bytes, the first to `first`."""
    made: list[list[nn.Parameter]] = [[]]
    for parameter in reversed([p for p in parameters if p.requires_grad]):
        made[-1].append(parameter)
        if sum(p.nbytes for p in made[-1]) >= (first if len(made) == 1 else cap):
            made.append([])
    return [bucket for bucket in made if bucket]


def sizes(first: float = FIRST, cap: float = CAP) -> tuple[int, ...]:
    """Bytes of the buckets of a Toy."""
    return tuple(sum(p.nbytes for p in bucket) for bucket in buckets(list(Toy(0).parameters()), first, cap))


def names(first: float = FIRST, cap: float = CAP) -> tuple[tuple[str, ...], ...]:
    """The parameters of the buckets of a Toy."""
    model = Toy(0)
    named = {id(p): name for name, p in model.named_parameters()}
    return tuple(tuple(named[id(p)] for p in bucket) for bucket in buckets(list(model.parameters()), first, cap))


def _in_buckets(function, watch: Watch) -> Tensors:
    rank = dist.get_rank()
    model = Toy(0)
    loss_of(model, rank, 1).backward()
    mine = buckets(list(model.parameters()), FIRST, CAP)
    with watch.peak(), own():
        function(mine)
    return toy.gradients(model)


@cache
def in_buckets_cases(n: int) -> list[Script]:
    """One step, in which only rank 1 uses the layer `detour`."""
    grads = [toy.own(Toy(0), [lambda m, r=r: loss_of(m, r, 1)]) for r in range(n)]
    right = toy.mean(grads)
    wrong = (
        Wrong(OWN, [without_none(mine) for mine in grads]),
        Wrong(SUM, [times(mine, n) for mine in right]),
        Wrong(TWICE, [times(mine, 1 / n) for mine in right]),
        Wrong(DETOUR, [without_detour(own, mine) for own, mine in zip(grads, right, strict=True)]),
        Wrong(LEFT, [left_none(own, mine) for own, mine in zip(grads, right, strict=True)]),
        Wrong("divide by the number of ranks, not of buckets", [times(mine, n / len(sizes())) for mine in right]),
        Wrong("that is the mean over the ranks that use the layer: the others count as zeros, divide by N", _of_users(grads)),
        Wrong("every parameter got the beginning of the row: cut it with row.split([...])", [_beginnings(m) for m in right]),
    )
    must = Travel(names(), sizes(), model=Toy.bytes(), cut="the buckets that you were given")
    return [Script(n, _in_buckets, right, lambda: wrong, must, "where only rank 1 uses the layer `detour`")]


def _of_users(grads: toy.Gradients) -> list[Tensors]:
    users = {name: max(1, sum(mine[name] is not None for mine in grads)) for name in grads[0]}
    return [{name: grad * len(grads) / users[name] for name, grad in mine.items()} for mine in toy.mean(grads)]


def _beginnings(grads: dict) -> Tensors:
    """Each gradient replaced by as many elements from the beginning of its bucket's row."""
    rows = {name: torch.cat([grads[other].flatten() for other in bucket]) for bucket in names() for name in bucket}
    return {name: rows[name][: grad.numel()].view_as(grad) for name, grad in grads.items()}


@dataclass(frozen=True)
class InBuckets(GradientTask):
    aspects: ClassVar[tuple[Aspect, ...]] = (
        values("averages over the ranks", 0.5),
        Aspect("makes one all-reduce a bucket, in order", 0.3, traffic.traffic),
        Aspect("holds the rows of one bucket at a time", 0.2, traffic.peak),
    )
