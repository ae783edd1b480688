"""Checks of exercise 03_zero: what comes out, what each rank sends and holds, and what happens when, on 2, 3 and 4 ranks.

The order of events tells what happens when; no clock does.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from manyranks.given import zero as given
from manyranks.given.numbers import EXACT
from manyranks.given.zero import BYTES, TURN, UNIT, Batch, Noted, Training, pieces, trained
from manyranks.grade.check import Task
from manyranks.grade.judges import Judge, Right, Verdict, as_bytes, at_most, facts, if_done, results, sent, silent, values
from manyranks.grade.learner import Allowed, arguments, checked, made, plain, tensor
from manyranks.grade.trial import Trial
from manyranks.measure.journal import Stopped
from manyranks.measure.watch import Watch

_ALLOWED = Allowed(hint="write it yourself, with dist.all_gather_single and dist.reduce_scatter_single")
_ALLOWED_UNITS = _ALLOWED._replace(given=(f"{given.__name__}.Unit", f"{given.__name__}.OneAtATime"))
_ADAMW = {"lr": 0.02, "betas": (0.8, 0.9), "eps": 1e-2, "weight_decay": 0.1}  # eps: that it matters how large gradients are
_SMALL, _UNIT_ROOM = 6144, 9216  # bytes of examples, numbers and counters; of half a unit

# What several tasks have in common

_ALL_REDUCE = "all-reduce gives every rank the whole sum, for twice the bytes: dist.reduce_scatter_single gives each its shard"
_INSTEAD = {
    "all_reduce": _ALL_REDUCE,
    "broadcast": "one all-gather brings all shards at once, and all ranks begin with the same parameters",
}
_EACH = "one reduce-scatter for each gradient, padded to a multiple of N; one all-gather for each parameter, of its shards"
_SENT = {"instead": _INSTEAD, "hint": _EACH}
_HELD = {"says": "it holds {got} {name}; {right} is enough", "unit": as_bytes, "grain": 4096}


# Who sends less than a quarter holds little. Who gathers and reduces nothing sends as much.
_holds = if_done(lambda seen, should: 4 * seen.bytes_sent >= should.bytes_sent, partial(at_most, **_HELD))
_TRAINS = values(0.2, "trains like one process on the whole batch", "^(parameter|shard)")
_NONE = "a parameter that a rank's examples do not use has a gradient of None there: zeros take its place, and are sent"
_ABSENT = (
    "a parameter was used after its memory was freed: call storage.resize_(nbytes), gather into this very storage, "
    "which autograd has saved, and wait(); only then may the layer compute"
)
_SCHEDULE = "before_forward", "after_forward", "before_backward", "after_backward"
_task = partial(
    Task,
    "03_zero",
    allowed=_ALLOWED,
    common=(
        (r"for \+=?: 'NoneType'|object has no attribute 'add_?'", "a shard's .grad may be None: then the mean takes its place"),
        (r"IndexError.*\n.*chunk", "few elements make fewer chunks than N: pad with zeros to a multiple of N first"),
        (r"(NoneType|Expected parameter `tensor`).*\n.*(\.grad|\bgrads?)\b", _NONE),
        (r"Padding length should be", "flatten the tensor before you pad it: pad counts along the last dimension"),
        (r"shape '.*' is invalid for input of size", "the padding is still there: keep the first shape.numel() elements"),
        (
            r"(waits in|to its|called) reduce_scatter",
            f"does one rank leave a call out? {_NONE}, in the same order on all ranks",
        ),
        (r"(waits in|to its|called) all_gather", "does one rank gather fewer tensors? All gather the same, in the same order"),
        (arguments("step|finish|zero_grad"), r"the training loop calls optimizer.\1()"),
        (r"out of bounds for storage of size [1-9]", BYTES),
        (r"signal 11|SIGSEGV|exited with code -11|Segmentation|storage of size 0|no storage", _ABSENT),
        (r"in wait: (assert|raise)\b", "wait() must do nothing if nothing is on its way, even if the unit is free"),
        (r"in start: (assert|raise)\b", "start() does nothing where the unit is whole or on its way"),
        (r"in reduce: (assert|raise)\b", "reduce() works whether the unit is whole or free: a gradient needs no parameter"),
        (arguments("|".join(UNIT)), r"the schedule calls unit.\1()"),
        (arguments("|".join(_SCHEDULE)), r"the driver calls schedule.\1(k)"),
    ),
)

# Tasks 1 and 2


def _returned(name: str, function: Callable, argument: Tensor, *more) -> Tensor:
    """Returns what the learner's function makes of a copy. Raises Stopped where it is no tensor, or the copy is changed."""
    result = tensor(function(mine := argument.clone(), *more), f"what {name} returned")
    if not torch.equal(mine, argument):
        raise Stopped(f"{name} has changed the tensor that it was given", "leave it as it is")
    return result


