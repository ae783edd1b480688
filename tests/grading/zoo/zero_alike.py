"""Other right answers to the tasks of 03_zero, which must get full marks."""

import torch
import torch.distributed as dist

from tests.grading.zoo.wrong import me
from tests.grading.zoo.zero_right import Right1, Right2, RightSchedule, RightUnit, add, filled, pad


def shard_into_zeros(tensor):
    rank, n = me()
    piece = tensor.new_zeros(-(-tensor.numel() // n))
    mine = tensor.flatten()[rank * len(piece) :][: len(piece)]
    piece[: len(mine)] = mine
    return piece


def gather_into_a_list(shard_S, shape):
    parts = [torch.empty_like(shard_S) for _ in range(me()[1])]
    dist.all_gather(parts, shard_S)
    return torch.cat(parts)[: shape.numel()].reshape(shape)


def gather_by_the_older_name(shard_S, shape):
    whole = shard_S.new_empty(len(shard_S) * me()[1])
    dist.all_gather_into_tensor(whole, shard_S, async_op=True).wait()
    return whole[: shape.numel()].view(shape)


class ListsAndAverages(Right1):
    def mean(self, parameter):
        parts = list(pad(filled(parameter)).chunk(me()[1]))
        mine = torch.empty_like(parts[0])
        dist.reduce_scatter(mine, parts, op=dist.ReduceOp.AVG)
        return mine

    def gather(self, p, s):
        return gather_into_a_list(s, p.shape)


class AssignsData(Right1):
    """One parameter after the other, with an optimizer's own zero_grad."""

    def spread(self):
        for p, s in zip(self.params, self.shards, strict=True):
            p.data = self.gather(p, s)

    def zero_grad(self):
        self.optimizer.zero_grad()
        for p in self.params:
            p.grad = None


class LooksForNone(Right2):
    """Instead of counting: what has left has no gradient."""

    def arrived(self, parameter):
        while self.left < len(self.queue) and self.queue[self.left][0].grad is not None:
            self.send()


class AddsInPlace(Right2):
    def __init__(self, params, optimizer_class, **kwargs):
        super().__init__(params, optimizer_class, **kwargs)
        for s in self.shards:
            s.grad = torch.zeros_like(s)

    def take(self, parameter, shard_S):
        if shard_S.grad is None:
            shard_S.grad = torch.zeros_like(shard_S)
        shard_S.grad += self.mean(parameter)


class CopiesInWait(RightUnit):
    """The parameters keep storages of their own; gathers arrive elsewhere."""

    def lay(self):
        self.sizes = [p.nbytes for p in self.params]

    def issue(self):
        for s in self.shards:
            room = s.new_empty(len(s) * self.n)
            self.works.append((room, dist.all_gather_single(room, s, async_op=True)))

    def wait(self):
        for p, size, (room, work) in zip(self.params, self.sizes, self.works, strict=False):
            work.wait()
            p.untyped_storage().resize_(size)
            p.data.copy_(room[: p.numel()].view(p.shape))
        self.works.clear()

    def free(self):
        for p in self.params:
            p.untyped_storage().resize_(0)
        self.is_free = True


class ReducesWithAvg(RightUnit):
    def reduce(self):
        for p, s in zip(self.params, self.shards, strict=True):
            if p.requires_grad:
                whole = pad(torch.zeros(p.shape, dtype=p.dtype) if p.grad is None else p.grad)
                mean_S = torch.empty_like(s)
                dist.reduce_scatter_single(mean_S, whole, op=dist.ReduceOp.AVG)
                add(s, mean_S)
                p.grad = None


class StartsBeforeItWaits(RightSchedule):
    def before_forward(self, k):
        for following in (k, k + 1)[: 1 + (k < self.last)]:
            self.units[following].start()
        self.units[k].wait()

    def before_backward(self, k):
        for following in (k, k - 1)[: 1 + (k > 0)]:
            self.units[following].start()
        self.units[k].wait()

    def after_backward(self, k):
        self.units[k].free()
        self.units[k].reduce()


ANSWERS = [
    ("shard", shard_into_zeros),
    ("gather", gather_into_a_list),
    ("gather", gather_by_the_older_name),
    ("Stage1", ListsAndAverages),
    ("Stage1", AssignsData),
    ("Stage2", LooksForNone),
    ("Stage2", AddsInPlace),
    ("Unit", CopiesInWait),
    ("Unit", ReducesWithAvg),
    ("Prefetch", StartsBeforeItWaits),
]
