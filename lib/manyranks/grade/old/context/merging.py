"""The task merge: pairs of output and log-sum-exp, of several blocks of keys."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import ClassVar

import torch
from torch import Tensor

from manyranks.grade.old.context.attention import LEAST, Pair, merge
from manyranks.grade.old.context.ready import own
from manyranks.grade.old.context.task import ContextTask, pair_of, untouched, values
from manyranks.grade.old.scripts import Scene, Tensors, Wrong
from manyranks.grade.old.tensor.layout import drawn
from manyranks.grade.old.tensor.task import telling
from manyranks.grade.old.trial import Trial
from manyranks.grade.old.verdict import Aspect, Verdict

_S, _B, _A, _D = 5, 2, 3, 4
_O, _LSE = "o", "lse"
_PLAIN, _LARGE, _HIDDEN = "ordinary parts", "scores near ±1000", "queries that see nothing"
_NO_MAX = (
    "exp(1000) is more than float64 has, and exp(−1000) is 0: take the largest lse off before exp, and add it to the "
    "logarithm again"
)
_OF_ALL = (
    "the largest lse is that of each query and head, not of all: next to +1000, exp(−1000 − 1000) is 0. torch.stack the parts' "
    "lse, and take amax(0)"
)
_NAN = (
    "−∞ − (−∞) is NaN: where no part has a key, the largest lse is −∞ itself. Take a finite number off there: the weights are "
    "then 0, the logarithm of their sum is −∞, and o is 0, not 0/0"
)
_GARBAGE = "where no part has a key, o is 0, whatever the parts' own o are there"
_INFINITE = "where no part has a key, lse is −∞: there is no exponential to sum"
_COUNTED = "a part with lse = −∞ has the weight 0: its o does not count, and exp(−∞) is 0"
_MEAN = "that is the mean of the outputs: each counts with its weight, exp(its lse) ÷ the sum of all parts' exp(lse)"
_SUM = "that is the sum of the outputs: their weights have to add up to 1. Divide by the sum of all parts' exp(lse)"
_BY_LSE = "the weights are lse itself: it is a logarithm, and a weight is exp(lse)"
_SWAPPED = "the weights are swapped: each part's o goes with its own lse"
_FIRST, _LAST = "that is the first part: the others are missing", "that is the last part: the others are missing"
_BASE = "that is base 2: lse is the natural logarithm; torch.exp and torch.log"
_LSE_MEAN = "that lse is a mean: sums of exponentials are added, and lse is the logarithm of their sum"
_LSE_MAX = "that lse is the largest one: it is what is taken off; add the logarithm of the sum of the weights"
_LSE_SUM = "that lse is the sum of logarithms, which is the logarithm of a product: add exponentials"
_LSE_FIRST = "that lse is the first part's: it grows with each part"
_LSE_SHIFTED = "lse lacks what was taken off before exp: add the largest one again"
_NOT_UPDATED = (
    "where there are three parts, the third one is merged with the first one's lse: what two parts have merged to has an lse "
    "of its own"
)
_TWO = "there may be one part, two, or more: all of them count"
_TWO_SHAPES = "parts is a list of pairs, o_SBAD and lse_SBA: lse[..., None] has a place for D"
_UNEXPLAINED = (
    "o = Σ wᵢ·oᵢ ÷ Σ wᵢ and lse = m + log Σ wᵢ, with wᵢ = exp(lseᵢ − m) and m the largest lse, for each query and head"
)


def _ordinary(count: int) -> list[Pair]:
    return [(drawn(10 * count + i, _S, _B, _A, _D), drawn(500 + 10 * count + i, _S, _B, _A)) for i in range(count)]


def _large(count: int) -> list[Pair]:
    """All but the last near 1000, or all near −1000, for a query and head."""
    sign_SBA = drawn(70, _S, _B, _A).sign()
    signs = [*[sign_SBA] * (count - 1), -torch.ones_like(sign_SBA)]
    return [(o, 1000 * sign + lse) for sign, (o, lse) in zip(signs, _ordinary(count), strict=True)]


def _hidden(count: int) -> list[Pair]:
    """Rows of which one part sees nothing, or two, or all."""
    parts = [(o, lse.clone()) for o, lse in _ordinary(count)]
    for (_, lse), rows in zip(parts, ((0, 1, 4), (1, 2), (1, 2, 4)), strict=False):
        lse[list(rows), :, 1:] = -math.inf
    return parts


def _parts(kind: str, count: int) -> list[Pair]:
    return {_PLAIN: _ordinary, _LARGE: _large, _HIDDEN: _hidden}[kind](count)


def _run(kind: str, count: int, function: Callable, watch) -> Tensors:
    parts, before = _parts(kind, count), _parts(kind, count)
    with own():
        merged = function([*parts])
    o, lse = pair_of(merged, parts[0], "merge")
    untouched(watch, _named(parts), _named(before))
    return {_O: o, _LSE: lse}


def _named(parts: list[Pair]) -> Tensors:
    return {f"{name} of part {i}": one for i, pair in enumerate(parts) for name, one in zip((_O, _LSE), pair, strict=True)}


def _weighted(weights: list[Tensor], parts: list[Pair], divided: bool = True) -> Tensor:
    sums = sum(weight[..., None] * o for weight, (o, _) in zip(weights, parts, strict=True))
    return sums / sum(weights)[..., None] if divided else sums


def _without_maximum(parts: list[Pair]) -> Tensors:
    weights = [lse.exp() for _, lse in parts]
    return {_O: _weighted(weights, parts), _LSE: sum(weights).log()}


def _of_all(parts: list[Pair]) -> Tensor:
    """With one maximum for all queries and heads; 0 where no weight is left."""
    lse_PSBA = _stacked(parts)
    return _weighted([*(lse_PSBA - lse_PSBA.max()).exp()], parts).nan_to_num(0)


def _bare(parts: list[Pair]) -> list[Tensor]:
    """Weights, with whatever the largest lse is taken off."""
    most = torch.stack([lse for _, lse in parts]).amax(0)
    return [(lse - most).exp() for _, lse in parts]


def _garbage(parts: list[Pair]) -> Tensor:
    """A first o that stays where no part has a key."""
    seen = torch.stack([lse for _, lse in parts]).amax(0) > LEAST
    return torch.where(seen[..., None], merge(parts)[0], parts[0][0])


def _not_updated(parts: list[Pair]) -> Tensor:
    o, first = parts[0]
    for other, lse in parts[1:]:
        o = merge([(o, first), (other, lse)])[0]
    return o


def _stacked(parts: list[Pair]) -> Tensor:
    return torch.stack([lse for _, lse in parts])


def _swapped(parts: list[Pair]) -> Tensor:
    others = [lse for _, lse in parts]
    return merge([(o, lse) for (o, _), lse in zip(parts, reversed(others), strict=True)])[0]


def _base_two(parts: list[Pair]) -> Tensors:
    weights = [lse.exp2() for _, lse in parts]
    return {_O: _weighted(weights, parts)}


def _finite(parts: list[Pair]) -> Tensor:
    lse = merge(parts)[1]
    return torch.where(lse > LEAST, lse, 0.0)


_KNOWN: list[tuple[str, Callable[[list[Pair]], Tensors]]] = [
    (_TWO, lambda parts: dict(zip((_O, _LSE), merge(parts[:2]), strict=True))),
    (_NO_MAX, _without_maximum),
    (_OF_ALL, lambda parts: {_O: _of_all(parts)}),
    (_NAN, lambda parts: {_O: _weighted(_bare(parts), parts)}),
    (_NAN, lambda parts: {_O: _weighted([w.nan_to_num() for w in _bare(parts)], parts)}),
    (_GARBAGE, lambda parts: {_O: _garbage(parts)}),
    (_COUNTED, lambda parts: {_O: merge([(o, lse.clamp(min=0)) for o, lse in parts])[0]}),
    (_MEAN, lambda parts: {_O: sum(o for o, _ in parts) / len(parts)}),
    (_SUM, lambda parts: {_O: sum(o for o, _ in parts)}),
    (_SUM, lambda parts: {_O: _weighted(_bare(parts), parts, divided=False)}),
    (_SUM, lambda parts: {_O: _weighted([lse.exp() for _, lse in parts], parts, divided=False)}),
    (_BY_LSE, lambda parts: {_O: _weighted([lse for _, lse in parts], parts)}),
    (_SWAPPED, lambda parts: {_O: _swapped(parts)}),
    (_FIRST, lambda parts: {_O: parts[0][0]}),
    (_LAST, lambda parts: {_O: parts[-1][0]}),
    (_BASE, _base_two),
    (_NOT_UPDATED, lambda parts: {_O: _not_updated(parts)}),
    (_LSE_MEAN, lambda parts: {_LSE: _stacked(parts).mean(0)}),
    (_LSE_MAX, lambda parts: {_LSE: _stacked(parts).amax(0)}),
    (_LSE_SUM, lambda parts: {_LSE: _stacked(parts).sum(0)}),
    (_LSE_FIRST, lambda parts: {_LSE: parts[0][1]}),
    (_LSE_SHIFTED, lambda parts: {_LSE: sum(_bare(parts)).log()}),
    (_BASE, lambda parts: {_LSE: torch.logsumexp(_stacked(parts), 0) / math.log(2)}),
    (_BASE, lambda parts: {_LSE: _stacked(parts).exp2().sum(0).log2()}),
    (_NAN, lambda parts: {_LSE: _stacked(parts).amax(0) + sum(_bare(parts)).log()}),
    (_INFINITE, lambda parts: {_LSE: _finite(parts)}),
]
_OF_ONE = {_NO_MAX, _NAN, _GARBAGE, _BASE, _LSE_SHIFTED, _INFINITE}  # that a single part shows


def _wrong(parts: list[Pair], right: Tensors) -> Iterator[Wrong]:
    """Those of lse show where o is right."""
    for hint, make in _KNOWN:
        if len(parts) == 1 and hint not in _OF_ONE:
            continue
        found = make(parts)
        yield Wrong(hint, [{_O: right[_O]} | found if _O not in found else found])


@cache
def cases(n: int) -> list[Scene]:
    """One part, two and three; large scores; queries that see nothing."""
    kinds = [(_PLAIN, 2), (_PLAIN, 3), (_PLAIN, 1), (_LARGE, 3), (_HIDDEN, 3), (_HIDDEN, 1)]
    return [_scene(kind, count) for kind, count in kinds]


def _scene(kind: str, count: int) -> Scene:
    parts = _parts(kind, count)
    right = dict(zip((_O, _LSE), merge(parts), strict=True))
    note = f"with {count} part{'s' * (count > 1)}, {kind}"
    return Scene(1, partial(_run, kind, count), [right], lambda: telling([right], _wrong(parts, right)), kind, note)


def _of(kind: str, task: "Merging", trial: Trial) -> Verdict:
    return values(task, trial) if trial.case.must == kind else Verdict(True)


@dataclass(frozen=True)
class Merging(ContextTask):
    sizes: ClassVar[tuple[int, ...]] = (1,)
    unexplained: ClassVar[str] = _UNEXPLAINED
    advice: ClassVar[tuple[tuple[str, str], ...]] = (
        (r"unpack|out of range|must match the size|not supported between|index", _TWO_SHAPES),
        *ContextTask.advice,
    )
    aspects: ClassVar[tuple[Aspect, ...]] = (
        Aspect("merges one part, two and three", 0.4, partial(_of, _PLAIN), each_world=True),
        Aspect("is safe for large scores", 0.35, partial(_of, _LARGE), each_world=True),
        Aspect("is safe for queries that see nothing", 0.25, partial(_of, _HIDDEN), each_world=True),
    )

    def better(self, trial: Trial, hint: str) -> str:
        """What is not finite, and should be, has few causes."""
        got, right = trial.answers[0].tensors, trial.case.expected[0]
        if trial.case.must == _HIDDEN:
            return _of_hidden(got, right, hint)
        if trial.case.must == _LARGE and not all(one.isfinite().all() for one in got.values()):
            high = right[_LSE] > 0
            return _OF_ALL if all(one[high].isfinite().all() for one in got.values()) else _NO_MAX
        return hint


def _of_hidden(got: Tensors, right: Tensors, hint: str) -> str:
    if any(one.isnan().any() for one in got.values()):
        return _NAN
    unseen = right[_LSE].isinf()
    if not hint and got[_LSE][unseen].isfinite().any():
        return _INFINITE
    return hint
