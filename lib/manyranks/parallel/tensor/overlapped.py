"""Asynchronous tensor parallelism: messages travel while products are made, piece by piece.

With sequence parallelism a column-parallel layer waits for its input to be gathered, and
what a row-parallel one makes is summed and scattered. Both collectives are rings of t − 1
messages, each about one shard of the sequence; and a product is t products, one per shard.
So the rings are taken apart, and the products made between their messages:

    column       a shard of x is multiplied while it goes on and the next one arrives
    row          a shard's term of y is made while the sum of another shard travels
    backward     each is the other's gradient; in a column both rings go at once: x is
                 gathered again, for only its shard was kept

    t    ranks of the group; this one is number r     s = S/t
    B batch   S sequence   I features that come in   O features that go out
    x_tBsI is x_BSI by shards: shard c has the tokens of rank c

It sends as many bytes as an all-gather and a reduce-scatter, (t − 1)/t of the whole. Sums
over the ranks are made in the dtype of what travels, as a plain ring makes them: in
bfloat16 each of the t − 1 is rounded. A weight's gradient is one product over all tokens.
Source: Wang et al., "Overlap Communication with Dependent Computation via Decomposition in
Large Deep Learning Models", ASPLOS 2023.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from manyranks.parallel.collectives.messages import Group, Members, wait
from manyranks.parallel.tensor.cuts import check_sequence, rank, size
from manyranks.parallel.wrappers import autocast


def column(
    x_BsI: Tensor, both: Sequence[tuple[Tensor, Tensor | None]], group: Group = None
) -> list[Tensor]:
    """Several column-parallel layers of one input: each one's y_BSO = xWᵀ + b.

    x_BsI: this rank's shard of the sequence
    both: each layer's weight, [O, I], this rank's rows, and its bias, this rank's too, or
        None

    The ranks' shards are equally long.
    Kept for backward: the shard, which is gathered a second time there.
    """
    weights = [autocast(weight) for weight, _ in both]
    ys = _Column.apply(autocast(x_BsI), group, *weights)
    biases = [bias for _, bias in both]
    return [y if b is None else y + b.to(y.dtype) for y, b in zip(ys, biases, strict=True)]


def row(x_BSI: Tensor, weight_OI: Tensor, group: Group = None) -> Tensor:
    """A row-parallel layer: this rank's shard y_BsO of the sum over the ranks of xWᵀ.

    x_BSI: this rank's features of all tokens
    weight_OI: this rank's columns

    A bias is the caller's to add, to the sum. Kept for backward: x.
    Raises ValueError where t does not divide S.
    """
    check_sequence(x_BSI, size(group))
    return _Row.apply(autocast(x_BSI), autocast(weight_OI), group)


class _Column(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_BsI: Tensor, group: Group, *weights: Tensor) -> tuple:
        ctx.ring = ring = _ring(group)
        ctx.save_for_backward(x_BsI, *weights)
        ys = [_room(x_BsI, ring, weight.shape[0]) for weight in weights]
        for c, shard_BsI in gathered(x_BsI, ring):
            for y_BSO, weight_OI in zip(ys, weights, strict=True):
                by_shards(y_BSO, ring)[c] = F.linear(shard_BsI, weight_OI)
        return tuple(ys)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads_BSO: Tensor) -> tuple:
        x_BsI, *weights = ctx.saved_tensors
        to_x, _, *to_weights = ctx.needs_input_grad
        grads_tBsO = [by_shards(grad, ctx.ring).contiguous() for grad in grads_BSO]
        whole_tBsI = _room_by_shards(x_BsI, ctx.ring) if any(to_weights) else None
        shards = gathered(x_BsI, ctx.ring, whole_tBsI) if any(to_weights) else iter(())

        def term(c: int) -> Tensor:
            # Two rings at a time: the shard of x that came is passed on first, then this
            # product is made; the weights' gradients come after both.
            next(shards, None)
            total = grads_tBsO[0][c] @ weights[0]
            for grad, weight in zip(grads_tBsO[1:], weights[1:], strict=True):
                _rows(total).addmm_(_rows(grad[c]), weight)
            return total

        grad_x = reduce_scattered(term, ctx.ring) if to_x else None
        for _ in shards:
            pass
        each = zip(grads_tBsO, to_weights, strict=True)
        to = [
            _rows(grad).mT @ _rows(whole_tBsI) if learns else None for grad, learns in each
        ]
        return grad_x, None, *to


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_BSI: Tensor, weight_OI: Tensor, group: Group) -> Tensor:
        ctx.ring = _ring(group)
        ctx.save_for_backward(x_BSI, weight_OI)
        x_tBsI = by_shards(x_BSI, ctx.ring)
        return reduce_scattered(lambda c: F.linear(x_tBsI[c], weight_OI), ctx.ring)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_BsO: Tensor) -> tuple:
        x_BSI, weight_OI = ctx.saved_tensors
        to_x, to_weight, _ = ctx.needs_input_grad
        whole_tBsO = _room_by_shards(grad_BsO, ctx.ring) if to_weight else None
        grad_x = torch.empty_like(x_BSI) if to_x else None
        for c, shard_BsO in gathered(grad_BsO, ctx.ring, whole_tBsO):
            if to_x:
                by_shards(grad_x, ctx.ring)[c] = shard_BsO @ weight_OI
        if not to_weight:
            return grad_x, None, None
        return grad_x, _rows(whole_tBsO).mT @ _rows(by_shards(x_BSI, ctx.ring)), None


def gathered(
    shard: Tensor, ring: Members, whole: Tensor | None = None
) -> Iterator[tuple[int, Tensor]]:
    """A ring all-gather that lends each shard, with its number, as soon as it is here.

    This rank's own comes first. What the caller does with a shard it does while that shard
    goes on to the next rank and another one comes from the rank before.
    whole: [t, *shard.shape], where the shards stay; None keeps no more than two of them.
    """
    t, r = len(ring.ranks), ring.place
    here = shard.contiguous() if whole is None else whole[r].copy_(shard)
    for step in range(t - 1):
        c, coming = (r - step) % t, (r - step - 1) % t
        arriving = torch.empty_like(here) if whole is None else whole[coming]
        works = ring.post(here, (r + 1) % t, arriving, (r - 1) % t)
        yield c, here
        wait(works)
        here = arriving
    yield (r + 1) % t, here


def reduce_scattered(term: Callable[[int], Tensor], ring: Members) -> Tensor:
    """A ring reduce-scatter that has each term made only when it is due: this rank's sum.

    term(c): this rank's term of shard c's sum, in a new tensor. It is made while the sum of
    another shard comes from the rank before, and the own sum of the last one goes on.
    A shard's sum starts at the rank after its owner and collects a term at every rank.
    """
    t, r = len(ring.ranks), ring.place
    total = term((r - 1) % t)
    for step in range(1, t):
        arriving = torch.empty_like(total)
        works = ring.post(total, (r + 1) % t, arriving, (r - 1) % t)
        following = term((r - step - 1) % t)
        wait(works)
        total = following.add_(arriving)
    return total


def by_shards(x_BSH: Tensor, ring: Members) -> Tensor:
    """The same memory as x_tBsH: [c] is shard c of the sequence."""
    return x_BSH.unflatten(1, (len(ring.ranks), -1)).movedim(1, 0)


def _ring(group: Group) -> Members:
    return Members(group, range(size(group)), rank(group))


def _room(x_BsI: Tensor, ring: Members, features: int) -> Tensor:
    batch, own, *more = x_BsI.shape[:-1]
    return x_BsI.new_empty(batch, own * len(ring.ranks), *more, features)


def _room_by_shards(shard: Tensor, ring: Members) -> Tensor:
    return shard.new_empty(len(ring.ranks), *shard.shape)


def _rows(x: Tensor) -> Tensor:
    """[tokens, features]; a copy where x's memory does not allow a view."""
    return x.flatten(0, -2)
