"""Parts of whole tensors, whoever has which: cut, dealt or in shards.

    parts = of_range("layers.0.mlp.up.weight", shard_S, first=96, shape=(8, 16), cut=cut)
    saving.save(folder, parts, step=100)      # on every rank, with what it has
    saving.load(folder, parts)                # by other ranks, with what they need

A rank's shard of a row is a range of a parameter's elements, which tensor parallelism,
say, cuts out of the whole one. That's a few boxes: of a matrix, the end of one row, some
whole rows, and the beginning of another one. So no rank has to put a tensor together, and
none has more in memory than it trains with.
"""

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from manyranks.parallel.fsdp.state import Sharded, names_of
from manyranks.parallel.precision import make_states
from manyranks.parallel.shard import local
from manyranks.parallel.tensor.cuts import Cut
from manyranks.parallel.zero import ZeroOptimizer

Rectangle = tuple[tuple[int, ...], tuple[int, ...]]  # offsets and sizes


class Box(NamedTuple):
    """Part of a whole tensor of this name and shape.

    tensor: its elements, on this rank
    """

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    tensor: Tensor


def of_model(
    model: Sharded | ZeroOptimizer, optimizer: torch.optim.Optimizer | None = None
) -> list[Box]:
    """Returns what a checkpoint needs of this rank; saving.load() fills the same tensors.

    After loading a ZeroOptimizer, call its spread() for the model's parameters. Learning
    rates and other options aren't in it.

    model: a Zero3 or FullyShardedDataParallel; or a ZeroOptimizer, which doesn't know the
        model's buffers: save them beside
    optimizer: of the former's parameters(); one that hasn't stepped gets its first states
    """
    found = []
    if isinstance(model, ZeroOptimizer):
        optimizer, buffers = model.optimizer, ()
        owned = [
            (shard.origin.name, shard.origin.shape, shard.origin.first, shard)
            for shard in model.shards()
        ]
        each = enumerate(model.frozen)
        found = [b for k, (_, p) in each for b in _whole(f"frozen.{k}", p)]
    else:
        names, buffers = names_of(model), model.named_buffers()
        owned = [
            (names[shard], whole.shape, first, shard)
            for unit in model.units
            for shard, whole, first in zip(
                unit.shards, unit.whole, unit.row.firsts, strict=True
            )
        ]
    if optimizer is not None:
        make_states(optimizer)
    for name, buffer in buffers:
        found += _whole(f"buffer.{name}", buffer)
    for name, shape, first, shard in owned:
        states = optimizer.state.get(shard, {}) if optimizer is not None else {}
        for kind, value in {"parameter": shard, **states}.items():
            if not isinstance(value, Tensor):
                continue
            if local(value).dim():
                part = local(value).detach()
                found += of_range(f"{kind}.{name}", part, first, shape)
            else:
                found += _whole(f"{kind}.{name}", value)
    return found


def _whole(name: str, tensor: Tensor) -> list[Box]:
    """Returns the box of a tensor that every rank has whole."""
    return of_range(name, tensor.detach().view(-1), 0, tensor.shape or (1,))


def of_range(
    name: str, values_E: Tensor, first: int, shape: Iterable[int], *cuts: Cut | None
) -> list[Box]:
    """Elements of this rank's part of a whole tensor, as boxes of the whole one.

    shape: of the part, cuts: where it lies, each in another dim, with its filling, which is
        left out; None: it has all
    values_E: its elements from number `first` on, row by row
    """
    whole, found, at = list(shape), [], 0
    cuts = [cut for cut in cuts if cut]
    for cut in cuts:
        whole[cut.dim] = cut.size
    for offsets, sizes in rectangles(tuple(shape), first, first + values_E.numel()):
        tensor = values_E[at : at + math.prod(sizes)].view(sizes)
        at += tensor.numel()
        placed = [(offsets, tensor)]
        for cut in cuts:
            placed = [there for each in placed for there in _placed(*each, cut)]
        found += [Box(name, tuple(whole), *each) for each in placed if each[1].numel()]
    return found


def rectangles(shape: tuple[int, ...], first: int, stop: int) -> Iterator[Rectangle]:
    """Boxes of a tensor that are its elements first … stop − 1, row by row, in order."""
    if len(shape) < 2:
        if first < stop:
            yield (first,), (stop - first,)
        return
    row_size = math.prod(shape[1:])
    while first < stop:
        row, at = divmod(first, row_size)
        if not at and (rows := (stop - first) // row_size):
            yield (row, *[0] * (len(shape) - 1)), (rows, *shape[1:])
            first += rows * row_size
            continue
        end = min(row_size, stop - row * row_size)
        for offsets, sizes in rectangles(shape[1:], at, end):
            yield (row, *offsets), (1, *sizes)
        first = row * row_size + end


def _placed(
    offsets: tuple[int, ...], tensor: Tensor, cut: Cut
) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """Yields what lies in the rank's slices, each part with its place in the whole."""
    dim, at = cut.dim, 0
    first, last = offsets[dim], offsets[dim] + tensor.shape[dim]
    for start, stop in cut.spans[cut.place]:
        a, b = max(first, at), min(last, at + stop - start)
        if a < b:
            there = (*offsets[:dim], start + a - at, *offsets[dim + 1 :])
            yield there, tensor.narrow(dim, a - first, b - a)
        at += stop - start