def _shard(tensors: list[tuple[str, Tensor]], function: Callable, watch: Watch) -> dict:
    found = {name: _returned("shard", function, whole) for name, whole in tensors}
    for rows in (301, 300):  # with padding, and without
        watch.weigh(function)
        piece = function(torch.ones(rows, 101, **EXACT))
        watch.weigh(function, piece)
        found[f"the piece of a large tensor of {rows} rows"] = plain(piece)
        left = {f"when only its piece of {rows} rows is left": watch.held[-1] - watch.held[-2]}
        found |= left if getattr(piece, "numel", int)() else {}
    return found


_VIEW = "a slice or a chunk is a view, and keeps the whole tensor's memory: clone() it"
shard = _task(
    "shard(tensor)",
    2,
    _shard,
    (
        values(0.5, "returns the rank's piece", "^(?!when)", alone=True),
        at_most(0.4, "keeps no more than the piece", "when", _VIEW, 1024, **_HELD),
        silent(0.1, "sends nothing", "every rank has the whole tensor here: it takes its piece without asking anybody"),
    ),
    make=lambda case, rank, n, seed: [*given.tensors(seed)],
    unexplained="a chunk has ceil(E / N) elements: flatten, pad with zeros to a multiple of N, and take chunk number rank",
)


def _gather(cut: list[tuple[str, Tensor, torch.Size]], function: Callable, watch: Watch) -> dict:
    return {name: _returned("gather", function, piece, shape) for name, piece, shape in cut}


_FOR_GATHERS = "an all-reduce sends twice the bytes: dist.all_gather_single brings all shards at once"
_ONCE = "one all-gather per tensor: each rank puts in its shard, and N shards come out"
gather = _task(
    "gather(shard_S, shape)",
    2,
    _gather,
    (
        values(0.6, "returns the whole tensor"),
        sent(0.4, "makes one all-gather of a shard", hint=_ONCE, instead=_INSTEAD | {"all_reduce": _FOR_GATHERS}),
    ),
    make=lambda case, rank, n, seed: [(name, pieces(one, n)[rank], one.shape) for name, one in given.tensors(seed)],
    unexplained="all shards, rank 0's first; of these the first shape.numel() elements, in this shape",
)

# Tasks 3 and 4


def _out_of_turn(trial: Trial, right: Right) -> str:
    """Says TURN where the first gradients of a run that broke off left in another order, and not where one was left out."""
    passes = sum(map(len, trial.case.batches))
    for rank, should in enumerate(right):
        must = [call.bytes for call in should.calls if call.op == "reduce_scatter"]
        got = [entry.bytes for entry in trial.notes.get(rank, []) if entry.op == "reduce_scatter"]
        first = len(must) // passes
        rest = iter(must[:first])
        if not all(count in rest for count in got[:first]):
            return TURN
    return ""


def _train(own: tuple[Training, nn.ModuleList, list[Batch]], kind, watch: Watch) -> dict:
    training, model, data = own
    found = {}
    watch.follow(model)

    def held(when: str) -> None:
        found[f"of optimizer states {when}"] = sum(states)
        found[f"of whole gradients {when}"] = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
        watch.weigh(optimizer)
        found[f"in all {when}"] = watch.held[-1]

    with checked(kind, given.FITS), given.state_bytes() as states:
        name, methods = ("Stage2", ("step", "zero_grad", "finish")) if training.finishes else ("Stage1", ("step", "zero_grad"))
        call, optimizer_class = f"{name}(params, optimizer_class, **kwargs)", getattr(torch.optim, training.optimizer)
        optimizer = made(kind, _ALLOWED, call, methods, model.parameters(), optimizer_class, **training.settings)
        for step, batches in enumerate(training.batches, 1):
            for batch in batches:
                loss = data[batch].loss(model)
                with watch.peak():
                    watch.mark("backward")
                    loss.backward()
                if training.finishes:
                    watch.mark("finish")
                    optimizer.finish()
                    watch.mark("finished")
            if training.finishes:
                held(f"after the backwards of step {step}")
            states.clear()
            watch.mark("step")
            optimizer.step()
            watch.mark("zero_grad")
            optimizer.zero_grad()
            held(f"after step {step}")
    if training.finishes:
        found["of gradients and copies in backward"] = given.in_backward(model, watch.peak_bytes, _SMALL)
        found["leaving"], found["hint"] = given.leaving(watch.events, model)
    watch.forget()
    return found | {f"parameter {name}": p for name, p in model.named_parameters()}


