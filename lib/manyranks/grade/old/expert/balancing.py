"""The task balance: the auxiliary loss and the bias, by the counts of all ranks."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from manyranks.grade.old.context.task import untouched
from manyranks.grade.old.context.travel import BACKWARD, FORWARD
from manyranks.grade.old.expert.copies import Copies
from manyranks.grade.old.expert.ready import own
from manyranks.grade.old.expert.task import ExpertTask, fitting, of, several
from manyranks.grade.old.expert.traffic import Must, Sent, messages
from manyranks.grade.old.scripts import Scene, Tensors, Wrong
from manyranks.grade.old.tensor.layout import drawn
from manyranks.grade.old.tensor.task import gradient, telling
from manyranks.grade.old.trial import Trial
from manyranks.grade.old.verdict import Aspect

_LOSS, _GRADIENT, _BIAS = "the loss", "the gradient of the probabilities", "the new bias"
_SPEED = 0.125
_SHAPE = "it returns (loss, bias_E): a tensor with one number, and one of E numbers"
_OWN_COUNTS = "the counts are this rank's own: f and the bias need those of all ranks, one all-reduce of counts"
_OWN_MEAN = (
    "P is the mean over this rank's own tokens: ranks have different numbers of tokens, and a token counts the same wherever "
    "it is. Divide by the number of all ranks' tokens, which the counts' sum tells"
)
_NO_N = "the sum of the ranks' losses is right there: their mean has to be, which takes a factor N"
_ALL_OF_IT = (
    "that is the whole loss on each rank: return this rank's tokens' part of it, N times, which needs no second message"
)
_NO_E = "the factor E is missing: with equal loads the loss is 1"
_NOT_TOKENS = "the counts' sum is that of all T·K choices: divided by K it is the number of tokens, by which P is divided"
_PER_TOKEN = "f is the share of all choices, which adds up to 1: divide by all T·K choices, not by the tokens"
_F_TWICE = "that is Σ f·f: P is the mean of the probabilities, which have gradients"
_P_TWICE = "that is Σ P·P: f is the share of the choices"
_FIRST = "f counts all choices, not only the first ones"
_NO_GRADIENT = "the loss has no gradient: P is made of the probabilities. No detach, no .item()"
_LACKS_N = "the gradient lacks a factor N, for an all-reduce is nothing that autograd sees: P needs no message"
_SIGN = "that is the sign's step, the chapter's: here the bias moves in proportion, by speed · (1 − count / mean count)"
_WRONG_WAY = "the bias moves the wrong way: an expert with too many copies gets a smaller one"
_NOT_RELATIVE = "the difference is not divided by the mean count: speed · (1 − count / mean count)"
_OWN_BIAS = "the new bias differs from rank to rank: it is made of this rank's counts. All ranks must have the same"
_ONLY_STEP = "that is the step alone: add it to the bias"
_OLD_BIAS = "that is the bias as it was: return the one for the next step"
_LESS_MEAN = "each rank's step is added up: the step is made of the sum of the counts"
_QUOTIENT = "a quotient of two int64 tensors is float32, so make the counts float64 first"
_SHARE = "1 − f is not it: count / mean count is E times the share f"
_MINLENGTH = "all ranks have E counts, 0 for an expert that nobody chose there: bincount(minlength=E)"
_GATHERED = "no rank needs to know what each of the others has: the sum of the counts is enough, dist.all_reduce"
_NOT_ALL = "each choice of each token would travel: count first, E numbers are enough"
_FEWER = "one all-reduce of E counts is enough: their sum tells how many tokens there are, and P needs no message"
_NOTHING = "nothing was sent: no rank knows the counts of the others"
_UNEXPLAINED = (
    "counts of all ranks by one all-reduce; f = counts ÷ their sum; P = this rank's sum of probabilities · N ÷ all tokens; "
    "loss = E · Σ f·P; bias + speed · (1 − counts ÷ their mean)"
)


class Rates(NamedTuple):
    """What a rank computes with, of rank and kind; the defaults are right."""

    counts: Callable[["Load", int], Tensor] = lambda load, rank: load.all_counts
    mean: Callable[["Load", int, Tensor], Tensor] = lambda load, rank, p: p.sum(0) * load.copies.n / load.tokens
    loss: Callable[[Tensor, Tensor], Tensor] = lambda f, p: len(f) * (f * p).sum()


class Load(NamedTuple):
    """A case: choices of all ranks' tokens."""

    copies: Copies

    @property
    def tokens(self) -> int:
        """Of all ranks."""
        return sum(self.copies.tokens)

    @property
    def own_counts(self) -> list[Tensor]:
        """By rank."""
        return [one.flatten().bincount(minlength=self.copies.experts).double() for one in self.copies.choices]

    @property
    def all_counts(self) -> Tensor:
        return sum(self.own_counts)

    def probabilities(self) -> list[Tensor]:
        """By rank."""
        return [drawn(600 + r, count, self.copies.experts).softmax(1) for r, count in enumerate(self.copies.tokens)]

    def bias(self) -> Tensor:
        return 0.5 * drawn(77, self.copies.experts)

    def moved(self, counts: Tensor) -> Tensor:
        """The bias after these counts."""
        return self.bias() + _SPEED * (1 - counts / counts.mean())


