"""The task Attention: heads dealt in turn, keys and values of a memory, key/value heads that several ranks share."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from manyranks.grade.old.scripts import Scene, Tensors, Wrong
from manyranks.grade.old.tensor import given, traffic
from manyranks.grade.old.tensor.dealing import Cut, dealt, heads, in_blocks
from manyranks.grade.old.tensor.layout import Layout, drawn
from manyranks.grade.old.tensor.lockstep import Exchange, divided, lockstep, mean, same, shared, total, twice
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
from manyranks.grade.old.tensor.wholes import WholeAttention, attended, made
from manyranks.grade.old.verdict import Aspect

NAMES = ("query.weight", "key.weight", "value.weight", "output.weight")
_S, _T, _B, _H, _D = 5, 7, 2, 12, 4
_BLOCKS = "heads are dealt in turn: rank r has the query heads r, r + t, r + 2t, …, not neighbours"
_ROWS = "cut whole heads: head j is rows j·D to (j + 1)·D (columns in output): weight.unflatten(0, (-1, D))[r::t].flatten(0, 1)"
_KV = "rank r needs the key/value heads of its query heads: r, r + t, … where there are t or more, else head r % kv_heads alone"
_NEIGHBOURS = (
    "query head j uses key/value head j % kv_heads. repeat_interleave, and sdpa's enable_gqa, let neighbours share one: with "
    "heads dealt in turn, a rank's query head i uses its key/value head i % (how many it has)"
)
_NOT_SHARED = (
    "several ranks have this key/value head, and each finds only what its own query heads add to the gradient: sum it over "
    "`sharers`. f is for anything that ranks have alike and use for different things: weights, too"
)
_ALL_SHARED = "key's and value's gradients are summed over ranks that have other heads: only `sharers` have this rank's"
_NO_KV = "this rank has no key/value head: r % kv_heads"
_ON_PRODUCTS = (
    "memory's gradient is summed twice, by sharers and by the group: f stands before key's and value's weights, not behind "
    "the product"
)
_SHARED_MEAN = "that is a mean: the gradient of a shared head is the sum of what the ranks that share it find"
_G_SHARED = (
    "g on shared weights adds the weights themselves: f leaves them as they are in forward, and sums their gradients "
    "in backward"
)
_NO_MEMORY = "memory comes to all ranks as x does: it has to pass through f, too, in the same call"
_NO_X = "x has to pass through f, as memory does, in the same call"
_NO_F = "x and memory have to pass through f: their gradients are the sums of what the ranks' heads find"
_NO_G = "that is the part of this rank's heads: g adds the parts up"
_SWAPPED = "f and g are swapped: x and memory go through f before the heads, what output gives goes through g"
_SUMS_BACK = (
    "the gradients are t times too large: g is silent in backward. Was the sum made by a function that sums there, too?"
)
_MEAN = "that is a mean of the ranks' parts, not their sum"
_TWICE = "that is summed twice: one f at the start, one g in the end"
_SHAPES = (
    "a head is D rows of query, key and value, and D columns of output. Rank r has the key/value heads of its query heads: "
    "r, r + t, … where there are t or more, else head r % kv_heads alone"
)
_UNEXPLAINED = (
    "f in front, for x, memory and shared weights; attend on the rank's heads as on the whole; g behind output, which has the "
    "columns of the rank's query heads"
)
_SCALE = "scores are divided by √D, D the size of one head: F.scaled_dot_product_attention does that by itself"


class Heads(NamedTuple):
    """How many, of queries and of keys and values."""

    query: int
    kv: int


_DEALT = heads(dealt, _D)


@dataclass(frozen=True)
class Way:
    """How it is computed; the defaults are right. of_x, of_memory: what f does with each; weights, products: with
    key's and value's, where so many key/value heads are there; kv_cut: how their rows are cut, if not by heads.
    """

    of_x: tuple[Exchange, Exchange] = (same, total)
    of_memory: tuple[Exchange, Exchange] = (same, total)
    g: tuple[Exchange, Exchange] = (total, same)
    weights: Callable[[int], tuple[Exchange, Exchange]] = lambda kv: (same, shared(kv))
    products: Callable[[int], tuple[Exchange, Exchange]] = lambda kv: (same, same)
    cut: Cut = _DEALT
    kv_cut: Cut | None = None
    kv: Callable[[int, int, int], list[int]] = lambda kv, rank, t: sorted({j % kv for j in range(rank, kv * t, t)})
    neighbours: bool = False
    scale: float = 1


RIGHT = Way()


def shards_of(whole: WholeAttention, rank: int, t: int, way: Way = RIGHT) -> Tensors:
    """A rank's parameters, as leaves."""
    own = torch.tensor(way.kv(whole.kv_heads, rank, t))
    parts = {name: getattr(whole, name).weight.unflatten(0, (-1, _D))[own].flatten(0, 1) for name in ("key", "value")}
    if way.kv_cut:
        parts = {name: way.kv_cut(getattr(whole, name).weight, 0, rank, t) for name in parts}
    parts |= {"query": way.cut(whole.query.weight, 0, rank, t), "output": way.cut(whole.output.weight, 1, rank, t)}
    return {name: parts[name.partition(".")[0]].detach().clone().requires_grad_() for name in NAMES}


