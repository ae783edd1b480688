"""The task cross_entropy: with a z-term, of logits whose tokens are dealt in turn; never all of them on one rank."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import ClassVar

import torch
from torch import Tensor

from manyranks.grade.old.compare import same, sizes
from manyranks.grade.old.scripts import Scene, Tensors, Wrong
from manyranks.grade.old.tensor import traffic
from manyranks.grade.old.tensor.layout import Layout, drawn
from manyranks.grade.old.tensor.losses import IGNORED, Slope, Way, gradients, loss
from manyranks.grade.old.tensor.memory import Made
from manyranks.grade.old.tensor.ready import READY, YOURSELF, own
from manyranks.grade.old.tensor.task import Must, TensorTask, gradient, telling, untouched, values
from manyranks.grade.old.tensor.traffic import Phases, Sent, reduced
from manyranks.grade.old.trial import Trial
from manyranks.grade.old.verdict import Aspect, Verdict
from manyranks.measure.journal import Stopped

_S, _B, _V, _Z, _SCALE = 9, 2, 61, 0.05, 3.0
_NEAR = 1e-6  # as good as float32
_OF_LOGITS = "the gradient of the logits"
_LARGEST = "largest"  # a mark
_RETURNS = "it returns the loss, a tensor without dimensions, the same on all ranks"
_NO_MAX = "exp overflows at 710 in float64: subtract the largest logit first, and add it to the logarithm again"
_OWN_MAX = (
    "each rank has subtracted its own largest logit, and sums of exponentials with different shifts do not add up: "
    "the maximum of all ranks first, by dist.ReduceOp.MAX"
)
_SUM_MAX = "exp overflows all the same: is the first all-reduce one of dist.ReduceOp.MAX? Without it, maxima are added up"
_OWN_SUM = "the sum of exponentials is only that of this rank's tokens: add the ranks' sums up before the logarithm"
_LOGS = "logarithms of parts do not add up to the logarithm of the sum: add up the exponentials first"
_OWN_TARGET = "a target's logit is on one rank: the others put in 0, and an all-reduce gives it to all"
_UNMASKED = (
    "every rank has taken a logit for every target, also for those that are not its own: target k is on rank k % t alone; the "
    "others put in 0"
)
_BLOCKS = "token k is number k // t on rank k % t, not in a block: not k − r·W on rank k // W"
_NO_TOKEN = "a target may be −100, which is no token, but −100 % t is a rank all the same: mask it before you look up a logit"
_COUNT_ALL = "the mean is over the targets that count: those of −100 are not among them"
_COUNT_OWN = "the mean is over all targets that count, of all ranks' tokens: every rank knows them"
_NOT_IGNORED = "where the target is −100, neither the logarithm nor the z-term counts"
_SUM = "that is the sum: divide by the number of targets that count"
_NO_Z = "the z-term is missing: z·(log Z)², for each target that counts"
_Z_SHIFTED = "the z-term is of the whole logarithm: add the maximum again before you square it"
_NOT_ADDED = "add the largest logit to the logarithm again"
_WIDTH = "where t does not divide V, some ranks have one more: do not count on V / t, but on the logits' own width"
_Z_LINEAR = "the z-term is the square of the logarithm"
_SUMMED_BACK = (
    "the gradient is t times too large: each rank has the same loss, and its own logits' gradient is whole without any sum"
)
_Z_GRADIENT = "the z-term has a gradient, too: with p the softmax, that of a logit is p·(1 + 2z·log Z), less 1 for the target"
_P_GRADIENT = "that is the softmax alone: the target's logit has 1 less, on the rank that has it"
_UPSTREAM = (
    "the loss was multiplied by a number: multiply by backward's argument, the gradient of the loss, which need not be 1"
)
_UNMASKED_GRADIENT = "the 1 is taken off on every rank: only the one that has the target takes it off"
_NOT_IGNORED_GRADIENT = "where the target is −100, the gradient is zero"
_OWN_P = "p is over all ranks' tokens: divide by the sum of all"
_PLACE_ZERO = (
    "[k = y] is on the rank that has y only, and nowhere where the target is −100: a place that stands in is no target"
)
_Z_SLOPE = "the z-term's gradient is p·2z·log Z"
_MAX_GRADIENT = "the shift cancels out, and has no gradient: take the maximum of logits.detach()"
_GRADIENT = "the gradient is (p·(1 + 2z·log Z) − [k = y]) / n, times the number that backward is given"
_LOSS = (
    "the loss is the mean of log Z − the target's logit + z·(log Z)² over the n targets that count, Z over all ranks' tokens"
)
_ORDER = "But the ranks have different ones: all ranks make their calls in the same order"
_COMPLETE = (
    "no tensor has more elements than this rank's logits: S·B·V/t. Exchange what is left of them after a sum or a maximum"
)
_THREE = (
    "three all-reduces of S·B numbers are enough: the largest logit, the sum of exponentials, the target's logit (the last two "
    "may go together)"
)
_BACK = "backward sends nothing: with the softmax's sum and maximum, each rank has all that its logits' gradient needs"
_GATHERED = "no rank needs the others' logits: only maxima and sums, of S·B numbers, are exchanged"


@dataclass(frozen=True)
class Batch:
    """Logits and targets. offset: what is added on ranks 0 and 2, and taken off on the others."""

    layout: Layout
    offset: float = 0.0

    def shards(self, number: int) -> list[Tensor]:
        """Each rank's logits, as leaves; their sizes differ where t does not divide V."""
        all_SBV = drawn(200 + number, _S, _B, _V) * 3
        t, shift = self.layout.t, self.offset
        return [(all_SBV[..., r::t] + shift * (1 - 2 * (r % 2))).clone().requires_grad_() for r in range(t)]

    def targets(self, number: int) -> Tensor:
        """Some of them ignored."""
        generator = torch.Generator().manual_seed(210 + number)
        targets_SB = torch.randint(_V, (_S, _B), generator=generator)
        targets_SB[-2:, 0] = targets_SB[0, 1] = IGNORED
        targets_SB[1:3, 1] = torch.tensor([_V - 1, _V - 2])  # the last ones of ranks, also of those that have one more
        return targets_SB


