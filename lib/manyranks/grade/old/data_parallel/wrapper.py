"""The tasks Overlapped and no_sync: a wrapper whose buckets leave while backward runs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import nn

from manyranks.grade.old import toy
from manyranks.grade.old.data_parallel import buckets, cutting, order, traffic
from manyranks.grade.old.data_parallel.averages import DETOUR, LEFT, OWN, SUM, TWICE, left_none, times
from manyranks.grade.old.data_parallel.buckets import CAP, FIRST
from manyranks.grade.old.data_parallel.ready import own
from manyranks.grade.old.data_parallel.task import GradientTask
from manyranks.grade.old.data_parallel.traffic import Travel
from manyranks.grade.old.scripted import refuse_ready
from manyranks.grade.old.scripts import Script, Tensors, Wrong, values
from manyranks.grade.old.toy import RATE, Gradients, Toy, loss_of
from manyranks.grade.old.verdict import Aspect
from manyranks.grade.watch import Watch
from manyranks.measure.journal import Stopped

_STEPS = [[0], [1], [2], [3]]  # batches; the layer `detour` is used on no rank, on rank 1, on all but rank 0, on no rank
_ACCUMULATED = [[0, 1, 3], [2, 4, 3], [3, 6, 7]]  # three micro-batches a step; some use `detour` in the first only
CALL = "Overlapped(module, first_bytes, cap_bytes)"
_EARLY = "does its hook run before the gradient is there? register_post_accumulate_grad_hook, not register_hook"
_INSIDE = "what arrives inside no_sync() is not counted, and leaves gradients that are not None"
_START = (
    "start the all-reduce in the hook of the bucket's last gradient, with async_op=True; does the hook get what you think? "
    "a lambda in a loop sees its last value: use functools.partial"
)
_EMPTY_LISTS = "only step 1 sent anything: empty your lists in finish()"
_LOOP = "the training loop calls finish(), after backward: a hook only starts all-reduces"
_AGAIN = f"{_START}; after no_sync(), switch this on again"
_STAYS = "an exception inside no_sync() must not leave it switched on: use try and finally"
_EMPTIED = "finish() leaves no gradients: write the means into parameter.grad, and let the loop call zero_grad()"
_STALE = "where the gradient is None, the row still has what a step before left there: write zeros into it"
_READY = ("manyranks.parallel", "torch.nn.parallel", "torch.distributed")
_YOURSELF = "write it yourself, with hooks and dist.all_reduce"
_AFTER = [[2], [3]]  # an exception inside no_sync()
_CUT = f"the buckets of `cut` with first_bytes={FIRST} and cap_bytes={CAP:,}"
_REPLICAS = "the ranks started from different weights: call replicate(module) when the wrapper is made"


class Failed(Exception):
    """What the script raises inside no_sync()."""


def _overlapping(wrapper, watch: Watch) -> Tensors:
    model, module, optimizer = _made(wrapper, watch)
    for (batch,) in _STEPS:
        watch.mark("forward")
        loss = loss_of(model, dist.get_rank(), batch)
        _backward(model, module, loss, watch)
        _step(optimizer, loss, watch)
    return toy.weights(module)


def _accumulating(wrapper, watch: Watch) -> Tensors:
    rank = dist.get_rank()
    model, module, optimizer = _made(wrapper, watch)
    for *alone, last in _ACCUMULATED:
        watch.mark("alone")
        with _no_sync(model):
            for batch in alone:
                loss_of(model, rank, batch).backward()
        watch.mark("forward")
        loss = loss_of(model, rank, last)
        _backward(model, module, loss, watch)
        _step(optimizer, loss, watch)
    return toy.weights(module)


def _failing(wrapper, watch: Watch) -> Tensors:
    model, module, optimizer = _made(wrapper, watch)
    try:
        with _no_sync(model):
            raise Failed
    except Failed:
        pass
    else:
        raise Stopped("no_sync() has swallowed an exception", "let it through: try and finally, without except")
    for (batch,) in _AFTER:
        loss = loss_of(model, dist.get_rank(), batch)
        _backward(model, module, loss, watch)
        _step(optimizer, loss, watch)
    return toy.weights(module)


def _made(wrapper, watch: Watch) -> tuple:
    module = Toy(dist.get_rank())
    watch.follow(module)
    refuse_ready(wrapper if isinstance(wrapper, type) else type(wrapper), _READY, _YOURSELF)
    with own():
        model = wrapper(module, FIRST, CAP)
    _check_made(model)
    watch.forbid("finish", "backward", "finish() ran inside backward", _LOOP)
    return model, module, torch.optim.SGD(module.parameters(), lr=RATE)


def _check_made(model) -> None:
    """Raises Stopped where it is no wrapper, or one that was ready."""
    for part in model.modules() if isinstance(model, nn.Module) else [model]:
        refuse_ready(type(part), _READY, _YOURSELF)
    if not callable(model):
        hint = "derive the class from torch.nn.Module, and give it a forward()"
        raise Stopped(f"{CALL} gave a {type(model).__name__}, which cannot be called", hint)
    if not callable(getattr(model, "finish", None)):
        raise Stopped(f"{CALL} gave a {type(model).__name__}, which has no finish()", "write finish(self) in the class")


def _no_sync(model):
    """The context manager. Raises Stopped where it is none."""
    if not callable(getattr(model, "no_sync", None)):
        raise Stopped(f"a {type(model).__name__} has no no_sync()", "write no_sync(self) in the class")
    context = model.no_sync()
    if not hasattr(type(context), "__enter__"):
        hint = "put @contextmanager above it, and `yield` where what stands inside is to run"
        raise Stopped(f"no_sync() returned a {type(context).__name__}, which `with` cannot use", hint)
    return context


def _backward(model, module: Toy, loss: torch.Tensor, watch: Watch) -> None:
    if max(len(p._post_accumulate_grad_hooks or ()) for p in module.parameters()) > 2:  # the check's and the learner's
        raise Stopped("a parameter has more than one hook of yours", "add hooks in __init__, one for each parameter")
    before = toy.weights(module)
    with _remembering(watch):
        watch.mark("backward")
        loss.backward()
        watch.mark("finish")
        model.finish()
    watch.mark("step")
    if changed := [name for name, p in module.named_parameters() if not torch.equal(p, before[name])]:
        hint = "average gradients, parameter.grad, and leave the weights to the optimizer"
        raise Stopped(f"finish() has changed the weights: {changed[0]}", hint)


@contextmanager
def _remembering(watch: Watch) -> Iterator[None]:
    """Raises Stopped for what goes wrong in a step that has sent nothing, where the one before has."""
    try:
        yield
    except Exception as error:
        happened = [event.what for event in watch.events]
        latest = max(k for k, what in enumerate(happened) if what == "backward")
        if "all_reduce" in happened and "all_reduce" not in happened[latest:] and not isinstance(error, Stopped):
            raise Stopped(f"{type(error).__name__} in step {happened.count('backward')}: {error}", _EMPTY_LISTS) from error
        raise


def _step(optimizer: torch.optim.Optimizer, loss: torch.Tensor, watch: Watch) -> None:
    optimizer.step()
    optimizer.zero_grad()
    watch.weigh()


@cache
def overlap_cases(n: int) -> list[Script]:
    """Four steps; in some of them not all ranks use all layers."""
    return [_script(n, _overlapping, _STEPS, "in four steps", lambda: _wrong(n, _STEPS), _EARLY, _START)]


@cache
def no_sync_cases(n: int) -> list[Script]:
    """Three steps of three micro-batches each, two of them inside no_sync(); then an exception inside it."""
    note = "with two micro-batches inside no_sync() and one outside"
    return [
        _script(n, _accumulating, _ACCUMULATED, note, lambda: _wrong_accumulated(n), _INSIDE, _AGAIN),
        _script(n, _failing, _AFTER, "after an exception inside no_sync()", lambda: _wrong_afterwards(n), _INSIDE, _STAYS),
    ]


def _script(n: int, script, batches: list[list[int]], note: str, wrong: Callable, *hints: str) -> Script:
    size = Toy.bytes()
    travel = Travel(buckets.names(), buckets.sizes(), len(batches), size, size, _CUT, *hints, _other_cuts())
    return Script(n, script, _trained(n, batches), wrong, travel, note)


def _other_cuts() -> tuple[tuple[str, tuple[int, ...]], ...]:
    parameters = list(Toy(0).parameters())
    cuts = ((hint, rule(parameters, FIRST, CAP)) for hint, rule in cutting.MISTAKES)
    return tuple((hint, tuple(sum(p.nbytes for p in bucket) for bucket in made)) for hint, made in cuts)


def _trained(n: int, batches: list[list[int]], combine=lambda grads, step: toy.mean(grads)) -> list[Tensors]:
    return toy.trained(batches, [0] * n, combine)


def _scaled(factor: float):
    return lambda grads, step: [times(mine, factor) for mine in toy.mean(grads)]


def _wrong(n: int, batches: list[list[int]]) -> Iterator[Wrong]:
    yield Wrong(_REPLICAS, toy.trained(batches, list(range(n)), lambda grads, step: toy.mean(grads)))
    yield Wrong(SUM, _trained(n, batches, _scaled(n)))
    yield Wrong(TWICE, _trained(n, batches, _scaled(1 / n)))
    yield Wrong(OWN, _trained(n, batches, _own))
    yield Wrong(DETOUR, _trained(n, batches, _without_detour))
    yield Wrong(LEFT, _trained(n, batches, _left_none))
    yield Wrong("only the first step is right: count anew in each step", _trained(n, batches, _first_only))
    again = "each step writes step 1's gradients: empty your lists in finish()"
    yield Wrong(again, _trained(n, batches, _first_again()))
    yield Wrong(_EMPTIED, _trained(n, batches, lambda grads, step: [{}] * n))
    for factor in (1, n):
        yield Wrong(_STALE, _trained(n, batches, _stale(factor)))
    copied = "those are rank 0's gradients on all ranks: all_reduce adds, broadcast copies"
    yield Wrong(copied, _trained(n, batches, lambda grads, step: grads[:1] * n))


def _wrong_accumulated(n: int) -> Iterator[Wrong]:
    last = [[step[-1]] for step in _ACCUMULATED]
    yield Wrong("only the last micro-batch counts: those inside no_sync() add to p.grad", _trained(n, last))
    yield Wrong("the sum over the micro-batches is asked for, not their mean", _trained(n, _ACCUMULATED, _scaled(1 / 3)))
    earlier = "what only an earlier micro-batch used has a gradient from inside no_sync(): it must travel, too"
    yield Wrong(earlier, _trained(n, _ACCUMULATED, _without_earlier))
    yield from _wrong(n, _ACCUMULATED)


def _wrong_afterwards(n: int) -> Iterator[Wrong]:
    yield Wrong(_STAYS, _trained(n, _AFTER, _own))


def _own(grads: Gradients, step: int) -> Gradients:
    return grads


def _without_detour(grads: Gradients, step: int) -> Gradients:
    """Each rank keeps its own gradients of a layer that not all use."""
    absent = {name for mine in grads for name, grad in mine.items() if grad is None}
    return [{**mine, **{name: own[name] for name in absent}} for own, mine in zip(grads, toy.mean(grads), strict=True)]


def _without_earlier(grads: Gradients, step: int) -> Gradients:
    """Zeros for the layer that the last micro-batch of a step does not use."""
    return [{k: grad * 0 if k.startswith("detour") else grad for k, grad in mine.items()} for mine in toy.mean(grads)]


def _left_none(grads: Gradients, step: int) -> Gradients:
    return [left_none(own, mine) for own, mine in zip(grads, toy.mean(grads), strict=True)]


def _first_again() -> Callable[[Gradients, int], Gradients]:
    found: list[Gradients] = []

    def combine(grads: Gradients, step: int) -> Gradients:
        found.append(toy.mean(grads))
        return found[0]

    return combine


def _stale(factor: float) -> Callable[[Gradients, int], Gradients]:
    """Where there is no gradient, the mean of the step before counts as one, so many times."""
    means: list[Gradients] = []

    def combine(grads: Gradients, step: int) -> Gradients:
        before = means[-1] if means else [{name: torch.zeros(()) for name in mine} for mine in grads]
        filled = [
            {name: old[name] * factor if grad is None else grad for name, grad in mine.items()}
            for mine, old in zip(grads, before, strict=True)
        ]
        means.append(toy.mean(filled))
        return means[-1]

    return combine


def _first_only(grads: Gradients, step: int) -> Gradients:
    return grads if step else toy.mean(grads)


@dataclass(frozen=True)
class Wrapped(GradientTask):
    aspects: ClassVar[tuple[Aspect, ...]] = (
        values("trains like one process on the whole batch", 0.4),
        Aspect("sends each bucket once a step", 0.2, traffic.traffic),
        Aspect("sends each bucket as soon as it can leave", 0.3, order.order),
        Aspect("keeps no more than it needs", 0.1, traffic.memory),
    )