_STATES = (
    "after zero_grad() a rank needs the model, its shards and their states, and nothing else: give the optimizer shards with "
    "memory of their own, one Parameter for each parameter that learns, and set the gradients of both to None"
)
stage1 = _task(
    "Stage1(params, optimizer_class, **kwargs)",
    5,
    _train,
    (
        _TRAINS,
        sent(0.13, "reduces each gradient and gathers each parameter once per step", **_SENT),
        _holds(0.67, "holds optimizer states of its shards only", "^(of|in)", _STATES, _SMALL),
    ),
    make=lambda case, rank, n, seed: (case.drawn(seed), *trained(rank, seed, 6)),
    cases=(Training("AdamW", _ADAMW, ((1,), (2,), (0,))), Training("SGD", {"lr": 0.1, "momentum": 0.9}, ((2,), (1,)))),
    unexplained="in each step: a shard's .grad is its part of the mean over the ranks, the optimizer steps on the shards, and "
    "what is gathered from them is copied into the parameters. Print one parameter on all ranks after each of these",
)


def _order(trial: Trial, right: Right) -> Verdict:
    every = [(rank, seen.results["leaving"], seen.results["hint"]) for rank, seen in enumerate(trial.seen)]
    return next((Verdict(False, f"rank {rank}: {found}", hint) for rank, found, hint in every if found), Verdict(True))


_GRADIENTS = (
    "once a gradient has left, set parameter.grad to None at once, not at the end of backward, and keep no copy; zero_grad() "
    "sets the shards' gradients to None, too"
)
stage2 = _task(
    "Stage2(params, optimizer_class, **kwargs)",
    4,
    _train,
    (
        _TRAINS,
        sent(0.1, "reduces each gradient once per backward", **_SENT),
        Judge(0.35, "reduces a gradient as soon as its turn comes", _order, results("^leaving"), early=_out_of_turn),
        _holds(0.35, "holds gradients of its shards only", "^(of|in)", _GRADIENTS, _SMALL),
    ),
    make=lambda case, rank, n, seed: (case.drawn(seed), *trained(rank, seed, 6)),
    cases=(Training("AdamW", _ADAMW, ((2, 3), (1, 5)), finishes=True),),
    unexplained="at step(), a shard's .grad is the mean over the ranks, added up over all backward passes since zero_grad()",
)

# Task 5


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
        units = [made(kind, _ALLOWED, "Unit(module)", UNIT, layer) for layer in layers]
        given.unchanged(layers, before)
        shards = given.shards_of(units, layers)
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
    given.unchanged(layers, before)
    found["what is in the wrong method"] = given.misplaced(watch.events)
    watch.forget()
    return found


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


def _prefetch(own: tuple[nn.ModuleList, list[Batch]], kind, watch: Watch) -> dict:
    layers, data = own
    units = [given.Unit(k, layer, watch) for k, layer in enumerate(layers)]
    shards = [shard for unit in units for shard in unit.shards]
    optimizer = torch.optim.AdamW(shards, **_ADAMW)
    model = given.Marked(layers, made(kind, _ALLOWED_UNITS, "Prefetch(units)", _SCHEDULE, units), watch)
    for batch in (0, 1):
        data[batch].loss(layers, model).backward()
        model.finish()
        watch.mark(f"step {batch + 1}")
        optimizer.step()
        optimizer.zero_grad()
    found = given.scheduled(watch.events, len(units))
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
    make=lambda case, rank, n, seed: trained(rank, seed, 2, more=True),
    cases=("in two steps",),
    allowed=_ALLOWED_UNITS,
    advice=((r"(waits in|to its|called) (all_gather|reduce_scatter)", "does the schedule do something on one rank only?"),),
    unexplained="does each layer compute with the parameters of this step? Gather its unit, wait for it, and free all units "
    "before the optimizer steps: one that is still whole is not gathered again",
)
