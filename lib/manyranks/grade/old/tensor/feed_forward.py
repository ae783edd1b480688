"""The task MLP: gated, units dealt in turn, with the residual connection inside."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from manyranks.grade.old.scripts import Scene, Tensors, Wrong
from manyranks.grade.old.tensor import given, traffic
from manyranks.grade.old.tensor.dealing import Cut, dealt, in_blocks
from manyranks.grade.old.tensor.layout import Layout, drawn
from manyranks.grade.old.tensor.lockstep import Exchange, divided, lockstep, mean, same, total, twice
from manyranks.grade.old.tensor.ready import READY, YOURSELF
from manyranks.grade.old.tensor.shards import keeps, kept, size
from manyranks.grade.old.tensor.task import (
    LISTS,
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
from manyranks.grade.old.tensor.wholes import WholeMLP, made
from manyranks.grade.old.verdict import Aspect

NAMES = ("gate.weight", "gate.bias", "up.weight", "up.bias", "down.weight", "down.bias")
_GATE_WEIGHT = "the parameter gate.weight"
_DIMS = "a unit is a row of gate and of up, and a column of down: cut these along dim 0, and down along dim 1"
_S, _B, _H, _UNITS = 6, 2, 12, 7  # units a rank
_BLOCKS = "units are dealt in turn: rank r has the units r, r + t, r + 2t, …, not neighbours"
_STACKED = (
    "the first F rows of gate_up are gates, the others ups: cut each half by itself. A part of all 2F rows has gates on some "
    "ranks and ups on the others"
)
_HALVES = "the first U rows of gate_up are the gate's, the other U are up's: chunk(2), then deal"
_NO_G = "that is this rank's part of the sum: g adds the parts up"
_NO_F = (
    "x's gradient through the units is only this rank's part: x has to pass through f before the units, which sums in backward"
)
_SWAPPED = "f and g are swapped: x goes through f before the units, what down gives goes through g"
_BIAS = "each rank has added down's bias to its part, so that the sum has it t times: add it after g"
_RESIDUAL = "each rank has added x to its part, so that the sum has it t times: add x after g"
_BOTH = "each rank has added x and down's bias to its part, so that the sum has them t times: add them after g"
_THROUGH_F = (
    "the residual connection's gradient is the same on all ranks, and f has summed it: give f's result to the units, and add x "
    "itself in the end"
)
_F_TWICE = "x's gradient is summed twice: one f before the units, for gate and up together"
_G_TWICE = "that is summed twice: one g"
_MEAN = "that is a mean of the ranks' parts, not their sum"
_SUMS_BACK = (
    "the gradients are t times too large: g is silent in backward. Was the sum made by a function that sums there, too?"
)
_FIRST = (
    "one rank alone adds it to its part: the sum has it once, but the other ranks find no gradient for it. Add it "
    "after g, on all ranks"
)
_GELU = "GELU of a sum is not the sum of GELUs: a rank computes its units whole, from all of x, and only what follows is a sum"
_NO_RESIDUAL = "x is missing: the result is x + down(…)"
_NO_BIAS = "down's bias is missing: it is added once, after g"
_GATE = "the gate is what goes through GELU: F.gelu(gate) * up"
_UNEXPLAINED = "f in front of the units, g behind the product with down, and then, once, its bias and x itself"
_TANH = "that is GELU's approximation by tanh: F.gelu(gate) as it is"


@dataclass(frozen=True)
class Way:
    """How it is computed; the defaults are right.

    f, g: what is exchanged forward and backward, at the two ends; middle: the same of the gate's products; before, first,
    after: what is added to a rank's part, to the first one's, and to the sum; through_f: whether the residual connection is;
    cut, stacked: how gate_up is cut, and whether both halves are at once; late: whether GELU comes after the sum.
    """

    f: tuple[Exchange, Exchange] = (same, total)
    g: tuple[Exchange, Exchange] = (total, same)
    middle: tuple[Exchange, Exchange] = (same, same)
    before: tuple[str, ...] = ()
    first: tuple[str, ...] = ()
    after: tuple[str, ...] = ("x", "bias")
    through_f: bool = False
    cut: Cut = dealt
    stacked: bool = False
    late: bool = False
    unit: Callable[[Tensor, Tensor], Tensor] = lambda gate, up: F.gelu(gate) * up


RIGHT = Way()


def shards_of(whole: WholeMLP, rank: int, t: int, way: Way = RIGHT) -> Tensors:
    """A rank's parameters, as leaves."""
    parts = {}
    for name in ("weight", "bias"):
        fused = getattr(whole.gate_up, name)
        if way.stacked:
            gate, up = way.cut(fused, 0, rank, t).chunk(2)
        else:
            gate, up = (way.cut(half, 0, rank, t) for half in fused.chunk(2))
        parts |= {f"gate.{name}": gate, f"up.{name}": up}
    parts |= {"down.weight": way.cut(whole.down.weight, 1, rank, t), "down.bias": whole.down.bias}
    return {name: parts[name].detach().clone().requires_grad_() for name in NAMES}


