"""The task route: which ranks, which experts, and gates without the bias."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from manyranks.grade.old.context.task import untouched
from manyranks.grade.old.expert.ready import own
from manyranks.grade.old.expert.task import ExpertTask, fitting, of, several
from manyranks.grade.old.scripts import Scene, Tensors, Wrong
from manyranks.grade.old.tensor.layout import drawn
from manyranks.grade.old.tensor.task import gradient, telling
from manyranks.grade.old.verdict import Aspect

_EXPERTS, _GATES, _LOGITS, _BIAS = "experts_KT", "gates_KT", "the gradient of the logits", "the gradient of the bias"
_SHAPE = "it returns (experts_KT, gates_KT), two tensors [K, T]: choices come first; the experts are int64"
_BLOCKS = "those are blocks of neighbours: here experts are dealt, and expert i lives on rank i % n"
_TWO_LAYOUTS = (
    "the ranks are found by one layout, and masked by another: expert i lives on rank i % n in both. [T, N] repeated along "
    "the experts, repeat and not repeat_interleave, has rank i % n at expert i"
)
_NO_LIMIT = "a token goes to more than `limit` ranks: choose the ranks first, and the experts from these only"
_SUMS = "a rank is as strong as its best expert, the one with the largest score + bias: not the sum of several"
_MEANS = "a rank is as strong as its best expert: that is the worst one"
_NO_BIAS = "the bias is missing: score + bias decides who is chosen"
_NOT_RANKS = "the bias is missing where the ranks are chosen: their best expert is the one with the largest score + bias"
_NOT_EXPERTS = "the bias is missing where the experts are chosen: score + bias decides here, too"
_LOGIT = "the bias is added to the logit: it is added to the score, the sigmoid of the logit"
_ZERO = (
    "score + bias can be negative, as much as you like, and then a hidden expert with 0 or −1 is larger: mask the other ranks' "
    "experts with −∞ (masked_fill)"
)
_RESHAPED = "the choices of different tokens are mixed: [T, K] becomes [K, T] by .T, not by reshape or view"
_ASCENDING = "the choices stand in another order: the largest score + bias comes first"
_BY_SCORE = "the choices are sorted by their score: the largest score + bias comes first"
_BIASED = "the bias is in the gates: it only chooses. Gates are made of scores alone"
_RAW = "the gates are not normalised: divide the chosen experts' scores by their sum"
_OVER_ALL = "the gates are divided by the sum of all experts' scores: divide by that of the K chosen ones"
_SOFTMAX = "the gates are a softmax of the chosen logits: here they are the chosen scores, sigmoids, divided by their sum"
_SOFTMAX_SCORES = "the gates are a softmax of the scores: divide the chosen scores by their sum, without another exp"
_SOFTMAX_ALL = "the scores are a softmax over all experts: here each is the sigmoid of its own logit"
_OVER_TOKENS = "the gates are divided by a sum over tokens: the K gates of each token add up to 1"
_ALIKE = "all gates are alike: each expert's is its share of the chosen scores"
_NO_GRADIENT = (
    "the gates have no way back to the logits: no detach, no no_grad, no new tensor from numbers. topk's values and gather "
    "have gradients, indices have none"
)
_CONSTANT = "the sum of the chosen scores is taken as a constant: it depends on the logits, too. Leave detach out"
_THROUGH_BIAS = "the bias gets a gradient: it is in no gate. It only chooses, and balancing moves it"
_UNEXPLAINED = (
    "scores = sigmoid(logits); ranks by their largest score + bias; the K largest score + bias on these; gates = their scores "
    "÷ their sum"
)


class Rule(NamedTuple):
    """How a token is routed; the defaults are right.

    score: of logits; dealt, masked: whether expert i is on rank i % n where ranks are chosen, and where others are masked;
    strong: of a rank's wanted scores [T, its experts], how strong it is; wanted, ranked: what chooses experts, and ranks, of
    scores, bias and logits; hidden: what other ranks' experts have instead; limited: whether ranks are chosen at all; gate: of
    chosen scores, bias, logits and all scores, in [T, K].
    """

    score: Callable[[Tensor], Tensor] = torch.sigmoid
    dealt: bool = True
    masked: bool = True
    strong: Callable[[Tensor], Tensor] = lambda wanted: wanted.amax(-1)
    wanted: Callable[[Tensor, Tensor, Tensor], Tensor] = lambda scores, bias, logits: scores + bias
    ranked: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
    hidden: float = -torch.inf
    limited: bool = True
    gate: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] = lambda s, bias, logits, scores: s / s.sum(1, keepdim=True)


RIGHT = Rule()


def _plain(scores: Tensor, bias: Tensor, logits: Tensor) -> Tensor:
    return scores


_RULES: list[tuple[str, Rule]] = [
    (_NO_BIAS, Rule(wanted=_plain)),
    (_BLOCKS, Rule(dealt=False, masked=False)),
    (_TWO_LAYOUTS, Rule(dealt=False)),
    (_TWO_LAYOUTS, Rule(masked=False)),
    (_NO_LIMIT, Rule(limited=False)),
    (_ZERO, Rule(hidden=0.0)),
    (_SUMS, Rule(strong=lambda wanted: wanted.sum(-1))),
    (_SUMS, Rule(strong=lambda wanted: wanted.topk(2).values.sum(-1))),
    (_MEANS, Rule(strong=lambda wanted: wanted.amin(-1))),
    (_NOT_RANKS, Rule(ranked=_plain)),
    (_NOT_EXPERTS, Rule(wanted=_plain, ranked=lambda scores, bias, logits: scores + bias)),
    (_LOGIT, Rule(wanted=lambda scores, bias, logits: logits + bias)),
    (_SOFTMAX_ALL, Rule(score=lambda logits: logits.softmax(-1))),
]
_GATES_WRONG: list[tuple[str, Rule]] = [
    (_RAW, Rule(gate=lambda s, bias, logits, scores: s)),
    (_BIASED, Rule(gate=lambda s, bias, logits, scores: (s + bias) / (s + bias).sum(1, keepdim=True))),
    (_BIASED, Rule(gate=lambda s, bias, logits, scores: s + bias)),
    (_OVER_ALL, Rule(gate=lambda s, bias, logits, scores: s / scores.sum(1, keepdim=True))),
    (_SOFTMAX, Rule(gate=lambda s, bias, logits, scores: logits.softmax(1))),
    (_SOFTMAX_SCORES, Rule(gate=lambda s, bias, logits, scores: s.softmax(1))),
    (_OVER_TOKENS, Rule(gate=lambda s, bias, logits, scores: s / s.sum(0))),
    (_ALIKE, Rule(gate=lambda s, bias, logits, scores: torch.full_like(s, 1 / s.shape[1]))),
    (_CONSTANT, Rule(gate=lambda s, bias, logits, scores: s / s.detach().sum(1, keepdim=True))),
]


class Router(NamedTuple):
    """A case: tokens, experts, K, ranks, and how many of them; shift: added to all biases."""

    tokens: int
    experts: int
    top_k: int
    n: int
    limit: int
    shift: float = 0.0

    @property
    def note(self) -> str:
        signs = ", negative biases" if self.shift < 0 else ""
        return f"{self.experts} experts on {self.n} ranks, K = {self.top_k}, limit = {self.limit}{signs}"

    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Logits, biases, and the gates' gradient."""
        seed = 100 * self.experts + self.n
        bias = 0.4 * drawn(seed + 1, self.experts) + self.shift
        return drawn(seed, self.tokens, self.experts), bias, drawn(seed + 2, self.top_k, self.tokens)


