"""The task Unit: parameters that are there only while they are needed."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import nn

from manyranks.grade.journal import Stopped
from manyranks.grade.scripts import Script, Tensors, Wrong, judge_values
from manyranks.grade.trial import Trial
from manyranks.grade.verdict import Aspect, Verdict
from manyranks.grade.watch import Watch
from manyranks.grade.zero import models, oracle, own, residence, traffic
from manyranks.grade.zero.driver import OneAtATime, Sharded
from manyranks.grade.zero.oracle import ADAMW, Training
from manyranks.grade.zero.residence import Bytes
from manyranks.grade.zero.stages import FORGOTTEN, KEPT, OWN, SUM, TWICE
from manyranks.grade.zero.task import ABSENT, BYTES, NONE, ZeroTask, made
from manyranks.grade.zero.traffic import Must

CALL = "Unit(module)"
METHODS = ("start", "wait", "free", "reduce")
_STEPS = [[0], [1, 2]]  # batches, the second step of two backward passes
_SHAPE = (
    "parameter.data = torch.empty(0) loses the shape, and frees nothing that autograd has saved: leave the parameter as it is, "
    "and resize the storage below it"
)
_STALE = "what is gathered are the parameters from before training: start() has to gather the shards as they are then"
_OTHERS = (
    "the module keeps the Parameter objects that it has: put nothing new into it, give parameter.data what it needs; "
    "others hold these objects, too"
)
_MARKED = "wait() does nothing where nothing is on its way: a free unit stays free, and the next start() gathers it"
_ONE_RANK = (
    "does one rank leave a call out, in reduce() where its gradient is None? It counts as zeros, which are sent all the same"
)
_FREED_FIRST = 1  # the number of a layer whose unit is freed before it is reduced: a gradient needs no parameter
_NEVER = (
    "the shards never change: the optimizer was made of unit.shards once, so reduce() gives these very Parameters their .grad"
)


@own.checked
def _training(unit, watch: Watch) -> Tensors:
    rank, layers = dist.get_rank(), models.layers()
    parameters = list(layers.parameters())
    shapes = [p.shape for p in parameters]
    units = [Noted(made(unit, watch, CALL, METHODS, layer), k, layer, watch) for k, layer in enumerate(layers)]
    _same_objects(layers, parameters)
    shards = _shards(units, layers, shapes)
    _weigh(layers, watch)
    optimizer = torch.optim.AdamW(shards, **ADAMW)
    model = Sharded(layers, _FreesOneFirst(units))
    for batches in _STEPS:
        for batch in batches:
            _backward(model, rank, batch, watch)
        optimizer.step()
        optimizer.zero_grad()
        _weigh(layers, watch)
    _same_objects(layers, parameters)
    return _result(layers, units, shards)


class _FreesOneFirst(OneAtATime):
    """As what was given; one unit is freed before it is reduced."""

    def after_backward(self, k):
        if k == _FREED_FIRST:
            self.units[k].free()
        super().after_backward(k)


def _same_objects(layers: nn.ModuleList, before: list[nn.Parameter]) -> None:
    now = list(layers.parameters())
    if len(now) != len(before) or any(p is not q for p, q in zip(now, before, strict=True)):
        raise Stopped("the modules' parameters are not still the same Parameter objects", _OTHERS)


def _backward(model: Sharded, rank: int, batch: int, watch: Watch) -> None:
    with watch.peak():
        models.shifts(model.layers, rank, batch)
        logits = model(models.tokens(rank, batch))
        loss = models.loss(logits, rank, batch)
        del logits
        _weigh(model.layers, watch)
        loss.backward()
        model.finish()
    watch.mark("over")
    _weigh(model.layers, watch)


def _weigh(layers: nn.Module, watch: Watch) -> None:
    """Two numbers: all live bytes, and those of the storages that the parameters have."""
    watch.weigh()
    storages = {p.untyped_storage()._cdata: p.untyped_storage() for p in layers.parameters()}
    watch.held.append(sum(storage.nbytes() for storage in storages.values()))


class Noted:
    """A learner's unit; the watch hears when its methods begin and end."""

    def __init__(self, unit, k: int, layer: nn.Module, watch: Watch):
        self.unit, self._k, self._layer, self._watch = unit, k, layer, watch

    def start(self) -> None:
        self._noted("start")

    def wait(self) -> None:
        self._noted("wait")

    def free(self) -> None:
        self._noted("free")

    def reduce(self) -> None:
        self._noted("reduce")

    def _noted(self, method: str) -> None:
        self._watch.mark(f"{method} {self._k}")
        getattr(self.unit, method)()
        self._watch.mark("over")
        for p in self._layer.parameters():
            if p.is_contiguous() and 0 < (there := p.untyped_storage().nbytes()) < p.nbytes:
                raise Stopped(f"after {method}(), a parameter of {p.nbytes:,} bytes has a storage of {there:,}", BYTES)


