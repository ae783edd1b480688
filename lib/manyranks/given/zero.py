"""What the checks of exercise 03_zero train, and what the exercise gives: a model of seven layers, a driver, and units."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from math import nan
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from manyranks.given.numbers import EXACT, normal, seed_of, whole
from manyranks.measure.watch import Watch

_SHAPES = {"matrix": (5, 7), "cube": (2, 3, 4), "vector": (11,), "square": (2, 2), "five": (5,), "one": (1,), "number": ()}
_HIDDEN, _VOCAB, _LENGTH = 47, 49, 3  # no parameter's size is a multiple of 2, 3 or 4, and one is below them


class Layer(nn.Module):
    """h + tanh(…). shift: made before the weight, whose gradient comes after its own, and used by some examples; twice: the
    weight is used once more, with a bias."""

    def __init__(self, shift: bool = False, twice: bool = False):
        super().__init__()
        self.shift, self.uses_shift = nn.Parameter(torch.ones(1, **EXACT)) if shift else None, False
        self.linear = nn.Linear(_HIDDEN, _HIDDEN, bias=False, **EXACT)
        self.again = nn.Linear(_HIDDEN, _HIDDEN, **EXACT) if twice else None
        if twice:
            self.again.weight = self.linear.weight

    def forward(self, h: Tensor) -> Tensor:
        out = self.linear(h)
        h = h + torch.tanh(out + self.shift if self.uses_shift else out)
        return h if self.again is None else h + torch.tanh(self.again(h))


class Head(nn.Linear):
    """The gradient of the weight comes before that of the scale, which is made last."""

    def __init__(self):
        super().__init__(_HIDDEN, _VOCAB, bias=False, **EXACT)
        self.scale = nn.Parameter(torch.ones(1, **EXACT))

    def forward(self, h: Tensor) -> Tensor:
        return super().forward(h * self.scale)


class Batch(NamedTuple):
    """A rank's. uses_shift: whether layer 1 adds `shift`."""

    tokens: Tensor
    uses_shift: bool

    def loss(self, layers: nn.ModuleList, run: Callable | None = None) -> Tensor:
        """The mean over its examples."""
        layers[1].uses_shift = self.uses_shift
        logits = (run or nn.Sequential(*layers))(self.tokens)
        return nn.functional.cross_entropy(logits[0, :-1], self.tokens[0, 1:])


def trained(rank: int, seed: int, batches: int) -> tuple[nn.ModuleList, list[Batch]]:
    """Layers to be run one after the other, the same on all ranks, of which number 2 is frozen; and a rank's batches.

    Batch 0 uses `shift` on no rank, 1 on one, 2 on all but one.
    """
    with torch.random.fork_rng([]):
        torch.manual_seed(seed_of(seed))
        blocks = [Layer(shift=True), Layer().requires_grad_(False), Layer(), Layer(twice=True), Layer()]
        layers = nn.ModuleList([nn.Embedding(_VOCAB, _HIDDEN, **EXACT), *blocks, Head()])
    shifts = [(i == 1 and rank == 1) or (i % 3 == 2 and rank != 0) for i in range(batches)]
    return layers, [Batch(whole(_VOCAB, (1, _LENGTH), seed, i, rank), shift) for i, shift in enumerate(shifts)]


def pieces(whole: Tensor, n: int = 0) -> list[Tensor]:
    """Of each rank, padding included. n: ranks, those of the world for 0."""
    flat, n = whole.detach().flatten(), n or dist.get_world_size()
    return [piece.clone() for piece in torch.cat([flat, flat.new_zeros(-flat.numel() % n)]).chunk(n)]


