"""The task Block: sequence parallelism around an MLP, with its norm, dropout and residual connection."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from manyranks.grade.old.compare import sizes
from manyranks.grade.old.scripts import Scene, Tensors, Wrong
from manyranks.grade.old.tensor import given, masks, traffic
from manyranks.grade.old.tensor.dealing import in_blocks
from manyranks.grade.old.tensor.layout import Layout
from manyranks.grade.old.tensor.lockstep import (
    divided,
    gathered,
    mean,
    nothing,
    own_part,
    padded,
    repeated,
    same,
    scattered,
    total,
)
from manyranks.grade.old.tensor.masks import KEPT, P
from manyranks.grade.old.tensor.memory import Made
from manyranks.grade.old.tensor.positions import NAMES, RIGHT, UPSTREAM, B, H, S, Way, X, computed, shard, shards_of, whole_of
from manyranks.grade.old.tensor.ready import READY, YOURSELF
from manyranks.grade.old.tensor.shards import keeps, kept, size
from manyranks.grade.old.tensor.strides import Strides, contiguous_traffic
from manyranks.grade.old.tensor.task import (
    Must,
    TensorTask,
    gradient,
    parameters,
    prefixed,
    result_of,
    telling,
    untouched,
    values,
)
from manyranks.grade.old.tensor.traffic import Phases, reduced
from manyranks.grade.old.tensor.wholes import WholeBlock
from manyranks.grade.old.trial import Trial
from manyranks.grade.old.verdict import Aspect, Verdict

_PARTIAL = ("norm.weight", "norm.bias", "down.bias")
_WHOLE = 8 * S * B * H  # bytes of all positions
_UP_WEIGHT = "the parameter up.weight"
_LARGEST = "largest alive"  # a mark
_BLOCKS = "units are dealt in turn: rank r has the units r, r + t, r + 2t, …, not neighbours"
_ALL_THREE = (
    "norm's parameters and down's bias work on this rank's positions only, so that each rank finds a part of their "
    "gradients: f is for what ranks have alike and use for different things. One f for the three"
)
_NORM = f"norm's gradients are this rank's positions' only. {_ALL_THREE}"
_BIAS = (
    "down's bias belongs into f's list: it is added after the reduce-scatter, so its gradient is this rank's positions' only. "
    f"{_ALL_THREE}"
)
_NORM_OWN = "norm has the whole norm's weight and bias: copy them, or take whole.norm itself"
_NORMED = "x itself is added, not norm(x)"
_F_ON_X = "x's shard is this rank's alone: not through f, which would add up gradients of different positions"
_MULTIPLE = "what is whole is not summed, and a sum is not divided by t"
_MEAN = "that is a mean: the gradient of what all ranks have alike is the sum of what they find"
_G_ON_WEIGHTS = "parameters are added up in forward: that is g. f leaves them as they are, and sums their gradients"
_UNITS_SUMMED = (
    "up's weights, and down's, are other ones on each rank: their gradients are whole after the gather, and not to be summed"
)
_T_TIMES = "each rank has added down's bias to its part, so that the sum has it t times: add it after the reduce-scatter"
_OWN_GRADIENT = (
    "the gradient of what was gathered is only this rank's: each rank has used all positions, so the gradients of a "
    "position are added up over the ranks, and go back to the one that has it: a reduce-scatter"
)
_NOT_GATHERED = (
    "behind the reduce-scatter, a rank knows the gradient of its own positions only, but has added to all of them: backward "
    "gathers"
)
_UNSEEN = (
    "autograd does not see what dist's calls do: inside a torch.autograd.Function, backward says what becomes of a gradient"
)
_NOT_SUMMED = "that is this rank's part of the sum: a reduce-scatter adds the parts up, and leaves each rank its positions"
_DIVIDED = "that is divided by t: sums are not"
_UNEXPLAINED = (
    "y = x + dropout(down(gelu(up(norm(x))))): the gather and the reduce-scatter go by ranks, along the first dim, "
    "and are each other's backward"
)
_NO_DROPOUT = (
    "an element of the sum is either dropped or divided by 1 − p. Dropout comes last, before x is added: after the "
    "reduce-scatter and the bias, and on this rank's positions"
)
_WHOLE_KEPT = (
    "the gathered positions are not kept: a product with weights keeps its input, so do the gather and that product in one "
    "torch.autograd.Function, which keeps the shard and gathers it again in backward. The norm and dropout work on shards"
)
_NO_ALL_REDUCE = (
    "an all-reduce gives each rank all positions, with twice the bytes of a reduce-scatter: what is outside the units has a "
    "rank's positions only"
)
_SEPARATE = "one all-reduce for the gradients of norm and of down's bias: f takes a list"


def _sum_of(whole: WholeBlock, x_sBH: Tensor) -> Tensor:
    """What dropout is applied to."""
    with torch.no_grad():
        return whole.down(F.gelu(whole.up(whole.norm(x_sBH))))


def _transposed(x_sBH: Tensor) -> Tensor:
    """The same numbers, not contiguous."""
    return x_sBH.transpose(0, 1).contiguous().transpose(0, 1)


def _run(layout: Layout, seeds: tuple[int, ...], transposed: bool, kind: Callable, watch) -> Tensors:
    """seeds: of the forwards, of which the first has a backward, too; none where p is 0. transposed: x and y's gradient are."""
    placed = _transposed if transposed else Tensor.contiguous
    watch.refuse(READY, YOURSELF)
    group, number, rank, _ = layout.place()
    whole, t = whole_of(number, layout.t), layout.t
    shards = size(shards_of(whole, 0, t))
    module = kept(watch, lambda: kind(whole_of(number, t), P if seeds else 0.0, given.f, group), shards)
    own = parameters(module, NAMES, "Block")
    found = prefixed({name: own[name].detach().clone() for name in NAMES}, "the parameter")
    x = placed(shard(X + number, rank, t)).requires_grad_()
    first, *others = seeds or (1,)
    with Strides() as strides, Made() as memory:
        watch.mark("forward")
        y = result_of(module(x, first), x)
        watch.mark(f"{_LARGEST} {memory.largest_alive(_WHOLE)}")
        watch.mark("backward")
        y.backward(placed(shard(UPSTREAM + number, rank, t)))
    watch.mark(traffic.AGAIN)
    strides.note(watch)
    untouched(watch, "x", [x.detach()], [shard(X + number, rank, t)])
    results = [y.detach(), *(module(x, seed).detach() for seed in others)]
    right = _sum_of(whole, x)
    found |= {f"{KEPT} {i}": masks.read(result, x, right) for i, result in enumerate(results) if seeds}
    found |= {"the result": y.detach().clone(), "the gradient of x": gradient(x)}
    return found | prefixed({name: gradient(own[name]) for name in NAMES}, "the gradient of")


