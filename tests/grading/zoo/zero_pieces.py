"""Wrong answers to the first two tasks of 03_zero: one tensor, cut over the ranks and put together again."""

import torch
import torch.distributed as dist
from torch.nn.functional import pad as torch_pad

from tests.grading.zoo.wrong import Wrong, keeper, me
from tests.grading.zoo.zero_right import gather, pad, shard

ZOO: list[Wrong] = []
wrong = keeper(ZOO)


@wrong("shard", "keeps the whole tensor's memory: clone() it", right_values=True)
def a_view(tensor):
    return pad(tensor).chunk(me()[1])[me()[0]]


@wrong("shard", "keeps the whole tensor's memory: clone() it", right_values=True)
def a_contiguous_view(tensor):
    return pad(tensor).chunk(me()[1])[me()[0]].contiguous()


@wrong("shard", "pieces of different sizes, and the collectives need equal ones: pad with zeros")
def no_padding(tensor):
    return tensor.flatten().tensor_split(me()[1])[me()[0]].clone()


@wrong("shard", "the last rank's chunk is short: pad with zeros to a multiple of N")
def no_padding_in_the_last_chunk(tensor):
    size = -(-tensor.numel() // me()[1])
    return tensor.flatten()[me()[0] * size :][:size].clone()


@wrong("shard", "few elements make fewer chunks than N: pad with zeros")
def torch_chunk(tensor):
    return list(tensor.flatten().chunk(me()[1]))[me()[0]].clone()


@wrong("shard", "the padding comes at the end: yours is at the front")
def pads_the_front(tensor):
    return torch_pad(tensor.flatten(), (-tensor.numel() % me()[1], 0)).chunk(me()[1])[me()[0]].clone()


@wrong("shard", "that is another rank's chunk: rank r keeps chunk r")
def the_next_ranks_chunk(tensor):
    return pad(tensor).chunk(me()[1])[(me()[0] + 1) % me()[1]].clone()


@wrong("shard", "that is another rank's chunk: rank r keeps chunk r")
def the_last_chunk_first(tensor):
    return pad(tensor).chunk(me()[1])[-1 - me()[0]].clone()


@wrong("shard", "E // N leaves the last elements out")
def rounds_down(tensor):
    size = tensor.numel() // me()[1]
    return tensor.flatten()[me()[0] * size :][:size].clone()


@wrong("shard", "that is every N-th element")
def every_nth(tensor):
    return pad(tensor)[me()[0] :: me()[1]].clone()


@wrong("shard", "that is the whole tensor: keep chunk number rank")
def nothing_cut(tensor):
    return tensor.flatten().clone()


@wrong("shard", "that is the whole tensor, flat and padded: keep chunk number rank")
def padded_only(tensor):
    return pad(tensor).clone()


@wrong("shard", "too much padding: none where E is a multiple of N")
def always_pads(tensor):
    n = me()[1]
    return torch_pad(tensor.flatten(), (0, n - tensor.numel() % n)).chunk(n)[me()[0]].clone()


@wrong("shard", "every rank has chunk 0")
def chunk_zero(tensor):
    return pad(tensor).chunk(me()[1])[0].clone()


@wrong("shard", "float64 has to stay float64")
def in_float32(tensor):
    return shard(tensor).float()


@wrong("shard", "it takes its piece without asking anybody", right_values=True)
def asks_the_others(tensor):
    mine = shard(tensor)
    dist.all_gather_single(torch.empty(len(mine) * me()[1], dtype=mine.dtype), mine)
    return mine


@wrong("shard", "shard has changed the tensor that it was given")
def spoils_its_input(tensor):
    mine = shard(tensor)
    tensor.zero_()
    return mine


@wrong("shard", "return this rank's piece: a tensor")
def returns_nothing(tensor):
    shard(tensor)


@wrong("gather", "the padding is still there: cut it off")
def keeps_the_padding(shard_S, shape):
    whole = shard_S.new_empty(len(shard_S) * me()[1])
    dist.all_gather_single(whole, shard_S)
    return whole


@wrong("gather", "the elements are right, the shape is not: .view(shape)")
def forgets_the_shape(shard_S, shape):
    return keeps_the_padding(shard_S, shape)[: shape.numel()]


@wrong("gather", "the padding is at the end, not at the front")
def cuts_the_front(shard_S, shape):
    return keeps_the_padding(shard_S, shape)[-shape.numel() :].view(shape)


@wrong("gather", "the shards are in the wrong order: rank 0's comes first")
def last_rank_first(shard_S, shape):
    parts = keeps_the_padding(shard_S, shape).chunk(me()[1])
    return torch.cat(parts[::-1])[: shape.numel()].view(shape)


@wrong("gather", "that is this rank's own shard, N times")
def its_own_n_times(shard_S, shape):
    return shard_S.repeat(me()[1])[: shape.numel()].view(shape)


@wrong("gather", "only this rank's own part is there")
def its_own_part(shard_S, shape):
    whole = shard_S.new_zeros(len(shard_S) * me()[1])
    whole.chunk(me()[1])[me()[0]].copy_(shard_S)
    return whole[: shape.numel()].view(shape)


@wrong("gather", "a call with async_op=True returns at once")
def never_waits(shard_S, shape):
    whole = shard_S.new_empty(len(shard_S) * me()[1])
    dist.all_gather_single(whole, shard_S, async_op=True)
    return whole[: shape.numel()].view(shape)


@wrong("gather", "dist.all_gather_single brings all shards at once", right_values=True)
def by_all_reduce(shard_S, shape):
    whole = shard_S.new_zeros(len(shard_S) * me()[1])
    whole.chunk(me()[1])[me()[0]].copy_(shard_S)
    dist.all_reduce(whole)
    return whole[: shape.numel()].view(shape)


@wrong("gather", "one all-gather brings all shards at once", right_values=True)
def by_broadcasts(shard_S, shape):
    parts = [shard_S.clone() for _ in range(me()[1])]
    for rank, part in enumerate(parts):
        dist.broadcast(part, rank)
    return torch.cat(parts)[: shape.numel()].view(shape)


@wrong("gather", "everything was gathered twice: one all-gather a tensor", right_values=True)
def gathers_twice(shard_S, shape):
    gather(shard_S, shape)
    return gather(shard_S, shape)


@wrong("gather", "each rank gave its whole tensor: it puts in its shard", right_values=True)
def gathers_wholes(shard_S, shape):
    n = me()[1]
    placed = shard_S.new_zeros(len(shard_S) * n)
    placed.chunk(n)[me()[0]].copy_(shard_S)
    rows = shard_S.new_empty(n * len(placed))
    dist.all_gather_single(rows, placed)
    return sum(rows.chunk(n))[: shape.numel()].view(shape)


@wrong("gather", "float64 is sent as float64, and this had half the bytes", right_values=True)
def as_float32(shard_S, shape):
    return gather(shard_S.float(), shape).double()


@wrong("gather", "make room for all of them")
def makes_too_little_room(shard_S, shape):
    whole = shard_S.new_empty(shape.numel())
    dist.all_gather_single(whole, shard_S)
    return whole.view(shape)


@wrong("gather", "is not allowed; hint: write it yourself")
def the_librarys_ring(shard_S, shape):
    from manyranks.parallel.collectives import ring_all_gather

    return ring_all_gather(shard_S, elements=len(shard_S) * me()[1])[: shape.numel()].view(shape)