def _inputs(number: int) -> tuple[Tensor, Tensor]:
    return drawn(60 + number, _S, _B, _H), drawn(70 + number, _T, _B, _H)


def _whole(number: int, count: Heads) -> WholeAttention:
    return made(WholeAttention, 80 + number, _H, _D, *count)


def _run(layout: Layout, count: Heads, kind: Callable, watch) -> Tensors:
    watch.refuse(READY, YOURSELF)
    group, number, _, sharers = layout.place()
    shards = size(shards_of(_whole(0, count), 0, layout.t))
    module = kept(watch, lambda: kind(_whole(number, count), given.f, given.g, group, sharers), shards)
    own = parameters(module, NAMES, "Attention")
    found = prefixed({name: own[name].detach().clone() for name in NAMES}, "the parameter")
    x, memory = (tensor.requires_grad_() for tensor in _inputs(number))
    watch.mark("forward")
    y = result_of(module(x, memory), x)
    watch.mark("backward")
    y.backward(drawn(90 + number, _S, _B, _H))
    untouched(watch, "x or memory", [x.detach(), memory.detach()], list(_inputs(number)))
    found |= {"the result": y.detach().clone(), "the gradient of x": gradient(x), "the gradient of memory": gradient(memory)}
    return found | prefixed({name: gradient(own[name]) for name in NAMES}, "the gradient of")


def _results(layout: Layout, count: Heads, way: Way, number: int) -> list[Tensors]:
    t = layout.t
    leaves = [[tensor.requires_grad_() for tensor in _inputs(number)] for _ in range(t)]
    own = [shards_of(_whole(number, count), rank, t, way) for rank in range(t)]
    results = _forward(leaves, own, count, way)
    torch.autograd.backward(results, [drawn(90 + number, _S, _B, _H)] * t)
    return [
        prefixed({name: p.detach() for name, p in own[r].items()}, "the parameter")
        | {"the result": results[r].detach()}
        | {"the gradient of x": gradient(leaves[r][0]), "the gradient of memory": gradient(leaves[r][1])}
        | prefixed({name: gradient(p) for name, p in own[r].items()}, "the gradient of")
        for r in range(t)
    ]


def _forward(leaves: list[list[Tensor]], own: list[Tensors], count: Heads, way: Way) -> list[Tensor]:
    """The ranks' results."""
    xs, memories = lockstep([x for x, _ in leaves], *way.of_x), lockstep([m for _, m in leaves], *way.of_memory)
    key, value = (
        lockstep([p[name] for p in own], *way.weights(min(count.kv, len(own)))) for name in ("key.weight", "value.weight")
    )
    keys, contents = (
        lockstep([F.linear(memory, weight) for memory, weight in zip(memories, weights, strict=True)], *products)
        for weights, products in ((w, way.products(min(count.kv, len(own)))) for w in (key, value))
    )
    parts = []
    for rank, p in enumerate(own):
        query = F.linear(xs[rank], p["query.weight"]) * way.scale
        parts.append(F.linear(attended(query, keys[rank], contents[rank], _D, way.neighbours), p["output.weight"]))
    return lockstep(parts, *way.g)


