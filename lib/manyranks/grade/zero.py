"""Checks of exercise 03_zero: what comes out, what each rank sends and holds, and what happens when, on 2, 3 and 4 ranks.

Tasks 5 and 6, a unit and a schedule of units, are zero_unit.py. What happens when is told by the order of events, not by any
clock.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from manyranks.given import zero as given
from manyranks.given.numbers import EXACT
from manyranks.given.zero import Batch, padded, pieces, trained
from manyranks.grade import zero_unit
from manyranks.grade.check import Task
from manyranks.grade.judges import Right, Verdict, as_bytes, at_most, by, if_done, sent, silent, values
from manyranks.grade.learner import Ready, arguments, checked, made, plain, tensor
from manyranks.grade.trial import Trial
from manyranks.measure.journal import Stopped
from manyranks.measure.watch import Event, Watch

_READY = Ready(hint="write it yourself, with dist.all_gather_single and dist.reduce_scatter_single")
_ADAMW = {"lr": 0.02, "betas": (0.8, 0.9), "eps": 1e-2, "weight_decay": 0.1}  # eps: that it matters how large gradients are
_SGD = {"lr": 0.1, "momentum": 0.9}
_SMALL = 6144  # bytes of examples, numbers and counters

# What several tasks have in common

_ALL_REDUCE = "all-reduce gives every rank the whole sum, for twice the bytes: dist.reduce_scatter_single gives each its shard"
_INSTEAD = {
    "all_reduce": _ALL_REDUCE,
    "broadcast": "one all-gather brings all shards at once, and all ranks begin with the same parameters",
}
_EACH = "one reduce-scatter for each gradient, padded to a multiple of N; one all-gather for each parameter, of its shards"
_SENT = {"instead": _INSTEAD, "hint": _EACH}
_HELD = {"says": "it holds {got} {name}; {right} is enough", "unit": as_bytes, "grain": 4096}
_holds = if_done(lambda seen: bool(seen.calls), partial(at_most, room=_SMALL, **_HELD))  # who sends nothing holds little
_TRAINS = values(0.2, "trains like one process on the whole batch", "^(parameter|shard)")
_NONE = "a parameter that a rank's examples do not use has a gradient of None there: zeros take its place, and are sent"
_task = partial(
    Task,
    "03_zero",
    ready=_READY,
    advice=(
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
    ),
)

# Tasks 1 and 2


def _returned(name: str, function: Callable, argument: Tensor, *more) -> Tensor:
    """What the learner's function makes of a copy. Raises Stopped where it is no tensor, or the copy is changed."""
    result = tensor(function(mine := argument.clone(), *more), f"what {name} returned")
    if not torch.equal(mine, argument):
        raise Stopped(f"{name} has changed the tensor that it was given", "leave it as it is")
    return result


def _shard(tensors: list[tuple[str, Tensor]], function: Callable, watch: Watch) -> dict:
    found = {name: _returned("shard", function, whole) for name, whole in tensors}
    watch.weigh(function)
    piece = function(torch.ones(300, 101, **EXACT))
    watch.weigh(function, piece)
    there = {"when only its piece is left": watch.held[1] - watch.held[0]} if getattr(piece, "numel", int)() else {}
    return found | there | {"the piece of a large tensor": plain(piece)}


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
_ONCE = "one all-gather a tensor: each rank puts in its shard, and N shards come out"
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


class Training(NamedTuple):
    """batches: of each step, those of its backward passes; finishes: whether finish() is called after each."""

    optimizer: str
    settings: dict
    batches: tuple[tuple[int, ...], ...]
    finishes: bool = False

    def __str__(self) -> str:
        return f"in {len(self.batches)} steps of {self.optimizer}" + ", each of two backward passes" * self.finishes


_HOOK = "reduce it in a hook, register_post_accumulate_grad_hook. A lambda in a loop sees its last value: use functools.partial"
_REST = "finish() sends what has not left, with zeros for None"
_TURN = "gradients leave in the reverse order of `params`, on all ranks: one that's there early waits for those before it"


