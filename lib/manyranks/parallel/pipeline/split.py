"""A GPT cut into the stages of a pipeline, so that the costliest stage costs least.

    stages = split(model, 4)
    pipeline = Pipeline({2: stages[2]}, schedule, loss=loss)     # on the rank of stage 2

The embedding and the head are parts as the layers are: they cost something too, and may end
up with fewer layers beside them, or none.

They may also be one parameter, which several stages then share. Each rank that has such a
stage has a copy, and the gradient of what its own stages do with it. The parameter's
gradient is the sum: an all-reduce between these ranks, nearly always the first and the
last. Two of them swap gradients and add. That's as many bytes as any all-reduce of two
sends, and it takes no process group, which all ranks of all pipelines would have to make
together. Copies that start equal stay equal.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn

from manyranks.parallel.collectives.messages import Group, members, wait
from manyranks.parallel.pipeline.schedules import Schedule
from manyranks.parallel.shard import local

Cut = tuple[float, tuple[int, ...]]  # the sum of the stages' squares, and their sizes


class Shared(NamedTuple):
    """A parameter that several stages use, such as an embedding that is also the head."""

    parameter: nn.Parameter
    stages: tuple[int, ...]


class Stage(nn.Module):
    """Some neighboring parts of a model, one after another.

    shared: which of its parameters are in other stages, too. Pipeline adds up their
        gradients
    given: what each part is called with beside its input, as the tokens' places
    """

    def __init__(
        self,
        parts: Sequence[nn.Module],
        shared: Sequence[Shared] = (),
        given: Sequence[Tensor] = (),
    ):
        super().__init__()
        self.parts, self.shared = nn.ModuleList(parts), tuple(shared)
        self.given = tuple(given)
        self.training = self.parts.training = any(part.training for part in parts)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x, *self.given)
        return x


def split(
    model: nn.Module, stages: int, costs: Sequence[float] | None = None
) -> list[Stage]:
    """The model in so many stages, which share its parameters.

    model: has .embedding, .layers and .head
    costs: of each of these parts, in any unit, the layers one by one; None for what
        products with the weights cost: nothing in the embedding, whose rows are only looked
        up

    Raises ValueError for a model without these, for more stages than parts, and for costs
    that are not one a part.
    """
    parts = _parts(model)
    costs = [cost(part) for part in parts] if costs is None else list(costs)
    if len(costs) != len(parts):
        raise ValueError(f"{len(costs)} costs for {len(parts)} parts: give one for each")
    return dealt(model, balanced(costs, stages))


def dealt(
    model: nn.Module, sizes: Sequence[int], given: Sequence[Tensor] = ()
) -> list[Stage]:
    """Splits as split does, into stages of so many parts each.

    given: as Stage's

    Raises ValueError for a model as split does, and for sizes that aren't of all parts.
    """
    parts = _parts(model)
    if sum(sizes) != len(parts) or min(sizes) < 1:
        raise ValueError(
            f"stages of {list(sizes)} parts: the model has {len(parts)} (the embedding, "
            f"{len(parts) - 2} layers and the head); give each stage one or more of them"
        )
    ends = [0, *accumulate(sizes)]
    cut = [parts[first:end] for first, end in pairwise(ends)]
    return [Stage(own, _shared(cut, s), given) for s, own in enumerate(cut)]


def _parts(model: nn.Module) -> list[nn.Module]:
    names = "embedding", "layers", "head"
    if missing := [name for name in names if not hasattr(model, name)]:
        raise ValueError(
            f"{type(model).__name__} has no {' and no '.join(missing)}: give one "
            "whose .embedding, .layers and .head take one tensor each; of another, make "
            "stages of neighboring layers for Pipeline, as in Your own model"
        )
    return [model.embedding, *model.layers, model.head]


def balanced(costs: Sequence[float], stages: int) -> list[int]:
    """Returns how many neighboring parts each stage gets, at least one.

    The largest sum of a stage is the smallest that there is; among such cuts, the one whose
    other stages are nearest to equal (by the sum of squares).
    Raises ValueError for more stages than parts, none, or a cost below 0.
    """
    n = len(costs)
    if type(stages) is not int or not 1 <= stages <= n:
        raise ValueError(
            f"stages={stages!r}: the model has {n} parts (the embedding, {n - 2} layers "
            f"and the head), and each stage needs one; give 1 to {n}, or more layers"
        )
    if min(costs) < 0:
        raise ValueError(f"a cost of {min(costs)}: give 0 or more")
    sums = [0.0, *accumulate(costs)]
    candidates = sorted({sums[j] - sums[i] for j in range(n + 1) for i in range(j)})
    fits = partial(_fits, sums, stages)
    most = candidates[bisect_left(candidates, True, key=fits)]
    # By how many parts the stages so far have: the most even cut of these.
    even: dict[int, Cut] = {0: (0.0, ())}
    for stage in range(1, stages + 1):
        ends = range(stage, n - (stages - stage) + 1)
        cuts = {end: _extended(even, sums, end, most) for end in ends}
        even = {end: min(found) for end, found in cuts.items() if found}
    return list(even[n][1])


def _fits(sums: list[float], stages: int, most: float) -> bool:
    """Returns whether so many stages are enough if none may cost more than `most`."""
    begin, n = 0, len(sums) - 1
    for _ in range(stages):
        ends = (end for end in range(n, begin, -1) if sums[end] - sums[begin] <= most)
        begin = next(ends, begin)
    return begin == n


def _extended(even: dict[int, Cut], sums: list[float], end: int, most: float) -> list[Cut]:
    """The cuts of the parts before `end`, by where their last stage begins."""
    cuts = []
    for begin, (squares, sizes) in even.items():
        if begin < end and (own := sums[end] - sums[begin]) <= most:
            cuts.append((squares + own**2, (*sizes, end - begin)))
    return cuts


def cost(part: nn.Module) -> float:
    """Elements of the weights that the part multiplies by: its FLOPs per token ÷ 6.

    Not counted: attention's scores, the same in every layer.
    """
    looked_up = {m.weight for m in part.modules() if isinstance(m, nn.Embedding)}
    return sum(p.numel() for p in part.parameters() if p.dim() > 1 and p not in looked_up)


def _shared(cut: list[list[nn.Module]], stage: int) -> list[Shared]:
    """The stage's parameters that are in other stages, too, in the order of the model."""
    of = [{p for part in parts for p in part.parameters()} for parts in cut]
    own = dict.fromkeys(p for part in cut[stage] for p in part.parameters())
    used = {p: tuple(s for s in range(len(cut)) if p in of[s]) for p in own}
    return [Shared(p, stages) for p, stages in used.items() if len(stages) > 1]


