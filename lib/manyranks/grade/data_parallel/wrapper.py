"""The tasks Overlapped and no_sync: a wrapper whose buckets leave while backward runs."""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist

from manyranks.grade.check import Task
from manyranks.grade.data_parallel import buckets, toy, traffic
from manyranks.grade.data_parallel.averages import DETOUR, OWN, SUM, TWICE, times
from manyranks.grade.data_parallel.buckets import CAP, FIRST
from manyranks.grade.data_parallel.toy import RATE, Gradients, Toy, loss_of
from manyranks.grade.data_parallel.traffic import Travel
from manyranks.grade.scripts import Script, Tensors, Wrong, values
from manyranks.grade.verdict import Aspect
from manyranks.grade.watch import Watch

_STEPS = [[0], [1], [2], [3]]  # batches; the layer `detour` is used on no rank, on rank 1, on all but rank 0, on no rank
_ACCUMULATED = [[0, 1, 3], [2, 4, 3], [3, 6, 7]]  # three micro-batches a step; some use `detour` in the first only
_REPLICAS = "the ranks started from different weights: call replicate(module) when the wrapper is made"


class Failed(Exception):
    """What the script raises inside no_sync()."""


def _overlapping(wrapper, watch: Watch) -> Tensors:
    model, module, optimizer = _made(wrapper, watch)
    for (batch,) in _STEPS:
        watch.mark("forward")
        loss = loss_of(model, dist.get_rank(), batch)
        _backward(model, loss, watch)
        _step(optimizer, loss, watch)
    return toy.weights(module)


def _accumulating(wrapper, watch: Watch) -> Tensors:
    rank = dist.get_rank()
    model, module, optimizer = _made(wrapper, watch)
    for *alone, last in _ACCUMULATED:
        watch.mark("alone")
        with model.no_sync():
            for batch in alone:
                loss_of(model, rank, batch).backward()
        watch.mark("forward")
        loss = loss_of(model, rank, last)
        _backward(model, loss, watch)
        _step(optimizer, loss, watch)
    return toy.weights(module)


def _failing(wrapper, watch: Watch) -> Tensors:
    model, module, optimizer = _made(wrapper, watch)
    try:
        with model.no_sync():
            raise Failed
    except Failed:
        pass
    for batch in (2, 3):
        loss = loss_of(model, dist.get_rank(), batch)
        _backward(model, loss, watch)
        _step(optimizer, loss, watch)
    return toy.weights(module)


def _made(wrapper, watch: Watch) -> tuple:
    module = Toy(dist.get_rank())
    watch.follow(module)
    model = wrapper(module, FIRST, CAP)
    return model, module, torch.optim.SGD(module.parameters(), lr=RATE)


def _backward(model, loss: torch.Tensor, watch: Watch) -> None:
    watch.mark("backward")
    loss.backward()
    watch.mark("finish")
    model.finish()
    watch.mark("step")


def _step(optimizer: torch.optim.Optimizer, loss: torch.Tensor, watch: Watch) -> None:
    optimizer.step()
    optimizer.zero_grad()
    watch.weigh()


def overlap_cases(n: int) -> list[Script]:
    """Four steps; in some of them not all ranks use all layers."""
    return [_script(n, _overlapping, _STEPS, "in four steps", _wrong(n, _STEPS))]


def no_sync_cases(n: int) -> list[Script]:
    """Three steps of three micro-batches each, two of them inside no_sync(); then an exception inside it."""
    last = [[step[-1]] for step in _ACCUMULATED]
    accumulated = (
        *_wrong(n, _ACCUMULATED),
        Wrong(
            "only the last micro-batch counts: those inside no_sync() add to p.grad",
            _trained(n, last),
        ),
        Wrong("the sum over the micro-batches is asked for, not their mean", _trained(n, _ACCUMULATED, _scaled(1 / 3))),
    )
    stays = "an exception inside no_sync() must not leave it switched on: use try and finally"
    after = Wrong(stays, toy.trained([[2], [3]], [0] * n, lambda grads, step: grads))
    return [
        _script(n, _accumulating, _ACCUMULATED, "with two micro-batches inside no_sync() and one outside", accumulated),
        _script(n, _failing, [[2], [3]], "after an exception inside no_sync()", (after,)),
    ]


def _script(n: int, script, batches: list[list[int]], note: str, wrong: tuple[Wrong, ...]) -> Script:
    travel = Travel(buckets.names(), buckets.sizes(), len(batches), first=Toy.bytes(), model=Toy.bytes())
    return Script(n, script, _trained(n, batches), wrong, travel, note)


def _trained(n: int, batches: list[list[int]], combine=lambda grads, step: toy.mean(grads)) -> list[Tensors]:
    return toy.trained(batches, [0] * n, combine)


def _scaled(factor: float):
    return lambda grads, step: [times(mine, factor) for mine in toy.mean(grads)]


def _wrong(n: int, batches: list[list[int]]) -> tuple[Wrong, ...]:
    return (
        Wrong(_REPLICAS, toy.trained(batches, list(range(n)), lambda grads, step: toy.mean(grads))),
        Wrong(SUM, _trained(n, batches, _scaled(n))),
        Wrong(TWICE, _trained(n, batches, _scaled(1 / n))),
        Wrong(OWN, _trained(n, batches, lambda grads, step: grads)),
        Wrong(DETOUR, _trained(n, batches, _without_detour)),
        Wrong("only the first step is right: count anew in each step", _trained(n, batches, _first_only)),
    )


def _without_detour(grads: Gradients, step: int) -> Gradients:
    """Each rank keeps its own gradients of a layer that not all use."""
    absent = {name for mine in grads for name, grad in mine.items() if grad is None}
    return [{**mine, **{name: own[name] for name in absent}} for own, mine in zip(grads, toy.mean(grads), strict=True)]


def _first_only(grads: Gradients, step: int) -> Gradients:
    return grads if step else toy.mean(grads)


@dataclass(frozen=True)
class Wrapped(Task):
    aspects: ClassVar[tuple[Aspect, ...]] = (
        values("trains like one process on the whole batch", 0.4),
        Aspect("sends each bucket once a step", 0.2, traffic.traffic),
        Aspect("sends each bucket as soon as it can leave", 0.3, traffic.order),
        Aspect("keeps no more than it needs", 0.1, traffic.memory),
    )