def _leaving(events: list[Event], model: nn.Module) -> tuple[str, str]:
    """Where a gradient first leaves too early, too late or in another's place, and a hint; empty where none does."""
    turns = [(name, padded(p)) for name, p in model.named_parameters() if p.requires_grad][::-1]
    place, backward, there, left = "", 0, set(), len(turns)
    for kind, what, count in events:
        name, right = turns[left] if left < len(turns) else ("", 0)
        if place == "backward" and kind in ("gradient", "mark") and name in there:
            until = f"that of {what} was made" if kind == "gradient" else "backward was over"
            return f"in backward #{backward}, the gradient of {name} was there, but had not left when {until}", _HOOK
        if kind == "gradient":
            there.add(what)
        elif kind == "mark":
            if what == "finished" and name:
                return f"{name} did not leave after backward #{backward}", _REST
            if what == "backward":
                backward, there, left = backward + 1, set(), 0
            place = what
        elif what == "reduce_scatter":
            if place == "step":
                return "something leaves in step()", "what has left is with the shards already: step() reduces nothing"
            if not name:
                return f"in backward #{backward}, more left than there are gradients", "each gradient leaves once a backward"
            if count != right or (place == "backward" and name not in there):
                why = f"with {right:,}" if count != right else "which was not there"
                return f"in backward #{backward}, {count:,} bytes left where it was the turn of {name}, {why}", _TURN
            left += 1
    return "", ""


def _out_of_turn(trial: Trial, right: Right) -> str:
    """Says _TURN where the first gradients of a run that broke off left in another order, and not where one was left out."""
    passes = sum(map(len, trial.case.batches))
    for rank, should in enumerate(right):
        must = [call.bytes for call in should.calls if call.op == "reduce_scatter"]
        got = [entry.bytes for entry in trial.notes.get(rank, []) if entry.op == "reduce_scatter"]
        first = len(must) // passes
        rest = iter(must[:first])
        if not all(count in rest for count in got[:first]):
            return _TURN
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
        optimizer = made(kind, _READY, call, methods, model.parameters(), optimizer_class, **training.settings)
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
        found["leaving"] = _leaving(watch.events, model)
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
        sent(0.13, "reduces each gradient and gathers each parameter once a step", **_SENT),
        _holds(0.67, "holds optimizer states of its shards only", "^(of|in)", _STATES),
    ),
    make=lambda case, rank, n, seed: (case, *trained(rank, seed, 6)),
    cases=(Training("AdamW", _ADAMW, ((1,), (2,), (0,))), Training("SGD", _SGD, ((2,), (1,)))),
    unexplained="in each step: a shard's .grad is its part of the mean over the ranks, the optimizer steps on the shards, and "
    "the parameters are gathered from them. Print one parameter on all ranks after each of these",
)


def _order(trial: Trial, right: Right) -> Verdict:
    every = [(rank, *seen.results["leaving"]) for rank, seen in enumerate(trial.seen)]
    return next((Verdict(False, f"rank {rank}: {found}", hint) for rank, found, hint in every if found), Verdict(True))


_GRADIENTS = (
    "once a gradient has left, its shard is all that a rank keeps: set parameter.grad to None at once, not at the end of "
    "backward, and keep no copy"
)
stage2 = _task(
    "Stage2(params, optimizer_class, **kwargs)",
    4,
    _train,
    (
        _TRAINS,
        sent(0.1, "reduces each gradient once a backward", **_SENT),
        by(
            0.35, "reduces a gradient as soon as its turn comes", _order, lambda seen: {"found": seen.results["leaving"][0]}
        )._replace(early=_out_of_turn),
        _holds(0.35, "holds gradients of its shards only", "^(of|in)", _GRADIENTS),
    ),
    make=lambda case, rank, n, seed: (case, *trained(rank, seed, 6)),
    cases=(Training("AdamW", _ADAMW, ((2, 3), (1, 5)), finishes=True),),
    unexplained="at step(), a shard's .grad is the mean over the ranks, added up over all backward passes since zero_grad()",
)

unit, prefetch = zero_unit.unit, zero_unit.prefetch  # tasks 5 and 6
