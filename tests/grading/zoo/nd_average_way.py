"""Wrong answers to the task average of 10_nd_parallel: how groups are made, and what is sent."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from manyranks.parallel.mesh import Mesh
from tests.grading.zoo.nd_right import RightAverage
from tests.grading.zoo.wrong import Wrong, keeper

ZOO: list[Wrong] = []
wrong = keeper(ZOO)
TASK = "average"
ALL_RANKS = "is called by all ranks, for every group, in one order"
READY = "what is ready is no answer"


@wrong(TASK, ALL_RANKS)
class OnlyMembers(RightAverage):
    def groups(self, axes):
        return [row for row in super().groups(axes) if dist.get_rank() in row]


@wrong(TASK, ALL_RANKS)
class OwnFirst(RightAverage):
    def groups(self, axes):
        return sorted(super().groups(axes), key=lambda row: dist.get_rank() not in row)


@wrong(TASK, ALL_RANKS)
class TpFirstOnSome(RightAverage):
    """Half the ranks make the groups of dp × cp first."""

    def __call__(self, sizes, weights):
        self.sizes, self.weights = sizes, weights
        kinds = {"tp": self.axes_of_tp(), "data": self.axes_of_data()}
        for name in sorted(kinds, reverse=dist.get_rank() % 2 == 0):
            setattr(self, name, self.make(kinds[name]))
        self.over_tp()
        self.over_data()


@wrong(TASK, ALL_RANKS, right_values=True)
class NobodyMakesTheRest(RightAverage):
    """Rank 5 leaves out the last group, which it does not need."""

    def make(self, axes):
        rows = self.groups(axes)
        for row in rows[: len(rows) - (dist.get_rank() == 0 and axes == self.axes_of_data())]:
            group = dist.new_group(row)
            if dist.get_rank() in row:
                own = group
        return own


@wrong(TASK, "with use_local_synchronization only a group's own ranks call it")
class Local(RightAverage):
    def make(self, axes):
        own = next(row for row in self.groups(axes) if dist.get_rank() in row)
        return dist.new_group(own, use_local_synchronization=True)


@wrong(TASK, "those of dp × cp, each once", right_values=True)
class MakesThemTwice(RightAverage):
    def make(self, axes):
        super().make(axes)
        return super().make(axes)


@wrong(TASK, "this rank is not in the group that it uses")
class KeepsTheFirst(RightAverage):
    def make(self, axes):
        first, *_ = [dist.new_group(row) for row in self.groups(axes)]
        return first


@wrong(TASK, READY)
def library_s_mesh(sizes, weights):
    Mesh(**sizes, order=(*sizes, *{"pp", "dp", "cp", "tp"} - {*sizes})).build()


@wrong(TASK, READY)
def device_mesh(sizes, weights):
    init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


@wrong(TASK, "one call for each parameter", right_values=True)
class OneCallEach(RightAverage):
    def add_up(self, grads, group):
        for grad in grads:
            self.reduce(grad, group)


@wrong(TASK, "no rank needs each of the others' gradients", right_values=True)
class Gathers(RightAverage):
    def reduce(self, flat, group):
        parts = [torch.empty_like(flat) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, flat, group=group)
        flat.copy_(sum(parts))


@wrong(TASK, "a barrier is not needed", right_values=True)
class WithABarrier(RightAverage):
    def over_data(self):
        dist.barrier()
        super().over_data()


@wrong(TASK, "dp and cp make one group together", right_values=True)
class OneAfterTheOther(RightAverage):
    """Over dp, then over cp."""

    ranks = 8

    def over_data(self):
        axes = [axis for axis in ("dp", "cp") if axis in self.sizes]
        for group in [self.make((axis,)) for axis in axes]:
            self.add_up(self.grads(), group)
        for grad in self.grads():
            grad /= self.divisor()

    def axes_of_data(self):
        return ("dp", "cp")


@wrong(TASK, "the calls are in order, but these are not the groups: on 6 ranks, dp 3, tp 2, those of dp × cp are [0, 2, 4]")
class Blocks(RightAverage):
    """Neighbours, whatever the axis."""

    def groups(self, axes):
        size = len(super().groups(axes)[0])
        return [list(range(first, first + size)) for first in range(0, dist.get_world_size(), size)]


@wrong(TASK, "over tp goes only what is partial", right_values=True)
class EverythingOverTp(RightAverage):
    """With zeros for what is not partial on all but one of the tp ranks."""

    def over_tp(self):
        first = dist.get_rank(self.tp) == 0
        rows = [w.parameter.grad.clone() * (w.kind == "partial" or first) for w in self.weights]
        flat = self.row(rows)
        self.reduce(flat, self.tp)
        self.put(rows, flat)
        for weight, one in zip(self.weights, rows, strict=True):
            if weight.kind == "partial":
                weight.parameter.grad.copy_(one)


@wrong(TASK, "two all-reduces: what is partial, over tp", right_values=True)
class PartialOverAll(RightAverage):
    """In one go over tp, dp and cp; the rest over dp × cp."""

    def over_tp(self):
        self.all = self.make(("tp", "dp", "cp"))

    def over_data(self):
        self.add_up(self.grads("partial"), self.all)
        self.add_up(self.grads("cut", "whole"), self.data)
        for grad in self.grads():
            grad /= self.divisor()


@wrong(TASK, "an all-reduce is one call", right_values=True)
class Messages(RightAverage):
    """Each sends to each other one of its group."""

    def reduce(self, flat, group):
        ranks, me, mine = dist.get_process_group_ranks(group), dist.get_rank(), flat.clone()
        for other in ranks:
            if other != me:
                coming = torch.empty_like(flat)
                pending = [dist.isend(mine, other), dist.irecv(coming, other)]
                for one in pending:
                    one.wait()
                flat += coming