def _run(layout: Layout, kind: Callable, watch) -> Tensors:
    watch.refuse(READY, YOURSELF)
    group, number, _, _ = layout.place()
    sizes = _H, _UNITS * layout.t
    shards = size(shards_of(made(WholeMLP, 31, *sizes), 0, layout.t))
    module = kept(watch, lambda: kind(made(WholeMLP, 31 + number, *sizes), given.f, given.g, group), shards)
    own = parameters(module, NAMES, "MLP")
    found = prefixed({name: own[name].detach().clone() for name in NAMES}, "the parameter")
    x = drawn(40 + number, _S, _B, _H).requires_grad_()
    watch.mark("forward")
    y = result_of(module(x), x)
    watch.mark("backward")
    y.backward(drawn(50 + number, _S, _B, _H))
    untouched(watch, "x", [x.detach()], [drawn(40 + number, _S, _B, _H)])
    found |= {"the result": y.detach().clone(), "the gradient of x": gradient(x)}
    return found | prefixed({name: gradient(own[name]) for name in NAMES}, "the gradient of")


def _results(layout: Layout, way: Way, number: int) -> list[Tensors]:
    t, xs = layout.t, [drawn(40 + number, _S, _B, _H).requires_grad_() for _ in range(layout.t)]
    whole = made(WholeMLP, 31 + number, _H, _UNITS * t)
    own = [shards_of(whole, rank, t, way) for rank in range(t)]
    results = _forward(xs, own, way)
    torch.autograd.backward(results, [drawn(50 + number, _S, _B, _H)] * t)
    return [
        prefixed({name: p.detach() for name, p in own[r].items()}, "the parameter")
        | {"the result": results[r].detach(), "the gradient of x": gradient(xs[r])}
        | prefixed({name: gradient(p) for name, p in own[r].items()}, "the gradient of")
        for r in range(t)
    ]


def _forward(xs: list[Tensor], own: list[Tensors], way: Way) -> list[Tensor]:
    """The ranks' results."""
    inside = lockstep(xs, *way.f)
    pairs = list(zip(inside, own, strict=True))
    gates = lockstep([F.linear(x, p["gate.weight"], p["gate.bias"]) for x, p in pairs], *way.middle)
    ups = [F.linear(x, p["up.weight"], p["up.bias"]) for x, p in pairs]
    units = [gate * up if way.late else way.unit(gate, up) for gate, up in zip(gates, ups, strict=True)]
    terms = [{"x": i if way.through_f else x, "bias": p["down.bias"]} for x, (i, p) in zip(xs, pairs, strict=True)]
    parts = [F.linear(h, p["down.weight"]) for h, p in zip(units, own, strict=True)]
    parts = [part + sum(mine[name] for name in way.before) for part, mine in zip(parts, terms, strict=True)]
    parts[0] = parts[0] + sum(terms[0][name] for name in way.first)
    sums = lockstep(parts, *way.g)
    sums = [F.gelu(whole) if way.late else whole for whole in sums]
    return [whole + sum(mine[name] for name in way.after) for whole, mine in zip(sums, terms, strict=True)]