_NONE = (same, same)
_WAYS = [
    (_BLOCKS, Way(cut=in_blocks)),
    (_ALL_THREE, Way(norm=_NONE, bias=_NONE)),
    (_NORM, Way(norm=_NONE)),
    (_BIAS, Way(bias=_NONE)),
    (_MEAN, Way(norm=(same, mean), bias=(same, mean))),
    (_MEAN, Way(norm=(same, mean))),
    (_G_ON_WEIGHTS, Way(norm=(total, same), bias=(total, same))),
    (_UNITS_SUMMED, Way(units=(same, total))),
    (_NORMED, Way(residual="normed")),
    (_F_ON_X, Way(x=(same, total), residual="own x")),
    (_F_ON_X, Way(x=(same, total))),
    (_T_TIMES, Way(early=True, bias=_NONE)),
    (_T_TIMES, Way(early=True)),
    (_OWN_GRADIENT, Way(gather=(gathered, own_part))),
    (_UNSEEN, Way(gather=(gathered, nothing(own_part)))),
    (_UNSEEN, Way(scatter=(scattered, nothing(padded)))),
    (_NOT_GATHERED, Way(scatter=(scattered, padded))),
    (_NOT_GATHERED, Way(scatter=(scattered, repeated))),
    (_NOT_SUMMED, Way(scatter=(own_part, padded))),
    (_NOT_SUMMED, Way(scatter=(own_part, gathered))),
    (_DIVIDED, Way(scatter=(lambda parts: scattered(divided(parts)), gathered))),
    (_DIVIDED, Way(scatter=(lambda parts: scattered(divided(parts)), lambda grads: gathered(divided(grads))))),
    (_DIVIDED, Way(gather=(gathered, lambda grads: scattered(divided(grads))))),
]


def _wrong(layout: Layout) -> Iterator[Wrong]:
    """Those of the cut show in up, a norm of its own in its parameters; of the others, parameters do not matter."""
    plain = {"the parameter norm.weight": torch.ones(H).double(), "the parameter norm.bias": torch.zeros(H).double()}
    yield Wrong(_NORM_OWN, [plain] * layout.n)
    for hint, way in _WAYS:
        results = layout.spread(partial(computed, layout, way, None))
        if hint == _BLOCKS:
            yield Wrong(hint, [{_UP_WEIGHT: own[_UP_WEIGHT]} for own in results])
        else:
            yield Wrong(hint, [{name: own[name] for name in own if not name.startswith("the parameter")} for own in results])


@cache
def cases(n: int) -> list[Scene]:
    """Without dropout on all ranks, with it, with tensors that are not contiguous; of 4, in two pairs."""
    world, pairs = Layout(n, n), [_scene(Layout(4, 2), ())] if n == 4 else []
    return [_scene(world, ()), _scene(world, masks.seeds(n)), *pairs, _scene(world, (), transposed=True)]


