"""The tasks cut and average_in_buckets: which gradients travel together, and one call for each bucket."""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import nn

from manyranks.grade.check import Task
from manyranks.grade.data_parallel import toy, traffic
from manyranks.grade.data_parallel.averages import DETOUR, OWN, SUM, TWICE, times, without_detour, without_none
from manyranks.grade.data_parallel.toy import Toy, loss_of
from manyranks.grade.data_parallel.traffic import Travel
from manyranks.grade.journal import Stopped
from manyranks.grade.scripts import Script, Tensors, Wrong, values
from manyranks.grade.trial import Trial
from manyranks.grade.verdict import Aspect, Verdict
from manyranks.grade.watch import Watch

FIRST, CAP = 300, 10_000  # bytes: of the first bucket, and of the others


def _cutting(function, watch: Watch) -> Tensors:
    parameters = list(Toy(0).parameters())
    numbers = {id(p): k for k, p in enumerate(parameters)}
    found = {}
    for name, (first, cap) in _LIMITS.items():
        buckets = function(list(parameters), first, cap)
        if not isinstance(buckets, list) or not all(isinstance(b, list) and all(id(p) in numbers for p in b) for b in buckets):
            raise Stopped(f"cut returned {type(buckets).__name__}", "return a list of lists of the parameters themselves")
        found[name] = _coded([[numbers[id(p)] for p in bucket] for bucket in buckets])
    return found


_LIMITS = {"usual": (FIRST, CAP), "exact": (384, 384 + 48 * 48 * 8), "large": (10**6, 10**6), "tiny": (1, 1)}


def _coded(buckets: list[list[int]]) -> torch.Tensor:
    """The numbers of the parameters, with −1 after each bucket."""
    return torch.tensor([number for bucket in buckets for number in (*bucket, -1)])


def _decoded(code: torch.Tensor) -> list[list[str]]:
    names = [name for name, _ in Toy(0).named_parameters()]
    buckets: list[list[str]] = [[]]
    for number in code.tolist():
        if number < 0:
            buckets.append([])
        else:
            buckets[-1].append(names[number])
    return buckets[:-1]


def buckets(parameters: list[nn.Parameter], first: float, cap: float) -> list[list[nn.Parameter]]:
    """From the last parameter on; a bucket ends with the parameter that brings it to `cap` bytes, the first to `first`."""
    made: list[list[nn.Parameter]] = [[]]
    for parameter in reversed([p for p in parameters if p.requires_grad]):
        made[-1].append(parameter)
        if sum(p.nbytes for p in made[-1]) >= (first if len(made) == 1 else cap):
            made.append([])
    return [bucket for bucket in made if bucket]


def cut_cases(n: int) -> list[Script]:
    parameters = list(Toy(0).parameters())
    numbers = {id(p): k for k, p in enumerate(parameters)}
    right = {k: _coded([[numbers[id(p)] for p in b] for b in buckets(parameters, *v)]) for k, v in _LIMITS.items()}
    return [Script(n, _cutting, [right])]


def _cut_right(task: Task, trial: Trial) -> Verdict:
    for name, right in trial.case.expected[0].items():
        first, cap = _LIMITS[name]
        got, must = _decoded(trial.answers[0].tensors[name]), _decoded(right)
        if got != must:
            found = f"with first_bytes={first:,} and cap_bytes={cap:,}: {_unlike(got, must)}"
            return Verdict(False, found, _cut_hint(got, must))
    return Verdict(True)


def _unlike(got: list[list[str]], must: list[list[str]]) -> str:
    for k, right in enumerate(must):
        if k >= len(got):
            return f"{len(got)} buckets; right are {len(must)}"
        if got[k] != right:
            return f"bucket {k} has {', '.join(got[k]) or 'nothing'}; right is {', '.join(right)}"
    return f"{len(got)} buckets; right are {len(must)}"


def _cut_hint(got: list[list[str]], must: list[list[str]]) -> str:
    flat, right = [name for b in got for name in b], [name for b in must for name in b]
    if any(name.startswith("frozen") for name in flat):
        return "frozen parameters get no gradient: leave them out"
    if flat == right[::-1]:
        return "backward makes the last parameter's gradient first: go through them in reverse"
    if [] in got:
        return "an empty bucket would be an all-reduce of nothing"
    if flat == right[: len(flat)] and len(flat) < len(right):
        return "the last bucket is missing: it need not be full"
    if flat == right and len(must) > 1 and got[1:] == must[1:]:
        return "the first bucket has a limit of its own"
    if flat == right:
        return "a bucket is closed once it holds at least so many bytes, the parameter that reaches it included"
    return ""


@dataclass(frozen=True)
class Cut(Task):
    aspects: ClassVar[tuple[Aspect, ...]] = (Aspect("cuts as it should", 1.0, _cut_right, each_world=True),)
    sizes: ClassVar[tuple[int, ...]] = (1,)


def sizes(first: float = FIRST, cap: float = CAP) -> tuple[int, ...]:
    """Bytes of the buckets of a Toy."""
    return tuple(sum(p.nbytes for p in bucket) for bucket in buckets(list(Toy(0).parameters()), first, cap))


def names(first: float = FIRST, cap: float = CAP) -> tuple[tuple[str, ...], ...]:
    """The parameters of the buckets of a Toy."""
    model = Toy(0)
    named = {id(p): name for name, p in model.named_parameters()}
    return tuple(tuple(named[id(p)] for p in bucket) for bucket in buckets(list(model.parameters()), first, cap))


# ---- average_in_buckets


def _in_buckets(function, watch: Watch) -> Tensors:
    rank = dist.get_rank()
    model = Toy(0)
    loss_of(model, rank, 1).backward()
    mine = buckets(list(model.parameters()), FIRST, CAP)
    with watch.peak():
        function(mine)
    return toy.gradients(model)


def in_buckets_cases(n: int) -> list[Script]:
    """One step, in which only rank 1 uses the layer `detour`."""
    grads = [toy.own(Toy(0), [lambda m, r=r: loss_of(m, r, 1)]) for r in range(n)]
    right = toy.mean(grads)
    wrong = (
        Wrong(OWN, [without_none(mine) for mine in grads]),
        Wrong(SUM, [times(mine, n) for mine in right]),
        Wrong(TWICE, [times(mine, 1 / n) for mine in right]),
        Wrong(DETOUR, [without_detour(own, mine) for own, mine in zip(grads, right, strict=True)]),
    )
    must = Travel(names(), sizes(), model=Toy.bytes())
    return [Script(n, _in_buckets, right, wrong, must, "where only rank 1 uses the layer `detour`")]


@dataclass(frozen=True)
class InBuckets(Task):
    aspects: ClassVar[tuple[Aspect, ...]] = (
        values("averages over the ranks", 0.5),
        Aspect("makes one all-reduce a bucket, in order", 0.3, traffic.traffic),
        Aspect("holds one bucket's row at a time", 0.2, traffic.peak),
    )