class Tied:
    """This rank's parameters that other ranks' stages have, too.

    shared: all of its stages', also those that no other rank has.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        schedule: Schedule,
        group: Group,
    ):
        copies = [
            Shared(parameter, (s,))
            for s, stage in stages.items()
            for parameter in stage.parameters()
            if len(schedule.ranks_of(s)) > 1 and parameter.requires_grad
        ]
        self.shared = copies + [
            one
            for stage in stages.values()
            for part in stage.modules()
            for one in (part.shared if isinstance(part, Stage) else ())
            if one.parameter.requires_grad
        ]
        self._everyone = members(group)
        self._shared_by: dict[tuple[int, ...], list[nn.Parameter]] = {}
        self._summed = False
        placed = {
            p: sorted({r for s in of for r in schedule.ranks_of(s)})
            for p, of in self.shared
        }
        for parameter, ranks in placed.items():
            if len(ranks) > 1:
                self._shared_by.setdefault(tuple(ranks), []).append(parameter)

    def begin(self) -> None:
        """Begins a step: gradients of earlier ones count once, if finish() summed them."""
        for ranks, parameters in self._shared_by.items() if self._summed else ():
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad /= len(ranks)
        self._summed = False

    def finish(self) -> None:
        """Ends a step: each gradient becomes the sum of the ranks', in their order."""
        for ranks, parameters in sorted(self._shared_by.items(), key=lambda one: one[0]):
            for parameter in parameters:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            grads = [local(parameter.grad) for parameter in parameters]
            parts = self._swapped(torch.cat([grad.flatten() for grad in grads]), ranks)
            sums = sum(parts[1:], start=parts[0]).split([grad.numel() for grad in grads])
            for grad, total in zip(grads, sums, strict=True):
                grad.copy_(total.view_as(grad))
        self._summed = True

    def _swapped(self, own: Tensor, ranks: tuple[int, ...]) -> list[Tensor]:
        """The rows of all these ranks, in their order."""
        rank = self._everyone.place
        parts = {r: own if r == rank else torch.empty_like(own) for r in ranks}
        others = [r for r in ranks if r != rank]
        works = [self._everyone.post(own, r, parts[r], r) for r in others]
        for both in works:
            wait(both)
        return list(parts.values())