def _scene(layout: Layout, seeds: tuple[int, ...], transposed: bool = False) -> Scene:
    t, x, whole = layout.t, _WHOLE, whole_of(0, layout.t)
    gather, scatter, small = ("all_gather", x // t, t), ("reduce_scatter", x, t), reduced(8 * len(_PARTIAL) * H, t)
    phases = Phases(((gather, scatter),), ((gather, gather, scatter, small), (gather, scatter, small)))
    shards = size(shards_of(whole, 0, t))
    must = Must(layout, phases, shards, size(dict(whole.named_parameters())), seeds)
    right = layout.spread(partial(computed, layout, RIGHT, None))
    wrong = tuple if seeds else lambda: telling(right, _wrong(layout))
    note = f"{layout}p = {P if seeds else 0:g}" + ", x and the result's gradient not contiguous" * transposed
    return Scene(layout.n, partial(_run, layout, seeds, transposed), right, wrong, must, note)


def _values(task: "Block", trial: Trial) -> Verdict:
    """With the masks that the ranks have drawn, where there is dropout."""
    layout, seeds = trial.case.must.layout, trial.case.must.seeds
    if not seeds:
        return _explained(task, trial, values(task, trial))
    kept_by = [seen.tensors[f"{KEPT} 0"] for seen in trial.answers]
    for rank, one in enumerate(kept_by):
        if not masks.is_dropout(one):
            wrong = f"rank {rank}: what was added to x is not what dropout makes of the sum"
            return Verdict(False, wrong, traffic.traffic(task, trial).hint or _NO_DROPOUT)
    right = layout.spread(partial(computed, layout, RIGHT, [one.round() for one in kept_by]))
    trial = replace(trial, case=replace(trial.case, expected=right))
    return _explained(task, trial, values(task, trial))


def _explained(task: "Block", trial: Trial, verdict: Verdict) -> Verdict:
    """With a hint for shards of another group, and for gradients that are multiples, where no known mistake explains values."""
    if verdict.ok or verdict.hint not in (task.unexplained, traffic.traffic(task, trial).hint):
        return verdict
    pairs = [(seen.tensors, right) for seen, right in zip(trial.answers, trial.case.expected, strict=True)]
    layout = trial.case.must.layout
    if layout.t < layout.n and any(got[_UP_WEIGHT].shape != right[_UP_WEIGHT].shape for got, right in pairs):
        return verdict._replace(hint=traffic.GROUP)
    multiples = {name: _multiple(pairs, name) for name in pairs[0][1] if name.startswith("the gradient")}
    told = next((f"{name} is {times:.4g} times the right one" for name, times in multiples.items() if times), "")
    return verdict._replace(hint=f"{told}, on each rank: {_MULTIPLE}") if told else verdict


def _multiple(pairs: list[tuple[Tensors, Tensors]], name: str) -> float:
    """What all ranks' gradients are of the right ones; 0 where there is no such number, or they are right."""
    if any(got[name].shape != right[name].shape for got, right in pairs):
        return 0.0
    got, right = (torch.stack([pair[i][name].double() for pair in pairs]) for i in (0, 1))
    times = ((got * right).sum() / right.square().sum()).item()
    return times if torch.allclose(got, times * right, 1e-9) and not abs(times) < 1e-9 and abs(times - 1) > 1e-9 else 0.0


def _whole_alive(task: "Block", trial: Trial) -> Verdict:
    """After forward, no tensor has all positions."""
    for rank, seen in enumerate(trial.answers):
        got = next(int(event.what.split()[-1]) for event in seen.events if event.what.startswith(_LARGEST))
        if got >= _WHOLE:
            there, here = sizes(got, _WHOLE // trial.case.must.layout.t)
            return Verdict(False, f"rank {rank} keeps a tensor of {there} after forward; a shard of x has {here}", _WHOLE_KEPT)
    return Verdict(True)


@dataclass(frozen=True)
class Block(TensorTask):
    unexplained: ClassVar[str] = _UNEXPLAINED
    advice: ClassVar[tuple[tuple[str, str], ...]] = (
        (r"in two pairs.*(must match|shape|size|returned \[)", traffic.GROUP),
        *TensorTask.advice,
    )
    aspects: ClassVar[tuple[Aspect, ...]] = (
        Aspect("shards, results and gradients are right", 0.4, _values, each_world=True),
        keeps(0.05),
        Aspect("drops other elements on each rank, and with each seed", 0.2, masks.differ),
        Aspect("gathers and reduce-scatters, and sums norm's and the bias's gradients in one call", 0.2, contiguous_traffic),
        Aspect("keeps no tensor with the whole sequence", 0.15, _whole_alive),
    )

    def why_traffic(self, phase, got, phases):
        ops = {op for op, _, _ in got[phase]}
        sums = [size for op, size, _ in got[phase] if op == "all_reduce"]
        if phase == "made":
            return super().why_traffic(phase, got, phases)
        if sums and max(sums) >= min(size for op, size, _ in phases.forward[0] if op == "reduce_scatter"):
            return _NO_ALL_REDUCE
        if phase == "backward" and len(sums) > 1:
            return _SEPARATE
        if phase == "backward" and not sums and ops:
            return _ALL_THREE
        return _UNEXPLAINED