def _allowed(router: Router, ranked: Tensor, rule: Rule) -> Tensor:
    """[T, E]: whether the expert's rank is one of the token's."""
    every = torch.arange(router.experts)
    dealt, blocks = every % router.n, every // (router.experts // router.n)
    at, masked = (dealt if one else blocks for one in (rule.dealt, rule.masked))
    if not rule.limited:
        return torch.ones_like(ranked, dtype=torch.bool)
    strong = torch.stack([rule.strong(ranked[:, at == rank]) for rank in range(router.n)], 1)
    best = strong.topk(router.limit).indices
    return (masked[None, :, None] == best[:, None, :]).any(-1)


def result(router: Router, rule: Rule = RIGHT) -> Tensors:
    """Choices, gates and the gradient of the logits."""
    logits, bias, upstream = router.inputs()
    logits = logits.requires_grad_()
    scores = rule.score(logits)
    wanted = rule.wanted(scores, bias, logits).detach()
    ranked = rule.ranked(scores, bias, logits).detach() if rule.ranked else wanted
    experts = wanted.masked_fill(~_allowed(router, ranked, rule), rule.hidden).topk(router.top_k).indices
    gates = rule.gate(scores.gather(1, experts), bias[experts], logits.gather(1, experts), scores)
    if gates.requires_grad:
        gates.T.backward(upstream)
    return {_EXPERTS: experts.T, _GATES: gates.detach().T, _LOGITS: gradient(logits), _BIAS: torch.zeros_like(bias)}