def _shards(units: list[Noted], layers: nn.ModuleList, shapes: list[torch.Size]) -> list[nn.Parameter]:
    """Of all units. Raises Stopped where they are not one Parameter a parameter, of its size."""
    found = []
    for p, shape in zip(layers.parameters(), shapes, strict=True):
        if p.shape != shape:
            raise Stopped(f"a parameter of shape {list(shape)} has the shape {list(p.shape)} when its unit is made", _SHAPE)
    for k, (unit, layer) in enumerate(zip(units, layers, strict=True)):
        shards, parameters = list(getattr(unit.unit, "shards", ())), list(layer.parameters())
        if len(shards) != len(parameters):
            what = f"the unit of layer {k} has {len(shards)} shards; its module has {len(parameters)} parameters"
            raise Stopped(what, "unit.shards is a list: one Parameter for each of module.parameters(), in their order")
        for shard, parameter in zip(shards, parameters, strict=True):
            _check(shard, parameter, k)
        found += shards
    return found


def _check(shard, parameter: nn.Parameter, k: int) -> None:
    if not isinstance(shard, nn.Parameter):
        raise Stopped(f"unit.shards of layer {k} has a {type(shard).__name__} in it", "an optimizer wants torch.nn.Parameter")
    if shard.requires_grad != parameter.requires_grad:
        hint = "a shard learns where its parameter does: torch.nn.Parameter(…, requires_grad=parameter.requires_grad)"
        raise Stopped(f"unit.shards of layer {k}: requires_grad is {shard.requires_grad}", hint)
    right = -(-parameter.shape.numel() // dist.get_world_size())
    if tuple(shard.shape) != (right,):
        what = f"unit.shards of layer {k} has a shard of shape {list(shard.shape)}; right is [{right}]"
        raise Stopped(what, "a shard is what shard(parameter) returns; a parameter keeps its shape")


def _result(layers: nn.ModuleList, units: list[Noted], shards: list[nn.Parameter]) -> Tensors:
    """The optimizer's shards, without padding, and what the units gather."""
    rank, n, found = dist.get_rank(), dist.get_world_size(), {}
    names = [name for name, _ in layers.named_parameters()]
    for name, shard, parameter in zip(names, shards, layers.parameters(), strict=True):
        first, end = models.bounds(parameter.shape, n)[rank]
        found[f"the shard of {name}"] = shard.detach()[: end - first].clone()
    for k, unit in enumerate(units):
        for method in ("wait", "start", "start", "wait", "wait", "start", "wait"):  # what is done already is not done again
            getattr(unit, method)()
        _are_there(k, layers[k])
        found |= {f"{k}.{name}": p.detach().clone() for name, p in layers[k].named_parameters()}
        unit.free()
        unit.free()
        unit.wait()
    return found


def _are_there(k: int, layer: nn.Module) -> None:
    """Raises Stopped where a parameter has no memory, which nobody could read and live."""
    for p in layer.parameters():
        if p.untyped_storage().nbytes() < p.nbytes:
            raise Stopped(
                f"after wait() on a free unit, start() and wait() of layer {k}, its parameters are not there", _MARKED
            )


def oracle_of(n: int, batches: list[list[int]]) -> Training:
    """n ranks that train the layers."""
    return Training(n, models.layers, _loss, batches, settings=tuple(ADAMW.items()))


def _loss(layers: nn.ModuleList, rank: int, batch: int) -> torch.Tensor:
    return models.run(layers, rank, batch)


@cache
def unit_cases(n: int) -> list[Script]:
    """Two steps; the second has two backward passes."""
    training = oracle_of(n, _STEPS)
    return [
        Script(
            n,
            _training,
            _both(training),
            lambda: _wrong(training),
            _must(n),
            "in two steps, the second with two backward passes",
        )
    ]


def _both(training: Training) -> list[Tensors]:
    return [{**named(shards), **weights} for weights, shards in zip(*training.both(), strict=True)]


def named(shards: Tensors) -> Tensors:
    """Shards by what a report calls them."""
    return {f"the shard of {name}": shard for name, shard in shards.items()}


def _must(n: int) -> Must:
    parameters = list(models.layers().parameters())
    passes = sum(map(len, _STEPS))
    rows = [models.padded_bytes(p, n) for p in parameters]
    learning = [row for row, p in zip(rows, parameters, strict=True) if p.requires_grad]
    held = Bytes(
        shards=sum(rows) // n,
        states=2 * sum(learning) // n,
        gradients=sum(learning) // n,
        whole=sum(rows),
        unit=max(sum(models.padded_bytes(p, n) for p in layer.parameters()) for layer in models.layers()),
        activations=models.activation_bytes(),
    )
    return Must(
        gathers=tuple(row // n for row in rows) * (2 * passes + 1),
        reduces=tuple(learning) * passes,
        once="for each parameter in each forward and each backward",
        reduced="for each parameter that learns in each backward",
        frozen=sum(row // n for row, p in zip(rows, parameters, strict=True) if not p.requires_grad),
        gathers_anew="start() does nothing where the unit is whole or under way; one all-gather a parameter",
        held=held,
    )


def _wrong(right: Training) -> Iterator[Wrong]:
    def when(hint: str, **differs) -> Wrong:
        return Wrong(hint, _both(replace(right, **differs)))

    n = right.n
    yield when(_NEVER, combine=lambda parts, step: [{}] * n, learns=lambda rank, name: False)
    yield when(_STALE, shown="first")
    yield when("what is gathered is one step behind", shown="before")
    yield when(SUM, combine=oracle.scaled(n))
    yield when(TWICE, combine=oracle.scaled(1 / n))
    yield when(OWN, combine=oracle.own)
    adds = "the backward passes of a step add up: where a shard has a gradient already, add to it"
    yield when(f"only the last backward pass counts; {adds}", combine=oracle.last_only)
    yield when(f"only the first backward pass counts; {adds}", combine=oracle.first_only)
    yield when(KEPT, combine=oracle.never_dropped())
    yield when(FORGOTTEN, combine=oracle.never_forgotten())
    for combine in (oracle.of_users, oracle.left_none):
        yield when(f"a rank without a gradient counts as one with zeros: {NONE}", combine=combine)
    for rank in range(n):
        yield when(f"rank {rank}'s shards never learn", learns=lambda r, name, still=rank: r != still)


def _values(task: ZeroTask, trial: Trial) -> Verdict:
    verdict = judge_values(task, trial)
    nan = any(torch.isnan(t).any() for seen in trial.answers for t in seen.tensors.values() if t.is_floating_point())
    if nan and not verdict.ok:
        return verdict._replace(hint=f"there are NaNs: {ABSENT}")
    return verdict


@dataclass(frozen=True)
class UnitTask(ZeroTask):
    advice: ClassVar[tuple[tuple[str, str], ...]] = (
        (r"in wait: (assert|raise)\b", "wait() does nothing where nothing is on its way, also where the unit is free"),
        (r"in start: (assert|raise)\b", "start() does nothing where the unit is whole or on its way"),
        (r"in free: (assert|raise)\b", "free() does nothing where the unit is free"),
        (r"in reduce: (assert|raise)\b", "reduce() works whether the unit is whole or free: a gradient needs no parameter"),
        *ZeroTask.advice,
    )
    guesses: ClassVar[tuple[tuple[str, str], ...]] = ((r"(waits in|to its|called) (all_gather|reduce_scatter)", _ONE_RANK),)
    aspects: ClassVar[tuple[Aspect, ...]] = (
        Aspect("trains like one process on the whole batch", 0.2, _values, each_world=True),
        Aspect("gathers and reduces each parameter as often as it must", 0.05, traffic.traffic),
        Aspect("starts to gather without waiting", 0.08, residence.asynchronous),
        Aspect("keeps nothing whole that is not needed", 0.67, residence.memory),
    )
