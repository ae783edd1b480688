"""More wrong answers to the tasks of 04_checkpointing after the first: slips that have hints of their own."""

import math
import time
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from tests.grading.zoo.checkpointing_right import RightShares, chosen, in_segments, in_turn, lengths_of
from tests.grading.zoo.wrong import Wrong, keeper

ZOO: list[Wrong] = []
wrong = keeper(ZOO)
SQRT, CORE, CHOOSE, LAST = "checkpoint_sqrt", "selective", "choose", "shared_checkpoint"


@wrong(SQRT, "layers are functions, not modules")
def takes_layers_for_modules(checkpoint, layers, x):
    return checkpoint(nn.Sequential(*layers), x)


@wrong(SQRT, "bind the segment to it")
def gives_checkpoint_a_third_argument(checkpoint, layers, x):
    return checkpoint(in_turn, x, layers)


@wrong(SQRT, "Backward runs the one before the last again", right_values=True)
def makes_one_segment_of_all_but_the_last(checkpoint, layers, x):
    n = len(layers)
    last = n // round(math.sqrt(n))
    x = checkpoint(partial(in_turn, layers[: n - last]), x) if n > last else x
    return in_turn(layers[n - last :], x)


@wrong(SQRT, "with N = 1 there is no checkpoint", right_values=True, cases=slice(None))
def divides_by_the_checkpoints(checkpoint, layers, x):
    lengths = lengths_of(len(layers))
    _ = sum(lengths[:-1]) // len(lengths[:-1])
    return in_segments(checkpoint, layers, x, lengths)


@wrong(CORE, "no gradient comes through no_grad")
def runs_the_core_under_no_grad(checkpoint, layer, x):
    qkv = layer.project(x)
    with torch.no_grad():
        context = layer.core(qkv)
    return layer.output(context)


@wrong(CORE, "give it layer.core, which it calls itself")
def gives_the_cores_result(checkpoint, layer, x):
    return layer.output(checkpoint(layer.core(layer.project(x)), x))


@wrong(CHOOSE, "layers are counted from 0: with 1 less, your numbers would be right")
def counts_the_right_ones_from_one(layers, budget):
    return {k + 1 for k in chosen(layers, budget)}


@wrong(CHOOSE, "yours are those that keep everything, the others would be right")
def returns_those_that_are_kept(layers, budget):
    return set(range(len(layers))) - set(chosen(layers, budget))


@wrong(CHOOSE, "choose returned {}; the least that fits is", right_values=True, cases=slice(None))
def returns_an_empty_set_where_nothing_fits(layers, budget):
    try:
        return set(chosen(layers, budget))
    except ValueError:
        return set()


@wrong(CHOOSE, "a loop does not end")
def never_ends(layers, budget):
    while True:
        time.sleep(0.1)


never_ends.seconds = 3


@wrong(LAST, "pad with zeros to a multiple of t first")
class TakesFloorsOfShares(RightShares):
    def share(self, flat, rank, t):
        size = len(flat) // t
        return flat[rank * size :][:size].clone()


@wrong(LAST, "pad with zeros to a multiple of t first")
class ReshapesWithoutPadding(RightShares):
    def share(self, flat, rank, t):
        return flat.reshape(t, -1)[rank].clone()


@wrong(LAST, "shares have the same size on all ranks")
class HasAShorterLastShare(RightShares):
    def share(self, flat, rank, t):
        return flat.chunk(t)[rank].clone()


@wrong(LAST, "gather within the group")
class TakesTheWorldsRankInTheGroup(RightShares):
    """A slice past the end is empty."""

    sizes = (4,)

    def share(self, flat, rank, t):
        size, rank = -(-len(flat) // t), dist.get_rank()
        return torch.nn.functional.pad(flat, (0, -len(flat) % t))[rank * size :][:size].clone()


@wrong(LAST, "gather within the group")
class ForgetsTheGroupInTheGather(RightShares):
    sizes = (4,)

    def gather(self, share, t, group):
        return super().gather(share, t, None)


@wrong(LAST, "group may be None")
class AsksTheGroup(RightShares):
    def size(self, group):
        return group.size()


@wrong(LAST, "one dist.all_gather_single brings all shares", right_values=True)
class BroadcastsEachShare(RightShares):
    def gather(self, share, t, group):
        row = share.new_empty(t, len(share))
        row[dist.get_rank(group)] = share
        for k in range(t):
            dist.broadcast(row[k], group=group, group_src=k)
        return row.flatten()


@wrong(LAST, "x need not be contiguous")
class ViewsX(RightShares):
    def __call__(self, function, x, group):
        rank, t, shape = self.rank(group), self.size(group), x.shape
        return self.run(
            function,
            x,
            lambda x: self.share(x.detach().view(-1), rank, t),
            lambda share: self.cut(self.gather(share, t, group), shape),
        )