def _run(batch: Batch, function: Callable, watch) -> Tensors:
    watch.refuse(READY, YOURSELF)
    group, number, rank, _ = batch.layout.place()
    logits, targets = batch.shards(number)[rank], batch.targets(number)
    with Made() as made:
        watch.mark("forward")
        with own():
            result = function(logits, targets, _Z, group)
        if not isinstance(result, Tensor) or result.numel() != 1:
            raise Stopped(f"it returned {result!r:.60}", _RETURNS)
        if not result.requires_grad:
            raise Stopped(
                "the loss has no graph", "it has to lead back to logits: by autograd, or by a torch.autograd.Function"
            )
        watch.mark("backward")
        (result.reshape(()) * _SCALE).backward()
    watch.mark(f"{_LARGEST} {made.largest}")
    untouched(watch, "the logits", [logits.detach()], [batch.shards(number)[rank].detach()])
    untouched(watch, "the targets", [targets], [batch.targets(number)], "leave what you are given as it is: clone() it")
    return {"the loss": result.detach().clone().reshape(()), _OF_LOGITS: gradient(logits)}


def _results(batch: Batch, way: Way, number: int) -> list[Tensors]:
    found, targets = [], batch.targets(number)
    for rank in range(batch.layout.t):
        shards = batch.shards(number)
        result = loss(shards, targets, _Z, rank, way)
        (result * _SCALE).backward()
        found.append({"the loss": result.detach(), _OF_LOGITS: gradient(shards[rank])})
    return found


def _of_all(targets_SB: Tensor, rank: int, t: int) -> Tensor:
    return torch.tensor(targets_SB.numel())


