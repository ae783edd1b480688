"""One layer's operators, the ways to split each over the axes of a mesh, and what a way costs.

On each axis a product Y = XW is split by its tokens (each rank some rows of X, all of W), by columns of W, by rows of W, or not
at all. What it reads and writes is then whole, has some of the tokens, some of the columns, or is a part of a sum. Backward is
two products more: the gradient of X comes from that of Y and needs it laid out; the gradient of W is a part of a sum where the
tokens were split, which the ranks of that axis reduce once a step (and gather the parameters: ZeRO-1). Between two operators
tensors are laid out anew.
Source: Alpa, arXiv 2201.12023, sections 4.1 and 4.2 (parallel algorithms of an operator, resharding, reduced gradients).
"""

import functools
import math
from typing import NamedTuple

from manyranks.theory import kernels, layer, network
from manyranks.theory.architecture import ModelShape
from manyranks.theory.calls import HALF
from manyranks.theory.cluster import Cluster, Route
from manyranks.theory.kernels import DEFAULT
from manyranks.theory.layer import Kernel, moved
from manyranks.theory.plan import Plan

CHOICES = {
    "linear": ("tokens", "columns", "rows", "whole"),
    "core": ("tokens", "columns", "whole"),  # columns: heads
    "norm": ("tokens", "whole"),
}
# Layouts on one axis: what forward reads and writes; of the gradients, what backward needs and gives. "sum": a part of one.
READS = {"tokens": "tokens", "columns": "whole", "rows": "columns", "whole": "whole"}
WRITES = {"tokens": "tokens", "columns": "columns", "rows": "sum", "whole": "whole"}
NEEDS = {"tokens": "tokens", "columns": "columns", "rows": "whole", "whole": "whole"}
GIVES = {"tokens": "tokens", "columns": "sum", "rows": "columns", "whole": "whole"}
_CORE = {name: name for name in CHOICES["core"]}  # attention reads, writes, needs and gives its own heads

Choice = tuple[str, ...]  # for each axis of the mesh


class Operator(NamedTuple):
    """reads, writes: numbers of a token; weights: rows and columns of its matrix, which are 0 where it has none."""

    name: str
    kind: str
    reads: int
    writes: int
    weights: tuple[int, int] = (0, 0)


class Work(NamedTuple):
    """A micro-batch of so many sequences, on a mesh whose last axis lies inside the nodes."""

    shape: ModelShape
    cluster: Cluster
    mesh: tuple[int, ...]
    sequences: int
    seq: int

    @property
    def tokens(self) -> int:
        return self.sequences * self.seq

    @property
    def routes(self) -> tuple[Route, ...]:
        return tuple(self.cluster.route(n, math.prod(self.mesh[i + 1 :])) for i, n in enumerate(self.mesh))


class Cost(NamedTuple):
    """seconds: of a micro-batch; once: of a step's gradients and parameters; states, kept: bytes, for a micro-batch."""

    seconds: float
    once: float
    states: float
    kept: float


def blocks(shape: ModelShape) -> tuple[tuple[Operator, ...], tuple[Operator, ...]]:
    """Of a dense layer: the norm and the products of attention, and of the MLP, whose activation belongs to what reads it."""
    h, heads, keys, inner = shape.hidden, shape.query_size, 2 * shape.kv_size, (1 + shape.gated) * shape.ffn
    norm = Operator("norm", "norm", h, h)
    attention = (
        norm,
        Operator("qkv", "linear", h, heads + keys, (h, heads + keys)),
        Operator("core", "core", heads + keys, heads),
        Operator("out", "linear", heads, h, (heads, h)),
    )
    mlp = norm, Operator("up", "linear", h, inner, (h, inner)), Operator("down", "linear", inner, h, (shape.ffn, h))
    return attention, mlp


def cost(operator: Operator, choice: Choice, work: Work) -> Cost:
    """Of one way to split one operator, forward and backward, without what lies between operators."""
    tokens, columns, rows = (_ranks(choice, name, work.mesh) for name in ("tokens", "columns", "rows"))
    weights = math.prod(operator.weights) / (columns * rows)
    reduced = network.fastest(_tokens_route(choice, work), HALF * weights, DEFAULT) if weights else 0.0
    recipe = Plan().recipe
    states = weights * (recipe.parameters + recipe.gradients + recipe.optimizer / tokens)
    split = tokens * (columns if operator.kind == "core" else rows)
    kept = HALF * work.tokens * operator.reads / split
    return Cost(_compute(operator, tokens, columns, rows, work), 2 * reduced, states, kept)


