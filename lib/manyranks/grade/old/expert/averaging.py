"""The task average: each gradient over the ranks that have its parameter, in as few messages as possible."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from manyranks.grade.old.context.task import untouched
from manyranks.grade.old.context.travel import FORWARD
from manyranks.grade.old.expert.ready import own
from manyranks.grade.old.expert.task import ExpertTask, values
from manyranks.grade.old.expert.traffic import Must, Sent, messages
from manyranks.grade.old.scripts import Scene, Tensors, Wrong
from manyranks.grade.old.tensor.layout import Layout, drawn
from manyranks.grade.old.tensor.task import gradient, slip, telling
from manyranks.grade.old.trial import Trial
from manyranks.grade.old.verdict import Aspect
from manyranks.measure.journal import Stopped

_DENSE, _EXPERTS = ((3, 2), (5,), (2, 2, 2)), ((4, 3), (2, 4), (3,))
_OFF_BY_E = (
    "expert gradients are the mean over their replicas there, e times too large: an expert has seen e ranks' tokens, and the "
    "mean is over N losses. Divide by N, not by the number of replicas"
)
_OVER_ALL = (
    "expert gradients are averaged over all ranks: other ranks have other experts. Sum over the replicas only, group=replicas"
)
_OWN_EXPERTS = "expert gradients are not summed over the replicas: each has seen other tokens"
_EXPERTS_SUM = "expert gradients are sums: the mean of N losses takes a division by N"
_EXPERTS_TWICE = "expert gradients are divided by N and by another number: the sum over e ranks' losses is divided by N, once"
_ALL_TWICE = "all gradients are divided twice: once by N is enough, and ReduceOp.AVG divides, too"
_SUMS = "all gradients are sums: the mean of N losses takes a division by N"
_DENSE_SUM = "dense gradients are sums: the mean of N losses takes a division by N"
_DENSE_REPLICAS = "dense gradients are averaged over the replicas only: all N ranks have these parameters alike"
_DENSE_OWN = "dense gradients are this rank's own: all N ranks have these parameters alike"
_DENSE_BY_REPLICAS = "dense gradients are divided by the number of replicas: they are a sum over all N ranks"
_UNTOUCHED = "the gradients are as they were: put what you computed into each parameter's .grad"
_MIXED = "the gradients are mixed up: cut the flat row again in the order and the sizes in which it was put together"
_NONE_SKIPPED = (
    "a parameter whose .grad is None counts as 0, and has a gradient in the end: its replicas may have one. Who skips it sends "
    "fewer numbers than the others"
)
_ONE_EACH = "one call for each parameter: put all gradients into one flat row, and cut it again afterwards"
_GATHERED = "no rank needs each of the others' gradients, only their sum: dist.all_reduce"
_TO_ALL = "gradients of experts go to all ranks there: only the replicas have the same experts, group=replicas"
_NO_EXPERTS = "the experts' gradients have to be summed over the replicas"
_NO_DENSE = "the dense gradients have to be summed over all ranks"
_MESSAGES = "an all-reduce is one call, dist.all_reduce, not a loop of messages"
_REPLICAS = "replicas is the process group of the ranks that have the same experts: dist.all_reduce(flat, group=replicas)"
_UNEXPLAINED = "dense: the sum over all ranks ÷ N; experts: the sum over the replicas ÷ N; None counts as 0"


@dataclass(frozen=True)
class Ranks:
    """n ranks, with e in an expert-parallel group; lost: which expert's gradient is None, of this rank."""

    n: int
    e: int
    lost: tuple[int, int] = (0, 1)

    @property
    def note(self) -> str:
        many = f"{self.n // self.e} replicas" if self.n > self.e else "1 replica"
        return f"e = {self.e}, {many} of each expert"

    @cached_property
    def layout(self) -> Layout:
        """The replicas."""
        return Layout(self.n, self.n // self.e)

    def replicas(self, rank: int) -> list[int]:
        """The ranks with the same experts."""
        return next(ranks for ranks in self.layout.groups if rank in ranks)

    def dense(self, rank: int) -> list[Tensor]:
        """Gradients on this rank."""
        return [drawn(20 * rank + i, *shape) for i, shape in enumerate(_DENSE)]

    def experts(self, rank: int) -> list[Tensor]:
        """Gradients on this rank; 0 where there is none."""
        found = [drawn(500 + 20 * rank + i, *shape) for i, shape in enumerate(_EXPERTS)]
        if rank == self.lost[0]:
            found[self.lost[1]] = torch.zeros_like(found[self.lost[1]])
        return found


def _summed(of: Callable[[int], list[Tensor]], ranks: list[int], by: float) -> list[Tensor]:
    return [sum(parts) / by for parts in zip(*map(of, ranks), strict=True)]


def _named(dense: list[Tensor], experts: list[Tensor]) -> Tensors:
    names = {f"the gradient of dense[{i}]": one for i, one in enumerate(dense)}
    return names | {f"the gradient of experts[{i}]": one for i, one in enumerate(experts)}


def results(ranks: Ranks) -> list[Tensors]:
    """By rank."""
    return [_named(*_right(ranks, rank)) for rank in range(ranks.n)]


def _right(ranks: Ranks, rank: int) -> tuple[list[Tensor], list[Tensor]]:
    every = [*range(ranks.n)]
    return _summed(ranks.dense, every, ranks.n), _summed(ranks.experts, ranks.replicas(rank), ranks.n)


def _of_experts(ranks: Ranks) -> list[tuple[str, Callable[[int], list[Tensor]]]]:
    n, e, every = ranks.n, ranks.e, [*range(ranks.n)]
    return [
        (_OFF_BY_E, lambda rank: _summed(ranks.experts, ranks.replicas(rank), n / e)),
        (_OVER_ALL, lambda rank: _summed(ranks.experts, every, n)),
        (_OVER_ALL, lambda rank: _summed(ranks.experts, every, n / e)),
        (_EXPERTS_SUM, lambda rank: _summed(ranks.experts, ranks.replicas(rank), 1)),
        (_OWN_EXPERTS, lambda rank: _summed(ranks.experts, [rank], n)),
        (_OWN_EXPERTS, lambda rank: _summed(ranks.experts, [rank], e)),
        (_OWN_EXPERTS, lambda rank: _summed(ranks.experts, [rank], n / e)),
        (_OWN_EXPERTS, lambda rank: _summed(ranks.experts, [rank], 1)),
        (_EXPERTS_TWICE, lambda rank: _summed(ranks.experts, ranks.replicas(rank), n * e)),
        (_EXPERTS_TWICE, lambda rank: _summed(ranks.experts, ranks.replicas(rank), n * n / e)),
        (_EXPERTS_TWICE, lambda rank: _summed(ranks.experts, ranks.replicas(rank), n * n)),
    ]


def _of_dense(ranks: Ranks) -> list[tuple[str, Callable[[int], list[Tensor]]]]:
    n, e, every = ranks.n, ranks.e, [*range(ranks.n)]
    return [
        (_DENSE_SUM, lambda rank: _summed(ranks.dense, every, 1)),
        (_DENSE_OWN, lambda rank: ranks.dense(rank)),
        (_DENSE_OWN, lambda rank: _summed(ranks.dense, [rank], n)),
        (_DENSE_REPLICAS, lambda rank: _summed(ranks.dense, ranks.replicas(rank), n / e)),
        (_DENSE_REPLICAS, lambda rank: _summed(ranks.dense, ranks.replicas(rank), n)),
        (_DENSE_BY_REPLICAS, lambda rank: _summed(ranks.dense, every, n / e)),
    ]


def _wrong(ranks: Ranks, right: list[Tensors]) -> Iterator[Wrong]:
    """By all gradients; then by those of experts where the dense ones are right, and the other way round."""
    n = ranks.n
    groups = [ranks.replicas(rank) for rank in range(n)]
    yield Wrong(_SUMS, [{name: one * n for name, one in own.items()} for own in right])
    yield Wrong(_ALL_TWICE, [{name: one / n for name, one in own.items()} for own in right])
    again = [_named(_summed(ranks.dense, [*range(n)], n * n), _summed(ranks.experts, same, n * len(same))) for same in groups]
    yield Wrong(_ALL_TWICE, again)
    yield Wrong(_UNTOUCHED, [_named(ranks.dense(rank), ranks.experts(rank)) for rank in range(n)])
    every = [_right(ranks, rank) for rank in range(n)]
    turned = [_named(_recut(dense), _recut(experts)) for dense, experts in every]
    yield Wrong(_MIXED, turned)
    yield Wrong(_MIXED, [_named(_begun_again(dense), _begun_again(experts)) for dense, experts in every])
    for hint, experts in _of_experts(ranks):
        yield Wrong(hint, [_named(every[rank][0], experts(rank)) for rank in range(n)])
    for hint, dense in _of_dense(ranks):
        yield Wrong(hint, [_named(dense(rank), every[rank][1]) for rank in range(n)])
    for hint, experts in _of_experts(ranks):
        yield Wrong(hint, [_named([], experts(rank)) for rank in range(n)])


def _recut(gradients: list[Tensor]) -> list[Tensor]:
    """Cut again in the opposite order of sizes."""
    flat, at, found = torch.cat([one.flatten() for one in gradients]), 0, {}
    for i in reversed(range(len(gradients))):
        found[i] = flat[at : at + gradients[i].numel()].view_as(gradients[i])
        at += gradients[i].numel()
    return [found[i] for i in range(len(gradients))]


def _begun_again(gradients: list[Tensor]) -> list[Tensor]:
    """Each cut from the beginning of the flat row."""
    flat = torch.cat([one.flatten() for one in gradients])
    return [flat[: one.numel()].view_as(one) for one in gradients]


def _parameters(gradients: list[Tensor], seed: int) -> list[nn.Parameter]:
    found = [nn.Parameter(drawn(seed + i, *one.shape)) for i, one in enumerate(gradients)]
    for parameter, one in zip(found, gradients, strict=True):
        parameter.grad = one.clone()
    return found


def _run(ranks: Ranks, function: Callable, watch) -> Tensors:
    rank = dist.get_rank()
    group = ranks.layout.place().group or dist.group.WORLD
    dense, experts = _parameters(ranks.dense(rank), 40), _parameters(ranks.experts(rank), 60)
    if rank == ranks.lost[0]:
        experts[ranks.lost[1]].grad = None
    before = [one.detach().clone() for one in (*dense, *experts)]
    with own(watch):
        watch.mark(FORWARD)
        function(dense, experts, group)
    names = [*(f"dense[{i}]" for i in range(len(dense))), *(f"experts[{i}]" for i in range(len(experts)))]
    for name, parameter in zip(names, (*dense, *experts), strict=True):
        if parameter.grad is None:
            slip(watch, f"{name} has no gradient", _NONE_SKIPPED)
        elif parameter.grad.shape != parameter.shape:
            raise Stopped(f"the gradient of {name} has the shape {list(parameter.grad.shape)}", _MIXED)
    untouched(watch, dict(zip(names, (*dense, *experts), strict=True)), dict(zip(names, before, strict=True)))
    return _named([gradient(one) for one in dense], [gradient(one) for one in experts])


@cache
def cases(n: int) -> list[Scene]:
    """Experts with replicas, and with none; one has no token on rank 0."""
    layouts = {2: (1, 2), 3: (1, 3), 4: (2, 4)}
    return [_scene(Ranks(n, e)) for e in layouts[n]]


def _scene(ranks: Ranks) -> Scene:
    right, n, r = results(ranks), ranks.n, ranks.n // ranks.e
    of_dense, of_experts = (8 * sum(torch.Size(shape).numel() for shape in shapes) for shapes in (_DENSE, _EXPERTS))
    calls = [Sent("all_reduce", of_dense, "float64", n)]
    calls += [Sent("all_reduce", of_experts, "float64", r)] if r > 1 else []
    must, wrong = Must([calls] * n, [[]] * n), partial(_wrong, ranks, right)
    return Scene(n, partial(_run, ranks), right, lambda: telling(right, wrong()), must, ranks.note)


@dataclass(frozen=True)
class Averaging(ExpertTask):
    unexplained: ClassVar[str] = _UNEXPLAINED
    instead: ClassVar[dict[str, str]] = {
        **dict.fromkeys(("all_gather", "all_to_all", "broadcast", "reduce", "reduce_scatter", "gather"), _GATHERED),
        **dict.fromkeys(("send", "recv"), _MESSAGES),
    }
    advice: ClassVar[tuple[tuple[str, str], ...]] = (
        (r"'NoneType' object has no attribute|of type NoneType|NoneType found|but got NoneType|not NoneType", _NONE_SKIPPED),
        (r"bytes to its all_reduce", _NONE_SKIPPED),
        (r"[Gg]roup.*(not part|not a member|invalid)|Invalid rank|not registered", _REPLICAS),
        *ExpertTask.advice,
    )
    aspects: ClassVar[tuple[Aspect, ...]] = (
        Aspect("each gradient is that of the mean of all losses", 0.55, values, each_world=True),
        Aspect("sums dense gradients over all ranks, and experts' over their replicas only, once each", 0.45, messages),
    )

    def accepts(self, got: list[Sent], right: list[Sent]) -> bool:
        """In any order, and together where all ranks are replicas."""
        whole = [right[0]._replace(bytes=sum(call.bytes for call in right))] if right else []
        return sorted(got) == sorted(right) or (got == whole and {call.ranks for call in right} == {whole[0].ranks})

    def why(self, trial: Trial, rank: int, phase: str, got: list[Sent], right: list[Sent]) -> str:
        """Experts to all ranks, too many calls, or too few."""
        n, dense = trial.case.n, right[0].bytes if right else 0
        if {call.op for call in got} - {"all_reduce"}:
            return super().why(trial, rank, phase, got, right)
        if any(call.dtype != "float64" for call in got):
            return super().why(trial, rank, phase, got, right)
        sent = {ranks: sum(call.bytes for call in got if call.ranks == ranks) for ranks in {c.ranks for c in [*got, *right]}}
        needed = {ranks: sum(call.bytes for call in right if call.ranks == ranks) for ranks in sent}
        if sent == needed:
            return _ONE_EACH
        if sent.get(n, 0) > max(needed.get(n, 0), dense):
            return _TO_ALL
        return _NO_DENSE if sent.get(n, 0) < dense else _NO_EXPERTS

    def better(self, trial: Trial, hint: str) -> str:
        """What was sent may explain what no known mistake does."""
        return hint or messages(self, trial).hint
