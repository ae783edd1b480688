"""Tasks 5 and 6 of exercise 03_zero: units that gather, free and reduce a layer's parameters, and a schedule of them."""

from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from manyranks.given import zero as given
from manyranks.given.zero import Batch, trained
from manyranks.grade.check import Task
from manyranks.grade.judges import as_bytes, at_most, facts, if_done, sent, values
from manyranks.grade.learner import Ready, arguments, checked, made
from manyranks.measure.journal import Stopped, kind_of
from manyranks.measure.watch import Event, Watch

_READY = Ready(hint="write it yourself, with dist.all_gather_single and dist.reduce_scatter_single")
_READY_UNITS = _READY._replace(given=(f"{given.__name__}.Unit", f"{given.__name__}.OneAtATime"))
_ADAMW = {"lr": 0.02, "betas": (0.8, 0.9), "eps": 1e-2, "weight_decay": 0.1}
_UNIT_ROOM = 9216  # bytes: half of a unit
_UNIT = "start", "wait", "free", "reduce"
_SCHEDULE = "before_forward", "after_forward", "before_backward", "after_backward"
_TRAINS = values(0.2, "trains like one process on the whole batch", "^(parameter|shard)")
_HELD = {"says": "it holds {got} {name}; {right} is enough", "unit": as_bytes, "grain": 4096}
_holds = if_done(lambda seen: bool(seen.calls), partial(at_most, **_HELD))  # who sends nothing holds little
_BYTES = "storage.resize_ takes bytes, not elements: t.nbytes is what t needs"
_MARKED = "wait() does nothing where nothing is on its way: a free unit stays free, and the next start() gathers it"
_SHAPE = (
    "parameter.data = torch.empty(0) loses the shape, and frees nothing that autograd has saved: leave the parameter as it is, "
    "and resize the storage below it"
)
_OTHERS = (
    "the module keeps the Parameter objects that it has: put nothing new into it, give parameter.data what it needs; "
    "others hold these objects, too"
)
_SHARDS = (
    "a shard is what shard(parameter) returns, and learns where its parameter does: "
    "torch.nn.Parameter(shard(parameter.detach()), requires_grad=parameter.requires_grad)"
)
_ABSENT = (
    "a row was used whose memory is freed: call storage.resize_(nbytes), gather into this very storage, which autograd has "
    "saved, and wait(); only then may the layer compute"
)
_task = partial(
    Task,
    "03_zero",
    ready=_READY,
    advice=(
        (r"for \+=?: 'NoneType'|object has no attribute 'add_?'", "a shard's .grad may be None: then the mean takes its place"),
        (r"(NoneType|Expected parameter `tensor`).*\n.*(\.grad|\bgrads?)\b", "a gradient may be None: zeros take its place"),
        (r"out of bounds for storage of size [1-9]", _BYTES),
        (r"signal 11|SIGSEGV|exited with code -11|Segmentation|storage of size 0|no storage", _ABSENT),
        (r"in wait: (assert|raise)\b", "wait() must do nothing if nothing is on its way, even if the unit is free"),
        (r"in start: (assert|raise)\b", "start() does nothing where the unit is whole or on its way"),
        (r"in reduce: (assert|raise)\b", "reduce() works whether the unit is whole or free: a gradient needs no parameter"),
        (r"(waits in|to its|called) reduce_scatter", "is a call left out where a gradient is None? Zeros are sent then"),
        (r"(waits in|to its|called) all_gather", "does one rank gather fewer tensors? All gather the same, in the same order"),
        (arguments("|".join(_UNIT)), r"the schedule calls unit.\1()"),
        (arguments("|".join(_SCHEDULE)), r"the driver calls schedule.\1(k)"),
    ),
)

# Task 5


class Noted:
    """A learner's unit; the watch hears when its methods begin and end. Raises Stopped where too little memory is there."""

    def __init__(self, unit, layer: nn.Module, watch: Watch):
        self._unit, self._layer, self._watch = unit, layer, watch
        self.start, self.wait, self.free, self.reduce = (partial(self._call, name) for name in _UNIT)

    def _call(self, method: str) -> None:
        self._watch.mark(method)
        getattr(self._unit, method)()
        self._watch.mark("over")
        for p in self._layer.parameters():
            if p.is_contiguous() and 0 < (there := p.untyped_storage().nbytes()) < p.nbytes:
                raise Stopped(f"after {method}(), a parameter of {p.nbytes:,} bytes has a storage of {there:,}", _BYTES)

    def is_there(self) -> None:
        """Raises Stopped where a parameter has no memory, which nobody could read and live."""
        if any(p.untyped_storage().nbytes() < p.nbytes for p in self._layer.parameters()):
            raise Stopped("after wait() on a free unit, start() and wait(), the parameters are not there", _MARKED)