def possible(operator: Operator, work: Work) -> list[Choice]:
    """All choices, but for those that cut what is not divisible: sequences in attention, heads."""
    found: list[Choice] = [()]
    for _ in work.mesh:
        found = [(*one, name) for one in found for name in CHOICES[operator.kind]]
    if operator.kind != "core":
        return found
    sizes = {"tokens": work.sequences, "columns": work.shape.kv_heads}
    return [one for one in found if all(size % _ranks(one, name, work.mesh) == 0 for name, size in sizes.items())]


def edge(first: Operator, before: Choice, second: Operator, after: Choice, work: Work) -> float:
    """Seconds of laying out anew what the first operator writes and the second reads, and its gradient on the way back."""
    numbers = second.reads
    there = reshard(_laid(WRITES, first, before), _laid(READS, second, after), numbers, work)
    return there + reshard(_laid(GIVES, second, after), _laid(NEEDS, first, before), numbers, work)


def _laid(table: dict[str, str], operator: Operator, choice: Choice) -> Choice:
    rule = _CORE if operator.kind == "core" else table
    return tuple(rule[name] for name in choice)


@functools.lru_cache(maxsize=65536)
def reshard(before: Choice, after: Choice, numbers: int, work: Work) -> float:
    """Axis after axis, in the better order. numbers: of a token."""
    orders = [range(len(before)), range(len(before) - 1, -1, -1)]
    return min(_reshard(before, after, numbers, work, order) for order in orders)


def _reshard(before: Choice, after: Choice, numbers: int, work: Work, order: range) -> float:
    now, seconds = list(before), 0.0
    for axis in order:
        split = math.prod(n for i, n in enumerate(work.mesh) if i != axis and now[i] in ("tokens", "columns"))
        size = HALF * work.tokens * numbers / split
        seconds += _reshard_axis(now[axis], after[axis], size, work.routes[axis])
        now[axis] = after[axis]
    return seconds


def _reshard_axis(before: str, after: str, size: float, route: Route) -> float:
    """size: bytes of the whole tensor. Taking its own part of what is whole costs a rank nothing."""
    if before in (after, "whole"):
        return 0.0
    if before != "sum" and after != "whole":  # tokens to columns, or back: an all-to-all
        return network.exchange(route, size / route.ranks, DEFAULT)
    return network.gather(route, size, DEFAULT) * (2 if before == "sum" and after == "whole" else 1)


def _ranks(choice: Choice, name: str, mesh: tuple[int, ...]) -> int:
    return math.prod(n for n, chosen in zip(mesh, choice, strict=True) if chosen == name)


def _tokens_route(choice: Choice, work: Work) -> Route:
    """The ranks that have the same part of a weight and other tokens; with both axes, all of them."""
    axes = [axis for axis, name in enumerate(choice) if name == "tokens"]
    if len(axes) == 1:
        return work.routes[axes[0]]
    return work.cluster.route(_ranks(choice, "tokens", work.mesh))


@functools.lru_cache(maxsize=65536)
def _compute(operator: Operator, tokens: int, columns: int, rows: int, work: Work) -> float:
    plan = Plan(seq=work.seq)
    forward = _kernels(operator, work.tokens / tokens, columns, rows, work)
    every = forward + [each for kernel in forward for each in layer.gradients(kernel, plan)]
    return sum(kernels.seconds(kernel, work.cluster.accelerator, DEFAULT, work.cluster.reserved) for kernel in every)


def _kernels(operator: Operator, tokens: float, columns: int, rows: int, work: Work) -> list[Kernel]:
    shape, plan = work.shape, Plan(seq=work.seq, tp=columns if operator.kind == "core" else 1)
    if operator.kind == "norm":
        return [moved(shape.norm, tokens * shape.hidden, 4), moved("residual", tokens * shape.hidden, 6)]
    if operator.kind == "core":
        one = layer.core(shape, plan, shape.head_size, shape.head_size)
        return [_times(kernel, tokens / work.seq) for kernel in one]
    k, n = operator.weights
    product = [layer.unquantised(operator.name, tokens, n / columns, k / rows, plan)]
    if operator.name == "down":
        product.append(moved("product", tokens * k / rows, 2 * (operator.reads // k) + 2))
    return product


def _times(kernel: Kernel, factor: float) -> Kernel:
    return kernel._replace(flops=factor * kernel.flops, bytes=factor * kernel.bytes, specials=factor * kernel.specials)
