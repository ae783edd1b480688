"""A step of training on real ranks, small, by hand, with every axis of a mesh: what is recorded of sick clusters.

x are a rank's tokens, G a vector that all tp ranks have whole, A and B matrices that are cut over tp. Each layer:
h = x·G + the mean of all tokens of the cp ranks; y = x + (h A) B, summed over tp.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from manyranks.grade.nd import layouts
from manyranks.grade.nd.layouts import Sizes
from manyranks.grade.tensor.layout import drawn

_RATE = 0.1
PP, CP, TP, DATA = "pp", "cp", "tp", "data"


class Work(NamedTuple):
    """A rank's part: tokens, hidden size, width of a layer over all tp ranks, layers of a stage, and of the last one's head.

    more: layers that each stage has beside those.
    """

    tokens: int = 8
    hidden: int = 16
    width: int = 32
    layers: int = 2
    head: int = 0
    more: tuple[int, ...] = ()


class Forgotten(NamedTuple):
    """What is wrong with the groups that average gradients: they leave out an axis; in one stage only, or everywhere."""

    axis: str
    stage: int | None = None


def averaging(sizes: Sizes, forgotten: Forgotten | None = None) -> list[list[int]]:
    """The groups over which gradients are averaged."""
    axes = layouts.present(sizes, "dp", CP)
    right = layouts.groups(sizes, axes)
    if forgotten is None:
        return right
    wrong = layouts.groups(sizes, tuple(axis for axis in axes if axis != forgotten.axis))

    def sick(ranks: list[int]) -> bool:
        return forgotten.stage in (None, layouts.coordinates(ranks[0], sizes).get(PP, 0))

    return sorted([ranks for ranks in right if not sick(ranks)] + [ranks for ranks in wrong if sick(ranks)])


class Done(NamedTuple):
    """What a rank says of its step. names: axis of each of its groups, by the group's name; flops: of products before each
    call; weights: after the step.
    """

    names: dict[str, str]
    flops: list[int]
    weights: dict[str, Tensor]


def step(sizes: Sizes, work: Work, forgotten: Forgotten | None) -> Done:
    """What each rank runs; those that the mesh has no place for only make groups."""
    wanted = {axis: layouts.groups(sizes, (axis,)) for axis in layouts.present(sizes, TP, CP)}
    wanted[DATA] = averaging(sizes, forgotten)
    groups = {}
    for axis, every in wanted.items():
        for ranks in every:
            group = dist.new_group(ranks)
            groups |= {axis: group} if dist.get_rank() in ranks else {}
    if dist.get_rank() >= layouts.count(sizes):
        return Done({}, [], {})
    rank = Rank(sizes, work, groups)
    rank.train()
    return Done({group.group_name: axis for axis, group in groups.items()}, rank.flops, rank.weights)


class Rank:
    """This rank's part of the model, and of the step."""

    def __init__(self, sizes: Sizes, work: Work, groups: dict[str, dist.ProcessGroup]):
        self.sizes, self.work, self.groups = sizes, work, groups
        self.at = layouts.coordinates(dist.get_rank(), sizes)
        self.stage, self.stages = self.at.get(PP, 0), sizes.get(PP, 1)
        self.layers = work.layers + (work.more[self.stage] if work.more else 0)
        self.weights = dict(self._parameters())
        self.grads: dict[str, Tensor] = {}
        self.kept: list[tuple[Tensor, ...]] = []
        self.flops, self._done = [], 0

    def _parameters(self):
        hidden, t, own = self.work.hidden, self.sizes.get(TP, 1), self.at.get(TP, 0)
        head = [("head", (hidden, self.work.head // t))] if self.work.head and self.stage == self.stages - 1 else []
        for layer in range(self.layers):
            seed = 100 * self.stage + 10 * layer
            yield f"layer{layer}.G", 1 + 0.1 * drawn(seed, hidden)
            yield f"layer{layer}.A", 0.2 * drawn(seed + 1, t, hidden, self.work.width // t)[own]
            yield f"layer{layer}.B", 0.2 * drawn(seed + 2, t, self.work.width // t, hidden)[own]
        for name, shape in head:
            yield name, 0.2 * drawn(900 + own, *shape)

    def train(self) -> None:
        """One micro-batch, forward and backward; then gradients are averaged, and the weights change."""
        x = self._received(-1) if self.stage else self._tokens()
        for layer in range(self.layers):
            x = self._forward(layer, x)
        self._send(x, 1)
        grad = self._received(1) if self.stage < self.stages - 1 else self._loss(x)
        for layer in reversed(range(self.layers)):
            grad = self._backward(layer, grad)
        self._send(grad, -1)
        self._update()

    def _tokens(self) -> Tensor:
        seed = 5000 + 10 * self.at.get("dp", 0) + self.at.get(CP, 0)
        return drawn(seed, self.work.tokens, self.work.hidden)

    def _product(self, a: Tensor, b: Tensor) -> Tensor:
        self._done += 2 * len(a) * b.numel()
        return a @ b

    def _comes(self) -> None:
        """The rank comes to a call."""
        self.flops.append(self._done)
        self._done = 0

    def _neighbour(self, way: int) -> int:
        return layouts.rank_of(self.at | {PP: self.stage + way}, self.sizes)

    def _received(self, way: int) -> Tensor:
        x = torch.empty(self.work.tokens, self.work.hidden, dtype=torch.float64)
        self._comes()
        dist.recv(x, self._neighbour(way))
        return x

    def _send(self, x: Tensor, way: int) -> None:
        if 0 <= self.stage + way < self.stages:
            self._comes()
            dist.send(x.contiguous(), self._neighbour(way))

    def _summed(self, x: Tensor, axis: str) -> Tensor:
        if axis in self.groups:
            self._comes()
            dist.all_reduce(x, group=self.groups[axis])
        return x

    def _mean(self, x: Tensor) -> Tensor:
        """Of the tokens of all cp ranks."""
        if CP not in self.groups:
            return x.mean(0)
        every = x.new_empty(self.sizes[CP] * len(x), self.work.hidden)
        self._comes()
        dist.all_gather_single(every, x.contiguous(), group=self.groups[CP])
        return every.mean(0)

    def _to_tokens(self, grad: Tensor) -> Tensor:
        """The mean's gradient, for each token of this rank."""
        c = self.sizes.get(CP, 1)
        every = (grad.sum(0) / (c * self.work.tokens)).expand(c * self.work.tokens, -1).contiguous()
        if CP not in self.groups:
            return every
        own = torch.empty_like(grad)
        self._comes()
        dist.reduce_scatter_single(own, every, group=self.groups[CP])
        return own

    def _forward(self, layer: int, x: Tensor) -> Tensor:
        g, a, b = (self.weights[f"layer{layer}.{name}"] for name in "GAB")
        scaled = x * g
        h = scaled + self._mean(scaled)
        inner = self._product(h, a)
        self.kept.append((x, h, inner))
        return x + self._summed(self._product(inner, b), TP)

    def _backward(self, layer: int, grad: Tensor) -> Tensor:
        g, a, b = (self.weights[f"layer{layer}.{name}"] for name in "GAB")
        x, h, inner = self.kept.pop()
        of_inner = self._product(grad, b.T)
        of_h = self._summed(self._product(of_inner, a.T), TP)
        of_scaled = of_h + self._to_tokens(of_h)
        self.grads |= {
            f"layer{layer}.G": (of_scaled * x).sum(0),
            f"layer{layer}.A": self._product(h.T, of_inner),
            f"layer{layer}.B": self._product(inner.T, grad),
        }
        return grad + of_scaled * g

    def _loss(self, x: Tensor) -> Tensor:
        """The gradient of half the mean square of the head's numbers, or of x."""
        if "head" not in self.weights:
            return x / len(x)
        of_logits = self._product(x, self.weights["head"]) / len(x)
        self.grads["head"] = self._product(x.T, of_logits)
        return self._summed(self._product(of_logits, self.weights["head"].T), TP)

    def _update(self) -> None:
        flat = torch.cat([grad.flatten() for grad in self.grads.values()])
        self._comes()
        dist.all_reduce(flat, group=self.groups[DATA])
        flat /= dist.get_world_size(self.groups[DATA])
        parts = flat.split([grad.numel() for grad in self.grads.values()])
        for name, part in zip(self.grads, parts, strict=True):
            self.weights[name] = self.weights[name] - _RATE * part.view_as(self.weights[name])