Before = list[tuple[str, nn.Parameter, torch.Size]]  # the layers' parameters: name, object, shape


def _unchanged(layers: nn.ModuleList, before: Before) -> None:
    """Raises Stopped where the layers have other parameters than before, or of other shapes."""
    if [id(p) for p in layers.parameters()] != [id(p) for _, p, _ in before]:
        raise Stopped("the modules' parameters are not still the same Parameter objects", _OTHERS)
    for name, p, shape in before:
        if p.shape != shape:
            raise Stopped(f"{name} of shape {list(shape)} has the shape {list(p.shape)} now", _SHAPE)


def _shards_of(units: list, layers: nn.ModuleList) -> list[nn.Parameter]:
    """Of all units. Raises Stopped where a layer's are not one Parameter a parameter, as `shard` gives it."""
    found = []
    for k, (unit, layer) in enumerate(zip(units, layers, strict=True)):
        shards, parameters = list(getattr(unit, "shards", ())), list(layer.parameters())
        if len(shards) != len(parameters):
            what = f"the unit of layer {k} has {len(shards)} shards; its module has {len(parameters)} parameters"
            raise Stopped(what, "unit.shards is a list: one Parameter for each of module.parameters(), in their order")
        for shard, p in zip(shards, parameters, strict=True):
            right = f"a Parameter of {[-(-p.numel() // dist.get_world_size())]} with requires_grad={p.requires_grad}"
            is_one = isinstance(shard, nn.Parameter)
            there = f"a Parameter of {list(shard.shape)} with requires_grad={shard.requires_grad}" if is_one else kind_of(shard)
            if there != right:
                raise Stopped(f"unit.shards of layer {k} has {there}; right is {right}", _SHARDS)
        found += shards
    return found


def _misplaced(events: list[Event]) -> list[str]:
    """What gathers and reduces in the wrong method, and whether start() waits."""
    place, found = "", set()
    for kind, what, _ in events:
        place = what if kind == "mark" else place
        if (what, place) in (("all_gather", "start"), ("reduce_scatter", "reduce")):
            continue
        if what in ("all_gather", "reduce_scatter") or (kind == "wait" and place == "start"):
            found.add(f"{what or kind} in {place}()")
    return sorted(found)


def _unit(own: tuple[nn.ModuleList, list[Batch]], kind, watch: Watch) -> dict:
    (layers, data), found = own, {}
    before = [(name, p, p.shape) for name, p in layers.named_parameters()]
    room = given.enough(layers, data[1], watch)

    def held(when: str) -> None:
        storages = {p.untyped_storage()._cdata: p.untyped_storage().nbytes() for _, p, _ in before}
        found[f"of whole parameters {when}"] = sum(storages.values())
        watch.weigh(units)
        found[f"in all {when}"] = watch.held[-1]

    with checked(kind, given.FITS):
        units = [made(kind, _READY, "Unit(module)", _UNIT, layer) for layer in layers]
        _unchanged(layers, before)
        shards = _shards_of(units, layers)
        held("when the units are made")
        noted = [Noted(unit, layer, watch) for unit, layer in zip(units, layers, strict=True)]
        optimizer, model = torch.optim.AdamW(shards, **_ADAMW), given.Sharded(layers, given.FreesOneFirst(noted))
        for step, batches in enumerate(((0,), (1, 2)), 1):
            for batch in batches:
                with watch.peak():
                    loss = data[batch].loss(layers, model)
                    held(f"after forward {batch + 1}")
                    loss.backward()
                    model.finish()
                held(f"after backward {batch + 1}")
            optimizer.step()
            optimizer.zero_grad()
            held(f"after step {step}")
        found["at one time"] = max(watch.peak_bytes, room - _UNIT_ROOM)
        for (name, _, shape), mine in zip(before, shards, strict=True):
            found[f"shard of {name}"] = mine[: max(0, shape.numel() - dist.get_rank() * len(mine))]  # without padding
        for k, unit in enumerate(noted):
            for method in ("wait", "start", "start", "wait", "wait", "start", "wait"):  # what is done already is not done again
                getattr(unit, method)()
            unit.is_there()
            found |= {f"parameter {k}.{name}": p.detach().clone() for name, p in layers[k].named_parameters()}
            unit.free()
            unit.free()
            unit.wait()
    _unchanged(layers, before)
    found["what is in the wrong method"] = _misplaced(watch.events)
    watch.forget()
    return found


