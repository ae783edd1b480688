"""What the ranks of a group make of a block with sequence parallelism, in lockstep: right, and wrong in known ways."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from manyranks.grade.old.scripts import Tensors
from manyranks.grade.old.tensor.dealing import Cut, dealt
from manyranks.grade.old.tensor.layout import Layout, drawn
from manyranks.grade.old.tensor.lockstep import Exchange, gathered, lockstep, same, scattered, total
from manyranks.grade.old.tensor.masks import P
from manyranks.grade.old.tensor.task import gradient, prefixed
from manyranks.grade.old.tensor.wholes import WholeBlock, made

NAMES = ("norm.weight", "norm.bias", "up.weight", "up.bias", "down.weight", "down.bias")
S, B, H, UNITS = 12, 4, 16, 5  # units a rank
X, UPSTREAM = 130, 140  # seeds


@dataclass(frozen=True)
class Way:
    """How it is computed; the defaults are right. gather, scatter: what is exchanged forward and backward before and after the
    units; norm, bias, units: of parameters; early: the bias is added to a rank's part; x: of x, before all;
    residual: what is added to the units' result: that "x", the rank's "own x", or "normed".
    """

    gather: tuple[Exchange, Exchange] = (gathered, scattered)
    scatter: tuple[Exchange, Exchange] = (scattered, gathered)
    norm: tuple[Exchange, Exchange] = (same, total)
    bias: tuple[Exchange, Exchange] = (same, total)
    units: tuple[Exchange, Exchange] = (same, same)
    early: bool = False
    x: tuple[Exchange, Exchange] = (same, same)
    residual: str = "x"
    cut: Cut = dealt


RIGHT = Way()


def shards_of(whole: WholeBlock, rank: int, t: int, way: Way = RIGHT) -> Tensors:
    """A rank's parameters, as leaves."""
    own = dict(whole.named_parameters())
    for name, dim in (("up.weight", 0), ("up.bias", 0), ("down.weight", 1)):
        own[name] = way.cut(own[name], dim, rank, t)
    return {name: own[name].detach().clone().requires_grad_() for name in NAMES}


def whole_of(number: int, t: int) -> WholeBlock:
    """That of a group."""
    return made(WholeBlock, 120 + number, H, UNITS * t)


def shard(seed: int, rank: int, t: int) -> Tensor:
    """A rank's positions of what this seed gives."""
    return drawn(seed, S, B, H)[rank::t].clone()


def computed(layout: Layout, way: Way, kept_by: list[Tensor] | None, number: int) -> list[Tensors]:
    """What a script returns, by rank of the group. kept_by: the ranks' masks; None for no dropout."""
    t = layout.t
    xs = [shard(X + number, rank, t).requires_grad_() for rank in range(t)]
    own = [shards_of(whole_of(number, t), rank, t, way) for rank in range(t)]
    keeps_ = [torch.ones_like(x) for x in xs] if kept_by is None else [kept_by[r] / (1 - P) for r in layout.groups[number]]
    results = _forward(xs, own, keeps_, way)
    torch.autograd.backward(results, [shard(UPSTREAM + number, rank, t) for rank in range(t)])
    return [
        prefixed({name: p.detach() for name, p in own[r].items()}, "the parameter")
        | {"the result": results[r].detach(), "the gradient of x": gradient(xs[r])}
        | prefixed({name: gradient(p) for name, p in own[r].items()}, "the gradient of")
        for r in range(t)
    ]


def _forward(xs: list[Tensor], own: list[Tensors], keeps_: list[Tensor], way: Way) -> list[Tensor]:
    """The ranks' results."""
    scale, shift = (lockstep([p[name] for p in own], *way.norm) for name in ("norm.weight", "norm.bias"))
    bias = lockstep([p["down.bias"] for p in own], *way.bias)
    shared = lockstep(xs, *way.x)
    normed = [F.layer_norm(x, (H,), a, b) for x, a, b in zip(shared, scale, shift, strict=True)]
    added = {"x": shared, "own x": xs, "normed": normed}[way.residual]
    own = [dict(p) for p in own]
    for name in ("up.weight", "up.bias", "down.weight"):
        for p, weight in zip(own, lockstep([p[name] for p in own], *way.units), strict=True):
            p[name] = weight
    parts = []
    for h, p, b in zip(lockstep(normed, *way.gather), own, bias, strict=True):
        parts.append(F.linear(F.gelu(F.linear(h, p["up.weight"], p["up.bias"])), p["down.weight"]) + way.early * b)
    sums = lockstep(parts, *way.scatter)
    late = [keep * (y + (not way.early) * b) for y, b, keep in zip(sums, bias, keeps_, strict=True)]
    return [x + y for x, y in zip(added, late, strict=True)]