RIGHT = Rates()


def _share(counts: Tensor) -> Tensor:
    return counts / counts.sum().clamp(min=1)


def results(load: Load, rates: Rates = RIGHT) -> list[Tensors]:
    """By rank."""
    found = []
    for rank, probabilities in enumerate(load.probabilities()):
        leaf = probabilities.requires_grad_()
        loss = rates.loss(_share(rates.counts(load, rank)), rates.mean(load, rank, leaf))
        if loss.requires_grad:
            loss.backward()
        found.append({_LOSS: loss.detach(), _GRADIENT: gradient(leaf), _BIAS: load.moved(load.all_counts)})
    return found


def _whole_mean(load: Load) -> Tensor:
    return sum(one.sum(0) for one in load.probabilities()) / load.tokens


def _own_mean(load: Load, rank: int, p: Tensor) -> Tensor:
    return p.sum(0) / max(load.copies.tokens[rank], 1)


def _n_own_means(load: Load, rank: int, p: Tensor) -> Tensor:
    return load.copies.n * _own_mean(load, rank, p)


def _of_losses(load: Load) -> list[tuple[str, Rates]]:
    top_k = load.copies.top_k
    firsts = [one[0].bincount(minlength=load.copies.experts).double() for one in load.copies.choices]
    return [
        (_OWN_COUNTS, Rates(counts=lambda load, rank: load.own_counts[rank])),
        (_OWN_COUNTS, Rates(counts=lambda load, rank: load.own_counts[rank], mean=_own_mean)),
        (_OWN_COUNTS, Rates(counts=lambda load, rank: load.own_counts[rank], mean=_n_own_means)),
        (_OWN_MEAN, Rates(mean=_own_mean)),
        (_OWN_MEAN, Rates(mean=_n_own_means)),
        (_NO_N, Rates(mean=lambda load, rank, p: p.sum(0) / load.tokens)),
        (_ALL_OF_IT, Rates(mean=lambda load, rank, p: _whole_mean(load))),
        (_NOT_TOKENS, Rates(mean=lambda load, rank, p: p.sum(0) * load.copies.n / (load.tokens * top_k))),
        (_NO_E, Rates(loss=lambda f, p: (f * p).sum())),
        (_PER_TOKEN, Rates(loss=lambda f, p: top_k * len(f) * (f * p).sum())),
        (_FIRST, Rates(counts=lambda load, rank: sum(firsts))),
        (_F_TWICE, Rates(loss=lambda f, p: len(f) * (f * f).sum())),
        (_P_TWICE, Rates(loss=lambda f, p: len(f) * (p * p).sum())),
    ]


def _of_biases(load: Load) -> list[tuple[str, Callable[[int], Tensor]]]:
    counts, bias, n = load.all_counts, load.bias(), load.copies.n
    step = load.moved(counts) - bias
    own_steps = [load.moved(one) - bias for one in load.own_counts]
    return [
        (_SIGN, lambda rank: bias + _SPEED * (counts.mean() - counts).sign()),
        (_WRONG_WAY, lambda rank: bias - step),
        (_WRONG_WAY, lambda rank: bias - _SPEED * (counts.mean() - counts).sign()),
        (_NOT_RELATIVE, lambda rank: bias + _SPEED * (counts.mean() - counts)),
        (_OWN_BIAS, lambda rank: bias + own_steps[rank]),
        (_LESS_MEAN, lambda rank: bias + sum(own_steps)),
        (_LESS_MEAN, lambda rank: bias + sum(own_steps) / n),
        (_ONLY_STEP, lambda rank: step),
        (_OLD_BIAS, lambda rank: bias),
        (_SHARE, lambda rank: bias + _SPEED * (1 - _share(counts))),
        (_SHARE, lambda rank: bias + _SPEED * (1 / len(counts) - _share(counts))),
    ]


