"""Gradients of a mesh's ranks: what each has, what one process makes of them, right and wrong in known ways."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from manyranks.grade.nd import layouts
from manyranks.grade.nd.layouts import Sizes
from manyranks.grade.scripts import Tensors, Wrong
from manyranks.grade.tensor.layout import drawn

CUT, WHOLE, PARTIAL = "cut", "whole", "partial"
WEIGHTS = ((CUT, (4, 3)), (WHOLE, (5,)), (PARTIAL, (2, 3)), (CUT, (2, 2, 2)), (PARTIAL, (3,)))
_UNTOUCHED = "the gradients are as they were: put what you computed into each parameter's .grad"
_SUMS = "these are sums over the data ranks: their mean takes a division by dp × cp"
_TWICE = "divided twice: once by dp × cp is enough, and ReduceOp.AVG divides, too"
_BY_ALL = "divided by the number of all ranks: the mean is over dp × cp, and tp and pp ranks are no part of it"
_BY_STAGES = "divided by dp × cp × pp: stages are no part of the mean. The divisor is dp × cp, dist.get_world_size(group)"
_BY_TP = "divided by tp: the mean is over the ranks of dp × cp"
_OVER_ALL = (
    "averaged over all ranks: other tp ranks have other parts, other stages other layers. Only ranks that differ in dp and "
    "cp alone have the same weights"
)
_OVER_STAGES = "averaged over stages, too: pp ranks have other layers. The mean is over dp × cp"
_OVER_TP = "averaged over the tp ranks, which have other parts of what is cut: the mean is over dp × cp"
_NO_CP = "averaged over dp only: cp ranks have the same weights, and have seen other tokens. The mean is over dp × cp"
_NO_DP = "averaged over cp only: the mean is over dp × cp"
_NOT_SUMMED = "what is partial was not summed over tp: each tp rank has seen a part of the tokens only"
_PARTIAL_MEAN = "what is partial is a sum over tp, not a mean: the parts of the tokens add up"
_WHOLE_SUMMED = "what is whole was summed over tp, and is tp times too large: its gradient is complete on each tp rank"
_CUT_SUMMED = "what is cut was summed over tp: each tp rank has the gradient of its own part"
_ONLY_PARTIAL = "only what is partial was averaged over dp × cp: all gradients are"
_NOT_PARTIAL = "what is partial was summed over tp, but not averaged over dp × cp"
_NOT_WHOLE = (
    "what is whole was not averaged over dp × cp: all gradients are, and that of whole is complete on each tp rank only"
)
_NOT_CUT = "what is cut was not averaged over dp × cp: all gradients are"
_FIXED_ORDER = "the groups are those of axes as in the chapter: the order is that of sizes, not pp, dp, cp, tp"
_OTHER_ORDER = (
    "the groups are those of another order of axes: sizes has the outermost axis first, so the last axis's ranks are neighbours"
)
MIXED = "the gradients are mixed up: cut the flat row again in the order and the sizes in which it was put together"


class Rule(NamedTuple):
    """What is done with gradients; the defaults are right. summed: kinds that are summed over tp, meant: that are averaged
    over it; data: axes of the mean; by: axes whose degrees it is divided by, None for those of data; again: as often; order:
    of the axes.
    """

    summed: tuple[str, ...] = (PARTIAL,)
    meant: tuple[str, ...] = ()
    data: tuple[str, ...] = ("dp", "cp")
    by: tuple[str, ...] | None = None
    again: int = 1
    kinds: tuple[str, ...] = (CUT, WHOLE, PARTIAL)
    order: Callable[[Sizes], Sizes] = dict


def _turned(sizes: Sizes) -> Sizes:
    return dict(reversed(sizes.items()))


def _as_in_the_chapter(sizes: Sizes) -> Sizes:
    return {axis: sizes[axis] for axis in layouts.present(sizes, "pp", "dp", "cp", "tp")}


RIGHT = Rule()
_RULES = (
    (_UNTOUCHED, Rule(summed=(), data=())),
    (_SUMS, Rule(by=())),
    (_BY_STAGES, Rule(by=("dp", "cp", "pp"))),
    (_BY_ALL, Rule(by=("dp", "cp", "tp", "pp"))),
    (_BY_ALL, Rule(by=("dp", "cp", "tp"))),
    (_TWICE, Rule(again=2)),
    (_BY_TP, Rule(by=("tp",))),
    (_OVER_ALL, Rule(summed=(), data=("dp", "cp", "tp", "pp"))),
    (_OVER_ALL, Rule(data=("dp", "cp", "tp", "pp"))),
    (_OVER_STAGES, Rule(data=("dp", "cp", "pp"))),
    (_OVER_ALL, Rule(summed=(), data=("dp", "cp", "tp"))),
    (_OVER_ALL, Rule(data=("dp", "cp", "tp"))),
    (_OVER_TP, Rule(summed=(), data=("tp",))),
    (_OVER_TP, Rule(data=("tp",))),
    (_NO_CP, Rule(data=("dp",))),
    (_NO_CP, Rule(data=("dp",), by=("dp", "cp"))),
    (_NO_DP, Rule(data=("cp",))),
    (_NO_DP, Rule(data=("cp",), by=("dp", "cp"))),
    (_NOT_SUMMED, Rule(summed=())),
    (_PARTIAL_MEAN, Rule(summed=(), meant=(PARTIAL,))),
    (_CUT_SUMMED, Rule(summed=(CUT, WHOLE, PARTIAL))),
    (_CUT_SUMMED, Rule(summed=(CUT, PARTIAL))),
    (_CUT_SUMMED, Rule(summed=(CUT,))),
    (_WHOLE_SUMMED, Rule(summed=(WHOLE, PARTIAL))),
    (_WHOLE_SUMMED, Rule(summed=(WHOLE,))),
    (_ONLY_PARTIAL, Rule(kinds=(PARTIAL,))),
    (_NOT_PARTIAL, Rule(kinds=(CUT, WHOLE))),
    (_NOT_WHOLE, Rule(kinds=(CUT, PARTIAL))),
    (_NOT_CUT, Rule(kinds=(WHOLE, PARTIAL))),
    (_FIXED_ORDER, Rule(order=_as_in_the_chapter)),
    (_OTHER_ORDER, Rule(order=_turned)),
)


@dataclass(frozen=True)
class Setup:
    """Of the ranks of a mesh."""

    axes: tuple[tuple[str, int], ...]

    @cached_property
    def sizes(self) -> Sizes:
        return dict(self.axes)

    @property
    def n(self) -> int:
        return layouts.count(self.sizes)

    @property
    def data(self) -> tuple[str, ...]:
        return layouts.present(self.sizes, "dp", "cp")

    def own(self, rank: int) -> list[Tensor]:
        """Gradients on this rank: what is whole is alike on tp ranks."""
        alike = layouts.rank_of(layouts.coordinates(rank, self.sizes) | {"tp": 0}, self.sizes)
        seeds = [100 * (alike if kind == WHOLE else rank) + i for i, (kind, _) in enumerate(WEIGHTS)]
        return [drawn(seed + 7000, *shape) for seed, (_, shape) in zip(seeds, WEIGHTS, strict=True)]

    def results(self, rule: Rule = RIGHT) -> list[Tensors]:
        """Gradients by rank, and no groups."""
        sizes = rule.order(self.sizes)
        by = rule.data if rule.by is None else rule.by
        degree = layouts.count({axis: sizes[axis] for axis in layouts.present(sizes, *by)}) ** rule.again
        before = [self.own(rank) for rank in range(self.n)]
        for rank, i, ranks, kind in list(self._over(sizes, ("tp",), (*rule.summed, *rule.meant))):
            t = len(ranks) if kind in rule.meant else 1
            before[rank][i] = sum(self.own(other)[i] for other in ranks) / t
        after = [list(mine) for mine in before]
        for rank, i, ranks, _ in self._over(sizes, rule.data, rule.kinds):
            after[rank][i] = sum(before[other][i] for other in ranks) / degree
        return [named(mine) for mine in after]

    def _over(self, sizes: Sizes, axes: tuple[str, ...], kinds: tuple[str, ...]) -> Iterator[tuple]:
        """Rank, number and kind of each such weight, and the ranks of its group."""
        for ranks in layouts.groups(sizes, layouts.present(sizes, *axes)):
            yield from ((rank, i, ranks, kind) for rank in ranks for i, (kind, _) in enumerate(WEIGHTS) if kind in kinds)

    def bytes(self, *kinds: str) -> int:
        return 8 * sum(torch.Size(shape).numel() for kind, shape in WEIGHTS if kind in kinds)

    def calls(self, rank: int) -> list[tuple[int, list[int]]]:
        """Bytes and ranks of each all-reduce."""
        groups = [
            (self.bytes(PARTIAL), layouts.group_of(rank, self.sizes, ("tp",))),
            (self.bytes(CUT, WHOLE, PARTIAL), layouts.group_of(rank, self.sizes, self.data)),
        ]
        return sorted(groups)

    def groups(self) -> list[list[int]]:
        """That have to be made."""
        return sorted(layouts.groups(self.sizes, ("tp",)) + layouts.groups(self.sizes, self.data))

    def __str__(self) -> str:
        return ", ".join(f"{axis} {size}" for axis, size in self.axes)


def named(gradients: list[Tensor]) -> Tensors:
    return {f"the gradient of weight {i}, which is {WEIGHTS[i][0]}": one for i, one in enumerate(gradients)}


def wrong(setup: Setup, right: list[Tensors]) -> Iterator[Wrong]:
    """By all gradients; then by those of each kind alone, where others are wrong in another way."""
    for hint, rule in _RULES:
        yield Wrong(hint, setup.results(rule))
    turned = [named(_recut(list(mine.values()))) for mine in right]
    yield Wrong(MIXED, turned)


def _recut(gradients: list[Tensor]) -> list[Tensor]:
    """Each cut from the beginning of the flat row."""
    flat = torch.cat([one.flatten() for one in gradients])
    return [flat[: one.numel()].view_as(one) for one in gradients]
