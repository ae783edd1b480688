"""The tasks Stage1 and Stage2: an optimizer whose states are sharded, and then the gradients, too."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import ClassVar

import torch
import torch.distributed as dist

from manyranks.grade import toy
from manyranks.grade.scripts import Script, Tensors, Wrong, judge_values
from manyranks.grade.trial import Trial
from manyranks.grade.verdict import Aspect, Verdict
from manyranks.grade.watch import Watch
from manyranks.grade.zero import leaving, memory, oracle, own, traffic
from manyranks.grade.zero.memory import Bytes
from manyranks.grade.zero.models import Net, loss_of, padded_bytes
from manyranks.grade.zero.oracle import ADAMW, SGD, Training
from manyranks.grade.zero.task import NONE, ZeroTask, made
from manyranks.grade.zero.traffic import Must

ONE, TWO = "Stage1(params, optimizer_class, **kwargs)", "Stage2(params, optimizer_class, **kwargs)"
SUM = "that is the sum over the ranks: their mean is asked for, so divide by N"
TWICE = "that is divided by N twice: once is enough, before or after, and ReduceOp.AVG divides, too"
OWN = "these are the rank's own gradients: reduce-scatter them, and give the shard the mean of its part"
FORGOTTEN = "gradients of all steps add up: zero_grad() has to forget those of the shards, too"
KEPT = "whole gradients count again in the next backward: drop them, parameter.grad = None"
UNCHANGED = "the parameters have not changed"
BEFORE = "the parameters are one step behind: gather after the optimizer's step, from the shards as they are then"
_GATHER = "the parameters are those from before the first step: after the optimizer's step, gather them from the shards"
_UNKNOWN = (
    "the model never changes. The optimizer has to have the very tensors that you gather from, with their .grad, for it "
    "changes them in place; and what is gathered has to be written into the model's parameters"
)
_FROZEN = "frozen parameters change, too, for AdamW makes all that it has smaller: leave them out, they get no shard"
_EMPTY = "nothing was sent, and nothing changed: was params a generator that was empty the second time? list(params)"
_AGAIN = "the shards' gradients are zeros when the optimizer steps: does step() reduce again, as in Stage1? Write one without"
_HALF = "each rank has the new values of its own shard only: gather those of the others"
_STEPS = [[1], [2], [0]]  # batches; the layer `detour` is used on rank 1, on all but rank 0, on no rank
_SHORT = [[2], [1]]
_ACCUMULATED = [[2, 3], [1, 5]]  # two backward passes a step; in the first step, only the first uses `detour`


@own.checked
def _stage1(stage, watch: Watch, optimizer_class=torch.optim.AdamW, settings=None, batches=_STEPS) -> Tensors:
    model = Net()
    watch.follow(model)
    kind, states = _recorded(optimizer_class)
    optimizer = made(stage, watch, ONE, ("step", "zero_grad"), model.parameters(), kind, **(settings or ADAMW))
    for (batch,) in batches:
        watch.mark("backward")
        loss = loss_of(model, dist.get_rank(), batch)
        loss.backward()
        _step(optimizer, watch)
        _weigh(watch, states)
    return toy.weights(model)


def _recorded(optimizer_class: type[torch.optim.Optimizer]) -> tuple[type, Callable[[], int]]:
    """The class, and a function that says how many bytes of states all of its optimizers have, counters apart."""
    optimizers = []

    class Recorded(optimizer_class):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            optimizers.append(self)

    Recorded.__name__ = optimizer_class.__name__
    return Recorded, lambda: sum(map(_state_bytes, optimizers[-1:]))


def _state_bytes(optimizer: torch.optim.Optimizer) -> int:
    named = [item for state in optimizer.state.values() for item in state.items()]
    return sum(value.nbytes for name, value in named if isinstance(value, torch.Tensor) and name != "step")


def _weigh(watch: Watch, states: Callable[[], int]) -> None:
    """Two numbers: all live bytes, and those of the optimizer's states."""
    watch.weigh()
    watch.held.append(states())


def _step(optimizer, watch: Watch) -> None:
    watch.mark("step")
    optimizer.step()
    watch.mark("zero_grad")
    optimizer.zero_grad()
    watch.mark("over")


def _with_sgd(stage, watch: Watch) -> Tensors:
    return _stage1(stage, watch, torch.optim.SGD, SGD, _SHORT)


@own.checked
def _stage2(stage, watch: Watch) -> Tensors:
    model = Net()
    watch.follow(model)
    kind, states = _recorded(torch.optim.AdamW)
    optimizer = made(stage, watch, TWO, ("step", "zero_grad", "finish"), model.parameters(), kind, **ADAMW)
    for batches in _ACCUMULATED:
        for batch in batches:
            _backward(model, optimizer, batch, watch)
        _weigh(watch, states)
        _step(optimizer, watch)
        _weigh(watch, states)
    return toy.weights(model)


def _backward(model: Net, optimizer, batch: int, watch: Watch) -> None:
    loss = loss_of(model, dist.get_rank(), batch)
    with watch.peak():
        watch.mark("backward")
        loss.backward()
    watch.mark("finish")
    optimizer.finish()
    watch.mark("finished")


@cache
def stage1_cases(n: int) -> list[Script]:
    """Three steps of AdamW; two of SGD with momentum."""
    adamw, sgd = _training(n, _STEPS), _training(n, _SHORT, optimizer=oracle.Momentum, settings=tuple(SGD.items()))
    return [
        Script(n, _stage1, adamw.weights(), lambda: _wrong(adamw), _must(n, 3), "in three steps of AdamW"),
        Script(n, _with_sgd, sgd.weights(), lambda: _wrong(sgd), _must(n, 2, states=1), "in two steps of SGD"),
    ]