_WAYS = [
    (_BLOCKS, Way(cut=in_blocks)),
    (_STACKED, Way(cut=in_blocks, stacked=True)),
    (_NO_G, Way(g=(same, same))),
    (_SWAPPED, Way(f=(total, same), g=(same, total))),
    (_SUMS_BACK, Way(g=(total, total))),
    (_NO_F, Way(f=(same, same))),
    (_BIAS, Way(before=("bias",), after=("x",))),
    (_RESIDUAL, Way(before=("x",), after=("bias",))),
    (_BOTH, Way(before=("x", "bias"), after=())),
    (_THROUGH_F, Way(through_f=True)),
    (_THROUGH_F, Way(through_f=True, before=("x",), after=("bias",))),
    (_F_TWICE, Way(f=(same, twice))),
    (_G_TWICE, Way(g=(twice, same))),
    (_MEAN, Way(g=(mean, same))),
    (_MEAN, Way(g=(mean, divided))),
    (_FIRST, Way(first=("bias",), after=("x",))),
    (_FIRST, Way(first=("x", "bias"), after=())),
    (_FIRST, Way(first=("x",), after=("bias",))),
    (_MEAN, Way(f=(same, mean))),
    (_GELU, Way(late=True)),
    (_GELU, Way(middle=(total, same))),
    (_GELU, Way(middle=(total, total))),
    (_NO_RESIDUAL, Way(after=("bias",))),
    (_NO_BIAS, Way(after=("x",))),
    (_GATE, Way(unit=lambda gate, up: gate * F.gelu(up))),
    (_TANH, Way(unit=lambda gate, up: F.gelu(gate, approximate="tanh") * up)),
]


_OTHER_ROWS: list[tuple[str, Callable[[Tensor, int, int], Tensor]]] = [
    (_HALVES, lambda fused, rank, t: fused.chunk(2)[1][rank::t]),
    (_HALVES, lambda fused, rank, t: fused[::2][rank::t]),
    (_HALVES, lambda fused, rank, t: fused[rank::t][::2]),
]


def _gates(layout: Layout, cut: Callable[[Tensor, int, int], Tensor], number: int) -> list[Tensors]:
    fused = made(WholeMLP, 31 + number, _H, _UNITS * layout.t).gate_up.weight.detach()
    return [{_GATE_WEIGHT: cut(fused, rank, layout.t)} for rank in range(layout.t)]


def _gates_by_world(layout: Layout, t: int, number: int) -> list[Tensors]:
    """Cut by the rank of the world."""
    gate = made(WholeMLP, 31 + number, _H, _UNITS * layout.t).gate_up.weight.detach().chunk(2)[0]
    return [{_GATE_WEIGHT: gate[rank::t]} for rank in layout.groups[number]]


def _wrong(layout: Layout) -> Iterator[Wrong]:
    """Those of the cut show in the gate; of the others, parameters do not matter."""
    for t in {layout.n, layout.t}:
        yield Wrong(traffic.GROUP, layout.spread(partial(_gates_by_world, layout, t)))
    for hint, cut in _OTHER_ROWS:
        yield Wrong(hint, layout.spread(partial(_gates, layout, cut)))
    for hint, way in _WAYS:
        results = layout.spread(partial(_results, layout, way))
        if hint in (_BLOCKS, _STACKED):
            yield Wrong(hint, [{_GATE_WEIGHT: own[_GATE_WEIGHT]} for own in results])
        else:
            yield Wrong(hint, [{name: own[name] for name in own if not name.startswith("the parameter")} for own in results])


@cache
def cases(n: int) -> list[Scene]:
    """On all ranks; of 4, in two pairs as well."""
    return [_scene(Layout(n, t)) for t in dict.fromkeys((n, 2 if n == 4 else n))]


def _scene(layout: Layout) -> Scene:
    x, whole = 8 * _S * _B * _H, made(WholeMLP, 0, _H, _UNITS * layout.t)
    call = (reduced(x, layout.t),)
    shards = size(shards_of(whole, 0, layout.t))
    must = Must(layout, Phases((call,), (call,)), shards, size(dict(whole.named_parameters())))
    right = layout.spread(partial(_results, layout, RIGHT))
    return Scene(
        layout.n,
        partial(_run, layout),
        right,
        lambda: telling(right, _wrong(layout)),
        must,
        f"{layout}{_UNITS * layout.t} units",
    )


@dataclass(frozen=True)
class FeedForward(TensorTask):
    unexplained: ClassVar[str] = _UNEXPLAINED
    advice: ClassVar[tuple[tuple[str, str], ...]] = (
        LISTS,
        (r"mat1 and mat2 shapes|must match the size of tensor", _DIMS),
        *TensorTask.advice,
    )
    aspects: ClassVar[tuple[Aspect, ...]] = (
        Aspect("shards, results and gradients are right", 0.5, values, each_world=True),
        keeps(0.15),
        Aspect("makes one all-reduce forward and one backward", 0.35, traffic.traffic),
    )