_WAYS = [
    (_NO_MAX, Way(most=lambda all_SBV: torch.zeros_like(all_SBV[..., 0]))),
    (_OWN_SUM, Way(sums=lambda parts, rank: parts[rank])),
    (_LOGS, Way(sums=lambda parts, rank: torch.stack(parts).prod(0))),
    (_OWN_TARGET, Way(picked=lambda picker: picker.own_only())),
    (_UNMASKED, Way(picked=lambda picker: picker.unmasked())),
    (_UNMASKED, Way(picked=lambda picker: picker.unmasked(False))),
    (_BLOCKS, Way(picked=lambda picker: picker.in_blocks())),
    (_BLOCKS, Way(picked=lambda picker: picker.in_own_blocks())),
    (_WIDTH, Way(picked=lambda picker: picker.without_last(True))),
    (_WIDTH, Way(picked=lambda picker: picker.without_last(False))),
    (_COUNT_ALL, Way(count=_of_all)),
    (_COUNT_OWN, Way(count=lambda targets_SB, rank, t: ((targets_SB != IGNORED) & (targets_SB % t == rank)).sum())),
    (_SUM, Way(count=lambda targets_SB, rank, t: torch.tensor(1))),
    (_NO_Z, Way(z_of=lambda log_SB, shifted_SB: 0 * log_SB)),
    (_NOT_ADDED, Way(adds=False)),
    (_NOT_ADDED, Way(adds=False, z_of=lambda log_SB, shifted_SB: shifted_SB.square())),
    (_Z_SHIFTED, Way(z_of=lambda log_SB, shifted_SB: shifted_SB.square())),
    (_Z_LINEAR, Way(z_of=lambda log_SB, shifted_SB: log_SB)),
    (_NOT_IGNORED, Way(ignores=False)),
    (_NOT_IGNORED, Way(ignores=False, count=_of_all)),
    (_NOT_IGNORED, Way(ignores=False, picked=lambda picker: picker.of_those_that_count())),
    (_NOT_IGNORED, Way(ignores=False, count=_of_all, picked=lambda picker: picker.of_those_that_count())),
]


def _wrong(batch: Batch) -> Iterator[Wrong]:
    """By the loss, where that is wrong; else by the gradient."""
    layout, right = batch.layout, batch.layout.spread(partial(_results, batch, Way()))
    for hint, way in _WAYS:
        results = layout.spread(partial(_results, batch, way))
        yield Wrong(hint, [{"the loss": own["the loss"]} for own in results])
    own_max = layout.spread(partial(_own_maxima, batch))
    yield Wrong(_OWN_MAX, [{"the loss": own} for own in own_max])
    for hint, change in _GRADIENTS:
        grads = layout.spread(partial(_gradients, batch, change))
        yield Wrong(hint, [own | {_OF_LOGITS: grad} for own, grad in zip(right, grads, strict=True)])


def _own_maxima(batch: Batch, number: int) -> list[Tensor]:
    """Losses where each rank shifts by its own maximum, and the sums are added up."""
    shards, targets = [shard.detach() for shard in batch.shards(number)], batch.targets(number)
    summed = sum((shard - shard.amax(-1, keepdim=True)).exp().sum(-1) for shard in shards)
    ways = [Way(most=lambda _, own=shard: own.amax(-1), sums=lambda parts, rank: summed) for shard in shards]
    return [loss(shards, targets, _Z, rank, way) for rank, way in enumerate(ways)]


_GRADIENTS = [
    (_SUMMED_BACK, Slope(times=True)),
    (_Z_GRADIENT, Slope(z=0)),
    (_Z_SLOPE, Slope(z=1)),
    (_Z_SLOPE, Slope(z=-2)),
    (_OWN_P, Slope(own=True)),
    (_PLACE_ZERO, Slope(places=True)),
    (_PLACE_ZERO, Slope(places=True, ignores=False)),
    (_MAX_GRADIENT, Slope(largest=True)),
    (_P_GRADIENT, Slope(target=False)),
    (_UPSTREAM, Slope(scale=1 / _SCALE)),
    (_UNMASKED_GRADIENT, Slope(masked=False)),
    (_NOT_IGNORED_GRADIENT, Slope(ignores=False)),
]