def padded(parameter: Tensor) -> int:
    """Bytes."""
    n = dist.get_world_size()
    return -(-parameter.numel() // n) * n * parameter.element_size()


def _is_shard(result, *given) -> bool:
    """Whether it is this rank's piece, where that was asked for."""
    if len(given) != 1:
        return True
    return _alike(result, given[0]) and torch.equal(result, pieces(given[0])[dist.get_rank()])


def _is_whole(result, *given) -> bool:
    """Whether what is given is its piece, as far as this rank knows, where that was asked for."""
    if len(given) != 2 or not isinstance(given[1], tuple | list):
        return True
    piece, shape = given[0], torch.Size(given[1])
    if not _alike(result, piece):
        return False
    there = min(len(piece), max(0, shape.numel() - dist.get_rank() * len(piece)))  # without padding
    mine, piece = (one[:there].nan_to_num() for one in (pieces(result)[dist.get_rank()], piece))
    return result.shape == shape and torch.equal(mine, piece)


def _alike(result, given: Tensor) -> bool:
    return isinstance(result, Tensor) and result.dtype == given.dtype


FITS = {"shard": _is_shard, "gather": _is_whole}  # answers that later ones call -> whether a result fits what it is made of


def tensors(seed: int) -> Iterator[tuple[str, Tensor]]:
    """Random numbers in several shapes, with their names."""
    for name, shape in _SHAPES.items():
        yield name, normal(shape, seed, name)


# What is held


@contextmanager
def state_bytes() -> Iterator[list[int]]:
    """Inside, each optimizer that steps adds the bytes of its states, counters apart."""
    counts = []
    stepped = register_optimizer_step_post_hook(lambda optimizer, *_: counts.append(_states(optimizer)))
    try:
        yield counts
    finally:
        stepped.remove()


def _states(optimizer: Optimizer) -> int:
    named = [item for state in optimizer.state.values() for item in state.items()]
    return sum(value.nbytes for name, value in named if isinstance(value, Tensor) and name != "step")


def in_backward(model: nn.Module, peak: int, room: int) -> int:
    """Bytes beside model, shards, their states and gradients; no less than `room` below what nearly all gradients take."""
    whole = sum(padded(p) for p in model.parameters() if p.requires_grad)
    beside = peak - sum(p.nbytes for p in model.parameters()) - 4 * whole // dist.get_world_size()
    return max(beside, 15 * whole // 16 - room)


def enough(layers: nn.ModuleList, batch: Batch, watch: Watch) -> int:
    """Bytes of shards, states, gradients and activations, and of six units."""
    watch.weigh()
    loss = batch.loss(layers)
    watch.weigh()
    activations = watch.held[-1] - watch.held[-2] - loss.nbytes
    shards = sum(padded(p) * (4 if p.requires_grad else 1) for p in layers.parameters()) // dist.get_world_size()
    return shards + activations + 6 * max(sum(map(padded, layer.parameters())) for layer in layers)


# What the exercise gives; the notebook shows both classes as they stand here.


class Sharded(torch.nn.Module):
    """Layers, one after the other. A schedule gathers, frees and reduces their units."""

    def __init__(self, layers, schedule):
        super().__init__()
        self.layers, self.schedule = layers, schedule

    def forward(self, x):
        for k, layer in enumerate(self.layers):
            self.schedule.before_forward(k)
            x = layer(x)
            self.schedule.after_forward(k)
            x.register_hook(partial(self.arrived, k))
        return x

    def arrived(self, k, grad):
        """The gradient of layer k's output is there: layer k + 1 is done, k is next."""
        if k + 1 < len(self.layers):
            self.schedule.after_backward(k + 1)
        self.schedule.before_backward(k)

    def finish(self):
        self.schedule.after_backward(0)


class OneAtATime:
    """Each unit is gathered when it is needed, and freed when it has computed."""

    def __init__(self, units):
        self.units = units

    def before_forward(self, k):
        self.units[k].start()
        self.units[k].wait()

    def after_forward(self, k):
        self.units[k].free()

    def before_backward(self, k):
        self.units[k].start()
        self.units[k].wait()

    def after_backward(self, k):
        self.units[k].reduce()
        self.units[k].free()


class FreesOneFirst(OneAtATime):
    """Unit 1 is freed before it is reduced, too: a gradient needs no parameter."""

    def after_backward(self, k):
        if k == 1:
            self.units[k].free()
        super().after_backward(k)


class Marked(Sharded):
    """The watch hears when a layer computes: "forward 3"."""

    def __init__(self, layers: nn.ModuleList, schedule, watch: Watch):
        super().__init__(layers, schedule)
        self._mark = watch.mark
        for k, layer in enumerate(layers):
            layer.register_forward_pre_hook(lambda *_, k=k: watch.mark(f"forward {k}"))

    def arrived(self, k, grad):
        super().arrived(k, grad)
        self._mark(f"backward {k}")


class Unit:
    """One layer's, which marks what a schedule does with it. While it is not whole, its parameters are NaN."""

    def __init__(self, k: int, layer: nn.Module, watch: Watch):
        self._k, self._parameters, self._mark = k, list(layer.parameters()), watch.mark
        self.shards = [nn.Parameter(pieces(p)[dist.get_rank()], p.requires_grad) for p in self._parameters]
        self._coming: list[tuple[Tensor, Tensor, dist.Work]] = []
        self._empty()

    def _empty(self) -> None:
        self._there = False
        for p in self._parameters:
            p.data.fill_(nan)

    def start(self) -> None:
        self._mark(f"start {self._k}")
        for p, shard in zip(self._parameters, self.shards, strict=True) if not self._there else ():
            row = shard.new_empty(len(shard) * dist.get_world_size())
            self._coming.append((p, row, dist.all_gather_single(row, shard.detach(), async_op=True)))
        self._there = True

    def wait(self) -> None:
        self._mark(f"wait {self._k}")
        for p, row, work in self._coming:
            work.wait()
            p.data.copy_(row[: p.numel()].view(p.shape))
        self._coming.clear()

    def free(self) -> None:
        self._mark(f"free {self._k}")
        for _, _, work in self._coming:
            work.wait()
        self._coming.clear()
        self._empty()

    def reduce(self) -> None:
        self._mark(f"reduce {self._k}")
        for p, shard in zip(self._parameters, self.shards, strict=True):
            if p.requires_grad:
                row = torch.cat(pieces(torch.zeros_like(p) if p.grad is None else p.grad)) / dist.get_world_size()
                dist.reduce_scatter_single(mean := torch.empty_like(shard), row)
                shard.grad, p.grad = mean, None