@cache
def stage2_cases(n: int) -> list[Script]:
    """Two steps of two backward passes each."""
    training = _training(n, _ACCUMULATED)
    note = "with two backward passes a step"
    must = _must(n, 2, 2)
    return [Script(n, _stage2, training.weights(), lambda: _wrong_accumulated(training), must, note)]


def _training(n: int, batches: list[list[int]], **kind) -> Training:
    return Training(n, Net, loss_of, batches, **kind)


def _must(n: int, steps: int, passes: int = 1, states: int = 2) -> Must:
    """passes: backward passes a step; states: tensors as large as its parameter that the optimizer keeps."""
    learning = [(name, p) for name, p in Net().named_parameters() if p.requires_grad]
    rows = tuple(padded_bytes(p, n) for _, p in learning)
    shards = tuple(row // n for row in rows)
    held = Bytes(model=sum(p.nbytes for p in Net().parameters()), whole=sum(rows), shards=sum(shards), states=states)
    return Must(
        gathers=shards * steps,
        reduces=rows * steps * passes,
        once="for each parameter in each step",
        reduced="for each parameter in each step" if passes == 1 else "for each parameter in each backward",
        frozen=padded_bytes(Net().frozen.weight, n) // n,
        names=tuple((name, row) for (name, _), row in zip(learning, rows, strict=True))[::-1],
        gathers_anew="gather each parameter once a step, after the optimizer's",
        quiet="step" if passes > 1 else "",
        held=held,
    )


def _wrong(right: Training) -> Iterator[Wrong]:
    def when(hint: str, **differs) -> Wrong:
        return Wrong(hint, replace(right, **differs).weights())

    n, last = right.n, right.n - 1
    yield when(UNCHANGED, shown="first")
    yield when(BEFORE, shown="before")
    yield when(_HALF, shown="own")
    yield when(SUM, combine=oracle.scaled(n))
    yield when(TWICE, combine=oracle.scaled(1 / n))
    yield when(OWN, combine=oracle.own)
    yield when(FORGOTTEN, combine=oracle.never_forgotten())
    yield when(KEPT, combine=oracle.never_dropped())
    yield when(_FROZEN, frozen_too=True)
    yield when("the padding of a gradient is at the front; it comes at the end, as that of shards", combine=oracle.moved)
    for combine in (oracle.of_users, oracle.left_none):
        yield when(f"a rank without a gradient counts as one with zeros: {NONE}", combine=combine)
    for rank in range(n):
        padded = ", which are those with padding in them: zeros there stay zeros by themselves" if rank == last else ""
        yield when(f"rank {rank}'s shards never learn{padded}", learns=_all_but(rank))
    yield when("each step begins with new optimizer states: make the optimizer once", anew=True)
    yield when("the optimizer has settings of its own: hand **kwargs on to optimizer_class", settings=())
    rate = (("lr", dict(right.settings)["lr"]),)
    yield when("the optimizer has more settings than lr: hand **kwargs on to optimizer_class", settings=rate)
    other = "that is another optimizer: make one of optimizer_class, with **kwargs"
    yield when(other, optimizer=oracle.AdamW, settings=rate)


def _all_but(still: int) -> Callable[[int, str], bool]:
    return lambda rank, name: rank != still


def _wrong_accumulated(right: Training) -> Iterator[Wrong]:
    def when(hint: str, combine) -> Wrong:
        return Wrong(hint, replace(right, combine=combine).weights())

    adds = "a step's backward passes add up: a mean that arrives is added to what the shard's gradient is already"
    yield when(f"only the last backward pass counts; {adds}", oracle.last_only)
    yield when(f"only the first backward pass counts; {adds}", oracle.first_only)
    dropped = (
        "what has left counts again in the next backward: once it has left, drop the whole gradient, parameter.grad = None"
    )
    yield when(dropped, oracle.running)
    yield when(_AGAIN, lambda parts, step: [{}] * right.n)
    yield when("the sum over the backward passes is asked for, not their mean", oracle.scaled(1 / len(right.batches[0])))
    yield from _wrong(right)


def _values(task: ZeroTask, trial: Trial) -> Verdict:
    """As usual, and where nothing changed, by whether anything was gathered."""
    verdict = judge_values(task, trial)
    if verdict.hint == UNCHANGED:
        gathered = any(seen.calls("all_gather") for seen in trial.answers)
        reduced = any(seen.calls("reduce_scatter", "all_reduce") for seen in trial.answers)
        return verdict._replace(hint=_UNKNOWN if gathered else _GATHER if reduced else _EMPTY)
    return verdict


@dataclass(frozen=True)
class Stage1(ZeroTask):
    aspects: ClassVar[tuple[Aspect, ...]] = (
        Aspect("trains like one process on the whole batch", 0.2, _values, each_world=True),
        Aspect("reduces each gradient and gathers each parameter once a step", 0.13, traffic.traffic),
        Aspect("holds optimizer states of its shards only", 0.67, memory.stage1),
    )


@dataclass(frozen=True)
class Stage2(ZeroTask):
    aspects: ClassVar[tuple[Aspect, ...]] = (
        Aspect("trains like one process on the whole batch", 0.2, _values, each_world=True),
        Aspect("reduces each gradient once a backward", 0.1, traffic.traffic),
        Aspect("reduces a gradient as soon as its turn comes", 0.35, leaving.order),
        Aspect("holds gradients of its shards only", 0.35, memory.stage2),
    )