def _gradients(batch: Batch, slope: Slope, number: int) -> list[Tensor]:
    return gradients([shard.detach() for shard in batch.shards(number)], batch.targets(number), _Z, _SCALE, slope)


@cache
def cases(n: int) -> list[Scene]:
    """Ordinary logits; and such as overflow, of 4 ranks in two pairs."""
    return [_scene(Batch(Layout(n, n)), "V = 61"), _scene(Batch(Layout(n, 2 if n == 4 else n), 900.0), "logits near ±900")]


def _scene(batch: Batch, note: str) -> Scene:
    layout, row = batch.layout, 8 * _S * _B
    small, both = reduced(row, layout.t), reduced(2 * row, layout.t)
    phases = Phases(((small, small, small), (small, both)), ((),))
    must = Must(layout, phases, row * -(-_V // layout.t))
    right = layout.spread(partial(_results, batch, Way()))
    return Scene(layout.n, partial(_run, batch), right, lambda: telling(right, _wrong(batch)), must, f"{layout}{note}")


def _values(task: "Vocabulary", trial: Trial) -> Verdict:
    """As usual; exponentials also overflow where a maximum is exchanged, but as a sum."""
    verdict = values(task, trial)
    exchanged = sum(size for _, size, _ in traffic.called(trial, 0, "forward"))
    if verdict.hint == _NO_MAX and exchanged >= sum(size for _, size, _ in trial.case.must.phases.forward[0]):
        return verdict._replace(hint=_SUM_MAX)
    return verdict._replace(hint=_fallback(trial)) if verdict.hint == task.unexplained else verdict


def _fallback(trial: Trial) -> str:
    """By what is wrong, where no known mistake explains it, and the calls are right."""
    pairs = list(zip([seen.tensors for seen in trial.answers], trial.case.expected, strict=True))
    if not all(same(got["the loss"], right["the loss"], _NEAR) for got, right in pairs):
        groups = [[pairs[rank][0]["the loss"] for rank in ranks] for ranks in trial.case.must.layout.groups]
        return _LOSS if all(same(own, losses[0], _NEAR) for losses in groups for own in losses) else f"{_LOSS}. {_ORDER}"
    found = [(got[_OF_LOGITS], right[_OF_LOGITS]) for got, right in pairs]
    if any(got.isnan().any() for got, _ in found):
        return _MAX_GRADIENT
    if all(same(got.double() * _SCALE, right, _NEAR) for got, right in found):
        return _UPSTREAM
    return _GRADIENT


def _largest(task: "Vocabulary", trial: Trial) -> Verdict:
    """No tensor larger than a rank's logits."""
    right = trial.case.must.limit
    for rank, seen in enumerate(trial.answers):
        got = max(int(event.what.split()[1]) for event in seen.events if event.what.startswith(_LARGEST))
        if got > right:
            there, here = sizes(got, right)
            return Verdict(False, f"rank {rank} made a tensor of {there}; the largest logits of a rank have {here}", _COMPLETE)
    return Verdict(True)


@dataclass(frozen=True)
class Vocabulary(TensorTask):
    unexplained: ClassVar[str] = _LOSS
    advice: ClassVar[tuple[tuple[str, str], ...]] = (
        (r"index -\d+ is out of bounds", _NO_TOKEN),
        (r"is out of bounds|index out of range", _BLOCKS),
        *TensorTask.advice,
    )
    aspects: ClassVar[tuple[Aspect, ...]] = (
        Aspect("loss and gradients are right", 0.4, _values, each_world=True),
        Aspect("makes no tensor larger than a rank's logits", 0.4, _largest),
        Aspect("makes three small all-reduces, and none in backward", 0.2, traffic.traffic),
    )

    def why_traffic(self, phase: str, got: dict[str, list[Sent]], phases: Phases) -> str:
        if phase == "backward":
            return _BACK
        row = min(size for _, size, _ in phases.forward[0])
        return _GATHERED if any(op != "all_reduce" or size > 2 * row for op, size, _ in got[phase]) else _THREE