def _wrong(router: Router, right: Tensors) -> Iterator[Wrong]:
    """By choices; where these are right, by gates; then by gradients."""
    logits, _, _ = router.inputs()
    for hint, rule in _RULES:
        yield Wrong(hint, [{_EXPERTS: result(router, rule)[_EXPERTS]}])
    yield Wrong(_RESHAPED, [{_EXPERTS: right[_EXPERTS].T.reshape(router.top_k, -1)}])
    yield Wrong(_ASCENDING, [{_EXPERTS: right[_EXPERTS].flip(0)}])
    yield Wrong(_ASCENDING, [{_EXPERTS: right[_EXPERTS].sort(0).values}])
    chosen = right[_EXPERTS]
    by_score = logits.T.gather(0, chosen).argsort(0, descending=True)
    yield Wrong(_BY_SCORE, [{_EXPERTS: chosen.gather(0, by_score)}])
    for hint, rule in _GATES_WRONG:
        found = result(router, rule)
        yield Wrong(hint, [{name: found[name] for name in (_EXPERTS, _GATES, _LOGITS)}])
        if hint != _CONSTANT:
            yield Wrong(hint, [{name: found[name] for name in (_EXPERTS, _GATES)}])
    yield Wrong(_SOFTMAX_ALL, [{_EXPERTS: chosen, _GATES: result(router, Rule(gate=_of_softmax))[_GATES]}])
    yield Wrong(_NO_GRADIENT, [right | {_LOGITS: torch.zeros_like(logits)}])


def _of_softmax(s: Tensor, bias: Tensor, logits: Tensor, scores: Tensor) -> Tensor:
    """Probabilities over all experts."""
    every = torch.logit(scores)
    return logits.exp() / every.exp().sum(1, keepdim=True)


def _run(router: Router, right: Tensors, function: Callable, watch) -> Tensors:
    logits, bias, upstream = router.inputs()
    leaves = {"logits_TE": logits.requires_grad_(), "bias_E": bias.requires_grad_()}
    before = {name: leaf.detach().clone() for name, leaf in leaves.items()}
    with own(watch):
        found = several(function(logits, bias, router.top_k, router.n, router.limit), 2, "route", _SHAPE)
    experts = fitting(found[0], right[_EXPERTS], "experts_KT", _SHAPE)
    gates = fitting(found[1], right[_GATES], "gates_KT", _SHAPE)
    if found[1].requires_grad:
        found[1].backward(upstream)
    untouched(watch, leaves, before)
    return {_EXPERTS: experts, _GATES: gates, _LOGITS: gradient(logits), _BIAS: gradient(bias)}


@cache
def cases(n: int) -> list[Scene]:
    """Several experts a rank; negative scores; one rank only."""
    routers = [Router(7, 12, 3, 4, 2), Router(5, 8, 2, 4, 2, shift=-1000.0), Router(6, 9, 3, 3, 1)]
    return [_scene(router) for router in routers]


def _scene(router: Router) -> Scene:
    right = result(router)
    return Scene(
        1, partial(_run, router, right), [right], lambda: telling([right], _wrong(router, right)), note=f"with {router.note}"
    )


@dataclass(frozen=True)
class Route(ExpertTask):
    sizes: ClassVar[tuple[int, ...]] = (1,)
    unexplained: ClassVar[str] = _UNEXPLAINED
    aspects: ClassVar[tuple[Aspect, ...]] = (
        Aspect("chooses the right experts", 0.4, of(_EXPERTS, alone=True), each_world=True),
        Aspect("the gates are right", 0.3, of(_GATES, alone=True), each_world=True),
        Aspect("the gradients of the logits are right, and the bias has none", 0.3, of(_LOGITS, _BIAS, alone=True)),
    )

    def better(self, trial, hint: str) -> str:
        """A bias with a gradient is in the gates."""
        got = trial.answers[0].tensors
        return hint or (_THROUGH_BIAS if got[_BIAS].any() else "")
