"""The task Prefetch: a schedule by which the next unit is on its way while one computes."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from math import nan
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import nn

from manyranks.grade.scripts import Script, Tensors, Wrong, judge_values
from manyranks.grade.trial import Trial
from manyranks.grade.verdict import Aspect, Verdict
from manyranks.grade.watch import Watch
from manyranks.grade.zero import models, schedules, traffic
from manyranks.grade.zero.driver import Sharded
from manyranks.grade.zero.oracle import ADAMW, Training
from manyranks.grade.zero.task import ZeroTask, made
from manyranks.grade.zero.traffic import Must
from manyranks.grade.zero.units import named, oracle_of

CALL = "Prefetch(units)"
_METHODS = ("before_forward", "after_forward", "before_backward", "after_backward")
_STEPS = [[0], [1]]
_ABSENT = "a layer computed while its parameters were not there: start() and wait() for unit k before layer k computes"
_STALE = "old parameters compute: a unit that is still whole when the optimizer steps is not gathered again; free it before"


class _Unit:
    """One layer's, which notes what the schedule does with it. While it is not whole, its parameters are NaN."""

    def __init__(self, k: int, layer: nn.Module, watch: Watch):
        self._k, self._watch, self._n = k, watch, dist.get_world_size()
        self._parameters = list(layer.parameters())
        self.shards = [self._shard(p) for p in self._parameters]
        self._coming: list[tuple] = []
        self._there = False
        self._spoil()

    def _shard(self, p: nn.Parameter) -> nn.Parameter:
        return nn.Parameter(models.pieces(p, self._n)[dist.get_rank()], requires_grad=p.requires_grad)

    def _spoil(self) -> None:
        for p in self._parameters:
            p.data.fill_(nan)

    def start(self) -> None:
        self._watch.mark(f"start {self._k}")
        if not self._there:
            for p, shard in zip(self._parameters, self.shards, strict=True):
                row = shard.new_empty(len(shard) * self._n)
                self._coming.append((p, row, dist.all_gather_single(row, shard.detach(), async_op=True)))
        self._there = True

    def wait(self) -> None:
        self._watch.mark(f"wait {self._k}")
        self._arrive()

    def _arrive(self) -> None:
        for p, row, work in self._coming:
            work.wait()
            p.data.copy_(row[: p.numel()].view(p.shape))
        self._coming.clear()

    def free(self) -> None:
        self._arrive()
        self._watch.mark(f"free {self._k}")
        self._spoil()
        self._there = False

    def reduce(self) -> None:
        self._watch.mark(f"reduce {self._k}")
        for p, shard in zip(self._parameters, self.shards, strict=True):
            if p.requires_grad:
                row = torch.cat(models.pieces(torch.zeros_like(p) if p.grad is None else p.grad, self._n)) / self._n
                grad = torch.empty_like(shard)
                dist.reduce_scatter_single(grad, row)
                shard.grad = grad
                p.grad = None


class _Noted(Sharded):
    """The driver; the watch hears when a layer computes."""

    def __init__(self, layers: nn.ModuleList, schedule, watch: Watch):
        super().__init__(layers, schedule)
        for k, layer in enumerate(layers):
            layer.register_forward_pre_hook(lambda *_, k=k: watch.mark(f"forward {k}"))
        self._watch = watch

    def arrived(self, k, grad):
        super().arrived(k, grad)
        self._watch.mark(f"backward {k}")


def _training(schedule, watch: Watch) -> Tensors:
    rank, layers = dist.get_rank(), models.layers()
    units = [_Unit(k, layer, watch) for k, layer in enumerate(layers)]
    shards = [shard for unit in units for shard in unit.shards]
    optimizer = torch.optim.AdamW(shards, **ADAMW)
    model = _Noted(layers, made(schedule, watch, CALL, _METHODS, units), watch)
    for (batch,) in _STEPS:
        models.shifts(layers, rank, batch)
        models.loss(model(models.tokens(rank, batch)), rank, batch).backward()
        model.finish()
        watch.mark("step")
        optimizer.step()
        optimizer.zero_grad()
    return _trained(layers, shards)


def _trained(layers: nn.ModuleList, shards: list[nn.Parameter]) -> Tensors:
    """The shards without padding."""
    rank, n, found = dist.get_rank(), dist.get_world_size(), {}
    for (name, p), shard in zip(layers.named_parameters(), shards, strict=True):
        first, end = models.bounds(p.shape, n)[rank]
        found[name] = shard.detach()[: end - first]
    return named(found)


@cache
def cases(n: int) -> list[Script]:
    """Two steps with units of the check's own."""
    return [Script(n, _training, _shards(oracle_of(n, _STEPS)), lambda: _wrong(n), _must(n), "in two steps")]


def _shards(training: Training) -> list[Tensors]:
    return [named(shards) for shards in training.both()[1]]


def _wrong(n: int) -> Iterator[Wrong]:
    right = oracle_of(n, _STEPS)
    never = "nothing learns: after_backward(k) calls reduce() of unit k, which gives the shards their gradients"
    yield Wrong(never, _shards(replace(right, combine=lambda parts, step: [{}] * n, learns=lambda rank, name: False)))
    yield Wrong(_STALE, _shards(replace(right, shown="first")))


def _must(n: int) -> Must:
    """The last unit is gathered in forward only."""
    layers = models.layers()
    rows = [[models.padded_bytes(p, n) for p in layer.parameters()] for layer in layers]
    learning = [models.padded_bytes(p, n) for p in layers.parameters() if p.requires_grad]
    once = [row // n for unit in rows for row in unit]
    twice = [row // n for unit in rows[:-1] for row in unit]
    return Must(
        gathers=tuple(once + twice) * len(_STEPS),
        reduces=tuple(learning) * len(_STEPS),
        once="for each parameter in forward, and one in backward but for the last unit",
        reduced="for each parameter in each backward",
        each="a unit that was freed is gathered again, and after_backward(k) reduces unit k once",
        gathers_anew="the last unit stays whole between forward and backward: do not free it after forward",
    )


def _values(task: ZeroTask, trial: Trial) -> Verdict:
    verdict = judge_values(task, trial)
    absent = any(torch.isnan(t).any() for seen in trial.answers for t in seen.tensors.values())
    if absent and not verdict.ok:
        return verdict._replace(hint=_ABSENT)
    if not verdict.ok and not verdict.hint and not schedules.few(task, trial).ok:
        return verdict._replace(hint=_STALE)
    return verdict


def _told(judge: Callable[["PrefetchTask", Trial], Verdict]) -> Callable[["PrefetchTask", Trial], Verdict]:
    """The judge; where a slip explains what is wrong, that is the hint."""

    def told(task: "PrefetchTask", trial: Trial) -> Verdict:
        verdict = judge(task, trial)
        hint = "" if verdict.ok else schedules.slip(trial)
        return verdict._replace(hint=hint) if hint else verdict

    return told


@dataclass(frozen=True)
class PrefetchTask(ZeroTask):
    guesses: ClassVar[tuple[tuple[str, str], ...]] = (
        (r"(waits in|to its|called) (all_gather|reduce_scatter)", "does the schedule do something on one rank only?"),
    )
    aspects: ClassVar[tuple[Aspect, ...]] = (
        Aspect("trains like one process on the whole batch", 0.2, _told(_values), each_world=True),
        Aspect("gathers no unit more often than it must", 0.13, _told(traffic.traffic)),
        Aspect("has the next unit on its way while one computes", 0.37, _told(schedules.ahead)),
        Aspect("has two units at a time, and no third", 0.3, _told(schedules.two)),
    )