def _divided(kv: int) -> tuple[Exchange, Exchange]:
    return same, lambda grads: [grad / (len(grads) // kv) for grad in shared(kv)(grads)]


_CUTS = {_BLOCKS: ("query", "output"), _KV: ("key", "value")}  # hint -> the parameters that show it
_WAYS = [
    (_BLOCKS, Way(cut=heads(in_blocks, _D))),
    (_KV, Way(kv=lambda kv, rank, t: list(range(kv)))),
    (_KV, Way(kv=lambda kv, rank, t: [k + rank * kv // t for k in range(max(1, kv // t))])),
    (_KV, Way(kv=lambda kv, rank, t: [rank * kv // t])),
    (_NO_G, Way(g=(same, same))),
    (_SWAPPED, Way(of_x=(total, same), of_memory=(total, same), g=(same, total))),
    (_SUMS_BACK, Way(g=(total, total))),
    (_NO_F, Way(of_x=(same, same), of_memory=(same, same))),
    (_NO_MEMORY, Way(of_memory=(same, same))),
    (_NO_X, Way(of_x=(same, same))),
    (_MEAN, Way(g=(mean, same))),
    (_MEAN, Way(g=(mean, divided))),
    (_MEAN, Way(of_x=(same, mean), of_memory=(same, mean))),
    (_TWICE, Way(g=(twice, same))),
    (_TWICE, Way(of_x=(same, twice), of_memory=(same, twice))),
    (_NOT_SHARED, Way(weights=lambda kv: (same, same))),
    (_ON_PRODUCTS, Way(weights=lambda kv: (same, same), products=lambda kv: (same, shared(kv)))),
    (_ALL_SHARED, Way(weights=lambda kv: (same, total))),
    (_SHARED_MEAN, Way(weights=_divided)),
    (_G_SHARED, Way(weights=lambda kv: (shared(kv), same))),
    (_NEIGHBOURS, Way(neighbours=True)),
    (_SCALE, Way(scale=_D**0.5)),
    (_SCALE, Way(scale=_D**-0.5)),
    (_SCALE, Way(scale=(_D / _H) ** 0.5)),
]


def _wrong(layout: Layout, count: Heads) -> Iterator[Wrong]:
    """Those of the cut show in the parameters; of the rest, parameters do not matter."""
    for t in {layout.n, layout.t}:
        yield Wrong(traffic.GROUP, layout.spread(partial(_queries_by_world, layout, count, t)))
    rows = layout.spread(partial(_cut, layout, count, Way(cut=dealt, kv_cut=dealt)))
    for name in (f"the parameter {name}" for name in NAMES):
        yield Wrong(_ROWS, [{name: own[name]} for own in rows])
    for hint, way in _WAYS:
        if hint in _CUTS:
            results = layout.spread(partial(_cut, layout, count, way))
            results = [{name: own[name] for name in own if name.split()[2].startswith(_CUTS[hint])} for own in results]
        else:
            results = layout.spread(partial(_results, layout, count, way))
            results = [{name: own[name] for name in own if not name.startswith("the parameter")} for own in results]
        yield Wrong(hint, results)


def _cut(layout: Layout, count: Heads, way: Way, number: int) -> list[Tensors]:
    whole = _whole(number, count)
    return [prefixed(shards_of(whole, rank, layout.t, way), "the parameter") for rank in range(layout.t)]


def _queries_by_world(layout: Layout, count: Heads, t: int, number: int) -> list[Tensors]:
    """Cut by the rank of the world."""
    whole = _whole(number, count).query.weight.detach()
    return [{"the parameter query.weight": _DEALT(whole, 0, rank, t)} for rank in layout.groups[number]]


_CASES = {
    2: ((2, Heads(8, 4)), (2, Heads(4, 1))),
    3: ((3, Heads(12, 6)), (3, Heads(6, 1))),
    4: ((4, Heads(8, 2)), (2, Heads(8, 4)), (2, Heads(4, 1))),
}


@cache
def cases(n: int) -> list[Scene]:
    """Key/value heads that ranks share, and enough of them; of 4 ranks, the latter in two pairs."""
    return [_scene(Layout(n, t, min(count.kv, t)), count) for t, count in _CASES[n]]


def _scene(layout: Layout, count: Heads) -> Scene:
    t, x, whole = layout.t, 8 * _S * _B * _H, _whole(0, count)
    sharing = t // min(t, count.kv)
    inputs, weights = reduced(x + 8 * _T * _B * _H, t), reduced(2 * 8 * _D * _H, sharing)
    backward = (inputs, weights) if sharing > 1 else (inputs,)
    shards = size(shards_of(whole, 0, t))
    must = Must(layout, Phases(((reduced(x, t),),), (backward,)), shards, size(dict(whole.named_parameters())))
    right = layout.spread(partial(_results, layout, count, RIGHT))
    note = f"{layout}{count.query} heads, {count.kv} of keys and values"
    return Scene(layout.n, partial(_run, layout, count), right, lambda: telling(right, _wrong(layout, count)), must, note)


@dataclass(frozen=True)
class ByHeads(TensorTask):
    unexplained: ClassVar[str] = _UNEXPLAINED
    advice: ClassVar[tuple[tuple[str, str], ...]] = (
        LISTS,
        (r"ZeroDivisionError", _NO_KV),
        (r"unflatten: Provided sizes", _ROWS),
        (r"enable_gqa|must match the size of tensor|mat1 and mat2 shapes|is invalid for input of size", _SHAPES),
        *TensorTask.advice,
    )
    aspects: ClassVar[tuple[Aspect, ...]] = (
        Aspect("shards, results and gradients are right", 0.6, values, each_world=True),
        keeps(0.1),
        Aspect("makes one all-reduce a group, for x and memory, and for shared heads", 0.3, traffic.traffic),
    )