_INSTEAD = {
    "all_reduce": "dist.reduce_scatter_single gives each its shard, for half the bytes of an all-reduce",
    "broadcast": "one all-gather brings all shards at once",
}
_ASYNC = "start() issues the gathers, with async_op=True, and keeps what they return; wait() waits for it; reduce() reduces"
_OFTEN = (
    "start() gathers each parameter of a free unit once, frozen ones, too; after that the unit is whole until free(). reduce() "
    "makes one reduce-scatter for each parameter that learns"
)
_WHOLE = (
    "free() takes the memory of whole parameters away, parameter.untyped_storage().resize_(0), after backward, too, and in the "
    "beginning; reduce() drops whole gradients; and nothing of yours keeps a copy, or a view"
)
unit = _task(
    "Unit(module)",
    4,
    _unit,
    (
        _TRAINS,
        sent(0.05, "gathers and reduces each parameter as often as it must", hint=_OFTEN, instead=_INSTEAD),
        facts(0.08, "starts to gather without waiting", "wrong method", _ASYNC),
        _holds(0.67, "keeps nothing whole that is not needed", "^(of|in all|at one)", _WHOLE, room=_UNIT_ROOM),
    ),
    make=lambda case, rank, n, seed: trained(rank, seed, 3),
    cases=("in two steps, the second of two backward passes",),
    unexplained="start() gathers from the shards as they are then, and reduce() adds the mean of what backward has left in "
    "parameter.grad to each shard's .grad",
)

# Task 6

_OLD = "there from before"


def _scheduled(events: list[Event], n: int) -> dict:
    """What is there when a layer computes; how many units at once, at least where there is a next one, and at most."""
    found, there, step, most, fewest = {}, {}, 1, 0, n
    marks = (event.what.partition(" ") for event in events if event.kind == "mark")
    for what, k in ((what, int(number)) for what, _, number in marks if number.isdigit()):
        if what == "start":
            there.setdefault(k, "on its way")
            most = max(most, len(there))
        elif what == "wait" and there.get(k) == "on its way":
            there[k] = "there"
        elif what == "free":
            there.pop(k, None)
        elif what == "step":
            found[f"units at once in step {k}"] = f"{fewest} to {most}"
            found[f"units still there at the end of step {k}"] = sorted(there)
            there, step, most, fewest = dict.fromkeys(there, _OLD), k + 1, 0, n
        elif what in ("forward", "backward"):
            following = k + 1 if what == "forward" else k - 1
            for unit in sorted({k, following} & set(range(n))):
                state = there.get(unit, "not there")
                found[f"while layer {k} computes in {what} {step}, unit {unit}"] = (
                    "there" if (unit, state) == (k, _OLD) else state
                )
            fewest = min(fewest, len(there)) if 0 <= following < n else fewest
    return found


def _prefetch(own: tuple[nn.ModuleList, list[Batch]], kind, watch: Watch) -> dict:
    layers, data = own
    units = [given.Unit(k, layer, watch) for k, layer in enumerate(layers)]
    shards = [shard for unit in units for shard in unit.shards]
    optimizer = torch.optim.AdamW(shards, **_ADAMW)
    model = given.Marked(layers, made(kind, _READY_UNITS, "Prefetch(units)", _SCHEDULE, units), watch)
    for batch in (0, 1):
        data[batch].loss(layers, model).backward()
        model.finish()
        watch.mark(f"step {batch + 1}")
        optimizer.step()
        optimizer.zero_grad()
    found = _scheduled(watch.events, len(units))
    for unit in units:
        unit.free()  # nothing is under way any more
    watch.forget()
    names = [f"shard of {name}" for name, _ in layers.named_parameters()]
    return found | dict(zip(names, shards, strict=True))


_NEXT = "start() and wait() for unit k before layer k computes, and start the next one, so that it comes while layer k computes"
_TWICE = "each unit is gathered once in forward and once in backward, but the last one is still there from forward"
_TWO = (
    "two at a time: the one that computes and the next one. after_forward(k) frees unit k, but for the last one; "
    "after_backward(k) frees it when it is reduced"
)
prefetch = _task(
    "Prefetch(units)",
    3,
    _prefetch,
    (
        _TRAINS,
        sent(0.13, "gathers no unit more often than it must", hint=_TWICE),
        facts(0.37, "has the next unit on its way while one computes", "^while", _NEXT),
        facts(0.3, "has two units at a time, and no third", "^units", _TWO),
    ),
    make=lambda case, rank, n, seed: trained(rank, seed, 2),
    cases=("in two steps",),
    ready=_READY_UNITS,
    advice=(
        (r"(waits in|to its|called) (all_gather|reduce_scatter)", "does the schedule do something on one rank only?"),
        *_task.keywords["advice"],
    ),
    unexplained="does each layer compute with the parameters of this step? Gather its unit, wait for it, and free all units "
    "before the optimizer steps: one that is still whole is not gathered again",
)