def _wrong(load: Load, right: list[Tensors]) -> Iterator[Wrong]:
    """By the loss; where it is right, by the gradient, and the bias."""
    for hint, rates in _of_losses(load):
        yield Wrong(hint, [{_LOSS: own[_LOSS]} for own in results(load, rates)])
    yield Wrong(_NO_GRADIENT, [{_LOSS: own[_LOSS], _GRADIENT: torch.zeros_like(own[_GRADIENT])} for own in right])
    yield Wrong(_LACKS_N, [{_LOSS: own[_LOSS], _GRADIENT: own[_GRADIENT] / load.copies.n} for own in right])
    for hint, bias in _of_biases(load):
        yield Wrong(hint, [{_BIAS: bias(rank)} for rank in range(load.copies.n)])


def _run(load: Load, function: Callable, watch) -> Tensors:
    rank = dist.get_rank()
    probabilities, experts, bias = load.probabilities()[rank].requires_grad_(), load.copies.choices[rank].clone(), load.bias()
    with own(watch):
        watch.mark(FORWARD)
        found = several(function(probabilities, experts, bias, _SPEED), 2, "balance", _SHAPE)
        loss = fitting(found[0], bias.sum(), "the loss", _SHAPE)
        moved = fitting(found[1], bias, "the new bias", _SHAPE)
        watch.mark(BACKWARD)
        if found[0].requires_grad:
            found[0].backward()
    given = {"probabilities_TE": probabilities, "experts_KT": experts, "bias_E": bias}
    before = dict(zip(given, (load.probabilities()[rank], load.copies.choices[rank], load.bias()), strict=True))
    untouched(watch, given, before)
    return {_LOSS: loss, _GRADIENT: gradient(probabilities), _BIAS: moved}


@cache
def cases(n: int) -> list[Scene]:
    """Different numbers of tokens; a rank without any."""
    return [_scene(Load(Copies(n, (5, 3, 6, 4)[:n], 1, 2, 2))), _scene(Load(Copies(n, (4, 0, 7, 2)[:n], 1, 3, 3)))]


def _scene(load: Load) -> Scene:
    right, n = results(load), load.copies.n
    counts = Sent("all_reduce", 8 * load.copies.experts, "int64", n)
    must = Must([[counts]] * n, [[]] * n)
    wrong = partial(_wrong, load, right)
    return Scene(n, partial(_run, load), right, lambda: telling(right, wrong()), must, load.copies.note)


@dataclass(frozen=True)
class Balancing(ExpertTask):
    unexplained: ClassVar[str] = _UNEXPLAINED
    advice: ClassVar[tuple[tuple[str, str], ...]] = (
        (r"bytes to its all_reduce|must match the (existing )?size|size of tensor", _MINLENGTH),
        *ExpertTask.advice,
    )
    instead: ClassVar[dict[str, str]] = {"all_gather": _GATHERED, "all_to_all": _GATHERED, "broadcast": _GATHERED}
    aspects: ClassVar[tuple[Aspect, ...]] = (
        Aspect("the loss and its gradient are one process's", 0.4, of(_LOSS, _GRADIENT), each_world=True),
        Aspect("the new bias is right, and the same on all ranks", 0.3, of(_BIAS), each_world=True),
        Aspect("sends E counts, once", 0.3, messages),
    )

    def accepts(self, got: list[Sent], right: list[Sent]) -> bool:
        """Counts may be of any dtype."""
        return [_numbers(call) for call in got] == [_numbers(call) for call in right]

    def why(self, trial: Trial, rank: int, phase: str, got: list[Sent], right: list[Sent]) -> str:
        """Nothing, too much, or too often."""
        if not got:
            return _NOTHING
        if any(call.op == "all_gather" and call.bytes > right[0].bytes for call in got if right):
            return _NOT_ALL
        return _FEWER if {call.op for call in got} == {"all_reduce"} else super().why(trial, rank, phase, got, right)

    def better(self, trial: Trial, hint: str) -> str:
        """What was sent may explain what no known mistake does."""
        return f"{hint}; {_QUOTIENT}" if hint.startswith("nearly right") else hint or messages(self, trial).hint


def _numbers(call: Sent) -> tuple[str, int]:
    return call.op, call.bytes // getattr(torch, call.dtype).itemsize if call.dtype else 0
